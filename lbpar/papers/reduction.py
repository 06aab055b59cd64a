"""Node and edge elimination of OptCNN (Jia et al., ICML 2018): how far a graph of layers folds up.

A node with one edge in and one edge out is minimised out and leaves an edge; parallel edges are added. Both keep
the optimum. What is left, K nodes, is enumerated. AlexNet, VGG, Inception-v3 and ResNet fold to K = 2.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


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
