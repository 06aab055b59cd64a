"""cuDNN's convolutions on the stand-in for its frontend: equal to NumPy's, with plans that keep their digits, ours where it has none."""

from __future__ import annotations

import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbpar.config.engine import EngineConfig
from lbpar.engine.base import LocalWindow
from lbpar.engine.cupy import engine as cupy_engine
from lbpar.engine.cupy import graphs, plans
from lbpar.engine.cupy.launch_conv import Geometry
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.registry import build_engine, get_engine
from lbpar.errors import ConfigError, EngineError
from tests.cuda.emulator import compiler_found
from tests.engine import test_convolution
from tests.engine.test_convolution import CASES
from tests.util import fake_cudnn, fake_cupy
from tests.util.fake_cupy.machine import Machine
from tests.util.on_host import OnHost

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
FLOAT32 = np.dtype("float32")
FLAT = (LocalWindow(3, 1, 1, 2), LocalWindow(3, 2, 1, 0))
SHAPES = (2, 9, 7, 16), (8, 3, 3, 16), (10, 3)
"""Of x, of w, and the extents of y, under the window `FLAT`."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    fake_cupy.few_kernels(monkeypatch, 4)
    fake_cudnn.executed.clear()
    monkeypatch.setattr(fake_cudnn, "version", 92100)
    return fake_cupy.install(monkeypatch, cudnn=fake_cudnn)


@pytest.fixture
def engine(machine: Machine) -> Any:
    return OnHost(get_engine("cupy", "float32", cudnn=True))


def values(dtype: Any = FLOAT32, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x, w, b and dy: small whole numbers, which products and sums of any type hold."""
    rng, (x, w, out) = np.random.default_rng(seed), SHAPES
    shapes = x, w, (w[0],), (x[0], *out, w[0])
    return tuple(rng.integers(-2, 3, shape).astype(dtype) for shape in shapes)  # type: ignore[return-value]


def passes(engine: Any, x: np.ndarray, w: np.ndarray, b: np.ndarray, dy: np.ndarray) -> list[np.ndarray]:
    return [
        engine.conv_forward(x, w, b, FLAT, 1, dy.shape[1:-1]),
        engine.conv_relu_forward(x, w, None, FLAT, 1, dy.shape[1:-1]),
        engine.conv_backward_data(dy, w, FLAT, 1, x.shape[1:-1]),
        engine.conv_backward_weights(x, dy, FLAT, 1),
    ]


def ran() -> Counter[str]:
    return Counter(name for name, _ in fake_cudnn.executed)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_matches_pytorch(machine: Machine, engine: Any, rng: np.random.Generator, case: Any) -> None:
    test_convolution.test_matches_pytorch(engine, FLOAT32, rng, case)
    ours = case[-1] > 1 and max(case[2], case[3]) // case[-1] <= 4  # few channels in a group
    assert ran() == ({} if ours else {"fprop": 2, "dgrad": 1, "wgrad": 1})
    assert ours == ("conv_grouped<float" in {n.split(",")[0] for n in machine.launches})


@pytest.mark.parametrize("seed", range(12))
def test_local_windows(engine: Any, seed: int) -> None:
    test_convolution.test_local_windows_match_plain_loops(engine, FLOAT32, seed)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sums_are_of_float32_whatever_the_type(machine: Machine, dtype: str) -> None:
    """Of values whose products fill the digits of float32."""
    kind = np.dtype(dtype) if dtype != "bfloat16" else np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    device: Any = get_engine("cupy", "float32", cudnn=True)
    rng, (xs, ws, out) = np.random.default_rng(3), SHAPES
    x, w, dy = (rng.standard_normal(s).astype(kind) for s in (xs, ws, (xs[0], *out, ws[0])))
    want = passes(NumpyEngine("float64"), *(a.astype("float64") for a in (x, w, w[:, 0, 0, 0], dy)))
    for got, exact in zip(passes(device, *map(device.from_host, (x, w, w[:, 0, 0, 0], dy))), want, strict=True):
        bits = {"float32": 22, "float16": 10, "bfloat16": 7}[dtype]
        np.testing.assert_allclose(
            device.to_host(got), exact, rtol=2.0**-bits, atol=1e-5 if dtype == "float32" else 1e-3
        )
    assert ran() == {"fprop": 2, "dgrad": 1, "wgrad": 1}


@pytest.mark.parametrize(("tf32", "note"), [(False, ""), (True, "TENSOR_CORE")])
def test_float32_is_exact_unless_tf32_is_chosen(machine: Machine, tf32: bool, note: str) -> None:
    passes(OnHost(get_engine("cupy", "float32", cudnn=True, tf32=tf32)), *values())
    assert {n for _, n in fake_cudnn.executed} == {note}


def test_a_workspace_is_bounded(machine: Machine) -> None:
    device = get_engine("cupy", "float32", cudnn=True, workspace=0)
    for got, want in zip(passes(OnHost(device), *values()), passes(NumpyEngine("float32"), *values()), strict=True):
        np.testing.assert_array_equal(got, want)
    plan = device.graphs.plan("weights", Geometry.of(2, (9, 7), (10, 3), FLAT, 1, 16, 8), "float32")  # type: ignore[attr-defined]
    assert plan.choice[1] == 0
    with_room = get_engine("cupy", "float32", cudnn=True)
    assert with_room.graphs.plan("weights", Geometry.of(2, (9, 7), (10, 3), FLAT, 1, 16, 8), "float32").choice[1] > 0  # type: ignore[attr-defined]


def test_plans_are_kept(machine: Machine, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    passes(engine, *values())
    monkeypatch.setattr(fake_cudnn, "pygraph", None)
    passes(engine, *values(seed=2))
    assert ran() == {"fprop": 4, "dgrad": 2, "wgrad": 2}


@pytest.mark.parametrize("fastest", [0, 1, 2])
def test_timing_takes_the_fastest_of_plans_and_our_kernels(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, fastest: int
) -> None:
    device: Any = get_engine("cupy", "float32", cudnn=True, autotune=True)
    times = [0.3, 0.3, 0.3]
    times[fastest] = 0.1
    said = iter(times)
    monkeypatch.setattr(device, "elapsed", lambda start, end: next(said))
    x, _, _, dy = values()
    want = NumpyEngine("float32").conv_backward_weights(x, dy, FLAT, 1)
    for _ in range(2):
        np.testing.assert_array_equal(OnHost(device).conv_backward_weights(x, dy, FLAT, 1), want)
        device.agree(lambda mine: [mine])
    tried, launches = 4, sum(n for name, n in machine.launches.items() if "conv_backward_weights" in name)
    assert ran() == {"wgrad": 2 * tried + 1 + (fastest < 2)}  # until they agree, the heuristics' choice runs
    assert launches == tried + (fastest == 2)


def test_ranks_agree_on_plans_whatever_each_has_timed(machine: Machine) -> None:
    """The fastest of all together; one that is timed later is what others chose before; what one of them lacks is left alone."""
    one, two, three = (get_engine("cupy", "float32", cudnn=True, autotune=True).graphs for _ in range(3))  # type: ignore[attr-defined]
    keys = [("forward", Geometry.of(n, (9, 7), (10, 3), FLAT, 1, 16, 8), "float32", False, False) for n in (1, 2, 3)]
    first, second, ours = one.plan(*keys[0]).candidates
    one.times = {keys[0]: {first: 1.0, second: 3.0, ours: 2.0}, keys[1]: {first: 2.0, ours: 1.0}}
    two.times = {keys[0]: {first: 4.0, second: 3.5, ours: 2.5}, keys[2]: {(9, 0): 0.5, first: 1.0}}
    found = [one.times, two.times, {}]
    for graphs_ in (one, two, three):
        graphs_.choose(found)
        assert [graphs_.plan(*key).choice for key in keys] == [ours, ours, first] and not graphs_.times


def test_our_kernels_take_what_cudnn_should_not(machine: Machine) -> None:
    device: Any = get_engine("cupy", "float32", cudnn=True)
    of = device.graphs.unsuited
    win = (LocalWindow(3, 1, 1, 1),) * 2

    def g(
        win: Any = win, groups: int = 1, c: int = 16, f: int = 16, inner: Any = (8, 8), outer: Any = (8, 8)
    ) -> Geometry:
        return Geometry.of(2, inner, outer, win, groups, c, f)

    assert of(g(), "float32") == of(g(), "bfloat16") == of(g(c=5), "float32") == of(g(groups=2), "float32") == ""
    assert "float64" in of(g(), "float64")
    assert "nothing" in of(g(f=0), "float32")
    assert "negative" in of(g((LocalWindow(3, 1, 1, -1),) * 2, outer=(5, 5)), "float32")
    assert "negative" in of(g(outer=(4, 4)), "float32")  # stops before the end of x
    assert "few channels" in of(g(groups=16), "float32")
    assert "multiples of 8" in of(g(c=12), "bfloat16")
    assert "64 bits" in of(Geometry.of(2, (1 << 15, 1 << 12), (1 << 15, 1 << 12), win, 1, 16, 16), "float32")
    deep = g((win[0],) * 3, inner=(4,) * 3, outer=(4,) * 3)
    assert of(deep, "float32") == ""
    fake_cudnn.version = 91500
    assert "91500 is not trusted in three dimensions" in get_engine("cupy", "float32").graphs.unsuited(deep, "float32")  # type: ignore[attr-defined]
    tf32: Any = get_engine("cupy", "float32", tf32=True)
    assert "multiples of 4" in tf32.graphs.unsuited(g(c=6), "float32")
    tuned: Any = get_engine("cupy", "float32", autotune=True)
    assert tuned.graphs.unsuited(g(c=12), "bfloat16") == ""  # timed, like all


def test_gradients_of_weights_that_begin_anywhere_in_a_bucket_are_cudnns(machine: Machine) -> None:
    device: Any = get_engine("cupy", "float32", cudnn=True)
    x, w, _, dy = values()
    bucket = device.zeros((w.size + 3,))
    place = bucket[3:].reshape(w.shape)
    got = device.conv_backward_weights(device.from_host(x), device.from_host(dy), FLAT, 1, out=place)
    want = NumpyEngine("float64").conv_backward_weights(x.astype(float), dy.astype(float), FLAT, 1)
    np.testing.assert_array_equal(device.to_host(got), want)
    assert ran() == {"wgrad": 1} and got.data.ptr == place.data.ptr
    np.testing.assert_array_equal(device.to_host(bucket)[:3], 0)


def test_what_is_not_aligned_is_left_to_our_kernels(machine: Machine) -> None:
    device: Any = get_engine("cupy", "float32", cudnn=True)
    x, w, _, dy = values()
    host = np.zeros(x.size + 1, FLOAT32)
    host[1:] = x.ravel()
    shifted = device.from_host(host)[1:].reshape(x.shape)
    y = device.to_host(device.conv_forward(shifted, device.from_host(w), None, FLAT, 1, dy.shape[1:-1]))
    np.testing.assert_array_equal(y, NumpyEngine("float32").conv_forward(x, w, None, FLAT, 1, dy.shape[1:-1]))
    assert not ran()


@pytest.mark.parametrize("biased", [True, False])
def test_relu_follows_by_our_kernel_where_cudnn_does_not_fuse_it(machine: Machine, engine: Any, biased: bool) -> None:
    """It wants a bias before it."""
    rng, win = np.random.default_rng(0), (LocalWindow(3, 1, 1, 1),) * 3
    x, w, b = (rng.integers(-2, 3, s).astype("float32") for s in ((1, 4, 5, 6, 8), (8, 3, 3, 3, 8), (8,)))
    args = (x, w, b if biased else None, win, 1, (4, 5, 6))
    np.testing.assert_array_equal(engine.conv_relu_forward(*args), NumpyEngine("float32").conv_relu_forward(*args))
    assert ran() == {"fprop": 1}
    assert machine.launches.get("relu_forward<float>", 0) == (not biased)


def test_an_interior_is_computed_with_the_rest_if_it_is_most_of_it(machine: Machine, engine: Any) -> None:
    x, w, b, dy = values()
    y = NumpyEngine("float32").conv_relu_forward(x, w, b, FLAT, 1, SHAPES[2])
    dx = NumpyEngine("float32").conv_backward_data(dy, w, FLAT, 1, x.shape[1:-1])
    for box, by_cudnn in (([(1, 9), (0, 3)], True), ([(1, 3), (0, 3)], False)):
        fake_cudnn.executed.clear()
        got = engine.conv_forward_inside(x, w, b, FLAT, 1, SHAPES[2], box, True)
        np.testing.assert_array_equal(*(a[:, slice(*box[0])] for a in (got, y)))
        got = engine.conv_backward_data_inside(dy, w, FLAT, 1, x.shape[1:-1], [box[0], (0, 7)])
        np.testing.assert_array_equal(*(a[:, slice(*box[0])] for a in (got, dx)))
        assert ran() == ({"fprop": 1, "dgrad": 1} if by_cudnn else {})


def test_cudnn_that_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_cupy.install(monkeypatch)
    with pytest.raises(EngineError, match=r"engine\.cudnn: true needs cuDNN .* pip install 'lbpar\[cuda13\]', or"):
        get_engine("cupy", "float32", cudnn=True)
    caplog.set_level("INFO", "lbpar")
    assert get_engine("cupy", "float32").graphs is None  # type: ignore[attr-defined]
    assert "lbpar's own kernels convolve and normalise, because cuDNN cannot be used" in caplog.text


def test_cudnn_that_does_not_start_is_said(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("cudnnHandle Create failed")

    monkeypatch.setattr(fake_cudnn, "create_handle", fail)
    with pytest.raises(EngineError, match=r"cannot be used \(cudnnHandle Create failed\)"):
        get_engine("cupy", "float32", cudnn=True)
    assert get_engine("cupy", "float32").graphs is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [fake_cudnn.cudnnGraphNotSupportedError, AttributeError, ValueError])
def test_cudnn_that_refuses_its_first_graph_is_said(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Which an incomplete package does, in one of several ways: the frontend's own error is no RuntimeError."""

    def refuse(self: Any) -> None:
        raise error("no engine configs")

    monkeypatch.setattr(fake_cudnn.pygraph, "validate", refuse)
    with pytest.raises(EngineError, match=r"cannot be used \(no engine configs\)"):
        get_engine("cupy", "float32", cudnn=True)
    assert get_engine("cupy", "float32").graphs is None  # type: ignore[attr-defined]


def test_cudnn_can_be_left_out(machine: Machine) -> None:
    passes(OnHost(get_engine("cupy", "float32", cudnn=False)), *values())
    assert not ran()


@pytest.mark.parametrize("option", ["cudnn", "autotune"])
def test_other_engines_refuse_what_is_of_gpus(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.{option}: true needs a GPU, but engine\.name is numpy"):
        build_engine(EngineConfig(name="numpy", **{option: True}))


def test_options_that_would_change_nothing_are_refused(machine: Machine) -> None:
    with pytest.raises(ConfigError, match=r"engine\.tf32: true .* engine\.dtype is bfloat16"):
        build_engine(EngineConfig(name="cupy", dtype="bfloat16", tf32=True))
    with pytest.raises(ConfigError, match=r"engine\.autotune: true .* engine\.cudnn is false"):
        build_engine(EngineConfig(name="cupy", cudnn=False, autotune=True))
    with pytest.raises(
        ConfigError, match=r"engine\.transport: nccl .* engine\.name is numpy; choose engine\.name: cupy"
    ):
        build_engine(EngineConfig(name="numpy", transport="nccl"))


def test_autotune_without_cudnn_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_cupy.install(monkeypatch)
    for config in (EngineConfig(name="cupy"), *[EngineConfig(name="cupy", autotune=True)] * 2):
        build_engine(config)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == len(set(said)) == 3  # of cuDNN, cuBLAS and this
    assert any(text.startswith("engine.autotune: true changes nothing here: it times plans of cuDNN") for text in said)


def norms(engine: Any, x: Any) -> list[Any]:
    """Sums, moments and y of a batch norm, and y of one with ReLU and a sum."""
    c = x.shape[-1]
    scale, bias, shift = (engine.from_host(np.linspace(*ends, c)) for ends in ((1, 2), (-1, 1), (0, 3)))
    made = [*engine.norm_forward(x, shift, scale, bias, None, False, x.size // c, 0.1)]
    return [*made, engine.norm_forward(x, shift, scale, bias, x, True, x.size // c, 0.1)[2]]


MUTATIONS = {
    "row-major strides": ("(1, *range(len(shape) - 1, 1, -1), 0)", "range(len(shape) - 1, -1, -1)"),
    "pads swapped": ("for before, _ in pads]", "for _, before in pads]"),
    "stride for dilation": ("d.dilation for d in win]", "d.stride for d in win]"),
    "no pads": ("[after for _, after in pads]", "[0 for _ in pads]"),
    "no workspace": ("at = 0 if workspace is None else address(workspace)", "at = 0"),
    "half a workspace": ("empty((nbytes,)", "empty((nbytes // 2,)"),
    "sums in the operands' type": ("            compute_data_type=types.FLOAT,\n", ""),
    "no stream": ("cudnn.set_stream(handle=self._handle, stream=engine.stream.ptr)", "pass"),
    "TF32 not deselected": ("found += [notes.DOWN_CONVERT_INPUTS, notes.TENSOR_CORE]", "pass"),
    "reduced sums not deselected": ("notes.NONDETERMINISTIC, notes.REDUCED_PRECISION_REDUCTION", "notes.NONDETERMINISTIC"),
    "order not deselected": ("notes.NONDETERMINISTIC, notes.REDUCED_PRECISION_REDUCTION", "notes.REDUCED_PRECISION_REDUCTION"),
    "workspace not bounded": ("graph.deselect_workspace_greater_than(self._workspace)", "self._workspace = 1 << 50"),
    "notes too early": ("            graph.validate()\n", "            graph.validate()\n            graph.deselect_numeric_notes([])\n"),
    "channels for filters": ("w = (g.groups * g.filters, g.channels,", "w = (g.channels, g.groups * g.filters,"),
    "wrong operand": ('loss=tensor("dy"), filter=tensor("w")', 'loss=tensor("w"), filter=tensor("dy")'),
    "no residual": ("        if residual:\n", "        if False:\n"),
    "no relu behind a norm": ("        if relu:\n            out = graph.relu(input=out)\n        self._result(out, \"y\"", "        self._result(out, \"y\""),
    "another eps": ('{"eps": eps, "momentum": 1.0}', '{"eps": 1.0, "momentum": eps}'),
    "statistics swapped": ('("mean", "invstd", "new_mean", "new_var")', '("invstd", "mean", "new_mean", "new_var")'),
    "no bias": ("            if bias:\n                out = graph", "            if False:\n                out = graph"),
    "no relu": ("            if relu:\n                out = graph", "            if False:\n                out = graph"),
    "not built": ("                graph.build_plan_at_index(index)\n", "                pass\n"),
    "wrong plan": ("execute_plan_at_index(pack, at, index,", "execute_plan_at_index(pack, at, 0,"),
}  # fmt: skip


@pytest.mark.parametrize("name", [None, *MUTATIONS])
def test_an_error_in_the_graphs_is_noticed(machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    sources = [Path(module.__file__ or "").read_text(encoding="utf-8") for module in (plans, graphs)]
    if name is not None:
        old, new = MUTATIONS[name]
        assert sum(source.count(old) for source in sources) == 1, name
        sources = [source.replace(old, new) for source in sources]
    for module, source in zip((plans, graphs), sources, strict=True):
        mutated = types.ModuleType(module.__name__)  # the second imports the first
        monkeypatch.setitem(sys.modules, module.__name__, mutated)
        exec(compile(source, str(module.__file__), "exec"), mutated.__dict__)  # noqa: S102
    monkeypatch.setattr(cupy_engine, "Graphs", mutated.__dict__["Graphs"])
    for kind in ("float32", "float16"):
        right = True
        fake_cudnn.executed.clear()
        try:
            device: Any = get_engine("cupy", "float32", cudnn=True)
            rng, (xs, ws, out) = np.random.default_rng(3), SHAPES
            shapes = (xs, ws, ws[:1], (xs[0], *out, ws[0]))
            given = [rng.standard_normal(s).astype(kind) for s in shapes]
            want = passes(NumpyEngine("float64"), *(a.astype("float64") for a in given))
            got = [device.to_host(a) for a in passes(device, *map(device.from_host, given))]
            got += [device.to_host(a) for a in norms(device, device.from_host(given[3]))]
            want += norms(NumpyEngine("float64"), given[3].astype("float64"))
            limit = 1e-6 if kind == "float32" else 2.0**-11
            right = all((np.abs(g - e) <= limit * np.abs(e) + 1e-5).all() for g, e in zip(got, want, strict=True))
            right = right and set(ran()) == {"fprop", "dgrad", "wgrad", "batchnorm"} and ran()["batchnorm"] == 2
        except (AssertionError, RuntimeError, EngineError):
            right = False
        if not right:
            break
    assert right == (name is None)
