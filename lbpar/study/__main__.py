"""`python -m lbpar.study`: studies that write their figures, tables and numbers into a directory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lbpar.config.arguments import add_run_file
from lbpar.config.paths import path_option
from lbpar.errors import LbparError
from lbpar.streams import standard_streams
from lbpar.study.measure import add_steps
from lbpar.study.points import GROW, STRONG, WEAK
from lbpar.study.stages import add_options
from lbpar.transport.stop import sigterm_exits


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="lbpar study", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    for name, text in (
        (STRONG, "the same work on more processes"),
        (WEAK, "as much work for each process, on more of them"),
    ):
        p = commands.add_parser(name, help=f"scaling study: {text}", description=f"Scaling study: {text}.")
        add_run_file(p)
        p.add_argument("--procs", required=True, metavar="1,2,4", help="numbers of processes")
        p.add_argument(
            "--plans", default="auto", metavar="auto,data,FILE", help="strategies and plan files (default: auto)"
        )
        p.add_argument("--machine", type=path_option, help="instead of the run file's")
        if name == WEAK:
            p.add_argument(
                "--grow", choices=GROW, default=GROW[0], help="what grows with the processes (default: %(default)s)"
            )
        p.add_argument("--predict", action="store_true", help="ask the cost model instead of running")
        p.add_argument("--launcher", metavar="TEXT", help="how ranks are started, as in 'srun --mpi=pmix -n {procs}'")
        p.add_argument("--slurm", metavar="OPTIONS", help="run the points as a job array, with these options of sbatch")
        p.add_argument("--retry", action="store_true", help="run points again that failed before")
        add_steps(p)
        p.add_argument("--out", type=path_option, required=True, metavar="DIR", help="where everything goes")
    point = commands.add_parser("point", help="measure one point of a study, as a task of its job array does")
    point.add_argument("folder", type=path_option)
    point.add_argument("--procs", type=int, required=True)
    point.add_argument("--launcher")
    add_steps(point)
    one = commands.add_parser("report", help="write report.html into a run directory", description="The page of a run.")
    one.add_argument("folder", type=path_option, metavar="RUN_DIR")
    one.add_argument(
        "--machine", type=path_option, help="what to predict for (default: what the plan was chosen for, if known)"
    )
    one.add_argument("--allow-code", action="store_true", help="run the Python function that is the run's model")
    both = commands.add_parser("compare", help="the times of two studies side by side")
    both.add_argument("first", type=path_option, metavar="A")
    both.add_argument("second", type=path_option, metavar="B")
    text = "where stages beat the best plan without, modelled on several machines"
    add_options(commands.add_parser("stages", help=text, description=f"Study: {text}."))
    papers = commands.add_parser("papers", help="redraw the papers' figures and tables beside ours")
    papers.add_argument(
        "--out", type=path_option, required=True, metavar="DIR", help="where papers.json, index.html and figures go"
    )
    return top


@standard_streams()
def main(argv: list[str] | None = None) -> int:
    """Run one command line; exit code 0, 1 if a published value is missed or a point failed, 2 for what cannot be done."""
    args = parser().parse_args(argv)
    try:
        match args.command:
            case "papers":
                return run_papers(Path(args.out))
            case "stages":
                from lbpar.study.stages import run

                return run(args, lambda text: print(text, flush=True))
            case "compare":
                return run_compare(Path(args.first), Path(args.second))
            case "report":
                from lbpar.study.report import write_report

                print(f"-> {write_report(Path(args.folder), args.machine, args.allow_code)}")
                return 0
            case "point":
                from lbpar.study.scaling import measure_one

                with sigterm_exits():  # with the launcher that it waits for, and this one's ranks
                    return measure_one(args)
            case _:
                from lbpar.study.scaling import run_study

                with sigterm_exits():  # with the launcher that it waits for, and this one's ranks
                    return run_study(args, lambda text: print(text, flush=True))
    except LbparError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "interrupted; where points are measured, the same command goes on with those that are left", file=sys.stderr
        )
        return 130


def run_compare(first: Path, second: Path) -> int:
    """The `compare` command."""
    from lbpar.study.scaling import compare, differences
    from lbpar.tables import print_table

    rows = compare(first, second)
    print_table(rows, ["plan", "processes", str(first), str(second), "second / first"])
    if any("~" in cell for row in rows for cell in row[2:4]):
        print("~ predicted, not measured")
    for difference in differences(first, second):
        print(f"not the same: {difference}")
    return 0


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
