"""Run the points of a study: each under mpirun, one after the other, or as tasks of one Slurm job array."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lbpar.config.run_file import AUTO, RunConfig, dump, load_run_file
from lbpar.errors import ConfigError
from lbpar.json_text import dumps, write_text
from lbpar.shipped import template
from lbpar.study.points import Point

FOUND, FAILED, LOG = "point.json", "failed.json", "log.txt"
#: In a study's folder: number of its job array, while that is under way.
JOB = "study.job"
#: Of a study on Slurm, and its own copy.
TEMPLATE = "study.sbatch"
#: Seconds between two questions whether it is.
NAP = 5.0
#: Seconds that a launcher has to end its ranks, when a study is ended.
PATIENCE = 20.0
#: Lines of a failed point's log that are kept as its message.
TAIL = 12


def default_launcher() -> str:
    """How P ranks are started here: the mpirun beside this Python, else that of the path."""
    beside = Path(sys.executable).with_name("mpirun")
    return f"{shlex.quote(str(beside)) if beside.exists() else 'mpirun'} -n {{procs}}"


def command_of(launcher: str, procs: int, module: str, *args: str) -> list[str]:
    """The command line that runs a module on so many ranks.

    Raises
    ------
    ConfigError
        The launcher does not say where the number of processes goes, or is not there.
    """
    if "{procs}" not in launcher:
        raise ConfigError(
            f"--launcher: got '{launcher}', expected {{procs}} in it, as in 'srun --mpi=pmix -n {{procs}}'."
        )
    words = split("--launcher", launcher.replace("{procs}", str(procs)))
    if shutil.which(words[0]) is None:
        raise ConfigError(
            f"--launcher: there is no program {words[0]}; give one, as in --launcher 'srun --mpi=pmix -n {{procs}}'."
        )
    return [*words, sys.executable, "-m", module, *args]


def split(option: str, text: str) -> list[str]:
    """An option's text in words, as a shell has them.

    Raises
    ------
    ConfigError
        A quote has no other end.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{option}: got {text}, expected words as in a shell: {str(error).lower()}.") from None


def prepare(folder: Path, config: RunConfig) -> None:
    """Make a point's folder with its run file.

    Raises
    ------
    ConfigError
        It holds a point of another study, or cannot be made.
    """
    text, file = dump(config), folder / "run.yaml"
    try:
        if file.is_file() and file.read_text(encoding="utf-8") != text:
            raise ConfigError(
                f"--out: {folder} was made from another run file or other options; choose another --out, or delete that folder."
            )
        write_text(file, text, "--out")
    except OSError as error:
        raise ConfigError(f"--out: {folder} cannot be read: {error.strerror}.") from None


def run_logged(command: Sequence[str], folder: Path) -> str | None:
    """Run a command with its output in the folder's log; the end of the log if it failed, else None."""
    with (folder / LOG).open("w", encoding="utf-8") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            code = child.wait()
        except BaseException:
            _end(child)
            raise
    if code == 0:
        return None
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    told = [line for line in lines if line.startswith("lbpar: ")] or [line for line in lines if line.strip()]
    return "\n".join(told[-TAIL:]) or f"ended with status {code} and said nothing"


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a launcher, whose ranks would compute on if it was killed: they would disturb what is measured next."""
    child.terminate()
    try:
        child.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def run_point(folder: Path, procs: int, launcher: str, options: Sequence[str]) -> None:
    """Measure a prepared point; its folder then holds `FOUND` or `FAILED`.

    Where the run file leaves the machine to be measured, that is done once for each number of processes, beside the points. Predictions for a
    machine that is in doubt are marked so.
    """
    (folder / FAILED).unlink(missing_ok=True)
    machine, run, message = folder.parent / f"machine-p{procs}.yaml", folder / "run.yaml", None
    config = load_run_file(run, allow_code=True)
    if config.machine == AUTO:
        if not machine.is_file():
            engine = config.engine  # what the point will compute with
            args = [
                "--engine",
                engine.name,
                "--dtype",
                engine.dtype,
                "--threads",
                str(engine.threads),
                "--transport",
                engine.transport,
            ]
            args += [
                "--quick",
                "--force",
                "--name",
                machine.stem,
                "--out",
                str(machine),
                "--config",
                str(run),
                "--allow-code",
            ]
            message = run_logged(command_of(launcher, procs, "lbpar.calibrate", *args), folder)
        options = [*options, "--machine", str(machine)]
    if message is None:
        message = run_logged(command_of(launcher, procs, "lbpar.study.measure", str(folder), *options), folder)
    if message is None and not (folder / FOUND).is_file():
        message = "ended without a result"
    if message is not None:
        write_text(folder / FAILED, dumps({"error": message}) + "\n", "--out")


def outcome(folder: Path) -> dict[str, Any] | None:
    """What a point's folder holds: figures, or ``error``; None if it has not run, or what is there cannot be read."""
    for name in (FOUND, FAILED):
        if (folder / name).is_file():
            try:
                found = json.loads((folder / name).read_text(encoding="utf-8"))
            except ValueError:
                continue
            if isinstance(found, dict) and found.keys() & {"seconds", "error"}:
                return found
    return None


def run_all(
    out: Path, points: Sequence[Point], launcher: str, options: Sequence[str], say: Callable[[str], None]
) -> None:
    """Measure one point after the other under the launcher."""
    for i, point in enumerate(points, 1):
        say(f"{i}/{len(points)}  {point.folder} ...")
        run_point(out / point.folder, point.procs, launcher, options)
        found = outcome(out / point.folder) or {}
        say(
            f"    {1e3 * found['seconds']:.3g} ms a step" if "seconds" in found else f"    failed: {found.get('error')}"
        )


def submit(
    out: Path, points: Sequence[Point], launcher: str, options: Sequence[str], slurm: str, say: Callable[[str], None]
) -> None:
    """Measure all points as one Slurm job array, and wait for its end. Every task gets the ranks of the largest point.

    Where an array that was submitted before is still under way, because whoever waited for it was ended, it is waited for first.

    Raises
    ------
    ConfigError
        There is no sbatch, or it refuses the options.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "--slurm: there is no sbatch on this machine; run the study on a login node, or without --slurm."
        )
    words_of_slurm = split("--slurm", slurm)
    if (out / JOB).is_file():
        _wait(out, say)
        points = [p for p in points if outcome(out / p.folder) is None]
        if not points:
            return
    script = out / TEMPLATE
    filled = {
        "#SBATCH --ntasks=": str(max(p.procs for p in points)),
        "#SBATCH --array=": f"0-{len(points) - 1}",
        "#SBATCH --output=": shlex.quote(str(out / "slurm-%a.log")),
        "points=": f"({shlex.join(str(out / p.folder) for p in points)})",
        "procs=": f"({' '.join(str(p.procs) for p in points)})",
        "measure=": f"({shlex.join([sys.executable, '-m', 'lbpar.study', 'point'])})",
        "options=": f"({shlex.join(['--launcher', launcher, *options])})",
    }
    lines = template(TEMPLATE).splitlines()
    text = [next((begin + value for begin, value in filled.items() if x.startswith(begin)), x) for x in lines]
    write_text(script, "\n".join(text) + "\n", "--out")
    say(f"{len(points)} points as one job array: {script}")
    done = subprocess.run(
        ["sbatch", "--parsable", *words_of_slurm, str(script)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise ConfigError(f"--slurm: sbatch {slurm}: {done.stderr.strip() or f'ended with status {done.returncode}'}")
    write_text(out / JOB, done.stdout.strip().partition(";")[0] + "\n", "--out")  # a cluster's name may follow
    _wait(out, say)
    for i, point in enumerate(points):
        if outcome(out / point.folder) is None:
            say(f"{point.folder}: no result; {out / f'slurm-{i}.log'} may say why. The same command runs it again.")


def _wait(out: Path, say: Callable[[str], None]) -> None:
    """Until the job array of a study has left Slurm's queue."""
    job = (out / JOB).read_text(encoding="utf-8").strip()
    say(f"waiting for job {job}; if this is ended, the job goes on, and the same command waits for it again")
    while True:
        done = subprocess.run(["squeue", "--noheader", f"--jobs={job}"], capture_output=True, text=True, check=False)
        if not done.stdout.strip() and (done.returncode == 0 or "Invalid job id" in done.stderr):
            break  # a controller that does not answer says something else
        time.sleep(NAP)
    (out / JOB).unlink(missing_ok=True)
