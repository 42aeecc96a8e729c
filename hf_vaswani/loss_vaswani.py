"""The label-smoothed loss of section 5.4: from logits, or from hidden states without ever holding all logits."""

from typing import Any

import torch
from torch import nn

# Logits that are held at a time, in elements: enough rows for fast products, yet a small part of a batch.
_CHUNK_ELEMENTS = {"cpu": 12 * 2**20}
_CHUNK_ELEMENTS_ELSEWHERE = 2**26


def label_smoothed_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    **kwargs: Any,
) -> torch.Tensor:
    """Cross-entropy against (1 - eps) on the label plus eps / V on each of all V classes, per target token.

    Args:
        logits (`torch.Tensor`): [B, T, V]. labels (`torch.LongTensor`): [B, T], `ignore_index` where there is none.
        label_smoothing (`float`): eps; 0 gives the negative log-likelihood in nats, whose exp is the perplexity.
        num_items_in_batch (*optional*): target tokens of the whole update; the sum is divided by it. None: by the
            tokens of this batch. Where there is not a single label the loss is 0, not NaN.

    Returns:
        `torch.Tensor`: a scalar, float32.

    Choice: eps is spread over all V classes (Szegedy et al. 2015); others spread it over V - 1 or V - 2.
    Source: Vaswani et al. 2017, section 5.4.
    """
    labels = labels.to(logits.device)
    total = nn.functional.cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        ignore_index=ignore_index,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    return _per_token(total, labels, num_items_in_batch, ignore_index)


def linear_label_smoothed_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """The same loss of `hidden_states @ weight.T + bias`, whose logits and gradients are made a few rows at a time.

    Rows without a label cost nothing. Memory is that of one chunk of logits instead of several times [B, T, V].

    Args:
        hidden_states (`torch.Tensor`): [B, T, D]. weight (`torch.Tensor`): [V, D]. bias (*optional*): [V].
        labels (`torch.LongTensor`): [B, T]. The rest as for `label_smoothed_cross_entropy`.

    Returns:
        `torch.Tensor`: a scalar, float32.

    Source: Vaswani et al. 2017, section 5.4.
    """
    labels = labels.to(hidden_states.device)
    flat_labels = labels.reshape(-1)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    has_label = flat_labels != ignore_index
    total = _LinearCrossEntropy.apply(rows[has_label], weight, bias, flat_labels[has_label], label_smoothing)
    return _per_token(total, labels, num_items_in_batch, ignore_index)


def _per_token(total: torch.Tensor, labels: torch.Tensor, count: torch.Tensor | int | None, ignored: int) -> Any:
    if count is None:
        count = (labels != ignored).sum()
    divisor = torch.as_tensor(count, device=total.device)
    return total / torch.where(divisor == 0, 1, divisor)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of the losses of all rows; the gradients are made in the forward pass, while a chunk's logits are at hand."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        device = rows.device.type
        # The products run in the precision of autocast, as those of `nn.Linear` would; sums and softmax in float32.
        precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        ctx.save_for_backward(rows, weight, bias, labels)
        ctx.eps, ctx.precision = eps, precision
        total, ctx.grads = _sum_and_gradients(rows, weight, bias, labels, eps, precision, ctx.needs_input_grad[:3])
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: torch.Tensor) -> Any:  # type: ignore[override]
        grads, ctx.grads = ctx.grads, None
        if grads is None:  # a second time through a graph that was retained
            rows, weight, bias, labels = ctx.saved_tensors
            _, grads = _sum_and_gradients(rows, weight, bias, labels, ctx.eps, ctx.precision, ctx.needs_input_grad[:3])
        # In place: a fresh tensor of a vocabulary's size costs as much as a layer.
        return (*(grad if grad is None else grad.mul_(grad_total.to(grad.dtype)) for grad in grads), None, None)


@torch.no_grad()
def _sum_and_gradients(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    eps: float,
    precision: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The summed loss of all rows, and the gradients of rows, weight and bias that are needed.

    With p = softmax(z) and target q = (1 - eps) onehot(y) + eps / V, a row's loss is logsumexp(z) - q.z, and its
    gradient p - q.
    """
    device = rows.device.type
    vocabulary = len(weight)
    total = torch.zeros((), dtype=torch.float32, device=rows.device)
    grad_rows = torch.empty_like(rows) if needs[0] else None
    grad_weight = torch.zeros_like(weight) if needs[1] else None
    grad_bias = torch.zeros_like(bias) if needs[2] and bias is not None else None
    with torch.autocast(device, enabled=False):
        matrix = weight.to(precision)
        step = min(max(1, len(rows)), max(16, _CHUNK_ELEMENTS.get(device, _CHUNK_ELEMENTS_ELSEWHERE) // vocabulary))
        # One chunk's logits, its probabilities, and its slopes in the precision of the products: the same memory for
        # all chunks.
        products = torch.empty(step, vocabulary, dtype=precision, device=rows.device)
        wide = torch.empty(step, vocabulary, dtype=torch.float32, device=rows.device) if any(needs) else None
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step].to(precision)
            wanted = labels[start : start + step, None]
            product = torch.mm(chunk, matrix.T, out=products[: len(chunk)])
            logits = product.float()
            if bias is not None:
                logits += bias.float()
            picked = logits.gather(1, wanted)[:, 0]
            if eps:
                total -= eps * logits.mean(dim=-1).sum()
            if wide is None:
                total += (torch.logsumexp(logits, dim=-1) - (1.0 - eps) * picked).sum()
                continue
            # One pass of softmax serves the loss too: logsumexp(z) = max z - log max p, and max p >= 1 / V.
            top = logits.amax(dim=-1)
            slopes = torch.softmax(logits, dim=-1, out=wide[: len(chunk)])
            total += (top - slopes.amax(dim=-1).log() - (1.0 - eps) * picked).sum()
            # From here on p becomes p - q.
            if eps:
                slopes.sub_(eps / vocabulary)
            slopes.scatter_add_(1, wanted, slopes.new_full(wanted.shape, eps - 1.0))
            if grad_bias is not None:
                grad_bias += slopes.sum(dim=0).to(bias)
            if precision != torch.float32:
                slopes = product.copy_(slopes)
            if grad_rows is not None:
                grad_rows[start : start + step] = slopes @ matrix
            if grad_weight is not None:
                if grad_weight.dtype == precision:
                    grad_weight.addmm_(slopes.T, chunk)
                else:
                    grad_weight += slopes.T @ chunk
    return total, [grad_rows, grad_weight, grad_bias]
