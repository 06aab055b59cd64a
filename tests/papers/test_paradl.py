"""ParaDL's table, line by line, against the formulas written out."""

from __future__ import annotations

import pytest

from lbpar.errors import ConfigError
from lbpar.papers import paradl
from lbpar.papers.records import LayerRecord

LAYERS = [
    LayerRecord("a", "conv", (10, 10, 3), (5, 5, 16), (3, 3), 27),
    LayerRecord("b", "conv", (5, 5, 16), (2, 4, 25), (5, 1), 90),
    LayerRecord("c", "fc", (1, 1, 200), (1, 1, 50), (1, 1), 500),
]
HALOS = (10 * 3 + 5 * 16, 2 * 5 * 16 + 2 * 4 * 25, 0)  # of x and dy, from one neighbour
S = paradl.Setting(data=1000, batch=20, alpha=3.0, beta=0.25, item=4)
B, D, A, DB = 20, 1000, 3.0, 4 * 0.25
W = 27 + 90 + 500
XY = 700 + 600 + 250


def test_data():
    price = paradl.data_parallel(LAYERS, S, 5)
    assert price.seconds == pytest.approx(2 * D / B * 4 * (A + W * DB / 5))
    assert price.memory == 2 * 4 * (B / 5 * XY + W)
    assert price.most == B


def test_spatial():
    price = paradl.spatial_parallel(LAYERS, S, 4)
    halos = sum(2 * A + B * words * DB for words in HALOS)
    assert price.seconds == pytest.approx(2 * D / B * (3 * (A + W * DB / 4) + halos))
    assert price.memory == 2 * 4 * (B * XY / 4 + W)
    assert price.most == 1


def test_filter():
    price = paradl.filter_parallel(LAYERS, S, 4)
    assert price.seconds == pytest.approx(3 * D / B * 3 * sum(A + B * y * DB / 4 for y in (400, 200)))
    assert price.memory == 2 * 4 * (B * XY + W / 4)
    assert price.most == 16


def test_data_and_filter():
    price = paradl.data_filter_parallel(LAYERS, S, 3, 2)
    exchange = 3 * D / B * 1 * sum(A + B * y * DB / 6 for y in (400, 200))
    assert price.seconds == pytest.approx(exchange + 2 * D / B * 2 * (A + W * DB / 6))
    assert price.memory == pytest.approx(2 * 4 * (B * XY / 3 + W / 2))
    assert price.most == B * 16


def test_data_and_filter_has_its_parts_as_limits():
    assert paradl.data_filter_parallel(LAYERS, S, 6, 1).seconds == paradl.data_parallel(LAYERS, S, 6).seconds
    assert paradl.data_filter_parallel(LAYERS, S, 1, 6).seconds == paradl.filter_parallel(LAYERS, S, 6).seconds


def test_pipeline():
    price = paradl.pipeline_parallel([LAYERS[:1], LAYERS[1:]], S, 5)
    assert price.seconds == pytest.approx(2 * D * (2 + 5 - 2) / B * (A + B / 5 * 400 * DB))
    assert price.memory == 2 * 4 * max(B * 700 + 27, B * 850 + 590)
    assert price.most == 3


def test_bad_numbers_are_named():
    with pytest.raises(ConfigError, match="3x0 processes"):
        paradl.data_filter_parallel(LAYERS, S, 3, 0)
