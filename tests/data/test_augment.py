"""Random changes of samples: a block is that part of the whole, which plain SciPy and NumPy make; the same on any grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from scipy import ndimage

from lbpar.config.augment import Augment
from lbpar.config.data import Patches
from lbpar.data.augment import warp
from lbpar.data.augment.apply import augmented
from lbpar.data.augment.filters import coarse_taps
from lbpar.data.augment.warp import Field, affine_bounds, affine_places, rotation
from lbpar.data.dataset import Dataset
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.named import NamedDataset
from lbpar.data.normalise import Normalisation
from lbpar.data.patches.cut import Patched
from lbpar.data.synthetic import SyntheticDataset
from lbpar.errors import ConfigError, DataError
from lbpar.layout.runs import Box, block, indices
from lbpar.train.setup import build_graph, build_plan
from lbpar.train.trainer import Trainer
from lbpar.transport.virtual import VirtualWorld
from tests.util.training import run_file, train

EACH: dict[str, dict[str, Any]] = {
    "rotate": {"rotate": {"low": -40, "high": 40}},
    "scale": {"scale": {"low": 0.5, "high": 2}},
    "elastic": {"elastic": {"spacing": 3, "displacement": 1.2}},
    "nearest": {"rotate": {}, "scale": {"low": 0.4, "high": 0.6}, "border": "nearest"},
    "low_resolution": {"low_resolution": {"low": 1.5, "high": 4}},
    "blur": {"blur": {"low": 0.4, "high": 1.8}},
    "contrast": {"contrast": {"centre": 0.3}},
    "brightness": {"brightness": {"low": -2, "high": 2}},
    "gamma": {"gamma": {"span": [-1, 1.5]}},
    "noise": {"noise": {"low": 0.2, "high": 0.4}},
    "crop": {"crop_pad": 3, "border": "nearest"},
}
EACH["all"] = {k: v for one in EACH.values() for k, v in one.items()} | {"flip": ["W", "H"]}
EACH["half"] = {n: {**o, "probability": 0.5} if isinstance(o, dict) else o for n, o in EACH["all"].items()}
SHAPES = [(11, 14, 2), (7, 9, 10, 1), (1, 5, 3, 2)]


class Held(Dataset):
    """Samples and targets in memory."""

    def __init__(self, x: np.ndarray, y: np.ndarray, classes: int | None) -> None:
        self._x, self._y, self.name, self.classes, self.normalisation = x, y, "held", classes, Normalisation()
        self.sample_shape, self.target_shape = x.shape[1:], y.shape[1:]

    def __len__(self) -> int:
        return len(self._x)

    def _read(self, samples: np.ndarray, box: Box) -> np.ndarray:
        return self._x[np.ix_(samples, *map(indices, box))]

    def _read_targets(self, samples: np.ndarray, box: Box) -> np.ndarray:
        return self._y[np.ix_(samples, *map(indices, box))]


def changed(source: Dataset, epoch: int = 1, seed: int = 3, **options: Any) -> Dataset:
    return augmented(source, Augment.model_validate(options), seed, epoch)


def fixed(number: float, **more: Any) -> dict[str, Any]:
    return {"low": number, "high": number, **more}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", EACH)
def test_blocks_are_cut_out_of_the_whole(name: str, shape: tuple[int, ...]) -> None:
    source = SyntheticDataset(6, shape, shape[:-1], 5, dtype=np.float64, distinct=6)
    data, n = changed(source, **EACH[name]), np.array([4, 0, 5])
    x, y = data.read(n), data.read_targets(n)
    assert x.shape == (3, *shape) and not np.array_equal(x, source.read(n))
    boxes: list[Box] = [  # an uneven grid, then runs apart, one channel, and nothing
        tuple((block(0, e, 3 - d % 2, i),) for d, e in enumerate(shape[:-1])) + (((0, shape[-1]),),) for i in range(2)
    ]
    boxes += [(*(((0, 1), (e - 1, e)) if e > 3 else ((0, e),) for e in shape[:-1]), ((0, 1),))]
    boxes += [(*(((0, e),) for e in shape[:-2]), (), ((0, 1),))]
    for box in boxes:
        np.testing.assert_array_equal(data.read(n, box), x[np.ix_(range(3), *map(indices, box))])
        np.testing.assert_array_equal(data.read_targets(n, box[:-1]), y[np.ix_(range(3), *map(indices, box[:-1]))])
    assert y.dtype == np.int64 and set(np.unique(y)) <= {0, 1, 2, 3, 4}
    assert data.read(np.array([], int)).shape == (0, *shape)


@pytest.mark.parametrize("name", EACH)
def test_changes_depend_on_sample_epoch_and_seed_only(name: str) -> None:
    source = SyntheticDataset(50, (9, 8, 1), (), 5, dtype=np.float64, distinct=1)  # all originals alike
    x = changed(source, **EACH[name]).read(np.arange(50))
    assert len({one.tobytes() for one in x}) > {"half": 20, "crop": 20, "low_resolution": 4}.get(name, 48)
    np.testing.assert_array_equal(changed(source, **EACH[name]).read(np.array([7])), x[[7]])
    for other in (changed(source, epoch=2, **EACH[name]), changed(source, seed=4, **EACH[name])):
        assert not np.array_equal(other.read(np.arange(50)), x)
    np.testing.assert_array_equal(
        changed(source, **EACH[name]).read_targets(np.arange(50)), source.read_targets(np.arange(50))
    )


@pytest.mark.parametrize(("axis", "plane"), [("D", (1, 2)), ("H", (0, 2)), ("W", (0, 1))])
def test_quarter_turns_of_volumes(axis: str, plane: tuple[int, int]) -> None:
    x, y = np.random.default_rng(0).standard_normal((1, 7, 7, 7, 2)), np.arange(343).reshape(1, 7, 7, 7) % 5
    data = changed(Held(x, y, 5), rotate=fixed(90, axes=[axis]))
    np.testing.assert_allclose(data.read(np.array([0]))[0], np.rot90(x[0], -1, plane), atol=1e-12)
    np.testing.assert_array_equal(data.read_targets(np.array([0]))[0], np.rot90(y[0], -1, plane))


def test_quarter_turns_of_pictures_and_changes_that_change_nothing() -> None:
    x = np.random.default_rng(0).standard_normal((1, 6, 6, 1))
    source = Held(x, x, None)
    turned = changed(source, rotate=fixed(90))
    np.testing.assert_allclose(turned.read(np.array([0]))[0], np.rot90(x[0], -1), atol=1e-12)
    np.testing.assert_allclose(
        turned.read_targets(np.array([0]))[0], np.rot90(x[0], -1), atol=1e-12
    )  # real ones move too
    for options in (
        {"scale": fixed(1.0)},
        {"rotate": fixed(0.0)},
        {"elastic": {"displacement": 0}},
        {"low_resolution": fixed(1.0)},
        {"blur": fixed(0.0)},
        {"contrast": fixed(1.0)},
        {"brightness": fixed(0.0)},
        {"gamma": fixed(1.0)},
        {"noise": fixed(0.0)},
        {"rotate": {"probability": 0}, "noise": {"probability": 0}},
    ):
        np.testing.assert_allclose(changed(source, **options).read(np.array([0])), x, atol=1e-14)
    assert changed(source) is source


def test_scaling_enlarges_about_the_middle() -> None:
    ramp = np.arange(9.0).reshape(1, 9, 1) * np.ones((1, 1, 9)) - 4
    data = changed(Held(ramp[..., None], np.zeros(1, int), 1), scale=fixed(2.0))
    np.testing.assert_allclose(data.read(np.array([0]))[0, ..., 0], ramp[0] / 2, atol=1e-12)
    small = changed(Held(ramp[..., None] + 9, np.zeros(1, int), 1), scale=fixed(0.5)).read(np.array([0]))[0, ..., 0]
    np.testing.assert_allclose(small[2:7, 4], 9 + 2 * np.arange(-2, 3))
    assert not small[:1].any() and not small[8:].any()  # zeros from outside
    near = changed(Held(ramp[..., None] + 9, np.zeros(1, int), 1), scale=fixed(0.5), border="nearest")
    np.testing.assert_allclose(near.read(np.array([0]))[0, [0, 8], 4, 0], [5, 13])


def test_a_warp_is_that_of_scipy_on_the_whole_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).standard_normal((1, 9, 8, 7, 1))
    options = {"rotate": {}, "scale": {}, "elastic": {"spacing": 4, "displacement": 1.6}}
    data: Any = changed(Held(x, np.zeros(1, int), 1), **options)
    middle, spans = [4, 3.5, 3], [(0, 9), (0, 8), (0, 7)]
    field = data._field(0)
    u = np.stack(list(field.displacements(spans)))
    assert 0.3 < np.abs(u).max() <= 1.6
    places = affine_places(data._matrix(0), middle, spans) + u
    want = ndimage.map_coordinates(x[0, ..., 0], places, order=1, mode="grid-constant")
    monkeypatch.setattr(warp, "_PIECE", 100)  # a plane at a time
    np.testing.assert_allclose(data.read(np.array([0]))[0, ..., 0], want, atol=1e-12)
    bounds = np.array(affine_bounds(data._matrix(0), middle, [(2, 5), (0, 3), (6, 7)], 1.6))
    inner = places[:, 2:5, 0:3, 6:7].reshape(3, -1)
    assert (bounds[:, 0] <= inner.min(1)).all() and (inner.max(1) <= bounds[:, 1]).all()


def test_displacements_are_smooth_bounded_and_without_folds() -> None:
    options = Augment.model_validate({"elastic": {"spacing": 5, "displacement": 2}}).elastic
    assert options is not None
    u = np.stack(list(Field(options, (60, 50), 8).displacements([(0, 60), (0, 50)])))
    assert abs(u.mean()) < 0.2 and 0.3 < u.std() < 2 / np.sqrt(3)
    places = u + np.stack(np.meshgrid(np.arange(60), np.arange(50), indexing="ij"))
    (aa, ab), (ba, bb) = (np.gradient(p) for p in places)
    assert (aa * bb - ab * ba > 0).all()
    np.testing.assert_allclose(rotation(3, 1, 30) @ rotation(3, 1, -30), np.eye(3), atol=1e-15)


def test_blur_is_scipys_with_mirrored_edges() -> None:
    x = np.random.default_rng(0).standard_normal((1, 5, 12, 2))
    data = changed(Held(x, np.zeros(1, int), 1), blur=fixed(1.7))
    want = ndimage.gaussian_filter(x[0], 1.7, axes=(0, 1))
    np.testing.assert_allclose(data.read(np.array([0]))[0], want, atol=1e-12)


def test_low_resolution_keeps_every_so_manyth_pixel() -> None:
    x = np.arange(12.0)[None, :, None]
    data = changed(Held(x, np.zeros(1, int), 1), low_resolution=fixed(3.0))
    kept = np.array([1, 4, 7, 10])  # the middle ones of three
    want = np.interp(np.arange(12), kept, x[0, kept, 0])
    np.testing.assert_allclose(data.read(np.array([0]))[0, :, 0], want, atol=1e-12)
    before, after, weight = coarse_taps(0, 5, 5, 9.0)
    assert set(before) == set(after) == {2} and not weight.any()  # a single one


def test_values_and_noise() -> None:
    x = np.linspace(-2, 2, 2 * 40 * 50).reshape(2, 40, 50, 1)
    source, n = Held(x, np.zeros(2, int), 1), np.arange(2)
    bent = changed(source, gamma=fixed(2.0, span=[-1, 1])).read(n)
    np.testing.assert_allclose(bent, np.where(abs(x) < 1, (np.clip(x, -1, 1) / 2 + 0.5) ** 2 * 2 - 1, x), atol=1e-12)
    both = changed(source, contrast=fixed(3.0, centre=0.5), brightness=fixed(0.25)).read(n)
    np.testing.assert_allclose(both, 0.5 + 3 * (x - 0.5) + 0.25, atol=1e-12)
    noise = changed(source, noise=fixed(0.3)).read(n) - x
    assert abs(noise.mean()) < 0.015 and abs(noise.std() - 0.3) < 0.01
    assert abs(np.corrcoef(noise[0].ravel(), noise[1].ravel())[0, 1]) < 0.07


def test_numbers_are_drawn_evenly_and_as_often_as_asked() -> None:
    source = SyntheticDataset(1500, (4, 4, 1), ())
    data: Any = changed(source, scale={"low": 0.5, "high": 2, "probability": 0.25}, rotate={"low": -10, "high": 30})
    factors = [f for n in range(1500) for f in data._drawn("scale", n)]
    assert 330 < len(factors) < 420 and 0.5 <= min(factors) < 0.52 and 1.92 < max(factors) <= 2
    assert abs(np.log(factors).mean()) < 0.05  # as often enlarged as shrunk
    angles = [a for n in range(1500) for a in data._drawn("rotate", n)]
    assert len(angles) == 1500 and abs(np.mean(angles) - 10) < 1.2


def test_a_block_reads_little_more_than_itself(tmp_path: Path) -> None:
    read = 0

    class Spy(SyntheticDataset):
        def _read(self, samples: np.ndarray, box: Box) -> np.ndarray:
            nonlocal read
            read += len(samples) * int(np.prod([len(indices(r)) for r in box]))
            return super()._read(samples, box)

    options = {"rotate": fixed(5.0, axes=["D"]), "elastic": {"displacement": 2}, "blur": fixed(0.5)}
    data = changed(Spy(4, (64, 32, 32, 1), (), dtype=np.float64), **options)
    data.read(np.array([1]), (((16, 32),), ((0, 32),), ((0, 32),), ((0, 1),)))
    assert 16 * 32 * 32 < read < 28 * 32 * 32  # two planes of displacement and two of blur, and rounding, at each end


def test_patches_take_from_the_volume_around_them(tmp_path: Path) -> None:
    volume = np.random.default_rng(1).standard_normal((1, 12, 12, 12, 1))
    source = Held(volume, np.zeros((1, 12, 12, 12), int) + 1, 2)
    patches = Patched(source, (4, 4, 4), Patches(per_sample=40, foreground=0.0), {}, 3)
    data = changed(patches, scale=fixed(0.5))
    inner = next(n for n in range(40) if all(2 <= o <= 6 for o in patches.place(n)[1]))
    _, origin = patches.place(inner)
    grid = np.stack(np.meshgrid(*(o + 1.5 + 2 * (np.arange(4) - 1.5) for o in origin), indexing="ij"))
    want = ndimage.map_coordinates(volume[0, ..., 0], grid, order=1)
    np.testing.assert_allclose(data.read(np.array([inner]))[0, ..., 0], want, atol=1e-12)
    assert (data.read_targets(np.array([inner])) == 1).all()


def test_boxes_that_vary_are_not_read_of_all_samples(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f["x"], f["y"] = np.random.default_rng(0).standard_normal((30, 8, 8, 1)), np.zeros(30, int)
    source, slabs = Hdf5Dataset(tmp_path / "a.h5", dtype=np.float64, cache=1 << 20), []
    original = source._slabs
    source._slabs = lambda name, samples, box: slabs.append(len(samples)) or original(name, samples, box)  # type: ignore[method-assign]
    want = source.read(np.array([3]))[0]
    for lo in range(4):
        source.read(np.array([3]), (((lo, 8),), ((0, 8),), ((0, 1),)))
    assert slabs == [1, 30]  # the whole box, again, is kept; parts of it are taken from there
    part = source.read(np.array([3]), (((1, 3), (4, 5)), ((0, 7),), ((0, 1),)))[0]
    np.testing.assert_array_equal(part, want[[1, 2, 4], :7])
    assert slabs == [1, 30]


RUN = """
model: {input: [6, 7, 5, 1], layers: [{op: conv, filters: 3, kernel: 3, pad: 1, name: low}, {op: relu}, {op: conv, filters: 3, kernel: 1, name: last}]}
data: {samples: 6, augment: {rotate: {}, scale: {}, elastic: {spacing: 3, displacement: 1}, flip: [D, W], crop_pad: 1, low_resolution: {},
       blur: {}, contrast: {}, brightness: {}, gamma: {}, noise: {}}}
train: {batch: 2, epochs: 2, seed: 5, loss: dice_cross_entropy, optimizer: {name: sgd, lr: 0.1}}
engine: {name: numpy, dtype: float64}
"""


@pytest.mark.parametrize(
    "plan", ["{procs: 2, strategy: spatial}", "{procs: 4, strategy: data, layers: {low: {D: 2, W: 2}, last: {H: 4}}}"]
)
def test_any_grid_trains_on_the_same_changes(plan: str) -> None:
    one = train(run_file([], RUN), 1)
    config = run_file([f"parallel={plan}"], RUN)
    many = train(config, config.parallel.procs or 1)
    for name, tensor in one.tensors.items():
        np.testing.assert_allclose(many.tensors[name], tensor, rtol=1e-9, atol=1e-12)


def test_any_grid_trains_on_the_same_changed_patches(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f["x"], f["y"] = rng.standard_normal((3, 9, 8, 7, 1)), rng.integers(0, 3, (3, 9, 8, 7)).astype(np.uint8)
    changes = [f"data.train={tmp_path}/a.h5", "data.patches={per_sample: 2, foreground: 0}", "train.epochs=1"]
    one = train(run_file(changes, RUN), 1)
    many = train(run_file([*changes, "parallel={procs: 2, strategy: spatial}"], RUN), 2)
    for name, tensor in one.tensors.items():
        np.testing.assert_allclose(many.tensors[name], tensor, rtol=1e-9, atol=1e-12)


def test_ranks_read_the_part_that_their_block_comes_from(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f["x"], f["y"] = (
            np.random.default_rng(0).random((4, 32, 6, 5, 1), np.float32),
            np.zeros((4, 32, 6, 5), np.uint8),
        )
    turn = "{rotate: {low: 5, high: 5, axes: [D]}, elastic: {spacing: 5, displacement: 2}}"
    changes = [
        f"data.train={tmp_path}/a.h5",
        "model.input=[32, 6, 5, 1]",
        "parallel={procs: 2, strategy: spatial}",
        "data.cache=0",
    ]
    config = run_file([*changes, f"data.augment={turn}", "train.epochs=1", "data.prefetch=0"], RUN)
    graph = build_graph(config)
    plan = build_plan(config, graph, 2)
    records = VirtualWorld(plan.grid).run(lambda transport: next(Trainer(config, graph, plan, transport).train()))
    plane = 4 * 6 * 5 * (4 + 1)  # of all samples, with labels
    for record in records:
        assert (
            17 * plane < record["steps"]["input"]["bytes"] < 22 * plane
        )  # half of 32, a halo, two of displacement and rounding
    assert records[0]["steps"]["input"]["seconds"] >= 0


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        ("{rotate: {low: 5, high: -5}}", "got low 5 and high -5, expected low no larger than high"),
        ("{elastic: {spacing: 4, displacement: 2}}", "expected at most 0.4 of the spacing 4: space would fold"),
        ("{gamma: {span: [1, 1]}}", "expected two numbers, the first below the second"),
        ("{scale: {low: 0}}", "data.augment.scale.low: got 0"),
        ("{noise: {high: .inf}}", "data.augment.noise.high"),
        ("{low_resolution: {low: 0.5}}", "data.augment.low_resolution.low"),
        ("{rotat: {}}", "rotat"),
        ("{blur: {probability: 2}}", "data.augment.blur.probability"),
    ],
)
def test_bad_values_are_refused(augment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        run_file([f"data.augment={augment}"], RUN)


def test_what_samples_cannot_be_changed_by_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        DataError, match="data.augment.blur: got samples of shape .5,., expected at least 1 spatial dimension"
    ):
        changed(SyntheticDataset(4, (5,)), blur={})
    with pytest.raises(DataError, match="rotate: got samples of shape .5, 1., expected at least 2 spatial dimensions"):
        changed(SyntheticDataset(4, (5, 1)), rotate={})
    changed(SyntheticDataset(4, (5, 3, 1)), crop_pad=2)
    with pytest.raises(DataError, match="crop_pad: got 3 for samples of shape .5, 3, 1., expected less than 3"):
        changed(SyntheticDataset(4, (5, 3, 1)), crop_pad=3)
    monkeypatch.setattr("lbpar.data.augment.apply.find_spec", lambda name: None)
    with pytest.raises(DataError, match="data.augment.elastic: it needs scipy"):
        changed(SyntheticDataset(4, (5, 5, 1)), elastic={})


@pytest.mark.parametrize("target", [(4, 4, 1), (8, 8)], ids=str)
def test_targets_of_another_size_do_not_stay_behind(target: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    source = Held(rng.standard_normal((2, 8, 8, 1)), rng.standard_normal((2, *target)), None)
    for name in ("flip", "crop_pad", "rotate", "scale", "elastic"):
        with pytest.raises(DataError, match=f"data.augment.{name}: got targets of shape .{target[0]}, {target[1]}"):
            changed(source, **{name: {"flip": ["W"], "crop_pad": 2}.get(name, {})})
    box = tuple(((0, n),) for n in target)
    seen = changed(source, noise={"low": 1, "high": 1}).read_targets(np.array([1]), box)  # what does not move may stay
    np.testing.assert_array_equal(seen, source.read_targets(np.array([1]), box))


def test_inputs_move_alike_and_have_noise_of_their_own() -> None:
    rng = np.random.default_rng(0)
    y, facts = rng.standard_normal((2, 8, 8, 1)), rng.standard_normal((2, 3))
    parts = {"facts": Held(facts, y, None), "a": Held(y, y, None), "b": Held(y, y, None)}
    whole = (((0, 8),), ((0, 8),), ((0, 1),))

    def read(**options: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        seen = changed(NamedDataset(parts, {"target/m": parts["a"]}), **options)
        one = np.array([1])
        a, b = (seen.part(name).read(one, whole) for name in "ab")
        return a, b, seen.part("target/m").read_targets(one, whole)

    a, b, m = read(scale={"low": 1.3, "high": 1.3, "probability": 1})
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a, m)
    assert not np.array_equal(a, y[1:])
    a, b, _ = read(noise={"low": 1, "high": 1, "probability": 1})
    noise = (a - y[1:]).ravel(), (b - y[1:]).ravel()
    assert abs(np.corrcoef(*noise)[0, 1]) < 0.5
