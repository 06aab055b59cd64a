"""One message for everything that is wrong with a file: where, what was given, what is allowed."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from lbpar.config.section import Section
from lbpar.errors import ConfigError
from lbpar.text import nearest, shorten

T = TypeVar("T", bound=Section)
MOST_SHOWN = 20


def check(cls: type[T], data: Any, source: str) -> T:
    """Make a section from plain data.

    Parameters
    ----------
    cls : type
        The section to make.
    data : Any
        Nested dicts, lists and scalars.
    source : str
        Where the data came from; opens the message.

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


def _expected(e: ErrorDetails) -> str:
    """Say what would have been right, from the kind of a failure."""
    ctx: dict[str, Any] = e.get("ctx", {})
    match e["type"]:
        case "value_error":
            return str(ctx["error"]).rstrip(".")
        case "literal_error":
            return f"{_near(e['input'], ctx['expected'])}expected one of {ctx['expected']}"
        case "kind":
            return e["msg"]
        case "int_type" | "int_parsing" | "int_from_float":
            return "expected a whole number"
        case "float_type" | "float_parsing":
            return "expected a number (in YAML a number has no quotes)"
        case "finite_number":
            return "expected a finite number"
        case "bool_type" | "bool_parsing":
            return "expected true or false"
        case "string_type":
            return "expected a text"
        case "string_too_short":
            return "expected a text that is not empty"
        case "greater_than":
            return f"expected more than {_number(ctx['gt'])}"
        case "greater_than_equal":
            return f"expected at least {_number(ctx['ge'])}"
        case "less_than":
            return f"expected less than {_number(ctx['lt'])}"
        case "less_than_equal":
            return f"expected at most {_number(ctx['le'])}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return "expected a block of fields"
        case "tuple_type" | "list_type":
            return "expected a list"
        case "none_required":
            return "expected null"
        case "model_choice":
            return "expected " + e["msg"]
        case "too_short":
            return f"expected at least {ctx['min_length']} entries"
        case "too_long":
            return f"expected at most {ctx['max_length']} entries"
        case _:
            return "expected: " + e["msg"][:1].lower() + e["msg"][1:]


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _near(given: Any, quoted: str) -> str:
    """Suggest the closest of a quoted, comma-separated list of choices."""
    choices = [c.strip().strip("'") for c in quoted.replace(" or ", ", ").split(",")]
    return nearest(given, choices) if isinstance(given, str) else ""
