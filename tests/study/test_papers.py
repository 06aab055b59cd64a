"""The papers' study: what it writes, and that every published value is met."""

from __future__ import annotations

import json

import pytest

from lbpar.papers.rows import SECTIONS, Row
from lbpar.study.__main__ import main


def test_study_writes_everything_and_agrees(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "papers"
    assert main(["papers", "--out", str(out)]) == 0  # times of this machine do not count
    rows = json.loads((out / "papers.json").read_text())
    assert len(rows) > 200
    assert len({r["id"] for r in rows}) == len(rows)
    assert {"id", "paper", "ours", "relative_error", "tag"} <= set(rows[0])
    text = (out / "index.html").read_text()
    for name in ("gholami-fig6", "gholami-fig8", "optcnn-vgg16", "pase-totals", "dryden-volumes", "paradl-vgg16"):
        assert (out / f"{name}.png").stat().st_size > 5000
        assert f"{name}.png" in text and f"{name}.png" in (out / "index.md").read_text()
    assert {r["id"].split("/")[1] for r in rows if r["fitted"]} == {
        "fig6",
        "fig7",
        "fig8",
        "fig9",
        "fig10",
        "compute",
        "vgg16-4",
    }
    assert "99 published values agree; 161 of 161 more agree because constants were fitted" in capsys.readouterr().out


def test_rows_notice_a_difference():
    assert not Row("a", 10.0, 10.6, "F", 0.05).agrees
    assert Row("a", 10.0, 10.4, "F", 0.05).agrees
    assert Row("a", 10.0, 10.4, "F", 0.05).relative_error == pytest.approx(0.04)
    assert not Row("a", "4x8", "8x4", "R").agrees and Row("a", "4x8", "8x4", "R").relative_error is None
    assert Row("a", 1.0, 0.5, "R", better=True).agrees and not Row("a", 1.0, 1.5, "R", better=True).agrees


def test_sections_cover_every_paper_with_printed_numbers():
    prefixes = {row.id.split("/")[0] for title, rows in SECTIONS.items() if "time" not in title for row in rows()}
    assert prefixes == {"gholami", "optcnn", "pase"}


def test_a_directory_that_cannot_be_made_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["papers", "--out", str(tmp_path / "file" / "below")]) == 2
    assert "cannot make the directory" in capsys.readouterr().err
