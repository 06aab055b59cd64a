"""ONNX ops without windows, and the table of all that can be imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from lbpar.errors import GraphError
from lbpar.graph import onnx_windows as windows
from lbpar.graph.onnx_file import Array, OnnxNode
from lbpar.graph.onnx_state import ONE, OPEN_BATCH, Import, Value, first_dims, has_input, note, weights


def gemm(s: Import, n: OnnxNode) -> Value:
    """Gemm: alpha and beta go into the weights, features in channels-first order into their columns."""
    a = n.take(alpha=1.0, beta=1.0, transA=0, transB=0)
    if a["transA"]:
        raise GraphError("it has transA=1, expected samples first (transA=0).")
    w = s.constant(n, 1, "weights")
    also: tuple[str, ...] = ()
    bias, scale = s.optional(n, 2, "bias"), a["beta"]
    w = _matrix(w) if a["transB"] else _matrix(w).T
    if bias is None:
        bias, also = s.following_bias(n, w.shape[0], 2)
        scale = 1.0
    elif prod(bias.shape) not in (1, w.shape[0]) or bias.shape[-1:] not in ((), (1,), (w.shape[0],)):
        raise GraphError(f"its bias has shape {bias.shape}, expected one number per feature ({w.shape[0]}).")
    else:
        bias = np.broadcast_to(bias.reshape(-1), w.shape[:1])
    return _linear(s, n, w, a["alpha"], bias, scale, also)


def matmul(s: Import, n: OnnxNode) -> Value:
    """MatMul of features and a constant matrix, with an Add of a constant after it as its bias."""
    n.take()
    if n.inputs[0] not in s.values:
        raise GraphError(f"its first input '{n.inputs[0]}' is a constant, expected samples times weights.")
    w = _matrix(s.constant(n, 1, "weights")).T
    bias, also = s.following_bias(n, w.shape[0], 2)
    return _linear(s, n, w, 1.0, bias, 1.0, also)


def batch_normalization(s: Import, n: OnnxNode) -> Value:
    """BatchNormalization; ONNX keeps ``momentum`` of the running statistics where we take it of the new ones."""
    a = n.take(epsilon=1e-5, momentum=0.9, training_mode=0, spatial=1)
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
    for k, array in arrays.items():
        array = weights(array if x.order is None else array[x.order])
        s.weights[f"{node}.{k}"] = array.astype(np.float64) if k.startswith("running") else array
    return s.finish(n, replace(x, name=node), *also)


def local_response_norm(s: Import, n: OnnxNode) -> Value:
    """LRN."""
    a = n.take(size=None, alpha=1e-4, beta=0.75, bias=1.0)
    x = s.tensor(n)
    if len(x.dims) < 2 or not s.is_channel(x, 1) or x.order is not None:
        raise GraphError(f"its input has shape {s.describe(x)}, expected the channels of an image in dimension 1.")
    if not isinstance(a["size"], int) or a["size"] % 2 == 0:
        raise GraphError(f"its size is {a['size']}, expected an odd number of channels.")
    options = {name: shortest(a[theirs]) for name, theirs in (("alpha", "alpha"), ("beta", "beta"), ("k", "bias"))}
    node = s.builder.local_response_norm(x.name, a["size"], **options, name=s.name(n))
    return replace(x, name=s.keep_sign(node, x.name))


def relu(s: Import, n: OnnxNode) -> Value:
    """Relu."""
    n.take()
    return _unary(s, n, s.builder.relu, True)


def sigmoid(s: Import, n: OnnxNode) -> Value:
    """Sigmoid."""
    n.take()
    return _unary(s, n, s.builder.sigmoid, True)


def tanh(s: Import, n: OnnxNode) -> Value:
    """Tanh."""
    n.take()
    return _unary(s, n, lambda x, name: s.builder.tanh(x, name=name), False)


def leaky_relu(s: Import, n: OnnxNode) -> Value:
    """LeakyRelu."""
    slope = shortest(n.take(alpha=0.01)["alpha"])
    return _unary(s, n, lambda x, name: s.builder.leaky_relu(x, slope, name=name), False)


def dropout(s: Import, n: OnnxNode) -> Value:
    """Dropout, its ratio an attribute or an input; active in training whatever the file says."""
    a = n.take(ratio=0.5, seed=None)
    given = s.optional(n, 1, "ratio")
    rate = float(a["ratio"] if given is None else given.ravel()[0])
    x = s.tensor(n)
    if rate == 0:
        return x
    return replace(x, name=s.keep_sign(s.builder.dropout(x.name, shortest(rate), name=s.name(n)), x.name))


def identity(s: Import, n: OnnxNode) -> Value:
    """Identity."""
    n.take()
    return s.value(n)


def cast(s: Import, n: OnnxNode) -> Value:
    """Cast between floating-point types, which the engine's own type replaces."""
    from onnx import TensorProto

    to = n.take(to=None, saturate=1, round_mode="up")["to"]
    if to not in (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16):
        raise GraphError(f"it casts to {TensorProto.DataType.Name(to)}, expected a floating-point type.")
    return s.value(n)


def cast_like(s: Import, n: OnnxNode) -> Value | None:
    """CastLike: a constant, or a value, takes the type of another; all are floating point here."""
    n.take(saturate=1, round_mode="up")
    if n.inputs[0] in s.values:
        return s.value(n)
    s.set_constant(n.outputs[0], s.constant(n, 0, "values"))
    return None


def add(s: Import, n: OnnxNode) -> Value:
    """Add and Sum."""
    n.take()
    return _join(s, n, s.builder.add, 0, "a bias belongs right after a Conv, Gemm or MatMul")


def multiply(s: Import, n: OnnxNode) -> Value:
    """Mul of tensors; one pixel is repeated over the image of another."""
    n.take()
    return _join(s, n, s.builder.multiply, 1, "scale the data or the weights instead, or use BatchNormalization")


def concat(s: Import, n: OnnxNode) -> Value:
    """Concat along the channels."""
    axis = n.take(axis=None)["axis"]
    xs = _together(s, n)
    if not s.is_channel(xs[0], axis):
        raise GraphError(
            f"it joins tensors of shape {s.describe(xs[0])} along axis {axis}, expected the channels (axis {xs[0].dims.index(len(s.shape(xs[0])) - 1)})."
        )
    order = None
    if any(x.order is not None for x in xs):
        parts, start = [], 0
        for x in xs:
            width = s.shape(x)[-1]
            parts.append(start + (np.arange(width) if x.order is None else x.order))
            start += width
        order = np.concatenate(parts)
    if len(xs) == 1:
        return xs[0]
    node = s.keep_sign(s.builder.concat([x.name for x in xs], name=s.name(n)), *(x.name for x in xs))
    return replace(xs[0], name=node, order=order)


def flatten(s: Import, n: OnnxNode) -> Value:
    """Flatten to (N, features)."""
    axis = n.take(axis=1)["axis"]
    x = s.tensor(n)
    if axis != 1 and axis != 1 - len(x.dims):
        raise GraphError(f"its axis is {axis}, expected 1: all dimensions but the samples in one.")
    return s.flat(x, s.name(n))


def reshape(s: Import, n: OnnxNode) -> Value:
    """Reshape to (N, features), or by dimensions of size one."""
    zero = n.take(allowzero=0)["allowzero"]
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
    node = s.keep_sign(s.builder.channel_shuffle(x.name, sizes[1], name=s.name(n)), x.name)
    return s.finish(n, replace(x, name=node), swap[0].outputs[0], back[0].outputs[0])


def _sizes(target: Array, before: Sequence[int], allowzero: bool) -> list[int]:
    """The shape that a Reshape asks for, 0 (the size before) and -1 (the rest) filled in."""
    given = enumerate(int(t) for t in target.ravel())
    sizes = [before[i] if t == 0 and not allowzero and i < len(before) else t for i, t in given]
    if -1 in sizes:
        rest = prod(t for t in sizes if t != -1)
        sizes[sizes.index(-1)] = prod(before) // rest if rest else 0
    return sizes


def squeeze(s: Import, n: OnnxNode) -> Value:
    """Squeeze of spatial dimensions of size one."""
    a = n.take(axes=None)
    given = s.optional(n, 1, "axes")
    x = s.tensor(n)
    sizes = s.onnx_shape(x)
    axes = a["axes"] if given is None else given.ravel().tolist()
    if axes is None:
        axes = [i for i, d in enumerate(x.dims) if d != 0 and sizes[i] == 1]
    return s.squeezed(x, {s.axis(x, int(i)) for i in axes}, s.name(n))


def unsqueeze(s: Import, n: OnnxNode) -> Value:
    """Unsqueeze: more dimensions of size one."""
    a = n.take(axes=None)
    given = s.optional(n, 1, "axes")
    axes = [int(i) for i in (a["axes"] if given is None else given.ravel())]
    x = s.tensor(n)
    rank = len(x.dims) + len(axes)
    new, old = {i % rank for i in axes}, iter(x.dims)
    return replace(x, dims=tuple(ONE if i in new else next(old) for i in range(rank)))


def transpose(s: Import, n: OnnxNode) -> Value:
    """Transpose, which only changes how the file's dimensions map to ours."""
    x = s.tensor(n)
    perm = n.take(perm=None)["perm"] or range(len(x.dims))[::-1]
    if sorted(perm) != list(range(len(x.dims))):
        raise GraphError(f"its perm is {list(perm)}, expected an order of the {len(x.dims)} dimensions of its input.")
    return replace(x, dims=tuple(x.dims[p] for p in perm))


def softmax(s: Import, n: OnnxNode) -> Value:
    """Softmax or LogSoftmax over the channels; at the very end it is dropped, since the loss contains it."""
    x = s.tensor(n)
    axis = n.take(axis=-1 if s.file.opset >= 13 else 1)["axis"]
    first, sizes = s.axis(x, axis), s.onnx_shape(x)
    # Before opset 13 it is over all dimensions from the axis on together.
    over = [i for i in range(first, len(sizes) if s.file.opset < 13 else first + 1) if sizes[i] != 1 or i == first]
    if len(over) != 1 or not s.is_channel(x, over[0]):
        joint = f"the axes {over} together (as softmax is before opset 13)" if len(over) > 1 else f"axis {axis}"
        raise GraphError(f"it is over {joint} of a tensor of shape {s.describe(x)}, expected the channels alone.")
    if not s.is_last(n.outputs[0]):
        if n.kind == "LogSoftmax":
            raise GraphError("it is not the last op of the network, where the loss contains it; use Softmax inside.")
        return _unary(s, n, s.builder.softmax, True)
    note(f"{s.file.path}: {n} at the end is dropped; the network gives logits, as the loss cross_entropy expects")
    return x


def shortest(value: float) -> float:
    """The shortest number that is a file's float32: 0.1 and not 0.10000000149."""
    return float(np.format_float_positional(np.float32(value), unique=True))


def shape(s: Import, n: OnnxNode) -> None:
    """Shape: becomes a constant, in which the number of samples is a stand-in."""
    a = n.take(start=0, end=None)
    s.set_constant(n.outputs[0], np.array(s.onnx_shape(s.tensor(n))[a["start"] : a["end"]], np.int64))


def _linear(
    s: Import, n: OnnxNode, w: Array, alpha: float, bias: Array | None, beta: float, also: tuple[str, ...]
) -> Value:
    x = s.features(n)
    if w.shape[1] != s.shape(x)[1]:
        raise GraphError(f"its weights read {w.shape[1]} features, its input has {s.shape(x)[1]}.")
    if x.order is not None:
        w = w[:, x.order]
    w = w if alpha == 1 else w * w.dtype.type(alpha)
    if bias is not None and beta != 1:
        bias = bias * bias.dtype.type(beta)
    node = s.builder.linear(x.name, w.shape[0], bias is not None, name=s.name(n, n.inputs[1]))
    s.keep(node, w, bias, n.inputs[1])
    return s.finish(n, Value(node, (0, 1)), *also)


def _matrix(w: Array) -> Array:
    if w.ndim != 2:
        raise GraphError(f"its weights have shape {w.shape}, expected a matrix.")
    return w


def _unary(s: Import, n: OnnxNode, build: Callable[..., str], nonnegative: bool) -> Value:
    x = s.tensor(n)
    node = build(x.name, name=s.name(n))
    if nonnegative:
        s.nonnegative.add(node)
    return replace(x, name=node)


def _together(s: Import, n: OnnxNode) -> list[Value]:
    """All inputs of a node, which must be computed from the samples and lie alike."""
    xs = [s.tensor(n, i) for i in range(len(n.inputs)) if has_input(n, i)]
    if any(x.dims != xs[0].dims for x in xs):
        raise GraphError(
            f"its inputs have shapes {' and '.join(map(s.describe, xs))}, flattened, pooled or transposed differently; expected them alike."
        )
    return xs


def _join(s: Import, n: OnnxNode, build: Callable[..., str], neutral: int, instead: str) -> Value:
    known = [i for i, name in enumerate(n.inputs) if name not in s.values]
    for i in known:
        array = s.constant(n, i, "operands")
        if array.size != 1 or (array != neutral).any():
            raise GraphError(
                f"its operand '{n.inputs[i]}' is a constant of shape {array.shape}, expected tensors computed from the samples; {instead}."
            )
    if known:
        rest = replace_inputs(n, [name for name in n.inputs if name in s.values])
        return s.value(rest) if len(rest.inputs) == 1 else _join(s, rest, build, neutral, instead)
    if len(n.inputs) == 1:
        return s.value(n)
    xs = _broadcast(s, _together(s, n))
    first = xs[0].order
    if any(
        (x.order is None) != (first is None) or not np.array_equal(_or_empty(x.order), _or_empty(first)) for x in xs
    ):
        raise GraphError(
            "its inputs are flattened from different shapes, so that their features are in different orders."
        )
    node = s.keep_sign(build([x.name for x in xs], name=s.name(n)), *(x.name for x in xs))
    return replace(xs[0], name=node)


def replace_inputs(n: OnnxNode, inputs: Sequence[str]) -> OnnxNode:
    """The same node with other inputs."""
    return replace(n, inputs=tuple(inputs))


def _or_empty(order: Array | None) -> Array:
    return np.empty(0, np.int64) if order is None else order


def _broadcast(s: Import, xs: list[Value]) -> list[Value]:
    """Images of one pixel repeated to the size of the others."""
    rank = len(s.shape(xs[0]))
    if rank < 3 or xs[0].dims != first_dims(rank):
        return xs
    spatial = max((s.spatial(x) for x in xs), key=prod)
    out = []
    for x in xs:
        if s.spatial(x) != spatial and prod(s.spatial(x)) == 1:
            x = replace(x, name=s.keep_sign(s.builder.upsample(x.name, spatial), x.name))
        out.append(x)
    return out


#: Op type to what imports it.
HANDLERS: dict[str, Callable[[Import, OnnxNode], Any]] = {
    "Add": add,
    "AveragePool": windows.average_pool,
    "BatchNormalization": batch_normalization,
    "Cast": cast,
    "CastLike": cast_like,
    "Concat": concat,
    "Conv": windows.conv,
    "ConvTranspose": windows.conv_transpose,
    "Dropout": dropout,
    "Flatten": flatten,
    "Gemm": gemm,
    "GlobalAveragePool": windows.global_average_pool,
    "GlobalMaxPool": windows.global_max_pool,
    "Identity": identity,
    "LRN": local_response_norm,
    "LeakyRelu": leaky_relu,
    "LogSoftmax": softmax,
    "MatMul": matmul,
    "MaxPool": windows.max_pool,
    "Mul": multiply,
    "Pad": windows.pad,
    "ReduceMax": windows.reduce_max,
    "ReduceMean": windows.reduce_mean,
    "Relu": relu,
    "Reshape": reshape,
    "Resize": windows.resize,
    "Shape": shape,
    "Sigmoid": sigmoid,
    "Softmax": softmax,
    "Squeeze": squeeze,
    "Sum": add,
    "Tanh": tanh,
    "Transpose": transpose,
    "Unsqueeze": unsqueeze,
    "Upsample": windows.resize,
}

#: What to use instead of an op that cannot be imported.
INSTEAD = {
    **dict.fromkeys(("Clip", "Elu", "Selu", "Celu", "Gelu", "Softplus", "ThresholdedRelu", "Mish"), "Relu"),
    "PRelu": "LeakyRelu",
    "HardSigmoid": "Sigmoid",
    "HardSwish": "x * sigmoid(x) (SiLU)",
    "Erf": "Relu (as activation)",
    **dict.fromkeys(("InstanceNormalization", "GroupNormalization", "LayerNormalization"), "BatchNormalization"),
    **dict.fromkeys(("LpPool", "GlobalLpPool"), "MaxPool, AveragePool or GlobalMaxPool"),
    "ReduceSum": "ReduceMean or GlobalAveragePool",
    **dict.fromkeys(("Slice", "Split", "Gather"), "a Conv per part, or a Conv with a stride"),
    "SpaceToDepth": "Conv with a stride",
    "DepthToSpace": "ConvTranspose or Resize",
    **dict.fromkeys(("Sub", "Div"), "Add or Mul, or scale the data"),
    "Einsum": "MatMul",
    **dict.fromkeys(("If", "Loop", "Scan"), "a graph without control flow: export with fixed shapes"),
}
