"""The run file: everything a training run needs to know.

config = load_run_file("run.yaml", ["train.epochs=3"])
config.train.optimizer.lr
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from lbpar.config.data import DataConfig
from lbpar.config.engine import EngineConfig
from lbpar.config.model import AnyModel, PythonModel
from lbpar.config.overrides import apply_overrides
from lbpar.config.parallel import ParallelConfig
from lbpar.config.paths import as_path
from lbpar.config.report import check
from lbpar.config.run import OutputConfig
from lbpar.config.section import FilePath, Section
from lbpar.config.training import TrainConfig
from lbpar.config.yaml_text import dump_yaml, parse_yaml, read_yaml
from lbpar.errors import ConfigError

AUTO = "auto"
"""Machine of a run file that leaves it to be measured."""


class RunConfig(Section):
    """A run file."""

    model: AnyModel = Field(description="Which network.")
    data: DataConfig = Field(default=DataConfig(), description="Where samples come from.")
    train: TrainConfig = Field(description="How to train.")
    parallel: ParallelConfig = Field(default=ParallelConfig(), description="How processes are arranged.")
    engine: EngineConfig = Field(default=EngineConfig(), description="What computes on each process.")
    machine: FilePath = Field(
        default=AUTO,
        description="`auto` (measured in a few seconds), a machine by name (`lbpar plan --help` lists them), or a machine file.",
    )
    run: OutputConfig = Field(default=OutputConfig(), description="What a run leaves behind.")


def load_run_file(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), allow_code: bool = False
) -> RunConfig:
    """Read and check a run file, or the same content as a dict.

    Parameters
    ----------
    source : str, Path or mapping
        A YAML (or JSON) file, or its content, in which ``model: {python: ...}`` may also be a function itself.
    overrides : sequence of str
        ``field.path=value`` each, as given to ``--set``; see `lbpar.config.overrides.apply_overrides`.
    allow_code : bool
        Whether the source may name a Python function, which then runs whenever the network is built.

    Raises
    ------
    ConfigError
        One message that names the file, and per mistake the field, what was given and what is allowed.
    """
    if isinstance(source, Mapping):
        return make_run(dict(source), overrides, allow_code=allow_code)
    path = as_path(source)
    where = f"{path} with --set" if overrides else str(path)
    return make_run(read_yaml(path, "run file"), overrides, where, path.parent, allow_code)


def parse_run(text: str, overrides: Sequence[str] = (), source: str = "run", allow_code: bool = False) -> RunConfig:
    """Read a run file from text; like `load_run_file` otherwise."""
    return make_run(parse_yaml(text, source), overrides, source, allow_code=allow_code)


def make_run(
    data: Any, overrides: Sequence[str] = (), source: str = "run", folder: Path = Path(), allow_code: bool = False
) -> RunConfig:
    """Check the content of a run file that lies in ``folder``; like `load_run_file` otherwise."""
    config = check(RunConfig, apply_overrides(data, overrides), source)
    if not isinstance(config.model, PythonModel):
        return config
    if isinstance(config.model.python, str) and not allow_code:
        raise ConfigError(
            f"{source}: model.python: got '{config.model.python}', a Python function, which can do whatever you can do; expected "
            "that you allow it. Read the function, then run again with --allow-code (from Python: allow_code=True)."
        )
    return config.model_copy(update={"model": config.model.in_folder(folder)})


def dump(config: RunConfig) -> str:
    """Write a run file with every field, defaults included, as YAML that loads to an equal configuration."""
    return dump_yaml(config.model_dump(mode="json", by_alias=True))
