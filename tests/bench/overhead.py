"""Python's share of a step: a network of 160 and more operations on tiny tensors, less the time inside compiled kernels.

    python tests/bench/overhead.py [--network resnet50] [--steps 40]

The kernels' time is that of the same library calls of one step, made again one after the other and nothing else. The
table shows medians over steps, and the calls and steps behind them; start-up is split into its parts.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))
START = time.perf_counter()

import numpy as np

from lbpar.engine.native.passes import Native
from lbpar.engine.onednn.engine import OneDnnEngine
from lbpar.engine.onednn.library import Primitive
from lbpar.graph.graph import TARGET
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.models.registry import build_model
from lbpar.program.plan import Plan
from lbpar.runtime.optim.rules import SGD
from lbpar.runtime.worker import Worker
from lbpar.transport.single import SingleTransport


class Recorder:
    """Stands in for the library of compiled passes: notes each call."""

    def __init__(self, lib: Any, calls: list[Any]) -> None:
        self.lib, self.calls = lib, calls

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.lib, name)

        def call(*arguments: Any) -> Any:
            self.calls.append((function, arguments))
            return function(*arguments)

        return call


def record(engine: OneDnnEngine, calls: list[Any], keep: list[Any]) -> None:
    """Note every kernel that the engine runs from now on, and keep the memory that the calls name."""
    original = Primitive.__call__

    def call(self: Primitive, *addresses: Any) -> None:
        original(self, *addresses)
        calls.append((self._execute, (self._prim, self.context.stream, self._count, self._args)))
        keep.append(addresses)

    Primitive.__call__ = call  # type: ignore[method-assign]
    if engine.native is not None:
        engine.native = Native(engine.native.path, engine.native.threads)  # which has not looked up any function yet
        engine.native.lib = Recorder(engine.native.lib, calls)


def replay(calls: list[Any]) -> float:
    start = time.thread_time()
    for function, arguments in calls:
        function(*arguments)
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    marks = [("imports", time.perf_counter() - START)]

    def mark(name: str, since: float) -> float:
        now = time.perf_counter()
        marks.append((name, now - since))
        return now

    t = time.perf_counter()
    graph = build_model(args.network, classes=10, input=(32, 32, 3), width=0.0625).with_loss(LOSSES["cross_entropy"]())
    engine = OneDnnEngine(np.float32, 1)
    t = mark("network, engine", t)
    worker = Worker(graph, Plan(Grid()), engine, SingleTransport())
    executor = worker.executor(1)
    t = mark("lowering, weights, binding", t)
    sgd = SGD(0.01, momentum=0.9)
    sgd.engine = engine
    executor.on_update = lambda p, g: sgd.step(p, g, 0.01)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((1, 32, 32, 3), dtype=np.float32), rng.integers(0, 10, (1,))
    feeds = {b: y if s == TARGET else x for b, s in executor.program.feeds.items()}
    worker.run(feeds, 1)
    mark("first step", t)
    times = []
    for _ in range(args.steps):
        start = time.thread_time()
        worker.run(feeds, 1)
        times.append(time.thread_time() - start)

    calls: list[Any] = []
    keep: list[Any] = []
    gc.disable()
    record(engine, calls, keep)
    worker.run(feeds, 1)
    kernels = [replay(calls) for _ in range(args.steps)]
    step, inside = median(times) * 1e3, median(kernels) * 1e3
    print(f"{args.network}: {len(graph.nodes)} nodes, {len(executor.program.steps)} steps, {len(calls)} kernel calls")
    print(f"step {step:.2f} ms, kernels {inside:.2f} ms, Python {step - inside:.2f} ms (least {min(times) * 1e3:.2f})")
    print("start-up: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in marks))


if __name__ == "__main__":
    main()
