"""ParaDL's table, line by line, against the formulas written out."""

from __future__ import annotations

import pytest

from lbpar.errors import ConfigError
from lbpar.papers import paradl
from lbpar.papers.gholami import alexnet

LAYERS = [
    paradl.Layer(x=300, y=400, w=27, halo_x=10, halo_y=12, filters=16, channels=3, spatial=64),
    paradl.Layer(x=400, y=200, w=90, halo_x=8, halo_y=6, filters=24, channels=16, spatial=32),
    paradl.Layer(x=200, y=50, w=500, filters=50, channels=24, spatial=1),
]
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
    halos = sum(2 * A + B * (x.halo_x + x.halo_y) * DB for x in LAYERS)
    assert price.seconds == pytest.approx(2 * D / B * (3 * (A + W * DB / 4) + halos))
    assert price.memory == 2 * 4 * (B * XY / 4 + W)
    assert price.most == 1


def test_filter_and_channel():
    price = paradl.filter_parallel(LAYERS, S, 4)
    assert price.seconds == pytest.approx(3 * D / B * 3 * sum(A + B * y * DB / 4 for y in (400, 200)))
    assert price.memory == 2 * 4 * (B * XY + W / 4)
    assert price.most == 16
    channel = paradl.channel_parallel(LAYERS, S, 4)
    assert (channel.seconds, channel.memory, channel.most) == (price.seconds, price.memory, 3)


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


def test_records_are_understood():
    conv = paradl.from_record(alexnet()[1])
    assert (conv.x, conv.y, conv.w) == (27 * 27 * 96, 27 * 27 * 256, 307200)
    assert (conv.halo_x, conv.halo_y, conv.filters, conv.channels) == (2 * 27 * 96, 2 * 27 * 256, 256, 96)


def test_bad_numbers_are_named():
    with pytest.raises(ConfigError, match="3x0 processes"):
        paradl.data_filter_parallel(LAYERS, S, 3, 0)
