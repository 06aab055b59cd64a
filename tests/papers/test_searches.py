"""The functions that the command line calls."""

from __future__ import annotations

import json

import pytest

from lbpar.errors import ConfigError
from lbpar.papers.gholami import alexnet
from lbpar.papers.pase import Machine, build_tables
from lbpar.papers.pase_models import pase_graph
from lbpar.papers.searches import price_gholami, price_pase


def test_price_pase_goes_to_json():
    out = json.loads(json.dumps(price_pase("pase-alexnet", 128, 16)))
    assert out["total"] == 7.0320712672e10 and out["exact"]
    assert out["seconds"] == pytest.approx(7.0320712672e-3)
    assert out["data_parallel"]["ratio"] == pytest.approx(6.12885e11 / 7.0320712672e10, rel=1e-5)
    by_name = {layer["name"]: layer["configuration"] for layer in out["layers"]}
    assert by_name["fc7"] == {"b": 1, "n": 8, "c": 2}


def test_totals_change_with_the_machine():
    graph = pase_graph("pase-alexnet", 128)
    fast, usual = (build_tables(graph, 16, m).minimum().total for m in (Machine(gbps=1600), None))
    assert fast < usual
    with pytest.raises(ConfigError, match="0 TFLOPS"):
        build_tables(graph, 16, Machine(tflops=0))


def test_price_gholami_reports_the_grid_and_the_best():
    out = json.loads(json.dumps(price_gholami(alexnet(), 2048, (8, 16))))
    assert out["epoch"]["total"] == pytest.approx(92.27, abs=0.005)
    assert out["grids"][0]["grid"] == [2, 64]
    assert sum(row["total"] for row in out["layers"]) == pytest.approx(out["step"]["total"])
    best = price_gholami(alexnet(), 2048, procs=128)
    assert best["grid"] == [2, 64] and best["batch_parallel_ratio"] == pytest.approx(47.38 / 35.94, abs=0.001)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "neither"),
        ({"grid": (0, 4)}, "grid 0x4"),
        ({"grid": (2, 4), "procs": 6}, "not 6"),
    ],
)
def test_price_gholami_names_what_is_wrong(arguments, message):
    with pytest.raises(ConfigError, match=message):
        price_gholami(alexnet(), 64, **arguments)
