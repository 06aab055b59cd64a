"""Small ONNX files made node by node, what ONNX's reference says of them, and what our executor says of the import."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from lbpar.graph.graph import Graph
from lbpar.models.onnx_import import import_onnx
from tests.util.run import serial


class LRN(OpRun):
    """By ONNX's definition; the reference of some versions (1.23) counts samples where it means channels."""

    op_domain = ""

    def _run(self, x: Any, alpha: float, beta: float, bias: float, size: int) -> tuple[Any]:
        before = (size - 1) // 2
        padded = np.pad(x**2, [(0, 0), (before, size - 1 - before), *[(0, 0)] * (x.ndim - 2)])
        sums = sum(padded[:, i : i + x.shape[1]] for i in range(size))
        return ((x / (bias + alpha / size * sums) ** beta).astype(x.dtype),)


class BatchNormalization(OpRun):
    """With the running statistics, as ONNX says of inference; the reference mixes those of the batch in before opset 14."""

    op_domain = ""

    def _run(self, x: Any, scale: Any, bias: Any, mean: Any, var: Any, epsilon: float, **_: Any) -> tuple[Any]:
        scale, bias, mean, var = (a.reshape(-1, *(1,) * (x.ndim - 2)) for a in (scale, bias, mean, var))
        return ((scale * (x - mean) / np.sqrt(var + epsilon) + bias).astype(x.dtype),)


def reference(model: Any, x: np.ndarray) -> np.ndarray:
    """What ONNX's reference gives for the one output of a file."""
    evaluator = ReferenceEvaluator(model, new_ops=[LRN, BatchNormalization])
    [name] = [n for n in evaluator.input_names if n not in evaluator.rt_inits_]  # weights may be listed too
    return np.asarray(evaluator.run(None, {name: x})[0])


class Net:
    """Nodes one after another; weights are random, of float64 unless said otherwise."""

    def __init__(
        self,
        shape: Sequence[int | str],
        opset: int = 17,
        dtype: Any = np.float64,
        seed: int = 1,
    ) -> None:
        self.rng, self.dtype, self.opset = np.random.default_rng(seed), np.dtype(dtype), opset
        self.shape = list(shape)
        self.nodes: list[Any] = []
        self.tensors: list[Any] = []

    def tensor(self, array: Any, name: str = "") -> str:
        """An initializer."""
        name = name or f"t{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def weight(self, *shape: int, name: str = "", positive: bool = False) -> str:
        """A random initializer of order one over its fan-in."""
        values = self.rng.random(shape) + 0.5 if positive else self.rng.standard_normal(shape)
        scale = 1.0 if positive else np.sqrt(max(1, np.prod(shape[1:])))
        return self.tensor((values / scale).astype(self.dtype), name)

    def add(self, kind: str, *inputs: str, name: str = "", outputs: int = 1, **attributes: Any) -> str:
        """A node; returns its first output."""
        output = f"v{len(self.nodes)}"
        names = [output, *(f"{output}_{i}" for i in range(1, outputs))]
        self.nodes.append(
            helper.make_node(kind, list(inputs), names, name or f"{kind}_{len(self.nodes)}", **attributes)
        )
        return output

    def norm(self, x: str, c: int, **attributes: Any) -> str:
        """BatchNormalization."""
        arrays = [self.weight(c), self.weight(c), self.weight(c), self.weight(c, positive=True)]
        return self.add("BatchNormalization", x, *arrays, **attributes)

    def model(self, output: str) -> Any:
        """The whole file."""
        kind = helper.np_dtype_to_tensor_dtype(self.dtype)
        x = helper.make_tensor_value_info("x", kind, self.shape)
        y = helper.make_empty_tensor_value_info(output)
        y.type.tensor_type.elem_type = kind
        graph = helper.make_graph(self.nodes, "net", [x], [y], self.tensors)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)

    def save(self, output: str, folder: Path) -> Path:
        """Write the file."""
        path = folder / "net.onnx"
        onnx.save(self.model(output), path)
        return path


def ours(path: Path, x: np.ndarray, **options: Any) -> np.ndarray:
    """What the imported network gives for channels-first samples, in float64, as (N, spatial..., C)."""
    graph, weights = import_onnx(path, **options)
    last = np.ascontiguousarray(np.moveaxis(x, 1, -1)).astype(np.float64)
    done = serial(graph, len(x), {"input": last}, state=weights, training=False, dtype=np.float64)
    return done.value(f"{graph.output}:y")


def check(net: Net, output: str, folder: Path, batch: int = 2, tolerance: float = 1e-10, **options: Any) -> Graph:
    """The import, which agrees with ONNX's reference."""
    path = net.save(output, folder)
    sizes = [e if isinstance(e, int) else 6 for e in net.shape[1:]]
    x = net.rng.standard_normal((batch, *sizes)).astype(net.dtype)
    want = reference(str(path), x)
    assert want.size and np.abs(want).max() > 1e-3
    compare(ours(path, x, **options), want, tolerance)
    return import_onnx(path, **options)[0]


def compare(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    """Ours, channels last, against theirs, channels first (dimensions of size one aside)."""
    want = np.moveaxis(want, 1, -1) if want.ndim > 2 else want
    assert got.size == want.size, (got.shape, want.shape)
    np.testing.assert_allclose(got, want.reshape(got.shape), rtol=tolerance, atol=tolerance * np.abs(want).max())


FLOAT = TensorProto.FLOAT
