"""The picture of a pipeline, in text and as a figure, is that of the schedule."""

from __future__ import annotations

import pytest

from lbpar.cost.simulate import Span, merged, pipeline
from lbpar.plan.pipeline_picture import draw_pipeline, pipeline_text
from tests.cost.test_stages import priced_alike, program

#: Of the schedules' page: three stages, four micro-batches; a backward pass is two units long.
SHOWN = {
    "gpipe": ["abcd......AABBCCDD", ".abcd...AABBCCDD..", "..abcdAABBCCDD...."],
    "1f1b": ["abc....AAdBB.CC.DD", ".ab..AAcBBdCC.DD..", "..aAAbBBcCCdDD...."],
}


@pytest.mark.parametrize("schedule", SHOWN)
def test_the_picture_is_that_of_the_schedule(schedule: str) -> None:
    p = program(3, 4, schedule)  # type: ignore[arg-type]
    spans = pipeline(p, priced_alike(p))
    assert pipeline_text(spans, 18) == SHOWN[schedule]
    assert {(s.place, s.kind, s.micro) for s in spans} == {(k, f, i) for k in range(3) for f in "FB" for i in range(4)}


def test_weights_gradients_that_wait_are_another_span() -> None:
    p = program(3, 4, "zero-bubble")
    assert pipeline_text(pipeline(p, priced_alike(p)), 14) == ["abc..AAdBBCCDD", ".ab.AcBAdCBDCD", "..aAbBcCAdDBCD"]


def test_neighbours_that_work_on_the_same_are_one() -> None:
    parts = [Span(0, "F", 0, 0.0, 1.0), Span(1, "F", 0, 0.5, 1.0), Span(0, "F", 0, 1.5, 2.0), Span(0, "B", 0, 2.0, 3.0)]
    assert merged(parts) == [Span(0, "F", 0, 0.0, 2.0), Span(0, "B", 0, 2.0, 3.0), Span(1, "F", 0, 0.5, 1.0)]
    assert pipeline_text([]) == []


def test_bars_lie_where_spans_do() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    spans = [
        Span(0, "F", 0, 0.0, 1e-3),
        Span(0, "B", 0, 3e-3, 5e-3),
        Span(1, "F", 0, 1e-3, 2e-3),
        Span(1, "U", -1, 2e-3, 3e-3),
    ]
    axis = figure.subplots()
    draw_pipeline(axis, spans, ["stage 0", "stage 1"])
    found = [
        (round(b.get_y() + b.get_height() / 2), round(b.get_x(), 9), round(b.get_width(), 9)) for b in axis.patches
    ]
    assert found == [(0, 0.0, 1.0), (0, 3.0, 2.0), (-1, 1.0, 1.0), (-1, 2.0, 1.0)]
    assert [t.get_text() for t in axis.texts] == ["0", "0", "0"]
    assert [t.get_text() for t in axis.get_yticklabels()] == ["stage 0", "stage 1"]
