"""Where messages of the ranks go: ``--log-level`` and ``--log-dir``."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from lbpar.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Screen(logging.Handler):
    """Standard error, whatever it is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message, without ornament."""
        print(self.format(record), file=sys.stderr, flush=True)


def add_logging(parser: argparse.ArgumentParser) -> None:
    """Add ``--log-level`` and ``--log-dir``."""
    parser.add_argument("--log-level", choices=LEVELS, default="warning", help="least severe messages that are shown")
    parser.add_argument("--log-dir", metavar="DIR", help="also write each rank's messages to DIR/rank-NUMBER.log")


def start_logging(args: argparse.Namespace, rank: int) -> None:
    """Send messages where the command line says.

    Rank 0 shows them on standard error. Others show errors alone, since what all ranks would warn of is said once; in ``--log-dir`` each
    rank has a file of its own with all of them, which grows when a run goes on.

    Raises
    ------
    ConfigError
        The directory cannot be written.
    """
    logger, level = logging.getLogger("lbpar"), args.log_level.upper()
    for handler in [h for h in logger.handlers if h.get_name() == "lbpar"]:  # of an earlier command in this process
        logger.removeHandler(handler)
        handler.close()
    screen = Screen("ERROR" if rank else level)
    handlers: list[logging.Handler] = [screen]
    if args.log_dir is not None:
        path = Path(args.log_dir) / f"rank-{rank:05}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = logging.FileHandler(path, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--log-dir: {path} cannot be written: {error.strerror or error}.") from None
        file.setFormatter(logging.Formatter(FORMAT))
        handlers.append(file)
    for handler in handlers:
        handler.set_name("lbpar")
        logger.addHandler(handler)
    logger.setLevel(level if args.log_dir is not None else screen.level)
