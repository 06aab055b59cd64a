"""`python -m lbpar.calibrate`: the machine file of the processes that run it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lbpar.config.paths import path_option
from lbpar.errors import ConfigError
from lbpar.text import human_bytes
from lbpar.transport.arguments import Parser
from lbpar.transport.base import Transport
from lbpar.transport.launch import connect
from lbpar.transport.together import check_alike, together

if TYPE_CHECKING:
    from lbpar.config.machine_file import MachineFile


def parser() -> Parser:
    """Command-line options."""
    p = Parser(
        prog="lbpar calibrate",
        description="Measure kernels, memory and, under mpirun, the links between the ranks; write a machine file for "
        "`machine:` of a run file and --machine of lbpar plan. Start it as the training job will be started: as many ranks a node, "
        "bound alike, on two nodes or more if training will use more than one.",
    )
    p.add_argument("--out", type=path_option, required=True, metavar="FILE", help="machine file to write (.yaml)")
    p.add_argument("--name", default="calibrated", help="name of the machine (default: %(default)s)")
    p.add_argument("--engine", default="auto", help="engine to measure (default: %(default)s)")
    p.add_argument("--dtype", default="float32", help="type to measure (default: %(default)s)")
    p.add_argument("--threads", default="auto", help="threads per process (default: a share of the node's cores)")
    p.add_argument("--repeats", type=int, default=5, help="runs of every sample; the least time counts")
    p.add_argument("--quick", action="store_true", help="the few samples that `machine: auto` takes")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write as the command line says. Collective over all ranks."""
    args = parser().parse_args(argv)

    from lbpar.calibrate.machine import measure_machine  # not for --help
    from lbpar.calibrate.samples import samples
    from lbpar.config.engine import EngineConfig
    from lbpar.config.machine_file import save_machine_file
    from lbpar.config.report import check
    from lbpar.engine.registry import build_engine

    if args.repeats < 1:
        raise ConfigError(f"--repeats: got {args.repeats}, expected a whole number of at least 1.")
    threads = int(args.threads) if re.fullmatch("[0-9]{1,9}", args.threads) else args.threads
    given = {"name": args.engine, "dtype": args.dtype, "threads": threads}
    engine = check(EngineConfig, given, "--engine, --dtype, --threads")
    kernels = build_engine(engine).name  # a missing engine is reported before anything is measured
    transport = connect()
    asked = {f"--{name}": value for name, value in vars(args).items() if name not in ("out", "name")}
    check_alike(transport, asked | {"engine": kernels})
    with together(transport):  # before anything is measured
        if transport.rank == 0 and not Path(args.out).parent.is_dir():
            raise ConfigError(f"--out: {args.out} cannot be written: there is no folder {Path(args.out).parent}.")
    found = measure_machine(engine, samples(more=not args.quick), args.repeats, transport)
    found = found.model_copy(update={"name": args.name})
    with together(transport):
        if transport.rank == 0:
            save_machine_file(found, args.out)
            print(summary(found, transport, args.out))
    transport.close()
    return 0


def summary(machine: MachineFile, transport: Transport, path: str) -> str:
    """What was found, in a few lines."""
    compute = machine.compute
    lines = [
        f"{path}: {transport.size} ranks, {len(compute.table)} rates of matrix products, {len(compute.speeds)} speeds of other kernels",
        f"  matrix products  up to {max(r.rate for r in compute.table) / 1e9:.1f} GFLOP/s a rank",
        f"  copies           {human_bytes(compute.memory_bandwidth)}/s, starting a kernel {1e6 * compute.overhead:.0f} µs",
    ]
    if transport.size > 1:
        lines += [
            f"  {level.name:16s} {1e6 * level.alpha:.0f} µs a message, {human_bytes(level.bandwidth)}/s"
            for level in machine.levels
        ]
    if machine.cores is not None:
        lines.append(f"  shared cores     {machine.cores} a node, taken in turns")
    if transport.size == 1:
        lines.append("  links            not measured (one rank): those of `laptop`")
    return "\n".join(lines)
