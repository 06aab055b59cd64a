"""Requests to end: noted once, obeyed at once the second time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lbpar.transport.stop import NUMBERS, stop_signals

STUCK = """
import ctypes, os, signal
from lbpar.transport.stop import stop_signals
with stop_signals() as stop:
    print("ready", flush=True)
    ctypes.CDLL(None).sleep(600)  # as inside MPI: Python's handlers wait for its end
    while True:
        ctypes.CDLL(None).sleep(600)
"""


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_is_noted_and_handlers_are_as_before(number: signal.Signals) -> None:
    before = [signal.getsignal(n) for n in NUMBERS]
    with stop_signals() as stop:
        assert stop() is None
        os.kill(os.getpid(), number)
        while stop() is None:
            pass
        assert stop() == number.name
        os.kill(os.getpid(), next(n for n in NUMBERS if n != number))  # the limit after its notice: saving goes on
    assert [signal.getsignal(n) for n in NUMBERS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_who_leaves_with_a_status_is_not_ended_by_another() -> None:
    before = [signal.getsignal(n) for n in NUMBERS]
    try:
        with pytest.raises(SystemExit), stop_signals():
            raise SystemExit(75)
        for number in NUMBERS:
            os.kill(os.getpid(), number)
    finally:
        for number, handler in zip(NUMBERS, before, strict=True):
            signal.signal(number, handler)


def test_other_threads_note_nothing() -> None:
    said = []

    def work() -> None:
        with stop_signals() as stop:
            said.append(stop())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert said == [None]


@pytest.mark.parametrize("number", NUMBERS)
def test_the_same_signal_again_ends_a_process_that_is_stuck(number: signal.Signals) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", STUCK], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        while process.poll() is None:
            process.send_signal(number)  # two that come at the same time are one
        assert process.returncode == 128 + number


EARLY = """
import os, signal, sys
from lbpar.transport.stop import stop_signals
with stop_signals() as stop:
    os.kill(os.getpid(), signal.SIG%s)
    import lbpar.train.command as command
    command.start_logging = lambda *_: sys.exit(command.main.__name__ if stop() is None else 3)
    command.main(["--config", "gone.yaml"], stop=stop)
"""


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_before_the_program_is_read_is_noted_too(number: signal.Signals) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", EARLY % number.name[3:]], env=env, check=False)
    assert done.returncode == 3


def test_what_has_come_acts_when_the_signal_is_left() -> None:
    code = "import os, signal\nfrom lbpar.transport.stop import stop_signals\nwith stop_signals() as stop:\n"
    code += "    os.kill(os.getpid(), 15)\n    while stop() is None: pass\n    stop.leave(signal.SIGTERM)\n    signal.pause()"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == -signal.SIGTERM
