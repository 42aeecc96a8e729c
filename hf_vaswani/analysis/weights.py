"""All attention weights of one sentence and its translation, from one pass over the finished translation.

Letters: H heads (of a layer: they may differ), S source length, T target length.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .words import piece_texts

KINDS = ("encoder", "decoder", "cross")
_switch = threading.RLock()  # a model's attention kernel is one setting for all threads that use it


@dataclass
class AttentionWeights:
    """What each head of each layer looks at, for one sentence and one translation.

    Args:
        encoder (`list[torch.Tensor]`): one per layer, [H, S, S], float32 on the processor, each row adds up to 1.
        decoder (`list[torch.Tensor]`): [H, T, T]. Row t is the step that chooses target piece t, column u the u-th
            piece that the decoder has read (`decoder_pieces`).
        cross (`list[torch.Tensor]`): [H, T, S].
        source_ids, target_ids (`list[int]`): S and T pieces, end tokens included.
        source_pieces, target_pieces (`list[str]`): their text, blanks shown as "␣".
        decoder_pieces (`list[str]`): what the decoder reads: the start token and all target pieces but the last.
        source, target (`str`): the texts.
        score (`float`, *optional*): of the translation that was searched for; None where the target was given.
        pruned_heads (`dict[str, list[int]]`): the model's `kept_heads`: the numbers, before any pruning, of the heads
            of an attention that was pruned.
    """

    encoder: list[torch.Tensor]
    decoder: list[torch.Tensor]
    cross: list[torch.Tensor]
    source_ids: list[int]
    target_ids: list[int]
    source_pieces: list[str]
    target_pieces: list[str]
    decoder_pieces: list[str]
    source: str
    target: str
    score: float | None = None
    pruned_heads: dict[str, list[int]] = field(default_factory=dict)

    def of_kind(self, kind: str) -> list[torch.Tensor]:
        """The layers of one kind: "encoder", "decoder" or "cross".

        Raises:
            ValueError: there is no such kind.
        """
        if kind not in KINDS:
            raise ValueError(f"`kind` must be one of {', '.join(KINDS)}, got {kind!r}.")
        return getattr(self, kind)

    def pieces_of_kind(self, kind: str) -> tuple[list[str], list[str]]:
        """Labels of the rows (who looks) and the columns (what is looked at) of one kind."""
        self.of_kind(kind)
        rows = self.source_pieces if kind == "encoder" else self.target_pieces
        columns = self.decoder_pieces if kind == "decoder" else self.source_pieces
        return rows, columns

    def layer(self, kind: str, layer: int) -> torch.Tensor:
        """One layer of one kind: [H, rows, columns].

        Args:
            kind (`str`): "encoder", "decoder" or "cross". layer (`int`): from 0; negative counts from the last.

        Raises:
            ValueError: there is no such kind or layer.
        """
        layers = self.of_kind(kind)
        if not -len(layers) <= layer < len(layers):
            stack = "encoder" if kind == "encoder" else "decoder"
            raise ValueError(f"`layer` {layer} does not exist: the {stack} has {len(layers)} layers, from 0.")
        return layers[layer]

    def head_numbers(self, kind: str, layer: int) -> list[int]:
        """Numbers of the heads of one layer, as they were before any pruning.

        Raises:
            ValueError: there is no such kind or layer.
        """
        count = len(self.layer(kind, layer))
        return self.pruned_heads.get(f"{kind}.{layer % len(self.of_kind(kind))}", list(range(count)))

    def head(self, kind: str, layer: int, number: int) -> torch.Tensor:
        """One head of one layer: [rows, columns].

        Args:
            kind (`str`), layer (`int`): as for `layer`. number (`int`): of the head, from 0.

        Raises:
            ValueError: there is no such kind, layer or head.
        """
        weights, numbers = self.layer(kind, layer), self.head_numbers(kind, layer)
        if number not in numbers:
            known = f"heads 0 to {numbers[-1]}" if numbers == list(range(len(numbers))) else f"heads {numbers}"
            raise ValueError(f"head {number} does not exist: layer {layer} ({kind}) has {known}.")
        return weights[numbers.index(number)]

    def for_bertviz(self, *kinds: str) -> dict[str, Any]:
        """Arguments for `head_view` and `model_view` of bertviz.

        Args:
            kinds (`str`): "encoder", "decoder", "cross"; default: all three. bertviz has one picker of layers for all
                that it is given, so that of stacks unlike in depth only the layers are drawn that each of them has:
                ask for one kind to see the others.

        Returns:
            `dict`: the weights of each kind as tuples of [1, H, rows, columns], the tokens of both sides, and the
            layers. A layer with fewer heads than others (pruned ones) ends in heads of zeros.
        """
        stacks = {kind: getattr(self, kind) for kind in kinds or ("encoder", "decoder", "cross")}
        heads = max(len(one) for layers in stacks.values() for one in layers)
        return {
            **{
                f"{kind}_attention": tuple(
                    torch.nn.functional.pad(one, (0, 0, 0, 0, 0, heads - len(one)))[None] for one in layers
                )
                for kind, layers in stacks.items()
            },
            "encoder_tokens": self.source_pieces,
            "decoder_tokens": self.decoder_pieces,
            "include_layers": list(range(min(map(len, stacks.values())))),
        }


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """Inside, the model gives its attention weights back and drops nothing; afterwards it is as before, faults or not.

    Only the eager form of attention has weights to give; the others would give empty tuples.
    """
    with _switch:
        was_training, kept = model.training, model.config._attn_implementation
        model.eval()
        try:
            model.set_attn_implementation("eager")
            with torch.no_grad():
                yield
        finally:
            model.set_attn_implementation(kept)
            model.train(was_training)


def attention_weights(
    model: Any, tokenizer: Any, source: str, target: str | None = None, **generate_arguments: Any
) -> AttentionWeights:
    """The weights of all layers and heads for a sentence and its translation.

    Args:
        model: a seq2seq model of transformers. tokenizer: its tokenizer.
        source (`str`): the sentence. target (`str`, *optional*): a translation to explain; None: the model's own.
        generate_arguments: for the search of the model's own translation, as in `generate`.

    Returns:
        `AttentionWeights`.

    Raises:
        ValueError: the source is blank, or search settings come with a given target.

    Source: Vaswani et al. 2017, section 3.2.3, and the figures of the appendix.
    """
    if not source.strip():
        raise ValueError("`source` is blank: there is no attention to show.")
    if target is not None and generate_arguments:
        raise ValueError(f"`target` is given, so {', '.join(generate_arguments)} would change nothing: leave one out.")
    encoded = tokenizer(source, return_tensors="pt").to(model.device)
    score = None
    if target is None:
        inputs = {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
        target_ids, score = _translate(model, inputs, generate_arguments)
    else:
        target_ids = tokenizer(text_target=target)["input_ids"]
    found = attention_of(model, tokenizer, encoded["input_ids"][0].tolist(), target_ids)
    found.source, found.score = source, score
    if target is not None:
        found.target = target
    return found


def attention_of(model: Any, tokenizer: Any, source_ids: list[int], target_ids: list[int]) -> AttentionWeights:
    """The same for pieces: a forced pass over the target, with the texts that the pieces spell.

    Args:
        model, tokenizer: as for `attention_weights`.
        source_ids, target_ids (`list[int]`): S and T pieces, end tokens included, no start token.

    Returns:
        `AttentionWeights` without a score.
    """
    labels = torch.tensor([target_ids], device=model.device)
    with eager_attention(model):
        output = model(input_ids=torch.tensor([source_ids], device=model.device), labels=labels, output_attentions=True)
    decoder_ids = model.prepare_decoder_input_ids_from_labels(labels=labels)[0].tolist()

    def layers(weights: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        return [one[0].float().cpu() for one in weights]

    return AttentionWeights(
        encoder=layers(output.encoder_attentions),
        decoder=layers(output.decoder_attentions),
        cross=layers(output.cross_attentions),
        source_ids=source_ids,
        target_ids=target_ids,
        source_pieces=piece_texts(tokenizer, source_ids),
        target_pieces=piece_texts(tokenizer, target_ids),
        decoder_pieces=piece_texts(tokenizer, decoder_ids),
        source=tokenizer.decode(source_ids, skip_special_tokens=True),
        target=tokenizer.decode(target_ids, skip_special_tokens=True),
        pruned_heads=getattr(model.config, "kept_heads", None) or {},
    )


def _translate(
    model: Any, inputs: dict[str, torch.Tensor], arguments: dict[str, Any]
) -> tuple[list[int], float | None]:
    """The model's best translation, end token included and start token not: T pieces, and its score."""
    was_training = model.training
    model.eval()
    try:
        found = model.generate(**inputs, **arguments, return_dict_in_generate=True, output_scores=True)
    finally:
        model.train(was_training)
    ids = found.sequences[0, 1:]
    is_end = torch.isin(ids, torch.tensor(model.generation_config.eos_token_id, device=ids.device))
    if is_end.any():
        ids = ids[: int(is_end.nonzero()[0]) + 1]
    scores = getattr(found, "sequences_scores", None)
    return ids.tolist(), None if scores is None else float(scores[0])
