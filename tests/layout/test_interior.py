"""The interior and the rims of a window over blocks: every output once, the interior as large as it can be."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.graph.loops import Index, Kernel, Operand, Window
from lbpar.layout.grid import Grid
from lbpar.layout.interior import interior, interior_share, rims
from lbpar.layout.layout import Layout
from lbpar.layout.transition import Move, transition


def halo(rng: np.random.Generator) -> tuple[Move, Window, bool, int] | None:
    """A halo exchange of a vector under a random window, read by outputs or, transposed, by inputs."""
    window = Window(*map(int, rng.integers(1, (6, 4, 3))), int(rng.integers(4)))
    extent, procs = int(rng.integers(1, 24)), int(rng.integers(2, 6))
    outputs = (extent + 2 * window.pad - window.reach - 1) // window.stride + 1
    if outputs < 1:
        return None
    transposed = bool(rng.integers(2))
    inside, loop = (outputs, extent) if transposed else (extent, outputs)
    operand = Operand("x0", (Index(inside, ("H",), window, transposed), Index(3, ("C",))))
    grid = Grid((procs,))
    kernel = Kernel("conv_forward", (("H", loop), ("C", 3)), (operand,), ())
    layout = Layout.of(operand, kernel, grid, {"H": (0,)})
    moves = transition(layout.plain, layout) if layout.has_ghosts else ()
    return (moves[-1], window, transposed, loop) if moves and moves[-1].kind == "halo" else None


def test_every_output_is_computed_once_and_as_many_as_possible_before_ghosts_come() -> None:
    rng = np.random.default_rng(3)
    seen, empty = 0, 0
    while seen < 300:
        found = halo(rng)
        if found is None:
            continue
        move, window, transposed, loop = found
        seen += 1
        count, shares = np.zeros(loop, int), []
        for rank in range(move.src.grid.size):
            inner, channels = interior(move, rank)
            ((lo, hi),) = move.dst.dims[0].parts(move.src.grid, (rank,))
            held = move.src.box(rank)[0] or ((0, 0),)
            hull = window.preimage if transposed else window.image
            hulls = {o: hull(o, o + 1, move.src.shape[0]) for o in range(lo, hi)}
            alone = {o for o, (a, z) in hulls.items() if a == z or (a >= held[0][0] and z <= held[0][1])}
            mine = range(*inner)
            assert alone.issuperset(mine)
            if all(a < z for a, z in hulls.values()):
                assert len(mine) == len(alone)
            empty += not mine
            for (box,) in [(inner,), *rims([inner], [(lo, hi)])] if mine else rims([inner], [(lo, hi)]):
                count[slice(*box)] += 1
            assert channels is None
            shares.append((hi - lo, len(mine)))
        assert (count == 1).all()
        largest = max(shares)[0]
        assert interior_share(move) == pytest.approx(min(m for n, m in shares if n == largest) / largest)
    assert empty > 20


def test_rims_of_a_box_in_three_dimensions() -> None:
    inner, whole = ((0, 2), (2, 6), (1, 5), (3, 9)), ((0, 2), (0, 7), (0, 5), (3, 9))
    boxes = rims(inner, whole)
    assert len(boxes) == 3
    count = np.zeros((2, 7, 5, 9), int)
    for box in [inner, *boxes]:
        count[tuple(slice(*side) for side in box)] += 1
    assert (count[..., 3:] == 1).all() and not count[..., :3].any()
    assert rims(((0, 2), (3, 3)), ((0, 2), (1, 4))) == [((0, 2), (1, 4))]
    assert rims(((0, 0), (0, 4)), ((0, 0), (0, 4))) == []
