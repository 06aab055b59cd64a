"""Steps that are recorded once and launched again (`engine.graphs`), on the stand-in for CuPy: the bits of steps that are not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbpar.engine.cupy.device import CupyDevice
from lbpar.engine.cupy.engine import CupyEngine
from lbpar.engine.registry import get_engine
from lbpar.errors import ConfigError, EngineError, TrainingError
from lbpar.runtime.binding import MicroBatch
from lbpar.runtime.recorded import Recorded
from tests.cuda.emulator import compiler_found
from tests.util import fake_cudnn, fake_cupy
from tests.util.fake_cupy.machine import CUDARuntimeError
from tests.util.training import Ran, loaded_again, run_file, train

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
GRAPHS = "engine.graphs=true"
# Batches of 8, 8 and 6: one program is recorded, of another shape there are too few steps; the rate changes each step.
CHANGES = ["engine.name=cupy", "train.epochs=3", "train.schedule={name: cosine}"]
CASES: dict[str, tuple[int, Sequence[str]]] = {
    "float64": (8, []),
    "adam": (8, ["train.optimizer={name: adam, lr: 0.01}", "train.clip_norm=0.5"]),
    "float16": (2, ["engine.dtype=float16", "train.loss_scale={start: 65536, interval: 3}"]),
    "accumulate": (8, ["train.accumulate=2", "train.epochs=5"]),
    "augmented": (8, ["data.augment.flip=[W]", "train.evaluate={batch: 4, metrics: [dice]}"]),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Programs that were recorded, in the order of their launches."""
    found, run = list[Recorded](), Recorded._run

    def noted(self: Recorded, stretch: Any) -> None:
        run(self, stretch)
        found.append(self)

    monkeypatch.setattr(Recorded, "_run", noted)
    return found


def both(patch: pytest.MonkeyPatch, itemsize: int, changes: Sequence[str], seed: int = 1, **more: Any) -> list[Ran]:
    ran = []
    for options in ([], [GRAPHS]):
        fake_cupy.install(patch, **more).scheduler.seed(seed)
        fake_cupy.few_kernels(patch, itemsize)
        ran.append(train(run_file([*CHANGES, *changes, *options])))
    return ran


def assert_same_bits(got: Ran, want: Ran) -> None:
    assert got.records == want.records
    for name, array in want.tensors.items():
        np.testing.assert_array_equal(got.tensors[name], array, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits(monkeypatch: pytest.MonkeyPatch, launched: list[Recorded], case: str) -> None:
    """Samples, keys of dropout, rates, loss scales and numbers of steps of each step reach what is launched again."""
    itemsize, changes = CASES[case]
    for seed in range(2):
        plain, recorded = both(monkeypatch, itemsize, changes, seed)
        assert_same_bits(recorded, plain)
    assert len(launched) > 8 and not any(r._refused for r in launched)


def test_with_cudnn(monkeypatch: pytest.MonkeyPatch, launched: list[Recorded]) -> None:
    monkeypatch.setattr(fake_cudnn, "executed", [])
    plain, recorded = both(monkeypatch, 4, ["engine.dtype=float32", "engine.cudnn=true"], cudnn=fake_cudnn)
    assert_same_bits(recorded, plain)
    assert launched


def forget_samples(patch: pytest.MonkeyPatch) -> None:
    copy = CupyDevice.copy
    patch.setattr(
        CupyDevice, "copy", lambda self, a, dtype=None, out=None: out if out is not None and a.ndim == 4 else copy(self, a, dtype, out)
    )  # fmt: skip


def forget_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MicroBatch, "key", lambda self, node, key=MicroBatch.key: self.keys.get(node, 5 * self.seed))


def forget_to_hold_memory(patch: pytest.MonkeyPatch) -> None:
    """What is recorded takes memory from where everything else does."""
    capture = CupyDevice.capture

    def shared(self: CupyDevice, run: Any) -> Any:
        self._captured = self.pool
        return capture(self, run)

    patch.setattr(CupyDevice, "capture", shared)


@pytest.mark.parametrize("fault", [forget_samples, forget_keys, forget_to_hold_memory], ids=lambda f: f.__name__)
def test_faults_are_noticed(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fake_cupy.install(patch).scheduler.seed(1)
        fake_cupy.few_kernels(patch, 8)
        plain = train(run_file(CHANGES))
    fake_cupy.install(monkeypatch).scheduler.seed(1)
    fake_cupy.few_kernels(monkeypatch, 8)
    fault(monkeypatch)
    with pytest.raises((AssertionError, TrainingError)):
        assert_same_bits(train(run_file([*CHANGES, GRAPHS])), plain)


def test_weights_that_are_loaded_are_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launched: list[Recorded]
) -> None:
    ran = []
    for options in ([], [GRAPHS]):
        fake_cupy.install(monkeypatch)
        fake_cupy.few_kernels(monkeypatch, 8)
        ran.append(train(run_file([*CHANGES, "train.epochs=5", *options]), 1, loaded_again(tmp_path)))
    assert_same_bits(*ran)
    assert ran[0].records[-2:] == [ran[0].records[-1]] * 2 and launched


def test_reading_on_the_host_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the stand-in as of CUDA, and what lbpar says of it; nothing is left of what was recorded until then."""
    fake_cupy.install(monkeypatch)
    engine: Any = get_engine("cupy", "float32", graphs=True)
    x = engine.from_host(np.array([-1, 2], np.float32))
    with pytest.raises(EngineError, match="the host reads an array in the midst of a step"):
        engine.capture(lambda: engine.to_host(engine.relu_forward(x)))
    with pytest.raises(EngineError, match="CUDA cannot record it .*cudaErrorStreamCaptureUnsupported"):
        engine.capture(engine.stream.synchronize)

    def passed_over() -> None:
        with suppress(CUDARuntimeError):
            engine.stream.synchronize()

    with pytest.raises(EngineError, match="CUDA cannot record it .*cudaErrorStreamCaptureInvalidated"):
        engine.capture(passed_over)
    with pytest.raises(EngineError, match="CUDA cannot record it .*CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
        engine.capture(lambda: (passed_over(), engine.relu_forward(x)))
    engine.stream.begin_capture()
    for ask in (engine.stream.synchronize, lambda: engine.record().synchronize(), lambda: engine.stream.done):
        with pytest.raises(CUDARuntimeError, match="StreamCapture"):
            ask()
    with pytest.raises(CUDARuntimeError, match="Invalidated"):
        engine.stream.end_capture()
    y = engine.empty((2,))
    launch = engine.capture(lambda: engine.copy(engine.relu_forward(x), out=y))
    for values in ([-3, 4], [5, -6]):
        engine.copy(engine.from_host(np.array(values, np.float32)), out=x)
        launch()
        np.testing.assert_array_equal(engine.to_host(y), np.maximum(values, 0))


def test_memory_that_is_short_in_a_recording_is_counted_with_all_that_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = fake_cupy.install(monkeypatch)
    engine: Any = get_engine("cupy", "float32", graphs=True)
    held, machine.memory = engine.empty((150_000,)), 1_000_000
    with pytest.raises(EngineError, match=r"an array of 800 kB does not fit the GPU: 600 kB of its 1 MB are in use"):
        engine.capture(lambda: engine.empty((200_000,)))
    assert held.size == 150_000 and engine.held_bytes() > 600_000


def test_memory_of_a_recording_is_not_given_back_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = fake_cupy.install(monkeypatch)
    engine: Any = get_engine("cupy", "float32", graphs=True)
    machine.memory, x = 10_000_000, engine.from_host(np.ones(1_000_000, np.float32))
    launch = engine.capture(lambda: engine.copy(engine.relu_forward(x), out=x))  # nobody holds the array in between
    taken = machine.held
    with pytest.raises(EngineError, match="an array of 8 MB does not fit"):
        engine.capture(lambda: engine.empty((2_000_000,)))
    assert machine.held == taken > 8_000_000
    launch()
    assert (engine.to_host(x) == 1).all()


def test_memory_of_steps_before_is_there_for_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = fake_cupy.install(monkeypatch)
    engine: Any = get_engine("cupy", "float32", graphs=True)
    machine.memory = 10_000_000
    x = engine.relu_forward(engine.from_host(np.ones(1_000_000, np.float32)))
    engine.capture(lambda: engine.relu_forward(x))()
    assert (engine.to_host(x) == 1).all()


def test_what_needs_the_host_goes_on_unrecorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, launched: list[Recorded]
) -> None:
    forward = CupyEngine.leaky_relu_forward
    monkeypatch.setattr(
        CupyEngine,
        "leaky_relu_forward",
        lambda self, x, slope: forward(self, self.from_host(np.asarray(self.to_host(x), x.dtype)), slope),
    )
    plain, recorded = both(monkeypatch, 8, ["model.layers.2={op: leaky_relu, slope: 0.1}"])
    assert_same_bits(recorded, plain)
    assert "engine.graphs: steps are not recorded: the host reads an array in the midst of a step" in caplog.text
    assert not any(r.launches for r in launched)


def test_other_engines_are_refused() -> None:
    with pytest.raises(ConfigError, match="engine.graphs: true needs a GPU, but engine.name is numpy"):
        train(run_file([GRAPHS]))
