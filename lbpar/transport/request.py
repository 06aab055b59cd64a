"""An operation that was started: what waits for its end and holds its buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from lbpar.engine.device import HOST, Device, Event


class Request(ABC):
    """An operation that was started; holds on to its buffers until it is waited for.

    Parameters
    ----------
    device : Device
        Of the buffers.
    keep : Any
        Buffers that the transfer reads and writes.
    result : Any
        What `wait` returns.
    """

    def __init__(self, device: Device, keep: Any, result: Any) -> None:
        self._device, self._keep, self._result = device, keep, result
        self._waited = False

    def wait(self) -> Any:
        """Finish the operation, as far as the device's queue is concerned, and return its result. Later calls return the
        same result."""
        if not self._waited:
            self._device.wait(self._finish())
            self._waited, self._keep = True, None
        return self._result

    @abstractmethod
    def test(self) -> bool:
        """Make progress without blocking; True once ``wait`` would return at once."""

    @abstractmethod
    def _finish(self) -> Event:
        """Block as long as the host must; returns the event that ends the transfer, None if that has happened."""


class Done(Request):
    """A request that was complete when it was made."""

    def __init__(self, result: Any) -> None:
        super().__init__(HOST, None, result)

    def test(self) -> bool:
        return True

    def _finish(self) -> Event:
        return None
