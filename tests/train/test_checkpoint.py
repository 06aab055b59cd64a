"""Checkpoints: any partition written, any other read; whatever is broken is refused with a way on."""

from __future__ import annotations

import json
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbpar.errors import CheckpointError
from lbpar.layout.runs import box_shape, whole
from lbpar.train import checkpoint
from lbpar.train.boxes import box_fits, slabs
from lbpar.train.checkpoint import checkpoint_path, latest, list_checkpoints, open_checkpoint, prune, write_checkpoint

h5py = pytest.importorskip("h5py")


def take(array, box):
    """A block by index lists: the oracle for slabs."""
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


@given(case=cases(), dtype=st.sampled_from(["f4", "f8", "i8", "f2"]), chunk=st.sampled_from([16, 64, 1 << 20]))
@settings(max_examples=60, deadline=None)
def test_any_partition_written_any_other_read(case, dtype, chunk, tmp_path_factory):
    shape, written, read = case
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    path = checkpoint_path(tmp_path_factory.getbasetemp() / "partitions", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "CHUNK_BYTES", chunk)
        write_checkpoint(path, {"a/w": (shape, dtype)}, (("a/w", box, take(array, box)) for box in written), {})
    with open_checkpoint(path) as saved:
        assert saved.tensors == {"a/w": (shape, np.dtype(dtype))}
        for box in read:
            block = saved.read("a/w", box)
            assert block.flags.c_contiguous
            assert block.dtype == dtype
            np.testing.assert_array_equal(block, take(array, box))


def test_slabs_name_every_element_once():
    box = (((0, 2), (5, 6)), ((1, 4),), ())
    assert box_shape(box) == (3, 3, 0)
    assert list(slabs(box)) == []
    pairs = list(slabs(box[:2]))
    assert pairs == [
        ((slice(0, 2), slice(1, 4)), (slice(0, 2), slice(0, 3))),
        ((slice(5, 6), slice(1, 4)), (slice(2, 3), slice(0, 3))),
    ]
    assert list(slabs(())) == [((), ())]


def test_slabs_walk_band_by_band_of_chunks():
    box = (((1, 5),), ((0, 2), (3, 4)))
    there = [there for there, _ in slabs(box, (2, 4))]
    assert there == [(slice(*rows), slice(*columns)) for rows in ((1, 2), (2, 4), (4, 5)) for columns in box[1]]
    assert len(list(slabs((box[0], ((0, 4),)), (2, 4)))) == 1  # one run: HDF5 walks the chunks itself
    array, out = np.arange(20).reshape(5, 4), np.full((4, 3), -1)
    for there, here in slabs(box, (2, 4)):
        out[here] = array[there]
    np.testing.assert_array_equal(out, take(array, box))


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
    assert box_fits(box, shape) is fits


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
        raise ConnectionError("rank 3 is gone")

    with pytest.raises(ConnectionError, match="rank 3"):
        write_checkpoint(path, {"w": ((2,), "f8")}, broken(), {})
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    with open_checkpoint(path) as saved:
        np.testing.assert_array_equal(saved.read("w", whole((2,))), np.ones(2))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (("v", (((0, 2),),), np.ones(2)), "block of 'v', expected one of w"),
        (("w", (((0, 3),),), np.ones(3)), "inside its shape"),
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
        simple(checkpoint_path(tmp_path, step), {"w": np.random.default_rng(step).standard_normal((64, 64))})
    return checkpoint_path(tmp_path, 20)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda p: (p / "meta.json").unlink(), "incomplete"),
        (lambda p: (p / "meta.json").write_text('{"form'), "incomplete"),
        (lambda p: (p / "meta.json").write_text("{}"), "incomplete"),
        (lambda p: (p / "tensors.h5").unlink(), "incomplete"),
        (lambda p: (p / "tensors.h5").write_bytes((p / "tensors.h5").read_bytes()[:-100]), "bytes, expected"),
        (lambda p: (p / "tensors.h5").write_bytes(bytes((p / "tensors.h5").stat().st_size)), "cannot be opened"),
    ],
)
def test_damaged_files_name_the_next_older_one(tmp_path, harm, message):
    path = three(tmp_path)
    harm(path)
    with pytest.raises(CheckpointError, match=f"{message}.*next older one is .*step-000010"):
        open_checkpoint(path)


def test_flipped_bit_is_seen_when_read(tmp_path):
    path = three(tmp_path)
    with open_checkpoint(path) as saved:
        values = saved.read("w", whole((64, 64)))
    raw = bytearray((path / "tensors.h5").read_bytes())
    raw[raw.index(values[5, 5].tobytes())] ^= 1
    (path / "tensors.h5").write_bytes(raw)
    with open_checkpoint(path) as saved, pytest.raises(CheckpointError, match="'w' cannot be read.*step-000010"):
        saved.read("w", whole((64, 64)))


def test_missing_oldest_and_future_checkpoints(tmp_path):
    three(tmp_path)
    with pytest.raises(CheckpointError, match="no such checkpoint.*step-000030"):
        open_checkpoint(checkpoint_path(tmp_path, 31))
    with pytest.raises(CheckpointError, match="There is no older one"):
        open_checkpoint(checkpoint_path(tmp_path, 5))
    meta = checkpoint_path(tmp_path, 30) / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        open_checkpoint(meta.parent)


def test_reading_what_is_not_there(tmp_path):
    with open_checkpoint(three(tmp_path)) as saved:
        with pytest.raises(CheckpointError, match="no tensor 'v'; it holds 1: w"):
            saved.read("v", ())
        with pytest.raises(CheckpointError, match=r"has shape \(64, 64\)"):
            saved.read("w", whole((65, 64)))
