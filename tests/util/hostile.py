"""Run files with hostile values: each is planned, verified and trained with, in limited time and memory.

    python -m tests.util.hostile SEED CASES [first case]

One field (at times two) of a small run file gets a value out of a list of numbers, texts and structures that programs stumble over. Whatever
comes of it must be a result or one of lbpar's own errors: no traceback, no hang. Prints what was not, and exits with 1.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from functools import partial
from typing import Any

import yaml

from lbpar.plan.command import run as plan
from lbpar.train.command import main as train
from lbpar.transport.launch import run_main
from lbpar.verify.command import main as verify

SECONDS = 20
MEMORY = 4 << 30

INLINE: dict[str, Any] = {
    "model": {
        "input": [6, 5, 2],
        "layers": [
            {"op": "conv", "filters": 4, "kernel": 3, "stride": 1, "pad": 1, "dilation": 1, "groups": 2, "name": "a"},
            {"op": "norm", "eps": 1e-5, "momentum": 0.1, "stats": "global"},
            {"op": "leaky_relu", "slope": 0.1},
            {
                "op": "max_pool",
                "kernel": 2,
                "stride": 1,
                "pad": [[0, 1], 1],
                "dilation": 1,
                "ceil_mode": True,
                "name": "m",
            },
            {"op": "avg_pool", "kernel": [3, 3], "stride": 2, "pad": 1, "count_include_pad": False},
            {"op": "upsample", "factor": 2},
            {"op": "conv_transpose", "filters": 4, "kernel": 2, "stride": 2, "output_pad": 1, "name": "t"},
            {"op": "dropout", "rate": 0.5, "name": "b"},
            {"op": "add", "from": ["t", "b"]},
            {"op": "flatten"},
            {"op": "linear", "features": 3, "bias": True, "name": "fc"},
        ],
    },
    "data": {
        "train": "synthetic",
        "test": "synthetic",
        "samples": 9,
        "prefetch": 1,
        "cache": "1MB",
        "x": "x",
        "augment": {"flip": ["W"], "crop_pad": 1},
    },
    "train": {
        "batch": 4,
        "epochs": 1,
        "max_steps": 1,
        "loss": "cross_entropy",
        "label_smoothing": 0.1,
        "seed": 1,
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": True},
        "schedule": {"name": "step", "every": 1, "gamma": 0.5, "warmup_epochs": 0, "warmup_start": 0.1},
        "accumulate": 1,
        "clip_norm": 1.0,
        "no_decay": ["norm"],
        "evaluate": {"every_epochs": 1, "batch": 4},
        "early_stop": {"patience": 2, "metric": "loss", "min_delta": 0.0},
    },
    "parallel": {"strategy": "data", "memory": "1GB", "procs": 1, "layers": {"a": {"N": 1}}, "norm": "global"},
    "engine": {"name": "numpy", "dtype": "float32", "threads": 1, "progress": "auto"},
    "machine": "laptop",
    "run": {
        "out": "out",
        "checkpoint": {"every_epochs": 1, "keep": 1},
        "trace": False,
        "progress": "none",
        "metrics": {"csv": True, "tensorboard": False},
    },
}
MODELS: list[dict[str, Any]] = [
    {"name": "lenet", "classes": 3, "input": [28, 28, 1], "width": 0.2},
    {"name": "unet2d", "classes": 2, "input": [16, 16, 1], "width": 0.05, "depth": 2, "norm": True},
    {"name": "unet3d", "classes": 2, "input": [8, 8, 8, 1], "width": 0.05, "depth": 1, "norm": True},
    {"name": "resnet18", "classes": 3, "input": [32, 32, 3], "width": 0.05},
    {"name": "cosmoflow", "classes": 3, "input": [32, 32, 32, 1], "width": 0.05},
    {"name": "alexnet", "classes": 3, "input": [67, 67, 3], "width": 0.01},
    {"onnx": "net.onnx", "input": [8, 8, 1]},
    {"python": "nowhere.py:net"},
]
MACHINE: dict[str, Any] = {
    "name": "m",
    "levels": [
        {"name": "node", "size": 2, "alpha": 1e-6, "bandwidth": 1e10, "source": "x"},
        {"name": "network", "alpha": 1e-5, "bandwidth": 1e9, "source": "x"},
    ],
    "latency": "log",
    "overlap": 0.5,
    "memory": "4GB",
    "cores": 4,
    "compute": {
        "peak": {"float32": 1e10},
        "efficiency": 0.8,
        "half_m": 32,
        "memory_bandwidth": 1e10,
        "overhead": 1e-5,
        "source": "x",
        "table": [{"kernel": "conv_forward", "m": 10, "n": 8, "k": 18, "taps": 9, "dtype": "float32", "rate": 1e9}],
        "speeds": {"relu_forward": 1e9, "update": 1e9},
    },
}
PLAN: dict[str, Any] = {
    "procs": 2,
    "grid": [2],
    "model": "network",
    "batch": 4,
    "ops": {"a": {"N": [0]}, "fc": {"F": 2}, "m": {"H": [0]}},
    "notes": {"x": 1},
}
NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    5,
    7,
    2**30,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    10**18,
    10**20,
    10**100,
    -(2**63),
    0.5,
    1.5,
    1e-300,
    1e300,
    1.7e308,
    -0.0,
    float("inf"),
    float("nan"),
    5e-324,
]
TEXTS = [
    "",
    "x",
    "\0",
    "a\0b",
    "\ud800",
    "../x",
    "/",
    ".",
    "a" * 5000,
    "a/" * 2500,
    "é" * 200,
    "1" * 5000,
    "{}",
    "os:system",
    "auto",
    "data",
    "~",
    "$HOME",
    "-",
    "N",
    "sgd",
    "synthetic",
    "\n",
    "[red]",
    "%s",
    "16GB",
    "9" * 400 + "GB",
    "laptop",
    "input",
    "out/checkpoints",
]
OTHERS = [
    None,
    True,
    False,
    [],
    {},
    [[]],
    [{}],
    [1, 2],
    [1] * 1000,
    ["W"] * 50,
    {"N": 2},
    {"a": {"H": 10**9}},
    {"a": {"N": [0, 1]}},
    {"name": "x"},
    [10**9, 10**9, 3],
    [1, 1, 1, 1],
    [[1, 2], [3, 4]],
    [2**31 - 1] * 3,
]


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a nested structure."""
    if path:
        yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def get(data: Any, path: tuple[Any, ...]) -> Any:
    """What is at a place."""
    for key in path:
        data = data[key]
    return data


def alike(value: Any) -> list[Any]:
    """Hostile values that pass for what stands there."""
    if isinstance(value, bool):
        return [True, False]
    if isinstance(value, int):
        return [v for v in NUMBERS if isinstance(v, int)]
    if isinstance(value, float):
        return NUMBERS
    return TEXTS if isinstance(value, str) else OTHERS


def put(data: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set a place, if it is still there."""
    with contextlib.suppress(KeyError, IndexError, TypeError):
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value


def case(rng: random.Random) -> tuple[dict[str, dict[str, Any]], str]:
    """Files by name, and what was changed in one of them."""
    files = {"run.yaml": INLINE, "machine.yaml": MACHINE, "plan.yaml": PLAN}
    files = copy.deepcopy(files)
    data = files["run.yaml"]
    target = rng.choice(["run.yaml"] * 6 + ["machine.yaml", "plan.yaml"])
    if target == "machine.yaml":
        data["machine"], data["parallel"]["strategy"] = target, "auto"
    elif target == "plan.yaml":
        data["parallel"] |= {"strategy": target, "layers": {}, "procs": 2}
    elif rng.random() < 0.3:
        data["model"] = copy.deepcopy(rng.choice(MODELS))
        data["parallel"]["layers"] = {}
        data["data"]["augment"] = {}
    if target == "run.yaml" and rng.random() < 0.3:
        data["parallel"]["strategy"] = "auto"
    changed = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        path = rng.choice(list(places(files[target])))
        if path[-1] == "input":
            continue  # the default may be large, and takes its time
        value = rng.choice(alike(get(files[target], path)) if rng.random() < 0.8 else [*NUMBERS, *TEXTS, *OTHERS])
        put(files[target], path, value)
        changed.append(f"{'.'.join(map(str, path))} = {repr(value)[:60]}")
    return files, f"{target}: " + ", ".join(changed)


class Late(BaseException):
    """The time is over."""


def late(*_: object) -> None:
    """Signal handler."""
    raise Late  # run_main reports it as it reports any


def attempt(files: dict[str, dict[str, Any]], rng: random.Random) -> str | None:
    """What went wrong, if anything did."""
    shutil.rmtree("out", ignore_errors=True)
    for name, data in files.items():
        with open(name, "w", encoding="utf-8") as file:
            yaml.safe_dump(data, file)
    args = ["--config", "run.yaml"]
    planned = "plan.yaml" in str(files["run.yaml"])
    procs = "2" if planned else str(rng.choice([1, 2, 4, 6, 64]))
    commands = {
        "plan": partial(plan, [*args, "--procs", procs]),
        "train": partial(run_main, partial(train, args)),
        "verify": partial(
            run_main, partial(verify, [*args, "--procs", "2" if planned else rng.choice(["1", "2", "4"])])
        ),
    }
    for name, command in commands.items():
        out, err, begin = io.StringIO(), io.StringIO(), time.monotonic()
        signal.alarm(SECONDS)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = command()
        except Late:
            return f"{name}: not done after {SECONDS} s"
        except BaseException as error:  # noqa: BLE001  whatever it is, it is a fault
            return f"{name}: {''.join(traceback.format_exception(error)[-6:])}"
        finally:
            signal.alarm(0)
        text = err.getvalue()
        if "Traceback" in text or code not in (0, 1, 2) or " Late," in text:
            return f"{name} ({code}): {text[-1500:]}"
        if os.environ.get("VERBOSE"):
            print(f"   {name} {code} {time.monotonic() - begin:.1f}s {text[:300].strip()}", flush=True)
    return None


def main(seed: int, cases: int, first: int = 0) -> int:
    """Try so many cases; how many failed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, late)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for i in range(first, first + cases):
            rng = random.Random(f"{seed} {i}")
            files, what = case(rng)
            if os.environ.get("VERBOSE"):
                print(i, what, flush=True)
            problem = attempt(files, rng)
            if problem is not None:
                failed += 1
                print(f"case {i}: {what}\n{problem}\n", flush=True)
        os.chdir("/")
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main(*map(int, sys.argv[1:]))))
