"""ONNX ops with windows: convolutions, pools, pads and resizing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, floor
from typing import Any

import numpy as np

from lbpar.errors import GraphError
from lbpar.graph.onnx_file import Array, OnnxNode
from lbpar.graph.onnx_state import ONE, Import, Value, first_dims, has_input

Pairs = tuple[tuple[int, int], ...]
_WINDOW = {"auto_pad": "NOTSET", "dilations": None, "kernel_shape": None, "pads": None, "strides": None}
_LOWEST = -3e38  # what exporters write for minus infinity in float32
#: Ops that pass over a pooled value on the way to one that needs it as an image.
_PASS = (
    "Relu",
    "LeakyRelu",
    "Sigmoid",
    "Tanh",
    "Dropout",
    "Identity",
    "BatchNormalization",
    "Add",
    "Sum",
    "Mul",
    "Concat",
)
_IMAGE_OPS = ("Conv", "ConvTranspose", "Resize", "Upsample", "Pad", "MaxPool", "AveragePool")


def conv(s: Import, n: OnnxNode) -> Value:
    """Conv, with an Add of a constant per channel after it as its bias."""
    a = n.take(**_WINDOW, group=1)
    x, w = s.image(n, padded=True), s.constant(n, 1, "weights")
    kernel = _kernel(a, w, s.spatial(x))
    filters, groups = w.shape[0], a["group"]
    if w.shape[1] * groups != s.shape(x)[-1]:
        raise GraphError(
            f"its weights have shape {w.shape} with group={groups}, which reads {w.shape[1] * groups} channels; "
            f"its input has {s.shape(x)[-1]}."
        )
    stride, dilation = _each(a["strides"], kernel, "strides"), _each(a["dilations"], kernel, "dilations")
    if x.pad is not None and x.pad_value != 0:
        raise GraphError(f"the Pad before it fills with {x.pad_value}, expected 0.")
    pads = _pads(a, s.spatial(x), kernel, stride, dilation, x.pad)
    bias, also = _bias(s, n, filters, len(kernel) + 2)
    node = s.builder.conv(
        x.name, filters, kernel, stride, pads, dilation, groups, bias is not None, name=s.name(n, n.inputs[1])
    )
    s.keep(node, np.moveaxis(w, 1, -1), bias, n.inputs[1])
    return s.finish(n, replace(x, name=node, pad=None), *also)


def conv_transpose(s: Import, n: OnnxNode) -> Value:
    """ConvTranspose, its padding given outright or by the output's shape."""
    a = n.take(**_WINDOW, group=1, output_padding=None, output_shape=None)
    x, w = s.image(n), s.constant(n, 1, "weights")
    kernel, spatial = _kernel(a, w, s.spatial(x)), s.spatial(x)
    filters, groups = w.shape[1] * a["group"], a["group"]
    if w.shape[0] != s.shape(x)[-1]:
        raise GraphError(f"its weights read {w.shape[0]} channels, its input has {s.shape(x)[-1]}.")
    stride, dilation = _each(a["strides"], kernel, "strides"), _each(a["dilations"], kernel, "dilations")
    extra = _each(a["output_padding"], kernel, "output_padding", 0)
    auto, wanted = a["auto_pad"], a["output_shape"]
    if wanted is None and auto in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [e * t for e, t in zip(spatial, stride, strict=True)]
    if wanted is None:
        pads = _pads(a, spatial, kernel, stride, dilation, None)
    else:
        if len(wanted) != len(kernel):
            raise GraphError(f"its output_shape is {list(wanted)}, expected {len(kernel)} spatial sizes.")
        found, longer = [], []
        for e, k, t, d, q, want in zip(spatial, kernel, stride, dilation, extra, wanted, strict=True):
            total = (e - 1) * t + q + (k - 1) * d + 1 - want
            small, large = max(total, 0) // 2, max(total, 0) - max(total, 0) // 2
            found.append((small, large) if auto == "SAME_UPPER" else (large, small))
            longer.append(q - min(total, 0))
        extra = tuple(longer)
        pads = tuple(found)
    bias, also = _bias(s, n, filters, len(kernel) + 2)
    node = s.builder.conv_transpose(
        x.name,
        filters,
        kernel,
        stride,
        pads,
        dilation,
        groups,
        bias is not None,
        output_pad=extra,
        name=s.name(n, n.inputs[1]),
    )
    s.keep(node, np.moveaxis(w, 1, -1), bias, n.inputs[1])
    return s.finish(n, replace(x, name=node), *also)


def max_pool(s: Import, n: OnnxNode) -> Value:
    """MaxPool; a Pad before it may be taken over where padding cannot win."""
    a = n.take(**_WINDOW, ceil_mode=0, storage_order=0)
    x = s.image(n, padded=True)
    kernel = _kernel(a, None, s.spatial(x))
    if x.pad is not None and x.pad_value > _LOWEST and not (x.pad_value == 0 and x.name in s.nonnegative):
        raise GraphError(
            f"the Pad before it fills with {x.pad_value}, which may win the maximum; expected minus infinity, or 0 after "
            "a Relu. Use the pads of MaxPool instead."
        )
    stride, dilation = _each(a["strides"], kernel, "strides"), _each(a["dilations"], kernel, "dilations")
    pads = _pads(a, s.spatial(x), kernel, stride, dilation, x.pad)
    node = s.builder.max_pool(x.name, kernel, stride, pads, bool(a["ceil_mode"]), dilation, name=s.name(n))
    return replace(x, name=s.keep_sign(node, x.name), pad=None)


def average_pool(s: Import, n: OnnxNode) -> Value:
    """AveragePool; a Pad with zeros before it counts as padding that is included."""
    a = n.take(**_WINDOW, ceil_mode=0, count_include_pad=0)
    x = s.image(n, padded=True)
    kernel = _kernel(a, None, s.spatial(x))
    stride, dilation = _each(a["strides"], kernel, "strides"), _each(a["dilations"], kernel, "dilations")
    if any(d != 1 for d in dilation):
        raise GraphError(f"its dilations are {list(dilation)}, expected 1: average pools have no dilation here.")
    include = bool(a["count_include_pad"])
    if x.pad is not None:
        own = _pads(
            a, tuple(e + p + q for e, (p, q) in zip(s.spatial(x), x.pad, strict=True)), kernel, stride, dilation
        )
        if x.pad_value != 0 or (not include and any(p or q for p, q in own)):
            raise GraphError(
                "the Pad before it cannot be joined with its own padding; pad once, with zeros and count_include_pad=1."
            )
        include = True
    pads = _pads(a, s.spatial(x), kernel, stride, dilation, x.pad)
    node = s.builder.avg_pool(x.name, kernel, stride, pads, bool(a["ceil_mode"]), include, name=s.name(n))
    return replace(x, name=s.keep_sign(node, x.name), pad=None)


def global_average_pool(s: Import, n: OnnxNode) -> Value:
    """GlobalAveragePool."""
    n.take()
    return mean_over_space(s, n, s.tensor(n), tuple(range(2, len(s.tensor(n).dims))), True)


def global_max_pool(s: Import, n: OnnxNode) -> Value:
    """GlobalMaxPool, as a max pool whose window is the whole image."""
    n.take()
    x = s.image(n)
    node = s.builder.max_pool(x.name, s.spatial(x), 1, name=s.name(n))
    return replace(x, name=s.keep_sign(node, x.name))


def reduce_mean(s: Import, n: OnnxNode) -> Value:
    """ReduceMean over all spatial dimensions."""
    axes, keep = _reduced(s, n)
    return mean_over_space(s, n, s.tensor(n), axes, keep) if axes else s.tensor(n)


def reduce_max(s: Import, n: OnnxNode) -> Value:
    """ReduceMax over all spatial dimensions, as a max pool whose window is the whole image."""
    axes, keep = _reduced(s, n)
    if not axes:
        return s.tensor(n)
    x = s.image(n)
    if axes != tuple(range(2, len(x.dims))):
        raise GraphError(
            f"it reduces the axes {list(axes)} of {s.describe(x)}, expected all spatial axes and no other."
        )
    node = s.builder.max_pool(x.name, s.spatial(x), 1, name=s.name(n))
    y = replace(x, name=s.keep_sign(node, x.name))
    return y if keep else s.squeezed(y, set(axes))


def _reduced(s: Import, n: OnnxNode) -> tuple[tuple[int, ...], bool]:
    """Axes that a reduction runs over (none: it does nothing), and whether they stay with size one."""
    a = n.take(axes=None, keepdims=1, noop_with_empty_axes=0)
    given = s.optional(n, 1, "axes")
    axes = a["axes"] if given is None else given.ravel().tolist()
    x = s.tensor(n)
    if not axes:
        axes = [] if a["noop_with_empty_axes"] else range(len(x.dims))
    return tuple(sorted(s.axis(x, int(i)) for i in axes)), bool(a["keepdims"])


def mean_over_space(s: Import, n: OnnxNode, x: Value, axes: tuple[int, ...], keep: bool) -> Value:
    """Mean over ONNX axes that must be all spatial ones; kept as an image of one pixel where later ops need that."""
    rank = len(s.shape(x))
    ours = {x.dims[i] for i in axes} - {ONE}
    if ours != set(range(1, rank - 1)):
        raise GraphError(
            f"it averages over the axes {list(axes)} of a tensor of shape {s.describe(x)}; expected all spatial axes and no other."
        )
    if rank == 2:
        return x if keep else replace(x, dims=tuple(d for i, d in enumerate(x.dims) if i not in axes))
    if keep and x.dims == first_dims(rank) and _needs_image(s, n.outputs[0]):
        node = s.builder.avg_pool(x.name, s.spatial(x), 1, name=s.name(n))
        return replace(x, name=s.keep_sign(node, x.name))
    node = s.keep_sign(s.builder.global_avg_pool(x.name, name=s.name(n)), x.name)
    dims = tuple(ONE if i in axes else min(d, 1) for i, d in enumerate(x.dims) if keep or i not in axes)
    return Value(node, dims)


def pad(s: Import, n: OnnxNode) -> Value:
    """Pad with a constant over space, left to the next window."""
    a = n.take(mode="constant", pads=None, value=0.0)
    given = s.optional(n, 1, "pads")
    pads = list(a["pads"] or []) if given is None else [int(p) for p in given.ravel()]
    fill = s.optional(n, 2, "constant_value")
    value = float(a["value"]) if fill is None else float(fill.ravel()[0])
    chosen = s.optional(n, 3, "axes")
    if not any(pads):
        return s.value(n)
    x = s.image(n, padded=True)
    rank = len(x.dims)
    if a["mode"] != "constant":
        raise GraphError(f"its mode is '{a['mode']}', expected 'constant' (with zeros).")
    axes = range(rank) if chosen is None else [s.axis(x, int(i)) for i in chosen.ravel()]
    if len(pads) != 2 * len(axes):
        raise GraphError(f"it has {len(pads)} pads, expected {2 * len(axes)}.")
    per_axis = dict.fromkeys(range(rank), (0, 0))
    per_axis |= {axis: (pads[i], pads[i + len(axes)]) for i, axis in enumerate(axes)}
    if any(per_axis[0]) or any(per_axis[1]):
        raise GraphError(
            "it pads the samples or the channels, expected spatial axes only; widen channels with a 1x1 Conv."
        )
    if min(pads) < 0:
        raise GraphError(f"its pads are {pads}: negative ones crop, which is not supported; use the pads of a window.")
    if x.pad is not None and x.pad_value != value:
        raise GraphError(f"it fills with {value} around a Pad that fills with {x.pad_value}.")
    before = x.pad or ((0, 0),) * (rank - 2)
    joined = tuple((p + per_axis[i + 2][0], q + per_axis[i + 2][1]) for i, (p, q) in enumerate(before))
    return replace(x, pad=joined, pad_value=value)


def resize(s: Import, n: OnnxNode) -> Value:
    """Resize and Upsample to the nearest neighbour by integer factors."""
    if n.kind == "Upsample":
        a = n.take(mode="nearest", scales=None) | {
            "coordinate_transformation_mode": "asymmetric",
            "nearest_mode": "floor",
        }
        inputs: tuple[int, int | None] = (1, None)
    else:
        a = n.take(
            mode="nearest",
            coordinate_transformation_mode="half_pixel",
            nearest_mode="round_prefer_floor",
            antialias=0,
            axes=None,
            cubic_coeff_a=-0.75,
            exclude_outside=0,
            extrapolation_value=0.0,
            keep_aspect_ratio_policy="stretch",
        )
        inputs = (1, None) if s.file.opset < 11 else (2, 3)
    x = s.image(n)
    scales = s.optional(n, inputs[0], "scales")
    if a.get("scales") is not None:
        scales = np.asarray(a["scales"])
    sizes = s.optional(n, inputs[1], "sizes") if inputs[1] else None
    rank, shape = len(x.dims), s.onnx_shape(x)
    axes = [s.axis(x, i) for i in a["axes"]] if a.get("axes") else list(range(rank))
    if a.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise GraphError(f"its keep_aspect_ratio_policy is '{a['keep_aspect_ratio_policy']}', expected 'stretch'.")
    if sizes is not None and sizes.size:
        pairs = zip(sizes.ravel(), axes, strict=True)
        factors = {i: Fraction(int(want), shape[i]) for want, i in pairs}
    elif scales is not None and scales.size:
        factors = {i: Fraction(float(f)) for f, i in zip(scales.ravel(), axes, strict=True)}
    else:
        raise GraphError("it has neither scales nor sizes that are constant.")
    by_axis = [factors.get(i, Fraction(1)) for i in range(rank)]
    if all(f == 1 for f in by_axis):
        return x
    if a["mode"] != "nearest":
        raise GraphError(f"its mode is '{a['mode']}', expected 'nearest'; a ConvTranspose can learn to interpolate.")
    if any(f.denominator != 1 or f < 1 for f in by_axis) or by_axis[0] != 1 or by_axis[1] != 1:
        raise GraphError(
            f"its factors are {[float(f) for f in by_axis]}, expected whole numbers over space and 1 for samples and channels."
        )
    whole = [int(f) for f in by_axis[2:]]
    for f, e in zip(whole, shape[2:], strict=True):
        source = _nearest(a["coordinate_transformation_mode"], a["nearest_mode"], f, e)
        if any(min(max(source(o), 0), e - 1) != o // f for o in range(e * f)):
            raise GraphError(
                f"with coordinate_transformation_mode '{a['coordinate_transformation_mode']}' and nearest_mode '{a['nearest_mode']}' "
                f"it does not repeat each element {f} times; expected 'asymmetric' with 'floor'."
            )
    node = s.keep_sign(s.builder.upsample(x.name, whole, name=s.name(n)), x.name)
    return replace(x, name=node)


def _nearest(coordinates: str, rounding: str, factor: int, extent: int) -> Callable[[int], int]:
    """Where output o of a resize reads, before clipping."""
    long = extent * factor
    places: dict[str, Callable[[int], Fraction]] = {
        "asymmetric": lambda o: Fraction(o, factor),
        "half_pixel": lambda o: Fraction(2 * o + 1, 2 * factor) - Fraction(1, 2),
        "align_corners": lambda o: Fraction(o * (extent - 1), long - 1) if long > 1 else Fraction(0),
    }
    places["half_pixel_symmetric"] = places["half_pixel"]  # they differ for fractions of a pixel only
    places["pytorch_half_pixel"] = places["half_pixel"] if long > 1 else lambda o: Fraction(0)
    rounds: dict[str, Callable[[Fraction], int]] = {
        "floor": floor,
        "ceil": ceil,
        "round_prefer_floor": lambda v: ceil(v - Fraction(1, 2)),
        "round_prefer_ceil": lambda v: floor(v + Fraction(1, 2)),
    }
    if coordinates not in places or rounding not in rounds:
        raise GraphError(
            f"its coordinate_transformation_mode is '{coordinates}' and its nearest_mode '{rounding}', expected 'asymmetric' with 'floor'."
        )
    return lambda o: rounds[rounding](places[coordinates](o))


def _needs_image(s: Import, output: str) -> bool:
    """Whether some later op reads a pooled value as an image of one pixel."""
    todo, seen = [output], set()
    while todo:
        for reader in s.readers(name := todo.pop()):
            others = [s.values[i] for i in reader.inputs if i != name and i in s.values]
            if reader.kind in _IMAGE_OPS:
                return True
            if reader.kind in ("Add", "Sum", "Mul", "Concat") and any(len(s.shape(v)) > 2 for v in others):
                return True
            if reader.kind in _PASS and reader.outputs[0] not in seen:
                seen.add(reader.outputs[0])
                todo.append(reader.outputs[0])
    return False


def _bias(s: Import, n: OnnxNode, filters: int, rank: int) -> tuple[Array | None, tuple[str, ...]]:
    """A convolution's bias: its own, or that of an Add after it."""
    if has_input(n, 2):
        bias = s.constant(n, 2, "bias")
        if bias.shape != (filters,):
            raise GraphError(f"its bias has shape {bias.shape}, expected one number per filter ({filters}).")
        # torch.export writes zeros where a module has no bias.
        filler = n.inputs[2] in s.computed and not bias.any()
        return None if filler else bias, ()
    return s.following_bias(n, filters, rank)


def _kernel(a: dict[str, Any], w: Array | None, spatial: Sequence[int]) -> tuple[int, ...]:
    kernel = a["kernel_shape"] if w is None else w.shape[2:]
    if kernel is None or len(kernel) != len(spatial):
        got = "no kernel_shape" if kernel is None else f"the kernel {list(kernel)}"
        raise GraphError(f"it has {got}, expected {len(spatial)} sizes, one per spatial dimension of its input.")
    if w is not None and a["kernel_shape"] is not None and tuple(a["kernel_shape"]) != tuple(kernel):
        raise GraphError(f"its kernel_shape is {list(a['kernel_shape'])}, but its weights have shape {w.shape}.")
    return tuple(int(k) for k in kernel)


def _each(values: Sequence[int] | None, kernel: Sequence[int], what: str, default: int = 1) -> tuple[int, ...]:
    if values is not None and len(values) != len(kernel):
        raise GraphError(f"its {what} are {list(values)}, expected {len(kernel)} numbers.")
    return (default,) * len(kernel) if values is None else tuple(int(v) for v in values)


def _pads(
    a: dict[str, Any],
    spatial: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    outer: Pairs | None = None,
) -> Pairs:
    """(before, after) per dimension; ``outer`` is a Pad before the op, which comes on top."""
    rank, auto, given = len(kernel), a["auto_pad"], a["pads"]
    around = outer or ((0, 0),) * rank
    if auto in ("NOTSET", "") or given is not None and any(given):
        flat = list(given) if given is not None else [0] * (2 * rank)
        if len(flat) != 2 * rank:
            raise GraphError(f"its pads are {flat}, expected {2 * rank} numbers: all starts, then all ends.")
        own = [(flat[i], flat[i + rank]) for i in range(rank)]
    elif auto == "VALID":
        own = [(0, 0)] * rank
    elif auto in ("SAME_UPPER", "SAME_LOWER"):
        own = []
        for e, k, t, d, o in zip(spatial, kernel, stride, dilation, around, strict=True):
            extent = e + sum(o)
            total = max((ceil(extent / t) - 1) * t + (k - 1) * d + 1 - extent, 0)
            small, large = total // 2, total - total // 2
            own.append((small, large) if auto == "SAME_UPPER" else (large, small))
    else:
        raise GraphError(f"its auto_pad is '{auto}', expected NOTSET, VALID, SAME_UPPER or SAME_LOWER.")
    return tuple((p + x, q + y) for (p, q), (x, y) in zip(own, around, strict=True))
