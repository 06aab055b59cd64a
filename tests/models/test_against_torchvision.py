"""Outputs of whole networks against those that torchvision 0.29 gave for the same weights and samples.

The figures below were computed once with torchvision's modules, in float64 and inference mode, from the weights and
samples that ``state_dict`` and ``samples`` make; they hold every stride, pool, epsilon and order of concatenation.
"""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from lbpar.models.registry import build_model
from lbpar.models.torch_names import from_torch

torch = pytest.importorskip("torch")

from tests.models.interpreter import run

# Network: extent of the square samples, and the first outputs of both samples.
EXPECTED: dict[str, tuple[int, list[list[float]]]] = {
    "resnet18": (48, [[12.15509616, 20.1447714, 46.78366343], [14.65818892, 29.6866029, 45.33367657]]),
    "resnet50": (48, [[-505.833879, 7258.206367, 3117.909164], [-613.5789285, 7188.430505, 3201.076335]]),
    "densenet121": (48, [[3.04665933, -3.03422857, -2.033068143], [3.226318206, -2.777874106, -2.029908179]]),
    "inception_v3": (80, [[0.2534388225, 2.626897952, 0.2158518725], [0.2477482208, 2.632740928, 0.2277778563]]),
}


def uniform(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers in [0, 1) that depend on a name only (a frozen generator)."""
    return np.random.RandomState(zlib.crc32(name.encode())).random_sample(shape)


def state_dict(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Weights in PyTorch's order that keep activations of order one."""
    out = {}
    for name, shape in shapes.items():
        u = uniform(name, shape)
        if len(shape) > 1:
            out[name] = (u - 0.5) * np.sqrt(24 / np.prod(shape[1:]))
        else:
            out[name] = u + 0.5 if name.endswith(("weight", "running_var")) else (u - 0.5) / 5
    return out


def samples(extent: int) -> np.ndarray:
    """Two samples, (N, C, H, W)."""
    return uniform("samples", (2, 3, extent, extent)) * 2 - 1


@pytest.mark.parametrize("name", EXPECTED)
def test_outputs(name: str) -> None:
    extent, expected = EXPECTED[name]
    graph = build_model(name, input=(extent, extent, 3))
    shapes = {k: p.shape for k, p in graph.params().items()}
    state = state_dict({k: (s[0], s[-1], *s[1:-1]) if len(s) > 2 else s for k, s in shapes.items()})
    y = run(graph, from_torch(graph, state), np.ascontiguousarray(np.moveaxis(samples(extent), 1, -1)))
    np.testing.assert_allclose(y[:, :3], expected, rtol=1e-7)
