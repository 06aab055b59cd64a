"""What all optimizers share: kinds of parameters, state by parameter and slot, the step counter, saving and loading."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from lbpar.config import optimizers
from lbpar.config.optimizers import OPTIMIZERS
from lbpar.config.report import check
from lbpar.engine.base import Engine
from lbpar.engine.device import Array
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.rules import Blocks
from lbpar.errors import CheckpointError, TrainingError
from lbpar.runtime.optim.norms import LocalNorms, Norms


class Optimizer(ABC):
    """Updates local blocks of parameters in place.

    Parameters
    ----------
    lr : float, optional
        Learning rate used when `step` is given none; schedules start from it.
    config : lbpar.config.optimizers.Optimizer, optional
        All options as a section of a run file; else they are given one by one, ``**options``.
    kinds : mapping from parameter name to "weight", "bias" or "norm", optional
        Kind of each parameter; those not named are weights.
    no_decay : collection of str
        Kinds without weight decay, and without trust ratio in LARS and LAMB.

    Attributes
    ----------
    slots : tuple of str
        Names of the state arrays that each parameter has, all of the parameter's shape, dtype and layout.
    state : dict
        ``state[param][slot]``: arrays like the parameter's local block.
    steps : int
        Number of steps taken.
    engine : Engine
        Holds the blocks and computes on them; default: NumPy.
    """

    #: Its options as users give them: defaults, ranges and documentation, and the arrays of state that it keeps.
    options: ClassVar[type[optimizers.Optimizer]]
    name: ClassVar[str]
    config: optimizers.Optimizer
    engine: Engine = NumpyEngine()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = OPTIMIZERS.kind(cls.options)

    def __init__(
        self,
        lr: float | None = None,
        *,
        config: optimizers.Optimizer | None = None,
        kinds: Mapping[str, str] | None = None,
        no_decay: Collection[str] = (),
        **options: Any,
    ) -> None:
        if config is None:
            given = {"name": self.name, **({} if lr is None else {"lr": lr}), **options}
            config = check(self.options, given, f"optimizer {self.name}")
        self.config = config
        self.lr, self.weight_decay = config.lr, config.weight_decay
        self.slots = config.state
        self.kinds = dict(kinds or {})
        self.no_decay = frozenset(no_decay)
        self.state: dict[str, dict[str, Array]] = {}
        self.steps = 0

    def decays(self, param: str) -> bool:
        """Whether a parameter is of a kind with weight decay (and trust ratio)."""
        return self.kinds.get(param, "weight") not in self.no_decay

    def init_state(self, params: Mapping[str, Array]) -> None:
        """Allocate zero state for parameters that have none yet; `step` does it on the way."""
        for param, p in params.items():
            if param not in self.state:
                self.state[param] = {slot: self.engine.zeros(p.shape, p.dtype) for slot in self.slots}

    def step(
        self,
        params: Mapping[str, Array],
        grads: Mapping[str, Array],
        lr: float | None = None,
        norms: Norms | None = None,
    ) -> None:
        """Update the parameters in place from their gradients.

        Parameters
        ----------
        params : mapping from name to array
            Local blocks, C-contiguous, float32 or float64; empty blocks are allowed.
        grads : mapping from name to array
            Gradients of the whole loss with respect to those blocks (already summed over ranks), same shapes. A
            parameter without a gradient is left alone. Never changed.
        lr : float, optional
            Learning rate of this step; default: the optimizer's own.
        norms : Norms, optional
            Sums over whole parameters; default: this process holds whole parameters. Only LARS and LAMB use it, and
            then the call is collective as `Norms.squared`.

        Raises
        ------
        TrainingError
            A block is not C-contiguous, or a gradient's shape differs from its parameter's.
        """
        used = {param: p for param, p in params.items() if param in grads}
        for param, p in used.items():
            if grads[param].shape != p.shape:
                raise TrainingError(
                    f"{self.name}: the gradient of {param} has shape {grads[param].shape}, expected the parameter's "
                    f"shape {p.shape}."
                )
        self.init_state(used)
        self.steps += 1
        flat_params = {param: flat(param, p) for param, p in used.items()}
        flat_grads = {param: flat(param, grads[param]) for param in used}
        rate = self.lr if lr is None else lr
        blocks = [(p, flat_grads[param], *self._slots(param)) for param, p in flat_params.items()]
        decays = [self.weight_decay * self.decays(param) for param in used]
        rates = [float(rate)] * len(blocks)
        self._update(list(used), blocks, decays, rates, norms or LocalNorms())

    @abstractmethod
    def _update(self, names: list[str], blocks: Blocks, decays: list[float], rates: list[float], norms: Norms) -> None:
        """The rule itself; ``self.steps`` counts this step already.

        Parameters
        ----------
        names : parameters
        blocks : 1-D views of each parameter, its gradient and its state in the order of ``slots``
        decays, rates : weight decay and learning rate of each
        norms : see `step`
        """

    def _slots(self, param: str) -> tuple[Array, ...]:
        """1-D views of a parameter's state, in the order of ``slots``."""
        state = self.state[param]
        return tuple(state[slot].reshape(-1) for slot in self.slots)

    def state_dict(self) -> dict[str, Array]:
        """State arrays (not copies) by ``"<param>/<slot>"``, each a block of a tensor laid out as its parameter."""
        return {f"{param}/{slot}": a for param, slots in self.state.items() for slot, a in slots.items()}

    def counters(self) -> dict[str, int]:
        """Whole numbers that belong to the state and are the same on all ranks."""
        return {"steps": self.steps}

    def load_state_dict(self, arrays: Mapping[str, Array], counters: Mapping[str, int]) -> None:
        """Replace the state by copies of what `state_dict` and `counters` gave, here or on another grid.

        Raises
        ------
        CheckpointError
            A name is not ``"<param>/<slot>"`` with a slot of this optimizer, a parameter lacks a slot, or the step
            counter is missing.
        """
        state: dict[str, dict[str, Array]] = {}
        for key, array in arrays.items():
            param, _, slot = key.rpartition("/")
            if not param or slot not in self.slots:
                raise CheckpointError(
                    f"{self.name}: the saved state holds {key!r}, expected slots {list(self.slots)}. "
                    "Resume with the optimizer that wrote the checkpoint."
                )
            state.setdefault(param, {})[slot] = self.engine.copy(self.engine.from_host(array))
        for param, slots in state.items():
            if missing := [s for s in self.slots if s not in slots]:
                raise CheckpointError(
                    f"{self.name}: the saved state of {param} lacks {', '.join(missing)}. "
                    "Resume with the optimizer that wrote the checkpoint."
                )
        if "steps" not in counters:
            raise CheckpointError(f"{self.name}: the saved counters {dict(counters)} lack 'steps'.")
        self.state = state
        self.steps = int(counters["steps"])


def flat(name: str, array: Array) -> Array:
    """One-dimensional view of a block; TrainingError if it is not C-contiguous (an update would be lost)."""
    if not array.flags.c_contiguous:
        raise TrainingError(
            f"{name}: the optimizer was given a block of shape {array.shape} that is not C-contiguous, expected a "
            "C-contiguous array. Pass numpy.ascontiguousarray of it and keep that copy as the parameter."
        )
    return array.reshape(-1)
