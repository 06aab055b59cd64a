"""Section ``model``: which network to train, in one of four ways."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Discriminator, Field, PrivateAttr, Tag, field_serializer, model_validator

from lbpar.config.layers import AnyLayer
from lbpar.config.section import OWN, Count, Custom, FilePath, Inputs, Positive, Section, Shape, Text
from lbpar.text import listed, nearest

WAYS = ("name", "onnx", "python", "layers")
"""Fields that say which of the four ways it is."""


class _WithOptions(Section):
    model_config = ConfigDict(extra="allow")

    classes: Count | None = Field(default=None, description="Number of classes.")
    input: Shape | None = Field(
        default=None, description="Shape of one sample, channels last; default: the network's own."
    )

    @property
    def options(self) -> dict[str, Any]:
        """Everything that was given besides the choice of the network: keyword arguments of its builder."""
        given = {"classes": self.classes, "input": self.input}
        return {n: v for n, v in given.items() if v is not None} | dict(self.model_extra or {})


class NamedModel(_WithOptions):
    """A network that lbpar knows by [name](networks.md); further fields (such as `width`) go to its builder."""

    name: Text = Field(description="Name of a network, such as `resnet18`.")


def _function(value: Any) -> str | Callable[..., Any]:
    if callable(value) or (isinstance(value, str) and re.fullmatch(r"([\w.]+|[\w-]+\.py):[\w.]+", value)):
        return value  # type: ignore[no-any-return]
    raise ValueError("expected file.py:function (a file beside the run file) or package.module:function")


class PythonModel(_WithOptions):
    """A function of yours that builds a graph; further fields are its keyword arguments. It runs only with `--allow-code`."""

    python: Annotated[
        str | Callable[..., Any], Custom(_function, "`file.py:function` or `package.module:function`")
    ] = Field(
        description="The function: in a file beside the run file, or in a module and then decorated with `@model`."
    )
    _folder: Path = PrivateAttr(default=Path())

    @property
    def folder(self) -> Path:
        """Where the run file lies, and the file it names."""
        return self._folder

    @property
    def file(self) -> Path | None:
        """The file beside the run file that is named, if one is."""
        name = self.python.partition(":")[0] if isinstance(self.python, str) else ""
        return self.folder / name if name.endswith(".py") else None

    def in_folder(self, folder: Path) -> PythonModel:
        """The same section of a run file that lies in ``folder``."""
        copy = self.model_copy()
        copy._folder = folder
        return copy

    @field_serializer("python")
    def _named(self, value: str | Callable[..., Any]) -> str:
        return value if isinstance(value, str) else f"{value.__module__}:{value.__qualname__}"


class OnnxModel(Section):
    """A network in an ONNX file."""

    onnx: FilePath = Field(description="Path of the file.")
    input: Shape | None = Field(
        default=None, description="Shape of one sample, channels last, where the file leaves it open."
    )


class InlineModel(Section):
    """A network written layer by layer."""

    input: Inputs = Field(
        description="Shape of one sample, channels last; or of several inputs, `{image: [D, H, W, C], facts: [C]}`, the main one first."
    )
    layers: tuple[AnyLayer, ...] = Field(min_length=1, description="The layers, in order.")
    heads: dict[str, Positive] = Field(
        default={},
        description="Further outputs that are trained (deep supervision): names of layers, and their weights beside the last one's 1.",
    )

    outputs: tuple[Text, ...] = Field(
        default=(),
        description="Names of the layers that are outputs, where there are several, the main one first; `train.losses` has a loss for each.",
    )

    @model_validator(mode="after")
    def _check_names(self) -> InlineModel:
        self.resolved()
        return self

    def resolved(self) -> list[tuple[str, tuple[str, ...], AnyLayer]]:
        """Return each layer with its final name and the names of its inputs.

        Unnamed layers are called ``<op><n>``, n counting the layers of that op from 1; ``input`` is the input.
        """
        counts: dict[str, int] = {}
        inputs = list(self.input) if isinstance(self.input, dict) else ["input"]
        known: dict[str, None] = dict.fromkeys(inputs)  # in order, and fast to look into
        last, out = inputs[0], []
        for i, layer in enumerate(self.layers):
            kind = layer.kind
            counts[kind] = counts.get(kind, 0) + 1
            name = layer.name or f"{kind}{counts[kind]}"
            where = f"layers[{i}] ({kind} '{name}')"
            if name in known:
                raise ValueError(f"{where}: the name '{name}' is already taken; names must differ")
            sources = layer.sources or (last,)
            for s in sources:
                if s not in known:
                    raise ValueError(
                        f"{where}: from: got '{s}', {nearest(s, known)}expected an earlier layer: {listed(known)}"
                    )
            if layer.joins and len(sources) < 2:
                raise ValueError(f"{where}: got {len(sources)} input, expected two or more in 'from', as in [a, b]")
            if not layer.joins and len(sources) > 1:
                raise ValueError(f"{where}: got {len(sources)} inputs in 'from', expected one; use add or concat")
            known[name] = None
            last = name
            out.append((name, sources, layer))
        for output in self.outputs:
            if output not in known:
                raise ValueError(f"outputs: got '{output}', {nearest(output, known)}expected layers: {listed(known)}")
        return out


def _choose(data: Any) -> str | None:
    fields = type(data).model_fields if isinstance(data, Section) else data if isinstance(data, dict) else ()
    given = [w for w in WAYS if w in fields]
    return f"by {given[0]}" if len(given) == 1 else None


AnyModel = Annotated[
    Annotated[NamedModel, Tag("by name")]
    | Annotated[PythonModel, Tag("by python")]
    | Annotated[OnnxModel, Tag("by onnx")]
    | Annotated[InlineModel, Tag("by layers")],
    Discriminator(
        _choose,
        custom_error_type=OWN,
        custom_error_message=f"expected exactly one of {', '.join(WAYS)}, as in name: resnet18",
    ),
]
