"""`hf-vaswani evaluate` and `hf-vaswani score`: files in, numbers out, faults in one sentence."""

import gzip
import json
import math
import os
import threading

import pytest
import torch

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer
from hf_vaswani.cli.main import main
from hf_vaswani.evaluation import evaluate_model, score_lines, score_pairs
from hf_vaswani.evaluation.bleu import default_kinds

SOURCES = ["ein Hund", "zwei sehr kleine Katzen schlafen", "", "kein Vogel singt", "42"]
REFERENCES = ["a dog", "two very small cats sleep", "", "no bird sings", "42"]
# Twenty lines in which every kind of score finds something of its own.
PEOPLE = ["Der Vater", "Die Mutter", "Das Kind", "Mein Freund", "Unsere Lehrerin"]
TWENTY_REFERENCES = [f"{one} kauft ein {what}, das z.B. 3,50 Euro kostet." for one in PEOPLE
                     for what in ("rot-grünes Hemd", "T-Shirt", "Zwei-Mann-Zelt", "Buch")]  # fmt: skip
TWENTY = [line.replace("kauft", "kaufte") if i % 2 else line.replace("rot", "blau") for i, line in
          enumerate(TWENTY_REFERENCES)]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An untrained model that says something different for each line, at most six tokens long."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = VaswaniTokenizer.train(SOURCES + REFERENCES, vocab_size=280, allow_fewer=True)
    torch.manual_seed(4)
    model = VaswaniForConditionalGeneration(
        VaswaniConfig(vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=2, num_attention_heads=2,
                      d_ff=24)
    )  # fmt: skip
    model.generation_config.max_new_tokens = 6
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def loaded(folder):
    return VaswaniForConditionalGeneration.from_pretrained(folder), VaswaniTokenizer.from_pretrained(folder)


@pytest.fixture
def write(tmp_path):
    """Writes lines to a new file and gives its path as text."""

    def to(name, lines):
        content = "".join(f"{line}\n" for line in lines).encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return str(path)

    return to


@pytest.fixture
def run(capfd):
    """Runs a command and gives its exit status and the lines of both streams."""

    def command(*arguments):
        status = main([str(one) for one in arguments])
        output = capfd.readouterr()
        return status, output.out.splitlines(), output.err.splitlines()

    return command


# ------------------------------------------------------------------ evaluate
def test_each_kind_is_printed_by_its_name_with_its_signature_and_the_perplexity_last(folder, loaded, write, run):
    status, out, err = run("evaluate", folder, write("s", SOURCES), write("r.gz", REFERENCES))
    assert status == 0
    kinds = default_kinds(None)
    expected = evaluate_model(*loaded, SOURCES, REFERENCES, kinds=kinds)
    assert out[:-1] == [str(score) for score in expected.scores]
    assert [line.split(" (")[0].rsplit(" ", 1)[0] for line in out[:-1]] == [
        "sacreBLEU", "tokenised BLEU", "compound-split BLEU", "chrF", "TER",
    ]  # fmt: skip
    scores = [one for one in score_pairs(*loaded, list(zip(SOURCES, REFERENCES, strict=True))) if one.pieces]
    count = sum(len(one.pieces) for one in scores)
    number = math.exp(-sum(one.log_prob for one in scores) / count)
    assert out[-1] == f"perplexity {number:.2f} (per:subword token|tokens:{count}|pairs:4|precision:float32)"
    assert err == ["1 of 5 lines have a blank side and are not in the perplexity."]


def test_translations_are_written_and_are_those_of_translate(folder, write, run, tmp_path):
    source, output = write("s", SOURCES), tmp_path / "out.txt"
    output.write_text("old")
    for beams in ("1", "5"):
        _, translated, _ = run("translate", folder, source, "--beams", beams)
        arguments = ["--output", output, "--beams", beams, "--batch-size", "2", "--kinds", "chrf"]
        assert run("evaluate", folder, source, write("r", REFERENCES), *arguments)[0] == 0
        assert output.read_bytes().decode().split("\n")[:-1] == "\n".join(translated).split("\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.txt", "r", "s"]


def test_three_kinds_of_twenty_lines_that_exist_already(write, run):
    hypotheses, reference = write("h.gz", TWENTY), write("r", TWENTY_REFERENCES)
    arguments = ["--kinds", "sacrebleu,tokenised,compound-split", "--target-language", "de"]
    status, out, err = run("evaluate", "--hypotheses", hypotheses, reference, *arguments)
    assert (status, err) == (0, [])
    names, numbers, signatures = zip(*map(split_line, out), strict=True)
    assert names == ("sacreBLEU", "tokenised BLEU", "compound-split BLEU")
    assert len(set(numbers)) == 3
    assert ["tok:13a" in signatures[0], "tok:moses-de" in signatures[1], "split:hyphens" in signatures[2]] == [True] * 3
    expected = score_lines(TWENTY, TWENTY_REFERENCES, arguments[1].split(","), target_language="de")
    assert out == [str(score) for score in expected]


def split_line(line):
    front, signature = line.removesuffix(")").split(" (")
    name, number = front.rsplit(" ", 1)
    return name, float(number), signature


def test_settings_reach_the_scorers(write, run):
    hypotheses, reference = write("h", ["„GUT“, sagt er"]), write("r", ['"gut", sagt er'])
    base = ["evaluate", "--hypotheses", hypotheses, reference, "--kinds"]
    lower = run(*base, "sacrebleu,chrf", "--lowercase", "--tokenize", "intl")[1]
    assert "case:lc|eff:no|tok:intl" in lower[0]
    assert "case:lc" in lower[1]
    (normal,) = run(*base, "tokenised", "--lowercase", "--normalize-punctuation", "--target-language", "de_DE")[1]
    assert normal.startswith("tokenised BLEU 100.00 (nrefs:1|case:lc|eff:no|tok:moses-de|norm:moses-de|")
    assert "tok:zh" in run(*base, "sacrebleu", "--target-language", "zh")[1][0]
    assert len(run(*base[:-1], "--target-language", "zh")[1]) == 2  # sacreBLEU and chrF


def test_one_json_object_says_the_same(folder, write, run):
    files = [write("s", SOURCES), write("r", REFERENCES)]
    status, out, _ = run("evaluate", folder, *files, "--kinds", "chrf,ter", "--json")
    assert status == 0
    found = json.loads("\n".join(out))
    lines = run("evaluate", folder, *files, "--kinds", "chrf,ter")[1]
    assert lines == [f"{one['name']} {one['score']:.2f} ({one['signature']})" for one in found["scores"]] + [
        f"perplexity {found['perplexity']:.2f} ({found['perplexity_signature']})"
    ]
    assert [one["kind"] for one in found["scores"]] == ["chrf", "ter"]
    assert found["lines"] == 5
    existing = json.loads(run("evaluate", "--hypotheses", *files, "--kinds", "sacrebleu", "--json")[1][0])
    assert "perplexity" not in existing
    assert existing["scores"][0]["details"].startswith("9.1/7.1/")


def test_a_reference_that_is_tokenised_brings_one_line_of_warning(write, run):
    hypotheses = write("h", ["Er kam, sah und siegte."] * 3)
    tokens = write("tok", ["Er kam , sah und siegte ."] * 3)
    status, out, err = run("evaluate", "--hypotheses", hypotheses, tokens)
    assert (status, len(out), len(err)) == (0, 5, 1)
    assert err[0].startswith(f'hf-vaswani evaluate: warning: {tokens} looks tokenised (many lines with " ,")')
    assert run("evaluate", "--hypotheses", hypotheses, write("same", ["Er kam, sah und siegte."] * 3))[2] == []
    assert tokens in run("evaluate", "--hypotheses", tokens, hypotheses)[2][0]


def test_references_are_read_as_they_were_written(write, run):
    hypotheses, reference = write("h", ["a b c\u0091 d e"]), write("r", ["\ufeffa b c\u0091 d e\r"])
    assert run("evaluate", "--hypotheses", hypotheses, reference, "--kinds", "chrf")[1][0].startswith("chrF 100.00")
    plain = write("p", ["a b c d e"])
    assert not run("evaluate", "--hypotheses", hypotheses, plain, "--kinds", "chrf")[1][0].startswith("chrF 100.00")


def test_what_the_user_got_wrong_in_evaluate_is_one_sentence(folder, write, run, tmp_path, monkeypatch):
    source, reference, short = write("s", SOURCES), write("r", REFERENCES), write("x", REFERENCES[:4])
    (tmp_path / "latin").write_bytes(b"ab\n\xe4\n")
    monkeypatch.setattr("hf_vaswani.evaluation.bleu.find_spec", lambda module: None)
    empty = write("empty", [])
    model_files = [folder, source, reference]
    for arguments, message in [
        ([folder, source], "give MODEL SRC REF, or --hypotheses FILE and REF alone"),
        (["--hypotheses", source, source, reference], "give MODEL SRC REF, or --hypotheses FILE and REF alone"),
        ([folder, source, short], "5 lines"),
        ([folder, empty, empty], "there is nothing to score"),
        ([folder, source, tmp_path / "gone"], "gone: no such file"),
        (["--hypotheses", short, reference], "x has 4 lines, "),
        (["--hypotheses", reference, reference], "r is given twice, as translations and as their references"),
        ([folder, reference, reference], "hold the same text"),
        (["--hypotheses", empty, empty], "there is nothing to score"),
        (["--hypotheses", tmp_path / "latin", reference], "latin, line 2: byte 1 (0xe4) is not UTF-8"),
        ([tmp_path / "none", source, reference], "none: no such folder"),
        ([*model_files, "--kinds", "bleu"], "'bleu' is no kind of score; there are sacrebleu, tokenised"),
        ([*model_files, "--kinds", ""], "'' is no kind of score"),
        ([*model_files, "--target-language", "ja"], "Japanese needs a segmenter that is not installed: pip install"),
        ([*model_files, "--output", tmp_path], "is a folder: name a file with --output"),
        ([*model_files, "--output", tmp_path / "no" / "out"], "is not a folder that you may write to"),
        (["--hypotheses", source, reference, "--output", tmp_path / "o"], "--output and --beams are for translating"),
        (["--hypotheses", source, reference, "--beams", "2"], "--output and --beams are for translating"),
        ([*model_files, "--output", reference], "r is one of the files to be read"),
        ([*model_files, "--output", os.devnull], "is no plain file"),
        ([*model_files, "--kinds", "chrf", "--tokenize", "zh"], "--tokenize is for sacreBLEU"),
        ([*model_files, "--kinds", "chrf", "--normalize-punctuation"], "--normalize-punctuation is for tokenised"),
    ]:
        status, out, err = run("evaluate", *arguments)
        assert (status, out, len(err)) == (2, [], 1), message
        assert err[0].startswith("hf-vaswani evaluate: ")
        assert message in err[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "latin", "r", "s", "x"]


@pytest.fixture
def pipe(tmp_path):
    """Gives the path of a pipe that hands out these lines once."""

    def to(name, lines):
        path = tmp_path / name
        os.mkfifo(path)
        threading.Thread(target=path.write_text, args=["".join(f"{line}\n" for line in lines)], daemon=True).start()
        return str(path)

    return to


@pytest.mark.timeout(100)
def test_what_can_be_read_only_once_is_read_once(folder, write, pipe, run):
    source, reference = write("s", SOURCES), write("r", REFERENCES)
    for number, arguments in enumerate(
        [
            lambda one: ["evaluate", folder, one("s", SOURCES), one("r", REFERENCES), "--kinds", "chrf"],
            lambda one: ["evaluate", "--hypotheses", one("s", SOURCES), one("r", REFERENCES), "--kinds", "chrf"],
            lambda one: ["score", folder, one("s", SOURCES), one("r", REFERENCES)],
            lambda one: ["translate", folder, one("s", SOURCES)],
        ]
    ):
        expected = run(*arguments(lambda name, _: {"s": source, "r": reference}[name]))
        assert expected[0] == 0
        assert run(*arguments(lambda name, lines: pipe(f"{name}{number}", lines))) == expected  # noqa: B023


def test_kinds_may_be_written_with_blanks_and_twice(folder, write, run):
    files = [write("s", SOURCES), write("r", REFERENCES)]
    out = run("evaluate", "--hypotheses", *files, "--kinds", "ter, chrf,ter")[1]
    assert [line.split(" ")[0] for line in out] == ["TER", "chrF"]


def test_a_link_as_output_stays_a_link(folder, write, run, tmp_path):
    (tmp_path / "link").symlink_to("real")
    arguments = [write("s", SOURCES), write("r", REFERENCES), "--kinds", "chrf", "--output", tmp_path / "link"]
    assert run("evaluate", folder, *arguments)[0] == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes().count(b"\n") == 5


def test_without_a_perplexity_the_translations_have_their_scores(folder, write, run, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("Pair 2 is too long.")

    files = [write("s", SOURCES), write("r", REFERENCES)]
    expected = run("evaluate", folder, *files, "--kinds", "chrf")[1][:-1]
    monkeypatch.setattr("hf_vaswani.evaluation.score_pairs", refuse)
    status, out, err = run("evaluate", folder, *files, "--kinds", "chrf")
    assert (status, out) == (0, expected)
    assert err == ["hf-vaswani evaluate: no perplexity. Pair 2 is too long."]
    found = json.loads(run("evaluate", folder, *files, "--kinds", "chrf", "--json")[1][0])
    assert (found["perplexity"], found["perplexity_signature"]) == (None, None)


def test_weights_that_are_no_numbers_are_one_sentence_of_every_command(loaded, write, run, tmp_path):
    model, tokenizer = loaded
    with torch.no_grad():
        kept = model.model.shared.weight.clone()
        model.model.shared.weight.fill_(math.nan)
        model.save_pretrained(tmp_path / "nan")
        model.model.shared.weight.copy_(kept)
    tokenizer.save_pretrained(tmp_path / "nan")
    files = [write("s", SOURCES), write("r", REFERENCES)]
    for command, count in (("translate", 1), ("evaluate", 2), ("score", 2)):
        status, out, err = run(command, tmp_path / "nan", *files[:count])
        assert (status, out, len(err)) == (2, [], 1)
        assert err[0].startswith(f"hf-vaswani {command}: ")
        assert "not finite" in err[0]


def test_a_disk_that_fills_up_leaves_the_older_translations(folder, write, run, tmp_path, monkeypatch):
    from pathlib import Path

    output = tmp_path / "out"
    output.write_text("old")

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    status, _, err = run("evaluate", folder, write("s", SOURCES), write("r", REFERENCES), "--output", output)
    assert status == 2
    assert err == [f"hf-vaswani evaluate: {output} cannot be written: No space left on device."]
    assert output.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "r", "s"]


# ------------------------------------------------------------------ score
def test_every_pair_has_its_row_and_the_perplexity_goes_to_standard_error(folder, loaded, write, run, monkeypatch):
    scores = score_pairs(*loaded, list(zip(SOURCES, REFERENCES, strict=True)))
    rows = [[f"{one.log_prob:.4f}", str(len(one.pieces)), f"{one.mean:.4f}"] for one in scores]
    files = [write("s", SOURCES), write("r", REFERENCES)]
    for at_once in (10_000, 2):  # whole, and in windows
        monkeypatch.setattr("hf_vaswani.cli.score._PAIRS_AT_ONCE", at_once)
        status, out, err = run("score", folder, *files)
        assert status == 0
        assert [line.split("\t") for line in out] == rows
        total, count = sum(one.log_prob for one in scores), sum(len(one.pieces) for one in scores)
        assert err == [
            f"perplexity {math.exp(-total / count):.4f} per token, of {count} tokens",
            "1 of 5 pairs have a blank side; they were not scored.",
        ]
    assert rows[2] == ["0.0000", "0", "0.0000"]


def test_each_token_comes_with_its_log_probability(folder, loaded, write, run):
    files = [write("s", SOURCES), write("r", REFERENCES)]
    _, out, _ = run("score", folder, *files, "--tokens", "--batch-tokens", "1")
    for line, one in zip(out, score_pairs(*loaded, list(zip(SOURCES, REFERENCES, strict=True))), strict=True):
        total, count, _, tokens = line.split("\t")
        tokens = json.loads(tokens)
        assert [piece for piece, _ in tokens] == one.pieces
        assert [value for _, value in tokens] == pytest.approx(one.log_probs, abs=1e-4)
        assert float(total) == pytest.approx(sum(value for _, value in tokens), abs=1e-3)
        assert int(count) == len(tokens)


def test_what_the_user_got_wrong_in_score_is_one_sentence(folder, write, run, tmp_path, monkeypatch):
    source, reference, short = write("s", SOURCES), write("r", REFERENCES), write("x", REFERENCES[:4])
    for arguments, message in [
        ([folder, source, tmp_path / "gone"], "gone: no such file"),
        ([tmp_path / "none", source, reference], "none: no such folder"),
        ([folder, source, short], "5 lines"),
    ]:
        status, out, err = run("score", *arguments)
        assert (status, out, len(err)) == (2, [], 1)
        assert message in err[0]
    assert run("score", folder, write("e", []), write("e", []))[1:] == ([], [])

    def refuse(*_, first_number, **__):
        raise ValueError(f"Pair {first_number} is too long.")

    monkeypatch.setattr("hf_vaswani.cli.score._PAIRS_AT_ONCE", 2)
    monkeypatch.setattr(
        "hf_vaswani.evaluation.score_pairs",
        lambda *rest, first_number, **options: refuse(first_number=first_number) if first_number > 1 else [],
    )
    status, _, err = run("score", folder, source, reference)
    assert (status, err) == (2, [f"hf-vaswani score: {source} and {reference}: Pair 3 is too long."])
    monkeypatch.setattr("hf_vaswani.evaluation.score_pairs", refuse)
    status, _, err = run("score", folder, source, reference)
    assert (status, err) == (2, [f"hf-vaswani score: {source} and {reference}: Pair 1 is too long."])
