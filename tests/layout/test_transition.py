"""Transitions: each kind where it is expected, values against a serial construction, and adjoints by dot products.

The adjoint test uses the plain inner product: the sum over *all* ranks of local dot products, every rank's block being a
component of its own. In it allreduce is its own adjoint, allgather is that of reduce-scatter, and so on.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lbpar.errors import LayoutError
from lbpar.graph.loops import Window
from lbpar.layout.exchange import exchange, volume
from lbpar.layout.grid import Grid
from lbpar.layout.layout import Dim, Layout
from lbpar.layout.transition import Move, accumulate, transition
from tests.util.layouts import perform, random_layout, random_shape, scatter, where
from tests.util.run import cut, join

G = Grid((2, 3))
R8, S8, T8 = Dim.whole(8), Dim(8, (8,), ((0,),)), Dim(8, (8,), ((1,),))
GHOSTS = replace(S8, window=Window(3, pad=1))
U8 = replace(T8, window=Window(3, pad=1))
FIRST, LAST = Dim.only((0,), 0), Dim.only((0,), 1)  # on axis 0
TABLE = {
    "partial-to-replicate": (Layout(G, (R8,), (0,)), Layout(G, (R8,)), ["allreduce"], (0,)),
    "partial-to-shard": (Layout(G, (R8,), (0,)), Layout(G, (S8,)), ["reduce_scatter"], (0,)),
    "shard-to-replicate": (Layout(G, (S8,)), Layout(G, (R8,)), ["allgather"], (0,)),
    "shard-to-other-dimension": (Layout(G, (S8, R8)), Layout(G, (R8, S8)), ["alltoall"], (0,)),
    "replicate-to-shard": (Layout(G, (R8,)), Layout(G, (S8,)), ["slice"], ()),
    "shard-to-ghosts": (Layout(G, (S8,)), Layout(G, (GHOSTS,)), ["halo"], (0,)),
    "shard-to-other-axis": (Layout(G, (S8,)), Layout(G, (T8,)), ["p2p"], (0,)),
    "replicate-to-ghosts": (Layout(G, (R8,)), Layout(G, (GHOSTS,)), ["slice"], ()),
    "partial-to-shard-on-a-free-axis": (Layout(G, (R8,), (0,)), Layout(G, (T8,)), ["slice", "allreduce"], None),
    "nothing": (Layout(G, (S8, T8)), Layout(G, (S8, T8)), [], ()),
    "at-to-at": (Layout(G, (T8,), at=FIRST), Layout(G, (T8,), at=LAST), ["p2p"], (0,)),
    "at-to-replicate": (Layout(G, (T8,), at=LAST), Layout(G, (T8,)), ["allgather"], (0,)),
    "replicate-to-at": (Layout(G, (R8,)), Layout(G, (T8,), at=LAST), ["slice"], ()),
    "shard-to-at": (Layout(G, (S8,)), Layout(G, (R8,), at=LAST), ["p2p"], (0,)),
    "at-to-shard": (Layout(G, (R8,), at=LAST), Layout(G, (S8,)), ["p2p"], (0,)),
    "partial-to-at": (Layout(G, (R8,), (0,)), Layout(G, (R8,), at=LAST), ["reduce_scatter"], (0,)),
    "partial-at-to-at": (Layout(G, (R8,), (1,), at=FIRST), Layout(G, (T8,), at=LAST), ["reduce_scatter", "p2p"], None),
    "at-to-slice-at": (Layout(G, (R8,), at=FIRST), Layout(G, (T8,), at=LAST), ["slice", "p2p"], None),
    "at-to-whole-at": (Layout(G, (T8,), at=FIRST), Layout(G, (R8,), at=LAST), ["p2p", "allgather"], None),
    "at-to-ghosts-at": (Layout(G, (T8,), at=FIRST), Layout(G, (U8,), at=LAST), ["p2p", "halo"], None),
    "at-to-other-axis": (Layout(G, (R8,), at=LAST), Layout(G, (R8,), at=Dim.only((1,), 2)), ["p2p"], (0,)),
}


@pytest.mark.parametrize(("src", "dst", "kinds", "axes"), TABLE.values(), ids=TABLE.keys())
def test_kind_of_move(src: Layout, dst: Layout, kinds: list[str], axes: tuple[int, ...] | None) -> None:
    moves = transition(src, dst)
    assert [m.kind for m in moves] == kinds
    assert axes is None or all(m.axes == axes for m in moves)


def test_minor_axes_are_gathered_among_themselves() -> None:
    """Only the axes that change role communicate."""
    fine = Layout(G, (Dim(8, (8,), ((1, 0),)),))
    (move,) = transition(fine, Layout(G, (T8,)))
    assert (move.kind, move.axes) == ("allgather", (0,))
    (move,) = transition(Layout(G, (T8,)), fine)
    assert move.kind == "slice"


@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
def test_sums_are_scattered_over_free_axes_as_well(axes: tuple[int, ...]) -> None:
    """Replicas along an idle axis each sum only the part that they will hold: no p times the traffic (openxla/xla #47945)."""
    (move,) = transition(Layout(G, (Dim.whole(12),), (1,)), Layout(G, (Dim(12, (12,), (axes,)),)))
    assert (move.kind, move.axes) == ("reduce_scatter", (1,))
    assert {volume(move, r).elements for r in range(6)} == {2 * 12 // 6}


def test_sums_have_no_ghosts() -> None:
    """The next reader of the sum may want other ghosts, or none."""
    moves = transition(Layout(G, (R8,), (1,)), Layout(G, (GHOSTS,)))
    assert [m.kind for m in moves] == ["slice", "allreduce", "halo"]
    assert not moves[1].dst.has_ghosts


def test_sums_are_made_never_undone() -> None:
    with pytest.raises(LayoutError, match="cannot be undone"):
        transition(Layout(G, (R8,)), Layout(G, (R8,), (0,)))


def test_other_shape() -> None:
    with pytest.raises(LayoutError, match="global shapes"):
        transition(Layout(G, (R8,)), Layout(G, (Dim.whole(9),)))


def random_pair(rng: np.random.Generator, partial: bool = True) -> tuple[Layout, Layout]:
    grid = Grid.of(int(rng.choice([2, 3, 4, 5, 6, 8, 12])))
    shape = random_shape(rng)
    at = float(rng.choice([0.0, 0.4]))
    src = random_layout(shape, grid, rng, partial=partial, at=at)
    dst = random_layout(shape, grid, rng, ghosts=True, at=at)
    left = tuple(a for a in src.partial if a not in dst.shard_axes and rng.random() < 0.3)
    return src, replace(dst, partial=left, reduce=src.reduce)


@pytest.mark.parametrize("seed", range(60))
def test_values_of_random_transitions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(5):
        src, dst = random_pair(rng)
        tensor = rng.integers(-99, 99, src.shape).astype(float)
        blocks = scatter(src, tensor, rng)
        out = perform(transition(src, dst), blocks)
        if not dst.partial:
            for r, block in enumerate(out):
                np.testing.assert_array_equal(block, cut(dst.box(r), tensor), err_msg=f"{src} -> {dst}")
        elif not dst.has_ghosts:
            np.testing.assert_array_equal(join(dst, out), tensor, err_msg=f"{src} -> {dst}")


@pytest.mark.parametrize("seed", range(20))
def test_accumulate_adds_every_ghost_to_its_owner(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(5):
        grid = Grid.of(int(rng.choice([2, 3, 4, 6, 12])))
        layout = random_layout(random_shape(rng), grid, rng, ghosts=True)
        shards = grid.ways(layout.shard_axes)
        blocks = [rng.integers(-9, 9, layout.local_shape(r)).astype(float) for r in range(grid.size)]
        for r in range(grid.size):  # replicas hold the same
            blocks[r] = blocks[min(grid.group(tuple(a for a in grid.axes if a not in layout.shard_axes), r))]
        want = np.zeros(layout.shape)
        for r, block in enumerate(blocks):
            part = np.zeros(layout.shape)
            _put(part, layout, r, block)
            want += part * shards / grid.size
        moves = accumulate(layout)
        out = perform(moves, blocks)
        target = moves[-1].dst if moves else layout
        for r, block in enumerate(out):
            np.testing.assert_allclose(block, cut(target.box(r), want), atol=1e-12, err_msg=str(layout))


def _put(array: np.ndarray, layout: Layout, rank: int, block: np.ndarray) -> None:
    index = where(layout, rank)
    array[index] = block.reshape(array[index].shape)


def adjoint(move: Move, blocks: list[np.ndarray]) -> list[np.ndarray]:
    """The transpose of one move, itself built from moves.

    allreduce: itself. reduce_scatter: allgather. allgather: reduce_scatter. alltoall: the alltoall back. halo: accumulate.
    accumulate: halo. slice: pad with zeros. p2p: every piece goes back and is added.
    """
    src, dst = move.src, move.dst
    if move.kind == "allreduce":
        return perform([replace(move, src=replace(src, reduce="sum"))], blocks)
    if move.kind == "reduce_scatter":
        return perform([Move("allgather", move.axes, dst, replace(src, partial=dst.partial))], blocks)
    if move.kind == "allgather":
        open_axes = tuple(sorted({*src.partial, *move.axes}))
        return perform([Move("reduce_scatter", move.axes, replace(dst, partial=open_axes), src)], blocks)
    if move.kind == "alltoall" and not dst.has_ghosts:
        return perform([Move("alltoall", move.axes, dst, src)], blocks)
    return perform([Move("accumulate", move.axes, dst, src)], blocks)


def dot(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return sum(float((x * y).sum()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_adjoint(seed: int) -> None:
    """<A x, y> = <x, A' y> for whole transitions, with independent random values on every rank, and move by move."""
    rng = np.random.default_rng(seed)
    for _ in range(6):
        src, dst = random_pair(rng)
        src, dst = replace(src, reduce="sum"), replace(dst, reduce="sum")
        moves = transition(src, dst)
        x = [rng.standard_normal(src.local_shape(r)) for r in range(src.grid.size)]
        y = [rng.standard_normal(dst.local_shape(r)) for r in range(src.grid.size)]
        forward, back = perform(moves, x), y
        for move in reversed(moves):
            back = adjoint(move, back)
        scale = max(np.sqrt(dot(forward, forward) * dot(y, y)), np.sqrt(dot(x, x) * dot(back, back)), 1e-30)
        assert abs(dot(forward, y) - dot(x, back)) <= 1e-13 * scale, f"{src} -> {dst}"


def test_the_random_pairs_meet_every_kind() -> None:
    rng = np.random.default_rng(0)
    met = {m.kind for _ in range(300) for m in transition(*random_pair(rng))}
    assert met == {"allreduce", "reduce_scatter", "allgather", "alltoall", "halo", "p2p", "slice"}


@pytest.mark.parametrize("seed", range(10))
def test_adjoint_of_accumulate_is_the_halo_exchange(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(5):
        grid = Grid.of(int(rng.choice([2, 3, 4, 6, 12])))
        ghosted = random_layout(random_shape(rng), grid, rng, ghosts=True)
        if not ghosted.has_ghosts:
            continue
        (move,) = accumulate(ghosted)
        x = [rng.standard_normal(ghosted.local_shape(r)) for r in range(grid.size)]
        y = [rng.standard_normal(ghosted.plain.local_shape(r)) for r in range(grid.size)]
        back = perform([Move("halo", move.axes, move.dst, move.src)], y)
        assert np.isclose(dot(perform([move], x), y), dot(x, back), rtol=1e-12, atol=1e-12)


def test_pairs_of_a_halo_are_neighbours_where_blocks_are_large_enough() -> None:
    """One row from each side, not more: right answers at p times the traffic are wrong too (openxla/xla #47945)."""
    grid = Grid((4,))
    row = Dim(16, (16,), ((0,),))
    (move,) = transition(Layout(grid, (row, R8)), Layout(grid, (replace(row, window=Window(3, pad=1)), R8)))
    assert [volume(move, r).elements for r in range(4)] == [8, 16, 16, 8]
    assert [tuple(p.peer for p in exchange(move, r).sends) for r in range(4)] == [(1,), (0, 2), (1, 3), (2,)]


def test_a_halo_reaches_past_the_neighbour() -> None:
    grid = Grid((5,))
    row = Dim(5, (5,), ((0,),))
    (move,) = transition(Layout(grid, (row,)), Layout(grid, (replace(row, window=Window(5, pad=2)),)))
    assert tuple(p.peer for p in exchange(move, 2).recvs) == (0, 1, 3, 4)
    assert tuple(p.peer for p in exchange(move, 0).recvs) == (1, 2)


def test_an_even_kernel_needs_ghosts_on_one_side_only() -> None:
    """distdl/distdl #173, #178: the halo on the other side is zero wide."""
    grid = Grid((3,))
    row = Dim(12, (12,), ((0,),))
    (move,) = transition(Layout(grid, (row,)), Layout(grid, (replace(row, window=Window(2, pad=0), factors=(12,)),)))
    assert [tuple(p.peer for p in exchange(move, r).recvs) for r in range(3)] == [(1,), (2,), ()]
