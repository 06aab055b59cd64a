"""The Python lines of the documentation run and print what the pages say; its run files are valid."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from lbpar.config.run_file import parse_run

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
CODE = [p for p in PAGES if re.search(r"^ *>>> ", p.read_text(encoding="utf-8"), re.MULTILINE)]
RUN_FILES = [
    pytest.param(text, id=f"{page.stem}-{i}")
    for page in PAGES
    for i, text in enumerate(
        re.findall(r"^```yaml\n(model:.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    )
]


@pytest.mark.parametrize("page", CODE, ids=lambda p: p.name)
def test_python_of_page(page: Path) -> None:
    done = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS, encoding="utf-8")
    assert done.attempted and not done.failed


@pytest.mark.parametrize("text", RUN_FILES)
def test_run_file_of_page(text: str) -> None:
    assert parse_run(text).train.batch > 0
