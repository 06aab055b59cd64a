"""Section ``data``: where samples come from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict, model_validator

from lbpar.config.augment import Augment
from lbpar.config.paths import expand
from lbpar.config.section import (
    BelowOne,
    Bytes,
    Count,
    Custom,
    Flag,
    Kinds,
    Names,
    Natural,
    Number,
    Section,
    UpToOne,
    check_text,
)


class Normalise(Section):
    """What is done to each sample by its own statistics, per channel."""


NORMALISATIONS: Kinds[Normalise] = Kinds("name", short=True)


@NORMALISATIONS.add
class ZScore(Normalise):
    """Each sample's mean becomes 0, its deviation 1."""

    name: Literal["zscore"]
    nonzero: Flag = Field(default=False, description="Mean and deviation of elements that are not 0.")


class _Ends(Normalise):
    @model_validator(mode="after")
    def _check(self) -> Any:
        if not self.low < self.high:  # type: ignore[attr-defined]
            raise ValueError(f"got low {self.low:g} and high {self.high:g}, expected low below high")  # type: ignore[attr-defined]
        return self


@NORMALISATIONS.add
class Percentile(_Ends):
    """Each sample is clipped to two of its percentiles, which become 0 and 1."""

    name: Literal["percentile"]
    low: Number = Field(default=0.5, ge=0, le=100, description="The lower percentile.")
    high: Number = Field(default=99.5, ge=0, le=100, description="The upper one.")
    nonzero: Flag = Field(default=False, description="Percentiles of elements that are not 0.")


@NORMALISATIONS.add
class Window(_Ends):
    """Clipped to two values, which become 0 and 1: for values in fixed units, such as those of Hounsfield in CT."""

    name: Literal["window"]
    low: Number = Field(default=-1000.0, description="The lower value.")
    high: Number = Field(default=1000.0, description="The upper one.")


def _source(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return expand(check_text(value))
    files = value.get("files") if isinstance(value, dict) and set(value) == {"files"} else value
    files = (files,) if isinstance(files, str) else files
    if isinstance(files, (list, tuple)) and files and all(isinstance(f, str) for f in files):
        return tuple(expand(check_text(f)) for f in files)
    raise ValueError("expected a file, or {files: ...} with a pattern as vol/*.h5 or a list of files")


Source = Annotated[str | tuple[str, ...], Custom(_source, "path, or `{files: ...}`: a pattern or a list of files")]


class Patches(Section):
    """Training on random patches of the size of the network's input, inference on whole samples by windows that overlap."""

    per_sample: Count = Field(default=1, description="Patches of each sample and epoch.")
    foreground: UpToOne = Field(
        default=0.33, description="Part of the patches that lie around a place whose label is not 0 (labels only)."
    )
    overlap: BelowOne = Field(default=0.5, description="Of windows, in each dimension; Gaussian weights blend them.")


Samples = Annotated[int, Strict(), Field(ge=1, le=10**7)]


class DataConfig(Section):
    """Where samples come from. HDF5 paths are relative to the current directory."""

    train: Source = Field(
        default="synthetic",
        description='HDF5 file, or `synthetic`. Its group `/train` is used if present. `{files: "vol/*.h5"}` is the samples of many files.',
    )
    test: Source | None = Field(
        default=None,
        description="HDF5 file (may be the same; group `/test`), `FILE:/GROUP`, `synthetic`, or `{files: ...}`.",
    )
    x: Names = Field(
        default="x",
        description="Name of the dataset of samples inside the file. Of several inputs `{image: scans}`: those that are not called like the input.",
    )
    y: Names = Field(
        default="y",
        description="Name of the dataset of targets inside the file. Of several targets `{mask: labels}`: those that are not called like the target.",
    )
    samples: Samples = Field(default=1024, description="Number of samples where `synthetic`.")
    shuffle: Flag = Field(default=True, description="A new order in every epoch.")
    drop_last: Flag = Field(
        default=False,
        description="Leave out an incomplete last batch (one of a single sample cannot train a `norm` behind `linear`).",
    )
    normalise: Annotated[Normalise, NORMALISATIONS] | None = Field(
        default=None,
        description="What is done to each sample by its own statistics, instead of the file's mean and std.",
    )
    nan: Literal["refuse", "zero", "skip"] = Field(
        default="refuse",
        description="What happens to samples with values that are not finite: the run ends (`refuse`), these values become 0 (`zero`, samples only), or such samples "
        "are left out of training and evaluation (`skip`; so are those with such targets). Predictions are of every sample: with `skip` they refuse as with `refuse`.",
    )
    check_labels: Flag = Field(
        default=True,
        description="Read all targets once before training, each rank its own part, to refuse those that the loss cannot take; not labels whose range stands in "
        "the file (`label_range`), if that fits. Without it, training begins at once. Such a target ends the run in any case when its batch is read.",
    )
    patches: Patches | None = Field(
        default=None, description="Cut patches out of samples that are larger than the network's input."
    )
    augment: Augment = Field(default=Augment(), description="Random changes of training samples.")
    prefetch: Natural = Field(default=2, description="Batches read ahead in the background; 0 reads when needed.")
    cache: Bytes = Field(
        default=64_000_000, description="Keep a rank's part of a data set in memory if not larger than this."
    )
