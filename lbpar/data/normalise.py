"""From stored numbers to what a network is given; training, evaluation and prediction all come through here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lbpar.data.rules import Rule, applied
from lbpar.errors import DataError

Array = NDArray[Any]
LARGE = 1e6
"""Values beyond this are beyond what networks are made for."""
_PIECE = 1 << 16  # elements worked on at a time


@dataclass(frozen=True)
class Normalisation:
    """``(x * scale - mean) / std``, or instead of mean and std a rule for each sample.

    Parameters
    ----------
    scale : float
        Belongs to how a file stores its numbers.
    mean, std : tuple of float, optional
        One per channel; what the network was trained with.
    integers : bool
        Whether the file stores whole numbers.
    rule : Rule, optional
        What is done to each sample by its own statistics.
    zero : bool
        Values that are not finite become 0, at the end.
    """

    scale: float = 1.0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    integers: bool = False
    rule: Rule | None = None
    zero: bool = False

    def statistics(self, x: Array) -> Array:
        """What the rule makes of a whole sample as stored (`Rule.statistics`)."""
        assert self.rule is not None
        return self.rule.statistics(self._wide(x))

    def streamed(self, pieces: Callable[[int], Iterator[Array]], channels: int) -> Array:
        """The same of a sample whose channels come in pieces, as stored (`Rule.streamed`)."""
        assert self.rule is not None
        return self.rule.streamed(lambda c: map(self._wide, pieces(c)), channels)

    def _wide(self, x: Array) -> Array:
        wide = x.astype(np.result_type(x.dtype, np.float32))
        return wide * wide.dtype.type(self.scale) if self.scale != 1 else wide

    def __call__(
        self, x: Array, dtype: DTypeLike, channels: Any = slice(None), statistics: Array | None = None
    ) -> Array:
        """The values a network is given, a fresh array.

        Parameters
        ----------
        x : (..., C) array
            As stored.
        dtype : dtype
            Of the result.
        channels : index, optional
            Which of the channels x holds; default all.
        statistics : (n, 4, C) array, optional
            Of each of n samples, where there is a rule.
        """
        out = np.empty(x.shape, dtype)
        if not x.size:
            return out
        if self.rule is not None:
            assert statistics is not None
            for source, target, own in zip(x, out, statistics[:, :, channels], strict=True):
                target[...] = applied(self._scaled(source, out.dtype)[None], own[None])[0]
            return self._finite(out)
        step = max(1, _PIECE // x.shape[-1])
        source, target = x.reshape(-1, x.shape[-1]), out.reshape(-1, x.shape[-1])
        for i in range(0, len(source), step):  # a piece at a time: the wider type takes memory
            target[i : i + step] = self._piece(source[i : i + step], out.dtype, channels)
        return self._finite(out)

    def _finite(self, x: Array) -> Array:
        return np.nan_to_num(x, copy=False, nan=0.0, posinf=0.0, neginf=0.0) if self.zero else x

    def _scaled(self, x: Array, dtype: np.dtype) -> Array:
        # In the precision of the source at least: in float32, 100000.01 - 100000 would keep two digits.
        out = x.astype(np.result_type(x.dtype, dtype, np.float32))
        if self.scale != 1:
            out *= out.dtype.type(self.scale)
        return out

    def _piece(self, x: Array, dtype: np.dtype, channels: Any) -> Array:
        out = self._scaled(x, dtype)
        if self.mean is not None:
            out -= np.asarray(self.mean, out.dtype)[channels]
        if self.std is not None:
            out /= np.asarray(self.std, out.dtype)[channels]
        return out

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep; JSON values."""
        return {n: list(v) if isinstance(v, tuple) else v for n, v in asdict(self).items()}  # the rule as fields

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Normalisation | Normalisations:
        """From `state_dict`, or from that of several inputs."""
        if "scale" not in state:
            return Normalisations({name: cls.of_one(one) for name, one in state.items()})
        return cls.of_one(state)

    @classmethod
    def of_one(cls, state: Mapping[str, Any]) -> Normalisation:
        """From `state_dict`."""
        mean, std = (None if state[n] is None else tuple(state[n]) for n in ("mean", "std"))
        return cls(state["scale"], mean, std, state["integers"], Rule.of(state.get("rule")), state.get("zero", False))

    def like(self, other: Normalisation) -> Normalisation:
        """This storage's scale with the mean and standard deviation, or the rule, of other data."""
        return replace(self, mean=other.mean, std=other.std, rule=other.rule, zero=other.zero)

    def ruled(self, rule: Rule | None, zero: bool) -> Normalisation:
        """With a rule, if there is one, instead of mean and standard deviation."""
        found = replace(self, zero=zero)
        return found if rule is None else replace(found, mean=None, std=None, rule=rule)

    def check_kind(self, x: Array, name: str) -> None:
        """Refuse real numbers where the training data are whole numbers, and the reverse: their scale would be wrong.

        Raises
        ------
        DataError
            Names ``name``, what was given and what was expected.
        """
        if (x.dtype.kind in "iub") != self.integers:
            raise DataError(
                f"{name}: got {x.dtype}, expected {'whole' if self.integers else 'real'} numbers, as the training data are "
                "stored. Give the values as the file has them, or normalised=True for values that need no change."
            )

    def check_scale(self, other: Normalisation, name: str, stored: DTypeLike, remedy: str) -> None:
        """Refuse data that nobody gave a scale, where the training data have another one: what their numbers mean is not known.

        Raises
        ------
        DataError
            Names ``name``, both scales and the ``remedy``.
        """
        if self.scale != other.scale:
            raise DataError(
                f"{name}: it holds {np.dtype(stored)} without a scale of its own, which counts as scaled by {self.scale:g}, but the training "
                f"data are scaled by {other.scale:g}. {remedy}."
            )

    def check_finite(self, x: Array, samples: Iterable[int], name: str) -> None:
        """Refuse parts x of samples, as stored, with values that are not finite, unless these are made 0.

        Raises
        ------
        DataError
            Names ``name`` and the first such sample.
        """
        if x.dtype.kind != "f" or self.zero or np.isfinite(x).all():
            return
        raise DataError(
            f"{name}: sample {first_bad(x, samples)} has values that are not finite. Mend it; training may make them 0 "
            "(data.nan: zero) or leave such samples out (data.nan: skip)."
        )

    def checked(
        self,
        x: Array,
        samples: Iterable[int],
        name: str,
        dtype: DTypeLike,
        channels: Any = slice(None),
        statistics: Array | None = None,
    ) -> Array:
        """Parts of samples as a network is given them, which are finite; parameters as of the call and of `check_finite`.

        Raises
        ------
        DataError
            As of `check_finite`, or the first sample with values that are finite as stored, but not in ``dtype``.
        """
        self.check_finite(x, samples, name)
        with np.errstate(over="ignore"):
            out = self(x, dtype, channels, statistics)
        if x.dtype.kind == "f" and x.dtype.itemsize > out.dtype.itemsize and not np.isfinite(out).all():
            raise DataError(
                f"{name}: sample {first_bad(out, samples)} has values that are too large for {out.dtype}. Give the dataset a scale, or a mean "
                "and a deviation, or set engine.dtype: float64."
            )
        return out


def largest(arrays: Iterable[Array]) -> float:
    """The largest real number, without its sign."""
    return max((float(np.abs(a).max()) for a in arrays if a.dtype.kind == "f" and a.size), default=0.0)


def first_bad(x: Array, samples: Iterable[int]) -> int:
    """The first of the samples, of which x holds parts, that has values which are not finite."""
    return next(i for i, one in zip(samples, x, strict=True) if not np.isfinite(one).all())


class Normalisations(dict[str, Normalisation]):
    """Of each of several inputs, by name."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep; JSON values."""
        return {name: one.state_dict() for name, one in self.items()}
