"""How fast a GPU is beside what it can do: copies, products, convolutions; every kernel of a network beside its floor; whole training steps beside
PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from time import perf_counter
from typing import Any

import numpy as np

from lbpar.calibrate.kernel_speeds import copy_speed, run_samples
from lbpar.cost.kernel_time import flops, matrix_shape, touched
from lbpar.engine.base import Engine, LocalWindow
from lbpar.engine.registry import get_engine
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.models.registry import build_model
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.runtime.executor import Executor
from lbpar.runtime.initial import initial_state
from lbpar.runtime.optim.rules import SGD
from lbpar.selftest.room import fitting, left_out
from lbpar.transport.single import SingleTransport

TRIES = 5
WARM, SECONDS, MOST = 3, 2.0, 50
"""Steps of a network before it is timed, seconds to time, and most steps in them."""

SIZES: dict[str, tuple[int, ...]] = {"resnet50": (224, 224, 3), "unet3d": (128, 128, 128, 1)}
NETWORKS = (("resnet50", 256), ("resnet50", 64), ("unet3d", 2))
"""Those whose steps are timed, and samples of a step."""

AUTOTUNE = ", autotune"
"""How names of parts end in which plans are timed."""

NO_PLANS = "autotune times plans of cuDNN, which cannot be used here"

TINY: dict[str, tuple[int, ...]] = {"resnet50": (32, 32, 3), "unet3d": (8, 8, 8, 1)}


def ceilings(ways: Mapping[str, Mapping[str, Any]], tiny: bool = False) -> dict[str, Any]:
    """Speeds of a copy, of large products and of a usual convolution, for each way to compute."""
    n, sizes = (16, (1, 8, 8)) if tiny else (8192, (256, 56, 64))
    copied = _copy(get_engine("cupy", "float32"), n * n)
    rows = []
    for name, options in ways.items():
        engine = get_engine("cupy", **options)
        rows.append({"": name, "product": _product(engine, n), **_convolution(engine, *sizes)})
    shown = "; ".join(f"{row['']} " + ", ".join(f"{k} {v:.0f}" for k, v in row.items() if k) for row in rows)
    title = "TFLOP/s of large products and of 3x3 convolutions of 64 channels"
    return {
        "found": f"copies {copied:.0f} GB/s; TFLOP/s: {shown}",
        "copy": copied,
        "table": {"title": title, "rows": rows},
    }


def _noise(engine: Engine, *shape: int) -> Any:
    """Random numbers, which repeat: products of zeros take less power, and so less time."""
    values = np.random.default_rng(0).standard_normal(min(prod(shape), 1 << 20), np.float32)
    return engine.copy(engine.from_host(np.resize(values, shape)), engine.activations)


def _copy(engine: Engine, elements: int) -> float:
    a = _noise(engine, elements)
    return 2 * a.nbytes / _timed(engine, lambda: engine.relu_forward(a)) / 1e9


def _product(engine: Engine, n: int) -> float:
    a, b = (_noise(engine, n, n) for _ in range(2))
    return 2 * n**3 / _timed(engine, lambda: engine.linear_forward(a, b, None)) / 1e12


def _convolution(engine: Engine, images: int, side: int, channels: int) -> dict[str, float]:
    x = _noise(engine, images, side, side, channels)
    w, window = _noise(engine, channels, 3, 3, channels), (LocalWindow(3, pad=1),) * 2
    passes: dict[str, Callable[[], Any]] = {
        "forward": lambda: engine.conv_forward(x, w, None, window, 1, (side, side)),
        "data": lambda: engine.conv_backward_data(x, w, window, 1, (side, side)),
        "weights": lambda: engine.conv_backward_weights(x, x, window, 1),
    }
    work = 2 * images * side * side * channels * channels * 9
    return {name: work / _timed(engine, run) / 1e12 for name, run in passes.items()}


def _timed(engine: Engine, run: Callable[[], Any]) -> float:
    """Seconds of the fastest of some runs, after one that compiles."""
    run()
    seconds = []
    for _ in range(TRIES):
        start = engine.mark()
        run()
        seconds.append(engine.elapsed(start, engine.mark()))
    return float(np.min(seconds))


def speed_graph(network: str, tiny: bool = False) -> Graph:
    """A network whose steps are timed."""
    options: dict[str, Any] = {"width": 0.0625} if tiny else {}
    shape = (TINY if tiny else SIZES)[network]
    return build_model(network, input=list(shape), **options).with_loss(CrossEntropy())


def nothing_to_time(asked: Mapping[str, Any], engine: Engine) -> bool:
    """Whether an engine's ``autotune`` would change nothing."""
    return bool(asked.get("autotune")) and getattr(engine, "graphs", None) is None


def floors(engine: Mapping[str, Any], tiny: bool = False) -> dict[str, Any]:
    """Every kernel of a training step of ResNet-50 beside the time that its bytes or its operations take at least."""
    return fitting(2 if tiny else 64, lambda batch: _floors(batch, engine, tiny))


def _floors(batch: int, engine: Mapping[str, Any], tiny: bool) -> dict[str, Any]:
    used = get_engine("cupy", **engine)
    copied, product = copy_speed(used, 3), 1e12 * _product(used, 16 if tiny else 8192)
    kind, halves = engine["dtype"], used.activations.itemsize == 2
    program = lower(speed_graph("resnet50", tiny), Plan(Grid()), batch)
    spent: dict[str, list[float]] = {}
    for sample in run_samples(used, [program], 1 if tiny else TRIES):
        least = float(touched(sample.kernel, sample.local, kind, halves)) / copied
        if matrix_shape(sample.kernel, sample.local) is not None:
            least = max(least, float(flops(sample.kernel, sample.local)) / product)
        row = spent.setdefault(sample.kernel.name, [0, 0.0, 0.0])
        row[0], row[1], row[2] = row[0] + 1, row[1] + sample.seconds, row[2] + least
    rows: list[dict[str, Any]] = [
        {
            "kernel": name,
            "launches": n,
            "ms": 1e3 * took,
            "floor ms": 1e3 * least,
            "of the floor": took / max(least, 1e-12),
        }
        for name, (n, took, least) in sorted(spent.items(), key=lambda item: -item[1][1])
    ]
    total, least = (sum(row[i] for row in spent.values()) for i in (1, 2))
    found = f"kernels {1e3 * total:.1f} ms, their floors {1e3 * least:.1f} ms; slowest beside its floor: "
    found += ", ".join(
        f"{r['kernel']} {r['of the floor']:.1f}x" for r in sorted(rows, key=lambda r: r["floor ms"] - r["ms"])[:3]
    )
    return {"found": found, "table": {"title": f"ResNet-50, batch {batch}: kernels beside their floors", "rows": rows}}


class _Resident(Executor):
    """Takes the same batch every time, once it is on the device: what is measured is computation."""

    def _fed(self, a: Any, source: str | None) -> Any:
        held = self.__dict__.setdefault("_held", {})
        if id(a) not in held:
            held[id(a)] = super()._fed(a, source)
        return held[id(a)]


def network(network: str, batch: int, engine: Mapping[str, Any], tiny: bool = False) -> dict[str, Any]:
    """Samples per second, step time and memory of training steps with SGD with momentum."""
    return fitting(min(batch, 2) if tiny else batch, lambda batch: _network(network, batch, engine, tiny))


def _network(network: str, batch: int, engine: Mapping[str, Any], tiny: bool) -> dict[str, Any]:
    used: Any = get_engine("cupy", **engine)
    if nothing_to_time(engine, used):
        return left_out(NO_PLANS)
    graph = speed_graph(network, tiny)
    program = lower(graph, Plan(Grid()), batch)
    state = initial_state(graph.params(), dict(program.params), 0, 1, used.dtype)
    executor = _Resident(program, used, SingleTransport(), {n: used.from_host(a) for n, a in state.items()})
    rule = SGD(0.01, momentum=0.9)
    rule.engine = used
    executor.on_update = lambda params, grads: rule.step(params, grads, 0.01)
    rng = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    for name in program.feeds:
        info = program.buffers[name]
        shape = info.layout.local_shape(0)
        values = rng.standard_normal(shape, np.float32)
        feeds[name] = np.zeros(shape, np.int64) if info.dtype == "int64" else values.astype(used.dtype)

    def step() -> None:
        executor.run(feeds)

    return _speed(batch, step, used.synchronize, used.held_bytes)


def torch_network(network: str, batch: int, way: str, compiled: bool = False, tiny: bool = False) -> dict[str, Any]:
    """The same steps by PyTorch: channels-last, cuDNN's own choice of algorithms, autocast for half types."""
    try:
        import torch
    except (ImportError, OSError) as error:  # a part of it, or one of its libraries
        return left_out(f"PyTorch cannot be loaded ({error})")
    if not torch.cuda.is_available() and not tiny:
        return left_out(f"PyTorch {torch.__version__} finds no GPU")
    return fitting(min(batch, 2) if tiny else batch, lambda batch: _torch_network(network, batch, way, compiled, tiny))


def _torch_network(network: str, batch: int, way: str, compiled: bool, tiny: bool) -> dict[str, Any]:
    import torch

    from lbpar.selftest.torch_net import TorchNet

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":  # what a larger batch has left behind
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if compiled:
        torch.compiler.reset()  # another batch would be compiled for batches of any size
    graph = speed_graph(network, tiny)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = way == "TF32"
    output = graph.shapes(batch)[graph.output]
    shape = graph.shapes(batch)["input"]
    order: Any = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    model: Any = TorchNet(graph)
    model = model.to(device, memory_format=order)
    x = torch.randn(batch, shape[-1], *shape[1:-1], device=device).to(memory_format=order)
    target = torch.zeros(output[:-1], dtype=torch.int64, device=device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    if compiled:
        model = torch.compile(model, backend="aot_eager" if tiny else "inductor")  # traced only: C++ takes minutes

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=way.startswith("bfloat16")):
            loss = torch.nn.functional.cross_entropy(model(x).float(), target)
        loss.backward()
        optimizer.step()

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    return _speed(batch, step, wait, torch.cuda.max_memory_reserved if device == "cuda" else lambda: 0)


def _speed(
    batch: int, step: Callable[[], None], wait: Callable[[], object], memory: Callable[[], int]
) -> dict[str, Any]:
    for _ in range(WARM):
        step()
    wait()
    started, steps = perf_counter(), 0
    while steps < MOST and (steps < 2 or perf_counter() - started < SECONDS):
        step()
        steps += 1
        if steps % 4 == 0:
            wait()
    wait()
    seconds = (perf_counter() - started) / steps
    held = memory()
    return {
        "found": f"{batch / seconds:.1f} samples/s, {1e3 * seconds:.1f} ms a step, {held / 1e9:.1f} GB",
        "samples/s": batch / seconds,
        "step": seconds,
        "memory": held,
    }
