"""Stationary-X, -Y and -W: volumes against a simulation that moves the blocks and counts, and which one wins."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.errors import ConfigError
from lbpar.papers import dryden
from lbpar.papers.collectives import Link


class Counter:
    """Collectives over lists of blocks, one per member; counts the words that member 0 sends."""

    def __init__(self):
        self.words = 0

    def allgather(self, parts):
        self.words += parts[0].size * (len(parts) - 1)
        return np.concatenate(parts, axis=1)

    def reduce_scatter(self, parts):
        pieces = np.split(sum(parts), len(parts), axis=1)
        self.words += sum(p.size for p in pieces[1:])
        return pieces


def step(x, w, dy, gc, gf):
    """Stationary-W on gc x gf members for a 1x1 convolution x (m, C) w (C, F); X is gf = 1 and Y is gc = 1.

    Member (i, j) holds w[channel block i, filter block j]; its share of x and y is block i * gf + j of x's and
    block j * gc + i of y's channels, so that neighbours along either direction hold adjoining blocks.
    """
    count = Counter()
    members = [(i, j) for i in range(gc) for j in range(gf)]
    g = gc * gf
    xs = dict(zip(members, np.split(x, g, axis=1), strict=True))
    dys = {(i, j): np.split(dy, g, axis=1)[j * gc + i] for i, j in members}
    ws = {(i, j): np.split(np.split(w, gc, axis=0)[i], gf, axis=1)[j] for i, j in members}

    def along(table, axis, operation):
        """Run ``operation`` over the members that differ along ``axis``; count member (0, 0)'s group only."""
        out = {}
        for fixed in range(gc if axis == 1 else gf):
            group = [(fixed, k) if axis == 1 else (k, fixed) for k in range(gf if axis == 1 else gc)]
            before = count.words
            result = getattr(count, operation)([table[m] for m in group])
            if fixed:
                count.words = before
            out.update({m: result if operation == "allgather" else result[k] for k, m in enumerate(group)})
        return out

    wide_x = along(xs, 1, "allgather")
    y = along({m: wide_x[m] @ ws[m] for m in members}, 0, "reduce_scatter")
    wide_dy = along(dys, 0, "allgather")
    dw = {m: wide_x[m].T @ wide_dy[m] for m in members}
    dx = along({m: wide_dy[m] @ ws[m].T for m in members}, 1, "reduce_scatter")
    whole_y = np.concatenate([y[i, j] for j in range(gf) for i in range(gc)], axis=1)
    whole_dx = np.concatenate([dx[m] for m in members], axis=1)
    whole_dw = np.block([[dw[i, j] for j in range(gf)] for i in range(gc)])
    return whole_y, whole_dx, whole_dw, count.words


@pytest.mark.parametrize(("gc", "gf"), [(1, 1), (4, 1), (1, 4), (2, 2), (3, 4), (4, 3)])
def test_volumes_equal_a_simulation_that_gives_the_serial_result(gc, gf):
    rng = np.random.default_rng(gc * 10 + gf)
    samples, spatial, channels, filters = 3, 4, 24, 36
    x = rng.normal(size=(samples * spatial, channels))
    w = rng.normal(size=(channels, filters))
    dy = rng.normal(size=(samples * spatial, filters))
    y, dx, dw, words = step(x, w, dy, gc, gf)
    np.testing.assert_allclose(y, x @ w)
    np.testing.assert_allclose(dx, dy @ w.T)
    np.testing.assert_allclose(dw, x.T @ dy)
    conv = dryden.Conv(samples, channels, filters, spatial, spatial, 1)
    assert dryden.volume_w(conv, gc, gf) == pytest.approx(words)
    if gf == 1:
        assert dryden.volume_x(conv, gc) == pytest.approx(words)
    if gc == 1:
        assert dryden.volume_y(conv, gf) == pytest.approx(words)


def test_who_wins():
    shrinking = dryden.Conv(4, 64, 32, 56 * 56, 28 * 28, 9)
    growing = dryden.Conv(4, 64, 256, 28 * 28, 28 * 28, 1)
    level = dryden.Conv(4, 256, 256, 14 * 14, 14 * 14, 9)
    assert dryden.best_choice(shrinking, 4).variant == "X"
    assert dryden.best_choice(growing, 4).variant == "Y"
    best = dryden.best_choice(level, 16)
    assert (best.variant, best.channel_groups, best.filter_groups) == ("W", 4, 4)
    # For equal sizes V_W with G_C = G_F falls like 1 / sqrt(G) while X and Y approach 2 S.
    ratio = dryden.volume_w(level, 16, 16) / dryden.volume_w(level, 4, 4)
    assert ratio == pytest.approx((15 / 16 / 16) / (3 / 4 / 4))
    assert {c.variant for c in dryden.choices(level, 2)} == {"X", "Y"}


def test_segmented_allreduce_is_g_times_smaller_and_has_fewer_members():
    conv = dryden.Conv(4, 64, 128, 49, 49, 9)
    data = dryden.volume_allreduce(conv, 32, 1)
    assert data == pytest.approx(2 * 31 / 32 * 64 * 128 * 9)
    assert dryden.volume_allreduce(conv, 32, 8) == pytest.approx(2 * 3 / 4 * 64 * 128 * 9 / 8)
    assert dryden.volume_allreduce(conv, 8, 8) == 0
    with pytest.raises(ConfigError, match="groups of 3 among 32"):
        dryden.volume_allreduce(conv, 32, 3)


def test_seconds_and_buffers():
    conv = dryden.Conv(2, 8, 16, 9, 9, 1)
    x, y, w = list(dryden.choices(conv, 4))
    assert dryden.extra_words(conv, x) == conv.output_words
    assert dryden.extra_words(conv, y) == conv.input_words
    assert dryden.extra_words(conv, w) == conv.input_words / 2 + conv.output_words / 2
    for choice in (x, y, w):
        bandwidth = dryden.seconds(conv, choice, 8, Link(0.0, 1.0, "ring"))
        assert bandwidth == pytest.approx(choice.words + dryden.volume_allreduce(conv, 8, 4))
    assert dryden.seconds(conv, w, 8, Link(1.0, 0.0, "ring")) == pytest.approx(4 * 1 + 2 * 1)
    assert dryden.seconds(conv, x, 8, Link(1.0, 0.0, "ring")) == pytest.approx(2 * 3 + 2 * 1)
