"""Traced runs: events of every step and move, as a timeline viewer reads them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from lbpar import api
from lbpar.runtime.trace import spread
from tests.util.trace_format import check_nesting, read_trace

RUN = {
    "model": {
        "input": [8, 8, 1],
        "layers": [
            {"op": "conv", "filters": 4, "kernel": 3, "name": "c"},
            {"op": "norm"},
            {"op": "relu"},
            {"op": "global_avg_pool"},
            {"op": "linear", "features": 3, "name": "fc"},
        ],
    },
    "data": {"train": "synthetic", "samples": 8},
    "train": {"batch": 4, "epochs": 1},
    "engine": {"name": "numpy"},
}


def trace(out: Path, name: str, **run: object) -> tuple[list[dict], dict]:
    config = api.load_run(
        {**RUN, "train": {"batch": 4, "epochs": 4}, "run": {"out": str(out), "progress": "none", **run}}
    )
    with api.train(config, write=True):
        pass
    return read_trace(out / name)


def test_trace_names_every_kernel_of_every_step(tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = api.load_run({**RUN, "run": {"out": str(out), "trace": True, "progress": "none"}})
    with api.train(config, write=True):
        pass
    events, _ = read_trace(out / "trace.json")
    spans = [e for e in events if e["ph"] == "X"]
    names = [e["name"] for e in spans]
    assert names.count("c conv_backward_weights_bias") == 2  # two steps
    assert names.count("fc linear_forward") == 2
    assert names.count("update") == 2
    assert all(e["dur"] >= 0 and e["pid"] == 0 for e in spans)
    starts = [e["ts"] for e in spans if e["tid"] == 0]
    assert starts == sorted(starts)
    assert {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank 0"}} in events


def test_steps_and_epochs_are_marked(tmp_path: Path) -> None:
    events, _ = trace(tmp_path, "trace.json", trace=True)
    assert [e["name"] for e in events if e["ph"] == "i"] == ["epoch 1", "epoch 2", "epoch 3", "epoch 4"]
    steps = [e for e in events if e.get("cat") == "step"]
    assert [(e["args"]["epoch"], e["args"]["step"]) for e in steps] == [(1 + i // 2, 1 + i) for i in range(8)]
    for first, second in pairwise(steps):
        assert first["ts"] + first["dur"] <= second["ts"] + 1
    updates = [e for e in events if e["name"] == "update"]
    for step, update in zip(steps, updates, strict=True):
        assert step["ts"] <= update["ts"] <= step["ts"] + step["dur"]


@pytest.mark.parametrize("whole", [False, True])
def test_the_fifth_step_is_kept_by_itself(tmp_path: Path, whole: bool) -> None:
    events, facts = trace(tmp_path, "step.json", trace=whole)
    assert (tmp_path / "trace.json").exists() == whole
    assert facts == {"step": 5, "bytes": [{"counted": {}, "model": {}}]}
    assert [e["args"] for e in events if e.get("cat") == "step"] == [{"epoch": 3, "step": 5}]
    names = [e["name"] for e in events]
    assert names.count("c conv_backward_weights_bias") == names.count("fc linear_forward") == names.count("update") == 1


def test_a_short_run_keeps_its_last_step_and_report_off_none(tmp_path: Path) -> None:
    config = {**RUN, "run": {"out": str(tmp_path / "short"), "progress": "none"}}
    with api.train(api.load_run(config), write=True):
        pass
    assert read_trace(tmp_path / "short" / "step.json")[1]["step"] == 2
    config["run"] = {"out": str(tmp_path / "off"), "progress": "none", "report": False}
    with api.train(api.load_run(config), write=True):
        pass
    assert not (tmp_path / "off" / "step.json").exists()


def test_kernels_name_their_micro_batch(tmp_path: Path) -> None:
    out = tmp_path / "run"
    parallel = {"strategy": "data", "micro_batches": 2}
    config = api.load_run({**RUN, "parallel": parallel, "run": {"out": str(out), "trace": True, "progress": "none"}})
    with api.train(config, write=True):
        pass
    events, _ = read_trace(out / "trace.json")
    found = [e.get("args", {}).get("micro") for e in events if e["name"] == "c conv_backward_weights_bias"]
    assert found == [0, 1, 0, 1]  # two steps
    assert [e.get("args", {}).get("micro") for e in events if e["name"] == "update"] == [None, None]


def test_moves_that_overlap_have_rows_of_their_own() -> None:
    times = [(0, 10), (2, 8), (5, 20), (9, 12), (10, 11)]
    moves = [{"ph": "X", "pid": 0, "tid": 1, "ts": a, "dur": b - a} for a, b in times]
    kernel = {"ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 30}
    assert spread([kernel, *moves]) == 2
    assert [m["tid"] for m in moves] == [1, 3, 4, 3, 1] and kernel["tid"] == 0
    check_nesting([kernel, *moves])
