"""Plain loops over the definitions, in float64, and comparisons. Slow, obvious, independent of the engines."""

from __future__ import annotations

import itertools

import numpy as np


def close(got, want, dtype, factor=1.0):
    """got has type dtype and equals the float64 array want, up to rounding relative to its largest element."""
    want = np.asarray(want)
    assert got.dtype == dtype
    assert got.shape == want.shape
    assert got.flags.c_contiguous
    tolerance = factor * (2e-12 if np.dtype(dtype) == np.float64 else 3e-6)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * max(1.0, np.abs(want).max(initial=0)))


def sums_of(engine, dtype):
    """How many times more than in float64 the sums of an engine may be off: devices add up to 32 numbers in the arrays' type."""
    return 1 if engine.name != "cupy" else 20 if np.dtype(dtype) == np.float64 else 3e5


def last(tensor):
    """Torch (N, C, *S) to NumPy (N, *S, C)."""
    return np.ascontiguousarray(np.moveaxis(tensor.detach().numpy(), 1, -1))


def first(array):
    """NumPy (N, *S, C) to a torch float64 leaf (N, C, *S)."""
    import torch

    return torch.tensor(np.moveaxis(array, -1, 1).astype(np.float64), requires_grad=True)


def taps(win, in_spatial, out_spatial):
    """Every (output position, tap, input position) with the input inside."""
    for o in itertools.product(*map(range, out_spatial)):
        for k in itertools.product(*(range(w.kernel) for w in win)):
            i = tuple(a * w.stride + b * w.dilation - w.pad for a, b, w in zip(o, k, win, strict=True))
            if all(0 <= p < n for p, n in zip(i, in_spatial, strict=True)):
                yield o, k, i


def conv(x, w, b, win, groups, out_spatial):
    x, w = x.astype(np.float64), w.astype(np.float64)
    y = np.zeros((len(x), *out_spatial, len(w)))
    cg, fg = x.shape[-1] // groups, len(w) // groups
    for o, k, i in taps(win, x.shape[1:-1], out_spatial):
        for f in range(len(w)):
            g = f // fg
            y[(slice(None), *o, f)] += x[(slice(None), *i)][:, g * cg : (g + 1) * cg] @ w[(f, *k)]
    return y if b is None else y + b


def conv_gradients(x, w, dy, win, groups):
    x, w, dy = (a.astype(np.float64) for a in (x, w, dy))
    dx, dw = np.zeros(x.shape), np.zeros(w.shape)
    cg, fg = x.shape[-1] // groups, len(w) // groups
    for o, k, i in taps(win, x.shape[1:-1], dy.shape[1:-1]):
        for f in range(len(w)):
            own = slice(f // fg * cg, (f // fg + 1) * cg)
            d = dy[(slice(None), *o, f)]
            dx[(slice(None), *i, own)] += d[:, None] * w[(f, *k)]
            dw[(f, *k)] += d @ x[(slice(None), *i)][:, own]
    return dx, dw


def max_pool(x, win, out_spatial):
    """Values, and per (n, *o, c) the input position of the first maximum (None without taps)."""
    y = np.full((len(x), *out_spatial, x.shape[-1]), -np.inf)
    where = np.full(y.shape, None, dtype=object)
    for o, _, i in taps(win, x.shape[1:-1], out_spatial):
        for n, c in itertools.product(range(len(x)), range(x.shape[-1])):
            at, value = (n, *o, c), x[(n, *i, c)]
            if where[at] is None or value > y[at] or np.isnan(value):
                y[at], where[at] = value, i
    return y, where


def window_sum(x, win, out_spatial):
    y = np.zeros((len(x), *out_spatial, x.shape[-1]))
    for o, _, i in taps(win, x.shape[1:-1], out_spatial):
        y[(slice(None), *o)] += x[(slice(None), *i)]
    return y


def joined(sums):
    """The two moments of `Engine.norm_sums`, whose leading bits and rest come apart."""
    return sums[::2] + sums[1::2]
