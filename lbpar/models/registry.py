"""All networks by name, and their options checked against the builder's signature."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any, get_type_hints

from pydantic import create_model

from lbpar.config.report import check
from lbpar.config.section import Section
from lbpar.errors import ConfigError, GraphError
from lbpar.graph.graph import Graph
from lbpar.models import densenet, resnet, vgg
from lbpar.models.alexnet import alexnet
from lbpar.models.cosmoflow import cosmoflow
from lbpar.models.inception import inception_v3
from lbpar.models.lenet import lenet
from lbpar.models.nnunet import nnunet
from lbpar.models.unet import unet2d, unet3d
from lbpar.models.vnet import vnet
from lbpar.text import nearest

#: Name to builder; a builder takes keyword options only, each with a type and a default.
MODELS: dict[str, Callable[..., Graph]] = {
    "lenet": lenet,
    "alexnet": alexnet,
    **{name: partial(vgg.vgg, name) for name in vgg.VARIANTS},
    **{name: partial(resnet.resnet, name) for name in resnet.VARIANTS},
    "inception_v3": inception_v3,
    **{name: partial(densenet.densenet, name) for name in densenet.VARIANTS},
    "unet2d": unet2d,
    "unet3d": unet3d,
    "nnunet": nnunet,
    "vnet": vnet,
    "cosmoflow": cosmoflow,
}


def build_model(name: str, **options: Any) -> Graph:
    """Build a network by name.

    Parameters
    ----------
    name : str
        A key of ``MODELS``.
    **options
        Keyword options of its builder: ``classes``, ``input`` and ``width`` for every network, and more for some.

    Raises
    ------
    ConfigError
        Unknown name or option (with the nearest known one), or an option of the wrong type or out of range.
    GraphError
        The network does not fit the input shape.

    Examples
    --------
    >>> build_model("resnet18").parameter_count
    11689512
    """
    if name not in MODELS:
        known = list(MODELS)
        if os.path.isfile(name):
            raise ConfigError(f"model: {name} is no network: files of networks are named .onnx.")
        raise ConfigError(f"model: got '{name}', {nearest(name, known)}expected one of {', '.join(known)}.")
    section = option_types(name)
    given = check(section, options, f"model {name}")
    try:
        return MODELS[name](**{field: getattr(given, field) for field in section.model_fields})
    except GraphError as error:
        raise GraphError(f"model {name}: {error}") from None


def option_types(name: str) -> type[Section]:
    """The options of a network as a section: types, defaults, checks."""
    return _options(MODELS[name])


@cache
def _options(builder: Callable[..., Graph]) -> type[Section]:
    """The options of a builder as a section, so that they are checked and reported like the rest of a run file."""
    function = builder.func if isinstance(builder, partial) else builder
    types = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {
        p.name: (types[p.name], p.default) for p in inspect.signature(builder).parameters.values()
    }
    return create_model("Options", __base__=Section, **fields)
