"""The label-smoothed loss of section 5.4: from logits, or from hidden states without ever holding all logits."""

from typing import Any

import torch
from torch import nn

# Logits that are held at a time, in elements: what stays in a processor's cache or is small beside a GPU's memory.
_CHUNK_ELEMENTS = {"cpu": 2**21}
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
    """Sum of the losses of all rows; the gradients are made in the forward pass, while a chunk's logits are at hand.

    With p = softmax(z) and target q = (1 - eps) onehot(y) + eps / V, a row's loss is logsumexp(z) - q.z, and its
    gradient p - q.
    """

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
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        needs_gradient = needs_rows or needs_weight or needs_bias
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        grad_rows = torch.empty_like(rows) if needs_rows else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias) if needs_bias and bias is not None else None
        with torch.autocast(device, enabled=False):
            matrix = weight.to(precision)
            step = max(16, _CHUNK_ELEMENTS.get(device, _CHUNK_ELEMENTS_ELSEWHERE) // len(weight))
            for start in range(0, len(rows), step):
                chunk = rows[start : start + step].to(precision)
                wanted = labels[start : start + step, None]
                logits = nn.functional.linear(chunk, matrix).float()
                if bias is not None:
                    logits += bias.float()
                picked = logits.gather(1, wanted)[:, 0]
                if eps:
                    total -= eps * logits.mean(dim=-1).sum()
                if needs_gradient:
                    # One pass of softmax serves the loss too: logsumexp(z) = max z - log max p, and max p >= 1 / V.
                    top = logits.amax(dim=-1)
                    logits = torch.softmax(logits, dim=-1)
                    total += (top - logits.amax(dim=-1).log() - (1.0 - eps) * picked).sum()
                else:
                    total += (torch.logsumexp(logits, dim=-1) - (1.0 - eps) * picked).sum()
                    continue
                # From here on `logits` holds p, then p - q.
                if eps:
                    logits.sub_(eps / len(weight))
                logits.scatter_add_(1, wanted, logits.new_full(wanted.shape, eps - 1.0))
                if grad_bias is not None:
                    grad_bias += logits.sum(dim=0).to(bias)
                slopes = logits.to(precision)
                if grad_rows is not None:
                    grad_rows[start : start + step] = slopes @ matrix
                if grad_weight is not None:
                    if grad_weight.dtype == precision:
                        grad_weight.addmm_(slopes.T, chunk)
                    else:
                        grad_weight += slopes.T @ chunk
        ctx.save_for_backward(*(grad for grad in (grad_rows, grad_weight, grad_bias) if grad is not None))
        ctx.present = tuple(grad is not None for grad in (grad_rows, grad_weight, grad_bias))
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: torch.Tensor) -> Any:  # type: ignore[override]
        saved = iter(ctx.saved_tensors)
        grads = [next(saved) if is_there else None for is_there in ctx.present]
        return (*(grad if grad is None else grad * grad_total.to(grad.dtype) for grad in grads), None, None)
