"""`hf-vaswani evaluate`: a model, or translations that exist already, against references."""

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..data.corpus import TextPath, clean_line, decode_as_written, open_text, paired_lines, read_lines
from .output import UserError, note, plain_faults
from .translate import load_translator, positive

_TOKENIZERS = ("13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none")
_USAGE = """%(prog)s [options] MODEL SRC REF
       %(prog)s [options] --hypotheses FILE REF"""


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "evaluate",
        usage=_USAGE,
        help="score a model, or translations that exist already",
        description="Translate SRC and score the translations against REF, or score the translations in FILE. All are "
        "UTF-8 text, plain or packed, one sentence a line; REF is raw text, as it was written, neither tokenised nor "
        "lowercased. Each score is printed with its kind and every setting: quote both. Scores of different kinds or "
        "settings cannot be compared.",
    )
    parser.add_argument("files", metavar="MODEL SRC REF", nargs="+", help="folder of a model or its name on the Hub; "
                        "source text; reference text")  # fmt: skip
    parser.add_argument("--hypotheses", metavar="FILE", help="score these translations; give REF alone then")
    parser.add_argument(
        "--kinds",
        metavar="KIND,KIND",
        help="of sacrebleu, tokenised, compound-split, chrf, chrf++, ter (default: all that mean something for the "
        "target language, without chrf++)",
    )
    parser.add_argument(
        "--target-language",
        metavar="XX",
        help="code of the language of REF, such as de or zh: it chooses the tokenisation of each kind",
    )
    parser.add_argument(
        "--tokenize", choices=_TOKENIZERS, help="sacreBLEU's tokenisation (default: by language, else 13a)"
    )
    parser.add_argument("--lowercase", action="store_true", help="ignore case; TER does so always")
    parser.add_argument(
        "--normalize-punctuation",
        action="store_true",
        help="for tokenised and compound-split: Moses' punctuation normalisation first",
    )
    parser.add_argument("--beams", type=positive, metavar="N", help="width of the search (default: the model's own)")
    parser.add_argument(
        "--batch-size", type=positive, default=32, metavar="N", help="lines translated together (default: 32)"
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="write the translations there, one a line")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    from ..evaluation import evaluate_model, score_lines
    from ..evaluation.bleu import check_kinds, default_kinds

    is_model_given = args.hypotheses is None
    if len(args.files) != (3 if is_model_given else 1):
        raise UserError(f"give MODEL SRC REF, or --hypotheses FILE and REF alone; got {' '.join(args.files)}")
    if not is_model_given and (args.output or args.beams):
        raise UserError("--output and --beams are for translating: --hypotheses are translations already.")
    language = args.target_language
    kinds = default_kinds(language)
    if args.kinds is not None:
        kinds = tuple(dict.fromkeys(kind.strip() for kind in args.kinds.split(",")))
    settings: dict[str, Any] = {
        "kinds": kinds,
        "target_language": language,
        "tokenize": args.tokenize,
        "lowercase": args.lowercase,
        "normalize_punctuation": args.normalize_punctuation,
    }
    try:
        check_kinds(kinds, language, args.tokenize)
    except ValueError as error:
        raise UserError(str(error)) from error
    if args.tokenize and "sacrebleu" not in kinds:
        raise UserError("--tokenize is for sacreBLEU, which is not among the kinds: leave it out.")
    if args.normalize_punctuation and not {"tokenised", "compound-split"} & set(kinds):
        raise UserError("--normalize-punctuation is for tokenised and compound-split BLEU: leave it out.")
    if args.output:
        _check_new_file(args.output, args.files[1:])
    found: dict[str, Any] = {}
    if is_model_given:
        model_name, source, reference = args.files
        # Every file is read once, as the `<(command)` of a shell can be.
        references = read_as_written(reference)
        targets = [clean_line(line) for line in references]
        pairs = [(src, tgt) for _, src, tgt in paired_lines(read_lines(source), targets, source, reference)]
        _check_references(reference, references)
        translator = load_translator(model_name)
        model, tokenizer = translator.model, translator.tokenizer
        sources = [one for one, _ in pairs]
        with plain_faults():
            evaluation = evaluate_model(
                model, tokenizer, sources, references, batch_size=args.batch_size, num_beams=args.beams, **settings
            )
        if args.output:
            write_whole_file(args.output, evaluation.hypotheses)
        scores = evaluation.scores
        found["perplexity"], found["perplexity_signature"] = _perplexity(model, tokenizer, pairs)
    else:
        hypotheses, references = read_as_written(args.hypotheses), read_as_written(args.files[0])
        _check_references(args.files[0], references)
        if len(hypotheses) != len(references):
            raise UserError(
                f"{args.hypotheses} has {len(hypotheses)} lines, {args.files[0]} has {len(references)}: line n of one "
                "must belong to line n of the other."
            )
        if Path(args.hypotheses).samefile(args.files[0]):
            raise UserError(f"{args.hypotheses} is given twice, as translations and as their references.")
        _warn_if_tokenised(args.hypotheses, hypotheses)
        scores = score_lines(hypotheses, references, **settings)
    found["lines"] = len(references)
    found["scores"] = [
        {"kind": kind, "name": one.name, "score": one.score, "signature": one.signature, "details": one.details}
        for kind, one in zip(kinds, scores, strict=True)
    ]
    with plain_faults():
        if args.json:
            if found.get("perplexity") == math.inf:  # which JSON cannot say
                found["perplexity"] = None
            print(json.dumps(found))
            return 0
        for score in scores:
            print(score)
        if found.get("perplexity") is not None:
            print(f"perplexity {found['perplexity']:.2f} ({found['perplexity_signature']})")
    return 0


def _check_references(path: str, lines: Sequence[str]) -> None:
    if not lines:
        raise UserError(f"{path} has no line: there is nothing to score.")
    _warn_if_tokenised(path, lines)


def read_as_written(path: TextPath) -> list[str]:
    """Lines for a scorer: nothing is taken out but their ends, so that the scores are those of other scorers.

    Args:
        path: UTF-8 text, plain or packed.

    Returns:
        `list[str]`: lines without "\\n" or "\\r\\n" at their ends, and without a byte order mark before the first.

    Raises:
        CorpusError: the file cannot be read.
    """
    with open_text(path) as stream:
        lines = decode_as_written(stream, str(path))
        return [line.removeprefix("\ufeff") if number == 0 else line for number, line in enumerate(lines)]


def _perplexity(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> tuple[float | None, str | None]:
    """Perplexity of the references per token, and what it was measured on; None where it cannot be measured."""
    from ..evaluation import score_pairs
    from ..evaluation.perplexity import mean_to_perplexity

    try:
        scores = score_pairs(model, tokenizer, pairs)
    except (ValueError, FloatingPointError) as error:
        # The translations have their scores all the same.
        note(f"hf-vaswani evaluate: no perplexity. {error}")
        return None, None
    scored = [one for one in scores if one.pieces]
    token_count = sum(len(one.pieces) for one in scored)
    signature = f"per:subword token|tokens:{token_count}|pairs:{len(scored)}|precision:float32"
    if len(scored) < len(pairs):
        note(f"{len(pairs) - len(scored)} of {len(pairs)} lines have a blank side and are not in the perplexity.")
    total = sum(one.log_prob for one in scored)
    return (mean_to_perplexity(total, token_count), signature) if token_count else (None, None)


def _warn_if_tokenised(name: str, lines: Sequence[str]) -> None:
    from ..evaluation.moses import looks_tokenised

    if sign := looks_tokenised(lines):
        note(
            f'hf-vaswani evaluate: warning: {name} looks tokenised (many lines with "{sign}"): scores of it cannot be '
            "compared with published ones. Give raw text."
        )


def _check_new_file(path: Path, inputs: Sequence[str]) -> None:
    """Refuse, before any work is done, a file that could not be written at the end, or that is itself read."""
    folder = path.resolve().parent
    if any(path.exists() and os.path.exists(one) and path.samefile(one) for one in inputs):
        raise UserError(f"{path} is one of the files to be read: name another one with --output.")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path} is no plain file: name one with --output.")
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file with --output.")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{path} cannot be written: {folder} is not a folder that you may write to.")


def write_whole_file(path: Path, lines: Sequence[str]) -> None:
    """Write lines to a file that takes its name only once it is whole; until then an older one stays.

    Where the path is a symbolic link, the file that it names is written.

    Args:
        path (`Path`): the file. lines (`Sequence[str]`): without line ends.

    Raises:
        UserError: it cannot be written, for example for want of room.
    """
    place = path.resolve()
    unfinished = place.with_name(f".unfinished-{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8", newline="\n") as stream:
            stream.writelines(line + "\n" for line in lines)
        unfinished.replace(place)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        unfinished.unlink(missing_ok=True)
