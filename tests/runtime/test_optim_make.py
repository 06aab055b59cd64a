"""Optimizers by the names of run files."""

from __future__ import annotations

import pytest

from lbpar.config import optimizers as config
from lbpar.runtime.optim.make import make_optimizer
from lbpar.runtime.optim.rules import LARS
from tests.util.optimizers import KINDS


def test_make_optimizer_leaves_kinds_undecayed():
    section = config.Lars(name="lars", lr=2.0, weight_decay=0.1)
    optimizer = make_optimizer(section, KINDS, no_decay=("norm", "bias"))
    assert isinstance(optimizer, LARS) and optimizer.config is section
    assert [optimizer.decays(p) for p in ("fc.weight", "conv.bias", "norm.weight")] == [True, False, False]


@pytest.mark.parametrize("config", [config.Sgd, config.Adam, config.AdamW, config.Lars, config.Lamb])
def test_reads_every_optimizer_of_a_run_file(config):
    name = config.model_fields["name"].annotation.__args__[0]
    chosen = config(name=name, lr=0.2, weight_decay=0.3)
    optimizer = make_optimizer(chosen, KINDS, no_decay=("bias",))
    assert (optimizer.name, optimizer.config) == (name, chosen)
