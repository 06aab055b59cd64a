"""`python -m lbpar.verify --config run.yaml`, alone or under mpirun."""

import sys

from lbpar.threads import limit_libraries

if __name__ == "__main__":
    limit_libraries()  # before NumPy is imported
    from lbpar.transport.launch import run_main
    from lbpar.verify.command import main

    sys.exit(run_main(main))
