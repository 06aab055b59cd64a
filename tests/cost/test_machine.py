from __future__ import annotations

from dataclasses import replace
from math import ceil, log2
from pathlib import Path

import pytest

from lbpar.config.machine_file import LinkConfig, RateConfig, load_machine_file, save_machine_file
from lbpar.cost.kernel_time import kernel_seconds
from lbpar.cost.machine import Machine, find_machine, machine_names
from lbpar.errors import ConfigError
from lbpar.graph.loops import Index, Kernel, Operand
from lbpar.layout.grid import Grid

NAMED = (
    "laptop",
    "cori-knl",
    "abci-v100",
    "lassen",
    "perlmutter-a100",
    "frontier-mi250x",
    "a100-nvl8",
    "h100-nvl8",
    "h200-nvl8",
    "b200-nvl8",
)


@pytest.mark.parametrize("name", machine_names())
def test_shipped_machines_load_and_say_where_constants_come_from(name: str) -> None:
    file = find_machine(name).file
    assert file.name == name and file.compute.source
    assert all(level.source for level in file.levels)
    fast = [level.bandwidth for level in file.levels]
    assert fast == sorted(fast, reverse=True)


def test_the_promised_machines_are_there() -> None:
    assert {*NAMED, "pase-1080ti", "pase-2080ti", "optcnn-p100"} <= set(machine_names())


def test_axes_use_the_fastest_links_that_join_their_ranks() -> None:
    m, grid = find_machine("perlmutter-a100"), Grid.of(16)  # four devices a node
    assert [m.level(grid, a) for a in grid.axes] == [0, 0, 1, 1]
    three = Grid((3, 2))  # a group of three fits in no way into nodes of four
    assert m.level(three, 0) == 1


def test_collectives_of_one_level_follow_the_textbook() -> None:
    m = find_machine("cori-knl")
    grid = Grid.of(16)
    n, p, (level,) = 1e6, 16, m.file.levels
    parts = m.parts(grid, grid.axes)
    reduce = n * (p - 1) / p
    assert m.move_seconds("allreduce", parts, 2 * reduce, 30) == pytest.approx(
        2 * ceil(log2(p)) * level.alpha + 2 * reduce / level.bandwidth
    )
    assert m.move_seconds("allgather", parts, reduce, 15) == pytest.approx(4 * level.alpha + reduce / level.bandwidth)
    assert m.move_seconds("halo", parts, 1e3, 2) == pytest.approx(2 * level.alpha + 1e3 / level.bandwidth)
    ring = Machine(m.file.model_copy(update={"latency": "ring"}))
    assert ring.move_seconds("allreduce", parts, 2 * reduce, 30) == pytest.approx(
        30 * level.alpha + 2 * reduce / level.bandwidth
    )
    tree = Machine(m.file.model_copy(update={"latency": "tree"}))
    assert tree.move_seconds("allreduce", parts, 2 * reduce, 30) == pytest.approx(
        4 * (level.alpha + n / level.bandwidth)
    )


def test_a_group_of_two_levels_sends_little_over_the_slow_one() -> None:
    m, grid = find_machine("perlmutter-a100"), Grid.of(16)
    n = 1e9
    seconds = m.move_seconds("allreduce", m.parts(grid, grid.axes), 2 * n * 15 / 16, 30)
    fast, slow = m.file.levels
    assert seconds == pytest.approx(2 * n * 0.75 / fast.bandwidth + 2 * n / 4 * 0.75 / slow.bandwidth, rel=1e-2)


def test_measured_tables_win_over_the_model(tmp_path: Path) -> None:
    file = find_machine("laptop").file
    row = {"kernel": "conv_forward", "m": 100, "n": 10, "k": 10, "rate": 123.0}
    path = tmp_path / "m.yaml"
    save_machine_file(
        type(file).model_validate({**file.model_dump(), "compute": {**file.compute.model_dump(), "table": [row]}}), path
    )
    m = Machine(load_machine_file(path))
    assert m.rate("conv_forward", 90, 10, 10, "float32") == pytest.approx(123.0)
    assert m.rate("linear_forward", 90, 10, 10, "float32") != 123.0


@pytest.mark.parametrize(
    ("name", "times"),
    [("a100-nvl8", 8.0), ("perlmutter-a100", 8.0), ("h100-nvl8", 494.5 / 67), ("h200-nvl8", 494.5 / 67)]
    + [("b200-nvl8", 1100 / 75), ("lassen", 1.0), ("frontier-mi250x", 1.0)],
)
def test_tf32_has_the_peak_of_the_data_sheet_or_is_computed_as_float32(name: str, times: float) -> None:
    m = find_machine(name)
    plain, fast = (m.rate("conv_forward", 1e5, 256, 576, dtype) for dtype in ("float32", "tf32"))
    assert fast / plain == pytest.approx(times)
    peak = m.file.compute.peak
    assert peak.get("tf32", 0) < peak["float16"]


def test_what_was_measured_in_float32_or_tf32_alone_stands_for_the_other() -> None:
    file = find_machine("a100-nvl8").file
    measured = {
        dtype: RateConfig(kernel="norm_apply", m=100, n=10, k=1, dtype=dtype, rate=rate)
        for dtype, rate in (("float32", 1e9), ("tf32", 2e9))
    }

    def rate(dtype: str, *known: str) -> float | None:
        table = tuple(measured[d] for d in known)
        m = Machine(file.model_copy(update={"compute": file.compute.model_copy(update={"table": table})}))
        found = m.measured_rate("norm_apply", (100, 10, 1, 1), dtype)
        return None if found is None else float(found)

    assert (
        rate("tf32", "float32")
        == rate("float32", "float32")
        == rate("float32", "float32", "tf32")
        == pytest.approx(1e9)
    )
    assert rate("tf32", "tf32") == rate("float32", "tf32") == rate("tf32", "float32", "tf32") == pytest.approx(2e9)
    assert rate("bfloat16", "float32", "tf32") is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("perlmuter-a100", "did you mean 'perlmutter-a100'"),
        ("gone.yaml", "no such machine file"),
        ("x", "expected auto, a machine file"),
        ("auto", "expected auto, a machine file"),
    ],
)
def test_unknown_machines_are_refused(given: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        find_machine(given)


def test_a_mistake_in_a_machine_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("name: x\nlevels: [{name: node, alpha: 1.0e-6, bandwith: 1.0, source: me}]\nmemory: 1GB\n")
    with pytest.raises(ConfigError, match="did you mean 'bandwidth'"):
        load_machine_file(path)


def test_measured_moves_and_sizes_of_groups_have_links_of_their_own() -> None:
    base = find_machine("laptop").file
    (level,) = base.levels
    links = [
        LinkConfig(kind="allreduce", ways=2, alpha=1e-5, bandwidth=1e9),
        LinkConfig(kind="allreduce", ways=8, alpha=4e-5, bandwidth=5e8),
        LinkConfig(kind="alltoall", ways=2, alpha=2e-5, bandwidth=2e9),
        LinkConfig(kind="p2p", ways=2, alpha=3e-5, bandwidth=4e9, beyond=1e9, knee=1e6),
    ]
    m = Machine(base.model_copy(update={"levels": (level.model_copy(update={"moves": tuple(links)}),)}))
    grid = Grid((2, 2, 2))
    two, all_ = m.parts(grid, (0,)), m.parts(grid, grid.axes)
    assert m.move_seconds("allreduce", two, 1e6, 2) == pytest.approx(2e-5 + 1e-3)
    assert m.move_seconds("allreduce", all_, 1e6, 2) == pytest.approx(6 * 4e-5 + 2e-3)
    assert m.move_seconds("alltoall", all_, 1e6, 7) == pytest.approx(
        7 * 2e-5 + 5e-4
    )  # between pairs, as it was measured
    for kind in ("halo", "accumulate", "p2p"):
        assert m.move_seconds(kind, two, 3e6, 2) == pytest.approx(2 * 3e-5 + 3e6 / 4e9 + 2e6 * (1 / 1e9 - 1 / 4e9))
    assert m.move_seconds("allgather", two, 1e6, 1) == pytest.approx(level.alpha + 1e6 / level.bandwidth)
    file = base.model_copy(update={"levels": m.file.levels})
    assert type(file).model_validate(file.model_dump(mode="json")) == file


def test_kernels_have_starts_and_measured_speeds_of_their_own() -> None:
    base = find_machine("laptop").file
    row = RateConfig(kernel="relu_forward", m=1000, n=8, k=1, rate=2e9)
    compute = base.compute.model_copy(update={"table": (row,), "starts": {"relu_forward": 3e-6, "update": 1e-6}})
    m = Machine(base.model_copy(update={"compute": compute}))
    x = Operand("x0", (Index(1000, ("N",)), Index(8, ("C",))))
    kernel = Kernel("relu_forward", (("N", 1000), ("C", 8)), (x,), (replace(x, value="y"),))
    local = {"N": 1000, "C": 8}
    assert kernel_seconds(m, kernel, local, "float32") == pytest.approx(2 * 4 * 8000 / 2e9 + 3e-6)
    other = replace(kernel, name="tanh_forward")
    assert kernel_seconds(m, other, local, "float32") == pytest.approx(2 * 4 * 8000 / 1e10 + base.compute.overhead)
    assert m.update_seconds(1e6, 1, 4) == pytest.approx(5e6 / 1e10 + 4e-6)
