"""What is to be found out about a GPU: the parts of ``lbpar selftest --engine cupy``, the most important first."""

from __future__ import annotations

import re
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
from lbpar.selftest.speeds import AUTOTUNE
from lbpar.selftest.wanted import launched
from lbpar.text import human_bytes
from lbpar.threads import cores
from lbpar.transport.nccl import load_nccl

TYPES: dict[str, dict[str, Any]] = {
    "float64": {"dtype": "float64"},
    "float32": {"dtype": "float32"},
    "TF32, own kernels": {"dtype": "float32", "tf32": True, "cudnn": False},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, own kernels": {"dtype": "bfloat16", "cudnn": False},
    "float32, own kernels": {"dtype": "float32", "cudnn": False},
    "float16": {"dtype": "float16"},
    "float16, own kernels": {"dtype": "float16", "cudnn": False},
}
"""Ways to compute whose results are checked, by name. In the first turn of `_checks` each network takes the way behind its own place here: a
network with products TF32, and "small blocks", which cuDNN convolves in half types, bfloat16."""

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

TUNED = {f"bfloat16{AUTOTUNE}": {"dtype": "bfloat16", "autotune": True}}
"""The same by the fastest of cuDNN's plans and our kernels, as PyTorch is timed."""

CHECK = 6.0
"""Seconds for a small network: NumPy and the host take up to 2 of them on a slow core; the rest is for the process, CUDA and cuDNN to start."""

_COMPUTE_MODE, _ONE_PROCESS = 20, 3
"""cudaDevAttrComputeMode, and one of its values: cudaComputeModeExclusiveProcess."""

OF_EXTRAS = ("NCCL", "cuDNN", "cuBLAS", "mpi4py")
"""What is not needed, and comes with lbpar's extras."""

NO_MPIRUN = "there is no mpirun"
NO_MPI4PY = "mpi4py is not installed: pip install 'lbpar[mpi]'"
NO_TORCH = "PyTorch is not installed"

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
    begin = [
        Part("versions", f"{here}.gpu:versions", seconds=5, alone=True),
        Part("kernels", f"{here}.gpu:kernels", {"few": tiny}, seconds=20, alone=True),
    ]
    first, further = _checks(plans)
    first.append(Part("training", f"{here}.checks:training", seconds=10))
    starter, with_mpi = mpirun(), find_spec("mpi4py") is not None
    missing = "" if starter and with_mpi else NO_MPIRUN if with_mpi else NO_MPI4PY
    ranks = list[Part]()
    for procs in RANKS:
        for transport in ("host", "nccl", "mpi"):
            name, arguments = f"{procs} ranks, {transport}", {"procs": procs, "transport": transport}
            ranks.append(Part(name, f"{here}.checks:ranks", arguments, seconds=15, missing=missing))
    first, further = first + ranks[:2], ranks[2:] + further
    headlines, rest = ([], []) if quick else _speeds(tiny)
    return begin + first + headlines + further + rest


def _checks(plans: int) -> tuple[list[Part], list[Part]]:
    """Small networks in all ways: each network and each way once, and all the others, in turn as well."""

    def check(name: str, way: str, seconds: float = CHECK) -> Part:
        arguments = {"network": name, "engine": (TYPES | TUNED)[way], "plans": plans}
        return Part(f"{name}, {way}", "lbpar.selftest.checks:network", arguments, seconds)

    ways, names = list(TYPES), list(networks())
    turns = [[(name, ways[(i + turn) % len(ways)]) for i, name in enumerate(names)] for turn in range(1, len(ways) + 1)]
    first, *others = [
        [check(name, way) for name, way in turn if name in PRODUCTS or not TYPES[way].get("tf32")] for turn in turns
    ]
    tuned = [check("small blocks", way, 30) for way in TUNED]
    return first, [*tuned, *(part for turn in others for part in turn)]


def _speeds(tiny: bool) -> tuple[list[Part], list[Part]]:
    """Those that matter most, and all the others."""
    here, missing = "lbpar.selftest.speeds", "" if find_spec("torch") else NO_TORCH
    size = {"tiny": tiny}

    def network(name: str, way: str, batch: int, seconds: float = 12) -> Part:
        arguments = {"network": name, "batch": batch, "engine": (FAST | GRAPHS | TUNED)[way], **size}
        return Part(f"{name} of {batch}, {way}", f"{here}:network", arguments, seconds, alone=True)

    def beside(name: str, way: str, batch: int, kind: str, seconds: float = 12) -> Part:
        arguments = {"network": name, "batch": batch, "way": way, "compiled": kind == "compile", **size}
        title = f"{name} of {batch}, {way}, PyTorch {kind}"
        return Part(title, f"{here}:torch_network", arguments, seconds, alone=True, missing=missing)

    def both(name: str, way: str, batch: int, seconds: float = 12) -> list[Part]:
        return [network(name, way, batch, seconds), beside(name, way, batch, "eager", seconds)]

    headlines = [*both("resnet50", "bfloat16", 256), *both("unet3d", "bfloat16", 2, 15)]
    compiled = [("resnet50", "bfloat16", 256), ("unet3d", "bfloat16", 2), ("resnet50", "TF32", 256)]
    compiled += [("unet3d", "TF32", 2), ("resnet50", "bfloat16", 64), ("resnet50", "TF32", 64)]
    rest = both("resnet50", "TF32", 256)
    rest += [network(name, way, batch, 30) for name, batch in (("resnet50", 256), ("unet3d", 2)) for way in TUNED]
    rest.append(Part("ceilings", f"{here}:ceilings", {"ways": FAST, **size}, seconds=10, alone=True))
    rest += [
        Part(f"floors, {way}", f"{here}:floors", {"engine": FAST[way], **size}, seconds=15, alone=True)
        for way in ("bfloat16", "bfloat16, own kernels")
    ]
    rest += [*both("unet3d", "TF32", 2, 15), *both("resnet50", "bfloat16", 64), *both("resnet50", "TF32", 64)]
    rest += [network("resnet50", way, 64) for way in GRAPHS] + [network("resnet50", "bfloat16, own kernels", 256)]
    rest += [beside(*asked, "compile", 60) for asked in compiled]
    return headlines, rest


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
        ("mpi4py", lambda: __import__("mpi4py").__version__),
        ("PyTorch", lambda: __import__("torch").__version__),
    ):
        try:
            found[name] = find()
        except Exception as error:  # noqa: BLE001  none of them is needed
            missing.append(f"no {name} ({_why(error)})")
    if any(name not in found for name in OF_EXTRAS):
        missing.append("pip install 'lbpar[mpi,cuda13]', or 'lbpar[mpi,cuda12]', brings " + ", ".join(OF_EXTRAS))
    text = (
        f"{found['devices']} x {found['device']}, {human_bytes(free)} of {human_bytes(total)} free; CuPy {found['CuPy']}, CUDA {found['CUDA']}, "
        f"driver {found['driver']}" + "".join(f", {n} {found[n]}" for n in (*OF_EXTRAS, "PyTorch") if n in found)
    )
    if found["exclusive"]:
        missing.append("one process at a time may use the GPU")
    return found | {"found": "; ".join([text, *missing])}


def _why(error: Exception) -> str:
    """Why a library is missing, without the option that would ask for it, which here nobody has given."""
    said = " ".join(str(error).split()) or type(error).__name__
    reason = re.search(r"cannot be (?:used|loaded) \((.*)\): ", said)
    return reason[1] if reason else said


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
