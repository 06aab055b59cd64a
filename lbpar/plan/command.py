"""`python -m lbpar.plan`: choose or explain the grid of every layer, without MPI and without a GPU."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lbpar.config.arguments import add_run_file, given_run
from lbpar.config.engine import EngineConfig
from lbpar.config.model import InlineModel, NamedModel, OnnxModel, PythonModel
from lbpar.config.output import check_output, write_output
from lbpar.config.parallel import STRATEGIES as NAMES
from lbpar.config.parallel import ParallelConfig
from lbpar.config.paths import path_option
from lbpar.config.plan_file import PlanFile, save_plan_file
from lbpar.config.report import check
from lbpar.config.run_file import RunConfig
from lbpar.config.section import is_int, parse_bytes
from lbpar.cost.machine import Machine, find_machine, machine_names
from lbpar.cost.memory import PREFETCH
from lbpar.cost.price import SLOTS
from lbpar.cost.simulate import pipeline
from lbpar.errors import ConfigError, LbparError
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES, CrossEntropy
from lbpar.models.load import load_graph, with_losses
from lbpar.papers.records import layer_records
from lbpar.papers.searches import price_gholami, price_pase
from lbpar.plan.asked import check_stages
from lbpar.plan.candidates import MOST_AXES
from lbpar.plan.choose import Choice, choose_plan
from lbpar.plan.compare_stages import Staged, best_without, check_counts, compare_stages, fastest_first, measured
from lbpar.plan.explain import explain
from lbpar.plan.lean import fit, fitted
from lbpar.plan.picture import draw
from lbpar.plan.pipeline_picture import pipeline_text
from lbpar.plan.priced import Settings
from lbpar.plan.report import print_report
from lbpar.plan.resolve import check_wanted, optimizer_name, plan_content, resolve_plan, staged
from lbpar.plan.segments import recomputed
from lbpar.plan.stage_search import best_stages
from lbpar.plan.stage_words import unpriced_words, whether_stages_pay, written
from lbpar.program.plan import Plan
from lbpar.streams import standard_streams
from lbpar.tables import print_table
from lbpar.text import human_bytes, human_seconds, nearest, shorten
from lbpar.threads import cores


def parser() -> argparse.ArgumentParser:
    """Command-line options."""
    p = argparse.ArgumentParser(
        prog="lbpar plan",
        description="Choose the grid of every layer and say why: python -m lbpar.plan --model resnet50 --batch 256 --procs 64",
    )
    what = p.add_argument_group("what to plan")
    add_run_file(what, required=False)  # options given besides it win
    what.add_argument("--model", help="name of a network, file.py:function, package.module:function, or an ONNX file")
    what.add_argument("--classes", type=int, help="number of classes of --model")
    what.add_argument("--input", help="shape of one sample of --model, channels last, as in 224,224,3")
    what.add_argument("--loss", choices=sorted(LOSSES), help="loss (default: cross_entropy)")
    what.add_argument("--batch", type=int, help="samples per step, over all processes")
    what.add_argument("--procs", type=int, help="number of processes")
    how = p.add_argument_group("how")
    how.add_argument(
        "--machine",
        type=path_option,
        help=f"auto, a machine file, or one of {', '.join(machine_names())} (default: auto)",
    )
    how.add_argument("--memory", help="what one process may use, as in 16GB")
    how.add_argument(
        "--recompute",
        help="auto, a number of segments, layers, as in relu1,relu2, or [] for none: see `parallel.recompute`",
    )
    how.add_argument("--strategy", type=path_option, help=f"one of {', '.join(NAMES)}, or a plan file (default: auto)")
    how.add_argument(
        "--dtype",
        choices=("float32", "float64", "bfloat16", "float16", "tf32"),
        help="type of activations; tf32: float32 on a GPU, multiplied in TF32",
    )
    how.add_argument("--optimizer", choices=sorted(SLOTS), help="for memory and the update's time")
    how.add_argument(
        "--axes", type=int, default=MOST_AXES, help="grid axes to plan with at most (default: %(default)s)"
    )
    how.add_argument(
        "--cost", choices=("lbpar", "pase", "gholami"), default="lbpar", help="cost model (default: lbpar)"
    )
    how.add_argument("--grid", help="Pr x Pc for --cost gholami, as in 16x32")
    out = p.add_argument_group("output")
    out.add_argument("--json", type=path_option, help="write everything to a JSON file (- for standard output)")
    how.add_argument(
        "--stages",
        metavar="N,N,...",
        help="also price so many stages with every schedule, as in 2,4,8, beside the best plan without; --out writes the fastest that keeps the arithmetic",
    )
    how.add_argument("--micro-batches", type=int, help="with --stages: parts of each batch (default: 4 per stage)")
    out.add_argument("--out", type=path_option, help="write the plan where lbpar.train can read it (plan.yaml)")
    out.add_argument("--plot", type=path_option, help="draw the plan (PNG, SVG or PDF)")
    out.add_argument("--quiet", action="store_true", help="leave out the table of layers")
    return p


@dataclass
class Job:
    """What the command line and the run file ask for together."""

    graph: Graph
    model: str | dict[str, Any]
    batch: int
    procs: int
    machine: str
    memory: int | None
    strategy: str
    dtype: str
    optimizer: str
    prefetch: int
    engine: EngineConfig
    parallel: ParallelConfig


#: Finds the machine of this name or file, for an engine; ``auto`` needs one that can measure.
FindMachine = Callable[[str, EngineConfig], Machine]


def named_machine(which: str, engine: EngineConfig) -> Machine:
    """A machine by name or by file."""
    return find_machine(which)


#: Options that a cost model does not look at.
UNUSED = {
    "lbpar": ("grid",),
    "pase": (
        "config",
        "set",
        "classes",
        "input",
        "loss",
        "machine",
        "memory",
        "recompute",
        "strategy",
        "dtype",
        "optimizer",
        "grid",
        "out",
        "plot",
    ),
    "gholami": ("loss", "machine", "memory", "recompute", "strategy", "dtype", "optimizer", "out", "plot"),
}


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options that would say nothing."""
    for name in UNUSED[args.cost]:
        if getattr(args, name):
            users = " or ".join(f"--cost {cost}" for cost, unused in UNUSED.items() if name not in unused)
            raise ConfigError(
                f"--{name}: --cost {args.cost} does not use it, only {users} does; leave one of them out."
            )
    if not args.model:
        for name in ("classes", "input"):
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name}: it belongs to --model; with --config, use --set model.{name}=...")
    if args.micro_batches is not None and (args.micro_batches < 1 or not args.stages):
        raise ConfigError(f"--micro-batches: got {args.micro_batches}, expected at least 1, together with --stages.")
    _counts(args.stages)
    for name in ("json", "out", "plot"):
        path = getattr(args, name)
        if path and path != "-":
            check_output(path, f"--{name}")
    if args.axes < 1:
        raise ConfigError(f"--axes: got {args.axes}, expected at least 1.")


def main(argv: Sequence[str] | None = None, find: FindMachine = named_machine) -> int:
    """Run the command; raises LbparError for what the user can mend.

    Parameters
    ----------
    argv : sequence of str, optional
        Default ``sys.argv[1:]``.
    find : callable
        Finds the machine.
    """
    args = parser().parse_args(argv)
    _check_options(args)
    if args.cost == "pase":
        return _pase(args)
    if args.cost == "gholami":
        return _gholami(args)
    job = _job(args)
    given = _given(job, args.axes)
    counts = [n for n in _counts(args.stages) if n > 1]
    micros, layers = args.micro_batches or job.parallel.micro_batches, job.parallel.layers
    check_counts(job.graph, job.batch, job.procs, counts, micros)
    choice = _choose(job, given, args, find(job.machine, job.engine))
    report = explain(choice, job.model if isinstance(job.model, str) else None)
    if args.stages:
        settings = _settings(job, choice.machine)
        settings = replace(settings, recompute=recomputed(job.parallel.recompute, job.graph) or ())
        asked = measured(choice.priced, choice.limit)
        options: dict[str, Any] = {"recompute": job.parallel.recompute, "cores": cores()}
        if given is None and asked.places == asked.micro_batches == 1:
            best = [asked]
        else:  # what the run file or --strategy asks for stands beside the best
            free = {} if given is not None else {"layers": layers}
            best = [asked, best_without(settings, job.procs, choice.limit, args.axes, **options, **free)]
        within = layers if given is None else None
        found = compare_stages(
            settings, job.procs, counts, micros, args.axes, choice.limit, delayed=True, layers=within
        )
        rows = fastest_first([*best, *found])
        report["stages"] = [r.as_dict(job.batch) for r in rows]
        report["whether_stages_pay"] = [
            *_asked(best),
            *whether_stages_pay([*best[-1:], *found], settings, choice.limit),
        ]
        report["unpriced"] = unpriced_words(job.graph, job.batch, job.procs, counts, micros, args.axes, within)
        if args.out:
            report["notes"] = [*report["notes"], *written(rows[0], asked, args.out, settings, choice.limit)]
        report["pipeline"] = _pipeline(next((r for r in rows if r.places > 1), rows[0]))
        choice.priced = rows[0].priced
    if args.json == "-":
        print(json.dumps(report, indent=2))
    else:
        print_report(report, layers=not args.quiet)
    if args.json and args.json != "-":
        write_output(args.json, json.dumps(report, indent=2) + "\n", "the report")
    if args.out:
        save(choice, args.out, job)
    if args.plot:
        draw(report, args.plot)
    return 0


def _asked(rows: Sequence[Staged]) -> list[str]:
    """A sentence on the plan that was asked for beside the best without stages, where these are two."""
    if len(rows) == 1:
        return []
    asked, best = (r.priced for r in rows)
    ratio = f"{asked.seconds / best.seconds:.2f} times as long as the best plan without stages"
    return [f"Asked for: {asked.name}, {human_seconds(asked.seconds)} a step, {ratio} ({human_seconds(best.seconds)})."]


def _pipeline(row: Staged) -> dict[str, Any]:
    """The picture of a plan with stages."""
    spans = pipeline(row.priced.program, row.priced.price)
    return {
        "name": row.priced.name,
        "lines": pipeline_text(spans),
        "spans": [s._asdict() for s in spans],
    }


def _counts(text: str | None) -> list[int]:
    if text is None:
        return []
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text) or "0" in text.split(","):
        raise ConfigError(f"--stages: got {text!r}, expected numbers of stages, as in 2,4,8.")
    return list(dict.fromkeys(int(n) for n in text.split(",")))


def save(choice: Choice, path: str, job: Job) -> None:
    """Write the plan, every layer with its axes, and a note on what it is expected to cost."""
    o = choice.priced
    ops = {n.name: {k: tuple(a) for k, a in o.plan[n.name].items() if a} for n in o.program.graph.ops}
    notes = {
        "strategy": o.name,
        "machine": choice.machine.name,
        "step_seconds": o.seconds,
        "memory_bytes": o.memory.peak,
        "axes": "a loop lists the grid axes that split it, slowest first; it may also give a number of ways",
    }
    content = {
        **plan_content(o.plan),
        "model": job.model,
        "batch": job.batch,
        "ops": ops,
        "notes": notes,
    }
    save_plan_file(PlanFile.model_validate(content), path)


def _names_or_number(text: str) -> int | list[str]:
    return int(text) if text.isdecimal() else [] if text == "[]" else text.split(",")


def _settings(job: Job, machine: Machine) -> Settings:
    return Settings(job.graph, job.batch, machine, job.dtype, job.optimizer, job.prefetch, **job.engine.planned)


def _given(job: Job, most_axes: int) -> Plan | None:
    """The plan, unless it is to be chosen. What does not fit the processes is refused before a machine is measured."""
    if job.strategy != "auto":
        return resolve_plan(job.parallel, job.graph, job.batch, job.procs)
    check_wanted(job.parallel, job.graph, job.batch, job.procs, most_axes)
    return None


def _choose(job: Job, plan: Plan | None, args: argparse.Namespace, machine: Machine) -> Choice:
    options: dict[str, Any] = {
        "memory_limit": job.memory,
        "dtype": job.dtype,
        "optimizer": job.optimizer,
        "prefetch": job.prefetch,
        **job.engine.planned,
        "most_axes": args.axes,
        "cores": cores(),
    }
    settings, parallel = _settings(job, machine), job.parallel
    limit = machine.memory if job.memory is None and parallel.recompute == "auto" else job.memory
    if plan is None:
        samples, places = check_stages(parallel, job.batch, job.procs)
        asked: dict[str, Any] = {"layers": parallel.layers, "recompute": parallel.recompute}
        best = best_stages(settings, parallel, job.procs, args.axes) if places > 1 else None
        if best is not None:  # a stage's own choice stands for what is said of grids
            options |= {"memory_limit": None, "compare": False}
            asked["recompute"] = None
        choice = choose_plan(job.graph, samples, job.procs // places, machine, **asked, **options)
        if best is not None:
            choice.priced, choice.plan, choice.batch, choice.others = best.priced, best.priced.plan, job.batch, ()
            choice.limit, choice.search_seconds = limit, best.search_seconds
            choice.space |= best.space
        elif places > 1 or samples < job.batch:
            plan, name = (
                staged(choice.plan, parallel, job.graph, samples, machine, job.dtype),
                f"auto, {places} stage{'s' * (places > 1)}",
            )
            priced = settings.priced(name, plan) if limit is None else fitted(settings, name, plan, limit)
            choice.priced, choice.plan, choice.batch, choice.others = priced, priced.plan, job.batch, ()
        return choice
    given = settings.priced(job.strategy, plan)
    if limit is not None and parallel.recompute == "auto":
        given = fitted(settings, job.strategy, plan, limit)
    elif limit is not None and parallel.recompute is None and given.memory.peak > limit:
        given = fit(settings, given, limit) or given
    options["memory_limit"] = None  # the plan is given; what the planner would do stands beside it
    choice = choose_plan(job.graph, job.batch, job.procs, machine, **options)
    notes = (
        []
        if job.memory is None or given.memory.peak <= job.memory
        else [
            f"Memory: this plan needs {human_bytes(given.memory.peak)} per process, more than the limit of {human_bytes(job.memory)}."
        ]
    )
    others = (replace(choice.priced.figures, name="auto"), *(o for o in choice.others if o.name != job.strategy))
    choice.priced, choice.plan, choice.limit, choice.notes = given, given.plan, limit, notes
    choice.others = tuple(sorted(others, key=lambda o: o.seconds))
    return choice


def _job(args: argparse.Namespace) -> Job:
    config = given_run(args) if args.config else None
    if config is None and args.set:
        raise ConfigError("--set: it changes a run file; give --config, or leave --set out.")
    section = _model(args) if args.model else config.model if config else None
    if section is None:
        raise ConfigError("plan: no network was given; give --config run.yaml, or --model with --batch and --procs.")
    batch = args.batch if args.batch is not None else config.train.batch if config else None
    procs = args.procs if args.procs is not None else config.parallel.procs if config else None
    for name, value in (("--batch", batch), ("--procs", procs)):
        if value is None:
            raise ConfigError(f"{name}: missing; give {name} with a whole number of at least 1.")
        if not is_int(value, 1):
            raise ConfigError(
                f"{name}: got {shorten(value)}, expected a whole number of at least 1 (and less than 2³¹)."
            )
    assert batch is not None and procs is not None
    memory = config.parallel.memory if config else None
    if args.memory:
        try:
            memory = parse_bytes(args.memory)
        except ValueError as error:
            raise ConfigError(f"--memory: got {args.memory!r}, {error}.") from None
    strategy = args.strategy or (config.parallel.strategy if config else "auto")
    if strategy not in NAMES and not strategy.endswith((".yaml", ".yml", ".json")):
        raise ConfigError(
            f"--strategy: got {strategy!r}, {nearest(strategy, NAMES)}expected one of {', '.join(NAMES)}, or a plan file."
        )
    parallel = config.parallel if config else ParallelConfig()
    if args.recompute:
        again = args.recompute if args.recompute == "auto" else _names_or_number(args.recompute)
        parallel = check(ParallelConfig, {**parallel.model_dump(), "recompute": again}, "--recompute")
    given = {"strategy": strategy, "layers": {k: dict(v) for k, v in parallel.layers.items()}, "memory": memory}
    parallel = check(ParallelConfig, {**parallel.model_dump(), **given}, "--strategy")
    engine = config.engine if config else EngineConfig()
    if args.dtype == "tf32":
        engine = engine.model_copy(update={"name": "cupy", "dtype": "float32", "tf32": True})
    elif args.dtype:
        engine = engine.model_copy(update={"dtype": args.dtype, "tf32": False})
    return Job(
        _with_loss(load_graph(section, config.parallel.norm if config else None), args, config),
        _model_text(section),
        batch,
        procs,
        args.machine or (config.machine if config else "auto"),
        memory,
        strategy,
        engine.arithmetic,
        args.optimizer or (optimizer_name(config.train.optimizer) if config else "momentum"),
        config.data.prefetch if config else PREFETCH,
        engine,
        parallel,
    )


def _model(args: argparse.Namespace) -> Any:
    options: dict[str, Any] = {}
    if args.classes is not None:
        options["classes"] = args.classes
    if args.input is not None:
        if not re.fullmatch(r"\d{1,20}(,\d{1,20})*", args.input):
            raise ConfigError(f"--input: got {args.input!r}, expected a shape such as 224,224,3 (channels last).")
        options["input"] = [int(n) for n in args.input.split(",")]
    if args.model.endswith(".onnx"):
        return check(OnnxModel, {"onnx": args.model}, "--model")
    if ":" in args.model:
        return check(PythonModel, {"python": args.model, **options}, "--model")
    return check(NamedModel, {"name": args.model, **options}, "--model")


def _model_text(section: NamedModel | PythonModel | OnnxModel | InlineModel) -> str | dict[str, Any]:
    if isinstance(section, NamedModel) and not section.options:
        return section.name
    return section.model_dump(mode="json", exclude_none=True, by_alias=True)


def _with_loss(graph: Graph, args: argparse.Namespace, config: RunConfig | None) -> Graph:
    if args.loss or config is None:
        return graph.with_loss(LOSSES[args.loss or CrossEntropy.kind]())
    return with_losses(graph, config.train)


def _pase(args: argparse.Namespace) -> int:
    if not (args.model and args.batch and args.procs):
        raise ConfigError(
            "--cost pase: give --model (pase-alexnet, pase-inception-v3, pase-resnet101), --batch and --procs."
        )
    found = price_pase(args.model, args.batch, args.procs)
    text = f"{found['model']}, batch {found['batch']}, {found['procs']} processes, cost model of PaSE's prototype: {found['total']:.11e} operations ({human_seconds(found['seconds'])}), data parallel {found['data_parallel']['ratio']:.2f} times as much"
    return _emit(found, args, {text: [(r["name"], r["configuration"]) for r in found["layers"]]})


def _gholami(args: argparse.Namespace) -> int:
    if not (args.batch and (args.procs or args.grid)):
        raise ConfigError("--cost gholami: give --model, --batch, and --grid 16x32 or --procs.")
    grid = None
    if args.grid:
        match = re.fullmatch(r"(\d+)[x×](\d+)", args.grid)
        if not match:
            raise ConfigError(f"--grid: got {args.grid!r}, expected rows x columns, as in 16x32.")
        grid = (int(match[1]), int(match[2]))
    section = _model(args) if args.model else given_run(args).model if args.config else None
    if section is None:
        raise ConfigError("--cost gholami: no network was given; give --model or --config.")
    found = price_gholami(layer_records(load_graph(section)), args.batch, grid, args.procs)
    text = f"{args.model or args.config}, batch {args.batch}, grid {found['grid'][0]}x{found['grid'][1]}, equation ({found['equation']}): communication {human_seconds(found['step']['total'])} a step, {found['batch_parallel_ratio']:.2f} times less than pure batch parallelism"
    grids = [("x".join(map(str, g["grid"])), human_seconds(g["step"])) for g in found["grids"]]
    layers = [(r["name"], human_seconds(r["total"])) for r in found["layers"]]
    return _emit(found, args, {text: layers, "grids, cheapest first": grids})


def _emit(found: dict[str, Any], args: argparse.Namespace, tables: Mapping[str, Sequence[Sequence[object]]]) -> int:
    text = json.dumps(found, indent=2)
    if args.json == "-":
        print(text)
        return 0
    for title, rows in tables.items():
        print_table(rows, title=title)
    if args.json:
        write_output(args.json, text + "\n", "the report")
    return 0


@standard_streams()
def run(argv: Sequence[str] | None = None, find: FindMachine = named_machine) -> int:
    """`main` with errors on one line instead of a traceback."""
    try:
        return main(argv, find)
    except LbparError as error:
        print(f"lbpar plan: {error}", file=sys.stderr)
        return 2
