"""Statistics of attention heads: sums of a batch against plain loops over one sentence at a time."""

import argparse
import json
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer
from hf_vaswani.analysis.head_importance import gate_gradients, head_importance
from hf_vaswani.analysis.head_masks import Head, all_heads, masked_heads
from hf_vaswani.analysis.heads import COLUMNS, head_statistics, padded_batches, piece_counts, tokenized
from hf_vaswani.cli import heads as command
from hf_vaswani.cli.output import UserError

PAIRS = [
    ("ein Hund", "a dog sleeps"),
    ("zwei sehr kleine Katzen schlafen", "two cats"),
    ("kein Vogel", "not one bird sings here"),
    ("42", "42"),
    ("", "nothing"),
    ("ein Vogel singt", "a bird sings"),
]
TEXTS = [text for pair in PAIRS for text in pair]
ROUNDING = 1e-6  # eager attention takes its softmax in float32, whatever the model's precision


@pytest.fixture(scope="module")
def tokenizer():
    return VaswaniTokenizer.train(TEXTS * 3, vocab_size=290, allow_fewer=True)


def build(tokenizer, **changes):
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "num_attention_heads": 2, "d_k": 5, "d_v": 7}
    model = VaswaniForConditionalGeneration(
        VaswaniConfig(**{"vocab_size": len(tokenizer), **sizes, "d_ff": 24, "max_position_embeddings": 64, **changes})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()  # initial weights attend to everything alike
    return model.eval()


@pytest.fixture(scope="module")
def model(tokenizer):
    return build(tokenizer).double()


def columns_of(statistics):
    return torch.tensor([[getattr(one, name) for name in COLUMNS] for one in statistics], dtype=torch.float64)


def plain_statistics(model, tokenizer, pairs, counts):
    """Token by token, as the definitions read."""
    special = {*tokenizer.all_special_ids, model.config.decoder_start_token_id, model.config.pad_token_id}
    sums, queries = {head: dict.fromkeys(COLUMNS, 0.0) for head in all_heads(model)}, Counter()
    kept = model.config._attn_implementation
    model.set_attn_implementation("eager")
    for src, tgt in pairs:
        if not src or not tgt:
            continue
        source, target = tokenizer(src)["input_ids"], tokenizer(text_target=tgt)["input_ids"]
        read = [model.config.decoder_start_token_id, *target[:-1]]
        with torch.no_grad():
            out = model(
                input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([read]), output_attentions=True
            )
        for kind, layers, rows, keys, counter in [
            ("encoder", out.encoder_attentions, source, source, counts[0]),
            ("decoder", out.decoder_attentions, read, read, counts[1]),
            ("cross", out.cross_attentions, read, source, counts[0]),
        ]:
            rarest = min((counter[one] for one in keys if one not in special), default=None)
            queries[kind] += len(rows)
            for layer, weights in enumerate(layers):
                for number, matrix in enumerate(weights[0].tolist()):
                    total = sums[Head(kind, layer, number)]
                    for i in range(len(rows)):
                        for j, one in enumerate(keys):
                            weight = matrix[i][j]
                            total["entropy"] -= weight * math.log(weight) if weight > 0 else 0.0
                            total["distance"] += weight * abs(i - j)
                            total["previous"] += weight * (j == i - 1)
                            total["same"] += weight * (j == i)
                            total["next"] += weight * (j == i + 1)
                            total["start"] += weight * (kind == "decoder" and j == 0)
                            total["end"] += weight * (one == model.config.eos_token_id)
                            total["rare"] += weight * (one not in special and counter[one] == rarest)
    model.set_attn_implementation(kept)
    rows = [[total[name] / queries[head.kind] for name in COLUMNS] for head, total in sums.items()]
    return torch.tensor(rows, dtype=torch.float64), queries


def test_the_statistics_are_those_of_plain_loops(model, tokenizer):
    found = head_statistics(model, tokenizer, PAIRS)
    expected, queries = plain_statistics(model, tokenizer, PAIRS, piece_counts(tokenized(tokenizer, PAIRS)))
    assert [one.head for one in found] == all_heads(model)
    assert [one.query_count for one in found] == [queries[one.head.kind] for one in found]
    torch.testing.assert_close(columns_of(found), expected, rtol=0, atol=ROUNDING)
    # Nothing is measured that is the same for all, but for what cannot be.
    by_kind = {kind: expected[[one.head.kind == kind for one in found]] for kind in ("encoder", "decoder", "cross")}
    assert by_kind["decoder"][:, COLUMNS.index("next")].eq(0).all()
    assert by_kind["decoder"][:, COLUMNS.index("start")].gt(0).all()
    assert by_kind["encoder"][:, COLUMNS.index("end")].gt(0).all()
    assert by_kind["cross"].std(dim=0)[[0, 1, 2, 3, 4, 6, 7]].gt(1e-3).all()


def test_given_counts_say_what_is_rare(model, tokenizer):
    counts = (Counter({one: one for one in range(290)}), Counter({one: 1000 - one for one in range(290)}))
    found = head_statistics(model, tokenizer, PAIRS, counts=counts)
    torch.testing.assert_close(
        columns_of(found), plain_statistics(model, tokenizer, PAIRS, counts)[0], rtol=0, atol=ROUNDING
    )
    own = head_statistics(model, tokenizer, PAIRS)
    assert any(abs(a.rare - b.rare) > 1e-3 for a, b in zip(found, own, strict=True))


TEXT = st.text("abc einz.", min_size=1, max_size=30)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(lines=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=7), budget=st.integers(1, 200))
def test_a_batch_gives_the_sums_of_its_sentences_one_by_one(model, tokenizer, lines, budget):
    lines = [(src + "a", tgt + "x") for src, tgt in lines]
    counts = piece_counts(tokenized(tokenizer, lines))
    whole = head_statistics(model, tokenizer, lines, counts=counts, batch_tokens=budget)
    total = torch.zeros(len(whole), len(COLUMNS), dtype=torch.float64)
    for line in lines:
        one = head_statistics(model, tokenizer, [line], counts=counts)
        total += columns_of(one) * torch.tensor([[each.query_count] for each in one])
    expected = total / torch.tensor([[each.query_count] for each in whole])
    torch.testing.assert_close(columns_of(whole), expected, rtol=0, atol=ROUNDING)


def test_the_model_is_left_as_it_was(tokenizer):
    model = build(tokenizer).train()
    assert model.config._attn_implementation == "sdpa"
    head_statistics(model, tokenizer, PAIRS)
    with pytest.raises(ValueError, match="text on both sides"):
        head_statistics(model, tokenizer, [("a", ""), (" ", "b")])
    learned = build(tokenizer, position_encoding="learned", max_position_embeddings=4).train()
    with pytest.raises(ValueError, match="4 rows"):
        head_statistics(learned, tokenizer, PAIRS)
    for one in (model, learned):
        assert one.training
        assert one.config._attn_implementation == "sdpa"
        assert not any(module._forward_hooks for module in one.modules() if hasattr(module, "scaling"))


# ------------------------------------------------------------------ importance
def summed_losses(model, batch):
    logits = model(**batch).logits
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return flat.view(batch["labels"].shape).sum(dim=1)


def test_the_gradient_of_a_gate_is_the_slope_of_the_sentences_loss(model, tokenizer):
    examples = tokenized(tokenizer, PAIRS)
    batch = next(padded_batches(examples, 0, 10_000))
    assert (batch["labels"] == -100).any()
    found = gate_gradients(model, batch)
    step = 1e-5
    for head in [Head("encoder", 1, 0), Head("decoder", 0, 1), Head("cross", 2, 1)]:
        stack = model.model.encoder if head.kind == "encoder" else model.model.decoder
        layer = stack.layers[head.layer]
        weight = (layer.encoder_attn if head.kind == "cross" else layer.self_attn).out_proj.weight
        columns, losses = slice(head.head * 7, head.head * 7 + 7), []
        kept = weight.detach().clone()
        with torch.no_grad():  # a gate of 1 + step is that much more of the head's slice of W^O
            for sign in (1, -1):
                weight[:, columns] = kept[:, columns] * (1 + sign * step)
                losses.append(summed_losses(model, batch))
            weight.copy_(kept)
        slope = (losses[0] - losses[1]) / (2 * step)  # [B]
        torch.testing.assert_close(found[head.kind, head.layer][:, head.head], slope, rtol=1e-6, atol=1e-8)


def test_importance_is_the_mean_absolute_slope_however_it_is_batched(model, tokenizer):
    found = head_importance(model, tokenizer, PAIRS)
    examples = tokenized(tokenizer, PAIRS)
    assert list(found) == all_heads(model)
    slopes = [gate_gradients(model, next(padded_batches([one], 0))) for one in examples]
    for head, value in found.items():
        expected = sum(abs(one[head.kind, head.layer][0, head.head].item()) for one in slopes) / len(examples)
        assert value == pytest.approx(expected, rel=1e-10)
    small = head_importance(model, tokenizer, PAIRS, batch_tokens=7)
    assert small == pytest.approx(found, rel=1e-10)
    assert all(one.requires_grad and one.grad is None for one in model.parameters())


def test_importance_per_layer_has_length_one_in_each_attention(model, tokenizer):
    plain, divided = (head_importance(model, tokenizer, PAIRS, per_layer=one) for one in (False, True))
    for kind, count in (("encoder", 2), ("decoder", 3), ("cross", 3)):
        for layer in range(count):
            pair = [divided[Head(kind, layer, head)] for head in range(2)]
            assert math.hypot(*pair) == pytest.approx(1.0)
            first, second = (plain[Head(kind, layer, head)] for head in range(2))
            assert pair[0] / pair[1] == pytest.approx(first / second)


def test_a_head_that_writes_nothing_has_no_importance(model, tokenizer):
    silent = Head("cross", 1, 0)
    with masked_heads(model, [silent]):
        found = head_importance(model, tokenizer, PAIRS)
    assert found[silent] == 0.0
    assert all(value > 0 for head, value in found.items() if head != silent)


# ------------------------------------------------------------------ the command
@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model = build(tokenizer)
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("text")
    for side, name in enumerate(("src", "tgt")):
        (path / name).write_text("".join(f"{pair[side]}\n" for pair in PAIRS))
    return str(path / "src"), str(path / "tgt")


def call(*words):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(dest="command"))
    args = parser.parse_args(["heads", *map(str, words)])
    return args.run(args)


def table(text):
    names, *rows = (line.split("\t") for line in text.splitlines())
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_the_command_writes_a_line_for_each_head(folder, files, tokenizer, capsys):
    assert call(folder, *files, "--importance") == 0
    out, err = capsys.readouterr()
    rows = table(out)
    loaded = VaswaniForConditionalGeneration.from_pretrained(folder)
    found, importance = head_statistics(loaded, tokenizer, PAIRS), head_importance(loaded, tokenizer, PAIRS)
    assert [row["head"] for row in rows] == list(map(str, all_heads(loaded)))
    for row, one in zip(rows, found, strict=True):
        assert all(float(row[name]) == pytest.approx(getattr(one, name), abs=1e-3) for name in COLUMNS)
        assert float(row["importance"]) == pytest.approx(importance[one.head], abs=1e-3)
        assert int(row["queries"]) == one.query_count
    assert "1 of 6 pairs have a blank side" in err


def test_without_a_target_the_models_own_translations_are_read(folder, files, tokenizer, capsys):
    from hf_vaswani.evaluation import translate_lines

    assert call(folder, files[0], "--json") == 0
    found = json.loads(capsys.readouterr().out)
    loaded = VaswaniForConditionalGeneration.from_pretrained(folder)
    own = translate_lines(loaded, tokenizer, [src for src, _ in PAIRS])
    expected = head_statistics(loaded, tokenizer, list(zip([src for src, _ in PAIRS], own, strict=True)))
    assert found["lines"] == len(PAIRS)
    for row, one in zip(found["heads"], expected, strict=True):
        assert row["entropy"] == pytest.approx(one.entropy, abs=1e-4)


def test_a_training_text_says_what_is_rare(folder, files, tmp_path, capsys):
    for name, line in (("s", "ein Hund"), ("t", "a dog")):
        (tmp_path / name).write_text(f"{line}\n" * 3)
    call(folder, *files)
    own = table(capsys.readouterr().out)
    call(folder, *files, "--training-text", tmp_path / "s", tmp_path / "t")
    other = table(capsys.readouterr().out)
    assert [row["rare"] for row in own] != [row["rare"] for row in other]
    assert [row["entropy"] for row in own] == [row["entropy"] for row in other]


def test_the_command_ablates_sets_and_every_head(folder, files, capsys):
    assert call(folder, *files, "--ablate", "encoder.0.*,cross.2.1", "--ablate", "each", "--bleu", "--beams", "1") == 0
    out, err = capsys.readouterr()
    rows = table(out)
    assert [row["heads"] for row in rows[:3]] == ["none", "encoder.0.*,cross.2.1", "encoder.0.0"]
    assert [int(row["masked"]) for row in rows] == [0, 3] + [1] * 16
    for row in rows:
        assert float(row["loss_change"]) == pytest.approx(float(row["loss"]) - float(rows[0]["loss"]), abs=2e-4)
    assert rows[0]["sacrebleu_change"] == "0.0000"
    assert "nrefs:1" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ablate", "encoder.9.0"], r"no head encoder.9.0.*encoder layers 0 to 1 with 2 heads"),
        (["--ablate", "each", "--importance"], "leave them out"),
        (["--bleu"], "for --ablate"),
        (["--beams", "2"], "leave one out"),
        (["--ablate", "each", "--beams", "2"], "without --bleu"),
    ],
)
def test_bad_input_is_one_sentence(folder, files, words, message):
    with pytest.raises(UserError, match=message):
        call(folder, *files, *words)


def test_ablation_without_a_target_is_refused(folder, files):
    with pytest.raises(UserError, match="give TGT too"):
        call(folder, files[0], "--ablate", "each")


def test_a_text_without_a_word_and_another_architecture_are_refused(folder, tmp_path):
    from transformers import MarianConfig, MarianMTModel

    (tmp_path / "blank").write_text("\n \n")
    with pytest.raises(UserError, match="no line with text"):
        call(folder, tmp_path / "blank")
    small = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    marian = MarianMTModel(MarianConfig(vocab_size=9, pad_token_id=0, decoder_start_token_id=0, **small, **heads))
    with pytest.raises(TypeError, match="MarianMTModel is not a VaswaniForConditionalGeneration"):
        all_heads(marian)
