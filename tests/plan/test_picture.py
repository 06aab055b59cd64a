"""The picture of a plan: a column per layer, as high as the processes that it splits among."""

from __future__ import annotations

from math import log2
from pathlib import Path

import pytest

from lbpar.cost.machine import find_machine
from lbpar.errors import ConfigError
from lbpar.plan.choose import choose_plan
from lbpar.plan.explain import explain
from lbpar.plan.picture import draw, picture
from tests.cost.nets import even

pytest.importorskip("matplotlib")


def test_columns_are_as_high_as_what_is_split(tmp_path: Path) -> None:
    report = explain(choose_plan(even(), 1 << 14, 4, find_machine("perlmutter-a100")))
    grids, times = picture(report).axes[:2]
    for x, row in enumerate(report["layers"]):
        bars = [b for b in grids.patches if abs(b.get_x() + b.get_width() / 2 - x) < 0.01]
        split = sum(log2(ways) for ways in row["grid"].values())
        assert sum(b.get_height() for b in bars if b.get_facecolor()[:3] != (221 / 255,) * 3) == pytest.approx(split)
    assert any(row["grid"] for row in report["layers"])
    ms = sum(1e3 * (row["compute_seconds"] + row["communication_seconds"]) for row in report["layers"])
    assert sum(b.get_height() for b in times.patches) == pytest.approx(ms)
    draw(report, tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text(encoding="utf-8").startswith("<?xml")
    with pytest.raises(ConfigError, match=r"--plot: .*plan\.nothing cannot be written"):
        draw(report, tmp_path / "plan.nothing")
