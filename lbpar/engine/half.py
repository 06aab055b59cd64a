"""Activations of a half type in host memory, beside parameters, sums and statistics of float32 and float64.

What an engine has no kernels of its own for runs here through float32: operands are widened, and what is an activation is rounded, once.
Weights are rounded before they are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from lbpar.engine.base import Array, Engine
from lbpar.engine.device import HOST
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.errors import EngineError

PIECE = 1 << 16
"""Elements that are widened at a time where rows do not depend on each other: they stay in a core's cache."""

_F32 = np.dtype(np.float32)

_BY_ROWS = (
    "norm_apply", "norm_relu_forward", "norm_inference", "norm_backward_data", "norm_backward_data_add", "leaky_relu_forward",
    "leaky_relu_backward", "sigmoid_forward", "sigmoid_backward", "tanh_forward", "tanh_backward", "activation_forward",
    "activation_backward", "add", "multiply", "multiply_backward", "local_response_norm_ratio", "local_response_norm_backward",
    "bias_add",
)  # fmt: skip
"""Methods of whose result, as large as the first activation, each row comes from the same row of the activations."""

_PRODUCTS = ("conv_forward", "conv_backward_data", "linear_forward", "linear_backward_data")
"""Methods whose second array are weights."""

_GRADIENTS = (
    "conv_backward_weights", "conv_backward_weights_bias", "bias_backward", "linear_backward_weights", "sample_norm_backward_sums",
)  # fmt: skip
"""Methods whose results in float32 are gradients of parameters, and stay so."""

_OTHERS = (
    "max_pool_forward", "max_pool_backward", "avg_pool_forward", "avg_pool_backward", "spatial_sum", "spatial_broadcast", "norm_sums",
    "norm_backward_sums", "norm_relu_backward_sums", "sample_norm_sums", "sample_norm_apply", "sample_norm_backward_data",
    "local_response_norm_forward", "upsample_backward", "dropout", "softmax_denominator", "softmax_forward", "softmax_inner",
    "softmax_backward", "softmax_sums", "cross_entropy_backward", "softmax_rank", "mse_loss", "mse_backward", "error_loss",
    "error_backward", "bce_loss", "bce_backward", "dice_sums", "dice_backward", "dice_backward_data",
)  # fmt: skip


def half(name: str) -> np.dtype[Any]:
    """A half type by name: NumPy has no bfloat16 of its own."""
    if name == "float16":
        return np.dtype(np.float16)
    try:
        import ml_dtypes
    except ImportError as error:
        raise EngineError(
            f"engine.dtype: {name} needs the package ml-dtypes ({error}): pip install ml-dtypes, or choose float32."
        ) from error
    return np.dtype(getattr(ml_dtypes, name))


def bits(a: Array) -> Array:
    """The same memory as integers where the type is none of NumPy's own, which libraries are given no address of."""
    return a.view(np.uint16) if a.dtype.kind == "V" else a


class Halves(Engine):
    """The part of an engine of the host that takes activations of the type ``_half``."""

    _half: np.dtype[Any] | None = None

    def _hold(self, name: str) -> None:
        """Hold activations in a half type."""
        self._half = self.activations = half(name)

    def fetch(self, a: Array) -> Callable[[], npt.NDArray[Any]]:
        """Half types arrive as float32."""
        return HOST.fetch(self._wide(a) if self._is_half(a) else a)

    def on_host(self, function: Callable[..., Any], *args: Any) -> Any:
        if not any(map(self._is_half, args)):
            return super().on_host(function, *args)
        made = super().on_host(function, *map(self._wide, args))
        return made if function.__name__.endswith("_sums") else self._narrow(made)

    def _is_half(self, a: Any) -> bool:
        """Whether this is an activation of a half type, or several."""
        if isinstance(a, (list, tuple)):
            return any(map(self._is_half, a))
        return self._half is not None and isinstance(a, np.ndarray) and a.dtype == self._half

    def _wide(self, a: Any) -> Any:
        """An array of a half type, or several, as float32; all else as it is."""
        if isinstance(a, (list, tuple)):
            return type(a)(map(self._wide, a))
        return self.copy(a, _F32) if self._is_half(a) else a

    def _narrow(self, a: Any) -> Any:
        """An array of float32, or several, rounded to the half type; all else as it is."""
        if isinstance(a, tuple):
            return tuple(map(self._narrow, a))
        return self.copy(a, self._half) if isinstance(a, np.ndarray) and a.dtype == _F32 else a

    def _rounded(self, w: Array) -> Array:
        """Weights as they are multiplied."""
        return w if self._is_half(w) else self.copy(w, self._half)

    def _widened(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if name in _PRODUCTS:
            args = (args[0], self._rounded(args[1]), *args[2:])
        if name in _BY_ROWS:
            return self._by_rows(name, args, kwargs)
        made = getattr(self, name)(*map(self._wide, args), **{k: self._wide(v) for k, v in kwargs.items()})
        return made if name in _GRADIENTS else self._narrow(made)

    def _by_rows(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Array:
        """A method of pieces of rows."""
        listed = (b for a in (*args, *kwargs.values()) for b in (a if isinstance(a, (list, tuple)) else (a,)))
        x = next(filter(self._is_half, listed))
        lead, rows, out = x.shape[:-1], prod(x.shape[:-1]), self.empty(x.shape, x.dtype)
        flat, method, step = out.reshape(rows, x.shape[-1]), getattr(self, name), max(1, PIECE // max(1, x.shape[-1]))

        def piece(a: Any, part: slice) -> Any:
            if isinstance(a, (list, tuple)):
                return type(a)(piece(b, part) for b in a)
            of_rows = isinstance(a, np.ndarray) and a.ndim == x.ndim and a.shape[:-1] == lead
            return self._wide(a.reshape(rows, a.shape[-1])[part]) if of_rows else a

        for start in range(0, rows, step):
            part = slice(start, start + step)
            flat[part] = method(*(piece(a, part) for a in args), **{k: piece(a, part) for k, a in kwargs.items()})
        return out


def _through_float32(name: str) -> Callable[..., Any]:
    @wraps(getattr(Engine, name), updated=())  # but for the mark of abstract methods
    def method(self: Halves, *args: Any, **kwargs: Any) -> Any:
        if self._half is not None and (any(map(self._is_half, args)) or any(map(self._is_half, kwargs.values()))):
            return self._widened(name, args, kwargs)
        return getattr(super(Halves, self), name)(*args, **kwargs)

    return method


for _name in (*_BY_ROWS, *_PRODUCTS, *_GRADIENTS, *_OTHERS):
    setattr(Halves, _name, _through_float32(_name))


class NumpyHalves(Halves, NumpyEngine):
    """The reference with activations of a half type.

    Parameters
    ----------
    name : "bfloat16" or "float16"
    threads : int, optional
        Ignored.
    """

    def __init__(self, name: str, threads: int | None = None) -> None:
        NumpyEngine.__init__(self, _F32, threads)
        self._hold(name)
