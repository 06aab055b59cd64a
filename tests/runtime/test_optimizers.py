"""Optimizers against PyTorch in float64, and LARS and LAMB against the papers' formulas written out plainly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lbpar.config import optimizers as config
from lbpar.engine import updates
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.errors import CheckpointError, ConfigError, TrainingError
from lbpar.runtime.optim.base import Optimizer
from lbpar.runtime.optim.clip import clip_by_global_norm
from lbpar.runtime.optim.make import make_optimizer
from lbpar.runtime.optim.norms import ReducedNorms
from lbpar.runtime.optim.rules import LAMB, LARS, SGD, Adam, AdamW

SHAPES = {"conv.weight": (5, 3, 3, 2), "conv.bias": (5,), "norm.weight": (5,), "fc.weight": (7, 4)}
KINDS = {"conv.bias": "bias", "norm.weight": "norm"}
STEPS = 50


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Pieces shorter than the largest parameter, so that every rule is walked in several."""
    monkeypatch.setattr(updates, "CHUNK", 13)


def problem(seed: int = 0):
    """Start weights and STEPS gradients per parameter."""
    rng = np.random.default_rng(seed)
    params = {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}
    grads = [{name: rng.standard_normal(shape) for name, shape in SHAPES.items()} for _ in range(STEPS)]
    return params, grads


def rates() -> np.ndarray:
    return 0.05 * (1 + np.cos(np.arange(STEPS) / 7))


def run(optimizer: Optimizer, params, grads, lrs=None, norms=None):
    params = {name: p.copy() for name, p in params.items()}
    for i, g in enumerate(grads):
        optimizer.step(params, g, None if lrs is None else float(lrs[i]), norms)
    return params


def run_torch(make: Any, params, grads, lrs=None, groups: dict[str, dict[str, float]] | None = None):
    torch = pytest.importorskip("torch")
    tensors = {name: torch.tensor(p, requires_grad=True) for name, p in params.items()}
    settings = groups or {}
    optimizer = make(
        torch, [{"params": [t], **{k: v for k, v in settings.get(name, {}).items()}} for name, t in tensors.items()]
    )
    for i, g in enumerate(grads):
        for name, t in tensors.items():
            t.grad = torch.tensor(g[name])
        if lrs is not None:
            for group in optimizer.param_groups:
                group["lr"] = float(lrs[i])
        optimizer.step()
    return {name: t.detach().numpy() for name, t in tensors.items()}


def assert_same(ours, theirs, rtol=1e-11):
    for name, expected in theirs.items():
        np.testing.assert_allclose(ours[name], expected, rtol=rtol, atol=1e-13, err_msg=name)


CASES = [
    (SGD(0.1), lambda t, ps: t.optim.SGD(ps, 0.1)),
    (SGD(0.1, weight_decay=0.02), lambda t, ps: t.optim.SGD(ps, 0.1, weight_decay=0.02)),
    (SGD(0.1, momentum=0.9), lambda t, ps: t.optim.SGD(ps, 0.1, 0.9)),
    (
        SGD(0.1, momentum=0.9, nesterov=False, weight_decay=0.02),
        lambda t, ps: t.optim.SGD(ps, 0.1, 0.9, weight_decay=0.02),
    ),
    (SGD(0.1, momentum=0.9, nesterov=True), lambda t, ps: t.optim.SGD(ps, 0.1, 0.9, nesterov=True)),
    (
        SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.02),
        lambda t, ps: t.optim.SGD(ps, 0.1, 0.9, weight_decay=0.02, nesterov=True),
    ),
    (Adam(0.01), lambda t, ps: t.optim.Adam(ps, 0.01)),
    (
        Adam(0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.02),
        lambda t, ps: t.optim.Adam(ps, 0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.02),
    ),
    (AdamW(0.01), lambda t, ps: t.optim.AdamW(ps, 0.01)),
    (AdamW(0.01, weight_decay=0.3), lambda t, ps: t.optim.AdamW(ps, 0.01, weight_decay=0.3)),
]


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_equals_pytorch(case, scheduled):
    ours, theirs = CASES[case]
    ours.state, ours.steps = {}, 0
    params, grads = problem()
    lrs = rates() if scheduled else None
    assert_same(run(ours, params, grads, lrs), run_torch(theirs, params, grads, lrs))


def test_kinds_without_decay_equal_pytorchs_parameter_groups():
    params, grads = problem()
    ours = SGD(0.1, momentum=0.9, weight_decay=0.02, kinds=KINDS, no_decay=["norm"])
    theirs = {"norm.weight": {"weight_decay": 0.0}}
    expected = run_torch(lambda t, ps: t.optim.SGD(ps, 0.1, 0.9, weight_decay=0.02), params, grads, groups=theirs)
    assert_same(run(ours, params, grads), expected)


def plain_lars(params, grads, lrs, momentum, decay, trust, unscaled=()):
    """Algorithm 1 of You, Gitman and Ginsburg (2017)."""
    weights = {n: p.copy() for n, p in params.items()}
    velocity = {n: np.zeros_like(p) for n, p in params.items()}
    for lr, step in zip(lrs, grads, strict=True):
        for n, w in weights.items():
            beta = 0.0 if n in unscaled else decay
            local = trust * np.linalg.norm(w) / (np.linalg.norm(step[n]) + beta * np.linalg.norm(w))
            local = 1.0 if n in unscaled else local
            velocity[n] = momentum * velocity[n] + lr * local * (step[n] + beta * w)
            weights[n] = w - velocity[n]
    return weights


def plain_lamb(params, grads, lrs, b1, b2, eps, decay, unscaled=()):
    """Algorithm 2 of You et al. (2020)."""
    weights = {n: p.copy() for n, p in params.items()}
    m = {n: np.zeros_like(p) for n, p in params.items()}
    v = {n: np.zeros_like(p) for n, p in params.items()}
    for t, (lr, step) in enumerate(zip(lrs, grads, strict=True), start=1):
        for n, w in weights.items():
            m[n] = b1 * m[n] + (1 - b1) * step[n]
            v[n] = b2 * v[n] + (1 - b2) * step[n] ** 2
            ratio = (m[n] / (1 - b1**t)) / (np.sqrt(v[n] / (1 - b2**t)) + eps)
            update = ratio + (0.0 if n in unscaled else decay) * w
            scale = 1.0 if n in unscaled else np.linalg.norm(w) / np.linalg.norm(update)
            weights[n] = w - lr * scale * update
    return weights


def test_lars_follows_the_paper():
    params, grads = problem()
    ours = LARS(1.0, momentum=0.9, weight_decay=0.02, trust=0.1, eps=0.0)
    assert_same(run(ours, params, grads, rates()), plain_lars(params, grads, rates(), 0.9, 0.02, 0.1))


def test_lars_leaves_norm_and_bias_unscaled():
    params, grads = problem()
    ours = LARS(1.0, momentum=0.9, weight_decay=0.02, trust=0.1, eps=0.0, kinds=KINDS, no_decay=["norm", "bias"])
    assert_same(run(ours, params, grads, rates()), plain_lars(params, grads, rates(), 0.9, 0.02, 0.1, set(KINDS)))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_follows_the_paper(decay):
    params, grads = problem()
    ours = LAMB(1.0, betas=(0.9, 0.99), eps=1e-6, weight_decay=decay, kinds=KINDS, no_decay=["norm", "bias"])
    expected = plain_lamb(params, grads, rates(), 0.9, 0.99, 1e-6, decay, set(KINDS))
    assert_same(run(ours, params, grads, rates()), expected)


@pytest.mark.parametrize("make", [lambda: LARS(1.0, weight_decay=0.1), lambda: LAMB(1.0, weight_decay=0.1)])
def test_zero_weights_and_gradients_stay_finite(make):
    params = {"a": np.zeros(3), "b": np.ones(3), "empty": np.zeros((0, 4))}
    grads = {"a": np.ones(3), "b": np.zeros(3), "empty": np.zeros((0, 4))}
    optimizer = make()
    for _ in range(3):
        optimizer.step(params, grads)
    assert all(np.isfinite(p).all() for p in params.values())
    assert (params["a"] != 0).all()


class Lockstep:
    """Norms for virtual ranks: what each hands in is known beforehand, because all are stepped on copies first."""

    def __init__(self):
        self.sums: list[np.ndarray] = []
        self.total: np.ndarray | None = None

    def squared(self, names, squares):
        if self.total is None:
            self.sums.append(squares.copy())
            return squares
        return self.total


def cut(arrays, rank):
    """Block of virtual rank 0, 1, 2: the first dimension split unevenly, and one parameter with an empty block."""
    bounds = {5: [0, 2, 4, 5], 7: [0, 3, 7, 7]}
    return {n: a[slice(*bounds[a.shape[0]][rank : rank + 2])].copy() for n, a in arrays.items()}


@pytest.mark.parametrize(
    "make",
    [lambda: LARS(1.0, momentum=0.9, weight_decay=0.02, trust=0.1, eps=0.0), lambda: LAMB(1.0, weight_decay=0.02)],
)
def test_three_blocks_equal_the_whole(make):
    import copy

    params, grads = problem()
    whole = run(make(), params, grads, rates())
    ranks = [(make(), cut(params, r)) for r in range(3)]
    for lr, g in zip(rates(), grads, strict=True):
        norms = Lockstep()
        for r, (optimizer, block) in enumerate(ranks):  # dry run on copies collects the local sums
            copy.deepcopy(optimizer).step(copy.deepcopy(block), cut(g, r), float(lr), norms)
        norms.total = sum(norms.sums)
        for r, (optimizer, block) in enumerate(ranks):
            optimizer.step(block, cut(g, r), float(lr), norms)
    joined = {n: np.concatenate([block[n] for _, block in ranks]) for n in params}
    assert_same(joined, whole, rtol=1e-10)


def test_reduced_norms_count_each_block_once_in_one_reduction():
    names, local = ["split", "copied"], np.array([[1.0, 2.0], [3.0, 4.0]])
    other = np.array([10.0, 20.0, 0.0, 0.0])  # the other rank owns a block of "split" only
    calls = []

    def reduce(buffer):
        calls.append(buffer.copy())
        return buffer + other

    total = ReducedNorms(reduce, {"split", "copied"}, NumpyEngine()).squared(names, local)
    assert len(calls) == 1
    np.testing.assert_array_equal(total, [[11.0, 22.0], [3.0, 4.0]])
    lone = ReducedNorms(reduce, {"split"}, NumpyEngine()).squared(names, np.array([[1.0, 2.0], [np.nan, 4.0]]))
    np.testing.assert_array_equal(lone, [[11.0, 22.0], [0.0, 0.0]])


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_equals_pytorch(max_norm):
    torch = pytest.importorskip("torch")
    _, (grads, *_) = problem()
    tensors = [torch.zeros(g.shape, dtype=torch.float64) for g in grads.values()]
    for t, g in zip(tensors, grads.values(), strict=True):
        t.grad = torch.tensor(g)
    expected = float(torch.nn.utils.clip_grad_norm_(tensors, max_norm))
    assert clip_by_global_norm(grads, max_norm)() == pytest.approx(expected, rel=1e-13)
    for t, g in zip(tensors, grads.values(), strict=True):
        np.testing.assert_allclose(g, t.grad.numpy(), rtol=1e-13)


def test_clipping_accumulates_in_float64_and_names_the_broken_parameter():
    grads = {"a": np.full(100_000, 1e-3, np.float32), "b": np.ones(2, np.float32)}
    expected = np.sqrt(np.sum(grads["a"].astype(np.float64) ** 2) + 2)
    assert clip_by_global_norm(grads, 1e9)() == pytest.approx(expected, rel=1e-13)
    grads["b"][1] = np.nan
    with pytest.raises(TrainingError, match="gradient of b has norm nan"):
        clip_by_global_norm(grads, 1.0)()


@pytest.mark.parametrize(
    "make", [lambda: SGD(0.1, momentum=0.9), lambda: Adam(0.01), lambda: LAMB(0.01), lambda: SGD(0.1)]
)
def test_saved_and_loaded_run_equals_the_uninterrupted_one(make):
    params, grads = problem()
    whole = run(make(), params, grads)
    first, second = make(), make()
    middle = run(first, params, grads[:20])
    saved = {k: v.copy() for k, v in first.state_dict().items()}
    second.load_state_dict(saved, first.counters())
    run(first, middle, grads[20:])  # must not disturb the copy
    kept = {k: v.copy() for k, v in saved.items()}
    result = run(second, middle, grads[20:])
    for key, array in kept.items():
        np.testing.assert_array_equal(saved[key], array)
    for name in whole:
        np.testing.assert_array_equal(result[name], whole[name])


def test_loading_another_optimizers_state_is_refused():
    with pytest.raises(CheckpointError, match="expected slots"):
        SGD(0.1, momentum=0.9).load_state_dict({"w/exp_avg": np.zeros(2)}, {"steps": 1})
    with pytest.raises(CheckpointError, match="lacks exp_avg_sq"):
        Adam().load_state_dict({"w/exp_avg": np.zeros(2)}, {"steps": 1})
    with pytest.raises(CheckpointError, match="lack 'steps'"):
        Adam().load_state_dict({}, {})


def test_float32_stays_float32_and_near_float64():
    params, grads = problem()
    exact = run(Adam(0.01, weight_decay=0.1), params, grads)
    optimizer = Adam(0.01, weight_decay=0.1)
    single = run(
        optimizer,
        {n: p.astype(np.float32) for n, p in params.items()},
        [{n: g.astype(np.float32) for n, g in step.items()} for step in grads],
    )
    assert all(p.dtype == np.float32 for p in single.values())
    assert all(a.dtype == np.float32 for a in optimizer.state_dict().values())
    for name in exact:
        np.testing.assert_allclose(single[name], exact[name], atol=1e-5)


def test_step_leaves_gradients_and_gradientless_parameters_alone():
    for optimizer in (
        SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        Adam(weight_decay=0.1),
        LARS(0.1, weight_decay=0.1),
        LAMB(0.1),
    ):
        params, (grads, *_) = problem()
        before = {n: g.copy() for n, g in grads.items()}
        frozen = params["fc.weight"].copy()
        del grads["fc.weight"]
        optimizer.step(params, grads)
        np.testing.assert_array_equal(params["fc.weight"], frozen)
        for n, g in grads.items():
            np.testing.assert_array_equal(g, before[n])


def test_bad_blocks_are_refused():
    with pytest.raises(TrainingError, match="not C-contiguous"):
        SGD(0.1).step({"w": np.zeros((3, 4)).T}, {"w": np.zeros((4, 3))})
    with pytest.raises(TrainingError, match="expected the parameter's shape"):
        SGD(0.1).step({"w": np.zeros((3, 4))}, {"w": np.zeros((4, 3))})


def test_make_optimizer_leaves_kinds_undecayed():
    section = config.Lars(name="lars", lr=2.0, weight_decay=0.1)
    optimizer = make_optimizer(section, KINDS, no_decay=("norm", "bias"))
    assert isinstance(optimizer, LARS) and optimizer.config is section
    assert [optimizer.decays(p) for p in ("fc.weight", "conv.bias", "norm.weight")] == [True, False, False]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(), "optimizer sgd: lr: missing; it is required"),
        (lambda: SGD(1.0, momentun=0.9), "did you mean 'momentum'"),
        (lambda: SGD(float("nan")), "lr: got nan"),
        (lambda: SGD(1.0, momentum=1.0), "momentum: got 1.0, expected less than 1"),
        (lambda: SGD(1.0, nesterov=True), "momentum above 0"),
        (lambda: Adam(betas=(0.9, 1.5)), r"betas\[1\]: got 1.5"),
        (lambda: LARS(1.0, trust=0.0), "trust: got 0.0"),
    ],
)
def test_options_are_checked_as_in_a_run_file(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_defaults_are_those_of_the_run_file():
    assert Adam().config == config.Adam(name="adam") and AdamW().weight_decay == 0.01
    assert SGD(0.1).slots == () and SGD(0.1, momentum=0.5).slots == ("momentum",) and LAMB().slots == Adam().slots


@pytest.mark.parametrize("config", [config.Sgd, config.Adam, config.AdamW, config.Lars, config.Lamb])
def test_reads_every_optimizer_of_a_run_file(config):
    name = config.model_fields["name"].annotation.__args__[0]
    chosen = config(name=name, lr=0.2, weight_decay=0.3)
    optimizer = make_optimizer(chosen, KINDS, no_decay=("bias",))
    assert (optimizer.name, optimizer.config) == (name, chosen)
