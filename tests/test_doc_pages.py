"""The README, the how-tos and the API page as a reader would follow them: every file saved, every command typed, every output compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.util.doc_pages import agrees, mpirun, needs_mpi, parts, try_page
from tests.util.registries import restored

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [
    pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if needs_mpi(text) else [])
    for page in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
    if parts(text := page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("page", PAGES)
def test_page_works(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if needs_mpi(text) and mpirun() is None:
        pytest.skip("no mpirun")
    if "import torch" in text:
        pytest.importorskip("torch")
    with restored():
        tried = list(try_page(text, tmp_path))
    for command, got in tried:
        assert agrees(command.output, got), f"$ {command.line}\nexpected\n{command.output}\ngot\n{got}"


def test_every_page_is_linked_from_the_index() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    strategies = (DOCS / "strategies" / "index.md").read_text(encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).as_posix()
        linked = f"]({page.name})" in strategies if page.parent.name == "strategies" and page.stem != "index" else None
        assert name == "index.md" or linked or f"]({name})" in index, f"docs/{name} is not linked from docs/index.md"


def test_a_wrong_output_and_a_failing_command_are_noticed(tmp_path: Path) -> None:
    page = "```python\n# hello.py\nprint('hello')\n```\n\n```console\n$ python hello.py\ngoodbye\n```\n"
    [(command, got)] = try_page(page, tmp_path)
    assert got == "hello\n" and not agrees(command.output, got)
    with pytest.raises(AssertionError, match="no such run file"):
        list(try_page("```console\n$ python -m lbpar.verify --config nowhere.yaml\n```\n", tmp_path))
