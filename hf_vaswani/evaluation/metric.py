"""sacreBLEU and chrF as a metric of the `evaluate` library that loads nothing from anywhere.

evaluate.evaluator("translation").compute(model_or_pipeline=translate, data=data, metric=SacreBleuMetric())
"""

from typing import Any

import datasets
import evaluate

from .bleu import chrf_score, sacrebleu_score


class SacreBleuMetric(evaluate.Metric):
    """The scores of `hf_vaswani.evaluation.bleu` for `evaluate`, which would else fetch a script from the Hub.

    `compute(predictions=[...], references=[...])` gives "sacrebleu", "sacrebleu_signature", "chrf" and
    "chrf_signature". A reference is a string, or a list of strings where there are several.

    Args:
        config_name (`str`, *optional*): sacreBLEU's tokenisation; None is "13a". kwargs: as for `evaluate.Metric`.
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="sacreBLEU and chrF of detokenised text.",
            citation="Post 2018, A Call for Clarity in Reporting BLEU Scores; Popovic 2015, chrF.",
            inputs_description="predictions: list of str; references: list of str, or of lists of str.",
            features=[
                datasets.Features({"predictions": text, "references": datasets.Sequence(text)}),
                datasets.Features({"predictions": text, "references": text}),
            ],
        )

    def _compute(self, predictions: list[str], references: list[Any], **_: Any) -> dict[str, Any]:
        tokenize = self.config_name if self.config_name not in (None, "default") else "13a"
        bleu, chrf = sacrebleu_score(predictions, references, tokenize), chrf_score(predictions, references)
        return {
            "sacrebleu": bleu.score,
            "sacrebleu_signature": bleu.signature,
            "chrf": chrf.score,
            "chrf_signature": chrf.signature,
        }
