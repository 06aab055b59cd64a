"""Every number of the papers that lbpar's cost models reproduce, beside ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lbpar.papers import gholami, optcnn, pase, published
from lbpar.papers.optcnn_models import optcnn_graph
from lbpar.papers.pase_models import pase_graph
from lbpar.papers.records import LayerRecord
from lbpar.papers.reduction import fold
from lbpar.papers.searches import optcnn_search, pase_search


@dataclass(frozen=True)
class Row:
    """A published value, ours, and whether they agree.

    ``tolerance`` is relative; None: the two must be equal (strings, grids) or, with ``better``, ours may only be smaller.
    ``tag`` says how the published value is known (:mod:`lbpar.papers.published`); ``fitted``: constants of ours were chosen to meet
    it, so that meeting it says nothing about the paper's formulas.
    """

    id: str
    paper: Any
    ours: Any
    tag: str
    tolerance: float | None = None
    better: bool = False
    fitted: bool = False

    @property
    def timing(self) -> bool:
        """Whether the value is a time of this machine, which a busy machine may miss."""
        return "/search-seconds/" in self.id

    @property
    def relative_error(self) -> float | None:
        """ours / paper - 1 for numbers, else None."""
        numbers = isinstance(self.paper, int | float) and isinstance(self.ours, int | float)
        return self.ours / self.paper - 1 if numbers and self.paper else None

    @property
    def agrees(self) -> bool:
        """Whether ours is within the tolerance, or equal, or better where that is what counts."""
        if self.better:
            return bool(self.ours <= self.paper)
        error = self.relative_error
        if self.tolerance is not None and error is not None:
            return abs(error) <= self.tolerance
        return bool(self.paper == self.ours)

    def record(self) -> dict[str, Any]:
        """The row as it goes to papers.json."""
        names = ("id", "paper", "ours", "relative_error", "tag", "agrees", "tolerance", "fitted")
        return {name: getattr(self, name) for name in names}


def grid_name(pr: int, pc: int) -> str:
    """ "4x8" for Pr = 4, Pc = 8."""
    return f"{pr}x{pc}"


def bar_rows() -> Iterator[Row]:
    """Every bar of Figures 6, 7, 9 and 10, and of Figure 8."""
    for panel in published.GHOLAMI_PANELS:
        for (pr, pc), seconds in zip(panel.grids, panel.seconds, strict=True):
            ours = gholami.recipe_terms(panel.figure, panel.batch, pr, pc).total
            name = f"gholami/fig{panel.figure}/B{panel.batch}/P{panel.procs}/{grid_name(pr, pc)}"
            yield Row(name, seconds, ours, "F", 0.05, fitted=True)
    for i, seconds in enumerate(published.GHOLAMI_FIG8):
        pr, pc = 1 << i, 512 >> i
        ours = gholami.overlapped_epoch_seconds(2048, pr, pc)
        yield Row(f"gholami/fig8/B2048/P512/{grid_name(pr, pc)}", seconds, ours, "F", 0.02, fitted=True)


def compute_rows() -> Iterator[Row]:
    """Compute seconds per epoch of the panels."""
    for (batch, procs), seconds in published.GHOLAMI_COMPUTE.items():
        ours = gholami.compute_epoch_seconds(batch, procs)
        yield Row(f"gholami/compute/B{batch}/P{procs}", seconds, ours, "F", 0.02, fitted=True)


def speedup_rows() -> Iterator[Row]:
    """Best grids and speed-ups printed in the figures, from the recipe; Figure 7's also from equation (8) as printed."""
    layers = gholami.alexnet()
    for row in published.GHOLAMI_SPEEDUPS:
        panel = next((p for p in published.GHOLAMI_PANELS if (p.figure, p.procs) == (row.figure, row.procs)), None)
        first = panel.first if panel else 1
        compute = gholami.compute_epoch_seconds(row.batch, row.procs)
        bars = {
            (pr, pc): gholami.recipe_terms(row.figure, row.batch, pr, pc).total
            for pr, pc in gholami.grids(row.procs)
            if first <= pr < first << 8
        }
        best = min(bars, key=lambda g: bars[g])
        start = bars[first, row.procs // first]
        name = f"gholami/fig{row.figure}/B{row.batch}/P{row.procs}"
        total, communication = (start + compute) / (bars[best] + compute), start / bars[best]
        yield Row(f"{name}/best-grid", grid_name(*row.grid), grid_name(*best), "R", fitted=True)
        yield Row(f"{name}/speed-up-total", row.total, total, "R", 0.06, fitted=True)
        yield Row(f"{name}/speed-up-communication", row.communication, communication, "R", 0.06, fitted=True)
        if row.figure == "7":
            name = f"gholami/eq8/fig7/P{row.procs}"
            literal = {
                g: gholami.by_layer(layers, row.batch, gholami.fc_only(layers, *g)).total
                for g in gholami.grids(row.procs)
            }
            best = min(literal, key=lambda g: literal[g])
            gain = literal[1, row.procs] / literal[best]
            yield Row(f"{name}/best-grid", grid_name(*row.grid), grid_name(*best), "R")
            yield Row(f"{name}/speed-up-communication", row.communication, gain, "R", 0.08)


def literal_rows() -> Iterator[Row]:
    """Equation (8) evaluated as printed, to two decimals; the crossover of (5)."""
    layers, epoch = gholami.alexnet(), gholami.IMAGES / 2048
    cases = (
        ("same", gholami.one_grid, published.GHOLAMI_LITERAL_SAME),
        ("fc", gholami.fc_only, published.GHOLAMI_LITERAL_FC),
    )
    for case, place, table in cases:
        for procs, expected in table.items():
            for grid, seconds in zip(gholami.grids(procs), expected, strict=True):
                ours = round(epoch * gholami.by_layer(layers, 2048, place(layers, *grid)).total, 2)
                yield Row(f"gholami/eq8/{case}/P{procs}/{grid_name(*grid)}", seconds, ours, "D")
    layer = LayerRecord("conv4", "conv", (13, 13, 384), (13, 13, 384), (3, 3), 9 * 384 * 384)
    yield Row("gholami/eq5/crossover-batch", 13.6, round(gholami.crossover_batch(layer), 1), "D")


def optcnn_rows() -> Iterator[Row]:
    """Folding to K = 2, the strategy for VGG-16, data-parallel volumes."""
    for name in ("alexnet", "vgg16", "inception-v3", "resnet50"):
        graph = optcnn_graph(name)
        remaining, _ = fold(list(graph.layers), [e[:2] for e in graph.edges])
        yield Row(f"optcnn/K/{name}", 2, len(remaining), "R")
    graph, tables, found = optcnn_search("vgg16", 4)
    for name in graph.layers:
        paper = list(published.OPTCNN_VGG16[name.partition("_")[0]])
        chosen = list(tables.degrees[name][found.choice[name]])
        yield Row(f"optcnn/vgg16-4/{name}", paper, chosen, "R", fitted=True)
    for name, volumes in published.OPTCNN_DATA_VOLUME.items():
        layers = optcnn_graph(name).layers.values()
        for procs, gib in volumes.items():
            ours = optcnn.total_bytes(layers, procs) / 2**30
            yield Row(f"optcnn/data-volume/{name}/p{procs}", gib, ours, "F+D", 0.035)
    for name, (_, _, seconds) in published.OPTCNN_SEARCH.items():
        _, tables, _ = optcnn_search(name, 4)
        ours = min(_timed(tables.seconds.minimum) for _ in range(3))
        yield Row(f"optcnn/search-seconds/{name}", seconds, ours, "R", better=True)


def printed(value: float, like: str) -> str:
    """``value`` with as many digits as ``like``, for example 1.234e11."""
    mantissa, exponent = like.split("e")
    return f"{value / 10 ** int(exponent):.{len(mantissa.partition('.')[2])}f}e{exponent}"


def pase_rows() -> Iterator[Row]:
    """Optimal totals to all printed digits, configurations per vertex, strategies, named strategies."""
    for (model, procs), total in published.PASE_TOTALS.items():
        _, found = pase_search(model, 128, procs)
        yield Row(f"pase/total/{model}/p{procs}", total, printed(found.total, total), "D")
    for procs, counts in published.PASE_COUNTS.items():
        tables = pase.build_tables(pase_graph("pase-alexnet", 128), procs)
        ours = [len(r) for r in tables.configurations.values()]
        yield Row(f"pase/configurations/alexnet/p{procs}", list(counts), ours, "D")
    for procs, splits in published.PASE_FC.items():
        tables, found = pase_search("pase-alexnet", 128, procs)
        for name, paper in zip(("fc6", "fc7", "fc8"), splits, strict=True):
            best = tables.configurations[name][found.choice[name]]
            yield Row(
                f"pase/alexnet-p{procs}/{name}", list(paper), [int(x) for x in best], "R+D" if procs == 32 else "D"
            )
        data, trick = (named_total(tables, procs, t) for t in (False, True))
        paper_data, paper_trick = published.PASE_DATA_PARALLEL[procs], published.PASE_ONE_WEIRD_TRICK[procs]
        yield Row(f"pase/data-parallel/alexnet/p{procs}", paper_data, printed(data, paper_data), "D")
        yield Row(f"pase/one-weird-trick/alexnet/p{procs}", paper_trick, printed(trick, paper_trick), "D")


def named_total(tables: pase.Tables, procs: int, trick: bool) -> float:
    """Cost of AlexNet with every vertex cut along the batch, or with the fully connected layers and the loss along classes."""
    rows = {n: (procs, *(1,) * (r.shape[1] - 1)) for n, r in tables.configurations.items()}
    if trick:
        rows |= {n: (1, procs, 1) for n in ("fc6", "fc7", "fc8")} | {"softmax": (1, procs)}
    return tables.total({n: tables.row(n, row) for n, row in rows.items()})


def speed_rows(repeats: int = 5) -> Iterator[Row]:
    """Our search against a hundredth of the prototype's: processor seconds of one thread, the median of ``repeats``."""
    for (model, procs), seconds in published.PASE_SEARCH_SECONDS.items():
        if seconds is None:
            continue
        tables = pase.build_tables(pase_graph(model, 128), procs)
        ours = sorted(_timed(tables.minimum) for _ in range(repeats))[repeats // 2]
        yield Row(f"pase/search-seconds/a-hundredth/{model}/p{procs}", seconds / 100, ours, "D", better=True)


def _timed(work: Callable[[], Any]) -> float:
    """Processor seconds, which other work on the machine changes little."""
    start = time.process_time()
    work()
    return time.process_time() - start


SECTIONS = {
    "Gholami et al.: bars of Figures 6 to 10": bar_rows,
    "Gholami et al.: compute time": compute_rows,
    "Gholami et al.: best grids and speed-ups": speedup_rows,
    "Gholami et al.: equations as printed": literal_rows,
    "OptCNN": optcnn_rows,
    "PaSE": pase_rows,
    "PaSE: search time": speed_rows,
}
