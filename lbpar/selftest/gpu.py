"""What is to be found out about a GPU: the parts of ``lbpar selftest --engine cupy``, the most important first."""

from __future__ import annotations

import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lbpar.engine.cupy import library
from lbpar.engine.cupy.blas import load_cublas
from lbpar.engine.cupy.names import GROUPS
from lbpar.engine.registry import get_engine
from lbpar.selftest.networks import RANKS, networks
from lbpar.selftest.parts import Part
from lbpar.selftest.wanted import launched
from lbpar.text import human_bytes
from lbpar.threads import cores
from lbpar.transport.nccl import load_nccl

TYPES: dict[str, dict[str, Any]] = {
    "float64": {"dtype": "float64"},
    "float32": {"dtype": "float32"},
    "float32, own kernels": {"dtype": "float32", "cudnn": False},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, own kernels": {"dtype": "bfloat16", "cudnn": False},
    "float16": {"dtype": "float16"},
    "float16, own kernels": {"dtype": "float16", "cudnn": False},
    "TF32, own kernels": {"dtype": "float32", "tf32": True, "cudnn": False},
}
"""Ways to compute whose results are checked, by name."""

PRODUCTS = ("planes", "volumes", "small blocks")
"""Networks for TF32, in which nothing but products differs from float32: those that have all kinds of them."""

FAST: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "TF32": {"dtype": "float32", "tf32": True},
    "bfloat16, own kernels": {"dtype": "bfloat16", "cudnn": False},
    "float32": {"dtype": "float32"},
}
"""Ways to compute whose speed is measured, by name."""

GRAPHS = {"bfloat16, CUDA graphs": {"dtype": "bfloat16", "graphs": True}}
"""The same with steps that are recorded."""

_COMPUTE_MODE, _ONE_PROCESS = 20, 3
"""cudaDevAttrComputeMode, and one of its values: cudaComputeModeExclusiveProcess."""

COMPILERS = 16
"""Modules that are compiled at the same time, at most."""

COMPILING = 60.0
"""Seconds after which no further module is compiled: what is left is, when another part launches it."""


def parts(plans: int, quick: bool, tiny: bool = False) -> list[Part]:
    """What is found out.

    Parameters
    ----------
    plans : int
        Random plans on simulated ranks for each network.
    quick : bool
        Leave out speeds.
    tiny : bool
        Of small sizes, for tests of this.
    """
    here = "lbpar.selftest"
    found = [
        Part("versions", f"{here}.gpu:versions", seconds=5, alone=True),
        Part("kernels", f"{here}.gpu:kernels", {"few": tiny}, seconds=20, alone=True),
    ]
    for way, engine in TYPES.items():
        for name in PRODUCTS if engine.get("tf32") else networks():
            arguments = {"network": name, "engine": engine, "plans": plans}
            found.append(Part(f"{name}, {way}", f"{here}.checks:network", arguments, seconds=10))
    found.append(Part("training", f"{here}.checks:training", seconds=10))
    if mpirun() and find_spec("mpi4py") is not None:
        for procs in RANKS:
            for transport in ("host", "nccl", "mpi"):
                arguments = {"procs": procs, "transport": transport}
                seconds = 30 if transport == "nccl" else 15
                found.append(Part(f"{procs} ranks, {transport}", f"{here}.checks:ranks", arguments, seconds))
    return found if quick else found + _speeds(tiny)


def _speeds(tiny: bool) -> list[Part]:
    here, torch = "lbpar.selftest.speeds", find_spec("torch") is not None
    size = {"tiny": tiny}
    found = [Part("ceilings", f"{here}:ceilings", {"ways": FAST, **size}, seconds=10, alone=True)]

    def network(name: str, way: str, batch: int, seconds: float = 12) -> None:
        arguments = {"network": name, "batch": batch, "engine": (FAST | GRAPHS)[way], **size}
        found.append(Part(f"{name} of {batch}, {way}", f"{here}:network", arguments, seconds, alone=True))

    def beside(name: str, way: str, batch: int, kind: str, seconds: float = 12) -> None:
        if torch:
            arguments = {"network": name, "batch": batch, "way": way, "compiled": kind == "compile", **size}
            title = f"{name} of {batch}, {way}, PyTorch {kind}"
            found.append(Part(title, f"{here}:torch_network", arguments, seconds, alone=True))

    first = ("resnet50", "bfloat16", 256, 12.0), ("resnet50", "TF32", 256, 12.0), ("unet3d", "bfloat16", 2, 15.0)
    further = ("unet3d", "TF32", 2, 15.0), ("resnet50", "bfloat16", 64, 12.0), ("resnet50", "TF32", 64, 12.0)
    for name, way, batch, seconds in first:
        network(name, way, batch, seconds)
        beside(name, way, batch, "eager", seconds)
    found += [
        Part(f"floors, {way}", f"{here}:floors", {"engine": FAST[way], **size}, seconds=15, alone=True)
        for way in ("bfloat16", "bfloat16, own kernels")
    ]
    for name, way, batch, seconds in further:
        network(name, way, batch, seconds)
        beside(name, way, batch, "eager", seconds)
    for way in GRAPHS:
        network("resnet50", way, 64)
    network("resnet50", "bfloat16, own kernels", 256)
    for name, way, batch, _ in first + further:
        beside(name, way, batch, "compile", 60)
    return found


def mpirun() -> str | None:
    """What starts ranks here."""
    return shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")


def versions() -> dict[str, Any]:
    """Devices, and the versions of everything that drives them."""
    cupy = library.load()
    runtime = cupy.cuda.runtime
    free, total = runtime.memGetInfo()
    found: dict[str, Any] = {
        "device": library.device_name(cupy),
        "devices": runtime.getDeviceCount(),
        "memory": total,
        "free": free,
        "CuPy": cupy.__version__,
        "CUDA": runtime.runtimeGetVersion(),
        "driver": runtime.driverGetVersion(),
        "exclusive": exclusive(cupy),
    }
    missing = []
    for name, find in (
        ("NCCL", lambda: load_nccl().get_version()),
        ("cuDNN", lambda: library.load_cudnn(True).backend_version()),
        ("cuBLAS", lambda: (cublas := load_cublas()).getVersion(cublas.create())),
        ("PyTorch", lambda: __import__("torch").__version__),
    ):
        try:
            found[name] = find()
        except Exception as error:  # noqa: BLE001  none of them is needed
            missing.append(f"no {name} ({str(error).splitlines()[0][:90] if str(error) else type(error).__name__})")
    text = (
        f"{found['devices']} x {found['device']}, {human_bytes(free)} of {human_bytes(total)} free; CuPy {found['CuPy']}, CUDA {found['CUDA']}, "
        f"driver {found['driver']}"
        + "".join(f", {n} {found[n]}" for n in ("NCCL", "cuDNN", "cuBLAS", "PyTorch") if n in found)
    )
    if found["exclusive"]:
        missing.append("one process at a time may use the GPU")
    return found | {"found": "; ".join([text, *missing])}


def exclusive(cupy: Any) -> bool:
    """Whether the GPU takes one process at a time."""
    return int(cupy.cuda.runtime.deviceGetAttribute(_COMPUTE_MODE, cupy.cuda.runtime.getDevice())) == _ONE_PROCESS


def kernels(few: bool = False, seconds: float = COMPILING) -> str:
    """Compile and load all kernels that one rank of the other parts launches, several at once: CuPy's cache then has them for these."""
    until = time.monotonic() + seconds
    engine: Any = get_engine("cupy", "float32")
    wanted = [(file, group[0], len(group)) for file, groups in GROUPS.items() for group in groups]
    if not few:
        (products,) = launched([engine._card], [*TYPES.values(), *FAST.values()])
        wanted += [(file, name, 1) for file, names in products.items() for name in names]
    else:
        wanted = wanted[:1]

    def load(file: str, name: str, count: int) -> int:
        if time.monotonic() > until:
            return 0
        with engine.running():
            engine.kernels.function(file, name)
        return count

    with ThreadPoolExecutor(min(COMPILERS, cores())) as pool:
        loaded = sum(list(pool.map(lambda kernel: load(*kernel), wanted)))
    left = sum(count for *_, count in wanted) - loaded
    later = f"; {left} are compiled when first launched, since {seconds:.0f} s were over" if left else ""
    return f"{loaded} in {len({file for file, *_ in wanted})} files compiled and loaded{later}"
