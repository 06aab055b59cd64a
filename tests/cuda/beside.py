"""Work of slow tests that goes on beside other tests, on the cores that there are: a test waits for its own alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lbpar.threads import cores


class Beside:
    """Calls of a function, by its arguments, begun in the order of the tests that want them."""

    def __init__(self, function: Callable[..., Any], wanted: Sequence[tuple[Any, ...]]) -> None:
        self._pool = ThreadPoolExecutor(cores())
        self._calls = {args: self._pool.submit(function, *args) for args in wanted}

    def __call__(self, *args: Any) -> Any:
        """The result for some arguments."""
        return self._calls.pop(args).result()

    def end(self) -> None:
        """Forget what has not begun."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def beside(request: pytest.FixtureRequest, function: Callable[..., Any], *names: str) -> Iterator[Beside]:
    """For a fixture of a module: calls for all tests that use it and are going to run, with their parameters ``names``."""
    tests = [i for i in request.session.items if isinstance(i, pytest.Function) and i.module is request.module]
    used = [i.callspec.params for i in tests if request.fixturename in i.fixturenames]
    made = Beside(function, [tuple(params.get(n) for n in names) for params in used])
    yield made
    made.end()
