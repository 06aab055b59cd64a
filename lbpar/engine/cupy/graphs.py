"""cuDNN's graphs: of one convolution, with its bias and ReLU where cuDNN fuses them, and of one norm.

Of arrays cuDNN gets addresses, extents and strides; that memory is channels-last it learns from the strides alone. What
it does not take, or should not be trusted with, is left to the kernels of our own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from lbpar.engine.base import LocalWindow
from lbpar.engine.cupy.kernels import address
from lbpar.engine.cupy.launch_conv import Geometry, thin
from lbpar.engine.cupy.plans import MOST_ELEMENTS, OURS, TYPES, Plan, Plans, strides
from lbpar.engine.device import Array

if TYPE_CHECKING:
    from lbpar.engine.cupy.device import CupyDevice

log = logging.getLogger(__name__)

OLDEST_DEEP = 91600
"""First cuDNN, as it counts its versions, that convolves in three dimensions right: between 9.8 and 9.15 half types and TF32 did not."""

MOST_TIMED, MOST_NORMS_TIMED = 16, 4
"""Plans that are tried beside each other: the heuristics name the better ones first. Those of norms are compiled one by one."""

_ROW = {"float16": 8, "bfloat16": 8, "tf32": 4}
"""Channels that tensor cores want multiples of; what has others is slow in cuDNN, or has no plan."""

RESULT = {"forward": "y", "data": "dx", "weights": "dw"}
UIDS = {
    name: i
    for i, name in enumerate(
        ("x", "w", "b", "y", "dx", "dw", "dy", "scale", "residual", "mean", "invstd", "old_mean", "old_var", "new_mean", "new_var", "eps", "momentum"),
        1,
    )
}  # fmt: skip

_TRIAL = Geometry.of(1, (8, 8), (8, 8), (LocalWindow(1),) * 2, 1, 8, 8)


class Graphs(Plans):
    """Plans of convolutions and norms on one device and stream; parameters as of `Plans`."""

    def __init__(
        self, engine: CupyDevice, cudnn: Any, tf32: bool, autotune: bool, workspace: int, properties: Any = None
    ) -> None:
        super().__init__(engine, cudnn, tf32, autotune, workspace, properties)
        self._values: dict[float, np.ndarray] = {}
        self._graph("forward", _TRIAL, "float32", False, False).validate()  # an incomplete package shows here

    def plan(self, what: str, g: Geometry, dtype: str, bias: bool = False, relu: bool = False) -> Plan | None:
        """The plan of a pass ("forward", "data" or "weights"), or None where our kernels compute it."""
        key = (what, g, dtype, bias, relu)
        if key in self._plans:
            return self._plans[key]
        unsuited = self.unsuited(g, dtype)
        found = None if unsuited else self._planned(key, dtype, lambda: self._graph(*key), MOST_TIMED)
        if found is None and not (bias or relu):
            log.info("our kernels convolve %s (%s) of %s: %s", what, dtype, g, unsuited or "cuDNN has no plan")
        return self._keep(key, found)

    def apart(self, g: Geometry, dtype: str, bias: bool, relu: bool) -> bool:
        """Whether cuDNN convolves, but leaves the bias or ReLU to others: it has no ReLU without a bias."""
        fused = not (bias or relu) or self.plan("forward", g, dtype, bias, relu) is not None
        return not fused and self.plan("forward", g, dtype) is not None

    def unsuited(self, g: Geometry, dtype: str) -> str:
        """Why cuDNN is not asked for a convolution, or ""."""
        if dtype not in TYPES:
            return f"it has no {dtype}"
        if 0 in (g.x_size, g.y_size, g.w_size):
            return "there is nothing to compute"
        if max(g.x_size, g.y_size, g.w_size) > MOST_ELEMENTS:
            return "indices of 64 bits"
        if min(min(before, after) for before, after in _pads(g)) < 0:
            return "it has no negative pads, which blocks have that hold more than is read"
        if thin(g):
            return "few channels in a group"
        if g.deep and self._version < OLDEST_DEEP:
            return f"version {self._version} is not trusted in three dimensions, {OLDEST_DEEP} or newer is"
        row = _ROW.get("tf32" if dtype == "float32" and self._tf32 else dtype, 1)
        if (g.channels % row or g.filters % row) and not self._autotune:
            return f"channels of a group are no multiples of {row}"
        return ""

    def convolve(
        self, key: tuple[str, Geometry, str, bool, bool], arrays: Mapping[str, Array | None], ours: Callable[[], None]
    ) -> None:
        """Compute a pass that has a `plan`, whose arguments ``key`` holds; ``ours`` does so by our kernels."""
        self.run(key, _addresses(arrays), ours)

    def norm_plan(self, shape: tuple[int, ...], dtype: str, residual: bool, relu: bool) -> Plan | None:
        """The plan of a batch norm of x, of (N, *S, C), by its own statistics, or None where our kernels compute it."""
        suited = prod(shape[:-1]) > 1  # of one value there is no unbiased variance, which cuDNN always computes
        return self._norm_plan(("norm", shape, dtype, residual, relu), suited, self._norm_graph)

    def norm(
        self,
        key: tuple[tuple[int, ...], str, bool, bool],
        arrays: Mapping[str, Array | None],
        eps: float,
        ours: Callable[[], None],
    ) -> bool:
        """Compute a batch norm that has a `norm_plan`, whose arguments ``key`` holds; False where ``ours`` did."""
        return self.run(("norm", *key), _addresses(arrays), ours, self._single({"eps": eps, "momentum": 1.0}))

    def sample_norm_plan(self, shape: tuple[int, ...], dtype: str) -> Plan | None:
        """The plan of an instance or layer norm of x, of (rows, positions, groups, channels of a group), or None where our kernels compute
        it: group norms, too, which cuDNN does not have."""
        _, positions, groups, width = shape
        return self._norm_plan(
            ("sample norm", shape, dtype), width == 1 or positions * groups == 1, self._sample_norm_graph
        )

    def sample_norm(
        self,
        key: tuple[tuple[int, ...], str],
        arrays: Mapping[str, Array | None],
        eps: float,
        ours: Callable[[], None],
    ) -> bool:
        """As `norm`, of a `sample_norm_plan`."""
        return self.run(("sample norm", *key), _addresses(arrays), ours, self._single({"eps": eps}))

    def _norm_plan(self, key: tuple[Any, ...], suited: bool, declare: Callable[..., Any]) -> Plan | None:
        """The plan of a graph that is declared for what a key holds behind its name: shape, type and flags. None also where timing has
        chosen our kernels."""
        if key not in self._plans:
            _, shape, dtype, *_ = key
            suited = suited and dtype in TYPES and 0 < prod(shape) <= MOST_ELEMENTS
            plan = self._planned(key, dtype, lambda: declare(*key[1:]), MOST_NORMS_TIMED) if suited else None
            self._keep(key, plan)
        found = self._plans[key]
        return None if found is None or found.choice == OURS else found

    def _single(self, values: Mapping[str, float]) -> dict[int, int]:
        """Where single values lie on the host, by the numbers of their tensors."""
        kept = (self._values.setdefault(value, np.array(value, np.float32)) for value in values.values())
        return {UIDS[name]: value.ctypes.data for name, value in zip(values, kept, strict=True)}

    def _graph(self, what: str, g: Geometry, dtype: str, bias: bool, relu: bool) -> Any:
        graph = self._begin(dtype)
        first = 0 if g.deep else 1
        inner, outer, win = g.inner[first:], g.outer[first:], g.win[first:]
        x = (g.samples, g.groups * g.channels, *inner)
        y = (g.samples, g.groups * g.filters, *outer)
        w = (g.groups * g.filters, g.channels, *(d.kernel for d in win))  # groups follow from the channels
        dims = {"x": x, "dx": x, "y": y, "dy": y, "w": w, "dw": w, "b": (1, y[1], *(1 for _ in win))}

        def tensor(name: str) -> Any:
            return self._tensor(graph, name, dims[name], dtype)

        pads = _pads(g)[first:]
        window = {
            "pre_padding": [before for before, _ in pads],
            "post_padding": [after for _, after in pads],
            "stride": [d.stride for d in win],
            "dilation": [d.dilation for d in win],
        }
        if what == "data":
            out = graph.conv_dgrad(loss=tensor("dy"), filter=tensor("w"), **window)
        elif what == "weights":
            out = graph.conv_wgrad(image=tensor("x"), loss=tensor("dy"), **window)
        else:
            out = graph.conv_fprop(image=tensor("x"), weight=tensor("w"), **window)
            if bias:
                out = graph.bias(input=out, bias=tensor("b"))
            if relu:
                out = graph.relu(input=out)
        self._result(out, RESULT[what], dims[RESULT[what]], dtype)
        return graph

    def _norm_graph(self, shape: tuple[int, ...], dtype: str, residual: bool, relu: bool) -> Any:
        graph = self._begin(dtype)
        samples, *extents, channels = shape
        x = (samples, channels, *(1 for _ in range(2 - len(extents))), *extents)
        vector = (1, channels, *(1 for _ in x[2:]))
        names = {"scale": "scale", "bias": "b", "in_running_mean": "old_mean", "in_running_var": "old_var"}
        vectors = {arg: self._tensor(graph, name, vector, "float32") for arg, name in names.items()}
        eps, momentum = (self._single_tensor(graph, name, len(x)) for name in ("eps", "momentum"))
        given = self._tensor(graph, "x", x, dtype)
        out, *found = graph.batchnorm(input=given, **vectors, epsilon=eps, momentum=momentum)
        if residual:
            out = graph.add(a=out, b=self._tensor(graph, "residual", x, dtype))
        if relu:
            out = graph.relu(input=out)
        self._result(out, "y", x, dtype)
        for statistic, name in zip(found, ("mean", "invstd", "new_mean", "new_var"), strict=True):
            self._result(statistic, name, vector, "float32")
        return graph

    def _sample_norm_graph(self, shape: tuple[int, ...], dtype: str) -> Any:
        graph, (rows, positions, groups, width) = self._begin(dtype), shape
        x, vector = (rows, groups * width, 1, positions), (1, groups * width, 1, 1)
        norm = graph.instancenorm if width == 1 else graph.layernorm
        out, *found = norm(
            norm_forward_phase=self._cudnn.norm_forward_phase.TRAINING,  # which gives the statistics
            input=self._tensor(graph, "x", x, dtype),
            scale=self._tensor(graph, "scale", vector, "float32"),
            bias=self._tensor(graph, "b", vector, "float32"),
            epsilon=self._single_tensor(graph, "eps", len(x)),
        )
        self._result(out, "y", x, dtype)
        for statistic, name in zip(found, ("mean", "invstd"), strict=True):
            self._result(statistic, name, (rows, groups, 1, 1), "float32")
        return graph

    def _tensor(self, graph: Any, name: str, shape: Sequence[int], dtype: str, **others: Any) -> Any:
        kind = getattr(self._cudnn.data_type, TYPES[dtype])
        return graph.tensor(dim=list(shape), stride=strides(shape), data_type=kind, uid=UIDS[name], **others)

    def _single_tensor(self, graph: Any, name: str, dims: int) -> Any:
        """A value on the host."""
        return self._tensor(graph, name, (1,) * dims, "float32", is_pass_by_value=True)

    def _result(self, tensor: Any, name: str, shape: Sequence[int], dtype: str) -> None:
        tensor.set_output(True).set_data_type(getattr(self._cudnn.data_type, TYPES[dtype])).set_uid(UIDS[name])
        tensor.set_dim(list(shape)).set_stride(strides(shape))


def _addresses(arrays: Mapping[str, Array | None]) -> dict[int, int]:
    """Where arrays lie, by the numbers of their tensors."""
    return {UIDS[name]: address(a) for name, a in arrays.items() if a is not None}


def _pads(g: Geometry) -> list[tuple[int, int]]:
    """Zeros before and behind x along each dimension: as many as the outputs read; none where some of x is left over."""
    out = []
    for d, inner, outer in zip(g.win, g.inner, g.outer, strict=True):
        after = (outer - 1) * d.stride + (d.kernel - 1) * d.dilation + 1 - d.pad - inner
        out.append((d.pad, 0 if -d.stride < after < 0 else after))
    return out
