"""`cupy.cuda` of the pretended device."""

from __future__ import annotations

from types import SimpleNamespace, TracebackType
from typing import Any, Self

from tests.util.fake_cupy import nccl, runtime
from tests.util.fake_cupy.memory import Memory, MemoryPointer, MemoryPool, alloc_pinned_memory
from tests.util.fake_cupy.streams import Event, Stream, get_current_stream, get_elapsed_time

__all__ = [
    "Device", "Event", "Memory", "MemoryPointer", "MemoryPool", "Stream", "alloc_pinned_memory", "get_current_stream", "get_elapsed_time",
    "memory", "nccl", "runtime",
]  # fmt: skip


class _OutOfMemoryError(MemoryError):
    def __init__(self, size: int, total: int) -> None:
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes).")


memory = SimpleNamespace(OutOfMemoryError=_OutOfMemoryError)


class Device:
    """One device."""

    def __init__(self, device: int | None = None) -> None:
        self.id = runtime.getDevice() if device is None else device
        self._before: list[int] = []

    @property
    def compute_capability(self) -> str:
        properties = runtime.getDeviceProperties(self.id)
        return f"{properties['major']}{properties['minor']}"

    @property
    def pci_bus_id(self) -> str:
        return f"0000:{self.id:02x}:00.0"

    @property
    def mem_info(self) -> tuple[int, int]:
        return runtime.memGetInfo()

    def use(self) -> None:
        runtime.setDevice(self.id)

    def __enter__(self) -> Self:
        self._before.append(runtime.getDevice())
        self.use()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> Any:
        runtime.setDevice(self._before.pop())
