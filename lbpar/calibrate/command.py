"""`python -m lbpar.calibrate`: the machine file of the processes that run it."""

from __future__ import annotations

import argparse
import platform
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from lbpar.config.arguments import add_run_file
from lbpar.config.paths import path_option
from lbpar.errors import CalibrationError, ConfigError
from lbpar.text import human_bytes
from lbpar.transport.arguments import Parser
from lbpar.transport.base import Transport
from lbpar.transport.launch import connect
from lbpar.transport.together import check_alike, together

if TYPE_CHECKING:
    from lbpar.config.machine_file import MachineFile
    from lbpar.program.steps import Program

SECONDS = 15.0
"""To spend on moves, about."""


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
    p.add_argument(
        "--repeats", type=int, default=9, help="runs of every sample, of which the median counts (default: %(default)s)"
    )
    p.add_argument("--quick", action="store_true", help="the few samples that `machine: auto` takes")
    p.add_argument("--force", action="store_true", help="write the file also where its numbers cannot be trusted")
    add_run_file(p.add_argument_group("a network whose own kernels are measured, too"), required=False)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write as the command line says. Collective over all ranks."""
    args = parser().parse_args(argv)

    from lbpar.calibrate.kept import Kept  # not for --help
    from lbpar.calibrate.machine import measure_machine
    from lbpar.calibrate.picture import write_fit
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
    asked = {f"--{name}": value for name, value in vars(args).items() if name not in ("out", "name", "force")}
    check_alike(transport, asked | {"engine": kernels})
    out = Path(args.out)
    with together(transport):  # before anything is measured
        if transport.rank == 0 and not out.parent.is_dir():
            raise ConfigError(f"--out: {args.out} cannot be written: there is no folder {out.parent}.")
    own = own_samples(args, transport.size)
    hosts = transport.allgather_obj(platform.node())
    kept = Kept(
        out.with_suffix(".parts.json") if transport.rank == 0 else None, asked | {"engine": kernels, "hosts": hosts}
    )
    found = measure_machine(
        engine, chain(samples(more=not args.quick), own), args.repeats, transport, 1.0 if args.quick else SECONDS, kept
    )
    file, doubts = found.file.model_copy(update={"name": args.name}), found.trust.doubts()
    with together(transport):
        if transport.rank == 0:
            write_fit(found.moves, out)
            if doubts and not args.force:
                raise CalibrationError(
                    f"calibrate: {args.out} is not written, its numbers cannot be trusted: {'; '.join(doubts)}. Leave the machine alone and "
                    "run it again, which measures only what is in doubt, or write it as it is with --force."
                )
            save_machine_file(file, args.out)
            kept.drop()
            print(summary(file, transport, args.out))
            print("\n".join(found.trust.summary()))
    transport.close()
    return 0


def own_samples(args: argparse.Namespace, procs: int) -> Iterator[Program]:
    """Programs of the network of the run file that is given, if one is."""
    if args.config is None:
        return iter(())
    from lbpar.calibrate.samples import own_programs
    from lbpar.config.arguments import given_run
    from lbpar.graph.ops.losses import make_loss
    from lbpar.models.load import load_graph

    config = given_run(args)
    graph = load_graph(config.model, config.parallel.norm).with_loss(
        make_loss(config.train.loss, config.train.label_smoothing)
    )
    return own_programs(graph, config.train.batch, procs)


def summary(machine: MachineFile, transport: Transport, path: str) -> str:
    """What was found, in a few lines."""
    compute = machine.compute
    lines = [
        f"{path}: {transport.size} ranks, {len(compute.table)} rates of {len({r.kernel for r in compute.table})} kernels",
        f"  matrix products  up to {max(compute.peak.values()) / 1e9:.1f} GFLOP/s a rank",
        f"  copies           {human_bytes(compute.memory_bandwidth)}/s, starting a kernel {1e6 * compute.overhead:.0f} µs",
    ]
    if transport.size > 1:
        lines += [
            f"  {level.name:16s} {link.kind} between {link.ways}: {1e6 * link.alpha:.1f} µs a message, {human_bytes(link.bandwidth)}/s, "
            f"line off by {100 * link.residual:.0f} %, repetitions apart by {100 * link.spread:.0f} %"
            for level in machine.levels
            for link in level.moves
        ]
    if machine.cores is not None:
        lines.append(f"  shared cores     {machine.cores} a node, taken in turns")
    if transport.size == 1:
        lines.append("  links            not measured (one rank): those of `laptop`")
    return "\n".join(lines)
