"""Scores, each under the name of its kind."""

from typing import TYPE_CHECKING, Any

from .bleu import CorpusScore, chrf_score, sacrebleu_score
from .perplexity import perplexity

if TYPE_CHECKING:
    from .metric import SacreBleuMetric

__all__ = ["CorpusScore", "SacreBleuMetric", "chrf_score", "perplexity", "sacrebleu_score"]


def __getattr__(name: str) -> Any:
    # The metric's base class needs `evaluate` and `datasets`, which take a second to import.
    if name == "SacreBleuMetric":
        from .metric import SacreBleuMetric

        return SacreBleuMetric
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
