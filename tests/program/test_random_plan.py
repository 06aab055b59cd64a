from __future__ import annotations

from random import Random

from lbpar.graph.builder import GraphBuilder
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.program.lowering import lower
from lbpar.program.random_plan import random_plan


def test_plans_reach_every_loop_of_every_layer_and_are_the_same_again() -> None:
    g = GraphBuilder((8, 8, 4))
    graph = g.build(g.linear(g.flatten(g.relu(g.conv(g.input, 8, 3, pad=1))), 4)).with_loss(CrossEntropy())
    found = [random_plan(graph, 4, 6, Random(seed)) for seed in range(80)]
    assert found == [random_plan(graph, 4, 6, Random(seed)) for seed in range(80)]
    for node in graph.ops:
        loops = node.op.loops(graph.input_shapes(node.name, 4))
        assert {loop for plan in found for loop in plan[node.name]} == set(loops)
        assert {sum(map(len, plan[node.name].values())) for plan in found} >= {1, 2}  # idle axes, too
    assert all(plan.grid.size == 6 and lower(graph, plan, 4).steps for plan in found)


def test_layers_are_computed_again_where_that_is_asked_for_and_never_the_loss() -> None:
    g = GraphBuilder((8,))
    graph = g.build(g.linear(g.relu(g.linear(g.relu(g.input), 4)), 4)).with_loss(CrossEntropy())
    again = {name for seed in range(40) for name in random_plan(graph, 4, 2, Random(seed), lean=True).recompute}
    assert graph.loss is not None
    assert again == {n.name for n in graph.ops} - {graph.loss.name}
    assert not random_plan(graph, 4, 2, Random(0)).recompute
