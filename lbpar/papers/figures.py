"""The papers' figures, redrawn: published values beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lbpar.errors import Unsupported
from lbpar.papers import dryden, gholami, networks, optcnn, paradl, published
from lbpar.papers.optcnn_models import optcnn_graph
from lbpar.papers.records import layer_records
from lbpar.papers.rows import grid_name, named_total
from lbpar.papers.searches import optcnn_search, pase_search

PAPER, OURS, LIGHT, ORANGE, GREEN = "#b0b7c3", "#1f5fa8", "#8fb8e8", "#d98c3f", "#3a8f4d"


def pyplot() -> Any:
    """matplotlib's pyplot on a backend that only writes files."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise Unsupported("study papers: matplotlib is not installed; `pip install 'lbpar[plot]'` brings it") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _grid_ticks(axis: Any, grids: Iterable[tuple[int, int]]) -> None:
    names = [grid_name(*g) for g in grids]
    axis.set_xticks(range(len(names)), names, rotation=60, fontsize=7)


def _bars(
    axis: Any, heights: Sequence[float], side: int, label: str, color: str, base: Sequence[float] | int = 0
) -> None:
    """Bars left (side -1) or right (1) of their tick."""
    axis.bar([i + 0.2 * side for i in range(len(heights))], heights, 0.38, bottom=base, color=color, label=label)


def gholami_bars(axes: Any, panels: Sequence[published.Panel]) -> None:
    """Figure 6, 7, 9 or 10: communication seconds per epoch on every grid, with compute time and total."""
    for axis, panel in zip(axes, panels, strict=True):
        ours = [gholami.recipe_terms(panel.figure, panel.batch, *grid) for grid in panel.grids]
        _bars(axis, panel.seconds, -1, "paper, communication", PAPER)
        base = [0.0] * len(ours)
        for term, color in (("batch", OURS), ("model", LIGHT), ("domain", ORANGE)):
            height = [getattr(t, term) for t in ours]
            if any(height):
                _bars(axis, height, 1, f"ours, {term}", color, base)
            base = [b + h for b, h in zip(base, height, strict=True)]
        compute = gholami.compute_epoch_seconds(panel.batch, panel.procs)
        axis.set_title(f"B = {panel.batch}, P = {panel.procs}; compute {compute:.3g} s", fontsize=9)
        _grid_ticks(axis, panel.grids)
        axis.margins(y=0.08)
    axes[0].set_ylabel("communication seconds per epoch")
    axes[-1].legend(fontsize=7)


def gholami_overlap(axes: Any) -> None:
    """Figure 8: total time with perfect overlap."""
    (axis,) = axes
    grids = [(1 << i, 512 >> i) for i in range(len(published.GHOLAMI_FIG8))]
    _bars(axis, published.GHOLAMI_FIG8, -1, "paper", PAPER)
    _bars(axis, [gholami.overlapped_epoch_seconds(2048, *g) for g in grids], 1, "ours", OURS)
    _grid_ticks(axis, grids)
    axis.set_ylabel("seconds per epoch")
    axis.legend()


def gholami_literal(axes: Any) -> None:
    """Equation (8) as printed: one grid for all layers, and grids for the fully connected layers only."""
    layers, epoch = gholami.alexnet(), gholami.IMAGES / 2048
    scopes = {"all layers": gholami.one_grid, "fully connected layers": gholami.fc_only}
    for axis, (scope, place) in zip(axes, scopes.items(), strict=True):
        for procs in (8, 32, 128, 512):
            grids = list(gholami.grids(procs))
            seconds = [epoch * gholami.by_layer(layers, 2048, place(layers, *g)).total for g in grids]
            axis.loglog([pr for pr, _ in grids], seconds, marker="o", ms=3, label=f"P = {procs}")
        axis.set_title(f"Pr x Pc for {scope}", fontsize=9)
        axis.set_xlabel("Pr")
    axes[0].set_ylabel("communication seconds per epoch")
    axes[1].legend(fontsize=8)


def optcnn_volumes(axes: Any) -> None:
    """Bytes moved per step by strategy, 2 to 16 devices, beside the paper's."""
    devices = (2, 4, 8, 16)
    strategies = {
        "data": (OURS, published.OPTCNN_DATA_VOLUME),
        "one weird trick": (ORANGE, published.OPTCNN_TRICK_VOLUME),
        "layer-wise": (GREEN, published.OPTCNN_LAYERWISE_VOLUME),
    }
    for axis, name in zip(axes, published.OPTCNN_DATA_VOLUME, strict=True):
        ours: dict[str, list[float]] = {key: [] for key in strategies}
        for procs in devices:
            graph, tables, found = optcnn_search(name, procs)
            data = tables.choose(optcnn.uniform(tables, "n"))
            trick = tables.choose(optcnn.one_weird_trick(graph, tables))
            for key, choice in zip(strategies, (data, trick, found.choice), strict=True):
                ours[key].append(tables.bytes.total(choice) / 2**30)
        for key, (color, paper) in strategies.items():
            axis.plot(devices, ours[key], marker="o", ms=3, color=color, label=f"ours, {key}")
            axis.plot(devices, list(paper[name].values()), "x", color=color, label=f"paper, {key}")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        weights = sum(x.weights for x in optcnn_graph(name).layers.values())
        axis.set_title(f"{name}, {weights / 1e6:.1f} M weights", fontsize=9)
        axis.set_xlabel("devices")
    axes[0].set_ylabel("GiB moved per step")
    axes[0].legend(fontsize=7)


def optcnn_strategy(axes: Any) -> None:
    """The strategy for VGG-16 on four devices, by layer."""
    graph, tables, found = optcnn_search("vgg16", 4)
    rows = [
        [n, *map(str, tables.degrees[n][found.choice[n]]), *map(str, published.OPTCNN_VGG16[n.partition("_")[0]])]
        for n in graph.layers
    ]
    axes[0].axis("off")
    heads = ["layer", "n", "h", "w", "c", "n paper", "h", "w", "c"]
    table = axes[0].table(rows, colLabels=heads, loc="center", cellLoc="center")
    table.auto_set_font_size(False)
    table.set_fontsize(8)


def pase_totals(axes: Any) -> None:
    """Optimal, data-parallel and one-weird-trick cost of AlexNet, and the optimum of the other networks."""
    devices = (4, 8, 16, 32, 64)
    for axis, model in zip(axes, ("pase-alexnet", "pase-inception-v3", "pase-resnet101"), strict=True):
        found = {p: pase_search(model, 128, p) for p in devices}
        axis.loglog(devices, [s.total for _, s in found.values()], marker="o", ms=4, color=OURS, label="ours, optimum")
        paper = {p: float(t) for (m, p), t in published.PASE_TOTALS.items() if m == model}
        axis.plot(list(paper), list(paper.values()), "x", ms=9, color="k", label="prototype, optimum")
        if model == "pase-alexnet":
            most = devices[:-1]  # a batch of 128 is cut at most 32 ways
            for style, trick, label in ((":", False, "data parallel"), ("--", True, "one weird trick")):
                totals = [named_total(found[p][0], p, trick) for p in most]
                axis.plot(most, totals, style, color="grey", label=label)
        axis.set_xscale("log", base=2)
        axis.set_title(model, fontsize=9)
        axis.set_xlabel("processes")
    axes[0].set_ylabel("operations")
    axes[0].legend(fontsize=7)


def dryden_volumes(axes: Any) -> None:
    """Words for activations of stationary-X, -Y and -W by group size, for layers that shrink, grow and keep their size."""
    cases = {
        "3x3, 64 to 128 channels, 56 to 28": dryden.Conv(8, 64, 128, 56 * 56, 28 * 28, 9),
        "1x1, 64 to 256 channels, 56": dryden.Conv(8, 64, 256, 56 * 56, 56 * 56, 1),
        "3x3, 512 to 512 channels, 7": dryden.Conv(8, 512, 512, 49, 49, 9),
    }
    groups = [1 << i for i in range(1, 9)]
    for axis, (title, conv) in zip(axes, cases.items(), strict=True):
        volumes = [dryden.volume_x(conv, g) for g in groups], [dryden.volume_y(conv, g) for g in groups]
        axis.semilogx(groups, volumes[0], marker="o", ms=3, label="stationary-X", base=2)
        axis.plot(groups, volumes[1], marker="s", ms=3, label="stationary-Y")
        best = [dryden.best_choice(conv, g) for g in groups]
        axis.plot(groups, [c.words for c in best], ls="--", color="k", label="least of X, Y, W")
        for g, c in zip(groups, best, strict=True):
            axis.annotate(c.variant, (g, c.words), textcoords="offset points", xytext=(0, -11), fontsize=7)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("processes of a group")
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("words sent per process and step")
    axes[0].legend(fontsize=7)


def paradl_table(axes: Any) -> None:
    """ParaDL's table for VGG-16 on its machine: seconds of communication per epoch and memory per process."""
    layers = layer_records(networks.vgg16())
    strategies: dict[str, Callable[[paradl.Setting, int], paradl.Price]] = {
        "data": partial(paradl.data_parallel, layers),
        "spatial": partial(paradl.spatial_parallel, layers),
        "filter": partial(paradl.filter_parallel, layers),
        "data + filter": lambda s, p: paradl.data_filter_parallel(layers, s, p // 4, 4),
    }
    # ABCI: 20 microseconds, 12.5 GB/s between nodes; ImageNet; 32 samples per process where samples are split.
    devices = (4, 16, 64)
    for name, price in strategies.items():
        prices = [price(paradl.Setting(1_281_167, 32 * p, 20e-6, 1 / 12.5e9), p) for p in devices]
        axes[0].loglog(devices, [p.seconds for p in prices], marker="o", ms=4, label=name, base=2)
        axes[1].loglog(devices, [p.memory / 2**30 for p in prices], marker="o", ms=4, label=name, base=2)
    axes[0].set_ylabel("communication seconds per epoch")
    axes[1].set_ylabel("GiB per process")
    for axis in axes:
        axis.set_xlabel("processes")
    axes[0].legend(fontsize=8)


def draw_all(out: Path) -> dict[str, list[str]]:
    """Draw every figure into ``out``; file names by paper."""
    plt = pyplot()

    def draw(
        name: str, title: str, content: Callable[[Any], None], size: tuple[float, float], n: int = 1, **how: Any
    ) -> str:
        """Draw a row of ``n`` axes into ``<name>.png``."""
        figure, axes = plt.subplots(1, n, figsize=size, squeeze=False, **how)
        content(axes[0])
        figure.suptitle(title)
        figure.tight_layout()
        figure.savefig(out / f"{name}.png", dpi=110)
        plt.close(figure)
        return f"{name}.png"

    def bars(number: str) -> str:
        panels = [p for p in published.GHOLAMI_PANELS if p.figure == number]
        size, n = (4.2 * len(panels), 3.6), len(panels)
        title = f"Gholami et al., Figure {number}"
        return draw(f"gholami-fig{number}", title, partial(gholami_bars, panels=panels), size, n)

    overlap = "Gholami et al., Figure 8: B = 2048, P = 512, overlap"
    literal = "Equation (8) as printed, AlexNet, B = 2048"
    strategy = "OptCNN: VGG-16 on four devices, ours and the paper's"
    moved = "OptCNN: data moved, 32 samples per device"
    variants = "Channel and filter parallelism: volumes of the three variants"
    paradl_title = "ParaDL's formulas, VGG-16, 32 samples per process"
    return {
        "Gholami et al.": [
            *map(bars, ("6", "7", "9", "10")),
            draw("gholami-fig8", overlap, gholami_overlap, (5, 3.4)),
            draw("gholami-eq8", literal, gholami_literal, (9, 3.6), 2, sharey=True),
        ],
        "OptCNN": [
            draw("optcnn-vgg16", strategy, optcnn_strategy, (6, 5.6)),
            draw("optcnn-volumes", moved, optcnn_volumes, (12, 3.6), 3),
        ],
        "PaSE": [draw("pase-totals", "PaSE's cost model, batch 128", pase_totals, (12, 3.6), 3)],
        "Dryden et al.": [draw("dryden-volumes", variants, dryden_volumes, (12, 3.6), 3)],
        "ParaDL": [draw("paradl-vgg16", paradl_title, paradl_table, (10, 3.6), 2)],
    }
