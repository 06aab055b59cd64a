"""Checkpoints: any partition written, any other read; whatever is broken is refused with a way on."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbpar.checkpoint.files import (
    check_checkpoint,
    checkpoint_path,
    latest,
    list_checkpoints,
    open_checkpoint,
    prune,
    write_checkpoint,
)
from lbpar.data.box import check_box, pieces
from lbpar.errors import CheckpointError, CommError, DataError
from lbpar.layout.runs import box_shape, whole

h5py = pytest.importorskip("h5py")


def take(array, box):
    """A block by index lists: the oracle for pieces."""
    if not box:
        return array
    return array[np.ix_(*[[i for lo, hi in runs for i in range(lo, hi)] for runs in box])]


def simple(path, arrays, meta=None, blocks=None):
    tensors = {n: (a.shape, a.dtype) for n, a in arrays.items()}
    write_checkpoint(path, tensors, blocks or [(n, whole(a.shape), a) for n, a in arrays.items()], meta or {})


@st.composite
def partition(draw, shape):
    """Boxes that cover a tensor once: per dimension, contiguous runs dealt out to 1-3 parts (some may be empty)."""
    per_dim = []
    for extent in shape:
        parts = draw(st.integers(1, 3))
        cuts = sorted({0, extent, *draw(st.lists(st.integers(0, extent), max_size=4))})
        runs = list(pairwise(cuts))
        owner = [draw(st.integers(0, parts - 1)) for _ in runs]
        per_dim.append([tuple(r for r, o in zip(runs, owner, strict=True) if o == p) for p in range(parts)])
    return list(product(*per_dim))


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    return shape, draw(partition(shape)), draw(partition(shape))


@given(case=cases(), dtype=st.sampled_from(["f4", "f8", "i8", "f2"]))
@settings(max_examples=60, deadline=None)
def test_any_partition_written_any_other_read(case, dtype, tmp_path_factory):
    shape, written, read = case
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    path = checkpoint_path(tmp_path_factory.getbasetemp() / "partitions", 1)
    write_checkpoint(path, {"a/w": (shape, dtype)}, (("a/w", box, take(array, box)) for box in written), {})
    with open_checkpoint(path) as saved:
        assert saved.tensors == {"a/w": (shape, np.dtype(dtype))}
        for box in read:
            block = saved.read("a/w", box)
            assert block.flags.c_contiguous
            assert block.dtype == dtype
            np.testing.assert_array_equal(block, take(array, box))


def test_pieces_name_every_element_once():
    box = (((0, 2), (5, 6)), ((1, 4),), ())
    assert box_shape(box) == (3, 3, 0)
    assert list(pieces(box)) == []
    pairs = list(pieces(box[:2]))
    assert pairs == [
        ((slice(0, 2), slice(1, 4)), (slice(0, 2), slice(0, 3))),
        ((slice(5, 6), slice(1, 4)), (slice(2, 3), slice(0, 3))),
    ]
    assert list(pieces(())) == [((), ())]


@pytest.mark.parametrize(
    ("box", "shape", "fits"),
    [
        ((((0, 2),),), (2,), True),
        ((((0, 3),),), (2,), False),
        ((((-1, 1),),), (2,), False),
        ((((1, 2), (0, 1)),), (2,), False),
        ((((0, 2), (1, 2)),), (2,), False),
        ((), (2,), False),
        ((), (), True),
        (((),), (2,), True),
    ],
)
def test_boxes_outside_are_seen(box, shape, fits):
    with nullcontext() if fits else pytest.raises(DataError, match="^here: got"):
        check_box(box, shape, "here")


def test_any_names_live_side_by_side(tmp_path):
    names = ["w", "w/momentum", "/w", "/w/", "//w", "50%", "%2F", "größe", "a b.c:0"]
    simple(checkpoint_path(tmp_path, 1), {n: np.full(2, i) for i, n in enumerate(names)})
    with open_checkpoint(latest(tmp_path)) as saved:
        assert sorted(saved.tensors) == sorted(names)
        assert [saved.read(n, whole((2,)))[0] for n in names] == list(range(len(names)))


def test_metadata_comes_back_exactly(tmp_path):
    meta = {"step": 123, "seed": 2**63 - 1, "lr": 0.1 + 0.2, "sampler": {"epoch": 3, "position": 64}, "note": "é"}
    simple(checkpoint_path(tmp_path, 123), {"w": np.ones(3)}, meta)
    assert latest(tmp_path).name == "step-000123"
    with open_checkpoint(latest(tmp_path)) as saved:
        assert saved.meta == meta


def test_writing_takes_one_block_at_a_time(tmp_path):
    alive = []

    def blocks():
        for i in range(4):
            block = np.full((2, 3), float(i))
            alive.append(i)
            yield "w", (((2 * i, 2 * i + 2),), ((0, 3),)), block
            block[...] = -1.0  # as a transport that reuses its buffer

    write_checkpoint(checkpoint_path(tmp_path, 1), {"w": ((8, 3), "f8")}, blocks(), {})
    with open_checkpoint(latest(tmp_path)) as saved:
        np.testing.assert_array_equal(saved.read("w", whole((8, 3)))[:, 0], [0, 0, 1, 1, 2, 2, 3, 3])


def test_order_newest_and_keeping(tmp_path):
    assert latest(tmp_path / "none") is None
    for step in (5, 1_000_000, 40):
        simple(checkpoint_path(tmp_path, step), {"w": np.ones(2)})
    (tmp_path / "step-9x").mkdir()
    (tmp_path / ".part-step-000007").mkdir()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-000005", "step-000040", "step-1000000"]
    prune(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000040", "step-1000000", "step-9x"]
    prune(tmp_path, 5)
    assert len(list_checkpoints(tmp_path)) == 2
    assert latest(tmp_path).name == "step-1000000"


def test_an_old_one_that_cannot_be_removed_stays(tmp_path, monkeypatch, caplog):
    for step in (1, 2):
        simple(checkpoint_path(tmp_path, step), {"w": np.ones(2)})

    def refuse(path, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(tmp_path), "rename", refuse)
    prune(tmp_path, 1)
    assert "step-000001: it is no longer needed, but cannot be removed: Permission denied" in caplog.text
    assert len(list_checkpoints(tmp_path)) == 2


def test_rewriting_replaces(tmp_path):
    path = checkpoint_path(tmp_path, 1)
    simple(path, {"w": np.ones(2)})
    simple(path, {"w": np.zeros(3)})
    with open_checkpoint(path) as saved:
        np.testing.assert_array_equal(saved.read("w", whole((3,))), np.zeros(3))
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_interrupted_writing_leaves_the_old_one(tmp_path):
    path = checkpoint_path(tmp_path, 1)
    simple(path, {"w": np.ones(2)})

    def broken():
        yield "w", (((0, 1),),), np.zeros(1)
        raise CommError("rank 3 is gone")

    with pytest.raises(CommError, match="rank 3"):
        write_checkpoint(path, {"w": ((2,), "f8")}, broken(), {})
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    with open_checkpoint(path) as saved:
        np.testing.assert_array_equal(saved.read("w", whole((2,))), np.ones(2))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (("v", (((0, 2),),), np.ones(2)), "no tensor 'v', expected one of 1: w"),
        (("w", (((0, 3),),), np.ones(3)), r"runs \(\(0, 3\),\) in dimension 0, expected increasing runs inside 0..2"),
        (("w", (((0, 2),),), np.ones(3)), r"expected shape \(2,\)"),
        (("w", (((0, 2),),), np.ones(2, np.float32)), "float64"),
        (("w", (((0, 1),),), np.ones(1)), "lack 1 elements"),
    ],
)
def test_wrong_blocks_are_refused(tmp_path, block, message):
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(checkpoint_path(tmp_path, 1), {"w": ((2,), "f8")}, [block], {})
    assert list(tmp_path.iterdir()) == []


def test_doubled_blocks_and_bad_metadata_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="give 2 elements twice"):
        simple(checkpoint_path(tmp_path, 1), {"w": np.ones(2)}, blocks=[("w", (((0, 2),),), np.ones(2))] * 2)
    with pytest.raises(CheckpointError, match="as JSON"):
        simple(checkpoint_path(tmp_path, 1), {"w": np.ones(2)}, {"x": object()})
    assert list(tmp_path.iterdir()) == []


def test_unwritable_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written.*run.out"):
        simple(checkpoint_path(tmp_path / "file", 1), {"w": np.ones(2)})


def three(tmp_path):
    for step in (10, 20, 30):
        values = np.random.default_rng(step).standard_normal((8, 8))
        simple(
            checkpoint_path(tmp_path, step),
            {"w": values, "w/momentum": -values, "steps": np.int64(step)},
            {"step": step},
        )
    return checkpoint_path(tmp_path, 20)


def test_sha256sum_checks_a_checkpoint_too(tmp_path):
    tool = shutil.which("sha256sum")
    if tool is None:
        pytest.skip("no sha256sum")
    subprocess.run([tool, "--check", "--strict", "SHA256SUMS"], cwd=three(tmp_path), check=True, capture_output=True)


def swap(name):
    def harm(path, rng):
        shutil.copy(path.with_name("step-000030") / name, path / name)

    return harm


def flip(name):
    def harm(path, rng):
        raw = bytearray((path / name).read_bytes())
        raw[rng.integers(len(raw))] ^= 1 << rng.integers(8)
        (path / name).write_bytes(raw)

    return harm


def cut(name):
    def harm(path, rng):
        raw = (path / name).read_bytes()
        (path / name).write_bytes(raw[: rng.integers(len(raw))])

    return harm


def zero(name):
    def harm(path, rng):
        raw = bytearray((path / name).read_bytes())
        used = np.flatnonzero(np.frombuffer(raw, np.uint8))
        at = rng.choice(used)
        raw[at : at + 512] = bytes(len(raw[at : at + 512]))
        (path / name).write_bytes(raw)

    return harm


def lost(name):
    return lambda path, rng: (path / name).unlink()


def folder(name):
    def harm(path, rng):
        (path / name).unlink()
        (path / name).mkdir()

    return harm


def renamed(path, rng):
    shutil.rmtree(path)
    path.with_name("step-000030").rename(path)


def replaced(change):
    """A file that HDF5 reads without complaint: what ``change`` makes of it."""

    def harm(path, rng):
        with h5py.File(path / "tensors.h5", "a") as file:
            value = file["w"][...]
            del file["w"]
            change(file, value)

    return harm


def virtual(file, value):
    layout = h5py.VirtualLayout(value.shape, value.dtype)
    layout[...] = h5py.VirtualSource("gone.h5", "w", value.shape)
    file.create_virtual_dataset("w", layout)


def external(file, value):
    file.create_dataset("w", value.shape, value.dtype, external=[("gone.bin", 0, value.nbytes)])


def never_written(file, value):
    file.create_dataset("w", value.shape, value.dtype, chunks=(2, 2))


def linked(file, value):
    file["w"] = h5py.ExternalLink("../step-000030/tensors.h5", "w")


ODD = {
    "virtual dataset": virtual,
    "external dataset": external,
    "never written": never_written,
    "linked": linked,
    "soft link": lambda file, value: file.__setitem__("w", h5py.SoftLink("/nowhere")),
    "group": lambda file, value: file.create_group("w"),
}
NAMES = ["tensors.h5", "meta.json", "SHA256SUMS"]
HARMS = {f"{kind.__name__} {name}": kind(name) for kind in (swap, flip, cut, zero, lost, folder) for name in NAMES}
HARMS |= {"renamed": renamed, **{kind: replaced(change) for kind, change in ODD.items()}}
HARMS["other type"] = replaced(lambda file, value: file.create_dataset("w", data=value.astype("f4")))


@pytest.mark.parametrize("kind", HARMS)
def test_whatever_is_damaged_is_refused_and_the_next_whole_one_named(kind, tmp_path):
    """Every kind of damage, those with a place at many places: nothing is taken, and nothing ends in another error."""
    path = three(tmp_path / "good")
    shutil.copy(path.with_name("step-000010") / "meta.json", tmp_path)
    places = 24 if kind.split()[0] in ("flip", "cut", "zero") else 1
    for seed in range(places):
        here = tmp_path / str(seed) / path.name
        shutil.copytree(path.parent, here.parent)
        HARMS[kind](here, np.random.default_rng(seed))
        with pytest.raises(
            CheckpointError, match=r"step-000020: damaged: .*next older whole one is .*step-000010"
        ) as e:
            check_checkpoint(here)
        assert f"delete {here} to resume" in str(e.value)


@pytest.mark.parametrize("kind", ODD)
def test_tensors_that_are_not_in_the_file_are_refused_whatever_its_checksum(kind, tmp_path):
    path = three(tmp_path)
    HARMS[kind](path, None)
    sums = [f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}\n" for name in NAMES[:2]]
    (path / "SHA256SUMS").write_text("".join(sums))
    check_checkpoint(path)
    with pytest.raises(CheckpointError, match="cannot be opened.*step-000010"):
        open_checkpoint(path)


def test_a_damaged_older_one_is_not_recommended(tmp_path):
    path = three(tmp_path)
    lost("meta.json")(path, None)
    lost("SHA256SUMS")(path.with_name("step-000030"), None)
    with pytest.raises(CheckpointError, match="step-000030: damaged.*next older whole one is .*step-000010"):
        check_checkpoint(path.with_name("step-000030"))
    cut("tensors.h5")(path.with_name("step-000010"), np.random.default_rng(0))
    with pytest.raises(CheckpointError, match="There is no older whole one"):
        check_checkpoint(path.with_name("step-000030"))


def test_a_copy_under_a_name_of_ones_own_is_whole(tmp_path):
    path = three(tmp_path)
    shutil.copytree(path, tmp_path / "submitted")
    check_checkpoint(tmp_path / "submitted")


def test_missing_oldest_and_other_formats(tmp_path):
    path = three(tmp_path)
    with pytest.raises(CheckpointError, match="no such checkpoint.*step-000030"):
        check_checkpoint(checkpoint_path(tmp_path, 31))
    with pytest.raises(CheckpointError, match="There is no older whole one"):
        check_checkpoint(checkpoint_path(tmp_path, 5))
    meta = path / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": 99}))
    sums = [f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}\n" for name in NAMES[:2]]
    (path / "SHA256SUMS").write_text("".join(sums))
    with pytest.raises(CheckpointError, match="step-000020: it has format 99, expected 2"):
        check_checkpoint(path)
    meta.write_text('{"format": 1, "tensors_bytes": 8, "meta": {}}')
    (path / "SHA256SUMS").unlink()
    with pytest.raises(
        CheckpointError, match="format 1, which had no checksum.*resume it with the lbpar that wrote it"
    ):
        check_checkpoint(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("when", ["first block", "last block"])
def test_a_full_disk_is_an_error_and_not_a_crash(when, tmp_path):
    """In a process of its own: what HDF5 could not write it tried once more at the end, and died of it."""
    three(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), when], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "step-000040: the checkpoint cannot be written: No space left on device. Free space there" in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000010", "step-000020", "step-000030"]


FULL = """
import os, sys
import numpy as np
from lbpar.errors import CheckpointError
from lbpar.layout.runs import whole
from lbpar.checkpoint.files import checkpoint_path, write_checkpoint

def blocks():
    for name in "ab":
        if sys.argv[2] == ("first block" if name == "a" else "last block"):
            for fd in map(int, os.listdir("/proc/self/fd")):
                if os.path.exists(f"/proc/self/fd/{fd}") and os.readlink(f"/proc/self/fd/{fd}").endswith("tensors.h5"):
                    os.dup2(os.open("/dev/full", os.O_RDWR), fd)
        yield name, whole((300, 300)), np.ones((300, 300))

try:
    write_checkpoint(checkpoint_path(sys.argv[1], 40), {n: ((300, 300), "f8") for n in "ab"}, blocks(), {})
except CheckpointError as error:
    print(error)
"""


def test_reading_what_is_not_there(tmp_path):
    with open_checkpoint(three(tmp_path)) as saved:
        with pytest.raises(CheckpointError, match="no tensor 'v', expected one of 3: steps, w, w/momentum"):
            saved.read("v", ())
        with pytest.raises(CheckpointError, match=r"tensor 'w': got runs \(\(0, 9\),\) in dimension 0"):
            saved.read("w", whole((9, 8)))
