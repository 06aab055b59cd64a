"""`cupy.cuda.runtime` of the pretended device."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tests.util.fake_cupy.machine import CUDARuntimeError, machine
from tests.util.fake_cupy.streams import stream_at

__all__ = ["CUDARuntimeError"]

memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3


def getDeviceCount() -> int:
    machine().check()
    return machine().devices


def getDevice() -> int:
    machine().check()
    return machine().device


def setDevice(device: int) -> None:
    if not 0 <= device < machine().devices:
        raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
    machine().device = device


def driverGetVersion() -> int:
    return 13000


def runtimeGetVersion() -> int:
    return 12090


def memGetInfo() -> tuple[int, int]:
    return machine().memory - machine().held, machine().memory


def deviceGetAttribute(attribute: int, device: int) -> int:
    assert attribute == 20, "the compute mode"
    return 3 if machine().exclusive else 0


def getDeviceProperties(device: int) -> dict[str, Any]:
    major, minor = machine().capability
    return {
        "name": b"Pretended",
        "major": major,
        "minor": minor,
        "multiProcessorCount": 4,
        "sharedMemPerBlockOptin": 232448,
    }


def _span(address: int, nbytes: int, kind: str) -> np.ndarray | None:
    """Bytes of the device or of pinned memory; None for ordinary memory of the host."""
    if type(address) is not int:
        raise TypeError("an integer is required")  # for an address CuPy takes none of NumPy's
    found = machine().find(address, nbytes)
    if kind == "device":
        if found is None or found[0].kind != "device":
            raise CUDARuntimeError("cudaErrorInvalidValue: not an address of the device")
        return found[1]
    if found is not None and found[0].kind == "device":
        raise CUDARuntimeError("cudaErrorInvalidValue: not an address of the host")
    return None if found is None else found[1]


def _host(address: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    """Pinned memory is read and written late; other memory of the host before the call returns, as CUDA does."""
    queue = stream_at(stream).queue
    if not size:
        return
    if kind == memcpyHostToDevice:
        target, source = _span(dst, size, "device"), _span(src, size, "host")
        if source is None:
            stream_at(stream).asked()
            source = _host(src, size).copy()
        queue.put(lambda: np.copyto(target, source))
    elif kind == memcpyDeviceToHost:
        target, source = _span(dst, size, "host"), _span(src, size, "device")
        if target is not None:
            queue.put(lambda: np.copyto(target, source))
        else:
            stream_at(stream).synchronize()
            _host(dst, size)[:] = source
    else:
        target, source = _span(dst, size, "device"), _span(src, size, "device")
        queue.put(lambda: np.copyto(target, source))


def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:
    if size:
        target = _span(ptr, size, "device")
        assert target is not None
        stream_at(stream).queue.put(lambda: target.fill(value))
