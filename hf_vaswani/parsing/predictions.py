"""Trees from a model, and from files that other parsers wrote: always one for each sentence, over its words."""

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from .linear import WORD
from .repair import Repairs, rebuild
from .trees import BLANKS, TOP, TOP_LABELS, Tree, TreebankError

# The settings of the paper's parsing experiment: section 6.3.
BEAMS, LENGTH_PENALTY, EXTRA_LENGTH = 21, 0.3, 300
_ATOM = rf"[^{BLANKS}()]"
_PARTS = re.compile(
    rf"\([{BLANKS}]*({_ATOM}*)[{BLANKS}]+({_ATOM}+(?:[{BLANKS}]+{_ATOM}+)*)[{BLANKS}]*\)|\([{BLANKS}]*({_ATOM}*)|(\))|({_ATOM}+)"
)


def parse_sentences(
    model: Any,
    tokenizer: Any,
    sentences: Sequence[Sequence[str]],
    *,
    num_beams: int = BEAMS,
    length_penalty: float = LENGTH_PENALTY,
    max_length_offset: int = EXTRA_LENGTH,
    batch_size: int = 8,
    progress: bool | None = None,
) -> tuple[list[Tree], list[Repairs]]:
    """Parse sentences with a model that was trained on `linear_text`.

    Args:
        model, tokenizer: of the training. sentences (`Sequence[Sequence[str]]`): their words, as the treebank has them.
        num_beams (`int`), length_penalty (`float`), max_length_offset (`int`): of the search; the output may be as long
            as the input (in pieces) and `max_length_offset` more.
        batch_size (`int`): sentences together. progress (`bool`, *optional*): a bar on standard error.

    Returns:
        A tree and its repairs for each sentence.

    Source: Vaswani et al. 2017, section 6.3: beam 21, α 0.3, input length + 300.
    """
    from ..evaluation.scoring import translate_lines

    filled = [i for i, words in enumerate(sentences) if words]
    written = translate_lines(
        model,
        tokenizer,
        [" ".join(sentences[i]) for i in filled],
        num_beams=num_beams,
        length_penalty=length_penalty,
        max_length_offset=max_length_offset,
        batch_size=batch_size,
        progress=progress,
    )
    parts: list[list[str]] = [[] for _ in sentences]
    for i, text in zip(filled, written, strict=True):
        parts[i] = text.split()
    found = [rebuild(one, words) for one, words in zip(parts, sentences, strict=True)]
    return [tree for tree, _ in found], [repairs for _, repairs in found]


def read_predictions(
    lines: Iterable[str], gold: Sequence[Tree], name: str = "text"
) -> tuple[list[Tree], list[Repairs]]:
    """Trees that any parser wrote, a line each, mended to the words of the gold trees.

    Args:
        lines (`Iterable[str]`): bracket strings; an empty line is a sentence without a parse.
        gold (`Sequence[Tree]`): what they are to be compared with. name (`str`): for messages.

    Returns:
        A tree and its repairs for each gold tree.

    Raises:
        TreebankError: another number of lines than of gold trees.
    """
    written = list(lines)
    if len(written) != len(gold):
        raise TreebankError(f"{name} has {len(written):,} lines for {len(gold):,} gold trees: one line each is needed.")
    trees, repairs = [], []
    for line, right in zip(written, gold, strict=True):
        words = right.words()
        parts, tags = _parts_of(line, len(words))
        tags += [WORD] * (len(words) - len(tags))
        tree, mended = rebuild(parts, words, tags)
        trees.append(tree)
        repairs.append(mended)
    return trees, repairs


def _parts_of(line: str, word_count: int) -> tuple[list[str], list[str]]:
    """A bracket string as parts of a sequence, and the tags of its words.

    A bracket around nothing is a word that was lost where the line has too few words without it.
    """
    found = list(_PARTS.finditer(line))
    lacking = word_count - sum(one[2] is not None for one in found)
    parts: list[str] = []
    tags: list[str] = []
    is_closed = False
    for one, after in zip_longest(found, found[1:]):
        if is_closed:
            is_closed = False
        elif one[2] is not None:
            parts.append(WORD)
            tags.append(one[1])
        elif one[3] is None:
            parts.append(one[4] or one[5])
        elif after is not None and after[4] and lacking > 0:
            lacking -= 1
            parts.append(WORD)
            tags.append(one[3] or WORD)
            is_closed = True
        else:
            parts.append(f"({TOP if one[3] in TOP_LABELS else one[3]}")
    return parts, tags
