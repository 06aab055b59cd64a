"""The functions that the command line calls."""

from __future__ import annotations

import json

import pytest

from lbpar.errors import ConfigError
from lbpar.papers.gholami import alexnet
from lbpar.papers.networks import vgg16
from lbpar.papers.pase import Machine
from lbpar.papers.records import layer_records
from lbpar.papers.searches import price_gholami, price_pase


def test_price_pase_goes_to_json():
    out = json.loads(json.dumps(price_pase("pase-alexnet", 128, 16)))
    assert out["total"] == 7.0320712672e10 and out["exact"]
    assert out["seconds"] == pytest.approx(7.0320712672e-3)
    assert out["data_parallel"]["ratio"] == pytest.approx(6.12885e11 / 7.0320712672e10, rel=1e-5)
    by_name = {layer["name"]: layer["configuration"] for layer in out["layers"]}
    assert by_name["fc7"] == {"b": 1, "n": 8, "c": 2}


def test_price_pase_changes_with_the_machine():
    fast = price_pase("pase-alexnet", 128, 16, Machine(gbps=1600))
    assert fast["total"] < price_pase("pase-alexnet", 128, 16)["total"]
    with pytest.raises(ConfigError, match="0 TFLOPS"):
        price_pase("pase-alexnet", 128, 16, Machine(tflops=0))


def test_price_gholami_reports_the_grid_and_the_best():
    out = json.loads(json.dumps(price_gholami(alexnet(), 2048, (16, 32), scope="fc")))
    assert out["epoch"]["total"] == pytest.approx(5.42, abs=0.005)
    assert out["grids"][0]["grid"] == [32, 16]
    assert sum(row["total"] for row in out["layers"]) == pytest.approx(out["step"]["total"])
    best = price_gholami(alexnet(), 2048, procs=512, scope="fc")
    assert best["grid"] == [32, 16] and best["batch_parallel_ratio"] == pytest.approx(10.19, abs=0.01)


def test_price_gholami_with_domain_layers():
    layers = layer_records(vgg16())
    convs = [x.name for x in layers if x.kind == "conv"]
    out = price_gholami(layers, 16, (8, 4), domain=convs)
    assert out["equation"] == "9" and out["step"]["domain"] > 0
    assert all(row["model"] == 0 for row in out["layers"] if row["kind"] == "conv")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "neither"),
        ({"grid": (0, 4)}, "grid 0x4"),
        ({"grid": (2, 4), "procs": 6}, "not 6"),
        ({"procs": 4, "domain": ["conv9"]}, "'conv9'"),
    ],
)
def test_price_gholami_names_what_is_wrong(arguments, message):
    with pytest.raises(ConfigError, match=message):
        price_gholami(alexnet(), 64, **arguments)
