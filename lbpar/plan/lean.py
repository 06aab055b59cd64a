"""Which activations to compute again, so that a plan fits in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from lbpar.errors import PlanError
from lbpar.plan.priced import PricedPlan, Settings
from lbpar.plan.segments import segments
from lbpar.program.plan import Plan
from lbpar.program.recompute import is_again, layer_of
from lbpar.program.steps import Compute, Start, writes
from lbpar.text import human_bytes

#: Look at the peak again at most so often, after more outputs were dropped.
ROUNDS = 12
#: Outputs to try to keep after all, the largest, where nothing is left to drop.
TRIALS = 10
#: Plans to make fit that would be faster than the best so far.
PLANS = 4
#: Numbers of segments to begin with where dropping single outputs is not enough.
SEGMENTS = (2, 3, 4, 6, 8, 12)
#: Keep an output after all, if there is room, where computing it again takes more than this part of the step.
MATTERS = 0.003


def fit(settings: Settings, priced: PricedPlan, limit: int) -> PricedPlan | None:
    """The plan that computes as little again as lets it fit, or None if nothing does: then the settings know the smallest that was tried.

    Of the outputs alive at the peak those are dropped that save most bytes per second, until it fits; the peak is that of the program. If that is
    not enough, because so much is computed again at once, the same begins with segments. What turns out not to be needed is kept.

    Parameters
    ----------
    settings : Settings
        How plans are priced.
    priced : PricedPlan
        Keeps everything.
    limit : int
        Bytes of one process.
    """
    tried, cost = replace(settings, known=[priced]), _seconds(priced)
    for names in ((), *(segments(settings.graph, n) for n in SEGMENTS)):
        lean = _drop(tried, priced, names, cost, limit)
        if lean is not None:
            return _give_back(tried, lean, cost, limit)
    settings.known.append(min(tried.known, key=lambda o: o.memory.peak))
    return None


def fit_any(settings: Settings, best: float, limit: int) -> PricedPlan | None:
    """The fastest that plans known to the settings become when they are made to fit; None if none takes less than ``best`` seconds.

    A plan that computes something again is slower than before, so that only those are looked at that are faster than the best so far. Where
    none fits as it is, the one that needs least must, or none will.
    """
    lean, tall = None, [o for o in settings.known if o.memory.peak > limit and not o.plan.recompute]
    if best == inf and tall:
        lean = fit(settings, min(tall, key=lambda o: o.memory.peak), limit)
        if lean is None:
            return None
        best = lean.seconds
    for o in sorted(tall, key=lambda o: o.seconds)[:PLANS]:
        found = fit(settings, o, limit) if o.seconds < best else None
        if found is not None and found.seconds < best:
            best, lean = found.seconds, found
    return lean


def fitted(settings: Settings, name: str, plan: Plan, limit: int, again: bool = True) -> PricedPlan:
    """A plan, with activations computed ``again`` if it may be and does not fit otherwise.

    Raises
    ------
    PlanError
        It does not fit.
    """
    priced = settings.priced(name, plan)
    lean = priced if priced.memory.peak <= limit or plan.recompute or not again else fit(settings, priced, limit)
    if lean is None or lean.memory.peak > limit:
        raise PlanError(too_small(limit, [priced, *(o for o in settings.known if o.name == name)]))
    return lean


def too_small(limit: int, tried: Sequence[PricedPlan]) -> str:
    """Message: nothing fits; the smallest footprint and what dominates it."""
    held = min((o.memory for o in tried), key=lambda m: m.peak)
    name, size = next(iter(held.largest.items()))
    return (
        f"parallel.memory: no plan fits in {human_bytes(limit)} per process. The smallest footprint found is {human_bytes(held.peak)} "
        f"(weights {human_bytes(held.weights)}, optimizer {human_bytes(held.optimizer)}, activations "
        f"{human_bytes(held.activations + held.ghosts)}, libraries and free pieces {human_bytes(held.overhead)}), reached at {held.where}; the largest array is {name}, {human_bytes(size)}. "
        "Use more processes, a smaller batch, or a larger limit."
    )


def _drop(
    settings: Settings, priced: PricedPlan, names: tuple[str, ...], cost: Mapping[str, float], limit: int
) -> PricedPlan | None:
    """Drop outputs alive at the peak until the plan fits."""
    lean = _with(settings, priced, names)
    for _ in range(ROUNDS):
        over = lean.memory.peak - limit
        if over <= 0:
            return lean
        sizes: dict[str, int] = {}
        for buffer, size in lean.memory.alive.items():
            layer = layer_of(buffer)
            if layer is not None and layer in cost and layer not in lean.plan.recompute and not is_again(buffer):
                sizes[layer] = sizes.get(layer, 0) + size
        more: list[str] = []
        for layer in sorted(sizes, key=lambda n: cost[n] / max(1, sizes[n])):
            if over > 0:
                more.append(layer)
                over -= sizes[layer]
        lower = _with(settings, lean, (*lean.plan.recompute, *more)) if more else _keep_one(settings, lean)
        if lower is None:
            return None
        lean = lower
    return None


def _keep_one(settings: Settings, lean: PricedPlan) -> PricedPlan | None:
    """Keep the output that lowers the peak most: what it would be computed from need not be there then."""
    again = dict.fromkeys(layer_of(b) for b in lean.memory.alive if is_again(b))  # the largest first
    tried = [_without(settings, lean, name) for name in list(again)[:TRIALS] if name in lean.plan.recompute]
    best = min(tried, key=lambda o: o.memory.peak, default=lean)
    return best if best.memory.peak < lean.memory.peak else None


def _without(settings: Settings, lean: PricedPlan, name: str) -> PricedPlan:
    return _with(settings, lean, tuple(n for n in lean.plan.recompute if n != name))


def _give_back(settings: Settings, lean: PricedPlan, cost: Mapping[str, float], limit: int) -> PricedPlan:
    """Keep outputs, the dearest first, as long as the plan fits."""
    for name in sorted(lean.plan.recompute, key=lambda n: -cost.get(n, 0.0)):
        if cost.get(name, 0.0) < MATTERS * lean.seconds:
            break
        kept = _without(settings, lean, name)
        if kept.memory.peak <= limit and kept.seconds <= lean.seconds:
            lean = kept
    return lean


def _with(settings: Settings, priced: PricedPlan, names: tuple[str, ...]) -> PricedPlan:
    order = [n.name for n in settings.graph.ops if n.name in set(names)]
    return settings.priced(priced.name, replace(priced.plan, recompute=tuple(order)))


def _seconds(priced: PricedPlan) -> dict[str, float]:
    """Seconds to compute each layer's output again, its moves included; none for what cannot be dropped."""
    out: dict[str, float] = {}
    results, loss = set(priced.program.results.values()), priced.program.graph.loss
    for step, cost in zip(priced.program.steps, priced.price.steps, strict=True):
        if not isinstance(step, (Compute, Start)) or step.phase != "forward":
            continue
        made = (step.dst,) if isinstance(step, Start) else writes(step)
        for layer in {layer_of(b) for b in made if b not in results} - {None, loss.name if loss is not None else None}:
            assert layer is not None
            out[layer] = out.get(layer, 0.0) + cost.seconds
    return out
