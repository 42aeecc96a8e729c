"""Scores and their names."""

import importlib.util
import math
from collections import Counter
from itertools import product

import pytest
import sacrebleu
import torch

from hf_vaswani.data import TokenizedPairs
from hf_vaswani.evaluation import (
    SacreBleuMetric,
    TranslationMetric,
    chrf_score,
    compound_split_bleu_score,
    perplexity,
    sacrebleu_score,
    sacrebleu_tokenizer_for,
    score_lines,
    ter_score,
    tokenised_bleu_score,
)
from hf_vaswani.evaluation.bleu import KINDS, check_kinds, default_kinds
from hf_vaswani.evaluation.moses import MosesText, looks_tokenised, split_compounds

HYPOTHESES = ["The cat sat on the mat.", "He's (very) tired, isn't he?", "A b c d e f."]
REFERENCES = ["The cat is on the mat.", "He's very tired, isn't he?", "A b c d e g."]
OTHERS = ["A cat sat on the mat.", "He is very tired, isn't he?", "A b c d e f."]


def test_sacrebleu_is_the_scorers_own_number_under_its_own_name():
    found = sacrebleu_score(HYPOTHESES, REFERENCES)
    assert found.name == "sacreBLEU"
    assert found.score == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert 0 < found.score < 100
    assert found.signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert str(found) == f"sacreBLEU {found.score:.2f} ({found.signature})"


def test_settings_change_the_score_and_its_signature():
    plain = sacrebleu_score(["the Cat sat on THE mat"], ["The cat sat on the mat"])
    lower = sacrebleu_score(["the Cat sat on THE mat"], ["The cat sat on the mat"], lowercase=True)
    assert lower.score == pytest.approx(100.0)
    assert plain.score < lower.score
    assert "case:lc" in lower.signature
    characters = sacrebleu_score(HYPOTHESES, REFERENCES, tokenize="char")
    assert "tok:char" in characters.signature
    assert characters.score != sacrebleu_score(HYPOTHESES, REFERENCES).score


def test_several_references_per_line_are_used():
    both = sacrebleu_score(HYPOTHESES, list(zip(REFERENCES, OTHERS, strict=True)))
    assert both.score == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES, OTHERS]).score
    assert both.score > sacrebleu_score(HYPOTHESES, REFERENCES).score
    assert "nrefs:2" in both.signature


def test_chrf_is_named_by_its_word_order():
    assert chrf_score(HYPOTHESES, REFERENCES).score == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert [chrf_score(HYPOTHESES, REFERENCES, n).name for n in (0, 2)] == ["chrF", "chrF++"]


@pytest.mark.parametrize(
    "scorer", [sacrebleu_score, chrf_score, ter_score, tokenised_bleu_score, compound_split_bleu_score]
)
def test_what_cannot_be_scored_is_refused(scorer):
    with pytest.raises(ValueError, match="3 hypotheses, but 2 references"):
        scorer(HYPOTHESES, REFERENCES[:2])
    with pytest.raises(ValueError, match="nothing to score"):
        scorer([], [])
    with pytest.raises(TypeError, match="lists of sentences"):
        scorer("one", "one")
    with pytest.raises(ValueError, match="Hypothesis 2 has 1 references where the first has 2"):
        scorer(["a", "b"], [["a", "c"], ["b"]])


def test_an_unknown_tokenisation_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'14a' is unknown.*13a"):
        sacrebleu_score(HYPOTHESES, REFERENCES, tokenize="14a")


# ------------------------------------------------------------------ tokenised text
def plain_bleu(hypotheses, references):
    """BLEU of lists of tokens, in plain loops: 0 when no n-gram of some length is right."""
    right, total = [0] * 4, [0] * 4
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        for n in range(1, 5):
            has = Counter(tuple(hypothesis[i : i + n]) for i in range(len(hypothesis) - n + 1))
            wants = Counter(tuple(reference[i : i + n]) for i in range(len(reference) - n + 1))
            right[n - 1] += sum(min(count, wants[gram]) for gram, count in has.items())
            total[n - 1] += sum(has.values())
    if 0 in right:
        return 0.0
    length, wanted = sum(map(len, hypotheses)), sum(map(len, references))
    brevity = min(1.0, math.exp(1 - wanted / length))
    return 100 * brevity * math.exp(sum(math.log(a / b) for a, b in zip(right, total, strict=True)) / 4)


GERMAN = ["Der rot-grüne Hund, z.B. Rex, bellt.", "Der Ost-West-Handel wächst weiter um 3,5 Prozent."]
GERMAN_REFERENCES = ["Der rot-grüne Hund, z.B. Max, bellt.", "Der Ost-West-Handel wuchs weiter um 3,5 Prozent."]
GERMAN_TOKENS = [
    ["Der", "rot-grüne", "Hund", ",", "z.B.", "Rex", ",", "bellt", "."],
    ["Der", "Ost-West-Handel", "wächst", "weiter", "um", "3,5", "Prozent", "."],
]
GERMAN_REFERENCE_TOKENS = [
    ["Der", "rot-grüne", "Hund", ",", "z.B.", "Max", ",", "bellt", "."],
    ["Der", "Ost-West-Handel", "wuchs", "weiter", "um", "3,5", "Prozent", "."],
]


def test_tokenised_bleu_is_counted_over_tokens_written_by_hand():
    found = tokenised_bleu_score(GERMAN, GERMAN_REFERENCES, "de")
    assert found.name == "tokenised BLEU"
    assert found.score == pytest.approx(plain_bleu(GERMAN_TOKENS, GERMAN_REFERENCE_TOKENS), abs=1e-9)
    assert 0 < found.score < 100
    as_tokens = tokenised_bleu_score(
        [" ".join(one) for one in GERMAN_TOKENS], [" ".join(one) for one in GERMAN_REFERENCE_TOKENS], tokenize="none"
    )
    assert as_tokens.score == pytest.approx(found.score, abs=1e-9)
    assert "|tok:moses-de|" in found.signature
    assert "|tok:none|" in as_tokens.signature


def test_tokenised_bleu_is_zero_without_a_right_four_gram_and_its_details_are_those_of_multi_bleu():
    assert tokenised_bleu_score(["a b c x"], ["a b c d"]).score == 0.0
    assert sacrebleu_score(["a b c x"], ["a b c d"]).score > 0
    found = tokenised_bleu_score(["a b c d e"], ["a b c d f g"])
    # 4/5 words, 3/4 pairs, 2/3 triples, 1/2 quadruples; exp(1 - 6/5) for the missing word.
    assert found.details == "80.0/75.0/66.7/50.0 (BP=0.819, ratio=0.833, hyp_len=5, ref_len=6)"
    assert found.score == pytest.approx(100 * math.exp(-0.2) * (0.8 * 0.75 * 2 / 3 * 0.5) ** 0.25)


def test_several_references_count_the_nearest_length_and_of_two_as_near_the_shorter():
    found = tokenised_bleu_score(["a b c d e"], [["a b c d", "a b c d e f"]])
    assert found.details.endswith("hyp_len=5, ref_len=4)")
    assert found.score == pytest.approx(100.0)
    assert found.signature.startswith("nrefs:2|")


def test_only_blanks_of_ascii_part_tokens_that_are_given():
    hypothesis, reference = "der 100\u00a0km lange Weg", "der 100 km lange Weg"
    assert tokenised_bleu_score([hypothesis], [hypothesis], tokenize="none").details.endswith("hyp_len=4, ref_len=4)")
    assert tokenised_bleu_score([hypothesis], [reference], tokenize="none").score == 0.0
    assert tokenised_bleu_score([hypothesis], [reference], tokenize="moses").score == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("words", "split"),
    [
        ("rot-grün", "rot ##AT##-##AT## grün"),
        ("der Ost-West-Handel , ein Zwei-Mann-Zelt", "der Ost ##AT##-##AT## West ##AT##-##AT## Handel , ein Zwei "
         "##AT##-##AT## Mann ##AT##-##AT## Zelt"),
        ("a-b-c", "a ##AT##-##AT## b-c"),  # the letter b is used up by the first hyphen
        ("a-b-c-d-e", "a ##AT##-##AT## b-c ##AT##-##AT## d-e"),
        ("ab-cd-e-f", "ab ##AT##-##AT## cd ##AT##-##AT## e-f"),
        ("Ein- und Ausgang - oder -10 -", "Ein- und Ausgang - oder -10 -"),
        ("a---b", "a ##AT##-##AT## --b"),
        ("rot–grün", "rot–grün"),
    ],
)  # fmt: skip
def test_hyphens_inside_words_are_split(words, split):
    assert split_compounds(words) == split


def test_compound_split_bleu_is_counted_over_split_tokens():
    def split(rows):
        return [split_compounds(" ".join(row)).split() for row in rows]

    found = compound_split_bleu_score(GERMAN, GERMAN_REFERENCES)
    assert found.name == "compound-split BLEU"
    assert found.score == pytest.approx(plain_bleu(split(GERMAN_TOKENS), split(GERMAN_REFERENCE_TOKENS)), abs=1e-9)
    assert found.score > tokenised_bleu_score(GERMAN, GERMAN_REFERENCES, "de").score
    assert "|tok:moses-de|norm:no|split:hyphens|" in found.signature


def test_case_and_punctuation_are_levelled_where_that_is_asked_for():
    hypotheses, references = ["Er sagte: „Das ist GUT“. Und ging"], ['er sagte : "das ist gut." und ging']
    scores = {}
    for lowercase, normalize in product((False, True), repeat=2):
        settings = {"lowercase": lowercase, "normalize_punctuation": normalize}
        found = tokenised_bleu_score(hypotheses, references, "de", **settings)
        scores[lowercase, normalize] = found.score
        assert ("|case:lc|" in found.signature, "|norm:moses-de|" in found.signature) == (lowercase, normalize)
        assert compound_split_bleu_score(hypotheses, references, **settings).score == found.score  # no hyphen in it
    assert scores[True, True] == pytest.approx(100.0)
    assert max(scores[False, False], scores[False, True], scores[True, False]) < 90


def test_a_full_stop_before_a_closing_quote_at_the_end_moves_out_as_in_the_script_that_sees_the_line_feed():
    assert MosesText("fr", normalize_punctuation=True)('Il dit "oui."') == "Il dit &quot; oui &quot; ."


def test_what_makes_no_sense_for_tokenised_text_is_refused():
    with pytest.raises(ValueError, match='must be "moses" or "none"'):
        tokenised_bleu_score(["a"], ["a"], tokenize="13a")
    with pytest.raises(ValueError, match="tokenised already"):
        tokenised_bleu_score(["a"], ["a"], tokenize="none", normalize_punctuation=True)


@pytest.mark.parametrize(
    ("lines", "sign"),
    [
        (["Er kam , sah und siegte .", "Das war gut ."], " ,"),
        (["Das Haus , das rot-@@ grün ist .", "Ja"], "@@ "),
        (["rot ##AT##-##AT## grün"], "##AT##"),
        (["Das ist &quot; gut &quot;."], "&quot;"),
        (["\u2581Das \u2581ist"], "\u2581"),
        (["Er kam, sah und siegte.", "Das war gut .", "Ja."], None),
        (["Er kam", "und ging"], None),
        ([], None),
    ],
)
def test_tokenised_text_is_seen(lines, sign):
    assert looks_tokenised(lines) == sign


# ------------------------------------------------------------------ chrF, TER, languages, all kinds
def test_chrf_with_its_first_smoothing_and_without_case():
    smoothed = chrf_score(HYPOTHESES, REFERENCES, eps_smoothing=True)
    assert "eff:no" in smoothed.signature
    assert smoothed.score == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES], eps_smoothing=True).score
    assert chrf_score(["ABC"], ["abc"], lowercase=True).score == pytest.approx(100.0)
    assert chrf_score(["ABC"], ["abc"]).score == 0.0


def test_ter_counts_edits_and_moves_per_word_of_the_reference():
    # One word replaced of six; then one block moved, which is one edit of seven words.
    assert ter_score(["the cat sat on the mat"], ["the cat is on the mat"]).score == pytest.approx(100 / 6)
    moved = ter_score(["on the mat sat the cat today"], ["the cat sat on the mat today"])
    assert moved.score < 100 * 3 / 7
    assert moved.name == "TER"
    assert ter_score(["THE CAT"], ["the cat"]).score == 0.0
    cased = ter_score(["THE CAT"], ["the cat"], case_sensitive=True)
    assert cased.score == pytest.approx(100.0)
    assert "case:mixed" in cased.signature
    assert ter_score(["a b c d"], ["a"]).score == pytest.approx(300.0)


def test_every_setting_is_in_the_signature():
    scores = [
        *(sacrebleu_score(GERMAN, GERMAN_REFERENCES, t, c) for t in ("13a", "intl", "char") for c in (False, True)),
        *(
            score(GERMAN, GERMAN_REFERENCES, language, lowercase, normalize)
            for score in (tokenised_bleu_score, compound_split_bleu_score)
            for language in ("de", "en")
            for lowercase in (False, True)
            for normalize in (False, True)
        ),
        *(tokenised_bleu_score(GERMAN, GERMAN_REFERENCES, tokenize="none", lowercase=c) for c in (False, True)),
        *(
            chrf_score(GERMAN, GERMAN_REFERENCES, order, lowercase, smoothing)
            for order in (0, 2)
            for lowercase in (False, True)
            for smoothing in (False, True)
        ),
        *(ter_score(GERMAN, GERMAN_REFERENCES, case) for case in (False, True)),
    ]
    assert len({score.signature for score in scores}) == len(scores) == 34
    assert all("version:" in score.signature for score in scores)


@pytest.mark.parametrize(
    ("code", "tokenize"),
    [
        (None, "13a"), ("de", "13a"), ("en_US", "13a"), ("zh", "zh"), ("zh-TW", "zh"), ("zho_Hans", "zh"),
        ("cmn", "zh"), ("ZH_CN", "zh"), ("th", "char"), ("zz", "13a"),
    ],
)  # fmt: skip
def test_the_language_chooses_the_tokenisation(code, tokenize):
    assert sacrebleu_tokenizer_for(code) == tokenize


def test_chinese_reads_near_zero_by_a_tokenisation_made_for_blanks():
    references = [
        "我今天早上在公园里看见了一只白色的猫。",
        "他明天要去北京参加一个重要的会议。",
        "这本书的作者是一位著名的科学家。",
    ]
    hypotheses = [
        "我今天早上在公园里看见了一只黑色的猫。",
        "他明天要去南京参加一个重要的会议。",
        "这本书的作者是一位有名的科学家。",
    ]
    (chinese, chrf), (blanks,) = (
        score_lines(hypotheses, references, ("sacrebleu", "chrf"), target_language="zh"),
        score_lines(hypotheses, references, ("sacrebleu",)),
    )
    assert "|tok:zh|" in chinese.signature
    assert chinese.score > 70
    assert blanks.score < 30
    assert chrf.name == "chrF"
    assert "|tok:13a|" in score_lines(hypotheses, references, target_language="zh", tokenize="13a")[0].signature


@pytest.mark.parametrize(
    ("code", "name", "short"), [("ja", "Japanese", "ja"), ("jpn_Jpan", "Japanese", "ja"), ("ko", "Korean", "ko")]
)
def test_a_missing_segmenter_is_named_before_anything_is_done(monkeypatch, code, name, short):
    known = importlib.util.find_spec
    monkeypatch.setattr(
        "hf_vaswani.evaluation.bleu.find_spec",
        lambda module: None if module.lower().startswith("mecab") else known(module),
    )
    message = rf"{name} needs a segmenter that is not installed: pip install 'sacrebleu\[{short}\]'"
    with pytest.raises(ValueError, match=message):
        sacrebleu_tokenizer_for(code)
    with pytest.raises(ValueError, match=message):
        check_kinds(["sacrebleu"], code)
    with pytest.raises(ValueError, match=message):
        sacrebleu_score(["a"], ["a"], f"{short}-mecab")
    check_kinds(["chrf", "ter"], code)  # these need none
    check_kinds(["sacrebleu"], code, "char")


def test_kinds_that_mean_something_for_a_language():
    assert default_kinds("de_DE") == default_kinds(None) == ("sacrebleu", "tokenised", "compound-split", "chrf", "ter")
    assert default_kinds("fr") == ("sacrebleu", "tokenised", "chrf", "ter")
    assert default_kinds("zh") == ("sacrebleu", "chrf")


def test_all_kinds_come_in_the_order_asked_for_each_by_its_own_settings():
    kinds = list(reversed(KINDS))
    found = score_lines(GERMAN, GERMAN_REFERENCES, kinds, target_language="de-AT", lowercase=True)
    expected = [
        ter_score(GERMAN, GERMAN_REFERENCES),
        chrf_score(GERMAN, GERMAN_REFERENCES, 2, lowercase=True),
        chrf_score(GERMAN, GERMAN_REFERENCES, lowercase=True),
        compound_split_bleu_score(GERMAN, GERMAN_REFERENCES, "de", lowercase=True),
        tokenised_bleu_score(GERMAN, GERMAN_REFERENCES, "de", lowercase=True),
        sacrebleu_score(GERMAN, GERMAN_REFERENCES, lowercase=True),
    ]
    assert found == expected
    quoted = score_lines(['"a."  b c d'], ["„a“. b c d"], ["tokenised"], normalize_punctuation=True)[0]
    assert "|tok:moses-en|norm:moses-en|" in quoted.signature
    assert "|tok:moses-de|" in score_lines(GERMAN, GERMAN_REFERENCES, ["compound-split"])[0].signature
    with pytest.raises(ValueError, match=r"'bleu' is no kind of score; there are sacrebleu, tokenised"):
        score_lines(GERMAN, GERMAN_REFERENCES, ["chrf", "bleu"])
    with pytest.raises(ValueError, match="No kind of score is asked for"):
        score_lines(GERMAN, GERMAN_REFERENCES, [])
    with pytest.raises(TypeError, match="not one string"):
        score_lines(GERMAN, GERMAN_REFERENCES, "chrf")


# ------------------------------------------------------------------ the library `evaluate`
def test_the_metric_of_any_kinds_gives_each_with_its_signature(tmp_path):
    metric = TranslationMetric(["compound-split", "ter"], "de", lowercase=True, cache_dir=str(tmp_path))
    found = metric.compute(predictions=GERMAN, references=GERMAN_REFERENCES)
    split = compound_split_bleu_score(GERMAN, GERMAN_REFERENCES, lowercase=True)
    ter = ter_score(GERMAN, GERMAN_REFERENCES)
    assert found == {
        "compound_split": split.score,
        "compound_split_signature": split.signature,
        "ter": ter.score,
        "ter_signature": ter.signature,
    }
    with pytest.raises(ValueError, match="no kind of score"):
        TranslationMetric(["bleu"])


def test_the_metric_of_evaluate_gives_the_same_numbers_offline(tmp_path):
    found = SacreBleuMetric(cache_dir=str(tmp_path)).compute(predictions=HYPOTHESES, references=REFERENCES)
    expected = sacrebleu_score(HYPOTHESES, REFERENCES)
    assert found["sacrebleu"] == expected.score
    assert found["sacrebleu_signature"] == expected.signature
    assert found["chrf"] == chrf_score(HYPOTHESES, REFERENCES).score
    characters = SacreBleuMetric("char", cache_dir=str(tmp_path)).compute(predictions=HYPOTHESES, references=REFERENCES)
    assert "tok:char" in characters["sacrebleu_signature"]
    several = SacreBleuMetric(cache_dir=str(tmp_path)).compute(
        predictions=HYPOTHESES, references=[list(pair) for pair in zip(REFERENCES, OTHERS, strict=True)]
    )
    assert "nrefs:2" in several["sacrebleu_signature"]


def test_evaluates_own_evaluator_scores_our_pipeline_with_it(make_model, tmp_path):
    pytest.importorskip("scipy", reason="evaluate's evaluators need scipy: pip install evaluate[evaluator]")
    import datasets
    import evaluate

    from hf_vaswani import VaswaniTokenizer, VaswaniTranslationPipeline

    lines = ["ein Hund", "zwei Katzen", "kein Vogel"]
    tokenizer = VaswaniTokenizer.train(lines, vocab_size=261, allow_fewer=True)
    translate = VaswaniTranslationPipeline(make_model(vocab_size=len(tokenizer)), tokenizer, max_new_tokens=5)
    data = datasets.Dataset.from_dict({"text": lines, "label": ["a dog", "two cats", "no bird"]})
    found = evaluate.evaluator("translation").compute(
        model_or_pipeline=translate, data=data, metric=SacreBleuMetric(cache_dir=str(tmp_path))
    )
    hypotheses = [one["translation_text"] for one in translate(lines)]
    assert found["chrf"] == chrf_score(hypotheses, data["label"]).score
    assert "version:" in found["sacrebleu_signature"]
    several = evaluate.evaluator("translation").compute(
        model_or_pipeline=translate, data=data, metric=TranslationMetric(["tokenised"], cache_dir=str(tmp_path))
    )
    assert several["tokenised_signature"] == tokenised_bleu_score(hypotheses, data["label"]).signature


def collate(examples):
    def pad(name, filler):
        width = max(len(one[name]) for one in examples)
        return torch.tensor([one[name] + [filler] * (width - len(one[name])) for one in examples])

    from transformers import BatchEncoding

    ids = pad("input_ids", 0)
    return BatchEncoding({"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": pad("labels", -100)})


def test_perplexity_weighs_every_target_token_alike_in_any_batches(make_model):
    model = make_model().train()
    data = TokenizedPairs([[3, 4, 1], [5, 1], [6, 7, 8, 1]], [[9, 1], [10, 11, 12, 13, 1], [1]])
    total = 0.0
    model.eval()
    for i in range(3):
        batch = collate([data[i]])
        log_probs = model(**batch).logits.log_softmax(-1)[0]
        total -= sum(log_probs[t, one].item() for t, one in enumerate(data[i]["labels"]))
    model.train()
    for budget in (1, 12, 100):
        assert perplexity(model, data, collate, batch_tokens=budget) == pytest.approx(math.exp(total / 8), rel=1e-5)
    assert model.training
    with pytest.raises(ValueError, match="no pair"):
        perplexity(model, TokenizedPairs([], []), collate)


@pytest.mark.parametrize("score", [sacrebleu_score, tokenised_bleu_score])
def test_text_that_looks_tokenised_brings_no_word_of_the_scorer(score, caplog):
    lines = [f"this is number {i} ." for i in range(120)]
    assert score(lines, lines).score == pytest.approx(100)
    assert caplog.records == []
