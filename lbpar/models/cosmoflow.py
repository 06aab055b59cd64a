"""CosmoFlow (Mathuriya et al. 2018): a 3-D network that estimates cosmological parameters from dark-matter volumes."""

from __future__ import annotations

from typing import Annotated, Literal

from lbpar.config.section import BelowOne, Count, Flag, Shape
from lbpar.errors import GraphError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.models.parts import Width, about, scaled


def cosmoflow(
    *,
    classes: Annotated[Count, about("Number of estimated parameters (a regression: train with `loss: mse`).")] = 4,
    input: Annotated[
        Shape, about("Sample shape (D, H, W, C); 128, 256 and 512 are usual extents, and give 5, 6 and 7 blocks.")
    ] = (128, 128, 128, 4),
    width: Width = 1.0,
    variant: Annotated[
        Literal["mlperf", "spatial"],
        about(
            '"mlperf": as the MLPerf HPC benchmark, 32 to 512 filters and max pooling. "spatial": as studies of spatial parallelism '
            "use it, 16 to 256 filters, overlapping average pooling and wider linear layers."
        ),
    ] = "mlperf",
    norm: Annotated[Flag, about("Batch normalisation instead of the convolutions' bias.")] = False,
    dropout: Annotated[BelowOne, about("Rate after the hidden linear layers.")] = 0.5,
) -> Graph:
    """CosmoFlow: blocks of convolution, leaky ReLU and a halving pool until about 4 x 4 x 4 is left, then three linear layers.

    Notes
    -----
    Scale the samples (log(1 + x)) and the targets (to [-1, 1]) beforehand; the last activation is 1.2 * tanh(x). Initial weights are
    those of the originals: Glorot's for "mlperf", He's for "spatial".
    """
    if len(input) != 4 or min(input[:-1]) < 8:
        raise GraphError(f"input: got {list(input)}, expected [D, H, W, C] with extents of at least 8.")
    mlperf = variant == "mlperf"
    first, most = (32, 512) if mlperf else (16, 256)
    init: Literal["he", "glorot"] = "glorot" if mlperf else "he"
    g = GraphBuilder(input, name="cosmoflow")
    x = g.input
    for i in range(1, min(input[:-1]).bit_length() - 2):
        filters = scaled(min(first * 2 ** (i - 1), most), width)
        x = g.conv(x, filters, 3, pad=1, bias=not norm, init=init, name=f"conv{i}")
        if norm:
            x = g.norm(x, momentum=0.01, name=f"norm{i}")
        x = g.leaky_relu(x, 0.3, name=f"act{i}")
        x = g.max_pool(x, 2, name=f"pool{i}") if mlperf else g.avg_pool(x, 3, 2, 1, name=f"pool{i}")
    x = g.flatten(x, name="flatten")
    for i, features in enumerate((128, 64) if mlperf else (2048, 256), 1):
        x = g.leaky_relu(g.linear(x, scaled(features, width), init=init, name=f"fc{i}"), 0.3, name=f"fc{i}.act")
        x = g.dropout(x, dropout, name=f"fc{i}.dropout")
    return g.build(g.tanh(g.linear(x, classes, init=init, name="fc3"), 1.2, name="output"))
