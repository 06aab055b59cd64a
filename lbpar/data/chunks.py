"""Chunks of HDF5 files beside what a process needs of a sample: HDF5 reads and decompresses whole chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from lbpar.data.box import touched
from lbpar.data.dataset import Dataset
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.subset import Subset
from lbpar.data.uneven import UnevenFiles
from lbpar.layout.runs import Box, box_size
from lbpar.text import human_bytes

LARGE = 1 << 18
"""Elements of a sample that are worth splitting."""
_TIMES = 1.5
"""What is read, by what is needed: worth a word."""


def advice(data: Hdf5Dataset, box: Box, who: str) -> str:
    """What to say of chunks of which ``who`` must read much more than its box of a sample; empty where there is nothing to say."""
    chunks, shape, own = data.chunks, data.sample_shape, box_size(box)
    if chunks is None or len(shape) < 3 or prod(shape) < LARGE or not own:
        return ""
    read, item = touched(chunks, shape, box), data.stored_type(False).itemsize
    cut = [sum(hi - lo for lo, hi in runs) < e for runs, e in zip(box, shape, strict=True)]
    better = smaller(shape, cut)
    if read < _TIMES * own or read < _TIMES * touched(better, shape, box):
        return ""
    return (
        f"{data.name}: of each sample, {who} needs {human_bytes(own * item)}, but must read and decompress {human_bytes(read * item)}, for chunks are "
        f"{_words(chunks)}. Store it without compression, or in smaller chunks: "
        f"`lbpar data convert --chunk {' '.join(map(str, better[1:]))}`"
    )


def smaller(shape: Sequence[int], cut: Sequence[bool]) -> tuple[int, ...]:
    """Chunks for samples that are split in some of their dimensions."""
    return (1, *(-(-e // 8) if c else e for e, c in zip(shape, cut, strict=True)))


def told(dataset: Dataset, boxes: Mapping[str, Box], who: str = "this process") -> list[str]:
    """`advice` of all that is read, given the box of each input; the same is said once."""
    found = (advice(one, box, who) for name, box in boxes.items() for one in _files(dataset.part(name)))
    return list(dict.fromkeys(filter(None, found)))[:1]


def whole_chunks(data: Hdf5Dataset) -> str:
    """What to say of chunks that hold the whole of large samples, which every process that needs a part of them decompresses."""
    chunk, sample = data.chunks, data.sample_shape
    if (
        chunk is None
        or len(sample) < 3
        or prod(sample) < LARGE
        or any(c < s for c, s in zip(chunk[1:], sample[:-1], strict=False))
    ):
        return ""
    cut = _words(smaller(sample, [d == 0 for d in range(len(sample))]))
    return (
        f"chunks hold whole samples: where samples are split over processes, each of them reads and decompresses all of a sample. Store "
        f"it without compression, or in chunks of some planes, as {cut}"
    )


def _files(dataset: Dataset) -> Iterator[Hdf5Dataset]:
    if isinstance(dataset, Subset):
        yield from _files(dataset.whole)
    elif isinstance(dataset, UnevenFiles):
        yield from dataset.files
    elif isinstance(dataset, Hdf5Dataset):
        yield dataset


def _words(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
