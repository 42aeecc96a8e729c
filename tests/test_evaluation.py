"""Scores and their names."""

import math

import pytest
import sacrebleu
import torch

from hf_vaswani.data import TokenizedPairs
from hf_vaswani.evaluation import SacreBleuMetric, chrf_score, perplexity, sacrebleu_score

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


@pytest.mark.parametrize("scorer", [sacrebleu_score, chrf_score])
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
