"""What a local kernel costs: operations, bytes touched and the matrix shape it amounts to.

Local extents may be numbers or arrays (one entry per configuration), so that one formula prices a step of a program
and a thousand candidate grids alike. They are those of the largest block.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from lbpar.cost.machine import Machine, Many
from lbpar.graph.loops import Index, Kernel, Operand
from lbpar.layout.cuts import pick
from lbpar.layout.grid import Axes, Grid

ITEM = {"float64": 8, "int64": 8, "opaque": 8, "float32": 4, "tf32": 4, "int32": 4}
HALF_TYPES = ("bfloat16", "float16")
_PARAMETERS = frozenset({"weight", "bias", "dweight", "dbias"})


def item_bytes(dtype: str | None, network: str, halves: bool, parameters: bool = False) -> int:
    """Bytes per element.

    Parameters
    ----------
    dtype : str, optional
        None stands for the network's type.
    network : str
    halves : bool
        Activations are held in a half type, and not only multiplied in it.
    parameters : bool
        They and their gradients stay float32 where the network's type is a half type.
    """
    if dtype is None and network in HALF_TYPES:
        return 2 if halves and not parameters else 4
    return ITEM[dtype or network]


def local_extents(kernel: Kernel, grid: Grid, op_grid: Mapping[str, Axes]) -> dict[str, int]:
    """Extent of each loop on the rank with the largest blocks."""
    return {loop: -(-e // grid.ways(op_grid.get(loop, ()))) for loop, e in kernel.loops}


def held(index: Index, local: Mapping[str, Many], extents: Mapping[str, int]) -> Many:
    """Indices of one dimension that a block of the loops needs, ghosts included."""
    if not index.loops:
        return index.extent
    if index.window is None:
        return prod((local[loop] for loop in index.loops), start=1)
    block, w = local[index.loops[0]], index.window
    need = (block - 1 + w.reach) // w.stride + 1 if index.transposed else (block - 1) * w.stride + w.reach + 1
    part = pick((block < extents[index.loops[0]]) & (need < index.extent), need, index.extent)
    return part * (block > 0)


def local_size(operand: Operand, local: Mapping[str, Many], extents: Mapping[str, int]) -> Many:
    """Elements of an operand that a block needs."""
    return prod((held(i, local, extents) for i in operand.dims), start=1)


def flops(kernel: Kernel, local: Mapping[str, Many]) -> Many:
    """Operations on a block, in proportion to the loops' blocks."""
    return kernel.flops * prod((local[loop] / max(1, e) for loop, e in kernel.loops), start=1.0)


def touched(kernel: Kernel, local: Mapping[str, Many], dtype: str, halves: bool = False) -> Many:
    """Bytes of a block's operands."""
    extents = dict(kernel.loops)
    return sum(
        local_size(o, local, extents) * item_bytes(o.dtype, dtype, halves, o.value in _PARAMETERS)
        for o in (*kernel.reads, *kernel.writes)
    )


def active_processes(kernel: Kernel, ways: Mapping[str, Many], procs: int) -> Many:
    """Processes with a block of a kernel, or with a copy of another's, when ``ways`` parts are made of each loop."""
    out: Many = procs
    for loop, extent in kernel.loops:
        parts = ways.get(loop, 1)
        out = out / parts * pick(parts < extent, parts, extent)
    return out


def kernel_seconds(machine: Machine, kernel: Kernel, local: Mapping[str, Many], dtype: str) -> Many:
    """Seconds of a kernel on a block: arithmetic or memory, whichever takes longer, and the start."""
    c = machine.file.compute
    moved, start = touched(kernel, local, dtype, c.half_arrays), c.starts.get(kernel.name, c.overhead)
    shape = matrix_shape(kernel, local)
    if shape is None:
        speed = machine.measured_rate(kernel.name, (*rows_and_channels(local), 1, 1), dtype)
        return moved / (c.speeds.get(kernel.name, c.memory_bandwidth) if speed is None else speed) + start
    rate = machine.rate(plain_name(kernel.name), *shape, dtype, taps(kernel))
    memory, arithmetic = moved / c.memory_bandwidth, flops(kernel, local) / rate
    return pick(memory > arithmetic, memory, arithmetic) + start


def plain_name(kernel: str) -> str:
    """Name of the matrix product inside a fused kernel, or one that computes a part."""
    name = kernel.replace("_relu_", "_")
    for end in ("_bias", "_interior", "_rims"):
        name = name.removesuffix(end)
    return name


def matrix_shape(kernel: Kernel, local: Mapping[str, Many]) -> tuple[Many, Many, Many] | None:
    """Rows, columns and terms of the matrix product that a kernel amounts to; None for the others."""
    if kernel.product is None:
        return None
    rows = prod((v for loop, v in local.items() if loop in ("N", "D", "H", "W")), start=1)
    f, c, t = local["F"], local["C"], taps(kernel)
    match kernel.product:
        case "backward_weights":
            return c * t, f, rows
        case "backward_data":
            return rows, c, f * t
        case "forward":
            return rows, f, c * t


def rows_and_channels(local: Mapping[str, Many]) -> tuple[Many, Many]:
    """What the speed of the other kernels depends on: the extent of the dimension that lies together in memory, and of all others."""
    last = next((loop for loop in ("C", "F") if loop in local), None)
    return prod((v for loop, v in local.items() if loop != last), start=1), local[last] if last else 1


def taps(kernel: Kernel) -> int:
    """Taps of a kernel's windows together; 1 without windows."""
    return prod((w.kernel for w in dict(kernel.attrs).get("windows", ())), start=1)
