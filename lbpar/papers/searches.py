"""The papers' cost models, searched: what the command line and the study call.

The models themselves are in :mod:`lbpar.papers`; here they meet the exact search. Results are plain dictionaries that
go to JSON as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lbpar.errors import ConfigError
from lbpar.papers import gholami, optcnn, pase
from lbpar.papers.optcnn_models import optcnn_graph
from lbpar.papers.pase_models import pase_graph
from lbpar.papers.records import LayerRecord
from lbpar.solver.search import Solution


def pase_search(model: str, batch: int, procs: int) -> tuple[pase.Tables, Solution]:
    """Tables of one of the prototype's networks and their optimum."""
    tables = pase.build_tables(pase_graph(model, batch), procs)
    return tables, tables.minimum()


def optcnn_search(model: str, procs: int) -> tuple[optcnn.Graph, optcnn.Tables, Solution]:
    """A network of OptCNN's study, 32 samples per device: its graph, tables and optimum."""
    graph = optcnn_graph(model)
    tables = optcnn.build_tables(graph, 32 * procs, procs)
    return graph, tables, tables.seconds.minimum()


def price_pase(model_name: str, batch: int, procs: int) -> dict[str, Any]:
    """Optimal strategy of a network of PaSE's prototype on its cost model.

    Parameters
    ----------
    model_name : ``pase-alexnet``, ``pase-inception-v3`` or ``pase-resnet101``.
    batch, procs : global mini-batch and number of processes, any positive numbers.

    Returns
    -------
    dict
        ``total`` in operations and ``seconds`` at the device's rate, both for the optimum; the same for ``data_parallel``
        (every vertex splits its batch as far as it can); the search's ``exact``, ``bound``, ``width``, ``states``,
        ``space_size``; and ``layers``: name, kind, loops, configuration, operations, number of configurations.

    Raises
    ------
    ConfigError
        Unknown model, or a number that is not positive.
    """
    machine = pase.Machine()
    rate = machine.tflops * 1e12
    graph = pase_graph(model_name, batch)
    tables, found = pase_search(model_name, batch, procs)
    layers = []
    for name, vertex in graph.layers.items():
        rows, chosen = tables.configurations[name], found.choice[name]
        ways = dict(zip(vertex.loops, map(int, rows[chosen]), strict=True))
        cost = float(tables.nodes[name][chosen])
        layers.append(
            {"name": name, "kind": vertex.kind, "configuration": ways, "operations": cost, "configurations": len(rows)}
        )
    data = tables.total({n: _most_batch(rows) for n, rows in tables.configurations.items()})
    return {
        "cost": "pase",
        "model": model_name,
        "batch": batch,
        "procs": procs,
        "machine": asdict(machine),
        "unit": "operations (a multiply-add counts once)",
        "total": found.total,
        "seconds": found.total / rate,
        "data_parallel": {"total": data, "seconds": data / rate, "ratio": data / found.total},
        **{k: getattr(found, k) for k in ("exact", "bound", "gap", "width", "states", "space_size")},
        "layers": layers,
    }


def _most_batch(rows: pase.Ints) -> int:
    """The configuration that splits only the first loop, the batch, as often as possible."""
    alone = (rows[:, 1:] == 1).all(axis=1)
    return int((rows[:, 0] * alone).argmax())


def price_gholami(
    layers: Sequence[LayerRecord], batch: int, grid: tuple[int, int] | None = None, procs: int | None = None
) -> dict[str, Any]:
    """Communication seconds of a network on a Pr x Pc grid by equation (8) of Gholami et al., on Cori KNL.

    Parameters
    ----------
    layers : records of the layers with weights.
    batch : global mini-batch, samples.
    grid : (Pr, Pc); None: the best grid of ``procs`` processes. One of the two must be given.

    Returns
    -------
    dict
        Seconds per step and per epoch of the chosen grid, by term and by layer, and of every other grid of as many processes,
        cheapest first.

    Raises
    ------
    ConfigError
        Neither grid nor procs, a number that is not positive.
    """
    if not layers:
        raise ConfigError("gholami: the network has no layer with weights; nothing to price")
    if grid is None and procs is None:
        raise ConfigError("gholami: neither a grid nor a number of processes was given; give one, for example 16x32")
    if grid is not None and min(grid) < 1:
        raise ConfigError(f"gholami: got grid {grid[0]}x{grid[1]}; expected two positive numbers")
    count = grid[0] * grid[1] if grid is not None else int(procs or 0)
    if count < 1 or batch < 1:
        raise ConfigError(f"gholami: got {count} processes, batch {batch}; expected positive numbers")
    if procs is not None and procs != count:
        raise ConfigError(f"gholami: grid {grid} has {count} processes, not {procs}; give one of the two")

    def seconds(pr: int, pc: int) -> gholami.Terms:
        return gholami.by_layer(layers, batch, gholami.one_grid(layers, pr, pc))

    ranking = sorted(((seconds(pr, pc).total, pr, pc) for pr, pc in gholami.grids(count)))
    pr, pc = grid or ranking[0][1:]
    steps, terms = gholami.IMAGES / batch, seconds(pr, pc)
    rows = [
        {"name": x.name, "kind": x.kind, "grid": [pr, pc], **_seconds(gholami.layer_terms(x, batch, pr, pc))}
        for x in layers
    ]
    return {
        "cost": "gholami",
        "equation": "8",
        "batch": batch,
        "procs": count,
        "grid": [pr, pc],
        **asdict(gholami.CORI),
        "unit": "seconds",
        "step": _seconds(terms),
        "epoch": {k: v * steps for k, v in _seconds(terms).items()},
        "batch_parallel_ratio": seconds(1, count).total / terms.total if terms.total else 1.0,
        "layers": rows,
        "grids": [{"grid": [a, b], "step": s, "epoch": s * steps} for s, a, b in ranking],
    }


def _seconds(terms: gholami.Terms) -> dict[str, float]:
    return {**asdict(terms), "total": terms.total}
