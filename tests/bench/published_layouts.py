"""Two published results beside the planner's: python tests/bench/published_layouts.py [unet] [wide]

unet: MLPerf's record U-Net run splits each 128^3 sample over 8 devices by a layout made by hand: depth where it is 32 or more,
replicated below. That layout and the planner's, both priced on h100-nvl8, beside one device.
wide: sample-parallel against the planner's choice where the batch does not grow, for ResNet-50 and one four times as wide on
lassen (Dryden et al., SC'19: up to about 4 times; segmented allreduces up to 4 times cheaper).
"""

from __future__ import annotations

import sys

from lbpar.cost.machine import find_machine
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.models.registry import build_model
from lbpar.plan.choose import choose_plan
from lbpar.plan.explain import WEIGHTS, spent_on
from lbpar.plan.priced import Settings
from lbpar.program.plan import Plan
from lbpar.program.words import grid_words

SPLIT_FROM = 32
"""Depth from which MLPerf's layout splits it."""


def unet() -> None:
    """MLPerf's layout and the planner's."""
    graph = build_model("unet3d", input=(128, 128, 128, 1), classes=3, depth=5, width=0.5).with_loss(CrossEntropy())
    machine, grid = find_machine("h100-nvl8"), Grid.of(8)
    settings = Settings(graph, 1, machine, "float16", "adam")
    depth = {n.name: (*graph.shapes(1)[n.name][1:], SPLIT_FROM)[0] for n in graph.ops}
    hand = {name: {"D": grid.axes} if d >= SPLIT_FROM else {} for name, d in depth.items()}
    whole = {name: {"D": grid.axes} for name in hand}
    alone = choose_plan(graph, 1, 1, machine, dtype="float16", optimizer="adam", compare=False).priced
    best = choose_plan(graph, 1, 8, machine, dtype="float16", optimizer="adam").priced
    print("| layout | devices | ms a step |\n| --- | --- | --- |")
    print(f"| one device | 1 | {1e3 * alone.seconds:.1f} |")
    print(f"| depth by 8 everywhere | 8 | {1e3 * settings.priced('depth', Plan(grid, whole)).seconds:.1f} |")
    print(f"| MLPerf's, by hand | 8 | {1e3 * settings.priced('by hand', Plan(grid, hand)).seconds:.1f} |")
    print(f"| the planner's | 8 | {1e3 * best.seconds:.1f} |")
    for node in graph.ops:
        if "conv" in node.op.kind:
            print(f"{node.name:14} {depth[node.name]:4}^3  {grid_words(best.plan[node.name], grid)}")


def wide() -> None:
    """Sample-parallel and the planner's choice."""
    machine = find_machine("lassen")
    print("| width | batch | processes | data [ms] | planner [ms] | ratio | sums of weight gradients: ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for width in (1.0, 4.0):
        graph = build_model("resnet50", width=width).with_loss(CrossEntropy())
        for batch, procs in ((32, 32), (32, 128), (32, 512), (128, 128), (128, 512)):
            choice = choose_plan(graph, batch, procs, machine)
            best, data = choice.priced, next(o for o in choice.others if o.name == "data")
            whole = Settings(graph, batch, machine, "float32", "momentum").priced("data", data.plan)
            sums = [o.price.by(spent_on).get(WEIGHTS, 0.0) for o in (whole, best)]
            times = f"{1e3 * data.seconds:.1f} | {1e3 * best.seconds:.1f} | {data.seconds / best.seconds:.2f}"
            print(f"| {width:g} | {batch} | {procs} | {times} | {sums[0] / sums[1]:.1f} |", flush=True)


def main() -> int:
    """Print the tables that are asked for, else both."""
    for name in sys.argv[1:] or ["unet", "wide"]:
        {"unet": unet, "wide": wide}[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
