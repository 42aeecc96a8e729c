"""What else the model could have said at each step of a translation, from one pass over the finished translation.

Letters: S source length, T target length, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..analysis.words import piece_texts

SHOWN = 5


@torch.inference_mode()
def forced_log_probs(model: Any, source_ids: Sequence[int], sequence: Sequence[int]) -> torch.Tensor:
    """What the model thinks of every piece at every step of a given translation.

    Args:
        model: a seq2seq model of transformers, in evaluation mode.
        source_ids (`Sequence[int]`): S pieces. sequence (`Sequence[int]`): the start token, then T target pieces.

    Returns:
        `torch.Tensor` [T, V], float32 on the processor: log-probabilities in nats.

    Raises:
        FloatingPointError: the model's scores are not numbers.
    """
    source = torch.tensor([list(source_ids)], device=model.device)  # [1, S]
    read = torch.tensor([list(sequence[:-1])], device=model.device)  # [1, T]
    output = model(input_ids=source, attention_mask=torch.ones_like(source), decoder_input_ids=read, use_cache=False)
    log_probs = output.logits[0].float().cpu().log_softmax(dim=-1)  # [T, V]
    if torch.isnan(log_probs).any():
        raise FloatingPointError(
            "The model's scores are not numbers. A weight that is not finite is the usual cause; in half precision an "
            "overflow is: try float32."
        )
    return log_probs


def log_probs_of(log_probs: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """The log-probabilities [T] of the pieces that stand in a translation, out of [T, V]."""
    return log_probs.gather(1, torch.tensor(list(ids))[:, None])[:, 0]


@dataclass(frozen=True)
class Step:
    """One step of a translation.

    Args:
        piece (`str`): what stands in the translation, as `piece_texts` writes it. prob (`float`): its probability.
        rank (`int`): one more than the number of pieces that were likelier.
        alternatives (`list[tuple[str, float]]`): the likeliest pieces with their probabilities, highest first.
    """

    piece: str
    prob: float
    rank: int
    alternatives: list[tuple[str, float]]


def steps_of(tokenizer: Any, log_probs: torch.Tensor, ids: Sequence[int], count: int = SHOWN) -> list[Step]:
    """The likeliest pieces at each step, given all pieces before it.

    Args:
        tokenizer: of transformers. log_probs (`torch.Tensor`): [T, V], from `forced_log_probs`.
        ids (`Sequence[int]`): the T pieces of the translation. count (`int`): pieces a step.

    Returns:
        `list[Step]`: T steps.
    """
    best = log_probs.topk(min(count, log_probs.shape[1]), dim=1)  # [T, count]
    chosen = log_probs_of(log_probs, ids)  # [T]
    ranks = (log_probs > chosen[:, None]).sum(dim=1) + 1  # [T]
    pieces = piece_texts(tokenizer, list(ids))
    names = piece_texts(tokenizer, best.indices.flatten().tolist())
    width = best.indices.shape[1]
    pairs = list(zip(names, best.values.exp().flatten().tolist(), strict=True))
    return [
        Step(piece, prob, rank, pairs[i * width : (i + 1) * width])
        for i, (piece, prob, rank) in enumerate(zip(pieces, chosen.exp().tolist(), ranks.tolist(), strict=True))
    ]
