"""One picture file, in its own depth: read by Pillow, or by tifffile where Pillow cannot hold what a TIFF file stores.

Where bits, channels or pages would be lost, the file is refused, with what to do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.errors import DataError

Array = NDArray[Any]
CHANNELS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}  # Pillow's modes of one byte per channel
_SAME = {"1": "L", "P": "RGB", "PA": "RGBA"}  # what becomes one of them without loss
_SPREAD = {"L;2": 85, "L;4": 17}  # Pillow makes bytes of fewer bits by these factors
# The number type in a file, by the name that Pillow has for its values.
_DEEP = {
    **dict.fromkeys(("I;16", "I;16B", "I;16L", "I;16N"), np.uint16),
    **dict.fromkeys(("I;16S", "I;16BS", "I;16NS"), np.int16),
    **dict.fromkeys(("I;32S", "I;32BS", "I;32NS"), np.int32),
    **dict.fromkeys(("F;32F", "F;32BF", "F;32NF"), np.float32),
}
_BITS, _DESCRIPTION, _SAMPLE_FORMAT, _SIGNED = 258, 270, 339, 2  # of TIFF


@dataclass(frozen=True)
class PictureFile:
    """What a file holds.

    Attributes
    ----------
    mode : str
        One of `CHANNELS`, or empty for other numbers than bytes.
    shape : tuple of int, (pages, H, W, channels)
    dtype : dtype
    read : callable
        Takes the mode to convert to (empty: none), returns an array.
    """

    path: Path
    mode: str
    shape: tuple[int, int, int, int]
    dtype: np.dtype[Any]
    read: Callable[[str], Array]


def look(path: Path, labels: bool = False) -> PictureFile:
    """Read the header of a file; of ``labels``, values are not looked up in a palette nor spread over a byte.

    Raises
    ------
    DataError
        It cannot be read, or not without loss; or Pillow (tifffile) is missing.
    """
    with _decoding(path):
        return _by_pillow(path, labels) or _by_tifffile(path)


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except ImportError as e:
        raise DataError(f"{path}: reading it needs {e.name}; `pip install lbpar[images]`.") from None
    except Exception as e:  # noqa: BLE001 - of damaged files, the libraries raise whatever happens
        raise DataError(f"{path}: cannot be read as a picture: {' '.join(str(e).split())}.") from None


def _by_pillow(path: Path, labels: bool) -> PictureFile | None:
    """None for a TIFF file that Pillow cannot hold."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(path)
    except UnidentifiedImageError:
        if path.suffix.lower() in (".tif", ".tiff"):
            return None
        raise
    with image:
        codec, raw = _stored_as(image)
        dtype = _number_type(image, codec, raw)
        if dtype is None and image.format == "TIFF":
            return None
        if dtype is None:
            raise DataError(
                f"{path}: Pillow cannot give its values ({image.format} {raw or image.mode}) without loss; save it as grey or RGB "
                "of 8 bits, as TIFF, or as a NumPy file."
            )
        # The second picture of a camera's file is a preview.
        pages, size, own = 1 if image.format == "MPO" else getattr(image, "n_frames", 1), image.size, image.mode
        if pages > 1 and image.format != "TIFF":
            raise DataError(
                f"{path}: it is an animation of {pages} pictures, expected one, or a TIFF file of several pages."
            )
        _check_stack(path, pages, str(getattr(image, "tag_v2", {}).get(_DESCRIPTION, "")))
        mode = "" if labels else "RGBA" if own == "P" and "transparency" in image.info else _SAME.get(own, own)
    mode = mode if mode in CHANNELS else ""
    spread = _SPREAD.get(raw, 1) if labels else 1
    channels = CHANNELS.get(mode) or CHANNELS.get(own, 1)

    def read(wanted: str) -> Array:
        with _decoding(path), Image.open(path) as image:
            out = np.empty((pages, size[1], size[0], CHANNELS.get(wanted, channels)), dtype)
            for n, page in enumerate(out):
                if n:
                    image.seek(n)
                if (image.size, image.mode) != (size, own):
                    raise DataError(
                        f"{path}: page {n + 1} is {image.size} {image.mode}, expected {size} {own} as the first."
                    )
                page[...] = np.asarray(image.convert(wanted) if wanted else image).reshape(page.shape)
                if spread > 1:
                    page //= spread
        return out

    return PictureFile(path, mode, (pages, size[1], size[0], channels), np.dtype(dtype), read)


def _stored_as(image: Any) -> tuple[str, str]:
    """Pillow's decoder and its name for the values in the file, as far as it tells."""
    if not image.tile:
        return "", ""
    codec, _, _, arguments = image.tile[0]
    if codec == "ppm":
        return codec, f"values up to {arguments[1]}"
    return codec, str(arguments[0] if isinstance(arguments, tuple) and arguments else arguments)


def _number_type(image: Any, codec: str, raw: str) -> Any:
    """The number type of what Pillow gives, None where that is not what the file holds."""
    if image.mode in CHANNELS or image.mode in _SAME:
        tags = getattr(image, "tag_v2", {})
        signed, bits = _SIGNED in tags.get(_SAMPLE_FORMAT, ()), max(tags.get(_BITS, (8,)))
        return None if ";16" in raw or bits > 8 or signed or codec == "ppm" else np.uint8
    return _DEEP.get(image.mode) or _DEEP.get(raw)


def _by_tifffile(path: Path) -> PictureFile:
    import tifffile

    with tifffile.TiffFile(path) as tiff:
        first, pages = tiff.pages[0], len(tiff.pages)
        axes, shape, dtype = first.axes, first.shape, np.dtype(first.dtype).newbyteorder("=")
        if axes not in ("YX", "YXS", "SYX"):
            raise DataError(f"{path}: its pages have the dimensions {axes}, expected height, width and channels.")
        _check_stack(path, pages, str(getattr(first, "description", "")))
    height, width = (shape[axes.index(a)] for a in "YX")
    full = (pages, height, width, shape[axes.index("S")] if "S" in axes else 1)

    def read(wanted: str) -> Array:
        with _decoding(path), tifffile.TiffFile(path) as tiff:
            out = np.empty(full, dtype)
            for n, (page, stored) in enumerate(zip(out, tiff.pages, strict=True)):
                if (stored.shape, stored.dtype) != (shape, first.dtype):
                    raise DataError(
                        f"{path}: page {n + 1} is {stored.shape} {stored.dtype}, expected {shape} {dtype} as the first."
                    )
                one = stored.asarray()
                page[...] = (np.moveaxis(one, 0, -1) if axes == "SYX" else one).reshape(page.shape)
        return out

    return PictureFile(path, "", full, dtype, read)


def _check_stack(path: Path, pages: int, description: str) -> None:
    """Refuse pages that are channels, as ImageJ and OME-TIFF say, rather than depth."""
    said = re.search(r'^channels=(\d+)|\bSizeC="(\d+)"', description, re.MULTILINE)
    if pages > 1 and said and int(said[1] or said[2]) > 1:
        raise DataError(
            f"{path}: its {pages} pages hold {said[1] or said[2]} channels; save it as a NumPy file, channels last."
        )
