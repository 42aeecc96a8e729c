"""Parallel text, from files to batches."""

from .batches import TokenBatchSampler
from .corpus import CorpusError, bundled_pairs, read_lines, read_tsv, read_two_files
from .dataset import TokenizedPairs, tokenize_pairs

__all__ = [
    "CorpusError",
    "TokenBatchSampler",
    "TokenizedPairs",
    "bundled_pairs",
    "read_lines",
    "read_tsv",
    "read_two_files",
    "tokenize_pairs",
]
