"""The base of every section of a run file, and the value types that sections share.

A section is frozen, refuses unknown fields and documents each field; `lbpar.config.reference` prints those texts.
Numbers are strict: ``epochs: "3"`` and ``epochs: true`` are mistakes, not the number one would guess.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar, get_args

from pydantic import AfterValidator, AllowInfNan, BaseModel, ConfigDict, Field, Strict, ValidationInfo, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from lbpar.config.paths import expand
from lbpar.text import nearest, shorten


class Section(BaseModel):
    """A block of named fields."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=(), defer_build=True
    )

    @model_validator(mode="before")
    @classmethod
    def _remember(cls, data: Any, info: ValidationInfo) -> Any:
        # Unknown fields are reported by path only; the report finds here which section the path belongs to.
        if isinstance(info.context, dict) and isinstance(data, dict):
            info.context[id(data)] = cls
        return data

    @classmethod
    def known_fields(cls) -> list[str]:
        """Names of the fields as written in a file."""
        return [f.alias or name for name, f in cls.model_fields.items()]


S = TypeVar("S", bound=Section)
T = TypeVar("T", bound=Section)


@dataclass(frozen=True)
class Custom:
    """Annotation: a type whose values one function checks and brings to one form.

    Parameters
    ----------
    check : callable
        Gets what the file says, returns the value or raises ValueError with "expected ...".
    shown : str
        How the reference describes the values.
    spread : callable, optional
        Of values that may be said once for all spatial dimensions: gets the value and the number of dimensions, returns
        one entry per dimension or raises ValueError with "expected ...".
    """

    check: Callable[[Any], Any]
    shown: str
    spread: Callable[[Any, int], Any] | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)


OWN = "own"
"""Type of mistakes whose message is ours."""


def _mistake(text: str) -> PydanticCustomError:
    return PydanticCustomError(OWN, "{text}", {"text": text})


class Kinds(Generic[S]):
    """Annotation: one of several sections, told apart by the field ``tag``. Kinds may be added while a program runs.

    With ``short``, a kind's word alone stands for its section without further fields.

    Attributes
    ----------
    sections : dict of str to type
        Section of each kind.
    """

    def __init__(self, tag: str, short: bool = False) -> None:
        self.tag, self.short = tag, short
        self.sections: dict[str, type[S]] = {}

    def kind(self, section: type[Section]) -> str:
        """The one word that the section's tag takes."""
        (word,) = get_args(section.model_fields[self.tag].annotation)
        return str(word)

    def add(self, section: type[T]) -> type[T]:
        """Make a section one of the kinds; a decorator."""
        self.sections[self.kind(section)] = section  # type: ignore[assignment]
        return section

    def _check(self, value: Any, info: ValidationInfo) -> Section:
        if isinstance(value, Section):
            return value
        known = ", ".join(self.sections)
        if self.short and not isinstance(value, dict):
            if not isinstance(value, str) or value not in self.sections:
                raise ValueError(f"{nearest(value, self.sections)}expected one of {known}")
            value = {self.tag: value}
        if not isinstance(value, dict):
            raise _mistake("expected a block of fields")
        if self.tag not in value:
            raise _mistake(f"expected a field '{self.tag}' that says which kind it is: {known}")
        given = value[self.tag]
        if not isinstance(given, str) or given not in self.sections:
            raise _mistake(
                f"whose '{self.tag}' is {shorten(given)}: {nearest(given, self.sections)}expected one of {known}"
            )
        return self.sections[given].model_validate(value, context=info.context)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self._check)


MOST = 2**31 - 1
"""Largest whole number of a field: what MPI and kernel libraries count with."""

Count = Annotated[int, Strict(), Field(ge=1, le=MOST)]
Seed = Annotated[int, Strict(), Field(ge=0, lt=2**63)]
Natural = Annotated[int, Strict(), Field(ge=0, le=MOST)]
Flag = Annotated[bool, Strict()]
Number = Annotated[float, Strict(), AllowInfNan(False)]
Positive = Annotated[float, Strict(), AllowInfNan(False), Field(gt=0)]
NonNegative = Annotated[float, Strict(), AllowInfNan(False), Field(ge=0)]
BelowOne = Annotated[float, Strict(), Field(ge=0, lt=1)]
UpToOne = Annotated[float, Strict(), Field(ge=0, le=1)]


def _words(value: Any, allowed: str = "\n\t") -> str:
    """Any text that can be printed and encoded."""
    if not isinstance(value, str) or not value:
        raise ValueError("expected a text that is not empty")
    odd = next((c for c in value if unicodedata.category(c) in ("Cc", "Cs") and c not in allowed), None)
    if odd is not None:
        raise ValueError(f"expected a text without control characters and half pairs (it holds U+{ord(odd):04X})")
    return value


def check_text(value: Any) -> str:
    """What can be the name of a layer or a file: one line, no longer than file systems take."""
    value = _words(value, "")
    if len(value) > 1000 or max(len(part.encode()) for part in value.split("/")) > 255:
        raise ValueError(
            f"expected a text of at most 1000 characters, 255 bytes between slashes (it has {len(value)} characters)"
        )
    return value


Text = Annotated[str, Custom(check_text, "text")]
LongText = Annotated[str, Custom(_words, "text")]
FilePath = Annotated[Text, AfterValidator(expand)]
"""A path, or a word without ``~`` and ``$``."""


def is_int(value: Any, least: int, most: int = MOST) -> bool:
    """Whether a value is a whole number (not a boolean) from ``least`` to ``most``."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def spread(value: int | tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """One entry per spatial dimension."""
    if isinstance(value, int):
        return (value,) * rank
    if len(value) != rank:
        raise ValueError(f"expected one entry for all spatial dimensions, or {rank} of them")
    return value


def _spread_pads(value: Pads, rank: int) -> tuple[tuple[int, int], ...]:
    return tuple((p, p) if isinstance(p, int) else p for p in spread(value, rank))


def _per_dim(least: int, pairs: bool = False) -> Callable[[Any], Pads]:
    """Check a number, or a list of one per spatial dimension: numbers, and with ``pairs`` also [before, after]."""

    def entry(value: Any) -> int | tuple[int, int] | None:
        if is_int(value, least):
            return int(value)
        pair = pairs and isinstance(value, (list, tuple)) and len(value) == 2 and all(is_int(v, least) for v in value)
        return (value[0], value[1]) if pair else None

    def check(value: Any) -> Pads:
        if is_int(value, least):
            return int(value)
        if isinstance(value, (list, tuple)) and value:
            entries = [entry(v) for v in value]
            if None not in entries:
                return tuple(entries)  # type: ignore[arg-type]
        raise ValueError(
            f"expected a whole number of at least {least} (and less than 2³¹), or a list of them, one per spatial dimension"
            + (", or of [before, after]" if pairs else "")
        )

    return check


Pads = int | tuple[int | tuple[int, int], ...]
_SHOWN = "or a list of them, one per spatial dimension"
Sizes = Annotated[int | tuple[int, ...], Custom(_per_dim(1), f"whole number ≥ 1, {_SHOWN}", spread)]
Naturals = Annotated[int | tuple[int, ...], Custom(_per_dim(0), f"whole number ≥ 0, {_SHOWN}", spread)]
Pad = Annotated[
    Pads,
    Custom(
        _per_dim(0, pairs=True),
        "whole number ≥ 0, or a list per spatial dimension of numbers or [before, after]",
        _spread_pads,
    ),
]


def check_shape(value: Any) -> tuple[int, ...]:
    """The shape of one sample."""
    if isinstance(value, (list, tuple)) and 1 <= len(value) <= 4 and all(is_int(v, 1) for v in value):
        return tuple(value)
    raise ValueError(
        "expected the shape of one sample without the batch: [C], [W, C], [H, W, C] or [D, H, W, C], each less than 2³¹"
    )


Shape = Annotated[tuple[int, ...], Custom(check_shape, "[C], [W, C], [H, W, C] or [D, H, W, C]")]


def _inputs(value: Any) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
    if not isinstance(value, dict):
        return check_shape(value)
    if not value:
        raise ValueError("expected an input at least")
    return {check_text(name): check_shape(shape) for name, shape in value.items()}


Inputs = Annotated[
    tuple[int, ...] | dict[str, tuple[int, ...]],
    Custom(_inputs, "[C], [W, C], [H, W, C] or [D, H, W, C]; of several inputs one for each name"),
]


def _names(value: Any) -> str | dict[str, str]:
    if isinstance(value, dict):
        return {check_text(k): check_text(v) for k, v in value.items()}
    return check_text(value)


Names = Annotated[str | dict[str, str], Custom(_names, "text; of several a mapping of names to texts")]

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGTP")}
_UNITS |= {f"{p}IB": 1024 ** (i + 1) for i, p in enumerate("KMGTP")}


def parse_bytes(value: Any) -> int:
    """Read an amount of memory, in bytes: ``16GB`` (10⁹), ``16GiB`` (2³⁰), ``512 MB`` or a whole number.

    Raises
    ------
    ValueError
        For anything else.
    """
    match = (
        re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-zA-Z]*)\s*", value) if isinstance(value, str) else None
    )
    amount = float(match[1]) * _UNITS.get(match[2].upper(), -1) if match else value
    if isinstance(value, str) and match and 0 <= amount < 2**63 or is_int(value, 0, 2**63 - 1):
        return int(amount)
    raise ValueError("expected an amount of memory such as 16GB, 16GiB, 512MB or a number of bytes, less than 2⁶³")


Bytes = Annotated[int, Custom(parse_bytes, "bytes: `16GB` (10⁹), `16GiB` (2³⁰) or a whole number")]
