"""Accuracy on Fashion-MNIST with delayed gradients, beside exact training: `jobs/fashion_mnist.yaml` with half the filters, in stages.

    python tests/bench/delayed_accuracy.py data/fashion_mnist.h5 --out accuracy.jsonl [--steps 400] [--seeds 1,2,3] [CASE ...]
    python tests/bench/delayed_accuracy.py --table accuracy.jsonl

Ranks are virtual: one process trains all stages, in turn, so that times say nothing. Each run adds a line to the file; those that are there
are left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from lbpar.config.run_file import load_run_file
from lbpar.config.yaml_text import read_yaml
from lbpar.train.setup import build_graph, build_plan
from lbpar.train.trainer import Trainer
from lbpar.transport.virtual import VirtualWorld

JOB = Path(__file__).parents[2] / "jobs" / "fashion_mnist.yaml"
DELAYED = ("parallel.schedule=delayed",)
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "exact": (1, ()),
    "K = 2": (2, DELAYED),
    "K = 4": (4, DELAYED),
    "K = 4, rescheduled": (4, (*DELAYED, "parallel.reschedule=100")),
}


def train(data: str, case: str, seed: int, steps: int) -> float:
    """Test accuracy after so many updates."""
    stages, more = CASES[case]
    changes = [f"data.train={data}", f"data.test={data}", f"train.seed={seed}", f"train.max_steps={steps}", *more]
    changes += [
        f"parallel.stages={stages}",
        "parallel.layers={}",
        "engine.threads=1",
        "train.schedule.warmup_epochs=0.1",
    ]
    content = read_yaml(JOB, "run file")
    for layer in content["model"]["layers"]:
        layer.update({"filters": layer["filters"] // 2} if "filters" in layer else {})
    config = load_run_file(content, changes)
    graph = build_graph(config)
    plan = build_plan(config, graph, stages)

    def one(transport: Any) -> float:
        *_, last = Trainer.alike(config, graph, plan, transport).train()
        accuracy: float = last["test_accuracy"]
        return accuracy

    return VirtualWorld(plan.grid, strict=False).run(one)[0]


def table(path: Path) -> None:
    """Print means and single runs."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for case in CASES:
        found = sorted((r["seed"], 100 * r["accuracy"]) for r in rows if r["case"] == case)
        if found:
            print(f"| {case} | {', '.join(f'{a:.1f}' for _, a in found)} | {mean(a for _, a in found):.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", help="written by `python -m lbpar.data convert ... --normalise`")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--out", type=Path, default=Path("accuracy.jsonl"))
    parser.add_argument("--table", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", default="1,2,3")
    args = parser.parse_intermixed_args()
    if args.table:
        return table(args.table)
    done = args.out.read_text(encoding="utf-8").splitlines() if args.out.exists() else []
    there = {(r["case"], r["seed"]) for r in map(json.loads, done)}
    for seed in map(int, args.seeds.split(",")):
        for case in args.cases or CASES:
            if (case, seed) not in there:
                accuracy = train(args.data, case, seed, args.steps)
                with args.out.open("a", encoding="utf-8") as file:
                    print(json.dumps({"case": case, "seed": seed, "accuracy": accuracy}), file=file)
    return table(args.out)


if __name__ == "__main__":
    main()
