"""The interface that every engine implements: local kernels on the arrays of one device.

Terms used throughout
    Memory order is channels-last and C-contiguous: activations are ``(N, *S, C)`` with one to three spatial
    dimensions ``S`` (or none for ``linear`` and the losses), convolution weights are ``(F, *K, C/groups)``.
    Outputs are freshly allocated and C-contiguous unless a method says that it may work in place. The element type
    of a result is that of the first array argument; statistics, sums and losses are float64 whatever goes in.
    Any extent of any array may be 0: results are then empty, or zero (plus bias) where there is nothing to add up.

Arrays, events and copies to and from the host are those of `lbpar.engine.device`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from lbpar.engine.device import Array, Float64Array
from lbpar.engine.rules import Rules


@dataclass(frozen=True)
class LocalWindow:
    """One spatial dimension of a local window: output ``o``, tap ``k`` reads input ``o*stride + k*dilation - pad``.

    Taps that fall outside ``[0, in)`` count as zero, except in max pooling, which skips them. There is no pad behind
    the input: the output size is always given, and what it reaches past the end counts as outside.

    Attributes
    ----------
    kernel : int
        Number of taps, at least 1.
    stride, dilation : int
        Steps between outputs and between taps, in input elements, at least 1.
    pad : int
        Zeros before the local input. Any size; negative crops, that is, the first ``-pad`` inputs are never read.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    pad: int = 0


Window: TypeAlias = tuple[LocalWindow, ...]
"""One `LocalWindow` per spatial dimension."""


class Engine(Rules):
    """Local kernels of one device.

    Parameters
    ----------
    dtype : numpy dtype or its name
        Element type of activations and weights that the caller means to use. Methods follow the type of their
        arguments all the same.
    threads : int, optional
        Threads that kernels may use; None leaves the library's own default. An engine that cannot set it ignores it.

    Attributes
    ----------
    activations : numpy dtype
        Element type in which activations are held: ``dtype``, or a half type beside weights of float32.
    """

    name: ClassVar[str] = "?"
    libraries: tuple[str, ...] = ()
    """Libraries of a device that take part of the work, where they are there."""

    accelerated: ClassVar[frozenset[str]] = frozenset()
    """Names of the element types that this engine's own kernels take; others run through its fallback."""

    rims: ClassVar[bool] = False
    """Whether programs compute the interior of a convolution while its halo is under way, and the rims then."""

    whole_norms: bool = False
    """Whether `norm_forward` and `sample_norm_forward` may be better than their parts."""

    volume_copies: bool = True
    """Whether gradients of weights of volumes may be computed from a copy of the input."""

    def __init__(self, dtype: npt.DTypeLike = np.float32, threads: int | None = None) -> None:
        self.dtype = self.activations = np.dtype(dtype)
        self.threads = threads

    def parameter_gradient(self, a: Array) -> Array:
        """A gradient of parameters that was summed in float64, in the parameters' type."""
        return self.copy(a, self.dtype)

    def running(self) -> AbstractContextManager[None]:
        """What a program's kernels run in, entered by the thread that calls them.

        An engine may set here what belongs to threads, such as the treatment of denormal numbers, and must restore it.
        """
        return nullcontext()

    def agree(self, exchange: Callable[[Any], Sequence[Any]]) -> None:
        """Let all ranks choose alike among ways to compute that they have timed; ``exchange`` gathers an object of each. Collective."""

    # -- convolution -----------------------------------------------------------------------------------------------

    @abstractmethod
    def conv_forward(
        self, x: Array, w: Array, b: Array | None, win: Window, groups: int, out_spatial: Sequence[int]
    ) -> Array:
        """Convolve (in fact correlate) ``x`` with ``w`` and add ``b``.

        Parameters
        ----------
        x : (N, *S, C)
        w : (F, *K, C/groups)
            Filters ``[g*F/groups, (g+1)*F/groups)`` read channels ``[g*C/groups, (g+1)*C/groups)``.
        b : (F,) or None
        win : window, whose kernels equal K
        groups : int, divides C and F
        out_spatial : output extents

        Returns
        -------
        (N, *out_spatial, F)
        """

    @abstractmethod
    def conv_backward_data(self, dy: Array, w: Array, win: Window, groups: int, in_spatial: Sequence[int]) -> Array:
        """Gradient of `conv_forward` for x; also the forward pass of a transposed convolution.

        Parameters
        ----------
        dy : (N, *O, F)
        w : (F, *K, C/groups)
        in_spatial : extents of the x that was (or would be) convolved

        Returns
        -------
        (N, *in_spatial, C)
        """

    @abstractmethod
    def conv_backward_weights(self, x: Array, dy: Array, win: Window, groups: int, out: Array | None = None) -> Array:
        """Gradient of `conv_forward` for w: ``(F, *K, C/groups)``, summed over samples and positions of ``dy``.

        ``out``, a C-contiguous array of the result's shape and type, may be written and returned instead of a new one.
        """

    @abstractmethod
    def bias_add(self, y: Array, b: Array) -> Array:
        """``y + b`` with b of shape (C,) along the last dimension; may overwrite and return y."""

    @abstractmethod
    def bias_backward(self, dy: Array) -> Array:
        """Sum over all but the last dimension, accumulated in float64, returned as (C,) in dy's type."""

    # -- linear ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def linear_forward(self, x: Array, w: Array, b: Array | None) -> Array:
        """``x @ w.T + b``: x (N, C), w (F, C), b (F,) or None; returns (N, F)."""

    @abstractmethod
    def linear_backward_data(self, dy: Array, w: Array) -> Array:
        """``dy @ w``: dy (N, F), w (F, C); returns (N, C)."""

    @abstractmethod
    def linear_backward_weights(self, x: Array, dy: Array, out: Array | None = None) -> Array:
        """``dy.T @ x``: x (N, C), dy (N, F); returns (F, C); ``out`` may be written and returned."""

    # -- pooling ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def max_pool_forward(self, x: Array, win: Window, out_spatial: Sequence[int]) -> tuple[Array, Array]:
        """Maximum of each window.

        Returns
        -------
        y : (N, *out_spatial, C)
            NaN wherever the window holds a NaN; -inf where no tap lies inside the input.
        arg : opaque array for `max_pool_backward`
            It stands for the first maximum in row-major window order (the last NaN, where there are any), which is
            PyTorch's choice too.
        """

    @abstractmethod
    def max_pool_backward(self, dy: Array, arg: Array, win: Window, in_spatial: Sequence[int]) -> Array:
        """Add each dy at the position of its window's maximum; returns (N, *in_spatial, C)."""

    @abstractmethod
    def avg_pool_forward(
        self, x: Array, win: Window, out_spatial: Sequence[int], divisors: Sequence[Float64Array]
    ) -> Array:
        """Sum of each window, divided by ``divisors[0][o0] * divisors[1][o1] * ...``.

        Parameters
        ----------
        x : (N, *S, C)
        divisors : one float64 array of length ``out_spatial[d]`` per spatial dimension
            How many taps count in each dimension; positions with a divisor of 0 give 0.

        Returns
        -------
        (N, *out_spatial, C)
        """

    @abstractmethod
    def avg_pool_backward(
        self, dy: Array, win: Window, in_spatial: Sequence[int], divisors: Sequence[Float64Array]
    ) -> Array:
        """Gradient of `avg_pool_forward`, ``divisors`` as there (indexed by dy's positions); (N, *in_spatial, C)."""

    @abstractmethod
    def spatial_sum(self, x: Array, scale: float) -> Array:
        """``scale`` times the sum over all spatial dimensions: (N, *S, C) to (N, C), accumulated in float64."""

    @abstractmethod
    def spatial_broadcast(self, dy: Array, spatial: Sequence[int], scale: float) -> Array:
        """Gradient of `spatial_sum`: ``scale * dy`` (N, C) at every position of (N, *spatial, C)."""

    # -- normalisation ---------------------------------------------------------------------------------------------

    @abstractmethod
    def norm_sums(self, x: Array, shift: Array) -> Float64Array:
        """First and second moments about ``shift`` (C,), summed over all but the last dimension.

        Returns
        -------
        float64 (4, C): leading bits and rest of sum(x - shift), leading bits and rest of sum((x - shift)**2)
            Blocks that used the same shift are merged by adding their results: however far from the mean the shift is, the
            variance keeps its digits, because leading parts are of few bits and add up without rounding.
        """

    @abstractmethod
    def norm_moments(self, sums: Array, shift: Array, count: float, eps: float) -> Float64Array:
        """Mean, ``1/sqrt(var + eps)`` and biased variance, float64 (3, C), from `norm_sums` over ``count`` values.

        A count of 0 gives finite numbers that mean nothing.
        """

    @abstractmethod
    def norm_apply(self, x: Array, mean: Array, invstd: Array, scale: Array | None, bias: Array | None) -> Array:
        """``(x - mean) * invstd * scale + bias``; scale and bias (C,) or None for 1 and 0; x's type and shape."""

    @abstractmethod
    def norm_backward_sums(self, x: Array, dy: Array, mean: Array, invstd: Array) -> Float64Array:
        """float64 (2, C): sum(dy) and sum(dy * xhat), with xhat = (x - mean)*invstd, over all but the last dimension.

        These are the gradients of bias and scale.
        """

    @abstractmethod
    def norm_backward_data(
        self, x: Array, dy: Array, mean: Array, invstd: Array, scale: Array | None, sums: Array, count: float
    ) -> Array:
        """``scale * invstd * (dy - sums[0]/count - xhat*sums[1]/count)``.

        ``sums`` is `norm_backward_sums` over all ``count`` values that shared the statistics. Pass zeros (with any
        count but 0) where mean and invstd were constants.
        """

    def norm_statistics(self, x: Array, shift: Array, count: float, eps: float) -> tuple[Float64Array, Float64Array]:
        """`norm_sums`, and `norm_moments` of them, where no other rank adds to the sums."""
        sums = self.norm_sums(x, shift)
        return sums, self.norm_moments(sums, shift, count, eps)

    @abstractmethod
    def norm_running(self, sums: Array, mean: Array, var: Array, momentum: float, count: int) -> None:
        """Move running statistics towards those of a batch, in place.

        Parameters
        ----------
        sums : float64 (4, C)
            `norm_sums` about the running mean, over all ranks.
        mean, var : float64 (C,)
            The running mean and the running unbiased variance.
        momentum : weight of the batch
        count : number of values behind the sums
        """

    @abstractmethod
    def norm_inference(
        self, x: Array, mean: Array, var: Array, scale: Array | None, bias: Array | None, eps: float
    ) -> Array:
        """`norm_apply` with ``invstd = 1/sqrt(var + eps)``."""

    # Within samples: x is (rows, positions, groups, channels of a group), statistics are per row and group, scale and bias are
    # (groups, channels of a group).

    @abstractmethod
    def sample_norm_sums(self, x: Array) -> Float64Array:
        """`norm_sums` about 0 of each row and group: float64 (4, rows, groups)."""

    @abstractmethod
    def sample_norm_apply(
        self, x: Array, mean: Array, invstd: Array, scale: Array | None = None, bias: Array | None = None
    ) -> Array:
        """``(x - mean) * invstd * scale + bias``; scale and bias None for 1 and 0."""

    @abstractmethod
    def sample_norm_backward_sums(
        self, x: Array, dy: Array, mean: Array, invstd: Array, scale: Array | None = None
    ) -> tuple[Float64Array, Array, Array]:
        """Sums of g = scale*dy and of g*xhat per row and group, float64 (2, rows, groups); and the gradients of scale and bias."""

    @abstractmethod
    def sample_norm_backward_data(
        self, count: float, x: Array, dy: Array, mean: Array, invstd: Array, sums: Array, scale: Array | None = None
    ) -> Array:
        """``invstd * (g - sums[0]/count - xhat*sums[1]/count)`` with g = scale*dy, sums over all ``count`` values of a row's group."""

    # -- pointwise -------------------------------------------------------------------------------------------------

    @abstractmethod
    def relu_forward(self, x: Array) -> Array:
        """``max(x, 0)``; NaN stays NaN."""

    @abstractmethod
    def relu_backward(self, y: Array, dy: Array) -> Array:
        """dy where the forward result y is above 0, else 0."""

    @abstractmethod
    def leaky_relu_forward(self, x: Array, slope: float) -> Array:
        """x where above 0, else ``slope * x``."""

    @abstractmethod
    def leaky_relu_backward(self, y: Array, dy: Array, slope: float) -> Array:
        """dy where the forward result y is above 0, else ``slope * dy``; slope must not be negative."""

    @abstractmethod
    def sigmoid_forward(self, x: Array) -> Array:
        """``1 / (1 + exp(-x))``, without overflow."""

    @abstractmethod
    def sigmoid_backward(self, y: Array, dy: Array) -> Array:
        """``dy * y * (1 - y)`` with y the forward result."""

    @abstractmethod
    def tanh_forward(self, x: Array, scale: float) -> Array:
        """``scale * tanh(x)``."""

    @abstractmethod
    def tanh_backward(self, y: Array, dy: Array, scale: float) -> Array:
        """``dy * (scale - y * y / scale)`` with y the forward result."""

    @abstractmethod
    def activation_forward(self, kind: str, x: Array, *options: float | str) -> Array:
        """An activation that has no method of its own (`lbpar.engine.activations`)."""

    @abstractmethod
    def activation_backward(self, kind: str, kept: Array, dy: Array, *options: float | str) -> Array:
        """dy times its slope, a function of x or y, as the op declares."""

    @abstractmethod
    def local_response_norm_forward(
        self, x: Array, size: int, own: int, first: int, channels: int, alpha: float, beta: float, k: float
    ) -> tuple[Array, Array]:
        """``y = x * scale**-beta`` and ``scale = k + alpha/size * (sum of x**2 over a window of channels)``, for ``channels`` outputs.

        Output j is about channel ``own + j`` of the block x; its window is ``x[..., j + first : j + first + size]``, where what x
        does not hold counts as zero.
        """

    @abstractmethod
    def local_response_norm_ratio(self, y: Array, dy: Array, scale: Array) -> Array:
        """``dy * y / scale``."""

    @abstractmethod
    def local_response_norm_backward(
        self, x: Array, dy: Array, scale: Array, ratio: Array, size: int, first: int, alpha: float, beta: float
    ) -> Array:
        """``dy * scale**-beta - 2*alpha*beta/size * x * (sum of ratio over the windows that hold the channel)``.

        For input i these are ``ratio[..., i + first : i + first + size]``.
        """

    @abstractmethod
    def channel_shuffle(self, x: Array, rows: int, columns: int) -> Array:
        """The last dimension as a table of so many rows and columns, transposed."""

    @abstractmethod
    def add(self, xs: Sequence[Array]) -> Array:
        """Sum of one or more arrays of one shape; a new array, from left to right."""

    @abstractmethod
    def multiply(self, xs: Sequence[Array]) -> Array:
        """Product of one or more arrays of one shape; a new array, from left to right."""

    @abstractmethod
    def multiply_backward(self, dy: Array, xs: Sequence[Array], i: int) -> Array:
        """Gradient of `multiply` for ``xs[i]``: dy times all the others."""

    @abstractmethod
    def concat(self, xs: Sequence[Array]) -> Array:
        """Join along the last dimension. Its gradient is a slice, see `pack`."""

    @abstractmethod
    def upsample_forward(
        self, x: Array, factors: Sequence[int], out_spatial: Sequence[int], offsets: Sequence[int]
    ) -> Array:
        """Nearest neighbour: ``y[j] = x[(j + offset) // factor]`` in each spatial dimension, offsets not negative.

        The offset lets a block of y start inside a repeated element.
        """

    @abstractmethod
    def upsample_backward(self, dy: Array, factors: Sequence[int]) -> Array:
        """Sum of each block of ``factors`` elements; dy's extents must be multiples of the factors."""

    @abstractmethod
    def dropout(self, x: Array, rate: float, key: int | Array, index: Sequence[npt.NDArray[np.int64]]) -> Array:
        """``x / (1 - rate)`` where kept, else 0; the same call on dy is the backward pass.

        Parameters
        ----------
        x : any shape
        rate : probability of dropping, 0 to 1
        key : 64-bit integer, one per layer and step (`lbpar.random.fold`)
            An engine that `captures` also takes an array of one uint64.
        index : per dimension, one int64 on the host for each place along it
            Their sum over the dimensions is the flat index of an element in the global tensor. Whether it is kept depends
            on key and index alone, so it is the same however the tensor is split.
        """

    # -- fused kernels ----------------------------------------------------------------------------------------------
    #
    # Programs call these where nothing but the next kernel reads a result. An engine overrides those it can run in one
    # pass over memory.

    def conv_relu_forward(
        self, x: Array, w: Array, b: Array | None, win: Window, groups: int, out_spatial: Sequence[int]
    ) -> Array:
        """``relu_forward(conv_forward(...))``."""
        return self.relu_forward(self.conv_forward(x, w, b, win, groups, out_spatial))

    def conv_forward_parts(
        self,
        x: Array,
        w: Array,
        b: Array | None,
        win: Window,
        groups: int,
        y: Array,
        boxes: Sequence[Sequence[tuple[int, int]]],
        relu: bool = False,
    ) -> None:
        """Write some boxes of ``y = conv_forward(x, w, b, win, groups, y's extents)``, with ReLU if asked for, and nothing else of y.

        A box is the first output, and one past the last, along each spatial dimension; boxes do not overlap.
        """
        conv = self.conv_relu_forward if relu else self.conv_forward
        for box in boxes:
            moved = tuple(replace(d, pad=d.pad - start * d.stride) for d, (start, _) in zip(win, box, strict=True))
            self._put(y, box, conv(x, w, b, moved, groups, [stop - start for start, stop in box]))

    def conv_backward_data_parts(
        self, dy: Array, w: Array, win: Window, groups: int, dx: Array, boxes: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        """Write some boxes of ``dx = conv_backward_data(dy, w, win, groups, dx's extents)`` and nothing else of dx."""
        for box in boxes:
            moved = tuple(replace(d, pad=d.pad + start) for d, (start, _) in zip(win, box, strict=True))
            self._put(dx, box, self.conv_backward_data(dy, w, moved, groups, [stop - start for start, stop in box]))

    def conv_forward_inside(
        self,
        x: Array,
        w: Array,
        b: Array | None,
        win: Window,
        groups: int,
        out_spatial: Sequence[int],
        box: Sequence[tuple[int, int]],
        relu: bool = False,
    ) -> Array:
        """A new y of which one box is as `conv_forward_parts` writes it, and the rest of no use to anybody."""
        y = self.empty((x.shape[0], *out_spatial, w.shape[0]), x.dtype)
        self.conv_forward_parts(x, w, b, win, groups, y, [box], relu)
        return y

    def conv_backward_data_inside(
        self, dy: Array, w: Array, win: Window, groups: int, in_spatial: Sequence[int], box: Sequence[tuple[int, int]]
    ) -> Array:
        """A new dx of which one box is as `conv_backward_data_parts` writes it, and the rest of no use to anybody."""
        dx = self.empty((dy.shape[0], *in_spatial, w.shape[-1] * groups), dy.dtype)
        self.conv_backward_data_parts(dy, w, win, groups, dx, [box])
        return dx

    def _put(self, y: Array, box: Sequence[tuple[int, int]], part: Array) -> None:
        if part.size:
            self.unpack(part, y, (slice(None), *(slice(*side) for side in box), slice(None)))

    def conv_backward_weights_bias(
        self, x: Array, dy: Array, win: Window, groups: int, out: Array | None = None
    ) -> tuple[Array, Array]:
        """``conv_backward_weights(...)`` and ``bias_backward(dy)``."""
        return self.conv_backward_weights(x, dy, win, groups, out), self.bias_backward(dy)

    def norm_relu_forward(
        self,
        x: Array,
        mean: Array,
        invstd: Array,
        scale: Array | None,
        bias: Array | None,
        residual: Array | None = None,
    ) -> Array:
        """``relu_forward(norm_apply(...) [+ residual])``."""
        y = self.norm_apply(x, mean, invstd, scale, bias)
        return self.relu_forward(y if residual is None else self.add([y, residual]))

    def norm_forward(
        self,
        x: Array,
        shift: Array,
        scale: Array | None,
        bias: Array | None,
        residual: Array | None,
        relu: bool,
        count: float,
        eps: float,
    ) -> tuple[Float64Array, Float64Array, Array]:
        """`norm_statistics`, and by them `norm_apply` or, with ``relu``, `norm_relu_forward`, which alone takes a residual: sums, moments, y."""
        sums, moments = self.norm_statistics(x, shift, count, eps)
        if relu:
            return sums, moments, self.norm_relu_forward(x, moments[0], moments[1], scale, bias, residual)
        return sums, moments, self.norm_apply(x, moments[0], moments[1], scale, bias)

    def sample_norm_moments(self, sums: Array, count: float, eps: float) -> Float64Array:
        """`norm_moments` of each row and group, float64 (3, rows, groups), from `sample_norm_sums` over ``count`` values."""
        flat = sums.reshape((4, prod(sums.shape[1:])))
        return self.norm_moments(flat, self.zeros(flat.shape[1:], np.float64), count, eps).reshape((3, *sums.shape[1:]))

    def sample_norm_forward(
        self, x: Array, scale: Array | None, bias: Array | None, count: float, eps: float
    ) -> tuple[Float64Array, Array]:
        """`sample_norm_moments` of `sample_norm_sums`, where no other rank adds to these, and `sample_norm_apply` by them."""
        moments = self.sample_norm_moments(self.sample_norm_sums(x), count, eps)
        return moments, self.sample_norm_apply(x, moments[0], moments[1], scale, bias)

    def norm_relu_backward_sums(
        self, x: Array, y: Array, dy: Array, mean: Array, invstd: Array, more: Array | None = None
    ) -> tuple[Float64Array, Array]:
        """``norm_backward_sums(x, g, ...)`` with ``g = relu_backward(y, dy [+ more])``, and g."""
        masked = self.relu_backward(y, dy if more is None else self.add([dy, more]))
        return self.norm_backward_sums(x, masked, mean, invstd), masked

    def norm_backward_data_add(
        self,
        x: Array,
        dy: Array,
        mean: Array,
        invstd: Array,
        scale: Array | None,
        sums: Array,
        count: float,
        more: Array,
    ) -> Array:
        """``norm_backward_data(...)`` plus the first channels of ``more``, which may have more of them than x."""
        channels = x.shape[-1]
        if more.shape[-1] > channels:
            more = self.pack(more, (*(slice(None) for _ in more.shape[1:]), slice(0, channels)))
        return self.add([self.norm_backward_data(x, dy, mean, invstd, scale, sums, count), more])

    def on_host(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a NumPy function makes of arrays and other things: of an op that most engines have no kernels of their own for. Engines
        of devices that have none copy the arrays to the host, and what it returns (an array, or a tuple of them) back."""
        return function(*args)

    # -- split softmax and losses ----------------------------------------------------------------------------------
    #
    # The last dimension holds classes [class_start, class_start + C) of `classes`; maxima and sums of the blocks are
    # combined between the calls (max of softmax_max, sum of softmax_sums, ...), so `m`, `sums`, `dsums` and `inner`
    # below are those of all classes (dsums: of all positions). Unsplit, they are simply the results of the calls
    # before. P stands for x.shape[:-1], the positions; target is an integer array of shape P with global classes.

    @abstractmethod
    def softmax_max(self, x: Array) -> Array:
        """Maximum over the last dimension, shape P in x's type; -inf for an empty block."""

    @abstractmethod
    def softmax_denominator(self, x: Array, m: Array) -> Float64Array:
        """Sum over the last dimension of exp(x - m), float64, P."""

    @abstractmethod
    def softmax_forward(self, x: Array, m: Array, sums: Array) -> Array:
        """``exp(x - m) / sums``."""

    @abstractmethod
    def softmax_inner(self, y: Array, dy: Array) -> Float64Array:
        """Sum over the last dimension of ``y * dy``, float64, P."""

    @abstractmethod
    def softmax_backward(self, y: Array, dy: Array, inner: Array) -> Array:
        """``y * (dy - inner)`` with y the forward result."""

    @abstractmethod
    def softmax_sums(self, x: Array, m: Array, target: Array, class_start: int) -> Float64Array:
        """float64 (3, *P) over local classes: sum(exp(x - m)); x[target] - m if that is local, else 0; sum(x - m)."""

    @abstractmethod
    def cross_entropy_loss(self, sums: Array, smoothing: float, classes: int, scale: float) -> Float64Array:
        """Cross-entropy with label smoothing, from `softmax_sums`; float64 of shape ().

        ``scale * sum over positions of log(s0) - (1 - smoothing)*s1 - smoothing/classes*s2``.
        """

    @abstractmethod
    def cross_entropy_backward(
        self,
        x: Array,
        m: Array,
        sums: Array,
        target: Array,
        class_start: int,
        smoothing: float,
        classes: int,
        scale: float,
    ) -> Array:
        """``scale * (softmax(x) - (1 - smoothing)*onehot(target) - smoothing/classes)`` for the local classes."""

    @abstractmethod
    def softmax_rank(self, x: Array, m: Array, sums: Array, target: Array, class_start: int) -> Float64Array:
        """Number of local classes that come before the target: larger ones, and equal ones with a smaller number; float64, P.

        Summed over class blocks, below k means a top-k hit, and 0 that the target is what argmax gives. Infinite where a logit
        is NaN or infinite (``sums[0]`` is then not finite).
        """

    @abstractmethod
    def count_hits(self, rank: Array, tops: Sequence[int]) -> Float64Array:
        """float64 (len(tops),): how many of `softmax_rank`, summed over class blocks, are below each of ``tops``."""

    @abstractmethod
    def mse_loss(self, x: Array, t: Array, scale: float) -> Float64Array:
        """``scale * sum((x - t)**2)``, float64 of shape ()."""

    @abstractmethod
    def mse_backward(self, x: Array, t: Array, scale: float) -> Array:
        """``2 * scale * (x - t)``."""

    @abstractmethod
    def error_loss(self, x: Array, t: Array, kind: str, scale: float) -> Float64Array:
        """``scale * sum(f(x - t))``, float64 of shape (), with f by name (`lbpar.engine.losses.ERRORS`)."""

    @abstractmethod
    def error_backward(self, x: Array, t: Array, kind: str, scale: float) -> Array:
        """``scale * f'(x - t)``."""

    @abstractmethod
    def bce_loss(self, x: Array, t: Array, scale: float) -> Float64Array:
        """Binary cross-entropy of logits x against t in [0, 1], scale times the sum; stable for large |x|."""

    @abstractmethod
    def bce_backward(self, x: Array, t: Array, scale: float) -> Array:
        """``scale * (sigmoid(x) - t)``."""

    @abstractmethod
    def dice_sums(self, x: Array, m: Array, sums: Array, target: Array, class_start: int) -> Float64Array:
        """float64 (3, C): per local class, summed over positions: p*t, p and t.

        p = exp(x - m) / sums[0] and t = onehot(target).
        """

    @abstractmethod
    def dice_loss(self, dsums: Array, eps: float, classes: int) -> Float64Array:
        """Sum over the local classes of ``(1 - (2*I + eps) / (P + T + eps)) / classes``, float64 of shape ()."""

    @abstractmethod
    def dice_backward(
        self, x: Array, m: Array, sums: Array, target: Array, class_start: int, dsums: Array, eps: float, classes: int
    ) -> tuple[Array, Float64Array]:
        """First half of the gradient of the Dice loss.

        Returns
        -------
        g : x's shape and type
            Derivative of the loss for p.
        inner : float64 of shape P
            sum of g*p over the local classes, to be summed over class blocks.
        """

    @abstractmethod
    def dice_backward_data(self, x: Array, m: Array, sums: Array, g: Array, inner: Array) -> Array:
        """Second half: ``p * (g - inner)``, in x's shape and type."""
