"""Batches of pairs of like length, cut by a budget of padded tokens on either side (section 5.1 of the paper)."""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class TokenBatchSampler(Sampler[list[int]]):
    """Yields lists of indices, each at most `src_tokens` source and `tgt_tokens` target tokens after padding.

    Pairs are sorted by source length, then target length; those of equal lengths change places at random from epoch to
    epoch, and the batches come in random order. Every pair comes exactly once an epoch. The order is a function of
    `seed` and epoch alone, and the number of batches is the same in every epoch.

    There is no attribute `batch_size` on purpose: Accelerate would take batches of another size for incomplete ones.

    Args:
        src_lengths, tgt_lengths (`torch.Tensor`): [pairs], tokens with the end token.
        src_tokens, tgt_tokens (`int`): budgets, in padded tokens per batch.
        seed (`int`): of the order.
        shuffle (`bool`): False: shortest first, the same in every epoch, for scoring.
        too_long (`str`): for a pair that is over a budget by itself: "error" refuses it, "drop" leaves it out and
            counts it in `dropped_count`.

    Raises:
        ValueError: lengths of unlike count, a budget below 1, or a pair over the budget.

    Source: Vaswani et al. 2017, section 5.1: about 25,000 source and 25,000 target tokens a batch.
    """

    def __init__(
        self,
        src_lengths: torch.Tensor,
        tgt_lengths: torch.Tensor,
        src_tokens: int = 25_000,
        tgt_tokens: int = 25_000,
        seed: int = 0,
        shuffle: bool = True,
        too_long: str = "error",
    ):
        if len(src_lengths) != len(tgt_lengths):
            raise ValueError(f"{len(src_lengths)} source lengths and {len(tgt_lengths)} target lengths.")
        if src_tokens < 1 or tgt_tokens < 1:
            raise ValueError(f"`src_tokens` ({src_tokens}) and `tgt_tokens` ({tgt_tokens}) must be at least 1.")
        if too_long not in ("error", "drop"):
            raise ValueError(f'`too_long` must be "error" or "drop", got {too_long!r}.')
        self.src_tokens, self.tgt_tokens, self.seed, self.shuffle = src_tokens, tgt_tokens, seed, shuffle
        self.epoch = 0
        src, tgt = src_lengths.to(torch.int32), tgt_lengths.to(torch.int32)
        is_over = (src > src_tokens) | (tgt > tgt_tokens)
        self.dropped_count = int(is_over.sum())
        if self.dropped_count and too_long == "error":
            first = int(is_over.nonzero()[0])
            raise ValueError(
                f"{self.dropped_count} pair(s) do not fit into a batch; the first is pair {first + 1}, with "
                f"{int(src[first])} source and {int(tgt[first])} target tokens where the budgets are {src_tokens} and "
                f'{tgt_tokens}. Raise the budget, shorten the pair, or pass too_long="drop".'
            )
        by_target = tgt.argsort(stable=True)
        # Indices of the pairs that fit, sorted by (source length, target length).
        order = by_target[src[by_target].argsort(stable=True)]  # [pairs]
        self._sorted = order[~is_over[order]]
        self._src, self._tgt = src[self._sorted], tgt[self._sorted]
        self._starts = self._cut()

    def _cut(self) -> list[int]:
        """Where each batch begins in the sorted order; its last entry is the number of pairs."""
        starts, start, count = [0], 0, len(self._sorted)
        while start < count:
            # No more than this many pairs can fit, because sources only get longer.
            window = slice(start, start + self.src_tokens // max(1, int(self._src[start])))
            src_width = self._src[window].cummax(0).values.long()
            tgt_width = self._tgt[window].cummax(0).values.long()
            rows = torch.arange(1, len(src_width) + 1)
            fits = (rows * src_width <= self.src_tokens) & (rows * tgt_width <= self.tgt_tokens)
            # Sizes only grow, so the batch ends where the first row does not fit.
            start += int(fits.long().sum())
            starts.append(start)
        return starts

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0, whose order comes next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __iter__(self) -> Iterator[list[int]]:
        order, batch_order = self._sorted, torch.arange(len(self))
        if self.shuffle:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
            shuffled = torch.randperm(len(order), generator=generator)
            # A stable sort of shuffled pairs by the lengths they had: only pairs of equal lengths change places.
            rank = self._src.long() * (int(self._tgt.max()) + 1 if len(order) else 1) + self._tgt
            order = order[shuffled[rank[shuffled].argsort(stable=True)]]
            batch_order = torch.randperm(len(self), generator=generator)
        for position in batch_order.tolist():
            yield order[self._starts[position] : self._starts[position + 1]].tolist()
