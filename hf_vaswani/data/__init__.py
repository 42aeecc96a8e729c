"""Parallel text, from files to batches."""

from .batches import BatchPlan, TokenBatchSampler
from .corpus import CorpusError, bundled_pairs, read_lines, read_tsv, read_two_files
from .dataset import TokenizedPairs, tokenize_pairs
from .preparation import prepare_corpus
from .prepared import PreparedCorpus, SourceReport
from .sources import CorpusSource, read_source

__all__ = [
    "BatchPlan",
    "CorpusError",
    "CorpusSource",
    "PreparedCorpus",
    "SourceReport",
    "TokenBatchSampler",
    "TokenizedPairs",
    "bundled_pairs",
    "prepare_corpus",
    "read_lines",
    "read_source",
    "read_tsv",
    "read_two_files",
    "tokenize_pairs",
]
