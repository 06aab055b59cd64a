"""Alpha-beta times of collectives, with the latency form as a switch.

Gholami et al. write the latency of recursive halving and doubling beside the ring's bandwidth; ParaDL and PaSE use the ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lbpar.errors import ConfigError

Form = Literal["log", "ring", "tree"]


@dataclass(frozen=True)
class Link:
    """Seconds of collectives over ``p`` processes. ``words`` is the size of the whole result (or of the buffer that is summed).

    Attributes
    ----------
    alpha, beta : seconds per message and per word.
    form : "log" (recursive halving and doubling), "ring", or "tree" (an allreduce by reduce and broadcast in ceil(log2 p) rounds
        that each carry the whole buffer; the other collectives as "log").
    """

    alpha: float
    beta: float
    form: Form = "log"

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise ConfigError(f"latency form: got {self.form!r}; expected one of {', '.join(get_args(Form))}")

    def message(self, words: float) -> float:
        """One message."""
        return self.alpha + self.beta * words

    def allgather(self, words: float, p: int) -> float:
        """Gather ``words`` in all; as long as a reduce-scatter of them."""
        rounds = p - 1 if self.form == "ring" else log2_ceil(p)
        return rounds * self.alpha + self.beta * words * (p - 1) / p

    def allreduce(self, words: float, p: int) -> float:
        """Sum a buffer and leave each process the whole."""
        return log2_ceil(p) * self.message(words) if self.form == "tree" else 2 * self.allgather(words, p)


def log2_ceil(p: int) -> int:
    """ceil(log2 p) for p >= 1, in integers."""
    return (p - 1).bit_length()
