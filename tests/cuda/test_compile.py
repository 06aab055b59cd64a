"""All CUDA kernels compile for all architectures, without a device, and none keeps registers in memory."""

from __future__ import annotations

import pytest

from tests.cuda import resources
from tests.cuda.nvrtc import ARCHITECTURES, CompileError, compile_kernels, library

pytestmark = pytest.mark.skipif(
    library() is None, reason="needs the wheels nvidia-cuda-nvrtc-cu12 and nvidia-cuda-runtime-cu12"
)

GROUPS = {architecture: resources.groups_of(architecture) for architecture in ARCHITECTURES}
CASES = [
    pytest.param(
        file,
        number,
        arch,
        id=f"{file}-{number}-{arch}",
        marks=[] if number == 0 and arch == "sm_90" else pytest.mark.slow,
    )
    for arch in ARCHITECTURES
    for file, groups in GROUPS[arch].items()
    for number, names in enumerate(groups)
    if names
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file,number,architecture", CASES)
def test_compiles_and_does_not_spill(file: str, number: int, architecture: str) -> None:
    names = GROUPS[architecture][file][number]
    rows = compile_kernels(file, names, architecture)
    assert [r.name for r in rows] == list(names)
    assert all(r.registers > 0 for r in rows)
    assert not [r for r in rows if r.spilled or r.stack]
    assert not [r for r in rows if r.shared > 48 << 10]


def test_errors_are_those_of_the_compiler() -> None:
    with pytest.raises(CompileError, match="no_such_kernel"):
        compile_kernels("dropout.cu", ["no_such_kernel<float>"], "sm_80")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_table_of_resources_is_up_to_date() -> None:
    """Names and architectures; the numbers belong to a version of the compiler."""
    text = resources.PAGE.read_text(encoding="utf-8")
    for file, groups in GROUPS[ARCHITECTURES[-1]].items():
        for names in groups:
            for name in names:
                assert f"| {file} | `{name.split('<')[0]}` |" in text, "run `python -m tests.cuda.resources`"
