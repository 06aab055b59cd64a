"""What ranks send and receive in a move: pairs match, and every needed element comes from exactly one place."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.layout.exchange import allreduce_volume, exchange, volume
from lbpar.layout.grid import Grid
from lbpar.layout.runs import box_size
from lbpar.layout.transition import Move, accumulate, transition
from tests.util.layouts import random_layout, random_shape
from tests.util.run import cut


def random_moves(seed: int, count: int = 12) -> list[Move]:
    rng = np.random.default_rng(seed)
    moves: list[Move] = []
    for _ in range(count):
        grid = Grid.of(int(rng.choice([1, 2, 3, 4, 5, 6, 8, 12])))
        shape = random_shape(rng)
        at = float(rng.choice([0.0, 0.4]))
        src = random_layout(shape, grid, rng, partial=True, at=at)
        dst = random_layout(shape, grid, rng, ghosts=True, at=at)
        moves += transition(src, dst)
        moves += accumulate(random_layout(shape, grid, rng, ghosts=True))
    return moves


@pytest.mark.parametrize("seed", range(25))
def test_sends_and_receives_match(seed: int) -> None:
    for move in random_moves(seed):
        if move.kind == "allreduce":
            continue
        plans = {r: exchange(move, r) for r in range(move.src.grid.size)}
        tensor = np.arange(np.prod(move.src.shape)).reshape(move.src.shape)
        sent = {}
        for r, plan in plans.items():
            block = cut(move.src.box(r), tensor)
            for piece in plan.sends:
                part = block[_outer(piece.index, block.shape)]
                assert part.size == piece.size == np.prod(piece.shape) > 0 and piece.peer != r
                sent[r, piece.peer] = part
            assert [p.peer for p in plan.sends] == sorted(p.peer for p in plan.sends)
        arrivals = 0
        for r, plan in plans.items():
            out = cut(move.dst.box(r), tensor)
            for piece in plan.recvs:
                want = out[_outer(piece.index, out.shape)]
                np.testing.assert_array_equal(sent[piece.peer, r].ravel(), want.ravel(), err_msg=str(move))
                arrivals += 1
        assert arrivals == len(sent), f"{move}: something is sent that nobody receives"


@pytest.mark.parametrize("seed", range(25))
def test_needed_is_kept_plus_received_once(seed: int) -> None:
    for move in random_moves(100 + seed):
        if move.kind in ("allreduce", "reduce_scatter", "accumulate"):
            continue
        for r in range(move.src.grid.size):
            plan = exchange(move, r)
            filled = np.zeros(plan.shape, int)
            if plan.keep is not None:
                filled[_outer(plan.keep[1], plan.shape)] += 1
            for piece in plan.recvs:
                filled[_outer(piece.index, plan.shape)] += 1
            assert (filled == 1).all(), f"{move} rank {r}"


@pytest.mark.parametrize("seed", range(25))
def test_volume_is_what_is_sent(seed: int) -> None:
    for move in random_moves(200 + seed):
        for r in range(move.src.grid.size):
            v, members = volume(move, r), move.src.grid.group(move.axes, r)
            if move.kind == "slice":
                assert (v.messages, v.elements) == (0, 0)
            elif move.kind == "allreduce":
                n, p, i = box_size(move.src.box(r)), len(members), members.index(r)
                own = n // p + (i < n % p)
                messages = 2 * (p - 1) if move.src.holds(r) else 0
                assert (v.messages, v.elements) == (messages, n - own + (p - 1) * own)
            elif move.kind == "allgather":
                assert v.elements == box_size(move.src.box(r)) * (len(members) - 1)
            else:
                plan = exchange(move, r)
                assert (v.messages, v.elements) == (len(plan.sends), sum(p.size for p in plan.sends))
        if move.kind in ("halo", "p2p", "alltoall"):  # what is received, rank by rank, is needed minus held
            held = [box_size(move.dst.box(r)) for r in range(move.src.grid.size)]
            kept = [_kept(move, r) for r in range(move.src.grid.size)]
            sent = sum(volume(move, r).elements for r in range(move.src.grid.size))
            assert sent == sum(held) - sum(kept)


def _kept(move: Move, rank: int) -> int:
    mine = np.zeros(move.src.shape, bool)
    mine[
        np.ix_(
            *(
                np.concatenate([np.arange(*x) for x in runs]) if runs else np.empty(0, int)
                for runs in move.src.box(rank)
            )
        )
    ] = True
    return int(cut(move.dst.box(rank), mine).sum())


def _outer(index: tuple, shape: tuple[int, ...]) -> tuple:
    return np.ix_(*(np.arange(n)[i] for i, n in zip(index, shape, strict=True)))


@pytest.mark.parametrize(("elements", "members"), [(10, 1), (10, 2), (10, 3), (2, 5), (0, 3), (12, 4)])
def test_members_of_an_allreduce_together_send_everything_twice_to_all_others(elements: int, members: int) -> None:
    """Reduce-scatter and allgather: each element crosses 2 (p - 1) times; the first member, with the largest piece, sends most."""
    parts = [allreduce_volume(elements, members, m) for m in range(members)]
    assert sum(p.elements for p in parts) == 2 * (members - 1) * elements
    assert {p.messages for p in parts} == {2 * (members - 1)}
    assert max(p.elements for p in parts) == allreduce_volume(elements, members).elements
