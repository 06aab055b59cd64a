"""Command-line arguments of a program that many ranks run: usage and mistakes are printed once."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from lbpar.launcher import launched_ranks


class Parser(argparse.ArgumentParser):
    """As argparse's; under a launcher only rank 0 prints; all ranks end with the same status."""

    def print_usage(self, file: Any = None) -> None:
        """Print the usage line on rank 0."""
        if _prints():
            super().print_usage(file)

    def print_help(self, file: Any = None) -> None:
        """Print the help text on rank 0."""
        if _prints():
            super().print_help(file)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End this process; the message is rank 0's."""
        super().exit(status, message if _prints() else None)


def _prints() -> bool:
    ranks = launched_ranks()
    return ranks is None or ranks[1] == 0
