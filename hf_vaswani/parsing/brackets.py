"""Labelled bracket F1 as `evalb` counts it with Collins' parameters.

Words tagged as punctuation are taken out of both trees, then every constituent over at least one word that is left
counts as (label, first word, last word), each as often as it occurs; ADVP and PRT are one label, the top counts not.

Source: Black et al. 1991 (the measure); Collins 1997, section 6 (punctuation, ADVP and PRT).
Choice: punctuation is told by the tags of the gold tree on both sides, as predicted trees are over the same words.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .trees import LEAF, OPEN, TOP, Tree, TreebankError

PUNCTUATION = frozenset({",", ":", "``", "''", "."})
_SAME = {"PRT": "ADVP"}
Bracket = tuple[str, int, int]


@dataclass
class BracketScores:
    """Counts over a test set.

    Args:
        sentences (`int`). matched, gold, predicted (`int`): brackets of both, of the gold trees, of the predicted ones.
        complete (`int`): sentences whose brackets are all right. crossing (`int`): predicted brackets that overlap a
            gold one without one holding the other.
    """

    sentences: int = 0
    matched: int = 0
    gold: int = 0
    predicted: int = 0
    complete: int = 0
    crossing: int = 0

    @property
    def precision(self) -> float:
        """Share of the predicted brackets that are right, 0 to 100."""
        return 100 * self.matched / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Share of the gold brackets that were found, 0 to 100."""
        return 100 * self.matched / self.gold if self.gold else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall, 0 to 100."""
        total = self.gold + self.predicted
        return 200 * self.matched / total if total else 0.0

    def __str__(self) -> str:
        share = 100 * self.complete / self.sentences if self.sentences else 0.0
        return (
            f"F1 {self.f1:.2f}, precision {self.precision:.2f}, recall {self.recall:.2f}, complete match {share:.2f} %"
            f", {self.sentences:,} sentences, {self.gold:,} gold brackets, {self.crossing:,} crossing"
        )


def brackets(tree: Tree, tags: Sequence[str] | None = None) -> list[Bracket]:
    """The brackets of a tree that count.

    Args:
        tree (`Tree`): with `TOP` at its top. tags (`Sequence[str]`, *optional*): that tell punctuation, one a word;
            default: the tree's own.

    Returns:
        `list[Bracket]`: (label, first word, word after the last), numbered without punctuation, in the order of their
        closing.
    """
    tags = [leaf.label for leaf in tree.leaves()] if tags is None else tags
    found: list[Bracket] = []
    starts: list[int] = []
    place, counted = 0, 0
    for event, node in tree.walk():
        if event == OPEN:
            starts.append(counted)
        elif event == LEAF:
            counted += tags[place] not in PUNCTUATION
            place += 1
        else:
            start = starts.pop()
            if node.label != TOP and counted > start:
                found.append((_SAME.get(node.label, node.label), start, counted))
    return found


def score_trees(gold: Sequence[Tree], predicted: Sequence[Tree]) -> BracketScores:
    """Compare trees over the same words.

    Args:
        gold, predicted (`Sequence[Tree]`): in the same order; a predicted tree's tags do not matter.

    Returns:
        `BracketScores`; gold trees without words are left out.

    Raises:
        TreebankError: another number of trees, or of words in a tree, which is named; `read_predictions` mends both.
    """
    if len(gold) != len(predicted):
        raise TreebankError(f"There are {len(gold):,} gold trees and {len(predicted):,} predicted ones.")
    total = BracketScores()
    for number, (right, guess) in enumerate(zip(gold, predicted, strict=True), 1):
        tags = [leaf.label for leaf in right.leaves()]
        if len(tags) != (count := len(guess.leaves())):
            raise TreebankError(f"Tree {number:,}: gold has {len(tags):,} words, predicted has {count:,}.")
        if not tags:
            continue
        ours, theirs = Counter(brackets(right, tags)), Counter(brackets(guess, tags))
        total.sentences += 1
        total.matched += (ours & theirs).total()
        total.gold += ours.total()
        total.predicted += theirs.total()
        total.complete += ours == theirs
        spans = {(start, end) for _, start, end in ours}
        total.crossing += sum(
            count
            for (_, start, end), count in theirs.items()
            if any(a < start < b < end or start < a < end < b for a, b in spans)
        )
    return total
