"""docs/run-file.md is what the types say."""

from __future__ import annotations

import re
from pathlib import Path

from lbpar.config.reference import render
from lbpar.config.run_file import RunConfig, parse_run
from lbpar.config.section import Section

PAGE = Path(__file__).parents[2] / "docs" / "run-file.md"


def _all_sections(cls: type[Section]) -> list[type[Section]]:
    """Sections of run files and plan files; machine files have a page of their own, networks make sections as they load."""
    found = [s for c in cls.__subclasses__() for s in [c, *_all_sections(c)]]
    others = ("lbpar.config.machine_file",)
    return [s for s in found if s.__module__.startswith("lbpar.config.") and s.__module__ not in others]


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), (
        "run `python -m lbpar.config.reference > docs/run-file.md` and commit the page"
    )


def test_every_field_is_described() -> None:
    page = render()
    for section in _all_sections(Section):
        for name, field in section.model_fields.items():
            if name in ("op", "name") and field.description is None:
                continue  # the choice itself, shown as a heading
            assert field.description, f"{section.__name__}.{name} has no description"
            if not section.__name__.startswith("_") and section is not RunConfig:
                assert f"| `{field.alias or name}` |" in page, f"{section.__name__}.{name} is not in the page"


def test_example_loads() -> None:
    example = re.search(r"```yaml\n(.*?)```", render(), re.DOTALL)
    assert example
    assert parse_run(example[1]).train.batch == 128
