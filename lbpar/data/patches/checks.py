"""Of which samples patches can be cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from lbpar.data.dataset import Dataset
from lbpar.errors import DataError


def check_patches(
    data: Dataset, inputs: Mapping[str, Sequence[int]], outputs: Mapping[str, tuple[str, Sequence[int], bool]]
) -> None:
    """Refuse samples of which a network's inputs cannot be patches, or without a target per pixel or voxel.

    Parameters
    ----------
    data : Dataset
        Of several inputs, with a part for each.
    inputs : mapping
        Of each input, its shape.
    outputs : mapping
        Of each output its target, its shape, and whether the target is a label.
    """
    patch, *others = dict.fromkeys(tuple(shape[:-1]) for shape in inputs.values())
    if others or not patch:
        got = ", ".join(f"{name} {tuple(shape)}" for name, shape in inputs.items())
        raise DataError(
            f"data.patches: the network has the inputs {got}, expected pixels or voxels of one size, as patches of all lie at one place."
        )
    for output, (_, shape, _) in outputs.items():
        if tuple(shape[:-1]) != patch:
            which = f" (output {output!r})" if len(outputs) > 1 else ""
            raise DataError(
                f"data.patches: the network makes {tuple(shape)} of {(*patch, *next(iter(inputs.values()))[-1:])}{which}, expected an output per pixel or voxel."
            )
    for name, wanted in inputs.items():
        _check_input(data.part(name), wanted, f" of {name!r}" if len(inputs) > 1 else "")
    check_one_size(data, inputs)
    for target, shape, labels in outputs.values():
        one = data.part(target)
        space = one.sample_shape[:-1]
        expected = space if labels else (*space, shape[-1])
        if one.target_shape != expected:
            which = f"'{target.partition('/')[2]}' has" if "/" in target else "targets have"
            raise DataError(
                f"{one.name}: {which} the shape {one.target_shape} per sample, expected {expected} for patches."
            )


def _check_input(data: Dataset, wanted: Sequence[int], which: str) -> None:
    """Refuse samples that are smaller than a patch, or of other channels."""
    space, patch = data.sample_shape[:-1], tuple(wanted[:-1])
    fits = len(space) == len(patch) and data.sample_shape[-1] == wanted[-1]
    small = next((n for n in range(len(data)) if any(e < p for e, p in zip(data.extents(n), patch, strict=False))), 0)
    if not fits or any(e < p for e, p in zip(data.extents(small), patch, strict=False)):
        got = f"sample {small}{which} has" if fits else f"samples{which} have"
        raise DataError(
            f"{data.name}: {got} the shape {(*data.extents(small), data.sample_shape[-1])}, expected at least {tuple(wanted)}, the network's input, "
            "of which patches are cut; pad them (`lbpar data convert --pad`), or take smaller patches."
        )


def check_one_size(data: Dataset, inputs: Iterable[str]) -> None:
    """Refuse samples whose inputs differ in size: their patches lie at one place."""
    parts = {n: data.part(n) for n in inputs}
    for n in range(len(data)):
        sizes = {name: one.extents(n) for name, one in parts.items()}
        if len({*sizes.values()}) > 1:
            got = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise DataError(
                f"{data.name}: sample {n} has inputs of the sizes {got}, expected a single one: patches of all lie at one place."
            )


def check_size(data: Dataset, wanted: Sequence[int], patches: bool) -> None:
    """Refuse samples to be predicted of another shape than a network's input, or, where it sees patches, smaller ones."""
    sizes = sorted({data.extents(n) for n in range(len(data))}) if patches else []
    got = (*(np.min(sizes, axis=0).tolist() if sizes else data.sample_shape[:-1]), data.sample_shape[-1])
    alike = len(got) == len(wanted)
    fits = all(a >= b for a, b in zip(got[:-1], wanted[:-1], strict=False)) if patches else got[:-1] == wanted[:-1]
    if alike and fits and got[-1] == wanted[-1]:
        return
    if alike and got[-1] != wanted[-1]:
        raise DataError(
            f"predict: {data.name} has samples of {got[-1]} channels, expected {wanted[-1]}, as the network was trained with (arrays "
            "have their channels last)."
        )
    least = f"at least {wanted}, of which patches are cut" if patches else f"{wanted}, channels last"
    single = (len(data), *got) == tuple(wanted)
    hint = "; one sample needs an axis of samples in front, x[None]" if single else ""
    raise DataError(f"predict: {data.name} has samples of shape {got}, expected {least}{hint}.")
