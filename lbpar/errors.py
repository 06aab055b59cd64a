"""Exceptions of lbpar.

Every message answers, in this order: where, what was given, what was expected, what to do.
"""

from __future__ import annotations


class LbparError(Exception):
    """Base class: everything lbpar raises on purpose. Command lines print it without a traceback."""


class ConfigError(LbparError, ValueError):
    """A run file, plan file, machine file or command-line option is wrong."""


class GraphError(LbparError, ValueError):
    """A network is ill-formed: unknown op, shapes that do not fit, a missing input."""


class LayoutError(LbparError, ValueError):
    """A grid, layout or transition is impossible."""


class PlanError(LayoutError):
    """A plan gives an op a grid that it cannot take."""


class DataError(LbparError, ValueError):
    """A dataset or its file is missing, truncated or of the wrong shape or type."""


class CheckpointError(LbparError, ValueError):
    """A checkpoint or run directory cannot be read or written."""


class TrainingError(LbparError, RuntimeError):
    """Training cannot go on, for example because the loss is not finite."""


class CommError(LbparError, RuntimeError):
    """Ranks disagree, a launcher started single ranks, or a peer was lost."""


class EngineError(LbparError, RuntimeError):
    """A kernel library is missing or refused a call."""


class Unsupported(LbparError, NotImplementedError):
    """The case is not handled; the message names the nearest case that is."""


class CalibrationError(LbparError, RuntimeError):
    """What was measured of a machine cannot be trusted."""
