"""The engine of CUDA devices on the real CuPy, which a pretended driver serves: what the stand-in for CuPy says is what CuPy does.

Skipped where CuPy is missing: `make test` puts it in a folder beside the environment, since other tests rely on its absence. Each check runs in a
process of its own, for CuPy stays what `pretended_driver` has made of it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbpar.engine.registry import get_engine
from lbpar.errors import EngineError
from lbpar.selftest.checks import network_row
from lbpar.selftest.networks import networks
from tests.cuda.emulator import compiler_found
from tests.engine.test_cupy import reserved_and_cut
from tests.util import fake_cupy
from tests.util.pretended_driver import Machine
from tests.util.training import assert_same, run_file, train

#: A folder with CuPy and what it needs: beside the environment that runs the tests, as `make test` makes it.
CUPY = Path(os.environ.get("LBPAR_TEST_CUPY") or Path(sys.prefix, "cupy"))

pytestmark = [
    pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler"),
    pytest.mark.skipif(not (CUPY / "cupy").is_dir(), reason=f"no CuPy in {CUPY}, where `make test` puts one"),
]
ROOT = Path(__file__).parents[2]


def run(check: str, *arguments: str) -> None:
    """One of the functions below in a process with CuPy."""
    paths = [str(CUPY), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "tests.util.pretended_driver", f"tests.engine.test_cupy_real:{check}", *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-6000:]}"


def made(dtype: str, **options: Any) -> Any:
    """An engine whose products are all cut alike, so that few kernels are compiled."""
    few_kernels(dtype)
    return get_engine("cupy", dtype, cudnn=False, **options)


def few_kernels(dtype: str) -> None:
    fake_cupy.few_kernels(pytest.MonkeyPatch(), {"float64": 8, "float32": 4}.get(dtype, 2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kind_of_op_gives_numpys_results(dtype: str) -> None:
    run("every_op", dtype)


def every_op(machine: Machine, dtype: str) -> None:
    engine = made(dtype)
    for name, graph in networks().items():
        row = network_row(graph, engine, 0, dtype)
        assert row[""] == "ok", (name, row)
    assert len(machine.launches) > 60, sorted(machine.launches)


@pytest.mark.parametrize("case", ["float64", "float16"])
def test_training_gives_numpys_results_and_recorded_steps_the_same_bits(case: str) -> None:
    run("training", case)


def training(machine: Machine, dtype: str) -> None:
    changes = ["engine.name=cupy", "engine.cudnn=false", f"engine.dtype={dtype}", "train.schedule={name: cosine}"]
    if dtype == "float16":
        changes.append("train.loss_scale={start: 65536, interval: 3}")
    few_kernels(dtype)
    plain = train(run_file(changes))
    assert not machine.graphs_launched
    recorded = train(run_file([*changes, "engine.graphs=true"]))
    assert machine.graphs_launched > 8
    assert recorded.records == plain.records
    for name, array in plain.tensors.items():
        np.testing.assert_array_equal(recorded.tensors[name], array, err_msg=name)
    if dtype == "float64":
        assert_same(plain, train(run_file(["train.schedule={name: cosine}"])))


@pytest.mark.parametrize(
    "check",
    [
        "a_stretch_is_cut_and_joined",
        "no_stretch_is_needed",
        "memory_that_is_short_is_said",
        "memory_of_a_recording_stays",
        "memory_of_steps_before_a_recording_does_not",
    ],
)
def test_memory(check: str) -> None:
    run(check)


def a_stretch_is_cut_and_joined(machine: Machine) -> None:
    device = made("float32")
    held = reserved_and_cut(device)
    several = [device.zeros((n, 100)) for n in (300, 1, 700, 50)]
    assert device.pool.used_bytes() == sum(-(-a.nbytes // 512) * 512 for a in several)
    assert device.pool.total_bytes() == held == machine.held


def no_stretch_is_needed(machine: Machine) -> None:
    said = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lbpar").addHandler(handler)
    logging.getLogger("lbpar").setLevel(logging.INFO)
    device = made("float32")
    machine.memory = 1 << 21
    for nbytes in (1 << 22, 1 << 21, (1 << 21) - 1000):  # more than there is; all; all that libraries need
        said.clear()
        device.reserve(nbytes)
        assert "can be spared on the GPU" in "".join(said) and not device.pool.total_bytes()
    taken = device.zeros((1 << 18,))
    del taken  # free in the pool, which gives it back where another stretch would not fit otherwise
    assert device.zeros((100, 100)).nbytes == 40_000


def memory_that_is_short_is_said(machine: Machine) -> None:
    device = made("float32", graphs=True)
    held, machine.memory = device.empty((150_000,)), 1_000_000
    for ask in (lambda f: f(), device.capture):
        with pytest.raises(
            EngineError, match=r"an array of 800 kB does not fit the GPU: 600 kB of its 1 MB are in use"
        ):
            ask(lambda: device.empty((200_000,)))
    assert held.size == 150_000 and device.held_bytes() == machine.held


def memory_of_a_recording_stays(machine: Machine) -> None:
    """CuPy's pool gives back what no array holds when memory is short; that of recordings must not."""
    assert not given_back_by_a_recording(machine, made("float32", graphs=True))
    machine.check()
    plain = made("float32", graphs=True)
    plain._captured = plain.cupy.cuda.MemoryPool()
    assert given_back_by_a_recording(machine, plain) >= 4_000_000
    with pytest.raises(AssertionError, match="had been given back"):
        machine.check()
    machine.given_back.clear()


def given_back_by_a_recording(machine: Machine, device: Any) -> int:
    """Bytes, where another one finds too little memory."""
    x = device.from_host(np.ones(1_000_000, np.float32))
    launch = device.capture(lambda: device.copy(device.relu_forward(x), out=x))  # nobody holds the array in between
    taken, machine.memory = machine.held, machine.held + 3_000_000
    with pytest.raises(EngineError, match="an array of 8 MB does not fit"):
        device.capture(lambda: device.empty((2_000_000,)))
    launch()
    assert (device.to_host(x) == 1).all()
    machine.memory = 1 << 30
    return taken - machine.held


def memory_of_steps_before_a_recording_does_not(machine: Machine) -> None:
    device = made("float32", graphs=True)
    machine.memory = 10_000_000
    x = device.relu_forward(device.from_host(np.ones(1_000_000, np.float32)))
    device.capture(lambda: device.relu_forward(x))()
    assert (device.to_host(x) == 1).all()


def test_what_cannot_be_recorded() -> None:
    run("refused_recordings")


def refused_recordings(machine: Machine) -> None:
    """The errors that CuPy raises, and what lbpar says of them."""
    device = made("float32", graphs=True)
    runtime, x = device.cupy.cuda.runtime, device.from_host(np.array([-1, 2], np.float32))
    with pytest.raises(EngineError, match="CUDA cannot record it .*cudaErrorStreamCaptureUnsupported"):
        device.capture(device.stream.synchronize)

    def passed_over() -> None:
        with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorStreamCaptureUnsupported"):
            device.stream.synchronize()

    with pytest.raises(EngineError, match="CUDA cannot record it .*cudaErrorStreamCaptureInvalidated"):
        device.capture(passed_over)
    y = device.empty((2,))
    launch = device.capture(lambda: device.copy(device.relu_forward(x), out=y))
    for values in ([-3, 4], [5, -6]):
        device.copy(device.from_host(np.array(values, np.float32)), out=x)
        launch()
        np.testing.assert_array_equal(device.to_host(y), np.maximum(values, 0))


def test_what_cupy_refuses() -> None:
    run("refused_arguments")


def refused_arguments(machine: Machine) -> None:
    """As the stand-in does."""
    device = made("float32")
    runtime, x = device.cupy.cuda.runtime, device.zeros((4,))
    for address in (np.int64(x.data.ptr), np.uint64(x.data.ptr), float(x.data.ptr)):
        with pytest.raises(TypeError):
            runtime.memsetAsync(address, 0, 16, device.stream.ptr)
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.asarray(x)
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorInvalidValue"):
        runtime.memsetAsync(x.data.ptr + (1 << 40), 0, 16, device.stream.ptr)
    assert device.to_host(x).tolist() == [0] * 4
    start = device.mark()
    device.copy(x)
    assert device.elapsed(start, device.mark()) > 0
