"""Memory of gradients that travel in one message: kernels write them where they are sent from."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from lbpar.engine.base import Array, Engine
from lbpar.program.steps import Program, StartMany

#: Kernels that take ``out``, a place for the first array that they write.
PLACED = (
    "conv_backward_weights",
    "conv_backward_weights_bias",
    "conv_transpose_backward_weights",
    "linear_backward_weights",
)


class Buckets:
    """One flat array per message of several gradients, made when the first of them is, given away when it starts.

    Parameters
    ----------
    program : Program
        Its `StartMany` steps say which gradients travel together, and in which order.
    engine : Engine
        Makes the arrays.
    rank : int
        Whose blocks they are.
    """

    def __init__(self, program: Program, engine: Engine, rank: int) -> None:
        self._engine = engine
        self._places: dict[str, tuple[str, slice, tuple[int, ...]]] = {}
        self._sizes: dict[str, int] = {}
        self._dtypes: dict[str, str | None] = {}
        self._flats: dict[str, Array] = {}
        self._views: dict[str, Array] = {}  # of places that kernels were given
        for step in program.steps:
            if isinstance(step, StartMany):
                at = 0
                for s in step.starts:
                    shape = s.move.src.local_shape(rank)
                    self._places[s.src] = (step.tag, slice(at, at + prod(shape)), shape)
                    at += prod(shape)
                self._sizes[step.tag] = at
                self._dtypes[step.tag] = program.buffers[step.starts[0].src].dtype

    def forget(self) -> None:
        """Drop what a step that was left early has left."""
        self._flats.clear()
        self._views.clear()

    def __contains__(self, buffer: str) -> bool:
        """Whether a buffer travels with others and is not empty."""
        return buffer in self._places and 0 not in self._places[buffer][2]

    def place(self, buffer: str) -> Array:
        """Where a buffer will be sent from."""
        tag, part, shape = self._places[buffer]
        view = self._views[buffer] = self._flat(tag)[part].reshape(shape)
        return view

    def take(self, step: StartMany, arrays: Mapping[str, Array]) -> Array:
        """The message, with what was written elsewhere copied into it."""
        flat = self._flat(step.tag)
        del self._flats[step.tag]
        for s in step.starts:
            array, (_, part, shape) = arrays[s.src], self._places[s.src]
            if array.size and array is not self._views.pop(s.src, None):
                self._engine.copy(array, out=flat[part].reshape(shape))
        return flat

    def _flat(self, tag: str) -> Array:
        flat = self._flats.get(tag)
        if flat is None:
            flat = self._flats[tag] = self._engine.empty((self._sizes[tag],), self._dtypes[tag])
        return flat
