"""The page of all networks by name, made from their builders: ``python -m lbpar.models.reference > docs/networks.md``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial

from lbpar.config.reference import table
from lbpar.config.section import Section
from lbpar.graph.graph import Graph
from lbpar.models.registry import MODELS, build_model, option_types

_COMMON = ("classes", "input", "width")
_INTRO = """\
# Networks by name

<!-- Made by `python -m lbpar.models.reference > docs/networks.md`; change the builders in lbpar/models, not this page. -->

    model: {name: resnet18, classes: 10, input: [32, 32, 3], width: 0.5, stem: cifar}

Names of layers and parameters are torchvision's where it has the network. All numbers below are for the defaults.

| name | parameters | `input` | `classes` | further options |
| --- | --- | --- | --- | --- |
"""


def render() -> str:
    """Return the whole page as Markdown."""
    rows = [_row(name, build_model(name), option_types(name)) for name in MODELS]
    return "\n".join([_INTRO + "\n".join(rows) + "\n", *_families()])


def _row(name: str, graph: Graph, options: type[Section]) -> str:
    shapes = graph.shapes(1)
    further = ", ".join(f"`{o}`" for o in options.model_fields if o not in _COMMON) or "–"
    shape = list(shapes[graph.inputs[0].name][1:])
    return f"| `{name}` | {graph.parameter_count:,} | {shape} | {shapes[graph.output][-1]} | {further} |"


def _families() -> Iterable[str]:
    """Yield a section for each builder: its networks, its text, its options."""
    families: dict[Callable[..., Graph], list[str]] = {}
    for name, builder in MODELS.items():
        families.setdefault(builder.func if isinstance(builder, partial) else builder, []).append(name)
    for function, names in families.items():
        text = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split()).replace("``", "`")
        yield f"## {', '.join(names)}\n\n{text}\n\n{table(option_types(names[0]))}"


if __name__ == "__main__":
    print(render(), end="")
