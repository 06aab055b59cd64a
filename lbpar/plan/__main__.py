"""`python -m lbpar.plan --model resnet50 --batch 256 --procs 64`."""

import sys

if __name__ == "__main__":
    from lbpar.plan.command import run

    sys.exit(run())
