"""Convolutions by cuDNN: graphs of one convolution, with its bias and ReLU where cuDNN fuses them, each planned once.

Of arrays cuDNN gets addresses, extents and strides; that memory is channels-last it learns from the strides alone. What
it does not take, or should not be trusted with, is left to the kernels of our own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lbpar.engine.base import LocalWindow
from lbpar.engine.cupy.kernels import address
from lbpar.engine.cupy.launch_conv import Geometry, thin
from lbpar.engine.device import Array

if TYPE_CHECKING:
    from lbpar.engine.cupy.device import CupyDevice

log = logging.getLogger(__name__)

TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BFLOAT16"}
"""Element types that graphs take; sums are float32 in all of them."""

OLDEST_DEEP = 91600
"""First cuDNN, as it counts its versions, that convolves in three dimensions right: between 9.8 and 9.15 half types and TF32 did not."""

ALIGNMENT = 16
"""Bytes that cuDNN takes addresses to be multiples of."""

MOST_ELEMENTS = 2**31 - 1
MOST_PLANS = 4096
MOST_TIMED = 16
"""Plans that are tried beside each other: the heuristics name the better ones first."""

_REPEATS = 3
_ROW = {"float16": 8, "bfloat16": 8, "tf32": 4}
"""Channels that tensor cores want multiples of; what has others is slow in cuDNN, or has no plan."""

RESULT = {"forward": "y", "data": "dx", "weights": "dw"}
UIDS = {"x": 1, "w": 2, "b": 3, "y": 4, "dx": 5, "dw": 6, "dy": 7}

_TRIAL = Geometry.of(1, (8, 8), (8, 8), (LocalWindow(1),) * 2, 1, 8, 8)

Choice = tuple[int, int]
"""A plan's index in its graph, and the bytes of workspace that it needs."""

OURS: Choice = (-1, 0)


@dataclass
class Plan:
    """A graph, the plans of it that may run, and the one that does."""

    graph: Any
    candidates: Sequence[Choice]
    choice: Choice


Times = Mapping[Hashable, Mapping[Choice, float]]
"""Seconds of the plans of each pass."""


class Graphs:
    """Plans of convolutions on one device and stream.

    Parameters
    ----------
    engine : CupyDevice
        Whose memory and stream are used.
    cudnn : module
        Of the package nvidia-cudnn-frontend.
    tf32 : bool
        Float32 may be multiplied in TF32.
    autotune : bool
        Time the plans, and our own kernels beside them, when a convolution is first computed. Else cuDNN's heuristics choose.
    workspace : int
        Most bytes that a plan may take for itself.
    properties : cudnn.device_properties, optional
        Plan for a described device, without one.

    Attributes
    ----------
    times : dict
        What was timed and not yet chosen from. Until then the heuristics' choice runs: ranks that compute the same thing, such as the
        gradient of a replicated weight, must not do so by different plans.
    """

    def __init__(
        self, engine: CupyDevice, cudnn: Any, tf32: bool, autotune: bool, workspace: int, properties: Any = None
    ) -> None:
        self._engine, self._cudnn = engine, cudnn
        self._tf32, self._autotune, self._workspace = tf32, autotune, workspace
        self._made_for: dict[str, Any] = {"device_property": properties}
        if properties is None:
            self._handle = cudnn.create_handle()
            cudnn.set_stream(handle=self._handle, stream=engine.stream.ptr)
            self._made_for = {"handle": self._handle}
        self._version: int = cudnn.backend_version()
        self._refusals = refusals(cudnn)
        self._plans: dict[Hashable, Plan | None] = {}
        self.times: dict[Hashable, dict[Choice, float]] = {}
        self._chosen: dict[Hashable, Choice] = {}
        self._graph("forward", _TRIAL, "float32", False, False).validate()  # an incomplete package shows here

    def plan(self, what: str, g: Geometry, dtype: str, bias: bool = False, relu: bool = False) -> Plan | None:
        """The plan of a pass ("forward", "data" or "weights"), or None where our kernels compute it."""
        key = (what, g, dtype, bias, relu)
        if key not in self._plans:
            if len(self._plans) >= MOST_PLANS:  # varying shapes must not grow memory without bound
                self._plans.clear()
            unsuited = self.unsuited(g, dtype)
            self._plans[key] = None if unsuited else self._planned(*key)
            if self._plans[key] is None and not (bias or relu):
                log.info("our kernels convolve %s (%s) of %s: %s", what, dtype, g, unsuited or "cuDNN has no plan")
        return self._plans[key]

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

    def choose(self, found: Sequence[Times]) -> None:
        """Of what all ranks have timed, take the plans that were fastest on those ranks together: the same on all of them."""
        for key in {key for times in found for key in times}:
            given = [times[key] for times in found if key in times]
            shared = sorted(set.intersection(*map(set, given)))
            if shared:
                self._chosen[key] = min(shared, key=lambda choice: sum(times[choice] for times in given))
            if (plan := self._plans.get(key)) is not None:
                plan.choice = self._choice(key, plan.candidates)
        self.times = {}

    def _choice(self, key: Hashable, candidates: Sequence[Choice]) -> Choice:
        chosen = self._chosen.get(key, candidates[0])
        return chosen if chosen in candidates else candidates[0]

    def run(self, key: Hashable, arrays: Mapping[str, Array | None], ours: Callable[[], None]) -> None:
        """Compute a pass that has a `plan`, whose arguments ``key`` holds; ``ours`` does so by our kernels."""
        pack, plan = {UIDS[name]: address(a) for name, a in arrays.items() if a is not None}, self._plans[key]
        assert plan is not None
        if any(at % ALIGNMENT for at in pack.values()):
            ours()
            return
        if self._autotune and key not in self._chosen and key not in self.times:
            self.times[key] = self._timed(plan, pack, ours)
        self._execute(plan, plan.choice, pack, ours)

    def _execute(self, plan: Plan, choice: Choice, pack: dict[int, int], ours: Callable[[], None]) -> None:
        index, nbytes = choice
        if choice == OURS:
            ours()
            return
        workspace = self._engine.empty((nbytes,), np.uint8) if nbytes else None  # given back in the stream's order
        at = 0 if workspace is None else address(workspace)
        plan.graph.execute_plan_at_index(pack, at, index, handle=self._handle)

    def _timed(self, plan: Plan, pack: dict[int, int], ours: Callable[[], None]) -> dict[Choice, float]:
        times: dict[Choice, float] = {}
        for choice in plan.candidates:
            self._execute(plan, choice, pack, ours)  # the first run loads kernels
            start = self._engine.mark()
            for _ in range(_REPEATS):
                self._execute(plan, choice, pack, ours)
            times[choice] = self._engine.elapsed(start, self._engine.mark())
        return times

    def _planned(self, what: str, g: Geometry, dtype: str, bias: bool, relu: bool) -> Plan | None:
        heuristics, candidates = self._cudnn.heur_mode, []
        try:
            graph = self._graph(what, g, dtype, bias, relu)
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([heuristics.A, heuristics.FALLBACK])
        except self._refusals as error:
            log.debug("cuDNN refuses %s (%s) of %s: %s", what, dtype, g, error)
            return None
        graph.deselect_numeric_notes(self._unwanted(dtype))
        graph.deselect_workspace_greater_than(self._workspace)
        for index in range(graph.get_execution_plan_count()):
            try:
                graph.build_plan_at_index(index)
            except self._refusals:  # deselected, or without a kernel for this device
                continue
            nbytes = graph.get_workspace_size_plan_at_index(index)
            if nbytes <= self._workspace:
                candidates.append((index, nbytes))
            if len(candidates) == (MOST_TIMED if self._autotune else 1):
                break
        if not candidates:
            return None
        candidates += [OURS] if self._autotune else []
        return Plan(graph, candidates, self._choice((what, g, dtype, bias, relu), candidates))

    def _unwanted(self, dtype: str) -> list[Any]:
        """Notes of plans that give other digits: in another type, with sums in one, or not the same each time."""
        notes = self._cudnn.numerical_note
        found = [notes.NONDETERMINISTIC, notes.REDUCED_PRECISION_REDUCTION]
        if dtype == "float32" and not self._tf32:
            found += [notes.DOWN_CONVERT_INPUTS, notes.TENSOR_CORE]
        return found

    def _graph(self, what: str, g: Geometry, dtype: str, bias: bool, relu: bool) -> Any:
        types = self._cudnn.data_type
        kind = getattr(types, TYPES[dtype])
        graph = self._cudnn.pygraph(
            io_data_type=kind, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, **self._made_for
        )
        first = 0 if g.deep else 1
        inner, outer, win = g.inner[first:], g.outer[first:], g.win[first:]
        x = (g.samples, g.groups * g.channels, *inner)
        y = (g.samples, g.groups * g.filters, *outer)
        w = (g.groups * g.filters, g.channels, *(d.kernel for d in win))  # groups follow from the channels
        dims = {"x": x, "dx": x, "y": y, "dy": y, "w": w, "dw": w, "b": (1, y[1], *(1 for _ in win))}

        def tensor(name: str) -> Any:
            shape = dims[name]
            return graph.tensor(dim=list(shape), stride=strides(shape), data_type=kind, uid=UIDS[name])

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
        shape = dims[RESULT[what]]
        out.set_output(True).set_data_type(kind).set_uid(UIDS[RESULT[what]])
        out.set_dim(list(shape)).set_stride(strides(shape))
        return graph


def refusals(cudnn: Any) -> tuple[type[Exception], ...]:
    """Errors by which cuDNN and its frontend refuse a graph, or to work at all."""
    return getattr(cudnn, "cudnnGraphNotSupportedError", RuntimeError), RuntimeError, ValueError


def strides(shape: Sequence[int]) -> list[int]:
    """Elements from one index to the next of dimensions (N, C, *S), in memory that is dense and ordered (N, *S, C)."""
    out, step = [0] * len(shape), 1
    for d in (1, *range(len(shape) - 1, 1, -1), 0):
        out[d], step = step, step * shape[d]
    return out


def _pads(g: Geometry) -> list[tuple[int, int]]:
    """Zeros before and behind x along each dimension: as many as the outputs read; none where some of x is left over."""
    out = []
    for d, inner, outer in zip(g.win, g.inner, g.outer, strict=True):
        after = (outer - 1) * d.stride + (d.kernel - 1) * d.dilation + 1 - d.pad - inner
        out.append((d.pad, 0 if -d.stride < after < 0 else after))
    return out
