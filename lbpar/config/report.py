"""One message for everything that is wrong with a file: where, what was given, what is allowed."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from lbpar.config.section import OWN, Section
from lbpar.errors import ConfigError
from lbpar.text import nearest, shorten

T = TypeVar("T", bound=Section)
MOST_SHOWN = 20


def check(cls: type[T], data: Any, source: str) -> T:
    """Make a section from plain data that came from ``source``, a name that opens every message.

    Raises
    ------
    ConfigError
        One message with a line per mistake.
    """
    seen: dict[int, type[Section]] = {}
    if not isinstance(data, dict):
        given = "nothing" if data is None else shorten(data)
        raise ConfigError(f"{source}: got {given}, expected fields: {', '.join(cls.known_fields())}.")
    try:
        return cls.model_validate(data, context=seen)
    except ValidationError as error:
        lines: dict[str, list[str]] = {}
        for e in error.errors(include_url=False):
            if e["type"] == "too_short" and e["input"]:
                continue  # pydantic counts only the entries that were right; the wrong ones have lines of their own
            path, line = _line(e, data, seen)
            lines.setdefault(path, []).append(line)
        texts = [f"{path}: {' — '.join(dict.fromkeys(parts))}" if path else parts[0] for path, parts in lines.items()]
    if len(texts) == 1:
        raise ConfigError(f"{source}: {texts[0]}")
    shown = texts if len(texts) <= MOST_SHOWN + 1 else [*texts[:MOST_SHOWN], f"and {len(texts) - MOST_SHOWN} more."]
    raise ConfigError("\n  ".join([f"{source}: {len(texts)} mistakes:", *shown]))


def _line(e: ErrorDetails, data: Any, seen: dict[int, type[Section]]) -> tuple[str, str]:
    """Return the path of one mistake and the sentence about it."""
    missing = e["type"] in ("missing", "extra_forbidden")
    path, holder = _walk(e["loc"], data, missing)
    section = seen.get(id(holder))
    if e["type"] == "extra_forbidden":
        known = section.known_fields() if section else []
        name = str(e["loc"][-1])
        return path, f"unknown field (got {shorten(e['input'])}); {nearest(name, known)}Known: {', '.join(known)}."
    if e["type"] == "missing":
        described = section.model_fields if section else {}
        field = next((f for n, f in described.items() if (f.alias or n) == e["loc"][-1]), None)
        return path, f"missing; it is required{f': {field.description}' if field and field.description else '.'}"
    expected = _expected(e)
    if e["type"] == "value_error" and isinstance(e["input"], dict):
        return path, f"{expected}."
    return path, f"got {shorten(e['input'])}, {expected}."


def _walk(loc: tuple[int | str, ...], data: Any, missing: bool) -> tuple[str, Any]:
    """Follow a location through the data; parts that name a choice of type and not a field are left out.

    Returns the dotted path and the object that holds (or should hold) its last part.
    """
    path, here, holder = "", data, data
    for i, part in enumerate(loc):
        last = i == len(loc) - 1
        if isinstance(here, dict) and (part in here or (last and missing)):
            quoted = f'"{part}"' if "." in str(part) else str(part)
            path += f".{quoted}" if path else quoted
            holder, here = here, here.get(part)
        elif isinstance(here, (list, tuple)) and isinstance(part, int) and part < len(here):
            path += f"[{part}]"
            holder, here = here, here[part]
    return path, holder


_ALLOWED = {
    "int_type": "a whole number",
    "float_type": "a number (in YAML a number has no quotes)",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "dict_type": "a block of fields",
    "model_type": "a block of fields",
    "tuple_type": "a list",
    "literal_error": "one of {expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
}


def _expected(e: ErrorDetails) -> str:
    """Say what would have been right, from the kind of a failure."""
    ctx = {name: f"{v:g}" if isinstance(v, float) else v for name, v in e.get("ctx", {}).items()}
    if e["type"] == "value_error":
        return str(ctx["error"]).rstrip(".")
    if e["type"] == OWN:
        return e["msg"]
    near = ""
    if e["type"] == "literal_error" and isinstance(e["input"], str):
        near = nearest(e["input"], [c.strip(" '") for c in ctx["expected"].replace(" or ", ", ").split(",")])
    return f"{near}expected {_ALLOWED[e['type']].format(**ctx)}" if e["type"] in _ALLOWED else f"expected: {e['msg']}"
