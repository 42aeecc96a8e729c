"""`hf-vaswani heads`: what each attention head looks at, and what the model loses without it."""

import argparse
import json
from collections import Counter
from itertools import islice
from typing import Any

from ..data.corpus import read_lines, read_two_files
from ..data.sources import CorpusSource, pair_count
from .output import UserError, note, plain_faults
from .translate import is_stream, load_translator, positive

_LINES_AT_ONCE = 10_000


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "heads",
        help="statistics of every attention head over a test set, and ablation",
        description="For each head of the model (encoder.0.3: kind, layer, head) write one line, with tabs between: "
        "the entropy of its attention (nats), the mean distance between query and key (tokens), the shares of its "
        "attention on the previous, same and next token, on the start token, on end tokens and on the rarest token of "
        "the sentence, and the number of queries. Without TGT the model's own translations are read. With --ablate, "
        "one line for each set of heads: the loss per token (nats) without them, and its change.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a model, or its name on the Hub")
    parser.add_argument("source", metavar="SRC", help="source text, plain or packed")
    parser.add_argument("target", metavar="TGT", nargs="?", help="its translation, line by line")
    parser.add_argument(
        "--training-text",
        nargs=2,
        metavar=("SRC", "TGT"),
        help="count here which tokens are rare (default: in the text that is measured)",
    )
    parser.add_argument(
        "--importance", action="store_true", help="a further column: expected |change of the loss|, from its gradient"
    )
    parser.add_argument(
        "--ablate",
        action="append",
        metavar="HEADS",
        help="measure TGT without these heads, such as encoder.0.3,cross.1.2; * is every layer or head, ^3 every head "
        "but 3; `each`: every head of the model by itself. May be given again",
    )
    parser.add_argument("--bleu", action="store_true", help="with --ablate: translate too, and give sacreBLEU")
    parser.add_argument("--target-language", metavar="XX", help="with --bleu: it chooses the tokenisation, as in zh")
    parser.add_argument("--beams", type=positive, metavar="N", help="width of the search (default: the model's own)")
    parser.add_argument(
        "--batch-tokens",
        type=positive,
        default=2048,
        metavar="N",
        help="padded tokens on either side of a batch (default: 2048): speed and memory, not the result",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    if args.ablate and args.target is None:
        raise UserError("--ablate measures the loss of given translations: give TGT too.")
    if args.ablate and (args.importance or args.training_text):
        raise UserError("--importance and --training-text are for the statistics: leave them out with --ablate.")
    if (args.bleu or args.target_language) and not args.ablate:
        raise UserError("--bleu and --target-language are for --ablate: the statistics have no score.")
    if args.target_language and not args.bleu:
        raise UserError("--target-language is for --bleu: the loss has no tokenisation.")
    if args.ablate and args.beams and not args.bleu:
        raise UserError("--beams is for translating, and nothing is translated here without --bleu.")
    if args.beams and args.target and not args.ablate:
        raise UserError("--beams is for translating, and TGT is given: leave one out.")
    if args.training_text:
        pair_count(CorpusSource(src=args.training_text[0], tgt=args.training_text[1]))
    pairs = read_pairs(args.source, args.target)
    translator = load_translator(args.model)
    try:
        found = _ablations(args, translator, pairs) if args.ablate else _statistics(args, translator, pairs)
    except (TypeError, ValueError) as error:
        raise UserError(f"{args.model}: {error}") from error
    with plain_faults():
        if args.json:
            print(json.dumps(found))
            return 0
        rows = found["ablations"] if args.ablate else found["heads"]
        print("\t".join(rows[0]))
        for row in rows:
            print("\t".join(_cell(value) for value in row.values()))
    return 0


def read_pairs(source: str, target: str | None) -> list[tuple[str, str]]:
    """All lines of a text, with their translations or, where there is no such file, with nothing.

    Raises:
        CorpusError: files that cannot be read, or of unlike length. UserError: no line has text.
    """
    if target is None:
        pairs = [(line, "") for line in read_lines(source)]
    else:
        if not (is_stream(source) or is_stream(target)):
            pair_count(CorpusSource(src=source, tgt=target))  # unequal files are told before the work
        pairs = list(read_two_files(source, target))
    if not any(src.strip() for src, _ in pairs):
        raise UserError(f"{source} has no line with text.")
    return pairs


def with_own_translations(translator: Any, pairs: list[tuple[str, str]], beams: int | None) -> list[tuple[str, str]]:
    """Sources, each with the model's own translation of it."""
    from ..evaluation import translate_lines

    sources = [src for src, _ in pairs]
    translations = translate_lines(translator.model, translator.tokenizer, sources, num_beams=beams)
    return list(zip(sources, translations, strict=True))


def _statistics(args: argparse.Namespace, translator: Any, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    from ..analysis.head_importance import head_importance
    from ..analysis.head_masks import attention_modules
    from ..analysis.heads import COLUMNS, head_statistics

    model, tokenizer = translator.model, translator.tokenizer
    attention_modules(model)  # another architecture is told before anything is translated
    counts = _training_counts(tokenizer, *args.training_text) if args.training_text else None
    if args.target is None:
        pairs = with_own_translations(translator, pairs, args.beams)
    rows = []
    statistics = head_statistics(model, tokenizer, pairs, counts=counts, batch_tokens=args.batch_tokens)
    for one in statistics:
        row: dict[str, Any] = {"head": str(one.head), **{name: getattr(one, name) for name in COLUMNS}}
        rows.append({**row, "queries": one.query_count})
    if args.importance:
        importance = head_importance(model, tokenizer, pairs, batch_tokens=args.batch_tokens)
        rows = [{**row, "importance": value} for row, value in zip(rows, importance.values(), strict=True)]
    _note_blank(pairs)
    return {
        "model": args.model,
        "source": args.source,
        "target": args.target or "the model's own translations",
        "lines": len(pairs),
        "heads": rows,
    }


def _training_counts(tokenizer: Any, source: str, target: str) -> tuple[Counter[int], Counter[int]]:
    """How often each id stands in the sources and in the targets of a text, read a piece at a time."""
    counts: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
    lines = read_two_files(source, target)
    while chunk := list(islice(lines, _LINES_AT_ONCE)):
        sides = (tokenizer([src for src, _ in chunk]), tokenizer(text_target=[tgt for _, tgt in chunk]))
        for counter, encoded in zip(counts, sides, strict=True):
            for ids in encoded["input_ids"]:
                counter.update(ids)
    return counts


def _ablations(args: argparse.Namespace, translator: Any, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    from ..analysis.head_masks import ablate, all_heads, parse_heads

    model = translator.model
    sets, names = [], ["none"]
    for spec in args.ablate:
        chosen = [[head] for head in all_heads(model)] if spec == "each" else [parse_heads(spec, model)]
        sets += chosen
        names += [str(one[0]) for one in chosen] if spec == "each" else [spec]
    found = ablate(
        model,
        translator.tokenizer,
        pairs,
        sets,
        with_bleu=args.bleu,
        target_language=args.target_language,
        batch_tokens=args.batch_tokens,
        num_beams=args.beams,
    )
    rows = []
    for name, one in zip(names, found, strict=True):
        row: dict[str, Any] = {
            "heads": name,
            "masked": len(one.heads),
            "loss": one.loss,
            "loss_change": one.loss_change,
        }
        rows.append({**row, "sacrebleu": one.bleu, "sacrebleu_change": one.bleu_change} if args.bleu else row)
    _note_blank(pairs)
    if args.bleu:
        note(f"sacreBLEU: {found[0].bleu_signature}")
    return {
        "model": args.model,
        "source": args.source,
        "target": args.target,
        "lines": len(pairs),
        "ablations": rows,
        "sacrebleu_signature": found[0].bleu_signature,
    }


def _note_blank(pairs: list[tuple[str, str]]) -> None:
    blank = sum(not (src.strip() and tgt.strip()) for src, tgt in pairs)
    if blank:
        note(f"{blank:,} of {len(pairs):,} pairs have a blank side; they have no part in attention and loss.")


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
