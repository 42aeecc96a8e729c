"""The folded decoder: candidates, slots, and steps beside the whole decoder."""

import pytest
import torch
from torch import nn

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, decoding_vaswani
from hf_vaswani.decoding_vaswani import FoldedDecoder, Slots, attend, linear


def make(vocab_size=203, **changes):
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "d_ff": 24}
    return VaswaniForConditionalGeneration(VaswaniConfig(vocab_size=vocab_size, **{**sizes, **changes})).eval()


def folded(model, batch=3, num_beams=2, width=5):
    generator = torch.Generator().manual_seed(batch)
    states = torch.randn(batch, width, model.config.d_model, generator=generator).to(model.dtype)
    is_real = torch.arange(width) < torch.tensor([2 + n % (width - 1) for n in range(batch)])[:, None]
    return FoldedDecoder(model, states, is_real, num_beams), states, is_real


@pytest.mark.parametrize("rows", [1, 2, 5, 15, 16, 23, 24, 40])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_map_is_the_same_for_any_number_of_rows(rows, bias, dtype):
    torch.manual_seed(rows)
    map_ = nn.Linear(7, 11, bias=bias).to(dtype)
    x = torch.randn(7, rows, dtype=dtype).T  # lies as columns
    with torch.no_grad():
        torch.testing.assert_close(linear(x, map_), map_(x), atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)


@pytest.mark.parametrize("rows", [1, 3, 15, 16, 37])
@pytest.mark.parametrize("vocab_size", [5, 64, 203, 1290])
@pytest.mark.parametrize("banned", [[], [1], [0, 4]])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_the_best_tokens_are_those_of_a_plain_pass(monkeypatch, rows, vocab_size, banned, bias):
    monkeypatch.setattr(decoding_vaswani, "_CHUNK_ELEMENTS", 128 * rows)  # several parts, the last one ragged
    model = make(vocab_size, output_bias=bias)
    if bias:
        model.lm_head.bias.normal_()
    decoder, *_ = folded(model)
    hidden = torch.randn(rows, 16)
    count = min(4, vocab_size)
    logits = model.lm_head(hidden)
    expected_sum = logits.logsumexp(-1)
    logits[:, banned] = -torch.inf
    expected = logits.topk(count, dim=-1)
    values, ids, total = decoder.best(hidden, count, banned)
    torch.testing.assert_close(values, expected.values, atol=1e-5, rtol=1e-5)
    assert torch.equal(ids[values.isfinite()], expected.indices[values.isfinite()])
    torch.testing.assert_close(total, expected_sum, atol=1e-5, rtol=1e-5)
    assert decoder.best(hidden, count, banned, needs_sum=False)[2] is None


@pytest.mark.parametrize("rows", [3, 20])
@torch.no_grad()
def test_sums_of_large_logits_stay_numbers(rows):
    model = make(300)
    model.lm_head.weight.mul_(1e4)
    decoder, *_ = folded(model)
    hidden = torch.randn(rows, 16)
    total = decoder.best(hidden, 3)[2]
    torch.testing.assert_close(total, model.lm_head(hidden).logsumexp(-1), rtol=1e-5, atol=1e-2)


def whole_states(model, states, is_real, tokens):
    """Last hidden states of the whole decoder for each hypothesis: [B, K, T] tokens -> [B K, D]."""
    num_beams = tokens.shape[1]
    return model.model.decoder(
        input_ids=tokens.flatten(0, 1),
        encoder_hidden_states=states.repeat_interleave(num_beams, 0),
        encoder_attention_mask=is_real.long().repeat_interleave(num_beams, 0),
    ).last_hidden_state[:, -1]


@pytest.mark.parametrize("num_beams", [1, 2, 5])
@pytest.mark.parametrize("clear_every", [1, 3, 100])
@pytest.mark.parametrize("changes", [{}, {"norm_position": "pre"}, {"zero_start_embedding": True}])
@torch.no_grad()
def test_steps_equal_the_whole_decoder_while_beams_are_chosen_and_sentences_leave(
    monkeypatch, num_beams, clear_every, changes
):
    monkeypatch.setattr(decoding_vaswani, "_CLEAR_EVERY", clear_every)
    model = make(**changes)
    decoder, states, is_real = folded(model, batch=6, num_beams=num_beams)
    generator = torch.Generator().manual_seed(9)
    text = torch.full((6, num_beams, 1), model.config.decoder_start_token_id)
    for step in range(14):
        hidden = decoder.step(text[:, :, -1])
        torch.testing.assert_close(hidden, whole_states(model, states, is_real, text), atol=2e-5, rtol=1e-4)
        parents = torch.randint(0, num_beams, text.shape[:2], generator=generator)
        tokens = torch.randint(4, 200, text.shape[:2], generator=generator)
        text = torch.cat([text.gather(1, parents[:, :, None].expand(-1, -1, step + 1)), tokens[:, :, None]], dim=2)
        decoder.reorder(parents)
        if step in (4, 9):
            rows = torch.tensor([0, 2, 3, 5] if step == 4 else [1, 2])
            decoder.keep(rows)
            text, states, is_real = text[rows], states[rows], is_real[rows]


@torch.no_grad()
def test_slots_of_hypotheses_that_ended_are_freed():
    model = make()
    decoder, *_ = folded(model, batch=2, num_beams=4)
    tokens = torch.full((2, 4), 7)
    for _ in range(64):
        decoder.step(tokens)
        decoder.reorder(torch.zeros(2, 4, dtype=torch.long))  # all go on from the best: one line of ancestors
    # 64 ancestors, and what came since the last clearing, instead of 256.
    assert decoder.used <= 64 + 4 * decoding_vaswani._CLEAR_EVERY
    assert decoder.slots[0].tensors[0].shape[2] <= 2 * decoder.used


def test_slots_grow_and_keep_what_is_in_them():
    slots = Slots()
    parts = [torch.randn(2, 3, 2, width) for width in (5, 7) for _ in range(1)]
    written = []
    for n in range(20):
        new = [one + n for one in parts]
        written.append(new)
        keys, values = slots.add(new, 2 * n)
    assert torch.equal(keys, torch.cat([one[0] for one in written], dim=2))
    assert torch.equal(values, torch.cat([one[1] for one in written], dim=2))
    slots.keep(torch.tensor([1]), torch.tensor([[3, 0, 39]]), room=4)
    assert torch.equal(slots.tensors[0][:, :, :3], keys[1:][:, :, [3, 0, 39]])
    assert slots.tensors[1].shape == (1, 3, 7, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 9])
def test_attention_of_folded_beams(dtype, batch):
    torch.manual_seed(0)
    query, key, value = (torch.randn(batch, 3, length, 4) for length in (2, 6, 6))
    is_seen = torch.rand(batch, 1, 2, 6) < 0.7
    is_seen[..., 0] = True
    scores = (query @ key.transpose(2, 3) * 0.5).masked_fill(~is_seen, -torch.inf)
    expected = scores.softmax(-1) @ value
    mask = torch.zeros(is_seen.shape, dtype=dtype).masked_fill(~is_seen, torch.finfo(dtype).min)
    attention = nn.Module().eval()
    attention.scaling = 0.5
    out = attend(attention, query.to(dtype), key.to(dtype), value.to(dtype), mask)
    torch.testing.assert_close(
        out.transpose(1, 2).float(), expected, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0.02
    )
