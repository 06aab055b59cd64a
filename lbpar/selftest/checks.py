"""Does an engine compute what it should: small networks beside the reference in float64, a training run beside NumPy's, real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from lbpar.config.run_file import load_run_file
from lbpar.engine.base import Engine
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.registry import get_engine
from lbpar.graph.graph import Graph
from lbpar.runtime.optim.rules import SGD
from lbpar.selftest import parts
from lbpar.selftest.networks import networks
from lbpar.train.setup import build_graph, build_plan
from lbpar.train.trainer import Trainer
from lbpar.transport.single import SingleTransport
from lbpar.verify.compare import Reference, Update, measure, verify_virtual, worst_of_large
from lbpar.verify.oracle import oracle
from lbpar.verify.plans import random_plan
from lbpar.verify.run import TOLERANCES

BATCH, PROCS, SEED = 5, 6, 1

HALF = 0.2
"""Relative difference that passes where activations are held in a half type: several roundings to 8 bits."""

RUN: dict[str, Any] = {
    "model": {
        "input": [9, 8, 3],
        "layers": [
            {"op": "conv", "filters": 8, "kernel": 3, "pad": 1},
            {"op": "norm"},
            {"op": "relu"},
            {"op": "max_pool", "kernel": 2},
            {"op": "conv", "filters": 6, "kernel": 3, "pad": 1},
            {"op": "relu"},
            {"op": "flatten"},
            {"op": "linear", "features": 5},
        ],
    },
    "data": {"train": "synthetic", "samples": 32},
    "train": {"batch": 8, "epochs": 3, "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}},
    "parallel": {"strategy": "spatial"},
}
"""A run file of a short training."""


def check(graph: Graph, engine: Engine, plans: int, dtype: str | None = None) -> tuple[float, float]:
    """Worst relative differences: of one rank from the reference in float64, of random plans from one rank.

    ``dtype`` is that of `get_engine`; default: the engine's element type. Where activations are held in a half type, random plans are
    compared with the reference as well, and small tensors are not.
    """
    update = Update(graph, BATCH, SEED, lambda _: SGD(0.1, momentum=0.9, weight_decay=1e-3), 0.1)
    dtype, random = dtype or engine.dtype.name, Random(SEED)
    half = engine.activations != engine.dtype
    ours = Reference(update, engine, measure(dtype))
    exact = Reference(update, NumpyEngine("float64") if half else oracle(dtype), measure(dtype))
    found = [verify_virtual(ours, random_plan(graph, BATCH, PROCS, random)) for _ in range(plans)]
    if half:
        ranks = [worst_of_large(exact, parity.tensors) for parity in found]
        return worst_of_large(exact, exact.beside(ours)), max(ranks, default=0.0)
    return max(exact.beside(ours).values()), max((parity.worst for parity in found), default=0.0)


def network_row(graph: Graph, engine: Engine, plans: int, dtype: str) -> dict[str, Any]:
    """What `check` gives, and whether it is good."""
    alone, ranks = check(graph, engine, plans, dtype)
    good = max(alone, ranks) <= (HALF if engine.activations != engine.dtype else TOLERANCES[dtype])
    return {"against float64": alone, f"{PROCS} ranks against 1": ranks, "": "ok" if good else "WRONG"}


def network(network: str, engine: Mapping[str, Any], plans: int) -> dict[str, Any]:
    """One network in one way to compute, on a GPU."""
    row = network_row(networks()[network], get_engine("cupy", **engine), plans, engine["dtype"])
    said = ", ".join(f"{name} {value:.1e}" for name, value in row.items() if name)
    return {**row, "found": f"{row['']}: {said}", "failed": row[""] != "ok"}


def training() -> dict[str, Any]:
    """A short training run on a GPU beside the same one by NumPy, from the first loss to the last."""

    def losses(engine: str, dtype: str) -> list[float]:
        config = load_run_file(RUN, [f"engine.name={engine}", f"engine.dtype={dtype}"])
        graph = build_graph(config)
        trainer = Trainer(config, graph, build_plan(config, graph, 1), SingleTransport())
        return [record["loss"] for record in trainer.train()]

    want = losses("numpy", "float64")
    worst = {
        dtype: max(abs(a - b) / abs(b) for a, b in zip(losses("cupy", dtype), want, strict=True))
        for dtype in ("float64", "float32")
    }
    good = worst["float64"] < 1e-9 and worst["float32"] < 1e-2
    return {
        "found": f"{'ok' if good else 'WRONG'}: losses differ from NumPy's by {worst['float64']:.1e} (float64), {worst['float32']:.1e} (float32)",
        "failed": not good,
        "losses": want,
        "worst": worst,
    }


def ranks(procs: int, transport: str) -> dict[str, Any]:
    """Real ranks, whose arrays travel by a transport, under random plans beside one rank. They may share devices."""
    from lbpar.engine.cupy import library
    from lbpar.selftest.gpu import mpirun
    from lbpar.transport.probe import cuda_aware

    devices = library.load().cuda.runtime.getDeviceCount()
    if transport == "nccl" and devices < procs:
        return {"found": f"left out: NCCL wants a GPU for each rank, and there are {devices} here", "left out": True}
    if transport == "mpi" and not (aware := cuda_aware()).aware:
        return {"found": f"left out: {aware.why}", "left out": True}
    with tempfile.TemporaryDirectory(prefix="lbpar-selftest-") as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(json.dumps({**RUN, "engine": {"name": "cupy", "transport": transport}}), encoding="utf-8")
        options = ["--config", str(file), "--random-plans", "3", "--engine", "cupy", "--dtype", "float32"]
        # More ranks than cores or devices are meant.
        allow = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
        allow |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        done = subprocess.run(
            [str(mpirun()), "-n", str(procs), *parts.PYTHON, "lbpar.verify", *options],
            env={**allow, **os.environ}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-3000:])
    return {"found": "".join(last), "failed": done.returncode != 0}
