"""The calls of lbpar.api on the ranks of this job: the same results as on one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lbpar import api
from tests.util.mpi import collective_assert

pytestmark = pytest.mark.mpi

RUN: dict[str, Any] = {
    "model": {
        "input": [6, 6, 2],
        "layers": [
            {"op": "conv", "filters": 5, "kernel": 3, "pad": 1, "name": "c"},
            {"op": "norm"},
            {"op": "relu"},
            {"op": "conv", "filters": 4, "kernel": 3, "name": "d"},
        ],
    },
    "data": {"train": "synthetic", "test": "synthetic", "samples": 14},
    "train": {"batch": 6, "epochs": 2, "loss": "mse", "optimizer": {"name": "sgd", "lr": 0.05}},
    "engine": {"name": "numpy", "dtype": "float64", "threads": 1},
}


@pytest.mark.parametrize("loops", ["N", "H", "F", "C"])
def test_train_evaluate_and_predict_as_one_rank_does(loops: str) -> None:
    from mpi4py import MPI

    from lbpar.transport.single import SingleTransport

    p = MPI.COMM_WORLD.size
    split = api.load_run(RUN, [f"parallel.layers={{c: {{{loops}: {p}}}, d: {{{loops}: {p}}}}}"])
    x = np.random.default_rng(1).standard_normal((7, 6, 6, 2))
    with api.train(split) as trained:
        got = (trained.predict(x), trained.weights(), trained.evaluate(), [r["loss"] for r in trained.records])
    alone = api.load_run(RUN)
    one = api.train(alone, plan=api.make_plan(alone, procs=1), transport=SingleTransport())
    with collective_assert(MPI.COMM_WORLD):
        np.testing.assert_allclose(got[0], one.predict(x), rtol=1e-10)
        for name, whole in one.weights().items():
            np.testing.assert_allclose(got[1][name], whole, rtol=1e-9, atol=1e-12, err_msg=name)
        assert got[2] == pytest.approx(one.evaluate(), rel=1e-10)
        assert got[3] == pytest.approx([r["loss"] for r in one.records], rel=1e-10)


def test_verify_uses_the_ranks_of_the_job() -> None:
    from mpi4py import MPI

    result = api.verify(api.load_run(RUN), random_plans=1)
    with collective_assert(MPI.COMM_WORLD):
        assert not result.simulated and result.procs == MPI.COMM_WORLD.size and result.equal()
