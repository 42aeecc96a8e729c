"""Heads by name, and what a model loses without some of them: their outputs set to zero before W^O.

A head is written "encoder.0.3": kind ("encoder", "decoder" for the decoder's self-attention, "cross"), layer and head,
both from 0 and as `output_attentions` counts them. In a pruned model heads are counted among those that are left.

Letters: B batch, L length, H heads.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

KINDS = ("encoder", "decoder", "cross")


class Head(NamedTuple):
    """One attention head of a model.

    Args:
        kind (`str`): "encoder", "decoder" (self-attention) or "cross". layer (`int`), head (`int`): from 0.
    """

    kind: str
    layer: int
    head: int

    def __str__(self) -> str:
        return f"{self.kind}.{self.layer}.{self.head}"


def attention_modules(model: Any) -> dict[tuple[str, int], Any]:
    """The attention sublayers of a whole model, by kind and layer: encoder, decoder, cross, each from layer 0.

    Args:
        model (`VaswaniForConditionalGeneration`): also of a class that came with a checkpoint.

    Raises:
        TypeError: for a model of another architecture.
    """
    if getattr(getattr(model, "config", None), "model_type", None) != "vaswani" or not hasattr(model, "lm_head"):
        raise TypeError(
            f"{type(model).__name__} is not a VaswaniForConditionalGeneration: its heads cannot be told apart here. "
            "`hf-vaswani import` converts MarianMT and other checkpoints."
        )
    encoder, decoder = model.model.encoder.layers, model.model.decoder.layers
    found = {("encoder", n): layer.self_attn for n, layer in enumerate(encoder)}
    found.update({("decoder", n): layer.self_attn for n, layer in enumerate(decoder)})
    found.update({("cross", n): layer.encoder_attn for n, layer in enumerate(decoder)})
    return found


def all_heads(model: Any) -> list[Head]:
    """Every head that a model (`VaswaniForConditionalGeneration`) has, in the order of `attention_modules`."""
    modules = attention_modules(model)
    return [Head(kind, layer, n) for (kind, layer), one in modules.items() for n in range(_count(one))]


def _count(attention: Any) -> int:
    return attention.out_proj.in_features // attention.d_v


def parse_heads(spec: str, model: Any) -> list[Head]:
    """Heads from text.

    Args:
        spec (`str`): names with commas between: "encoder.0.3,cross.1.2". "*" stands for every layer or head
            ("cross.*.0", "encoder.1.*"), "^2" as a head for all heads of that attention but head 2.
        model (`VaswaniForConditionalGeneration`): the model that must have them.

    Returns:
        `list[Head]`: each once, in the order of `all_heads`.

    Raises:
        ValueError: for a name that is none, or of a head that does not exist; the message says which there are.
    """
    counts = {place: _count(one) for place, one in attention_modules(model).items()}
    found: set[Head] = set()
    for name in (one.strip() for one in spec.split(",")):
        kind, layer_text, head_text = _three_parts(name)
        layers = [layer for one, layer in counts if one == kind]
        for layer in layers if layer_text == "*" else [int(layer_text)]:
            if layer not in layers:
                raise ValueError(_no_such(name, counts))
            present = range(counts[kind, layer])
            number = head_text.removeprefix("^")
            if number != "*" and int(number) not in present:
                raise ValueError(_no_such(name, counts))
            if head_text == "*":
                chosen = set(present)
            else:
                chosen = set(present) - {int(number)} if head_text.startswith("^") else {int(number)}
            found.update(Head(kind, layer, one) for one in chosen)
    return [head for head in all_heads(model) if head in found]


def check_heads(heads: Iterable[Head], model: Any) -> list[Head]:
    """Heads (iterable of `Head` or of equal tuples) in the order of `all_heads`, each once.

    Raises:
        ValueError: for one that the model does not have; the message says which there are.
    """
    wanted = {Head(*one) for one in heads}
    known = all_heads(model)
    for head in sorted(wanted - set(known)):
        raise ValueError(_no_such(str(head), {place: _count(one) for place, one in attention_modules(model).items()}))
    return [head for head in known if head in wanted]


def _three_parts(name: str) -> tuple[str, str, str]:
    parts = name.split(".")
    if len(parts) == 3:
        kind, layer, head = parts
        if kind in KINDS and _is_number(layer, "*") and _is_number(head.removeprefix("^"), "*") and head != "^*":
            return kind, layer, head
    raise ValueError(
        f"{name!r} names no heads: write KIND.LAYER.HEAD, such as encoder.0.3, with a kind of {', '.join(KINDS)}; * is "
        "every layer or head, ^3 every head but 3; commas between."
    )


def _is_number(text: str, other: str) -> bool:
    return text == other or (text.isascii() and text.isdigit())


def _no_such(name: str, counts: dict[tuple[str, int], int]) -> str:
    known = []
    for kind in KINDS:
        numbers = [count for (one, _), count in counts.items() if one == kind]
        layers = "layer 0" if len(numbers) == 1 else f"layers 0 to {len(numbers) - 1}"
        if len(set(numbers)) == 1:
            known.append(f"{kind} {layers} with {numbers[0]} head{'' if numbers[0] == 1 else 's'} each")
        else:
            known.append(f"{kind} {layers} with {', '.join(map(str, numbers))} heads")
    return f"There is no head {name}. The model has {'; '.join(known)}; heads count from 0."


# --------------------------------------------------------------------------- masking
@contextmanager
def masked_heads(model: Any, heads: Iterable[Head]) -> Iterator[None]:
    """Inside, the named heads write nothing: their outputs are zero before W^O.

    Everything else works as ever, `generate` included, which takes the library's own, slower loop where a head of the
    decoder is masked. Masks may be nested.

    Args:
        model (`VaswaniForConditionalGeneration`): is itself again afterwards, also after a fault.
        heads (iterable of `Head`): none at all changes nothing.

    Raises:
        ValueError: a head that the model does not have.

    Source: Michel et al. 2019, "Are Sixteen Heads Really Better than One?", section 2.3: xi_h = 0.
    """
    modules = attention_modules(model)
    by_place: dict[tuple[str, int], list[int]] = {}
    for head in check_heads(heads, model):
        by_place.setdefault((head.kind, head.layer), []).append(head.head)
    handles = []
    try:
        for place, numbers in by_place.items():
            attention = modules[place]
            gates = torch.ones(_count(attention), dtype=torch.bool)
            gates[numbers] = False
            handles.append(attention.out_proj.register_forward_pre_hook(_Mask(gates, attention.d_v)))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Mask:
    """Before W^O: zeros in the columns of masked heads, [B, L, H * d_v] -> the same. NaN of a masked head goes too."""

    def __init__(self, is_kept: torch.Tensor, width: int):
        self.is_masked = ~is_kept.repeat_interleave(width)  # [H * d_v]

    def __call__(self, module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        return (inputs[0].masked_fill(self.is_masked.to(inputs[0].device), 0.0),)


# --------------------------------------------------------------------------- what is lost
@dataclass(frozen=True)
class Ablation:
    """A model without some heads, beside the whole one.

    Args:
        heads (`list[Head]`): what was masked.
        loss (`float`): negative log-likelihood per target token, end tokens included, in nats. loss_change (`float`):
            that of the whole model taken off; above 0 where the heads are missed.
        bleu, bleu_change (`float`, *optional*): sacreBLEU, and that of the whole model taken off.
        bleu_signature (`str`, *optional*): sacreBLEU's settings.
    """

    heads: list[Head]
    loss: float
    loss_change: float
    bleu: float | None = None
    bleu_change: float | None = None
    bleu_signature: str | None = None


def ablate(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[tuple[str, str]],
    sets: Sequence[Sequence[Head]],
    *,
    with_bleu: bool = False,
    target_language: str | None = None,
    batch_tokens: int = 2048,
    num_beams: int | None = None,
) -> list[Ablation]:
    """Loss and, if wanted, BLEU of a model without each of several sets of heads.

    Args:
        model (`VaswaniForConditionalGeneration`), tokenizer: of one folder.
        pairs (`Sequence[tuple[str, str]]`): source and reference; a pair with a blank side has no part in the loss.
        sets (`Sequence` of lists of `Head`): one ablation each; `[[head] for head in all_heads(model)]` takes every
            head by itself.
        with_bleu (`bool`): translate and score as well, once for the whole model and once for each set.
        target_language (`str`, *optional*): it chooses sacreBLEU's tokenisation.
        batch_tokens (`int`): padded tokens on either side of a batch. num_beams (`int`, *optional*): of the search.

    Returns:
        `list[Ablation]`: one a set, and before them the whole model with no heads masked and changes of 0.

    Raises:
        ValueError: a head that does not exist, a pair that is too long, or no pair with text on both sides.

    Source: Michel et al. 2019, section 3.
    """
    from ..data.progress import late_bar

    checked = [[], *(check_heads(one, model) for one in sets)]
    if not any(src.strip() and tgt.strip() for src, tgt in pairs):
        raise ValueError("There is nothing to measure: no pair has text on both sides.")
    found: list[Ablation] = []
    with late_bar("ablation", "set", len(checked)) as bar:
        for heads in checked:
            with masked_heads(model, heads):
                loss = _loss(model, tokenizer, pairs, batch_tokens)
                score = _bleu(model, tokenizer, pairs, target_language, num_beams) if with_bleu else None
            whole = found[0] if found else None
            found.append(
                Ablation(
                    heads=heads,
                    loss=loss,
                    loss_change=loss - whole.loss if whole else 0.0,
                    bleu=score.score if score else None,
                    bleu_change=(score.score - (whole.bleu or 0.0) if whole else 0.0) if score else None,
                    bleu_signature=score.signature if score else None,
                )
            )
            bar.update(1)
    return found


def _loss(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]], batch_tokens: int) -> float:
    from ..evaluation import score_pairs

    scores = score_pairs(model, tokenizer, pairs, batch_tokens=batch_tokens, progress=False)
    return -sum(one.log_prob for one in scores) / sum(len(one.pieces) for one in scores)


def _bleu(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]], language: str | None, beams: int | None) -> Any:
    from ..evaluation import evaluate_model

    sources, references = [src for src, _ in pairs], [tgt for _, tgt in pairs]
    evaluation = evaluate_model(
        model, tokenizer, sources, references,
        kinds=("sacrebleu",), target_language=language, num_beams=beams, progress=False,
    )  # fmt: skip
    return evaluation.scores[0]
