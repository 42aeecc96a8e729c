"""Our scores as metrics of the `evaluate` library that load nothing from anywhere.

evaluate.evaluator("translation").compute(model_or_pipeline=translate, data=data, metric=SacreBleuMetric())
"""

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from .bleu import check_kinds, chrf_score, sacrebleu_score, score_lines


def _info(description: str) -> evaluate.MetricInfo:
    text = datasets.Value("string")
    return evaluate.MetricInfo(
        description=description,
        citation="Post 2018, A Call for Clarity in Reporting BLEU Scores; Popovic 2015, chrF.",
        inputs_description="predictions: list of str; references: list of str, or of lists of str.",
        features=[
            datasets.Features({"predictions": text, "references": datasets.Sequence(text)}),
            datasets.Features({"predictions": text, "references": text}),
        ],
    )


class SacreBleuMetric(evaluate.Metric):
    """The scores of `hf_vaswani.evaluation.bleu` for `evaluate`, which would else fetch a script from the Hub.

    `compute(predictions=[...], references=[...])` gives "sacrebleu", "sacrebleu_signature", "chrf" and
    "chrf_signature". A reference is a string, or a list of strings where there are several.

    Args:
        config_name (`str`, *optional*): sacreBLEU's tokenisation; None is "13a". kwargs: as for `evaluate.Metric`.
    """

    def _info(self) -> evaluate.MetricInfo:
        return _info("sacreBLEU and chrF of detokenised text.")

    def _compute(self, predictions: list[str], references: list[Any], **_: Any) -> dict[str, Any]:
        tokenize = self.config_name if self.config_name not in (None, "default") else "13a"
        bleu, chrf = sacrebleu_score(predictions, references, tokenize), chrf_score(predictions, references)
        return {
            "sacrebleu": bleu.score,
            "sacrebleu_signature": bleu.signature,
            "chrf": chrf.score,
            "chrf_signature": chrf.signature,
        }


class TranslationMetric(evaluate.Metric):
    """Any kinds of score for `evaluate`, each with its signature, without the Hub.

    `compute(predictions=[...], references=[...])` gives two entries a kind, such as "ter" and "ter_signature", or
    "compound_split" and "compound_split_signature". A reference is a string, or a list of strings.

    Args:
        kinds (`Sequence[str]`): any of "sacrebleu", "tokenised", "compound-split", "chrf", "chrf++", "ter".
        target_language (`str`, *optional*), tokenize, lowercase, normalize_punctuation: see `score_lines`.
        kwargs: as for `evaluate.Metric`.

    Raises:
        ValueError: for an unknown kind, or a language whose segmenter is not installed.
    """

    def __init__(
        self,
        kinds: Sequence[str] = ("sacrebleu", "chrf"),
        target_language: str | None = None,
        tokenize: str | None = None,
        lowercase: bool = False,
        normalize_punctuation: bool = False,
        **kwargs: Any,
    ):
        check_kinds(kinds, target_language, tokenize)
        self.kinds = tuple(kinds)
        self.settings: dict[str, Any] = {
            "target_language": target_language,
            "tokenize": tokenize,
            "lowercase": lowercase,
            "normalize_punctuation": normalize_punctuation,
        }
        super().__init__(**kwargs)

    def _info(self) -> evaluate.MetricInfo:
        return _info("Scores of translations, each with its signature.")

    def _compute(self, predictions: list[str], references: list[Any], **_: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for kind, score in zip(
            self.kinds, score_lines(predictions, references, self.kinds, **self.settings), strict=True
        ):
            name = kind.replace("-", "_")
            found[name], found[f"{name}_signature"] = score.score, score.signature
        return found
