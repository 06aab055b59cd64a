"""Pages whose files and commands are tried: what a reader would save is saved, what a reader would type is run.

A fenced block whose first line is ``# name.py`` (or .yaml) is a file. A ```console block holds commands after ``$ ``, each
followed by what it prints, where ``…`` stands for anything. They run in order in an empty directory: ``python ...`` and
``lbpar ...`` inside this process, to save time, ``mpirun ...`` for real. To fill in what commands print where a
page says nothing yet: ``python -m tests.util.doc_pages docs/howto/*.md``
"""

from __future__ import annotations

import doctest
import importlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lbpar.calibrate.machine import machine_of
from lbpar.transport.launch import run_main

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"^# ([\w/-]+\.(?:py|yaml|txt))\n")
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Where `python -m lbpar.NAME` has its main.
MAINS = {
    "data": ("lbpar.data.__main__", "main"),
    **{use: ("lbpar.inference", use) for use in ("evaluate", "predict", "export")},
}


@dataclass(frozen=True)
class File:
    """A block to save under a name."""

    name: str
    text: str


@dataclass(frozen=True)
class Command:
    """A line to type, and what it prints."""

    line: str
    output: str


def parts(page: str) -> list[File | Command]:
    """The files and commands of a page, in order."""
    out: list[File | Command] = []
    for kind, text in FENCE.findall(page):
        name = NAME.match(text)
        if kind == "console":
            for chunk in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                line, _, output = chunk.partition("\n")
                out.append(Command(line, output))
        elif name and kind in ("python", "yaml", "text"):
            out.append(File(name[1], text))
    return out


def try_page(page: str, where: Path) -> Iterator[tuple[Command, str]]:
    """Save and run everything in a directory; yields each command with what it printed."""
    with inside(where):
        for part in parts(page):
            if isinstance(part, File):
                path = where / part.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(part.text, encoding="utf-8")
            else:
                yield part, run(part.line)


def agrees(wanted: str, got: str) -> bool:
    """Whether a command printed what the page says. A line that is just … stands for any lines, or none."""
    wanted = wanted.replace("\n…\n", "\n…").replace("…", "...")
    return doctest.OutputChecker().check_output(wanted, got, OPTIONS)


def needs_mpi(page: str) -> bool:
    """Whether a page types mpirun."""
    return any(isinstance(p, Command) and p.line.startswith("mpirun") for p in parts(page))


def mpirun() -> str | None:
    """The launcher of this environment."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


@contextmanager
def inside(where: Path) -> Iterator[None]:
    """In a directory whose modules are found and forgotten again."""
    before, modules, path = os.getcwd(), set(sys.modules), list(sys.path)
    os.chdir(where)
    sys.path.insert(0, str(where))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.startswith(str(where)):
                del sys.modules[name]


def run(line: str) -> str:
    """Run one command line; returns what it printed.

    Raises
    ------
    AssertionError
        It failed.
    """
    words = shlex.split(line.split("  #")[0])
    words = ["python", "-m", f"lbpar.{words[1].replace('-', '_')}", *words[2:]] if words[0] == "lbpar" else words
    text = io.StringIO()
    if words[:2] == ["python", "-m"] and words[2].startswith("lbpar."):
        room = words[2].removeprefix("lbpar.")
        module, name = MAINS.get(room, (f"lbpar.{room}.command", "main"))
        main = getattr(importlib.import_module(module), name)
        if room == "plan":
            main = partial(main, find=machine_of)
        with redirect_stdout(text), redirect_stderr(text):
            code = run_main(lambda: main(words[3:]))
    elif words[0] == "python" and words[1] != "-m":
        with redirect_stdout(text), redirect_stderr(text):
            runpy.run_path(words[1], run_name="__main__")
        code = 0
    else:
        code = _outside(words, text)
    assert code == 0, f"$ {line}\nended with {code}\n{text.getvalue()}"
    return text.getvalue()


def _outside(words: list[str], text: io.StringIO) -> int:
    if words[0] == "mpirun":
        words = [mpirun() or "mpirun", *words[1:]]
    words = [sys.executable if w == "python" else w for w in words]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    done = subprocess.run(words, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    text.write(done.stdout + (done.stderr if done.returncode else ""))
    return done.returncode


def fill(page: str) -> str:
    """The page with the output of those commands for which it gives none."""
    with tempfile.TemporaryDirectory() as where:
        for command, got in try_page(page, Path(where).resolve()):
            if not command.output.strip():
                page = page.replace(f"$ {command.line}\n", f"$ {command.line}\n{got.rstrip()}\n", 1)
    return page


if __name__ == "__main__":
    for name in sys.argv[1:]:
        file = Path(name)
        file.write_text(fill(file.read_text(encoding="utf-8")), encoding="utf-8")
