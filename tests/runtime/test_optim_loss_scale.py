"""The loss scale: when it grows and falls, and that all ranks agree on what has overflowed."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.config.training import LossScale
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.errors import TrainingError
from lbpar.layout.grid import Grid
from lbpar.runtime.optim.loss_scale import Scaler
from lbpar.runtime.worker import sum_over_ranks
from lbpar.transport.base import Transport
from lbpar.transport.virtual import VirtualWorld


def test_a_single_ranks_overflow_is_everybodys() -> None:
    world = VirtualWorld(Grid((3,)))

    def one(transport: Transport) -> tuple[bool, float]:
        scaler = Scaler(LossScale(), NumpyEngine("float32"), sum_over_ranks(transport))
        grads = {"w": np.full(4, 65536.0, np.float32)}
        if transport.rank == 1:
            grads["w"][2] = np.inf
        return scaler.unscale(grads), scaler.scale

    assert world.run(one) == [(False, 32768.0)] * 3


def test_the_scale_grows_after_a_while_and_falls_at_once() -> None:
    scaler = Scaler(LossScale(start=8, interval=2, most=32), NumpyEngine("float32"), lambda v: v)
    scales = []
    for finite in (True, True, True, False, True, True, True, True, True, True, True, True):
        scaler.update(finite)
        scales.append(scaler.scale)
    assert scales == [8, 16, 16, 8, 8, 16, 16, 32, 32, 32, 32, 32]
    assert scaler.skipped == 1
    with pytest.raises(TrainingError, match=r"gradients are not finite even with a loss scale of 6\.1"):
        for _ in range(30):
            scaler.update(False)
