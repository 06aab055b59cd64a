"""A stand-in for `cudnn` (nvidia-cudnn-frontend) beside that for CuPy: graphs of one convolution or batch norm, computed by NumPy from what
was declared.

Extents and strides that a graph declares decide what is read and written, so that a wrong one gives a wrong number. What cuDNN
refuses is refused at the step at which cuDNN does (seen with its library 9.21 for a described device). Each graph has plans with
every numerical note; what such a plan would do to the digits, it does.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from tests.util import fake_cudnn_norm as norms
from tests.util.fake_cupy.machine import CUDARuntimeError, machine
from tests.util.fake_cupy.runtime import _span
from tests.util.fake_cupy.streams import stream_at

__version__ = "1.23.0"
version = 92100
"""Of the pretended library; tests change it."""

executed: list[tuple[str, str]] = []
"""Passes that ran, with the note of their plan."""


class cudnnGraphNotSupportedError(Exception):
    """As in the package, no RuntimeError."""


class data_type(enum.Enum):
    NOT_SET, FLOAT, HALF, BFLOAT16 = range(4)


class numerical_note(enum.Enum):
    TENSOR_CORE, DOWN_CONVERT_INPUTS, REDUCED_PRECISION_REDUCTION, NONDETERMINISTIC, WINOGRAD, FFT, STRICT_NAN_PROP = (
        range(7)
    )


class heur_mode(enum.Enum):
    A, B, FALLBACK = range(3)


class norm_forward_phase(enum.Enum):
    NOT_SET, TRAINING, INFERENCE = range(3)


class build_plan_policy(enum.Enum):
    HEURISTICS_CHOICE, ALL = range(2)


_DTYPES = {
    data_type.FLOAT: np.dtype(np.float32),
    data_type.HALF: np.dtype(np.float16),
    data_type.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}


class Handle:
    """Opaque; bound to a stream."""

    def __init__(self) -> None:
        self.stream = 0


def create_handle() -> Handle:
    machine().check()
    return Handle()


def set_stream(handle: Handle, stream: int) -> None:
    assert isinstance(handle, Handle) and isinstance(stream, int)
    handle.stream = stream


def backend_version() -> int:
    return version


class tensor:
    """A tensor's declaration. Setters give it back."""

    by_value = False

    def __init__(self, dim: Sequence[int], stride: Sequence[int], kind: data_type, uid: int, virtual: bool) -> None:
        self.dim, self.stride, self.kind, self.uid, self.virtual = list(dim), list(stride), kind, uid, virtual

    def set_output(self, output: bool) -> tensor:
        self.virtual = not output
        return self

    def set_data_type(self, kind: data_type) -> tensor:
        self.kind = kind
        return self

    def set_uid(self, uid: int) -> tensor:
        self.uid = uid
        return self

    def set_dim(self, dim: list[int]) -> tensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> tensor:
        self.stride = stride
        return self

    def check(self) -> None:
        if not self.dim or len(self.dim) != len(self.stride) or min(self.dim) < 1 or min(self.stride) < 1:
            raise RuntimeError(f"tensor {self.uid}: dims {self.dim}, strides {self.stride}")
        if self.kind is data_type.NOT_SET:
            raise RuntimeError(f"tensor {self.uid} has no data type")

    def view(self, raw: np.ndarray) -> np.ndarray:
        """The elements in memory that begins with ``raw``."""
        item = raw.itemsize
        return np.lib.stride_tricks.as_strided(raw, self.dim, [s * item for s in self.stride])

    @property
    def reach(self) -> int:
        return 1 + sum((n - 1) * s for n, s in zip(self.dim, self.stride, strict=True))


class _Plan:
    def __init__(self, note: numerical_note | None, workspace: int) -> None:
        self.note, self.workspace, self.built = note, workspace, False


class pygraph:
    """A graph of one convolution or batch norm, and what follows it."""

    def __init__(
        self,
        *,
        handle: Handle | None = None,
        io_data_type: data_type = data_type.NOT_SET,
        intermediate_data_type: data_type = data_type.NOT_SET,
        compute_data_type: data_type = data_type.NOT_SET,
    ) -> None:
        assert isinstance(handle, Handle), "a graph without a handle makes one of its own"
        self._handle, self._io = handle, io_data_type
        self._between = io_data_type if intermediate_data_type is data_type.NOT_SET else intermediate_data_type
        self._sums = io_data_type if compute_data_type is data_type.NOT_SET else compute_data_type
        self._tensors: list[tensor] = []
        self._after: list[tuple[str, tensor | None]] = []
        self._name = ""
        self._step = 0
        self._plans: list[_Plan] = []
        self._barred: set[numerical_note] = set()
        self._limit = 1 << 62

    # -- what is declared

    def tensor(
        self,
        dim: list[int],
        stride: list[int],
        data_type: data_type = data_type.NOT_SET,
        is_pass_by_value: bool = False,
        uid: int = -1,
    ) -> tensor:
        assert isinstance(dim, list) and isinstance(stride, list)
        kind = self._io if data_type is type(data_type).NOT_SET else data_type
        made = tensor(dim, stride, kind, uid, False)
        made.by_value = is_pass_by_value
        self._tensors.append(made)
        return made

    def conv_fprop(self, image: tensor, weight: tensor, **window: list[int]) -> tensor:
        return self._convolution("fprop", (image, weight), window)

    def conv_dgrad(self, loss: tensor, filter: tensor, **window: list[int]) -> tensor:
        return self._convolution("dgrad", (loss, filter), window)

    def conv_wgrad(self, image: tensor, loss: tensor, **window: list[int]) -> tensor:
        return self._convolution("wgrad", (image, loss), window)

    def batchnorm(
        self,
        input: tensor,
        scale: tensor,
        bias: tensor,
        in_running_mean: tensor,
        in_running_var: tensor,
        epsilon: tensor,
        momentum: tensor,
    ) -> list[tensor]:
        return self._norm("batchnorm", 5, input, scale, bias, in_running_mean, in_running_var, epsilon, momentum)

    def instancenorm(
        self, norm_forward_phase: norm_forward_phase, input: tensor, scale: tensor, bias: tensor, epsilon: tensor
    ) -> list[tensor]:
        assert norm_forward_phase.name == "TRAINING", "without statistics"
        return self._norm("instancenorm", 3, input, scale, bias, epsilon)

    def layernorm(
        self, norm_forward_phase: norm_forward_phase, input: tensor, scale: tensor, bias: tensor, epsilon: tensor
    ) -> list[tensor]:
        assert norm_forward_phase.name == "TRAINING", "without statistics"
        return self._norm("layernorm", 3, input, scale, bias, epsilon)

    def _norm(self, name: str, results: int, *operands: tensor) -> list[tensor]:
        assert not self._name, "one operation"
        self._name, self._operands = name, operands
        self._outs = [tensor([], [], self._between, -1, True) for _ in range(results)]
        self._out = self._outs[0]
        return self._outs

    def add(self, a: tensor, b: tensor) -> tensor:
        return self._then("add", a, b)

    def bias(self, input: tensor, bias: tensor) -> tensor:
        return self._then("bias", input, bias)

    def relu(self, input: tensor) -> tensor:
        return self._then("relu", input, None)

    def _convolution(self, name: str, operands: tuple[tensor, tensor], window: dict[str, list[int]]) -> tensor:
        assert not self._name, "one convolution"
        assert set(window) == {"pre_padding", "post_padding", "stride", "dilation"}, window
        self._name, self._operands, self._window = name, operands, window
        self._out = tensor([], [], self._between, -1, True)
        self._outs = [self._out]
        return self._out

    def _then(self, name: str, given: tensor, other: tensor | None) -> tensor:
        assert given is self._out
        self._after.append((name, other))
        return given

    # -- the steps to plans

    def validate(self) -> None:
        out, (one, two, *_) = self._out, self._operands
        if self._name == "fprop" and not out.dim:
            out.dim = [one.dim[0], two.dim[0], *self._outer(one.dim[2:], two.dim[2:])]
        for t in (*self._tensors, *self._outs):
            t.check()
        uids = [t.uid for t in (*self._tensors, *self._outs)]
        if any(t.virtual for t in self._outs) or min(uids) < 0 or len(set(uids)) < len(uids):
            raise RuntimeError(f"uids {uids}, or no output")
        if self._sums is data_type.NOT_SET:
            raise RuntimeError("no type to compute in")
        self._step = 1

    def build_operation_graph(self) -> None:
        self._need(1)
        self._step = 2
        if self._name in norms.KINDS:
            return norms.check(self._name, self._operands, self._outs)
        if min(*self._window["pre_padding"], *self._window["post_padding"]) < 0:
            raise RuntimeError("detail::finalize(convolution_descriptor) failed: CUDNN_STATUS_BAD_PARAM")
        x, w, y = self._roles()
        if y.dim[2:] != self._outer(x.dim[2:], w.dim[2:]) or (x.dim[0], w.dim[0]) != (y.dim[0], y.dim[1]):
            raise RuntimeError(f"CUDNN_STATUS_BAD_PARAM: {x.dim} with {w.dim} do not make {y.dim}")
        if x.dim[1] % w.dim[1] or w.dim[0] % (x.dim[1] // w.dim[1]):
            raise RuntimeError(f"CUDNN_STATUS_BAD_PARAM: channels {x.dim[1]} and {w.dim[:2]}")

    def create_execution_plans(self, modes: list[heur_mode]) -> None:
        self._need(2)
        x, followed = self._out, [name for name, _ in self._after]
        if self._name in norms.KINDS:
            refused = followed not in ([], ["relu"], ["add", "relu"])
            refused |= self._name == "batchnorm" and x.dim[1] * _DTYPES[x.kind].itemsize % 16 > 0
        else:
            refused = len({t.kind for t in (*self._operands, self._out)}) > 1 or followed == ["relu"]
        if refused:
            raise cudnnGraphNotSupportedError("No valid engine configs for _")
        note, small = numerical_note, 64 * len(modes)
        self._plans = [
            _Plan(note.TENSOR_CORE, 0), _Plan(note.DOWN_CONVERT_INPUTS, 0), _Plan(note.REDUCED_PRECISION_REDUCTION, 0),
            _Plan(note.NONDETERMINISTIC, 0), _Plan(None, 1 << 40), _Plan(None, small), _Plan(None, 0),
        ]  # fmt: skip
        if x.kind is not data_type.FLOAT:
            del self._plans[1]  # half types multiply on tensor cores as they are
        self._step = 3

    def deselect_numeric_notes(self, notes: list[numerical_note]) -> None:
        self._need(3)  # earlier ones are lost
        self._barred |= set(notes)

    def deselect_workspace_greater_than(self, limit: int) -> None:
        self._limit = limit

    def get_execution_plan_count(self) -> int:
        return len(self._plans)

    def build_plan_at_index(self, index: int) -> None:
        plan = self._plans[index]
        if plan.note in self._barred:
            raise RuntimeError("Deselecting execution plan")
        if plan.workspace > self._limit:
            raise cudnnGraphNotSupportedError("Workspace size is too large.")
        plan.built = True

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return self._plans[index].workspace if self._plans[index].built else 0

    def execute_plan_at_index(
        self, tensor_to_device_buffer: dict[int, int], workspace: int, index: int, handle: Handle | None = None
    ) -> None:
        machine().check()
        plan = self._plans[index]
        assert plan.built, "a plan that was not built"
        assert handle is self._handle
        assert all(type(k) is int and type(v) is int for k, v in tensor_to_device_buffer.items())
        wanted = {t.uid: t for t in (*self._tensors, *self._outs)}
        if set(wanted) != set(tensor_to_device_buffer):
            raise RuntimeError(f"the variant pack holds {sorted(tensor_to_device_buffer)}, expected {sorted(wanted)}")
        raws = {}
        for uid, at in tensor_to_device_buffer.items():
            kind = _DTYPES[wanted[uid].kind]
            if wanted[uid].by_value:
                raws[uid] = np.array([ctypes.c_float.from_address(at).value], kind)
                continue
            if at % 16:
                raise CUDARuntimeError("cudaErrorMisalignedAddress")
            found = _span(at, wanted[uid].reach * kind.itemsize, "device")
            assert found is not None
            raws[uid] = found.view(kind)
        scratch = _span(workspace, plan.workspace, "device") if plan.workspace else None

        def work() -> None:
            if scratch is not None:
                scratch.fill(0xA5)
            outs = [t.uid for t in self._outs]
            inputs = {uid: raw.tobytes() for uid, raw in raws.items() if uid not in outs}
            self._compute(plan, raws)
            for uid, before in inputs.items():
                assert raws[uid].tobytes() == before, "the result lies over an operand"
            executed.append((self._name, plan.note.name if plan.note else ""))

        stream_at(handle.stream).queue.put(work)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"the stand-in for cuDNN's graphs has no {name}")

    # -- the numbers

    def _need(self, step: int) -> None:
        assert self._step >= step, "a step was left out"

    def _roles(self) -> tuple[tensor, tensor, tensor]:
        """x, w and y of the convolution, whichever of them is computed."""
        one, two = self._operands
        return {"fprop": (one, two, self._out), "dgrad": (self._out, two, one), "wgrad": (one, self._out, two)}[
            self._name
        ]

    def _outer(self, inner: list[int], kernel: list[int]) -> list[int]:
        w = self._window
        sizes = zip(inner, kernel, w["pre_padding"], w["post_padding"], w["stride"], w["dilation"], strict=True)
        return [(n + before + after - (k - 1) * d - 1) // s + 1 for n, k, before, after, s, d in sizes]

    def _compute(self, plan: _Plan, raws: dict[int, np.ndarray]) -> None:
        if self._name in norms.KINDS:
            views = [[t.view(raws[t.uid]) for t in tensors] for tensors in (self._operands, self._outs[1:])]
            return self._finish(norms.compute(self._name, *views), raws, plan)
        note = numerical_note
        rough = plan.note is note.TENSOR_CORE and self._operands[0].kind is data_type.FLOAT
        change: Callable[[np.ndarray], np.ndarray] = _tf32 if rough else lambda a: a
        if plan.note is note.DOWN_CONVERT_INPUTS:
            change = lambda a: a.astype(ml_dtypes.bfloat16)
        one, two = (change(t.view(raws[t.uid]).astype(np.float64)).astype(np.float64) for t in self._operands)
        x, w, y = self._roles()
        groups = x.dim[1] // w.dim[1]
        reduced = plan.note is note.REDUCED_PRECISION_REDUCTION
        sums = np.dtype(ml_dtypes.bfloat16) if reduced else _DTYPES[self._sums]
        total = _CONVOLUTIONS[self._name](one, two, x.dim, w.dim, y.dim, groups, self._window, sums)
        self._finish(total, raws, plan)

    def _finish(self, total: np.ndarray, raws: dict[int, np.ndarray], plan: _Plan) -> None:
        if plan.note is numerical_note.NONDETERMINISTIC:
            total *= 1 + 1e-3 * (len(executed) % 7)
        for name, other in self._after:
            total = np.maximum(total, 0) if name == "relu" else total + other.view(raws[other.uid]).astype(np.float64)  # type: ignore[union-attr]
        self._out.view(raws[self._out.uid])[...] = total.astype(_DTYPES[self._out.kind])


def _tf32(a: np.ndarray) -> np.ndarray:
    bits = a.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)


def _taps(x: list[int], w: list[int], y: list[int], window: dict[str, list[int]]) -> Any:
    """Per tap: its index, and the slices of x and y that it joins."""
    for tap in itertools.product(*map(range, w[2:])):
        ins, outs = [], []
        for k, n, m, pad, s, d in zip(tap, x[2:], y[2:], window["pre_padding"], window["stride"], window["dilation"], strict=True):  # fmt: skip
            at = [(o * s + k * d - pad, o) for o in range(m)]
            at = [(i, o) for i, o in at if 0 <= i < n]
            ins.append(slice(at[0][0], at[-1][0] + 1, s) if at else slice(0, 0))
            outs.append(slice(at[0][1], at[-1][1] + 1) if at else slice(0, 0))
        yield tap, (slice(None), slice(None), *ins), (slice(None), slice(None), *outs)


def _grouped(a: np.ndarray, groups: int, axis: int) -> np.ndarray:
    return a.reshape(*a.shape[:axis], groups, a.shape[axis] // groups, *a.shape[axis + 1 :])


def _fprop(x: Any, w: Any, xs: Any, ws: Any, ys: Any, groups: int, window: Any, sums: Any) -> np.ndarray:
    y = np.zeros(ys)
    for tap, ins, outs in _taps(xs, ws, ys, window):
        part = np.einsum("ngc...,gfc->ngf...", _grouped(x[ins], groups, 1), _grouped(w[(..., *tap)], groups, 0))
        y[outs] = _rounded(y[outs] + part.reshape(y[outs].shape), sums)
    return y


def _dgrad(dy: Any, w: Any, xs: Any, ws: Any, ys: Any, groups: int, window: Any, sums: Any) -> np.ndarray:
    dx = np.zeros(xs)
    for tap, ins, outs in _taps(xs, ws, ys, window):
        part = np.einsum("ngf...,gfc->ngc...", _grouped(dy[outs], groups, 1), _grouped(w[(..., *tap)], groups, 0))
        dx[ins] = _rounded(dx[ins] + part.reshape(dx[ins].shape), sums)
    return dx


def _wgrad(x: Any, dy: Any, xs: Any, ws: Any, ys: Any, groups: int, window: Any, sums: Any) -> np.ndarray:
    dw = np.zeros(ws)
    for tap, ins, outs in _taps(xs, ws, ys, window):
        one, two = _grouped(x[ins], groups, 1), _grouped(dy[outs], groups, 1)
        one, two = (a.reshape(*a.shape[:3], -1) for a in (one, two))
        for sample in zip(one, two, strict=True):
            part = np.einsum("gcp,gfp->gfc", *sample).reshape(ws[:2])
            dw[(..., *tap)] = _rounded(dw[(..., *tap)] + part, sums)
    return dw


def _rounded(a: np.ndarray, sums: np.dtype[Any]) -> np.ndarray:
    return a.astype(sums).astype(np.float64)


_CONVOLUTIONS = {"fprop": _fprop, "dgrad": _dgrad, "wgrad": _wgrad}
