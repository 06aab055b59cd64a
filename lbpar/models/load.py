"""From the ``model`` section of a run file to a network."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from lbpar.config.layers import NormStats
from lbpar.config.model import AnyModel, InlineModel, NamedModel, OnnxModel, PythonModel
from lbpar.graph.graph import Graph
from lbpar.graph.norm_stats import with_norm_stats


def load_graph(model: AnyModel, norm: NormStats | None = None) -> Graph:
    """Build the network that a run file describes, in whichever of the four ways.

    Parameters
    ----------
    model : NamedModel, PythonModel, OnnxModel or InlineModel
        The ``model`` section.
    norm : {"global", "sample", "local"}, optional
        ``parallel.norm``: the statistics of every norm; default: as the network says.

    Raises
    ------
    ConfigError
        Unknown name or option, a Python function that cannot be found, a package that is missing, or a choice of
        statistics for a network without norms.
    GraphError
        A network that is ill-formed or does not fit its input, or an ONNX file that cannot be imported.
    """
    return with_norm_stats(_build(model), norm)


def _build(model: AnyModel) -> Graph:
    # Each way is imported where it is taken: every rank of a job spends that time.
    match model:
        case NamedModel():
            from lbpar.models.registry import build_model

            return build_model(model.name, **model.options)
        case PythonModel():
            from lbpar.models.python_model import python_graph

            return python_graph(model.python, model.folder, **model.options)
        case InlineModel():
            from lbpar.models.inline import inline_graph

            return inline_graph(model)
        case OnnxModel():
            from lbpar.models.onnx_import import import_onnx

            return import_onnx(model.onnx, model.input)[0]


def load_weights(model: AnyModel) -> dict[str, NDArray[Any]] | None:
    """The initial weights that come with a network, if any do.

    Parameters
    ----------
    model : NamedModel, PythonModel, OnnxModel or InlineModel
        The ``model`` section.

    Returns
    -------
    dict of str to numpy.ndarray, or None
        For an ONNX file, a whole array (every rank reads the file and cuts out its blocks) for each parameter and
        running statistic of `load_graph`'s network; see `lbpar.models.onnx_import.import_onnx`. None for the others,
        whose weights are drawn.

    Raises
    ------
    GraphError, ConfigError
        As `load_graph`.
    """
    if not isinstance(model, OnnxModel):
        return None
    from lbpar.models.onnx_import import import_onnx

    return import_onnx(model.onnx, model.input)[1]
