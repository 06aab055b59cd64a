"""HDF5 files are written whole; an interrupt waits until h5py is done, and is not lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from lbpar.checkpoint.files import check_checkpoint, checkpoint_path, write_checkpoint
from lbpar.hdf5_file import uninterrupted, writing
from lbpar.layout.runs import whole

h5py = pytest.importorskip("h5py")


@pytest.fixture(autouse=True)
def interrupts():
    """Tests may run in the background, where shells let interrupts be ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Lost:
    """Interrupts where Python swallows the exception: as h5py's objects do when the interrupt comes while they are let go."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_the_block():
    done = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        with uninterrupted():
            Lost()
            done.append("inside")
        done.append("outside")
    assert done == ["inside", "outside"]
    assert signal.getsignal(signal.SIGINT) is before
    with uninterrupted():
        pass


def test_a_second_interrupt_does_not_wait():
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append("first")
        signal.raise_signal(signal.SIGINT)
        done.append("second")
    assert done == ["first"]


def test_only_the_main_thread_is_interrupted():
    before = signal.getsignal(signal.SIGINT)
    inside = []

    def work():
        with uninterrupted():
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [before]


def test_an_interrupt_while_a_checkpoint_is_written_ends_the_run_when_it_is_whole(tmp_path):
    path = checkpoint_path(tmp_path, 1)

    def blocks():
        Lost()
        yield "w", whole((3,)), np.arange(3.0)

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(path, {"w": ((3,), "f8")}, blocks(), {})
    check_checkpoint(path)


def test_a_failure_closes_the_file(tmp_path):
    with pytest.raises(ZeroDivisionError), writing(tmp_path / "a.h5") as (file, _):
        file["x"] = np.ones(1000)
        raise ZeroDivisionError
    assert not file
    with writing(tmp_path / "a.h5") as (file, _):
        file["x"] = np.ones(10)
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["x"].shape == (10,)


@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "chunks": (1, 16, 16)}])
def test_a_full_disk_at_any_write_ends_in_peace(tmp_path, options):
    """In a process of its own: HDF5 that could not close a file crashes when the process ends."""
    code = f"""
import errno
import h5py
import numpy as np
from lbpar.hdf5_file import _Sink, writing
left = [0]
class Raw:
    def __init__(self, raw):
        self.raw = raw
    def __getattr__(self, name):
        return getattr(self.raw, name)
    def write(self, data):
        left[0] -= 1
        if left[0] == 0:
            return self.raw.write(data[:1])
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.raw.write(data)
build = _Sink.__init__
_Sink.__init__ = lambda self, raw: build(self, Raw(raw))
x = np.random.default_rng(0).standard_normal((40, 16, 16))
for n in range(1000):
    left[0] = n
    try:
        with writing("a.h5") as (file, check):
            for name in ("train", "test"):
                file.create_dataset(f"{{name}}/x", data=x, **{options})
                file[f"{{name}}/x"].attrs["mean"] = x[0]
                if n % 2:
                    check()
        break
    except OSError as e:
        assert e.errno == errno.ENOSPC
with h5py.File("a.h5") as file:
    assert (file["test/x"][...] == x).all()
print(n)
"""
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > (80 if options else 5)
