"""Compiling the C sources of ``kernels/`` on the machine they run on, once: the library is kept in a folder."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import runpy
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from lbpar.engine.native.cache import find_or_make, keep, private, temporary
from lbpar.errors import EngineError
from lbpar.shipped import shipped

log = logging.getLogger(__name__)

CACHE = "LBPAR_CACHE"
"""Environment variable: the folder in which compiled code is kept; default ``lbpar`` in the user's cache folder."""

_SOURCES = ("rows.c", "rows_bfloat16.c", "losses.c", "updates.c", "threads.c")

# Products and sums are not contracted: results then depend neither on the processor nor on the compiler, and those
# of optimizers equal NumPy's. (Passes are bound by memory, and exponentials say where they want it.)
_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fopenmp-simd", "-shared", "-fPIC")
_TRIES = (("-march=native", "-mprefer-vector-width=512", "-fopenmp"), ("-march=native", "-fopenmp"), ("-fopenmp",), ())


def library() -> Path | None:
    """Path of the compiled library, compiled now if it is not there yet; None, and a line in the log, where that fails."""
    return _library(os.environ.get(CACHE, ""), os.environ.get("CC", ""))


@lru_cache(maxsize=8)
def _library(cache: str, compiler: str) -> Path | None:
    sources = _sources()
    if sources is None:
        log.info("native passes: %s are not installed", ", ".join(_SOURCES))
        return None
    settings = repr((_FLAGS, _TRIES, compiler)) + _processor()
    digest = hashlib.sha256(b"".join(s.read_bytes() for s in sources) + settings.encode())
    name = f"passes-{digest.hexdigest()[:16]}"
    return _kept(cache, lambda folder: find_or_make(folder, name, lambda: _compile(compiler, sources, folder, name)))


def _kept(cache: str, get: Callable[[Path], Path | None]) -> Path | None:
    """What ``get`` finds or makes in the first folder that can be used; None, and a line in the log, where none can."""
    folders = [Path(cache)] if cache else [_user_cache(), Path(tempfile.gettempdir()) / f"lbpar-{os.getuid()}"]
    for folder in folders:
        try:
            if found := get(private(folder)):
                return found
        except EngineError as error:
            log.warning("native passes: no code is loaded from %s", error)
        except OSError as error:
            log.info("native passes: %s cannot be used (%s)", folder, error)
    return None


def types(text: str) -> Any:
    """cffi's types and functions of some C declarations. Parsing them takes a tenth of a second, so the result is kept for other processes."""
    import _cffi_backend

    name = f"types-{hashlib.sha256(f'{_cffi_backend.__version__} {text}'.encode()).hexdigest()[:16]}"
    found = _kept(
        os.environ.get(CACHE, ""), lambda folder: find_or_make(folder, name, lambda: _parse(text, folder, name), ".py")
    )
    if found is None:
        return _parsed(text)
    # Its content is what its name says, and the folder is this user's alone.
    return runpy.run_path(str(found))["ffi"]


def _parse(text: str, folder: Path, name: str) -> Path:
    ffi = _parsed(text)
    with temporary(folder) as part:
        made = Path(part) / "types.py"
        ffi.set_source(name, None)
        ffi.emit_python_code(str(made))
        return keep(folder, name, made)


def _parsed(text: str) -> Any:
    import cffi

    ffi = cffi.FFI()
    ffi.cdef(text)
    return ffi


def declarations() -> str:
    """What the compiled library offers, for cffi: the heads of the functions in the sources, every array as an address.

    A ``PASS(name)`` is there for each type of activations.
    """
    text = "".join(source.read_text() for source in _sources() or ())
    found = re.findall(r"^((?:int|int64_t|double) (?:lbpar_\w+|PASS\(\w+\))\([^)]*\)) {", text, re.MULTILINE)
    heads = [
        re.sub(r"PASS\((\w+)\)", rf"lbpar_\1{of}", head)
        for head in found
        for of in (("", "_bfloat16") if "PASS(" in head else ("",))
    ]
    return re.sub(r"(?:const )?\w+ \*(?:restrict )?", "const void *", ";\n".join([*heads, ""])).replace(
        "idx ", "int64_t "
    )


def _compile(compiler: str, sources: Sequence[Path], folder: Path, name: str) -> Path | None:
    """Compile with the best flags that the compiler takes. The file appears whole: ranks of other nodes may be at the same."""
    command = next((c for c in ([compiler] if compiler else ["cc", "gcc", "clang"]) if shutil.which(c.split()[0])), "")
    if not command:
        log.info("native passes: no C compiler found; norms, losses and updates run through oneDNN and NumPy, slower")
        return None
    with temporary(folder) as part:
        made = Path(part) / "passes.so"
        for extra in _TRIES:
            run = [*command.split(), *_FLAGS, *extra, "-o", str(made), *map(str, sources), "-lm"]
            done = subprocess.run(run, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return keep(folder, name, made)
    log.info("native passes: %s failed: %s", command, done.stderr.strip()[-500:])
    return None


def _sources() -> list[Path] | None:
    """The C files, if this installation has them."""
    paths = [path for name in _SOURCES if (path := shipped(f"kernels/{name}"))]
    return paths if len(paths) == len(_SOURCES) else None


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "lbpar"


def _processor() -> str:
    """What ``-march=native`` depends on: nodes of a cluster that share a home folder may differ."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = {line for line in file if line.startswith(("flags", "model name", "Features"))}
    except OSError:
        lines = {platform.processor()}
    return platform.machine() + "".join(sorted(lines))
