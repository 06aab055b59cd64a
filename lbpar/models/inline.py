"""Networks written layer by layer in a run file."""

from __future__ import annotations

from lbpar.config.model import InlineModel
from lbpar.errors import GraphError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph


def inline_graph(model: InlineModel, name: str = "network") -> Graph:
    """Build the network of an inline layer list; its output is the last layer.

    Parameters
    ----------
    model : InlineModel
        ``model: {input: ..., layers: [...]}`` of a run file. To start from plain dicts, use
        ``check(InlineModel, data, source)`` of ``lbpar.config.report``.
    name : str
        Name of the network.

    Raises
    ------
    GraphError
        A layer does not fit the shape of its input, or nothing reads its output; says which layer.
    """
    g = GraphBuilder(model.input, name=name)
    unread: dict[str, str] = {}
    if isinstance(model.input, dict):
        unread = {one: f"model.input.{one}" for one in model.input}
    for i, (layer_name, sources, layer) in enumerate(model.resolved()):
        try:
            g.layer(layer, list(sources) if layer.joins else sources[0], layer_name)
        except GraphError as error:
            raise GraphError(f"model.layers[{i}]: {error}") from None
        for source in sources:
            unread.pop(source, None)
        unread[layer_name] = f"model.layers[{i}] ({layer_name})"
    outputs = model.outputs or (layer_name,)
    for read in (*outputs, *model.heads):
        unread.pop(read, None)
    if unread:
        raise GraphError(
            f"{', '.join(unread.values())}: no layer reads this output, expected every input, and every layer but the last, to be read; "
            "name it in a later layer's 'from' (or in model.outputs), or remove it."
        )
    return g.build(outputs, model.heads)
