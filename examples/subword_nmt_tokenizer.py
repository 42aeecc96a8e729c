"""Make a tokenizer of published subword-nmt codes: Moses, lowercase, BPE, one joint vocabulary of the training text.

    python examples/subword_nmt_tokenizer.py CODES train.en train.de OUT --source-language en --target-language de

The folder OUT is what a recipe names as `tokenizer.path`. Raw text goes in and comes out: the steps that the codes were
learned behind are part of the tokenizer.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from hf_vaswani.data.corpus import read_lines
from hf_vaswani.foreign_tokenization_vaswani import VaswaniForeignTokenizer
from hf_vaswani.interop.vocabulary import build_tokenizer

CONTROL = ("<pad>", "</s>", "<s>", "<unk>")


def build(pieces: list[str], arguments: argparse.Namespace) -> VaswaniForeignTokenizer:
    """The tokenizer of a vocabulary; `pieces` are in the order of their ids."""
    return build_tokenizer(
        pieces,
        None,
        segmentation="subword-nmt",
        codes=arguments.codes,
        pad="<pad>",
        eos="</s>",
        bos="<s>",
        unk="<unk>",
        moses=(arguments.source_language, arguments.target_language),
        moses_normalize=True,
        moses_escape=not arguments.no_escape,
        lowercase=arguments.lowercase,
    )


def all_pieces(codes: Path, letters: set[str]) -> list[str]:
    """Whatever a text of these letters can be cut into: single letters, and what a merge makes of two pieces."""
    found = {form for letter in letters for form in (letter, letter + "@@")}
    for line in read_lines(codes):
        left, _, right = line.partition(" ")
        if not line.startswith("#version:"):
            merged = left + right
            found.add(merged.removesuffix("</w>") if merged.endswith("</w>") else merged + "@@")
    return [*CONTROL, *sorted(found - set(CONTROL))]


def pieces_of(arguments: argparse.Namespace) -> list[str]:
    """Every piece of the training text, the most frequent first, behind the control tokens."""
    texts = [list(read_lines(path)) for path in (arguments.source, arguments.target)]
    letters = {letter for lines in texts for line in lines for letter in line + line.lower()} - {" "}
    everything = build(all_pieces(arguments.codes, letters | set("&;#aposquotamplgt0123456789")), arguments)
    names = {number: piece for piece, number in everything.get_src_vocab().items()}
    counts: Counter[str] = Counter()
    for lines, side in zip(texts, ("text", "text_target"), strict=True):
        for ids in everything(**{side: lines}, add_special_tokens=False)["input_ids"]:
            counts.update(names[number] for number in ids)
    ordered = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    return [*CONTROL, *(piece for piece, _ in ordered if piece not in CONTROL)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("codes", type=Path)
    parser.add_argument("source", type=Path, help="training text of the source; plain, .gz or .zst")
    parser.add_argument("target", type=Path, help="training text of the target")
    parser.add_argument("out", type=Path)
    parser.add_argument("--source-language", required=True)
    parser.add_argument("--target-language", required=True)
    parser.add_argument("--lowercase", action="store_true", help="the codes were learned on lowercased text")
    parser.add_argument("--no-escape", action="store_true", help="the codes were learned on text without &apos; etc.")
    arguments = parser.parse_args()
    if arguments.out.exists():
        sys.exit(f"{arguments.out} is there already; name another folder.")
    pieces = pieces_of(arguments)
    build(pieces, arguments).save_pretrained(arguments.out)
    print(f"{len(pieces)} pieces")


if __name__ == "__main__":
    main()
