"""The methods of the engine `cupy` on NumPy arrays, their kernels run by the emulation: what they launch, without streams or a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from lbpar.engine.cupy.lines import Lines
from lbpar.engine.cupy.names import GROUPS
from lbpar.engine.cupy.tiles import Card
from tests.cuda.emulator import Emulator


class OnEmulation(Lines):
    """Arrays are NumPy's, of exactly their size, so that sanitizers see what lies outside; they hold NaN before they are written.

    Parameters
    ----------
    dtype : type of parameters
    blocks : most blocks of a launch
    """

    def __init__(self, dtype: Any = np.float64, blocks: int = 2) -> None:
        self.dtype = self.activations = np.dtype(dtype)
        self._card, self._uploads = Card(processors=2), {}
        self.kernels: Any = SimpleNamespace(
            launch=self._launch, blocks=lambda work, threads=256: min(-(-work // threads), blocks)
        )
        self.modules = dict[tuple[str, str], Emulator]()

    def empty(self, shape: Sequence[int], dtype: Any = None) -> Any:
        kind = np.dtype(self.dtype if dtype is None else dtype)
        return np.full(shape, 99 if kind.kind in "iu" else np.nan, kind)

    def zeros(self, shape: Sequence[int], dtype: Any = None) -> Any:
        return np.zeros(shape, self.dtype if dtype is None else dtype)

    def copy(self, a: Any, dtype: Any = None, out: Any = None) -> Any:
        return np.array(a, dtype, order="C")

    def from_host(self, a: Any) -> Any:
        return a

    def use(self, file: str, module: Emulator) -> None:
        """Take the kernels of a file from a module."""
        self.modules |= {(file, name): module for name in module.names}

    def _launch(
        self, file: str, name: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int = 0
    ) -> None:
        if 0 in grid:
            return
        if (file, name) not in self.modules:
            self.use(file, Emulator(file, next(g for g in GROUPS[file] if name in g)))
        module = self.modules[file, name]
        module.launch(name, grid, block, [_argument(a) for a in args], shared_bytes=shared)


def as_launched(check: Callable[[tuple[str, OnEmulation]], Any], **options: Any) -> None:
    """Run a check of float32, and once more with no other kernels than it launched, built with options of `Emulator`."""
    right, other = OnEmulation(np.float32), OnEmulation(np.float32)
    check(("float", right))
    for file in {file for file, _ in right.modules}:
        names = {name for (of, name), module in right.modules.items() if of == file and name in module.launched}
        other.use(file, Emulator(file, sorted(names), **options))
    check(("float", other))


def _argument(a: Any) -> Any:
    if a is None:
        return 0
    kinds = {bool: np.bool_, int: np.int64, float: np.float64}
    return kinds[type(a)](a) if type(a) in kinds else a
