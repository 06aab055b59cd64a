"""Two ranks × one thread on one machine: against DDP, against one rank, and plans against each other.

    python tests/bench/two_ranks.py [--rounds 3] [--steps 6] [CASE ...]

Each case lists jobs; a round runs every job once, each in processes of its own, in turn. A job's figure is the median of its
rounds' median step times. PyTorch runs DistributedDataParallel over gloo in its channels-last order, with the same network, batch
per process, optimizer and one thread per process.
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

CASES: dict[str, dict[str, Job]] = {
    "ddp-resnet18-32": {
        "DDP, 2 × 1 thread": ddp(SMALL, 64),
        "lbpar, samples 2": job(SMALL, 64, strategy="data"),
        "lbpar, 1 rank": job(SMALL, 64, 1),
    },
    "ddp-resnet50-224": {
        "DDP, 2 × 1 thread": ddp(LARGE, 16),
        "lbpar, samples 2": job(LARGE, 16, strategy="data"),
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
    """One process of an lbpar job: prints the median step time on rank 0."""
    from lbpar import api
    from lbpar.train.setup import build_graph, build_plan
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
    trainer = Trainer(config, graph, build_plan(config, graph, transport.size), transport)
    times = []
    for _ in range(2 + steps):
        transport.barrier()
        start = time.perf_counter()
        trainer.train_epoch()  # one step: as many samples as the batch
        times.append(time.perf_counter() - start)
    if transport.rank == 0:
        print(f"STEP {median(times[2:])}", flush=True)
    transport.close()


def run_torch(spec: Job, steps: int) -> None:
    """One process of a DDP job."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel

    from lbpar.config.run_file import parse_run
    from lbpar.graph.load import load_graph
    from tests.bench.torch_net import TorchNet

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


def launch(spec: Job, steps: int) -> float:
    """Run one job; its median step time in seconds."""
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
    return float(text.split("STEP ")[1].split()[0])


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
    rows = []
    for case in args.cases or CASES:
        times: dict[str, list[float]] = {name: [] for name in CASES[case]}
        for _ in range(args.rounds):
            for name, spec in CASES[case].items():
                times[name].append(launch(spec, args.steps))
        first = median(next(iter(times.values())))
        for name, t in times.items():
            rows.append({"case": case, "job": name, "seconds": median(t), "speed": first / median(t)})
            print(f"{case:18} {name:20} {median(t):9.4f} s/step  {first / median(t):5.2f} ×", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
