"""The papers' figures, redrawn: published values beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lbpar.errors import Unsupported
from lbpar.papers import dryden, gholami, optcnn, paradl, published
from lbpar.papers.optcnn_models import optcnn_graph
from lbpar.papers.records import alexnet, vgg16
from lbpar.papers.rows import grid_name, named_total, panel_grids
from lbpar.papers.searches import optcnn_search, pase_search

PAPER, OURS, LIGHT = "#b0b7c3", "#1f5fa8", "#8fb8e8"


def pyplot() -> Any:
    """matplotlib's pyplot on a backend that only writes files."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise Unsupported("study papers: matplotlib is not installed; `pip install 'lbpar[plot]'` brings it") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _save(plt: Any, figure: Any, out: Path, name: str) -> str:
    figure.tight_layout()
    figure.savefig(out / name, dpi=110)
    plt.close(figure)
    return name


def gholami_bars(out: Path, number: str) -> str:
    """Figure 6, 7, 9 or 10: communication seconds per epoch on every grid, with compute time and total."""
    plt = pyplot()
    panels = [p for p in published.GHOLAMI_PANELS if p.figure == number]
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.6), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        grids = panel_grids(panel)
        ours = [gholami.recipe_terms(panel.figure, panel.batch, pr, pc) for pr, pc in grids]
        at = range(len(grids))
        axis.bar([i - 0.2 for i in at], panel.seconds, 0.38, color=PAPER, label="paper, communication")
        base = [0.0] * len(grids)
        for term, colour in (("batch", OURS), ("model", LIGHT), ("domain", "#d98c3f")):
            height = [getattr(t, term) for t in ours]
            if any(height):
                bar = axis.bar([i + 0.2 for i in at], height, 0.38, bottom=base, color=colour)
                bar.set_label(f"ours, {term}")
            base = [b + h for b, h in zip(base, height, strict=True)]
        compute = gholami.compute_epoch_seconds(panel.batch, panel.procs)
        axis.set_title(f"B = {panel.batch}, P = {panel.procs}; compute {compute:.3g} s", fontsize=9)
        axis.set_xticks(list(at), [grid_name(*g) for g in grids], rotation=60, fontsize=7)
        axis.margins(y=0.08)
    axes[0][0].set_ylabel("communication seconds per epoch")
    axes[0][-1].legend(fontsize=7)
    figure.suptitle(f"Gholami et al., Figure {number}")
    return _save(plt, figure, out, f"gholami-fig{number}.png")


def gholami_overlap(out: Path) -> str:
    """Figure 8: total time with perfect overlap."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(5, 3.4))
    at = range(len(published.GHOLAMI_FIG8))
    axis.bar([i - 0.2 for i in at], published.GHOLAMI_FIG8, 0.38, color=PAPER, label="paper")
    ours = [gholami.overlapped_epoch_seconds(2048, 1 << i, 512 >> i) for i in at]
    axis.bar([i + 0.2 for i in at], ours, 0.38, color=OURS, label="ours")
    axis.set_xticks(list(at), [grid_name(1 << i, 512 >> i) for i in at], rotation=60, fontsize=7)
    axis.set_ylabel("seconds per epoch")
    axis.set_title("Gholami et al., Figure 8: B = 2048, P = 512, overlap")
    axis.legend()
    return _save(plt, figure, out, "gholami-fig8.png")


def gholami_literal(out: Path) -> str:
    """Equation (8) as printed: one grid for all layers, and grids for the fully connected layers only."""
    plt = pyplot()
    layers, epoch = alexnet(), gholami.IMAGES / 2048
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axis, scope in zip(axes, ("all layers", "fully connected layers"), strict=True):
        for procs in (8, 32, 128, 512):
            grids = list(gholami.grids(procs))
            place = [
                {x.name: g for x in layers} if scope == "all layers" else gholami.fc_only(layers, *g) for g in grids
            ]
            seconds = [epoch * gholami.by_layer(layers, 2048, p).total for p in place]
            axis.loglog([pr for pr, _ in grids], seconds, marker="o", ms=3, label=f"P = {procs}")
        axis.set_title(f"Pr x Pc for {scope}", fontsize=9)
        axis.set_xlabel("Pr")
    axes[0].set_ylabel("communication seconds per epoch")
    axes[1].legend(fontsize=8)
    figure.suptitle("Equation (8) as printed, AlexNet, B = 2048")
    return _save(plt, figure, out, "gholami-eq8.png")


def optcnn_volumes(out: Path) -> str:
    """Bytes moved per step by strategy, 2 to 16 devices, with the paper's data-parallel values."""
    plt = pyplot()
    names = ("alexnet", "vgg16", "inception-v3")
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6))
    for axis, name in zip(axes, names, strict=True):
        devices = (2, 4, 8, 16)
        ours: dict[str, list[float]] = {"data": [], "one weird trick": [], "layer-wise": []}
        for procs in devices:
            graph, tables, found = optcnn_search(name, procs)
            data = tables.choose(optcnn.data_parallel(tables, procs))
            trick = tables.choose(optcnn.one_weird_trick(graph, tables, procs))
            for key, choice in (("data", data), ("one weird trick", trick), ("layer-wise", found.choice)):
                ours[key].append(tables.moved(choice) / 2**30)
        paper = {
            "data": published.OPTCNN_DATA_VOLUME,
            "one weird trick": published.OPTCNN_TRICK_VOLUME,
            "layer-wise": published.OPTCNN_LAYERWISE_VOLUME,
        }
        for colour, (key, values) in zip((OURS, "#d98c3f", "#3a8f4d"), ours.items(), strict=True):
            axis.plot(devices, values, marker="o", ms=3, color=colour, label=f"ours, {key}")
            axis.plot(devices, list(paper[key][name].values()), "x", color=colour, label=f"paper, {key}")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(f"{name}, {optcnn_graph(name).weights / 1e6:.1f} M weights", fontsize=9)
        axis.set_xlabel("devices")
    axes[0].set_ylabel("GiB moved per step")
    axes[0].legend(fontsize=7)
    figure.suptitle("OptCNN: data moved, 32 samples per device")
    return _save(plt, figure, out, "optcnn-volumes.png")


def optcnn_strategy(out: Path) -> str:
    """The strategy for VGG-16 on four devices, by layer."""
    plt = pyplot()
    graph, tables, found = optcnn_search("vgg16", 4)
    names = list(graph.layers)
    rows = [
        [n, *map(str, tables.degrees[n][found.choice[n]]), *map(str, published.OPTCNN_VGG16[n.partition("_")[0]])]
        for n in names
    ]
    figure, axis = plt.subplots(figsize=(6, 5.6))
    axis.axis("off")
    heads = ["layer", "n", "h", "w", "c", "n paper", "h", "w", "c"]
    table = axis.table(rows, colLabels=heads, loc="center", cellLoc="center")
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    axis.set_title("OptCNN: VGG-16 on four devices, ours and the paper's")
    return _save(plt, figure, out, "optcnn-vgg16.png")


def pase_totals(out: Path) -> str:
    """Optimal, data-parallel and one-weird-trick cost of AlexNet, and the optimum of the other networks."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6))
    devices = (4, 8, 16, 32, 64)
    for axis, model in zip(axes, ("pase-alexnet", "pase-inception-v3", "pase-resnet101"), strict=True):
        found = {p: pase_search(model, 128, p) for p in devices}
        axis.loglog(devices, [s.total for _, s in found.values()], marker="o", ms=4, color=OURS, label="ours, optimum")
        paper = {p: float(t) for (m, p), t in published.PASE_TOTALS.items() if m == model}
        axis.plot(list(paper), list(paper.values()), "x", ms=9, color="k", label="prototype, optimum")
        if model == "pase-alexnet":
            most = devices[:-1]  # a batch of 128 is cut at most 32 ways
            axis.plot(
                most, [named_total(found[p][0], p, False) for p in most], ":", color="grey", label="data parallel"
            )
            axis.plot(
                most, [named_total(found[p][0], p, True) for p in most], "--", color="grey", label="one weird trick"
            )
        axis.set_xscale("log", base=2)
        axis.set_title(model, fontsize=9)
        axis.set_xlabel("processes")
    axes[0].set_ylabel("operations")
    axes[0].legend(fontsize=7)
    figure.suptitle("PaSE's cost model, batch 128")
    return _save(plt, figure, out, "pase-totals.png")


def dryden_volumes(out: Path) -> str:
    """Words for activations of stationary-X, -Y and -W by group size, for layers that shrink, grow and keep their size."""
    plt = pyplot()
    cases = {
        "3x3, 64 to 128 channels, 56 to 28": dryden.Conv(8, 64, 128, 56 * 56, 28 * 28, 9),
        "1x1, 64 to 256 channels, 56": dryden.Conv(8, 64, 256, 56 * 56, 56 * 56, 1),
        "3x3, 512 to 512 channels, 7": dryden.Conv(8, 512, 512, 49, 49, 9),
    }
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6))
    groups = [1 << i for i in range(1, 9)]
    for axis, (title, conv) in zip(axes, cases.items(), strict=True):
        axis.semilogx(
            groups, [dryden.volume_x(conv, g) for g in groups], marker="o", ms=3, label="stationary-X", base=2
        )
        axis.plot(groups, [dryden.volume_y(conv, g) for g in groups], marker="s", ms=3, label="stationary-Y")
        cuts = [min((c for c in dryden.choices(conv, g)), key=lambda c: c.words) for g in groups]
        axis.plot(groups, [c.words for c in cuts], ls="--", color="k", label="least of X, Y, W")
        for g, c in zip(groups, cuts, strict=True):
            axis.annotate(c.variant, (g, c.words), textcoords="offset points", xytext=(0, -11), fontsize=7)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("processes of a group")
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("words sent per process and step")
    axes[0].legend(fontsize=7)
    figure.suptitle("Channel and filter parallelism: volumes of the three variants")
    return _save(plt, figure, out, "dryden-volumes.png")


def paradl_table(out: Path) -> str:
    """ParaDL's table for VGG-16 on its machine: seconds of communication per epoch and memory per process."""
    plt = pyplot()
    layers = [paradl.from_record(x) for x in vgg16()]
    # ABCI: 20 microseconds, 12.5 GB/s between nodes; ImageNet; 32 samples per process where samples are split.
    devices = (4, 16, 64)
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6))
    for name in ("data", "spatial", "filter", "data + filter"):
        prices = []
        for p in devices:
            s = paradl.Setting(1_281_167, 32 * p, 20e-6, 1 / 12.5e9)
            price = {
                "data": lambda s=s, p=p: paradl.data_parallel(layers, s, p),
                "spatial": lambda s=s, p=p: paradl.spatial_parallel(layers, s, p),
                "filter": lambda s=s, p=p: paradl.filter_parallel(layers, s, p),
                "data + filter": lambda s=s, p=p: paradl.data_filter_parallel(layers, s, p // 4, 4),
            }[name]
            prices.append(price())
        axes[0].loglog(devices, [p.seconds for p in prices], marker="o", ms=4, label=name, base=2)
        axes[1].loglog(devices, [p.memory / 2**30 for p in prices], marker="o", ms=4, label=name, base=2)
    axes[0].set_ylabel("communication seconds per epoch")
    axes[1].set_ylabel("GiB per process")
    for axis in axes:
        axis.set_xlabel("processes")
    axes[0].legend(fontsize=8)
    figure.suptitle("ParaDL's formulas, VGG-16, 32 samples per process")
    return _save(plt, figure, out, "paradl-vgg16.png")


def draw_all(out: Path) -> dict[str, list[str]]:
    """Draw every figure into ``out``; file names by paper."""
    return {
        "Gholami et al.": [
            *(gholami_bars(out, n) for n in ("6", "7", "9", "10")),
            gholami_overlap(out),
            gholami_literal(out),
        ],
        "OptCNN": [optcnn_strategy(out), optcnn_volumes(out)],
        "PaSE": [pase_totals(out)],
        "Dryden et al.": [dryden_volumes(out)],
        "ParaDL": [paradl_table(out)],
    }
