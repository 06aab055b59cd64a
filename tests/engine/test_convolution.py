from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine import convolution
from lbpar.engine.base import LocalWindow
from tests.engine import oracles
from tests.engine.oracles import close, first, last

# samples, spatial, C, F, kernel, stride, dilation, pad, groups
CASES = {
    "3x3": (2, (9, 7), 5, 6, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "1x1": (3, (5, 6), 7, 4, (1, 1), (1, 1), (1, 1), (0, 0), 1),
    "1x1 stride 2": (2, (7, 6), 4, 8, (1, 1), (2, 2), (1, 1), (0, 0), 1),
    "7x7 stride 2": (2, (17, 15), 3, 8, (7, 7), (2, 2), (1, 1), (3, 3), 1),
    "stride 3 and 4": (2, (14, 13), 3, 2, (2, 5), (3, 4), (1, 1), (0, 2), 1),
    "stride above kernel": (1, (11, 11), 2, 3, (2, 1), (4, 3), (1, 1), (1, 0), 1),
    "dilated": (2, (13, 11), 3, 4, (3, 2), (1, 1), (3, 2), (3, 1), 1),
    "dilated, strided": (1, (17, 18), 2, 3, (4, 3), (2, 4), (3, 2), (2, 3), 1),
    "stride equals dilation": (1, (12, 13), 2, 2, (3, 3), (2, 3), (2, 3), (1, 4), 1),
    "groups": (2, (8, 7), 6, 9, (3, 3), (1, 2), (1, 1), (1, 1), 3),
    "depthwise": (2, (9, 8), 6, 6, (3, 3), (2, 1), (1, 2), (1, 1), 6),
    "depthwise, 2 filters each": (2, (7, 7), 4, 8, (3, 3), (1, 1), (1, 1), (1, 1), 4),
    "3-D": (2, (6, 5, 7), 3, 4, (3, 2, 3), (1, 1, 2), (1, 2, 1), (1, 0, 1), 1),
    "3-D depthwise": (1, (5, 5, 5), 4, 4, (3, 3, 3), (1, 2, 1), (1, 1, 1), (1, 1, 1), 4),
    "1-D": (3, (19,), 4, 5, (4,), (3,), (2,), (2,), 1),
    "1-D groups": (2, (12,), 4, 6, (3,), (1,), (1,), (1,), 2),
    "one channel": (2, (8, 8), 1, 5, (5, 5), (1, 1), (1, 1), (2, 2), 1),
    "kernel reaches past both ends": (2, (2, 3), 3, 4, (5, 7), (1, 1), (1, 1), (2, 3), 1),
}


def windows(kernel, stride, dilation, pad):
    return tuple(LocalWindow(*four) for four in zip(kernel, stride, dilation, pad, strict=True))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_matches_pytorch(engine, dtype, rng, case):
    torch = pytest.importorskip("torch")
    samples, spatial, channels, features, kernel, stride, dilation, pad, groups = case
    x = rng.standard_normal((samples, *spatial, channels)).astype(dtype)
    w = rng.standard_normal((features, *kernel, channels // groups)).astype(dtype)
    b = rng.standard_normal(features).astype(dtype)
    tx, tw = first(x), first(w)
    convolve = getattr(torch.nn.functional, f"conv{len(spatial)}d")
    ty = convolve(tx, tw, torch.tensor(b).double(), stride, pad, dilation, groups)
    dy = rng.standard_normal(last(ty).shape).astype(dtype)
    ty.backward(torch.tensor(np.moveaxis(dy, -1, 1)).double())

    win = windows(kernel, stride, dilation, pad)
    close(engine.conv_forward(x, w, b, win, groups, ty.shape[2:]), last(ty), dtype)
    close(engine.conv_forward(x, w, None, win, groups, ty.shape[2:]), last(ty) - b, dtype)
    close(engine.conv_backward_data(dy, w, win, groups, spatial), last(tx.grad), dtype)
    close(engine.conv_backward_weights(x, dy, win, groups), last(tw.grad), dtype)


@pytest.mark.parametrize("seed", range(30))
def test_local_windows_match_plain_loops(engine, dtype, seed):
    """Blocks of a split tensor: crops, pads of any size and outputs that stop early or reach far past the end."""
    rng = np.random.default_rng(seed)
    dims = int(rng.integers(1, 4))
    groups = int(rng.integers(1, 4))
    spatial = tuple(map(int, rng.integers(1, 6, dims)))
    out = tuple(map(int, rng.integers(1, 5, dims)))
    win = tuple(
        LocalWindow(int(rng.integers(1, 4)), int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.integers(-3, 6)))
        for _ in range(dims)
    )
    kernel = tuple(dim.kernel for dim in win)
    x = rng.standard_normal((2, *spatial, groups * int(rng.integers(1, 3)))).astype(dtype)
    w = rng.standard_normal((groups * int(rng.integers(1, 3)), *kernel, x.shape[-1] // groups)).astype(dtype)
    b = rng.standard_normal(len(w)).astype(dtype)
    dy = rng.standard_normal((2, *out, len(w))).astype(dtype)
    dx, dw = oracles.conv_gradients(x, w, dy, win, groups)
    close(engine.conv_forward(x, w, b, win, groups, out), oracles.conv(x, w, b, win, groups, out), dtype)
    close(engine.conv_backward_data(dy, w, win, groups, spatial), dx, dtype)
    close(engine.conv_backward_weights(x, dy, win, groups), dw, dtype)


@pytest.mark.parametrize("pad", [(9, 0), (-9, 0), (0, -5), (40, -40)])
def test_windows_that_miss_the_input_give_the_bias(engine, dtype, rng, pad):
    win = windows((3, 3), (1, 2), (1, 1), pad)
    x = rng.standard_normal((2, 4, 5, 3)).astype(dtype)
    w = rng.standard_normal((4, 3, 3, 3)).astype(dtype)
    b = rng.standard_normal(4).astype(dtype)
    dy = rng.standard_normal((2, 2, 2, 4)).astype(dtype)
    dx, dw = oracles.conv_gradients(x, w, dy, win, 1)
    close(engine.conv_forward(x, w, b, win, 1, (2, 2)), oracles.conv(x, w, b, win, 1, (2, 2)), dtype)
    close(engine.conv_backward_data(dy, w, win, 1, (4, 5)), dx, dtype)
    close(engine.conv_backward_weights(x, dy, win, 1), dw, dtype)


EMPTY = {  # samples, spatial, C, F, out
    "no samples": (0, (4, 5), 3, 2, (4, 5)),
    "no channels": (2, (4, 5), 0, 2, (4, 5)),
    "no filters": (2, (4, 5), 3, 0, (4, 5)),
    "no input rows": (2, (0, 5), 3, 2, (2, 5)),
    "no output rows": (2, (4, 5), 3, 2, (0, 5)),
    "nothing in, nothing out": (2, (0, 5), 3, 2, (0, 0)),
}


@pytest.mark.parametrize("case", EMPTY.values(), ids=EMPTY.keys())
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1)])
def test_empty_blocks(engine, dtype, rng, case, kernel):
    samples, spatial, channels, features, out = case
    win = windows(kernel, (1, 1), (1, 1), (kernel[0] // 2,) * 2)
    x = rng.standard_normal((samples, *spatial, channels)).astype(dtype)
    w = rng.standard_normal((features, *kernel, channels)).astype(dtype)
    b = rng.standard_normal(features).astype(dtype)
    dy = rng.standard_normal((samples, *out, features)).astype(dtype)
    close(engine.conv_forward(x, w, b, win, 1, out), oracles.conv(x, w, b, win, 1, out), dtype)
    close(engine.conv_forward(x, w, None, win, 1, out), oracles.conv(x, w, None, win, 1, out), dtype)
    close(engine.conv_backward_data(dy, w, win, 1, spatial), np.zeros(x.shape), dtype)
    close(engine.conv_backward_weights(x, dy, win, 1), np.zeros(w.shape), dtype)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rows", [1, 5, 8, 60])
def test_blocks_of_unrolled_windows_join_seamlessly(monkeypatch, rng, groups, rows):
    monkeypatch.setattr(convolution, "BLOCK_BYTES", 1)
    monkeypatch.setattr(convolution, "MIN_ROWS", rows)
    win = windows((3, 2), (2, 1), (1, 2), (1, 1))
    x, w = rng.standard_normal((3, 9, 8, 4)), rng.standard_normal((6, 3, 2, 4 // groups))
    dy = rng.standard_normal((3, 5, 8, 6))
    dx, dw = oracles.conv_gradients(x, w, dy, win, groups)
    close(convolution.forward(x, w, None, win, groups, (5, 8)), oracles.conv(x, w, None, win, groups, (5, 8)), x.dtype)
    close(convolution.backward_data(dy, w, win, groups, (9, 8)), dx, x.dtype)
    close(convolution.backward_weights(x, dy, win, groups), dw, x.dtype)


def test_transposed_convolution_is_backward_data(engine, dtype, rng):
    torch = pytest.importorskip("torch")
    x = rng.standard_normal((2, 4, 5, 6)).astype(dtype)
    w = rng.standard_normal((6, 3, 4, 2)).astype(dtype)  # (C_in, kH, kW, F/groups), groups 2
    ty = torch.nn.functional.conv_transpose2d(first(x), first(w), None, (2, 3), (1, 1), (1, 0), 2)
    win = windows((3, 4), (2, 3), (1, 1), (1, 1))
    close(engine.conv_backward_data(x, w, win, 2, ty.shape[2:]), last(ty), dtype)


def test_arguments_are_left_alone(engine, dtype, rng):
    win = windows((3, 3), (1, 1), (1, 1), (1, 1))
    x, w, dy = (rng.standard_normal(s).astype(dtype) for s in ((2, 5, 5, 4), (3, 3, 3, 4), (2, 5, 5, 3)))
    before = [a.copy() for a in (x, w, dy)]
    engine.conv_forward(x, w, None, win, 1, (5, 5))
    engine.conv_backward_data(dy, w, win, 1, (5, 5))
    engine.conv_backward_weights(x, dy, win, 1)
    for now, was in zip((x, w, dy), before, strict=True):
        np.testing.assert_array_equal(now, was)


def test_bias(engine, dtype, rng):
    y, b = rng.standard_normal((3, 4, 5)).astype(dtype), rng.standard_normal(5).astype(dtype)
    want = y.astype(np.float64) + b
    close(engine.bias_add(y.copy(), b), want, dtype)
    close(engine.bias_backward(y), y.astype(np.float64).sum((0, 1)), dtype)
    close(engine.bias_backward(np.empty((0, 4, 5), dtype)), np.zeros(5), dtype)
    close(engine.bias_backward(np.empty((2, 4, 0), dtype)), np.zeros(0), dtype)


def test_bias_gradient_of_many_positions_is_summed_in_float64(engine, dtype):
    dy = np.full((1, 3000, 1000, 1), 0.1, dtype=dtype)  # in float32 one after another: 2 % off
    close(engine.bias_backward(dy), [3_000_000 * float(dy[0, 0, 0, 0])], dtype)


@pytest.mark.parametrize(("n", "c", "f"), [(5, 7, 3), (1, 1, 1), (0, 4, 3), (4, 0, 3), (4, 3, 0)])
def test_linear(engine, dtype, rng, n, c, f):
    x, w, b, dy = (rng.standard_normal(s).astype(dtype) for s in ((n, c), (f, c), (f,), (n, f)))
    x64, w64, dy64 = (a.astype(np.float64) for a in (x, w, dy))
    close(engine.linear_forward(x, w, b), np.einsum("nc,fc->nf", x64, w64) + b, dtype)
    close(engine.linear_forward(x, w, None), np.einsum("nc,fc->nf", x64, w64), dtype)
    close(engine.linear_backward_data(dy, w), np.einsum("nf,fc->nc", dy64, w64), dtype)
    close(engine.linear_backward_weights(x, dy), np.einsum("nf,nc->fc", dy64, x64), dtype)
