"""`python -m lbpar.export --run runs/x`, alone or under mpirun."""

import sys

from lbpar.threads import limit_libraries

if __name__ == "__main__":
    limit_libraries()  # before NumPy is imported
    from lbpar.inference import export
    from lbpar.transport.launch import run_main

    sys.exit(run_main(export))
