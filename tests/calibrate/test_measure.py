from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice, takewhile
from typing import Any

import numpy as np
import pytest

from lbpar.calibrate import kernel_speeds, links
from lbpar.calibrate.kernel_speeds import Sample, measure_compute, run_samples
from lbpar.calibrate.links import Timed, fit, measure_links, node_size
from lbpar.calibrate.machine import machine_of
from lbpar.calibrate.nobody import Nobody
from lbpar.calibrate.samples import networks, own_programs, samples, samples_by_turns
from lbpar.calibrate.spread import spread, unsure
from lbpar.config.engine import EngineConfig
from lbpar.cost.kernel_time import kernel_seconds, touched
from lbpar.cost.machine import Machine, find_machine
from lbpar.engine.registry import get_engine
from lbpar.errors import ConfigError, EngineError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.program.steps import Compute, Free, Program
from lbpar.runtime.binding import BINDERS
from lbpar.runtime.executor import Executor
from lbpar.transport.base import Transport
from lbpar.transport.virtual import VirtualWorld


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_was_measured_is_what_is_priced(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of a measured shape is priced at the time that it took."""
    engine = get_engine("numpy", dtype, 1)
    g = GraphBuilder((16, 16, 8))
    graph = g.build(g.global_avg_pool(g.conv(g.input, 16, 3, pad=1, bias=False))).with_loss(CrossEntropy())
    program = lower(graph, Plan(Grid(), {}), 2, input_grad=True)
    seen: list[Sample] = []

    def once(*args: Any) -> Iterator[Sample]:
        seen.extend(run_samples(*args))
        return iter(seen)

    monkeypatch.setattr(kernel_speeds, "run_samples", once)
    compute, apart = measure_compute(engine, dtype, [program], 3)
    assert apart == pytest.approx(np.mean([s.spread for s in seen]))
    products = {r.kernel for r in compute.table if r.k > 1}
    assert products == {"conv_forward", "conv_backward_data", "conv_backward_weights"}
    assert {(r.dtype, r.taps) for r in compute.table if r.k > 1} == {(dtype, 9)}
    fast = compute.model_copy(update={"memory_bandwidth": 1e21})  # what a copy takes is not what these kernels take
    machine = Machine(find_machine("laptop").file.model_copy(update={"compute": fast}))
    for s in seen:
        if touched(s.kernel, s.local, dtype) > 1 << 12 and s.seconds > 2 * compute.overhead:
            assert float(kernel_seconds(machine, s.kernel, s.local, dtype)) == pytest.approx(s.seconds, rel=1e-2)


def test_samples_show_every_kernel_that_takes_time() -> None:
    """All kernels of the trainer are run, but for those on a few numbers, of inference, or of losses that rarely matter."""
    engine = get_engine("numpy", "float32", 1)
    seen = {s.kernel.name for s in run_samples(engine, (p for p in samples() if p.batch == 4), 1)}
    rare = {"mse", "bce", "l1", "huber", "dice", "linear", "norm_inference", "reshape", "conv"}
    rare |= {
        "label_factors",
        "class_",
        "weighed_entropy",
        "smoothed_entropy",
        "region",
        "count_known_hits",
        "softmax_first",
        "error_sums",
        "sample_counts",
    }
    missing = {k for k in BINDERS if k not in seen and not any(k.startswith(r) for r in rare)}
    whole = {"norm_forward", "sample_norm_forward"}  # whose parts are measured
    assert missing - whole <= {"identity", "norm_sums", "norm_moments", "norm_backward_data_add", "thin"}


def test_auto_is_measured_and_names_are_looked_up() -> None:
    machine = machine_of("auto", EngineConfig(name="numpy", threads=1))
    assert machine.name == "auto" and machine.file.compute.table and machine.file.cores is None
    assert machine_of("auto", EngineConfig(name="numpy", threads=1)).file is machine.file
    assert machine_of("cori-knl", EngineConfig()).name == "cori-knl"
    with pytest.raises(ConfigError, match="did you mean"):
        machine_of("cori-kn", EngineConfig())


@pytest.mark.parametrize(
    ("hosts", "size"),
    [("aaaa", 4), ("aabb", 2), ("aabbaa", 2), ("abab", 1), ("aabbb", 1), ("abc", 1), ("a", 1)],
)
def test_nodes_are_runs_of_equal_length(hosts: str, size: int) -> None:
    """Also where a node comes twice, as in the third case."""
    assert node_size(hosts) == size


def timed(seconds: float, messages: float, size: int, packing: float = 0.0) -> Timed:
    return Timed("node", "allgather", 2, size, seconds, 0.0, 0.0, 9, (messages, float(size), packing))


SIZES = [(2, 256), (2, 4096), (4, 65_536), (2, 1 << 20), (2, 1 << 23)]


def test_fit_recovers_what_times_were_made_of() -> None:
    line = fit([timed(5e-6 * m + 1e-9 * n + 1e-12 * n, m, n, 1e-12 * n) for m, n in SIZES])
    assert (line.alpha, line.bandwidth, line.beyond) == (pytest.approx(5e-6), pytest.approx(1e9), None)


def test_an_outlier_does_not_bend_the_line() -> None:
    """Least squares would follow it; the sum of absolute residuals is least where most points lie."""
    times = [5e-6 * m + 1e-9 * n for m, n in SIZES]
    times[2] *= 30
    line = fit([timed(t, m, n) for t, (m, n) in zip(times, SIZES, strict=True)])
    assert (line.alpha, line.bandwidth) == (pytest.approx(5e-6), pytest.approx(1e9))


def test_bytes_that_no_cache_holds_may_take_longer() -> None:
    sizes = [(2, 1 << i) for i in range(8, 24)]
    times = [5e-6 * m + 1e-9 * n + 3e-9 * max(0, n - (1 << 16)) for m, n in sizes]
    points = [timed(t, m, n) for t, (m, n) in zip(times, sizes, strict=True)]
    line = fit(points, [n for _, n in sizes[2:-1]])
    assert (line.knee, line.beyond) == (1 << 16, pytest.approx(1 / 4e-9))
    assert [line.seconds(p) for p in points] == pytest.approx(times)
    assert fit([timed(5e-6 * m + 1e-9 * n, m, n) for m, n in sizes], [1 << 16]).beyond is None


@pytest.mark.parametrize("times", [[1e-6] * 5, [1e-10 * n**1.5 for _, n in SIZES]])
def test_what_no_line_explains_has_large_residuals_and_no_unknown_below_its_least(times: list[float]) -> None:
    points = [timed(t, m, n) for t, (m, n) in zip(times, SIZES, strict=True)]
    line = fit(points)
    assert line.alpha >= 1e-8 and line.bandwidth <= 1e13
    assert line.error == pytest.approx(sum(abs(line.seconds(p) / p.seconds - 1) for p in points))


def test_spread_is_half_the_distance_of_the_quartiles() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 1000.0]) == pytest.approx(1 / 3)
    assert spread([7.0]) == 0.0


def test_the_median_of_many_repetitions_is_surer_than_one_of_them() -> None:
    """Its standard error is what medians of so many drawings are apart."""
    draw = np.random.default_rng(3)
    for n in (9, 25, 100):
        runs = draw.normal(1.0, 0.2, (4000, n))
        assert np.mean([unsure(list(r)) for r in runs]) == pytest.approx(np.std(np.median(runs, axis=1)), rel=0.12)
    assert unsure([1.0, 1.0]) == 1.0


def links_of(budget: float) -> list[Timed]:
    def rank(transport: Transport) -> list[Timed]:
        engine = get_engine("numpy", "float32", 1)
        return measure_links(engine, transport, ["a", "a"], False, find_machine("laptop").file, budget)[1]

    (found, same) = VirtualWorld(Grid((2,))).run(rank)
    assert found == same
    return found


def test_moves_whose_medians_are_not_sure_are_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here those of which there are fewer than thirty repetitions, until time is over."""
    monkeypatch.setattr(links, "MOST_ROUNDS", 7)
    monkeypatch.setattr(links, "ROWS", (1, 64))
    monkeypatch.setattr(links, "MOST_ROWS", 128)
    monkeypatch.setattr(links, "unsure", lambda times: 0.3 if len(times) < 30 else 0.01)
    found = links_of(10.0)
    assert {t.repeats for t in found} == {7 + 5 * links.MORE_ROUNDS} and {t.unsure for t in found} == {0.01}
    monkeypatch.setattr(links, "MOST_REPEATS", 17)
    assert {t.repeats for t in links_of(10.0)} == {7 + 2 * links.MORE_ROUNDS}


def test_a_machine_too_slow_for_all_moves_has_some_of_every_link_and_all_in_doubt() -> None:
    found = links_of(0.0)
    of_kind = {kind: [t.bytes for t in found if t.kind == kind] for kind in links.MOVES}
    every = (*links.ROWS, links.MOST_ROWS)
    assert all(links.SIZES <= len(sizes) < len(every) for sizes in of_kind.values())
    assert min(of_kind["allreduce"]) == 256 and max(of_kind["allreduce"]) >= links.ROWS[3] * 256
    assert all(t.repeats == 1 and t.unsure == 1.0 for t in found)


def test_a_networks_own_kernels_are_measured_on_the_blocks_that_ranks_have() -> None:
    """Every split of two ranks, without the other rank; the numbers that arrive from it are zero."""
    g = GraphBuilder((8, 8, 4))
    x = g.relu(g.norm(g.conv(g.input, 8, 3, pad=1, bias=False, name="conv")))
    graph = g.build(g.linear(g.flatten(x), 4)).with_loss(CrossEntropy())
    found = list(run_samples(get_engine("numpy", "float32", 1), own_programs(graph, 4, 2), 1))
    blocks = {tuple(s.local[loop] for loop in "NFCHW") for s in found if s.kernel.name == "conv_forward"}
    whole = (4, 8, 4, 8, 8)
    assert blocks == {whole, *(tuple(e // 2 if i == j else e for j, e in enumerate(whole)) for i in range(5))}


def test_nobody_answers_with_zeros() -> None:
    transport = Nobody(Grid((2,)))
    assert transport.allgather(np.ones(3), [3, 2], (0,)).wait().tolist() == [0.0] * 5
    assert transport.reduce_scatter(np.ones(5), [3, 2], (0,)).wait().shape == (3,)
    assert transport.allreduce(np.ones(2), (0,)).wait().tolist() == [1.0, 1.0]
    assert transport.exchange({1: np.ones(2)}, {1: 4}, np.float64, (0,)).wait()[1].tolist() == [0.0] * 4


def test_the_samples_have_a_loss_and_a_batch() -> None:
    for graph, batch in islice(networks(), 3):
        assert graph.loss is not None and batch >= 1


def test_a_kernel_that_takes_no_time_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a reshape on a device, whose queue has nothing to do."""
    engine = get_engine("numpy", "float32", 1)
    found = [replace(s, seconds=0.0) for s in run_samples(engine, islice(samples(), 1), 1)]
    monkeypatch.setattr(kernel_speeds, "run_samples", lambda *_: iter(found))
    monkeypatch.setattr(kernel_speeds, "STREAM", 1 << 10)
    compute, _ = measure_compute(engine, "float32", [], 1)
    fast = compute.model_copy(update={"memory_bandwidth": 1e21})  # copies are measured here and now
    machine = Machine(find_machine("laptop").file.model_copy(update={"compute": fast}))
    assert all(0 <= float(kernel_seconds(machine, s.kernel, s.local, "float32")) < 1e-5 for s in found)


def test_freeing_counts_as_the_kernel_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel takes one tick of the clock, and every step that frees, too."""
    engine, clock = get_engine("numpy", "float32", 1), count()
    monkeypatch.setattr(engine, "mark", lambda: next(clock), raising=False)
    monkeypatch.setattr(engine, "elapsed", lambda start, end: float(end - start), raising=False)
    program = next(samples())
    monkeypatch.setattr(Executor, "execute", lambda self, index: None)
    found = [s.seconds for s in run_samples(engine, [program], 2)]
    steps = program.steps
    kernels = [i for i, s in enumerate(steps) if isinstance(s, Compute)]
    want = [1.0 + len(list(takewhile(lambda s: isinstance(s, Free), steps[i + 1 :]))) for i in kernels]
    assert found == want and max(want) > 1


def test_as_many_networks_take_turns_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that are shown come out, in order, however many there is room for at a time."""
    engine, programs = get_engine("numpy", "float32", 1), list(islice(samples(), 4))

    def names(room: int) -> list[str]:
        monkeypatch.setattr(kernel_speeds, "ROOM", room)
        return [s.kernel.name for s in run_samples(engine, iter(programs), 1)]

    assert names(1) == names(1 << 30) and len(names(1)) > 4


def test_a_limited_time_is_for_some_programs_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on by a second whenever it is looked at, as it may on a machine that is busy."""
    clock, ran = count(), Counter[int]()
    monkeypatch.setattr(kernel_speeds, "perf_counter", lambda: float(next(clock)))
    once = kernel_speeds._Run.once

    def noted(run: Any) -> None:
        ran[id(run)] += 1
        once(run)

    monkeypatch.setattr(kernel_speeds._Run, "once", noted)
    engine, programs = get_engine("numpy", "float32", 1), samples_by_turns()
    found = list(run_samples(engine, programs, 3, 50.0, every=False))
    assert (
        15 <= len(ran) <= 20 and min(ran.values()) >= 2
    )  # of what is ready, 40 % of the time, each at least once after its first run
    assert sum(ran.values()) < 4 * len(ran)
    few = len(ran)
    ran.clear()
    list(run_samples(engine, islice(samples(), few + 5), 3, 50.0))
    assert len(ran) == few + 5 and set(ran.values()) <= {2, 3}  # all of them, but not once more
    assert {s.kernel.product for s in found} == {"forward", "backward_data", "backward_weights", None}


def test_the_samples_by_turns_are_the_samples() -> None:
    def kinds(programs: Iterator[Program]) -> list[str]:
        return sorted(f"{p.batch} {[n.op for n in p.graph.nodes]}" for p in programs)

    assert kinds(samples_by_turns()) == kinds(samples())


def test_whether_volumes_are_copied_is_what_the_engine_says(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = get_engine("numpy", "float32", 1)
    monkeypatch.setattr(kernel_speeds, "STREAM", 1 << 10)
    for said in (True, False):
        monkeypatch.setattr(engine, "volume_copies", said, raising=False)
        assert measure_compute(engine, "float32", islice(samples(), 1), 1)[0].volume_copies == said


def test_copies_of_parts_are_measured_with_their_start() -> None:
    compute = measure_compute(get_engine("numpy", "float32", 1), "float32", islice(samples(), 1), 3)[0]
    assert set(compute.speeds) == {"rows", "columns", "update"} and compute.starts["slice"] > 0
    machine = Machine(find_machine("laptop").file.model_copy(update={"compute": compute}))
    assert machine.copy_seconds(1e6, True) == pytest.approx(2e6 / compute.speeds["columns"])
    assert machine.copy_seconds(1e6) == pytest.approx(2e6 / compute.speeds["rows"])


def test_planning_where_the_engine_is_missing_says_how_to_plan_for_another_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(EngineError, match=r"machine: auto measures this machine: .*needs CuPy.*name it: --machine"):
        machine_of("auto", EngineConfig(name="cupy", threads=3))
