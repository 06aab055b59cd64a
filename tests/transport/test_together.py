"""Ranks fail together, and start only with the same network and plan."""

from __future__ import annotations

from typing import Any

import pytest

from lbpar.errors import ConfigError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.layout.grid import Grid
from lbpar.program.plan import Plan
from lbpar.transport.together import check_alike
from lbpar.transport.virtual import VirtualWorld


def _network(dilation: int = 1) -> Graph:
    g = GraphBuilder((8, 8, 1))
    return g.build(g.conv(g.input, 2, 3, pad=dilation, dilation=dilation, name="conv"))


def _errors(graphs: list[Graph], plans: list[Plan]) -> list[str | None]:
    def rank(transport: Any) -> str | None:
        try:
            check_alike(transport, {"network": graphs[transport.rank], "plan": plans[transport.rank]})
        except ConfigError as error:
            return str(error)
        return None

    return VirtualWorld(Grid((3,))).run(rank)


def test_same_on_all_ranks() -> None:
    assert _errors([_network() for _ in range(3)], [Plan(Grid((3,)), {"conv": {"N": (0,)}})] * 3) == [None] * 3


def test_one_rank_has_another_network_of_the_same_shapes() -> None:
    errors = _errors([_network(), _network(), _network(2)], [Plan(Grid((3,)))] * 3)
    assert len(set(errors)) == 1 and errors[0] is not None
    assert errors[0].startswith("network: rank 2 has another one than rank 0.")


def test_one_rank_has_another_plan() -> None:
    plans = [Plan(Grid((3,)), {"conv": {loop: (0,)}}) for loop in ("N", "H", "N")]
    errors = _errors([_network()] * 3, plans)
    assert errors[0] is not None and errors == [errors[0]] * 3 and errors[0].startswith("plan: rank 1 ")


def test_functions_without_a_text_of_their_own_are_no_difference() -> None:
    def rank(transport: Any) -> None:
        check_alike(transport, {"thing": object()})

    VirtualWorld(Grid((2,))).run(rank)


def test_a_missing_seed_is_what_to_look_for() -> None:
    def rank(transport: Any) -> None:
        check_alike(transport, {"thing": transport.rank})

    with pytest.raises(ConfigError, match="without a seed"):
        VirtualWorld(Grid((2,))).run(rank)
