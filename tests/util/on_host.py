"""An engine of a device that takes and gives NumPy arrays, so that tests written for host memory run on it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from lbpar.engine.base import Engine

HOST = {"index", "divisors"}
"""Arguments that are arrays of the host for every engine."""


class OnHost:
    """Copies what a call is given to the device, and what it returns or changed back.

    Where nothing of this matters, attributes are those of the engine.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.engine, name)
        if not callable(value) or name not in _CALLS:
            return value
        return self._call(name, value)

    def from_host(self, a: np.ndarray) -> np.ndarray:
        return self.engine.to_host(self.engine.from_host(a))

    def to_host(self, a: np.ndarray) -> np.ndarray:
        return a

    def _call(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(method).parameters)

        def call(*args: Any, **kwargs: Any) -> Any:
            given: list[tuple[np.ndarray, Any]] = []

            def there(x: Any) -> Any:
                if isinstance(x, np.ndarray):
                    same = [d for a, d in given if a is x]
                    given.append((x, same[0] if same else self.engine.from_host(x.copy())))
                    return given[-1][1]
                return type(x)(map(there, x)) if isinstance(x, list | tuple) else x

            moved = [a if n in HOST else there(a) for n, a in zip(names, args, strict=False)]
            result = method(*moved, **{n: a if n in HOST else there(a) for n, a in kwargs.items()})

            def back(x: Any) -> Any:
                if isinstance(x, tuple):
                    return tuple(map(back, x))
                if not hasattr(x, "dtype"):
                    return x
                same = [a for a, d in given if d is x]
                return same[0] if same else self.engine.to_host(x)

            for a, d in given:
                value = self.engine.to_host(d)
                if value.tobytes() != a.tobytes():
                    a[...] = value
            return back(result)

        return call


_CALLS = {n for n in dir(Engine) if not n.startswith("_")} - {"running", "record", "wait", "mark", "elapsed"}
