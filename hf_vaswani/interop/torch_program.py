"""`torch.nn.Transformer` itself, filled with a state dict, as the program to compare an import with."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from .foreign import Program
from .reference import plain_beam_search

_LIMIT = 60  # new tokens


class TorchTransformer:
    """Encoder and decoder of torch's own classes between the embeddings and the output layer of a state dict.

    Args:
        tensors (`dict`): the state dict. mapping (`dict`): what its names mean. prefixes (`dict`): of both stacks.
        tables (`dict`, *optional*): positions [rows, d_model] of "encoder" and "decoder"; None: the formula.
        config (`dict`): sizes and special ids. generation (`dict`): settings of the search.
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        mapping: dict[str, Any],
        prefixes: dict[str, str],
        tables: dict[str, torch.Tensor] | None,
        config: dict[str, Any],
        generation: dict[str, Any],
    ):
        self.tensors, self.mapping, self.tables, self.fields, self.generation = (
            tensors,
            mapping,
            tables,
            config,
            generation,
        )
        # The one field that the search reads.
        self.config: Any = SimpleNamespace(decoder_start_token_id=config["decoder_start_token_id"])
        width, eps = config["d_model"], config["layer_norm_eps"]
        activation: Any = mapping["activation"]
        if activation not in ("relu", "gelu"):
            activation = {"silu": nn.functional.silu, "tanh": torch.tanh}[activation]
        shape = (width, config["num_attention_heads"], config["d_ff"], 0.0, activation, eps)
        options = {"batch_first": True, "norm_first": mapping["norm_first"]}
        top = config["final_norm"]
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(*shape, **options),
            config["encoder_layers"],
            nn.LayerNorm(width, eps) if top else None,
            enable_nested_tensor=False,
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(*shape, **options),
            config["decoder_layers"],
            nn.LayerNorm(width, eps) if top else None,
        )
        for side, stack in (("encoder", self.encoder), ("decoder", self.decoder)):
            prefix = prefixes[side]
            own = {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}
            for name, value in stack.state_dict().items():
                if name.endswith("bias"):  # a model made without biases
                    own.setdefault(name, torch.zeros_like(value))
            stack.load_state_dict(own)
            stack.eval()

    def _embed(self, ids: list[int], side: str) -> torch.Tensor:
        name = self.mapping["source_embedding" if side == "encoder" else "target_embedding"]
        rows = self.tensors[name][torch.tensor(ids)]
        if self.mapping["scale_embedding"]:
            rows = rows * math.sqrt(rows.shape[1])
        if self.tables is not None and len(self.tables[side]) >= len(ids):
            return (rows + self.tables[side][: len(ids)])[None]
        width, places = rows.shape[1], np.arange(len(ids)) + self.mapping["position_offset"]
        pairs = np.arange(width // 2)
        power = 2 * pairs / (width if self.mapping["position_exponent"] == "2i/d" else width - 2)
        angles = places[:, None] / 10000.0**power
        table = np.zeros((len(ids), width))
        if self.mapping["positions"] == "interleaved":
            table[:, 0::2], table[:, 1::2] = np.sin(angles), np.cos(angles)
        else:
            table[:, : width // 2], table[:, width // 2 :] = np.sin(angles), np.cos(angles)
        return (rows + torch.from_numpy(table).float())[None]

    def _output(self, states: torch.Tensor) -> np.ndarray:
        output = self.mapping["output"]
        matrix = self.tensors[self.mapping["target_embedding"] if output is None else f"{output.rstrip('.')}.weight"]
        logits = states @ matrix.T
        if self.fields["output_bias"]:
            logits = logits + self.tensors[f"{output.rstrip('.')}.bias"]
        return logits.numpy()

    @torch.no_grad()
    def begin(self, source: list[int]) -> tuple[torch.Tensor, list[int]]:
        return self.encoder(self._embed(source, "encoder")), []

    @torch.no_grad()
    def step(self, state: tuple[torch.Tensor, list[int]], ids: list[int]) -> tuple[np.ndarray, Any]:
        memory, before = state
        ids = [*before, *ids]
        mask = nn.Transformer.generate_square_subsequent_mask(len(ids))
        states = self.decoder(self._embed(ids, "decoder"), memory, tgt_mask=mask, tgt_is_causal=True)[0]
        return self._output(states[len(before) :]).astype(np.float64), (memory, ids)

    def logits(self, source: list[int], target: list[int]) -> np.ndarray:
        """[T, V] of one pair; `target` begins with the start token."""
        return self.step(self.begin(source), target)[0]

    def program(self) -> Program:
        end = self.fields["eos_token_id"]

        def search(sources: list[list[int]], beams: int) -> list[list[int]]:
            settings: dict[str, Any] = {
                "beams": beams,
                "limit": _LIMIT,
                "end": {end},
                "alpha": 0.6,
                "kind": "gnmt",
                "barred": self.generation.get("suppress_tokens", ()),
            }
            # The search asks for `begin`, `step` and the start token only.
            model: Any = self
            return [plain_beam_search(model, source, **settings)[0] for source in sources]

        return Program(
            name=f"torch {torch.__version__}, nn.Transformer",
            logits=lambda sources, targets: [self.logits(s, t) for s, t in zip(sources, targets, strict=True)],
            search=search,
        )
