"""From the ``model`` section of a run file to a network."""

from __future__ import annotations

from lbpar.config.model import InlineModel, NamedModel, OnnxModel, PythonModel
from lbpar.errors import Unsupported
from lbpar.graph.graph import Graph
from lbpar.graph.inline import inline_graph
from lbpar.graph.models.registry import build_model
from lbpar.graph.python_model import python_graph


def load_graph(model: NamedModel | PythonModel | OnnxModel | InlineModel) -> Graph:
    """Build the network that a run file describes, in whichever of the four ways.

    Parameters
    ----------
    model : NamedModel, PythonModel, OnnxModel or InlineModel
        The ``model`` section.

    Raises
    ------
    ConfigError
        Unknown name or option, or a Python function that cannot be found.
    GraphError
        A network that is ill-formed or does not fit its input.
    Unsupported
        ONNX files.
    """
    match model:
        case NamedModel():
            return build_model(model.name, **model.options)
        case PythonModel():
            return python_graph(model.python, **model.options)
        case InlineModel():
            return inline_graph(model)
        case OnnxModel():
            raise Unsupported(
                f"model.onnx: got {model.onnx}, but ONNX files cannot be read yet; write the network as a Python "
                'function (model: {python: "package.module:function"}) or as inline layers.'
            )
