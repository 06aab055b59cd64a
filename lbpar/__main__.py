"""`python -m lbpar COMMAND ...` is `lbpar COMMAND ...`."""

from __future__ import annotations

import sys

from lbpar.cli import main

sys.exit(main())
