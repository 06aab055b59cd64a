"""How tests are shared out among the processes of ``pytest -n 2 --dist loadfile``."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests stay together, and those of all kernels: the last of them looks at what the others have run."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder = "tests/cuda/"
            return folder if nodeid.startswith(folder) else super()._split_scope(nodeid)

    return ByFile(config, log)
