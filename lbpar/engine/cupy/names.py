"""The kernels that the engine launches by default: which there are, and which are compiled together."""

from __future__ import annotations

import re

FLOATS = ("float", "double", "__half", "__nv_bfloat16")
_SIZES = {"float": 4, "double": 8, "__half": 2, "__nv_bfloat16": 2}

ACTIVATIONS = {
    "elu": "Elu", "gelu": "Gelu", "gelu tanh": "GeluTanh", "silu": "Silu", "softplus": "Softplus", "hardsigmoid": "HardSigmoid",
    "hardswish": "HardSwish",
}  # fmt: skip
"""Functions of ``activations.cu``."""

ERRORS = {"l1": "L1", "huber": "Huber"}
"""Functions of errors in ``losses.cu``."""

_ELEMENTWISE = ("relu", "leaky_relu", "sigmoid", "tanh")
_POINTWISE = (
    *(f"{name}_{way}<T>" for name in _ELEMENTWISE for way in ("forward", "backward")),
    "add_all<T>", "multiply_all<T>", "axpy<T>", "local_response_norm_ratio<T>",
    "local_response_norm_forward<T, i32>", "local_response_norm_backward<T, i32>",
)  # fmt: skip

_NORM = (
    "norm_partials<T>", "norm_apply<T, P, true>", "norm_apply<T, P, false>", "norm_backward_partials<T, true>",
    "norm_backward_partials<T, false>", "norm_backward_data<T, P>", "column_partials<T>", "column_sums<T>", "bias_add<T, P>",
)  # fmt: skip
_POOLING = (
    "max_pool_forward<T, signed char, i32>", "max_pool_backward<T, signed char, i32>", "avg_pool_forward<T, i32>",
    "avg_pool_backward<T, i32>", "spatial_broadcast<T, i32>", "upsample_forward<T, i32>", "upsample_backward<T, i32>",
)  # fmt: skip
_WIDTHS = (1, 8, 32)
_SOFTMAX = tuple(
    f"softmax_{name}<T, {width}>"
    for width in _WIDTHS
    for name in ("max", "denominator", "forward", "inner", "backward")
)
_LOSSES = (
    *(
        f"{name}<T, i64, {width}>"
        for width in _WIDTHS
        for name in ("softmax_sums", "cross_entropy_backward", "softmax_rank")
    ),
    *(f"{name}_{part}<T, P>" for name in ("mse", "bce") for part in ("partials", "backward")),
    *(f"error_{part}<T, P, {name}>" for name in ERRORS.values() for part in ("partials", "backward")),
)
_LOSSES_PLAIN = ("sum_partials", "cross_entropy_partials", "count_hits<i64>")
_LABEL_LOSSES = (
    *(f"{name}<T, i64, {width}>" for width in _WIDTHS for name in ("weighed_entropy_backward", "region_backward")),
    *(f"{name}<T, {width}>" for width in _WIDTHS for name in ("class_spread", "region_backward_data", "softmax_first")),
    "region_partials<T, i64>", "error_partials_of_both<T, P>",
)  # fmt: skip
_LABEL_LOSSES_PLAIN = (
    "label_factors<i64>", "entropy_partials", "entropy_loss", "region_sums", "region_loss", "region_slopes<float>", "region_slopes<double>",
    "class_confusion<i64>", "class_counts", "dice_of_samples",
)  # fmt: skip
_UPDATES = (
    "squares<P>", "clip<P>", "unscale<P, P>", *(f"{name}<P, P>" for name in ("sgd", "adam", "lars", "lamb_moments", "lamb")),
)  # fmt: skip
_NORM_PLAIN = (
    "norm_sums", "norm_found", "norm_moments", "norm_running", "norm_invstd", "norm_backward_sums<float>", "norm_backward_sums<double>",
)  # fmt: skip


def _typed(*patterns: str) -> tuple[tuple[str, ...], ...]:
    """A group for each element type: T is the type, P that of parameters beside it."""

    def filled(pattern: str, kind: str) -> str:
        return re.sub(r"\bP\b", "double" if kind == "double" else "float", re.sub(r"\bT\b", kind, pattern))

    return tuple(tuple(filled(p, kind) for p in patterns) for kind in FLOATS)


GROUPS: dict[str, tuple[tuple[str, ...], ...]] = {
    "pack.cu": (
        tuple(
            name
            for unit in ("u8", "u16", "u32", "uint2", "uint4")
            for name in (f"move_pieces<{unit}, i32, 1>", f"move_pieces<{unit}, i32, 24>", f"move_rows<{unit}, i32>")
            if name != "move_rows<uint4, i32>"
        ),
        *(
            (f"add_rows<{t}, i32>", *(f"add_pieces<{t}, {n}, i32, {k}>" for n in (1, 16 // _SIZES[t]) for k in (1, 24)))
            for t in FLOATS
        ),
    ),
    "losses.cu": (*_typed(*_LOSSES), _LOSSES_PLAIN),
    "label_losses.cu": (*_typed(*_LABEL_LOSSES), _LABEL_LOSSES_PLAIN),
    "softmax.cu": _typed(*_SOFTMAX),
    "lines.cu": _typed("along_lines<T, i32>"),
    "prelu.cu": _typed("prelu_forward<T, P>", "prelu_backward_data<T, P>", "prelu_slope_partials<T>"),
    "updates.cu": (*_typed(*_UPDATES)[:2], ("sum_blocks",)),
    "dropout.cu": _typed("dropout<T, i32>"),
    "norm.cu": (*_typed(*_NORM), _NORM_PLAIN),
    "sample_norm.cu": _typed(
        "sample_norm_sums<T, 32>",
        "sample_norm_sums<T, 256>",
        "sample_norm_backward_sums<T, P, 32>",
        "sample_norm_backward_sums<T, P, 256>",
        "sample_norm_scale_partials<T>",
        "sample_norm_apply<T, P, i32>",
        "sample_norm_backward_data<T, P, i32>",
    ),
    "pooling.cu": _typed(*_POOLING),
    "activations.cu": _typed(
        *(f"activation_{way}<T, {name}>" for name in ACTIVATIONS.values() for way in ("forward", "backward"))
    ),
    "pointwise.cu": (
        *_typed(*_POINTWISE),
        tuple(f"convert<{to}, {source}>" for to in FLOATS for source in FLOATS if to != source),
        tuple(f"channel_shuffle<{unit}, i32>" for unit in ("u16", "u32", "uint2")),
    ),
}
"""Per file: groups of name expressions. Kernels that are in none (index arithmetic in 64 bits, tiles of other sizes) are compiled one
by one when they are first launched."""
