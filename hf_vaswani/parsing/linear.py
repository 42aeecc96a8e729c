"""Trees as the sequences that a translation model writes, and the pieces that they are made of.

    (S (NP (PRP They)) (VP (VBP wait)) (. .))   becomes   (S (NP XX )NP (VP XX )VP XX )S

Source: Vinyals et al. 2015, "Grammar as a Foreign Language", section 2.1 and figure 2, with one "XX" for every tag as
in section 3.1; the paper's section 6.3 writes trees in the same way. The words are not in the sequence: the i-th "XX"
is the i-th word. With tags, as in that section 2.1, the parts are "XX/PRP" and "XX/VBP": a model that has to name the
tag of each word learns early which word it stands at, which a small treebank does not teach otherwise.
"""

from collections.abc import Iterable

from .trees import CLOSE, LEAF, TOP, Tree

WORD = "XX"
TAGGED = f"{WORD}/"

__all__ = ["TAGGED", "TOP", "WORD", "linear_text", "linearize", "reserved_pieces"]


def linearize(tree: Tree, with_tags: bool = False) -> list[str]:
    """The sequence of a tree, its top left out.

    Args:
        tree (`Tree`): with `TOP` at its top; several children give one sequence after another.
        with_tags (`bool`): "XX/NN" for a word with this tag, not "XX".

    Returns:
        `list[str]`: "(NP", ")NP" and "XX".
    """
    found = []
    for event, node in list(tree.walk())[1:-1]:
        if event == LEAF:
            found.append(f"{TAGGED}{node.label}" if with_tags else WORD)
        else:
            found.append(f"){node.label}" if event == CLOSE else f"({node.label}")
    return found


def linear_text(tree: Tree, with_tags: bool = False) -> str:
    """The sequence as a line of text: every part with a blank before it, the first one too.

    With its blank each part is one piece of the vocabulary, and no part can be taken for the beginning of another.
    """
    return "".join(f" {part}" for part in linearize(tree, with_tags))


def reserved_pieces(trees: Iterable[Tree], with_tags: bool = False) -> list[str]:
    """The pieces of all sequences over these trees' labels, for `VaswaniTokenizer.train(…, reserved=…)`.

    Args:
        trees (`Iterable[Tree]`): the training part. with_tags (`bool`): as in `linearize`.

    Returns:
        `list[str]`: " XX", or " XX/NN" for each tag, and an opening and a closing piece for each label.
    """
    labels, words = set(), {WORD}
    for tree in trees:
        for event, node in list(tree.walk())[1:-1]:
            if event != LEAF:
                labels.add(node.label)
            elif with_tags:
                words.add(f"{TAGGED}{node.label}")
    return [*(f" {word}" for word in sorted(words)), *(f" {side}{label}" for label in sorted(labels) for side in "()")]
