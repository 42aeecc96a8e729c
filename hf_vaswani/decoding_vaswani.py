"""The decoder one step at a time, for all open hypotheses of a batch: the same equations, arranged for speed.

The beams of a sentence are folded into the query dimension. Keys and values of its source are made once and never
copied. Those of its translations lie in slots that all of its beams can see; a table says which slots are a hypothesis'
own past, so that choosing beams moves that table alone. Slots that belong to no open hypothesis are cleared away from
time to time.

Letters: B open sentences, K beams, N = B K rows, H heads, D d_model, V vocabulary, S source length, n slots.
"""

from typing import Any

import torch
from torch import nn

from .attention_vaswani import eager_attention_forward

_CLEAR_EVERY = 8
# From so many rows on, a processor multiplies W by x^T faster than x by W^T: three times as fast for 4 rows in float32.
_ROWS_FOR_TRANSPOSED = {torch.float32: 2}
_ROWS_FOR_TRANSPOSED_ELSE = 24
# From so many rows on, logits are looked through as columns, and half precision attends by plain products.
_MANY_ROWS = 16
# Logits that are looked through at a time: what stays in a processor's cache.
_CHUNK_ELEMENTS = 2**19
_BLOCK = 64
_OUTPUT_CAPTURING = "transformers.utils.output_capturing"


def is_plain(module: nn.Module) -> bool:
    """Whether calling a module does what its class says: no hook, no other `forward`, no weight of a special kind.

    Hooks by which the library records outputs stay on a module for good and do nothing unless outputs are asked for.
    """
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if "forward" in vars(module) or any(hook.__module__ != _OUTPUT_CAPTURING for hook in hooks):
        return False
    weights = [one for one in module._parameters.values() if one is not None]
    return all(type(one.data) is torch.Tensor and not hasattr(one, "ds_id") for one in weights)


def linear(x: torch.Tensor, map_: nn.Linear) -> torch.Tensor:
    """x W^T + b, [N, D] -> [N, E]; on a processor the result may lie column by column."""
    if x.device.type != "cpu" or x.shape[0] < _ROWS_FOR_TRANSPOSED.get(x.dtype, _ROWS_FOR_TRANSPOSED_ELSE):
        return nn.functional.linear(x, map_.weight, map_.bias)
    if x.shape[0] < _MANY_ROWS:
        x = x.contiguous()  # a few rows that lie as columns take twice as long
    product = torch.mm(map_.weight, x.T)  # [E, N]
    if map_.bias is not None:
        product += map_.bias[:, None]  # `addmm` would spread the bias out first
    return product.T


def attend(
    attention: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention of K queries a sentence.

    Args:
        attention (`VaswaniAttention`): whose it is. query (`torch.Tensor`): [B, H, K, d_k]. key: [B, H, n, d_k].
        value: [B, H, n, d_v]. mask (`torch.Tensor`, *optional*): additive, [B, 1, K or 1, n].

    Returns:
        [B, K, H, d_v].
    """
    is_half_on_cpu = query.device.type == "cpu" and query.dtype != torch.float32
    if is_half_on_cpu and query.shape[0] * query.shape[2] >= _MANY_ROWS:
        # Torch's kernel for half precision takes twice as long on a processor.
        return eager_attention_forward(attention, query, key, value, mask, attention.scaling)[0]
    attended = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=attention.scaling
    )  # [B, H, K, d_v]
    return attended.transpose(1, 2)


class Slots:
    """Keys and values of one layer's self-attention: [B, H, capacity, K]."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def add(self, new: list[torch.Tensor], used: int) -> list[torch.Tensor]:
        """Write keys and values [B, H, K, d] behind the used slots; both with all that is used now."""
        end = used + new[0].shape[2]
        if not self.tensors:
            self.tensors = [one.new_empty(*one.shape[:2], 4 * one.shape[2], one.shape[3]) for one in new]
        elif end > self.tensors[0].shape[2]:
            grown = [one.new_empty(*one.shape[:2], 2 * one.shape[2], one.shape[3]) for one in self.tensors]
            for wide, one in zip(grown, self.tensors, strict=True):
                wide[:, :, :used] = one[:, :, :used]
            self.tensors = grown
        for one, fresh in zip(self.tensors, new, strict=True):
            one[:, :, used:end] = fresh
        return [one[:, :, :end] for one in self.tensors]

    def keep(self, rows: torch.Tensor, slots: torch.Tensor, room: int) -> None:
        """Keep sentences [B'] and in each of them slots [B', m], with room for more."""
        kept = []
        for one in self.tensors:
            heads, capacity, width = one.shape[1:]
            start = (rows[:, None] * heads + torch.arange(heads, device=rows.device)) * capacity  # [B', H]
            index = start[:, :, None] + slots[:, None, :]  # [B', H, m]
            wide = one.new_empty(len(rows), heads, slots.shape[1] + room, width)
            wide[:, :, : slots.shape[1]] = one.view(-1, width)[index]
            kept.append(wide)
        self.tensors = kept


class FoldedDecoder:
    """The decoder of a model over one batch of sources.

    Args:
        model (`VaswaniForConditionalGeneration`): for which `suits` said True.
        encoder_states (`torch.Tensor`): [B, S, D]. is_real (`torch.Tensor`, *optional*): [B, S], False for padding.
        num_beams (`int`): K.
    """

    def __init__(self, model: Any, encoder_states: torch.Tensor, is_real: torch.Tensor | None, num_beams: int):
        self.decoder, self.head, self.config = model.model.decoder, model.lm_head, model.config
        self.num_beams, self.dtype, self.device = num_beams, encoder_states.dtype, encoder_states.device
        self.position = self.used = 0
        self.slots = [Slots() for _ in self.decoder.layers]
        self.batch = batch = encoder_states.shape[0]
        self.visible = torch.zeros(batch, num_beams, 0, dtype=torch.bool, device=self.device)  # [B, K, n]
        self.own = torch.eye(num_beams, dtype=torch.bool, device=self.device)
        self.source_mask = None
        if is_real is not None and not bool(is_real.all()):
            self.source_mask = self._additive(is_real)[:, None, None, :]  # [B, 1, 1, S]
        self.source = []
        flat = encoder_states.reshape(-1, encoder_states.shape[-1])
        for layer in self.decoder.layers:
            cross = layer.encoder_attn
            pair = ((cross.k_proj, cross.d_k), (cross.v_proj, cross.d_v))
            self.source.append([self._heads(linear(flat, map_), batch, width) for map_, width in pair])

    @staticmethod
    def suits(model: Any, classes: tuple[type, ...]) -> bool:
        """Whether a model's decoder is the plain one, on one device, and in evaluation mode.

        Args:
            model: the whole model. classes (`tuple` of types): what the decoder may be made of.
        """
        # An activation is called as it stands, so it may be of any kind.
        inside = [one for name, one in model.model.decoder.named_modules() if not name.endswith(".activation")]
        modules = [model, model.model, model.lm_head, *inside]
        first = model.lm_head.weight
        return (
            not model.training
            and not torch.is_autocast_enabled(first.device.type)
            and model.config._attn_implementation in (None, "eager", "sdpa")
            and all(type(one) in classes and is_plain(one) for one in modules)
            and all((p.device, p.dtype) == (first.device, first.dtype) for p in model.model.decoder.parameters())
        )

    def _additive(self, is_seen: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(is_seen.shape, dtype=self.dtype, device=self.device)
        return zeros.masked_fill_(~is_seen, torch.finfo(self.dtype).min)

    def _heads(self, rows: torch.Tensor, batch: int, width: int) -> torch.Tensor:
        """[B L, H d] -> [B, H, L, d], contiguous."""
        return rows.reshape(batch, -1, rows.shape[1] // width, width).transpose(1, 2).contiguous()

    # ------------------------------------------------------------------ one step
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read one token of each hypothesis: [B, K] -> hidden states [N, D]."""
        x = self._embed(tokens).view(-1, self.config.d_model)
        mask = None
        if self.num_beams > 1:
            self.visible = torch.cat([self.visible, self.own.expand(self.batch, -1, -1)], dim=2)
            mask = self._additive(self.visible)[:, None]  # [B, 1, K, n]
        for n, layer in enumerate(self.decoder.layers):
            x = self._residual(layer.self_attn_residual, x, self._attend_own, layer.self_attn, n, mask)
            x = self._residual(layer.encoder_attn_residual, x, self._attend_source, layer.encoder_attn, n)
            x = self._residual(layer.feed_forward_residual, x, self._feed_forward, layer.feed_forward)
        self.used += self.num_beams
        self.position += 1
        return x if self.decoder.layer_norm is None else self.decoder.layer_norm(x)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        decoder, start = self.decoder, self.config.decoder_start_token_id
        embeds = decoder.embed(tokens, None)
        if self.config.zero_start_embedding and start is not None:
            embeds = embeds.masked_fill((tokens == start)[..., None], 0.0)
        position = torch.full((1,), self.position, device=self.device)
        return decoder.place(embeds, position, self.position + 1)

    def _residual(self, residual: Any, x: torch.Tensor, sublayer: Any, *arguments: Any) -> torch.Tensor:
        if residual.is_post:
            return residual.layer_norm(sublayer(x, *arguments).add_(x))
        return sublayer(residual.layer_norm(x), *arguments).add_(x)

    def _attend_own(self, x: torch.Tensor, attention: Any, n: int, mask: torch.Tensor | None) -> torch.Tensor:
        query = self._heads(linear(x, attention.q_proj), self.batch, attention.d_k)
        new = [
            linear(x, map_).reshape(self.batch, self.num_beams, -1, width).transpose(1, 2)
            for map_, width in ((attention.k_proj, attention.d_k), (attention.v_proj, attention.d_v))
        ]
        key, value = self.slots[n].add(new, self.used)
        return self._joined(attention, attend(attention, query, key, value, mask))

    def _attend_source(self, x: torch.Tensor, attention: Any, n: int) -> torch.Tensor:
        query = self._heads(linear(x, attention.q_proj), self.batch, attention.d_k)
        key, value = self.source[n]
        return self._joined(attention, attend(attention, query, key, value, self.source_mask))

    def _joined(self, attention: Any, heads: torch.Tensor) -> torch.Tensor:
        return linear(heads.reshape(self.batch * self.num_beams, -1), attention.out_proj)

    def _feed_forward(self, x: torch.Tensor, block: Any) -> torch.Tensor:
        return linear(block.activation(linear(x, block.fc1)), block.fc2)

    # ------------------------------------------------------------------ which hypotheses go on
    def reorder(self, parents: torch.Tensor) -> None:
        """Let each beam go on from the hypothesis that it was made of: [B, K]."""
        if self.num_beams > 1:
            self.visible = self.visible.gather(1, parents[:, :, None].expand(-1, -1, self.used))
            if self.position % _CLEAR_EVERY == 0:
                self._clear(torch.arange(self.batch, device=self.device))

    def keep(self, rows: torch.Tensor) -> None:
        """Let the sentences that are not named leave: [B']."""
        if self.source_mask is not None:
            self.source_mask = self.source_mask[rows]
        self.source = [[one[rows] for one in pair] for pair in self.source]
        self._clear(rows, is_forced=True)
        self.batch = len(rows)

    def _clear(self, rows: torch.Tensor, is_forced: bool = False) -> None:
        """Free the slots that no hypothesis of a kept sentence has in its past."""
        if self.num_beams == 1:
            count = self.used
            slots = torch.arange(count, device=self.device).expand(len(rows), -1)
        else:
            visible = self.visible[rows] if is_forced else self.visible
            is_live = visible.any(dim=1)  # [B', n]
            count = int(is_live.sum(dim=1).max())
            if not is_forced and count > 0.75 * self.used:
                return
            slots = is_live.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :count]  # [B', m]
            self.visible = visible.gather(2, slots[:, None].expand(-1, self.num_beams, -1))
        for one in self.slots:
            one.keep(rows, slots, room=(_CLEAR_EVERY + 1) * self.num_beams)
        self.used = count

    # ------------------------------------------------------------------ the vocabulary
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, D] -> [N, V], float32."""
        return linear(hidden, self.head).float().contiguous()

    def best(
        self, hidden: torch.Tensor, count: int, banned: list[int] | None = None, needs_sum: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The tokens with the highest logits, and the logarithm of the sum of all exponentials.

        The vocabulary is passed over as little as can be: the candidates come out of the blocks with the highest
        maxima, which are made while a part of the logits is at hand.

        Args:
            hidden (`torch.Tensor`): [N, D]. count (`int`): C, candidates of each row.
            banned (`list[int]`, *optional*): tokens that are no candidates, yet part of the sum.
            needs_sum (`bool`): whether the sum is wanted.

        Returns:
            logits [N, C], highest first; their ids [N, C]; log sum exp [N] or None. float32.
        """
        banned = banned or []
        if self.device.type == "cpu" and len(hidden) >= _MANY_ROWS:
            return self._best_of_columns(hidden, count, banned, needs_sum)
        logits = self.logits(hidden)
        total = None
        if needs_sum:
            highest = logits.amax(dim=-1)
            share = torch.softmax(logits, dim=-1).amax(dim=-1)  # of the highest: 1 / sum exp(z - highest)
            total = highest - share.log()
        if banned:
            logits[:, banned] = -torch.inf
        width = logits.shape[1] // _BLOCK * _BLOCK
        if self.device.type != "cpu" or width < 2 * count * _BLOCK:
            return (*logits.topk(count, dim=-1), total)
        blocks = logits[:, :width].view(len(logits), -1, _BLOCK).amax(dim=-1).topk(count, dim=-1).indices
        ids = self._ids_of(blocks, width, logits.shape[1])
        return (*self._highest(logits.gather(1, ids), ids, count), total)

    def _ids_of(self, blocks: torch.Tensor, width: int, vocabulary: int) -> torch.Tensor:
        """Ids in the chosen blocks [N, C], and those behind the last whole block: [N, C * 64 + rest]."""
        inside = torch.arange(_BLOCK, device=self.device)
        ids = (blocks[:, :, None] * _BLOCK + inside).flatten(1)
        rest = torch.arange(width, vocabulary, device=self.device).expand(len(blocks), -1)
        return torch.cat([ids, rest], dim=1)

    def _highest(self, logits: torch.Tensor, ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = logits.topk(count, dim=-1)
        return values, ids.gather(1, places)

    def _best_of_columns(
        self, hidden: torch.Tensor, count: int, banned: list[int], needs_sum: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """`best` with the logits as columns, a part of the vocabulary at a time."""
        weight, bias, rows = self.head.weight, self.head.bias, len(hidden)
        vocabulary = len(weight)
        width = vocabulary // _BLOCK * _BLOCK
        logits = torch.empty(vocabulary, rows, dtype=self.dtype)
        step = max(1, _CHUNK_ELEMENTS // rows // _BLOCK) * _BLOCK
        columns = hidden.T
        maxima, tops, sums = [], [], []
        for start in range(0, vocabulary, step):
            end = min(start + step, vocabulary)
            part = torch.mm(weight[start:end], columns, out=logits[start:end])
            if bias is not None:
                part += bias[start:end, None]
            whole = min(end, width) - start
            if whole > 0:
                maxima.append(part[:whole].view(-1, _BLOCK, rows).amax(dim=1))
            if needs_sum:
                part = part.float()
                top = maxima[-1].amax(dim=0).float() if whole == end - start else part.amax(dim=0)
                tops.append(top)
                sums.append((part - top).exp_().sum(dim=0))
        total = None
        if needs_sum:
            top, one = torch.stack(tops), torch.stack(sums)
            total = torch.logsumexp(top + one.log(), dim=0)
        wanted = count + len(banned)
        if width < wanted * _BLOCK:
            ids = torch.arange(vocabulary).expand(rows, -1)
        else:
            ids = self._ids_of(torch.cat(maxima).T.topk(wanted, dim=-1).indices, width, vocabulary)
        found = logits.T.gather(1, ids).float()
        for token in banned:
            found.masked_fill_(ids == token, -torch.inf)
        return (*self._highest(found, ids, count), total)
