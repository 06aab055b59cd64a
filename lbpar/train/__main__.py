"""`python -m lbpar.train --config run.yaml`, alone or under mpirun."""

import gc
import sys
from pathlib import Path

from lbpar.threads import limit_libraries
from lbpar.transport.stop import stop_signals


def after(out: Path) -> None:
    """Draw the run's page: a program's start may enter every room."""
    from lbpar.study.report import after_run

    after_run(out)


if __name__ == "__main__":
    with stop_signals() as stop:  # first of all: a signal may come while a thousand ranks still read their modules
        gc.disable()  # imports leave little garbage; `lbpar.train.command` enables it again
        limit_libraries()  # before NumPy is imported
        from lbpar.train.command import main
        from lbpar.transport.launch import run_main

        sys.exit(run_main(lambda: main(after=after, stop=stop)))
