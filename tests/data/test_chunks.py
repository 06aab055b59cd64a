"""Chunks beside what is needed of a sample: said where a process must decompress much more than its block."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import h5py
import numpy as np
import pytest

from lbpar import api
from lbpar.data import chunks
from lbpar.data.__main__ import main
from lbpar.data.box import touched
from lbpar.data.chunks import advice
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.layout.runs import Box, indices
from lbpar.train.setup import build_graph, build_plan
from lbpar.transport.virtual import VirtualWorld
from tests.util.training import run_file

BOXES: list[Box] = [
    (((0, 32),), ((0, 64),), ((0, 64),), ((0, 1),)),
    (((31, 64),), ((0, 64),), ((0, 64),), ((0, 1),)),
    (((0, 64),), ((20, 41),), ((0, 3), (61, 64)), ((0, 1),)),
    ((), ((0, 64),), ((0, 64),), ((0, 1),)),
]


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("cut", [(1, 64, 64, 64, 1), (1, 8, 64, 64, 1), (2, 9, 7, 64, 1)])
def test_chunks_that_hold_a_box_are_counted(cut: tuple[int, ...], box: Box) -> None:
    of_dim = [{i // c for i in indices(runs).tolist()} for runs, c in zip(box, cut[1:], strict=True)]
    want = sum(np.prod(np.minimum(cut[1:], (64, 64, 64, 1))) for _ in product(*of_dim))
    assert touched(cut, (64, 64, 64, 1), box) == want


@pytest.mark.parametrize("chunks", [None, (2, 3, 6, 2)])
def test_bytes_of_chunks_are_counted_beside_those_that_are_wanted(
    tmp_path: Path, chunks: tuple[int, ...] | None
) -> None:
    with h5py.File(tmp_path / "d.h5", "w") as f:
        f.create_dataset("x", data=np.arange(7 * 5 * 6 * 2, dtype=np.int16).reshape(7, 5, 6, 2), chunks=chunks)
    data = Hdf5Dataset(tmp_path / "d.h5", "", y=None)
    part = data.read(np.array([6, 0, 3]), (((2, 4),), ((0, 1), (5, 6)), ((0, 2),)))
    wanted = 2 * part.size
    assert part.shape == (3, 2, 2, 2)
    # Chunks of samples 0 and 1, 2 and 3, 6 alone; of rows 0 to 2 and 3 to 5; all columns.
    assert data.bytes_read.tolist() == [3 * (2 * 6 * 6 * 2) * 2 if chunks else wanted, wanted]


def volumes(path: Path, chunks: tuple[int, ...] | None, size: int = 64) -> Path:
    with h5py.File(path, "w") as f:
        x = np.zeros((2, size, size, size, 1), np.int16)
        f.create_dataset("x", data=x, chunks=chunks, compression="gzip" if chunks else None)
        f["y"] = np.arange(2) % 2
    return path


@pytest.mark.parametrize(
    ("cut", "box", "told"),
    [
        (
            (1, 64, 64, 64, 1),
            BOXES[0],
            "needs 262 kB, but must read and decompress 524 kB, .* 1 x 64 x 64 x 64 x 1.*--chunk 8 64 64 1`",
        ),
        ((1, 8, 64, 64, 1), BOXES[0], ""),
        ((1, 8, 64, 64, 1), BOXES[2], "--chunk 64 8 8 1`"),
        ((1, 64, 8, 8, 1), BOXES[2], ""),
        (None, BOXES[0], ""),
        ((1, 64, 64, 64, 1), BOXES[3], ""),
    ],
)
def test_advice_is_about_the_box(cut: tuple[int, ...] | None, box: Box, told: str, tmp_path: Path) -> None:
    text = advice(Hdf5Dataset(volumes(tmp_path / "a.h5", cut)), box, "it")
    assert bool(text) == bool(told) and re.search(told, text)


def test_info_says_what_a_plan_makes_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(volumes(tmp_path / "a.h5", (1, 64, 64, 64, 1)))
    for ops, said in (
        ("{a: {D: [0], H: [1]}}", "(D in 2, H in 2) needs 131 kB, but must read and decompress 524 kB"),
        ("{a: {N: 4}}", "by this plan, processes read whole samples"),
    ):
        (tmp_path / "plan.yaml").write_text(f"procs: 4\ngrid: [2, 2]\nops: {ops}\n")
        assert main(["info", file, "--plan", str(tmp_path / "plan.yaml")]) == 0
        assert said in capsys.readouterr().out
    volumes(tmp_path / "a.h5", (1, 32, 32, 64, 1))
    (tmp_path / "plan.yaml").write_text("procs: 4\ngrid: [2, 2]\nops: {a: {D: 2, H: 2}}\n")
    assert main(["info", file, "--plan", str(tmp_path / "plan.yaml")]) == 0
    assert "a process reads little more than its block" in capsys.readouterr().out
    with h5py.File(tmp_path / "small.h5", "w") as f:  # too small for advice, but the figure is told
        f.create_dataset("x", (2, 8, 8, 8, 1), "f4", chunks=(1, 8, 8, 8, 1), data=np.zeros((2, 8, 8, 8, 1)))
        f["y"] = np.zeros((2, 8, 8, 8), np.uint8)
    assert main(["info", str(tmp_path / "small.h5"), "--plan", str(tmp_path / "plan.yaml")]) == 0
    assert "(D in 2, H in 2), a process reads 4 times its block" in capsys.readouterr().out


@pytest.mark.parametrize(("plan", "more"), [("spatial", ""), ("spatial", "data.patches={per_sample: 1}"), ("data", "")])
def test_training_says_it_at_its_start(
    plan: str, more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "LARGE", 1000)
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f.create_dataset(
            "x", data=np.zeros((2, 16, 12, 12, 1), np.int16), chunks=(1, 16, 12, 12, 1), compression="gzip"
        )
        f["y"] = np.zeros((2, 16, 12, 12), np.uint8)
    config = run_file(
        [
            f"data.train={tmp_path}/a.h5",
            f"parallel={{strategy: {plan}}}",
            f"run.out={tmp_path}/run",
            *filter(None, [more]),
        ],
        """
model: {input: [16, 12, 12, 1], layers: [{op: conv, filters: 2, kernel: 3, pad: 1}]}
train: {batch: 2, epochs: 1, loss: dice}
engine: {name: numpy}
run: {progress: none}
""",
    )
    grid = build_plan(config, build_graph(config), 2).grid
    VirtualWorld(grid).run(lambda t: api.train(config, transport=t, write=True).close())
    # Half of the volume, and a plane beyond it.
    said = "needs 2.59 kB, but must read and decompress 4.61 kB, for chunks are 1 x 16 x 12 x 12 x 1"
    assert (said in capsys.readouterr().out) == (plan == "spatial")


def test_info_of_several_inputs_and_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as f:
        for split, n in (("train", 4), ("test", 2)):
            f[f"{split}/image"], f[f"{split}/facts"] = np.zeros((n, 3, 4, 1), np.uint8), np.zeros((n, 5), np.float32)
            f[f"{split}/mask"], f[f"{split}/size"] = (
                np.arange(n * 12).reshape(n, 3, 4) % 3,
                np.zeros((n, 2), np.float32),
            )
    assert main(["info", str(tmp_path / "a.h5"), "--x", "image,facts", "--y", "mask, size"]) == 0
    said = capsys.readouterr().out.split("\n")[1:5]
    assert said == [
        "  /train: 4 samples image: 3 x 4 x 1, uint8, contiguous",
        "    facts: 5, float32, contiguous",
        "    mask: labels one per voxel 3 x 4, 3 classes",
        "    size: targets 2, real numbers",
    ]
    with h5py.File(tmp_path / "a.h5", "a") as f:
        del f["train/facts"]
        f["train/facts"] = np.zeros((3, 5))
    assert main(["info", str(tmp_path / "a.h5"), "--x", "image,facts", "--y", "mask"]) == 2
    assert "'facts' has 3 samples, expected 4 as the first input" in capsys.readouterr().err
