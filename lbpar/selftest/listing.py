"""Which kernels a program launches, found without a device: an engine that only writes down their names."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from lbpar.engine.base import Engine
from lbpar.engine.cupy.engine import CupyEngine, half
from lbpar.engine.cupy.tiles import Card, Job, Math
from lbpar.engine.device import Array


class _Placed(np.ndarray):
    """An array that says where it begins as one of the device does. Its memory is never touched, and so takes no room."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)


class Listing(CupyEngine):
    """Takes calls as the engines of some cards would, by their own kernels. Arrays hold anything; those of the host are zero.

    Attributes
    ----------
    launched : list of dict
        For each card: the most bytes of shared memory that a kernel asked for, by file and name.
    """

    place, capacity = "nowhere", None

    def __init__(
        self, cards: Sequence[Card], dtype: npt.DTypeLike = np.float32, tf32: bool = False, compute: str | None = None
    ) -> None:
        Engine.__init__(self, dtype)
        self.cards, self._card = cards, cards[0]
        self.launched: list[dict[tuple[str, str], int]] = [{} for _ in cards]
        self._listed = self.launched
        self.kernels: Any = SimpleNamespace(launch=self._launch, blocks=lambda work, threads=256: -(-work // threads))
        self._jobs, self._uploads, self._ndarray, self._autotune, self.tf32 = {}, {}, _Placed, False, tf32
        if compute is not None:
            self.activations = half(compute)

    def _launch(
        self, file: str, name: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int = 0
    ) -> None:
        for listed in self._listed if 0 not in grid else ():
            listed[file, name] = max(shared, listed.get((file, name), 0))

    def _multiply(self, key: Hashable, make: Callable[[Math, Card], Job], **arrays: Array | None) -> None:
        """As each of the cards cuts the product."""
        for number, card in enumerate(self.cards):
            self._card, self._listed = card, [self.launched[number]]
            super()._multiply((number, key), make, **arrays)
        self._listed, self._card = self.launched, self.cards[0]

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike | None = None) -> Array:
        kind = self.dtype if dtype is None else np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        whole = np.empty(nbytes + 16, np.uint8)
        start = -whole.ctypes.data % 16  # as every array of a device
        made: Array = np.ndarray(tuple(shape), kind, whole[start : start + nbytes]).view(_Placed)
        return made

    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike | None = None) -> Array:
        return self.empty(shape, dtype)

    def from_host(self, a: npt.NDArray[Any]) -> Array:
        return self.empty(a.shape, a.dtype)

    def fetch(self, a: Array) -> Callable[[], npt.NDArray[Any]]:
        return lambda: np.zeros(a.shape, np.float32 if a.dtype.itemsize == 2 else a.dtype)

    def buffer(self, size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.zeros(size, dtype)

    def copy_out(self, a: Array, buffer: npt.NDArray[Any], after: Any) -> Callable[[], None]:
        return lambda: None

    def copy_in(self, buffer: npt.NDArray[Any], out: Array) -> None:
        return None

    def release(self, buffer: npt.NDArray[Any], after: Any = None) -> None:
        return None

    def _copy(self, to: int, source: int, nbytes: int, kind: int) -> None:
        return None

    @property
    def _runtime(self) -> Any:
        return SimpleNamespace(memcpyDeviceToDevice=3)

    @_runtime.setter
    def _runtime(self, _: Any) -> None:
        raise AttributeError("there is no device")

    def record(self) -> None:
        return None

    def wait(self, event: Any) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def mark(self) -> float:
        return 0.0

    def elapsed(self, start: float, end: float) -> float:
        return 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        yield
