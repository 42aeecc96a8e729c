"""How much the loss hangs on each head, by its gradient: no head has to be taken out to see it.

Letters: B batch, H heads, L length, T target length, S source length, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..data.progress import late_bar
from ..evaluation.bare import bare_model
from .head_masks import Head, all_heads, attention_modules
from .heads import padded_batches, tokenized


def head_importance(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[tuple[str, str]],
    *,
    per_layer: bool = False,
    batch_tokens: int = 2048,
) -> dict[Head, float]:
    """I_h = E_x |Att_h(x)^T dL(x) / dAtt_h(x)|, to first order the change of the loss when a head's gate closes.

    x is a sentence pair, L(x) the negative log-likelihood of its target in nats, summed over its tokens, end token
    included; Att_h(x) holds the head's output at every position.

    Args:
        model (`VaswaniForConditionalGeneration`): measured in evaluation mode, without dropout, and left as it was.
        tokenizer: its tokenizer. pairs (`Sequence[tuple[str, str]]`): pairs with a blank side are left out.
        per_layer (`bool`): divide by the l2 norm over the heads of the same attention, so that attentions of unlike
            strength compare.
        batch_tokens (`int`): padded tokens on either side of a batch: speed, not the result.

    Returns:
        `dict[Head, float]`: in the order of `all_heads`.

    Raises:
        ValueError: no pair has text on both sides.

    Source: Michel et al. 2019, "Are Sixteen Heads Really Better than One?", section 4.1, eq. (2); the division by layer
    is from the same section, after Molchanov et al. 2017.

    Choice: one absolute value a sentence, as in the formula; the authors' code takes one a position.
    """
    examples = tokenized(tokenizer, pairs)
    sums = dict.fromkeys(all_heads(model), 0.0)
    batches = padded_batches(examples, tokenizer.pad_token_id or 0, batch_tokens)
    with late_bar("importance", "pair", len(examples)) as bar, bare_model(model) as plain, torch.enable_grad():
        for batch in batches:
            for (kind, layer), gradient in gate_gradients(plain, batch).items():
                for number, value in enumerate(gradient.abs().double().sum(dim=0).tolist()):
                    sums[Head(kind, layer, number)] += value
            bar.update(len(batch["input_ids"]))
    found = {head: value / len(examples) for head, value in sums.items()}
    return _divided_by_layer(found) if per_layer else found


def gate_gradients(model: Any, batch: dict[str, torch.Tensor]) -> dict[tuple[str, int], torch.Tensor]:
    """dL(x) / dxi_h at xi_h = 1, where each head's output is multiplied by its gate xi_h.

    By the chain rule this is Att_h(x)^T dL(x) / dAtt_h(x).

    Args:
        model (`VaswaniForConditionalGeneration`): in evaluation mode; no gradient reaches its weights.
        batch (`dict`): `input_ids` [B, S], `attention_mask` [B, S], `labels` [B, T] with -100 for padding.

    Returns:
        [B, H] for each attention, by kind and layer.
    """
    rows = len(batch["labels"])
    handles, gates = [], {}
    frozen = [one for one in model.parameters() if one.requires_grad]
    try:
        for one in frozen:
            one.requires_grad_(False)
        for place, attention in attention_modules(model).items():
            heads = attention.out_proj.in_features // attention.d_v
            gate = torch.ones(rows, heads, dtype=model.dtype, device=model.device, requires_grad=True)
            gates[place] = gate
            handles.append(attention.out_proj.register_forward_pre_hook(partial(_close, gate)))
        inputs = {name: value.to(model.device) for name, value in batch.items()}
        labels = inputs.pop("labels")
        logits = model(
            **inputs, decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels), use_cache=False
        ).logits
        logits = logits if model.dtype == torch.float64 else logits.float()  # [B, T, V]
        # A sum of sentences' losses: the gates of a sentence meet its own loss alone.
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        gradients = torch.autograd.grad(loss, list(gates.values()))
    finally:
        for handle in handles:
            handle.remove()
        for one in frozen:
            one.requires_grad_(True)
    return dict(zip(gates, gradients, strict=True))


def _close(gate: torch.Tensor, module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
    x = inputs[0]  # [B, L, H * d_v]
    gated = x.unflatten(-1, (gate.shape[1], -1)) * gate[:, None, :, None]
    return (gated.flatten(-2),)


def _divided_by_layer(found: dict[Head, float]) -> dict[Head, float]:
    squares: dict[tuple[str, int], float] = {}
    for head, value in found.items():
        place = (head.kind, head.layer)
        squares[place] = squares.get(place, 0.0) + value**2
    return {head: value / max(squares[head.kind, head.layer] ** 0.5, 1e-20) for head, value in found.items()}
