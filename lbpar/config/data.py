"""Section ``data``: where samples come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from lbpar.config.section import Bytes, FilePath, Flag, Natural, Section, Text


class Augment(Section):
    """Random changes of training samples; they depend on the seed, epoch and sample only, not on the grid."""

    flip: tuple[Literal["D", "H", "W"], ...] = Field(
        default=(), description="Dimensions that are mirrored with probability ½."
    )
    crop_pad: Natural = Field(
        default=0, description="Shift by up to so many pixels in each spatial dimension, zeros outside."
    )


Samples = Annotated[int, Strict(), Field(ge=1, le=10**7)]


class DataConfig(Section):
    """Where samples come from. HDF5 paths are relative to the current directory."""

    train: FilePath = Field(
        default="synthetic", description="HDF5 file, or `synthetic`. Its group `/train` is used if present."
    )
    test: FilePath | None = Field(
        default=None, description="HDF5 file (may be the same; group `/test`), `FILE:/GROUP`, or `synthetic`."
    )
    x: Text = Field(default="x", description="Name of the dataset of samples inside the file.")
    y: Text = Field(default="y", description="Name of the dataset of targets inside the file.")
    samples: Samples = Field(default=1024, description="Number of samples where `synthetic`.")
    shuffle: Flag = Field(default=True, description="A new order in every epoch.")
    drop_last: Flag = Field(
        default=False,
        description="Leave out an incomplete last batch (one of a single sample cannot train a `norm` behind `linear`).",
    )
    augment: Augment = Field(default=Augment(), description="Random changes of training samples.")
    prefetch: Natural = Field(default=2, description="Batches read ahead in the background; 0 reads when needed.")
    cache: Bytes = Field(
        default=64_000_000, description="Keep a rank's part of a data set in memory if not larger than this."
    )
