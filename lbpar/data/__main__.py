"""``python -m lbpar.data make|convert|info``: write and describe HDF5 datasets."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, NoReturn

from lbpar.config.paths import path_option
from lbpar.errors import LbparError
from lbpar.streams import standard_streams

if TYPE_CHECKING:
    from lbpar.data.writer import Split

TYPES = ("int8", "uint8", "int16", "uint16", "int32", "float16", "float32", "float64")
_OVERWRITE = "replace what the file has of the same splits (default: refuse; other splits are kept)"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"lbpar: error: {message} (see {self.prog} --help)\n")


def _names(text: str) -> list[str]:
    """Names with commas between them."""
    return [name.strip() for name in text.split(",")]


def parser() -> argparse.ArgumentParser:
    """Return the parser of this command line."""
    top = _Parser(prog="python -m lbpar.data", description="Write and describe HDF5 datasets.")
    commands = top.add_subparsers(dest="command", required=True, parser_class=_Parser)

    make = commands.add_parser("make", help="make a dataset", description="Make a dataset.")
    make.add_argument(
        "kind",
        choices=["digits", "digits64", "synthetic", "volumes", "brain", "atlas", "cells"],
        help="1,797 real handwritten digits of 8 x 8 pixels; the same enlarged to 64 x 64; random samples; Gaussian random fields "
        "whose spectrum's parameters are the targets; deformations of a real T1 volume of a head, with its brain, or seven parts of it, as labels; pictures of cells that are made up",
    )
    make.add_argument("--out", required=True, type=path_option, help="file to write, as data/digits.h5")
    make.add_argument("--size", type=int, help="digits: height and width, a multiple of 8")
    make.add_argument(
        "--shape",
        type=int,
        nargs="+",
        help="synthetic, volumes, cells: [D] H W C of one sample (32 32 3; 64 64 64 1; 1024 1024 1); brain, atlas: resample to D H W",
    )
    make.add_argument("--samples", type=int, help="training samples, but of digits (256; brain, atlas: 8; cells: 16)")
    make.add_argument("--test-samples", type=int, help="test samples (64; brain, atlas: 2; cells: 4)")
    make.add_argument("--classes", type=int, default=10, help="synthetic: number of classes")
    make.add_argument("--per-voxel", action="store_true", help="synthetic: a label per voxel")
    make.add_argument("--uint8", action="store_true", help="synthetic: store bytes")
    make.add_argument("--source", type=path_option, help="brain, atlas: folder of Debian's mricron-data, if elsewhere")
    make.add_argument("--seed", type=int, default=0, help="another seed makes other data, but of digits")
    make.add_argument("--gzip", action="store_true", help="compress (not synthetic)")
    make.add_argument("--overwrite", action="store_true", help=_OVERWRITE)

    convert = commands.add_parser("convert", help="convert other formats", description="Convert to HDF5.")
    convert.add_argument(
        "source",
        nargs="+",
        type=path_option,
        help="directory of IDX files, pictures, volumes (NIfTI, .npy, .raw) or CIFAR's binary files; .npz or HDF5 file; or images and labels as "
        "two files; or volumes or pictures, with --labels",
    )
    convert.add_argument(
        "--labels", nargs="+", default=(), type=path_option, metavar="FILE",
        help="label maps of volumes, or masks of pictures, that are named one by one, in the same order; patterns in quotes are fine",
    )  # fmt: skip
    convert.add_argument("--out", required=True, type=path_option, help="file to write")
    convert.add_argument("--split", default="", help="group to write into, for formats without splits (default: root)")
    convert.add_argument(
        "--channels",
        choices=["auto", "last", "first", "none"],
        default="auto",
        help="where arrays have their channels (auto: none in (samples, H, W), else wherever there is no doubt)",
    )
    convert.add_argument("--classes", type=int, help="number of classes (default: largest label plus one)")
    convert.add_argument("--normalise", action="store_true", help="store mean and deviation per channel")
    convert.add_argument("--spacing", type=float, nargs="+", metavar="MM", help="volumes: resample to this voxel size")
    convert.add_argument("--shape", type=int, nargs=3, metavar=("D", "H", "W"), help="volumes: resample to this size")
    convert.add_argument(
        "--pad", type=int, nargs="?", const=1, metavar="N", help="volumes: pad to the largest, a multiple of N (1)"
    )
    convert.add_argument(
        "--each", action="store_true", help="volumes: a file for each, of its own size (--out is a folder)"
    )
    convert.add_argument(
        "--type", dest="dtype", choices=TYPES, help="HDF5: type of the new samples (default: as they are)"
    )
    convert.add_argument(
        "--test-share", type=float, metavar="PART", help="HDF5: make /train and /test of one split, as 0.2"
    )
    convert.add_argument("--x", type=_names, default=["x"], help="HDF5: name of the samples; of several inputs A,B")
    convert.add_argument("--y", type=_names, default=["y"], help="HDF5: name of the targets; of several A,B")
    convert.add_argument(
        "--chunk", type=int, nargs="+", metavar="N", help="compress, in chunks of this part of a sample: [D] H W C"
    )
    convert.add_argument("--gzip", action="store_true", help="compress, in chunks of one sample or less")
    convert.add_argument("--overwrite", action="store_true", help=_OVERWRITE)

    info = commands.add_parser("info", help="describe a file", description="Describe a file and check its labels.")
    info.add_argument("file", type=path_option)
    info.add_argument("--x", type=_names, default=["x"], help="name of the samples; of several inputs A,B")
    info.add_argument("--y", type=_names, default=["y"], help="name of the targets; of several A,B")
    info.add_argument("--plan", type=path_option, help="a plan file: also say what its processes must read of a sample")
    return top


@standard_streams()
def main(argv: list[str] | None = None) -> int:
    """Run one command line; returns the exit code, 2 for what the user can mend."""
    args = parser().parse_args(argv)
    try:
        if args.command == "info":
            from lbpar.data.info import describe

            print(describe(args.file, args.x, args.y, args.plan))
            return 0
        each = getattr(args, "each", False)
        for split in _write(args):
            print("\n  ".join([f"{split.origin} -> {split.name if each else f'/{split.name}'}", *split.remarks]))
        if each:
            return 0
        from lbpar.data.info import describe

        named = args.command == "convert" and (len(args.x) > 1 or len(args.y) > 1)
        print(describe(args.out, args.x, args.y) if named else describe(args.out))
        return 0
    except LbparError as e:
        print(f"lbpar: error: {e}", file=sys.stderr)
        return 2


def _write(args: argparse.Namespace) -> list[Split]:
    """What was converted, with what there is to say about it."""
    given = dict(vars(args))
    command, out = given.pop("command"), given.pop("out")
    if command == "convert":
        from lbpar.data.convert import convert

        return convert(given.pop("source"), out, **given)
    from lbpar.data.made.cells import make_cells
    from lbpar.data.made.fields import make_volumes
    from lbpar.data.made.heads import make_heads
    from lbpar.data.make import make_digits, make_synthetic

    kind, size, gzip, shape = (given.pop(n) for n in ("kind", "size", "gzip", "shape"))
    some = {n: given[n] for n in ("samples", "test_samples", "seed", "overwrite") if given[n] is not None}
    if kind == "synthetic":
        make_synthetic(out, shape or [32, 32, 3], **some, **{n: given[n] for n in ("classes", "per_voxel", "uint8")})
    elif kind == "volumes":
        make_volumes(out, shape or [64, 64, 64, 1], gzip=gzip, **some)
    elif kind == "cells":
        make_cells(out, shape or [1024, 1024, 1], gzip=gzip, **some)
    elif kind in ("brain", "atlas"):
        source = {"source": given["source"]} if given["source"] else {}
        make_heads(out, kind == "atlas", shape=shape, gzip=gzip, **source, **some)
    else:
        make_digits(out, size if size is not None else 64 if kind == "digits64" else 8, gzip, args.overwrite)
    return []


if __name__ == "__main__":
    sys.exit(main())
