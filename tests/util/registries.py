"""What a test or a page registers with lbpar is forgotten again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from lbpar.config.layers import LAYERS
from lbpar.config.losses import LOSSES as LOSS_SECTIONS
from lbpar.config.optimizers import OPTIMIZERS as OPTIMIZER_SECTIONS
from lbpar.cost.price import SLOTS
from lbpar.graph.builder import OPS, GraphBuilder
from lbpar.graph.ops.losses import LOSSES
from lbpar.models.registry import MODELS
from lbpar.runtime.binding import BINDERS
from lbpar.runtime.optim.make import OPTIMIZERS

SECTIONS = (LAYERS.sections, LOSS_SECTIONS.sections, OPTIMIZER_SECTIONS.sections)
TABLES = (*SECTIONS, OPS, LOSSES, MODELS, BINDERS, OPTIMIZERS, SLOTS)


@contextmanager
def restored() -> Iterator[None]:
    """In this block ops, losses, optimizers and networks may be registered."""
    methods = dict(vars(GraphBuilder))
    with ExitStack() as stack:
        for table in TABLES:
            stack.enter_context(patch.dict(table))
        try:
            yield
        finally:
            for name, method in dict(vars(GraphBuilder)).items():
                if name not in methods:
                    delattr(GraphBuilder, name)
                elif methods[name] is not method:
                    setattr(GraphBuilder, name, methods[name])
