"""Run files: what loads, what is refused, and how the message reads."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from lbpar.config.model import InlineModel, NamedModel, OnnxModel, PythonModel
from lbpar.config.optimizers import AdamW, Cosine
from lbpar.config.run_file import RunConfig, dump, load_run_file, parse_run
from lbpar.errors import ConfigError

FULL = """
model:    {name: resnet18, classes: 10, width: 0.5}
data:     {train: digits.h5, test: digits.h5}
train:    {batch: 128, epochs: 20, loss: cross_entropy, seed: 1,
           optimizer: {name: sgd, lr: 0.1, momentum: 0.9, weight_decay: 5.0e-4},
           schedule: {name: cosine, warmup_epochs: 1}}
parallel: {strategy: auto, memory: 16GB,
           layers: {conv1: {N: 2, H: 2}, fc: {F: [0, 2]}}}
engine:   {name: auto, dtype: float32, threads: auto}
machine:  auto
run:      {out: runs/digits, checkpoint: {every_epochs: 1, keep: 3}}
"""
SMALL = "model: {name: lenet}\ntrain: {batch: 8}\n"


def refused(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as e:
        parse_run(text, overrides)
    return str(e.value)


def inline(layers: str) -> str:
    return f"model: {{input: [8, 8, 1], layers: {layers}}}\ntrain: {{batch: 2}}"


def test_full_file() -> None:
    c = parse_run(FULL)
    assert isinstance(c.model, NamedModel)
    assert c.model.options == {"classes": 10, "width": 0.5}
    assert c.train.optimizer.weight_decay == 5e-4
    assert isinstance(c.train.schedule, Cosine)
    assert c.parallel.memory == 16 * 10**9
    assert c.parallel.layers == {"conv1": {"N": 2, "H": 2}, "fc": {"F": (0, 2)}}
    assert c.run.checkpoint is not None
    assert c.run.checkpoint.keep == 3


def test_small_file_has_defaults_for_the_rest() -> None:
    c = parse_run(SMALL)
    assert c.data.train == "synthetic"
    assert c.parallel.strategy == "auto"
    assert c.parallel.plan_file is None
    assert c.train.no_decay == ("norm", "bias")


def test_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        parse_run(SMALL).train.batch = 3  # type: ignore[misc]


@pytest.mark.parametrize("text", [FULL, SMALL, inline("[{op: conv, filters: 2, kernel: 3, pad: [1, [0, 2]]}]")])
def test_dump_loads_to_the_same(text: str) -> None:
    c = parse_run(text)
    again = parse_run(dump(c))
    assert again == c
    assert dump(again) == dump(c)


def test_file_and_overrides(tmp_path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(FULL)
    c = load_run_file(
        path,
        [
            "train.epochs=3",
            "train.optimizer={name: adamw, lr: 1e-3}",
            "parallel.layers.conv1.N=4",
            'parallel.layers."layer1.0.conv1".F=2',
            "train.early_stop.patience=5",
            "run.checkpoint=null",
            "data.augment.flip=[W]",
        ],
    )
    assert c.train.epochs == 3
    assert isinstance(c.train.optimizer, AdamW)
    assert c.train.optimizer.lr == 1e-3
    assert c.parallel.layers["conv1"] == {"N": 4, "H": 2}
    assert c.parallel.layers["layer1.0.conv1"] == {"F": 2}
    assert c.train.early_stop is not None
    assert c.run.checkpoint is None
    assert c.data.augment.flip == ("W",)


def test_override_reaches_into_lists() -> None:
    c = parse_run(inline("[{op: linear, features: 3}]"), ["model.layers.0.features=7"])
    assert isinstance(c.model, InlineModel)
    assert c.model.layers[0].features == 7  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.epochs", "expected field.path=value"),
        ("=3", "expected field.path=value"),
        ("train.batch.size=3", "train.batch is 8, which has no field 'size'"),
        ("train.epochs=[1", "not valid YAML"),
        ("model.layers.3.op=relu", "exactly one of name, onnx, python, layers"),
        ("tarin.epochs=3", "did you mean 'train'?"),
        ("train.epochs=three", "train.epochs: got 'three', expected a whole number"),
    ],
)
def test_bad_overrides(override: str, words: str) -> None:
    assert words in refused(SMALL, override)


def test_override_outside_a_list() -> None:
    message = refused(inline("[{op: relu}]"), "model.layers.1.op=relu")
    assert "a list of 1; got '1', expected an entry from 0 to 0" in message


def test_file_is_named_with_overrides(tmp_path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(SMALL)
    with pytest.raises(ConfigError, match=r"run.yaml with --set: train.batch: got 0, expected at least 1"):
        load_run_file(path, ["train.batch=0"])


def test_all_mistakes_in_one_message() -> None:
    message = refused(
        "model: {name: a, onnx: b.onnx}\n"
        "train: {batch: 0, epoch: 3, optimizer: {name: sgd, lr: '1', momentun: 0.9}, loss: mce}\n"
        "run: {checkpoint: {every_epoch: 2}}\n"
        "parallel: {strategy: dat, memory: lots, layers: {c: {n: 2, X: 3, H: [0, 0]}, d: 3}}\n"
        "enigne: {}"
    )
    for line in [
        "14 mistakes",
        "model: got fields (name, onnx), expected exactly one of name, onnx, python, layers",
        "train.batch: got 0, expected at least 1",
        "train.epoch: unknown field (got 3); did you mean 'epochs'? Known: batch, epochs,",
        "train.optimizer.lr: got '1', expected a number",
        "train.optimizer.momentun: unknown field (got 0.9); did you mean 'momentum'?",
        "train.loss: got 'mce', did you mean 'mse'?",
        "run.checkpoint.every_epoch: unknown field (got 2); did you mean 'every_epochs'?",
        "parallel.strategy: got 'dat', did you mean 'data'?",
        "parallel.memory: got 'lots', expected an amount of memory such as 16GB",
        "parallel.layers.c.n: got 'n', did you mean 'N'?",
        "parallel.layers.c.X: got 'X', expected one of 'N', 'C'",
        "parallel.layers.c.H: got [0, 0], expected a number of ways",
        "enigne: unknown field (got {}); did you mean 'engine'?",
    ]:
        assert line in message
    assert "parallel.layers.d: got 3, expected a block of fields" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {name: a}", "train: missing; it is required"),
        ("model: {name: a}\ntrain: {epochs: 2}", "train.batch: missing; it is required: Samples per step"),
        ("", "got nothing, expected fields: model, data"),
        ("[1, 2]", "got [1, 2], expected fields: model"),
        ("model: {}\ntrain: {batch: 2}", "exactly one of name, onnx, python, layers"),
        ("model: resnet18\ntrain: {batch: 2}", "got 'resnet18', expected exactly one of"),
        ("model: {python: net.py}\ntrain: {batch: 2}", "model.python: got 'net.py', expected file.py:function (a file beside the run file)"),
        ("model: {onnx: a.onnx, classes: 3}\ntrain: {batch: 2}", "model.classes: unknown field (got 3)"),
        ("model: {name: a, input: [8, x]}\ntrain: {batch: 2}", "model.input: got [8, 'x'], expected the shape of one"),
        (SMALL + "train: {batch: 3}", "line 3: field 'train' is given twice (first on line 2)"),
        ("model: {name: a\ntrain: {batch: 2}", "line 2, column 6: not valid YAML"),
        ("a: b: c", "line 1, column 5: not valid YAML"),
        ("model: {name: a}\ntrain: {batch: true}", "train.batch: got True, expected a whole number"),
        ("model: {name: a}\ntrain: {batch: 2.0}", "train.batch: got 2.0, expected a whole number"),
        ("model: {name: a}\ntrain: {batch: 2, clip_norm: .inf}", "train.clip_norm: got inf, expected a finite number"),
        ("model: {name: a}\ntrain: {batch: 2, optimizer: {name: sdg, lr: 1}}", "whose 'name' is 'sdg': did you mean 'sgd'?"),
        ("model: {name: a}\ntrain: {batch: 2, optimizer: {lr: 1}}", "expected a field 'name' that says which kind"),
        ("model: {name: a}\ntrain: {batch: 2, optimizer: {name: sgd, lr: 1, nesterov: true}}", "nesterov without momentum"),
        ("model: {name: a}\ntrain: {batch: 2, schedule: {name: step}}", "exactly one of every and milestones"),
        (SMALL + "engine: {threads: 0}", "engine.threads: got 0, expected auto or a whole number"),
        (SMALL + "engine: {dtype: bfloat61}", "engine.dtype: got 'bfloat61', did you mean 'bfloat16'?"),
        (SMALL + "parallel: {strategy: 3}", "parallel.strategy: got 3, expected one of auto"),
        (SMALL + "parallel: {layers: {\"layer1.0.conv\": {N: 0}}}", 'parallel.layers."layer1.0.conv".N: got 0'),
        (SMALL + "data: {augment: {flip: [X]}}", "data.augment.flip[0]: got 'X', expected one of 'D', 'H' or 'W'"),
    ],
)  # fmt: skip
def test_refused(text: str, words: str) -> None:
    message = refused(text)
    assert words in message
    assert "pydantic" not in message


def test_missing_and_unreadable_files(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"nope.yaml: no such run file"):
        load_run_file(tmp_path / "nope.yaml")
    with pytest.raises(ConfigError, match="cannot read this run file"):
        load_run_file(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        load_run_file(tmp_path / "binary.yaml")


def test_four_kinds_of_model() -> None:
    def model(text: str) -> object:
        return parse_run(f"model: {text}\ntrain: {{batch: 1}}", allow_code=True).model

    python = model('{python: "my.nets:build", depth: 3, input: [8, 8, 1]}')
    assert isinstance(python, PythonModel)
    assert python.options == {"depth": 3, "input": (8, 8, 1)}
    onnx = model("{onnx: net.onnx, input: [8, 8, 1]}")
    assert isinstance(onnx, OnnxModel)
    assert onnx.input == (8, 8, 1)
    assert isinstance(model("{name: lenet}"), NamedModel)
    assert isinstance(model("{input: [3], layers: [{op: linear, features: 2}]}"), InlineModel)


def test_plan_file_as_strategy() -> None:
    c = parse_run(SMALL + "parallel: {strategy: plans/best.yaml}")
    assert c.parallel.plan_file == "plans/best.yaml"


def test_validating_again_is_the_identity() -> None:
    c = parse_run(FULL)
    assert RunConfig.model_validate(c) is c
