"""Planes of predictions that come together on rank 0 are those of the whole prediction; the picture is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbpar import api
from lbpar.data.writer import Split, write
from lbpar.errors import ConfigError, DataError
from lbpar.inference import evaluate
from lbpar.study.slice_figure import draw_slices, slices_figure
from lbpar.study.slices import slices
from lbpar.train import predict
from tests.util.training import run_file, train

VOLUMES = """
model: {input: [5, 4, 6, 2], layers: [{op: conv, filters: 3, kernel: 3, pad: 1, name: last}]}
data: {train: synthetic, test: synthetic, samples: 7}
train: {batch: 2, epochs: 1, seed: 5, loss: dice, evaluate: {metrics: [dice, confusion]}}
engine: {name: numpy, dtype: float64}
"""
PLANES = VOLUMES.replace("[5, 4, 6, 2]", "[5, 4, 2]").replace(
    "loss: dice, evaluate: {metrics: [dice, confusion]}", "loss: mse"
)


@pytest.mark.parametrize("text", [VOLUMES, PLANES], ids=["volumes", "planes"])
@pytest.mark.parametrize(
    ("procs", "plan"), [(1, "{}"), (3, "{strategy: spatial}"), (4, "{strategy: data, layers: {last: {F: 4}}}")]
)
def test_slices_are_those_of_the_whole_prediction(
    text: str, procs: int, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "PART", 40)  # a prediction comes in many parts
    which, seen = [4, 0, 6], []

    def job(trainer: Any) -> list[dict[str, Any]]:
        found = slices(trainer, which)
        assert (found is None) == (trainer.transport.rank != 0)
        x = trainer.test.read(np.arange(7))
        y, whole = trainer.test.read_targets(np.arange(7)), trainer.predict(x, normalised=True)
        for one, i in zip(found or [], which, strict=found is not None):
            space = y[i].any(axis=(1, 2)) if one.depth is not None else None
            assert one.sample == i and (space is None or space[one.depth])
            at = () if one.depth is None else (one.depth,)
            np.testing.assert_array_equal(one.image, x[i][(*at, ..., 0)])
            truth, out = y[i][at], whole[i][at]
            np.testing.assert_array_equal(one.truth, truth if one.classes else truth[..., 0])
            np.testing.assert_allclose(one.prediction, out.argmax(-1) if one.classes else out[..., 0], rtol=1e-12)
        if found:
            draw_slices(found, tmp_path / "deep" / "slices.png")
            seen.append(found)
        return []

    train(run_file([f"parallel={plan}"], text), procs, job)
    pytest.importorskip("matplotlib")
    assert (tmp_path / "deep" / "slices.png").read_bytes()[:4] == b"\x89PNG" and len(seen) == 1


def test_the_plane_with_most_labels_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(trainer: Any) -> list[dict[str, Any]]:
        for one in slices(trainer) or []:
            y = trainer.test.read_targets(np.array([one.sample]))[0]
            assert np.count_nonzero(y[one.depth]) == max(map(np.count_nonzero, y))
        with pytest.raises(DataError, match="got the sample 7, expected 0 to 6"):
            slices(trainer, [7])
        trainer.test = None
        with pytest.raises(ConfigError, match="pictures are of test samples"):
            slices(trainer)
        return []

    train(run_file([], VOLUMES), 1, job)


def test_labels_per_sample_have_no_picture() -> None:
    with pytest.raises(ConfigError, match="expected a target per pixel or voxel"):
        train(run_file([]), 1, lambda trainer: slices(trainer) or [])


def test_the_command_says_what_there_is_per_class_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    api.train(run_file([f"run.out={tmp_path}/run", "run.progress=none"], VOLUMES), write=True).close()
    capsys.readouterr()
    picture = tmp_path / "slices.png"
    assert evaluate(["--run", f"{tmp_path}/run", "--picture", str(picture), "--metrics", "iou,dice,confusion"]) == 0
    said = capsys.readouterr().out
    assert "test_dice " in said and "test_iou_of" in said and "taken for 2" in said and picture.stat().st_size > 1000
    with pytest.raises(ConfigError, match="--samples: got 'a'"):
        evaluate(["--run", f"{tmp_path}/run", "--samples", "a"])


def test_volumes_that_say_how_they_lie_are_shown_upright(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    x, y = np.arange(2.0 * 5 * 4 * 6).reshape(2, 5, 4, 6, 1), np.ones((2, 5, 4, 6), np.uint8)
    affine = np.repeat(np.diag([2.0, 1.5, 3.0, 1.0])[None], 2, axis=0)
    write(tmp_path / "lie.h5", [Split("test", x, y, classes=3, beside={"affine": affine})])
    seen: list[Any] = []

    def job(trainer: Any) -> list[dict[str, Any]]:
        seen.extend(slices(trainer, [1]) or [])
        return []

    changes = [
        f"data.test={tmp_path}/lie.h5",
        "model.input=[5, 4, 6, 1]",
        "model.layers=[{op: conv, filters: 3, kernel: 1}]",
    ]
    train(run_file(changes, VOLUMES.replace("samples: 7", "samples: 4")), 1, job)
    axis = slices_figure(seen).axes[0]
    shown = axis.images[0].get_array()
    np.testing.assert_array_equal(shown[0], x[1, 0, :, -1, 0])  # above: the end of W; from left to right: H
    assert seen[0].voxel == (1.5, 3.0) and axis.get_aspect() == 2.0
