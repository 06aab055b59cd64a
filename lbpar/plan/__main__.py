"""`python -m lbpar.plan --model resnet50 --batch 256 --procs 64`."""

import sys

from lbpar.threads import limit_libraries

if __name__ == "__main__":
    limit_libraries()  # before NumPy is imported
    # Where a program starts every room may be entered: planning itself measures nothing.
    from lbpar.calibrate.machine import machine_of
    from lbpar.plan.command import run

    sys.exit(run(find=machine_of))
