"""Machine files: what the cost model knows of a cluster, each constant with its source.

name: my-cluster
levels:
- {name: node, size: 4, alpha: 5.0e-6, bandwidth: 5.0e+10, source: "vendor data sheet"}
- {name: network, alpha: 2.0e-6, bandwidth: 1.25e+10, source: "osu_bw, 4 processes a node"}
memory: 16GB
compute:
  peak: {float32: 1.5e+13}
  memory_bandwidth: 9.0e+11
  source: vendor data sheet
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lbpar.config.output import write_output
from lbpar.config.report import check
from lbpar.config.section import Bytes, Count, Flag, LongText, Number, Section, Text
from lbpar.config.yaml_text import dump_yaml, read_yaml

Latency = Literal["log", "ring", "tree"]
# Far beyond every machine, and so that no price overflows.
Seconds = Annotated[Number, Field(ge=0, le=1e3)]
PerSecond = Annotated[Number, Field(ge=1, le=1e21)]
Half = Annotated[Number, Field(ge=0, le=1e9)]
Share = Annotated[Number, Field(ge=0, le=1e9)]
Efficiency = Annotated[Number, Field(ge=1e-6, le=1)]


MeasuredMove = Literal["allreduce", "reduce_scatter", "allgather", "alltoall", "p2p"]
"""Moves whose links are measured; halo exchanges and their adjoints are messages between pairs as well."""


class LinkConfig(Section):
    """Links as one kind of move between so many processes uses them, measured."""

    kind: MeasuredMove = Field(description="The move; `p2p` stands for halo exchanges, too.")
    ways: Annotated[Count, Field(ge=2)] = Field(description="Processes of a group.")
    alpha: Seconds = Field(description="As of the level, but for this move.")
    bandwidth: PerSecond = Field(description="As of the level, but for this move.")
    beyond: PerSecond | None = Field(
        default=None,
        description="Bandwidth of what is sent beyond `knee` bytes, where caches hold no more; never of allreduces.",
    )
    knee: Annotated[Number, Field(ge=0, le=1e21)] = Field(default=0.0, description="See `beyond`.")
    residual: Share = Field(default=0.0, description="Mean part by which measured times differ from the line of both.")
    spread: Share = Field(
        default=0.0, description="Mean part by which half of the repetitions lie around their median."
    )
    unsure: Share = Field(
        default=0.0, description="Mean standard error of these medians, as a part of them; 1 where it is not known."
    )
    doubt: LongText | None = Field(default=None, description="Why it cannot be trusted, if so.")

    @property
    def large(self) -> tuple[float, float]:
        """What each byte beyond so many takes longer, in seconds, and so many."""
        return (1 / self.beyond - 1 / self.bandwidth, self.knee) if self.beyond else (0.0, 0.0)


class LevelConfig(Section):
    """Links of one kind: inside a node, between nodes."""

    name: Text = Field(description="What the links join, as in `node` or `network`.")
    size: Count | None = Field(
        default=None, description="Devices of one unit of the level below that it joins; the last level has no end."
    )
    alpha: Seconds = Field(description="Seconds that a message costs, however short.")
    bandwidth: PerSecond = Field(description="Bytes per second that one device sends while all others send too.")
    source: LongText = Field(description="Where alpha and bandwidth come from.")
    moves: tuple[LinkConfig, ...] = Field(
        default=(),
        max_length=1000,
        description="The same for single moves and sizes of groups; the nearest size counts, and alpha and bandwidth where a move is not listed.",
    )

    @property
    def large(self) -> tuple[float, float]:
        """As of a `LinkConfig`: nothing is known of large messages."""
        return 0.0, 0.0


class RateConfig(Section):
    """One measured kernel; one that is no matrix product counts as one of a term, and its bytes as operations."""

    kernel: Text = Field(description="Name of the kernel, such as `conv_forward`.")
    m: Count = Field(description="Rows of the product: samples times positions of the local block.")
    n: Count = Field(description="Columns: local filters.")
    k: Count = Field(description="Terms of each sum: local channels times taps.")
    taps: Count = Field(default=1, description="Taps of the window, as in 9 for 3 x 3.")
    dtype: Text = Field(
        default="float32", description="Type of the elements; `tf32` of float32 that is multiplied in TF32."
    )
    rate: PerSecond = Field(
        description="Operations per second reached (a multiply-add is two), or bytes, without the start."
    )


class ComputeConfig(Section):
    """What one device computes."""

    peak: dict[str, PerSecond] = Field(
        min_length=1, description="Operations per second per type; `tf32` of float32 that is multiplied in TF32."
    )
    efficiency: Efficiency = Field(default=0.7, description="Part of the peak that large kernels reach.")
    half_m: Half = Field(default=0.0, description="Rows at which half of that efficiency is reached.")
    half_n: Half = Field(default=0.0, description="The same for columns (filters).")
    half_k: Half = Field(default=0.0, description="The same for terms (channels times taps).")
    memory_bandwidth: PerSecond = Field(description="Bytes per second to and from the device's memory.")
    overhead: Seconds = Field(default=0.0, description="Seconds that starting a kernel costs.")
    starts: dict[str, Seconds] = Field(
        default_factory=dict, description="The same for single kernels, by name, and for a `slice`."
    )
    table: tuple[RateConfig, ...] = Field(
        default=(),
        max_length=10_000,
        description="Measured rates; where a kernel has entries, its rate is a mean of those of near shapes.",
    )
    speeds: dict[str, PerSecond] = Field(
        default_factory=dict,
        description="Bytes per second that kernels without a matrix product reach, by name, such as `norm_apply`; `update`, the optimizer's step; `rows` and `columns`, copies of parts of an array, the latter of a part of each row. Others run at `memory_bandwidth`.",
    )
    half_arrays: Flag = Field(
        default=True,
        description="Activations of half types take two bytes; else they are only multiplied in that type.",
    )
    volume_copies: Flag = Field(
        default=True,
        description="Weight gradients of volumes in float32 are computed from a copy of the input, as oneDNN does on processors without AVX-512.",
    )
    source: LongText = Field(description="Where the numbers come from.")


class MachineFile(Section):
    """A machine file."""

    name: Text = Field(description="Name of the machine.")
    description: LongText | None = Field(default=None, description="In words.")
    levels: tuple[LevelConfig, ...] = Field(min_length=1, description="Links, fastest first.")
    latency: Latency = Field(
        default="log", description="Messages one after the other in a collective of p: log2 p, p - 1, or a tree."
    )
    overlap: Annotated[Number, Field(ge=0, le=1)] = Field(
        default=1.0, description="Part of communication that can go on while the device computes."
    )
    memory: Bytes = Field(description="Memory of one device.")
    cores: Count | None = Field(
        default=None,
        description="Processes of one node that can compute at the same time; more of them take turns. Default: all.",
    )
    compute: ComputeConfig = Field(description="What one device computes.")
    notes: Any = Field(default=None, description="Free.")

    @model_validator(mode="after")
    def _check(self) -> MachineFile:
        for level in self.levels[:-1]:
            if level.size is None:
                raise ValueError(f"levels: {level.name} has no size; only the last level may go without")
        return self


def load_machine_file(path: str | Path) -> MachineFile:
    """Read a machine file (YAML or JSON); raises ConfigError as `lbpar.config.run_file.load_run_file` does."""
    return check(MachineFile, read_yaml(path, "machine file"), str(path))


def save_machine_file(machine: MachineFile, path: str | Path) -> None:
    """Write a machine file as YAML; see `write_output`."""
    write_output(path, dump_yaml(machine.model_dump(mode="json", exclude_none=True)), "the machine file")
