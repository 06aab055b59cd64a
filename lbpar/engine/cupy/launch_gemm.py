"""Launches of matrix products (``kernels/gemm.cu``), from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lbpar.engine.cupy.tiles import (
    MAX_ROWS,
    Card,
    Job,
    Launch,
    Math,
    choose,
    record_of,
    shape,
    shared_bytes,
    sum_splits,
    vector,
)

GemmSizes = np.dtype(
    [(name, "i8") for name in ("m", "n", "k", "pitch_a", "pitch_b", "batch_a", "batch_b", "depth", "relu", "vectors")]
    + [("alpha", "f8"), ("beta", "f8")]
)


@dataclass(frozen=True)
class Operand:
    """A matrix of `gemm`: whether k runs along its rows, elements between rows and between matrices of a batch, and its name."""

    name: str
    along_k: bool
    pitch: int
    batch: int = 0


def gemm(
    math_: Math,
    card: Card,
    m: int,
    n: int,
    k: int,
    a: Operand,
    b: Operand,
    out: str,
    bias: str = "",
    relu: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    batch: int = 1,
) -> Job:
    """``out = relu(alpha * A·Bᵀ + bias + beta * out)``, out of shape (batch, m, n)."""
    count = batch * m * n
    if count == 0:
        return Job()
    cut = choose(math_, card, m, n, k, batch, count)
    extents = [(k if o.along_k else rows, o.pitch, o.batch) for o, rows in ((a, m), (b, n))]
    vectors = (vector(card, math_, *extents[0]), vector(card, math_, *extents[1]))
    reaches = (rows * o.pitch if o.along_k else k * o.pitch + rows for o, rows in ((a, m), (b, n)))
    largest = max(*reaches, m * n, 2 * k) + 2 * MAX_ROWS
    index = "i32" if largest <= card.int_limit else "i64"
    flags = ", ".join("true" if o.along_k else "false" for o in (a, b))
    sizes = record_of(
        GemmSizes,
        m=m, n=n, k=k, pitch_a=a.pitch, pitch_b=b.pitch, batch_a=a.batch, batch_b=b.batch, depth=cut.depth,
        relu=relu, vectors=vector(card, math_, n) == 16 // math_.element_bytes, alpha=alpha, beta=beta,
    )  # fmt: skip
    whole = cut.splits == 1
    first = Launch(
        "gemm.cu",
        f"gemm<{math_.name}, {index}, {flags}, {shape(cut, vectors)}>",
        (-(-m // cut.rows) * -(-n // cut.columns), batch, cut.splits),
        (cut.threads, 1, 1),
        shared_bytes(math_, cut, a.along_k, b.along_k),
        (out, "" if whole else "workspace", a.name, b.name, bias if whole else ""),
        sizes,
    )
    if whole:
        return Job((first,))
    second = sum_splits(math_, out, bias, count, n, cut.splits, relu, alpha, beta)
    return Job((first, second), cut.splits * count * math_.sum_bytes)


def linear_forward(
    math_: Math, card: Card, samples: int, channels: int, features: int, bias: bool = False, relu: bool = False
) -> Job:
    """``y = relu(x·wᵀ + b)``: x (samples, channels), w (features, channels)."""
    return gemm(
        math_, card, samples, features, channels, Operand("x", True, channels), Operand("w", True, channels), "y",
        "b" if bias else "", relu,
    )  # fmt: skip


def linear_backward_data(math_: Math, card: Card, samples: int, channels: int, features: int) -> Job:
    """``dx = dy·w``."""
    return gemm(
        math_, card, samples, channels, features, Operand("dy", True, features), Operand("w", False, channels), "dx"
    )


def linear_backward_weights(
    math_: Math, card: Card, samples: int, channels: int, features: int, add: bool = False
) -> Job:
    """``dw = dyᵀ·x``, or added to what is there."""
    return gemm(
        math_, card, features, channels, samples, Operand("dy", False, features), Operand("x", False, channels), "dw",
        beta=float(add),
    )  # fmt: skip
