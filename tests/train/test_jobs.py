"""The jobs of jobs/ on small samples that are made up here, two steps each, on two virtual ranks: run files that still run."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from lbpar import api
from lbpar.config.run_file import load_run_file
from tests.util.training import train

JOBS = Path(__file__).parents[2] / "jobs"
SMALL: dict[str, tuple[list[int], list[int], int]] = {
    "brain_unet3d": ([17, 19, 17, 1], [17, 19, 17, 1], 2),
    "atlas_unet3d": ([16, 16, 16, 1], [17, 21, 18, 1], 8),
    "unet2d_1024": ([32, 40, 1], [32, 40, 1], 2),
    "brain_gpu": ([16, 16, 16, 1], [16, 16, 16, 1], 2),
    "cosmoflow": ([16, 16, 16, 1], [16, 16, 16, 1], 0),
}
"""Input of the network, shape of the samples, and classes (none: three real targets)."""


def test_all_jobs_are_tried() -> None:
    elsewhere = {"digits", "digits64", "fashion_mnist"}
    assert {p.stem for p in JOBS.glob("*.yaml")} == elsewhere | set(SMALL)


@pytest.mark.parametrize("job", SMALL)
def test_a_job_trains_and_is_tested_on_two_ranks(job: str, tmp_path: Path) -> None:
    shape, sample, classes = SMALL[job]
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "small.h5", "w") as f:
        for split, n in (("train", 4), ("test", 2)):
            x = rng.integers(0, 256, (n, *sample)).astype(np.uint8)
            f[f"{split}/x"] = x if classes else x / 256 - 0.5
            f[f"{split}/y"] = x[..., 0] % classes if classes else rng.uniform(-1, 1, (n, 3))
    changes = [f"data.train={tmp_path}/small.h5", f"data.test={tmp_path}/small.h5", f"model.input={shape}"]
    changes += ["train.max_steps=2", "train.batch=1", "train.schedule={name: constant}", "engine={name: numpy}"]
    changes += ["model.width=0.125"] if job == "brain_gpu" else []  # which is of full width
    [record] = train(load_run_file(JOBS / f"{job}.yaml", changes), 2).records
    assert record["step"] == 2 and np.isfinite(record["loss"])
    assert any(name.startswith("test_") and np.isfinite(value) for name, value in record.items() if value is not None)


@pytest.mark.parametrize(("job", "dimension"), [("brain_unet3d", "D"), ("unet2d_1024", "H")])
@pytest.mark.parametrize("procs", [2, 4])
def test_whole_samples_are_split_in_one_dimension(job: str, dimension: str, procs: int) -> None:
    config = load_run_file(JOBS / f"{job}.yaml")
    graph = api.build_graph(config)
    plan = api.make_plan(config, graph, procs)
    grids = {
        n.name: {loop: plan.grid.ways(axes) for loop, axes in plan[n.name].items()} for n in graph.ops if n.op.weighted
    }
    assert set(map(str, grids.values())) == {str({dimension: procs})}
