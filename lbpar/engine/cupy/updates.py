"""Steps of optimizers and norms, for all parameters in one launch (``kernels/updates.cu``); dropout (``kernels/dropout.cu``)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from lbpar.engine.cupy.kernels import THREADS, address, index_type, kind_of
from lbpar.engine.cupy.lines import Lines
from lbpar.engine.cupy.norms import F64
from lbpar.engine.device import Array, Float64Array
from lbpar.engine.rules import Blocks

FILE = "updates.cu"
CHUNK = 8192
"""Elements that one block of threads works on."""

DIMS = 5
_BLOCK = np.dtype(
    [(name, "u8") for name in ("p", "m", "v", "copy", "g")]
    + [(name, "i8") for name in ("size", "first_chunk", "adapted")]
    + [(name, "f8") for name in ("keep", "decay", "rate")]
)
_PLACES = np.dtype([("of", "u8", DIMS), ("extent", "i8", DIMS)])


class Updates(Lines):
    """The part of the engine that changes parameters."""

    def squared_norms(self, arrays: Sequence[Array]) -> Float64Array:
        out = self.empty((len(arrays),), F64)
        if arrays:
            table, chunks = self._table({"g": arrays})
            partial = self.empty((chunks,), F64)
            self._step(f"squares<{kind_of(arrays[0].dtype)}>", chunks, partial, table, len(arrays))
            self._step("sum_blocks", len(arrays), out, partial, table, 1)
        return out

    def unscale(self, grads: Sequence[Array], inverse: float) -> Float64Array:
        bad = self.zeros((1,), F64)
        if grads:
            table, chunks = self._table({"p": grads, "g": grads})
            kind = kind_of(grads[0].dtype)
            self._step(f"unscale<{kind}, {kind}>", chunks, bad, table, len(grads), float(inverse))
        return bad

    def clip(self, grads: Sequence[Array], squares: Array, max_norm: float) -> None:
        if grads:
            table, chunks = self._table({"p": grads})
            args = (table, len(grads), self._dense(squares), squares.size, float(max_norm))
            self._step(f"clip<{kind_of(grads[0].dtype)}>", chunks, *args)

    def sgd(
        self, blocks: Blocks, momentum: float, nesterov: bool, decays: Sequence[float], rates: Sequence[float]
    ) -> None:
        names = ("p", "g", "v") if blocks and len(blocks[0]) == 3 else ("p", "g")
        self._rule("sgd", blocks, names, (float(momentum), int(nesterov)), decay=decays, rate=rates)

    def adam(
        self,
        blocks: Blocks,
        betas: tuple[float, float],
        eps: float,
        keeps: Sequence[float],
        decays: Sequence[float],
        rates: Sequence[float],
    ) -> None:
        args = (*map(float, betas), float(eps))
        self._rule("adam", blocks, ("p", "g", "m", "v"), args, keep=keeps, decay=decays, rate=rates)

    def lars(
        self,
        blocks: Blocks,
        squares: Array,
        adapted: Sequence[bool],
        momentum: float,
        decays: Sequence[float],
        rates: Sequence[float],
        trust: float,
        eps: float,
    ) -> None:
        args = (self._as(squares, F64), float(momentum), float(trust), float(eps))
        self._rule("lars", blocks, ("p", "g", "v"), args, adapted=adapted, decay=decays, rate=rates)

    def lamb_moments(
        self, blocks: Blocks, betas: tuple[float, float], eps: float, scale: float, decays: Sequence[float]
    ) -> Float64Array:
        squares = self.empty((len(blocks), 2), F64)
        if blocks:
            table, chunks = self._table(_columns(blocks, ("p", "g", "m", "v")), decay=decays)
            partial, count = self.empty((chunks, 2), F64), len(blocks)
            args = (partial, table, count, None, *map(float, betas), float(eps), float(scale))
            self._step(f"lamb_moments<{_kinds(blocks)}>", chunks, *args)
            self._step("sum_blocks", count, squares, partial, table, 2)
        return squares

    def lamb(
        self,
        blocks: Blocks,
        squares: Array,
        adapted: Sequence[bool],
        eps: float,
        scale: float,
        decays: Sequence[float],
        rates: Sequence[float],
    ) -> None:
        args = (self._as(squares, F64), float(eps), float(scale))
        self._rule("lamb", blocks, ("p", "m", "v"), args, adapted=adapted, decay=decays, rate=rates)

    def _rule(
        self, name: str, blocks: Blocks, names: Sequence[str], args: Sequence[Any], **numbers: Sequence[Any]
    ) -> None:
        if blocks:
            table, chunks = self._table(_columns(blocks, names), **numbers)
            self._step(f"{name}<{_kinds(blocks)}>", chunks, table, len(blocks), None, *args)

    def _table(self, arrays: dict[str, Sequence[Array]], **numbers: Sequence[Any]) -> tuple[Array, int]:
        """The table of arrays on the device, and the number of their chunks."""
        first = next(iter(arrays.values()))
        table = np.zeros(len(first) + 1, _BLOCK)
        for name, column in arrays.items():
            table[name][:-1] = [address(a) for a in column]
        for name, values in numbers.items():
            table[name][:-1] = values
        table["size"][:-1] = [a.size for a in first]
        starts = list(accumulate((-(-a.size // CHUNK) for a in first), initial=0))
        table["first_chunk"] = starts
        return self.from_host(table.view(np.uint8)), starts[-1]

    def _step(self, name: str, blocks: int, *args: Any) -> None:
        self.kernels.launch(FILE, name, (blocks,), (THREADS,), args)

    def dropout(self, x: Array, rate: float, key: int | Array, index: Sequence[npt.NDArray[np.int64]]) -> Array:
        if rate >= 1:
            return self.zeros(x.shape, x.dtype)
        y, places, first = self._like(x), np.zeros((), _PLACES), DIMS - x.ndim
        places["extent"] = (1,) * first + x.shape
        places["of"][first:] = [address(self._upload(part)) for part in index]
        name = f"dropout<{kind_of(x.dtype)}, {index_type(x.size)}>"
        value, at = (0, key) if isinstance(key, self._ndarray) else (key, None)
        args = (y, self._dense(x), float(rate), np.uint64(value), at, places)
        self.kernels.launch("dropout.cu", name, (self.kernels.blocks(-(-x.size // 4)),), (THREADS,), args)
        return y


def _columns(blocks: Blocks, names: Sequence[str]) -> dict[str, Sequence[Array]]:
    return dict(zip(names, zip(*blocks, strict=True), strict=True))


def _kinds(blocks: Blocks) -> str:
    """Types of parameters and of gradients."""
    return f"{kind_of(blocks[0][0].dtype)}, {kind_of(blocks[0][1].dtype)}"
