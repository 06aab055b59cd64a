"""What fits into a budget by the parts' own estimates: the parts that matter most, with many workers and with one."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import groupby

import pytest

from lbpar.selftest import gpu
from lbpar.selftest.networks import networks
from lbpar.selftest.parts import Part

BEGIN = ["versions", "kernels"]
HEADLINES = [f"{name}, bfloat16{by}" for name in ("resnet50 of 256", "unet3d of 2") for by in ("", ", PyTorch eager")]
FIRST = [*BEGIN, "training", "2 ranks, host", "2 ranks, nccl", *HEADLINES]


@pytest.fixture(autouse=True)
def everything_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda name: name)
    monkeypatch.setattr(gpu, "mpirun", lambda: "mpirun")


def fit(parts: Sequence[Part], budget: float, workers: int) -> list[str]:
    """Names of the parts that are run where each takes all its seconds, as `lbpar.selftest.parts.run` goes about it."""
    now, names = 0.0, list[str]()
    for alone, group in groupby(parts, key=lambda p: p.alone):
        free = [now] * (1 if alone else workers)
        for part in group:
            start = heapq.heappop(free)
            if fits := budget - start >= part.seconds:
                names.append(part.name)
            heapq.heappush(free, start + part.seconds * fits)
        now = max(free)
    return names


def checks(names: Sequence[str]) -> list[tuple[str, str]]:
    """Networks that are checked, and ways."""
    pairs = [name.partition(", ")[::2] for name in names]
    return [(network, way) for network, way in pairs if network in networks()]


@pytest.mark.parametrize("workers", [1, 6])
@pytest.mark.parametrize("budget", [170, 290])
def test_each_network_each_way_training_ranks_and_headlines_fit_into_any_budget(budget: float, workers: int) -> None:
    found = fit(gpu.parts(3, quick=False), budget, workers)
    assert set(FIRST) <= set(found)
    assert {network for network, _ in checks(found)} == set(networks())
    assert {way for _, way in checks(found)} >= set(gpu.TYPES)


def test_with_six_workers_all_checks_fit_into_the_default_budget_and_headlines_with_autotune_into_290_seconds() -> None:
    wanted = [part.name for part in gpu.parts(3, quick=True)]
    short, long = (fit(gpu.parts(3, quick=False), budget, 6) for budget in (170, 290))
    assert set(wanted) <= set(short) and set(short) <= set(long)
    tuned = {f"{name}, bfloat16, autotune" for name in ("resnet50 of 256", "unet3d of 2")}
    assert {"resnet50 of 256, TF32", "resnet50 of 256, TF32, PyTorch eager", "ceilings", *tuned} <= set(long)


def test_what_is_further_down_never_stands_before_what_matters_most() -> None:
    names = [part.name for part in gpu.parts(3, quick=False)]
    assert len(set(names)) == len(names) and names[:2] == BEGIN
    first = max(names.index(name) for name in FIRST)
    assert len(names[: first + 1]) == len(FIRST) + len(networks())
    assert all(name in names[: first + 1] for name in FIRST)
    ahead = {"small blocks, bfloat16, autotune", "4 ranks, mpi"}
    assert all(names.index(name) < names.index("resnet50 of 256, TF32") for name in ahead)
    assert all(name.endswith("PyTorch compile") for name in names[-6:])
    assert not any(part.alone for part in gpu.parts(3, quick=True)[2:])
