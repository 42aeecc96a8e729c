"""`hf-vaswani attention`: what the heads look at in one sentence, as pictures and as a page."""

import argparse
import sys
from pathlib import Path
from typing import Any

from .output import UserError, note
from .translate import load_translator, positive

_PAGE = (".html", ".htm")
_PICTURES = (".png", ".svg", ".pdf")
_LONGEST = 20_000  # letters: more than any picture or page holds, told before anything is translated


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "attention",
        help="draw what the attention heads look at in one sentence",
        description="Translate SENTENCE, or take the translation that --target gives, and draw the attention of the "
        "encoder, the decoder, or between the two. A .png, .svg or .pdf is one picture of the layers and heads that "
        "are chosen; an .html is a page with pickers for all of them. The names of the files are printed.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a model, or its name on the Hub")
    parser.add_argument("sentence", metavar="SENTENCE", nargs="?", help="source text (default: one line of stdin)")
    parser.add_argument("--target", metavar="TEXT", help="a translation to explain (default: the model's own)")
    parser.add_argument(
        "--kind", choices=("cross", "encoder", "decoder"), default="cross", help="which attention (default: cross)"
    )
    parser.add_argument(
        "--layers", type=_numbers, metavar="N,N", default=[-1], help="layers from 0, -1 for the last (default), or all"
    )
    parser.add_argument(
        "--heads", type=_numbers, metavar="N,N", default="all", help="heads from 0, all (default), or mean"
    )
    parser.add_argument(
        "--picture",
        choices=("heat", "lines"),
        help="heat maps, or lines as in the paper (default: heat maps; in a page lines, which can be changed there)",
    )
    parser.add_argument(
        "--query", metavar="PIECE", help="with --picture lines: one piece alone, by its text or its place from 0"
    )
    parser.add_argument("--words", action="store_true", help="put the pieces of a word together")
    parser.add_argument("--beams", type=positive, metavar="N", help="width of the search (default: the model's own)")
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="FILE",
        action="append",
        help="where to write; its ending chooses the kind; may be given again (default: attention.html)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    outputs = args.output or [Path("attention.html")]
    _check_outputs(outputs)
    if args.target is not None and args.beams:
        raise UserError("--beams is for translating, and --target is given: leave one out.")
    if args.query is not None and args.picture != "lines":
        raise UserError("--query is for --picture lines: a heat map shows the rows of all pieces.")
    sentence = args.sentence if args.sentence is not None else _read_line()
    if not sentence.strip():
        raise UserError("the sentence is blank: there is no attention to draw.")
    if "\n" in sentence.strip("\n"):
        raise UserError("the sentence has several lines: give one.")
    if len(sentence) > _LONGEST:
        raise UserError(f"the sentence has {len(sentence):,} letters, more than a picture or a page holds.")
    if any(one.suffix.lower() in _PICTURES for one in outputs):
        _check_matplotlib()
    from ..analysis.attention import draw_attentions, save_figure
    from ..analysis.attention_page import attention_page, write_page
    from ..analysis.weights import attention_weights

    translator = load_translator(args.model)
    settings = {"num_beams": args.beams} if args.beams else {}
    try:
        found = attention_weights(translator.model, translator.tokenizer, sentence, args.target, **settings)
    except (TypeError, ValueError) as error:
        raise UserError(f"{args.model}: {error}") from error
    note(f"{found.source} -> {found.target}")
    for path in outputs:
        try:
            if path.suffix.lower() in _PAGE:
                page = attention_page(found, args.kind, args.layers, args.heads, args.words, args.picture or "lines")
                write_page(page, path)
            else:
                query = int(args.query) if (args.query or "").isdecimal() else args.query
                picture = args.picture or "heat"
                figure = draw_attentions(found, args.kind, args.layers, args.heads, picture, args.words, query)
                save_figure(figure, path)
        except ValueError as error:
            raise UserError(str(error)) from error
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
        print(path)
    return 0


def _check_outputs(outputs: list[Path]) -> None:
    """Refuse, before the model is loaded, files that could not be written at the end."""
    for path in outputs:
        if path.suffix.lower() not in (*_PAGE, *_PICTURES):
            raise UserError(f"{path}: the ending must be one of {', '.join((*_PICTURES, '.html'))}.")
        if path.is_dir():
            raise UserError(f"{path} is a folder: name a file.")
        if not path.parent.is_dir():
            raise UserError(f"{path}: there is no folder {path.parent}.")


def _check_matplotlib() -> None:
    from ..analysis.labels import require_matplotlib

    try:
        require_matplotlib()
    except ImportError as error:
        raise UserError(str(error)) from error


def _read_line() -> str:
    if sys.stdin.isatty():
        note("The sentence (one line):")
    try:
        return sys.stdin.buffer.readline().decode("utf-8").rstrip("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8: {error}.") from error


def _numbers(text: str) -> list[int] | str:
    """ "0,2" as numbers; "all" and "mean" as they are."""
    if text in ("all", "mean"):
        return text
    try:
        return [int(one) for one in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"numbers with commas between, got {text!r}") from error
