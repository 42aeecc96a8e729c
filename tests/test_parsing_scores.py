"""Labelled bracket F1 against pairs worked out by hand, and against another scorer."""

import pytest

from hf_vaswani.parsing import BracketScores, TreebankError, read_trees, score_trees
from hf_vaswani.parsing.brackets import brackets

DOG = "(S (NP (D the) (N dog)) (VP (V ran)))"
# Gold, predicted, and by hand: right brackets, gold ones, predicted ones, crossing ones.
PAIRS = [
    (DOG, DOG, 3, 3, 3, 0),
    (DOG, "(S (PP (D the) (N dog)) (VP (V ran)))", 2, 3, 3, 0),  # a wrong label
    (DOG, "(S (D the) (N dog) (V ran))", 1, 3, 1, 0),  # too flat
    ("(S (D the) (N dog) (V ran))", DOG, 1, 1, 3, 0),  # too deep
    ("(S (NP (A a) (B b)) (VP (C c)))", "(S (A a) (X (B b) (C c)))", 1, 3, 2, 1),  # X crosses NP
    ("(S (VP (V go)))", "(S (V go))", 1, 2, 1, 0),  # a missing unary
    ("(S (VP (V go)))", "(VP (S (V go)))", 2, 2, 2, 0),  # the order of unaries is not seen
    ("(NP (NP (N a)))", "(NP (N a))", 1, 2, 1, 0),  # twice the same bracket counts twice
    ("(NP (N a))", "(NP (NP (N a)))", 1, 1, 2, 0),
    ("(NP (NP (N a)))", "(NP (NP (NP (N a))))", 2, 2, 3, 0),
    ("(S (NP (A a)) (VP (V b)) (. .))", "(S (NP (A a)) (VP (V b) (. .)))", 3, 3, 3, 0),  # the place of a full stop
    ("(NP (NP (A a)) (, ,) (NP (B b)))", "(NP (NP (A a) (, ,)) (NP (B b)))", 3, 3, 3, 0),
    ("(S (X (. .)) (V b))", "(S (. .) (V b))", 1, 1, 1, 0),  # brackets around punctuation alone
    ("(VP (V put) (PRT (R off)))", "(VP (V put) (ADVP (R off)))", 2, 2, 2, 0),
    ("(S (`` ``) (NP (A a)) ('' '') (VP (V b)))", "(S (NP (`` ``) (A a) ('' '')) (VP (V b)))", 3, 3, 3, 0),
    (
        "(PRN (-LRB- -LRB-) (NP (A a)) (-RRB- -RRB-))",  # brackets are words
        "(PRN (NP (-LRB- -LRB-) (A a)) (-RRB- -RRB-))",
        1,
        2,
        2,
        0,
    ),
    ("(TOP (S (A a)) (S (B b)))", "(TOP (S (A a)) (S (B b)))", 2, 2, 2, 0),
    ("(TOP (S (A a)) (S (B b)))", "(TOP (S (A a) (B b)))", 0, 2, 1, 0),
    (
        "(VP (V saw) (NP (NP (N man)) (PP (P with) (N scope))))",
        "(VP (V saw) (NP (N man)) (PP (P with) (N scope)))",
        3,
        4,
        3,
        0,
    ),
    ("(S (X (A a) (B b)) (Y (C c) (D d)))", "(S (A a) (Z (B b) (C c)) (D d))", 1, 3, 2, 1),  # crosses two, counts once
    ("(S (A a) (X (B b) (C c)) (D d))", "(S (Y (A a) (B b)) (Z (C c) (D d)))", 1, 2, 3, 2),
    ("(S (NP (A a)) (: ;) (NP (B b)))", "(S (NP (A a) (: ;) (B b)))", 1, 3, 2, 0),
    ("(QP ($ $) (CD 5))", "(NP (QP ($ $) (CD 5)))", 1, 1, 2, 0),  # a currency sign is a word
    ("(S (A a) (X (, ,) (B b)))", "(S (A a) (, ,) (X (B b)))", 2, 2, 2, 0),
]
# Where only the tags differ, and they do not count.
OF_TAGS = [
    (DOG, "(S (NP (XX the) (XX dog)) (VP (XX ran)))", 3, 3, 3, 0),
    ("(S (NP (A a)) (B b))", "(S (NP (. a)) (B b))", 2, 2, 2, 0),
    ("(S (NP (A a)) (. .))", "(S (NP (A a) (X .)))", 2, 2, 2, 0),
]


@pytest.mark.parametrize(("gold", "predicted", "matched", "of_gold", "of_predicted", "crossing"), [*PAIRS, *OF_TAGS])
def test_hand_worked_pairs(gold, predicted, matched, of_gold, of_predicted, crossing):
    found = score_trees(read_trees([gold]), read_trees([predicted]))
    assert (found.matched, found.gold, found.predicted) == (matched, of_gold, of_predicted)
    assert found.crossing == crossing
    assert found.complete == (matched == of_gold == of_predicted)


def test_counts_add_up_over_sentences_and_give_the_measures():
    gold = read_trees([one[0] for one in PAIRS])
    predicted = read_trees([one[1] for one in PAIRS])
    found = score_trees(gold, predicted)
    sums = [sum(one[i] for one in PAIRS) for i in (2, 3, 4, 5)]
    assert [found.matched, found.gold, found.predicted, found.crossing] == sums
    assert found.sentences == len(PAIRS) >= 20
    assert found.precision == pytest.approx(100 * sums[0] / sums[2])
    assert found.recall == pytest.approx(100 * sums[0] / sums[1])
    assert found.f1 == pytest.approx(2 * found.precision * found.recall / (found.precision + found.recall))
    assert f"F1 {found.f1:.2f}" in str(found)


def test_spans_are_numbered_without_punctuation():
    (tree,) = read_trees(["(S (`` ``) (NP (A a) (, ,) (B b)) (VP (V c) (. .)))"])
    assert brackets(tree) == [("NP", 0, 2), ("VP", 2, 3), ("S", 0, 3)]
    assert brackets(tree, ["X"] * 6) == [("NP", 1, 4), ("VP", 4, 6), ("S", 0, 6)]


def test_nothing_gives_zero_and_a_tree_without_words_is_left_out():
    assert BracketScores().f1 == BracketScores().precision == BracketScores().recall == 0.0
    from hf_vaswani.parsing import Tree

    assert score_trees([Tree("TOP")], [Tree("TOP")]).sentences == 0


def test_trees_over_other_words_are_named():
    gold = read_trees([DOG, DOG])
    with pytest.raises(TreebankError, match="2 gold trees and 1 predicted"):
        score_trees(gold, gold[:1])
    with pytest.raises(TreebankError, match="Tree 2: gold has 3 words, predicted has 1"):
        score_trees(gold, [gold[0], *read_trees(["(S (A a))"])])


def test_another_scorer_counts_the_same():
    pytest.importorskip("PYEVALB", reason="needs PYEVALB")
    from PYEVALB import parser, scorer

    compared = 0
    for gold, predicted, *_ in PAIRS:
        # It counts the top and punctuation, tells ADVP from PRT, and misses a third equal bracket.
        if any(sign in gold for sign in (", ", ". ", "`` ", "PRT")) or predicted.startswith("(NP (NP (NP"):
            continue
        ours = score_trees(read_trees([gold]), read_trees([predicted]))
        texts = [text if text.startswith("(TOP") else f"(TOP {text})" for text in (gold, predicted)]
        theirs = scorer.Scorer().score_trees(*map(parser.create_from_bracket_string, texts))
        counts = (theirs.matched_brackets, theirs.gold_brackets, theirs.test_brackets)
        assert tuple(one - 1 for one in counts) == (ours.matched, ours.gold, ours.predicted), (gold, predicted)
        compared += 1
    assert compared >= 15
