"""Scaled dot-product attention (section 3.2.1): the equation, and which kernel carries it out where."""

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_torchdynamo_compiling

# Up to here bfloat16 products with the weights at hand are faster on a processor than any kernel without them.
_LONGEST_WITH_WEIGHTS = 128


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V.

    Args:
        query (`torch.Tensor`): [B, H, T, d_k]. key: [B, H, S, d_k]. value: [B, H, S, d_v].
        attention_mask (`torch.Tensor`, *optional*): additive, broadcast to [B, H, T, S].
        scaling (`float`): 1 / sqrt(d_k).

    Returns:
        output [B, T, H, d_v] and weights [B, H, T, S].

    Source: Vaswani et al. 2017, section 3.2.1, eq. (1).
    """
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling  # [B, H, T, S]
    # In float16 the mask's smallest number plus a negative score is -inf, and a row of them NaN: add in float32.
    scores = scores.float()
    if attention_mask is not None:
        scores = scores + attention_mask.float()
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    dropped = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(dropped, value).transpose(1, 2).contiguous(), weights  # [B, T, H, d_v]


def half_attention_on_cpu(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The same in bfloat16 or float16 on a processor, where torch's own kernel is up to ten times slower than these.

    Args:
        attention_mask (`torch.Tensor`, *optional*): True where a key may be read, broadcast to [B, H, T, S]; None: all
            keys, or in a causal module those up to the query's place. The rest as for `eager_attention_forward`.

    Returns:
        output [B, T, H, d_v] and None.
    """
    longest = max(query.shape[2], key.shape[2])
    with torch.autocast("cpu", enabled=False):
        if query.dtype != torch.bfloat16 or longest > _LONGEST_WITH_WEIGHTS:
            attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
            out, _ = attend(
                module, query.float(), key.float(), value.float(), attention_mask,
                dropout=dropout, scaling=scaling, **kwargs,
            )  # fmt: skip
            return out.to(query.dtype), None
        if attention_mask is None and module.is_causal and query.shape[2] > 1:
            attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        additive = None
        if attention_mask is not None:
            smallest = torch.finfo(torch.float32).min
            additive = torch.zeros(attention_mask.shape).masked_fill_(~attention_mask, smallest)
        key, value = key.to(query.dtype), value.to(query.dtype)
        return eager_attention_forward(module, query, key, value, additive, scaling, dropout)[0], None


def is_half_on_cpu(implementation: str | None, query: torch.Tensor) -> bool:
    """Whether `half_attention_on_cpu` is to take the place of torch's kernel ("sdpa") for this query."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return implementation == "sdpa" and is_half and query.device.type == "cpu" and not is_torchdynamo_compiling()
