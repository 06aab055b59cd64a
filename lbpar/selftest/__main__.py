"""`python -m lbpar.selftest [--engine NAME]`."""

import os
import sys

from lbpar.threads import limit_libraries

if __name__ == "__main__":
    limit_libraries()  # before NumPy is imported
    from lbpar.launcher import launched_ranks

    ranks = launched_ranks()
    if ranks is not None and ranks[1] > 0:
        sys.exit(0)  # one process tests for all
    from lbpar.selftest.command import main
    from lbpar.transport.launch import run_main
    from lbpar.transport.probe import outside

    if ranks is not None:  # it starts ranks itself, which are none of that job
        kept = outside(os.environ)
        os.environ.clear()
        os.environ.update(kept)
    sys.exit(run_main(main, alone=True))
