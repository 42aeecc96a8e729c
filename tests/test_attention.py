"""Attention in half precision on a processor, beside the same in float32."""

import pytest
import torch
from torch import nn

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, attention_vaswani
from hf_vaswani.attention_vaswani import eager_attention_forward, half_attention_on_cpu, is_half_on_cpu


def drawn(batch=3, heads=2, queries=5, keys=7, width=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(queries * 31 + keys)
    shapes = [(batch, heads, length, width) for length in (queries, keys, keys)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


class Place(nn.Module):
    """What a kernel asks of the module that it attends for."""

    def __init__(self, is_causal):
        super().__init__()
        self.is_causal = is_causal


def additive(mask):
    return None if mask is None else torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("longest", [0, 128])
@pytest.mark.parametrize("kind", ["none", "padding", "causal module", "causal mask", "one query"])
def test_half_precision_is_float32_to_its_own_digits(monkeypatch, dtype, longest, kind):
    monkeypatch.setattr(attention_vaswani, "_LONGEST_WITH_WEIGHTS", longest)
    queries, keys = {"none": (5, 7), "padding": (5, 7), "one query": (1, 7)}.get(kind, (6, 6))
    query, key, value = drawn(queries=queries, keys=keys, dtype=dtype)
    mask, expected_mask = None, None
    if kind == "padding":
        mask = expected_mask = torch.arange(keys)[None, None, None] < torch.tensor([7, 2, 4])[:, None, None, None]
    elif kind == "causal mask":
        mask = expected_mask = torch.ones(3, 1, 6, 6, dtype=torch.bool).tril()
    elif kind == "causal module":
        expected_mask = torch.ones(6, 6, dtype=torch.bool).tril()
    place = Place(is_causal=kind in ("causal module", "one query"))
    out, weights = half_attention_on_cpu(place, query, key, value, mask, scaling=0.5)
    whole = [one.detach().float().requires_grad_() for one in (query, key, value)]
    expected, _ = eager_attention_forward(place, *whole, additive(expected_mask), scaling=0.5)
    assert weights is None
    assert out.dtype == dtype
    rounding = {"atol": 0.03, "rtol": 0.03}
    torch.testing.assert_close(out.float(), expected, **rounding)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    out.backward(slope.to(dtype))
    expected.backward(slope)
    for ours, theirs in zip((query, key, value), whole, strict=True):
        torch.testing.assert_close(ours.grad.float(), theirs.grad, atol=0.06, rtol=0.06)


def test_a_query_without_any_key_gets_a_number():
    query, key, value = drawn(dtype=torch.bfloat16)
    mask = torch.ones(3, 1, 5, 7, dtype=torch.bool)
    mask[1] = False
    out, _ = half_attention_on_cpu(Place(False), query, key, value, mask, scaling=0.5)
    assert out.isfinite().all()


def test_which_kernel_attends_where():
    query = torch.zeros(1, 1, 1, 2)
    assert is_half_on_cpu("sdpa", query.bfloat16())
    assert is_half_on_cpu("sdpa", query.half())
    assert not is_half_on_cpu("sdpa", query)
    assert not is_half_on_cpu("sdpa", query.bfloat16().to("meta"))
    assert not is_half_on_cpu("eager", query.bfloat16())


@pytest.mark.parametrize("length", [9, 140])
def test_autocast_trains_like_float32(length):
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "d_model": 16, "d_ff": 24, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = VaswaniForConditionalGeneration(VaswaniConfig(vocab_size=29, dropout=0.0, **sizes)).train()
    ids = torch.randint(4, 29, (3, length))
    mask = torch.ones_like(ids)
    mask[1, length // 2 :] = 0
    ids = ids.masked_fill(mask == 0, model.config.pad_token_id)
    grads = []
    for is_half in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    assert {one.dtype for one in grads[1]} == {torch.float32}
    plain, half = (torch.cat([one.flatten() for one in each]) for each in grads)
    assert torch.cosine_similarity(plain, half, dim=0) > 0.9995
    assert (half - plain).norm() < 0.03 * plain.norm()
