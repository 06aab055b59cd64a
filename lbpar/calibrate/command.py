"""`python -m lbpar.calibrate`: the machine file of the processes that run it."""

from __future__ import annotations

import argparse
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lbpar.config.arguments import add_run_file, given_run
from lbpar.config.paths import path_option
from lbpar.errors import CalibrationError, ConfigError
from lbpar.text import human_bytes
from lbpar.transport.arguments import Parser
from lbpar.transport.base import Transport
from lbpar.transport.launch import connect
from lbpar.transport.together import check_alike, together

if TYPE_CHECKING:
    from lbpar.config.machine_file import MachineFile
    from lbpar.graph.graph import Graph

SECONDS = 15.0
"""To spend on moves, about."""
KERNELS = 30.0
"""Seconds after which no kernel is run again, but for the first time."""


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
        "--transport",
        default="auto",
        help="how arrays of GPUs travel, as in `engine:` of a run file (default: %(default)s)",
    )
    p.add_argument(
        "--repeats",
        type=int,
        default=9,
        help="runs of every sample, of which the median counts, unless they take half a minute (default: %(default)s)",
    )
    p.add_argument("--quick", action="store_true", help="the few samples that `machine: auto` takes")
    p.add_argument("--force", action="store_true", help="write the file also where its numbers cannot be trusted")
    add_run_file(
        p.add_argument_group(
            "a network whose own kernels and whole steps are measured, too; with --engine cupy as its `engine:` says (tf32, cudnn, autotune, "
            "workspace)"
        ),
        required=False,
    )
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
    from lbpar.config.output import check_output
    from lbpar.config.report import check
    from lbpar.engine.registry import OF_GPU, build_engine

    if args.repeats < 1:
        raise ConfigError(f"--repeats: got {args.repeats}, expected a whole number of at least 1.")
    threads = int(args.threads) if re.fullmatch("[0-9]{1,9}", args.threads) else args.threads
    given = {"name": args.engine, "dtype": args.dtype, "threads": threads, "transport": args.transport}
    if args.config is not None and args.engine == "cupy":  # TF32, cuDNN, workspace: as its training will be
        of_run = given_run(args).engine
        given |= {name: getattr(of_run, name) for name in OF_GPU if name != "graphs"}
    engine = check(EngineConfig, given, "--engine, --dtype, --threads, --transport")
    kernels = build_engine(engine).name  # a missing engine is reported before anything is measured
    transport = connect()
    asked = {f"--{name}": value for name, value in vars(args).items() if name not in ("out", "name", "force")}
    check_alike(transport, asked | {"engine": kernels})
    out = Path(args.out)
    with together(transport):  # before anything is measured
        if transport.rank == 0:
            check_output(out, "--out")
    network = given_network(args)
    hosts = transport.allgather_obj(platform.node())
    kept = Kept(
        out.with_suffix(".parts.json") if transport.rank == 0 else None, asked | {"engine": kernels, "hosts": hosts}
    )
    found = measure_machine(
        engine,
        samples(more=not args.quick),
        args.repeats,
        transport,
        1.0 if args.quick else SECONDS,
        kept,
        KERNELS,
        network=network,
    )
    file, doubts = found.file.model_copy(update={"name": args.name}), found.trust.doubts()
    with together(transport):
        if transport.rank == 0:
            refused = bool(doubts) and not args.force
            shown = write_fit(found.moves, out, refused)
            if refused:
                look = f" {shown} shows what was measured." if shown else ""
                again = f", which measures only what is in doubt ({kept.path} holds the rest)" if kept.any else ""
                raise CalibrationError(
                    f"calibrate: {args.out} is not written, its numbers cannot be trusted: {'; '.join(doubts)}.{look} Leave the machine alone "
                    f"and run it again{again}, or write it as it is with --force."
                )
            save_machine_file(file, args.out)
            kept.drop()
            print(summary(file, transport, args.out))
            print("\n".join(found.trust.summary()))
    transport.close()
    return 0


def given_network(args: argparse.Namespace) -> tuple[Graph, int] | None:
    """The network of the run file that is given, if one is, and its batch."""
    if args.config is None:
        return None
    from lbpar.models.load import load_graph, with_losses

    config = given_run(args)
    return with_losses(load_graph(config.model, config.parallel.norm), config.train), config.train.batch


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
            f"line off by {100 * link.residual:.0f} %, medians sure to {100 * link.unsure:.0f} %{f'; IN DOUBT: {link.doubt}' if link.doubt else ''}"
            for level in machine.levels
            for link in level.moves
        ]
    if machine.cores is not None:
        lines.append(f"  shared cores     {machine.cores} a node, taken in turns")
    if transport.size == 1:
        lines.append("  links            not measured (one rank): those of `laptop`")
    return "\n".join(lines)
