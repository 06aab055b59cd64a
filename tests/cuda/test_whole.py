"""Behind all other tests of kernels: what these have run."""

from __future__ import annotations

import pytest

from lbpar.engine.cupy.names import GROUPS
from lbpar.engine.cupy.tiles import MATHS
from tests.cuda.conftest import PARTLY
from tests.cuda.emulator import RAN, compiler_found

FILES = {
    "activations", "convolution", "dropout", "gemm", "label_losses", "lines", "losses", "norm", "pack", "pointwise", "pooling",
    "sample_norm", "updates",
}  # fmt: skip
TILED = {
    "gemm.cu": ("gemm",),
    "convolution.cu": ("conv_forward", "conv_backward_data", "conv_backward_weights"),
    "rims.cu": ("conv_rims", "conv_data_rims"),
}
GROUPED = ("conv_grouped", "conv_grouped_rims", "conv_grouped_weights")


@pytest.mark.slow
@pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
def test_every_kernel_has_run_in_every_type(request: pytest.FixtureRequest) -> None:
    collected = {item.path.name for item in request.session.items}
    wanted = {f"test_{name}.py" for name in FILES}
    partly = request.config.stash.get(PARTLY, set())
    if wanted - collected or wanted & partly or any("::" in a for a in request.config.args):
        pytest.skip("not all tests of kernels run")
    missing = {(f, n) for f, groups in GROUPS.items() for group in groups for n in group} - RAN
    assert not missing, "\n".join(f"{file}: {name}" for file, name in sorted(missing))
    left = tiled() - {kind_of(file, name) for file, name in RAN}
    assert not left, "\n".join(map(str, sorted(left)))


def tiled() -> set[tuple[str, str, str]]:
    """Kernels of products, which are in no group: file, name, and arithmetic or element type."""
    found = {(f, kernel, math.name) for f, kernels in TILED.items() for kernel in kernels for math in MATHS.values()}
    elements = {math.element for math in MATHS.values()}
    found |= {("grouped.cu", kernel, kind) for kernel in GROUPED for kind in elements}
    return found | {("gemm.cu", "sum_splits", kind) for kind in elements}


def kind_of(file: str, name: str) -> tuple[str, str, str]:
    """The same of a kernel that was launched."""
    kernel, _, arguments = name.rstrip(">").partition("<")
    return file, kernel, arguments.split(",")[0]
