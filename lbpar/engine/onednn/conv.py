"""Convolutions: primitives for one shape and geometry, with the weights' reorder where oneDNN prefers its own format.

Weights lie as (F, *K, C/groups). Kernels that read them so are one to two orders of magnitude slower than those on blocked
formats, and the reorder costs one pass over the weights (measured: 0.2 to 3 % of a ResNet layer at batch 16), so oneDNN
chooses the format and weights are reordered in every call. Nothing is remembered about their values between calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

from lbpar.engine.base import Array, LocalWindow, Window
from lbpar.engine.onednn import cdef
from lbpar.engine.onednn.library import Description, DnnlContext, Primitive, Refused
from lbpar.engine.onednn.rows import matmul
from lbpar.engine.windows import first_tap, tap_slices


class Geometry:
    """A window in oneDNN's terms, on the part ``crop`` of the input (None where that is all of it), of extents ``spatial``.

    Raises
    ------
    Refused
        The windows of a dimension read no input at all.
    """

    def __init__(self, win: Window, inner: Sequence[int], outer: Sequence[int]) -> None:
        self.win, self.inner, self.outer = win, tuple(inner), tuple(outer)
        self.strides = [dim.stride for dim in win]
        self.dilates = [dim.dilation - 1 if dim.kernel > 1 else 0 for dim in win]
        self.before = [max(0, dim.pad) for dim in win]
        self.after, crop = [], []
        for dim, n_in, n_out in zip(win, inner, outer, strict=True):
            end = (n_out - 1) * dim.stride + (dim.kernel - 1) * dim.dilation + 1 - dim.pad  # one past the last read
            start = max(0, -dim.pad)
            # oneDNN takes inputs left over behind the last window up to, not including, one stride.
            stop = n_in if end > n_in - dim.stride else end
            if stop <= start or not any(_reading(dim, n_in, n_out)):
                raise Refused("windows outside the input")
            crop.append(slice(start, stop))
            self.after.append(end - stop)
        self.spatial = tuple(part.stop - part.start for part in crop)
        self.crop = None if self.spatial == self.inner else (slice(None), *crop)

    @property
    def pointwise(self) -> bool:
        """Whether the first tap of output i reads input i, and nothing is cut off or added."""
        return self.crop is None and max(self.strides) == 1 and not any((*self.before, *self.after))

    @property
    def tail(self) -> list[list[int]]:
        """Strides, dilations and pads as oneDNN's create functions take them."""
        return [self.strides, self.dilates, self.before, self.after]


def _reading(dim: LocalWindow, n_in: int, n_out: int) -> list[bool]:
    """Per tap, whether it reads any input: dilation may step over the input, stride may leave it out."""
    outputs = (tap_slices(dim, tap, n_in, n_out)[0] for tap in range(dim.kernel))
    return [part.stop > part.start for part in outputs]


def safe_type(result: Literal["y", "dx", "dw"], geometry: Geometry, channels: int, wanted: int) -> int:
    """The type in which oneDNN computes a convolution or one of its gradients rightly: ``wanted``, else float32.

    Fuzzing oneDNN 3.0, 3.1 and 3.2 (``tests/engine/fuzz_onednn.py``: poisoned memory between guard pages; AVX2, AVX-512, bfloat16
    and AMX kernels; 1 to 4 threads; tens of thousands of cases) found them wrong here:

    * **y and dx of volumes in bfloat16**, where an output reads padding only (the kernel cannot be made, and after it no other);
      with AMX, for some numbers of channels and widths, where taps are dilated, where the kernel is 1 x 1 x 1, y where the depth is
      strided further than the kernel reaches (written behind the scratch memory), and dx where any dimension is strided.
    * **y in bfloat16**, where q divides the kernel's width and its stride, and q times the channels fill vectors of 32, but they alone
      do not: q pixels become one, of channels in another order (AMX).
    * **dw in bfloat16**, where a tap reads padding only (its gradient is then stale memory or, in depth and height, the call
      ends in a segmentation fault); where the depth is *tight*: padded in front, and the window of the first output without
      padding in front ends behind the input, so that padding starts at the wrong output; where the height is dilated, more than
      28 outputs wide, and of channels that do not fill vectors of 16; where a single tap strides over rows (what it steps over is
      read, times 0).
    * **dw of volumes in float32** (AVX-512), where a tap in depth or height reads padding only, or the depth is tight and strided.
    * **dw of strided 1 x 1 kernels** of fewer channels than a vector has (8 or 16): written behind the scratch memory.

    Such geometries are those of small blocks and odd layers, so all versions go round them; one that has none of these faults
    would win little by being known here.

    Parameters
    ----------
    result
    geometry : Geometry
    channels : int
        Input channels of a group.
    wanted : int
        float32 or bfloat16.

    Raises
    ------
    Refused
        It is right in neither type.
    """
    dims = list(zip(geometry.win, geometry.inner, geometry.outer, strict=True))
    wrong = any((first_tap(*dim) < 0).any() for dim in dims)
    depth, last, volume = geometry.win[0], geometry.win[-1], len(dims) == 3
    single = all(dim.kernel == 1 for dim in geometry.win)
    if volume and result != "dw":
        wrong |= single or any(geometry.dilates) or depth.kernel < depth.stride
        wrong |= result == "dx" and max(geometry.strides) > 1
    if result == "y" and channels % 32:
        folds = range(2, last.kernel + 1)
        wrong |= any(last.kernel % q == last.stride % q == channels * q % 32 == 0 for q in folds)
    if result == "dw":
        idle = [not all(_reading(*dim)) for dim in dims]
        tight = volume and _tight(*dims[0])
        if (volume and (any(idle[:2]) or (tight and depth.stride > 1))) or (
            single and max(geometry.strides) > 1 and channels < 16
        ):
            raise Refused("weight gradient that oneDNN gets wrong")
        wrong |= tight or any(idle)
        if len(dims) > 1:
            wrong |= geometry.dilates[-2] > 0 and geometry.outer[-1] > 28 and channels % 16 > 0
            wrong |= geometry.win[-2].kernel == 1 and geometry.strides[-2] > 1 and last.kernel > 1
    return cdef.F32 if wrong else wanted


def _tight(dim: LocalWindow, n_in: int, n_out: int) -> bool:
    """Whether the window of the first output without padding in front (or of the last output) ends behind the input."""
    first = min(-(-dim.pad // dim.stride), n_out - 1)
    return dim.pad > 0 and first * dim.stride - dim.pad + (dim.kernel - 1) * dim.dilation >= n_in


FEW_ROWS = 4096
"""Positions up to which dw of a 1 x 1 convolution is faster as a matrix product (measured: 1.1 to 1.3 times)."""


_NOTHING = bytes(64)


class _Operand:
    """An operand in the type and format that a primitive chose, brought there or back; often nothing to do.

    Parameters
    ----------
    context
    area : name of the scratch memory that holds the converted operand
    plain, chosen : descriptors of the caller's array and of the primitive's
    result : whether the operand is written by the primitive
    odd : whether it is of bfloat16, with an odd number of channels in a group
    """

    def __init__(
        self, context: DnnlContext, area: str, plain: Any, chosen: Any, result: bool, odd: bool = False
    ) -> None:
        self.context, self.area, self.result, self.odd = context, area, result, odd and not result
        self.reorder: Primitive | None = None
        if not context.lib.dnnl_memory_desc_equal(plain, chosen):
            self.nbytes = int(context.lib.dnnl_memory_desc_get_size(chosen))
            source, target = (chosen, plain) if result else (plain, chosen)
            self.reorder = Primitive(
                context,
                "reorder",
                (source, context.engine, target, context.engine, context.attributes()),
                ((cdef.ARG_SRC, source), (cdef.ARG_DST, target)),
            )

    def put(self, array: Array) -> Any:
        """Address of the operand as the primitive wants it; of a result, where it shall be written, for `fetch` to finish."""
        address = self.context.pointer(array)
        if self.reorder is None and not self.odd:
            return address
        # Kernels read channels in pairs: where their number is odd, one too many, times a weight of 0, which must not be NaN.
        nbytes = array.nbytes if self.reorder is None else self.nbytes
        staged = self.context.area(self.area, nbytes + len(_NOTHING))
        if self.reorder is None:
            self.context.ffi.memmove(staged, address, nbytes)
        elif not self.result:
            self.reorder(address, staged)
        if not self.result:
            self.context.ffi.memmove(staged + nbytes, _NOTHING, len(_NOTHING))
        return staged

    def fetch(self, staged: Any, array: Array) -> None:
        """Move a result that was written to ``staged`` to ``array``."""
        if self.result and self.reorder is not None:
            self.reorder(staged, self.context.pointer(array))


_ARGUMENTS = {
    "y": (cdef.ARG_SRC, cdef.ARG_WEIGHTS, cdef.ARG_DST, cdef.ARG_BIAS),
    "dx": (cdef.ARG_DIFF_SRC, cdef.ARG_WEIGHTS, cdef.ARG_DIFF_DST),
    "dw": (cdef.ARG_SRC, cdef.ARG_DIFF_WEIGHTS, cdef.ARG_DIFF_DST, cdef.ARG_DIFF_BIAS),
}
_NAMES = {"y": "forward", "dx": "backward_data", "dw": "backward_weights"}


class Convolution:
    """``y = conv(x, w) [+ b]``, or the gradient dx or dw (and db) of it, for arrays of one shape each.

    Parameters
    ----------
    context
    result : which of x, w and y (or their gradients) is computed from the other two
    x_shape, w_shape : shapes of the caller's arrays
    win, groups, out : window, groups, and output extents
    bias : whether there is a b, or a db is wanted
    stored : the type of x, y and weights that are multiplied; gradients of weights, and biases, are float32. They multiply in
        that type, unless `safe_type` knows better.

    Attributes
    ----------
    staged : bytes of scratch memory that operands take: converted to another type, or arranged as kernels want them
    crop : the part of x that windows read, or None for all of it; a call takes (or writes) that part
    x_shape : its shape
    """

    def __init__(
        self,
        context: DnnlContext,
        result: Literal["y", "dx", "dw"],
        x_shape: Sequence[int],
        w_shape: Sequence[int],
        win: Window,
        groups: int,
        out: Sequence[int],
        bias: bool,
        stored: int = cdef.F32,
    ) -> None:
        geometry = Geometry(win, x_shape[1:-1], out)
        self.crop, self.x_shape = geometry.crop, (x_shape[0], *geometry.spatial, x_shape[-1])
        compute = safe_type(result, geometry, w_shape[-1], stored)
        activations, b = (self.x_shape, (x_shape[0], *out, w_shape[0])), context.null
        plain_x, plain_y = (context.activation(shape, stored) for shape in activations)
        x, y = (context.activation(shape, compute) for shape in activations)
        low_w = context.weights(w_shape, groups, plain=False, dtype=compute)
        w = context.weights(w_shape, groups, plain=False) if result == "dw" else low_w
        if bias:
            b = context.rows((w_shape[0],))
        made: tuple[Any, ...] = (cdef.CONV_DIRECT, x, w, y) if result == "dx" else (cdef.CONV_DIRECT, x, w, b, y)
        hint: tuple[Any, ...] = ()
        if result == "y":
            made = (cdef.FORWARD_TRAINING, *made)
        else:  # a forward primitive's descriptor, which backward ones ask for
            forward = (cdef.FORWARD_TRAINING, cdef.CONV_DIRECT, x, low_w, context.null, y, *geometry.tail)
            hint = (Description(context, "convolution_forward", (*forward, context.attributes())).descriptor,)
        chosen = cdef.QUERY_DIFF_WEIGHTS if result == "dw" else cdef.QUERY_WEIGHTS
        self.run = Primitive(
            context,
            f"convolution_{_NAMES[result]}",
            (*made, *geometry.tail, *hint, context.attributes()),
            list(zip(_ARGUMENTS[result], (x, chosen, y, b) if bias else (x, chosen, y), strict=False)),
        )
        converted = 0 if compute == stored else 4 * sum(map(prod, activations))
        self.staged = converted + self.run.size(cdef.QUERY_SCRATCHPAD)
        plain_w = context.weights(w_shape, groups, plain=True, dtype=cdef.F32 if result == "dw" else stored)
        odd = [stored == cdef.BF16 and n % 2 == 1 for n in (w_shape[-1], w_shape[0] // groups)]
        self._x = _Operand(context, "first", plain_x, x, result == "dx", odd[0])
        self._w = _Operand(context, "weights", plain_w, self.run.query(chosen), result == "dw")
        self._y = _Operand(context, "second", plain_y, y, result == "y", odd[1])

    def __call__(self, x: Array, w: Array, y: Array, b: Array | None = None) -> None:
        """All arrays as `dense` gives them; the result is written into its place among them."""
        first, weights, second = self._x.put(x), self._w.put(w), self._y.put(y)
        self.run(first, weights, second, *(() if b is None else (self.run.context.pointer(b),)))
        for operand, staged, array in ((self._x, first, x), (self._w, weights, w), (self._y, second, y)):
            operand.fetch(staged, array)


class PointwiseWeights:
    """dw of a 1 x 1 convolution as the product of two matrices of ``rows`` positions."""

    crop, staged = None, 0

    def __init__(self, context: DnnlContext, rows: int, channels: int, filters: int) -> None:
        self.run = matmul(context, (filters, rows, channels), (True, False), False)

    def __call__(self, x: Array, dw: Array, dy: Array, db: Array | None = None) -> None:
        pointer = self.run.context.pointer
        self.run(pointer(dy), pointer(x), pointer(dw))


def weights_gradient(
    context: DnnlContext,
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    win: Window,
    groups: int,
    out: Sequence[int],
    bias: bool,
    stored: int,
) -> Convolution | PointwiseWeights:
    """dw, and db if wanted, by whichever of the two is faster."""
    rows, single = prod(x_shape[:-1]), groups == 1 and all(dim.kernel == 1 for dim in win)
    alone = single and Geometry(win, x_shape[1:-1], out).pointwise
    if alone and not bias and rows <= FEW_ROWS and stored == cdef.F32:
        return PointwiseWeights(context, rows, x_shape[-1], w_shape[0])
    return Convolution(context, "dw", x_shape, w_shape, win, groups, out, bias, stored)
