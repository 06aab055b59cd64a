"""docs/networks.md is what the builders say."""

from __future__ import annotations

from pathlib import Path

from lbpar.models.reference import render
from lbpar.models.registry import MODELS, option_types

PAGE = Path(__file__).parents[2] / "docs" / "networks.md"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), (
        "run `python -m lbpar.models.reference > docs/networks.md` and commit the page"
    )


def test_every_network_and_option_is_described() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in MODELS:
        assert f"| `{name}` |" in page
        for option in option_types(name).model_fields:
            assert f"| `{option}` |" in page
    assert "|  |" not in page  # no meaning is empty
