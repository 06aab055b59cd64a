"""Did an MPI launcher start this process? Read from the environment; nothing here needs MPI."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lbpar.errors import ConfigError

ALONE = "LBPAR_ALONE"

# Number of ranks and own rank, most telling first: what an MPI launcher says about this very process comes before what
# Slurm says about the step that may have started that launcher. SLURM_NTASKS is not here: a batch script sees it too,
# and a python started there without srun is rightly alone. SLURM_STEP_NUM_TASKS exists only in steps of srun.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)
# These tell a rank, but no number of ranks.
RANKS_ONLY = ("PMIX_RANK", "SLURM_PROCID")


def launched_ranks(env: Mapping[str, str] | None = None) -> tuple[int, int, str] | None:
    """What the launcher says: (number of ranks at least, own rank, variable), or None without a launcher.

    Parameters
    ----------
    env : mapping, optional
        Default ``os.environ``.
    """
    env = os.environ if env is None else env
    if truth(env, ALONE):
        return None
    for size_name, rank_name in _LAUNCHERS:
        if size_name in env and rank_name in env:
            size, rank = _int(env, size_name), _int(env, rank_name)
            if size is not None and rank is not None and 0 <= rank < size:
                return size, rank, size_name
    for name in RANKS_ONLY:
        rank = _int(env, name)
        # Slurm sets SLURM_PROCID=0 in a batch script too; a higher rank can only come from a launcher.
        if rank is not None and (rank > 0 or (name == "PMIX_RANK" and "PMIX_NAMESPACE" in env)):
            return rank + 1, rank, name
    return None


def truth(env: Mapping[str, str], name: str) -> bool:
    """Whether a variable says yes; without it, no."""
    text = env.get(name, "0").strip().lower()
    if text in ("", "0", "no", "false", "off"):
        return False
    if text in ("1", "yes", "true", "on"):
        return True
    raise ConfigError(f"environment: {name}={env[name]!r}, expected 0 or 1.")


def _int(env: Mapping[str, str], name: str) -> int | None:
    try:
        return int(env[name])
    except (KeyError, ValueError):
        return None
