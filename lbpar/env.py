"""`lbpar env`: what a report of a fault should say about the installation and the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from lbpar import __version__
from lbpar.provenance import package_versions
from lbpar.streams import standard_streams
from lbpar.text import human_bytes
from lbpar.threads import cores, node_cores

#: Environment variables that change what lbpar, MPI or a library does.
PREFIXES = (
    "LBPAR_",
    "OMP_",
    "OPENBLAS_",
    "MKL_",
    "KMP_",
    "OMPI_",
    "PRTE_",
    "PMIX_",
    "MPICH_",
    "UCX_",
    "NCCL_",
    "CUDA_",
    "SLURM_",
    "HDF5_",
)
#: Each runs in a process of its own: loading a broken library may end it.
PROBES = {
    "MPI library": "from mpi4py import MPI; print(MPI.Get_library_version())",
    "engine": "from lbpar.engine.registry import get_engine as g; e = g('auto', 'float32', 1); print(e.name)",
    "GPUs": "import cupy as c; r = c.cuda.runtime; print([r.getDeviceProperties(i)['name'].decode() for i in range(r.getDeviceCount())])",
}
SECONDS = 60.0


def facts() -> dict[str, str]:
    """The facts by name, as texts."""
    found = {
        "lbpar": f"{__version__} in {Path(__file__).parent}",
        "python": f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}",
        "system": f"{platform.platform()}, {_processor()}",
        "cores": f"{cores()} for this process, {node_cores()} for the job, {os.cpu_count()} of the machine",
        "memory": human_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "compiler": shutil.which("cc") or shutil.which("gcc") or shutil.which("clang") or "none",
        "mpirun": shutil.which("mpirun") or "none",
        "slurm": _output(["sinfo", "--version"]) or "none",
    }
    found |= package_versions()
    alone = {**os.environ, "LBPAR_ALONE": "1"}
    for name, code in PROBES.items():
        found[name] = _output([sys.executable, "-c", code], alone) or "cannot be used"
    found |= {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
    return found


def _output(command: list[str], env: dict[str, str] | None = None) -> str | None:
    """First line that a command prints; None if it fails."""
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = done.stdout.strip("\0 \n").splitlines()
    return text[0].strip() if done.returncode == 0 and text else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


@standard_streams()
def main(argv: list[str] | None = None) -> int:
    """Print the facts."""
    p = argparse.ArgumentParser(
        prog="lbpar env", description="Versions, machine and environment, to paste into a report."
    )
    p.add_argument("--json", action="store_true", help="as JSON")
    args, found = p.parse_args(argv), facts()
    print(json.dumps(found, indent=1) if args.json else "\n".join(f"{k:22} {v}" for k, v in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
