"""Section ``engine``: what computes on each process."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lbpar.config.section import Bytes, Custom, Flag, Section, is_int


def _threads(value: Any) -> int | Literal["auto"]:
    if value == "auto" or is_int(value, 1, MOST_THREADS):
        return value  # type: ignore[no-any-return]
    raise ValueError(f"expected auto or a whole number from 1 to {MOST_THREADS}")


def _maybe(value: Any) -> bool | Literal["auto"]:
    if value == "auto" or isinstance(value, bool):
        return value  # type: ignore[return-value]
    raise ValueError("expected auto, true or false")


MOST_THREADS = 1024
Threads = Annotated[int | Literal["auto"], Custom(_threads, f"`auto` or whole number from 1 to {MOST_THREADS}")]
Maybe = Annotated[bool | Literal["auto"], Custom(_maybe, "`auto`, true or false")]

WORKSPACE = 256 << 20
"""Bytes that a product may take on a GPU beside its operands, by default."""


class EngineConfig(Section):
    """What computes on each process."""

    name: Literal["auto", "numpy", "onednn", "cupy"] = Field(
        default="auto",
        description="Library of kernels; auto is onednn where it is installed, else numpy. cupy computes on CUDA devices.",
    )
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = Field(
        default="float32",
        description="Type of activations and weights. Half types are those of activations and products; weights, sums and statistics stay "
        "float32. float16 is for cupy, with loss scaling (`train.loss_scale`).",
    )
    threads: Threads = Field(default="auto", description="Threads per process; auto shares the cores of a node.")
    tf32: Flag = Field(
        default=False,
        description="Let tensor cores multiply float32 in TF32, whose products have 11 bits; sums stay float32. For cupy.",
    )
    cudnn: Maybe = Field(
        default="auto",
        description="Convolve and normalise by cuDNN where it is the better choice, and multiply the matrices of linear layers by cuBLAS; false leaves all to "
        "lbpar's own kernels, auto takes each library where it can be loaded, true insists on cuDNN. For cupy.",
    )
    autotune: Flag = Field(
        default=False,
        description="Time cuDNN's plans, and lbpar's own kernels, in the first step, and take the fastest from then on, on all processes "
        "the same; results may differ between runs in their last digits. Else cuDNN's heuristics choose. For cupy.",
    )
    workspace: Bytes = Field(
        default=WORKSPACE,
        description="Most memory that a convolution or product may take beside its operands. For cupy.",
    )
    graphs: Flag = Field(
        default=False,
        description="Record the third step as CUDA graphs, and launch these from then on: kernels of small layers wait less for the host. The "
        "memory of recorded steps is not shared with others; matrices are multiplied by lbpar's own kernels. For cupy, on several "
        "processes where arrays travel by NCCL, without `parallel.stages`.",
    )
    transport: Literal["auto", "nccl", "mpi", "host"] = Field(
        default="auto",
        description="How arrays of GPUs travel between processes: by NCCL, which needs a GPU for each process, by an MPI that takes device "
        "memory, or by way of the host; auto is the first of these that works. For cupy.",
    )
    progress: Literal["auto", "test", "thread", "block"] = Field(
        default="auto",
        description="How messages progress while kernels run: tested after each kernel, by a thread, or only when started "
        "and waited for (block); auto is block where all ranks have cores of their own on one node, else test.",
    )

    @property
    def arithmetic(self) -> str:
        """What prices know of its type: `dtype`, or ``tf32`` for arrays of float32 that are multiplied in TF32."""
        return "tf32" if self.name == "cupy" and self.dtype == "float32" and self.tf32 else self.dtype

    @property
    def planned(self) -> dict[str, Any]:
        """What plans know of it: whether interiors of convolutions are computed while halos are under way, and room for products."""
        gpu = self.name == "cupy"
        return {"rims": gpu, "workspace": self.workspace if gpu else 0}
