"""Perplexity per target token, as in Table 3 of the paper."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from ..data.batches import TokenBatchSampler
from .bare import bare_model


def mean_to_perplexity(log_prob: float, token_count: int) -> float:
    """Perplexity of tokens whose log-probabilities have this sum; `inf` where no float can hold it."""
    try:
        return math.exp(-log_prob / token_count)
    except OverflowError:
        return math.inf


def budgeted_batches(src_lengths: torch.Tensor, tgt_lengths: torch.Tensor, budget: int) -> Iterator[list[int]]:
    """Indices in batches of like length within a budget of padded tokens a side; a pair over it comes alone, last."""
    yield from TokenBatchSampler(src_lengths, tgt_lengths, budget, budget, shuffle=False, too_long="drop")
    is_over = torch.maximum(src_lengths, tgt_lengths) > budget
    yield from ([index] for index in is_over.nonzero().flatten().tolist())


@torch.no_grad()
def perplexity(model: Any, dataset: Any, collator: Any, batch_tokens: int = 4096, accelerator: Any = None) -> float:
    """exp of the mean negative log-likelihood of all target tokens, end tokens included.

    Args:
        model: a seq2seq model whose loss in evaluation mode is the plain negative log-likelihood, divided by
            `num_items_in_batch`.
        dataset: what is measured, with `len`, one example by index, `src_lengths` and `tgt_lengths`, such as
            `TokenizedPairs`. collator: pads a list of examples.
        batch_tokens (`int`): budget in padded tokens on either side of a batch; a pair over it is a batch by itself.
            It changes the speed, not the result.
        accelerator (`accelerate.Accelerator`, *optional*): measure with all its processes, each pair once; all must
            call this, and all get the same number.

    Returns:
        `float`: per subword token, so only comparable between models of one vocabulary; `inf` where no float can hold
        it.

    Raises:
        ValueError: for a dataset without a pair, or without a target token.
    """
    if len(dataset) == 0:
        raise ValueError("There is nothing to measure: the dataset has no pair.")
    src, tgt = dataset.src_lengths, dataset.tgt_lengths
    rank, processes = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
    total, count = 0.0, 0
    with bare_model(model, accelerator, dtype=torch.float32) as plain:
        for number, indices in enumerate(budgeted_batches(src, tgt, batch_tokens)):
            if number % processes == rank:
                batch = {
                    name: value.to(plain.device) for name, value in collator([dataset[i] for i in indices]).items()
                }
                total += float(plain(**batch, num_items_in_batch=1).loss)
                count += int((batch["labels"] != -100).sum())
    if accelerator is not None:
        from accelerate.utils import gather_object

        shares = gather_object([(total, count)])
        total, count = math.fsum(one for one, _ in shares), sum(one for _, one in shares)
    if count == 0:
        raise ValueError("There is nothing to measure: the dataset has no target token.")
    return mean_to_perplexity(-total, count)
