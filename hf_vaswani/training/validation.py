"""Measuring a model on held-out text while it is trained, by the functions that the command line uses."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from ..data.corpus import Pair
from ..data.dataset import tokenize_pairs
from ..evaluation.bleu import sacrebleu_tokenizer_for
from ..evaluation.perplexity import perplexity
from ..evaluation.scoring import evaluate_model
from .config import ValidationConfig


class Validation:
    """Perplexity, and BLEU of translations, on one text.

    Args:
        pairs (`Sequence[tuple[str, str]]`): raw sources and references. tokenizer, collator: as in training.
        plan (`ValidationConfig`): whether to translate, and how wide to search.
        target_language (`str`, *optional*): chooses sacreBLEU's tokenisation.

    Raises:
        ValueError: there is no pair with text on both sides, or the language's segmenter for BLEU is not installed.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        tokenizer: Any,
        collator: Any,
        plan: ValidationConfig,
        target_language: str | None = None,
    ):
        self.sources, self.references = [src for src, _ in pairs], [tgt for _, tgt in pairs]
        self.tokenizer, self.collator, self.plan, self.target_language = tokenizer, collator, plan, target_language
        self.dataset = tokenize_pairs(pairs, tokenizer)
        self.text_key = hashlib.sha256(json.dumps(list(pairs)).encode()).hexdigest()[:16]  # of this text
        self.longest = max([0, *self.dataset.src_lengths.tolist(), *self.dataset.tgt_lengths.tolist()])  # in tokens
        if plan.bleu:
            sacrebleu_tokenizer_for(target_language)  # a missing segmenter is told now, not after the first hours
        if not len(self.dataset):
            raise ValueError("The validation text has no pair with text on both sides.")

    def __call__(self, model: Any, accelerator: Any) -> dict[str, float]:
        """Scores by name, the same on every process; every process must call it.

        Args:
            model: as `Accelerator.prepare` gave it.

        Returns:
            `dict[str, float]`: "perplexity" per target token and, where asked for, "bleu" (sacreBLEU).
        """
        scores = {"perplexity": perplexity(model, self.dataset, self.collator, accelerator=accelerator)}
        if self.plan.bleu:
            evaluation = evaluate_model(
                model,
                self.tokenizer,
                self.sources,
                self.references,
                target_language=self.target_language,
                num_beams=self.plan.num_beams,
                accelerator=accelerator,
            )
            scores["bleu"] = next(one.score for one in evaluation.scores if one.name == "sacreBLEU")
        return scores
