"""A tree over given words from whatever a model wrote, with a count of what had to be mended."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .linear import TAGGED, WORD
from .trees import LEAF, TOP, Tree


@dataclass
class Repairs:
    """What was mended in one sequence, or, added up, in many.

    Args:
        missing_closes (`int`): brackets that were open at another's close or at the end. extra_closes (`int`): closing
            brackets that closed nothing, left out. missing_words (`int`): words without a place, put at the end.
            extra_words (`int`): places without a word, left out. empty_brackets (`int`): brackets around nothing, left
            out. unknown_parts (`int`): text that is no part of a sequence, left out. absent_trees (`int`): sequences
            without any bracket, for which all words stand below the top.
    """

    missing_closes: int = 0
    extra_closes: int = 0
    missing_words: int = 0
    extra_words: int = 0
    empty_brackets: int = 0
    unknown_parts: int = 0
    absent_trees: int = 0

    def __bool__(self) -> bool:
        return any(asdict(self).values())

    def __add__(self, other: "Repairs") -> "Repairs":
        return Repairs(**{name: value + getattr(other, name) for name, value in asdict(self).items()})

    def __str__(self) -> str:
        counts = [f"{value:,} {name.replace('_', ' ')}" for name, value in asdict(self).items() if value]
        return ", ".join(counts) or "none"


def rebuild(parts: Sequence[str], words: Sequence[str], tags: Sequence[str] | None = None) -> tuple[Tree, Repairs]:
    """The tree that a sequence means, over exactly the given words.

    Args:
        parts (`Sequence[str]`): "(NP", ")NP" or ")" (whatever is open), and "XX" or "XX/NN".
        words (`Sequence[str]`): of the sentence. tags (`Sequence[str]`, *optional*): one a word; default: those of the
            parts, and "XX" where a part has none.

    Returns:
        `Tree` with `TOP` at its top, and `Repairs`, false where the sequence was well formed.

    Choice: a close of a bracket that is open further out closes all within it. Words left over go to the innermost
    bracket that is still open, else to the last constituent below the top, where a sentence's full stop stands.
    """
    top, repairs = Tree(TOP), Repairs()
    stack, placed = [top], 0

    def place(node: Tree, tag: str = WORD) -> None:
        nonlocal placed
        node.children.append(Tree(tag if tags is None else tags[placed], word=words[placed]))
        placed += 1

    has_bracket = False
    for part in parts:
        if part == WORD or part.startswith(TAGGED):
            if placed < len(words):
                place(stack[-1], part.removeprefix(TAGGED) or WORD)
            else:
                repairs.extra_words += 1
        elif part.startswith("(") and len(part) > 1:
            node = Tree(part[1:])
            stack[-1].children.append(node)
            stack.append(node)
            has_bracket = True
        elif part.startswith(")"):
            depth = len(stack) - 1
            while depth and part != ")" and stack[depth].label != part[1:]:
                depth -= 1
            if depth == 0:
                repairs.extra_closes += 1
            else:
                repairs.missing_closes += len(stack) - 1 - depth
                del stack[depth:]
        else:
            repairs.unknown_parts += 1
    repairs.missing_words = len(words) - placed
    if repairs.missing_words:
        home = stack[-1]
        while home.label == TOP and home.children and home.children[-1].word is None:
            home = home.children[-1]
        while placed < len(words):
            place(home)
    repairs.missing_closes += len(stack) - 1
    if words and not has_bracket:
        repairs.absent_trees = 1
    repairs.empty_brackets = _prune_empty(top)
    # A bracket string may have its top written out.
    inner = [one.children if one.label == TOP and one.word is None else [one] for one in top.children]
    top.children = [child for children in inner for child in children]
    return top, repairs


def _prune_empty(top: Tree) -> int:
    """Take brackets around nothing out; how many there were."""
    events = list(top.walk())
    filled: set[int] = set()
    count = 0
    path: list[Tree] = []
    for event, node in events:
        if event == LEAF:
            for one in reversed(path):  # ends at the first that is known: each is added once
                if id(one) in filled:
                    break
                filled.add(id(one))
        elif path and path[-1] is node:
            path.pop()
            kept = [child for child in node.children if child.word is not None or id(child) in filled]
            count += len(node.children) - len(kept)
            node.children = kept
        else:
            path.append(node)
    return count
