"""Heads taken out for good: their rows of W^Q, W^K and W^V and their columns of W^O are removed.

The smaller model is one of the same class, and saves, loads, trains and translates like any other; its configuration
says in `kept_heads` which heads are left.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .head_masks import Head, all_heads, attention_modules, check_heads


def prune_heads(model: Any, heads: Iterable[Head]) -> Any:
    """A copy without some heads, which computes what the model computes with them masked.

    Args:
        model (`VaswaniForConditionalGeneration`): stays as it is; it may have been pruned before.
        heads (iterable of `Head`): which to take out, counted among those that the model has now.

    Returns:
        a model of the same class, precision, device and mode.

    Raises:
        ValueError: a head that does not exist, or an attention that would have none left.

    Source: Michel et al. 2019, "Are Sixteen Heads Really Better than One?", section 4.

    Choice: an attention keeps at least one head. One without any would be another architecture, with a sublayer less.
    """
    lost = set(check_heads(heads, model))
    kept: dict[tuple[str, int], list[int]] = {place: [] for place in attention_modules(model)}
    for head in all_heads(model):
        if head not in lost:
            kept[head.kind, head.layer].append(head.head)
    bare = [f"{kind}.{layer}" for (kind, layer), numbers in kept.items() if not numbers]
    if bare:
        raise ValueError(
            f"Nothing would be left of {', '.join(bare)}: an attention keeps at least one head. Masking can take all."
        )
    smaller = copy.deepcopy(model)
    names = dict(smaller.config.kept_heads or {})
    for (kind, layer), attention in attention_modules(smaller).items():
        numbers = kept[kind, layer]
        if len(numbers) == attention.out_proj.in_features // attention.d_v:
            continue
        before = smaller.config.heads_of(kind, layer)
        names[f"{kind}.{layer}"] = [before[number] for number in numbers]
        for map_, width in ((attention.q_proj, attention.d_k), (attention.k_proj, attention.d_k)):
            _keep(map_, numbers, width, dim=0)
        _keep(attention.v_proj, numbers, attention.d_v, dim=0)
        _keep(attention.out_proj, numbers, attention.d_v, dim=1)
    smaller.config.kept_heads = names or None
    for part in smaller.modules():  # all share one configuration, unless somebody gave a part its own
        if hasattr(part, "config") and part.config is not smaller.config:
            part.config.kept_heads = names or None
    return smaller


def _keep(map_: nn.Linear, heads: list[int], width: int, dim: int) -> None:
    """Cut a map down to the rows (dim 0) or columns (dim 1) of some heads."""
    index = torch.cat([torch.arange(head * width, (head + 1) * width) for head in heads]).to(map_.weight.device)
    weight, bias = map_.weight, map_.bias
    map_.weight = nn.Parameter(weight.detach().index_select(dim, index), requires_grad=weight.requires_grad)
    if dim == 0:
        map_.out_features = len(index)
        if bias is not None:
            map_.bias = nn.Parameter(bias.detach().index_select(0, index), requires_grad=bias.requires_grad)
    else:
        map_.in_features = len(index)


def least_important(importance: Mapping[Head, float], keep: int) -> list[Head]:
    """Heads to take out, so that the most important ones are left and every attention has one.

    Args:
        importance (mapping from `Head` to `float`): of every head of a model, from `head_importance`.
        keep (`int`): heads that are left in the whole model.

    Returns:
        `list[Head]`: the least important first.

    Raises:
        ValueError: `keep` is less than the number of attentions, or more than that of heads.
    """
    left: dict[tuple[str, int], int] = {}
    for head in importance:
        left[head.kind, head.layer] = left.get((head.kind, head.layer), 0) + 1
    if not len(left) <= keep <= len(importance):
        raise ValueError(
            f"{keep} heads cannot be kept: the model has {len(importance)}, and each of its {len(left)} attentions "
            "keeps at least one."
        )
    lost: list[Head] = []
    for head in sorted(importance, key=lambda one: importance[one]):
        place = (head.kind, head.layer)
        if len(lost) < len(importance) - keep and left[place] > 1:
            left[place] -= 1
            lost.append(head)
    return lost
