"""`hf-vaswani prune`: a smaller model, without some of the attention heads."""

import argparse
from pathlib import Path
from typing import Any

from .heads import read_pairs, with_own_translations
from .output import UserError, check_new_folder, note
from .translate import load_translator, positive

# How `--keep` chooses; the same words as in the description.
CHOICES = ("importance", "layer-importance")


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "prune",
        help="take attention heads out for good and save the smaller model",
        description="Write a model without some of its attention heads: their weights are removed, and it computes "
        "what the old one does with them masked. Name the heads with --heads, or say with --keep how many stay, and "
        "with --data on which text their importance is measured. Each attention keeps at least one head.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a model, or its name on the Hub")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to come")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--heads",
        metavar="HEADS",
        help="heads to take out, such as encoder.0.3,cross.1.2; * is every layer or head, ^3 every head but 3",
    )
    which.add_argument("--keep", type=positive, metavar="N", help="heads that stay, in the whole model")
    parser.add_argument(
        "--by",
        choices=CHOICES,
        help="with --keep: the expected |change of the loss| from its gradient, as it is (importance, the default) or "
        "divided by the l2 norm of its attention's heads (layer-importance)",
    )
    parser.add_argument(
        "--data",
        nargs="+",
        metavar="FILE",
        help="with --keep: source text, and its translation line by line (default: the model's own)",
    )
    parser.add_argument(
        "--store-as",
        choices=("float32", "float16", "bfloat16"),
        help="precision on disk (default: that of MODEL's file); the model is loaded in its own all the same",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier model in OUT")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out; the new folder's name goes to standard output."""
    from ..analysis.head_masks import all_heads, parse_heads
    from ..analysis.pruning import prune_heads

    if args.heads is not None and (args.by or args.data):
        raise UserError("--by and --data are for --keep; --heads says already which heads go.")
    if args.keep is not None and not args.data:
        raise UserError("--keep needs a text to measure the heads on: --data SRC [TGT].")
    if args.data and len(args.data) > 2:
        raise UserError(f"--data takes SRC, or SRC and TGT; got {' '.join(args.data)}")
    try:
        check_new_folder(args.out, args.overwrite, "model.safetensors")
    except UserError as error:
        raise UserError(str(error).replace(" with --output", "")) from None
    if args.out.resolve() == Path(args.model).resolve():
        raise UserError(f"{args.out} is MODEL itself: name a new folder.")
    pairs = read_pairs(args.data[0], args.data[1] if len(args.data) == 2 else None) if args.data else []
    translator = load_translator(args.model)
    model = translator.model
    try:
        lost = parse_heads(args.heads, model) if args.heads is not None else _least_important(args, translator, pairs)
        smaller = prune_heads(model, lost)
    except (TypeError, ValueError) as error:
        raise UserError(f"{args.model}: {error}") from error
    _save(smaller, translator.tokenizer, args.out, args.store_as or _stored_as(Path(args.model)))
    before, after = model.num_parameters(), smaller.num_parameters()
    note(
        f"{len(all_heads(smaller))} of {len(all_heads(model))} heads are left, and {after:,} of {before:,} parameters "
        f"({100 * after / before:.1f} %)."
    )
    if lost:
        note(f"Taken out: {', '.join(map(str, lost))}")
    print(args.out)
    return 0


def _least_important(args: argparse.Namespace, translator: Any, pairs: list[tuple[str, str]]) -> list[Any]:
    from ..analysis.head_importance import head_importance
    from ..analysis.head_masks import all_heads
    from ..analysis.pruning import least_important

    least_important(dict.fromkeys(all_heads(translator.model), 0.0), args.keep)  # a wrong number is told first
    if len(args.data) == 1:
        pairs = with_own_translations(translator, pairs, None)
    importance = head_importance(translator.model, translator.tokenizer, pairs, per_layer=args.by == "layer-importance")
    return least_important(importance, args.keep)


def _stored_as(folder: Path) -> str | None:
    """The precision of a folder's weights on disk, which may be less than what they are loaded as."""
    from safetensors import safe_open

    path = folder / "model.safetensors"
    if not path.is_file():
        return None
    with safe_open(path, "pt") as file:
        return str(file.get_tensor(next(iter(file.keys()))).dtype).removeprefix("torch.")


def _save(model: Any, tokenizer: Any, out: Path, store_as: str | None) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from ..sharing.folders import whole_folder

    try:
        with whole_folder(out) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            for path in folder.glob("*.safetensors") if store_as else []:
                weights = {name: tensor.to(getattr(torch, str(store_as))) for name, tensor in load_file(path).items()}
                save_file(weights, path, metadata={"format": "pt"})
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror or error}); nothing of it is left.") from error
