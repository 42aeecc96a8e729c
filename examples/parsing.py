"""Table 4 of the paper: constituency parsing as translation, on any treebank in the Penn format.

    t=../shared/data/treebank_craft
    python examples/parsing.py prepare runs/craft --train $t/craft.train.trees.gz --valid $t/craft.dev.trees.gz \
        --test $t/craft.test.trees.gz --vocab-size 4000 --tags
    hf-vaswani train examples/recipes/parsing_craft.yaml
    python examples/parsing.py parse runs/parsing_craft/model $t/craft.test.trees.gz -o runs/craft/test.predicted
    python examples/parsing.py score $t/craft.test.trees.gz runs/craft/test.predicted

`prepare` writes sentences, trees as sequences, and the tokenizer; the run is an ordinary training. `parse` takes a
treebank (its words alone are read) or lines of words, and says how much of the output was well formed before repair.
`score` takes the trees of any parser.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from hf_vaswani import VaswaniTokenizer
from hf_vaswani.data.corpus import CorpusError, read_lines
from hf_vaswani.parsing import (
    Repairs,
    Tree,
    linear_text,
    linearize,
    parse_sentences,
    read_predictions,
    read_treebank,
    reserved_pieces,
    score_trees,
)
from hf_vaswani.parsing.predictions import BEAMS, EXTRA_LENGTH, LENGTH_PENALTY


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def treebank(paths: list[Path]) -> list[Tree]:
    """The trees of several files, one after another; a folder stands for its `.mrg` files."""
    files = [one for path in paths for one in (sorted(path.rglob("*.mrg")) if path.is_dir() else [path])]
    if not files:
        raise CorpusError(f"{', '.join(map(str, paths))}: no .mrg file in there.")
    return [tree for path in files for tree in read_treebank(path)]


# --------------------------------------------------------------------------- prepare
def prepare(arguments: argparse.Namespace) -> int:
    """Write what the recipe reads."""
    parts = {
        name: treebank(getattr(arguments, name)) for name in ("train", "valid", "test") if getattr(arguments, name)
    }
    reserved = reserved_pieces(parts["train"], arguments.tags)
    words_of_train = (" ".join(tree.words()) for tree in parts["train"])
    tokenizer = VaswaniTokenizer.train(words_of_train, arguments.vocab_size, reserved=reserved)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, trees in parts.items():
        kept = [tree for tree in trees if tree.children]
        for ending, lines in (
            ("words", (" ".join(tree.words()) for tree in kept)),
            ("brackets", (linear_text(tree, arguments.tags) for tree in kept)),
        ):
            text = "".join(f"{line}\n" for line in lines)
            (arguments.out / f"{name}.{ending}").write_text(text, encoding="utf-8", newline="\n")
        words = sum(len(tree.leaves()) for tree in kept)
        empty = f", {len(trees) - len(kept)} left out that hold no word" if len(kept) < len(trees) else ""
        say(f"{name}: {len(kept):,} trees, {words:,} words, {sum(map(len, map(linearize, kept))):,} parts{empty}")
    known = set(reserved)
    for name, trees in parts.items():
        new = Counter(f" {part}" for tree in trees for part in linearize(tree, arguments.tags))
        strange = {part: count for part, count in new.items() if part not in known}
        if strange:
            say(f"{name}: {sum(strange.values()):,} parts that train has not: {' '.join(strange)}")
    tokenizer.save_pretrained(arguments.out / "tokenizer")
    say(f"{len(tokenizer):,} pieces, {len(reserved)} of them parts of trees")
    return 0


# --------------------------------------------------------------------------- parse
def parse(arguments: argparse.Namespace) -> int:
    """Write a tree a line."""
    from transformers import AutoTokenizer

    from hf_vaswani import VaswaniForConditionalGeneration

    if arguments.words:
        sentences = [line.split(" ") for path in arguments.text for line in read_lines(path)]
    else:
        sentences = [tree.words() for tree in treebank(arguments.text)]
    sentences = sentences[: arguments.first]
    model = VaswaniForConditionalGeneration.from_pretrained(arguments.model).eval()
    trees, repairs = parse_sentences(
        model,
        AutoTokenizer.from_pretrained(arguments.model),
        sentences,
        num_beams=arguments.beams,
        length_penalty=arguments.alpha,
        max_length_offset=arguments.extra_length,
        batch_size=arguments.batch_size,
    )
    text = "".join(f"{tree}\n" for tree in trees)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8", newline="\n")
    else:
        sys.stdout.write(text)
    say(repair_text(repairs))
    return 0


def repair_text(repairs: list[Repairs]) -> str:
    """How much was well formed, and what was mended."""
    good = sum(not one for one in repairs)
    share = 100 * good / len(repairs) if repairs else 0.0
    return f"well formed: {good:,} of {len(repairs):,} ({share:.2f} %); mended: {sum(repairs, Repairs())}"


# --------------------------------------------------------------------------- score
def score(arguments: argparse.Namespace) -> int:
    """Print labelled bracket F1."""
    gold = treebank(arguments.gold)[: arguments.first]
    trees, repairs = read_predictions(read_lines(arguments.predicted), gold, str(arguments.predicted))
    found = score_trees(gold, trees)
    say(repair_text(repairs))
    short = [i for i, tree in enumerate(gold) if len(tree.leaves()) <= 40]
    found_short = score_trees([gold[i] for i in short], [trees[i] for i in short])
    if arguments.json:
        fields = {"f1": found.f1, "precision": found.precision, "recall": found.recall, **vars(found)}
        print(json.dumps(fields | {"f1_up_to_40_words": found_short.f1, "mended": sum(map(bool, repairs))}, indent=2))
    else:
        print(f"all: {found}\nup to 40 words: {found_short}")
    return 0


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare", help="write sentences, sequences and the tokenizer")
    one.add_argument("out", type=Path)
    for name in ("train", "valid", "test"):
        one.add_argument(f"--{name}", type=Path, nargs="+", required=name != "test", metavar="TREES")
    one.add_argument("--vocab-size", type=int, default=16000, help="pieces (default: 16,000, as in the paper)")
    one.add_argument("--tags", action="store_true", help="the tag of each word too: learned with fewer trees")
    one.set_defaults(run=prepare)
    one = commands.add_parser("parse", help="write the tree of each sentence")
    one.add_argument("model")
    one.add_argument("text", type=Path, nargs="+", help="treebanks; with --words, lines of words")
    one.add_argument("--words", action="store_true", help="the text is a sentence a line, its words parted by blanks")
    one.add_argument("--output", "-o", type=Path, help="default: standard output")
    one.add_argument("--first", type=int, metavar="N", help="the first N sentences alone")
    one.add_argument("--beams", type=int, default=BEAMS, help=f"default: {BEAMS}, as in the paper")
    one.add_argument("--alpha", type=float, default=LENGTH_PENALTY, help=f"default: {LENGTH_PENALTY}, as in the paper")
    one.add_argument("--extra-length", type=int, default=EXTRA_LENGTH, help=f"default: {EXTRA_LENGTH}, as in the paper")
    one.add_argument("--batch-size", type=int, default=8)
    one.set_defaults(run=parse)
    one = commands.add_parser("score", help="labelled bracket F1 of a file of trees, a line each")
    one.add_argument("gold", type=Path, nargs="+")
    one.add_argument("predicted", type=Path)
    one.add_argument("--first", type=int, metavar="N", help="the first N gold trees alone")
    one.add_argument("--json", action="store_true")
    one.set_defaults(run=score)
    return parser.parse_args()


def main() -> int:
    arguments = read_arguments()
    return arguments.run(arguments)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (CorpusError, OSError, ValueError) as error:
        sys.exit(f"parsing.py: {error}")
    except KeyboardInterrupt:
        sys.exit("parsing.py: stopped.")
