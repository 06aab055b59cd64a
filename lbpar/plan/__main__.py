"""`python -m lbpar.plan --model resnet50 --batch 256 --procs 64`."""

import gc
import sys
from typing import Any

from lbpar.threads import limit_libraries

if __name__ == "__main__":
    limit_libraries()  # before NumPy is imported
    gc.disable()  # millions of small objects without cycles, for a few seconds
    from lbpar.launcher import launched_ranks
    from lbpar.plan.command import named_machine, run

    ranks = launched_ranks()
    if ranks is not None and ranks[1] > 0:
        sys.exit(0)  # one process plans for all

    def find(which: str, engine: Any) -> Any:
        if which != "auto":
            return named_machine(which, engine)
        # Where a program starts every room may be entered: planning itself measures nothing.
        from lbpar.calibrate.machine import machine_of

        return machine_of(which, engine)

    sys.exit(run(find=find))
