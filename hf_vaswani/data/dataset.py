"""Sentence pairs as token ids, ready for a sampler that counts tokens and a collator that pads."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset

from .corpus import Pair

_ENCODE_AT_ONCE = 10_000


class TokenizedPairs(Dataset):
    """Pairs of token id lists, in memory.

    Args:
        src_ids, tgt_ids (`list[list[int]]`): one list a sentence, end token included.
        blank_count (`int`): pairs that were left out because a side was blank.
    """

    def __init__(self, src_ids: list[list[int]], tgt_ids: list[list[int]], blank_count: int = 0):
        if len(src_ids) != len(tgt_ids):
            raise ValueError(f"{len(src_ids)} sources and {len(tgt_ids)} targets: every source needs its target.")
        self.src_ids, self.tgt_ids, self.blank_count = src_ids, tgt_ids, blank_count

    def __len__(self) -> int:
        return len(self.src_ids)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.src_ids[index], "labels": self.tgt_ids[index]}

    @property
    def src_lengths(self) -> torch.Tensor:
        """Tokens of each source, end token included: [pairs], int32."""
        return torch.tensor([len(ids) for ids in self.src_ids], dtype=torch.int32)

    @property
    def tgt_lengths(self) -> torch.Tensor:
        """Tokens of each target, end token included: [pairs], int32."""
        return torch.tensor([len(ids) for ids in self.tgt_ids], dtype=torch.int32)


def tokenize_pairs(pairs: Iterable[Pair], tokenizer: Any) -> TokenizedPairs:
    """Encode sentence pairs.

    Args:
        pairs (iterable of `tuple[str, str]`): source, target.
        tokenizer: a tokenizer of transformers that ends each sentence with its end token.

    Returns:
        `TokenizedPairs`: in the order of `pairs`, without those that have a blank side; these are counted in
        `blank_count`, because a blank side teaches the model to drop a sentence or to invent one.
    """
    src_ids: list[list[int]] = []
    tgt_ids: list[list[int]] = []
    blank_count = 0
    remaining = iter(pairs)
    while chunk := list(islice(remaining, _ENCODE_AT_ONCE)):
        full = [(src, tgt) for src, tgt in chunk if src.strip() and tgt.strip()]
        blank_count += len(chunk) - len(full)
        if full:
            sources, targets = zip(*full, strict=True)
            src_ids += tokenizer(list(sources))["input_ids"]
            tgt_ids += tokenizer(text_target=list(targets))["input_ids"]
    return TokenizedPairs(src_ids, tgt_ids, blank_count)
