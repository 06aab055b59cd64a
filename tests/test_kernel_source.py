"""Kernel sources are found, and their index helpers are right (compiled for the host: no device needed)."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from lbpar import kernel_source
from lbpar.errors import EngineError

PROGRAM = r"""
#include <cstdio>
#include "common.cuh"
using namespace lbpar;
int main() {
    long long kind, a, b, c, d, e, f;
    while (std::scanf("%lld %lld %lld %lld %lld %lld %lld", &kind, &a, &b, &c, &d, &e, &f) == 7) {
        if (kind == 0) std::printf("%lld %lld %lld %lld\n", div_up(a < 0 ? -a : a, b), div_floor(a, b),
                                   block_size(c, b, d), block_start(c, b, d));
        if (kind == 1) {
            Window w{int(a), int(b), int(c), int(d)};  // kernel, stride, dilation, pad; e = output, f = input extent
            std::printf("%d %d", w.tap_begin(e), w.tap_end(e, f));
            for (int k = 0; k < a; ++k) std::printf(" %lld %lld", w.input(e, k), w.output(w.input(e, k), k, e + 1));
            std::printf("\n");
        }
        if (kind == 2) {
            const index_t from[3] = {a, b, c}, to[3] = {a + 2, b + 3, c + 4}, shift[3] = {1, 2, 3};
            std::printf("%lld\n", Position<3>(d, from).flat(to, shift));
        }
    }
}
"""


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    folder = tmp_path_factory.mktemp("helper")
    (folder / "main.cpp").write_text(PROGRAM)
    include = f"-I{kernel_source.folder()}"
    subprocess.run(
        [compiler, "-std=c++17", "-Wall", "-Werror", include, "main.cpp", "-o", "main"], cwd=folder, check=True
    )
    return folder / "main"


def ask(helper: Path, kind: int, cases: list[tuple[int, ...]]) -> list[list[int]]:
    text = "\n".join(" ".join(map(str, (kind, *case, *[0] * (6 - len(case))))) for case in cases)
    out = subprocess.run([helper], input=text, capture_output=True, text=True, check=True).stdout
    return [[int(v) for v in line.split()] for line in out.splitlines()]


def test_divisions_and_blocks(helper: Path) -> None:
    cases = [(a, p, n, i) for a in range(-7, 8) for p in (1, 2, 3, 5) for n in (0, 1, 2, 7, 12) for i in range(p)]
    for (a, p, n, i), got in zip(cases, ask(helper, 0, cases), strict=True):
        sizes = [len(range(k, n, p)) for k in range(p)]
        assert got == [-(-abs(a) // p), a // p, sizes[i], sum(sizes[:i])]


def test_window_taps(helper: Path) -> None:
    cases = list(itertools.product((1, 2, 3), (1, 2, 3), (1, 2), (-2, 0, 1, 4), (0, 1, 3), (0, 1, 5)))
    for (kernel, stride, dilation, pad, o, n), (begin, end, *taps) in zip(cases, ask(helper, 1, cases), strict=True):
        reads = [o * stride + k * dilation - pad for k in range(kernel)]
        assert taps[::2] == reads
        assert taps[1::2] == [o] * kernel  # the adjoint finds the same output again
        assert [k for k in range(kernel) if 0 <= reads[k] < n] == list(range(begin, end))


def test_position_moves_a_block_into_a_larger_array(helper: Path) -> None:
    cases = [(2, 3, 4, i) for i in range(24)]
    for (_, h, w, i), (got,) in zip(cases, ask(helper, 2, cases), strict=True):
        a, rest = divmod(i, h * w)
        b, c = divmod(rest, w)
        assert got == ((a + 1) * (h + 3) + b + 2) * (w + 4) + c + 3


def test_unknown_source_names_the_known_ones() -> None:
    assert "common.cuh" in kernel_source.names()
    with pytest.raises(EngineError, match=r"no source 'halo.cuu'.*common\.cuh"):
        kernel_source.read("halo.cuu")
