"""`python -m lbpar.train --config run.yaml`, alone or under mpirun."""

import sys
from pathlib import Path

from lbpar.threads import limit_libraries


def after(out: Path) -> None:
    """Draw the run's page: a program's start may enter every room."""
    from lbpar.study.report import after_run

    after_run(out)


if __name__ == "__main__":
    limit_libraries()  # before NumPy is imported
    from lbpar.train.command import main
    from lbpar.transport.launch import run_main

    sys.exit(run_main(lambda: main(after=after)))
