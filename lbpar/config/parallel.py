"""Section ``parallel``: how processes are arranged, for all layers and for single ones."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lbpar.config.layers import NormStats
from lbpar.config.paths import expand
from lbpar.config.section import Bytes, Count, Custom, Natural, Section, is_int
from lbpar.text import nearest

STRATEGIES = ("auto", "data", "spatial", "slabs", "filter", "channel", "stationary-w", "owt")
Loop = Literal["N", "C", "F", "D", "H", "W", "G"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "delayed"]


def _strategy(value: Any) -> str:
    names = ", ".join(STRATEGIES)
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected one of {names}, or the path of a plan file (.yaml, .json)")
    if value in STRATEGIES:
        return value
    if value.endswith((".yaml", ".yml", ".json")):
        return expand(value)
    raise ValueError(f"{nearest(value, STRATEGIES)}expected one of {names}, or the path of a plan file (.yaml, .json)")


def _ways(value: Any) -> int | tuple[int, ...]:
    if is_int(value, 1):
        return int(value)
    if isinstance(value, (list, tuple)) and all(is_int(v, 0) for v in value) and len(set(value)) == len(value):
        return tuple(value)
    raise ValueError("expected a number of ways of at least 1, or a list of different grid axes, as in [0, 2]")


def _recompute(value: Any) -> str | int | tuple[str, ...]:
    if value == "auto" or is_int(value, 1):
        return value if isinstance(value, str) else int(value)
    if isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value) and len(set(value)) == len(value):
        return tuple(value)
    raise ValueError("expected auto, a number of segments of at least 1, or a list of different layers")


Ways = Annotated[int | tuple[int, ...], Custom(_ways, "number of ways, or a list of grid axes")]
Strategy = Annotated[str, Custom(_strategy, ", ".join(f"`{s}`" for s in STRATEGIES) + ", or the path of a plan file")]

Recompute = Annotated[
    str | int | tuple[str, ...], Custom(_recompute, "`auto`, number of segments, or a list of layers")
]


class ParallelConfig(Section):
    """How processes are arranged."""

    strategy: Strategy = Field(default="auto", description="Chosen by cost, a named strategy, or a plan file.")
    memory: Bytes | None = Field(
        default=None,
        description="What one process may use. Plans that need more are left out, and a strategy that does is refused (see `recompute`).",
    )
    procs: Count | None = Field(default=None, description="Processes to plan for; default: as many as were started.")
    layers: dict[str, dict[Loop, Ways]] = Field(
        default={}, description="Exceptions per layer: loop → ways (or list of grid axes). Loops: N C F D H W G."
    )
    stages: Count = Field(
        default=1,
        description="Parts of the network, one after the other, each on its own share of the processes; `strategy` arranges those of a part.",
    )
    schedule: Schedule = Field(
        default="1f1b",
        description="Order in which micro-batches go through the stages: `gpipe`, `1f1b`, `interleaved` (several stages at each place) or "
        "`zero-bubble` (gradients of weights apart). All of these train as without stages. **`delayed` does not**: stages never wait for "
        "each other, and stage k of K (from 1 on) is updated with gradients that are K − k updates old.",
    )
    micro_batches: Count | None = Field(
        default=None,
        description="Parts of each batch; their gradients are added. Default: 4 per stage, and 1 without stages or with `delayed`. Batch norms take statistics "
        "of a part, and losses that are ratios of sums (Dice, weighed classes, ignored labels) are those of parts.",
    )
    interleave: Count | None = Field(
        default=None,
        description="Stages at each place with `interleaved`, so that there are `stages` times as many. Default: 2.",
    )
    stage: dict[str, Natural] = Field(
        default={}, description="Stage of single layers, from 0 on; others are cut where the slowest stage is fastest."
    )
    recompute: Recompute | None = Field(
        default=None,
        description="Activations to drop after the forward pass and compute again in the backward pass. A list: the outputs of these layers "
        "(`[]`: never any). A number: the layers are cut into so many segments with outputs of equal size; what a segment hands on is kept, "
        "and so is all of the last segment. The square root of the number of layers is a good number. `auto`: as many as `memory` asks for, those first that "
        "save most bytes per second. Default: `auto` where nothing fits in `memory` otherwise, else none. Results stay the same to the last bit "
        "(on GPUs with `cudnn: false`; else norms that are computed again are lbpar's own, not cuDNN's).",
    )
    reschedule: Count | None = Field(
        default=None,
        description="With `delayed`: updates over which the learning rate of a stage with gradients d updates old grows from 1/(1 + d) of the "
        "schedule's to all of it. Default: all of it at once.",
    )
    norm: NormStats | None = Field(
        default=None,
        description="Over which processes every norm of the network merges its training statistics. `global`: all, so that "
        "the result does not depend on the grid (PyTorch's SyncBatchNorm). `sample`: those that share the same samples, that "
        "is over space only. `local`: none; each process uses its own part of the batch (PyTorch's DistributedDataParallel). "
        "With `sample` and `local` the result depends on the grid. Running statistics, with which a network is evaluated, "
        "always merge all processes. Default: as the network says, which is `global` unless a layer has other `stats`.",
    )

    @property
    def plan_file(self) -> str | None:
        """Path of the plan file, where the strategy is one."""
        return None if self.strategy in STRATEGIES else self.strategy
