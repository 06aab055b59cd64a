"""Losses, whole and with the classes split into uneven and empty blocks, against PyTorch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.engine.oracles import close, sums_of

CLASSES = 7
SPLITS = {"whole": (0, 7), "two blocks": (0, 4, 7), "three, one empty": (0, 1, 1, 7)}
POSITIONS = {"samples": (5,), "pixels": (2, 3, 4), "voxels": (2, 2, 3, 2)}

splits = pytest.mark.parametrize("cuts", SPLITS.values(), ids=SPLITS.keys())
positions = pytest.mark.parametrize("shape", POSITIONS.values(), ids=POSITIONS.keys())


class SplitSoftmax:
    """Runs the steps that ranks run on their blocks of classes, with the sums between them."""

    def __init__(self, engine, x, target, cuts):
        self.target = target
        self.blocks = [(np.ascontiguousarray(x[..., a:b]), a) for a, b in itertools.pairwise(cuts)]
        self.m = np.max([engine.softmax_max(x) for x, _ in self.blocks], axis=0)
        self.sums = sum(engine.softmax_sums(x, self.m, target, start) for x, start in self.blocks)

    def join(self, step):
        return np.concatenate([step(x, start) for x, start in self.blocks], axis=-1)


def rank(engine, split):
    return sum(engine.softmax_rank(x, split.m, split.sums, split.target, start) for x, start in split.blocks)


def logits(torch, rng, shape, dtype):
    x = (5 * rng.standard_normal((*shape, CLASSES))).astype(dtype)
    target = rng.integers(0, CLASSES, shape)
    return x, target, torch.tensor(x).double().requires_grad_()


@splits
@positions
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(engine, dtype, rng, cuts, shape, smoothing):
    torch = pytest.importorskip("torch")
    x, target, tx = logits(torch, rng, shape, dtype)
    cross_entropy = torch.nn.functional.cross_entropy
    loss = cross_entropy(tx.reshape(-1, CLASSES), torch.tensor(target.reshape(-1)), label_smoothing=smoothing)
    loss.backward()

    split, scale = SplitSoftmax(engine, x, target, cuts), 1 / target.size
    assert split.m.dtype == dtype
    got = engine.cross_entropy_loss(split.sums, smoothing, CLASSES, scale)
    close(np.asarray(got), loss.item(), np.float64, 10 * sums_of(engine, dtype))
    dx = split.join(
        lambda x, start: engine.cross_entropy_backward(x, split.m, split.sums, target, start, smoothing, CLASSES, scale)
    )
    close(dx, tx.grad.numpy(), dtype)


@splits
def test_rank_of_the_target(engine, dtype, rng, cuts):
    x = np.round(rng.standard_normal((40, CLASSES))).astype(dtype)  # many ties
    target = rng.integers(0, CLASSES, 40)
    split = SplitSoftmax(engine, x, target, cuts)
    order = np.argsort(-x, axis=1, kind="stable")  # ties in the order of the classes, as argmax has them
    np.testing.assert_array_equal(rank(engine, split), np.argmax(order == target[:, None], axis=1))


@splits
def test_a_target_among_equals_is_hit_only_if_it_is_the_first(engine, dtype, cuts):
    split = SplitSoftmax(engine, np.full((CLASSES, CLASSES), 0.25, dtype), np.arange(CLASSES), cuts)
    np.testing.assert_array_equal(rank(engine, split), np.arange(CLASSES))


@splits
def test_nan_is_never_a_hit(engine, dtype, cuts):
    x = np.zeros((5, CLASSES), dtype)
    x[0, 0], x[1, 6], x[2], x[3, 2] = np.nan, np.nan, np.nan, np.inf
    with np.errstate(invalid="ignore"):
        got = rank(engine, SplitSoftmax(engine, x, np.array([0, 0, 0, 2, 0]), cuts))
    np.testing.assert_array_equal(got, [np.inf] * 4 + [0])


def test_large_and_infinite_logits(engine, dtype):
    x = np.array([[1000, 0, -1000], [5, -np.inf, 5]], dtype=dtype)
    target = np.array([0, 2])
    split = SplitSoftmax(engine, x, target, (0, 3))
    np.testing.assert_allclose(
        engine.cross_entropy_loss(split.sums, 0.0, 3, 1.0), np.log(2), rtol=1e-12 * sums_of(engine, dtype)
    )
    dx = engine.cross_entropy_backward(x, split.m, split.sums, target, 0, 0.0, 3, 1.0)
    np.testing.assert_allclose(dx, [[0, 0, 0], [0.5, 0, -0.5]], atol=1e-12)


def test_no_positions(engine, dtype):
    x, target = np.empty((0, 3), dtype=dtype), np.empty(0, dtype=np.int64)
    split = SplitSoftmax(engine, x, target, (0, 2, 3))
    close(np.asarray(engine.cross_entropy_loss(split.sums, 0.1, 3, 0.5)), 0.0, np.float64)
    close(engine.cross_entropy_backward(x, split.m, split.sums, target, 0, 0.1, 3, 0.5), np.zeros((0, 3)), dtype)
    close(engine.dice_sums(x, split.m, split.sums, target, 0), np.zeros((3, 3)), np.float64)


def test_small_target_types(engine, dtype, rng):
    x = rng.standard_normal((4, 3)).astype(dtype)
    target = np.array([0, 2, 1, 2], dtype=np.uint8)
    whole = SplitSoftmax(engine, x, target, (0, 3)).sums
    close(SplitSoftmax(engine, x, target, (0, 2, 3)).sums, whole, np.float64, sums_of(engine, dtype))


@splits
@positions
def test_dice(engine, dtype, rng, cuts, shape):
    torch = pytest.importorskip("torch")
    x, target, tx = logits(torch, rng, shape, dtype)
    p = torch.softmax(tx.reshape(-1, CLASSES), -1)
    t = torch.nn.functional.one_hot(torch.tensor(target.reshape(-1)), CLASSES).double()
    eps = 0.5
    loss = (1 - (2 * (p * t).sum(0) + eps) / (p.sum(0) + t.sum(0) + eps)).mean()
    loss.backward()

    split = SplitSoftmax(engine, x, target, cuts)
    m, sums = split.m, split.sums
    dsums = split.join(lambda x, start: engine.dice_sums(x, m, sums, target, start))
    want = np.stack([(p * t).sum(0).detach(), p.sum(0).detach(), t.sum(0)])
    close(dsums, want, np.float64, 10 * sums_of(engine, dtype))
    parts = [dsums[:, a:b] for a, b in itertools.pairwise(cuts)]
    total = sum(engine.dice_loss(d, eps, CLASSES) for d in parts)
    close(np.asarray(total), loss.item(), np.float64, 10 * sums_of(engine, dtype))
    halves = [
        engine.dice_backward(x, m, sums, target, start, d, eps, CLASSES)
        for (x, start), d in zip(split.blocks, parts, strict=True)
    ]
    inner = sum(i for _, i in halves)
    dx = [engine.dice_backward_data(x, m, sums, g, inner) for (x, _), (g, _) in zip(split.blocks, halves, strict=True)]
    close(np.concatenate(dx, -1), tx.grad.numpy(), dtype)


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 4, 1), (0, 3)])
def test_mean_square_error(engine, dtype, rng, shape):
    x, t = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    difference = x.astype(np.float64) - t
    close(np.asarray(engine.mse_loss(x, t, 0.3)), 0.3 * (difference**2).sum(), np.float64, sums_of(engine, dtype))
    close(engine.mse_backward(x, t, np.float64(0.3)), 0.6 * difference, dtype)


def test_binary_cross_entropy(engine, dtype, rng):
    torch = pytest.importorskip("torch")
    x, t = (30 * rng.standard_normal((6, 5))).astype(dtype), rng.random((6, 5)).astype(dtype)
    x[0, :2] = 2000, -2000
    tx = torch.tensor(x).double().requires_grad_()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(tx, torch.tensor(t).double())
    loss.backward()
    close(np.asarray(engine.bce_loss(x, t, 1 / 30)), loss.item(), np.float64, sums_of(engine, dtype))
    close(engine.bce_backward(x, t, np.float64(1 / 30)), tx.grad.numpy(), dtype)


@pytest.mark.parametrize("kind", ["l1", "huber"])
def test_losses_of_the_error(engine, dtype, rng, kind):
    torch = pytest.importorskip("torch")
    x, t = ((3 * rng.standard_normal((6, 5))).astype(dtype) for _ in range(2))
    tx = torch.tensor(x).double().requires_grad_()
    loss = getattr(torch.nn.functional, f"{kind}_loss")(tx, torch.tensor(t).double())
    loss.backward()
    close(np.asarray(engine.error_loss(x, t, kind, 1 / 30)), loss.item(), np.float64, sums_of(engine, dtype))
    close(engine.error_backward(x, t, kind, 1 / 30), tx.grad.numpy(), dtype)
