"""Search time on PaSE's own space and cost model, beside its prototype's: `python tests/bench/pase_search.py [--repeats 9]`.

Prints a Markdown table. "tables" builds every configuration, vertex and edge cost; "search" finds the optimum. The
prototype's figures are its search alone, on two cores (lbpar.papers.published). The search runs on one thread.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import statistics
import time

from lbpar.models.registry import build_model
from lbpar.papers import published
from lbpar.papers.pase import Machine, build_tables
from lbpar.papers.pase_models import MODELS, from_graph, pase_graph


def measure(model: str, procs: int, batch: int, repeats: int, clock) -> dict:
    """Median seconds of building and of searching, and what the search found."""
    building, searching = [], []
    for _ in range(repeats):
        start = clock()
        tables = build_tables(pase_graph(model, batch), procs)
        middle = clock()
        found = tables.minimum()
        building.append(middle - start)
        searching.append(clock() - middle)
    return {"build": statistics.median(building), "search": statistics.median(searching), "found": found}


def measure_wide(procs: int, batch: int, clock) -> dict:
    """ResNet-101 on 256 x 256 images with every loop of every convolution split by any divisor, space included."""
    graph = from_graph(build_model("resnet101", input=(256, 256, 3)), batch)
    for name, vertex in graph.layers.items():
        if vertex.kind == "conv":
            graph.layers[name] = dataclasses.replace(vertex, whole="")
    start = clock()
    tables = build_tables(graph, procs, Machine(cutoff=1))
    middle = clock()
    found = tables.minimum()
    end = clock()
    most = max(map(len, tables.configurations.values()))
    return {"build": middle - start, "search": end - middle, "found": found, "most": most}


def wide_table(clock) -> None:
    """Print the wide space for growing numbers of processes, with two samples per process."""
    print("| P | configurations of a layer, at most | space | exact | states | tables, s | search, s |")
    print("|" + " --- |" * 7)
    for procs in (64, 256, 1024, 4096):
        row = measure_wide(procs, 2 * procs, clock)
        found = row["found"]
        print(
            f"| {procs} | {row['most']} | 10^{len(str(found.space_size)) - 1} | {found.exact} | {found.states:.1e} "
            f"| {row['build']:.2f} | {row['search']:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--procs", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument(
        "--clock", choices=["cpu", "wall"], default="cpu", help="cpu: other work on the machine counts little"
    )
    parser.add_argument(
        "--wide", action="store_true", help="also a space with spatial splits and no least block, to 4,096"
    )
    args = parser.parse_args()
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    print(
        "| network | P | optimum, operations | width | states | space | tables, ms | search, ms | prototype, s | ratio |"
    )
    print("|" + " --- |" * 10)
    for model in MODELS:
        for procs in args.procs:
            row = measure(model, procs, args.batch, args.repeats, clock)
            theirs = published.PASE_SEARCH_SECONDS.get((model, procs), "")
            known = isinstance(theirs, float)
            shown = theirs if known else ("> 240" if theirs is None else "")
            ratio = (
                f"{theirs / row['search']:.0f}" if known else (f"> {240 / row['search']:.0f}" if theirs is None else "")
            )
            found = row["found"]
            digits = len(str(found.space_size)) - 1
            print(
                f"| {model} | {procs} | {found.total:.6e} | {found.width} | {found.states} | 10^{digits} "
                f"| {1e3 * row['build']:.1f} | {1e3 * row['search']:.1f} | {shown} | {ratio} |"
            )
    if args.wide:
        print()
        wide_table(clock)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\nMedian of {args.repeats} runs, {args.clock} time; peak memory {peak:.0f} MiB.")


if __name__ == "__main__":
    main()
