"""`python -m lbpar.study`: studies that write their figures, tables and numbers into a directory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lbpar.config.paths import path_option
from lbpar.errors import LbparError
from lbpar.streams import standard_streams


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m lbpar.study", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    papers = commands.add_parser("papers", help="redraw the papers' figures and tables beside ours")
    papers.add_argument(
        "--out", type=path_option, required=True, metavar="DIR", help="where papers.json, index.html and figures go"
    )
    return top


@standard_streams()
def main(argv: list[str] | None = None) -> int:
    """Run one command line; exit code 0, 1 if a published value is missed, 2 for a wrong command line or directory."""
    args = parser().parse_args(argv)
    try:
        return run_papers(Path(args.out))
    except LbparError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run_papers(out: Path) -> int:
    """The `papers` command."""
    from lbpar.study.papers import summary, write_papers

    counts = write_papers(out)
    print(f"{summary(counts)}; {counts['figures']} figures; see {out / 'index.html'}")
    for name in counts["differ"]:
        print(f"  differs: {name}")
    for name in counts["slow"]:
        print(f"  slower than wanted, this time: {name}")
    return 1 if counts["differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
