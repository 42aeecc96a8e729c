"""Dropout with 16 random bits an element."""

import pytest
import torch
from torch import nn

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.dropout_vaswani import dropout


@pytest.mark.parametrize(("p", "shape"), [(0.1, (101, 997)), (0.3, (7, 41, 333)), (0.5, (100_003,))])
def test_rate_scale_and_independence(p, shape):
    torch.manual_seed(5)
    x = torch.ones(shape)
    first, second = dropout(x, p, True), dropout(x, p, True)
    dropped = first == 0
    count = x.numel()
    assert abs(dropped.float().mean().item() - p) < 4 * (p * (1 - p) / count) ** 0.5
    kept_rate = 1 - round(p * 65536) / 65536
    assert torch.equal(first[~dropped], torch.full((int((~dropped).sum()),), 1 / kept_rate))
    both = (dropped & (second == 0)).float().mean().item()
    assert abs(both - p * p) < 4 * (p * p / count) ** 0.5
    # Nor do neighbours, which share one random word, depend on each other.
    flat = dropped.flatten().float()
    for step in (1, 2, 3, 4):
        together = (flat[:-step] * flat[step:]).mean().item()
        assert abs(together - p * p) < 5 * (p * p / count) ** 0.5


def test_the_seed_decides():
    x = torch.randn(3, 5, 7)
    torch.manual_seed(1)
    first = dropout(x, 0.4, True)
    torch.manual_seed(1)
    assert torch.equal(first, dropout(x, 0.4, True))
    assert not torch.equal(first, dropout(x, 0.4, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_pass_where_values_did(dtype):
    x = torch.randn(5, 9, dtype=dtype, requires_grad=True)
    torch.manual_seed(2)
    y = dropout(x, 0.25, True)
    assert y.dtype == dtype
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)
    assert torch.allclose(x.grad[y != 0], torch.tensor(4 / 3, dtype=dtype))


def test_second_derivatives_are_there():
    x = torch.randn(11, dtype=torch.float64, requires_grad=True)

    def masked(x):
        torch.manual_seed(3)
        return dropout(x, 0.5, True).pow(3)

    assert torch.autograd.gradgradcheck(masked, (x,))


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.7, False), (1e-9, False)])
def test_nothing_is_dropped_where_nothing_is_to_be(p, training):
    x = torch.randn(4, 3)
    assert dropout(x, p, training) is x


@pytest.mark.parametrize("p", [1.0, 1e-6, 0.9999999])
def test_rates_beyond_the_grid_are_those_of_torch(p):
    x = torch.randn(13, 17)
    torch.manual_seed(4)
    ours = dropout(x, p, True)
    torch.manual_seed(4)
    assert torch.equal(ours, nn.functional.dropout(x, p, True))


def test_the_model_drops_in_training_alone_and_where_the_paper_says(monkeypatch):
    from hf_vaswani import modeling_vaswani

    rates = []
    monkeypatch.setattr(modeling_vaswani, "dropout", lambda x, p, training: rates.append((p, training)) or x)
    sizes = {"encoder_layers": 2, "decoder_layers": 3, "d_model": 8, "d_ff": 12, "num_attention_heads": 2}
    model = VaswaniForConditionalGeneration(VaswaniConfig(vocab_size=23, dropout=0.2, activation_dropout=0.05, **sizes))
    ids = torch.tensor([[5, 6, 7]])
    model.train()(input_ids=ids, labels=ids)
    # Embeddings of both sides, every sublayer's output, and the inside of each feed-forward.
    assert rates.count((0.2, True)) == 2 + 2 * 2 + 3 * 3
    assert rates.count((0.05, True)) == 2 + 3
    rates.clear()
    model.eval()(input_ids=ids, labels=ids)
    assert {training for _, training in rates} == {False}
