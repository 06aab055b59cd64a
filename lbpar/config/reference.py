"""The run-file reference, made from the types: ``python -m lbpar.config.reference > docs/run-file.md``."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from lbpar.config.layers import Layer
from lbpar.config.model import InlineModel, NamedModel, OnnxModel, PythonModel
from lbpar.config.plan_file import PlanFile
from lbpar.config.run_file import RunConfig
from lbpar.config.section import MOST, Custom, Kinds, Section

_NAMES = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    dict: "fields",
    Any: "anything",
}
_INTRO = """\
# Run file

<!-- Made by `python -m lbpar.config.reference > docs/run-file.md`; change the types in lbpar/config, not this page. -->

A run file is YAML. Unknown fields and fields given twice are refused. `--set train.epochs=3` changes single fields on
the command line; names that hold dots go in quotes, as in `--set 'parallel.layers."layer1.0.conv1".N=2'`. Fields
without a default are required. Whole numbers are less than 2³¹. Paths are relative to the current directory; `~`, `$NAME` and `${NAME}` are replaced as
in a shell, and a variable that is not defined is refused.

```yaml
model:    {name: resnet18, classes: 10}
data:     {train: data/digits.h5, test: data/digits.h5}
train:    {batch: 128, epochs: 20, seed: 1,
           optimizer: {name: sgd, lr: 0.1, momentum: 0.9, weight_decay: 5.0e-4},
           schedule: {name: cosine, warmup_epochs: 1}}
parallel: {strategy: auto, memory: 16GB, layers: {conv1: {N: 2, H: 2}, fc: {F: 4}}}
run:      {out: runs/digits}
```
"""


def render() -> str:
    """Return the whole page as Markdown."""
    parts = [_INTRO]
    for name, field in RunConfig.model_fields.items():
        sections = list(_sections(field.annotation))
        if not sections:
            parts.append(f"## `{name}`\n\n{field.description} {_type_and_default(field)}\n")
        elif len(sections) == 1:
            parts += [f"## `{name}`\n", *_section(sections[0], name)]
        else:
            parts.append(f"## `{name}`\n\n{field.description} One of:\n")
            for s in sections:
                parts += [f"### `{name}`: {_WAYS[s]}\n", *_section(s, name)]
    parts += ["## Plan files\n", *_section(PlanFile, "")]
    return "\n".join(parts)


_WAYS = {NamedModel: "by name", PythonModel: "a Python function", OnnxModel: "an ONNX file", InlineModel: "inline"}


def _section(section: type[Section], path: str) -> Iterator[str]:
    """Yield a section's text and table, then those of the sections inside."""
    yield f"{_doc(section)}\n"
    yield table(section)
    for name, field in section.model_fields.items():
        inner = list(_sections(field.annotation, field.metadata))
        here = f"{path}.{field.alias or name}".lstrip(".")
        if len(inner) == 1:
            yield f"### `{here}`\n"
            yield from _section(inner[0], here)
        elif inner:
            tag = "op" if issubclass(inner[0], Layer) else "name"
            common = [n for n in inner[0].model_fields if n != tag and all(_same(n, inner[0], s) for s in inner)]
            shared = f" Every {name.removesuffix('s')} has:\n\n{table(inner[0], only=common)}" if common else "\n"
            yield f"### `{here}`\n\n{field.description} `{tag}` says which kind.{shared}"
            for s in inner:
                yield f"#### `{tag}: {Kinds(tag).kind(s)}`\n\n{_doc(s)}\n"
                own = [n for n in s.model_fields if n != tag and n not in common]
                if own:
                    yield table(s, only=own)


def _same(name: str, a: type[Section], b: type[Section]) -> bool:
    return name in b.model_fields and repr(a.model_fields[name]) == repr(b.model_fields[name])


def _doc(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split("\n\n")[0].split())


def table(section: type[Section], only: list[str] | None = None) -> str:
    """A section's fields as a Markdown table."""
    rows = ["| field | value | default | meaning |", "| --- | --- | --- | --- |"]
    for name, f in section.model_fields.items():
        if only is None or name in only:
            default = "required" if f.is_required() else default_text(f)
            rows.append(f"| `{f.alias or name}` | {type_text(f)} | {default} | {f.description} |")
    return "\n".join(rows) + "\n"


def _type_and_default(field: FieldInfo) -> str:
    text = type_text(field)
    return f"{text[:1].upper()}{text[1:]}; default {default_text(field)}."


def default_text(field: FieldInfo) -> str:
    """Default of a field, as the tables show it."""
    value = field.default
    if value is None:
        return "–"
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, Section):
        given = value.model_dump(exclude_unset=True)
        return "`{" + ", ".join(f"{k}: {_plain(v)}" for k, v in given.items()) + "}`" if given else "see below"
    return f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    return str(value)


def type_text(field: FieldInfo) -> str:
    """Say in words which values a field takes, as the tables show it."""
    return _describe(field.annotation, field.metadata).replace("|", "\\|")


def _describe(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """Say in words which values a type takes."""
    for m in metadata:
        if isinstance(m, Custom):
            return m.shown
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _describe(args[0], [*args[1:], *metadata])
    if origin is typing.Literal:
        return ", ".join(f"`{a}`" for a in args)
    if origin in (typing.Union, types.UnionType):
        inner = [_describe(a, metadata) for a in args if a is not type(None)]
        sections = [a for a in args if isinstance(a, type) and issubclass(a, Section)]
        return "fields, see below" if sections else " or ".join(dict.fromkeys(inner))
    if origin is tuple:
        return f"list of{'' if args[-1] is ... else f' {len(args)}'}: {_describe(args[0])}"
    if origin is dict:
        return f"{'fields: ' * (args[0] is str)}{_describe(args[0])} → {_describe(args[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "fields, see below"
    return _NAMES.get(annotation, "anything") + _limits(metadata)


def _limits(metadata: list[Any] | tuple[Any, ...]) -> str:
    out = []
    for m in (inner for outer in metadata for inner in (getattr(outer, "metadata", None) or [outer])):
        for name, sign in {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}.items():
            if (limit := getattr(m, name, MOST)) != MOST:
                out.append(f"{sign} {'2⁶³' if limit == 2**63 else limit}")
    return (" " + ", ".join(dict.fromkeys(out))) if out else ""


def _sections(annotation: Any, metadata: Sequence[Any] = ()) -> Iterator[type[Section]]:
    """Yield the sections that an annotation mentions, in order."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *metadata = typing.get_args(annotation)
    kinds = next((m for m in metadata if isinstance(m, Kinds)), None)
    if kinds is not None:
        yield from kinds.sections.values()
        return
    if isinstance(annotation, type) and not typing.get_origin(annotation):
        if issubclass(annotation, Section):
            yield annotation
        return
    for a in typing.get_args(annotation):
        yield from _sections(a)


if __name__ == "__main__":
    print(render(), end="")
