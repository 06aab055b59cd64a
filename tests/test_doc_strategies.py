"""The strategy pages say what lbpar does: same headings, and the collectives of each example as the program has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lbpar.verify.command import main as verify
from tests.util.doc_moves import MOVES, YAML, expected

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(p for p in (DOCS / "strategies").glob("*.md") if p.name != "index.md")
HEADINGS = [
    "Layouts",
    "Forward",
    "Backward-data",
    "Backward-weights",
    "Collectives and their groups",
    "Cost",
    "Memory",
    "When to use",
    "Example",
]


def test_every_strategy_has_a_page_and_a_row_in_the_index() -> None:
    names = [
        "sample",
        "spatial",
        "filter",
        "channel",
        "stationary-x",
        "stationary-y",
        "stationary-w",
        "1.5d",
        "layer-wise",
        "stages",
    ]
    assert {p.stem for p in PAGES} == set(names)
    index = (DOCS / "strategies" / "index.md").read_text(encoding="utf-8")
    assert all(f"]({name}.md)" in index for name in names)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_page_has_the_common_headings(page: Path) -> None:
    found = re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert [h for h in found if h != "Source"] == HEADINGS


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_collectives_of_the_example(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    (shown,) = MOVES.findall(text)
    assert shown == expected(text), f"write it anew: python -m tests.util.doc_moves {page}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_example_computes_what_one_process_computes(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = YAML.search(page.read_text(encoding="utf-8"))
    assert found
    (tmp_path / "run.yaml").write_text(found[1], encoding="utf-8")
    code = verify(["--config", str(tmp_path / "run.yaml"), "--procs", "4"])
    assert code == 0, capsys.readouterr().out


@pytest.mark.parametrize("page", [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
