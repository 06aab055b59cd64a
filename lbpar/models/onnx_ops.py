"""ONNX ops without windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from lbpar.errors import GraphError
from lbpar.models.onnx_file import Array, OnnxNode
from lbpar.models.onnx_state import (
    ACTIVATIONS,
    ONE,
    OPEN_BATCH,
    Import,
    Value,
    first_dims,
    has_input,
    imports,
    note,
    shortest,
)


@imports("Gemm", "MatMul")
def gemm(s: Import, n: OnnxNode) -> Value:
    """Gemm, and MatMul with constants: alpha and beta go into the weights, an Add of a constant after it is its bias."""
    a = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0} | dict(n.attributes)
    if a["transA"]:
        raise GraphError("it has transA=1, expected samples first (transA=0).")
    x, w = s.features(n), s.constant(n, 1, "weights")
    if w.ndim != 2:
        raise GraphError(f"its weights have shape {w.shape}, expected a matrix.")
    w = w if a["transB"] else w.T
    features, channels = w.shape
    if channels != s.shape(x)[1]:
        raise GraphError(f"its weights read {channels} features, its input has {s.shape(x)[1]}.")
    also: tuple[str, ...] = ()
    bias = s.optional(n, 2, "bias")
    if bias is None:
        bias, also = s.following_bias(n, features, 2)
    elif prod(bias.shape) not in (1, features) or bias.shape[-1:] not in ((), (1,), (features,)):
        raise GraphError(f"its bias has shape {bias.shape}, expected one number per feature ({features}).")
    else:
        bias = np.broadcast_to(_times(bias.reshape(-1), a["beta"]), (features,))
    node = s.builder.linear(x.name, features, bias is not None, name=s.name(n, n.inputs[1]))
    s.keep_weights(node, {"weight": _times(w, a["alpha"]), "bias": bias}, (*n.inputs[1:], *also, *map(str, a.items())))
    return s.absorbing(s.made(x, node, False), *also)


def _times(array: Array, factor: float) -> Array:
    return array if factor == 1 else array * array.dtype.type(factor)


@imports("BatchNormalization")
def batch_normalization(s: Import, n: OnnxNode) -> Value:
    """BatchNormalization; ONNX keeps ``momentum`` of the running statistics where we take it of the new ones."""
    a = n.attributes
    x = s.tensor(n)
    if len(x.dims) < 2 or not s.is_channel(x, 1) or x.dims[0] != 0:
        raise GraphError(f"its input has shape {s.describe(x)}, expected the channels in dimension 1.")
    names = ("weight", "bias", "running_mean", "running_var")
    arrays = {k: s.constant(n, i + 1, k.replace("_", " ")) for i, k in enumerate(names)}
    c = s.shape(x)[-1]
    for k, array in arrays.items():
        if array.shape != (c,):
            raise GraphError(f"its {k} has shape {array.shape}, expected ({c},), one number per channel.")
    factor, offset, also = s.following_affine(n, c, len(x.dims))
    arrays["weight"], arrays["bias"] = arrays["weight"] * factor, arrays["bias"] * factor + offset
    momentum = float(np.float64(np.round(1.0 - a["momentum"], 7)))  # the file holds float32
    node = s.builder.norm(x.name, shortest(a["epsilon"]), momentum, name=s.name(n, n.inputs[1]))
    s.keep_weights(node, arrays)
    return s.absorbing(s.made(x, node, False), *also)


@imports("InstanceNormalization", "GroupNormalization", "LayerNormalization")
def sample_norm(s: Import, n: OnnxNode) -> Value:
    """Normalisation within samples, with one scale and one bias per channel (of groups before opset 21: per group)."""
    a, kind = n.attributes, n.kind.removesuffix("ization")
    x = s.tensor(n)
    c, axis = s.shape(x)[-1], a["axis"] if kind == "LayerNormal" else 1
    if len(x.dims) < 2 or x.dims[0] != 0 or not s.is_channel(x, axis):
        raise GraphError(
            f"its input has shape {s.describe(x)}, expected the channels, and nothing else, in dimension {axis}."
        )
    if kind == "LayerNormal" and s.axis(x, axis) != len(x.dims) - 1:
        raise GraphError(
            f"it is over the axes from {axis} on of a tensor of shape {s.describe(x)}, expected the channels alone, in the last one."
        )
    groups = a["num_groups"] if kind == "GroupNormal" else None
    scale, bias = s.constant(n, 1, "scale"), s.optional(n, 2, "bias")
    arrays: dict[str, Array | None] = {"weight": scale, "bias": np.zeros_like(scale) if bias is None else bias}
    for k, array in arrays.items():
        assert array is not None
        if groups and s.file.opset < 21 and array.shape == (groups,) and c % groups == 0:
            arrays[k] = array = np.repeat(array, c // groups)
        if array.shape != (c,):
            raise GraphError(f"its {k} has shape {array.shape}, expected ({c},), one number per channel.")
    options = {"eps": shortest(a["epsilon"])} | ({"groups": groups} if groups else {})
    node = s.builder.layer(f"{kind.removesuffix('Normal').lower()}_norm", x.name, s.name(n, n.inputs[1]), **options)
    s.keep_weights(node, arrays)
    return s.made(x, node, False)


@imports("LRN")
def local_response_norm(s: Import, n: OnnxNode) -> Value:
    """LRN."""
    a = n.attributes
    x = s.tensor(n)
    if len(x.dims) < 2 or not s.is_channel(x, 1):
        raise GraphError(f"its input has shape {s.describe(x)}, expected the channels of an image in dimension 1.")
    if not isinstance(a["size"], int) or a["size"] % 2 == 0:
        raise GraphError(f"its size is {a['size']}, expected an odd number of channels.")
    options = (a["size"], *(shortest(a[name]) for name in ("alpha", "beta", "bias")))
    return s.made(x, s.builder.local_response_norm(x.name, *options, name=s.name(n)))


@imports(*ACTIVATIONS)
def activation(s: Import, n: OnnxNode) -> Value:
    """A function of each element."""
    kind, names, nonnegative = ACTIVATIONS[n.kind]
    x = s.tensor(n)
    if n.kind == "HardSigmoid" and n.attributes["beta"] != 0.5:
        raise GraphError(f"its beta is {n.attributes['beta']}, expected 0.5.")
    given = {ours: n.attributes[theirs] for theirs, ours in names.items()}
    options: dict[str, Any] = {k: v if isinstance(v, str) else shortest(v) for k, v in given.items()}
    return s.made(x, s.builder.layer(kind, x.name, s.name(n), **options), nonnegative)


@imports("PRelu")
def prelu(s: Import, n: OnnxNode) -> Value:
    """PRelu with a slope for all, or one per channel."""
    x, slope = s.tensor(n), s.constant(n, 1, "slopes")
    places = (1,) * (len(x.dims) - slope.ndim) + slope.shape
    wide = [i for i, e in enumerate(places) if e != 1]
    if wide and (len(wide) > 1 or not s.is_channel(x, wide[0]) or slope.size != s.shape(x)[-1]):
        raise GraphError(
            f"its slopes have shape {slope.shape}, expected one number or one per channel of {s.describe(x)}."
        )
    node = s.builder.prelu(x.name, bool(wide), name=s.name(n, n.inputs[1]))
    s.keep_weights(node, {"weight": slope.reshape(-1)}, n.inputs[1:])
    return s.made(x, node, False)


@imports("Dropout")
def dropout(s: Import, n: OnnxNode) -> Value:
    """Dropout, its ratio an attribute or an input; active in training whatever the file says."""
    (rate,) = s.attribute_or_input(n, n.attributes["ratio"], 1, "ratio") or (0.5,)
    x = s.tensor(n)
    return s.made(x, s.builder.dropout(x.name, shortest(rate), name=s.name(n))) if rate else x


@imports("Identity")
def identity(s: Import, n: OnnxNode) -> Value:
    """Identity."""
    return s.value(n)


@imports("Cast")
def cast(s: Import, n: OnnxNode) -> Value:
    """Cast between floating-point types, which the engine's own type replaces."""
    from onnx import TensorProto

    to = n.attributes["to"]
    if to not in (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16):
        raise GraphError(f"it casts to {TensorProto.DataType.Name(to)}, expected a floating-point type.")
    return s.value(n)


@imports("CastLike")
def cast_like(s: Import, n: OnnxNode) -> Value | None:
    """CastLike: a constant, or a value, takes the type of another; all are floating point here."""
    if n.inputs[0] in s.values:
        return s.value(n)
    s.set_constant(n.outputs[0], s.constant(n, 0, "values"))
    return None


_BIAS = "a bias belongs right after a Conv, Gemm or MatMul"
#: Joins: our op, the constant that changes nothing, and what to do instead of joining another constant.
_JOINS = {
    "Add": ("add", 0, _BIAS),
    "Sum": ("add", 0, _BIAS),
    "Mul": ("multiply", 1, "scale the data or the weights instead, or use BatchNormalization"),
}


@imports(*_JOINS)
def join(s: Import, n: OnnxNode) -> Value:
    """Sum or product of tensors; one pixel is repeated over the image of another."""
    kind, neutral, instead = _JOINS[n.kind]
    for i, name in enumerate(n.inputs):
        if name not in s.values and ((array := s.constant(n, i, "operands")).size != 1 or (array != neutral).any()):
            raise GraphError(
                f"its operand '{name}' is a constant of shape {array.shape}, expected tensors computed from the samples; {instead}."
            )
    n = replace(n, inputs=tuple(name for name in n.inputs if name in s.values))
    if len(n.inputs) == 1:
        return s.value(n)
    xs = _broadcast(s, _together(s, n))
    node = s.builder.layer(kind, [x.name for x in xs], s.name(n))
    return s.made(xs[0], node, s.nonnegative.issuperset(x.name for x in xs))


@imports("Concat")
def concat(s: Import, n: OnnxNode) -> Value:
    """Concat along the channels."""
    axis = n.attributes["axis"]
    xs = _together(s, n)
    if not s.is_channel(xs[0], axis):
        channels = xs[0].dims.index(len(s.shape(xs[0])) - 1)
        raise GraphError(
            f"it joins tensors of shape {s.describe(xs[0])} along axis {axis}, expected the channels (axis {channels})."
        )
    if len(xs) == 1:
        return xs[0]
    names = [x.name for x in xs]
    return s.made(xs[0], s.builder.concat(names, name=s.name(n)), s.nonnegative.issuperset(names))


@imports("Flatten")
def flatten(s: Import, n: OnnxNode) -> Value:
    """Flatten to (N, features)."""
    axis = n.attributes["axis"]
    x = s.tensor(n)
    if axis != 1 and axis != 1 - len(x.dims):
        raise GraphError(f"its axis is {axis}, expected 1: all dimensions but the samples in one.")
    return s.flat(x, s.name(n))


@imports("Reshape")
def reshape(s: Import, n: OnnxNode) -> Value:
    """Reshape to (N, features), or by dimensions of size one."""
    zero = n.attributes["allowzero"]
    x = s.tensor(n)
    before = s.onnx_shape(x)
    target = s.constant(n, 1, "shape")
    sizes = _sizes(target, before, bool(zero))
    shuffled = _channel_shuffle(s, n, x, sizes)
    if shuffled is not None:
        return shuffled
    fits = sizes and sizes[0] == s.batch and x.dims[:1] == (0,) and prod(sizes) == prod(before)
    if fits and tuple(sizes) == before:
        return x
    if not fits or len(sizes) == 1 or sum(t != 1 for t in sizes[1:]) > 1:
        shown = ", ".join("N" if t == OPEN_BATCH else str(t) for t in target.ravel())
        raise GraphError(
            f"it reshapes {s.describe(x)} to ({shown}), expected (N, features): a flatten of all dimensions but the samples."
        )
    flat = s.flat(x, s.name(n))
    at = next((i for i, t in enumerate(sizes) if i and t != 1), 1)
    return replace(flat, dims=tuple(0 if i == 0 else 1 if i == at else ONE for i in range(len(sizes))))


def _channel_shuffle(s: Import, n: OnnxNode, x: Value, sizes: Sequence[int]) -> Value | None:
    """The channels as a table, transposed, and as channels again: three nodes that are one op; None for other reshapes."""
    before, rank = s.onnx_shape(x), len(x.dims)
    if rank < 3 or x.dims != first_dims(rank) or len(sizes) != rank + 1:
        return None
    if (sizes[0], *sizes[3:]) != (before[0], *before[2:]) or sizes[1] * sizes[2] != before[1]:
        return None
    swap = s.readers(n.outputs[0])
    back = s.readers(swap[0].outputs[0]) if len(swap) == 1 else []
    if len(back) != 1 or (swap[0].kind, back[0].kind) != ("Transpose", "Reshape") or len(back[0].inputs) != 2:
        return None
    shape = back[0].inputs[1]
    if list(swap[0].attributes.get("perm", ())) != [0, 2, 1, *range(3, rank + 1)] or not s.is_constant(shape):
        return None
    between = (sizes[0], sizes[2], sizes[1], *sizes[3:])
    if _sizes(s.array(shape), between, bool(back[0].attributes.get("allowzero", 0))) != list(before):
        return None
    y = s.made(x, s.builder.channel_shuffle(x.name, sizes[1], name=s.name(n)))
    return s.absorbing(y, swap[0].outputs[0], back[0].outputs[0])


def _sizes(target: Array, before: Sequence[int], allowzero: bool) -> list[int]:
    """The shape that a Reshape asks for, 0 (the size before) and -1 (the rest) filled in."""
    given = enumerate(int(t) for t in target.ravel())
    sizes = [before[i] if t == 0 and not allowzero and i < len(before) else t for i, t in given]
    if -1 in sizes:
        rest = prod(t for t in sizes if t != -1)
        sizes[sizes.index(-1)] = prod(before) // rest if rest else 0
    return sizes


@imports("Squeeze")
def squeeze(s: Import, n: OnnxNode) -> Value:
    """Squeeze of spatial dimensions of size one."""
    axes = s.attribute_or_input(n, n.attributes["axes"], 1, "axes")
    x = s.tensor(n)
    if axes is None:
        axes = [i for i, (d, size) in enumerate(zip(x.dims, s.onnx_shape(x), strict=True)) if d != 0 and size == 1]
    return s.squeezed(x, {s.axis(x, i) for i in axes}, s.name(n))


@imports("Unsqueeze")
def unsqueeze(s: Import, n: OnnxNode) -> Value:
    """Unsqueeze: more dimensions of size one."""
    axes = s.attribute_or_input(n, n.attributes["axes"], 1, "axes") or ()
    x = s.tensor(n)
    rank = len(x.dims) + len(axes)
    new, old = {i % rank for i in axes}, iter(x.dims)
    return replace(x, dims=tuple(ONE if i in new else next(old) for i in range(rank)))


@imports("Transpose")
def transpose(s: Import, n: OnnxNode) -> Value:
    """Transpose, which only changes how the file's dimensions map to ours."""
    x = s.tensor(n)
    perm = n.attributes["perm"] or range(len(x.dims))[::-1]
    if sorted(perm) != list(range(len(x.dims))):
        raise GraphError(f"its perm is {list(perm)}, expected an order of the {len(x.dims)} dimensions of its input.")
    return replace(x, dims=tuple(x.dims[p] for p in perm))


@imports("Softmax", "LogSoftmax")
def softmax(s: Import, n: OnnxNode) -> Value:
    """Softmax or LogSoftmax over the channels; at the very end it is dropped, since the loss contains it."""
    x = s.tensor(n)
    axis = n.attributes["axis"]
    first, sizes = s.axis(x, axis), s.onnx_shape(x)
    # Before opset 13 it is over all dimensions from the axis on together.
    over = [i for i in range(first, len(sizes) if s.file.opset < 13 else first + 1) if sizes[i] != 1 or i == first]
    if len(over) != 1 or not s.is_channel(x, over[0]):
        joint = f"the axes {over} together (as softmax is before opset 13)" if len(over) > 1 else f"axis {axis}"
        raise GraphError(f"it is over {joint} of a tensor of shape {s.describe(x)}, expected the channels alone.")
    if not s.is_last(n.outputs[0]):
        if n.kind == "LogSoftmax":
            raise GraphError("it is not the last op of the network, where the loss contains it; use Softmax inside.")
        return s.made(x, s.builder.softmax(x.name, name=s.name(n)), True)
    note(f"{s.file.path}: {n} at the end is dropped; the network gives logits, as the loss cross_entropy expects")
    return x


@imports("Shape")
def shape(s: Import, n: OnnxNode) -> None:
    """Shape: becomes a constant, in which the number of samples is a stand-in."""
    a = n.attributes
    s.set_constant(n.outputs[0], np.array(s.onnx_shape(s.tensor(n))[a["start"] : a["end"]], np.int64))


def _together(s: Import, n: OnnxNode) -> list[Value]:
    """All inputs of a node, which must be computed from the samples and lie alike."""
    xs = [s.tensor(n, i) for i in range(len(n.inputs)) if has_input(n, i)]
    if any(x.dims != xs[0].dims for x in xs):
        raise GraphError(
            f"its inputs have shapes {' and '.join(map(s.describe, xs))}, flattened, pooled or transposed differently; expected them alike."
        )
    return xs


def _broadcast(s: Import, xs: list[Value]) -> list[Value]:
    """Images of one pixel repeated to the size of the others."""
    rank = len(s.shape(xs[0]))
    if rank < 3 or xs[0].dims != first_dims(rank):
        return xs
    spatial = max((s.spatial(x) for x in xs), key=prod)
    out = []
    for x in xs:
        if s.spatial(x) != spatial and prod(s.spatial(x)) == 1:
            x = s.made(x, s.builder.upsample(x.name, spatial))
        out.append(x)
    return out


#: What to use instead of an op that cannot be imported.
INSTEAD = {
    **dict.fromkeys(("Clip", "Selu", "Celu", "ThresholdedRelu", "Mish"), "Relu"),
    "Erf": "Gelu (opset 20)",
    **dict.fromkeys(("LpPool", "GlobalLpPool"), "MaxPool, AveragePool or GlobalMaxPool"),
    "ReduceSum": "ReduceMean or GlobalAveragePool",
    **dict.fromkeys(("Slice", "Split", "Gather"), "a Conv per part, or a Conv with a stride"),
    "SpaceToDepth": "Conv with a stride",
    "DepthToSpace": "ConvTranspose or Resize",
    **dict.fromkeys(("Sub", "Div"), "Add or Mul, or scale the data"),
    "Einsum": "MatMul",
    **dict.fromkeys(("If", "Loop", "Scan"), "a graph without control flow: export with fixed shapes"),
}
