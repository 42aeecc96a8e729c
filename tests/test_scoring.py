"""From a model to its scores: the same translations whichever way, and forced decoding."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import DataCollatorForSeq2Seq

from hf_vaswani import VaswaniTokenizer, VaswaniTranslationPipeline
from hf_vaswani.data import tokenize_pairs
from hf_vaswani.evaluation import chrf_score, evaluate_model, perplexity, sacrebleu_score, score_pairs, translate_lines
from hf_vaswani.evaluation.bare import bare_model
from hf_vaswani.evaluation.perplexity import mean_to_perplexity

SOURCES = ["ein Hund", "zwei sehr kleine Katzen schlafen", "", "kein Vogel singt", "42"]
REFERENCES = ["a dog", "two very small cats sleep", "", "no bird sings", "42"]


def make_tokenizer():
    return VaswaniTokenizer.train(SOURCES + REFERENCES, vocab_size=280, allow_fewer=True)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def model(make_model, tokenizer):
    model = make_model(seed=7, vocab_size=len(tokenizer))
    model.generation_config.max_new_tokens = 7
    return model


# ------------------------------------------------------------------ evaluate_model
def test_scores_are_those_of_the_lines_that_the_pipeline_gives(model, tokenizer):
    found = evaluate_model(model, tokenizer, SOURCES, REFERENCES)
    lines = [one["translation_text"] for one in VaswaniTranslationPipeline(model, tokenizer)(SOURCES)]
    assert found.hypotheses == lines
    assert (lines[2], lines[4]) == ("", "42")
    assert len(set(lines)) == 5
    assert found.scores == [sacrebleu_score(lines, REFERENCES), chrf_score(lines, REFERENCES)]
    assert found["chrF"] == found.scores[1]
    with pytest.raises(KeyError, match="No score 'TER' was made, only sacreBLEU, chrF"):
        found["TER"]


def test_language_kinds_and_search_are_passed_on(model, tokenizer):
    found = evaluate_model(
        model, tokenizer, SOURCES, REFERENCES, target_language="zh", kinds=["sacrebleu", "tokenised"], lowercase=True,
        normalize_punctuation=True, num_beams=1, max_new_tokens=3,
    )  # fmt: skip
    translate = VaswaniTranslationPipeline(model, tokenizer)
    lines = [one["translation_text"] for one in translate(SOURCES, num_beams=1, max_new_tokens=3)]
    assert found.hypotheses == lines != evaluate_model(model, tokenizer, SOURCES, REFERENCES).hypotheses
    assert "|case:lc|eff:no|tok:zh|" in found.scores[0].signature
    assert "|tok:moses-zh|norm:moses-zh|" in found.scores[1].signature
    assert "tok:char" in evaluate_model(model, tokenizer, SOURCES, REFERENCES, tokenize="char").scores[0].signature


def test_without_a_limit_a_translation_may_be_fifty_tokens_longer_than_its_source(make_model, tokenizer):
    model = make_model(vocab_size=len(tokenizer))
    end = tokenizer.eos_token_id
    (line,) = evaluate_model(model, tokenizer, ["Hund"], ["x"], num_beams=1, suppress_tokens=[end]).hypotheses
    (source,) = tokenizer(["Hund"])["input_ids"]
    logits = model.generate(torch.tensor([source]), num_beams=1, suppress_tokens=[end])[0, 1:].tolist()
    assert line == tokenizer.decode(logits, skip_special_tokens=True).replace("\r", " ").replace("\n", " ")
    assert len(logits) == len(source) + 50


def test_what_cannot_be_scored_is_refused_before_the_model_runs(model, tokenizer, monkeypatch):
    monkeypatch.setattr(model, "generate", None)
    with pytest.raises(ValueError, match="5 sources, but 4 references"):
        evaluate_model(model, tokenizer, SOURCES, REFERENCES[:4])
    with pytest.raises(ValueError, match="there are no sources"):
        evaluate_model(model, tokenizer, [], [])
    with pytest.raises(ValueError, match="'bleu' is no kind"):
        evaluate_model(model, tokenizer, SOURCES, REFERENCES, kinds=["bleu"])
    with pytest.raises(ValueError, match="'xx' is unknown to sacreBLEU"):
        evaluate_model(model, tokenizer, SOURCES, REFERENCES, tokenize="xx")
    with pytest.raises(TypeError, match="not one string"):
        translate_lines(model, tokenizer, "ein Hund")


def test_a_line_end_in_a_translation_becomes_a_blank_and_options_are_passed_on(model, tokenizer, monkeypatch):
    seen = []

    def answer(self, lines, **options):
        seen.append(options)
        return [{"translation_text": "a\r\nb"} for _ in lines]

    monkeypatch.setattr(VaswaniTranslationPipeline, "__call__", answer)
    assert translate_lines(model, tokenizer, ["x", "y"], batch_size=3, progress=True) == ["a  b", "a  b"]
    assert translate_lines(model, tokenizer, ["x"], num_beams=2) == ["a  b"]
    assert translate_lines(model, tokenizer, []) == []
    assert seen == [{"batch_size": 3, "progress": True}, {"batch_size": 32, "progress": None, "num_beams": 2}]


def test_mixed_precision_of_a_run_changes_neither_its_validation_nor_itself(make_model, tokenizer):
    pairs = [pair for pair in zip(SOURCES, REFERENCES, strict=True) if pair[0]]
    dataset, collator = tokenize_pairs(pairs, tokenizer), DataCollatorForSeq2Seq(tokenizer)
    plain = make_model(vocab_size=len(tokenizer))
    expected = perplexity(plain, dataset, collator)
    lines = translate_lines(plain, tokenizer, SOURCES, max_new_tokens=9)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(make_model(vocab_size=len(tokenizer)).train())
    batch = collator([dataset[0]])
    in_run = prepared.eval()(**batch).loss.item()
    prepared.train()
    assert in_run != plain(**batch).loss.item()  # the run itself rounds
    assert perplexity(prepared, dataset, collator, accelerator=accelerator) == expected
    assert translate_lines(prepared, tokenizer, SOURCES, max_new_tokens=9, accelerator=accelerator) == lines
    assert prepared.training
    assert prepared.eval()(**batch).loss.item() == in_run


def test_the_model_comes_back_as_it_was_after_an_error(model):
    model.train()

    def fail():
        with bare_model(model) as plain:
            assert not plain.training
            raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        fail()
    assert model.training


def test_weights_that_are_sharded_out_of_reach_are_refused(model):
    next(iter(model.parameters())).ds_id = 0
    with pytest.raises(ValueError, match="ZeRO stage 3"), bare_model(model):
        pass
    wrapped = torch.nn.Sequential(type("FullyShardedDataParallel", (torch.nn.Identity,), {})())
    with pytest.raises(ValueError, match="fsdp_version: 2"), bare_model(wrapped):
        pass


TWO_PROCESSES = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from transformers import DataCollatorForSeq2Seq
from conftest import TINY
from test_scoring import REFERENCES, SOURCES, make_tokenizer
from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.data import tokenize_pairs
from hf_vaswani.evaluation import evaluate_model, perplexity
accelerator = Accelerator(cpu=True)
tokenizer = make_tokenizer()
pairs = [pair for pair in zip(SOURCES, REFERENCES) if pair[0]]
dataset, collator = tokenize_pairs(pairs[:3], tokenizer), DataCollatorForSeq2Seq(tokenizer)
class Watched:
    src_lengths, tgt_lengths = dataset.src_lengths, dataset.tgt_lengths
    def __len__(self):
        return len(dataset)
    def __getitem__(self, index):
        seen.append(index)
        return dataset[index]
found = []
for kind in ("ddp", "fsdp2"):
    torch.manual_seed(7)
    model = VaswaniForConditionalGeneration(VaswaniConfig(**{**TINY, "vocab_size": len(tokenizer)})).eval()
    model.generation_config.max_new_tokens = 7
    if kind == "ddp":
        model = accelerator.prepare(model)
    else:
        fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
        assert all(hasattr(weight, "full_tensor") for weight in model.parameters())
    evaluation = evaluate_model(model, tokenizer, SOURCES, REFERENCES, accelerator=accelerator)
    lone = evaluate_model(model, tokenizer, SOURCES[:1], REFERENCES[:1], accelerator=accelerator).hypotheses
    seen = []
    number = perplexity(model, Watched(), collator, batch_tokens=1, accelerator=accelerator)
    whole = perplexity(model, dataset, collator, accelerator=accelerator)
    found.append([evaluation.hypotheses, [str(one) for one in evaluation.scores], lone, seen, number, whole])
with open(f"{sys.argv[2]}/{accelerator.process_index}.json", "w") as stream:
    json.dump([accelerator.num_processes, found], stream)
"""


def test_two_processes_find_the_same_as_one_on_exactly_the_test_lines(model, tokenizer, tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES)
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(here.parent), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*launch, str(script), str(here), str(tmp_path)],
        capture_output=True, text=True, env=environment, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    expected = evaluate_model(model, tokenizer, SOURCES, REFERENCES)
    pairs = [pair for pair in zip(SOURCES, REFERENCES, strict=True) if pair[0]]
    number = perplexity(model, tokenize_pairs(pairs[:3], tokenizer), DataCollatorForSeq2Seq(tokenizer))
    seen = []
    for rank in (0, 1):
        processes, found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert processes == 2
        assert len(found) == 2
        for hypotheses, scores, lone, own, *numbers in found:
            assert 0 < len(own) < 3
            seen += own
            assert hypotheses == expected.hypotheses
            assert scores == [str(one) for one in expected.scores]
            assert lone == expected.hypotheses[:1]
            assert numbers == pytest.approx([number, number], rel=1e-6)
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]  # each pair once for each of the two models


# ------------------------------------------------------------------ forced decoding
def test_each_token_has_the_log_probability_of_a_plain_forward_pass(model, tokenizer):
    pairs = [(src, tgt) for src, tgt in zip(SOURCES, REFERENCES, strict=True) if src]
    for (src, tgt), found in zip(pairs, score_pairs(model.train(), tokenizer, pairs), strict=True):
        (source,), (target,) = tokenizer([src])["input_ids"], tokenizer(text_target=[tgt])["input_ids"]
        model.eval()
        steps = torch.tensor([[model.config.decoder_start_token_id, *target[:-1]]])
        logits = model(input_ids=torch.tensor([source]), decoder_input_ids=steps).logits[0]
        expected = [logits[t].log_softmax(-1)[one].item() for t, one in enumerate(target)]
        assert found.log_probs == pytest.approx(expected, abs=1e-5)
        assert found.log_prob == pytest.approx(sum(expected), abs=1e-5)
        assert found.mean == pytest.approx(sum(expected) / len(target), abs=1e-5)
        assert found.pieces == tokenizer.convert_ids_to_tokens(target)
        assert found.pieces[-1] == tokenizer.eos_token
        model.train()


def test_a_score_does_not_depend_on_its_neighbours_and_keeps_its_place(model, tokenizer):
    pairs = [(src, tgt) for src in SOURCES[:2] for tgt in (*REFERENCES[:2], "a very long target that pads the others")]
    alone = [score_pairs(model, tokenizer, [pair])[0] for pair in pairs]
    for batch_tokens in (1, 40, 4096):
        together = score_pairs(model, tokenizer, pairs, batch_tokens=batch_tokens)
        assert [one.pieces for one in together] == [one.pieces for one in alone]
        for one, other in zip(together, alone, strict=True):
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
    assert len({round(one.log_prob, 4) for one in alone}) == len(pairs)


def test_a_blank_side_has_its_own_defined_score(model, tokenizer):
    pairs = [("", "a dog"), ("ein Hund", "a dog"), ("ein Hund", " \t"), ("", "")]
    found = score_pairs(model, tokenizer, pairs)
    assert [(one.log_prob, one.pieces, one.mean) for one in found[::2]] == [(0.0, [], 0.0)] * 2
    assert found[3] == found[0]
    assert found[1] == score_pairs(model, tokenizer, pairs[1:2])[0]
    assert found[1].log_prob < 0
    assert score_pairs(model, tokenizer, []) == []
    assert score_pairs(model, tokenizer, pairs[2:]) == found[2:]


def test_a_model_of_lower_precision_is_scored_in_float32_and_stays_as_it_is(model, tokenizer):
    low = model.bfloat16()
    found = score_pairs(low, tokenizer, [("ein Hund", "a dog")])[0]
    assert low.dtype == torch.bfloat16
    assert found.log_probs == score_pairs(low.float(), tokenizer, [("ein Hund", "a dog")])[0].log_probs


def test_perplexity_is_that_of_the_scores_of_all_pairs(model, tokenizer):
    pairs = list(zip(SOURCES, REFERENCES, strict=True))
    scores = score_pairs(model, tokenizer, pairs)
    expected = math.exp(-sum(one.log_prob for one in scores) / sum(len(one.pieces) for one in scores))
    found = perplexity(model, tokenize_pairs(pairs, tokenizer), DataCollatorForSeq2Seq(tokenizer))
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_pair_over_the_budget_does_not_widen_the_batches_of_others(model, tokenizer, monkeypatch):
    pairs = [("a b", "c"), ("d " * 40, "e"), ("f g", "h"), ("i j", "k")]
    sizes, forward = [], type(model).forward
    monkeypatch.setattr(
        type(model),
        "forward",
        lambda self, **inputs: sizes.append(inputs["input_ids"].shape) or forward(self, **inputs),
    )
    scores = score_pairs(model, tokenizer, pairs, batch_tokens=9)
    assert max(rows * columns for rows, columns in sizes[:-1]) <= 9
    assert sizes[-1][0] == 1
    monkeypatch.undo()
    for pair, score in zip(pairs, scores, strict=True):
        assert score.log_prob == pytest.approx(score_pairs(model, tokenizer, [pair])[0].log_prob, abs=1e-4)


def test_perplexity_past_any_float_is_infinite_and_a_score_that_is_no_number_is_named(model, tokenizer):
    assert mean_to_perplexity(-1e6, 10) == math.inf
    assert mean_to_perplexity(-20.0, 10) == pytest.approx(math.exp(2))
    with torch.no_grad():
        model.model.shared.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match=r"Pair 12 .* has a score that is no number"):
        score_pairs(model, tokenizer, [("", "x"), ("a", "b")], first_number=11)


def test_a_pair_that_is_longer_than_the_position_table_is_named(make_model, tokenizer):
    model = make_model(vocab_size=len(tokenizer), position_encoding="learned", max_position_embeddings=8)
    pairs = [("ein Hund", "a dog"), ("", "x" * 20), ("ein Hund", "xyzzy " * 4)]
    with pytest.raises(ValueError, match=r"Pair 3 \(counted from 1\) has a side of \d+ tokens, .* can take 8\."):
        score_pairs(model, tokenizer, pairs)
    with pytest.raises(ValueError, match="Pair 12 "):
        score_pairs(model, tokenizer, pairs, first_number=10)
    grows = make_model(vocab_size=len(tokenizer), max_position_embeddings=8)
    assert len(score_pairs(grows, tokenizer, pairs)[2].pieces) > 8
