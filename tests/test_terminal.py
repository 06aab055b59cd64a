"""Who watches: this process' own files without a launcher, the launcher's with one."""

from __future__ import annotations

import io
import os
import pty
import sys

import pytest

from lbpar import terminal
from lbpar.tables import print_table
from lbpar.terminal import columns, is_terminal, launcher, screen, terminal_of


@pytest.fixture(autouse=True)
def person(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def proc(tmp_path):
    """A made-up /proc: shell 10, mpirun 20, its proxy 30, and their files."""

    def process(pid, parent, name, stdout, stderr):
        folder = tmp_path / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "comm").write_text(f"{name}\n")
        (folder / "stat").write_text(f"{pid} ({name} (x) y) S {parent} 1 1")
        (folder / "fd" / "1").symlink_to(stdout)
        (folder / "fd" / "2").symlink_to(stderr)

    process(10, 1, "bash", "/dev/pts/3", "/dev/pts/3")
    process(20, 10, "mpirun", "pipe:[7]", "/dev/pts/3")
    process(30, 20, "hydra_pmi_proxy", "pipe:[8]", "pipe:[9]")
    return tmp_path


def test_the_outermost_launcher_counts(proc):
    assert launcher(proc, 30) == 20
    assert launcher(proc, 20) == 20
    assert launcher(proc, 10) is None
    assert launcher(proc, 99) is None  # gone, or of another node


def test_its_files_tell(proc):
    assert terminal_of(20, 1, proc) is None  # mpirun ... | tee log
    assert terminal_of(20, 2, proc) == "/dev/pts/3"
    assert terminal_of(20, 0, proc) is None
    assert terminal_of(99, 1, proc) is None


@pytest.fixture
def pseudo_terminal():
    ours, theirs = pty.openpty()
    yield os.ttyname(theirs), ours
    os.close(ours)
    os.close(theirs)


def test_a_launcher_s_terminal_is_written_to_directly(proc, pseudo_terminal, monkeypatch, capfd):
    path, ours = pseudo_terminal
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.delenv("LBPAR_ALONE", raising=False)
    (proc / "20" / "fd" / "2").unlink()
    (proc / "20" / "fd" / "2").symlink_to(path)
    monkeypatch.setattr(terminal, "launcher", lambda: 20)
    monkeypatch.setattr(terminal, "terminal_of", lambda pid, fd: terminal_of(pid, fd, proc))
    with open(1, "w", closefd=False) as out, open(2, "w", closefd=False) as err:
        assert screen(out) is out
        assert not is_terminal(out)
        with screen(err) as watched:
            assert is_terminal(watched)
            print("bar", end="\r", file=watched, flush=True)
            assert os.read(ours, 100) == b"bar\r"
    terminal._open.cache_clear()


def test_without_a_launcher_the_stream_tells(monkeypatch):
    monkeypatch.setenv("LBPAR_ALONE", "1")
    log = io.StringIO()
    assert screen(log) is log
    assert screen(sys.__stdout__) is sys.__stdout__
    assert not is_terminal(log)


def test_a_table_too_wide_for_its_terminal_is_plain(pseudo_terminal):
    pytest.importorskip("rich")
    path, ours = pseudo_terminal
    rows = [{"layer": "conv1", "collectives": "allreduce(4), " * 3}]
    with open(path, "w") as narrow:
        for width, boxes in ((40, False), (120, True)):
            terminal_size(narrow.fileno(), width)
            assert columns(narrow) == width
            print_table(rows, stream=narrow)
            assert ("│" in os.read(ours, 10_000).decode()) == boxes


def terminal_size(fd, width):
    import fcntl
    import struct
    import termios

    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
