"""Reading small configurations: any of mapping, dataclass or pydantic model, with clear refusals."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lbpar.errors import ConfigError
from lbpar.text import nearest


def as_fields(config: Any) -> dict[str, Any]:
    """Fields of a mapping, a dataclass instance or a pydantic model, as a new dict without the None values."""
    if isinstance(config, Mapping):
        fields = dict(config)
    elif hasattr(config, "model_dump"):
        fields = dict(config.model_dump(by_alias=True))
    else:
        fields = dict(vars(config))
    return {name: value for name, value in fields.items() if value is not None}


def choose(where: str, what: str, name: str, known: Collection[str]) -> str:
    """``name`` if it is known, else ConfigError with the nearest known name and all of them."""
    if name in known:
        return name
    raise ConfigError(f"{where}: unknown {what} {name!r}, {nearest(name, known)}expected one of {', '.join(known)}.")
