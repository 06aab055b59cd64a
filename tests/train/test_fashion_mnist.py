"""The Fashion-MNIST job, cut short: real images through the converter, two ranks, an accuracy that only learning reaches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lbpar.config.run_file import load_run_file
from lbpar.data.convert import convert
from tests.util.training import train

# Debian's package dataset-fashion-mnist, or the IDX files elsewhere.
IMAGES = Path(os.environ.get("FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))
JOB = Path(__file__).parents[2] / "jobs" / "fashion_mnist.yaml"


@pytest.mark.slow
def test_120_steps_reach_83_percent(tmp_path):
    pytest.importorskip("h5py")
    if not (IMAGES / "train-images-idx3-ubyte.gz").exists():
        pytest.skip(f"no Fashion-MNIST in {IMAGES}; apt-get install dataset-fashion-mnist, or set FASHION_MNIST")
    data = tmp_path / "fashion.h5"
    convert([IMAGES], data, normalise=True)
    changes = [f"data.train={data}", f"data.test={data}", "train.max_steps=120", "train.schedule={name: constant}"]
    [record] = train(load_run_file(JOB, changes), 2).records
    assert record["test_accuracy"] > 0.83  # 0.86; ten kinds of clothes, so guessing gives 0.10
