"""The same network in PyTorch, as its users would write it: modules, in-place relu, channels-last memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lbpar.graph.graph import LOSS, Graph


class TorchNet(nn.Module):
    """A graph (less its loss) as a PyTorch module.

    Activations are logical (N, C, *S); convert inputs and module to ``torch.channels_last`` to compute in that order.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        shapes = graph.shapes(1)
        self.layers = nn.ModuleDict()
        for node in graph.ops:
            if node.name == LOSS:
                continue
            xs = [shapes[i] for i in node.inputs]
            alone = len(graph.consumers(node.inputs[0])) == 1
            layer = _module(node.op, xs[0], alone)
            if layer is not None:
                self.layers[node.name.replace(".", "/")] = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = {"input": x}
        left = {n.name: len(self.graph.consumers(n.name)) for n in self.graph.nodes}
        for node in self.graph.ops:
            if node.name == LOSS:
                continue
            xs = [values[i] for i in node.inputs]
            values[node.name] = self._run(node.name, node.op.kind, xs)
            for i in node.inputs:
                left[i] -= 1
                if left[i] == 0:
                    del values[i]
        return values[self.graph.output]

    def _run(self, name: str, kind: str, xs: list[torch.Tensor]) -> torch.Tensor:
        if kind == "add":
            return xs[0] + xs[1]
        if kind == "multiply":
            return xs[0] * xs[1]
        if kind == "concat":
            return torch.cat(xs, 1)
        if kind == "flatten":
            return torch.flatten(xs[0], 1)
        if kind == "global_avg_pool":
            return xs[0].mean(dim=tuple(range(2, xs[0].ndim)))
        y = self.layers[name.replace(".", "/")](xs[0])
        return self.graph[name].op.scale * y if kind == "tanh" else y  # type: ignore[attr-defined]


def _module(op: Any, x: tuple[int, ...], alone: bool) -> nn.Module | None:
    rank = len(x) - 2
    conv: Any
    pool: Any
    kind: Any
    match op.kind:
        case "conv":
            conv = {2: nn.Conv2d, 3: nn.Conv3d}[rank]
            pad = tuple(p for p, _ in op.pad)
            return conv(x[-1], op.filters, op.kernel, op.stride, pad, op.dilation, op.groups, op.bias)
        case "conv_transpose":
            conv = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[rank]
            pad = tuple(p for p, _ in op.pad)
            return conv(
                x[-1], op.filters, op.kernel, op.stride, pad, op.output_pad or 0, op.groups, op.bias, op.dilation
            )
        case "norm":
            kind = {0: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[rank]
            return kind(x[-1], op.eps, op.momentum, op.affine)
        case "max_pool":
            pool = {2: nn.MaxPool2d, 3: nn.MaxPool3d}[rank]
            return pool(op.kernel, op.stride, tuple(p for p, _ in op.pad), op.dilation, ceil_mode=op.ceil_mode)
        case "avg_pool":
            pool = {2: nn.AvgPool2d, 3: nn.AvgPool3d}[rank]
            return pool(op.kernel, op.stride, tuple(p for p, _ in op.pad), op.ceil_mode, op.count_include_pad)
        case "linear":
            return nn.Linear(x[-1], op.features, op.bias)
        case "relu":
            return nn.ReLU(inplace=alone)
        case "leaky_relu":
            return nn.LeakyReLU(op.slope, inplace=alone)
        case "sigmoid":
            return nn.Sigmoid()
        case "tanh":
            return nn.Tanh()
        case "dropout":
            return nn.Dropout(op.rate)
        case "upsample":
            return nn.Upsample(scale_factor=tuple(float(f) for f in op.factors))
    return None
