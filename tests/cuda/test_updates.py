"""kernels/updates.cu: the bits of the NumPy engine, for many parameters in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from tests.cuda.emulator import Emulator, compiler_found
from tests.cuda.kinds import KINDS, normal

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
ENGINE = NumpyEngine()
CHUNK = 8192
BLOCK = np.dtype([(n, "u8") for n in ("p", "m", "v", "copy", "g")] + [(n, "i8") for n in ("size", "first_chunk", "adapted")] + [(n, "f8") for n in ("keep", "decay", "rate")])  # fmt: skip
SIZES = (5, 0, 8192, 20001, 64, 0)
PAIRS = [("float", "float"), ("double", "double"), ("float", "__half")]
DECAYS, RATES, KEEPS = (0.0, 0.1, 0.01, 0.0, 0.2, 0.1), (0.1, 0.2, 0.3, 0.1, 0.2, 0.1), (1.0, 0.9, 0.99, 1.0, 0.8, 1.0)
ADAPTED = (True, True, False, True, True, True)


def names() -> list[str]:
    pairs = [f"{n}<{p}, {g}>" for p, g in PAIRS for n in ("sgd", "adam", "lars", "lamb_moments", "lamb", "unscale")]
    return [*pairs, *(f"{n}<{t}>" for n in ("squares", "clip") for t in ("float", "__half", "double")), "sum_blocks"]


@pytest.fixture(scope="module")
def updates() -> Emulator:
    return Emulator("updates.cu", names())


def table(rate: Sequence[float] = RATES, **arrays: Sequence[np.ndarray] | None) -> tuple[np.ndarray, int, int]:
    """The table on the device, the number of arrays, and of chunks."""
    first = next(a for a in arrays.values() if a is not None)
    t = np.zeros(len(first) + 1, BLOCK)
    for name, many in arrays.items():
        if many is not None:
            t[name][:-1] = [a.ctypes.data for a in many]
    sizes = [a.size for a in first]
    t["size"][:-1], t["adapted"][:-1] = sizes, ADAPTED[: len(sizes)]
    t["first_chunk"] = np.cumsum([0, *(-(-s // CHUNK) for s in sizes)])
    t["keep"][:-1], t["decay"][:-1], t["rate"][:-1] = KEEPS[: len(sizes)], DECAYS[: len(sizes)], rate[: len(sizes)]
    return t.view(np.uint8), len(sizes), int(t["first_chunk"][-1])


def arrays(seed: int, kind: str, positive: bool = False) -> list[np.ndarray]:
    made = [normal(seed * 10 + i, (n,), kind) for i, n in enumerate(SIZES)]
    return [np.abs(a) for a in made] if positive else made


def launch(module: Emulator, name: str, chunks: int, args: list[Any]) -> None:
    module.launch(name, (chunks,), (256,), args)


class State:
    """The same numbers twice: for the kernel, and for NumPy."""

    def __init__(self, p: str, g: str) -> None:
        self.kinds, self.p, self.g, self.m, self.v = (
            f"{p}, {g}",
            arrays(0, p),
            arrays(1, g),
            arrays(2, p),
            arrays(3, p, True),
        )
        self.expected = [[a.copy() for a in many] for many in (self.p, self.m, self.v)]
        self.wide = [a.astype(KINDS[p]) for a in self.g]
        self.copies = [np.full_like(a, 99) for a in self.g]

    def check(self, *which: str) -> None:
        for name, expected in zip(("p", "m", "v"), self.expected, strict=True):
            for a, b in zip(getattr(self, name), expected, strict=True):
                np.testing.assert_array_equal(a, b, err_msg=name)
        for a, b in zip(self.copies, self.p, strict=True):
            np.testing.assert_array_equal(a, b.astype(a.dtype))


@pytest.fixture(params=PAIRS, ids=str)
def state(request: pytest.FixtureRequest) -> State:
    return State(*request.param)


@pytest.mark.parametrize("momentum,nesterov", [(None, False), (0.9, False), (0.9, True)])
def test_sgd(updates: Emulator, state: State, momentum: float | None, nesterov: bool) -> None:
    p, _, v = state.expected
    moving = momentum is not None
    t, count, chunks = table(p=state.p, g=state.g, v=state.v if moving else None, copy=state.copies)
    args = [t, np.int64(count), 0, np.float64(momentum or 0), np.int64(nesterov)]
    launch(updates, f"sgd<{state.kinds}>", chunks, args)
    blocks = list(zip(p, state.wide, v, strict=True)) if moving else list(zip(p, state.wide, strict=True))
    ENGINE.sgd(blocks, momentum or 0, nesterov, DECAYS, RATES)
    state.check()


def test_adam(updates: Emulator, state: State) -> None:
    p, m, v = state.expected
    t, count, chunks = table(p=state.p, g=state.g, m=state.m, v=state.v, copy=state.copies)
    launch(
        updates, f"adam<{state.kinds}>", chunks, [t, np.int64(count), 0, *(np.float64(x) for x in (0.9, 0.99, 1e-6))]
    )
    ENGINE.adam(list(zip(p, state.wide, m, v, strict=True)), (0.9, 0.99), 1e-6, KEEPS, DECAYS, RATES)
    state.check()


def test_lars(updates: Emulator, state: State) -> None:
    p, _, v = state.expected
    squares = np.stack([ENGINE.squared_norms(p), ENGINE.squared_norms(state.wide)], axis=1)
    t, count, chunks = table(p=state.p, g=state.g, v=state.v, copy=state.copies)
    launch(
        updates,
        f"lars<{state.kinds}>",
        chunks,
        [t, np.int64(count), 0, squares, *(np.float64(x) for x in (0.9, 0.02, 1e-3))],
    )
    ENGINE.lars(list(zip(p, state.wide, v, strict=True)), squares, ADAPTED, 0.9, DECAYS, RATES, 0.02, 1e-3)
    state.check()


def test_lamb(updates: Emulator, state: State) -> None:
    p, m, v = state.expected
    t, count, chunks = table(p=state.p, g=state.g, m=state.m, v=state.v)
    partial, squares = np.full((chunks, 2), np.nan), np.full((count, 2), np.nan)
    betas = [np.float64(x) for x in (0.9, 0.99, 1e-6, 1.5)]
    launch(updates, f"lamb_moments<{state.kinds}>", chunks, [partial, t, np.int64(count), 0, *betas])
    launch(updates, "sum_blocks", count, [squares, partial, t, np.int64(2)])
    expected = ENGINE.lamb_moments(list(zip(p, state.wide, m, v, strict=True)), (0.9, 0.99), 1e-6, 1.5, DECAYS)
    np.testing.assert_allclose(squares, expected, rtol=1e-12)
    t, count, chunks = table(p=state.p, m=state.m, v=state.v, copy=state.copies)
    launch(updates, f"lamb<{state.kinds}>", chunks, [t, np.int64(count), 0, expected, *betas[2:]])
    ENGINE.lamb(list(zip(p, m, v, strict=True)), expected, ADAPTED, 1e-6, 1.5, DECAYS, RATES)
    state.check()


@pytest.mark.parametrize("kind", ["float", "__half", "double"])
def test_norms_and_clipping(updates: Emulator, kind: str) -> None:
    g = arrays(1, kind)
    t, count, chunks = table(g=g, p=g)
    partial, squares = np.full(chunks, np.nan), np.full(count, np.nan)
    launch(updates, f"squares<{kind}>", chunks, [partial, t, np.int64(count)])
    launch(updates, "sum_blocks", count, [squares, partial, t, np.int64(1)])
    np.testing.assert_allclose(squares, ENGINE.squared_norms(g), rtol=1e-12)
    expected = [a.copy() for a in g]
    for most in (1e6, 3.0, np.nan):
        wide = [a.astype(np.float32) for a in expected] if kind == "__half" else expected
        ENGINE.clip(wide, squares, most)
        launch(updates, f"clip<{kind}>", chunks, [t, np.int64(count), squares, np.int64(count), np.float64(most)])
        for a, b in zip(g, wide, strict=True):
            np.testing.assert_allclose(a, b.astype(a.dtype), rtol=1e-3 if kind == "__half" else 1e-6)
        expected = [a.copy() for a in g]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("bad", [None, np.inf, np.nan])
def test_loss_scaling(updates: Emulator, pair: tuple[str, str], bad: float | None) -> None:
    """Gradients are scaled back; one number that is not finite, and the step changes nothing."""
    kinds, state = ", ".join(pair), State(*pair)
    if bad is not None:
        state.g[3][-1] = bad
    out, flag = [np.full_like(a, 99) for a in state.p], np.zeros(1)
    t, count, chunks = table(p=out, g=state.g)
    launch(updates, f"unscale<{kinds}>", chunks, [flag, t, np.int64(count), np.float64(0.25)])
    assert flag[0] == (bad is not None)
    for a, b in zip(out, state.g, strict=True):
        np.testing.assert_array_equal(a, b.astype(a.dtype) / 4)
    before = [a.copy() for a in state.p]
    t, count, chunks = table(p=state.p, g=out, m=state.m, v=state.v)
    kinds = f"{pair[0]}, {pair[0]}"
    launch(updates, f"adam<{kinds}>", chunks, [t, np.int64(count), flag, *(np.float64(x) for x in (0.9, 0.99, 1e-6))])
    changed = any((a != b).any() for a, b in zip(state.p, before, strict=True))
    assert changed == (bad is None)


def test_beyond_the_limit_of_32_bits() -> None:
    module = Emulator("updates.cu", names(), defines={"EMULATED_INT_LIMIT": 10000})
    state = State("float", "float")
    test_adam(module, state)
    test_norms_and_clipping(module, "float")
