"""A real Slurm of two nodes on this machine: controller, two node daemons with host names of their own, munge.

Needs root, Linux' unshare, and Debian's packages slurm-wlm, munge and (for Open MPI under srun) libpmix2.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "unshare", "runuser")
#: Everything that a cluster asks for here takes seconds; a loaded machine may need long.
PATIENCE = 300.0


def missing() -> str | None:
    """Why there can be no Slurm here; None if there can."""
    if os.geteuid() != 0:
        return "a Slurm of our own needs root"
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"no {', '.join(lacking)} on this machine"
    allowed = subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode == 0
    return None if allowed else "nodes with host names of their own are not allowed here"


def free_ports(n: int) -> list[int]:
    """So many free ports."""
    sockets = [socket.socket() for _ in range(n)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def wait_for(
    condition: Callable[[], object], what: str, seen: Callable[[], str] = str, seconds: float = PATIENCE
) -> None:
    """Look until a condition holds; if it does not, ``seen`` says what there was instead."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {seconds:g} s. {seen()}")
        time.sleep(0.2)


class Cluster:
    """Two nodes, n1 and n2, of four cores each (more than the machine has: nothing is bound), and four GPUs that nobody looks for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        for name in ("state", "spool.n1", "spool.n2", "tmp.n1", "tmp.n2", "log", "run"):
            (folder / name).mkdir(parents=True)
        host = platform.node()
        control, *nodes = free_ports(3)
        lines = {
            "ClusterName": "two",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": "cred_expire=5",  # a requeued job starts again when its old credential has expired: after 2 min else
            "StateSaveLocation": folder / "state",
            "SlurmdSpoolDir": folder / "spool.%n",
            "TmpFS": folder / "tmp.%n",
            "SlurmctldPidFile": folder / "run/slurmctld.pid",
            "SlurmdPidFile": folder / "run/slurmd.%n.pid",
            "SlurmctldLogFile": folder / "log/slurmctld.log",
            "SlurmdLogFile": folder / "log/slurmd.%n.log",
            "SlurmctldPort": control,
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU",
            "SlurmdParameters": "config_overrides",
            "GresTypes": "gpu",
            "SchedulerParameters": "batch_sched_delay=0,sched_interval=1",
            "KillWait": 5,
            "ReturnToService": 2,
        }
        text = [f"{name}={value}" for name, value in lines.items()]
        for name, port in zip(("n1", "n2"), nodes, strict=True):
            text.append(
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 CoresPerSocket=4 "
                "RealMemory=2000 Gres=gpu:4"
            )
        text.append("PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=60 State=UP")
        self.conf.write_text("\n".join(text) + "\n")
        for gpu in range(4):
            (folder / f"gpu{gpu}").touch()  # Slurm wants files
        (folder / "gres.conf").write_text(f"AutoDetect=off\nNodeName=n[1-2] Name=gpu File={folder}/gpu[0-3]\n")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "PMI", "PRTE_"))}
        self.env["SLURM_CONF"] = str(self.conf)
        self.env["HYDRA_IFACE"] = "lo"  # no name service knows n1 and n2, which MPICH's mpiexec looks up otherwise
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons; returns when both nodes are idle."""
        subprocess.run(["install", "-d", "-o", "munge", "-g", "munge", "-m", "0755", "/run/munge"], check=True)
        if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode:
            self._spawn("runuser", "-u", "munge", "--", "munged", "--foreground")
            wait_for(lambda: not subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode, "munge")
        self._spawn("slurmctld", "-D", "-c")
        for node in ("n1", "n2"):
            self._spawn("unshare", "--uts", "sh", "-c", f"hostname {node}; exec slurmd -D -N {node}")
        wait_for(lambda: self.states() == ["idle", "idle"], "two idle nodes")

    def stop(self) -> None:
        """Cancel all jobs and end the daemons."""
        subprocess.run(["scancel", "--user=root"], env=self.env, check=False)
        wait_for(lambda: not self.run("squeue", "-h").strip(), "end of all jobs")
        for process in reversed(self._started):
            process.terminate()
        for process in self._started:
            process.wait(30)

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Standard output of a command of Slurm."""
        done = subprocess.run(command, env=self.env, cwd=cwd, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def states(self) -> list[str]:
        """States of the nodes."""
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%T"], env=self.env, capture_output=True, text=True, check=False
        )
        return done.stdout.split()

    def fact(self, job: str, name: str) -> str:
        """What Slurm says of a job, as PENDING or COMPLETED for its JobState."""
        words = dict(w.split("=", 1) for w in self.run("scontrol", "show", "job", "-o", job).split() if "=" in w)
        return words[name]

    def _spawn(self, *command: str) -> None:
        log = (self.folder / "log" / f"{len(self._started)}-{command[0]}.txt").open("wb")
        with log:
            self._started.append(
                subprocess.Popen(command, env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            )
