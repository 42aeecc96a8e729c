"""Treebanks read, written as sequences, and mended from whatever a model wrote."""

import re
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_vaswani import VaswaniTokenizer
from hf_vaswani.data.corpus import read_lines
from hf_vaswani.parsing import (
    Repairs,
    Tree,
    TreebankError,
    linear_text,
    linearize,
    read_predictions,
    read_treebank,
    read_trees,
    rebuild,
    reserved_pieces,
    score_trees,
)
from hf_vaswani.parsing.trees import bare, bare_label

DATA = Path(__file__).parents[2] / "shared" / "data"
CRAFT = DATA / "treebank_craft"
WSJ = DATA / "treebank_wsj_sample" / "treebank.zip"


def one(text):
    (tree,) = read_trees([text])
    return tree


# --------------------------------------------------------------------------- reading
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("( (S (A a)))", "(TOP (S (A a)))"),
        ("( (S (A a)) (S (B b)))", "(TOP (S (A a)) (S (B b)))"),
        ("(TOP (S (A a)))", "(TOP (S (A a)))"),
        ("(ROOT (S (A a)))", "(TOP (S (A a)))"),
        ("(S1 (S (A a)))", "(TOP (S (A a)))"),
        ("(S (A a))", "(TOP (S (A a)))"),
        ("(A a)", "(TOP (A a))"),
        ("((S(A a)(B b)))", "(TOP (S (A a) (B b)))"),
        ("( (SYM = ) )", "(TOP (SYM =))"),
        ("(NN Xpd TTD)", "(TOP (NN Xpd TTD))"),
        ("(NN a\u00a0b)", "(TOP (NN a\u00a0b))"),
    ],
)
def test_tops_of_all_kinds_are_read(text, expected):
    assert str(one(text)) == expected
    assert str(one(expected)) == expected


def test_trees_lie_on_a_line_or_over_several_and_all_are_there():
    text = "( (S\n    (NP (DT a) (NN b) )\n    (VP (V c) )))\n\n(S (A a)) (S (B b))\n( (X (C c)))\n"
    assert [str(tree) for tree in read_trees(text.split("\n"))] == [
        "(TOP (S (NP (DT a) (NN b)) (VP (V c))))",
        "(TOP (S (A a)))",
        "(TOP (S (B b)))",
        "(TOP (X (C c)))",
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["(S (A a))", "(S (HYPH ) (A a))"], "bank, line 2: the leaf (HYPH ) has no word."),
        (["(S (A a))", "(S ((B) b) (A a))"], "bank, line 2: the leaf (B ) has no word."),
        (["(S (A a)", "(S (A a))"], "bank, line 1: 1 bracket is not closed in the tree that begins here."),
        (["(S (A a))", "(S (B (C c)", "", "  (D d)"], "bank, line 2: 2 brackets are not closed in the tree"),
        (["(S (A a))", "(S (A a)))"], "bank, line 2: a closing bracket has no opening one."),
        (["(S (A a))", " a"], "bank, line 2: 'a' stands outside of all brackets."),
        (["(S (A a) b)"], "bank, line 1: the word 'b' has brackets beside it."),
        (["(S", "(A a))"], "bank, line 1: 1 bracket is not closed"),
        (["(S b", "  (A a))"], "bank, line 2: the word 'b' has brackets beside it."),
        (["()"], "bank, line 1: the leaf ( ) has no word."),
    ],
)
def test_a_fault_is_named_with_its_line(lines, message):
    with pytest.raises(TreebankError, match=re.escape(message)):
        read_trees(lines, "bank")


def test_a_file_is_named_too_and_packed_ones_are_read(tmp_path):
    import gzip

    path = tmp_path / "bank.gz"
    path.write_bytes(gzip.compress(b"( (S (NP-SBJ (-NONE- *)) (VP=2 (V go))))\n( (S (A a))\n"))
    with pytest.raises(TreebankError, match=re.escape(f"{path}, line 2: 1 bracket")):
        read_treebank(path)
    path.write_bytes(gzip.compress(b"( (S (NP-SBJ (-NONE- *)) (VP=2 (V go))))\n( (-NONE- *))\n"))
    assert [str(tree) for tree in read_treebank(path)] == ["(TOP (S (VP (V go))))", "(TOP)"]
    assert [str(tree) for tree in read_treebank(path, is_bare=False)][1] == "(TOP (-NONE- *))"


def test_empty_elements_and_functions_are_taken_off_and_the_tree_stays():
    tree = one("(S (NP-SBJ-1 (NP (-NONE- *)) (-LRB- -LRB-) (PRP$ my)) (VP (S (NP (-NONE- *T*-1)))))")
    before = str(tree)
    assert str(bare(tree)) == "(TOP (S (NP (-LRB- -LRB-) (PRP$ my))))"
    assert str(tree) == before
    assert [bare_label(label) for label in ("NP-SBJ=2", "-NONE-", "PRT|ADVP", "S", "WHNP-1")] == [
        "NP",
        "-NONE-",
        "PRT|ADVP",
        "S",
        "WHNP",
    ]


def test_a_tree_deeper_than_the_stack_is_read_written_and_scored():
    depth = 5000
    text = "(X " * depth + "(A a)" + ")" * depth
    tree = one(text)
    assert len(linearize(tree)) == 2 * depth + 1
    again, repairs = rebuild(linearize(tree), ["a"], ["A"])
    assert not repairs
    assert again == tree
    assert bare(tree) == tree
    found = score_trees([tree], [again])
    assert (found.matched, found.gold) == (depth, depth)


# --------------------------------------------------------------------------- sequences
def test_the_sequence_has_no_words_and_one_part_for_every_tag():
    tree = one("(S (NP (PRP They)) (VP (VBP wait)) (. .))")
    assert linear_text(tree) == " (S (NP XX )NP (VP XX )VP XX )S"
    assert linear_text(one("( (S (A a)) (S (B b)))")) == " (S XX )S (S XX )S"
    assert linear_text(tree, with_tags=True) == " (S (NP XX/PRP )NP (VP XX/VBP )VP XX/. )S"


@pytest.mark.parametrize("with_tags", [False, True])
def test_every_part_is_one_piece_of_the_tokenizer_and_comes_back(with_tags):
    trees = [one("(S (SBAR (A a) (B b)) (SB (C c)) (NP-X (-LRB- d) (NNS d) (NN d)))"), one("(XX (/ a))")]
    reserved = reserved_pieces(trees, with_tags)
    assert len(reserved) == len(set(reserved)) == 10 + (1 + 7 if with_tags else 1)
    tokenizer = VaswaniTokenizer.train(["a b c d"] * 3, 300, reserved=reserved, allow_fewer=True)
    for tree in trees:
        text = linear_text(tree, with_tags)
        ids = tokenizer(text_target=text)["input_ids"]
        assert len(ids) == len(linearize(tree)) + 1
        assert tokenizer.decode(ids) == text


@st.composite
def trees(draw):
    """Random trees: a stack of open brackets that grows, shrinks and takes words."""
    top = Tree("TOP")
    stack, count = [top], 0
    for step in draw(st.lists(st.sampled_from("(()wwSN"), max_size=30)):
        if step in "(SN":
            node = Tree({"(": "X"}.get(step, step))
            stack[-1].children.append(node)
            stack.append(node)
        elif step == "w":
            stack[-1].children.append(Tree(f"T/{count % 3}", word=f"w{count}"))
            count += 1
        elif len(stack) > 1:
            stack.pop()
    return bare(top)


@given(trees())
@settings(max_examples=150, deadline=None)
def test_a_tree_becomes_a_sequence_and_the_same_tree_again_without_repair(tree):
    words = tree.words()
    again, repairs = rebuild(linearize(tree), words, [leaf.label for leaf in tree.leaves()])
    assert again == tree
    assert rebuild(linearize(tree, with_tags=True), words) == (tree, repairs)
    assert [leaf.label for leaf in rebuild(linearize(tree), words)[0].leaves()] == ["XX"] * len(words)
    assert bool(repairs) == bool(words and not any(part.startswith("(") for part in linearize(tree)))


PARTS = st.lists(
    st.sampled_from(["(S", "(NP", ")S", ")NP", ")", "XX", "XX/T", "oops", "(", "()", "((", ")TOP"]), max_size=25
)


@given(PARTS, st.integers(0, 8))
@settings(max_examples=300, deadline=None)
def test_whatever_is_written_becomes_a_tree_over_exactly_the_words(parts, count):
    words = [f"w{i}" for i in range(count)]
    tree, repairs = rebuild(parts, words)
    assert tree.words() == words
    assert tree.label == "TOP"
    assert all(node.children or node.word for _, node in list(tree.walk())[1:-1])
    if not repairs:
        assert linearize(tree) == [part.removesuffix("/T") for part in parts if part != ")"] or ")" in parts
    assert not rebuild(linearize(tree), words)[1] or not any(part[0] == "(" for part in linearize(tree))


@pytest.mark.parametrize(
    ("parts", "expected", "repairs"),
    [
        ("(S (NP XX )NP XX )S", "(TOP (S (NP (XX a)) (XX b)))", {}),
        ("(S (NP XX XX )S", "(TOP (S (NP (XX a) (XX b))))", {"missing_closes": 1}),
        ("(S (NP XX XX", "(TOP (S (NP (XX a) (XX b))))", {"missing_closes": 2}),
        ("(S XX )NP XX )S", "(TOP (S (XX a) (XX b)))", {"extra_closes": 1}),
        ("(S XX XX )S )S", "(TOP (S (XX a) (XX b)))", {"extra_closes": 1}),
        ("(S (NP XX )NP )S", "(TOP (S (NP (XX a)) (XX b)))", {"missing_words": 1}),
        ("(S (NP XX", "(TOP (S (NP (XX a) (XX b))))", {"missing_words": 1, "missing_closes": 2}),
        ("(S XX XX XX XX )S", "(TOP (S (XX a) (XX b)))", {"extra_words": 2}),
        ("(S (NP )NP XX XX )S", "(TOP (S (XX a) (XX b)))", {"empty_brackets": 1}),
        ("(S (X (Y )Y )X XX XX )S", "(TOP (S (XX a) (XX b)))", {"empty_brackets": 2}),
        ("(S XX the XX )S", "(TOP (S (XX a) (XX b)))", {"unknown_parts": 1}),
        ("", "(TOP (XX a) (XX b))", {"missing_words": 2, "absent_trees": 1}),
        ("XX XX", "(TOP (XX a) (XX b))", {"absent_trees": 1}),
        ("(S (S XX )S XX )S", "(TOP (S (S (XX a)) (XX b)))", {}),
    ],
)
def test_each_kind_of_repair_is_made_and_counted(parts, expected, repairs):
    tree, found = rebuild(parts.split(), ["a", "b"])
    assert str(tree) == expected
    assert found == Repairs(**repairs)
    assert bool(found) == bool(repairs)


def test_repairs_add_up_and_are_told_in_words():
    total = sum([Repairs(extra_words=2), Repairs(), Repairs(extra_words=1, missing_closes=1000)], Repairs())
    assert str(total) == "1,000 missing closes, 3 extra words"
    assert str(Repairs()) == "none"


# --------------------------------------------------------------------------- trees of other parsers
@pytest.mark.parametrize(
    ("gold", "line", "expected", "repairs"),
    [
        ("( (S (A a)) (S (B b)))", "( (S (A a)) (S (B b)))", "(TOP (S (A a)) (S (B b)))", {}),
        ("(S (A a) (B b))", "(TOP (S (X a) (B b)))", "(TOP (S (X a) (B b)))", {}),
        ("(S (A a) (B b))", "(S (NP (A a) (B b))", "(TOP (S (NP (A a) (B b))))", {"missing_closes": 1}),
        ("(S (A a) (B b))", "(TOP (S (A a) (B b))", "(TOP (S (A a) (B b)))", {"missing_closes": 1}),
        ("(S (A a) (B b))", "(TOP (S (A a) (B b))))", "(TOP (S (A a) (B b)))", {"extra_closes": 1}),
        ("(S (A a) (B b))", "(TOP (S (A a))) (B b))", "(TOP (S (A a)) (B b))", {"extra_closes": 1}),
        ("(S (HYPH -) (A a))", "(S (HYPH ) (A a))", "(TOP (S (HYPH -) (A a)))", {}),
        ("(S (A a))", "(S (HYPH ) (A a))", "(TOP (S (A a)))", {"empty_brackets": 1}),
        ("(S (A a) (B b))", "", "(TOP (XX a) (XX b))", {"missing_words": 2, "absent_trees": 1}),
        ("(S (NN Xpd TTD))", "(S (NN Xpd TTD))", "(TOP (S (NN Xpd TTD)))", {}),
        ("(S (A a))", "(S (A other))", "(TOP (S (A a)))", {}),
    ],
)
def test_a_predicted_line_becomes_a_tree_over_the_gold_words(gold, line, expected, repairs):
    right = read_trees([gold])
    (tree,), (mended,) = read_predictions([line], right)
    assert str(tree) == expected
    assert mended == Repairs(**repairs)
    score_trees(right, [tree])


def test_a_predicted_chain_three_hundred_deep_is_scored():
    gold = read_trees(["(S (A a))"])
    (tree,), (mended,) = read_predictions(["(X " * 300 + "(A a)" + ")" * 300], gold)
    assert not mended
    found = score_trees(gold, [tree])
    assert (found.matched, found.predicted) == (0, 300)


def test_another_number_of_lines_is_refused_with_both_numbers():
    gold = read_trees(["(S (A a))", "(S (B b))"])
    with pytest.raises(TreebankError, match=r"out\.txt has 1 lines for 2 gold trees"):
        read_predictions(["(S (A a))"], gold, "out.txt")


# --------------------------------------------------------------------------- real treebanks
@pytest.mark.skipif(not CRAFT.is_dir(), reason="needs ../shared/data/treebank_craft")
def test_the_trees_of_craft_are_all_read_and_come_back_from_their_sequences():
    path = CRAFT / "craft.dev.trees.gz"
    found = read_treebank(path)
    assert len(found) == 2780
    text = "\n".join(read_lines(path))
    in_leaves = re.findall(r"\(([^\s()]+) ([^\s()]+)\)", text)
    assert sum(len(tree.leaves()) for tree in found) == sum(tag != "-NONE-" for tag, _ in in_leaves) + 2  # with blanks
    for tree in found:
        words, tags = tree.words(), [leaf.label for leaf in tree.leaves()]
        again, repairs = rebuild(linearize(tree), words, tags)
        assert again == tree
        assert not repairs
    (reread, mended) = read_predictions(map(str, found), found)
    assert reread == found
    assert not any(mended)


@pytest.mark.skipif(not WSJ.is_file(), reason="needs ../shared/data/treebank_wsj_sample")
def test_the_trees_of_the_wsj_sample_are_all_read():
    count = words = 0
    with zipfile.ZipFile(WSJ) as packed:
        for name in packed.namelist():
            if name.endswith(".mrg"):
                for tree in read_trees(packed.read(name).decode("utf-8").split("\n"), name):
                    count += 1
                    words += len(bare(tree).leaves())
    assert (count, words) == (3914, 94084)
