"""What ranks find out about their shares of the samples and tell each other: statistics, and which samples cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lbpar.config.data import Patches
from lbpar.data.dataset import Dataset
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.named import NamedDataset, each
from lbpar.data.patches.cut import Patched, own_places
from lbpar.data.subset import Subset
from lbpar.data.targets import own_range
from lbpar.errors import DataError
from lbpar.transport.base import Transport
from lbpar.transport.together import together

SHOWN = 10
"""Numbers of samples that are told."""
_log = logging.getLogger("lbpar")


def explored(dataset: Dataset, transport: Transport, skip: bool = False) -> Dataset:
    """A dataset of which each rank has read its share once and told the others what it has found. Collective over all ranks.

    Parameters
    ----------
    dataset : Dataset
        Of a file, it learns the statistics of all its samples, where its normalisation asks for them.
    transport : Transport
    skip : bool
        Leave out samples with values that are not finite, in any of several inputs or in targets of real numbers.

    Returns
    -------
    Dataset
        The same, or a `Subset` of it (of several inputs, subsets of each).

    Raises
    ------
    DataError
        No sample is left; on all ranks alike.
    """
    inputs, targets = each(dataset), dataset.targets if skip and isinstance(dataset, NamedDataset) else {}
    with together(transport):
        own = own_range(dataset, (transport.rank, transport.size))
        findings = {name: one.own_findings(own, skip) for name, one in inputs.items()}
        files = (one for one in targets.values() if isinstance(one, Hdf5Dataset))
        spoilt = set[int]().union(*(one.own_spoilt(own, targets=True) for one in files))
    all_spoilt: set[int] = set()
    for found, bad in transport.allgather_obj((findings, spoilt)):
        all_spoilt |= bad
        for name, (statistics, some) in found.items():
            all_spoilt |= some
            inputs[name].learn(statistics)
    return without(dataset, all_spoilt, transport.rank == 0) if all_spoilt else dataset


def without(dataset: Dataset, spoilt: set[int], tell: bool = True) -> Dataset:
    """A dataset less some samples; with ``tell``, a warning says which."""
    rest = [i for i in range(len(dataset)) if i not in spoilt]
    if not rest:
        raise DataError(
            f"{dataset.name}: all of its {len(dataset):,} samples have values that are not finite, so that data.nan: skip leaves none. "
            "Mend them, or train with data.nan: zero, which makes these values 0."
        )
    if tell:
        _log.warning(
            "%s: %d of %d samples have values that are not finite and are left out: %s.",
            dataset.name,
            len(spoilt),
            len(dataset),
            ", ".join(map(str, sorted(spoilt)[:SHOWN])) + (", ..." if len(spoilt) > SHOWN else ""),
        )
    return dataset.map(lambda _, one: Subset(one, rest))


def patched(
    volumes: Dataset,
    patch: Sequence[int],
    options: Patches,
    seed: int,
    transport: Transport | None = None,
    labels: Dataset | None = None,
    ignore: int | None = None,
) -> Dataset:
    """Patches of samples, of several inputs and targets at the same places; with a transport, around places whose label is not 0 as well, and collective
    over all ranks.

    ``labels``: whose, if not those of the samples themselves; ``ignore``: one that counts as little as 0.
    """
    places: dict[int, Any] = {}
    labels = volumes if labels is None else labels
    if transport is not None and options.foreground and labels.classes is not None:
        with together(transport):
            own = own_places(labels, (transport.rank, transport.size), ignore)
        for found in transport.allgather_obj(own):
            places |= found
    return volumes.map(lambda _, one: Patched(one, patch, options, places, seed))


def left_out(dataset: Dataset | None) -> list[int]:
    """Numbers of the samples that a dataset is without."""
    one = next(iter(each(dataset).values()), None)
    if not isinstance(one, Subset):
        return []
    return sorted({*range(len(one.whole))} - {*one.numbers.tolist()})
