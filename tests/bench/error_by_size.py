"""Draw how the error of a regression falls as its volumes grow, from runs on volumes of different sizes; print the same as a table.

    python tests/bench/error_by_size.py runs/cosmoflow16 runs/cosmoflow32 runs/cosmoflow --out docs/howto/cosmoflow.svg

Run it in the directory in which the runs were made: their data files are read for the error of always predicting the mean. ``docs/howto/jobs.md`` has the
commands of the runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import h5py
import matplotlib as mpl
from matplotlib.figure import Figure

from lbpar.config.run_file import load_run_file
from lbpar.train.metrics import read_metrics


def figures(run: Path) -> tuple[int, float, float, float]:
    """Voxels a side, test loss of the last epoch, that of always predicting the mean, and seconds of the quietest epoch."""
    config, records = load_run_file(run / "run.yaml"), read_metrics(run / "metrics.jsonl")
    with h5py.File(str(config.data.train)) as train, h5py.File(str(config.data.test)) as test:
        mean = float(((test["test/y"][:] - train["train/y"][:].mean(axis=0)) ** 2).mean())
    return config.model.input[0], records[-1]["test_loss"], mean, min(r["seconds"] for r in records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = sorted(map(figures, args.runs))
    print("| voxels a side | mean square error of the test fields | below predicting the mean | seconds an epoch |")
    print("| --- | --- | --- | --- |")
    for side, error, mean, seconds in rows:
        print(f"| {side} | {error:.3f} | {mean / error:.1f} times | {seconds:.0f} |")
    sides, errors, means, _ = zip(*rows, strict=True)
    with mpl.rc_context({"svg.hashsalt": "lbpar", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(5, 3.3), layout="constrained")
        axis = figure.subplots()
        axis.plot(sides, errors, marker="o", color="#1f5fa8", label="trained")
        axis.plot(sides, means, "--", color="#888888", label="predicting the mean")
        axis.plot(sides, [m / 5 for m in means], ":", color="#888888", label="a fifth of that")
        for side, error in zip(sides, errors, strict=True):
            axis.annotate(f"{error:.3f}", (side, error), (4, 6), textcoords="offset points")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_ylim(0.02, 0.5)
        axis.set_xticks(sides, list(map(str, sides)))
        axis.set_yticks([0.02, 0.05, 0.1, 0.2, 0.5], ["0.02", "0.05", "0.1", "0.2", "0.5"])
        axis.minorticks_off()
        axis.set_xlabel("voxels a side")
        axis.set_ylabel("mean square error, test")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, loc="lower left")
        figure.savefig(args.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
