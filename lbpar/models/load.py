"""From the ``model`` section of a run file to a network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from lbpar.config.layers import NormStats
from lbpar.config.model import AnyModel, InlineModel, NamedModel, OnnxModel, PythonModel
from lbpar.config.training import TrainConfig
from lbpar.errors import ConfigError
from lbpar.graph.graph import Graph
from lbpar.graph.norm_stats import with_norm_stats
from lbpar.graph.ops.losses import LOSSES, Loss, make_loss
from lbpar.text import nearest


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


def with_losses(graph: Graph, train: TrainConfig, metrics: bool = False) -> Graph:
    """The network followed by what a run file minimises: a loss, or one for each of several outputs.

    Parameters
    ----------
    graph : Graph
        Without a loss.
    train : TrainConfig
    metrics : bool
        Measure ``train.evaluate.metrics`` beside it.

    Raises
    ------
    ConfigError
        There is not a loss for each output, or none measures a metric.
    """
    wanted = train.evaluate.metrics if metrics else ()
    if not train.losses:
        if graph.others:
            raise ConfigError(
                f"train.losses: not given, but the network has the outputs {', '.join(graph.outputs)}; give a loss for each, as "
                f"train: {{losses: {{{graph.output}: {{loss: cross_entropy}}, ...}}}}."
            )
        return graph.with_loss(make_loss(train.loss, train.label_smoothing, wanted))
    unknown = next((o for o in train.losses if o not in graph.outputs), None)
    if unknown is not None:
        raise ConfigError(
            f"train.losses: got {unknown!r}, {nearest(unknown, graph.outputs)}expected the network's outputs: {', '.join(graph.outputs)} "
            "(model.outputs)."
        )
    missing = [o for o in graph.outputs if o not in train.losses]
    if missing:
        raise ConfigError(
            f"train.losses: got none for {', '.join(missing)}, expected one for each output of the network."
        )
    losses, measured = dict[str, tuple[Loss, str]](), set[str]()
    for output, part in train.losses.items():
        known = LOSSES[part.loss.kind]
        own = tuple(m for m in wanted if m in known.measures)
        measured |= {*own}
        smoothing = train.label_smoothing if hasattr(known, "smoothing") else 0.0
        loss = make_loss(part.loss, smoothing, own)
        losses[output] = replace(loss, factor=loss.factor * part.weight), part.target or output
    idle = next((m for m in wanted if m not in measured), None)
    if idle is not None:
        raise ConfigError(f"train.evaluate.metrics: got {idle}, which none of the losses measures.")
    return graph.with_losses(losses)


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
