"""Metrics files parse back, in every form, and survive interruption and resumption."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from lbpar.errors import CheckpointError, ConfigError
from lbpar.json_text import dumps, write_text
from lbpar.train.metrics import MetricsWriter, read_metrics

RECORDS = [
    {"epoch": 0, "step": 10, "loss": np.float32(1.5), "steps": {"allreduce": {"bytes": 1024, "seconds": 0.25}}},
    {"epoch": 1, "step": 20, "loss": float("nan"), "steps": {"allreduce": {"bytes": 2048, "seconds": 0.5}}},
    {"epoch": 2, "step": 30, "loss": 0.5, "accuracy": 0.75, "note": 'a,"b"'},
]


def write(out, records=RECORDS, **options):
    with MetricsWriter(out, **{"tensorboard": False, **options}) as metrics:
        for record in records:
            metrics.write(record)


def strict(line):
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_lines_parse_back(tmp_path):
    write(tmp_path / "new" / "run", csv=False)
    lines = (tmp_path / "new" / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [strict(line) for line in lines] == [
        {**RECORDS[0], "loss": 1.5},
        {**RECORDS[1], "loss": None},
        RECORDS[2],
    ]
    assert not (tmp_path / "new" / "run" / "metrics.csv").exists()


def test_each_record_is_on_disk_at_once(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as metrics:
        metrics.write({"step": 1, "loss": 1.0})
        assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]
        assert (tmp_path / "metrics.csv").read_text() == "step,loss\n1,1.0\n"


def test_table_gains_columns(tmp_path):
    write(tmp_path)
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "epoch",
        "step",
        "loss",
        "steps/allreduce/bytes",
        "steps/allreduce/seconds",
        "accuracy",
        "note",
    ]
    assert [row["loss"] for row in rows] == ["1.5", "", "0.5"]
    assert [row["steps/allreduce/bytes"] for row in rows] == ["1024", "2048", ""]
    assert [row["note"] for row in rows] == ["", "", 'a,"b"']


def events(out):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    paths = sorted(out.glob("events.out.tfevents.*"))
    return [list(loader.LegacyEventFileLoader(str(path)).Load()) for path in paths]


def test_tensorboard_reads_the_events(tmp_path):
    write(tmp_path, tensorboard=True)
    (loaded,) = events(tmp_path)
    assert loaded[0].file_version == "brain.Event:2"
    values = {(e.step, v.tag): v.simple_value for e in loaded for v in e.summary.value}
    assert values == {
        (10, "epoch"): 0,
        (10, "loss"): 1.5,
        (10, "steps/allreduce/bytes"): 1024,
        (10, "steps/allreduce/seconds"): 0.25,
        (20, "epoch"): 1,
        (20, "steps/allreduce/bytes"): 2048,
        (20, "steps/allreduce/seconds"): 0.5,
        (30, "epoch"): 2,
        (30, "loss"): 0.5,
        (30, "accuracy"): 0.75,
    }


def test_tensorboard_needs_neither_tensorflow_nor_torch(tmp_path):
    import subprocess

    pytest.importorskip("tensorboard")
    code = (
        "import sys; from lbpar.train.metrics import MetricsWriter; m = MetricsWriter(sys.argv[1]); "
        "m.write({'step': 1, 'loss': 2.0}); m.close(); sys.exit(any(n in sys.modules for n in ('tensorflow', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0


def test_without_tensorboard_a_clear_message(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(ConfigError, match=r"not installed.*lbpar\[tensorboard\]"):
        MetricsWriter(tmp_path)
    MetricsWriter(tmp_path, tensorboard=False).close()


def test_resuming_keeps_what_the_checkpoint_knew(tmp_path):
    write(tmp_path, [*RECORDS[:2], {**RECORDS[2], "step": 21}], tensorboard=True)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 3, "st')  # the run died here
    write(tmp_path, [{"epoch": 2, "step": 30, "loss": 0.25}], tensorboard=True, resume_step=20)
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path / "metrics.jsonl")] == [
        (10, 1.5),
        (20, None),
        (30, 0.25),
    ]
    with open(tmp_path / "metrics.csv", newline="") as file:
        assert [(r["step"], r["loss"]) for r in csv.DictReader(file)] == [("10", "1.5"), ("20", ""), ("30", "0.25")]
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    loaded = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in loaded.Scalars("loss")] == [(10, 1.5), (30, 0.25)]
    assert [e.step for e in loaded.Scalars("epoch")] == [10, 20, 30]


def test_a_new_run_replaces_the_old_files(tmp_path):
    write(tmp_path, tensorboard=True)
    write(tmp_path, RECORDS[:1], tensorboard=True)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 2
    assert len(events(tmp_path)) == 1


def test_damaged_lines_are_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n[2]\n{"step": 3}\n')
    with pytest.raises(CheckpointError, match=r"metrics.jsonl, line 2: expected a JSON object, got '\[2\]'"):
        MetricsWriter(tmp_path, resume_step=3)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_said_once_and_closing_does_not_hide_it(tmp_path):
    full = os.open("/dev/full", os.O_WRONLY)
    message = "metrics.jsonl: cannot be written: No space left on device"
    with pytest.raises(CheckpointError, match=message), MetricsWriter(tmp_path, tensorboard=False) as writer:
        os.dup2(full, writer._lines.fileno())
        writer.write({"step": 1, "loss": 0.5})
    os.close(full)


def test_unwritable_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        MetricsWriter(tmp_path / "file" / "run")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_text(tmp_path / "file" / "run" / "report.json", "{}")


def test_report_is_valid_and_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    write_text(path, dumps({"loss": float("inf"), "shape": (1, np.int64(2)), "grid": {"N": 2}, "at": tmp_path}))
    assert strict(path.read_text()) == {"loss": None, "shape": [1, 2], "grid": {"N": 2}, "at": str(tmp_path)}

    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", broken)
    with pytest.raises(CheckpointError, match="No space left"):
        write_text(path, "{}")
    assert strict(path.read_text())["loss"] is None
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_json_of_numpy_values():
    value = {"a": np.array([1.0, np.nan]), "b": np.bool_(True), 3: np.int32(4), "c": {1}, "d": -np.inf}
    assert strict(dumps(value)) == {"a": [1.0, None], "b": True, "3": 4, "c": [1], "d": None}
