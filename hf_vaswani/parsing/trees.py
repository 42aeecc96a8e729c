"""Trees of a treebank in the Penn format: read with every fault named by its line, and written.

Nothing here calls itself for a subtree: a tree may be deeper than Python's stack.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..data.corpus import CorpusError, read_lines

TOP = "TOP"
TOP_LABELS = ("", "TOP", "ROOT", "S1", "VROOT")
_EMPTY = "-NONE-"
# Blanks of ASCII alone part words: a no-break space may stand within one.
BLANKS = " \t\r\n\f\v"
_TOKENS = re.compile(rf"[()]|[^{BLANKS}()]+")
OPEN, LEAF, CLOSE = "open", "leaf", "close"


class TreebankError(CorpusError):
    """A treebank that cannot be read as it is; the message names the file and the line."""


@dataclass(eq=False, repr=False)
class Tree:
    """A constituent with its parts, or a word with its tag.

    Args:
        label (`str`): of the constituent, or the tag of the word.
        children (`list[Tree]`): the parts, in order; none for a word.
        word (`str`, *optional*): None for a constituent.
    """

    label: str
    children: list["Tree"] = field(default_factory=list)
    word: str | None = None

    def walk(self) -> Iterator[tuple[str, "Tree"]]:
        """What is met from left to right: (`OPEN`, constituent), (`LEAF`, word) and (`CLOSE`, constituent)."""
        waiting: list[tuple[str, Tree]] = [(OPEN, self)]
        while waiting:
            event, node = waiting.pop()
            if node.word is not None:
                yield LEAF, node
                continue
            yield event, node
            if event == OPEN:
                waiting.append((CLOSE, node))
                waiting.extend((OPEN, child) for child in reversed(node.children))

    def leaves(self) -> list["Tree"]:
        """The words from left to right, as trees with their tags."""
        return [node for event, node in self.walk() if event == LEAF]

    def words(self) -> list[str]:
        """The words from left to right."""
        return [leaf.word or "" for leaf in self.leaves()]

    def __str__(self) -> str:
        parts: list[str] = []
        for event, node in self.walk():
            if event == CLOSE:
                parts.append(")")
            else:
                parts.append(f" ({node.label}" if event == OPEN else f" ({node.label} {node.word})")
        return "".join(parts).strip()

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tree) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


def read_trees(lines: Iterable[str], name: str = "text") -> list[Tree]:
    """Trees as they are written, one after another, each on a line or over several.

    A bracket in the first column begins a tree, as in all Penn treebanks, so that a bracket that is missing is found on
    its own tree and not at the end of the file. Tops may be without a label and may have several children; a tree
    without a top gets one. Every tree of the text is in the list, whatever is left of it.

    Args:
        lines (`Iterable[str]`): without or with line ends. name (`str`): for messages.

    Returns:
        `list[Tree]`: each with the label `TOP` at its top.

    Raises:
        TreebankError: brackets that do not match, a leaf without a word, a word beside brackets, or a word outside.

    Choice: several atoms in one leaf, such as (NN Xpd TTD), are one word with a blank within: the tag is of all of it.
    """
    trees: list[Tree] = []
    open_nodes: list[Tree] = []
    begun = 0
    for number, line in enumerate(lines, 1):
        if line.startswith("(") and open_nodes:
            raise _unclosed(name, begun, len(open_nodes))
        expects_label = False
        for token in _TOKENS.findall(line):
            place = f"{name}, line {number}"
            if token == "(":
                node = Tree("")
                if open_nodes:
                    if open_nodes[-1].word is not None:
                        raise TreebankError(f"{place}: the word {open_nodes[-1].word!r} has brackets beside it.")
                    open_nodes[-1].children.append(node)
                else:
                    begun = number
                open_nodes.append(node)
            elif token == ")":
                if not open_nodes:
                    raise TreebankError(f"{place}: a closing bracket has no opening one.")
                node = open_nodes.pop()
                if node.word is None and not node.children:
                    raise TreebankError(f"{place}: the leaf ({node.label} ) has no word.")
                if not open_nodes:
                    trees.append(_with_top(node))
            elif not open_nodes:
                raise TreebankError(f"{place}: {token[:40]!r} stands outside of all brackets.")
            elif expects_label:
                open_nodes[-1].label = token
            elif open_nodes[-1].children:
                raise TreebankError(f"{place}: the word {token[:40]!r} has brackets beside it.")
            elif open_nodes[-1].word is not None:  # real treebanks have a few words with a blank within
                open_nodes[-1].word += f" {token}"
            else:
                open_nodes[-1].word = token
            expects_label = token == "("
    if open_nodes:
        raise _unclosed(name, begun, len(open_nodes))
    return trees


def _unclosed(name: str, begun: int, count: int) -> TreebankError:
    brackets = "1 bracket is" if count == 1 else f"{count} brackets are"
    return TreebankError(f"{name}, line {begun}: {brackets} not closed in the tree that begins here.")


def _with_top(node: Tree) -> Tree:
    if node.word is None and node.label in TOP_LABELS:
        node.label = TOP
        return node
    return Tree(TOP, [node])


def read_treebank(path: str | os.PathLike[str], is_bare: bool = True) -> list[Tree]:
    """The trees of a file, plain, .gz or .zst.

    Args:
        path: of the file.
        is_bare (`bool`): without empty elements, and without functions and indices in labels, as parsers are trained
            and scored.

    Raises:
        TreebankError: see `read_trees`. CorpusError: a file that is missing or no text.
    """
    trees = read_trees(read_lines(path), str(path))
    return [bare(tree) for tree in trees] if is_bare else trees


def bare(tree: Tree) -> Tree:
    """A tree without empty elements ("-NONE-"), constituents that hold nothing else, functions and indices.

    Args:
        tree (`Tree`): is not changed.

    Returns:
        `Tree`: a new one; its top may be without children.
    """
    stack = [Tree(tree.label)]
    for event, node in list(tree.walk())[1:-1]:
        if event == OPEN:
            stack.append(Tree(bare_label(node.label)))
        elif event == LEAF:
            if node.label != _EMPTY:
                stack[-1].children.append(Tree(node.label, word=node.word))
        else:
            done = stack.pop()
            if done.children:
                stack[-1].children.append(done)
    return stack[0]


def bare_label(label: str) -> str:
    """ "NP" of "NP-SBJ-1" and of "NP=2"; a label that begins with a sign, such as "-LRB-", stays."""
    return re.split(r"(?<!^)[-=]", label, maxsplit=1)[0] if label[:1] not in "-=" else label
