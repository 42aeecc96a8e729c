"""Corpus scores whose names say what they are: there is no bare "BLEU" here."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CorpusScore:
    """One number for a whole corpus, with the settings that made it.

    Args:
        name (`str`): the kind of score. score (`float`): from 0 to 100.
        signature (`str`): sacreBLEU's, which names every setting and its version; quote it with the number.
    """

    name: str
    score: float
    signature: str

    def __str__(self) -> str:
        return f"{self.name} {self.score:.2f} ({self.signature})"


def _streams(hypotheses: Sequence[str], references: Sequence[str] | Sequence[Sequence[str]]) -> list[list[str]]:
    """References as sacreBLEU wants them, one list per reference, each as long as the hypotheses."""
    if isinstance(hypotheses, str) or isinstance(references, str):
        raise TypeError("Scores need lists of sentences, not one string.")
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} hypotheses, but {len(references)} references: line n answers line n.")
    if not hypotheses:
        raise ValueError("There is nothing to score: no hypothesis was given.")
    rows = [[one] if isinstance(one, str) else list(one) for one in references]
    count = len(rows[0])
    for number, row in enumerate(rows, start=1):
        if len(row) != count or not row:
            raise ValueError(f"Hypothesis {number} has {len(row)} references where the first has {count}.")
    return [[row[i] for row in rows] for i in range(count)]


def sacrebleu_score(
    hypotheses: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    tokenize: str = "13a",
    lowercase: bool = False,
) -> CorpusScore:
    """sacreBLEU: BLEU of plain, detokenised text, with the tokenisation done by the scorer.

    Args:
        hypotheses (`Sequence[str]`): translations. references: for each, one reference or a list of them.
        tokenize (`str`): "13a", sacreBLEU's default; "zh", "ja-mecab", "ko-mecab" and others for those languages.
        lowercase (`bool`): ignore case.

    Returns:
        `CorpusScore` named "sacreBLEU".

    Raises:
        ValueError: counts that differ, no hypothesis, or an unknown `tokenize`.
    """
    from sacrebleu.metrics import BLEU

    if tokenize not in BLEU.TOKENIZERS:
        raise ValueError(f"`tokenize` {tokenize!r} is unknown to sacreBLEU: {', '.join(sorted(BLEU.TOKENIZERS))}.")
    # Hypotheses that look tokenised are scored as they are; a warning of the scorer's would end up in the output.
    metric = BLEU(tokenize=tokenize, lowercase=lowercase, force=True)
    score = metric.corpus_score(list(hypotheses), _streams(hypotheses, references)).score
    return CorpusScore("sacreBLEU", score, str(metric.get_signature()))


def chrf_score(
    hypotheses: Sequence[str], references: Sequence[str] | Sequence[Sequence[str]], word_order: int = 0
) -> CorpusScore:
    """chrF: F-score of character n-grams, kinder than BLEU to languages with many word forms.

    Args:
        hypotheses (`Sequence[str]`): translations. references: for each, one reference or a list of them.
        word_order (`int`): 0 is chrF; 2 adds word n-grams and is chrF++.

    Returns:
        `CorpusScore` named "chrF", with one plus sign per word order.

    Raises:
        ValueError: counts that differ, or no hypothesis.
    """
    from sacrebleu.metrics import CHRF

    metric = CHRF(word_order=word_order)
    score = metric.corpus_score(list(hypotheses), _streams(hypotheses, references)).score
    return CorpusScore("chrF" + "+" * word_order, score, str(metric.get_signature()))
