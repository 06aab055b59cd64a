"""Where the CUDA C++ sources are: `kernels/` of the repository, `lbpar/kernels/` of an installed wheel.

Text only. Compiling them is the business of the engine that runs them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from lbpar.errors import EngineError


@cache
def folder() -> Path:
    """Return the folder that holds ``*.cu`` and ``*.cuh``; pass it to the compiler as an include path.

    Raises
    ------
    EngineError
        The installation has no kernel sources.
    """
    here = Path(__file__).resolve().parent
    for place in (here / "kernels", here.parent / "kernels"):
        if (place / "common.cuh").is_file():
            return place
    raise EngineError(
        f"kernels: no kernel sources in {here / 'kernels'} or {here.parent / 'kernels'}, expected at least common.cuh. "
        "This installation of lbpar is incomplete: install it again from a wheel or a clone."
    )


def names() -> list[str]:
    """Names of all kernel source files, sorted."""
    return sorted(p.name for p in folder().iterdir() if p.suffix in (".cu", ".cuh"))


def read(name: str) -> str:
    """Return the text of one kernel source file.

    Parameters
    ----------
    name : str
        File name, such as ``"common.cuh"``.

    Raises
    ------
    EngineError
        There is no such file.
    """
    path = folder() / name
    if not path.is_file():
        raise EngineError(f"kernels: no source {name!r} in {folder()}, expected one of {', '.join(names())}.")
    return path.read_text(encoding="utf-8")
