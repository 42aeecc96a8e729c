"""Scores, each under the name of its kind."""

from typing import TYPE_CHECKING, Any

from .bleu import (
    CorpusScore,
    chrf_score,
    compound_split_bleu_score,
    sacrebleu_score,
    sacrebleu_tokenizer_for,
    score_lines,
    ter_score,
    tokenised_bleu_score,
)
from .perplexity import perplexity
from .scoring import Evaluation, PairScore, evaluate_model, score_pairs, translate_lines

if TYPE_CHECKING:
    from .metric import SacreBleuMetric, TranslationMetric

__all__ = [
    "CorpusScore",
    "Evaluation",
    "PairScore",
    "SacreBleuMetric",
    "TranslationMetric",
    "chrf_score",
    "compound_split_bleu_score",
    "evaluate_model",
    "perplexity",
    "sacrebleu_score",
    "sacrebleu_tokenizer_for",
    "score_lines",
    "score_pairs",
    "ter_score",
    "tokenised_bleu_score",
    "translate_lines",
]


def __getattr__(name: str) -> Any:
    # The metrics' base class needs `evaluate` and `datasets`, which take a second to import.
    if name in ("SacreBleuMetric", "TranslationMetric"):
        from . import metric

        return getattr(metric, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
