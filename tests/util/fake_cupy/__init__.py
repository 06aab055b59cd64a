"""A stand-in for CuPy that shows what is missing; `install` puts it in CuPy's place.

Arrays refuse to become NumPy arrays. Memory holds NaN before it is written, and again once nobody refers to it, in the order of its
stream. Nothing runs before the host asks for a value; then what it depends on runs in an order that a seed chooses, as late
as recorded events allow. Kernels are those of ``kernels/``, run by the emulation; what they may only read is watched. A wait that
is left out, memory let go too early or a read by the host that does not wait shows as a wrong number or an error.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from lbpar.engine.cupy.library import warn_once
from lbpar.engine.cupy.tiles import TILES, Card
from lbpar.transport.virtual import VirtualWorld
from tests.util.fake_cupy import cuda, nccl, runtime
from tests.util.fake_cupy.kernels import RawKernel, RawModule
from tests.util.fake_cupy.machine import Machine, machine, new_machine
from tests.util.fake_cupy.memory import asnumpy, ndarray

__all__ = ["RawKernel", "RawModule", "asnumpy", "between", "cuda", "few_kernels", "install", "ndarray"]
__version__ = "14.2.0"


def between(world: VirtualWorld) -> None:
    """Let a rank of a virtual world that waits for its device hand over to the others."""

    def others(condition: Callable[[], bool]) -> bool:
        threads, name = world._threads, threading.current_thread().name
        return threads is not None and threads.wait_until(int(name.removeprefix("rank ")), condition)

    machine().scheduler.others = others


def few_kernels(patch: Any, itemsize: int) -> None:
    """Let engines made from now on cut all products alike, so that few kernels are compiled."""
    from lbpar.engine.cupy import products

    patch.setattr(products, "Card", partial(Card, tiles=TILES[-1:], alignment=itemsize))


def install(patch: Any, devices: int = 1, cudnn: Any = None, cublas: Any = None) -> Machine:
    """Let ``import cupy`` give the stand-in, with machines that hold nothing yet; undone by pytest's ``monkeypatch``.

    ``cudnn`` stands for the module of that name, ``cublas`` for CuPy's own; both are missing by default. As CuPy's, the latter is there only for
    those who ask its package for it: that loads the library first.
    """
    warn_once.cache_clear()
    libs = ModuleType("cupy_backends.cuda.libs")
    if cublas is not None:
        libs.__dict__["cublas"] = cublas
    names: dict[str, Any] = {
        "cudnn": cudnn,
        "cupy": sys.modules[__name__],
        "cupy_backends.cuda.libs": libs,
        "cupy.cuda": cuda,
        "cupy.cuda.runtime": runtime,
        "cupy.cuda.nccl": nccl,
    }
    for name, module in names.items():
        patch.setitem(sys.modules, name, module)
    patch.delitem(sys.modules, "cupy_backends.cuda.libs.cublas", raising=False)
    return new_machine(devices)
