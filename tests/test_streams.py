"""Commands end well whatever their standard streams are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MANY = "import sys\nfor i in range(100_000): print('line', i)"

Done = subprocess.CompletedProcess[str]

SCRIPT = """
import sys
from lbpar.streams import standard_streams
from lbpar.transport.launch import run_main

def main():
    exec(eval(sys.argv[2]))

sys.exit(run_main(main) if sys.argv[1] == "job" else standard_streams()(main)())
"""


def run(kind: str, code: str, shell: str = "", stdout: int = subprocess.PIPE, **env: str) -> Done:
    command = ["bash", "-c", f'set -o pipefail; "$@" {shell}', "bash", sys.executable, "-c", SCRIPT, kind, ascii(code)]
    settings = {**os.environ, "LBPAR_ALONE": "1", "PYTHONPATH": str(Path(__file__).parents[1]), **env}
    return subprocess.run(command, env=settings, stdout=stdout, stderr=subprocess.PIPE, encoding="utf-8", check=False)


pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a Unix shell and /dev/full")
both = pytest.mark.parametrize("kind", ["job", "command"])


@both
@pytest.mark.parametrize(
    "locale", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_what_an_encoding_lacks_is_written_in_ascii(kind: str, locale: dict[str, str]) -> None:
    done = run(kind, "print('8 × 2·2 → 5 µs ≥ 10⁶ é 中'); print('–…', file=sys.stderr)", **locale)
    assert (done.returncode, done.stdout, done.stderr) == (0, "8 x 2*2 -> 5 us >= 106 e \\u4e2d\n", "-...\n")


@both
def test_what_an_encoding_has_stays(kind: str) -> None:
    done = run(kind, r"print('8 × 2·2', '\udcff')", PYTHONIOENCODING="utf-8")
    assert (done.returncode, done.stdout) == (0, "8 × 2·2 \\udcff\n")


@both
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_the_null_device(kind: str, closed: str, tmp_path: Path) -> None:
    code = (
        "print('out', flush=True); print('err', file=sys.stderr, flush=True); sys.stdout.isatty(), sys.stderr.fileno()\n"
        f"import os; made = os.open({str(tmp_path / 'made')!r}, os.O_CREAT | os.O_WRONLY); assert made > 2, made"
    )
    done = run(kind, code, closed)
    assert (done.returncode, done.stdout) == (0, "out\n" if closed == "2>&-" else "")
    assert done.stderr == ("err\n" if closed == ">&-" else "")


@both
def test_a_reader_that_goes_away_ends_it_quietly(kind: str) -> None:
    done = run(kind, MANY, "| head -1")
    assert (done.returncode, done.stdout, done.stderr) == (141, "line 0\n", "")


@both
def test_a_reader_that_is_gone_ends_it_quietly(kind: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run(kind, "print('one')", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@both
def test_another_broken_pipe_is_not_hidden(kind: str) -> None:
    done = run(kind, "raise BrokenPipeError(32, 'Broken pipe')")
    assert done.returncode == 1
    assert "BrokenPipeError: [Errno 32] Broken pipe" in done.stderr


@both
@pytest.mark.parametrize("code", [MANY, "print('one')"])
def test_a_full_disk_is_said(kind: str, code: str) -> None:
    done = run(kind, code, "> /dev/full")
    assert done.returncode == 1
    assert done.stderr == "lbpar: error: standard output or a file cannot be written: No space left on device.\n"
