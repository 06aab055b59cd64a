"""A rank reads exactly its block of a batch, and what two feeds share once."""

from __future__ import annotations

import numpy as np

from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import TARGET
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.layout.runs import Box, indices
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.runtime.feeds import read_feeds

IMAGES = np.arange(10 * 6 * 5 * 2, dtype=np.float64).reshape(10, 6, 5, 2)
LABELS = np.arange(10, dtype=np.int64)


class Recorder:
    """Samples that note what is read of them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...], Box]] = []

    def _read(self, name: str, whole: np.ndarray, samples: np.ndarray, box: Box) -> np.ndarray:
        self.calls.append((name, tuple(samples), box))
        return whole[np.ix_(samples, *map(indices, box))]

    def part(self, source: str) -> Recorder:
        return self

    def read(self, samples: np.ndarray, box: Box) -> np.ndarray:
        return self._read("input", IMAGES, samples, box)

    def read_targets(self, samples: np.ndarray, box: Box) -> np.ndarray:
        return self._read(TARGET, LABELS, samples, box)


def test_blocks_have_ghosts_the_engines_type_and_whole_labels() -> None:
    g = GraphBuilder((6, 5, 2))
    graph = g.build(g.global_avg_pool(g.conv(g.input, 3, 3, pad=1, name="c"))).with_loss(CrossEntropy())
    program = lower(graph, Plan(Grid((2,)), {"c": {"H": (0,)}}), 4)
    data, batch = Recorder(), np.array([7, 2, 9, 4])
    feeds = read_feeds(program, 1, data, batch, np.dtype(np.float32))
    for buffer, source in program.feeds.items():
        where = [indices(runs) for runs in program.buffers[buffer].layout.box(1)]
        whole = LABELS if source == TARGET else IMAGES
        np.testing.assert_array_equal(feeds[buffer], whole[np.ix_(batch[where[0]], *where[1:])])
        assert feeds[buffer].dtype == (np.int64 if source == TARGET else np.float32)
        assert feeds[buffer].flags.c_contiguous
    rows = {tuple(indices(box[0])) for name, _, box in data.calls if name == "input"}
    assert rows == {(2, 3, 4, 5)}  # three of its own, and one in front
    assert len(data.calls) == len(set(data.calls))  # nothing is read twice
