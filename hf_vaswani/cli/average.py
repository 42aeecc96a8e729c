"""`hf-vaswani average`: one model from the last checkpoints of a run."""

import argparse
from pathlib import Path
from typing import Any

from .output import UserError, check_new_folder
from .translate import positive


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "average",
        help="average the weights of a run's last checkpoints",
        description="Write a model whose weights are the mean of several checkpoints. Name a run, whose last "
        "checkpoints are taken, or two and more model folders.",
    )
    parser.add_argument("run_or_models", metavar="RUN", nargs="+", type=Path, help="a run's folder, or model folders")
    parser.add_argument("--last", type=positive, metavar="N", help="checkpoints of a run to take (default: 5)")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="new folder (default: averaged-N in the run; needed for model folders)",
    )
    parser.add_argument(
        "--store-as",
        choices=("float32", "float16", "bfloat16"),
        help="precision on disk (default: that of the checkpoints); the model is loaded in its own all the same",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier model in that folder")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out; the new folder's name goes to standard output."""
    import torch

    from ..training.averaging import AveragingError
    from ..training.run import average_folder

    folders, output = _chosen(args)
    check_new_folder(output, args.overwrite, "model.safetensors")
    try:
        average_folder(folders, output, getattr(torch, args.store_as) if args.store_as else None)
    except AveragingError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"{output} cannot be written ({error.strerror or error}); nothing of it is left.") from error
    print(output)
    return 0


def _chosen(args: argparse.Namespace) -> tuple[list[Path], Path]:
    from ..training.checkpoint import CheckpointFolder
    from ..training.run import CHECKPOINTS

    named: list[Path] = args.run_or_models
    for path in named:
        if not path.is_dir():
            raise UserError(f"{path}: no such folder.")
    if len(named) > 1:
        if args.last is not None:
            raise UserError("--last counts the checkpoints of one run; here model folders are named one by one.")
        if args.output is None:
            raise UserError("Name the new folder with --output.")
        return named, args.output
    root = named[0] / CHECKPOINTS if (named[0] / CHECKPOINTS).is_dir() else named[0]
    found, wanted = CheckpointFolder(root).due(), args.last or 5
    if len(found) < wanted:
        raise UserError(
            f"{root} holds {len(found)} checkpoint(s), and {wanted} were asked for. Ask for fewer with --last, or "
            "train with a larger `checkpoints.keep_last`."
        )
    return [path for _, path in found[-wanted:]], args.output or named[0] / f"averaged-{wanted}"
