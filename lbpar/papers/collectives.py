"""Alpha-beta times of collectives, with the latency form as a switch.

``words`` is the size of the full result (allgather), of the full input (reduce-scatter) or of the buffer (allreduce).
Forms: "log" (recursive halving and doubling), "ring", and "tree" (an allreduce by reduce and broadcast in
ceil(log2 p) rounds that each carry the whole buffer; the other collectives as "log"). Gholami et al. write the log
latency beside the ring's bandwidth; ParaDL and PaSE use the ring.
"""

from __future__ import annotations

from typing import Literal, get_args

from lbpar.errors import ConfigError

Form = Literal["log", "ring", "tree"]


def log2_ceil(p: int) -> int:
    """ceil(log2 p) for p >= 1, in integers."""
    return (p - 1).bit_length()


def rounds(p: int, form: Form) -> int:
    """Messages in sequence of one allgather or reduce-scatter over ``p`` processes."""
    if form not in get_args(Form):
        raise ConfigError(f"latency form: got {form!r}; expected one of {', '.join(get_args(Form))}")
    return p - 1 if form == "ring" else log2_ceil(p)


def allgather_seconds(words: float, p: int, alpha: float, beta: float, form: Form = "log") -> float:
    """Seconds to gather ``words`` in all over ``p`` processes; ``alpha`` s per message, ``beta`` s per word."""
    return rounds(p, form) * alpha + beta * words * (p - 1) / p


def reduce_scatter_seconds(words: float, p: int, alpha: float, beta: float, form: Form = "log") -> float:
    """Seconds to sum a buffer of ``words`` over ``p`` processes and leave each its share."""
    return allgather_seconds(words, p, alpha, beta, form)


def allreduce_seconds(words: float, p: int, alpha: float, beta: float, form: Form = "log") -> float:
    """Seconds to sum a buffer of ``words`` over ``p`` processes and leave each the whole."""
    if form == "tree":
        return log2_ceil(p) * (alpha + beta * words)
    return 2 * allgather_seconds(words, p, alpha, beta, form)


def message_seconds(words: float, alpha: float, beta: float) -> float:
    """Seconds of one message of ``words``."""
    return alpha + beta * words
