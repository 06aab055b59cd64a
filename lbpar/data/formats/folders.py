"""Folders of pictures or volumes: a folder per class, or ``images`` and ``masks``, in one folder per split or without splits."""

from __future__ import annotations

import os
import re
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lbpar.data.formats.pictures import SUFFIXES, open_pictures
from lbpar.data.formats.volume_file import is_volume, stem
from lbpar.data.formats.volumes import Fit, open_volumes
from lbpar.data.pieces import Rows
from lbpar.data.writer import Split
from lbpar.errors import DataError

# Names of splits, of arrays and files too.
_WORDS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "dev"), "test": ("test", "testing")}
SPLITS = {word: split for split, words in _WORDS.items() for word in words}
_IMAGES = {"images", "image", "imgs", "img"}
_MASKS = {"masks", "mask", "labels", "label", "annotations", "segmentations", "segmentation", "labelmaps", "gt"}
_NOT_DATA = {
    "thumbs.db",
    "desktop.ini",
    "__macosx",
    "@eadir",
    "$recycle.bin",
    "system volume information",
    "lost+found",
}
_OF_A_MASK = re.compile(r"[-_. ](mask|seg|segmentation|label|labels|gt)$", re.IGNORECASE)


def read_folder(folder: Path, split: str, fit: Fit) -> list[Split]:
    """The splits in a folder, train first; none if it holds no folders.

    Parameters
    ----------
    folder : Path
    split : str
        Name of the only split where there are no folders per split.
    fit : Fit
        Of volumes.

    Raises
    ------
    DataError
        Anything about the folders or pictures is doubtful.
    """
    inner = _folders(folder)
    named = {f: SPLITS[f.name.lower()] for f in inner if f.name.lower() in SPLITS}
    if not inner or (not named and all(not _folders(f) and not any(map(_is_picture, _visible(f))) for f in inner)):
        return []
    if not named:
        return _group(folder, split, None, fit)
    if len(named) < len(inner):
        others = ", ".join(f.name for f in inner if f not in named)
        raise DataError(
            f"{folder}: it has folders of splits ({', '.join(f.name for f in named)}) and others ({others}); are those classes? "
            "Move one kind elsewhere."
        )
    if len(set(named.values())) < len(named):
        raise DataError(
            f"{folder}: two of the folders {', '.join(f.name for f in named)} mean the same split; merge them."
        )

    def read(fit: Fit) -> list[Split]:
        found: list[Split] = []
        for f, name in sorted(named.items(), key=lambda item: list(_WORDS).index(item[1])):
            found += _group(f, name, found[0] if found else None, fit)
        return found

    found = read(fit)
    if not all(s.beside for s in found):
        return found
    sizes = np.array([s.x.shape[1:4] for s in found])
    if fit.pad is not None and not fit.each and (sizes != sizes[0]).any():  # volumes of all splits come to one size
        found = read(replace(fit, inside=sizes.max(axis=0).tolist()))
    dtypes = [np.result_type(*some) for some in zip(*((s.x.dtype, s.y.dtype) for s in found), strict=True)]
    return [replace(s, x=_as_type(s.x, dtypes[0]), y=_as_type(s.y, dtypes[1])) for s in found]


def _as_type(values: Any, dtype: np.dtype[Any]) -> Any:
    """Volumes or label maps in the type that holds those of all splits, as those of one split are."""
    if values.dtype == dtype or not isinstance(values, Rows):
        return values
    return Rows(values.shape, dtype, lambda rows: values[int(rows[0]) : int(rows[-1]) + 1].astype(dtype))


def _group(folder: Path, split: str, first: Split | None, fit: Fit) -> list[Split]:
    """One split, or one of each of its volumes; ``first`` is the first of the same folder, which says what the classes are."""
    inner = _folders(folder)
    left_out = _left_out(folder)
    loose = [f for f in _visible(folder) if _is_picture(f)]
    if loose:
        raise DataError(
            f"{folder}: pictures lie beside folders or without any ({loose[0].name}, {len(loose)} in all), so their class is not "
            "known. Put each into the folder of its class, or remove them."
        )
    images, masks = ([f for f in inner if f.name.lower() in names] for names in (_IMAGES, _MASKS))
    if images or any(f.name.lower().endswith("s") for f in masks):  # a class may well be called "mask"
        if len(images) != 1 or len(masks) != 1 or len(inner) != 2:
            raise DataError(
                f"{folder}: got the folders {', '.join(f.name for f in inner)}, expected a folder `images` and one `masks` with a "
                "picture of the same name for each, or a folder per class."
            )
        return _masked(images[0], masks[0], split, left_out, fit)
    return [_classes(inner, folder, split, first, left_out, fit)]


def _masked(images: Path, masks: Path, split: str, left_out: list[str], fit: Fit) -> list[Split]:
    """Pictures or volumes with a class per pixel."""
    pictures, labels = _by_stem(images, left_out), _by_stem(masks, left_out)
    if labels.keys() != pictures.keys():
        labels = {_OF_A_MASK.sub("", name) if name not in pictures else name: f for name, f in labels.items()}
    alone = sorted(pictures.keys() ^ labels.keys())
    if alone:
        raise DataError(
            f"{images} and {masks}: expected a mask of the same name for every picture, but '{alone[0]}' is in one of them only "
            f"({len(alone)} such in all)."
        )
    lossy = next((f for f in labels.values() if f.suffix.lower() in (".jpg", ".jpeg", ".jpe", ".jfif")), None)
    if lossy:
        raise DataError(
            f"{lossy}: JPEG changes the values of pixels, which are numbers of classes; save masks as PNG or TIFF."
        )
    return _paired([(f, labels[n]) for n, f in pictures.items()], f"{images} and {masks}", split, left_out, fit)


def _paired(pairs: list[tuple[Path, Path]], where: str, split: str, left_out: list[str], fit: Fit) -> list[Split]:
    """Pictures or volumes, each with its mask."""
    found: list[Split] = []
    for some in [[pair] for pair in pairs] if fit.each else [pairs]:
        x, y, words, beside = _open([f for f, _ in some], [m for _, m in some], fit)
        named = f"{some[0][0]} and {some[0][1]}" if fit.each else where
        origin = f"{named}: {words}, and a class per {'voxel' if beside else 'pixel'}"
        found.append(Split(split, x, y, origin=origin, remarks=[] if found else _told(left_out), beside=beside))
    return found


def read_files(images: list[Path], masks: list[Path], split: str, fit: Fit) -> list[Split]:
    """The same of files that are named one by one: the n-th mask is that of the n-th picture or volume.

    Raises
    ------
    DataError
        They are no pictures or volumes, not as many, or their names do not go together: what is different in the names of one list must be
        the same in the other, as in ``a_t1.nii, b_t1.nii`` and ``a_seg.nii, b_seg.nii``.
    """
    other = next((f for f in [*images, *masks] if not _is_picture(f)), None)
    if other is not None:
        raise DataError(
            f"{other}: expected a volume (.nii[.gz], .npy, .raw) or a picture ({', '.join(s[1:] for s in SUFFIXES)})."
        )
    if len(masks) != len(images):
        raise DataError(f"convert: got {len(images)} images and {len(masks)} labels, expected as many of both.")
    parts = zip(*(_different(files) for files in (images, masks)), strict=True)
    odd = next((i for i, (a, b) in enumerate(parts) if a != b), None)
    if odd is not None:
        raise DataError(
            f"convert: got {images[odd]} with the labels {masks[odd]}, expected names that go together, as in a_t1.nii with a_seg.nii. Name "
            "both in the same order."
        )
    return _paired(list(zip(images, masks, strict=True)), f"{images[0]} and {masks[0]}, ...", split, [], fit)


def _different(files: list[Path]) -> list[str]:
    """What of each path is not common to all of them; it ends where a word does."""
    names = [unicodedata.normalize("NFC", str(f.absolute().parent / stem(f))) for f in files]
    begin, end = os.path.commonprefix(names), os.path.commonprefix([n[::-1] for n in names])[::-1]
    begin, end = re.sub(r"[^-_. /]+$", "", begin), re.sub(r"^[^-_. /]+", "", end)
    return [n[len(begin) : len(n) - len(end)] for n in names]


def _open(files: list[Path], masks: list[Path] | None, fit: Fit) -> tuple[Rows, Any, str, dict[str, Any]]:
    """Samples, labels if there are masks, a few words, and what is stored beside each sample."""
    kinds = {is_volume(f) for f in [*files, *(masks or [])]}
    if len(kinds) == 2:
        raise DataError(
            f"{files[0].parent}: got pictures and volumes (NIfTI, NumPy, raw), expected one kind; convert them separately."
        )
    if kinds == {True}:
        return open_volumes(files, masks, fit)
    if fit:
        raise DataError(
            f"{files[0].parent}: got pictures; --spacing, --shape, --pad and --each are for volumes (NIfTI, NumPy, raw)."
        )
    x, words = open_pictures(files)
    return x, open_pictures(masks, labels=True)[0] if masks else None, words, {}


def _classes(inner: list[Path], folder: Path, split: str, first: Split | None, left_out: list[str], fit: Fit) -> Split:
    """Pictures in a folder per class."""
    if fit.each:
        raise DataError(
            f"{folder}: --each is for folders `images` and `labels` of volumes; volumes in a folder per class become one file: leave it out, and "
            "pad or resample them (`--pad`, `--shape`) where their sizes differ."
        )
    own = {unicodedata.normalize("NFC", f.name): f for f in inner}
    names = (
        first.class_names
        if first
        else tuple(sorted(own, key=lambda n: (not n.isdecimal(), int(n) if n.isdecimal() else 0, n)))
    )
    for name in own:
        if name not in names:
            raise DataError(
                f"{folder}: got the class {name}, expected those of the first split: {', '.join(names) or 'none'}."
            )
        if not name.isprintable():
            raise DataError(f"{str(folder / name)!r}: this name cannot be stored; rename the folder.")
    if len(names) < 2:
        raise DataError(
            f"{folder}: got the class {', '.join(names)} alone, expected a folder per class, two at least. "
            f"If {own[names[0]]} is the dataset, name it."
        )
    files = {name: _pictures(f, left_out) for name, f in own.items()}
    empty = [name for name in names if not files.get(name)]
    if empty and not first:
        raise DataError(
            f"{folder / empty[0]}: there are no pictures in this folder; fill it, or remove it if it is no class."
        )
    labels = np.repeat(np.arange(len(names)), [len(files.get(n, ())) for n in names])
    if not len(labels):
        raise DataError(f"{folder}: there are no pictures.")
    x, _, words, beside = _open([f for n in names for f in files.get(n, ())], None, fit)
    told = ", ".join(f"{i} {n}" for i, n in enumerate(names[:20])) + (", ..." if len(names) > 20 else "")
    return Split(
        split,
        x,
        labels,
        class_names=names,
        origin=f"{folder}: {words}, a class per folder: {told}",
        remarks=_told(left_out),
        beside=beside,
    )


def _by_stem(folder: Path, left_out: list[str]) -> dict[str, Path]:
    files = _pictures(folder, left_out)
    found = {unicodedata.normalize("NFC", stem(f)): f for f in files}
    if not files or len(found) < len(files):
        raise DataError(f"{folder}: there are {'two pictures of one name' if files else 'no pictures'}.")
    return found


def _pictures(folder: Path, left_out: list[str]) -> list[Path]:
    """The pictures right in a folder; notes other files, refuses folders."""
    inner = _folders(folder)
    if inner:
        raise DataError(f"{inner[0]}: a folder inside {folder.name}, where pictures are expected; move it.")
    left_out += _left_out(folder)
    files = [f for f in _visible(folder) if _is_picture(f)]
    plain = {stem(f) for f in files}
    marked = next((f for f in files if _OF_A_MASK.sub("", stem(f)) in plain - {stem(f)}), None)
    if marked:
        raise DataError(
            f"{marked}: it looks like the mask of a picture beside it; put them into folders `images` and `masks`."
        )
    return files


def _told(left_out: list[str]) -> list[str]:
    """A remark about what was left out."""
    shown = ", ".join(left_out[:5]) + (", ..." if len(left_out) > 5 else "")
    return [f"left out: {len(left_out)} files that are no pictures ({shown})"] if left_out else []


def _left_out(folder: Path) -> list[str]:
    return [str(f) for f in _visible(folder) if not f.is_dir() and not _is_picture(f)]


def _is_picture(file: Path) -> bool:
    return (file.suffix.lower() in SUFFIXES or is_volume(file)) and not file.is_dir()


def _folders(folder: Path) -> list[Path]:
    return [f for f in _visible(folder) if f.is_dir()]


def _visible(folder: Path) -> list[Path]:
    """What is in a folder, in order, except for what operating systems and programs keep there for themselves."""
    try:
        return sorted(f for f in folder.iterdir() if f.name[0] != "." and f.name.lower() not in _NOT_DATA)
    except OSError as e:
        raise DataError(f"{folder}: cannot be read: {e.strerror}.") from None
