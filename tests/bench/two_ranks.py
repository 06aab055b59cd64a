"""Two ranks × one thread on one machine: against DDP, against one rank, and plans against each other.

    python tests/bench/two_ranks.py [--rounds 3] [--steps 6] [CASE ...]

Each case lists jobs; a round runs every job once, each in processes of its own, in turn. A job's figure is the median of its
rounds' median step times. PyTorch runs DistributedDataParallel over gloo in its channels-last order, with the same network, batch
per process, optimizer and one thread per process. Its batch norm uses each process' own samples, which is lbpar's `norm: local`.
`predicted` is the step time of lbpar's own cost model for the same plan, and the ratio that follows from it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
THREADS = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}

Job = dict[str, Any]


def job(model: dict[str, Any], batch: int, ranks: int = 2, progress: str = "auto", **parallel: Any) -> Job:
    """A training job of lbpar."""
    return {"kind": "lbpar", "model": model, "batch": batch, "ranks": ranks, "progress": progress, "parallel": parallel}


def ddp(model: dict[str, Any], batch: int) -> Job:
    """The same with PyTorch."""
    return {"kind": "torch", "model": model, "batch": batch, "ranks": 2}


SMALL = {"name": "resnet18", "classes": 10, "input": [32, 32, 3]}
LARGE = {"name": "resnet50"}
VOLUME = {"name": "unet3d", "input": [96, 96, 96, 1], "classes": 3}
PLANE = {"name": "unet2d", "input": [1024, 1024, 1], "classes": 2}
WIDE_FC = {
    "input": [4096],
    "layers": [{"op": "linear", "features": 4096, "name": n} for n in ("fc1", "fc2", "fc3")],
}
WIDE_CONV = {
    "input": [14, 14, 1024],
    "layers": [
        *({"op": "conv", "filters": 1024, "kernel": 3, "pad": 1, "name": f"c{i}"} for i in (1, 2, 3)),
        {"op": "global_avg_pool"},
    ],
}
VGG_LIKE = {
    "input": [64, 64, 3],
    "layers": [
        *(
            layer
            for filters in (32, 64, 128, 256)
            for layer in (
                {"op": "conv", "filters": filters, "kernel": 3, "pad": 1},
                {"op": "relu"},
                {"op": "conv", "filters": filters, "kernel": 3, "pad": 1},
                {"op": "relu"},
                {"op": "max_pool", "kernel": 2},
            )
        ),
        {"op": "flatten"},
        {"op": "linear", "features": 1024},
        {"op": "relu"},
        {"op": "linear", "features": 10},
    ],
}
UNET_LIKE = {"name": "unet2d", "input": [128, 128, 1], "classes": 2, "width": 0.25}


def staged(model: dict[str, Any], batch: int) -> dict[str, Job]:
    """Two ranks as two stages, beside two that split the samples and one."""
    inside = {"strategy": "data", "stages": 2, "micro_batches": 8}
    return {
        "samples 2": job(model, batch, strategy="data"),
        "1 rank": job(model, batch, 1),
        "1 rank, 8 micro-batches": job(model, batch, 1, strategy="data", micro_batches=8),
        **{f"2 stages, {s}": job(model, batch, **inside, schedule=s) for s in ("1f1b", "zero-bubble", "gpipe")},
    }


CASES: dict[str, dict[str, Job]] = {
    "stages-vgg": staged(VGG_LIKE, 64),
    "stages-unet": staged(UNET_LIKE, 32),
    "stages-k": {
        "1 rank, 16 micro-batches": job(VGG_LIKE, 64, 1, strategy="data", micro_batches=16),
        "K = 2, 1F1B": job(VGG_LIKE, 64, 2, strategy="data", stages=2, schedule="1f1b", micro_batches=16),
        "K = 4, 1F1B (oversubscribed where there are fewer cores)": job(
            VGG_LIKE, 64, 4, strategy="data", stages=4, schedule="1f1b", micro_batches=16
        ),
    },
    "ddp-resnet18-32": {
        "DDP, 2 × 1 thread": ddp(SMALL, 64),
        "lbpar, samples 2": job(SMALL, 64, strategy="data"),
        "lbpar, samples 2, local norms": job(SMALL, 64, strategy="data", norm="local"),
        "lbpar, 1 rank": job(SMALL, 64, 1),
    },
    "ddp-resnet50-224": {
        "DDP, 2 × 1 thread": ddp(LARGE, 16),
        "lbpar, samples 2": job(LARGE, 16, strategy="data"),
        "lbpar, samples 2, local norms": job(LARGE, 16, strategy="data", norm="local"),
        "lbpar, 1 rank": job(LARGE, 16, 1),
    },
    "progress": {
        "only in waits": job(SMALL, 64, progress="block", strategy="data"),
        "tests between kernels": job(SMALL, 64, progress="test", strategy="data"),
        "a thread": job(SMALL, 64, progress="thread", strategy="data"),
    },
    "volume": {
        "1 rank": job(VOLUME, 1, 1),
        "depth 2": job(VOLUME, 1, strategy="spatial"),
    },
    "plane": {
        "1 rank": job(PLANE, 1, 1),
        "height 2": job(PLANE, 1, strategy="spatial"),
    },
    "wide-fc": {
        "samples 2": job(WIDE_FC, 2, strategy="data"),
        "filters 2": job(WIDE_FC, 2, strategy="filter"),
        "alternating": job(WIDE_FC, 2, layers={"fc1": {"F": 2}, "fc2": {"C": 2}, "fc3": {"F": 2}}, strategy="data"),
    },
    "wide-conv": {
        "samples 2": job(WIDE_CONV, 2, strategy="data"),
        "filters 2": job(WIDE_CONV, 2, strategy="filter"),
        "channels 2": job(WIDE_CONV, 2, strategy="channel"),
    },
}


def run_lbpar(spec: Job, steps: int) -> None:
    """One process of an lbpar job: rank 0 prints the median step time and the predicted one."""
    from lbpar import api
    from lbpar.train.setup import build_graph, build_plan, connect_to
    from lbpar.train.trainer import Trainer
    from lbpar.transport.launch import connect

    config = api.load_run(
        {
            "model": spec["model"],
            "data": {"train": "synthetic", "samples": spec["batch"], "prefetch": 0},
            "train": {
                "batch": spec["batch"],
                "epochs": 2 + steps,
                "optimizer": {"name": "sgd", "lr": 0.001, "momentum": 0.9},
            },
            "parallel": spec["parallel"],
            "engine": {"name": "onednn", "threads": 1, "progress": spec["progress"]},
            "run": {"progress": "none"},
        }
    )
    transport = connect()
    graph = build_graph(config)
    plan = build_plan(config, graph, transport.size, transport=transport)  # ranks that choose for themselves may differ
    transport = connect_to(plan.grid, transport)
    trainer = Trainer(config, graph, plan, transport)
    times = []
    for _ in range(2 + steps):
        transport.barrier()
        start = time.perf_counter()
        trainer.train_epoch()  # one step: as many samples as the batch
        times.append(time.perf_counter() - start)
    predicted = predicted_seconds(config, graph, plan, transport)
    if transport.rank == 0:
        print(f"STEP {median(times[2:])} PREDICTED {predicted}", flush=True)
    transport.close()


def predicted_seconds(config: Any, graph: Any, plan: Any, transport: Any) -> float | None:
    """Seconds of a step as lbpar's cost model prices the plan, on rank 0; None on the others. Called by all ranks."""
    from lbpar.calibrate.machine import machine_of
    from lbpar.plan.priced import Settings
    from lbpar.plan.resolve import optimizer_name

    machine = machine_of(config.machine, config.engine, transport)
    if transport.rank:
        return None
    optimizer = optimizer_name(config.train.optimizer)
    return Settings(graph, config.train.batch, machine, config.engine.dtype, optimizer).priced("given", plan).seconds


def run_torch(spec: Job, steps: int) -> None:
    """One process of a DDP job."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel

    from lbpar.config.run_file import parse_run
    from lbpar.models.load import load_graph
    from lbpar.selftest.torch_net import TorchNet

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    graph = load_graph(parse_run(json.dumps({"model": spec["model"], "train": {"batch": 1}})).model)
    net = TorchNet(graph).to(memory_format=torch.channels_last)
    net = DistributedDataParallel(net)
    n = spec["batch"] // size
    shape = graph.shapes(n)["input"]
    x = torch.randn(shape).movedim(-1, 1).contiguous(memory_format=torch.channels_last)
    t = torch.randint(graph.shapes(1)[graph.output][-1], (n,))
    optimizer = torch.optim.SGD(net.parameters(), 0.001, momentum=0.9)
    times = []
    for _ in range(2 + steps):
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(net(x), t).backward()
        optimizer.step()
        dist.barrier()
        times.append(time.perf_counter() - start)
    if rank == 0:
        print(f"STEP {median(times[2:])}", flush=True)
    dist.destroy_process_group()


def launch(spec: Job, steps: int) -> tuple[float, float | None]:
    """Run one job; its median step time in seconds, and the predicted one if it is lbpar's."""
    me = [sys.executable, str(Path(__file__)), "--steps", str(steps), "--job", json.dumps(spec)]
    env = {**os.environ, **THREADS, "PYTHONPATH": str(ROOT), "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if spec["kind"] == "lbpar":
        mpirun = Path(sys.executable).with_name("mpirun")
        start = [] if spec["ranks"] == 1 else [str(mpirun), "-n", str(spec["ranks"])]
        out = subprocess.run([*start, *me], env=env, text=True, capture_output=True, check=False)
        text = out.stdout
        if out.returncode:
            raise SystemExit(out.stdout + out.stderr)
    else:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        rest = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(spec["ranks"])}
        ranks = [
            subprocess.Popen(me, env={**env, **rest, "RANK": str(r)}, stdout=subprocess.PIPE, text=True)
            for r in range(spec["ranks"])
        ]
        text = "".join(p.communicate()[0] for p in ranks)
    return _after(text, "STEP "), _after(text, "PREDICTED ") if spec["kind"] == "lbpar" else None


def _after(text: str, word: str) -> float:
    return float(text.split(word)[1].split()[0])


def report(case: str, jobs: dict[str, list[tuple[float, float | None]]]) -> list[dict[str, Any]]:
    """A row per job, printed, too: median seconds, times as fast as the first job, and both as predicted."""
    rows: list[dict[str, Any]] = []
    for name, runs in jobs.items():
        seconds, said = median(t for t, _ in runs), [p for _, p in runs if p is not None]
        row = {"case": case, "job": name, "seconds": seconds, "predicted": median(said) if said else None}
        first = rows[0] if rows else row
        row["speed"] = first["seconds"] / seconds
        row["predicted_speed"] = first["predicted"] / row["predicted"] if said and first["predicted"] else None
        rows.append(row)
        text = f"{case:18} {name:30} {seconds:9.4f} s/step {row['speed']:5.2f} ×"
        if said:
            text += f"   predicted {row['predicted']:9.4f} s/step"
        if row["predicted_speed"]:
            text += f" {row['predicted_speed']:5.2f} ×"
        print(text, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--job")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.job:
        spec = json.loads(args.job)
        return (run_torch if spec["kind"] == "torch" else run_lbpar)(spec, args.steps)
    rows: list[dict[str, Any]] = []
    for case in args.cases or CASES:
        times: dict[str, list[tuple[float, float | None]]] = {name: [] for name in CASES[case]}
        for _ in range(args.rounds):
            for name, spec in CASES[case].items():
                times[name].append(launch(spec, args.steps))
        rows += report(case, times)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
