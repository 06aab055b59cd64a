"""Does an engine compute what it should: small networks beside the reference in float64, a training run beside NumPy's, real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lbpar.config.run_file import load_run_file
from lbpar.engine.base import Engine
from lbpar.engine.registry import get_engine
from lbpar.errors import LbparError
from lbpar.graph.graph import Graph
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.runtime.executor import SMALL, Executor, run_lockstep
from lbpar.runtime.initial import initial_state
from lbpar.runtime.optim.base import Optimizer
from lbpar.runtime.optim.rules import LAMB, LARS, SGD, Adam
from lbpar.selftest import parts
from lbpar.selftest.networks import BATCH, PROCS, RUN, SEED, networks, tried_plans
from lbpar.selftest.room import crowded, left_out, says_no_room
from lbpar.selftest.speeds import NO_PLANS, nothing_to_time
from lbpar.train.setup import build_graph, build_plan
from lbpar.train.trainer import Trainer
from lbpar.transport.single import SingleTransport
from lbpar.transport.virtual import VirtualWorld
from lbpar.verify.compare import Reference, Update, measure, verify_virtual, worst_of_large
from lbpar.verify.oracle import oracle
from lbpar.verify.run import HALVES, LOSS_SCALES, TOLERANCES

LOSSES = {"float64": 1e-9, "float32": 1e-2, "bfloat16": 0.1, "float16": 2e-2}
"""Relative differences of a training run's losses that pass, by type."""

RECORDED = "float32, CUDA graphs"

ACCUMULATED = {"voxels": 2, "outputs": 2}
"""Small networks that add the gradients of so many batches, by name."""

TIE = 2.0
"""What one position that is taken for another class moves in counts."""

Rule = tuple[Callable[..., Optimizer], float, float | None]
"""An optimizer, but for its learning rate, this, and the norm that gradients are scaled down to."""

_SGD = partial(SGD, momentum=0.9, weight_decay=1e-3)
RULES: dict[str, Rule] = {
    "voxels": (partial(LARS, momentum=0.9, weight_decay=1e-3, trust=1.0), 0.1, None),
    "weighed voxels": (_SGD, 0.1, 0.1),
    # eps: rounding alone gives the gradients of biases before a norm
    "vectors with mse": (partial(LAMB, weight_decay=1e-3, eps=0.01), 0.1, None),
    "vectors with bce": (partial(Adam, weight_decay=1e-3, eps=0.01), 0.01, None),
}
"""How the small networks are updated, by name: every rule has kernels of its own. Others by SGD."""


def check(graph: Graph, engine: Engine, plans: int, dtype: str | None = None) -> tuple[float, float]:
    """Worst relative differences, of an update and of an evaluation: of one rank from the reference in float64, of random plans, and one
    that splits space, from one rank.

    ``dtype`` is that of `get_engine`; default: the engine's element type. Where it rounds to few bits (`_few_bits`), plans are
    compared with the reference as well, and small tensors are not.
    """
    dtype = dtype or engine.dtype.name
    half = _few_bits(engine, dtype) is not None
    rule, lr, clip = RULES.get(graph.name, (_SGD, 0.1, None))
    accumulate, scale = ACCUMULATED.get(graph.name, 1), LOSS_SCALES.get(dtype, 1.0)
    update = Update(graph, BATCH, SEED, lambda _: rule(lr), lr, clip, accumulate, loss_scale=scale)
    ours = Reference(update, engine, measure(dtype))
    exact = Reference(update, oracle(engine, dtype), measure(dtype))
    wanted, measured = _evaluated(exact, Plan(Grid())), _evaluated(ours, Plan(Grid()))
    alone, ranks = [_apart(measured, wanted, half)], [0.0]
    alone.append(worst_of_large(exact, exact.beside(ours)) if half else max(exact.beside(ours).values()))
    for plan in tried_plans(graph, plans):
        parity = verify_virtual(ours, plan)
        ranks.append(worst_of_large(exact, parity.tensors) if half else parity.worst)
        ranks.append(_apart(_evaluated(ours, plan), wanted if half else measured, half))
    return max(alone), max(ranks)


def _few_bits(engine: Engine, dtype: str) -> str | None:
    """The half type that has as few bits as activations, or factors of products: those of TF32 have float16's."""
    if getattr(engine, "tf32", False):
        return "float16"
    return dtype if engine.activations != engine.dtype else None


def _evaluated(reference: Reference, plan: Plan) -> dict[str, Any]:
    """What an evaluation measures after the update, under a plan: losses, hits, and what metrics follow from."""
    update, engine = reference.update, reference.engine
    graph, world = update.graph, VirtualWorld(plan.grid, strict=False)
    program, executors = lower(graph, plan, BATCH, training=False, rims=engine.rims), list[Executor]()
    for transport in world.transports:
        weights = {name: reference.values[name] for name in program.params}
        state = initial_state(graph.params(), program.params, transport.rank, SEED, engine.dtype, weights)
        executors.append(Executor(program, engine, transport, {n: engine.from_host(a) for n, a in state.items()}))
    run_lockstep(executors, [update.feeds(executor) for executor in executors])
    names = [name for name in program.results if name.partition("/")[0] in SMALL]
    return {name: executors[0].value(name) for name in names}


def _apart(found: Mapping[str, Any], wanted: Mapping[str, Any], half: bool) -> float:
    """The largest relative difference of what was measured: of counts, the part of them that is elsewhere. With few bits one position may
    fall on the other side of a tie, which among five samples would be much."""
    apart = []
    for name, a in wanted.items():
        difference, rounding = np.abs(found[name] - a).sum(), TIE if half and not name.startswith("loss") else 0.0
        apart.append(
            float("inf") if np.isnan(difference) else max(0.0, difference - rounding) / (np.abs(a).sum() or 1.0)
        )
    return float(max(apart))


def network_row(graph: Graph, engine: Engine, plans: int, dtype: str) -> dict[str, Any]:
    """What `check` gives, and whether it is good."""
    alone, ranks = check(graph, engine, plans, dtype)
    few = _few_bits(engine, dtype)
    good = max(alone, ranks) <= (TOLERANCES[dtype] if few is None else HALVES[few])
    return {"against float64": alone, f"{PROCS} ranks against 1": ranks, "": "ok" if good else "WRONG"}


def network(network: str, engine: Mapping[str, Any], plans: int) -> dict[str, Any]:
    """One network in one way to compute, on a GPU."""
    graph, used = networks()[network], get_engine("cupy", **engine)
    if nothing_to_time(engine, used):
        return left_out(NO_PLANS)
    row = network_row(graph, used, plans, engine["dtype"])
    if engine.get("autotune") and row[""] == "ok":  # once more, all of it by what was fastest
        row = network_row(graph, used, plans, engine["dtype"])
    said = ", ".join(f"{name} {value:.1e}" for name, value in row.items() if name)
    return {**row, "found": f"{row['']}: {said}", "failed": row[""] != "ok"}


def training() -> dict[str, Any]:
    """A short training run on a GPU beside the same one by NumPy, from the first loss to the last."""

    want = _losses("numpy", "float64")
    found = {dtype: _losses("cupy", dtype) for dtype in LOSSES} | {RECORDED: _losses("cupy", "float32", True)}
    worst = {way: _worst(ours, want) for way, ours in found.items()}
    good = all(value < LOSSES.get(way, LOSSES["float32"]) for way, value in worst.items())
    said = ", ".join(f"{value:.1e} ({dtype})" for dtype, value in worst.items())
    return {
        "found": f"{'ok' if good else 'WRONG'}: losses differ from NumPy's by {said}",
        "failed": not good,
        "losses": want,
        "worst": worst,
    }


def _losses(engine: str, dtype: str, graphs: bool = False) -> list[float]:
    """Of the epochs of a short training run on one rank."""
    asked = [f"engine.name={engine}", f"engine.dtype={dtype}"]
    if graphs:
        asked.append("engine.graphs=true")
    if dtype in LOSS_SCALES:  # from the start, so that no step is left out
        asked.append(f"train.loss_scale={{start: {LOSS_SCALES[dtype]}}}")
    config = load_run_file(RUN, asked)
    graph = build_graph(config)
    trainer = Trainer(config, graph, build_plan(config, graph, 1), SingleTransport())
    return [record["loss"] for record in trainer.train()]


def _worst(losses: Sequence[float], want: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, want, strict=True))


def ranks(procs: int, transport: str) -> dict[str, Any]:
    """Real ranks, whose arrays travel by a transport, under random plans beside one rank, and by NCCL in recorded steps, too. They may
    share devices."""
    from lbpar.engine.cupy import library
    from lbpar.selftest.gpu import exclusive, mpirun
    from lbpar.transport.nccl import load_nccl
    from lbpar.transport.probe import cuda_aware

    cupy = library.load()
    devices = cupy.cuda.runtime.getDeviceCount()
    if devices < procs and exclusive(cupy):
        return left_out("one process at a time may use the GPU")
    if transport == "nccl":
        if devices < procs:
            return left_out(f"NCCL wants a GPU for each rank, and there are {devices} here")
        try:
            load_nccl()
        except LbparError as error:
            return left_out(error)
    if transport == "mpi" and not (aware := cuda_aware()).aware:
        return left_out(aware.why)
    with tempfile.TemporaryDirectory(prefix="lbpar-selftest-") as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(json.dumps({**RUN, "engine": {"name": "cupy", "transport": transport}}), encoding="utf-8")
        # More ranks than cores or devices are meant.
        allow = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
        allow |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

        def started(module: str, *options: str) -> subprocess.CompletedProcess[str]:
            done = subprocess.run(
                [str(mpirun()), "-n", str(procs), *parts.PYTHON, module, "--config", str(file), *options],
                env={**allow, **os.environ}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                print(done.stdout[-2000:], done.stderr[-3000:])
            return done

        done = started("lbpar.verify", "--random-plans", "3", "--engine", "cupy", "--dtype", "float32")
        if done.returncode and says_no_room(done.stdout + done.stderr) and crowded():
            return left_out("the GPU has too little memory for them")
        found = "".join((done.stdout.strip() or done.stderr.strip()).splitlines()[-1:])
        if done.returncode or transport != "nccl":
            return {"found": found, "failed": done.returncode != 0}
        out = Path(folder) / "out"
        done = started("lbpar.train", "--set", "engine.graphs=true", "--set", f"run.out={out}")
        if done.returncode or "steps are not recorded" in done.stderr:
            said = "".join(done.stderr.strip().splitlines()[-1:])
            return {"found": f"{found}; WRONG with steps recorded as CUDA graphs: {said}", "failed": True}
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    worst = _worst([record["loss"] for record in records], _losses("numpy", "float64"))
    return {
        "found": f"{found}; losses of recorded steps differ from NumPy's by {worst:.1e}",
        "failed": not worst < LOSSES["float32"],
    }
