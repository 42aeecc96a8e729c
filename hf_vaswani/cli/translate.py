"""`hf-vaswani translate`: lines in, lines out."""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..data.corpus import CorpusError, decode_lines, open_text, read_lines
from .output import UserError, plain_faults


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "translate",
        help="translate a file or standard input, line by line",
        description="Translate UTF-8 text line by line: one line out for each line in, in the same order. Only a line "
        "feed ends a line. A blank line stays blank.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a model, or its name on the Hub")
    parser.add_argument("file", metavar="FILE", nargs="?", default="-", help="text, plain or packed; - or none: stdin")
    parser.add_argument("--beams", type=positive, metavar="N", help="width of the search (default: the model's own)")
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=32,
        metavar="N",
        help="lines translated together (default: 32); 1 answers each line before the next is read",
    )
    parser.add_argument(
        "--n-best",
        type=positive,
        metavar="N",
        help="write up to N translations a line, best first, each as: line number, tab, score, tab, translation",
    )
    parser.add_argument("--device", help="such as cpu or cuda:1 (default: an accelerator if there is one)")
    parser.set_defaults(run=run)


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    lines = decode_lines(sys.stdin.buffer, "standard input") if args.file == "-" else read_lines(args.file)
    if args.file != "-" and not is_stream(args.file):
        with open_text(args.file):  # a fault of the file is told before the model is loaded
            pass
    translator = load_translator(args.model, args.device)
    options: dict[str, Any] = {"batch_size": args.batch_size}
    beams = args.beams or translator.model.generation_config.num_beams or 1
    if args.beams:
        options["num_beams"] = beams
    if args.n_best:
        # A wider search could change the best translation, so it is widened only when asked for.
        if args.n_best > beams:
            raise UserError(f"--n-best {args.n_best} needs --beams of at least {args.n_best}; the search has {beams}.")
        options.update(num_return_sequences=args.n_best, return_scores=True)
    with plain_faults():
        write_translations(translator, lines, sys.stdout.buffer, options, is_n_best=bool(args.n_best))
    return 0


def is_stream(path: str) -> bool:
    """Whether a file can be read only once, such as the `<(command)` of a shell."""
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))


def load_translator(model: str, device: str | None = None) -> Any:
    """The translation pipeline of a folder or a Hub name.

    Args:
        model (`str`): a folder, or "owner/name" on the Hub.
        device (`str`, *optional*): such as "cpu" or "cuda:1"; None: an accelerator if there is one.

    Returns:
        `VaswaniTranslationPipeline`.

    Raises:
        UserError: there is no such model or device, or the model cannot translate.
    """
    from transformers import pipeline

    _check_device(device)
    folder = Path(model)
    # A Hub name has exactly one slash; anything else that does not exist is a mistyped folder.
    looks_like_hub_name = model.count("/") == 1 and not model.startswith((".", "/", "~")) and not model.endswith("/")
    if not folder.is_dir() and not looks_like_hub_name:
        raise UserError(f"{model}: no such folder.")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"{model} is not the folder of a model: it has no config.json.")
    if folder.is_dir() and not any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")):
        raise UserError(f"{model} has no tokenizer, so it reads and writes ids only: save one into the folder.")
    try:
        return pipeline("translation", model=model, device=device)  # type: ignore[call-overload]
    except (OSError, ValueError, TypeError, KeyError) as error:
        where = "" if folder.is_dir() else ": no such folder, and not to be had from the Hub"
        # A fault of the weights comes wrapped in the whole story of the attempts; its last line says what it was.
        text = str(error).strip()
        text = text.splitlines()[-1].partition(": ")[2] or text if "Traceback (most recent call last)" in text else text
        reason = " ".join(text.split())
        raise UserError(f"{model} cannot be loaded as a translation model{where} ({reason}).") from error


def _check_device(device: str | None) -> None:
    """Refuse a device that is none, or is not here, before a model is loaded for it."""
    import torch

    try:
        torch.empty(1, device=device or "cpu").cpu()  # the way back too, which "meta" does not have
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device}: no such device here ({' '.join(str(error).split())[:80]}).") from error


def write_translations(
    translator: Any, lines: Iterable[str], stream: BinaryIO, options: dict[str, Any], is_n_best: bool = False
) -> None:
    """Translate lines as they come and write each result as soon as it is there.

    Args:
        translator: a translation pipeline. lines (iterable of `str`): without line ends.
        stream (`BinaryIO`): gets UTF-8 lines that end in "\\n". options: arguments of the pipeline's call.
        is_n_best (`bool`): write the number of the line and the score before each translation.

    Raises:
        CorpusError: for a faulty line, after all lines before it have been translated and written.
    """
    faults: list[CorpusError] = []

    def until_fault() -> Iterator[str]:
        try:
            yield from lines
        except CorpusError as error:
            faults.append(error)

    for number, result in enumerate(translator(until_fault(), **options), start=1):
        candidates = result if isinstance(result, list) else [result]
        for candidate in candidates:
            # Whatever the model says, a line in is a line out.
            text = candidate["translation_text"].replace("\r", " ").replace("\n", " ")
            if is_n_best:
                text = f"{number}\t{candidate['score']:.4f}\t" + text.replace("\t", " ")
            stream.write(text.encode("utf-8") + b"\n")
        stream.flush()
    if faults:
        raise faults[0]
