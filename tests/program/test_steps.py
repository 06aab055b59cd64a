"""What steps read, write and send."""

from __future__ import annotations

from lbpar.graph.loops import Kernel
from lbpar.layout.grid import Grid
from lbpar.layout.layout import Layout
from lbpar.layout.transition import Move
from lbpar.program.plan import Plan
from lbpar.program.steps import (
    Accumulate,
    Compute,
    Free,
    Program,
    Start,
    StartMany,
    Sum,
    Update,
    Wait,
    reads,
    writes,
)
from tests.program.nets import network

GRID = Grid((2,))
WHOLE = Layout.replicated(GRID, (4,))
STARTS = tuple(Start(Move("allreduce", WHOLE, WHOLE, (0,)), f"{n}:part", f"{n}:sum", "fc", "backward") for n in "abc")


def test_reads_and_writes() -> None:
    kernel = Kernel("add", (), (), ())
    table = [
        (Compute("x", kernel, ("a", "b"), ("c",), "forward"), ("a", "b"), ("c",)),
        (STARTS[0], ("a:part",), ()),  # what arrives is there when it was waited for
        (StartMany(STARTS, "backward"), ("a:part", "b:part", "c:part"), ()),
        (Wait("a:sum", "backward"), (), ("a:sum",)),
        (Sum(("a", "b"), "c", "backward"), ("a", "b"), ("c",)),
        (Accumulate("w", "w:grad", last=True), ("w:grad",), ("w:grad",)),  # in place
        (Update(("w", "v"), ("w:grad", "v:grad")), ("w:grad", "v:grad"), ()),
        (Free(("a", "b")), (), ()),
    ]
    for step, read, written in table:
        assert (reads(step), writes(step)) == (read, written), step


def test_moves_are_those_of_single_and_of_merged_starts_in_order() -> None:
    first, *rest = STARTS
    steps = (first, Wait("a:sum", "backward"), StartMany(tuple(rest), "backward"), Update((), ()))
    program = Program(network(), Plan(GRID), 8, steps, {}, {}, {})
    assert program.moves == STARTS


def test_a_message_of_several_arrays_is_counted_under_the_first_one() -> None:
    assert StartMany(STARTS, "backward").tag == "a:sum +2"
