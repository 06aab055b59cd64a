"""A graph in PyTorch, float64, with autograd: the oracle of a whole training step.

Built from torch's own functions, so it shares no arithmetic with lbpar. Import it behind ``pytest.importorskip("torch")``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from lbpar.graph.graph import LOSS, Graph
from lbpar.graph.op import Input
from lbpar.graph.ops.joint import Joint


@dataclass
class Step:
    """Outputs, gradients and statistics of one step, as NumPy arrays in channels-last order."""

    y: dict[str, np.ndarray]
    dy: dict[str, np.ndarray]
    grad: dict[str, np.ndarray]
    state: dict[str, np.ndarray]


def step(
    graph: Graph,
    feeds: Mapping[str, np.ndarray],
    params: Mapping[str, np.ndarray],
    training: bool = True,
    parts: Sequence[int] = (),
) -> Step:
    """Forward and backward of ``graph`` (with its loss, or seeded with ones); dropout must be absent.

    ``parts``: in how many blocks of samples, first spatial dimension, ... each norm is trained on its own; its running
    statistics then stay as they were.
    """
    own = {k: torch.tensor(v, dtype=torch.float64) for k, v in params.items()}
    for name, tensor in own.items():
        tensor.requires_grad_(graph.params()[name].kind != "statistic")
    values: dict[str, torch.Tensor] = {}
    for node in graph.nodes:
        if isinstance(node.op, Input):
            value = torch.tensor(feeds[node.name])
            values[node.name] = value.requires_grad_() if value.is_floating_point() else value
        else:
            mine = {k.rpartition(".")[2]: v for k, v in own.items() if k.rpartition(".")[0] == node.owner}
            values[node.name] = _apply(node.op, [values[i] for i in node.inputs], mine, training, parts)
            values[node.name].retain_grad()
    end = values[LOSS] if LOSS in values else values[graph.output].sum()
    end.backward()
    dy = {k: v.grad.numpy() for k, v in values.items() if v.grad is not None}
    grad = {k: v.grad.numpy() for k, v in own.items() if v.grad is not None}
    return Step(
        {k: v.detach().numpy() for k, v in values.items()}, dy, grad, {k: v.detach().numpy() for k, v in own.items()}
    )


def _first(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(-1, 1)


def _last(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(1, -1)


def _padded(x: torch.Tensor, pad: Any, value: float = 0.0, mode: str = "zeros") -> torch.Tensor:
    """Explicit (possibly asymmetric) padding of a channels-first tensor."""
    around = [p for pair in reversed(pad) for p in pair]
    return functional.pad(x, around, value=value) if mode == "zeros" else functional.pad(x, around, mode=mode)


def _in_parts(x: torch.Tensor, parts: Sequence[int], f: Callable[[torch.Tensor], torch.Tensor], dim: int = 0) -> Any:
    """``f`` of each block of a channels-last tensor; of n blocks the first are one larger."""
    if dim == len(parts):
        return f(x)
    blocks = torch.tensor_split(x, parts[dim], dim)
    return torch.cat([_in_parts(b, parts, f, dim + 1) if b.numel() else b for b in blocks], dim)


def _apply(
    op: Any, xs: list[torch.Tensor], own: dict[str, torch.Tensor], training: bool, parts: Sequence[int] = ()
) -> torch.Tensor:
    x, w, b = xs[0], own.get("weight"), own.get("bias")
    rank = x.ndim - 2
    if isinstance(op, Joint):
        total = torch.zeros((), dtype=torch.float64)
        for part in op.parts:
            head, target = xs[part.x], xs[part.target]
            full = xs[next(p.x for p in op.parts if p.target == part.target)]
            steps = op.strides(tuple(full.shape), tuple(head.shape))
            thin = target[(slice(None), *(slice(None, None, s) for s in steps))]
            total = total + part.loss.factor * _apply(part.loss, [head, thin], own, training)
        return total
    match op.kind:
        case "conv":
            f = getattr(functional, f"conv{rank}d")
            return _last(f(_padded(_first(x), op.pad), _first(w), b, op.stride, 0, op.dilation, op.groups))
        case "conv_transpose":
            f = getattr(functional, f"conv_transpose{rank}d")
            y = f(_first(x), _first(w), b, op.stride, 0, 0, op.groups, op.dilation)
            extra = (
                op.output_pad or (0,) * rank
            )  # torch pads on both sides alike: crop by hand, and lengthen with the bias
            y = functional.pad(y - _bias(b, y), [q for e in reversed(extra) for q in (0, e)]) + _bias(b, y)
            inside = tuple(slice(p, y.shape[2 + i] - q) for i, (p, q) in enumerate(op.pad))
            return _last(y[(slice(None), slice(None), *inside)])
        case "max_pool":
            f = getattr(functional, f"max_pool{rank}d")
            if all(p == q for p, q in op.pad):
                return _last(f(_first(x), op.kernel, op.stride, [p for p, _ in op.pad], op.dilation, op.ceil_mode))
            return _last(f(_padded(_first(x), op.pad, -torch.inf), op.kernel, op.stride, 0, op.dilation))
        case "avg_pool":
            f = getattr(functional, f"avg_pool{rank}d")
            pad = [p for p, _ in op.pad]
            return _last(f(_first(x), op.kernel, op.stride, pad, op.ceil_mode, op.count_include_pad))
        case "global_avg_pool":
            return x.flatten(1, -2).mean(1)
        case "norm" if parts:
            return _in_parts(
                x,
                parts,
                lambda p: _last(functional.batch_norm(_first(p), None, None, w, b, True, op.momentum, op.eps)),
            )
        case "norm":
            y = functional.batch_norm(
                _first(x), own["running_mean"], own["running_var"], w, b, training, op.momentum, op.eps
            )
            return _last(y)
        case "instance_norm":
            return _last(functional.instance_norm(_first(x), None, None, w, b, True, 0.0, op.eps))
        case "group_norm":
            return _last(functional.group_norm(_first(x), op.groups, w, b, op.eps))
        case "layer_norm":
            return functional.layer_norm(x, x.shape[-1:], w, b, op.eps)
        case "linear":
            return functional.linear(x, w, b)
        case "relu" | "sigmoid":
            return getattr(torch, op.kind)(x)
        case "tanh":
            return op.scale * torch.tanh(x)
        case "local_response_norm":
            return _last(functional.local_response_norm(_first(x), op.size, op.alpha, op.beta, op.k))
        case "softmax":
            return x.softmax(-1)
        case "channel_shuffle":
            return _last(functional.channel_shuffle(_first(x), op.groups))
        case "elu":
            return functional.elu(x, op.alpha)
        case "gelu":
            return functional.gelu(x, approximate=op.approximate)
        case "softplus":
            return functional.softplus(x, op.beta)
        case "silu" | "hardswish":
            return getattr(functional, op.kind)(x)
        case "hardsigmoid":  # torch's own has a gradient of 1/6 in float32
            return (op.slope * x + 0.5).clamp(0, 1)
        case "leaky_relu":
            return functional.leaky_relu(x, op.slope)
        case "add":
            return torch.stack(xs).sum(0)
        case "multiply":
            return torch.stack(xs).prod(0)
        case "concat":
            return torch.cat(xs, -1)
        case "flatten":
            return x.flatten(1)
        case "pad" | "crop":
            shapes = [tuple(t.shape) for t in xs]
            return _last(_padded(_first(x), op.sides(shapes), mode=getattr(op, "mode", "zeros")))
        case "upsample" if op.mode == "linear":
            mode = ("linear", "bilinear", "trilinear")[rank - 1]
            y = functional.interpolate(_first(x), scale_factor=op.factor, mode=mode, align_corners=op.align_corners)
            return _last(y)
        case "prelu":
            return _last(functional.prelu(_first(x), w))
        case "upsample":
            for i, f in enumerate(op.factor):
                x = x.repeat_interleave(f, 1 + i)
            return x
        case "cross_entropy" | "focal" | "dice" | "dice_cross_entropy":
            return _class_loss(op, x, xs[1])
        case "mse":
            return functional.mse_loss(x, xs[1])
        case "l1":
            return functional.l1_loss(x, xs[1])
        case "huber":
            return functional.huber_loss(x, xs[1])
        case "bce":
            return functional.binary_cross_entropy_with_logits(x, xs[1])
    raise NotImplementedError(op.kind)


def _class_loss(op: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    ignore = -100 if op.ignore_index is None else op.ignore_index
    weight = None if op.class_weights is None else torch.tensor(op.class_weights, dtype=x.dtype)
    smoothing, gamma = getattr(op, "smoothing", 0.0), getattr(op, "gamma", 0.0)
    entropy = functional.cross_entropy(_first(x), t, weight, ignore_index=ignore, label_smoothing=smoothing)
    known = t != ignore
    if gamma:
        log = functional.cross_entropy(_first(x), t, ignore_index=ignore, reduction="none")
        factor = known if weight is None else weight[torch.where(known, t, 0)] * known
        entropy = (factor * (1 - torch.exp(-log)) ** gamma * log).sum() / factor.sum()
    if op.kind in ("cross_entropy", "focal"):
        return entropy
    p = x.softmax(-1) * known[..., None]
    one = functional.one_hot(torch.where(known, t, 0), x.shape[-1]) * known[..., None]
    p, one = (a.reshape(len(x) if op.per_sample else 1, -1, x.shape[-1]) for a in (p, one))
    each = 1 - (2 * (p * one).sum(1) + op.eps) / (p.sum(1) + one.sum(1) + op.eps)
    classes = torch.ones(x.shape[-1], dtype=x.dtype) if weight is None else weight.clone()
    if not op.background:
        classes[0] = 0
    dice = (each * classes).sum(-1).mean() / classes.sum()
    return dice if op.kind == "dice" else op.cross_entropy * entropy + op.dice * dice


def _bias(b: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor | float:
    return 0.0 if b is None else b.reshape(1, -1, *(1,) * (y.ndim - 2))
