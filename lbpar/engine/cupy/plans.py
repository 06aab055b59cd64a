"""Plans of cuDNN's graphs: each planned once, by its heuristics or by timing, and run on the engine's stream."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from lbpar.engine.cupy.kernels import address

if TYPE_CHECKING:
    from lbpar.engine.cupy.device import CupyDevice

log = logging.getLogger(__name__)

TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BFLOAT16"}
"""Element types that graphs take; sums are float32 in all of them."""

ALIGNMENT = 16
"""Bytes that cuDNN takes addresses to be multiples of."""

MOST_ELEMENTS = 2**31 - 1
MOST_PLANS = 4096
_REPEATS = 3

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
"""Seconds of the plans of each graph."""


class Plans:
    """Plans of graphs on one device and stream.

    Parameters
    ----------
    engine : CupyDevice
        Whose memory and stream are used.
    cudnn : module
        Of the package nvidia-cudnn-frontend.
    tf32 : bool
        Float32 may be multiplied in TF32.
    autotune : bool
        Time the plans, and our own kernels beside them, when a graph is first computed. Else cuDNN's heuristics choose.
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

    def run(
        self,
        key: Hashable,
        pack: Mapping[int, int],
        ours: Callable[[], None],
        host: Mapping[int, int] = MappingProxyType({}),
    ) -> bool:
        """Compute a graph that has a plan; ``ours`` does so by our kernels, where it has to: then False.

        Parameters
        ----------
        key : hashable
            Under which the plan is kept.
        pack : dict of int
            Addresses of device memory by the numbers of the graph's tensors.
        ours : callable
        host : dict of int
            Addresses of single values on the host, by such numbers.
        """
        plan = self._plans[key]
        assert plan is not None
        if any(at % ALIGNMENT for at in pack.values()):
            ours()
            return False
        given = {**pack, **host}
        if self._autotune and key not in self._chosen and key not in self.times:
            self.times[key] = self._timed(plan, given, ours)
        return self._execute(plan, plan.choice, given, ours)

    def _keep(self, key: Hashable, plan: Plan | None) -> Plan | None:
        if len(self._plans) >= MOST_PLANS:  # varying shapes must not grow memory without bound
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def _choice(self, key: Hashable, candidates: Sequence[Choice]) -> Choice:
        chosen = self._chosen.get(key, candidates[0])
        return chosen if chosen in candidates else candidates[0]

    def _execute(self, plan: Plan, choice: Choice, pack: dict[int, int], ours: Callable[[], None]) -> bool:
        index, nbytes = choice
        if choice == OURS:
            ours()
            return False
        workspace = self._engine.empty((nbytes,), np.uint8) if nbytes else None  # given back in the stream's order
        at = 0 if workspace is None else address(workspace)
        plan.graph.execute_plan_at_index(pack, at, index, handle=self._handle)
        return True

    def _timed(self, plan: Plan, pack: dict[int, int], ours: Callable[[], None]) -> dict[Choice, float]:
        times: dict[Choice, float] = {}
        for choice in plan.candidates:
            self._execute(plan, choice, pack, ours)  # the first run loads kernels
            start = self._engine.mark()
            for _ in range(_REPEATS):
                self._execute(plan, choice, pack, ours)
            times[choice] = self._engine.elapsed(start, self._engine.mark())
        return times

    def _planned(self, key: Hashable, dtype: str, declare: Callable[[], Any], most: int) -> Plan | None:
        """A plan of the graph that ``declare`` makes, or None where cuDNN has none; of ``most`` plans where they are timed."""
        heuristics, candidates = self._cudnn.heur_mode, []
        try:
            graph = declare()
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([heuristics.A, heuristics.FALLBACK])
        except self._refusals as error:
            log.debug("cuDNN refuses %s: %s", key, error)
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
            if len(candidates) == (most if self._autotune else 1):
                break
        if not candidates:
            return None
        candidates += [OURS] if self._autotune else []
        return Plan(graph, candidates, self._choice(key, candidates))

    def _unwanted(self, dtype: str) -> list[Any]:
        """Notes of plans that give other digits: in another type, with sums in one, or not the same each time."""
        notes = self._cudnn.numerical_note
        found = [notes.NONDETERMINISTIC, notes.REDUCED_PRECISION_REDUCTION]
        if dtype == "float32" and not self._tf32:
            found += [notes.DOWN_CONVERT_INPUTS, notes.TENSOR_CORE]
        return found

    def _begin(self, dtype: str) -> Any:
        """A graph without tensors, whose values between its operations, and sums, are float32."""
        types = self._cudnn.data_type
        return self._cudnn.pygraph(
            io_data_type=getattr(types, TYPES[dtype]),
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            **self._made_for,
        )


def refusals(cudnn: Any) -> tuple[type[Exception], ...]:
    """Errors by which cuDNN and its frontend refuse a graph, or to work at all."""
    return getattr(cudnn, "cudnnGraphNotSupportedError", RuntimeError), RuntimeError, ValueError


def strides(shape: Sequence[int]) -> list[int]:
    """Elements from one index to the next of dimensions (N, C, *S), in memory that is dense and ordered (N, *S, C)."""
    out, step = [0] * len(shape), 1
    for d in (1, *range(len(shape) - 1, 1, -1), 0):
        out[d], step = step, step * shape[d]
    return out
