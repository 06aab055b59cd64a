"""An op, a loss and an optimizer of a user's own, defined here alone: checked, planned, verified and trained with like any other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from pydantic import Field

from lbpar import api
from lbpar.config.layers import Layer
from lbpar.config.optimizers import Optimizer as OptimizerSection
from lbpar.config.section import BelowOne, Positive
from lbpar.errors import ConfigError, GraphError
from lbpar.graph.builder import GraphBuilder, register_op
from lbpar.graph.ops.losses import Elementwise, register_loss
from lbpar.graph.ops.pointwise import Activation
from lbpar.plan.command import main as plan
from lbpar.runtime.binding import register_kernel
from lbpar.runtime.optim.base import Optimizer
from lbpar.runtime.optim.make import register_optimizer
from tests.util.registries import restored

Array = Any


class SquareplusLayer(Layer):
    """(x + √(x² + b)) / 2."""

    op: Literal["squareplus"] = "squareplus"
    b: Positive = Field(default=4.0, description="How wide the bend is.")


@dataclass(frozen=True)
class Squareplus(Activation):
    """y = (x + √(x² + b)) / 2, whose derivative is 1 / (1 + b / (4 y²))."""

    options: ClassVar[type[Layer]] = SquareplusLayer
    b: float


def squareplus(x: Array, b: float) -> Array:
    return (x + np.sqrt(x * x + b)) / 2


def squareplus_backward(y: Array, dy: Array, b: float) -> Array:
    return dy / (1 + b / (4 * y * y))


@dataclass(frozen=True)
class LogCosh(Elementwise):
    """mean of log(cosh(x - t))"""

    kind: ClassVar[str] = "log_cosh"


def log_cosh(x: Array, t: Array, scale: float) -> Array:
    d = np.abs(x.astype(np.float64) - t)
    return np.asarray(scale * (d + np.log1p(np.exp(-2 * d)) - np.log(2)).sum())


def log_cosh_backward(x: Array, t: Array, scale: float) -> Array:
    return scale * np.tanh(x - t)


class LionSection(OptimizerSection):
    """Sign of a running mean of the gradient."""

    slots: ClassVar[tuple[str, ...]] = ("mean",)
    name: Literal["lion"] = "lion"
    beta: BelowOne = Field(default=0.9, description="Factor of the running mean.")


class Lion(Optimizer):
    """m = beta · m + (1 - beta) · g; w -= lr · sign(m)."""

    options: ClassVar[type[OptimizerSection]] = LionSection
    config: LionSection

    def _update(self, names: Any, blocks: Any, decays: Any, rates: list[float], norms: Any) -> None:
        for (w, g, m), rate in zip(blocks, rates, strict=True):
            m += (1 - self.config.beta) * (g - m)
            w -= rate * np.sign(m)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with restored():
        register_op(Squareplus)
        register_kernel("squareplus_forward", squareplus, "b")
        register_kernel("squareplus_backward", squareplus_backward, "b")
        register_loss(LogCosh)
        register_kernel("log_cosh_loss", log_cosh, "scale")
        register_kernel("log_cosh_backward", log_cosh_backward, "scale")
        register_optimizer(Lion)
        yield


RUN: dict[str, Any] = {
    "model": {
        "input": [9, 7, 3],
        "layers": [
            {"op": "conv", "filters": 6, "kernel": 3, "pad": 1, "name": "conv"},
            {"op": "squareplus", "b": 2.0, "name": "bend"},
            {"op": "max_pool", "kernel": 2},
            {"op": "squareplus"},
            {"op": "flatten"},
            {"op": "linear", "features": 2},
        ],
    },
    "data": {"train": "synthetic", "samples": 24},
    "train": {"batch": 6, "epochs": 8, "loss": "log_cosh", "optimizer": {"name": "lion", "lr": 0.003}},
    "parallel": {"strategy": "data", "layers": {"bend": {"H": 2, "C": 3}}},
    "machine": "laptop",
}


def test_it_is_checked_like_any_other() -> None:
    model = {"input": [4], "layers": [{"op": "squareplus", "bb": 1}]}
    with pytest.raises(ConfigError, match=r"model.layers\[0\].bb: unknown field .* did you mean 'b'"):
        api.load_run({**RUN, "model": model})
    g = GraphBuilder((4,))
    with pytest.raises(GraphError, match="s: b: got 0, expected more than 0"):
        g.layer("squareplus", g.input, name="s", b=0)
    assert g.build(g.layer("squareplus", g.input)).ops[0].op == Squareplus(b=4.0)
    assert g.build(g.squareplus(g.input, 2.0)).ops[0].op == Squareplus(b=2.0)
    with pytest.raises(ConfigError, match="train.optimizer.beta: got 1, expected less than 1"):
        api.load_run(RUN, ["train.optimizer.beta=1"])
    with pytest.raises(ConfigError, match="train.loss: got 'log_cos', did you mean 'log_cosh'"):
        api.load_run(RUN, ["train.loss=log_cos"])


def test_an_op_named_as_a_method_of_the_builder_leaves_that_alone() -> None:
    class ShapeLayer(Layer):
        """Not what `GraphBuilder.shape` is."""

        op: Literal["shape"]

    @register_op
    @dataclass(frozen=True)
    class ShapeOp(Activation):
        options: ClassVar[type[Layer]] = ShapeLayer

    g = GraphBuilder((4,))
    assert g.shape(g.layer("shape", g.input)) == (1, 4)


def test_it_computes_what_pytorch_computes() -> None:
    torch = pytest.importorskip("torch")
    x, dy = np.random.default_rng(1).standard_normal((2, 3, 4, 5, 2))
    tx = torch.tensor(x, requires_grad=True)
    y = (tx + torch.sqrt(tx * tx + 2.0)) / 2
    y.backward(torch.tensor(dy))
    np.testing.assert_allclose(squareplus(x, 2.0), y.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(squareplus_backward(squareplus(x, 2.0), dy, 2.0), tx.grad.numpy(), rtol=1e-12)


def test_any_plan_computes_what_one_rank_computes() -> None:
    result = api.verify(api.load_run(RUN), procs=6, random_plans=6)
    assert result.equal(1e-10)
    assert {"bend:y", "bend:dy", "conv.weight:grad", "loss:y"} <= set(result.tensors)


def test_it_is_planned_and_priced(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config = api.load_run(RUN, ["parallel.strategy=auto"])
    graph = api.build_graph(config)
    [row] = [r for r in api.explain(graph, api.make_plan(config, graph, procs=6), 6) if r["layer"] == "bend"]
    assert (row["op"], row["grid"]) == ("squareplus", "height 2 × channels 3")
    path = tmp_path / "run.yaml"
    path.write_text(repr({**RUN, "parallel": {}}))
    assert plan(["--config", str(path), "--procs", "4"]) == 0
    out = capsys.readouterr().out
    assert "squareplus" in out and "lion" in out


def test_it_trains() -> None:
    with api.train(api.load_run(RUN, ["parallel={}"])) as trained:
        losses = [r["loss"] for r in trained.records]
        assert losses[-1] < 0.5 * losses[0]
        assert set(trained.trainer.optimizer.state["conv.weight"]) == {"mean"}
