"""Each block against the paper's formula, and what must hold whatever the weights are."""

import math

import pytest
import torch
from reference_model import Reference, feed_forward, layer_norm, multi_head, position
from torch import nn

from hf_vaswani import VaswaniConfig, VaswaniModel
from hf_vaswani.attention_vaswani import eager_attention_forward
from hf_vaswani.modeling_vaswani import (
    VaswaniAttention,
    VaswaniFeedForward,
    VaswaniResidual,
    shift_right,
    sinusoid_table,
)

BACKENDS = ["eager", "sdpa"]


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(
        actual.double(), torch.as_tensor(expected, dtype=torch.float64), atol=tolerance, rtol=0, check_dtype=False
    )


# ------------------------------------------------------------------ formulas
def test_sinusoid_table_equals_the_formula():
    close(sinusoid_table(53, 14), [position(pos, 14) for pos in range(53)], 1e-7)


def test_position_zero_is_zero_one_in_turn_whatever_the_pad_id(make_model):
    for pad in (0, 5):
        table = make_model(pad_token_id=pad).model.encoder.embed_positions.table
        assert table[0].tolist() == [0.0, 1.0] * 8
        assert table[1, 0].item() == pytest.approx(math.sin(1.0), abs=1e-7)


def test_halved_layout_is_the_same_table_permuted():
    woven, halves = sinusoid_table(11, 6), sinusoid_table(11, 6, "halves")
    assert torch.equal(halves, torch.cat([woven[:, 0::2], woven[:, 1::2]], dim=1))
    assert not torch.equal(halves, woven)


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_other_exponent_and_first_number_of_descendants(layout):
    table = sinusoid_table(23, 10, layout, "2i/(d-2)", 3)
    for n in range(23):
        for i in range(5):
            angle = (3 + n) / 10000 ** (2 * i / (10 - 2))
            columns = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, 5 + i)
            found = [table[n, column].item() for column in columns]
            assert found == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-7)
    assert torch.equal(sinusoid_table(9, 10, layout)[2:], sinusoid_table(7, 10, layout, offset=2))


def test_a_grown_table_keeps_its_layout_exponent_and_offset(make_model):
    options = {"sinusoid_layout": "halves", "sinusoid_exponent": "2i/(d-2)", "position_offset": 2}
    short, long = make_model(max_position_embeddings=4, **options), make_model(max_position_embeddings=64, **options)
    ids, target = torch.tensor([[5, 6, 7, 8, 9, 3, 4, 1]]), torch.tensor([[2, 3, 4, 5, 6, 7]])
    mask = torch.ones_like(ids)
    grown = short(input_ids=ids, attention_mask=mask, decoder_input_ids=target).logits
    assert torch.equal(grown, long(input_ids=ids, attention_mask=mask, decoder_input_ids=target).logits)
    again = long.to(torch.bfloat16).float().model.encoder.embed_positions.table
    assert torch.equal(again[:20], sinusoid_table(20, 16, *options.values()))


def test_zero_start_embedding_reads_nothing_at_the_start_token_and_only_there(make_model):
    zero, plain = make_model(zero_start_embedding=True), make_model()
    ids, target = torch.tensor([[5, 6, 1]]), torch.tensor([[2, 3, 4]])
    source = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = zero(**source, decoder_input_ids=target).logits
    rows = plain.model.shared.weight[target].clone()
    rows[0, 0] = 0.0
    assert torch.equal(plain(**source, decoder_inputs_embeds=rows).logits, expected)
    assert not torch.allclose(plain(**source, decoder_input_ids=target).logits, expected)
    # The start row itself stays what it is to the softmax and to the source side.
    cached = zero(**source, decoder_input_ids=target[:, :2], use_cache=True)
    step = zero(**source, encoder_outputs=(cached.encoder_last_hidden_state,), decoder_input_ids=target[:, 2:],
                cache=cached.cache)  # fmt: skip
    close(step.logits, expected[:, 2:].double())


@pytest.mark.parametrize("backend", BACKENDS)
def test_multi_head_attention_equals_the_formula(tiny_config, backend):
    torch.manual_seed(3)
    tiny_config._attn_implementation = backend
    attention = VaswaniAttention(tiny_config)
    x, memory = torch.randn(1, 4, 16), torch.randn(1, 6, 16)
    weights = {name: getattr(attention, f"{name}_proj").weight.double().tolist() for name in ("q", "k", "v", "out")}
    expected = multi_head(x[0].double().tolist(), memory[0].double().tolist(), weights, 2, lambda t, s: True)
    close(attention(x, memory)[0][0], expected)


def test_attention_by_hand():
    # One query that scores 0 and ln 3 against two keys: weights 1/4 and 3/4, so the mix of 8 and 4 is 5.
    query, key = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.0], [math.log(3.0)]]]])
    value = torch.tensor([[[[8.0], [4.0]]]])
    output, weights = eager_attention_forward(nn.Identity(), query, key, value, None, scaling=1.0)
    close(output.flatten(), [5.0])
    close(weights.flatten(), [0.25, 0.75])


def test_feed_forward_equals_the_formula(tiny_config):
    torch.manual_seed(4)
    block = VaswaniFeedForward(tiny_config)
    x = torch.randn(3, 16)
    parts = [p.double().tolist() for p in (block.fc1.weight, block.fc1.bias, block.fc2.weight, block.fc2.bias)]
    close(block(x), [feed_forward(row, *parts) for row in x.double().tolist()])


def test_sublayer_of_zero_leaves_layer_norm_of_x(tiny_config):
    torch.manual_seed(5)
    wrap = VaswaniResidual(tiny_config)
    nn.init.normal_(wrap.layer_norm.weight)
    nn.init.normal_(wrap.layer_norm.bias)
    x = torch.randn(5, 16)
    gain, shift = wrap.layer_norm.weight.double().tolist(), wrap.layer_norm.bias.double().tolist()
    close(wrap(x, torch.zeros_like), [layer_norm(row, gain, shift, 1e-6) for row in x.double().tolist()])


def test_pre_norm_of_zero_leaves_x(tiny_config):
    wrap = VaswaniResidual(VaswaniConfig(**{**tiny_config.to_dict(), "norm_position": "pre"}))
    x = torch.randn(5, 16)
    assert torch.equal(wrap(x, torch.zeros_like), x)
    seen = []
    wrap(x, lambda y: seen.append(y) or y)
    assert torch.equal(seen[0], wrap.layer_norm(x))


def test_no_norm_after_the_last_layer_but_for_pre_norm(make_model):
    assert make_model().model.encoder.layer_norm is None
    assert make_model(norm_position="pre").model.decoder.layer_norm is not None
    assert make_model(final_norm=True).model.encoder.layer_norm is not None


def test_the_whole_model_equals_the_papers_equations(make_model):
    model = make_model()
    for name, parameter in model.named_parameters():
        if "layer_norm" in name or name.endswith("bias"):
            nn.init.normal_(parameter, mean=0.5)  # the initial ones and zeros would hide a fault
    source, target = [5, 9, 33, 4, 8, 1], [2, 7, 12, 30]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target])).logits[0]
    close(logits, Reference(model).logits(source, target), 2e-4)
    double = model.double()
    with torch.no_grad():
        logits = double(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target])).logits[0]
    # The position table stays float32 in every precision, which is what is left of the difference.
    close(logits, Reference(model).logits(source, target), 1e-5)


# ------------------------------------------------------------------ parameters
def test_the_names_of_saved_parameters_are_fixed(make_model):
    names = set(make_model(encoder_layers=1, decoder_layers=1).state_dict())
    linear = [f"{part}_proj.weight" for part in ("q", "k", "v", "out")]
    feed = [f"feed_forward.fc{n}.{kind}" for n in (1, 2) for kind in ("weight", "bias")]

    def norms(*sublayers):
        return [f"{sub}_residual.layer_norm.{kind}" for sub in sublayers for kind in ("weight", "bias")]

    encoder = [f"self_attn.{n}" for n in linear] + feed + norms("self_attn", "feed_forward")
    decoder = encoder + [f"encoder_attn.{n}" for n in linear] + norms("encoder_attn")
    expected = {f"model.encoder.layers.0.{n}" for n in encoder} | {f"model.decoder.layers.0.{n}" for n in decoder}
    expected |= {"model.shared.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"}
    assert names == expected | {"lm_head.weight"}


def test_one_matrix_is_source_target_and_output(make_model):
    model = make_model()
    shared = model.model.shared.weight
    assert model.model.encoder.embed_tokens.weight is shared
    assert model.model.decoder.embed_tokens.weight is shared
    assert model.lm_head.weight is shared
    assert shared.std().item() == pytest.approx(16**-0.5, rel=0.15)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": False}, {"source_vocab_size": 41}, {"position_encoding": "learned"},
     {"norm_position": "pre"}, {"attention_bias": True, "output_bias": True}],
)  # fmt: skip
def test_every_parameter_takes_part_in_the_loss(make_model, batch, changes):
    model = make_model(**changes)
    model.train()
    model(**batch).loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_resizing_keeps_the_tie(make_model, batch):
    model = make_model()
    model.resize_token_embeddings(40)
    assert model.lm_head.weight is model.model.shared.weight is model.model.encoder.embed_tokens.weight
    assert (model.config.vocab_size, model.lm_head.out_features) == (40, 40)
    labels = batch["labels"].clone()
    labels[0, 0] = 39
    assert torch.isfinite(model(**{**batch, "labels": labels}).loss)


def test_resizing_two_matrices_of_one_vocabulary_resizes_both(make_model):
    model = make_model(tie_encoder_decoder_embeddings=False, output_bias=True)
    model.resize_token_embeddings(40)
    assert model.model.encoder.embed_tokens.weight.shape[0] == 40
    assert model.model.encoder.embed_tokens.weight is not model.model.shared.weight
    assert model.lm_head.bias.shape[0] == 40


def test_a_separate_source_vocabulary_has_its_own_rows(make_model):
    model = make_model(source_vocab_size=41)
    out = model(input_ids=torch.tensor([[40, 1]]), decoder_input_ids=torch.tensor([[2, 5, 6]]))
    assert out.logits.shape == (1, 3, 37)
    with pytest.raises(IndexError, match=r"40.*37 rows in VaswaniDecoder"):
        model(input_ids=torch.tensor([[40, 1]]), decoder_input_ids=torch.tensor([[2, 40]]))


# ------------------------------------------------------------------ masks, padding, neighbours
@pytest.mark.parametrize("backend", BACKENDS)
def test_later_target_tokens_never_reach_earlier_logits(make_model, batch, backend):
    model = make_model()
    model.set_attn_implementation(backend)
    source = {k: batch[k] for k in ("input_ids", "attention_mask")}
    target = torch.tensor([[2, 4, 6, 8, 10, 12, 14]]).repeat(3, 1)
    changed = target.clone()
    changed[:, 5] = 33
    before = model(**source, decoder_input_ids=target).logits
    after = model(**source, decoder_input_ids=changed).logits
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("position_encoding", ["sinusoidal", "learned"])
def test_a_sentence_does_not_feel_its_neighbours_or_padding(make_model, batch, backend, position_encoding):
    model = make_model(position_encoding=position_encoding)
    model.set_attn_implementation(backend)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    target = torch.tensor([[2, 4, 6, 8], [2, 9, 11, 13], [2, 5, 5, 7]])
    together = model(input_ids=ids, attention_mask=mask, decoder_input_ids=target).logits
    padding = torch.zeros(3, 10, dtype=torch.long)
    wider = model(
        input_ids=torch.cat([ids, padding], 1), attention_mask=torch.cat([mask, padding], 1), decoder_input_ids=target
    ).logits
    left = model(
        input_ids=torch.cat([padding, ids], 1), attention_mask=torch.cat([padding, mask], 1), decoder_input_ids=target
    ).logits
    close(wider, together.double())
    close(left, together.double())
    for row in range(3):
        length = int(mask[row].sum())
        alone = model(input_ids=ids[row : row + 1, :length], decoder_input_ids=target[row : row + 1]).logits
        close(alone[0], together[row].double())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_left_padded_target_reads_like_an_unpadded_one(make_model, batch, backend):
    model = make_model()
    model.set_attn_implementation(backend)
    source = {"input_ids": batch["input_ids"][:1]}
    plain = model(**source, decoder_input_ids=torch.tensor([[2, 4, 6]])).logits
    padded = model(
        **source,
        decoder_input_ids=torch.tensor([[0, 0, 2, 4, 6]]),
        decoder_attention_mask=torch.tensor([[0, 0, 1, 1, 1]]),
    ).logits
    assert torch.isfinite(padded).all()
    close(padded[:, 2:], plain.double())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_all_padding_row_stays_finite_forward_and_backward(make_model, batch, backend, dtype):
    model = make_model().to(dtype)
    model.set_attn_implementation(backend)
    model.train()
    batch["input_ids"][1] = 0
    batch["attention_mask"][1] = 0
    out = model(**batch)
    out.loss.backward()
    assert torch.isfinite(out.logits).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    # The other rows do not feel it.
    model.eval()
    alone = model(**{k: v[:1] for k, v in batch.items()}).logits
    close(model(**batch).logits[0], alone[0].double(), 1e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_masks_never_make_nan(make_model, batch, backend):
    model = make_model().half()
    model.set_attn_implementation(backend)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 4  # scores of a few tens, of either sign
    decoder_mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert torch.isfinite(model(**batch, decoder_attention_mask=decoder_mask).logits).all()


def test_padding_without_a_mask_is_refused_with_the_way_out(make_model, batch):
    with pytest.raises(ValueError, match=r"2 of 3 rows.*padding id 0.*attention_mask"):
        make_model()(input_ids=batch["input_ids"], labels=batch["labels"])


def test_ids_outside_the_vocabulary_are_named(make_model):
    model = make_model()
    with pytest.raises(IndexError, match=r"id 37 is outside the vocabulary of 37 rows"):
        model(input_ids=torch.tensor([[5, 37]]), decoder_input_ids=torch.tensor([[2]]))
    with pytest.raises(IndexError, match=r"id 99"):
        model(input_ids=torch.tensor([[5, 6]]), labels=torch.tensor([[99, 4]]))


# ------------------------------------------------------------------ lengths
def test_a_sinusoid_grows_past_its_first_size(make_model):
    model = make_model(max_position_embeddings=8)
    big = make_model(max_position_embeddings=64)
    ids = torch.arange(3, 23)[None]
    small_logits = model(input_ids=ids, decoder_input_ids=ids).logits
    assert torch.equal(small_logits, big(input_ids=ids, decoder_input_ids=ids).logits)
    assert torch.equal(model.model.encoder.embed_positions.table[:20], sinusoid_table(20, 16))


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_learned_table_names_both_lengths(make_model, side):
    model = make_model(position_encoding="learned", max_position_embeddings=8)
    long, short = torch.full((1, 18), 5), torch.full((1, 4), 5)
    source, target = (long, short) if side == "source" else (short, long)
    with pytest.raises(ValueError, match=r"18 positions.*8 rows"):
        model(input_ids=source, decoder_input_ids=target)


# ------------------------------------------------------------------ the library's ways
@pytest.mark.parametrize("backend", ["sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)])  # it compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # transformers' own call
def test_attention_backends_agree(make_model, batch, backend):
    logits = {}
    for name in ("eager", backend):
        model = make_model(d_k=16, d_v=16)
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits[name] = model(**batch).logits
    close(logits["eager"], logits[backend].double())


def test_recorded_attentions_and_states_have_the_right_shapes(make_model, batch):
    model = make_model()
    model.set_attn_implementation("eager")
    out = model(**batch, output_attentions=True, output_hidden_states=True)
    assert [a.shape for a in out.encoder_attentions] == [(3, 2, 7, 7)] * 2
    assert [a.shape for a in out.decoder_attentions] == [(3, 2, 5, 5)] * 3
    assert [a.shape for a in out.cross_attentions] == [(3, 2, 5, 7)] * 3
    close(out.cross_attentions[1].sum(-1), torch.ones(3, 2, 5).double())
    assert (out.cross_attentions[0][1, :, :, 4:] == 0).all()
    assert len(out.encoder_hidden_states) == 3
    assert len(out.decoder_hidden_states) == 4
    assert torch.equal(out.encoder_hidden_states[-1], out.encoder_last_hidden_state)


def test_gradient_checkpointing_changes_nothing(make_model, batch):
    grads = []
    for checkpointing in (False, True):
        model = make_model(dropout=0.0)
        model.train()
        if checkpointing:
            model.activation_checkpointing_enable()
        model(**batch).loss.backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert grads[0].abs().sum() > 0
    close(grads[0], grads[1].double(), 1e-7)


def test_cached_steps_equal_one_pass(make_model, batch):
    model = make_model()
    source = {k: batch[k] for k in ("input_ids", "attention_mask")}
    target = torch.tensor([[2, 4, 6, 8, 10], [2, 9, 11, 13, 3], [2, 5, 5, 7, 7]])
    whole = model(**source, decoder_input_ids=target).logits
    cache, steps, encoder_outputs = None, [], model.get_encoder()(**source)
    for t in range(5):
        out = model(
            encoder_outputs=encoder_outputs, attention_mask=source["attention_mask"],
            decoder_input_ids=target[:, t : t + 1], cache=cache, use_cache=True,
        )  # fmt: skip
        cache = out.cache
        steps.append(out.logits)
    close(torch.cat(steps, 1), whole.double())


def test_the_old_name_of_the_cache_still_works_with_a_warning(make_model):
    model = make_model()
    ids = torch.tensor([[5, 6, 1]])
    first = model(input_ids=ids, decoder_input_ids=torch.tensor([[2, 4]]), use_cache=True)
    with pytest.warns(FutureWarning, match="past_key_values"):
        second = model(input_ids=ids, decoder_input_ids=torch.tensor([[9]]), past_key_values=first.cache)
    whole = model(input_ids=ids, decoder_input_ids=torch.tensor([[2, 4, 9]])).logits
    close(second.logits[:, 0], whole[:, 2].double())


def test_full_graph_compile_gives_the_same_logits(make_model, batch):
    model = make_model()
    with torch.no_grad():
        expected = model(**batch).logits
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        close(compiled(**batch).logits, expected.double())


def test_dropout_sits_on_sublayers_and_embeddings_only_in_training(make_model, batch):
    model = make_model(dropout=0.3)
    assert torch.equal(model(**batch).logits, model(**batch).logits)
    model.train()
    assert not torch.equal(model(**batch).logits, model(**batch).logits)
    still = make_model(dropout=0.0)
    still.train()
    assert torch.equal(still(**batch).logits, still(**batch).logits)


def test_each_dropout_and_activation_option_changes_the_result(make_model, batch):
    for option in ("attention_dropout", "activation_dropout"):
        model = make_model(dropout=0.0, **{option: 0.4})
        model.train()
        assert not torch.equal(model(**batch).logits, model(**batch).logits), option
    plain = make_model()(**batch).logits
    for change in ({"activation_function": "gelu"}, {"scale_embedding": False}, {"sinusoid_layout": "halves"},
                   {"sinusoid_exponent": "2i/(d-2)"}, {"position_offset": 2}, {"zero_start_embedding": True},
                   {"norm_position": "pre"}, {"final_norm": True, "layer_norm_eps": 0.5}):  # fmt: skip
        assert not torch.allclose(make_model(**change)(**batch).logits, plain), change


def test_base_model_and_head_share_their_states(make_model, batch):
    model = make_model()
    base = VaswaniModel(model.config).eval()
    base.load_state_dict(model.model.state_dict())
    source = {k: batch[k] for k in ("input_ids", "attention_mask")}
    target = torch.tensor([[2, 4], [2, 6], [2, 8]])
    states = base(**source, decoder_input_ids=target).last_hidden_state
    close(model(**source, decoder_input_ids=target).logits, (states @ model.lm_head.weight.T).double())


def test_logits_to_keep_gives_the_last_columns(make_model, batch):
    model = make_model()
    source = {k: batch[k] for k in ("input_ids", "attention_mask")}
    target = torch.tensor([[2, 4, 6], [2, 6, 8], [2, 8, 3]])
    whole = model(**source, decoder_input_ids=target).logits
    assert torch.equal(model(**source, decoder_input_ids=target, logits_to_keep=2).logits, whole[:, -2:])


# ------------------------------------------------------------------ loss
def test_label_smoothed_loss_by_hand(make_model):
    from hf_vaswani.loss_vaswani import label_smoothed_cross_entropy

    # V = 5, eps = 0.1: 0.92 on the label, 0.02 on each other class.
    logits = torch.tensor([[[2.0, 0.0, 0.0, 1.0, -1.0]]])
    log_z = math.log(math.exp(2.0) + 2.0 + math.exp(1.0) + math.exp(-1.0))
    expected = -(0.92 * (2.0 - log_z) + 0.02 * (-log_z - log_z + (1.0 - log_z) + (-1.0 - log_z)))
    loss = label_smoothed_cross_entropy(logits, torch.tensor([[0]]), label_smoothing=0.1)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_training_loss_is_smoothed_and_evaluation_loss_is_not(make_model, batch):
    model = make_model(dropout=0.0)
    logits, labels = model(**batch).logits, batch["labels"]
    plain = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    smooth = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    close(model(**batch).loss, plain.double())
    model.train()
    close(model(**batch).loss, smooth.double())
    assert abs(smooth - plain) > 1e-3


def test_loss_is_divided_by_the_tokens_of_the_whole_update(make_model, batch):
    model = make_model(dropout=0.0)
    model.train()
    tokens = int((batch["labels"] != -100).sum())
    whole = model(**batch).loss
    parts = [
        model(**{k: v[rows] for k, v in batch.items()}, num_items_in_batch=torch.tensor(tokens)).loss
        for rows in (slice(0, 1), slice(1, 3))
    ]
    close(sum(parts), whole.double(), 1e-6)


def test_padding_columns_do_not_change_the_loss(make_model, batch):
    model = make_model(dropout=0.0)
    model.train()
    wider = {**batch, "labels": torch.cat([batch["labels"], torch.full((3, 10), -100)], dim=1)}
    close(model(**wider).loss, model(**batch).loss.double(), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [None, 0, torch.tensor(0)], ids=["own", "number", "tensor"])
def test_labels_that_are_all_ignored_give_zero_with_a_zero_gradient(make_model, batch, dtype, count):
    model = make_model().to(dtype)
    model.train()
    loss = model(**{**batch, "labels": torch.full((3, 5), -100)}, num_items_in_batch=count).loss
    loss.backward()
    assert loss.item() == 0.0
    assert all((p.grad == 0).all() for p in model.parameters())


def test_labels_are_shifted_right_behind_the_start_token(make_model):
    labels = torch.tensor([[7, 8, 1, -100]])
    assert make_model().prepare_decoder_input_ids_from_labels(labels).tolist() == [[2, 7, 8, 1]]
    assert shift_right(torch.tensor([[7, -100, -100]]), 2, 0).tolist() == [[2, 7, 0]]


def test_a_callers_own_loss_function_is_used(make_model, batch):
    model = make_model()
    model.loss_function = lambda logits, labels, **kwargs: logits.sum() * 0 + 42.0
    assert model(**batch).loss.item() == 42.0
