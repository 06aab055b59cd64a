"""The engine of CUDA devices on the stand-in for CuPy: what is missing is said, what runs late is waited for."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
from inspect import getclosurevars
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbpar.config.engine import EngineConfig
from lbpar.engine.cupy import kernels, library, through_host
from lbpar.engine.cupy.device import CupyDevice
from lbpar.engine.cupy.engine import CupyEngine
from lbpar.engine.cupy.kernels import source
from lbpar.engine.cupy.names import GROUPS
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.registry import build_engine, get_engine
from lbpar.errors import ConfigError, EngineError
from lbpar.runtime.binding import BINDERS, _on_host
from tests.cuda.emulator import compiler_found
from tests.util import fake_cupy
from tests.util.fake_cupy.machine import Machine

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return fake_cupy.install(monkeypatch)


@pytest.fixture
def device(machine: Machine) -> Any:
    return get_engine("cupy", "float32")


def test_without_cupy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(
        EngineError, match=r"engine\.name: cupy needs CuPy.*pip install 'lbpar\[cuda13\]', or 'lbpar\[cuda12\]'"
    ):
        get_engine("cupy")


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("driver", r"the NVIDIA driver is missing, or older.*InsufficientDriver.*lbpar\[cuda12\]"),
        ("device", r"no GPU can be used here \(cudaErrorNoDevice.*CUDA_VISIBLE_DEVICES is '7'"),
    ],
)
def test_without_driver_or_device(machine: Machine, monkeypatch: pytest.MonkeyPatch, missing: str, said: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    machine.missing = missing
    with pytest.raises(EngineError, match=said):
        get_engine("cupy")


def test_what_is_left_of_another_cupy_is_no_cupy(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fake_cupy, "__version__")  # as of an empty folder of that name
    with pytest.raises(EngineError, match=r"needs CuPy, which cannot be loaded \(.*__version__"):
        library.load()


def test_a_device_that_another_process_has_for_itself(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(self: fake_cupy.cuda.Device) -> None:
        raise fake_cupy.cuda.runtime.CUDARuntimeError("cudaErrorDevicesUnavailable: devices are busy or unavailable")

    monkeypatch.setattr(fake_cupy.cuda.Device, "use", busy)
    with pytest.raises(EngineError, match=r"no GPU can be used here \(cudaErrorDevicesUnavailable"):
        get_engine("cupy")


@pytest.mark.parametrize(
    ("capability", "runtime", "refused"), [((7, 0), 13000, True), ((7, 5), 13010, False), ((7, 0), 12090, False)]
)
def test_a_gpu_that_cuda_13_compiles_nothing_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], runtime: int, refused: bool
) -> None:
    machine.capability = capability
    monkeypatch.setattr(fake_cupy.cuda.runtime, "runtimeGetVersion", lambda: runtime)
    if refused:
        with pytest.raises(
            EngineError, match=r"Pretended \(sm_70\) is older than Turing \(sm_75\).*pip install 'lbpar\[cuda12\]'"
        ):
            library.load()
    else:
        library.load()


@pytest.mark.parametrize("variable", ["CUPY_CACHE_DIR", "HOME"])
def test_kernels_are_kept_in_memory_where_no_folder_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, variable: str
) -> None:
    """CuPy makes its folder as it is loaded."""
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")
    monkeypatch.setenv(variable, str(tmp_path / "file" / "folder"))
    (tmp_path / "cupy.py").write_text(
        "import os\n"
        "__version__ = '14.0'\n"
        "folder = os.environ.get('CUPY_CACHE_DIR') or os.path.expanduser('~/.cupy/kernel_cache')\n"
        "os.makedirs(folder, exist_ok=True)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    before = os.environ.get("CUPY_CACHE_DIR")
    assert not Path(library._import().folder).exists()
    assert os.environ["CUPY_CACHE_IN_MEMORY"] == "1" and os.environ.get("CUPY_CACHE_DIR") == before
    assert "they cannot be kept" in caplog.text
    monkeypatch.delitem(sys.modules, "cupy")


def test_a_disk_without_room_for_what_is_compiled_is_said(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fake_cupy, "RawModule", full)
    with pytest.raises(EngineError, match=r"cannot be kept: .*No space left on device\. Set CUPY_CACHE_DIR"):
        device.relu_forward(device.zeros((3,)))


def test_an_old_cupy_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cupy, "__version__", "13.6.0")
    with pytest.raises(EngineError, match=r"CuPy 13\.6\.0 is installed, expected 14 or newer"):
        library.load()


def test_kernels_that_do_not_compile_are_named_with_the_compilers_words(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise RuntimeError("CUDA headers not found")

    monkeypatch.setattr(fake_cupy, "RawModule", refuse)
    with pytest.raises(
        EngineError, match=r"kernels of pointwise\.cu cannot be compiled.*headers not found.*cupy-cuda13x\[ctk\]"
    ):
        device.relu_forward(device.zeros((3,)))


def test_cudnn_is_neither_looked_for_nor_insisted_on_in_float64(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    get_engine("cupy", "float64")
    assert "cuDNN" not in caplog.text
    get_engine("cupy", "float32")
    assert "because cuDNN cannot be used" in caplog.text
    for option in ("cudnn", "autotune"):
        with pytest.raises(ConfigError, match=rf"engine\.{option}: true .* engine\.dtype is float64"):
            get_engine("cupy", "float64", **{option: True})


def test_what_other_engines_lack_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.tf32: true needs tensor cores, but engine\.name is numpy"):
        build_engine(EngineConfig(name="numpy", tf32=True))


def test_each_file_says_how_it_is_launched_what_limits_it_and_who_calls_it() -> None:
    files = sorted(kernels.folder().glob("*.cu"))
    assert {f.name for f in files} >= set(GROUPS)
    for file in files:
        head = file.read_text(encoding="utf-8").partition("#include")[0]
        wanted = (r"^// (Launch|Grid)\b|Launch:", r"^// Limits: ", r"^// Called by")
        assert not [w for w in wanted if not re.search(w, head, re.MULTILINE)], file.name


def test_sources_hold_their_headers_once() -> None:
    for file in GROUPS:
        text = source(file)
        assert text.startswith(f"// kernels/{file}\n")
        assert '#include "' not in text
        assert text.count("struct Accumulated {") == 1


def test_an_array_that_does_not_fit(machine: Machine, device: CupyDevice) -> None:
    machine.memory = 1 << 20
    with pytest.raises(EngineError, match=r"memory: an array of 4 MB does not fit the GPU.*use more GPUs"):
        device.empty((1000, 1000))


def test_memory_is_used_again_in_the_order_of_the_stream(device: CupyDevice) -> None:
    a = device.from_host(np.arange(8, dtype=np.float32))
    b = device.copy(a)
    del a
    c = device.zeros((8,))
    assert device.pool.total_bytes() == 2 * 512
    assert (device.to_host(b).tolist(), device.to_host(c).tolist()) == (list(range(8)), [0] * 8)


def test_what_the_host_gives_may_change_at_once(device: CupyDevice) -> None:
    host = np.arange(6, dtype=np.float32)
    a = device.from_host(host)
    host[:] = -1
    assert device.to_host(a).tolist() == list(range(6))


@pytest.mark.parametrize("size", [3, 1 << 22])
def test_a_fetch_shows_what_was_there_when_it_started(device: CupyDevice, size: int) -> None:
    a = device.from_host(np.ones(size, np.float32))
    fetch, forgotten = device.fetch(a), device.fetch(a)
    del forgotten  # whose memory may be used again, but not before its copy has ended
    device.copy(device.zeros((size,)), out=a)
    again = device.fetch(a)
    assert (fetch() == 1).all() and (again() == 0).all() and (fetch() == 1).all()
    device.synchronize()
    assert device.pinned.nbytes <= 4 * max(4096, 4 * size)


def test_an_unread_fetch_in_garbage_that_refers_to_itself(device: CupyDevice) -> None:
    """Python then ends the event, too, which CuPy destroys, although the memory of the copy still waits for it."""
    forgotten: list[Any] = [device.fetch(device.zeros((3,)))]
    forgotten.append(forgotten)
    del forgotten
    gc.collect()
    assert device.to_host(device.zeros((3,))).tolist() == [0] * 3
    device.synchronize()
    assert device.to_host(device.zeros((3,))).tolist() == [0] * 3 and device.pinned.nbytes <= 2 * 4096


def test_times_of_the_device(device: CupyDevice) -> None:
    start = device.mark()
    device.copy(device.zeros((5,)))
    assert device.elapsed(start, device.mark()) > 0


def test_what_runs_on_the_host_keeps_half_types(machine: Machine) -> None:
    engine: Any = get_engine("cupy", "bfloat16")
    x = engine.copy(engine.from_host(np.array([-1, 0.5, 2], np.float32)), engine.activations)
    y = engine.on_host(NumpyEngine("float32").relu_forward, x)
    assert y.dtype == engine.activations
    np.testing.assert_array_equal(engine.to_host(y), [0, 0.5, 2])


def test_no_function_of_lbpar_runs_on_the_host() -> None:
    """Whatever a program may ask for as a NumPy function has a method of the engine's own."""
    asked = {
        getclosurevars(binder).nonlocals["function"]
        for binder in BINDERS.values()
        if binder.__qualname__.startswith(_on_host.__name__)
    }
    assert len(asked) > 15 and asked <= through_host._HERE
    for function in asked:
        assert getattr(CupyEngine, function.__name__).__module__.startswith("lbpar.engine.cupy.")


def test_all_pieces_of_a_move_go_in_one_launch(machine: Machine, device: CupyDevice) -> None:
    a = np.arange(6 * 5 * 4, dtype=np.float32).reshape(6, 5, 4)
    held, rows = device.from_host(a), np.array([4, 0])
    indices: list[Any] = [
        (slice(0, 1), slice(None), slice(None)),
        (slice(5, 6), slice(1, 4), slice(None)),
        (slice(2, 2), slice(None), slice(None)),
        (slice(1, 5), slice(0, 1), slice(1, 3)),
    ]
    outs = [device.empty((a[i].size,)) for i in indices]
    machine.launches.clear()
    device.pack_all(held, list(zip(indices, outs, strict=True)))
    assert sum(machine.launches.values()) <= 2  # one for each width of copies
    for index, out in zip(indices, outs, strict=True):
        assert device.to_host(out).tolist() == a[index].reshape(-1).tolist()
    back, want = device.zeros(a.shape), np.zeros_like(a)
    machine.launches.clear()
    device.unpack_all(list(zip(outs, indices, strict=True)), back)
    assert sum(machine.launches.values()) <= 2
    for index in indices:
        want[index] = a[index]
    assert (device.to_host(back) == want).all()
    listed: Any = (rows, slice(None), slice(0, 1))
    out = device.empty((10,))
    device.pack_all(held, [(listed, out)])
    assert device.to_host(out).tolist() == a[rows][:, :, :1].reshape(-1).tolist()


def reserved_and_cut(device: CupyDevice) -> int:
    """Let arrays be cut from a stretch of 1 MiB, and joined again; the bytes that it holds."""
    device.reserve(1 << 20)
    held: int = device.pool.total_bytes()
    assert 1 << 20 <= held < (1 << 20) + 1024 and not device.pool.used_bytes()
    several = [device.zeros((n, 100)) for n in (300, 1, 700, 50)]
    del several[1:3]
    several.append(device.zeros((900, 100)))
    assert device.pool.total_bytes() == held
    several.clear()
    assert device.zeros((1 << 18,)).nbytes == 1 << 20 and device.pool.total_bytes() == held  # what came back was joined
    device.reserve(1 << 20)  # what is there counts
    assert device.pool.total_bytes() == held
    return held


def test_a_stretch_that_is_reserved_is_cut_into_arrays(machine: Machine, device: CupyDevice) -> None:
    reserved_and_cut(device)


def test_no_stretch_is_needed(machine: Machine, device: CupyDevice, caplog: pytest.LogCaptureFixture) -> None:
    machine.memory = 1 << 21
    for nbytes in (1 << 22, 1 << 21, (1 << 21) - 1000):  # more than there is; all; all that libraries need
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="lbpar"):
            device.reserve(nbytes)
        assert "can be spared on the GPU" in caplog.text and not device.pool.total_bytes()
    assert device.zeros((100, 100)).nbytes == 40_000
