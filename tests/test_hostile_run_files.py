"""Values that should end in one of our own errors at once, before anything is allocated."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lbpar import api
from lbpar.config.machine_file import load_machine_file
from lbpar.config.run_file import load_run_file, parse_run
from lbpar.config.yaml_text import MOST_BYTES, parse_yaml
from lbpar.errors import ConfigError, EngineError, GraphError, LayoutError
from lbpar.layout.runs import expand
from lbpar.plan.command import main as plan
from lbpar.runtime.room import node_memory
from tests.util.hostile import MACHINE

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.timeout(60)
MODEL = "{input: [8, 8, 1], layers: [{op: conv, filters: 4, kernel: 3, pad: 1, name: c}, {op: flatten}, {op: linear, features: 2}]}"


def run(*overrides: str, model: str = MODEL) -> Any:
    return parse_run(f"model: {model}\ntrain: {{batch: 4}}\ndata: {{samples: 8}}", overrides)


def test_aliases_that_stand_for_too_much() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match="bomb: line 7: this holds more than 1000000 entries, aliases written out"):
        parse_yaml("\n".join(lines), "bomb")
    merges = "\n".join(["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 40))])
    with pytest.raises(ConfigError, match="more than 1000000 entries"):
        parse_yaml(merges, "bomb")
    with pytest.raises(ConfigError, match="line 1: an alias may not stand for what it is part of"):
        parse_yaml("a: &a [*a]", "bomb")
    assert parse_yaml("a: &a [1]\nb: [*a, *a]", "fine") == {"a": [1], "b": [[1], [1]]}


def test_what_is_wrong_is_shown_shortly(tmp_path: Path) -> None:
    """However large a wrong value is, the message is not, and takes no time."""
    deep = "[" * 90 + "]" * 90
    for text in (f"[{'9, ' * 10_000}]", "9" * 4000, "x" * 100_000, deep, f"0x{'f' * 100_000}"):
        with pytest.raises(ConfigError) as caught:
            run(f"train.batch={text}")
        assert len(str(caught.value)) < 1000
    with pytest.raises(ConfigError, match=r"100 mistakes:(\n.*){20}\n  and 80 more\.$"):
        run(f"train.no_decay=[{'x, ' * 100}]")
    many = ", ".join(["{op: relu}"] * 3_000)
    with pytest.raises(ConfigError, match="got 'nowhere'") as caught:
        run(model=f"{{input: [4], layers: [{many}, {{op: add, from: [nowhere, relu1]}}]}}")
    assert len(str(caught.value)) < 2000
    (tmp_path / "large.yaml").write_bytes(b"#" * (MOST_BYTES + 1))
    for path in (str(tmp_path / "large.yaml"), "/dev/zero"):
        with pytest.raises(ConfigError, match="this run file is larger than 16000000 bytes"):
            load_run_file(path)
    for path, message in (("a" * 5000, "File name too long"), ("a\0b", "null byte")):
        with pytest.raises(ConfigError, match=message):
            load_run_file(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.samples=9223372036854775808", "data.samples: got 9223372036854775808, expected at most 10000000"),
        ("data.samples=2147483647", "data.samples: got 2147483647, expected at most 10000000"),
        ("engine.threads=20000", "engine.threads: got 20000, expected auto or a whole number from 1 to 1024"),
        ("train.schedule={name: constant, warmup_epochs: 1e308}", "warmup_epochs: got 1e.308, expected at most"),
        ("train.schedule={name: step, every: 1e308}", "every: got 1e.308, expected at most"),
        ("train.batch=99999999999999999999", "train.batch: got 99999999999999999999, expected at most 2147483647"),
        ("model.layers.0.stride=9223372036854775807", r"stride: got 9223372036854775807, expected a whole number .*2³¹"),
        ("model.layers.0.filters=9223372036854775807", "filters: got 9223372036854775807, expected at most 2147483647"),
        ("model.layers.0.filters=100000000000", "filters: got 100000000000, expected at most 2147483647"),
        ("model.layers.0.pad=[9223372036854775807, 1]", "pad: got .9223372036854775807, 1., expected a whole number"),
        ("model.input=[8, 99999999999, 1]", "model.input: got .8, 99999999999, 1., expected the shape of one sample"),
        (f"parallel.memory={'9' * 400}GB", "parallel.memory: got '9.*9GB', expected an amount of memory .* less than 2⁶³"),
        ("data.cache=10000000000000PB", "data.cache: got .*, expected an amount of memory"),
        (r'run.out="a\0b"', r"run.out: got 'a\\x00b', expected a text without control characters .*holds U.0000"),
        (r'model.layers.0.name="\ud800"', r"name: got '\\ud800', expected a text without control .*holds U.D800"),
        (r'model.layers.2.from="\ud800"', "from: got .*holds U.D800"),
        (f"data.train={'a' * 5000}", "data.train: got 'aaa.*', expected a text of at most 1000 .*it has 5000 characters"),
        (f"run.out=runs/{'é' * 128}", "run.out: got 'runs/é.*255 bytes between slashes"),
    ],
)  # fmt: skip
def test_fields(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(override)


def test_the_largest_seed() -> None:
    assert run("train.seed=9223372036854775807").train.seed == 2**63 - 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{name: unet2d, depth: 1000000}", "depth: got 1000000, expected at most 30 poolings"),
        ("{name: unet3d, depth: 31}", "depth: got 31, expected at most 30 poolings"),
        ("{name: vgg16, width: 1e300}", "width: 1e.300 times 64 channels is more than 2³¹"),
        ("{name: resnet50, width: 1e8}", "width: 1e.08 times 64 channels is more than 2³¹"),
        ("{input: [2000000000, 2000000000, 3], layers: [{op: relu}]}", r"input: a tensor of shape .* more than 2⁴⁸ elements"),
        ("{input: [8, 8, 1], layers: [{op: conv, filters: 9, kernel: 1, pad: 2147483647}]}", "more than 2⁴⁸ elements"),
        ("{input: [1000000000], layers: [{op: linear, features: 1000000000}]}", "linear1: weight: a tensor of shape"),
        ("{input: [8, 8, 1], layers: [{op: upsample, factor: 2147483647}]}", "more than 2⁴⁸ elements"),
    ],
)  # fmt: skip
def test_networks(model: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        api.build_graph(run(model=model))


def test_a_batch_that_makes_tensors_too_large() -> None:
    config = run(
        "train.batch=2147483647",
        "parallel.strategy=data",
        model="{input: [4096, 4096], layers: [{op: conv, filters: 4096, kernel: 1}]}",
    )
    with pytest.raises(GraphError, match=r"input: a tensor of shape \(2147483647, 4096, 4096\)"):
        api.make_plan(config, api.build_graph(config.model_copy(update={"train": run().train})), procs=2)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--batch", "99999999999999999999"], "--batch: got 99999999999999999999, expected a whole number"),
        (["--batch", "9" * 4000], "--batch: got a number of 13288 bits, expected a whole number"),
        (["--batch", "4", "--input", "9" * 5000], "--input: got .*, expected a shape"),
        (["--batch", "4", "--input", "99999999999,8,1"], "--model: input: got .99999999999, 8, 1., expected the shape"),
    ],
)
def test_command_line(option: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(["--model", "lenet", "--procs", "2", "--machine", "laptop", *option])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("table", {"m": 10**20}),
        ("table", {"rate": 1e308}),
        ("peak", {"float32": 1e308}),
        ("speeds", {"update": 5e-324}),
    ],
)
def test_machine_files(path: str, value: dict[str, Any], tmp_path: Path) -> None:
    compute: dict[str, Any] = MACHINE["compute"]
    old = compute[path]
    new = [{**old[0], **value}] if path == "table" else value
    file = tmp_path / "m.yaml"
    file.write_text(repr({**MACHINE, "compute": {**compute, path: new}}))
    with pytest.raises(ConfigError, match=rf"compute.{path}.*expected at (most|least)"):
        load_machine_file(file)


@pytest.mark.parametrize("command", [lambda c: api.train(c), lambda c: api.verify(c, procs=2)], ids=["train", "verify"])
def test_what_no_memory_can_hold_is_refused_before_it_is_allocated(command: Callable[[Any], object]) -> None:
    config = run("model.layers.0.filters=1000000000", "parallel.strategy=data")
    with pytest.raises(EngineError, match="memory: one process needs at least .* (GB|TB).*on this node"):
        command(config)
    assert node_memory() < 1 << 60


def test_flattened_blocks_of_very_many_pieces() -> None:
    assert len(expand([(0, 300), (0, 300), (0, 1)], [300, 300, 2])) == 90_000
    with pytest.raises(LayoutError, match="a flattened dimension .* would consist of 250000 pieces"):
        expand([(0, 500), (0, 500), (0, 1)], [500, 500, 2])


@pytest.mark.parametrize(
    ("seed", "cases"), [(1, 12), pytest.param(2, 300, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_random_hostile_values(seed: int, cases: int) -> None:
    """In a process of its own, whose memory is limited."""
    line = [sys.executable, "-m", "tests.util.hostile", str(seed), str(cases)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
