"""Section ``data.augment``: random changes of training samples."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from lbpar.config.section import Natural, NonNegative, Number, Positive, Section, UpToOne

Dims = tuple[Literal["D", "H", "W"], ...]


class Change(Section):
    """A change that a part of the samples gets."""

    probability: UpToOne = Field(default=1.0, description="Of a sample to be changed so.")


class Drawn(Change):
    """A change by a number that is drawn for each sample."""

    low: Number = Field(default=0.0, description="Smallest number.")
    high: Number = Field(default=0.0, description="Largest one.")
    ratio: ClassVar[bool] = False
    """Whether the number is drawn evenly on a logarithmic scale."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"got low {self.low:g} and high {self.high:g}, expected low no larger than high")
        return self


class Rotate(Drawn):
    """Turn about the middle, in a plane of pixels; volumes about each of some axes, one after the other."""

    low: Number = Field(default=-15.0, description="Smallest angle, in degrees.")
    high: Number = Field(default=15.0, description="Largest one.")
    axes: Dims = Field(default=("D", "H", "W"), description="Of volumes, the axes to turn about.")


class Scale(Drawn):
    """Enlarge about the middle."""

    low: Positive = Field(default=0.8, description="Smallest factor; below 1 shrinks.")
    high: Positive = Field(default=1.25, description="Largest one.")
    ratio = True


class Elastic(Change):
    """Bend smoothly: random displacements of the nodes of a coarse grid, joined by cubic B-splines."""

    spacing: Number = Field(default=16.0, ge=2, description="Voxels from node to node.")
    displacement: NonNegative = Field(
        default=4.0, description="Most voxels by which a node moves, at most 0.4 of the spacing, so that nothing folds."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.displacement > 0.4 * self.spacing:
            raise ValueError(
                f"got the displacement {self.displacement:g}, expected at most 0.4 of the spacing {self.spacing:g}: space would fold"
            )
        return self


class LowResolution(Drawn):
    """Keep every so-manyth pixel in each dimension, and interpolate linearly between them."""

    low: Number = Field(default=1.0, ge=1, description="Smallest factor.")
    high: Number = Field(default=2.0, ge=1, description="Largest one.")
    ratio = True


class Blur(Drawn):
    """Gaussian blur."""

    low: Number = Field(default=0.5, ge=0, le=100, description="Smallest deviation of the Gaussian, in pixels.")
    high: Number = Field(default=1.0, ge=0, le=100, description="Largest one.")


class Contrast(Drawn):
    """Move values from, or towards, a centre."""

    low: Positive = Field(default=0.75, description="Smallest factor.")
    high: Positive = Field(default=1.25, description="Largest one.")
    centre: Number = Field(default=0.0, description="The value that stays, after normalisation.")
    ratio = True


class Brightness(Drawn):
    """Add a number."""

    low: Number = Field(default=-0.1, description="Smallest one, after normalisation.")
    high: Number = Field(default=0.1, description="Largest one.")


class Gamma(Drawn):
    """Bend the scale of values: a power, between two values that stay. Those beyond stay as well."""

    low: Positive = Field(default=0.7, description="Smallest power.")
    high: Positive = Field(default=1.5, description="Largest one.")
    span: tuple[Number, Number] = Field(
        default=(0.0, 1.0), description="The two values, after normalisation, as [-2, 3] for `zscore`."
    )
    ratio = True

    @model_validator(mode="after")
    def _check_span(self) -> Self:
        if not self.span[0] < self.span[1]:
            raise ValueError(f"got the span {list(self.span)}, expected two numbers, the first below the second")
        return self


class Noise(Drawn):
    """Add Gaussian noise."""

    low: NonNegative = Field(default=0.0, description="Smallest deviation, after normalisation.")
    high: NonNegative = Field(default=0.1, description="Largest one.")


class Augment(Section):
    """Random changes of training samples, in this order; they depend on the seed, epoch and sample only, not on the grid."""

    rotate: Rotate | None = Field(default=None, description="Turn.")
    scale: Scale | None = Field(default=None, description="Enlarge or shrink.")
    elastic: Elastic | None = Field(default=None, description="Bend.")
    flip: Dims = Field(default=(), description="Dimensions that are mirrored with probability ½.")
    crop_pad: Natural = Field(default=0, description="Shift by up to so many pixels in each spatial dimension.")
    border: Literal["zero", "nearest"] = Field(
        default="zero", description="What comes in from outside of a sample: 0, also as a label, or what lies nearest."
    )
    low_resolution: LowResolution | None = Field(default=None, description="Coarser pixels.")
    blur: Blur | None = Field(default=None, description="Blur.")
    contrast: Contrast | None = Field(default=None, description="Stretch values.")
    brightness: Brightness | None = Field(default=None, description="Shift values.")
    gamma: Gamma | None = Field(default=None, description="Bend values.")
    noise: Noise | None = Field(default=None, description="Add noise.")
