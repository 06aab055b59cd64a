"""Schedules against PyTorch's, 50 steps."""

from __future__ import annotations

from typing import Any

import pytest

from lbpar.config.optimizers import SCHEDULES
from lbpar.errors import ConfigError
from lbpar.runtime.optim.schedules import Schedule
from lbpar.runtime.optim.schedules import make_schedule as make
from tests.util.training import run_file

BASE, STEPS, PER_EPOCH, WARMUP = 0.3, 50, 5, 8


def make_schedule(config: dict[str, Any], *numbers: Any) -> Schedule:
    """As training does with what a run file says."""
    return make(run_file([f"train.schedule={config}"]).train.schedule, *numbers)


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
WARM = {"warmup_epochs": WARMUP / PER_EPOCH}
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


def test_warm_up_ends_at_the_base_rate():
    schedule = make_schedule({"name": "cosine", "warmup_epochs": 2}, BASE, PER_EPOCH, STEPS)
    assert 0 < schedule(0) < schedule(9) < schedule(10) == BASE


def test_beyond_the_end_keeps_the_last_value():
    schedule = make_schedule({"name": "cosine", "min_lr": 0.1}, BASE, PER_EPOCH, STEPS)
    assert schedule(STEPS) == schedule(10 * STEPS) == pytest.approx(0.1)


def test_all_warmup_needs_no_division():
    schedule = make_schedule({"name": "polynomial", "warmup_epochs": STEPS / PER_EPOCH}, BASE, PER_EPOCH, STEPS)
    assert schedule(STEPS - 1) < schedule(STEPS) == BASE


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "cosin"}, "did you mean 'cosine'"),
        ({"name": "cosine", "power": 2}, "schedule.power: unknown field"),
        ({"name": "step", "milestones": []}, "increasing"),
        ({"name": "step"}, "expected exactly one of every and milestones"),
        ({"name": "step", "every": 1, "milestones": [2]}, "expected exactly one of every and milestones"),
        ({"name": "step", "milestones": [4, 2]}, r"got \[4.0, 2.0\], expected epochs in increasing order"),
        ({"name": "step", "every": 0.01}, "at least one step"),
        ({"name": "constant", "warmup_epochs": 11}, "55 steps, expected at most the training's 50"),
        ({"name": "constant", "warmup_start": 2}, "warmup_start"),
        ({"name": "polynomial", "power": 0}, "power"),
    ],
)
def test_bad_configurations_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        make_schedule(config, BASE, PER_EPOCH, STEPS)


@pytest.mark.parametrize("name", SCHEDULES.sections)
def test_reads_every_schedule_of_a_run_file(name):
    extra = {"every": 1} if name == "step" else {}
    schedule = make_schedule({"name": name, "warmup_epochs": 1.0, **extra}, BASE, PER_EPOCH, STEPS)
    assert schedule(0) == pytest.approx(BASE / 6)
    assert (schedule(STEPS - 1) == BASE) == (name == "constant")
