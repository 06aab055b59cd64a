"""Kernels of the oneDNN engine beside PyTorch's, op by op, on the layers of a network.

    python tests/bench/engine_ops.py --model resnet50 --batch 16 --threads 2 --repeats 7
    python tests/bench/engine_ops.py --model unet3d --batch 1 --threads 1 --clock cpu

Prints a Markdown table of medians in milliseconds, per distinct shape and times its count in the network; the two take
turns, on the same data, PyTorch in channels-last. With --clock cpu, processor time (meant for one thread) counts, so that other
work on the machine counts little. Fused rows compare with PyTorch's separate calls (relu in place).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from lbpar.engine.base import LocalWindow
from lbpar.engine.onednn.engine import OneDnnEngine

Pair = tuple[Callable[[], Any], Callable[[], Any]]


class Conv(NamedTuple):
    """One convolution: extents of its input, channels, filters, kernel, stride."""

    size: tuple[int, ...]
    c: int
    f: int
    k: int
    s: int = 1


class Norm(NamedTuple):
    """One normalisation: extents, channels, and what follows it ("", "relu", "add+relu")."""

    size: tuple[int, ...]
    c: int
    then: str


class Pool(NamedTuple):
    """One max pooling."""

    size: tuple[int, ...]
    c: int
    k: int
    s: int
    p: int


def resnet(blocks: list[int], bottleneck: bool, side: int = 224) -> Iterator[Conv | Norm | Pool]:
    """Layers of a ResNet (He et al. 2015; stride in the 3x3 convolution)."""
    h = side // 2
    yield Conv((side, side), 3, 64, 7, 2)
    yield Norm((h, h), 64, "relu")
    yield Pool((h, h), 64, 3, 2, 1)
    h, c = h // 2, 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        out = 4 * width if bottleneck else width
        for block in range(count):
            s = 2 if stage and not block else 1
            o = h // s
            chain = [(c, width, 1, 1), (width, width, 3, s), (width, out, 1, 1)]
            if not bottleneck:
                chain = [(c, width, 3, s), (width, width, 3, 1)]
            here = h
            for i, (a, b, k, stride) in enumerate(chain):
                yield Conv((here, here), a, b, k, stride)
                here //= stride
                yield Norm((here, here), b, "relu" if i < len(chain) - 1 else "add+relu")
            if c != out or s != 1:
                yield Conv((h, h), c, out, 1, s)
                yield Norm((o, o), out, "")
            h, c = o, out


def unet3d(side: int = 64, width: int = 32, levels: int = 4) -> Iterator[Conv | Norm | Pool]:
    """Convolutions of a 3-D U-Net (two per level and side), normalised."""
    c = 1
    for level in range(levels):
        size, f = (side >> level,) * 3, width << level
        for a, b in ((c, f // 2), (f // 2, f)):
            yield Conv(size, a, b, 3)
            yield Norm(size, b, "relu")
        c = f
        if level < levels - 1:
            yield Pool(size, f, 2, 2, 0)
    for level in reversed(range(levels - 1)):
        size, f = (side >> level,) * 3, width << level
        for a, b in ((3 * f, f), (f, f)):
            yield Conv(size, a, b, 3)
            yield Norm(size, b, "relu")


MODELS = {
    "resnet50": lambda: resnet([3, 4, 6, 3], True),
    "resnet18": lambda: resnet([2, 2, 2, 2], False),
    "unet3d": unet3d,
}


def to_torch(a: np.ndarray) -> torch.Tensor:
    """The same memory as a channels-last tensor."""
    return torch.from_numpy(a).movedim(-1, 1)


def new(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def conv_ops(engine: OneDnnEngine, layer: Conv, batch: int, rng: np.random.Generator) -> dict[str, Pair]:
    """Forward, backward-data (not for the first layer) and backward-weights."""
    dims, pad = len(layer.size), layer.k // 2
    out = tuple((n + 2 * pad - layer.k) // layer.s + 1 for n in layer.size)
    win = (LocalWindow(layer.k, layer.s, 1, pad),) * dims
    x, dy = new(rng, batch, *layer.size, layer.c), new(rng, batch, *out, layer.f)
    w = new(rng, layer.f, *(layer.k,) * dims, layer.c)
    tx, tdy, tw = to_torch(x), to_torch(dy), to_torch(w)
    args = ([0], [layer.s] * dims, [pad] * dims, [1] * dims, False, [0] * dims, 1)

    def backward(data: bool) -> Callable[[], Any]:
        return lambda: torch.ops.aten.convolution_backward(tdy, tx, tw, *args, [data, not data, False])

    convolve = functional.conv2d if dims == 2 else functional.conv3d
    ops: dict[str, Pair] = {
        "conv fwd": (
            lambda: engine.conv_forward(x, w, None, win, 1, out),
            lambda: convolve(tx, tw, None, layer.s, pad),
        ),
        "conv bwd data": (lambda: engine.conv_backward_data(dy, w, win, 1, layer.size), backward(True)),
        "conv bwd weights": (lambda: engine.conv_backward_weights(x, dy, win, 1), backward(False)),
    }
    if layer.c <= 3:
        del ops["conv bwd data"]
    return ops


def norm_ops(engine: OneDnnEngine, layer: Norm, batch: int, rng: np.random.Generator) -> dict[str, Pair]:
    """Normalisation with statistics of the batch; apart, and fused with what follows it."""
    x, dy, z = (new(rng, batch, *layer.size, layer.c) for _ in range(3))
    scale, bias, shift = new(rng, layer.c), new(rng, layer.c), np.zeros(layer.c)
    count = x.size // layer.c
    tx, tdy, tz, ts, tb = to_torch(x), to_torch(dy), to_torch(z), torch.from_numpy(scale), torch.from_numpy(bias)
    mean, invstd, _ = engine.norm_moments(engine.norm_sums(x, shift), shift, count, 1e-5)
    tm, ti = torch.from_numpy(mean.astype(np.float32)), torch.from_numpy(invstd.astype(np.float32))
    y = engine.relu_forward(x)
    ty = to_torch(y)

    def ours_forward(extra: Any = None, fused: bool = False) -> np.ndarray:
        m, i, _ = engine.norm_moments(engine.norm_sums(x, shift), shift, count, 1e-5)
        if fused:
            return engine.norm_relu_forward(x, m, i, scale, bias, extra)
        return engine.norm_apply(x, m, i, scale, bias)

    def ours_backward(fused: bool = False) -> np.ndarray:
        if fused:
            sums, g = engine.norm_relu_backward_sums(x, y, dy, mean, invstd)
        else:
            sums, g = engine.norm_backward_sums(x, dy, mean, invstd), dy
        return engine.norm_backward_data(x, g, mean, invstd, scale, sums, count)

    def their_forward() -> torch.Tensor:
        return functional.batch_norm(tx, None, None, ts, tb, True)

    def their_backward(g: torch.Tensor = tdy) -> Any:
        return torch.ops.aten.native_batch_norm_backward(g, tx, ts, None, None, tm, ti, True, 1e-5, [True, True, True])

    ops: dict[str, Pair] = {"norm fwd": (ours_forward, their_forward), "norm bwd": (ours_backward, their_backward)}
    if layer.then:
        ops["relu fwd"] = (lambda: engine.relu_forward(x), lambda: torch.relu(tx))
        ops["relu bwd"] = (
            lambda: engine.relu_backward(y, dy),
            lambda: torch.ops.aten.threshold_backward(tdy, ty, 0),
        )
        residual = z if "add" in layer.then else None
        ops[f"norm+{layer.then} fwd, fused"] = (
            lambda: ours_forward(residual, True),
            (lambda: their_forward().add_(tz).relu_()) if "add" in layer.then else (lambda: their_forward().relu_()),
        )
        ops[f"norm+{layer.then} bwd, fused"] = (
            lambda: ours_backward(True),
            lambda: their_backward(torch.ops.aten.threshold_backward(tdy, ty, 0)),
        )
    if "add" in layer.then:
        ops["add"] = (lambda: engine.add([x, z]), lambda: tx + tz)
    return ops


def pool_ops(engine: OneDnnEngine, layer: Pool, batch: int, rng: np.random.Generator) -> dict[str, Pair]:
    """Max pooling."""
    dims = len(layer.size)
    out = tuple((n + 2 * layer.p - layer.k) // layer.s + 1 for n in layer.size)
    win = (LocalWindow(layer.k, layer.s, 1, layer.p),) * dims
    x, dy = new(rng, batch, *layer.size, layer.c), new(rng, batch, *out, layer.c)
    tx, tdy = to_torch(x), to_torch(dy)
    _, arg = engine.max_pool_forward(x, win, out)
    aten = torch.ops.aten
    forward = aten.max_pool2d_with_indices if dims == 2 else aten.max_pool3d_with_indices
    backward = aten.max_pool2d_with_indices_backward if dims == 2 else aten.max_pool3d_with_indices_backward
    args = ([layer.k] * dims, [layer.s] * dims, [layer.p] * dims, [1] * dims, False)
    indices = forward(tx, *args)[1]
    return {
        "max pool fwd": (lambda: engine.max_pool_forward(x, win, out), lambda: forward(tx, *args)),
        "max pool bwd": (
            lambda: engine.max_pool_backward(dy, arg, win, layer.size),
            lambda: backward(tdy, tx, *args, indices),
        ),
    }


def measure(pair: Pair, repeats: int, clock: Callable[[], float]) -> list[float]:
    """Median seconds of each, taking turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        for function, record in zip(pair, times, strict=True):
            start = clock()
            function()
            if turn:
                record.append(clock() - start)
    return [statistics.median(record) for record in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="resnet50")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=["cpu", "wall"], default="wall")
    parser.add_argument("--compute", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--only", default="", help="ops whose name contains this")
    parser.add_argument("--shapes", action="store_true", help="a row per shape, not only the sums per op")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    engine = OneDnnEngine(np.float32, args.threads, args.compute)
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    rng = np.random.default_rng(0)
    makers: dict[type, Callable[..., dict[str, Pair]]] = {Conv: conv_ops, Norm: norm_ops, Pool: pool_ops}
    print(
        f"{engine.library.split(' (')[0]}, PyTorch {torch.__version__}; {args.model}, batch {args.batch}, "
        f"{args.threads} threads, {args.compute}, {args.clock} time, ms\n"
    )
    totals: dict[str, list[float]] = {}
    if args.shapes:
        print("| op | shape | times | lbpar | PyTorch | ratio |\n|" + " --- |" * 6)
    for layer, times in Counter(MODELS[args.model]()).items():
        for name, pair in makers[type(layer)](engine, layer, args.batch, rng).items():
            if args.only not in name:
                continue
            ours, theirs = (1e3 * t for t in measure(pair, args.repeats, clock))
            total = totals.setdefault(name, [0.0, 0.0])
            total[0] += times * ours
            total[1] += times * theirs
            if args.shapes:
                shape = " ".join(str(v) for v in layer).replace(", ", "x")
                print(f"| {name} | {shape} | {times} | {ours:.2f} | {theirs:.2f} | {theirs / ours:.2f} |", flush=True)
    print("\n| op | lbpar | PyTorch | ratio |\n|" + " --- |" * 4)
    for name, (ours, theirs) in totals.items():
        print(f"| {name} | {ours:.0f} | {theirs:.0f} | {theirs / ours:.2f} |")


if __name__ == "__main__":
    main()
