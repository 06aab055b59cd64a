"""The printed report says what the explained plan holds."""

from __future__ import annotations

from typing import Any

import pytest

from lbpar.cost.machine import find_machine
from lbpar.plan.choose import choose_plan
from lbpar.plan.explain import explain
from lbpar.plan.report import print_report
from lbpar.text import human_bytes, human_seconds
from tests.cost.nets import even


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return explain(choose_plan(even(), 1 << 14, 4, find_machine("perlmutter-a100")))


def test_every_strategy_and_the_totals_are_printed(report: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report, layers=False)
    text = capsys.readouterr().out
    assert all(row["strategy"] in text for row in report["comparison"])
    assert human_seconds(report["step"]["seconds"]) in text and human_bytes(report["memory"]["peak"]) in text
    assert not any(f" {row['layer']} " in text for row in report["layers"] if row["op"] == "conv")


def test_layers_are_listed_unless_left_out(report: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report)
    text = capsys.readouterr().out
    assert all(row["layer"] in text and row["words"] in text for row in report["layers"] if row["op"] == "conv")


@pytest.mark.parametrize(
    ("proof", "words"), [({}, "; exact;"), ({"exact": False, "gap": 1e-3}, "; bounded, gap 0.1 %;")]
)
def test_the_proven_gap_is_said(
    report: dict[str, Any], proof: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_report(report | {"space": report["space"] | proof}, layers=False)
    assert words in " ".join(capsys.readouterr().out.split())
