"""The architecture once more, as a plain float64 forward pass, to hold conversions against.

It reads the fields of the configuration and the tensors as a file gave them, and nothing of the model's own code, so
that a mistake in a mask, a position, a cache, in tying or in saving shows as a difference. One sentence at a time,
without padding; keys and values of earlier steps are kept.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": lambda x: x * 0.5 * (1.0 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2.0))),
    "silu": lambda x: x / (1.0 + np.exp(-x)),
    "swish": lambda x: x / (1.0 + np.exp(-x)),
    "tanh": np.tanh,
    "linear": lambda x: x,
    "relu2": lambda x: np.maximum(x, 0.0) ** 2,
}
for _name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"):
    _ACTIVATIONS[_name] = lambda x: 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


@dataclass
class DecoderState:
    """Keys and values: of the source once, of the target one more column a step; [heads, columns, width] a layer."""

    cross: list[tuple[np.ndarray, np.ndarray]]
    own: list[tuple[np.ndarray, np.ndarray]]
    length: int = 0


class PlainTransformer:
    """Encoder and decoder of section 3, with the options of `VaswaniConfig`.

    Args:
        config (`VaswaniConfig`): fields only are read.
        tensors (`Mapping[str, Tensor]`): by the names of `VaswaniForConditionalGeneration.state_dict()`.

    Raises:
        ValueError: for an activation that has no plain formula here.
    """

    def __init__(self, config: Any, tensors: Mapping[str, torch.Tensor]):
        if config.activation_function not in _ACTIVATIONS:
            raise ValueError(f"No plain formula for the activation {config.activation_function!r}.")
        self.config, self.tensors = config, tensors
        self.activate = _ACTIVATIONS[config.activation_function]
        self.heads = config.num_attention_heads
        self.arrays: dict[str, np.ndarray] = {}

    # ------------------------------------------------------------------ parts
    def array(self, name: str) -> np.ndarray:
        if name not in self.arrays:
            self.arrays[name] = self.tensors[name].double().numpy()
        return self.arrays[name]

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        y = x @ self.array(f"{name}.weight").T
        return y + self.array(f"{name}.bias") if f"{name}.bias" in self.tensors else y

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + self.config.layer_norm_eps)
        return scaled * self.array(f"{name}.weight") + self.array(f"{name}.bias")

    def around(self, x: np.ndarray, name: str, sublayer: Any) -> np.ndarray:
        """Section 3.1: LayerNorm(x + Sublayer(x)), or the descendants' x + Sublayer(LayerNorm(x))."""
        norm = f"{name}.layer_norm"
        if self.config.norm_position == "post":
            return self.norm(x + sublayer(x), norm)
        return x + sublayer(self.norm(x, norm))

    def split(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x), self.heads, -1).transpose(1, 0, 2)  # [L, H*K] -> [H, L, K]

    def keys_and_values(self, x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
        return self.split(self.linear(x, f"{name}.k_proj")), self.split(self.linear(x, f"{name}.v_proj"))

    def attend(self, x: np.ndarray, key: np.ndarray, value: np.ndarray, name: str, is_causal: bool) -> np.ndarray:
        """Section 3.2, eq. (1), for all heads: [T, D] -> [T, D]."""
        query = self.split(self.linear(x, f"{name}.q_proj"))
        scores = query @ key.transpose(0, 2, 1) / math.sqrt(query.shape[-1])  # [H, T, S]
        if is_causal:
            first = key.shape[1] - len(x)  # number of the first new column
            hidden = np.arange(key.shape[1])[None, :] > first + np.arange(len(x))[:, None]
            scores = np.where(hidden[None], -np.inf, scores)
        raised = np.exp(scores - scores.max(-1, keepdims=True))
        heads = raised / raised.sum(-1, keepdims=True) @ value  # [H, T, d_v]
        return self.linear(heads.transpose(1, 0, 2).reshape(len(x), -1), f"{name}.out_proj")

    def feed_forward(self, x: np.ndarray, name: str) -> np.ndarray:
        return self.linear(self.activate(self.linear(x, f"{name}.fc1")), f"{name}.fc2")

    def positions(self, first: int, length: int, side: str) -> np.ndarray:
        """Section 3.5, in the layout, exponent and from the number that the configuration names: [L, D]."""
        config = self.config
        if config.position_encoding == "learned":
            return self.array(f"model.{side}.embed_positions.weight")[first : first + length]
        width = config.d_model
        table = np.zeros((length, width))
        for n in range(length):
            for i in range(width // 2):
                power = 2 * i / (width if config.sinusoid_exponent == "2i/d" else width - 2)
                angle = (config.position_offset + first + n) / 10000.0**power
                where = (2 * i, 2 * i + 1) if config.sinusoid_layout == "interleaved" else (i, width // 2 + i)
                table[n, where[0]], table[n, where[1]] = math.sin(angle), math.cos(angle)
        return table

    def embed(self, ids: list[int], first: int, side: str) -> np.ndarray:
        """Sections 3.4 and 3.5: [L, D]."""
        own = f"model.{side}.embed_tokens.weight"
        rows = self.tensors[own if own in self.tensors else "model.shared.weight"][torch.tensor(ids)].double().numpy()
        rows = rows * math.sqrt(self.config.d_model) if self.config.scale_embedding else rows.copy()
        if side == "decoder" and self.config.zero_start_embedding:
            rows[np.asarray(ids) == self.config.decoder_start_token_id] = 0.0
        return rows + self.positions(first, len(ids), side)

    def top(self, x: np.ndarray, side: str) -> np.ndarray:
        return self.norm(x, f"model.{side}.layer_norm") if self.config.has_final_norm else x

    # ------------------------------------------------------------------ the two stacks
    def encode(self, source: list[int]) -> np.ndarray:
        """Source ids to the encoder's output, [S, D]."""
        x = self.embed(source, 0, "encoder")
        for n in range(self.config.encoder_layers):
            name = f"model.encoder.layers.{n}"

            def own(y: np.ndarray, name: str = name) -> np.ndarray:
                return self.attend(y, *self.keys_and_values(y, f"{name}.self_attn"), f"{name}.self_attn", False)

            x = self.around(x, f"{name}.self_attn_residual", own)
            x = self.around(
                x, f"{name}.feed_forward_residual", lambda y, name=name: self.feed_forward(y, f"{name}.feed_forward")
            )
        return self.top(x, "encoder")

    def begin(self, source: list[int]) -> DecoderState:
        """What decoding of one sentence starts from."""
        memory = self.encode(source)
        names = [f"model.decoder.layers.{n}.encoder_attn" for n in range(self.config.decoder_layers)]
        cross = [self.keys_and_values(memory, name) for name in names]
        own = [(key[:, :0], value[:, :0]) for key, value in cross]
        return DecoderState(cross, own)

    def step(self, state: DecoderState, ids: list[int]) -> tuple[np.ndarray, DecoderState]:
        """Read further target ids: their logits [T, V] and the state after them; `state` itself stays as it was."""
        x = self.embed(ids, state.length, "decoder")
        grown = list(state.own)
        for n in range(self.config.decoder_layers):
            name = f"model.decoder.layers.{n}"

            def own(y: np.ndarray, n: int = n, name: str = f"{name}.self_attn") -> np.ndarray:
                new = self.keys_and_values(y, name)
                key, value = (np.concatenate(pair, axis=1) for pair in zip(state.own[n], new, strict=True))
                grown[n] = (key, value)
                return self.attend(y, key, value, name, True)

            x = self.around(x, f"{name}.self_attn_residual", own)
            x = self.around(
                x,
                f"{name}.encoder_attn_residual",
                lambda y, n=n, name=name: self.attend(y, *state.cross[n], f"{name}.encoder_attn", False),
            )
            x = self.around(
                x, f"{name}.feed_forward_residual", lambda y, name=name: self.feed_forward(y, f"{name}.feed_forward")
            )
        x = self.top(x, "decoder")
        matrix = self.array("lm_head.weight" if "lm_head.weight" in self.tensors else "model.shared.weight")
        logits = x @ matrix.T
        if "lm_head.bias" in self.tensors:
            logits = logits + self.array("lm_head.bias")
        return logits, DecoderState(state.cross, grown, state.length + len(ids))

    def logits(self, source: list[int], target: list[int]) -> np.ndarray:
        """Logits of all columns of one pair, [T, V]; `target` begins with the start token."""
        return self.step(self.begin(source), target)[0]


def plain_beam_search(
    model: PlainTransformer,
    source: list[int],
    *,
    beams: int,
    limit: int,
    end: set[int],
    alpha: float,
    kind: str,
    barred: list[int] | tuple[int, ...] = (),
    last: int | None = None,
    least: int = 0,
) -> tuple[list[int], float]:
    """Beam search by the rule of `generate()`, with states instead of a padded cache.

    Args:
        source (`list[int]`): ids of one sentence. beams (`int`): 1 is greedy search.
        limit (`int`): most new tokens. end (`set[int]`): end tokens. barred: tokens that are never taken.
        last (`int`, *optional*): the token that stands at the limit in any case, at no cost.
        least (`int`): new tokens before an end token may come.
        alpha (`float`), kind (`str`): the length penalty's exponent and form.

    Returns:
        New tokens, the end token included, and the score log P / penalty.
    """
    factor = (lambda n: ((5 + n) / 6) ** alpha) if kind == "gnmt" else (lambda n: float(n) ** alpha)
    open_ones: list[tuple[float, list[int], DecoderState]] = [(0.0, [], model.begin(source))]
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, limit + 1):
        candidates = []
        for total, tokens, state in open_ones:
            before = tokens[-1] if tokens else model.config.decoder_start_token_id
            logits, after = model.step(state, [before])
            row = logits[-1] - logits[-1].max()
            row = row - np.log(np.exp(row).sum())
            row[list(barred)] = -np.inf
            if length <= least:
                row[list(end)] = -np.inf
            if last is not None and length == limit:
                row = np.where(np.arange(len(row)) == last, 0.0, -np.inf)
            for token in np.argsort(-row, kind="stable")[: 2 * beams]:
                candidates.append((total + row[token], [*tokens, int(token)], after))
        candidates.sort(key=lambda one: -one[0])
        open_ones = []
        for rank, (total, tokens, state) in enumerate(candidates[: 2 * beams]):
            if tokens[-1] in end or length == limit:
                if rank < beams:
                    finished.append((total / factor(length), tokens))
            elif len(open_ones) < beams:
                open_ones.append((total, tokens, state))
        finished = sorted(finished, key=lambda one: -one[0])[:beams]
        # log P only falls, so nothing open can win once its best over the largest factor ahead is below the winner.
        ahead = max(factor(length + 1), factor(limit)) if alpha > 0 else factor(length + 1)
        if not open_ones or (finished and open_ones[0][0] / ahead <= finished[0][0]):
            break
        if beams == 1 and finished:
            break
    return finished[0][1], float(finished[0][0])
