"""The loss of section 5.4 made from hidden states, a few rows at a time."""

import math

import pytest
import torch
from torch import nn

from hf_vaswani import loss_vaswani
from hf_vaswani.loss_vaswani import label_smoothed_cross_entropy, linear_label_smoothed_cross_entropy


def drawn(dtype=torch.float64, bias=True, seed=0):
    """Hidden states [3, 5, 7] of 11 classes, some rows without a label."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(3, 5, 7, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(11, 7, generator=generator, dtype=dtype).requires_grad_()
    offset = torch.randn(11, generator=generator, dtype=dtype).requires_grad_() if bias else None
    labels = torch.randint(0, 11, (3, 5), generator=generator)
    labels[0, 2:], labels[2, 0] = -100, -100
    return hidden, weight, offset, labels


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 16, 100])
def test_equals_a_plain_loop_whatever_the_chunk(monkeypatch, eps, bias, rows):
    monkeypatch.setattr(loss_vaswani, "_CHUNK_ELEMENTS", {"cpu": rows * 11})
    hidden, weight, offset, labels = drawn(bias=bias)
    expected, count = 0.0, 0
    for state, label in zip(hidden.reshape(-1, 7).tolist(), labels.flatten().tolist(), strict=True):
        if label == -100:
            continue
        logits = [sum(a * b for a, b in zip(state, row, strict=True)) for row in weight.tolist()]
        if offset is not None:
            logits = [a + b for a, b in zip(logits, offset.tolist(), strict=True)]
        log_sum = math.log(sum(math.exp(z) for z in logits))
        target = [eps / 11 + (1 - eps) * (n == label) for n in range(11)]
        expected += sum(q * (log_sum - z) for q, z in zip(target, logits, strict=True))
        count += 1
    assert count == 11
    loss = linear_label_smoothed_cross_entropy(hidden, weight, offset, labels, eps)
    assert loss.item() == pytest.approx(expected / count, rel=1e-6)


@pytest.mark.parametrize("count", [None, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_equal_those_of_the_loss_from_logits(monkeypatch, count, bias):
    monkeypatch.setattr(loss_vaswani, "_CHUNK_ELEMENTS", {"cpu": 0})  # 16 rows at a time: more than one would be
    hidden, weight, offset, labels = drawn(torch.float32, bias, seed=1)
    wanted = [one for one in (hidden, weight, offset) if one is not None]
    fused = linear_label_smoothed_cross_entropy(hidden, weight, offset, labels, 0.1, count)
    plain = label_smoothed_cross_entropy(nn.functional.linear(hidden, weight, offset), labels, 0.1, count)
    assert fused.item() == pytest.approx(plain.item(), rel=1e-6)
    # Times 3, as a loss scale or a share of several processes would do.
    for a, b in zip(torch.autograd.grad(3 * fused, wanted), torch.autograd.grad(3 * plain, wanted), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_a_batch_without_a_label_costs_nothing_and_gives_zero():
    hidden, weight, offset, labels = drawn(torch.float32)
    loss = linear_label_smoothed_cross_entropy(hidden, weight, offset, torch.full_like(labels, -100), 0.1)
    grads = torch.autograd.grad(loss, [hidden, weight, offset])
    assert loss.item() == 0.0
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


def test_under_autocast_the_sums_stay_in_float32():
    hidden, weight, offset, labels = drawn(torch.float32, seed=2)
    exact = linear_label_smoothed_cross_entropy(hidden, weight, offset, labels, 0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_label_smoothed_cross_entropy(hidden, weight, offset, labels, 0.1)
        plain = label_smoothed_cross_entropy(nn.functional.linear(hidden, weight, offset), labels, 0.1)
    assert loss.dtype == torch.float32
    assert loss.item() != exact.item()  # the products did run in bfloat16
    assert loss.item() == pytest.approx(plain.item(), rel=5e-3)
    grads = torch.autograd.grad(loss, [hidden, weight])
    assert [grad.dtype for grad in grads] == [torch.float32] * 2
    reference = torch.autograd.grad(exact, [hidden, weight])
    for a, b in zip(grads, reference, strict=True):
        assert (a - b).abs().max() < 0.03 * b.abs().max()


@pytest.mark.parametrize("changes", [{}, {"output_bias": True}, {"tie_word_embeddings": False}])
def test_a_model_without_logits_has_the_same_loss_and_gradients(make_model, batch, changes):
    model = make_model(dropout=0.0, **changes).train()
    found = []
    for skip in (False, True):
        model.zero_grad()
        outputs = model(**batch, num_items_in_batch=9, skip_logits=skip)
        outputs.loss.backward()
        found.append((outputs.loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}))
        assert (outputs.logits is None) == skip
    (plain, grads), (fused, others) = found
    assert fused == pytest.approx(plain, rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(others[name], grad, atol=1e-6, rtol=1e-4, msg=name)
    assert model.eval()(**batch, skip_logits=True).loss.item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)


def test_a_loss_or_head_of_the_users_own_is_used_without_logits_too(make_model, batch):
    model = make_model().train()
    model.loss_function = lambda logits, labels, **kwargs: logits.sum() * 0 + 5.0
    outputs = model(**batch, skip_logits=True)
    assert outputs.loss.item() == 5.0
    assert outputs.logits is None
    model, calls = make_model().eval(), []
    plain = model(**batch).loss.item()
    model.lm_head.register_forward_hook(lambda *args: calls.append(1))
    assert model(**batch, skip_logits=True).loss.item() == pytest.approx(plain, rel=1e-6)
    assert calls == [1]


def test_without_labels_the_logits_are_given_whatever_is_asked(make_model, batch):
    source = {key: batch[key] for key in ("input_ids", "attention_mask")}
    outputs = make_model()(**source, decoder_input_ids=torch.tensor([[2]] * 3), skip_logits=True)
    assert outputs.logits.shape == (3, 1, 37)
