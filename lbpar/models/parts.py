"""What several families need: the options that all have, channel counts scaled by a width, and convolution + norm + ReLU.

The options of a builder are its keyword arguments; their types carry what docs/networks.md says of them.
"""

from __future__ import annotations

from math import gcd
from typing import Annotated, Any, Literal

from pydantic import Field

from lbpar.config.section import MOST, Count, Flag, Positive, Shape
from lbpar.errors import GraphError
from lbpar.graph.arguments import Ints, Pads
from lbpar.graph.builder import GraphBuilder


def about(description: str) -> Any:
    """Annotation: what docs/networks.md says of an option."""
    return Field(description=description)


Classes = Annotated[Count, about("Size of the output.")]
Image = Annotated[Shape, about("Sample shape (H, W, C).")]
Width = Annotated[Positive, about("Factor of all channel counts.")]

Normalisation = Flag | Literal["batch", "instance", "group"]
NORMS = "`batch` (or true), `instance`, `group` (of up to 32 groups), or none (false)."


def normalised(g: GraphBuilder, x: str, norm: Normalisation, name: str) -> str:
    """The norm of a kind; groups are as many of 32 as divide the channels."""
    if norm == "group":
        return g.group_norm(x, gcd(32, g.shape(x)[-1]), name=name)
    return g.instance_norm(x, name=name) if norm == "instance" else g.norm(x, name=name)


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
