"""Pictures keep their depth, channels and pages, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbpar.data.formats.pictures import open_pictures
from lbpar.errors import DataError

Image = pytest.importorskip("PIL.Image")
RNG = np.random.default_rng(4)
BYTES = RNG.integers(0, 256, (5, 7, 4), np.uint8)


def stored(path: Path, picture: Any, **options: Any) -> Path:
    (picture if isinstance(picture, Image.Image) else Image.fromarray(picture)).save(path, **options)
    return path


def read(*files: Path, labels: bool = False) -> np.ndarray:
    rows, _ = open_pictures(list(files), labels)
    out = rows[0 : len(files)]
    assert (out.shape, out.dtype) == (rows.shape, rows.dtype)
    return out


@pytest.mark.parametrize(
    ("suffix", "channels"), [*(("png", n) for n in range(1, 5)), *(("tif", n) for n in range(1, 5)), ("webp", 3), ("webp", 4), ("bmp", 3)]
)  # fmt: skip
def test_bytes(tmp_path, suffix: str, channels: int) -> None:
    a = BYTES[..., :channels].copy()
    a[..., 3:] |= 1  # WebP drops colours that nobody sees
    file = stored(
        tmp_path / f"a.{suffix}", a[..., 0] if channels == 1 else a, **{"lossless": True} if suffix == "webp" else {}
    )
    np.testing.assert_array_equal(read(file)[0], a)


@pytest.mark.parametrize("dtype", ["uint16", "int32", "float32"])
def test_more_than_bytes(tmp_path, dtype: str) -> None:
    a = (RNG.random((5, 7)) * 60000 - 20000 * (dtype != "uint16")).astype(dtype)
    for options in ({}, {"compression": "tiff_lzw"}):
        got = read(stored(tmp_path / "a.tif", a, **options))
        assert got.dtype == dtype
        np.testing.assert_array_equal(got[0, ..., 0], a)
    if dtype == "uint16":
        for suffix in ("png", "pgm"):
            got = read(stored(tmp_path / f"a.{suffix}", a))
            assert got.dtype == dtype
            np.testing.assert_array_equal(got[0, ..., 0], a)


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", ">u2", "i2", ">i2", "u4", "i4", "f2", "f4", "f8", ">f8"])
@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3), (5, 7, 6), (3, 5, 7), (4, 5, 7)])
def test_any_tiff(tmp_path, dtype: str, shape: tuple[int, ...]) -> None:
    """What Pillow cannot hold, tifffile reads: colours of 16 bits, double precision, many channels, planes."""
    tifffile = pytest.importorskip("tifffile")
    a = (RNG.random(shape) * 100 - 50 * ("u" not in dtype)).astype(dtype)
    kind: dict[str, Any] = {"photometric": "minisblack"}
    if len(shape) == 3:
        planar = "contig" if shape[0] == 5 else "separate"
        kind = {"photometric": "rgb" if shape[-1] == 3 or shape[0] in (3, 4) else "minisblack", "planarconfig": planar}
        if shape[0] == 4:  # pages
            kind = {"photometric": "minisblack"}
    tifffile.imwrite(tmp_path / "a.tif", a, byteorder=">" if ">" in dtype else "<", **kind)
    got = read(tmp_path / "a.tif")[0]
    assert got.dtype == np.dtype(dtype).newbyteorder("=")
    expected = np.moveaxis(a, 0, -1) if shape[0] == 3 else a
    np.testing.assert_array_equal(got, expected if expected.ndim == 3 and shape[0] != 4 else expected[..., None])


def test_palettes_and_bits(tmp_path) -> None:
    indices = RNG.integers(0, 4, (5, 7), np.uint8)
    picture = Image.fromarray(indices).convert("P")
    colours = RNG.integers(0, 256, (256, 3), np.uint8)
    picture.putpalette(colours.ravel().tolist())
    file = stored(tmp_path / "a.png", picture)
    np.testing.assert_array_equal(read(file)[0], colours[indices])
    np.testing.assert_array_equal(read(file, labels=True)[0], indices)
    clear = stored(tmp_path / "b.png", picture, transparency=2)
    np.testing.assert_array_equal(read(clear)[0], np.dstack([colours[indices], 255 * (indices != 2).astype(np.uint8)]))
    bits = stored(tmp_path / "c.png", Image.fromarray(indices % 2 * 255).convert("1"))
    np.testing.assert_array_equal(read(bits)[0, ..., 0], indices % 2 * 255)
    np.testing.assert_array_equal(read(bits, labels=True)[0], indices % 2)
    for n in (1, 2, 4):
        few = Image.fromarray(indices % 2**n).convert("P")
        np.testing.assert_array_equal(read(stored(tmp_path / "d.png", few, bits=n), labels=True)[0], indices % 2**n)


def test_grey_of_few_bits_are_labels(tmp_path) -> None:
    """A PNG of two bits, which Pillow spreads to 0, 85, 170 and 255."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 4, 1, 2, 0, 0, 0, 0)
    data = zlib.compress(bytes([0, 0b00011011]))
    file = tmp_path / "a.png"
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b""))
    assert read(file, labels=True).tolist() == [[[0, 1, 2, 3]]]
    assert read(file).ravel().tolist() == [0, 85, 170, 255]


def test_grey_among_coloured(tmp_path) -> None:
    grey, colour = stored(tmp_path / "a.png", BYTES[..., 0]), stored(tmp_path / "b.png", BYTES[..., :3])
    clear = stored(tmp_path / "c.png", BYTES)
    rows, words = open_pictures([grey, colour, grey])
    assert words == "3 pictures, RGB (2 L, 1 RGB)"
    np.testing.assert_array_equal(rows[0:3], np.stack([np.repeat(BYTES[..., :1], 3, -1), BYTES[..., :3]] * 2)[:3])
    got = read(grey, clear)
    np.testing.assert_array_equal(got[1], BYTES)
    np.testing.assert_array_equal(got[0, ..., 3], 255)
    np.testing.assert_array_equal(read(clear, colour)[1, ..., :3], BYTES[..., :3])


def test_pages_are_depth(tmp_path) -> None:
    stack = RNG.integers(0, 65536, (3, 5, 7), np.uint16)
    pages = [Image.fromarray(p) for p in stack]
    file = stored(tmp_path / "a.tif", pages[0], save_all=True, append_images=pages[1:])
    rows, words = open_pictures([file, file])
    assert words == "2 pictures of 3 pages each, taken for depth, uint16"
    np.testing.assert_array_equal(rows[1:2], stack[None, ..., None])
    np.testing.assert_array_equal(read(file, labels=True), stack[None])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda f: stored(f / "a.jpg", Image.fromarray(BYTES, "CMYK")), "without loss"),
        (lambda f: (f / "a.ppm").write_bytes(b"P6 1 1 65535\n" + bytes(6)), "without loss"),
        (lambda f: (f / "a.pgm").write_bytes(b"P5 1 1 4095\n" + bytes(2)), "values up to 4095.*without loss"),
        (lambda f: (f / "a.png").write_bytes(b""), "cannot be read as a picture"),
        (lambda f: (f / "a.png").write_bytes(b"hello"), "cannot be read as a picture"),
        (lambda f: (f / "a.tif").write_bytes(b"II*\0" + bytes(9)), "cannot be read as a picture|reading it needs"),
        (
            lambda f: (f / "a.png").write_bytes(stored(f / "b.png", BYTES).read_bytes()[:-60]),
            "cannot be read as a picture",
        ),
    ],
)
def test_refusals(tmp_path, make: Any, words: str) -> None:
    make(tmp_path)
    file = next(f for f in tmp_path.iterdir() if f.stem == "a")
    with pytest.raises(DataError, match=rf"{file.name}: .*{words}"):
        read(file)


def test_colours_of_16_bits_in_png(tmp_path) -> None:
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header, data = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0), zlib.compress(bytes(7))
    (tmp_path / "a.png").write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )
    with pytest.raises(DataError, match="PNG RGB;16B.* without loss; save it as"):
        read(tmp_path / "a.png")


def test_animations_and_unlike_pages(tmp_path) -> None:
    one, two = (Image.fromarray(BYTES[..., i]) for i in range(2))
    for suffix in ("gif", "png", "webp"):
        file = stored(tmp_path / f"a.{suffix}", one, save_all=True, append_images=[two])
        with pytest.raises(DataError, match="an animation of 2 pictures"):
            read(file)
    file = stored(tmp_path / "a.tif", one, save_all=True, append_images=[two.resize((3, 3))])
    with pytest.raises(DataError, match="page 2 is"):
        read(file)
    tifffile = pytest.importorskip("tifffile")
    hyper = RNG.integers(0, 9, (2, 3, 5, 7), np.uint16)
    tifffile.imwrite(tmp_path / "b.tif", hyper, imagej=True, metadata={"axes": "ZCYX"})
    tifffile.imwrite(tmp_path / "c.ome.tif", hyper, metadata={"axes": "ZCYX"})
    for name in ("b.tif", "c.ome.tif"):
        with pytest.raises(DataError, match="its 6 pages hold 3 channels"):
            read(tmp_path / name)


def test_pictures_unlike_the_first(tmp_path) -> None:
    first = stored(tmp_path / "a.png", BYTES[..., :3])
    others = {
        "b.png": BYTES[:4, :, :3],
        "c.png": BYTES[..., 0].astype(np.uint16),
        "d.tif": BYTES[..., 0].astype(np.float32),
    }
    for name, a in others.items():
        with pytest.raises(DataError, match=rf"{name}: got .*, expected 5 x 7 x 3 uint8 as a.png"):
            read(first, stored(tmp_path / name, a))
    for a in (BYTES[..., :3], BYTES[..., 0].astype(np.float32)):
        with pytest.raises(DataError, match="expected one whole number per pixel"):
            read(stored(tmp_path / "e.tif", a), labels=True)
