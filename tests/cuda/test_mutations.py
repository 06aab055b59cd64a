"""Kernels with a fault put in: the tests of each must notice. (What a test cannot fail it does not test.)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from lbpar.engine.base import LocalWindow
from lbpar.engine.cupy.names import GROUPS
from tests.cuda import (
    test_activations,
    test_dropout,
    test_label_losses,
    test_lines,
    test_losses,
    test_norm,
    test_pack,
    test_pointwise,
    test_pooling,
    test_sample_norm,
    test_updates,
)
from tests.cuda.emulator import EmulationError, Emulator, compiler_found, complaints
from tests.cuda.engine import OnEmulation

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")]

W = LocalWindow
POOL = ((2, 9, 8, 3), (W(3, 2, 1, 1), W(2, 2)), (5, 4))
NOTICED = (AssertionError, EmulationError)

Check = Callable[[Emulator], Any]


def of_kind(test: Callable[..., Any], *args: Any) -> Check:
    return lambda module: test(("float", module), *args)


def dropout(module: Emulator) -> None:
    test_dropout.test_same_bits_as_on_the_cpu(module, 0.5)


def in_both_orders(check: Check) -> Check:
    """Threads from first to last, and from last to first."""

    def run(module: Emulator) -> None:
        launch = module.launch
        for order in (0, 1):
            module.launch = lambda *a, order=order, **k: launch(*a, order=order, **k)  # type: ignore[method-assign]
            check(module)

    return run


def on(file: str, test: Callable[..., Any], *args: Any) -> Check:
    """A test of the engine's methods, with the kernels of a file from a module."""

    def run(module: Emulator) -> None:
        engine = OnEmulation(np.float32)
        engine.use(file, module)
        test(("float", engine), *args)

    return run


SHAPE = (301, 16)
LABELS = [*GROUPS["label_losses.cu"][0], *GROUPS["label_losses.cu"][-1]]
CASES: list[tuple[str, Sequence[str], str, str, Check]] = [
    # what a wrong step reads or writes
    ("pack.cu", test_pack.NAMES, "o.from += i * p.from_step[d];", "o.from += i * p.to_step[d];", lambda m: test_pack.test_parts_go_to_a_buffer_and_back(m, np.float32, test_pack.CUTS[0])),
    ("pack.cu", test_pack.NAMES, "all.first_tile[k + 1] <=", "all.first_tile[k + 1] <", lambda m: test_pack.test_all_pieces_of_a_move_in_one_launch(m, np.float32, 8, "uint4")),
    ("pack.cu", test_pack.NAMES, "(rows.written ? row : i) * p.to_step[d]", "i * p.to_step[d]", lambda m: test_pack.test_sums_of_listed_rows(m, "float")),
    # statistics
    ("norm.cu", test_norm.names("float"), "a[1] += b[1] + distance * distance * share", "a[1] += b[1] + distance * share", of_kind(test_norm.test_statistics, SHAPE, 0.0)),
    ("norm.cu", test_norm.names("float"), "        __syncthreads();\n        if (p.active && p.row < rows - half) {", "        if (p.active && p.row < rows - half) {", in_both_orders(of_kind(test_norm.test_statistics, SHAPE, 0.0))),
    ("norm.cu", test_norm.names("float"), "(static_cast<A>(m) - m) * mine[0][0]", "0", of_kind(test_norm.test_gradient_sums_where_the_mean_is_large)),
    ("norm.cu", test_norm.names("float"), "if (RELU && v <= 0) v = 0;", "", of_kind(test_norm.test_apply, SHAPE, False)),
    ("norm.cu", test_norm.names("float"), "rest + (p.high * q.low + p.low * q.high)", "0", lambda m: test_norm.test_sums_of_ranks_are_added(("float", m))),
    # pooling
    ("pooling.cu", test_pooling.names("float"), "first < 0 || v > best[j]", "first < 0 || v >= best[j]", of_kind(test_pooling.test_max, POOL, "int", False)),
    ("pooling.cu", test_pooling.names("float"), "if (v > best[j] || v != v) best[j]", "if (v > best[j]) best[j]", of_kind(test_pooling.test_max, POOL, "int", True)),
    ("pooling.cu", test_pooling.names("float"), "o * s.stride[d] == from && o < s.out[d]", "o < s.out[d]", of_kind(test_pooling.test_avg, POOL)),
    # losses
    ("losses.cu", test_losses.losses_names("float"), "(c < t && d == own)", "(c <= t && d == own)", of_kind(test_losses.test_cross_entropy_over_split_classes, (41, 17), 8, 0.0)),
    ("losses.cu", test_losses.losses_names("float"), "if (c == t) g -= hit;", "if (c == t + class_start) g -= hit;", of_kind(test_losses.test_cross_entropy_over_split_classes, (41, 17), 8, 0.1)),
    ("softmax.cu", test_losses.softmax_names("float"), "row - row % (32 / WIDTH) < rows", "row < rows", of_kind(test_losses.test_softmax, (41, 17), 8)),
    # losses over labels, lines
    ("label_losses.cu", LABELS, "const bool counts = !(f < 0) && by != 0;", "const bool counts = by != 0;", on("label_losses.cu", test_label_losses.test_weighed_entropy, (3, 70, 3), 2.0, 0.1)),
    ("label_losses.cu", LABELS, "if (t == ignore) return;", "", on("label_losses.cu", test_label_losses.test_regions, (3, 70, 3), 1, True)),
    ("label_losses.cu", LABELS, "slopes + row / positions * channels", "slopes", on("label_losses.cu", test_label_losses.test_regions, (3, 70, 3), 1, True)),
    ("label_losses.cu", LABELS, "? c : channels;", "? channels - 1 - c : channels;", on("label_losses.cu", test_label_losses.test_what_metrics_follow_from, (3, 70, 3))),
    ("lines.cu", GROUPS["lines.cu"][0], "(start + index[t]) * s.inner", "(start + j) * s.inner", on("lines.cu", test_lines.test_lines, "linear", 3)),
    ("prelu.cu", GROUPS["prelu.cu"][0], "slope[one ? 0 : channel + j]", "slope[one ? 0 : j]", on("prelu.cu", test_lines.test_prelu, (41, 130), False)),
    # dropout
    ("dropout.cu", ["dropout<float, i32>"], "round < 10", "round < 9", dropout),
    ("dropout.cu", ["dropout<float, i32>"], "if (index >> 2 != counter)", "if (j == 0)", dropout),
    # updates
    ("updates.cu", test_updates.names(), "table[middle].first_chunk <= static_cast<i64>(blockIdx.x)", "table[middle].first_chunk < static_cast<i64>(blockIdx.x)", lambda m: test_updates.test_adam(m, test_updates.State("float", "float"))),
    ("updates.cu", test_updates.names(), "d = nesterov ? multiply_add(v, move, d) : v;", "d = v;", lambda m: test_updates.test_sgd(m, test_updates.State("float", "float"), 0.9, True)),
    ("updates.cu", test_updates.names(), "if (!finite) *bad = 1;", "", lambda m: test_updates.test_loss_scaling(m, ("float", "float"), np.inf)),
    # norms within samples
    ("sample_norm.cu", test_sample_norm.names("float"), "unit % s.groups * s.width", "unit % s.groups", of_kind(test_sample_norm.test_sums, (2, 7, 3, 5), 32)),
    ("sample_norm.cu", test_sample_norm.names("float"), "at / size * groups + channel / width", "at / size * groups", of_kind(test_sample_norm.test_each_element, (2, 7, 3, 5), True)),
    ("sample_norm.cu", test_sample_norm.names("float"), "row / s.positions * s.groups", "row / s.positions", of_kind(test_sample_norm.test_gradients_of_scale_and_bias, (2, 7, 3, 5))),
    # activations
    ("activations.cu", test_activations.names("float"), "v > 1 ? V(1) : v;", "v;", of_kind(test_activations.test_functions_and_slopes, "hardsigmoid", 1003, 0)),
    # pointwise
    ("pointwise.cu", test_pointwise.names("float"), "v > 0 || v != v ? v : Acc<T>(0)", "v > 0 ? v : Acc<T>(0)", of_kind(test_pointwise.test_activations, "relu", 1003, 0)),
    ("pointwise.cu", test_pointwise.names("float"), "for (i64 i = done + grid_thread();", "for (i64 i = done + 1 + grid_thread();", of_kind(test_pointwise.test_activations, "sigmoid", 1003, 0)),
]  # fmt: skip


@pytest.mark.parametrize(
    "file,names,old,new,check", CASES, ids=[f"{c[0]}: {c[2].split()[0]}... {i}" for i, c in enumerate(CASES)]
)
def test_is_noticed(file: str, names: Sequence[str], old: str, new: str, check: Check) -> None:
    right = Emulator(file, names)
    check(right)
    with pytest.raises(NOTICED):  # only what the check launches is compiled again
        check(Emulator(file, sorted(right.launched), replace={old: new}))


INDICES = {
    "pack.cu": test_pack.NAMES,
    "norm.cu": test_norm.names("float") + test_norm.names("__half"),
    "pooling.cu": test_pooling.names("float", "i64"),
    "softmax.cu": test_losses.softmax_names("float"),
    "losses.cu": test_losses.losses_names("float"),
    "label_losses.cu": LABELS,
    "lines.cu": ["along_lines<float, i64>"],
    "prelu.cu": GROUPS["prelu.cu"][0],
    "updates.cu": test_updates.names(),
    "dropout.cu": ["dropout<float, i64>"],
    "pointwise.cu": test_pointwise.names("float"),
    "activations.cu": test_activations.names("float"),
    "sample_norm.cu": test_sample_norm.names("float"),
}


@pytest.mark.parametrize("file", INDICES)
def test_no_index_loses_bits(file: str) -> None:
    """Nothing of 64 bits becomes an int by itself."""
    assert not complaints(file, INDICES[file])


def test_a_lost_bit_is_noticed() -> None:
    fault = {"const i64 row = rest,": "const int row = unit / units; const i64"}
    assert "may change value" in " ".join(complaints("dropout.cu", INDICES["dropout.cu"], fault))
