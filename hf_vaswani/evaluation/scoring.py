"""One way from a model to its scores, for validation during training and for the command line alike.

Letters in shapes: B batch, T target tokens, V vocabulary.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from .bare import bare_model
from .bleu import CorpusScore, check_counts, check_kinds, score_lines
from .perplexity import budgeted_batches


@dataclass(frozen=True)
class Evaluation:
    """What a model made of a test set.

    Args:
        hypotheses (`list[str]`): one translation a source, in the order of the sources.
        scores (`list[CorpusScore]`): in the order of the kinds asked for.
    """

    hypotheses: list[str]
    scores: list[CorpusScore]

    def __getitem__(self, name: str) -> CorpusScore:
        """The score of that name, such as "sacreBLEU" or "chrF"."""
        for score in self.scores:
            if score.name == name:
                return score
        raise KeyError(f"No score {name!r} was made, only {', '.join(score.name for score in self.scores)}.")


def translate_lines(
    model: Any,
    tokenizer: Any,
    sources: Sequence[str],
    *,
    batch_size: int = 32,
    num_beams: int | None = None,
    accelerator: Any = None,
    progress: bool | None = None,
    **generate: Any,
) -> list[str]:
    """Translate line by line, as `hf-vaswani translate` does.

    Args:
        model, tokenizer: a seq2seq model and its tokenizer. sources (`Sequence[str]`): one sentence each.
        batch_size (`int`): lines translated together. num_beams (`int`, *optional*): default: the model's own.
        accelerator (`accelerate.Accelerator`, *optional*): share the lines between all its processes; all must call
            this, and all get every translation.
        progress (`bool`, *optional*): a bar on standard error. Default: on a terminal.
        generate: any argument of the pipeline or of `generate`.

    Returns:
        `list[str]`: exactly one translation a source, in the same order, each without a line end in it.
    """
    from ..pipeline_vaswani import VaswaniTranslationPipeline

    if isinstance(sources, str):
        raise TypeError("Sources are a list of sentences, not one string.")
    rank, processes = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
    options = {**generate, "batch_size": batch_size, "progress": progress if rank == 0 else False}
    if num_beams is not None:
        options["num_beams"] = num_beams
    own = list(sources[rank::processes])
    with bare_model(model, accelerator) as plain:
        translate = VaswaniTranslationPipeline(plain, tokenizer, device=plain.device)
        results = translate(own, **options) if own else []
    texts = [one["translation_text"].replace("\r", " ").replace("\n", " ") for one in results]
    if processes == 1:
        return texts
    from accelerate.utils import gather_object

    lines: list[str] = [""] * len(sources)
    for other, part in enumerate(gather_object([texts])):
        lines[other::processes] = part  # the stride keeps the order, and a part of another size is an error
    return lines


def evaluate_model(
    model: Any,
    tokenizer: Any,
    sources: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    *,
    target_language: str | None = None,
    kinds: Sequence[str] = ("sacrebleu", "chrf"),
    tokenize: str | None = None,
    lowercase: bool = False,
    normalize_punctuation: bool = False,
    batch_size: int = 32,
    num_beams: int | None = None,
    accelerator: Any = None,
    progress: bool | None = None,
    **generate: Any,
) -> Evaluation:
    """Translate a test set and score it: the one function for validation during training and for the command line.

    Args:
        model, tokenizer: a seq2seq model and its tokenizer.
        sources (`Sequence[str]`): one sentence each.
        references: raw text; for each source, one reference or a list of them.
        target_language, kinds, tokenize, lowercase, normalize_punctuation: see `score_lines`.
        batch_size, num_beams, accelerator, progress, generate: see `translate_lines`.

    Returns:
        `Evaluation`, the same in every process of `accelerator`.

    Raises:
        ValueError: before any work is done, for counts that differ, an unknown kind, or a language without its
            segmenter.
    """
    check_counts(sources, references, "sources")
    check_kinds(kinds, target_language, tokenize)
    hypotheses = translate_lines(
        model,
        tokenizer,
        sources,
        batch_size=batch_size,
        num_beams=num_beams,
        accelerator=accelerator,
        progress=progress,
        **generate,
    )
    scores = score_lines(
        hypotheses,
        references,
        kinds,
        target_language=target_language,
        tokenize=tokenize,
        lowercase=lowercase,
        normalize_punctuation=normalize_punctuation,
    )
    return Evaluation(hypotheses, scores)


# ------------------------------------------------------------------ forced decoding
@dataclass(frozen=True)
class PairScore:
    """What a model thinks of one given translation.

    Args:
        log_prob (`float`): log-probability of the whole target, its end token included, in nats; 0.0 for a pair with a
            blank side, which the model never saw.
        pieces (`list[str]`): target tokens as the vocabulary spells them, the end token last; none for such a pair.
        log_probs (`list[float]`): of each piece, given the source and the pieces before it.
    """

    log_prob: float
    pieces: list[str]
    log_probs: list[float]

    @property
    def mean(self) -> float:
        """Log-probability per token, in nats; 0.0 where there is no token."""
        return self.log_prob / max(1, len(self.pieces))


@torch.no_grad()
def score_pairs(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[tuple[str, str]],
    *,
    batch_tokens: int = 2048,
    first_number: int = 1,
    progress: bool | None = None,
) -> list[PairScore]:
    """Log-probabilities of given translations, by forced decoding in float32.

    Args:
        model, tokenizer: a seq2seq model and its tokenizer.
        pairs (`Sequence[tuple[str, str]]`): source, target.
        batch_tokens (`int`): budget in padded tokens on either side of a batch; a pair over it is a batch by itself.
            It changes the speed, not the result.
        first_number (`int`): what messages call the first pair.
        progress (`bool`, *optional*): a bar on standard error. Default: on a terminal.

    Returns:
        `list[PairScore]`: one a pair, in the same order. A pair with a blank side has no tokens and the score 0.0:
        translating gives a blank line for a blank line without asking the model.

    Raises:
        ValueError: a side of a pair is longer than the model's position table; the pair is named.
        FloatingPointError: the model's scores are not numbers.
    """
    results = [PairScore(0.0, [], [])] * len(pairs)
    places = [i for i, (src, tgt) in enumerate(pairs) if src.strip() and tgt.strip()]
    if not places:
        return results
    src_ids: list[list[int]] = tokenizer([pairs[i][0] for i in places])["input_ids"]
    tgt_ids: list[list[int]] = tokenizer(text_target=[pairs[i][1] for i in places])["input_ids"]
    src_lengths = torch.tensor([len(ids) for ids in src_ids])
    tgt_lengths = torch.tensor([len(ids) for ids in tgt_ids])
    _check_lengths(model, torch.maximum(src_lengths, tgt_lengths), [first_number + i for i in places])
    is_shown = sys.stderr.isatty() if progress is None else progress
    bar = tqdm(total=len(places), disable=not is_shown, delay=0 if progress else 2, unit="line", desc="score")
    with bare_model(model, dtype=torch.float32) as plain, bar:
        pad = tokenizer.pad_token_id or 0
        for batch in budgeted_batches(src_lengths, tgt_lengths, batch_tokens):
            rows = [torch.tensor(src_ids[i]) for i in batch]
            labels = [torch.tensor(tgt_ids[i]) for i in batch]
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            target = pad_sequence(labels, batch_first=True, padding_value=-100).to(plain.device)  # [B, T]
            logits = plain(
                input_ids=pad_sequence(rows, batch_first=True, padding_value=pad).to(plain.device),
                attention_mask=mask.to(plain.device),
                labels=target,
            ).logits.float()  # [B, T, V]
            chosen = logits.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)  # [B, T]
            log_probs = (chosen - logits.logsumexp(-1)).cpu()  # [B, T]
            for i, row in zip(batch, log_probs, strict=True):
                values = row[: len(tgt_ids[i])].tolist()
                if not all(map(math.isfinite, values)):
                    raise FloatingPointError(
                        f"Pair {first_number + places[i]} (counted from 1) has a score that is no number. A weight "
                        "that is not finite is the usual cause."
                    )
                pieces = tokenizer.convert_ids_to_tokens(tgt_ids[i])
                results[places[i]] = PairScore(math.fsum(values), pieces, values)
            bar.update(len(batch))
    return results


def _check_lengths(model: Any, lengths: torch.Tensor, numbers: list[int]) -> None:
    """Refuse, by its number, a pair that is longer than a position table that cannot grow."""
    config = model.config
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or getattr(config, "position_encoding", None) == "sinusoidal" or int(lengths.max()) <= limit:
        return
    first = int((lengths > limit).nonzero()[0])
    raise ValueError(
        f"Pair {numbers[first]} (counted from 1) has a side of {int(lengths[first])} tokens, but the model can take "
        f"{limit}. Split it, or leave it out."
    )
