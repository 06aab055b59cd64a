"""Random local operations of the oneDNN engine on poisoned memory between guard pages, beside the reference in float64.

    python -m tests.engine.fuzz_onednn --cases 20000 --seed 1 --dtype bfloat16 --ops weights forward --threads 2
    ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 LBPAR_DNNL=/path/to/libdnnl.so.3 python -m tests.engine.fuzz_onednn --raw

Operands, results and scratch memory start as NaN and end (or begin) at a page that may not be touched, so stale memory that
is read shows as NaN and an access outside ends the process. A child process runs the cases, and another one goes on after
a crash. Values are small integers, which every type and order of summation gets exactly right. ``--raw`` leaves out
`lbpar.engine.onednn.conv.safe_type`, so that it shows what a library does by itself: a library that passes needs none
of it. Faults are printed, a line each; the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lbpar.engine.base import LocalWindow
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.onednn import conv
from lbpar.engine.onednn.engine import OneDnnEngine
from lbpar.engine.onednn.library import SLACK
from lbpar.errors import EngineError

PAGE = mmap.PAGESIZE
LINE = 64
"""Bytes of a cache line, the alignment of the engine's memory: what shares the last line with an array may be read."""

OPS = ("forward", "data", "weights", "max_pool", "avg_pool", "linear")


class Case(NamedTuple):
    """One local operation: samples, inputs and outputs per dimension, windows, channels, filters, groups."""

    op: str
    n: int
    inner: tuple[int, ...]
    outer: tuple[int, ...]
    win: tuple[tuple[int, int, int, int], ...]
    c: int
    f: int
    groups: int = 1
    bias: bool = False
    at_end: bool = True


KNOWN = (
    # Weight gradients: a tap that sees only padding in the width, by stride, by a narrow block, by dilation.
    Case("weights", 4, (8, 1), (4, 1), ((3, 2, 1, 1), (3, 2, 1, 1)), 16, 16),
    Case("weights", 4, (9, 2), (3, 1), ((3, 3, 1, 1), (3, 3, 1, 1)), 16, 16),
    Case("weights", 1, (5, 1), (5, 1), ((3, 1, 1, 1), (3, 1, 2, 2)), 32, 16, 2, True),
    Case("weights", 2, (1,), (1,), ((5, 2, 1, 2),), 32, 32),
    # Volumes: kernel 3 on 2, kernel 5 on 3 and 4, kernel 7 on (8, 2, 8), kernel 3 on 1.
    *(
        Case("weights", 2, size, size, ((k, 1, 1, k // 2),) * 3, 16, 16)
        for k, size in ((3, (2, 2, 2)), (5, (3, 3, 3)), (5, (4, 4, 4)), (7, (8, 2, 8)), (3, (1, 1, 1)))
    ),
    # The stem of a residual network on a thin block, float32 too.
    Case("weights", 2, (5, 5, 5), (3, 3, 3), ((7, 2, 1, 3),) * 3, 16, 16),
    Case("weights", 1, (5, 3, 2), (3, 3, 1), ((7, 2, 1, 3), (2, 1, 2, 1), (4, 4, 2, 0)), 32, 16),
    # A dilated height, a wide block, channels that leave vectors half empty.
    Case("weights", 2, (9, 40), (9, 40), ((3, 1, 2, 2), (3, 1, 1, 1)), 17, 32),
    Case("weights", 4, (9, 29), (9, 29), ((3, 1, 2, 2), (5, 1, 1, 2)), 2, 2, 2),
    # Strided single taps: over rows, and on few channels.
    Case("weights", 3, (57, 62), (15, 62), ((1, 4, 1, 0), (3, 1, 1, 1)), 33, 8),
    Case("weights", 2, (8, 11), (4, 11), ((1, 2, 1, 0), (1, 1, 1, 0)), 1, 32),
    # No tap reads anything; an output reads nothing, after which no kernel can be made.
    Case("forward", 2, (1, 8), (1, 6), ((3, 1, 3, 1), (3, 1, 3, 1)), 32, 32),
    Case("forward", 3, (1, 2, 6), (3, 2, 2), ((1, 4, 1, 0),) * 3, 48, 8),
    # Patches of an even width, of channels that fill half a vector.
    Case("forward", 2, (8, 8), (4, 4), ((2, 2, 1, 0), (2, 2, 1, 0)), 48, 16),
    Case("forward", 1, (32, 32), (4, 4), ((8, 8, 1, 0), (8, 8, 1, 0)), 12, 32),
    # A depth strided further than its kernel reaches.
    Case("forward", 2, (46, 4, 6), (12, 3, 7), ((1, 4, 1, 0), (7, 1, 1, 3), (3, 1, 1, 1)), 24, 2),
    # Single taps in volumes, odd channels; strided and dilated volumes.
    Case("forward", 1, (2, 1, 38), (2, 1, 38), ((1, 1, 1, 0),) * 3, 17, 32),
    Case("data", 1, (2, 2, 19), (2, 2, 19), ((1, 1, 1, 0),) * 3, 16, 3),
    Case("data", 1, (3, 6, 28), (1, 5, 9), ((2, 2, 1, 0), (3, 2, 3, 3), (3, 3, 1, 0)), 15, 48),
    # Pairs of channels of which one is not there.
    Case("forward", 5, (3, 7, 5), (1, 1, 1), ((7, 1, 1, 0),) * 3, 66, 128, 2),
)
"""Cases of each fault found with oneDNN 3.2."""


class GuardedMemory:
    """Arrays full of NaN, each between two pages that may not be touched; stands in for the engine's `Arena`."""

    def __init__(self) -> None:
        self.at_end = True
        self._used: list[tuple[int, mmap.mmap, int, int]] = []
        self._free: dict[int, list[mmap.mmap]] = {}

    def take(self, nbytes: int) -> Any:
        """Bytes that are 0xFF (NaN in every type), at the end of their pages or at the beginning."""
        room = -(-max(nbytes, 1) // LINE) * LINE
        pages = -(-room // PAGE)
        spare = self._free.setdefault(pages, [])
        block = spare.pop() if spare else _guarded(pages)
        inside = np.frombuffer(block, np.uint8)[PAGE:-PAGE]
        inside.fill(0xFF)
        start = pages * PAGE - room if self.at_end else 0
        self._used.append((pages, block, start, nbytes))
        return inside[start : start + nbytes]

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """As `Arena.empty`."""
        dtype = np.dtype(dtype)
        return self.take(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize).view(dtype).reshape(shape)

    def put(self, a: Any) -> Any:
        """A guarded copy."""
        out = self.empty(a.shape, a.dtype)
        out[...] = a
        return out

    def reset(self) -> bool:
        """Take all memory back; whether something was written beside it."""
        spilled = False
        for pages, block, start, nbytes in self._used:
            inside = np.frombuffer(block, np.uint8)[PAGE:-PAGE]
            spilled |= bool((inside[:start] != 0xFF).any() or (inside[start + nbytes :] != 0xFF).any())
            self._free[pages].append(block)
        self._used = []
        return spilled


def _guarded(pages: int) -> mmap.mmap:
    block = mmap.mmap(-1, (pages + 2) * PAGE)
    first = np.frombuffer(block, np.uint8).ctypes.data
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for address in (first, first + (pages + 1) * PAGE):
        if protect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    return block


class Subject:
    """An engine on guarded memory, and what it should compute."""

    def __init__(self, dtype: str, threads: int) -> None:
        self.engine = OneDnnEngine(np.float32, threads=threads, compute=dtype)
        self.engine.native = None  # our own C passes have tests of their own
        self.memory = GuardedMemory()
        self.engine.arena = self.memory  # type: ignore[assignment]
        context = self.engine._context
        context.area = self._area  # type: ignore[method-assign]
        self.reference = NumpyEngine(np.float64)

    def _area(self, _: str, nbytes: int) -> Any:
        """As `DnnlContext.area`, in new memory each time."""
        context = self.engine._context
        context.moved += 1
        return context.pointer(self.memory.take(nbytes + SLACK))

    def check(self, case: Case, seed: int) -> str:
        """What is wrong with one operation; empty if nothing is."""
        self.engine._plans.clear()
        self.memory.at_end = case.at_end
        rng = np.random.default_rng(seed)
        arrays = [rng.integers(-8, 9, shape).astype(np.float32) for shape in _shapes(case)]
        want = _run(self.reference, case, [a.astype(np.float64) for a in arrays])
        x, dy, *parameters = arrays
        given = [self.engine._narrow(a) if self.engine.activations != np.float32 else a for a in (x, dy)]
        got = _run(self.engine, case, [self.memory.put(a) for a in (*given, *parameters)])
        # Averages are rounded; the rest is exact, but for what is stored in bfloat16.
        near = 1e-5 if case.op == "avg_pool" else 0.0
        wrong = [
            int((~np.isclose(self.engine.to_host(a), b, 2**-8 if self.engine._is_half(a) else near, 64 * near)).sum())
            for a, b in zip(got, want, strict=True)
        ]
        del got
        spilled = self.memory.reset()
        return (f"wrong: {wrong}" if any(wrong) else "") + (" writes outside" if spilled else "")

    def kernel(self) -> str:
        """oneDNN's name of the kernel of the last operation."""
        plan = next(iter(self.engine._plans.values()), None)
        run = getattr(plan, "run", getattr(plan, "forward", plan))
        return getattr(run, "implementation", "reference")


def _shapes(case: Case) -> Iterator[tuple[int, ...]]:
    """Of x, dy, w, b."""
    yield (case.n, *case.inner, case.c)
    yield (case.n, *case.outer, case.f)
    yield (case.f, *(k for k, *_ in case.win), case.c // case.groups)
    yield (case.f,)


def _run(e: Any, case: Case, arrays: Sequence[Any]) -> tuple[Any, ...]:
    x, dy, w, b = arrays
    win = tuple(LocalWindow(*dim) for dim in case.win)
    if case.op == "forward":
        return (e.conv_forward(x, w, b if case.bias else None, win, case.groups, case.outer),)
    if case.op == "data":
        return (e.conv_backward_data(dy, w, win, case.groups, case.inner),)
    if case.op == "weights":
        if case.bias:
            return tuple(e.conv_backward_weights_bias(x, dy, win, case.groups))
        return (e.conv_backward_weights(x, dy, win, case.groups),)
    if case.op == "max_pool":
        y, arg = e.max_pool_forward(x, win, case.outer)
        dx = e.to_host(e.max_pool_backward(dy, arg, win, case.inner))
        return y, dx.sum(axis=tuple(range(1, dy.ndim - 1)))
    if case.op == "avg_pool":
        divisors = [np.full(n, k) for n, (k, *_) in zip(case.outer, case.win, strict=True)]
        return e.avg_pool_forward(x, win, case.outer, divisors), e.avg_pool_backward(dy, win, case.inner, divisors)
    bias = b if case.bias else None
    return e.linear_forward(x, w, bias), e.linear_backward_data(dy, w), e.linear_backward_weights(x, dy)


def draw(r: random.Random, ops: Sequence[str]) -> Case:
    """A case of blocks as split layers have them: small, cropped, padded far, reaching past their ends."""
    op = r.choice(ops)
    dims = 0 if op == "linear" else r.choice((1, 2, 2, 2, 3, 3, 3))
    pool = op.endswith("pool")
    inner, outer, win = [], [], []
    alike = r.random() < 0.4
    big = 6 if dims == 3 else 10
    for d in range(dims):
        if d == 0 or not alike or r.random() < 0.2:
            kernel = r.choice((1, 1, 2, 3, 3, 3, 4, 5, 7))
            stride = r.choice((1, 1, 1, 1, 2, 2, 3, 4))
            dilation = r.choice((1, 1, 1, 1, 2, 3))
            reach = (kernel - 1) * dilation
            pad = r.choice((0, reach // 2, reach // 2, r.randint(0, reach), r.randint(-2, 2 + reach)))
            if r.random() < 0.1:
                stride, dilation, pad = kernel, 1, 0  # patches
            if pool:
                dilation, pad = 1, min(pad, kernel - 1)
        n = r.randint(1, big) if r.random() < 0.85 else r.randint(big, 8 * big)
        full = (n + 2 * pad - (kernel - 1) * dilation - 1) // stride + 1
        if pool:
            full = max(1, min(full, (n + pad - 1) // stride + 1))
        inner.append(n)
        outer.append(max(1, full if pool or r.random() < 0.6 else r.randint(1, max(1, full + 2))))
        win.append((kernel, stride, dilation, pad))
    groups = 1 if pool or op == "linear" else r.choice((1, 1, 1, 1, 2, 3, 4, 8))
    widths = (1, 1, 2, 3, 4, 5, 8, 15, 16, 16, 17, 24, 32, 33, 48, 64, 96, 128)
    c, f = (r.choice(widths) if r.random() < 0.7 else r.randint(1, 128) for _ in range(2))
    if groups > 1 and r.random() < 0.3:
        c = f = 1  # depthwise
    samples = r.choice((1, 1, 2, 3, 4, 5, 8, 16))
    taps = int(np.prod([k for k, *_ in win]))
    while samples > 1 and samples * np.prod(outer) * taps * c * f * groups > 2e7:
        samples //= 2
    while c * f > 1 and samples * np.prod(outer) * taps * c * f * groups > 2e7:
        c, f = max(1, c // 2), max(1, f // 2)
    c, f = c * groups, f * groups
    if pool:
        f = c
    flag = r.random() < 0.5
    return Case(op, samples, tuple(inner), tuple(outer), tuple(win), c, f, groups, flag, r.random() < 0.7)


def faults(cases: Iterable[Case], dtype: str, threads: int = 1) -> Iterator[tuple[Case, str, str]]:
    """Cases that go wrong, oneDNN's kernel, and how. Children run them: an access outside ends the child."""
    cases = list(cases)
    at = 0
    while at < len(cases):
        source, sink = os.pipe()
        child = os.fork()
        if not child:
            os.close(source)
            _child(cases, at, dtype, threads, sink)
        os.close(sink)
        running = True
        with os.fdopen(source) as lines:
            for line in lines:
                i, kernel, wrong = json.loads(line)
                running = wrong is None
                if wrong:
                    yield cases[i], kernel, wrong
                at = i if running else i + 1
        _, status = os.waitpid(child, 0)
        if running and at < len(cases):
            yield cases[at], kernel, f"the process ended with {os.waitstatus_to_exitcode(status)}"
            at += 1


def _child(cases: Sequence[Case], first: int, dtype: str, threads: int, sink: int) -> None:
    status = 1
    try:
        subject = Subject(dtype, threads)
        with os.fdopen(sink, "w", buffering=1) as out:
            named = conv.Primitive.__call__

            def told(self: Any, *addresses: Any) -> None:
                print(json.dumps((i, self.implementation, None)), file=out)
                named(self, *addresses)

            conv.Primitive.__call__ = told  # type: ignore[method-assign]
            for i in range(first, len(cases)):
                print(json.dumps((i, "at creation", None)), file=out)
                try:
                    wrong = subject.check(cases[i], i)
                except EngineError as error:
                    print(json.dumps((i, "at creation", str(error))), file=out)
                    break  # oneDNN may make no more kernels after one that it could not make
                print(json.dumps((i, subject.kernel(), wrong)), file=out)
        status = 0
    finally:
        os._exit(status)


def unrouted() -> None:
    """Let oneDNN compute everything in the type asked for."""
    conv.safe_type = lambda _result, _geometry, _channels, wanted: wanted


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cases", type=int, default=20000)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    p.add_argument("--raw", action="store_true", help="without lbpar's way round known faults")
    args = p.parse_args()
    if args.raw:
        unrouted()
    r = random.Random(args.seed)
    cases = [*KNOWN, *(draw(r, args.ops) for _ in range(args.cases))]
    count: Counter[tuple[str, str, str]] = Counter()
    for case, kernel, wrong in faults(cases, args.dtype, args.threads):
        count[case.op, kernel, wrong.partition(":")[0]] += 1
        print(tuple(case), kernel, wrong, flush=True)
    for (op, kernel, kind), n in sorted(count.items()):
        print(f"{n:6} {op} {kernel}: {kind}")
    print(f"{sum(count.values())} of {len(cases)} cases are wrong", flush=True)
    return int(bool(count))


if __name__ == "__main__":
    sys.exit(main())
