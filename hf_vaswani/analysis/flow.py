"""Attention traced back through the layers to the tokens that were read: rollout and flow.

Every position keeps half of what it had, by the residual connection, and takes half of what it attends to:
A_l = 0.5 W_l + 0.5 I, with W_l the mean over the heads of layer l. Rollout multiplies these matrices; flow takes them
for the widths of pipes and asks how much can run from a position at the top to a token at the bottom.

Letters: B batch, H heads, L length, S source length, T target length, N layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .weights import eager_attention

_UNITS = 2**28  # of which a capacity of 1 has so many: the library computes in 32-bit whole numbers


@dataclass(frozen=True)
class TokenAttention:
    """How much each position at the top of a stack goes back to each token that was read.

    Args:
        encoder (`torch.Tensor`): [B, S, S], from encoder positions to source tokens.
        decoder (`torch.Tensor`): [B, T, T + S], from decoder positions to what the decoder read and to source tokens.
    """

    encoder: torch.Tensor
    decoder: torch.Tensor


def mixed(weights: torch.Tensor) -> torch.Tensor:
    """0.5 times the mean over heads: [..., H, T, S] -> [..., T, S]; the other half is the residual's."""
    return 0.5 * weights.mean(dim=-3)


def encoder_rollout(attentions: Sequence[torch.Tensor]) -> torch.Tensor:
    """A_N ... A_2 A_1, the share of each token in each position at the top.

    Args:
        attentions (`Sequence[torch.Tensor]`): [..., H, L, L] for each layer, the first layer first.

    Returns:
        [..., L, L]; each row adds up to 1.

    Source: Abnar and Zuidema 2020, "Quantifying Attention Flow in Transformers", section 3, eq. (1).
    """
    length = attentions[0].shape[-1]
    rollout = torch.eye(length, dtype=attentions[0].dtype, device=attentions[0].device)
    for weights in attentions:
        rollout = 0.5 * rollout + mixed(weights) @ rollout
    return rollout


def decoder_rollout(
    self_attentions: Sequence[torch.Tensor], cross_attentions: Sequence[torch.Tensor], encoder: torch.Tensor
) -> torch.Tensor:
    """The same for a decoder, which reads its own input and, through the encoder's rollout, the source.

    Args:
        self_attentions (`Sequence[torch.Tensor]`): [..., H, T, T] for each layer.
        cross_attentions (`Sequence[torch.Tensor]`): [..., H, T, S] for each layer.
        encoder (`torch.Tensor`): [..., S, S] from `encoder_rollout`.

    Returns:
        [..., T, T + S]; each row adds up to 1.

    Choice: the source of `encoder_rollout` has no decoder. Here each of a layer's two attentions is a step of its own,
    half of it the residual's.
    """
    first = self_attentions[0]
    length, width = first.shape[-1], encoder.shape[-1]
    batch = first.shape[:-3]
    rollout = torch.eye(length, length + width, dtype=first.dtype, device=first.device).expand(*batch, -1, -1)
    for own, cross in zip(self_attentions, cross_attentions, strict=True):
        rollout = 0.5 * rollout + mixed(own) @ rollout
        source = mixed(cross) @ encoder  # [..., T, S]
        rollout = 0.5 * rollout + torch.cat([source.new_zeros(*source.shape[:-1], length), source], dim=-1)
    return rollout


def encoder_flow(attentions: Sequence[torch.Tensor]) -> torch.Tensor:
    """The maximum flow from each position at the top to each token, with A_l as capacities.

    Args:
        attentions (`Sequence[torch.Tensor]`): [H, L, L] for each layer, of one sentence without padding.

    Returns:
        [L, L], float64, between 0 and 1; rows need not add up to 1.

    Raises:
        ImportError: scipy is not installed.

    Source: Abnar and Zuidema 2020, section 3, attention flow.
    """
    graph = _Graph()
    bottom, top = graph.add_encoder(attentions)
    return graph.flows(top, bottom)


def decoder_flow(
    self_attentions: Sequence[torch.Tensor],
    cross_attentions: Sequence[torch.Tensor],
    encoder_attentions: Sequence[torch.Tensor],
) -> torch.Tensor:
    """The same from each decoder position to what the decoder read and to the source: [T, T + S], float64.

    Args:
        self_attentions, cross_attentions, encoder_attentions: [H, T, T], [H, T, S] and [H, S, S] for each layer, of
            one sentence without padding.

    Raises:
        ImportError: scipy is not installed.
    """
    graph = _Graph()
    source, memory = graph.add_encoder(encoder_attentions)
    bottom = top = graph.add_nodes(self_attentions[0].shape[-1])
    for own, cross in zip(self_attentions, cross_attentions, strict=True):
        top = graph.add_layer(top, top, own)
        top = graph.add_layer(top, memory, cross)
    return graph.flows(top, np.concatenate([bottom, source]))


class _Graph:
    """Positions as nodes, and from each to those below it an edge as wide as its attention."""

    def __init__(self) -> None:
        self.size = 0
        self.edges: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add_nodes(self, count: int) -> np.ndarray:
        self.size += count
        return np.arange(self.size - count, self.size)

    def add_layer(self, below: np.ndarray, attended: np.ndarray, weights: torch.Tensor) -> np.ndarray:
        """Nodes of one attention's outputs: half from the node below, half from what is attended to."""
        above = self.add_nodes(len(below))
        self._connect(above, below, np.eye(len(below)) * 0.5)
        self._connect(above, attended, mixed(weights.detach().double()).cpu().numpy())
        return above

    def add_encoder(self, attentions: Sequence[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
        bottom = top = self.add_nodes(attentions[0].shape[-1])
        for weights in attentions:
            top = self.add_layer(top, top, weights)
        return bottom, top

    def _connect(self, above: np.ndarray, below: np.ndarray, widths: np.ndarray) -> None:
        rows, columns = np.nonzero(widths)
        self.edges.append((above[rows], below[columns], widths[rows, columns]))

    def flows(self, starts: np.ndarray, ends: np.ndarray) -> torch.Tensor:
        try:
            from scipy.sparse import coo_array, csr_array
            from scipy.sparse.csgraph import maximum_flow
        except ImportError as error:
            raise ImportError("Attention flow needs scipy. Run: pip install scipy") from error
        above, below, widths = (np.concatenate(one) for one in zip(*self.edges, strict=True))
        units = np.rint(widths * _UNITS)
        # Both edges between two nodes, of the residual and of attention, become one.
        summed: Any = csr_array(coo_array((units, (above, below)), shape=(self.size, self.size)))
        graph = csr_array(summed.astype(np.int32))
        found = [[maximum_flow(graph, int(start), int(end)).flow_value for end in ends] for start in starts]
        return torch.tensor(found, dtype=torch.float64) / _UNITS


# --------------------------------------------------------------------------- from a model
def model_rollout(
    model: Any,
    input_ids: torch.Tensor,
    decoder_input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> TokenAttention:
    """Rollout of a batch of sentences and their translations.

    Args:
        model: a seq2seq model of transformers whose attentions can be had; eager meanwhile, and back after.
        input_ids (`torch.Tensor`): [B, S]. decoder_input_ids (`torch.Tensor`): [B, T], the start token first.
        attention_mask (`torch.Tensor`, *optional*): [B, S]; columns of padding have no share in rows of real tokens.

    Returns:
        `TokenAttention`; each row adds up to 1.
    """
    encoder, own, cross = _attentions(model, input_ids, decoder_input_ids, attention_mask)
    rolled = encoder_rollout(encoder)
    return TokenAttention(rolled, decoder_rollout(own, cross, rolled))


def model_flow(model: Any, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor) -> TokenAttention:
    """Flow of one sentence and its translation.

    Args:
        model: as for `model_rollout`. input_ids (`torch.Tensor`): [1, S]. decoder_input_ids (`torch.Tensor`): [1, T].

    Returns:
        `TokenAttention`, float64.

    Raises:
        ValueError: more than one sentence. ImportError: scipy is not installed.
    """
    if len(input_ids) != 1 or len(decoder_input_ids) != 1:
        raise ValueError(f"Flow takes one sentence at a time, got {len(input_ids)}: padding is no part of its graph.")
    encoder, own, cross = ([one[0] for one in kind] for kind in _attentions(model, input_ids, decoder_input_ids, None))
    return TokenAttention(encoder_flow(encoder)[None], decoder_flow(own, cross, encoder)[None])


def _attentions(
    model: Any, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    with eager_attention(model):
        output = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            output_attentions=True,
            use_cache=False,
        )
    return output.encoder_attentions, output.decoder_attentions, output.cross_attentions
