"""The IDX format of the MNIST family: a big-endian header, then the array, maybe gzip-compressed.

References
----------
Y. LeCun, C. Cortes and C. Burges, "The MNIST database of handwritten digits", section "File formats".
"""

from __future__ import annotations

import gzip
import zlib
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.errors import DataError

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | Path) -> NDArray[Any]:
    """Read an IDX file, gzip-compressed or not.

    Returns
    -------
    array of the shape in the header, native byte order

    Raises
    ------
    DataError
        Missing or truncated file, or no IDX file.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file.") from None
    except EOFError:
        raise DataError(f"{path}: it is truncated; fetch it again.") from None
    except (OSError, zlib.error) as e:
        raise DataError(f"{path}: cannot be read: {e}.") from None
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES or not content[3]:
        raise DataError(
            f"{path}: not an IDX file: it starts with {content[:4].hex(' ')}, expected 00 00, type, dimensions."
        )
    dtype, ndim = np.dtype(_TYPES[content[2]]), content[3]
    start = 4 + 4 * ndim
    shape = tuple(int(e) for e in np.frombuffer(content[4:start], ">u4")) if len(content) >= start else ()
    expected = start + prod(shape) * dtype.itemsize
    if len(content) != expected or len(shape) != ndim:
        raise DataError(
            f"{path}: it holds {len(content)} bytes, expected {expected} for an array {shape}; fetch it again."
        )
    return np.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))
