"""Node and edge elimination of OptCNN (Jia et al., ICML 2018): how far a graph of layers folds up.

A node with one edge in and one edge out is minimised out and leaves an edge; parallel edges are added. Both keep
the optimum. What is left, K nodes, is enumerated. AlexNet, VGG, Inception-v3 and ResNet fold to K = 2.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from numpy.typing import ArrayLike

from lbpar.solver.exact import solve
from lbpar.solver.factors import Problem
from lbpar.solver.search import EdgeTable, compile_problem

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Reduction:
    """What folding a graph gave.

    ``k`` nodes (``remaining``) are left after ``eliminated`` (in order) went; ``combinations`` of their configurations
    were enumerated; ``choice`` and ``total`` are optimal for the whole graph.
    """

    k: int
    remaining: tuple
    eliminated: tuple
    combinations: int
    choice: dict
    total: float


def fold(nodes: list[Name], edges: list[tuple[Name, Name]]) -> tuple[list[Name], list[Name]]:
    """Apply node and edge elimination until neither applies: the nodes that remain, and those that went, in order.

    Only the shape of the graph matters: edges run from producer to consumer, parallel edges count once.
    """
    out: dict[Name, set[Name]] = {n: set() for n in nodes}
    into: dict[Name, set[Name]] = {n: set() for n in nodes}
    for a, b in edges:
        out[a].add(b)
        into[b].add(a)
    gone: list[Name] = []
    ready = list(nodes)
    while ready:
        again: list[Name] = []
        for n in ready:
            if n not in out or len(out[n]) != 1 or len(into[n]) != 1:
                continue
            (before,), (after,) = into.pop(n), out.pop(n)
            out[before].remove(n)
            into[after].remove(n)
            out[before].add(after)  # a parallel edge merges here
            into[after].add(before)
            gone.append(n)
            again += [before, after]
        ready = again
    return [n for n in nodes if n in out], gone


def eliminate_to_k(
    node_costs: Mapping[Name, ArrayLike], edges: Mapping[tuple[Name, Name], ArrayLike | EdgeTable]
) -> Reduction:
    """Fold the graph, then enumerate the configurations of the K nodes left.

    Parameters
    ----------
    node_costs, edges : as for :func:`lbpar.solver.search.minimise`; an edge (u, v) runs from producer u to consumer v.

    Raises
    ------
    PlanError
        As :func:`lbpar.solver.search.minimise`.
    """
    names, problem, workshop = compile_problem(node_costs, edges)
    remaining, gone = fold(names, list(edges))
    number = {n: i for i, n in enumerate(names)}
    # Minimising out the rest, one node after the other, is the enumeration of all their combinations, done in sums.
    outcome = solve(Problem(problem.unary, problem.factors), [number[n] for n in [*gone, *remaining]], workshop)
    combinations = 1
    for n in remaining:
        combinations *= problem.unary[number[n]].size
    choice = dict(zip(names, outcome.choice, strict=True))
    return Reduction(len(remaining), tuple(remaining), tuple(gone), combinations, choice, outcome.total)
