"""Command-line options of every command that reads a run file."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a parser alone needs no models
    from lbpar.config.run_file import RunConfig


def add_run_file(parser: argparse._ActionsContainer, required: bool = True) -> None:
    """Add ``--config``, ``--set`` and ``--allow-code``."""
    parser.add_argument("--config", required=required, help="run file (YAML); see docs/run-file.md")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field, as in train.epochs=3"
    )
    parser.add_argument(
        "--allow-code", action="store_true", help="run the Python function that the run file names as its model"
    )


def given_run(args: argparse.Namespace) -> RunConfig:
    """The run file that a command line names.

    Raises
    ------
    ConfigError
        As `load_run_file`.
    """
    from lbpar.config.run_file import load_run_file

    return load_run_file(args.config, args.set, args.allow_code)
