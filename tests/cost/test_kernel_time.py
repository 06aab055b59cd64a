"""Operations, bytes and matrix shapes of local kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lbpar.cost.kernel_time import (
    active_processes,
    flops,
    held,
    kernel_seconds,
    local_extents,
    local_size,
    matrix_shape,
    plain_name,
    taps,
    touched,
)
from lbpar.cost.machine import find_machine
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.loops import Kernel
from lbpar.layout.grid import Grid
from tests.cost.nets import even

MACHINE = find_machine("perlmutter-a100")


def test_small_blocks_run_slower() -> None:
    kernel = even()["c2"].op.forward(((64, 8, 8, 8),), True)[0]
    whole = dict(kernel.loops)
    tenth = {**whole, "F": 1}
    full, part = (float(kernel_seconds(MACHINE, kernel, x, "float32")) for x in (whole, tenth))
    assert part > full / 8


def conv(**options: object) -> Kernel:
    """The forward kernel of a 3 x 3 convolution, 12 x 10 pixels, 6 channels, 8 filters, batch 4."""
    g = GraphBuilder((12, 10, 6))
    return g.build(g.conv(g.input, 8, 3, pad=1, name="c", **options))["c"].op.forward(((4, 12, 10, 6),), True)[0]


def test_local_extents_are_those_of_the_largest_block() -> None:
    extents = local_extents(conv(), Grid((2, 3)), {"N": (0,), "H": (1,), "F": ()})
    assert extents == {"N": 2, "F": 8, "C": 6, "H": 4, "W": 10}
    assert local_extents(conv(), Grid((8,)), {"N": (0,)})["N"] == 1


def test_a_block_needs_its_ghosts_but_no_more_than_there_is() -> None:
    kernel = conv()
    x, height = kernel.reads[0], kernel.reads[0].dims[1]
    extents = dict(kernel.loops)
    assert held(height, {**extents, "H": 4}, extents) == 6  # a row above and a row below
    assert held(height, extents, extents) == 12
    assert held(height, {**extents, "H": 0}, extents) == 0
    assert local_size(x, {**extents, "N": 2, "H": 4}, extents) == 2 * 6 * 10 * 6


def test_flops_and_bytes_of_a_block() -> None:
    kernel = conv(bias=False)
    block = {**dict(kernel.loops), "N": 2, "F": 4}
    assert kernel.flops == 2 * (4 * 12 * 10) * 8 * (6 * 9)
    assert flops(kernel, block) == kernel.flops / 4
    assert touched(kernel, block, "float32") == 4 * (2 * 12 * 10 * 6 + 4 * 9 * 6 + 2 * 12 * 10 * 4)
    assert touched(kernel, block, "float64") == 2 * touched(kernel, block, "float32")


@pytest.mark.parametrize(
    ("product", "shape"),
    [("forward", (480, 8, 54)), ("backward_data", (480, 6, 72)), ("backward_weights", (54, 8, 480))],
)
def test_convolutions_are_products_of_matrices(product: str, shape: tuple[int, int, int]) -> None:
    kernel = replace(conv(), product=product)
    assert taps(kernel) == 9
    assert matrix_shape(kernel, dict(kernel.loops)) == shape


def test_parts_and_fused_kernels_cost_what_the_product_inside_costs() -> None:
    assert plain_name("conv_relu_forward") == plain_name("conv_forward_interior") == "conv_forward"
    assert plain_name("conv_backward_weights_bias") == "conv_backward_weights"


def test_processes_without_a_block_repeat_nothing() -> None:
    """A loop of extent 4 in 8 parts keeps 4 of 16 processes' blocks, twice; axes that split no loop make copies."""
    kernel = conv()
    assert active_processes(kernel, {"N": 8}, 16) == 8
    assert active_processes(kernel, {"N": 2, "H": 3}, 12) == 12


def test_a_kernel_takes_as_long_as_memory_or_arithmetic_and_the_start() -> None:
    relu = GraphBuilder((12, 10, 6))
    kernel = relu.build(relu.relu(relu.input, name="r"))["r"].op.forward(((4, 12, 10, 6),), True)[0]
    c = MACHINE.file.compute
    moved = 2 * 4 * 12 * 10 * 6 * 4
    speed = c.speeds.get("relu_forward", c.memory_bandwidth)
    assert kernel_seconds(MACHINE, kernel, dict(kernel.loops), "float32") == pytest.approx(moved / speed + c.overhead)
    big = conv()
    local = {**dict(big.loops), "N": 4000}
    rate = MACHINE.rate("conv_forward", 480_000, 8, 54, "float32", 9)
    memory_bound = touched(big, local, "float32") / c.memory_bandwidth
    wanted = max(memory_bound, big.flops * 1000 / rate) + c.overhead
    assert kernel_seconds(MACHINE, big, local, "float32") == pytest.approx(wanted)
