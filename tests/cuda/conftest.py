"""Which files of tests run whole, for the test that looks at all of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

PARTLY = pytest.StashKey[set[str]]()
"""Files of which some tests are left out, but for those that are marked exhaustive."""


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("exhaustive") is None:
            item.config.stash.setdefault(PARTLY, set()).add(item.path.name)
