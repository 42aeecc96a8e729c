"""`hf-vaswani translate`: lines in, lines out."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..data.corpus import CorpusError, decode_lines, open_text, read_lines
from .output import Terminated, UserError, note, plain_faults, stop_at_once, stop_at_sigterm

_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "translate",
        help="translate a file or standard input, line by line",
        description="Translate UTF-8 text line by line: one line out for each line in, in the same order. Only a line "
        "feed ends a line. A blank line stays blank. Lines are read ahead, sorted by length into batches, and written "
        "in their own order, in constant memory however many there are.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a model (also one of `export ctranslate2`), or its "
                        "name on the Hub")  # fmt: skip
    parser.add_argument("file", metavar="FILE", nargs="?", default="-", help="text, plain or packed; - or none: stdin")
    parser.add_argument("--beams", type=positive, metavar="N", help="width of the search (default: the model's own)")
    parser.add_argument(
        "--batch-size",
        type=positive,
        metavar="N",
        help="most lines in a batch; 1 answers each line before the next is read (default: 512 over the width of the "
        "search on a processor, 2048 over it on a GPU)",
    )
    parser.add_argument(
        "--batch-tokens",
        type=positive,
        metavar="N",
        help="most source tokens in a batch, padding counted; less takes less memory (default: 2048 on a processor, "
        "16384 on a GPU)",
    )
    parser.add_argument(
        "--window",
        type=positive,
        metavar="N",
        help="batches of --batch-size lines that are read ahead and sorted by length; 1 keeps them in file order, "
        "which is slower and answers sooner (default: 8)",
    )
    parser.add_argument(
        "--n-best",
        type=positive,
        metavar="N",
        help="write up to N translations a line, best first, each as: line number, tab, score, tab, translation",
    )
    parser.add_argument("--device", help="such as cpu or cuda:1 (default: an accelerator if there is one)")
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="precision; int8 converts the model on the fly and runs it by CTranslate2 (pip install "
        "'hf-vaswani[ctranslate2]'). Default: auto, as the folder stores it",
    )
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help="threads that compute (default: OMP_NUM_THREADS where it is set, else one for each core)",
    )
    parser.add_argument(
        "--stats",
        action="store_true",
        help="say at the end, on standard error, how many lines and tokens took how long, loading not counted "
        "(default: where standard error is a terminal and standard output is not)",
    )
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
    if args.threads:
        use_threads(args.threads)
    with stop_at_sigterm():
        translator = load_translator(args.model, args.device, args.dtype)
        names = ("batch_size", "batch_tokens", "window")
        options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
        beams = args.beams or translator.model.generation_config.num_beams or 1
        if args.beams:
            options["num_beams"] = beams
        if args.n_best:
            # A wider search could change the best translation, so it is widened only when asked for.
            if args.n_best > beams:
                raise UserError(
                    f"--n-best {args.n_best} needs --beams of at least {args.n_best}; the search has {beams}."
                )
            options.update(num_return_sequences=args.n_best, return_scores=True)
        if sys.stdout.isatty():  # where results appear, a bar would stand between them
            options["progress"] = False
        start = time.perf_counter()
        try:
            with plain_faults():
                count = write_translations(translator, lines, sys.stdout.buffer, options, is_n_best=bool(args.n_best))
        except (KeyboardInterrupt, Terminated) as error:
            if getattr(translator.model, "is_computing", False):
                stop_at_once(args.command, error)
            raise
    if args.stats or (sys.stderr.isatty() and not sys.stdout.isatty()):
        note(closing_line(count, translator.new_tokens, time.perf_counter() - start))
    return 0


def use_threads(count: int) -> None:
    """Compute with so many threads and no more: torch, the tokenizers, and CTranslate2, which asks torch."""
    import torch

    torch.set_num_threads(count)
    # The pool of the tokenizers is made when it is first used, which is later than this.
    os.environ["RAYON_NUM_THREADS"] = str(count)


def closing_line(lines: int, tokens: int, seconds: float) -> str:
    """What was done in which time, such as "1,014 lines, 13,100 tokens out in 9.8 s (1,337 tokens/s)"."""
    rate = tokens / max(seconds, 1e-9)
    return f"{lines:,} line{'' if lines == 1 else 's'}, {tokens:,} tokens out in {seconds:.1f} s ({rate:,.0f} tokens/s)"


def is_stream(path: str) -> bool:
    """Whether a file can be read only once, such as the `<(command)` of a shell."""
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))


def load_translator(model: str, device: str | None = None, dtype: str | None = None) -> Any:
    """The translation pipeline of a folder or a Hub name.

    Args:
        model (`str`): a folder, or "owner/name" on the Hub.
        device (`str`, *optional*): such as "cpu" or "cuda:1"; None: an accelerator if there is one.
        dtype (`str`, *optional*): one of "auto", "float32", "bfloat16", "float16" and "int8"; None is "auto".

    Returns:
        `VaswaniTranslationPipeline`.

    Raises:
        UserError: there is no such model or device, or the model cannot translate.
    """
    from transformers import pipeline

    folder = Path(model)
    is_converted = is_ctranslate2_folder(folder)
    if not (is_converted or dtype == "int8"):
        _check_device(device)
    # A Hub name has exactly one slash; anything else that does not exist is a mistyped folder.
    looks_like_hub_name = model.count("/") == 1 and not model.startswith((".", "/", "~")) and not model.endswith("/")
    if not folder.is_dir() and not looks_like_hub_name:
        raise UserError(f"{model}: no such folder.")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"{model} is not the folder of a model: it has no config.json.")
    if folder.is_dir() and not any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")):
        raise UserError(f"{model} has no tokenizer, so it reads and writes ids only: save one into the folder.")
    if is_converted or dtype == "int8":
        return load_ctranslate2(model, is_converted, device, dtype)
    try:
        return pipeline("translation", model=model, device=device, dtype=dtype or "auto")  # type: ignore[call-overload]
    except (OSError, ValueError, TypeError, KeyError) as error:
        where = "" if folder.is_dir() else ": no such folder, and not to be had from the Hub"
        # A fault of the weights comes wrapped in the whole story of the attempts; its last line says what it was.
        text = str(error).strip()
        text = text.splitlines()[-1].partition(": ")[2] or text if "Traceback (most recent call last)" in text else text
        reason = " ".join(text.split())
        raise UserError(f"{model} cannot be loaded as a translation model{where} ({reason}).") from error


def is_ctranslate2_folder(folder: Path) -> bool:
    """Whether a folder holds a model in CTranslate2's format."""
    return (folder / "model.bin").is_file() and (folder / "config.json").is_file() and not is_model_of_library(folder)


def is_model_of_library(folder: Path) -> bool:
    try:
        return "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return True  # whoever loads it says what is wrong


def load_ctranslate2(model: str, is_converted: bool, device: str | None, dtype: str | None) -> Any:
    """The same by CTranslate2: a folder in its format, or a model of ours in int8."""
    import torch

    from ..interop.foreign import ConversionError

    try:
        from ctranslate2 import get_cuda_device_count

        from .ctranslate2_model import convert, open_folder
    except ImportError as error:
        raise UserError(
            f"{'This folder' if is_converted else '--dtype int8'} needs CTranslate2, which is not installed. Run: pip "
            "install 'hf-vaswani[ctranslate2]'"
        ) from error
    device = device or ("cuda" if get_cuda_device_count() else "cpu")
    kind, _, number = device.partition(":")
    if not (device == "cpu" or (kind == "cuda" and int(number or 0) < get_cuda_device_count())):
        raise UserError(f"--device {device}: CTranslate2 has no such device here.")
    try:
        if is_converted:
            compute_type = "default" if dtype in (None, "auto") else str(dtype)
            return open_folder(Path(model), compute_type, device, torch.get_num_threads())
        return convert(model, device, torch.get_num_threads())
    except (ConversionError, OSError, ValueError) as error:
        raise UserError(" ".join(str(error).split())) from error


def _check_device(device: str | None) -> None:
    """Refuse a device that is none, or is not here, before a model is loaded for it."""
    import torch

    try:
        torch.empty(1, device=device or "cpu").cpu()  # the way back too, which "meta" does not have
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device}: no such device here ({' '.join(str(error).split())[:80]}).") from error


def write_translations(
    translator: Any, lines: Iterable[str], stream: BinaryIO, options: dict[str, Any], is_n_best: bool = False
) -> int:
    """Translate lines as they come and write each result as soon as it is there.

    Args:
        translator: a translation pipeline. lines (iterable of `str`): without line ends.
        stream (`BinaryIO`): gets UTF-8 lines that end in "\\n". options: arguments of the pipeline's call.
        is_n_best (`bool`): write the number of the line and the score before each translation.

    Returns:
        `int`: lines that were translated.

    Raises:
        CorpusError: for a faulty line, after all lines before it have been translated and written.
    """
    faults: list[CorpusError] = []
    number = 0

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
    return number
