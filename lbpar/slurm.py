"""`lbpar slurm write`: a batch script for one run file, from the templates of `jobs/slurm`, and what the planner expects of it."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from math import inf
from pathlib import Path

from lbpar.config.arguments import add_run_file, given_run
from lbpar.config.paths import as_path, path_option
from lbpar.config.run_file import RunConfig
from lbpar.cost.machine import find_machine
from lbpar.cost.price import SLOTS
from lbpar.data.sampler import Sampler
from lbpar.errors import ConfigError, LbparError
from lbpar.json_text import write_text
from lbpar.plan.resolve import optimizer_name
from lbpar.shipped import template
from lbpar.streams import standard_streams
from lbpar.study.predict import predict
from lbpar.text import human_bytes, human_seconds
from lbpar.train.setup import build_dataset, build_graph

#: Template by launcher, and that of GPUs.
TEMPLATES, GPUS = {"srun": "cpu.sbatch", "mpirun": "mpirun.sbatch"}, "gpu.sbatch"
#: Seconds between Slurm's signal and the time limit, if steps and checkpoints are not long.
NOTICE = 120.0
#: Bytes of a checkpoint written in a second by a slow file system, checksums included.
SAVED_PER_SECOND = 100e6
#: In a template: how it takes a run file from its own command line.
_USAGE = re.compile(r"if \[ \$# -lt 1 \]; then\n.*?\nfi\n", re.DOTALL)
_TAKEN = "config=$1\nshift\n"


def script(text: str, config: Path, options: dict[str, str], args: list[str]) -> str:
    """A template with sbatch's options filled in, for one run file.

    Parameters
    ----------
    text : str
        The template.
    config : Path
        The run file.
    options : dict
        Long options of sbatch; those that the template lacks are added.
    args : list of str
        Options of ``lbpar train`` that are always given.
    """
    for name, value in options.items():
        line = f"#SBATCH --{name}={value}"
        text, there = re.subn(rf"^#SBATCH --{name}=.*$", line.replace("\\", "\\\\"), text, flags=re.MULTILINE)
        if not there:
            text = text.replace("#SBATCH --requeue\n", f"#SBATCH --requeue\n{line}\n")
    text, usage = _USAGE.subn("", text)
    assert usage == 1 and text.count(_TAKEN) == 1, "a template has lost what is replaced here"
    given = f'set -- {shlex.join(args)} "$@"\n' if args else ""
    text = text.replace(_TAKEN, f"config={shlex.quote(str(config))}\n{given}")
    heading = "\n".join(
        f"# {line}" for line in (f"lbpar with {config}. Submit it:", "  sbatch SCRIPT [options of lbpar train]")
    )
    return re.sub(r"(?m)\A(#!.*\n)# lbpar .*\n#   sbatch .*\n", rf"\1{heading}\n", text)


def expected(config: RunConfig, procs: int, nodes: int, limit: float) -> tuple[list[str], float]:
    """What the planner expects of the job, in sentences: time of a step and of the run, memory per rank; and the seconds of an update.

    Parameters
    ----------
    config : RunConfig
    procs, nodes : int
    limit : float, seconds
        Time limit of the job.

    Raises
    ------
    LbparError
        The run file cannot be planned on so many processes.
    """
    machine = find_machine(config.machine)
    found = predict(config, procs, machine)
    if "error" in found:
        raise ConfigError(f"slurm: {found['error']}")
    step, memory = found["predicted"]["seconds"], found["predicted"]["memory"]
    train, data = config.train, config.data
    batches = Sampler(_samples(config), train.batch, train.seed, data.shuffle, data.drop_last).steps_per_epoch
    steps = min(train.epochs * batches, train.accumulate * (train.max_steps or sys.maxsize))
    total = steps * step
    time = f"{human_seconds(step)} a step, {steps:,} steps, {_hours(total)} for all"
    room = f"{human_bytes(memory)} per rank, of {human_bytes(machine.memory)} that one has there ({procs // nodes} ranks a node)"
    lines = [f"expected on {machine.name}: {time}; {room}"]
    if memory > machine.memory:
        lines.append("this does not fit: use more processes, a smaller batch, or set parallel.memory")
    if total > limit:
        jobs = -(-int(total) // max(1, int(limit)))
        lines.append(f"this takes about {jobs} jobs of {_hours(limit)}: each goes on where the one before was ended")
    if found["idle_ranks"]:
        lines.append(f"{found['idle_ranks']} processes get no sample in some layer; another strategy may use them")
    return lines, step * config.train.accumulate


def notice(config: RunConfig, limit: float, update: float) -> int:
    """Seconds before a time limit when a job should hear of it: what an update and a checkpoint may take, but not half of its time.

    Parameters
    ----------
    config : RunConfig
    limit, update : float, seconds
        Of the job; expected of an update.
    """
    arrays = 1 + SLOTS[optimizer_name(config.train.optimizer)]
    save = 4 * arrays * build_graph(config).parameter_count / SAVED_PER_SECOND
    return int(min(max(NOTICE, 2 * (update + save)), limit / 2))


def _samples(config: RunConfig) -> int:
    if config.data.train == "synthetic":
        return config.data.samples
    dataset = build_dataset(config, build_graph(config), "train", "float32")
    assert dataset is not None
    try:
        return len(dataset) * (config.data.patches.per_sample if config.data.patches else 1)
    finally:
        dataset.close()


def _hours(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes else human_seconds(seconds)


def seconds_of(text: str) -> float:
    """Slurm's time (``minutes``, ``m:s``, ``h:m:s``, ``d-h``, ``d-h:m``, ``d-h:m:s``) in seconds; infinite where it is 0, which sets no limit.

    Raises
    ------
    ConfigError
        It is none of these.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None:
        raise ConfigError(f"--time: got {text}, expected a time as Slurm reads it: 90, 1:30:00 or 2-12.")
    days, *parts = (int(p) if p else None for p in found.groups())
    a, b, c = (p or 0 for p in parts)
    if days is not None:
        return 86400 * days + 3600 * a + 60 * b + c or inf
    return (60 * a + b if parts[2] is None else 3600 * a + 60 * b + c) or inf


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="lbpar slurm", description="Slurm scripts for run files.")
    p = top.add_subparsers(dest="command", required=True).add_parser(
        "write", help="write a script that trains a run file"
    )
    add_run_file(p)
    p.add_argument("--nodes", type=int, required=True)
    p.add_argument("--ntasks-per-node", type=int, required=True, help="ranks of a node")
    p.add_argument("--cpus-per-task", type=int, help="cores of a rank (default: those of the template)")
    p.add_argument("--gpus-per-node", type=int, help="one for each rank of a node")
    p.add_argument("--time", required=True, help="limit of the job, as in 2:00:00")
    p.add_argument("--launcher", choices=TEMPLATES, default="srun", help="what starts the ranks (default: %(default)s)")
    p.add_argument(
        "--mpi", default="pmix", help="srun's --mpi: pmix for Open MPI, pmi2 for MPICH (default: %(default)s)"
    )
    p.add_argument(
        "--sbatch", action="append", default=[], metavar="NAME=VALUE", help="further options, as in partition=gpu"
    )
    p.add_argument("--machine", type=path_option, help="to predict with; default: the run file's")
    p.add_argument("--out", type=path_option, metavar="FILE", help="the script (default: the run file's name.sbatch)")
    return top


def write(args: argparse.Namespace) -> None:
    """The command ``write``.

    Raises
    ------
    LbparError
        The run file is wrong, or the script cannot be written.
    """
    config = given_run(args)
    if args.machine is not None:
        config = config.model_copy(update={"machine": args.machine})
    for name in ("nodes", "ntasks_per_node", "cpus_per_task", "gpus_per_node"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: got {getattr(args, name)}, expected at least 1.")
    if args.gpus_per_node not in (None, args.ntasks_per_node):
        raise ConfigError(
            f"--gpus-per-node: got {args.gpus_per_node} with {args.ntasks_per_node} ranks a node, expected a GPU for each rank; make them equal."
        )
    if args.gpus_per_node is not None and args.launcher != "srun":
        raise ConfigError("--launcher: mpirun has no template for GPUs; leave it out, or --gpus-per-node.")
    gpu = config.engine.name == "cupy"
    limit, procs = seconds_of(args.time), args.nodes * args.ntasks_per_node
    if config.parallel.procs not in (None, procs):
        raise ConfigError(f"parallel.procs: the run file asks for {config.parallel.procs}, but this job has {procs}.")
    names = "nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node"
    values = (getattr(args, name.replace("-", "_")) for name in names)
    options = {name: str(value) for name, value in zip(names, values, strict=True) if value is not None}
    options |= {"time": args.time, "job-name": as_path(args.config).stem}
    for given in args.sbatch:
        name, equals, value = given.partition("=")
        if not equals or not re.fullmatch("[a-z][a-z-]*", name):
            raise ConfigError(f"--sbatch: got {given}, expected NAME=VALUE, as in --sbatch partition=long.")
        if name in (*names, "time"):  # what is expected of the job follows from these
            raise ConfigError(
                f"--sbatch: got {given}, expected an option that has none of its own here; give --{name} {value}."
            )
        options[name] = value
    lines, update = [], 0.0
    if config.machine == "auto":
        lines.append("machine: auto is measured when the job starts; name one with --machine to see what it expects")
    else:
        lines, update = expected(config, procs, args.nodes, limit)
    if args.gpus_per_node is not None and not gpu:
        lines.append(
            f"engine.name: {config.engine.name} takes no GPU, but this script asks for some; add --set engine.name=cupy, or leave out --gpus-per-node"
        )
    if (
        gpu
        and args.gpus_per_node is None
        and not any("gpu" in f"{n}={v}" for n, v in options.items() if n != "job-name")
    ):
        lines.append(
            "engine.name: cupy needs GPUs, for which this script does not ask: --gpus-per-node does, one for each rank"
        )
    options.setdefault("signal", f"B:USR1@{notice(config, limit, update)}")
    passed = [w for change in args.set for w in ("--set", change)] + ["--allow-code"] * args.allow_code
    base = template(TEMPLATES[args.launcher] if args.gpus_per_node is None else GPUS)
    if args.cpus_per_task is None:
        cores = re.search(r"^#SBATCH --cpus-per-task=(\d+)", base, re.MULTILINE)
        assert cores is not None
        lines.append(f"{cores[1]} cores a rank, as the template has it: --cpus-per-task changes that")
    text = script(base, as_path(args.config), options, passed)
    if args.launcher == "srun":
        text = text.replace("${LBPAR_SRUN_MPI:-pmix}", f"${{LBPAR_SRUN_MPI:-{args.mpi}}}")
    out = as_path(args.out or f"{as_path(args.config).stem}.sbatch")
    if out.exists() and not out.read_text(encoding="utf-8", errors="replace").startswith("#!"):
        raise ConfigError(f"--out: {out} is there and is no script; it is left as it is. Choose another name.")
    write_text(out, text, "--out")
    print("\n".join([f"-> {out}: {procs} ranks on {args.nodes} node{'s' * (args.nodes > 1)}", *lines]))


@standard_streams()
def main(argv: list[str] | None = None) -> int:
    """Run one command line; exit code 0, or 2 for what cannot be done."""
    args = parser().parse_args(argv)
    try:
        write(args)
    except LbparError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
