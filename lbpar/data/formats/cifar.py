"""CIFAR-10 and CIFAR-100 in their binary form, as splits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.data.pieces import Rows
from lbpar.data.writer import Split
from lbpar.errors import DataError

PIXELS = (3, 32, 32)  # planes of red, green, blue
#: Files of the splits, the labels of a record, which of them is the class, and where names are.
FORMS = (
    (
        {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)},
        1,
        0,
        "batches.meta.txt",
        10,
    ),
    ({"train": ("train.bin",), "test": ("test.bin",)}, 2, 1, "fine_label_names.txt", 100),
)


def read_cifar_folder(folder: Path) -> list[Split]:
    """The splits in a folder of CIFAR's binary files; none if there are none.

    Raises
    ------
    DataError
        A file is missing, or not a whole number of records long.
    """
    for splits, labels, which, names, classes in FORMS:
        if not (folder / splits["test"][0]).is_file() or not (folder / splits["train"][0]).is_file():
            continue
        return [_split(folder, name, files, labels, which, names, classes) for name, files in splits.items()]
    return []


def _split(folder: Path, name: str, files: tuple[str, ...], labels: int, which: int, names: str, classes: int) -> Split:
    size, held = labels + int(np.prod(PIXELS)), []
    for file in files:
        path = folder / file
        try:
            raw: NDArray[Any] = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as e:
            raise DataError(f"{path}: cannot be read: {e}.") from None
        if raw.size % size or not raw.size:
            raise DataError(
                f"{path}: it has {raw.size:,} bytes, expected a multiple of {size:,}, the size of a record."
            )
        held.append(raw.reshape(-1, size))
    said = folder / names
    words = tuple(said.read_text(encoding="utf-8").split()) if said.is_file() else ()
    y = np.concatenate([records[:, which] for records in held])
    x = Rows((len(y), *PIXELS[1:], PIXELS[0]), np.uint8, partial(_pictures, held, labels))
    class_names = words if len(words) == classes else ()
    return Split(name, x, y, classes=classes, class_names=class_names, origin=f"{folder}: {', '.join(files)}")


def _pictures(held: list[NDArray[Any]], labels: int, rows: NDArray[np.int64]) -> NDArray[Any]:
    starts = np.cumsum([0, *map(len, held)])
    found = np.empty((len(rows), int(np.prod(PIXELS))), np.uint8)
    for records, first in zip(held, starts, strict=False):
        mine = (rows >= first) & (rows < first + len(records))
        found[mine] = records[rows[mine] - first, labels:]
    return found.reshape(-1, *PIXELS).transpose(0, 2, 3, 1)
