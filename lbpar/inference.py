"""`python -m lbpar.evaluate`, `predict` and `export --run runs/x`: use what a run has trained, on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lbpar.config.paths import path_option
from lbpar.errors import ConfigError, DataError
from lbpar.transport.arguments import Parser
from lbpar.transport.together import together

if TYPE_CHECKING:  # --help needs neither networks nor data
    from lbpar.api import Trained
    from lbpar.train.evaluator import Evaluator

Array = np.ndarray[Any, Any]


def _parser(name: str, what: str) -> Parser:
    p = Parser(prog=f"lbpar {name}", description=f"{what}: lbpar {name} --run runs/x")
    p.add_argument("--run", required=True, type=path_option, metavar="DIR", help="run directory of lbpar train")
    p.add_argument("--checkpoint", default="last", metavar="best|last|STEP", help="whose weights (default: last)")
    p.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field of its run file")
    p.add_argument("--allow-code", action="store_true", help="run the Python function that its run file names")
    return p


def _restored(args: Any) -> Trained[Evaluator]:
    from lbpar import api

    return api.restore(args.run, args.checkpoint, args.set, allow_code=args.allow_code)


def evaluate(argv: Sequence[str] | None = None) -> int:
    """Loss, accuracies and metrics on the run's test data. Collective over all ranks."""
    p = _parser("evaluate", "Loss, accuracies and metrics on the test data of a run")
    p.add_argument(
        "--metrics", default="", metavar="A,B", help="also measure these (train.evaluate.metrics), as dice,confusion"
    )
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument(
        "--picture", metavar="FILE", help="draw slices: image, truth, prediction, difference (png, svg, pdf)"
    )
    p.add_argument("--samples", metavar="I,J", help="test samples of the picture (default: the first three)")
    args = p.parse_args(argv)
    if args.metrics:
        args.set.append(f"train.evaluate.metrics=[{args.metrics}]")
    if args.samples and not all(i.isdecimal() for i in args.samples.split(",")):
        raise ConfigError(f"--samples: got {args.samples!r}, expected numbers of test samples, as 0,3,5.")
    with _restored(args) as network:
        found = {"step": network.trainer.step, **network.evaluate()}
        if args.picture:  # before what is printed: who reads that may stop reading
            network.picture(args.picture, [int(i) for i in args.samples.split(",")] if args.samples else None)
        if network.trainer.transport.rank == 0:
            _say(found, args.json)
    return 0


def _say(found: Mapping[str, Any], as_json: bool) -> None:
    """Print what was measured: numbers in a line, what there is per class in a table."""
    from lbpar.json_text import dumps
    from lbpar.tables import print_table, short

    if as_json:
        print(dumps(found), flush=True)
        return
    per_class = {k: v for k, v in found.items() if isinstance(v, dict)}
    print("  ".join(f"{k} {short(v)}" for k, v in found.items() if not isinstance(v, dict | list)), flush=True)
    if per_class:
        names = next(iter(per_class.values()))
        print_table([{"class": c, **{k: v[c] for k, v in per_class.items()}} for c in names])
    for name, rows in found.items():
        if isinstance(rows, list):
            print_table(
                [[f"is {i}", *row] for i, row in enumerate(rows)],
                ["", *(f"taken for {i}" for i in range(len(rows)))],
                name,
            )


def predict(argv: Sequence[str] | None = None) -> int:
    """The network's output (before the loss) for samples of a file. Collective over all ranks."""
    p = _parser("predict", "The network's output for each sample of a file")
    p.add_argument(
        "--input",
        required=True,
        type=path_option,
        metavar="FILE",
        help="HDF5 (or FILE:/GROUP; samples in data.x), .npy as the training data are stored, NIfTI, raw, or a folder of volumes",
    )
    p.add_argument("--labels", action="store_true", help="the best class: HDF5 dataset labels, else in place of scores")
    kinds = ("", ".h5", ".hdf5", ".npy", ".nii", ".nii.gz")
    args, out = _with_out(p, argv, "HDF5 (dataset y), .npy, NIfTI, or a folder for NIfTI files", kinds)
    if out.exists() and any(Path(p).exists() and out.samefile(p) for p in (args.input, args.input.partition(":/")[0])):
        raise ConfigError(f"--out: {out} is the input; give another name.")
    with _restored(args) as network:
        trainer = network.trainer
        with together(trainer.transport):
            given = _samples(args.input, trainer)
        network.predict_to(out, given, args.labels, args.overwrite)
        if trainer.transport.rank == 0:
            held = _described(out, given, trainer, args.labels)
            print(f"{out}: {held}, of step {trainer.step}", flush=True)
    return 0


def _described(out: Path, given: Any, trainer: Evaluator, labels: bool) -> str:
    """What a file of predictions holds, in words."""
    from lbpar.data.named import NamedDataset
    from lbpar.data.prediction_file import described

    graph, dtype = trainer.graph, np.dtype(trainer.engine.dtype)
    first = NamedDataset(given, {}).main if isinstance(given, Mapping) else given
    sample = first.shape[1:] if isinstance(first, np.ndarray) else first.sample_shape
    if graph.others:
        sizes = {n: " x ".join(map(str, (len(first), *trainer.output_shape(sample, n)))) for n in graph.outputs}
        return f"{', '.join(f'{n} {size}' for n, size in sizes.items())}, {dtype}"
    return described(out, first, (len(first), *trainer.output_shape(sample)), dtype, labels)


def export(argv: Sequence[str] | None = None) -> int:
    """All parameters and running statistics of the network in one file. Collective over all ranks."""
    p = _parser("export", "The weights of a run, whole and by name, channels last")
    args, out = _with_out(p, argv, ".safetensors or .npz", (".safetensors", ".npz"))
    from lbpar.data.prediction_file import check_free

    with _restored(args) as network:
        transport = network.trainer.transport
        with together(transport):
            if transport.rank == 0:
                check_free(out, args.overwrite)
        weights = network.weights()
        with together(transport):
            if transport.rank == 0:
                _write(out, weights)
                print(f"{out}: {len(weights)} tensors of step {network.trainer.step}", flush=True)
    return 0


def _with_out(p: Parser, argv: Sequence[str] | None, shown: str, kinds: tuple[str, ...]) -> tuple[Any, Path]:
    """The command line, and the file that it names to be written."""
    p.add_argument("--out", required=True, type=path_option, metavar="FILE", help=f"file to write: {shown}")
    p.add_argument("--overwrite", action="store_true", help="replace the file if there is one")
    args = p.parse_args(argv)
    out = Path(args.out)
    if not any(out.name.endswith(k) if k else not out.suffix for k in kinds):
        raise ConfigError(f"--out: got {out}, expected a name that ends in {', '.join(filter(None, kinds))}.")
    return args, out


def _samples(path: str, trainer: Evaluator) -> Any:
    names = [n.name for n in trainer.graph.samples]
    if names != ["input"]:
        from lbpar.data.hdf5 import Hdf5Dataset
        from lbpar.data.open import part_names

        if not path.partition(":/")[0].endswith((".h5", ".hdf5")):
            raise DataError(f"--input: got {path}, expected an HDF5 file with the network's inputs {', '.join(names)}.")
        inside = part_names(trainer.config.data.x, "x", names)
        return {n: Hdf5Dataset(path, "test", x=inside[n], y=None, dtype=trainer.engine.dtype) for n in names}
    if Path(path).is_dir() or path.lower().endswith((".nii", ".nii.gz", ".raw")):
        from lbpar.data.volume_dataset import VolumeDataset

        shape = trainer.graph.shapes(1)["input"][1:-1]
        if len(shape) != 3:
            raise DataError(f"--input: {path} holds volumes, but the network takes samples of {len(shape)} dimensions.")
        data = trainer.config.data
        return VolumeDataset(path, shape, trainer.engine.dtype, larger=data.patches is not None, cache=data.cache)
    if not path.endswith(".npy"):
        from lbpar.data.hdf5 import Hdf5Dataset

        return Hdf5Dataset(path, "test", x=str(trainer.config.data.x), y=None, dtype=trainer.engine.dtype)
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise DataError(f"--input: {path} cannot be read: {error}.") from None
    except (ValueError, EOFError):
        raise DataError(f"--input: {path} is no whole array of numbers, as numpy.save writes them.") from None


def _write(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write a file that takes its name when it is complete."""
    from lbpar.whole_file import beside

    with beside(path, lambda reason: DataError(f"--out: {path} cannot be written: {reason}.")) as part:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            if path.suffix == ".safetensors":
                from safetensors.numpy import save

                file.write(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))
            else:
                np.savez(file, **arrays)  # type: ignore[arg-type]
