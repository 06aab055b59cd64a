"""Messages of ranks: on the screen and in a file per rank."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from lbpar.config.run_file import dump
from lbpar.errors import ConfigError
from lbpar.logs import add_logging, start_logging
from lbpar.train.command import main
from tests.util.training import run_file


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    logger = logging.getLogger("lbpar")
    handlers, level = list(logger.handlers), logger.level
    yield
    for handler in [h for h in logger.handlers if h not in handlers]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(level)


def start(rank: int, *options: str) -> None:
    parser = argparse.ArgumentParser()
    add_logging(parser)
    start_logging(parser.parse_args(options), rank)


def say() -> None:
    for level in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("lbpar.somewhere"), level)("a %s", level)


@pytest.mark.parametrize(
    ("rank", "options", "shown"),
    [
        (0, [], ["a warning", "a error"]),
        (3, [], ["a error"]),
        (0, ["--log-level", "debug"], ["a debug", "a info", "a warning", "a error"]),
        (3, ["--log-level", "debug"], ["a error"]),
        (0, ["--log-level", "error"], ["a error"]),
    ],
)
def test_rank_0_speaks_and_others_only_of_errors(
    capsys: pytest.CaptureFixture[str], rank: int, options: list[str], shown: list[str]
) -> None:
    start(rank, *options)
    say()
    assert capsys.readouterr().err.splitlines() == shown


def test_each_rank_has_a_file_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 7):
        start(rank, "--log-level", "info", "--log-dir", str(tmp_path / "logs"))
        say()
    assert {p.name for p in (tmp_path / "logs").iterdir()} == {"rank-00000.log", "rank-00007.log"}
    lines = (tmp_path / "logs" / "rank-00007.log").read_text().splitlines()
    assert [line.partition("lbpar.somewhere: ")[2] for line in lines] == ["a info", "a warning", "a error"]
    assert "WARNING" in lines[1]
    assert capsys.readouterr().err.splitlines() == ["a info", "a warning", "a error", "a error"]


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--log-dir"):
        start(0, "--log-dir", str(tmp_path / "file"))


def test_train_writes_a_record_per_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LBPAR_ALONE", "1")
    (tmp_path / "run.yaml").write_text(dump(run_file(["run.progress=none", f"run.out={tmp_path / 'out'}"])))
    logs = ["--log-dir", str(tmp_path / "logs"), "--log-level", "info"]
    assert main(["--config", str(tmp_path / "run.yaml"), *logs]) == 0
    text = (tmp_path / "logs" / "rank-00000.log").read_text()
    assert [f"'epoch': {i}" in text for i in (1, 2, 3, 4)] == [True, True, True, False]
