"""Patches of several inputs and targets, cut at one place, and whole samples by windows: against plain NumPy, and alike on every grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lbpar import api, inference
from lbpar.config.data import Patches
from lbpar.data.augment.apply import augmented
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.named import NamedDataset
from lbpar.data.patches.cut import Patched, own_places
from lbpar.errors import DataError
from lbpar.layout.grid import Grid
from lbpar.study.slices import slices
from lbpar.train import predict
from lbpar.train.setup import build_graph, build_plan
from lbpar.train.trainer import Trainer
from lbpar.transport.virtual import VirtualWorld
from tests.runtime.test_scores import means, per_volume
from tests.train.test_patches import blended, dice_and_entropy
from tests.util.training import run_file, whole

RNG = np.random.default_rng(8)
SCANS, DOSE = RNG.standard_normal((5, 9, 7, 8, 2)), RNG.standard_normal((5, 9, 7, 8, 1))
MASK, FLOW = np.zeros((5, 9, 7, 8), np.uint8), RNG.standard_normal((5, 9, 7, 8, 2))
MASK[:, 6:, 2:4, 1], MASK[:, :2, 5:] = 1, 255
MASK[4, 3:5] = 2
PATCH = (4, 5, 4)
RUN = """
model:
  input: {image: [4, 5, 4, 2], dose: [4, 5, 4, 1]}
  layers:
    - {op: concat, from: [image, dose], name: both}
    - {op: conv, filters: 3, kernel: 3, pad: 1, name: low}
    - {op: relu, name: act}
    - {op: conv, filters: 3, kernel: 1, name: seg}
    - {op: conv, filters: 2, kernel: 1, from: act, name: flow}
  outputs: [seg, flow]
data: {patches: {per_sample: 2, foreground: 0.5, overlap: 0.4}, x: {image: scans}}
train:
  batch: 4
  epochs: 2
  seed: 5
  losses: {seg: {loss: {name: dice_cross_entropy, ignore_index: 255}, target: mask}, flow: {loss: mse, weight: 0.5}}
  optimizer: {name: sgd, lr: 0.1}
  evaluate: {metrics: [dice, mae, confusion, dice_per_volume], watch: test_seg_dice}
engine: {name: numpy, dtype: float64}
run: {progress: none}
"""
PLANS = {
    1: "{}",
    2: "{strategy: spatial}",
    3: "{strategy: data}",
    4: "{strategy: data, layers: {low: {D: 2, W: 2}, seg: {F: 2, D: 2}, flow: {F: 2, H: 2}}}",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "vol.h5", "w") as f:
        for name, values in (("scans", SCANS), ("dose", DOSE), ("mask", MASK), ("flow", FLOW)):
            f[f"train/{name}"], f[f"test/{name}"] = values[:3], values[3:]
    return tmp_path / "vol.h5"


def files(file: Path, *more: str) -> list[str]:
    return [f"data.train={file}", f"data.test={file}", *more]


def window(tensors: dict[str, np.ndarray], x: np.ndarray) -> dict[str, np.ndarray]:
    """What the network makes of a window, in plain loops."""
    wide = np.pad(x, ((1, 1), (1, 1), (1, 1), (0, 0)))
    w, d, h, v = tensors["low.weight"], *x.shape[:-1]
    y = tensors["low.bias"] + sum(
        wide[i : i + d, j : j + h, k : k + v] @ w[:, i, j, k].T for i in range(3) for j in range(3) for k in range(3)
    )
    y = np.maximum(y, 0)
    return {n: y @ tensors[f"{n}.weight"][:, 0, 0, 0].T + tensors[f"{n}.bias"] for n in ("seg", "flow")}


def runs(config: Any, procs: int, job: Any) -> Any:
    """Trained on virtual ranks, with what ranks tell each other: tensors, records of the last epoch, and what each rank's ``job`` gave."""
    graph = build_graph(config)
    plan = build_plan(config, graph, procs)

    def one(transport: Any) -> Any:
        trainer = Trainer.alike(config, graph, plan, transport)
        return trainer, list(trainer.train())[-1], job(trainer)

    ran = VirtualWorld(plan.grid).run(one)
    for _, record, _ in ran[1:]:
        assert {k: v for k, v in record.items() if k.startswith("test_")} == {
            k: v for k, v in ran[0][1].items() if k.startswith("test_")
        }
    return whole([r[0] for r in ran]), ran[0][1], [r[2] for r in ran]


@pytest.mark.parametrize("procs", [1, 2, 3, 4])
def test_any_grid_trains_predicts_and_measures_alike(
    procs: int, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "PART", 100)  # windows come in parts
    out = tmp_path / "out.h5"

    def job(trainer: Trainer) -> Any:
        inputs = {
            n: Hdf5Dataset(file, "test", x=x, y=None, dtype=np.float64)
            for n, x in (("image", "scans"), ("dose", "dose"))
        }
        trainer.predict_to(out, inputs, labels=True)
        return trainer.predict({"image": SCANS[3:], "dose": DOSE[3:]}), slices(trainer, [1])

    tensors, record, found = runs(run_file(files(file, f"parallel={PLANS[procs]}"), RUN), procs, job)
    both = np.concatenate([SCANS, DOSE], -1)[3:]
    want = {
        n: np.array([blended(lambda x, n=n: window(tensors, x)[n], x, PATCH, 0.4, c) for x in both])
        for n, c in (("seg", 3), ("flow", 2))
    }
    labels, mask, known = want["seg"].argmax(-1), MASK[3:], MASK[3:] != 255
    with h5py.File(out) as f:
        np.testing.assert_array_equal(f["seg_labels"][...], labels)
        for name, values in want.items():
            np.testing.assert_allclose(f[name][...], values, rtol=1e-9, atol=1e-12)
            for got, _ in found:
                np.testing.assert_allclose(got[name], values, rtol=1e-9, atol=1e-12)
    (one,) = found[0][1]
    np.testing.assert_array_equal(one.prediction, labels[1][one.depth])
    np.testing.assert_array_equal(one.truth, mask[1][one.depth])
    np.testing.assert_array_equal(one.image, SCANS[4, one.depth, ..., 0])

    assert record["test_seg_accuracy"] == (labels == mask)[known].mean()
    assert record["test_seg_confusion"] == [
        [int(((mask == i) & (labels == j)).sum()) for j in range(3)] for i in range(3)
    ]
    each = means(per_volume(np.where(known, labels, 255), mask, 3))
    assert record["test_seg_dice_per_volume"] == pytest.approx(np.nanmean(each[1:]), rel=1e-12)
    assert record["test_flow_mae"] == pytest.approx(np.abs(want["flow"] - FLOW[3:]).mean(), rel=1e-9)

    # The loss is of patches, around places of the mask.
    held = {n: Hdf5Dataset(file, "test", x="scans", y=n, dtype=np.float64) for n in ("mask", "flow")}
    places = own_places(held["mask"], (0, 1), 255)
    cut = Patched(held["mask"], PATCH, Patches(per_sample=2, foreground=0.5), places, 5)
    at = [
        (n, tuple(slice(o, o + p) for o, p in zip(origin, PATCH, strict=True)))
        for n, origin in map(cut.place, range(4))
    ]
    outputs = [window(tensors, both[n][where]) for n, where in at]
    flow = np.mean([(o["flow"] - FLOW[3 + n][where]) ** 2 for o, (n, where) in zip(outputs, at, strict=True)])
    assert record["test_flow_loss"] == pytest.approx(0.5 * flow, rel=1e-9)
    truth, scores = (np.array(v) for v in ([MASK[3 + n][where] for n, where in at], [o["seg"] for o in outputs]))
    counted = truth != 255
    seg = dice_and_entropy(scores[counted], truth[counted])
    assert record["test_seg_loss"] == pytest.approx(seg, rel=1e-9)
    assert record["test_loss"] == pytest.approx(seg + 0.5 * flow, rel=1e-9)

    same, _, _ = runs(run_file(files(file), RUN), 1, lambda t: None)
    for name, tensor in same.items():
        np.testing.assert_allclose(tensors[name], tensor, rtol=1e-9, atol=1e-12)


def test_inputs_and_targets_are_cut_at_the_same_place_and_move_alike(file: Path) -> None:
    with h5py.File(file, "r+") as f:
        f["train/scans"][...] = f["train/mask"][...][..., None] * [1.0, 2.0]
        f["train/dose"][...] = f["train/mask"][...][..., None] * 3.0
        f["train/flow"][...] = f["train/mask"][...][..., None] * [4.0, 5.0]
    config = run_file(files(file, "data.augment={flip: [D, W]}", "data.patches.foreground=1"), RUN)

    def look(trainer: Trainer) -> None:
        seen = []
        for epoch in range(3):
            data = augmented(trainer.dataset.at(epoch), trainer.config.data.augment, 5, epoch)
            assert isinstance(data, NamedDataset) and len(data) == 6
            all_ = np.arange(6)
            mask = data.part("target/mask").read_targets(all_)
            assert mask.any(axis=(1, 2, 3)).all()
            seen.append(mask)
            np.testing.assert_array_equal(data.part("image").read(all_), mask[..., None] * [1.0, 2.0])
            np.testing.assert_array_equal(data.part("dose").read(all_), mask[..., None] * 3.0)
            np.testing.assert_array_equal(data.part("target/flow").read_targets(all_), mask[..., None] * [4.0, 5.0])
        assert not np.array_equal(seen[0], seen[1])

    runs(config, 1, look)


def test_the_commands_work_on_whole_samples(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = f"{tmp_path}/run", tmp_path / "p.h5"
    with api.train(run_file(files(file, f"run.out={run}", "parallel.strategy=data"), RUN), write=True) as network:
        want: Any = network.predict({"image": SCANS[3:], "dose": DOSE[3:]})
        measured = network.evaluate()
    capsys.readouterr()
    assert inference.predict(["--run", run, "--input", str(file), "--out", str(out)]) == 0
    assert "p.h5: seg 2 x 9 x 7 x 8 x 3, flow 2 x 9 x 7 x 8 x 2, float64" in capsys.readouterr().out
    with h5py.File(out) as f:
        for name, values in want.items():
            np.testing.assert_allclose(f[name][...], values, rtol=1e-12)
    assert inference.evaluate(["--run", run]) == 0
    assert "test_seg_dice " in capsys.readouterr().out

    def rank(transport: Any) -> None:
        with api.restore(run, transport=transport, overrides=["parallel.strategy=spatial"]) as network:
            again = network.evaluate()
            assert again["test_flow_mae"] == pytest.approx(measured["test_flow_mae"], rel=1e-9)

    VirtualWorld(Grid.of(2)).run(rank)


def test_one_output_with_a_name_is_measured(file: Path) -> None:
    """Metrics too; with patches and without."""
    one = "train.losses={seg: {loss: {name: dice_cross_entropy, ignore_index: 255}, target: mask}}"
    layers = "[{op: concat, from: [image, dose]}, {op: conv, filters: 3, kernel: 1, name: seg}]"
    for more in ([], ["data.patches=null", "model.input={image: [9, 7, 8, 2], dose: [9, 7, 8, 1]}"]):
        given = files(
            file, one, f"model.layers={layers}", "model.outputs=[seg]", "train.evaluate.metrics=[dice]", *more
        )
        with api.train(run_file(given, RUN)) as network:
            out = network.predict({"image": SCANS[3:], "dose": DOSE[3:]})
            known, taken = MASK[3:] != 255, out.argmax(-1)
            got = network.evaluate()
            for c in range(3):
                is_c, as_c = (MASK[3:] == c) & known, (taken == c) & known
                dice = 2 * (is_c & as_c).sum() / (is_c.sum() + as_c.sum()) if (is_c | as_c).any() else None
                assert got["test_seg_dice_of"][str(c)] == (dice if dice is None else pytest.approx(dice, rel=1e-12))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "model.input={image: [4, 5, 4, 2], dose: [4, 5, 4, 2]}",
            "samples of 'dose' have the shape .9, 7, 8, 1., expected at least .4, 5, 4, 2.",
        ),
        (
            "model.input={image: [4, 8, 4, 2], dose: [4, 8, 4, 1]}",
            "sample 0 of 'image' has .* expected at least .4, 8, 4, 2.",
        ),
        (
            "data.x={image: scans, dose: other}",
            "sample 0 has inputs of the sizes image .9, 7, 8., dose .9, 7, 9., expected a single one",
        ),
        ("data.y={flow: dose}", "'flow' has the shape .9, 7, 8, 1. per sample, expected .9, 7, 8, 2. for patches"),
        ("data.y={mask: wrong}", "label 7 in sample 1 of '/train/wrong', expected 0 to 2"),
    ],
)
def test_what_does_not_fit_is_refused(change: str, message: str, file: Path) -> None:
    with h5py.File(file, "r+") as f:
        for split, at in (("train", slice(3)), ("test", slice(3, 5))):
            f[f"{split}/other"] = np.zeros((len(MASK[at]), 9, 7, 9, 1))
            f[f"{split}/wrong"] = MASK[at]
        f["train/wrong"][1, 8, 6, 7] = 7
    with pytest.raises(DataError, match=message):
        runs(run_file(files(file, change), RUN), 1, lambda t: None)
