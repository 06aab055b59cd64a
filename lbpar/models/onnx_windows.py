"""ONNX ops with windows: convolutions, pools, pads and resizing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import Any

from lbpar.errors import GraphError
from lbpar.models.onnx_file import Array, OnnxNode
from lbpar.models.onnx_state import ACTIVATIONS, ONE, Import, Value, first_dims, has_input, imports

Pairs = tuple[tuple[int, int], ...]
_SAME = ("SAME_UPPER", "SAME_LOWER")
_LOWEST = -3e38  # what exporters write for minus infinity in float32
#: Ops that pass over a pooled value on the way to one that needs it as an image.
_JOINS = ("Add", "Sum", "Mul", "Concat")
_NORMS = ("InstanceNormalization", "GroupNormalization", "LayerNormalization")
_PASS = (*ACTIVATIONS, "Dropout", "Identity", "BatchNormalization", *_NORMS, *_JOINS)
_IMAGE_OPS = ("Conv", "ConvTranspose", "Resize", "Upsample", "Pad", "MaxPool", "AveragePool")


@imports("Conv", "ConvTranspose")
def convolution(s: Import, n: OnnxNode) -> Value:
    """Conv and ConvTranspose, with an Add of a constant per channel after it as its bias."""
    transposed = n.kind == "ConvTranspose"
    a = n.attributes
    x, w, groups = s.image(n, padded=not transposed), s.constant(n, 1, "weights"), a["group"]
    window = _window(s, a, x, w)
    filters, channels = (w.shape[1] * groups, w.shape[0]) if transposed else (w.shape[0], w.shape[1] * groups)
    if channels != s.shape(x)[-1]:
        raise GraphError(
            f"its weights have shape {w.shape} with group={groups}, which reads {channels} channels; "
            f"its input has {s.shape(x)[-1]}."
        )
    if x.pad is not None and x.pad_value != 0:
        raise GraphError(f"the Pad before it fills with {x.pad_value}, expected 0.")
    if transposed:
        window |= _enlarged(a, s.spatial(x), window)
    bias, also = _bias(s, n, filters, len(w.shape))
    build = s.builder.conv_transpose if transposed else s.builder.conv
    name = s.name(n, n.inputs[1])
    node = build(x.name, filters, **window, groups=groups, bias=bias is not None, name=name)
    s.keep_weights(node, {"weight": w, "bias": bias}, (*n.inputs[1:], *also))
    return s.absorbing(s.made(x, node, False), *also)


def _enlarged(a: Mapping[str, Any], spatial: Sequence[int], window: dict[str, Any]) -> dict[str, Any]:
    """Padding of a transposed convolution, given outright or by the output's shape."""
    kernel, auto, wanted = window["kernel"], a["auto_pad"], a["output_shape"]
    extra = _each(a["output_padding"], kernel, "output_padding", 0)
    if wanted is None and auto in _SAME:
        wanted = [e * t for e, t in zip(spatial, window["stride"], strict=True)]
    if wanted is None:
        return {"output_pad": extra}
    if len(wanted) != len(kernel):
        raise GraphError(f"its output_shape is {list(wanted)}, expected {len(kernel)} spatial sizes.")
    sizes = zip(spatial, kernel, window["stride"], window["dilation"], extra, wanted, strict=True)
    totals = [(e - 1) * t + q + (k - 1) * d + 1 - want for e, k, t, d, q, want in sizes]
    longer = [q - min(total, 0) for q, total in zip(extra, totals, strict=True)]
    return {"pad": [_halves(max(total, 0), auto) for total in totals], "output_pad": longer}


@imports("MaxPool")
def max_pool(s: Import, n: OnnxNode) -> Value:
    """MaxPool; a Pad before it may be taken over where padding cannot win."""
    a = n.attributes
    x = s.image(n, padded=True)
    window = _window(s, a, x)
    if x.pad is not None and x.pad_value > _LOWEST and not (x.pad_value == 0 and x.name in s.nonnegative):
        raise GraphError(
            f"the Pad before it fills with {x.pad_value}, which may win the maximum; expected minus infinity, or 0 after "
            "a Relu. Use the pads of MaxPool instead."
        )
    return s.made(x, s.builder.max_pool(x.name, **window, ceil_mode=bool(a["ceil_mode"]), name=s.name(n)))


@imports("AveragePool")
def average_pool(s: Import, n: OnnxNode) -> Value:
    """AveragePool; a Pad with zeros before it counts as padding that is included."""
    a = n.attributes
    x = s.image(n, padded=True)
    window = _window(s, a, x)
    dilation, include = window.pop("dilation"), bool(a["count_include_pad"])
    if any(d != 1 for d in dilation):
        raise GraphError(f"its dilations are {list(dilation)}, expected 1: average pools have no dilation here.")
    if x.pad is not None:
        if x.pad_value != 0 or (not include and window["pad"] != x.pad):
            raise GraphError(
                "the Pad before it cannot be joined with its own padding; pad once, with zeros and count_include_pad=1."
            )
        include = True
    options = {"ceil_mode": bool(a["ceil_mode"]), "count_include_pad": include}
    return s.made(x, s.builder.avg_pool(x.name, **window, **options, name=s.name(n)))


@imports("GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "ReduceMax")
def over_space(s: Import, n: OnnxNode) -> Value:
    """Mean or maximum over all spatial dimensions, as a pool whose window is the whole image where it stays an image."""
    x = s.tensor(n)
    rank = len(s.shape(x))
    if n.kind.startswith("Global"):
        axes, keep = tuple(range(2, len(x.dims))), True
    else:
        a = n.attributes
        given = s.attribute_or_input(n, a["axes"], 1, "axes") or (
            [] if a["noop_with_empty_axes"] else range(len(x.dims))
        )
        axes, keep = tuple(sorted(s.axis(x, i) for i in given)), bool(a["keepdims"])
        if not axes:
            return x
    average = n.kind in ("GlobalAveragePool", "ReduceMean")
    if {x.dims[i] for i in axes} - {ONE} != set(range(1, rank - 1)):
        raise GraphError(
            f"it {'averages' if average else 'takes the maximum'} over the axes {list(axes)} of a tensor of shape {s.describe(x)}; "
            "expected all spatial axes and no other."
        )
    if rank == 2:
        return x if keep else replace(x, dims=tuple(d for i, d in enumerate(x.dims) if i not in axes))
    if average and not (keep and x.dims == first_dims(rank) and _needs_image(s, n.outputs[0])):
        dims = tuple(ONE if i in axes else min(d, 1) for i, d in enumerate(x.dims) if keep or i not in axes)
        return replace(s.made(x, s.builder.global_avg_pool(x.name, name=s.name(n))), dims=dims)
    pool = s.builder.avg_pool if average else s.builder.max_pool
    y = s.made(x, pool(x.name, s.spatial(x), 1, name=s.name(n)))
    return y if keep else s.squeezed(y, set(axes))


@imports("Pad")
def pad(s: Import, n: OnnxNode) -> Value:
    """Pad with a constant over space, left to the next window."""
    a = n.attributes
    pads = [int(p) for p in s.attribute_or_input(n, a["pads"], 1, "pads") or ()]
    (value,) = s.attribute_or_input(n, a["value"], 2, "constant_value") or (0.0,)
    chosen = s.attribute_or_input(n, None, 3, "axes")
    if not any(pads):
        return s.value(n)
    x = s.image(n, padded=True)
    rank = len(x.dims)
    if a["mode"] != "constant":
        raise GraphError(f"its mode is '{a['mode']}', expected 'constant' (with zeros).")
    axes = range(rank) if chosen is None else [s.axis(x, i) for i in chosen]
    if len(pads) != 2 * len(axes):
        raise GraphError(f"it has {len(pads)} pads, expected {2 * len(axes)}.")
    per_axis = dict.fromkeys(range(rank), (0, 0)) | dict(zip(axes, _pairs(pads), strict=True))
    if any(per_axis[0]) or any(per_axis[1]):
        raise GraphError(
            "it pads the samples or the channels, expected spatial axes only; widen channels with a 1x1 Conv."
        )
    if min(pads) < 0:
        raise GraphError(f"its pads are {pads}: negative ones crop, which is not supported; use the pads of a window.")
    if x.pad is not None and x.pad_value != value:
        raise GraphError(f"it fills with {value} around a Pad that fills with {x.pad_value}.")
    own = [per_axis[i] for i in range(2, rank)]
    return replace(x, pad=_sum(own, x.pad), pad_value=float(value))


@imports("Resize", "Upsample")
def resize(s: Import, n: OnnxNode) -> Value:
    """Resize and Upsample by integer factors, to the nearest neighbour or linear."""
    a = {"keep_aspect_ratio_policy": "stretch", "axes": None} | dict(n.attributes)
    if n.kind == "Upsample":
        a |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    newer = n.kind == "Resize" and s.file.opset >= 11
    x = s.image(n)
    rank, shape = len(x.dims), s.onnx_shape(x)
    axes = [s.axis(x, i) for i in a["axes"] or range(rank)]
    if a["keep_aspect_ratio_policy"] != "stretch":
        raise GraphError(f"its keep_aspect_ratio_policy is '{a['keep_aspect_ratio_policy']}', expected 'stretch'.")
    scales, sizes = (
        s.attribute_or_input(n, a.get("scales"), 2 if newer else 1, "scales"),
        s.attribute_or_input(n, None, 3, "sizes"),
    )
    if sizes:
        factors = {i: Fraction(int(want), shape[i]) for want, i in zip(sizes, axes, strict=True)}
    elif scales:
        factors = {i: Fraction(f) for f, i in zip(scales, axes, strict=True)}
    else:
        raise GraphError("it has neither scales nor sizes that are constant.")
    by_axis = [factors.get(i, Fraction(1)) for i in range(rank)]
    if all(f == 1 for f in by_axis):
        return x
    if a["mode"] not in ("nearest", "linear"):
        raise GraphError(f"its mode is '{a['mode']}', expected 'nearest' or 'linear'.")
    if any(f.denominator != 1 or f < 1 for f in by_axis) or by_axis[0] != 1 or by_axis[1] != 1:
        raise GraphError(
            f"its factors are {[float(f) for f in by_axis]}, expected whole numbers over space and 1 for samples and channels."
        )
    whole = [int(f) for f in by_axis[2:]]
    coordinates, rounding = a["coordinate_transformation_mode"], a["nearest_mode"]
    if a["mode"] == "linear":
        if coordinates not in ("half_pixel", "pytorch_half_pixel", "align_corners") or a.get("antialias"):
            raise GraphError(
                f"with mode 'linear' its coordinate_transformation_mode is '{coordinates}'{', with antialias' if a.get('antialias') else ''}, "
                "expected 'half_pixel' or 'align_corners'."
            )
        corners = coordinates == "align_corners"
        return s.made(x, s.builder.upsample(x.name, whole, "linear", corners, name=s.name(n)))
    for f, e in zip(whole, shape[2:], strict=True):
        if not _repeats(coordinates, rounding, f, e):
            raise GraphError(
                f"with coordinate_transformation_mode '{coordinates}' and nearest_mode '{rounding}' "
                f"it does not repeat each element {f} times; expected 'asymmetric' with 'floor'."
            )
    return s.made(x, s.builder.upsample(x.name, whole, name=s.name(n)))


def _repeats(coordinates: str, rounding: str, factor: int, extent: int) -> bool:
    """Whether output o of a nearest resize reads input o // factor, for each o.

    Half pixels: o // factor is less than half a pixel away. Aligned corners: so it is if (extent - 2) (factor - 2) < 1.
    """
    if coordinates not in ("asymmetric", "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners"):
        return False
    if rounding not in ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"):
        return False
    if min(factor, extent) == 1:
        return True
    if coordinates == "asymmetric":
        return rounding == "floor"
    return rounding.startswith("round") and (coordinates != "align_corners" or min(factor, extent) == 2)


def _needs_image(s: Import, output: str) -> bool:
    """Whether some later op reads a pooled value as an image of one pixel."""
    todo, seen = [output], set()
    while todo:
        for reader in s.readers(name := todo.pop()):
            others = [s.values[i] for i in reader.inputs if i != name and i in s.values]
            if reader.kind in _IMAGE_OPS or (reader.kind in _JOINS and any(len(s.shape(v)) > 2 for v in others)):
                return True
            if reader.kind in _PASS and reader.outputs[0] not in seen:
                seen.add(reader.outputs[0])
                todo.append(reader.outputs[0])
    return False


def _bias(s: Import, n: OnnxNode, filters: int, rank: int) -> tuple[Array | None, tuple[str, ...]]:
    """A convolution's bias: its own, or that of an Add after it."""
    if not has_input(n, 2):
        return s.following_bias(n, filters, rank)
    bias = s.constant(n, 2, "bias")
    if bias.shape != (filters,):
        raise GraphError(f"its bias has shape {bias.shape}, expected one number per filter ({filters}).")
    # torch.export writes zeros where a module has no bias.
    filler = n.inputs[2] in s.computed and not bias.any()
    return None if filler else bias, ()


def _window(s: Import, a: Mapping[str, Any], x: Value, w: Array | None = None) -> dict[str, Any]:
    """The kernel, stride, dilation and padding of an op, whose weights have shape (_, _, *kernel) if it has any.

    A Pad before the op comes on top of its own padding.
    """
    given, spatial = a["kernel_shape"], s.spatial(x)
    kernel = given if w is None else w.shape[2:]
    if kernel is None or len(kernel) != len(spatial):
        got = "no kernel_shape" if kernel is None else f"the kernel {list(kernel)}"
        raise GraphError(f"it has {got}, expected {len(spatial)} sizes, one per spatial dimension of its input.")
    if w is not None and given is not None and tuple(given) != tuple(kernel):
        raise GraphError(f"its kernel_shape is {list(given)}, but its weights have shape {w.shape}.")
    stride, dilation = _each(a["strides"], kernel, "strides"), _each(a["dilations"], kernel, "dilations")
    rank, auto = len(kernel), a["auto_pad"]
    flat = list(a["pads"] or [0] * (2 * rank))
    around = x.pad or ((0, 0),) * rank
    if auto in ("NOTSET", "") or any(flat):
        if len(flat) != 2 * rank:
            raise GraphError(f"its pads are {flat}, expected {2 * rank} numbers: all starts, then all ends.")
        own = _pairs(flat)
    elif auto == "VALID":
        own = [(0, 0)] * rank
    elif auto in _SAME:
        extents = [e + sum(o) for e, o in zip(spatial, around, strict=True)]
        cut = zip(extents, kernel, stride, dilation, strict=True)
        own = [_halves(max((ceil(e / t) - 1) * t + (k - 1) * d + 1 - e, 0), auto) for e, k, t, d in cut]
    else:
        raise GraphError(f"its auto_pad is '{auto}', expected NOTSET, VALID, SAME_UPPER or SAME_LOWER.")
    return {"kernel": list(kernel), "stride": stride, "pad": _sum(own, x.pad), "dilation": dilation}


def _each(values: Sequence[int] | None, kernel: Sequence[int], what: str, default: int = 1) -> tuple[int, ...]:
    if values is not None and len(values) != len(kernel):
        raise GraphError(f"its {what} are {list(values)}, expected {len(kernel)} numbers.")
    return (default,) * len(kernel) if values is None else tuple(int(v) for v in values)


def _pairs(flat: Sequence[int]) -> list[tuple[int, int]]:
    """(before, after) from all starts and then all ends."""
    return list(zip(flat[: len(flat) // 2], flat[len(flat) // 2 :], strict=True))


def _sum(own: Sequence[tuple[int, int]], outer: Pairs | None) -> Pairs:
    """Padding with that of a Pad before it."""
    return tuple((p + x, q + y) for (p, q), (x, y) in zip(own, outer or ((0, 0),) * len(own), strict=True))


def _halves(total: int, auto: str) -> tuple[int, int]:
    """Padding split over both sides; the odd one goes after the input for SAME_UPPER, else before it."""
    small, large = total // 2, total - total // 2
    return (small, large) if auto == "SAME_UPPER" else (large, small)
