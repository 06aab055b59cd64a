"""Picture files of one size and depth as samples, or as labels per pixel."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.data.formats.picture_file import CHANNELS, look
from lbpar.data.pieces import Rows
from lbpar.errors import DataError

SUFFIXES = (
    *(".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".gif", ".pbm", ".pgm", ".ppm", ".pnm"),
    *(".tif", ".tiff", ".tga", ".webp"),
)


def open_pictures(files: list[Path], labels: bool = False) -> tuple[Rows, str]:
    """Pictures as samples that are read when they are asked for, and a few words about them.

    Parameters
    ----------
    files : list of Path
    labels : bool
        The pixels are numbers of classes; there is no channel dimension.

    Returns
    -------
    Rows, (files, [pages], H, W, channels), of labels (files, [pages], H, W)
        In the type of the files. Grey pictures among coloured ones become coloured, opaque ones among transparent ones get
        an alpha channel.

    Raises
    ------
    DataError
        What `look` refuses; a file of another size or depth than the first; labels that are no whole numbers.
    """
    found = [look(f, labels) for f in files]
    first, modes = found[0], Counter(f.mode for f in found)
    colour, alpha = (any(letter in m for m in modes) for letter in "RA")
    mode = first.mode and ("RGB" if colour else "L") + "A" * alpha
    channels = CHANNELS.get(mode, first.shape[3])
    for f in found:
        own = channels if mode and f.mode else f.shape[3]
        if (bool(f.mode), *f.shape[:3], own, f.dtype) != (bool(mode), *first.shape[:3], channels, first.dtype):
            raise DataError(
                f"{f.path}: got {_words(f.shape)} {f.dtype}, expected {_words(first.shape)} {first.dtype} as {files[0].name}; "
                "make all pictures of one size and depth."
            )
    if labels and (channels > 1 or first.dtype.kind not in "iu"):
        raise DataError(
            f"{files[0]}: got {_words(first.shape)} {first.dtype}, expected one whole number per pixel: its class."
        )
    shape = (*first.shape[first.shape[0] == 1 : 3], *(() if labels else (channels,)))

    def read(rows: NDArray[np.int64]) -> NDArray[Any]:
        out = np.empty((len(rows), *shape), first.dtype)
        for one, i in zip(out, rows, strict=True):
            one[...] = found[i].read(mode).reshape(shape)
        return out

    mixed = f" ({', '.join(f'{n} {m}' for m, n in modes.items())})" if len(modes) > 1 else ""
    pages = f" of {first.shape[0]} pages each, taken for depth" if first.shape[0] > 1 else ""
    return Rows((len(files), *shape), first.dtype, read), f"{len(files)} pictures{pages}, {mode or first.dtype}{mixed}"


def _words(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape[shape[0] == 1 :]))
