"""Let a virtual environment's `mpirun` start more ranks than cores, and start them as root.

Open MPI refuses both until told otherwise. Typing the options each time is a nuisance on a laptop and in a container,
so `python -m lbpar.mpi_setup` writes them down once, inside the virtual environment and nowhere else:

* `etc/prte-mca-params.conf`: more ranks than cores are welcome (read by every `mpirun` of this environment);
* `bin/activate`: running as root is allowed (Open MPI takes that only from the environment or the command line).

Clusters that bring their own MPI need none of this, and nothing outside the virtual environment is ever touched.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lbpar.errors import ConfigError
from lbpar.streams import standard_streams

MARK = "# lbpar:"
MAPPING = f"""
{MARK} more ranks than cores are welcome
rmaps_default_mapping_policy = :oversubscribe
"""
ACTIVATE = f"""
{MARK} Open MPI as root, as in containers; harmless for everyone else
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
"""


def prepare(prefix: Path) -> list[Path]:
    """Write the settings into the virtual environment at ``prefix``; the files that changed.

    None change the second time, or with MPICH, which needs no settings.

    Raises
    ------
    ConfigError
        ``prefix`` is not a virtual environment.
    """
    if not (prefix / "pyvenv.cfg").is_file():
        raise ConfigError(
            f"mpi_setup: {prefix} is not a virtual environment (it has no pyvenv.cfg), and a system's MPI is not ours to "
            "change. Make one with `python3 -m venv`, or pass mpirun `--allow-run-as-root --oversubscribe`."
        )
    params = prefix / "etc" / "prte-mca-params.conf"
    if not params.is_file():  # no Open MPI in this environment
        return []
    changed = []
    for path, text in ((params, MAPPING), (prefix / "bin" / "activate", ACTIVATE)):
        old = path.read_text(encoding="utf-8")
        if MARK not in old:
            path.write_text(old.rstrip("\n") + "\n" + text, encoding="utf-8")
            changed.append(path)
    return changed


@standard_streams()
def main(argv: list[str] | None = None) -> int:
    """Command line: prepare the environment of the running Python."""
    argparse.ArgumentParser(prog="lbpar mpi_setup", description=__doc__.splitlines()[0]).parse_args(argv)
    try:
        for path in prepare(Path(sys.prefix)):
            print(f"changed {path}")
    except ConfigError as err:
        print(err, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
