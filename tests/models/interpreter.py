"""Runs a graph's forward pass with PyTorch's functions, so that networks can be compared with torch modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from lbpar.graph.graph import Graph, Node
from lbpar.graph.op import Input
from lbpar.graph.ops.pooling import AvgPool


def first(x: torch.Tensor) -> torch.Tensor:
    """Channels last to channels first."""
    return x.movedim(-1, 1)


def last(x: torch.Tensor) -> torch.Tensor:
    """Channels first to channels last."""
    return x.movedim(1, -1).contiguous()


def run(graph: Graph, params: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Output of a graph for channels-last samples, in inference mode."""
    values: dict[str, torch.Tensor] = {}
    for node in graph.nodes:
        own = {
            k.rpartition(".")[2]: torch.from_numpy(v) for k, v in params.items() if k.rpartition(".")[0] == node.owner
        }
        ins = [values[i] for i in node.inputs]
        values[node.name] = torch.from_numpy(x) if isinstance(node.op, Input) else _apply(node, ins, own)
        assert tuple(values[node.name].shape) == graph.shapes(len(x))[node.name], node
    return values[graph.output].numpy()


def _apply(node: Node, ins: list[torch.Tensor], own: dict[str, torch.Tensor]) -> torch.Tensor:
    op: Any = node.op
    x, w, b = ins[0], own.get("weight"), own.get("bias")
    rank = x.ndim - 2
    if op.kind in ("conv", "conv_transpose", "max_pool", "avg_pool"):
        assert all(p == q for p, q in op.pad)
        pad = tuple(p for p, _ in op.pad)
    match op.kind:
        case "conv":
            f = getattr(functional, f"conv{rank}d")
            return last(f(first(x), first(w), b, op.stride, pad, op.dilation, op.groups))
        case "conv_transpose":
            f = getattr(functional, f"conv_transpose{rank}d")
            extra = op.output_pad or 0
            return last(f(first(x), first(w), b, op.stride, pad, extra, op.groups, op.dilation))
        case "max_pool":
            f = getattr(functional, f"max_pool{rank}d")
            return last(f(first(x), op.kernel, op.stride, pad, op.dilation, op.ceil_mode))
        case "avg_pool":
            assert isinstance(op, AvgPool)
            f = getattr(functional, f"avg_pool{rank}d")
            return last(f(first(x), op.kernel, op.stride, pad, op.ceil_mode, op.count_include_pad))
        case "global_avg_pool":
            return x.flatten(1, -2).mean(1)
        case "norm":
            y = functional.batch_norm(first(x), own["running_mean"], own["running_var"], w, b, eps=op.eps)
            return last(y)
        case "instance_norm":
            return last(functional.instance_norm(first(x), None, None, w, b, True, 0.0, op.eps))
        case "group_norm":
            return last(functional.group_norm(first(x), op.groups, w, b, op.eps))
        case "layer_norm":
            return functional.layer_norm(x, x.shape[-1:], w, b, op.eps)
        case "linear":
            return functional.linear(x, w, b)
        case "relu":
            return x.relu()
        case "tanh":
            return op.scale * x.tanh()
        case "local_response_norm":
            return last(functional.local_response_norm(first(x), op.size, op.alpha, op.beta, op.k))
        case "softmax":
            return x.softmax(-1)
        case "channel_shuffle":
            return last(functional.channel_shuffle(first(x), op.groups))
        case "leaky_relu":
            return functional.leaky_relu(x, op.slope)
        case "add":
            return torch.stack(ins).sum(0)
        case "concat":
            return torch.cat(ins, -1)
        case "flatten":
            return x.flatten(1)
        case "dropout":
            return x
    raise NotImplementedError(op.kind)
