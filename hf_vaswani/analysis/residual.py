"""The residual stream taken apart: what embedding, positions, heads, feed-forwards and biases add to it.

Every sublayer adds its output to the stream, and a head's share of that is its own output times its slice of W^O. With
the norm before the sublayers these writes simply add up. With the paper's norm behind them,

    LayerNorm(x) = g * (x - mean(x)) / sigma(x) + b

rescales all that came before; once sigma is held at the value that the whole stream has, this is linear in x, and every
part can be taken through it by itself.

Letters: P parts, B batch, L length, D d_model, H heads, K width of a head's values.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .head_masks import attention_modules


@dataclass(frozen=True)
class StreamPoint:
    """The stream at one place, as two sums.

    Args:
        place (`str`): the norm that reads it ("encoder.0.self_attn", "decoder.1.encoder_attn", "encoder.final_norm"),
            or "encoder.end" and "decoder.end" for what a stack gives out.
        stream (`torch.Tensor`): [B, L, D], as the model computed it.
        write_names (`list[str]`), writes (`torch.Tensor`): [W, B, L, D], the stream at the last point ("stream"; at the
            start "embedding" and "position") and what was added to it since, as written. They add up to `stream`.
        part_names (`list[str]`), parts (`torch.Tensor`): [P, B, L, D], every write since the start, taken through the
            norms that came after it. They add up to `stream` too.

    Heads are named "encoder.0.3" as everywhere, others "encoder.0.feed_forward", "... .bias" for a bias of an
    attention's or feed-forward's output, and "... .norm_bias" for a norm's b.
    """

    place: str
    stream: torch.Tensor
    write_names: list[str]
    writes: torch.Tensor
    part_names: list[str]
    parts: torch.Tensor


@dataclass(frozen=True)
class ResidualParts:
    """The points of both stacks (`list[StreamPoint]`), in the order in which they are computed."""

    encoder: list[StreamPoint]
    decoder: list[StreamPoint]


@torch.no_grad()
def residual_parts(
    model: Any,
    input_ids: torch.Tensor,
    decoder_input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> ResidualParts:
    """Take the residual streams of a batch apart.

    Args:
        model (`VaswaniForConditionalGeneration`): post-norm or pre-norm; measured in evaluation mode.
        input_ids (`torch.Tensor`): [B, S]. decoder_input_ids (`torch.Tensor`): [B, T], the start token first.
        attention_mask (`torch.Tensor`, *optional*): [B, S].

    Returns:
        `ResidualParts`. It holds some P * B * L * D numbers for each norm, so a few sentences are a lot.

    Raises:
        TypeError: for a model of another architecture.

    Source: Vaswani et al. 2017, section 3.1 (residual, norm) and 3.2.2 (W^O). The view of heads as additive writes is
    Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
    """
    attention_modules(model)
    was_training = model.training
    model.eval()
    try:
        with _recorded(model) as seen:
            model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                decoder_input_ids=decoder_input_ids,
                use_cache=False,
            )
    finally:
        model.train(was_training)
    return ResidualParts(
        _Stack(model, "encoder", seen).points(input_ids), _Stack(model, "decoder", seen).points(decoder_input_ids)
    )


@contextmanager
def _recorded(model: Any) -> Iterator[dict[nn.Module, tuple[Any, torch.Tensor]]]:
    """Inside, the input and output of every map, norm, position table and stack is kept."""
    seen: dict[nn.Module, tuple[Any, torch.Tensor]] = {}

    def keep(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        seen[module] = (inputs[0] if inputs else None, getattr(output, "last_hidden_state", output))

    stacks = [model.model.encoder, model.model.decoder]
    kept = [one for one in model.model.modules() if isinstance(one, nn.Linear | nn.LayerNorm)]
    kept += [*stacks, *(stack.embed_positions for stack in stacks)]
    handles = [one.register_forward_hook(keep) for one in kept]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


class _Stack:
    """One stack's stream, followed from the embedding to the end."""

    def __init__(self, model: Any, kind: str, seen: dict[nn.Module, tuple[Any, torch.Tensor]]):
        self.stack, self.kind, self.seen, self.config = getattr(model.model, kind), kind, seen, model.config
        self.writes: dict[str, torch.Tensor] = {}  # since the last norm
        self.parts: dict[str, torch.Tensor] = {}
        self.found: list[StreamPoint] = []

    def points(self, ids: torch.Tensor) -> list[StreamPoint]:
        self._start(ids)
        for number, layer in enumerate(self.stack.layers):
            sublayers = ["self_attn", "encoder_attn", "feed_forward"]
            for name in (one for one in sublayers if hasattr(layer, one)):
                residual = getattr(layer, f"{name}_residual")
                place = f"{self.kind}.{number}.{name}"
                if residual.is_post:
                    self._write(getattr(layer, name), name, number)
                    self._read(place, residual.layer_norm)
                    self._normalise(place, residual.layer_norm)
                else:
                    self._read(place, residual.layer_norm)
                    self._write(getattr(layer, name), name, number)
        if self.stack.layer_norm is not None:
            self._read(f"{self.kind}.final_norm", self.stack.layer_norm)
            self._normalise(f"{self.kind}.final_norm", self.stack.layer_norm)
        self._add_point(f"{self.kind}.end", self.seen[self.stack][1])
        return self.found

    def _start(self, ids: torch.Tensor) -> None:
        embeds = self.stack.embed_tokens(ids)  # [B, L, D]
        if self.kind == "decoder" and self.config.zero_start_embedding:
            embeds = embeds.masked_fill((ids == self.config.decoder_start_token_id)[..., None], 0.0)
        scale = math.sqrt(self.config.d_model) if self.config.scale_embedding else 1.0
        self._add("embedding", embeds * scale)
        self._add("position", self.seen[self.stack.embed_positions][1].to(embeds).expand_as(embeds))

    def _add(self, name: str, write: torch.Tensor) -> None:
        self.writes[name] = write
        self.parts[name] = write

    def _write(self, sublayer: Any, name: str, number: int) -> None:
        """What a sublayer adds: each head's part by its slice of W^O, or a feed-forward's, and the bias by itself."""
        if name == "feed_forward":
            place, out = f"{self.kind}.{number}.feed_forward", sublayer.fc2
            self._add(place, self.seen[out][0] @ out.weight.T)
        else:
            place, out = f"{'cross' if name == 'encoder_attn' else self.kind}.{number}", sublayer.out_proj
            heads = self.seen[out][0].unflatten(-1, (-1, sublayer.d_v))  # [B, L, H, K]
            slices = out.weight.unflatten(1, (-1, sublayer.d_v))  # [D, H, K]
            written = torch.einsum("blhk,dhk->hbld", heads, slices)
            for head, write in enumerate(written):
                self._add(f"{place}.{head}", write)
        if out.bias is not None:
            self._add(
                f"{place}.bias", out.bias.expand_as(self.writes["stream" if "stream" in self.writes else "embedding"])
            )

    def _read(self, place: str, norm: nn.LayerNorm) -> None:
        stream = self.seen[norm][0]
        self._add_point(place, stream)
        self.writes = {"stream": stream}

    def _add_point(self, place: str, stream: torch.Tensor) -> None:
        self.found.append(
            StreamPoint(
                place,
                stream,
                list(self.writes),
                torch.stack(list(self.writes.values())),
                list(self.parts),
                torch.stack(list(self.parts.values())),
            )
        )

    def _normalise(self, place: str, norm: nn.LayerNorm) -> None:
        """Every part through a norm whose sigma is that of the whole stream: g * (part - its mean) / sigma."""
        stream, output = self.seen[norm]
        sigma = (stream.var(dim=-1, correction=0, keepdim=True) + norm.eps).sqrt()  # [B, L, 1]
        gain = norm.weight / sigma  # [B, L, D]
        self.parts = {name: (part - part.mean(-1, keepdim=True)) * gain for name, part in self.parts.items()}
        self.parts[f"{place}.norm_bias"] = norm.bias.expand_as(stream)
        self.writes = {"stream": output}
