"""The papers' cost models, searched: what the command line and the study call.

The models themselves are in :mod:`lbpar.papers`; here they meet the exact search. Results are plain dictionaries that
go to JSON as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

from lbpar.errors import ConfigError
from lbpar.papers import gholami, optcnn, pase
from lbpar.papers.collectives import Link
from lbpar.papers.optcnn_models import optcnn_graph
from lbpar.papers.pase_models import pase_graph
from lbpar.papers.records import LayerRecord
from lbpar.solver.search import Solution


def pase_search(
    model: str, batch: int, procs: int, machine: pase.Machine | None = None
) -> tuple[pase.Tables, Solution]:
    """Tables of one of the prototype's networks and their optimum."""
    tables = pase.build_tables(pase_graph(model, batch), procs, machine)
    return tables, tables.minimum()


def optcnn_search(
    model: str, procs: int, batch_per_device: int = 32, machine: optcnn.Machine | None = None
) -> tuple[optcnn.Graph, optcnn.Tables, Solution]:
    """A network of OptCNN's study under weak scaling: its graph, tables and optimum."""
    graph = optcnn_graph(model)
    tables = optcnn.build_tables(graph, batch_per_device * procs, procs, machine)
    return graph, tables, tables.seconds.minimum()


def price_pase(model_name: str, batch: int, procs: int, machine: pase.Machine | None = None) -> dict[str, Any]:
    """Optimal strategy of a network of PaSE's prototype on its cost model.

    Parameters
    ----------
    model_name : ``pase-alexnet``, ``pase-inception-v3`` or ``pase-resnet101``.
    batch, procs : global mini-batch and number of processes, any positive numbers.
    machine : the prototype's unless given.

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
    machine = machine or pase.Machine()
    rate = machine.tflops * 1e12
    graph = pase_graph(model_name, batch)
    tables, found = pase_search(model_name, batch, procs, machine)
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
    layers: Sequence[LayerRecord],
    batch: int,
    grid: tuple[int, int] | None = None,
    procs: int | None = None,
    link: Link = gholami.CORI,
    *,
    scope: Literal["all", "fc"] = "all",
    domain: Collection[str] = (),
    images: int = gholami.IMAGES,
) -> dict[str, Any]:
    """Communication seconds of a network on a Pr x Pc grid by equations (8) and (9) of Gholami et al.

    Parameters
    ----------
    layers : records of the layers with weights.
    batch : global mini-batch, samples.
    grid : (Pr, Pc); None: the best grid of ``procs`` processes. One of the two must be given.
    link : seconds per message and per word (4 bytes), with the form of the latency.
    scope : "all" puts every layer on the grid; "fc" only the fully connected ones, convolutions being pure batch.
    domain : names of layers whose Pr processes split space instead of weights (equation (9)).
    images : samples of an epoch.

    Returns
    -------
    dict
        Seconds per step and per epoch of the chosen grid, by term and by layer, and of every other grid of as many processes,
        cheapest first.

    Raises
    ------
    ConfigError
        Neither grid nor procs, a number that is not positive, an unknown layer in ``domain``.
    """
    if not layers:
        raise ConfigError("gholami: the network has no layer with weights; nothing to price")
    if grid is None and procs is None:
        raise ConfigError("gholami: neither a grid nor a number of processes was given; give one, for example 16x32")
    if grid is not None and min(grid) < 1:
        raise ConfigError(f"gholami: got grid {grid[0]}x{grid[1]}; expected two positive numbers")
    count = grid[0] * grid[1] if grid is not None else int(procs or 0)
    if count < 1 or batch < 1 or images < 1:
        raise ConfigError(f"gholami: got {count} processes, batch {batch}, {images} images; expected positive numbers")
    if procs is not None and procs != count:
        raise ConfigError(f"gholami: grid {grid} has {count} processes, not {procs}; give one of the two")
    unknown = set(domain) - {x.name for x in layers}
    if unknown:
        raise ConfigError(f"gholami: no layer {min(unknown)!r}; layers are {', '.join(x.name for x in layers)}")

    on = partial(gholami.fc_only if scope == "fc" else gholami.one_grid, layers)

    def seconds(pr: int, pc: int) -> gholami.Terms:
        return gholami.by_layer(layers, batch, on(pr, pc), domain, link)

    ranking = sorted(((seconds(pr, pc).total, pr, pc) for pr, pc in gholami.grids(count)))
    pr, pc = grid or ranking[0][1:]
    steps = images / batch
    rows = []
    for x in layers:
        shape = on(pr, pc)[x.name]
        terms = gholami.layer_terms(x, batch, *shape, x.name in domain, link)
        rows.append({"name": x.name, "kind": x.kind, "grid": list(shape), **_seconds(terms)})
    terms = seconds(pr, pc)
    return {
        "cost": "gholami",
        "equation": "9" if domain else "8",
        "batch": batch,
        "procs": count,
        "grid": [pr, pc],
        **asdict(link),
        "scope": scope,
        "unit": "seconds",
        "step": _seconds(terms),
        "epoch": {k: v * steps for k, v in _seconds(terms).items()},
        "batch_parallel_ratio": seconds(1, count).total / terms.total if terms.total else 1.0,
        "layers": rows,
        "grids": [{"grid": [a, b], "step": s, "epoch": s * steps} for s, a, b in ranking],
    }


def _seconds(terms: gholami.Terms) -> dict[str, float]:
    return {**asdict(terms), "total": terms.total}
