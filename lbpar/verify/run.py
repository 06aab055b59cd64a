"""Compare several plans of one network with one rank; what the command line and `lbpar.api.verify` share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from lbpar.config.engine import EngineConfig
from lbpar.config.run_file import RunConfig
from lbpar.config.section import MOST
from lbpar.engine.registry import OF_GPU, build_engine
from lbpar.errors import ConfigError
from lbpar.graph.graph import Graph
from lbpar.graph.norm_stats import norms, with_norm_stats
from lbpar.program.norms import check_norms
from lbpar.program.plan import Plan
from lbpar.program.random_plan import random_plan
from lbpar.runtime.devices import over_devices
from lbpar.runtime.optim.loss_scale import check_scalable
from lbpar.runtime.optim.make import make_optimizer
from lbpar.text import shorten
from lbpar.train.delayed import check_delayed
from lbpar.train.setup import build_graph, build_plan, check_asked, connect_to
from lbpar.transport.base import Transport
from lbpar.transport.launch import connect
from lbpar.transport.together import check_alike
from lbpar.verify.compare import Parity, Reference, Update, large, measure, verify_mpi, verify_virtual
from lbpar.verify.oracle import oracle, rounding

TOLERANCES = {"float64": 1e-10, "float32": 1e-3, "bfloat16": 2e-2, "float16": 2.5e-3}
"""Relative differences that pass in any network, by type."""

MARGINS = {"float64": 16, "float32": 16}
"""How many times as much as sums in another order change on one rank (`lbpar.verify.oracle.rounding`) a plan may change."""

HALF_MARGIN = 16
"""The same where activations are held in a half type, and on a GPU rounding is what the ranks' own kernels make on one rank."""

HALVES = {"bfloat16": 0.2, "float16": 0.1}
"""Relative differences, from float64, that rounding of activations explains in tensors that are not small: it happens in every layer, and
what falls on the other side of a kink counts in full, so that three bits more are worth a root of eight."""

LOSS_SCALES = {"float16": 1024.0}
"""By what gradients are multiplied on their way back, where the range of the type asks for it."""

MOST_RANKS = 4096
"""Simulated in one process."""


@dataclass
class Verification:
    """What the comparison of some plans with one rank found.

    Attributes
    ----------
    plans : dict of str to Parity
        Result per plan, in order.
    procs : int
        Ranks that shared the step.
    simulated : bool
        They lived in this process.
    engine, dtype : str
        What the ranks computed with.
    rounding : dict of str to float
        Where a difference exceeds the tolerance: that which rounding makes on one rank, per tensor. ``margin`` times as much passes, too.
    half : bool
        Activations are held in a half type; the one rank rounds them as well, or computed wholly in float64 for a GPU.
    merged : tuple of str
        Norms whose training statistics the network keeps per group of ranks (``stats: sample`` or ``local``). One rank
        cannot compute the same, so all plans were compared with the statistics of all norms merged over all ranks.
    """

    procs: int
    simulated: bool
    engine: str = "numpy"
    dtype: str = "float64"
    plans: dict[str, Parity] = field(default_factory=dict)
    rounding: dict[str, float] = field(default_factory=dict)
    half: bool = False
    merged: tuple[str, ...] = ()

    @property
    def worst(self) -> float:
        """Largest relative difference of all tensors under all plans."""
        return max((p.worst for p in self.plans.values()), default=0.0)

    @property
    def tensors(self) -> dict[str, float]:
        """Worst relative difference per tensor, over all plans."""
        out: dict[str, float] = {}
        for parity in self.plans.values():
            for tensor, difference in parity.tensors.items():
                out[tensor] = max(out.get(tensor, 0.0), difference)
        return out

    @property
    def margin(self) -> int:
        """How many times as much as rounding makes on one rank a difference may be."""
        return HALF_MARGIN if self.half else MARGINS[self.dtype]

    def allowed(self, tensor: str) -> float:
        """Largest difference of a tensor that passes."""
        return max(TOLERANCES[self.dtype], self.margin * self.rounding.get(tensor, 0.0))

    def equal(self, tolerance: float | None = None) -> bool:
        """Whether no difference exceeds the tolerance; by default that of the type, or what rounding explains."""
        if tolerance is not None:
            return self.worst <= tolerance
        return all(difference <= self.allowed(t) for t, difference in self.tensors.items())

    def rows(self) -> list[dict[str, Any]]:
        """A row per plan: worst difference, the tensor that shows it, tensors compared, bytes that all ranks sent."""
        out = []
        for name, parity in self.plans.items():
            where = max(parity.tensors, key=lambda t: parity.tensors[t], default="")
            sent = sum(parity.sent.values())
            out.append(
                {
                    "plan": name,
                    "worst": parity.worst,
                    "tensor": where,
                    "tensors": len(parity.tensors),
                    "bytes sent": sent,
                }
            )
        return out


def verify(
    config: RunConfig,
    graph: Graph | None = None,
    plan: Plan | None = None,
    *,
    procs: int | None = None,
    random_plans: int = 0,
    seed: int = 1,
    batch: int | None = None,
    engine: str | None = None,
    dtype: str = "float64",
    transport: Transport | None = None,
) -> Verification:
    """Run one training step on P ranks, and on one by NumPy in float64, on random samples, and compare every tensor.

    Collective over all ranks. Under mpirun the ranks are real; alone, they are simulated in this process.

    Parameters
    ----------
    config : RunConfig
    graph : Graph, optional
        With its loss; default: the network of the run file.
    plan : Plan, optional
        Default: the run file's.
    procs : int, optional
        Ranks to simulate; default ``parallel.procs``, or 4. Must be left out under mpirun.
    random_plans : int
        Also try so many plans of random legal grids.
    seed : int
        Of the random plans, weights and samples.
    batch : int, optional
        Samples; default: the run file's.
    engine : {"numpy", "onednn", "cupy", "auto"}, optional
        Kernels of the ranks; default: numpy for float64, else auto.
    dtype : {"float64", "float32", "bfloat16", "float16"}
        Type that the ranks compute in.
    transport : Transport, optional
        Default: that of this job. It is closed.

    Returns
    -------
    Verification
        ``equal(tolerance)``, ``worst``, ``tensors``, and per plan the bytes that were sent.

    Raises
    ------
    ConfigError
        The processes do not fit the plan or the job, or nothing would be compared.
    PlanError
        The run file's plan cannot be made.

    Notes
    -----
    The relative difference of a tensor is its largest absolute difference over its largest absolute value; tensors that
    are a thousand times smaller than the largest of their kind are judged on that scale.
    """
    graph = build_graph(config, graph)
    batch = config.train.batch if batch is None else batch
    transport = connect() if transport is None else transport
    asked = {"procs": procs, "batch": batch, "random_plans": random_plans, "engine": engine, "dtype": dtype}
    check_asked(transport, config, graph, **asked, seed=seed, plan=plan is not None)
    check_numbers(procs, batch, random_plans)
    wanted = plan.grid.size if plan is not None else procs
    if procs not in (None, wanted):
        raise ConfigError(f"verify: got procs={procs} and a plan for {wanted}; leave one of them out.")
    if transport.size > 1 and wanted not in (None, transport.size):
        raise ConfigError(
            f"verify: procs: got {wanted}, but {transport.size} ranks were started; leave it out under mpirun."
        )
    name = "plan"
    if plan is None:
        name = config.parallel.strategy
        procs = transport.size if transport.size > 1 else wanted or config.parallel.procs or 4
        plan = build_plan(config, graph, procs, batch, transport)
    plans = named_plans(name, plan, graph, batch, random_plans, seed)
    result, transport = verify_plans(config, graph, plans, batch, engine, seed, transport, dtype)
    transport.close()
    return result


def check_numbers(procs: int | None, batch: int, random_plans: int) -> None:
    """Raise ConfigError for numbers with which nothing would be compared."""
    for name, given, least, most in (
        ("procs", procs, 1, MOST_RANKS),
        ("batch", batch, 1, MOST),
        ("number of random plans", random_plans, 0, MOST),
    ):
        if given is not None and not least <= given <= most:
            raise ConfigError(f"verify: {name}: got {shorten(given)}, expected {least} to {most}.")


def verify_plans(
    config: RunConfig,
    graph: Graph,
    plans: Sequence[tuple[str, Plan]],
    batch: int,
    engine: str | None,
    seed: int,
    transport: Transport,
    dtype: str = "float64",
) -> tuple[Verification, Transport]:
    """Run the same update under each plan and on one rank. Collective over all ranks.

    Where a plan lets norms keep statistics per group of ranks, which differ from those of one rank by design, the step that
    is compared merges them over all ranks instead; ``Verification.merged`` names these norms.

    Parameters are those of `verify`; if ``transport`` has one rank, plans may be for any number, and ranks are simulated.

    Returns
    -------
    Verification
    Transport
        The one to go on with: its grid is that of the last plan, if ranks are real.
    """
    check_alike(transport, {"plans": plans})
    merged = kept_apart(graph, (plan for _, plan in plans), batch)
    graph = with_norm_stats(graph, "global" if merged else None)
    for _, plan in plans:
        check_norms(graph, plan, batch)
    kinds = {name: p.kind for name, p in graph.params().items() if p.kind != "statistic"}
    t = config.train
    asked = _engine(config.engine, engine, dtype)
    tested = build_engine(asked, dtype)
    rule = partial(make_optimizer, t.optimizer, kinds, t.no_decay)
    micros = {plan.micro_batches for _, plan in plans}
    if len(micros) > 1:
        raise ConfigError(
            "verify: got plans with different numbers of micro-batches; compare those of one number at a time."
        )
    scale = LOSS_SCALES.get(dtype, 1.0)
    stages = [dict(plan.pipeline.stages) if plan.pipeline is not None and plan.delayed else None for _, plan in plans]
    if any(s != stages[0] for s in stages):
        raise ConfigError(
            "verify: got plans whose stages delay gradients differently; compare those of the same stages."
        )
    for _, plan in plans:
        check_delayed(config, plan, tested)
    update = Update(graph, batch, seed, rule, t.optimizer.lr, t.clip_norm, t.accumulate, micros.pop(), scale, stages[0])
    if scale != 1:
        check_scalable(update.programs(plans[0][1])[-1])
    half = tested.activations != tested.dtype
    reference = Reference(update, oracle(tested, dtype), measure(dtype))
    real = transport.size > 1
    result = Verification(plans[0][1].grid.size, not real, tested.name, dtype, half=half, merged=merged)
    for name, plan in plans:
        if real:
            transport = over_devices(connect_to(plan.grid, transport), asked)
            result.plans[name] = verify_mpi(reference, plan, transport, tested)
        else:
            result.plans[name] = verify_virtual(reference, plan, tested)
    if TOLERANCES[dtype] < result.worst < float("inf"):
        found = reference.beside(Reference(update, rounding(tested, dtype)))
        if half:
            found |= {t: min(d, HALVES[dtype] / HALF_MARGIN) for t, d in large(reference, found).items()}
        result.rounding = transport.bcast(found)
    return result, transport


def _engine(config: EngineConfig, engine: str | None, dtype: str) -> EngineConfig:
    """The engine of the ranks. What a run file asks of GPUs, or of another type, is left out where it has no meaning."""
    name = _engine_name(engine, dtype)
    left = {*OF_GPU, "transport"} if name != "cupy" else {"tf32"} if dtype != "float32" else set[str]()
    if dtype == "float64":
        left |= {"autotune", "cudnn"} if config.cudnn is True else {"autotune"}
    return EngineConfig(**{**config.model_dump(exclude=left), "name": name, "dtype": dtype})


def _engine_name(engine: str | None, dtype: str) -> str:
    if dtype != "float64" or engine == "cupy":
        return engine or "auto"
    if engine == "onednn":
        raise ConfigError(
            "verify: oneDNN has no float64, so that --engine onednn would compare NumPy with itself; add --dtype float32 or bfloat16."
        )
    return "numpy"


def named_plans(name: str, plan: Plan, graph: Graph, batch: int, count: int, seed: int) -> list[tuple[str, Plan]]:
    """A plan, followed by ``count`` plans of random legal grids, the same on all ranks; if the plan computes layers again, they do with others."""
    random = Random(seed)
    p = plan.pipeline
    places = plan.grid.ways(p.axes) if p is not None else 1

    def other() -> Plan:
        found = random_plan(graph, batch, plan.grid.size // places, random, lean=bool(plan.recompute))
        return found if p is None else found.staged(places, p)

    return [(name, plan), *((f"random {i + 1}", other()) for i in range(count))]


def kept_apart(graph: Graph, plans: Iterable[Plan], batch: int) -> tuple[str, ...]:
    """Norms that under some plan normalise with the statistics of a part of what one rank normalises with.

    Those are the ones with ``stats: sample`` or ``local`` whose plan splits a loop over which these stay separate.
    """
    plans = tuple(plans)
    out = []
    for node in norms(graph):
        apart = node.op.varying(graph.input_shapes(node.name, batch))  # type: ignore[attr-defined]
        if any(plan.ways(node.name).get(loop, 1) > 1 for plan in plans for loop in apart):
            out.append(node.name)
    return tuple(out)
