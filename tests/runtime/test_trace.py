"""A traced run: events of every step and move, as a timeline viewer reads them."""

from __future__ import annotations

import json
from pathlib import Path

from lbpar import api

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


def test_trace_names_every_kernel_of_every_step(tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = api.load_run({**RUN, "run": {"out": str(out), "trace": True, "progress": "none"}})
    with api.train(config, write=True):
        pass
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    names = [e["name"] for e in spans]
    assert names.count("c conv_backward_weights_bias") == 2  # two steps
    assert names.count("fc linear_forward") == 2
    assert names.count("update") == 2
    assert all(e["dur"] >= 0 and e["pid"] == 0 for e in spans)
    starts = [e["ts"] for e in spans if e["tid"] == 0]
    assert starts == sorted(starts)
    assert {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank 0"}} in events
