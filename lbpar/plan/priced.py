"""Plans, lowered and priced."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lbpar.cost.machine import Machine
from lbpar.cost.memory import PREFETCH, Memory, memory_of_stages
from lbpar.cost.price import Price, price
from lbpar.cost.simulate import Simulation, simulate
from lbpar.graph.graph import Graph
from lbpar.program.lowering import lower
from lbpar.program.order import BUCKET_BYTES
from lbpar.program.plan import Plan
from lbpar.program.steps import Program


@dataclass(frozen=True)
class Figures:
    """What plans are compared by: see `PricedPlan`; ``sum`` is that of all steps, ``moves`` how many of them are communication."""

    name: str
    plan: Plan
    memory: Memory
    step: Simulation
    sum: float
    bytes: int
    moves: int

    @property
    def seconds(self) -> float:
        """The predicted step time."""
        return self.step.seconds


@dataclass(frozen=True)
class PricedPlan:
    """One plan, lowered and priced.

    ``name``: how it was made; ``price``: of each step, one after the other; ``places``: memory of a rank at each place of stages; ``step``: with
    overlap; ``kept``: the same with all activations kept, where some are computed again.
    """

    name: str
    plan: Plan
    program: Program
    price: Price
    places: tuple[Memory, ...]
    step: Simulation
    kept: PricedPlan | None = None

    @property
    def seconds(self) -> float:
        """The predicted step time."""
        return self.step.seconds

    @property
    def memory(self) -> Memory:
        """Of the stage that needs most."""
        return max(self.places, key=lambda m: m.peak)

    @property
    def figures(self) -> Figures:
        """What it is compared by."""
        p = self.price
        return Figures(self.name, self.plan, self.memory, self.step, p.seconds, p.bytes, sum(s.moves for s in p.steps))


@dataclass(frozen=True)
class Settings:
    """How plans of one run are priced; equal plans are lowered once. Plans that say nothing of it compute ``recompute`` again."""

    graph: Graph
    batch: int
    machine: Machine
    dtype: str
    optimizer: str
    prefetch: int = PREFETCH
    rims: bool = False
    workspace: int = 0
    recompute: tuple[str, ...] = ()
    known: list[PricedPlan] = field(default_factory=list)
    compared: list[Figures] = field(default_factory=list)

    def priced(self, name: str, plan: Plan) -> PricedPlan:
        """Lower and price a plan."""
        again = plan.recompute or self.recompute
        return self._priced(name, plan, None if not again else replace(plan, recompute=again))

    def figures(self, name: str, plan: Plan) -> Figures:
        """What a plan is compared by: it is not lowered if it is among those that were compared elsewhere."""
        plan = replace(plan, recompute=plan.recompute or self.recompute)
        found = next((o for o in self.compared if o.plan == plan), None)
        return replace(found, name=name) if found else self.priced(name, plan).figures

    def _priced(self, name: str, kept: Plan, lean: Plan | None = None) -> PricedPlan:
        plan = lean or kept
        for o in self.known:
            if o.plan == plan:
                return replace(o, name=name)
        whole = self._priced(name, replace(kept, recompute=())) if lean else None
        program = lower(self.graph, plan, self.batch, bucket_bytes=BUCKET_BYTES, rims=self.rims)
        cost = price(program, self.machine, self.dtype, self.optimizer)
        of = self.machine.half_arrays, self.machine.volume_copies, self.workspace
        held = memory_of_stages(program, self.dtype, self.optimizer, self.prefetch, *of)
        step = simulate(program, cost, self.machine)
        self.known.append(PricedPlan(name, plan, program, cost, tuple(held), step, whole))
        return self.known[-1]
