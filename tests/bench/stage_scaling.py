"""How near K stages on K processes come to K times one process, as the cost model sees it, and what the rest is lost to.

    python tests/bench/stage_scaling.py [--machine perlmutter-a100] [--model vgg16] [--batch 256] [--stages 2,4,8]

Of each number of stages the best schedule of those that keep the weights exact, with cuts chosen. Numbers of stages beside the best plan without, on
more processes: `lbpar study stages`.
"""

from __future__ import annotations

import argparse

from lbpar.cost.machine import find_machine
from lbpar.graph.ops.losses import LOSSES
from lbpar.models.registry import build_model
from lbpar.plan.choose import choose_plan
from lbpar.plan.compare_stages import compare_stages
from lbpar.plan.priced import Settings
from lbpar.plan.stage_words import spent
from lbpar.study.stages import numbers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--machine", default="perlmutter-a100")
    parser.add_argument("--model", default="vgg16")
    parser.add_argument("--loss", default="cross_entropy")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--stages", type=numbers, default=[2, 4, 8])
    parser.add_argument("--micro-batches", type=int)
    args = parser.parse_args()
    graph = build_model(args.model).with_loss(LOSSES[args.loss]())
    settings = Settings(graph, args.batch, find_machine(args.machine), "float32", "momentum")
    one = choose_plan(graph, args.batch, 1, settings.machine).priced.seconds
    for k in args.stages:
        best = compare_stages(settings, k, [k], args.micro_batches)[0]
        speed, s = one / best.priced.seconds, spent(best, settings)
        work = sum(best.priced.step.busy)
        lost = {
            "smaller kernels": work / one - 1,
            "unequal stages": k * max(best.priced.step.busy) / work - 1,
            "filling, draining, moves": best.priced.seconds / max(best.priced.step.busy) - 1,
        }
        print(
            f"{args.model} K = {k}: {speed:.2f} times one process ({best.schedule}, {best.micro_batches} micro-batches); more time by "
            + ", ".join(f"{w} {100 * v:.0f} %" for w, v in lost.items())
            + f"; idle {100 * s.idle / best.priced.seconds:.0f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
