"""`hf-vaswani score`: how likely a model finds translations that are given."""

import argparse
import json
import sys
from itertools import islice
from typing import Any

from ..data.corpus import read_two_files
from ..data.sources import CorpusSource, pair_count
from .output import UserError, note, plain_faults
from .translate import is_stream, load_translator, positive

_PAIRS_AT_ONCE = 10_000  # sorted by length among themselves, then written: memory stays the same for any file


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "score",
        help="log-probability of given translations, by sentence and token",
        description="For each line of SRC and its translation in TGT, write one line: the log-probability (nats) of "
        "the translation with its end token, the number of its tokens, and the log-probability per token, with tabs "
        "between. A pair with a blank side is not given to the model: 0, 0 tokens, 0. The perplexity of all goes to "
        "standard error.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a model, or its name on the Hub")
    parser.add_argument("source", metavar="SRC", help="source text, plain or packed")
    parser.add_argument("target", metavar="TGT", help="its translation, line by line")
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="a fourth column: a JSON list of [token, log-probability], tokens as the vocabulary spells them",
    )
    parser.add_argument(
        "--batch-tokens",
        type=positive,
        default=2048,
        metavar="N",
        help="padded tokens on either side of a batch (default: 2048): speed and memory, not the result",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    from ..evaluation import score_pairs
    from ..evaluation.perplexity import mean_to_perplexity

    if not (is_stream(args.source) or is_stream(args.target)):
        pair_count(CorpusSource(src=args.source, tgt=args.target))  # unequal files are told before the work
    pairs = read_two_files(args.source, args.target)
    waiting = list(islice(pairs, _PAIRS_AT_ONCE))  # a faulty file is told before the model is loaded
    translator = load_translator(args.model)
    line_count = blank_count = token_count = 0
    total = 0.0
    while waiting:
        try:
            scores = score_pairs(
                translator.model,
                translator.tokenizer,
                waiting,
                batch_tokens=args.batch_tokens,
                first_number=line_count + 1,
            )
        except (ValueError, FloatingPointError) as error:
            raise UserError(f"{args.source} and {args.target}: {error}") from error
        with plain_faults():
            for one in scores:
                columns = [f"{one.log_prob:.4f}", str(len(one.pieces)), f"{one.mean:.4f}"]
                if args.tokens:
                    rounded = [round(value, 4) for value in one.log_probs]
                    columns.append(json.dumps(list(zip(one.pieces, rounded, strict=True)), ensure_ascii=False))
                sys.stdout.buffer.write(("\t".join(columns) + "\n").encode("utf-8"))
            sys.stdout.buffer.flush()
        total += sum(one.log_prob for one in scores)
        token_count += sum(len(one.pieces) for one in scores)
        blank_count += sum(not one.pieces for one in scores)
        line_count += len(waiting)
        waiting = list(islice(pairs, _PAIRS_AT_ONCE))
    if token_count:
        note(f"perplexity {mean_to_perplexity(total, token_count):.4f} per token, of {token_count:,} tokens")
    if blank_count:
        note(f"{blank_count:,} of {line_count:,} pairs have a blank side; they were not scored.")
    return 0
