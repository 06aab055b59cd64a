"""Schedules against PyTorch's, 50 steps."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lbpar.config.optimizers import Constant, Cosine, Polynomial, Step
from lbpar.errors import ConfigError
from lbpar.train.schedules import make_schedule

BASE, STEPS, PER_EPOCH, WARMUP = 0.3, 50, 5, 8


def pytorch(make):
    """Learning rates of 50 steps; ``make(torch.optim.lr_scheduler, optimizer)`` gives the scheduler."""
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1, dtype=torch.float64, requires_grad=True)], BASE)
    scheduler = make(torch.optim.lr_scheduler, optimizer)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def after_warmup(make, start):
    def both(lrs, opt):
        warm = lrs.LinearLR(opt, start, total_iters=WARMUP)
        return lrs.SequentialLR(opt, [warm, make(lrs, opt)], [WARMUP])

    return both


def chained(make, start):
    return lambda lrs, opt: lrs.ChainedScheduler([lrs.LinearLR(opt, start, total_iters=WARMUP), make(lrs, opt)])


REST = STEPS - WARMUP
WARM = {"warmup_steps": WARMUP}
CASES = [
    ({"name": "constant"}, lambda lrs, o: lrs.ConstantLR(o, 1.0)),
    ({"name": "step", "milestones": [3, 7], "gamma": 0.2}, lambda lrs, o: lrs.MultiStepLR(o, [15, 35], 0.2)),
    ({"name": "step", "every": 2, "gamma": 0.5}, lambda lrs, o: lrs.StepLR(o, 10, 0.5)),
    ({"name": "cosine"}, lambda lrs, o: lrs.CosineAnnealingLR(o, STEPS)),
    ({"name": "cosine", "min_lr": 0.05}, lambda lrs, o: lrs.CosineAnnealingLR(o, STEPS, 0.05)),
    ({"name": "polynomial", "power": 2.0}, lambda lrs, o: lrs.PolynomialLR(o, STEPS, 2.0)),
    ({"name": "constant", **WARM}, lambda lrs, o: lrs.LinearLR(o, 1 / (WARMUP + 1), total_iters=WARMUP)),
    (
        {"name": "cosine", "min_lr": 0.01, "warmup_start": 0.1, **WARM},
        after_warmup(lambda lrs, o: lrs.CosineAnnealingLR(o, REST, 0.01), 0.1),
    ),
    (
        {"name": "polynomial", "power": 1.5, "warmup_start": 0.1, **WARM},
        after_warmup(lambda lrs, o: lrs.PolynomialLR(o, REST, 1.5), 0.1),
    ),
    (
        {"name": "step", "milestones": [1, 6], "warmup_start": 0.25, **WARM},
        chained(lambda lrs, o: lrs.MultiStepLR(o, [5, 30], 0.1), 0.25),
    ),
]


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize(("config", "theirs"), CASES)
def test_equals_pytorch(config, theirs):
    schedule = make_schedule(config, BASE, PER_EPOCH, STEPS)
    assert [schedule(i) for i in range(STEPS)] == pytest.approx(pytorch(theirs), rel=1e-12)


def test_warmup_in_epochs_is_warmup_in_steps():
    epochs = make_schedule({"name": "cosine", "warmup_epochs": 2}, BASE, PER_EPOCH, STEPS)
    steps = make_schedule({"name": "cosine", "warmup_steps": 10, "warmup_epochs": 0}, BASE, PER_EPOCH, STEPS)
    assert epochs == steps
    assert epochs(0) > 0
    assert epochs(10) == BASE


def test_beyond_the_end_keeps_the_last_value():
    schedule = make_schedule({"name": "cosine", "min_lr": 0.1}, BASE, PER_EPOCH, STEPS)
    assert schedule(STEPS) == schedule(10 * STEPS) == pytest.approx(0.1)


def test_all_warmup_needs_no_division():
    schedule = make_schedule({"name": "polynomial", "warmup_steps": STEPS}, BASE, PER_EPOCH, STEPS)
    assert schedule(STEPS - 1) < schedule(STEPS) == BASE


def test_reads_objects_and_no_configuration():
    @dataclass
    class Config:
        name: str = "step"
        every: int = 1
        gamma: float | None = None

    assert make_schedule(Config(), 1.0, 2, 8)(7) == pytest.approx(1e-3)
    assert make_schedule(None, 1.0, 2, 8)(7) == 1.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "cosin"}, "did you mean 'cosine'"),
        ({"name": "cosine", "power": 2}, "unknown field 'power'"),
        ({"name": "step"}, "expected one of the two"),
        ({"name": "step", "every": 1, "milestones": [2]}, "expected one of the two"),
        ({"name": "step", "milestones": [4, 2]}, "increasing"),
        ({"name": "step", "every": 0.01}, "at least one step"),
        ({"name": "constant", "warmup_epochs": 11}, "55 steps, expected at most the training's 50"),
        ({"name": "constant", "warmup_epochs": 1, "warmup_steps": 2}, "both given"),
        ({"name": "constant", "warmup_start": 2}, "warmup_start"),
        ({"name": "polynomial", "power": 0}, "power"),
    ],
)
def test_bad_configurations_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        make_schedule(config, BASE, PER_EPOCH, STEPS)


@pytest.mark.parametrize("config", [Constant, Cosine, Polynomial, Step])
def test_reads_every_schedule_of_a_run_file(config):
    name = config.model_fields["name"].annotation.__args__[0]
    extra = {"every": 1} if config is Step else {}
    schedule = make_schedule(config(name=name, warmup_epochs=1.0, **extra), BASE, PER_EPOCH, STEPS)
    assert type(schedule).__name__ == config.__name__
    assert schedule(0) == pytest.approx(BASE / 6)
