"""Progress and tables on a terminal and in logs."""

from __future__ import annotations

import io

import pytest

from lbpar.tables import print_table, short
from lbpar.terminal import is_terminal
from lbpar.train.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def no_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")


class Clock:
    def __init__(self, seconds):
        self.times = iter(seconds)

    def __call__(self):
        return next(self.times)


def test_lines_in_a_log():
    log = io.StringIO()
    with Progress(40, stream=log, label="epoch 1", clock=Clock(range(41))) as progress:
        for i in range(40):
            progress.update(loss=1 / (i + 1))
    lines = log.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "epoch 1: 4/40  4.0 s  loss 0.25"
    assert lines[-1] == "epoch 1: 40/40  40.0 s  loss 0.025"


def test_fast_work_does_not_flood_a_log():
    log = io.StringIO()
    with Progress(10, stream=log, clock=Clock([0.5 * i for i in range(11)])) as progress:
        for _ in range(10):
            progress.update()
    assert log.getvalue().splitlines() == ["4/10  2.0 s", "8/10  4.0 s"]


def test_numbers():
    assert [short(v) for v in (None, 3, 0.123456, 1234.5, 12345.6, float("nan"), "x")] == [
        "", "3", "0.1235", "1234", "12,346", "nan", "x",
    ]  # fmt: skip


def test_slow_work_still_gives_signs_of_life():
    log = io.StringIO()
    progress = Progress(1000, stream=log, clock=Clock([0, 10, 31, 40, 61]))
    for _ in range(4):
        progress.update()
    assert log.getvalue().splitlines() == ["2/1000  31.0 s", "4/1000  61.0 s"]


def test_bar_on_a_terminal():
    pytest.importorskip("tqdm")
    screen = Terminal()
    with Progress(4, stream=screen, label="epoch 1") as progress:
        progress.update(2, loss=0.5)
        progress.update(2, loss=0.25)
    assert "\r" in screen.getvalue()
    assert "epoch 1" in screen.getvalue()


def test_modes_override_the_terminal():
    screen, log = Terminal(), io.StringIO()
    with Progress(1, stream=screen, mode="lines") as progress:
        progress.update()
    assert "\r" not in screen.getvalue()
    with Progress(1, stream=log, mode="bar") as progress:
        progress.update()
    assert "\r" in log.getvalue()


def test_ci_and_dumb_terminals_are_logs(monkeypatch):
    assert is_terminal(Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("CI", "true")
    assert not is_terminal(Terminal())


def test_disabled_is_silent():
    for options in ({"enabled": False}, {"mode": "none"}):
        screen = Terminal()
        with Progress(1, stream=screen, **options) as progress:
            progress.update(loss=1.0)
        assert screen.getvalue() == ""


def test_nothing_to_do_is_no_error():
    with Progress(0, stream=io.StringIO()) as progress:
        progress.update(0)


def test_plain_table_is_aligned():
    out = io.StringIO()
    rows = [{"layer": "conv1", "seconds": 0.123456, "bytes": 1024}, {"layer": "[fc]", "seconds": 12.0}]
    print_table(rows, title="Time", stream=out)
    assert out.getvalue().splitlines() == [
        "Time",
        "layer  seconds  bytes",
        "conv1   0.1235   1024",
        "[fc]        12",
    ]


def test_rows_without_headings_and_no_rows():
    out = io.StringIO()
    print_table([["accuracy", 0.5], ["a"]], stream=out)
    assert out.getvalue().splitlines() == ["accuracy  0.5", "a"]
    print_table([], stream=out)
    print_table([], ["a", "b"], stream=out)
    assert out.getvalue().splitlines()[2:] == ["a  b"]


def test_boxes_on_a_terminal_keep_square_brackets():
    pytest.importorskip("rich")
    screen = Terminal()
    print_table([{"layer": "[red]", "n": 1}], title="Time", stream=screen)
    assert "[red]" in screen.getvalue()
    assert "─" in screen.getvalue()
