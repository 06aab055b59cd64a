"""`lbpar COMMAND ...`: the same as `python -m lbpar.COMMAND ...`.

Commands are found by name and loaded only when asked for, so `lbpar --version` imports nothing heavy.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys

from lbpar import __version__
from lbpar.streams import standard_streams
from lbpar.text import nearest

COMMANDS: dict[str, str] = {
    "train": "train a network: mpirun -n 4 lbpar train --config run.yaml",
    "plan": "choose or explain the grid of every layer, without MPI",
    "evaluate": "loss and accuracies of a trained network on test data",
    "predict": "a trained network's output for the samples of a file",
    "export": "the weights of a trained network as one file",
    "calibrate": "measure this cluster for the planner: mpirun -n 4 lbpar calibrate --out machine.yaml",
    "verify": "compare one step on P ranks with the same step on one",
    "study": "strong and weak scaling, measured or predicted; the papers' figures beside our values",
    "data": "make, convert and describe datasets",
    "slurm": "write a Slurm script for a run file",
    "env": "versions, machine and environment, for a report",
    "selftest": "check that the engines of this installation work",
    "mpi_setup": "let this virtual environment's mpirun oversubscribe and run as root",
}


def usage() -> str:
    """Text of `lbpar --help`."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
    return f"usage: lbpar COMMAND [options]\n\n{rows}\n\n`lbpar COMMAND --help` lists a command's options."


@standard_streams()
def main(argv: list[str] | None = None) -> int:
    """Run one command line.

    Parameters
    ----------
    argv : list of str, optional
        Arguments after the program's name; default ``sys.argv[1:]``.

    Returns
    -------
    int
        Exit code: 0, or 2 for a command line that names no command. The command's own exit passes through.
    """
    args = sys.argv[1:] if argv is None else argv
    if not args:
        print(usage(), file=sys.stderr)
        return 2
    name, rest = args[0], args[1:]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name in ("-V", "--version"):
        print(f"lbpar {__version__}")
        return 0
    command = name.replace("-", "_")
    if command not in COMMANDS:
        hint = nearest(command, COMMANDS).strip() or f"expected one of: {', '.join(COMMANDS)}."
        print(f"lbpar: unknown command `{name}`; {hint}", file=sys.stderr)
        return 2
    module = f"lbpar.{command}"
    if importlib.util.find_spec(module) is None:
        print(f"lbpar: `{name}` is not part of lbpar {__version__}.", file=sys.stderr)
        return 2
    # sys.argv[0] stays what the user typed: argparse prints it in usage lines.
    sys.argv = [f"lbpar {name}", *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
