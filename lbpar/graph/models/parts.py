"""What several families need: channel counts scaled by a width, and convolution + norm + ReLU."""

from __future__ import annotations

from lbpar.config.section import MOST
from lbpar.errors import GraphError
from lbpar.graph.arguments import Ints, Pads
from lbpar.graph.builder import GraphBuilder


def scaled(channels: int, width: float, multiple: int = 1) -> int:
    """Channels times width, rounded to the nearest positive multiple of ``multiple``."""
    number = channels * width / multiple + 0.5
    if number * multiple > MOST:
        raise GraphError(f"width: {width:g} times {channels} channels is more than 2³¹, expected less.")
    return max(1, int(number)) * multiple


def conv_norm_relu(
    g: GraphBuilder,
    x: str,
    filters: int,
    kernel: Ints,
    stride: Ints = 1,
    pad: Pads = 0,
    *,
    conv: str,
    norm: str,
    relu: str,
    eps: float = 1e-5,
) -> str:
    """Convolution without bias, norm and ReLU; ``conv``, ``norm`` and ``relu`` name the three nodes."""
    x = g.conv(x, filters, kernel, stride, pad, bias=False, name=conv)
    return g.relu(g.norm(x, eps=eps, name=norm), name=relu)
