"""Heads by name, and masks."""

import pytest
import torch

from hf_vaswani import VaswaniTokenizer
from hf_vaswani.analysis.head_masks import Head, ablate, all_heads, check_heads, masked_heads, parse_heads
from hf_vaswani.decoding_vaswani import FoldedDecoder
from hf_vaswani.evaluation import score_pairs

E, D, C = "encoder", "decoder", "cross"


def without_columns(model, heads):
    """The same by the weights: no column of W^O reads a masked head."""
    for head in heads:
        layer = (model.model.encoder if head.kind == E else model.model.decoder).layers[head.layer]
        attention = layer.encoder_attn if head.kind == C else layer.self_attn
        with torch.no_grad():
            attention.out_proj.weight[:, head.head * 7 : (head.head + 1) * 7] = 0.0
    return model


def test_all_heads_are_listed_in_order(make_model):
    heads = all_heads(make_model())
    assert len(heads) == 2 * (2 + 3 + 3)
    assert [str(one) for one in heads[:5]] == [
        "encoder.0.0",
        "encoder.0.1",
        "encoder.1.0",
        "encoder.1.1",
        "decoder.0.0",
    ]
    assert heads[-1] == Head(C, 2, 1)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("encoder.0.1", [(E, 0, 1)]),
        ("cross.2.0, encoder.1.0,cross.2.0", [(E, 1, 0), (C, 2, 0)]),
        ("decoder.1.*", [(D, 1, 0), (D, 1, 1)]),
        ("cross.*.1", [(C, 0, 1), (C, 1, 1), (C, 2, 1)]),
        ("encoder.*.^1", [(E, 0, 0), (E, 1, 0)]),
    ],
)
def test_heads_are_read_from_text(make_model, spec, expected):
    assert parse_heads(spec, make_model()) == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "encoder.2.0",
            r"no head encoder.2.0. The model has encoder layers 0 to 1 with 2 heads each; decoder layers 0",
        ),
        ("cross.0.2", r"no head cross.0.2.*cross layers 0 to 2 with 2 heads each"),
        ("cross.0.^2", r"no head cross.0.\^2"),
        ("encoder.0", "'encoder.0' names no heads: write KIND.LAYER.HEAD"),
        ("self.0.0", "names no heads"),
        ("encoder.0.x", "names no heads"),
        ("encoder.-1.0", "names no heads"),
        ("encoder.0.^*", "names no heads"),
        ("", "names no heads"),
        ("encoder.0.0,", "names no heads"),
        ("encoder.0.²", "names no heads"),
    ],
)
def test_a_head_that_does_not_exist_is_refused_with_those_that_do(make_model, spec, message):
    with pytest.raises(ValueError, match=message):
        parse_heads(spec, make_model())


def test_a_head_given_as_numbers_is_checked_too(make_model):
    model = make_model()
    assert check_heads([(C, 1, 0), (E, 0, 0), (C, 1, 0)], model) == [Head(E, 0, 0), Head(C, 1, 0)]
    with pytest.raises(ValueError, match=r"no head decoder\.3\.0"), masked_heads(model, [Head(D, 3, 0)]):
        pass
    with pytest.raises(ValueError, match=r"no head decoder\.0\.-1"):
        check_heads([Head(D, 0, -1)], model)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("heads", [[], [Head(E, 1, 0)], [Head(D, 0, 1), Head(C, 2, 0)], "all"])
def test_a_masked_head_is_one_whose_slice_of_w_o_is_zero(make_model, batch, heads, implementation):
    model, reference = make_model(), make_model()
    heads = all_heads(model) if heads == "all" else heads
    model.set_attn_implementation(implementation)
    whole = model(**batch).logits
    without_columns(reference, heads)
    with masked_heads(model, heads):
        found = model(**batch).logits
    torch.testing.assert_close(found, reference(**batch).logits)
    assert bool(heads) == (not torch.allclose(found, whole, atol=1e-4))
    assert torch.equal(model(**batch).logits, whole)  # and nothing of it stays


@pytest.mark.parametrize("options", [{}, {"num_beams": 1}, {"num_beams": 2, "num_return_sequences": 2}])
def test_generate_is_that_of_the_model_without_the_head(make_model, batch, options):
    for heads in ([Head(E, 0, 1)], [Head(D, 1, 0), Head(C, 0, 1)]):
        model, reference = make_model(), make_model()
        source = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        options = {"max_new_tokens": 9, **options}
        whole = model.generate(**source, **options)
        expected = without_columns(reference, heads).generate(**source, **options)
        with masked_heads(model, heads):
            assert torch.equal(model.generate(**source, **options), expected)
        assert torch.equal(model.generate(**source, **options), whole)


def test_a_mask_in_the_decoder_takes_the_librarys_loop_and_one_in_the_encoder_does_not(make_model):
    model = make_model()
    assert FoldedDecoder.suits(model, model._plain_classes)
    with masked_heads(model, [Head(E, 0, 0)]):
        assert FoldedDecoder.suits(model, model._plain_classes)
        with masked_heads(model, [Head(C, 0, 0)]):
            assert not FoldedDecoder.suits(model, model._plain_classes)
    assert FoldedDecoder.suits(model, model._plain_classes)


def test_masks_nest_and_go_after_a_fault(make_model, batch):
    model = make_model()
    whole = model(**batch).logits
    with masked_heads(model, [Head(E, 0, 0), Head(C, 1, 1)]):
        both = model(**batch).logits
    with masked_heads(model, [Head(E, 0, 0)]), masked_heads(model, [Head(C, 1, 1)]):
        assert torch.equal(model(**batch).logits, both)
    with pytest.raises(RuntimeError, match="stop"), masked_heads(model, [Head(E, 0, 0)]):
        raise RuntimeError("stop")
    assert torch.equal(model(**batch).logits, whole)


def test_what_is_no_number_is_masked_too(make_model, batch):
    model = make_model()
    with torch.no_grad():
        model.model.encoder.layers[0].self_attn.v_proj.weight[7:] = torch.nan  # rows of head 1
    assert model(**batch).logits.isnan().any()
    with masked_heads(model, [Head(E, 0, 1)]):
        assert not model(**batch).logits.isnan().any()


# ------------------------------------------------------------------ what is lost
PAIRS = [("ein Hund", "a dog"), ("zwei Katzen schlafen", "two cats sleep"), ("", ""), ("kein Vogel", "no bird")]


@pytest.fixture(scope="module")
def tokenizer():
    return VaswaniTokenizer.train([text for pair in PAIRS for text in pair] * 2, vocab_size=280, allow_fewer=True)


def test_ablation_gives_the_loss_of_each_set_beside_the_whole_models(make_model, tokenizer):
    model = make_model(vocab_size=len(tokenizer))
    sets = [[Head(C, 0, 0)], [Head(E, 0, 0), Head(E, 0, 1), Head(D, 2, 1)]]
    found = ablate(model, tokenizer, PAIRS, sets)
    assert [one.heads for one in found] == [[], *sets]
    for one in found:
        reference = without_columns(make_model(vocab_size=len(tokenizer)), one.heads)
        scores = score_pairs(reference, tokenizer, PAIRS)
        expected = -sum(score.log_prob for score in scores) / sum(len(score.pieces) for score in scores)
        assert one.loss == pytest.approx(expected, abs=1e-5)
        assert one.loss_change == pytest.approx(one.loss - found[0].loss, abs=1e-9)
        assert one.bleu is one.bleu_change is one.bleu_signature is None
    assert min(abs(one.loss_change) for one in found[1:]) > 1e-3
    with pytest.raises(ValueError, match="text on both sides"):
        ablate(model, tokenizer, [("a", " ")], [])


def test_ablation_measures_bleu_of_the_masked_models_translations(make_model, tokenizer):
    from hf_vaswani.evaluation import evaluate_model

    model = make_model(vocab_size=len(tokenizer))
    model.generation_config.max_new_tokens = 4
    heads = [Head(C, 0, 0), Head(C, 1, 0), Head(C, 2, 0)]
    sources = [src for src, _ in PAIRS]
    # References that the whole model meets exactly, so that a loss of BLEU can be seen.
    own = evaluate_model(model, tokenizer, sources, sources, kinds=("sacrebleu",)).hypotheses
    pairs = list(zip(sources, own, strict=True))
    found = ablate(model, tokenizer, pairs, [heads], with_bleu=True)
    reference = without_columns(make_model(vocab_size=len(tokenizer)), heads)
    reference.generation_config.max_new_tokens = 4
    expected = evaluate_model(reference, tokenizer, sources, own, kinds=("sacrebleu",)).scores[0]
    assert found[1].bleu == pytest.approx(expected.score)
    assert found[1].bleu_change == pytest.approx(expected.score - found[0].bleu)
    assert found[0].bleu_change == 0.0
    assert found[1].bleu_signature == expected.signature
