"""Batches of pairs of like length, cut by a budget of padded tokens on either side (section 5.1 of the paper)."""

import heapq
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Sampler

# Source lengths that share one run of target lengths: the widths that are tried, the least padding wins.
_GROUP_WIDTHS = (1, 2, 3, 4, 6, 8)


class TokenCounts(NamedTuple):
    """Tokens of an epoch: those of the pairs, end tokens included, and those of the batches, padding included."""

    src_tokens: int
    tgt_tokens: int
    src_padded: int
    tgt_padded: int

    @property
    def padding(self) -> float:
        """Share of the places of all batches that hold no token, from 0 to 1, both sides together."""
        places = self.src_padded + self.tgt_padded
        return 1 - (self.src_tokens + self.tgt_tokens) / places if places else 0.0


class BatchPlan(Sequence[list[int]]):
    """The batches of one epoch, in order; `plan[i]` is a list of indices of pairs.

    Of W processes, process r takes the batches `plan[r::W]`.

    Args:
        order (`np.ndarray`): [pairs], indices of the pairs, batch after batch.
        starts (`np.ndarray`): [batches + 1], where each batch begins in `order`, and the end of the last.
        batch_order (`np.ndarray`): [batches], the batch that comes first, second and so on.
        src_lengths, tgt_lengths (`np.ndarray`): tokens by index of a pair.
    """

    def __init__(
        self,
        order: np.ndarray,
        starts: np.ndarray,
        batch_order: np.ndarray,
        src_lengths: np.ndarray,
        tgt_lengths: np.ndarray,
    ):
        self._order, self._starts, self._batch_order = order, starts, batch_order
        self._src, self._tgt = src_lengths, tgt_lengths

    def __len__(self) -> int:
        return len(self._batch_order)

    def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        batch = self._batch_order[index]  # an IndexError ends iteration, as for a list
        return self._order[self._starts[batch] : self._starts[batch + 1]].tolist()

    @property
    def pair_count(self) -> int:
        """Pairs of the epoch, repeated ones counted each time."""
        return len(self._order)

    def token_counts(self) -> TokenCounts:
        """Tokens with and without padding, over the whole epoch."""
        counts = []
        for lengths in (self._src, self._tgt):
            ordered, total = lengths[self._order], 0
            if len(ordered):
                widths = np.maximum.reduceat(ordered, self._starts[:-1])
                total = int((widths.astype(np.int64) * np.diff(self._starts)).sum())
            counts.append((int(ordered.sum(dtype=np.int64)), total))
        (src, src_padded), (tgt, tgt_padded) = counts
        return TokenCounts(src, tgt, src_padded, tgt_padded)


class TokenBatchSampler(Sampler[list[int]]):
    """Yields lists of indices, each at most `src_tokens` source and `tgt_tokens` target tokens after padding.

    Pairs are sorted by length; those of equal lengths change places at random from epoch to epoch, and the batches come
    in random order. Every pair comes exactly once an epoch, unless `weights` say otherwise. The order is a function of
    `seed` and epoch alone. Without weights, the number of batches is the same in every epoch.

    There is no attribute `batch_size` on purpose: Accelerate would take batches of another size for incomplete ones.

    Args:
        src_lengths, tgt_lengths (`torch.Tensor`): [pairs], tokens with the end token.
        src_tokens, tgt_tokens (`int`): budgets, in padded tokens per batch.
        seed (`int`): of the order, and of what fractional weights draw.
        shuffle (`bool`): False: shortest first, the same in every epoch, for scoring.
        too_long (`str`): for a pair that is over a budget by itself: "error" refuses it, "drop" leaves it out and
            counts it in `dropped_count`.
        weights (`torch.Tensor`, *optional*): [pairs], how often a pair comes in an epoch: weight 2.25 is twice, and a
            third time in a quarter of the epochs, drawn for each pair alone. None: once.
        multiple_of (`int`): the number of batches is a multiple of this, such as the number of processes. The largest
            batches are split to reach it; no pair is repeated or lost.

    Raises:
        ValueError: lengths of unlike count, a budget below 1, a pair over the budget, a weight that is no number from
            0 up, weights that make an epoch too long for any memory, or too few pairs for a multiple of `multiple_of`.

    Source: Vaswani et al. 2017, section 5.1: about 25,000 source and 25,000 target tokens a batch.
    Choice: neighbours in source length share a run of target lengths, up in one and down in the next. The paper says
        only "approximate sequence length"; this keeps the padding of both sides small.
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
        weights: torch.Tensor | None = None,
        multiple_of: int = 1,
    ):
        if len(src_lengths) != len(tgt_lengths):
            raise ValueError(f"{len(src_lengths)} source lengths and {len(tgt_lengths)} target lengths.")
        if src_tokens < 1 or tgt_tokens < 1:
            raise ValueError(f"`src_tokens` ({src_tokens}) and `tgt_tokens` ({tgt_tokens}) must be at least 1.")
        if too_long not in ("error", "drop"):
            raise ValueError(f'`too_long` must be "error" or "drop", got {too_long!r}.')
        if multiple_of < 1:
            raise ValueError(f"`multiple_of` must be at least 1, got {multiple_of}.")
        self.src_tokens, self.tgt_tokens, self.seed, self.shuffle = src_tokens, tgt_tokens, seed, shuffle
        self.multiple_of, self.epoch = multiple_of, 0
        self._src, self._tgt = (
            np.asarray(lengths, dtype=np.int32) if len(lengths) else np.zeros(0, np.int32)
            for lengths in (src_lengths, tgt_lengths)
        )
        is_over = (self._src > src_tokens) | (self._tgt > tgt_tokens)
        self.dropped_count = int(is_over.sum())
        if self.dropped_count and too_long == "error":
            first = int(is_over.argmax())
            raise ValueError(
                f"{self.dropped_count} pair(s) do not fit into a batch; the first is pair {first + 1}, with "
                f"{self._src[first]} source and {self._tgt[first]} target tokens where the budgets are {src_tokens} "
                f'and {tgt_tokens}. Raise the budget, shorten the pair, or pass too_long="drop".'
            )
        self._weights = None if weights is None else _checked_weights(weights, len(self._src))
        fits = np.flatnonzero(~is_over)
        if len(self._src) < 2**31:
            fits = fits.astype(np.int32)
        self._sorted, self._starts, self._group = self._arranged(fits)
        if self._weights is None:
            self._starts = self._split(self._starts)
        self._latest: tuple[int, BatchPlan] | None = None

    # ------------------------------------------------------------------ once
    def _arranged(self, fits: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Indices sorted so that padding is small, where batches start, and the width of a group of source lengths."""
        best: tuple[np.ndarray, np.ndarray, int] | None = None
        least = None
        # Few pairs a length want wide groups, many want narrow ones. The first width that pads more ends the search.
        for group in _GROUP_WIDTHS:
            order = fits[self._rank(fits, group).argsort(kind="stable")]
            starts = self._cut(order)
            plan = BatchPlan(order, starts, np.arange(len(starts) - 1), self._src, self._tgt)
            counts = plan.token_counts()
            places = counts.src_padded + counts.tgt_padded
            if least is not None and places >= least:
                break
            best, least = (order, starts, group), places
        assert best is not None
        return best

    def _rank(self, indices: np.ndarray, group: int) -> np.ndarray:
        """The place of pairs in the sort: by group of source lengths, then target length, up and down in turn."""
        src, tgt = self._src[indices].astype(np.int64), self._tgt[indices].astype(np.int64)
        room = int(tgt.max(initial=0)) + 1
        groups = src // group
        key = groups * room + np.where(groups % 2, room - 1 - tgt, tgt)
        # Pairs of one target length go by source length, so that equal rank means equal lengths on both sides.
        return key * group + src % group

    def _cut(self, order: np.ndarray) -> np.ndarray:
        """Where each batch begins in the order; the last entry is the number of pairs."""
        starts, start, count = [0], 0, len(order)
        src, tgt = self._src[order], self._tgt[order]
        rows = np.arange(1, self.src_tokens + 1) if count > self.src_tokens else np.arange(1, count + 1)
        while start < count:
            # No more pairs than this can fit, as the first is in the batch on both sides.
            most = min(self.src_tokens // max(1, int(src[start])), self.tgt_tokens // max(1, int(tgt[start])))
            window = slice(start, start + max(1, most))
            src_width = np.maximum.accumulate(src[window]).astype(np.int64)
            tgt_width = np.maximum.accumulate(tgt[window]).astype(np.int64)
            row = rows[: len(src_width)]
            fits = (row * src_width <= self.src_tokens) & (row * tgt_width <= self.tgt_tokens)
            # Sizes only grow, so the batch ends where the first row does not fit.
            start += int(fits.sum())
            starts.append(start)
        return np.array(starts)

    def _split(self, starts: np.ndarray) -> np.ndarray:
        """Starts of so many batches that `multiple_of` divides them, by halving the largest again and again."""
        missing = -(len(starts) - 1) % self.multiple_of
        if not missing:
            return starts
        if starts[-1] < (needed := len(starts) - 1 + missing):
            raise ValueError(
                f"{starts[-1]} pair(s) cannot fill {needed} batches, the next multiple of {self.multiple_of}: each "
                "needs at least one. Use fewer processes, a larger budget, or more text."
            )
        halves = [(begin - end, begin, end) for begin, end in pairwise(starts.tolist())]
        heapq.heapify(halves)
        for _ in range(missing):
            _, begin, end = heapq.heappop(halves)
            middle = (begin + end) // 2
            heapq.heappush(halves, (begin - middle, begin, middle))
            heapq.heappush(halves, (middle - end, middle, end))
        return np.array(sorted([0, *(end for _, _, end in halves)]))

    # ------------------------------------------------------------------ each epoch
    def plan(self, epoch: int) -> BatchPlan:
        """The batches of one epoch, from 0: a function of seed and epoch alone.

        Args:
            epoch (`int`): from 0.

        Returns:
            `BatchPlan`: `len(plan)` batches; it takes 4 bytes a pair.
        """
        if self._latest is not None and self._latest[0] == epoch:
            return self._latest[1]
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        order, starts = self._sorted, self._starts
        if self._weights is not None:
            order = np.repeat(order, self._copies(generator)[order])
            starts = self._split(self._cut(order))
        batch_order = np.arange(len(starts) - 1)
        if self.shuffle:
            # A stable sort of shuffled pairs by length: only pairs of equal lengths change places.
            order = order[torch.randperm(len(order), generator=generator).numpy()]
            order = order[self._rank(order, self._group).argsort(kind="stable")]
            batch_order = torch.randperm(len(starts) - 1, generator=generator).numpy()
        plan = BatchPlan(order, starts, batch_order, self._src, self._tgt)
        self._latest = (epoch, plan)
        return plan

    def _copies(self, generator: torch.Generator) -> np.ndarray:
        """[pairs], how often each pair comes in the epoch of this generator."""
        assert self._weights is not None
        whole = np.floor(self._weights)
        drawn = torch.rand(len(whole), generator=generator).numpy() < self._weights - whole
        return whole.astype(np.int32) + drawn

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0, whose order comes next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._starts) - 1 if self._weights is None else len(self.plan(self.epoch))

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.plan(self.epoch)


def _checked_weights(weights: torch.Tensor, pair_count: int) -> np.ndarray:
    values = np.asarray(weights, dtype=np.float32)
    if values.shape != (pair_count,):
        raise ValueError(f"`weights` must be one number for each of the {pair_count} pairs, got shape {values.shape}.")
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        first = int(wrong.argmax())
        raise ValueError(f"`weights`: pair {first + 1} has {values[first]}; a weight is a number from 0 up.")
    if (total := float(values.sum(dtype=np.float64))) >= 2**31:
        raise ValueError(f"`weights` make an epoch of {total:,.0f} pairs. Divide them all by the same number.")
    return values
