"""Plain records of the layers with weights, as the papers' formulas need them, and the networks they print."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from lbpar.errors import ConfigError


@dataclass(frozen=True)
class LayerRecord:
    """A layer with weights. Shapes are (height, width, channels) of one sample; (1, 1, features) when fully connected.

    ``kernel`` is (k_h, k_w); ``weights`` counts parameters without biases, as the papers do.
    """

    name: str
    kind: Literal["conv", "fc"]
    in_shape: tuple[int, int, int]
    out_shape: tuple[int, int, int]
    kernel: tuple[int, int]
    weights: int

    @property
    def inputs(self) -> int:
        """Input activations of one sample, d_{i-1}."""
        h, w, c = self.in_shape
        return h * w * c

    @property
    def outputs(self) -> int:
        """Output activations of one sample, d_i."""
        h, w, c = self.out_shape
        return h * w * c


def conv(
    name: str, in_shape: tuple[int, int, int], out_shape: tuple[int, int, int], kernel: int, groups: int = 1
) -> LayerRecord:
    """A convolution with a square ``kernel``."""
    weights = kernel * kernel * in_shape[2] // groups * out_shape[2]
    return LayerRecord(name, "conv", in_shape, out_shape, (kernel, kernel), weights)


def fc(name: str, inputs: int, outputs: int) -> LayerRecord:
    """A fully connected layer."""
    return LayerRecord(name, "fc", (1, 1, inputs), (1, 1, outputs), (1, 1), inputs * outputs)


def alexnet(*, grouped: bool = True, classes: int = 1000, first_fc: int = 6 * 6 * 256) -> tuple[LayerRecord, ...]:
    """AlexNet's eight weighted layers.

    Published variants differ. ``grouped``: 60,954,656 weights, the original (Gholami et al.). ``grouped=False,
    first_fc=7 * 7 * 256`` is close to OptCNN's, about 74.5 M (:mod:`lbpar.papers.optcnn`).
    """
    g = 2 if grouped else 1
    return (
        conv("conv1", (227, 227, 3), (55, 55, 96), 11),
        conv("conv2", (27, 27, 96), (27, 27, 256), 5, g),
        conv("conv3", (13, 13, 256), (13, 13, 384), 3),
        conv("conv4", (13, 13, 384), (13, 13, 384), 3, g),
        conv("conv5", (13, 13, 384), (13, 13, 256), 3, g),
        fc("fc6", first_fc, 4096),
        fc("fc7", 4096, 4096),
        fc("fc8", 4096, classes),
    )


def vgg16(classes: int = 1000) -> tuple[LayerRecord, ...]:
    """VGG-16's sixteen weighted layers, 138.3 M weights."""
    layers: list[LayerRecord] = []
    size, channels = 224, 3
    for block, (repeats, filters) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), 1):
        for i in range(1, repeats + 1):
            layers.append(conv(f"conv{block}_{i}", (size, size, channels), (size, size, filters), 3))
            channels = filters
        size //= 2
    sizes = (size * size * channels, 4096, 4096, classes)
    return (*layers, *(fc(f"fc{6 + i}", sizes[i], sizes[i + 1]) for i in range(3)))


NETWORKS: dict[str, Callable[[], tuple[LayerRecord, ...]]] = {"alexnet": alexnet, "vgg16": vgg16}


def network(name: str) -> tuple[LayerRecord, ...]:
    """The records of a network by name."""
    if name not in NETWORKS:
        raise ConfigError(f"paper formulas: got network {name!r}; expected one of {', '.join(sorted(NETWORKS))}")
    return NETWORKS[name]()


def total_weights(layers: Iterable[LayerRecord]) -> int:
    """Weights of all layers."""
    return sum(layer.weights for layer in layers)
