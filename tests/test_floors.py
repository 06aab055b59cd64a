"""The floors of the house, read from the sources: a room imports only from rooms below it.

The import-linter contract in setup.cfg says the same; this one needs nothing installed and also sees imports that are
hidden inside functions.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "lbpar"
FLOORS = [
    *["errors", "text", "random", "config", "graph", "models", "layout", "program", "cost", "solver", "papers"],
    *["engine", "transport", "runtime", "data", "checkpoint", "calibrate", "plan", "train"],
]
PLANNING = ["errors", "text", "random", "config", "graph", "models", "layout", "program", "cost", "solver", "papers"]
FORBIDDEN = {
    **{room: {"mpi4py", "cupy"} for room in PLANNING},
    "plan": {"mpi4py", "cupy", *(f"lbpar.{room}" for room in ["engine", "transport", "runtime", "data", "calibrate"])},
    "solver": {
        "mpi4py",
        "cupy",
        *(f"lbpar.{room}" for room in ["config", "graph", "models", "layout", "program", "cost"]),
    },
    "engine": {
        "mpi4py",
        *(f"lbpar.{room}" for room in ["graph", "models", "layout", "program", "cost", "solver", "papers"]),
    },
    "transport": {f"lbpar.{room}" for room in ["graph", "models", "program", "cost", "solver", "papers", "engine"]},
    "data": {
        f"lbpar.{room}" for room in ["graph", "models", "program", "cost", "solver", "papers", "engine", "runtime"]
    },
}

# Buffers of transports come from the device that an engine computes on.
ALLOWED = {"transport": {"lbpar.engine.device"}}


MOST_LINES = 4500
"""Of a room; one that has grown beyond is two."""
FEWER = {"train": 2500}
APART = ["data/augment", "data/formats", "data/made", "data/patches", "engine/cupy", "engine/host", "engine/onednn"]
"""Rooms inside a room, which are counted by themselves."""


def imports(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, ``from lbpar import x`` counted as ``lbpar.x``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full (from lbpar.room.module import name)"
            found |= {f"lbpar.{a.name}" for a in node.names} if node.module == "lbpar" else {node.module or ""}
    return found


def files(room: str) -> list[Path]:
    single = ROOT / f"{room}.py"
    # Where a program starts, every room may be entered.
    return [single] if single.is_file() else sorted(p for p in (ROOT / room).rglob("*.py") if p.name != "__main__.py")


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("room", FLOORS)
def test_room_imports_only_from_lower_floors(room: str) -> None:
    higher = {f"lbpar.{r}" for r in [*FLOORS[FLOORS.index(room) + 1 :], "study", "verify", "selftest", "api", "cli"]}
    for path in files(room):
        for name in imports(path) - ALLOWED.get(room, set()):
            wrong = [p for p in higher | FORBIDDEN.get(room, set()) if inside(name, p)]
            assert not wrong, f"{path.relative_to(ROOT.parent)} imports {name}, which {room} may not know"


def test_no_room_is_too_large() -> None:
    sizes = {
        f"{p.relative_to(ROOT)}": sum(len(f.read_text(encoding="utf-8").splitlines()) for f in p.rglob("*.py"))
        for p in [*(p for p in ROOT.iterdir() if p.is_dir()), *(ROOT / a for a in APART)]
    }
    for room in APART:
        sizes[room.partition("/")[0]] -= sizes[room]
    large = {room: lines for room, lines in sizes.items() if lines >= FEWER.get(room, MOST_LINES)}
    assert not large, "more lines than a room may have: make it say less, or find what in it is a room of its own"


def test_rooms_import_from_the_defining_module() -> None:
    """Package roots are for users; inside the library they are the main source of import cycles."""
    roots = {f"lbpar.{p.parent.name}" for p in ROOT.glob("*/__init__.py")}
    for path in ROOT.rglob("*.py"):
        if path.name != "__init__.py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.module in roots:
                    for alias in node.names:
                        module = ROOT.parent.joinpath(*node.module.split("."), alias.name)
                        known = module.with_suffix(".py").is_file() or module.is_dir()
                        assert known, f"{path}:{node.lineno}: import {alias.name} from the module that defines it"


def test_the_walk_sees_hidden_imports(tmp_path: Path) -> None:
    source = tmp_path / "a.py"
    source.write_text(
        "def f():\n    import mpi4py.MPI\n    from lbpar.solver.search import best\n    from lbpar import cost\n"
    )
    assert imports(source) == {"mpi4py.MPI", "lbpar.solver.search", "lbpar.cost"}


def test_no_two_modules_import_each_other() -> None:
    """Directly or through others, imports inside functions included."""
    names = {
        ".".join(p.with_suffix("").relative_to(ROOT.parent).parts).removesuffix(".__init__"): p
        for p in ROOT.rglob("*.py")
    }
    graph = {n: {i for i in imports(p) if i in names and i != n} for n, p in names.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"imports go round: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for other in graph[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in names:
        visit(name, ())


TESTED = ["layout", "program", "cost", "solver", "plan", "runtime"]


@pytest.mark.parametrize("room", TESTED)
def test_every_module_has_a_file_of_tests(room: str) -> None:
    """``runtime/trace.py``: ``tests/runtime/test_trace.py``, or several, ``test_trace_*.py``; ``optim/clip.py``: ``test_optim_clip.py``."""
    modules = [p.relative_to(ROOT / room).with_suffix("") for p in files(room) if p.name != "__init__.py"]
    present = {p.stem for p in (ROOT.parent / "tests" / room).glob("test_*.py")}
    for module in modules:
        wanted = "_".join(["test", *module.parts])
        found = any(name == wanted or name.startswith(f"{wanted}_") for name in present)
        assert found, f"{room}/{module}.py: write tests/{room}/{wanted}.py"
