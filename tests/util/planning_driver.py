"""A CUDA driver without a device, with which cuDNN compiles the kernels of its plans and believes that they were loaded.

For plans whose kernels are compiled when they are made, such as those of batch norm, cuDNN asks the driver to load them. Nothing can be
launched by it.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from tests.cuda.emulator import build

_GIVES = {"cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction", "cuModuleLoadData", "cuModuleGetFunction"}
_SPECIAL = {
    "cuDeviceGetCount": "int cuDeviceGetCount(int* count) { *count = 1; return 0; }",
    "cuDriverGetVersion": "int cuDriverGetVersion(int* version) { *version = 13000; return 0; }",
    "cuGetErrorString": 'int cuGetErrorString(int error, const char** text) { *text = "?"; return 0; }',
    "cuGetExportTable": "int cuGetExportTable(const void** table) { *table = 0; return 500; }",
}


def load(library: Path, folder: Path) -> None:
    """Make the driver that a library of cuDNN asks for, in a folder, and load it into this process."""
    names = {found.decode() for found in re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", library.read_bytes())}
    lines = []
    for name in sorted(n for n in names if not n.startswith(("cudnn", "cuDNN"))):
        gives = f"int {name}(void** handle) {{ *handle = (void*)64; return 0; }}"
        lines.append(_SPECIAL.get(name, gives if name in _GIVES else f"int {name}(void) {{ return 0; }}"))
    source, made = folder / "driver.cpp", folder / "libcuda.so.1"
    source.write_text("\n".join(f'extern "C" {line}' for line in lines), encoding="utf-8")
    build(source, made, ["-shared", "-fPIC", f"-Wl,-soname,{made.name}"])
    ctypes.CDLL(str(made), ctypes.RTLD_GLOBAL)  # by whose name cuDNN finds it
