"""Perplexity per target token, as in Table 3 of the paper."""

import math
from typing import Any

import torch

from ..data.batches import TokenBatchSampler
from ..data.dataset import TokenizedPairs


@torch.no_grad()
def perplexity(model: Any, dataset: TokenizedPairs, collator: Any, batch_tokens: int = 4096) -> float:
    """exp of the mean negative log-likelihood of all target tokens, end tokens included.

    Args:
        model: a seq2seq model whose loss in evaluation mode is the plain negative log-likelihood.
        dataset (`TokenizedPairs`): what is measured. collator: pads a list of examples.
        batch_tokens (`int`): budget in padded tokens a batch; it changes the speed, not the result.

    Returns:
        `float`: per subword token, so only comparable between models of one vocabulary.

    Raises:
        ValueError: for a dataset without a pair.
    """
    if len(dataset) == 0:
        raise ValueError("There is nothing to measure: the dataset has no pair.")
    src, tgt = dataset.src_lengths, dataset.tgt_lengths
    budget = max(batch_tokens, int(src.max()), int(tgt.max()))
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    try:
        for indices in TokenBatchSampler(src, tgt, budget, budget, shuffle=False):
            batch = collator([dataset[i] for i in indices]).to(model.device)
            total += float(model(**batch, num_items_in_batch=1).loss)
            count += int((batch["labels"] != -100).sum())
    finally:
        model.train(was_training)
    return math.exp(total / count)
