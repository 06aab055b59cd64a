"""What many ranks cost: starting 64 on the cores there are, memory of each, and one rank of 1,024 simulated ones.

    python tests/bench/many_ranks.py [--ranks 64] [--simulated 1024] [--model resnet50] [--batch 2048]

Starts a small network under the mpirun on the path. Wall time depends on what else the machine does; seconds of all
ranks' CPUs, divided by the cores, are what an idle machine needs at least. Memory is asked for when training is about
to start and when it has ended: resident (what tools show, shared libraries counted in every rank) and proportional (these shared out).
"""

from __future__ import annotations

import argparse
import compileall
import gc
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

RUN = """
model: {name: lenet}
data: {train: synthetic, samples: 128}
train: {batch: 64, epochs: 1, optimizer: {name: sgd, lr: 0.1, momentum: 0.9}}
parallel: {strategy: data}
run: {out: run, report: false}
"""


def memory() -> tuple[float, float]:
    """Megabytes of this process: resident and proportional."""
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]]
    size = {words[0]: int(words[1]) / 1e3 for words in lines}
    return size["Rss:"], size["Pss:"]


def say(when: str, found: list[tuple[float, float, float]] | None) -> None:
    """Print what all ranks have found; only on rank 0."""
    if found is None:
        return
    rss, pss, cpu = (sorted(values) for values in zip(*found, strict=True))
    print(
        f"memory of a rank {when}: resident {median(rss):.0f} MB (at most {rss[-1]:.0f}), proportional {median(pss):.0f} MB "
        f"(at most {pss[-1]:.0f}); CPU {median(cpu):.2f} s a rank, {sum(cpu):.1f} s in all",
        flush=True,
    )


def rank() -> int:
    """One rank of a job: `lbpar train`, which says how much memory and time it took until it was ready."""
    from lbpar.threads import limit_libraries
    from lbpar.train.command import main
    from lbpar.transport.launch import run_main

    gc.disable()  # as the command does
    limit_libraries()

    def start() -> int:
        from lbpar.train import job

        run = job.run

        def told(trainer: Any, *args: Any, **more: Any) -> Any:
            say("when it is ready", trainer.transport.gather((*memory(), time.process_time())))
            out = run(trainer, *args, **more)
            say("when it has trained", trainer.transport.gather((*memory(), time.process_time())))
            return out

        job.run = told
        return main()

    return run_main(start)


def start(ranks: int) -> None:
    """Start so many ranks, and print what they say of it."""
    compileall.compile_dir(Path(__file__).parents[2] / "lbpar", quiet=1)  # as a package is that was installed
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.yaml").write_text(RUN)
        command = ["mpirun", "-n", str(ranks), sys.executable, __file__, "--config", "run.yaml"]
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    said = [line for line in done.stdout.splitlines() if "ready after" in line or line.startswith("memory of")]
    print("\n".join(said))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"mpirun -n {ranks}: {wall:.1f} s in all, {cpu:.1f} s of CPU on {len(os.sched_getaffinity(0))} cores",
        flush=True,
    )


def simulate(ranks: int, model: str, batch: int) -> None:
    """Plan, lower and bind for one of so many ranks, in this process."""
    began, spent = time.perf_counter(), time.process_time()
    from lbpar.cost.machine import find_machine
    from lbpar.engine.registry import get_engine
    from lbpar.graph.ops.losses import CrossEntropy
    from lbpar.models.registry import build_model
    from lbpar.plan.choose import choose_plan
    from lbpar.runtime.worker import Worker
    from lbpar.transport.virtual import VirtualWorld

    graph = build_model(model).with_loss(CrossEntropy())
    plan = choose_plan(graph, batch, ranks, find_machine("perlmutter-a100")).plan
    planned = time.process_time() - spent
    worker = Worker(graph, plan, get_engine("auto", "float32", 1), VirtualWorld(plan.grid).transport(ranks // 2))
    worker.executor(batch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(
        f"{model}, batch {batch}, rank {ranks // 2} of {ranks}: planned, lowered and bound in {time.perf_counter() - began:.1f} s "
        f"({time.process_time() - spent:.1f} s of CPU, of which {planned:.1f} s until it was planned), {peak:.0f} MB"
    )


def main() -> None:
    """All three, each in processes of its own."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ranks", type=int, default=64)
    p.add_argument("--simulated", type=int, default=1024)
    p.add_argument("--model", default="resnet50")
    p.add_argument("--batch", type=int, default=2048)
    p.add_argument("--alone", action="store_true", help="only the simulated rank, in this process")
    args = p.parse_args()
    if args.alone:
        simulate(args.simulated, args.model, args.batch)
        return
    start(args.ranks)
    subprocess.run([sys.executable, *sys.argv, "--alone"], check=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    if "--config" in sys.argv:
        sys.exit(rank())
    main()
