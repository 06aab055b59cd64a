"""Work in a second process: its result, and what happens where there is none or it fails."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from lbpar.aside import aside


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the thread that watches a test's time."""
    watch = threading.active_count() - 1
    count = threading.active_count
    monkeypatch.setattr(threading, "active_count", lambda: count() - watch)


def test_the_result_comes_from_another_process() -> None:
    with aside(os.getpid) as there, aside(os.getpid, fork=False) as here:
        assert there() != os.getpid() == here()


def test_what_it_does_changes_nothing_here() -> None:
    made: list[int] = []
    with aside(lambda: made.append(1) or made) as result:
        assert result() == [1] and made == []


def test_beside_threads_this_process_does_the_work() -> None:
    go = threading.Event()
    other = threading.Thread(target=go.wait)
    other.start()
    with aside(os.getpid) as result:
        assert result() == os.getpid()
    go.set()
    other.join()


def test_without_a_further_process_this_one_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", full)
    with aside(os.getpid) as result:
        assert result() == os.getpid()


def test_a_process_that_is_ended_is_replaced() -> None:
    me = os.getpid()
    with aside(lambda: me if os.getpid() == me else os.kill(os.getpid(), signal.SIGKILL)) as result:
        assert result() == me


def test_what_cannot_be_sent_is_made_here() -> None:
    with aside(lambda: lambda: 5) as result:
        assert result()() == 5


def test_errors_are_raised_here_and_say_nothing_there(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise ValueError("wrong")

    with aside(work) as result, pytest.raises(ValueError, match="wrong"):
        result()
    assert capfd.readouterr() == ("", "")


def test_whoever_is_not_waited_for_is_ended() -> None:
    unread, kept_open = os.pipe()
    with pytest.raises(KeyError), aside(lambda: os.read(unread, 1)):  # for ever
        raise KeyError
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    os.close(unread)
    os.close(kept_open)
