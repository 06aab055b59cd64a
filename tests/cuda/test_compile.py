"""All CUDA kernels compile for all architectures, without a device, and none keeps registers in memory."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lbpar.engine.cupy.kernels import source
from lbpar.engine.cupy.names import GROUPS
from tests.cuda import resources
from tests.cuda.beside import Beside, beside
from tests.cuda.nvrtc import ARCHITECTURES, CompileError, Resources, compile_kernels, library

pytestmark = pytest.mark.skipif(
    library() is None, reason="needs the wheels nvidia-cuda-nvrtc-cu12 and nvidia-cuda-runtime-cu12"
)

CASES = [
    pytest.param(file, arch, id=f"{file}-{arch}", marks=[] if quick else pytest.mark.slow)
    for arch in ARCHITECTURES
    for file in (*GROUPS, *resources.TILED)
    for quick in [arch == "sm_90" and file in ("dropout.cu", "pack.cu", "updates.cu")]
]


def compiled(file: str, architecture: str) -> list[tuple[tuple[str, ...], list[Resources]]]:
    """All that the self-test launches, and with it all that are compiled together."""
    groups = filter(None, resources.groups_of(file, architecture))
    return [(names, compile_kernels(file, names, architecture)) for names in groups]


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> Iterator[Beside]:
    yield from beside(request, compiled, "file", "architecture")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("file,architecture", CASES)
def test_compiles_and_does_not_spill(report: Beside, file: str, architecture: str) -> None:
    found = report(file, architecture)
    assert found
    for names, rows in found:
        assert [r.name for r in rows] == list(names)
        assert all(r.registers > 0 for r in rows)
        assert not [r for r in rows if r.spilled or r.stack]
        assert not [r for r in rows if r.shared > 48 << 10]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", [f for f, groups in GROUPS.items() if any("i32" in n for g in groups for n in g)])
def test_what_arrays_beyond_32_bits_take_compiles_and_does_not_spill(file: str) -> None:
    """Compiled one by one when first launched; on one architecture here."""
    wide = [tuple(n.replace("i32", "i64") for n in group if "i32" in n) for group in GROUPS[file]]
    rows = [r for names in filter(None, wide) for r in compile_kernels(file, names, "sm_90")]
    assert rows and not [r for r in rows if r.spilled or r.stack]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("file", [*GROUPS, *resources.TILED])
def test_nvcc_of_this_machine_compiles_them_too(file: str, tmp_path: Path) -> None:
    """Whichever CUDA it is of: the wheels above are of CUDA 12."""
    names = [n for group in resources.groups_of(file, "sm_90") for n in (group if file in GROUPS else group[:4])]
    text, object_file = tmp_path / "kernels.cu", tmp_path / "kernels.cubin"
    wanted = ", ".join(f"(void*){name}" for name in names)  # makes the templates be compiled
    text.write_text(f"{source(file)}\nvoid* wanted[] = {{{wanted}}};\n", encoding="utf-8")
    options = ["-std=c++17", "-cubin", "-arch=sm_90", "-ftz=true", "-Xptxas=-v"]
    done = subprocess.run(
        ["nvcc", *options, "-o", str(object_file), str(text)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("Compiling entry function") == len(names)
    assert len(re.findall(r"\b0 bytes stack frame, 0 bytes spill stores", done.stderr)) >= len(names)
    assert not re.search(r"[1-9]\d* bytes spill stores", done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_only_products_are_not_compiled_together(architecture: str) -> None:
    assert set(resources.usual(architecture)) == set(resources.TILED)


def test_errors_are_those_of_the_compiler() -> None:
    with pytest.raises(CompileError, match="no_such_kernel"):
        compile_kernels("dropout.cu", ["no_such_kernel<float>"], "sm_80")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_table_of_resources_is_up_to_date() -> None:
    """Names and architectures; the numbers belong to a version of the compiler."""
    text = resources.PAGE.read_text(encoding="utf-8")
    for file in (*GROUPS, *resources.TILED):
        for names in resources.groups_of(file, "sm_90"):
            for name in names:
                assert f"| {file} | `{name.split('<')[0]}` |" in text, "run `python -m tests.cuda.resources`"
