"""Dropout whose random bits cost little on a processor."""

from typing import Any

import torch
from torch import nn
from transformers.utils import is_torchdynamo_compiling

_LEVELS = 2**16


def dropout(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Set each element to 0 with probability p and divide the others by 1 - p.

    Args:
        x (`torch.Tensor`): any shape, floating. p (`float`): from 0 to 1. training (`bool`): False gives x back.

    Returns:
        `torch.Tensor`: as x. The same seed of torch gives the same mask.

    Choice: on a processor torch draws a double per element, which took more time than the matrix products of a small
    model; here an element gets 16 bits, so p is the nearest multiple of 1 / 65,536. What is kept is divided by the
    rate that is really kept, so the expectation is x exactly.

    Source: Vaswani et al. 2017, section 5.4; Srivastava et al. 2014.
    """
    drop = round(p * _LEVELS)
    if not training or p == 0.0:
        return x
    if x.device.type != "cpu" or not 0 < drop < _LEVELS or is_torchdynamo_compiling():
        return nn.functional.dropout(x, p, training)  # drawn and applied in one kernel there
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    keep = (words.view(torch.int16)[: x.numel()] >= drop - _LEVELS // 2).view(x.shape)
    return _Kept.apply(x, keep, _LEVELS / (_LEVELS - drop))


class _Kept(torch.autograd.Function):
    """x * keep * scale, which remembers a byte per element for the way back."""

    @staticmethod
    def forward(x: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:  # type: ignore[override]
        return (x * keep).mul_(scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.scale = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.saved_tensors[0] * ctx.scale, None, None
