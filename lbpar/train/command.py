"""`python -m lbpar.train`: the whole job, from a run file to a trained network and its report."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from signal import SIGTERM
from time import perf_counter

from lbpar.config.arguments import add_run_file, given_run
from lbpar.launcher import launched_ranks
from lbpar.logs import add_logging, start_logging
from lbpar.transport.arguments import Parser
from lbpar.transport.stop import Stop, stop_signals


def parser() -> argparse.ArgumentParser:
    """Command-line options."""
    p = Parser(prog="lbpar train", description="Train a network: mpirun -n 4 python -m lbpar.train --config run.yaml")
    add_run_file(p)
    add_logging(p)
    p.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        choices=("auto",),
        help="go on from the newest checkpoint in run.out; --resume auto: if there is one, else start anew",
    )
    return p


def main(
    argv: Sequence[str] | None = None, after: Callable[[Path], None] | None = None, stop: Stop | None = None
) -> int:
    """Train as the command line says. Collective over all ranks; call it through `lbpar.transport.launch.run_main`.

    ``after`` is given the run directory when all is written, on rank 0, unless ``run.report`` is off. ``stop`` has noted signals since the
    program began; default: they are noted from now on.
    """
    args = parser().parse_args(argv)

    from lbpar.runtime.room import leave_libraries
    from lbpar.train.job import run, start  # not for --help
    from lbpar.train.report import process_seconds

    started = perf_counter() - process_seconds()
    start_logging(args, (launched_ranks() or (1, 0))[1])
    config = given_run(args)
    with stop_signals() if stop is None else nullcontext(stop) as asked:
        if not config.run.checkpoint:  # it has nothing to do about a time limit, but may end well before it
            asked.leave(SIGTERM)
        trainer, goes_on = start(config, write=True, resume=args.resume)
        if not gc.isenabled():  # what start-up made lives to the end: it is not looked through again
            gc.freeze()
            gc.enable()
        leave_libraries()
        try:
            with closing(trainer):
                run(trainer, goes_on, started, stop=asked)
        except SystemExit:
            asked.ignore()
            raise
        trainer.transport.close()
    if after is not None and config.run.report and trainer.transport.rank == 0:
        after(Path(config.run.out))
    return 0
