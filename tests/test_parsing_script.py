"""`examples/parsing.py` from a treebank to its score."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_vaswani import VaswaniTokenizer
from hf_vaswani.data.corpus import CorpusError
from hf_vaswani.parsing import read_trees
from hf_vaswani.parsing.predictions import BEAMS, EXTRA_LENGTH, LENGTH_PENALTY, parse_sentences

SCRIPT = Path(__file__).parents[1] / "examples" / "parsing.py"
TREES = """( (S (NP-SBJ (DT The) (NN dog)) (VP (VBZ barks)) (. .)))
( (S (NP-SBJ-1 (-NONE- *)) (VP (VB Go) (ADVP (RB home)))))
( (-NONE- *))
( (S (NP-SBJ (PRP It))
     (VP (VBD ran)
         (PP (IN to) (NP (DT the) (NN house))))))
"""


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("parsing_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        return module.main()

    return call


@pytest.fixture
def prepared(tmp_path, script):
    (tmp_path / "wsj").mkdir()
    (tmp_path / "wsj" / "wsj_0001.mrg").write_text(TREES)
    (tmp_path / "valid").write_text("( (INTJ (UH Oh)))\n")
    wsj = tmp_path / "wsj"
    assert script("prepare", tmp_path / "out", "--train", wsj, "--valid", tmp_path / "valid", "--vocab-size", 272) == 0
    return tmp_path


def test_sentences_sequences_and_tokenizer_are_written_and_what_is_left_out_is_counted(prepared, script, capsys):
    out = prepared / "again"
    texts = ("--train", prepared / "wsj", "--valid", prepared / "valid", "--vocab-size", 272)
    assert script("prepare", out, *texts) == 0
    said = capsys.readouterr().err
    assert (out / "train.words").read_text() == "The dog barks .\nGo home\nIt ran to the house\n"
    assert (out / "train.brackets").read_text().splitlines()[1] == " (S (VP XX (ADVP XX )ADVP )VP )S"
    assert "train: 3 trees, 11 words, 33 parts, 1 left out that hold no word" in said
    assert "valid: 2 parts that train has not:  (INTJ  )INTJ" in said
    tokenizer = VaswaniTokenizer.from_pretrained(out / "tokenizer")
    assert len(tokenizer) == 272
    line = (out / "train.brackets").read_text().splitlines()[0]
    assert len(tokenizer(text_target=line)["input_ids"]) == len(line.split()) + 1

    assert script("prepare", out, *texts[:-1], 282, "--tags") == 0
    assert (out / "train.brackets").read_text().splitlines()[1] == " (S (VP XX/VB (ADVP XX/RB )ADVP )VP )S"
    assert "valid: 3 parts that train has not:  (INTJ  XX/UH  )INTJ" in capsys.readouterr().err


def test_a_model_parses_every_sentence_and_the_trees_are_scored(prepared, script, make_model, capsys):
    out = prepared / "out"
    tokenizer = VaswaniTokenizer.from_pretrained(out / "tokenizer")
    model = make_model(vocab_size=len(tokenizer)).eval()
    model.save_pretrained(prepared / "model")
    tokenizer.save_pretrained(prepared / "model")
    options = ("--beams", 2, "--extra-length", 4)
    capsys.readouterr()
    assert script("parse", prepared / "model", prepared / "wsj", "-o", prepared / "predicted", *options) == 0
    said = capsys.readouterr()
    assert "well formed: " in said.err
    assert " of 4 (" in said.err
    assert said.out == ""
    lines = (prepared / "predicted").read_text().splitlines()
    found = [tree.words() for tree in read_trees(lines[:2])]
    assert found == [["The", "dog", "barks", "."], ["Go", "home"]]
    assert len(lines) == 4
    assert script("parse", prepared / "model", out / "train.words", "--words", *options) == 0
    assert capsys.readouterr().out.splitlines() == [line for line in lines if line != "(TOP)"]

    assert script("score", prepared / "wsj", prepared / "predicted", "--json") == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["sentences"] == 3
    assert scores["gold"] == 3 + 3 + 5
    assert 0 <= scores["f1"] <= 100
    (prepared / "short").write_text("\n".join(lines[:3]) + "\n")
    with pytest.raises(CorpusError, match="3 lines for 4 gold trees"):
        script("score", prepared / "wsj", prepared / "short")


def test_the_right_trees_have_full_marks(prepared, script, capsys):
    right = "(S (NP (DT The) (NN dog)) (VP (VBZ barks)) (. .))\n(S (VP (VB Go) (ADVP (RB home))))\n\n"
    right += "(TOP (S (NP (PRP It)) (VP (VBD ran) (PP (IN to) (NP (DT the) (NN house))))))\n"
    (prepared / "right").write_text(right)
    capsys.readouterr()
    assert script("score", prepared / "wsj", prepared / "right") == 0
    said = capsys.readouterr()
    assert said.out.startswith("all: F1 100.00, precision 100.00, recall 100.00, complete match 100.00 %, 3 sentences")
    assert "well formed: 4 of 4 (100.00 %); mended: none" in said.err
    (prepared / "bent").write_text(right.replace("(S (VP (VB Go)", "(S (VB Go)"))
    assert script("score", prepared / "wsj", prepared / "bent") == 0
    said = capsys.readouterr()
    assert "recall 90.91" in said.out  # 10 of 11
    assert "well formed: 3 of 4 (75.00 %); mended: 1 extra closes" in said.err


def test_the_search_of_the_paper_is_the_default(make_model, monkeypatch):
    from hf_vaswani.evaluation import scoring

    assert (BEAMS, LENGTH_PENALTY, EXTRA_LENGTH) == (21, 0.3, 300)
    given = {}

    def translate(model, tokenizer, sources, **options):
        given.update(options, sources=sources)
        return [" (S XX XX )S", "XX"]

    monkeypatch.setattr(scoring, "translate_lines", translate)
    trees, repairs = parse_sentences(None, None, [["a", "b"], [], ["c"]])
    assert given["sources"] == ["a b", "c"]
    assert (given["num_beams"], given["length_penalty"], given["max_length_offset"]) == (21, 0.3, 300)
    assert [str(tree) for tree in trees] == ["(TOP (S (XX a) (XX b)))", "(TOP)", "(TOP (XX c))"]
    assert [bool(one) for one in repairs] == [False, False, True]


def test_a_faulty_treebank_ends_the_script_with_the_line(tmp_path):
    bank = tmp_path / "bank"
    bank.write_text("( (S (A a)))\n( (S (A a))\n( (S (A a)))\n")
    command = [sys.executable, SCRIPT, "prepare", tmp_path / "out", "--train", bank, "--valid", bank]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"parsing.py: {bank}, line 2: 1 bracket is not closed in the tree that begins here.\n"
    assert not (tmp_path / "out").exists()


def test_a_size_that_the_text_cannot_give_leaves_no_folder(prepared, script):
    with pytest.raises(ValueError, match="Ask for"):
        script("prepare", prepared / "other", "--train", prepared / "wsj", "--valid", prepared / "valid")
    assert not (prepared / "other").exists()
