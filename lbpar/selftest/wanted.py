"""The tiled kernels that the parts of a self-test ask for: which they are follows from shapes, types and the card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lbpar.config.run_file import load_run_file
from lbpar.engine.cupy.names import GROUPS
from lbpar.engine.cupy.tiles import Card
from lbpar.graph.graph import Graph
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.runtime.executor import Executor, run_lockstep
from lbpar.selftest.listing import Listing
from lbpar.selftest.networks import BATCH, RANKS, RUN, networks, tried_plans
from lbpar.selftest.speeds import NETWORKS, speed_graph
from lbpar.train.setup import build_graph, build_plan
from lbpar.transport.base import Transport
from lbpar.transport.single import SingleTransport
from lbpar.transport.virtual import VirtualWorld


def launched(
    cards: Sequence[Card], ways: Iterable[Mapping[str, Any]], plans: int = 0
) -> list[dict[str, dict[str, int]]]:
    """Kernels that are in no group of `GROUPS`, for each card: per file, name expressions with the bytes of shared memory that they ask for.

    Parameters
    ----------
    cards : sequence of Card
    ways : iterable of mapping
        Options of `get_engine`; those of cuDNN do not matter: its place is taken by our kernels.
    plans : int
        Random plans on simulated ranks for each of the small networks, beside one that splits space.
    """
    found: list[dict[tuple[str, str], int]] = [{} for _ in cards]
    for dtype, tf32 in dict.fromkeys((way["dtype"], way.get("tf32", False)) for way in ways):
        wide = dtype in ("float32", "float64")
        engine = Listing(cards, dtype if wide else "float32", tf32, None if wide else dtype)
        for graph in networks().values():
            _step(engine, graph, BATCH, Plan(Grid()))
            for plan in tried_plans(graph, plans):
                _step(engine, graph, BATCH, plan)
        run = load_run_file(RUN)
        for procs in (1, *RANKS):
            _step(engine, graph := build_graph(run), run.train.batch, build_plan(run, graph, procs))
        for network, batch in NETWORKS if dtype != "float64" else ():
            _step(engine, speed_graph(network), batch, Plan(Grid()))
        for all_, some in zip(found, engine.launched, strict=True):
            all_ |= some
    known = {(file, name) for file, groups in GROUPS.items() for group in groups for name in group}
    return [_by_file({kernel: shared for kernel, shared in some.items() if kernel not in known}) for some in found]


def _by_file(kernels: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    files: dict[str, dict[str, int]] = {}
    for (file, name), shared in kernels.items():
        files.setdefault(file, {})[name] = shared
    return files


def _step(engine: Listing, graph: Graph, batch: int, plan: Plan) -> None:
    """A training step less its update, whose kernels are the same for all."""
    program = lower(graph, plan, batch, rims=engine.rims)
    alone: list[Transport] = [SingleTransport()]
    transports = alone if plan.grid.size == 1 else list(VirtualWorld(plan.grid, strict=False).transports)
    executors, feeds = [], []
    for transport in transports:
        rank = transport.rank
        state = {name: engine.empty(layout.local_shape(rank)) for name, layout in program.params.items()}
        executors.append(Executor(program, engine, transport, state))
        held = {name: program.buffers[name] for name in program.feeds}
        feeds.append({n: np.zeros(b.layout.local_shape(rank), b.dtype or engine.dtype) for n, b in held.items()})
    run_lockstep(executors, feeds)
