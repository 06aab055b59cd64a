"""Inline layers: each op knows its own fields."""

from __future__ import annotations

import pytest

from lbpar.config.model import InlineModel
from lbpar.config.run_file import parse_run
from lbpar.errors import ConfigError


def model(layers: str) -> InlineModel:
    m = parse_run(f"model: {{input: [8, 8, 1], layers: {layers}}}\ntrain: {{batch: 2}}").model
    assert isinstance(m, InlineModel)
    return m


def test_every_op_of_the_contract() -> None:
    m = model(
        """[
        {op: conv, name: a, filters: 4, kernel: [3, 1], stride: 1, pad: [[1, 0], 0], dilation: 1, groups: 1, bias: false},
        {op: norm}, {op: relu},
        {op: conv_transpose, filters: 4, kernel: 2, stride: 2, output_pad: 1},
        {op: leaky_relu, slope: 0.1}, {op: sigmoid},
        {op: max_pool, kernel: 3, stride: 2, pad: 1, ceil_mode: true},
        {op: avg_pool, kernel: 2, count_include_pad: false},
        {op: upsample, factor: [2, 1]}, {op: upsample, from: avg_pool1, name: b},
        {op: add, from: [b, b]}, {op: multiply, from: [add1, b]}, {op: concat, from: [b, add1, multiply1]},
        {op: dropout, rate: 0.2}, {op: global_avg_pool}, {op: flatten}, {op: linear, features: 10, init: glorot},
        {op: tanh, scale: 1.2}]"""
    )
    conv = m.layers[0]
    assert (conv.kernel, conv.pad) == ((3, 1), ((1, 0), 0))  # type: ignore[union-attr]
    names = [(name, sources) for name, sources, _ in m.resolved()]
    assert names[0] == ("a", ("input",))
    assert names[1] == ("norm1", ("a",))
    assert names[8] == ("upsample1", ("avg_pool1",))
    assert names[9] == ("b", ("avg_pool1",))
    assert names[12] == ("concat1", ("b", "add1", "multiply1"))
    assert names[-2:] == [("linear1", ("flatten1",)), ("tanh1", ("linear1",))]


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ("[]", "expected at least 1 entries"),
        ("[{op: conf, filters: 2, kernel: 3}]", "model.layers[0]: got fields (op, filters, kernel), whose 'op' is 'conf': did"),
        ("[{op: conf}]", "did you mean 'conv'?"),
        ("[{filters: 2}]", "model.layers[0]: got fields (filters), expected a field 'op'"),
        ("[{op: conv, filters: 2, kernal: 3}]", "model.layers[0].kernal: unknown field (got 3); did you mean 'kernel'?"),
        ("[{op: conv, filters: 2, kernal: 3}]", "model.layers[0].kernel: missing; it is required"),
        ("[{op: relu, slope: 1}]", "model.layers[0].slope: unknown field (got 1); Known: name, from, share, op"),
        ("[{op: conv, filters: 2, kernel: 0}]", "model.layers[0].kernel: got 0, expected a whole number of at least 1"),
        ("[{op: conv, filters: 2, kernel: 3, pad: [1, -1]}]", "model.layers[0].pad: got [1, -1], expected a whole"),
        ("[{op: conv, filters: 2, kernel: 3, pad: [[1, 2, 3]]}]", "[before, after]"),
        ("[{op: dropout, rate: 1}]", "model.layers[0].rate: got 1, expected less than 1"),
        ("[{op: relu, name: a}, {op: add, from: [a, b]}]", "from: got 'b', expected an earlier layer: input, a"),
        ("[{op: relu, name: a}, {op: add}]", "(add 'add1'): got 1 input, expected two or more"),
        ("[{op: relu, name: a}, {op: relu, from: [a, input]}]", "got 2 inputs in 'from', expected one"),
        ("[{op: relu, name: a}, {op: relu, name: a}]", "the name 'a' is already taken"),
        ("[{op: relu, from: [1]}]", "model.layers[0].from: got [1], expected the name of a layer"),
        ("3", "model.layers: got 3, expected a list"),
    ],
)  # fmt: skip
def test_refused(layers: str, words: str) -> None:
    with pytest.raises(ConfigError) as e:
        model(layers)
    assert words in str(e.value)
