"""Delayed gradients: several mini-batches under way in one program, each one round behind the one before it.

In a round every mini-batch goes one of its rounds further (`lbpar.program.steps.Program.rounds`): the newest makes its forward passes and the last
stage's backward pass and update, the one before it the backward pass and update of the stage before the last, and so on. A rank thus alternates
between a forward pass of the newest and a backward pass of an older one, and waits for no other stage in between.

A backward pass must see the weights of its forward pass, or it would give the gradient of nothing. So before an update changes weights that
mini-batches under way have used, these get a copy (weight stashing: Narayanan et al., PipeDream, SOSP 2019). Running statistics are not kept:
only forward passes use them, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from lbpar.runtime.executor import Executor
from lbpar.runtime.trace import Tracer

Array = Any


class Pipe:
    """The mini-batches under way on one rank.

    Parameters
    ----------
    rounds : int
        That a mini-batch takes: the number of stages.
    """

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._under_way: deque[Executor | None] = deque()  # the newest first; None where none entered

    def __len__(self) -> int:
        """Mini-batches under way."""
        return sum(e is not None for e in self._under_way)

    def go(
        self, entering: Executor | None = None, feeds: Mapping[str, Array] | None = None, tracer: Tracer | None = None
    ) -> Executor | None:
        """Let all under way go one round further; returns the one that has come to its end, whose results are there.

        Collective over all ranks, which give the same mini-batches, but meet only where one needs what another sends.

        Parameters
        ----------
        entering : Executor, optional
            A mini-batch that enters, with ``on_update``; not under way yet. None: those under way go on alone.
        feeds : mapping, optional
            Its samples, as for `Executor.run`.
        tracer : Tracer, optional
            Gets the times of this round.
        """
        if entering is not None:
            entering.begin(feeds or {})
            entering.before_update = lambda params: self._keep(entering, params)
        self._under_way.appendleft(entering)
        for age, executor in enumerate(self._under_way):
            if executor is not None:
                executor.tracer = tracer
                executor.go(age)
        return self._under_way.pop() if len(self._under_way) == self._rounds else None

    def _keep(self, done: Executor, params: Mapping[str, Array]) -> None:
        """Copy weights that ``done`` is about to change for the mini-batches whose backward pass wants them; it wants them no more."""
        for name, live in params.items():
            done.arrays.pop(name, None)
            users = [e for e in self._under_way if e is not None and e.arrays.get(name) is live]
            if users:
                kept = users[0].engine.copy(live)
                for e in users:
                    e.arrays[name] = kept

    def drain(self) -> Iterator[Executor]:
        """Let those under way go on, and no more enter, until none is left."""
        while len(self):
            done = self.go()
            if done is not None:
                yield done
