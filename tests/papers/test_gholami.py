"""Equations (3) to (9), the literal evaluation of (8), and the bars of the figures."""

from __future__ import annotations

import math

import pytest

from lbpar.errors import ConfigError
from lbpar.papers import gholami as g
from lbpar.papers import published
from lbpar.papers.collectives import Link
from lbpar.papers.networks import vgg16
from lbpar.papers.records import LayerRecord, layer_records

ALEXNET = g.alexnet()


def total_weights(layers):
    return sum(x.weights for x in layers)


def on_grid(layers, batch, pr, pc, domain=(), link=g.CORI):
    return g.by_layer(layers, batch, g.one_grid(layers, pr, pc), domain, link)


def test_alexnet_constants():
    assert [x.weights for x in ALEXNET] == [34848, 307200, 884736, 663552, 442368, 37748736, 16777216, 4096000]
    assert total_weights(ALEXNET) == 60_954_656
    assert [x.outputs for x in ALEXNET] == [290400, 186624, 64896, 64896, 43264, 4096, 4096, 1000]
    assert total_weights(x for x in ALEXNET if x.kind == "conv") == g.W_CONV
    assert sum(sum(g.halo_words(x)) for x in ALEXNET if x.kind == "conv") == 75_437
    assert g.S_FC == 29_696
    assert round(total_weights(layer_records(vgg16())) / 1e6, 1) == 138.3


def test_literal_equation_8_on_one_grid_to_the_printed_digits():
    for procs, expected in published.GHOLAMI_LITERAL_SAME.items():
        ours = [g.IMAGES / 2048 * on_grid(ALEXNET, 2048, pr, pc).total for pr, pc in g.grids(procs)]
        assert tuple(round(s, 2) for s in ours) == expected


def test_literal_equation_8_on_the_fc_layers_to_the_printed_digits():
    for procs, expected in published.GHOLAMI_LITERAL_FC.items():
        ours = [
            g.by_layer(ALEXNET, 2048, g.fc_only(ALEXNET, pr, pc)).total * g.IMAGES / 2048 for pr, pc in g.grids(procs)
        ]
        assert tuple(round(s, 2) for s in ours) == expected


@pytest.mark.parametrize("row", [s for s in published.GHOLAMI_SPEEDUPS if s.figure == "7"])
def test_figure_7_best_grids_and_speed_ups_follow_from_equation_8(row):
    seconds = {
        (pr, pc): g.by_layer(ALEXNET, row.batch, g.fc_only(ALEXNET, pr, pc)).total for pr, pc in g.grids(row.procs)
    }
    best = min(seconds, key=lambda grid: seconds[grid])
    assert best == row.grid
    assert seconds[1, row.procs] / seconds[best] == pytest.approx(row.communication, rel=0.08)


def test_recipe_gives_every_bar_within_five_percent():
    errors = []
    for panel in published.GHOLAMI_PANELS:
        for i, seconds in enumerate(panel.seconds):
            pr = panel.first << i
            ours = g.recipe_terms(panel.figure, panel.batch, pr, panel.procs // pr).total
            errors.append(abs(ours / seconds - 1))
    assert len(errors) == 84
    assert max(errors) < 0.05
    assert sum(errors) / len(errors) < 0.013


@pytest.mark.parametrize("row", published.GHOLAMI_SPEEDUPS)
def test_recipe_gives_the_printed_speed_ups(row):
    first = 4 if (row.figure, row.procs) == ("10", 2048) else 1
    compute = g.compute_epoch_seconds(row.batch, row.procs)
    seconds = {
        pr: g.recipe_terms(row.figure, row.batch, pr, row.procs // pr).total
        for pr in (first << i for i in range(8))
        if row.procs % pr == 0
    }
    best = min(seconds, key=lambda pr: seconds[pr])
    assert (best, row.procs // best) == row.grid
    assert seconds[first] / seconds[best] == pytest.approx(row.communication, rel=0.06)
    assert (seconds[first] + compute) / (seconds[best] + compute) == pytest.approx(row.total, abs=0.06)


def test_compute_seconds_of_the_figures():
    for (batch, procs), seconds in published.GHOLAMI_COMPUTE.items():
        assert g.compute_epoch_seconds(batch, procs) == pytest.approx(seconds, rel=0.015)


def test_figure_8_overlap():
    for i, seconds in enumerate(published.GHOLAMI_FIG8):
        assert g.overlapped_epoch_seconds(2048, 1 << i, 512 >> i) == pytest.approx(seconds, rel=0.01)


def test_equations_3_4_6_7_by_hand():
    layer = LayerRecord("c", "conv", (8, 10, 3), (8, 9, 5), (3, 5), 225)
    a, b, batch, p = 2.0, 0.5, 12, 6
    link = Link(a, b)
    model = on_grid([layer], batch, p, 1, link=link)
    assert model.total == model.model == pytest.approx(3 * (a * 3 + b * 12 * 5 / 6 * 360))
    weights = 2 * (a * 3 + b * 5 / 6 * 225)
    data = on_grid([layer], batch, 1, p, link=link)
    assert data.total == data.batch == pytest.approx(weights)
    assert g.redistribution_seconds(layer, batch, p, link) == pytest.approx(a * 3 + b * 12 * 5 / 6 * 360)
    halos = (a + b * 12 * 10 * 3 * 1) + (a + b * 12 * 9 * 5 * 2)
    domain = on_grid([layer], batch, p, 1, {"c"}, link)
    assert (domain.model, domain.batch, domain.domain) == pytest.approx((0, weights, halos))


def test_layers_on_grids_of_their_own_add_up():
    rest = {x.name for x in ALEXNET if x.kind == "conv"}
    both = on_grid(ALEXNET, 256, 16, 1, rest)
    parts = [on_grid([x], 256, 16, 1, rest) for x in ALEXNET]
    assert both.total == pytest.approx(sum(t.total for t in parts))
    assert both.model == pytest.approx(sum(t.total for t, x in zip(parts, ALEXNET, strict=True) if x.kind == "fc"))


def test_redistribution_is_at_most_a_third_of_the_model_step():
    for layer in ALEXNET:
        assert g.redistribution_seconds(layer, 64, 8) <= on_grid([layer], 64, 8, 1).model / 3 * (1 + 1e-12)


def test_crossover_of_the_papers_example():
    layer = LayerRecord("c", "conv", (13, 13, 384), (13, 13, 384), (3, 3), 9 * 384 * 384)
    assert g.crossover_batch(layer) == pytest.approx(13.6, abs=0.05)
    assert g.volume_ratio(layer, g.crossover_batch(layer)) == pytest.approx(1)
    assert g.volume_ratio(layer, 12) > 1 > g.volume_ratio(layer, 14)


@pytest.mark.parametrize(("form", "steps"), [("log", 4), ("ring", 12)])
def test_latency_forms(form, steps):
    link = Link(1.0, 0.5, form)
    assert link.allgather(26, 13) == pytest.approx(steps + 0.5 * 24)
    assert link.allreduce(26, 13) == pytest.approx(2 * (steps + 0.5 * 24))


def test_tree_allreduce_and_one_process():
    assert Link(1.0, 0.5, "tree").allreduce(26, 13) == pytest.approx(4 * (1 + 13))
    for form in ("log", "ring", "tree"):
        assert Link(1.0, 0.5, form).allreduce(26, 1) == 0
    ring = on_grid(ALEXNET, 64, 4, 16, link=Link(1.0, 0.0, "ring")).total
    assert ring == pytest.approx(8 * (3 * 3 + 2 * 15)) and math.isfinite(ring)


def test_bad_arguments_are_named():
    with pytest.raises(ConfigError, match="batch 0 on a grid 2x2"):
        on_grid(ALEXNET, 0, 2, 2)
    with pytest.raises(ConfigError, match="'star'"):
        Link(1.0, 1.0, "star")
