"""The parity check that ends every conversion: the same sentences through both sides."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import logging

from ..data.corpus import bundled_pairs, read_lines
from ..generation_vaswani import length_penalty_factor
from .foreign import ConversionError, Program
from .reference import PlainTransformer, plain_beam_search
from .report import Parity

TOLERANCE = 1e-4  # of float32 logits
LIMIT = 60  # new tokens of a sentence in the check: models with random weights never end
_MOST_COLUMNS = 100  # of a source
_BATCH = 16
_MOST_LOGITS = 2**23  # held at a time, of either side
# Sentences to compare unless the user says how many; a large model takes seconds for each.
_MANY, _FEW, _LARGE = 32, 6, 20_000_000


# ---------------------------------------------------------------------- sentences
def default_count(parameters: int) -> int:
    """How many sentences a conversion is checked with, unless the user says it."""
    return _FEW if parameters > _LARGE else _MANY


def proof_sources(
    tokenizer: Any, config: Any, sentences: Path | list[str] | None, count: int
) -> tuple[list[list[int]], str]:
    """Source ids to compare with, and where they are from.

    Args:
        tokenizer (*optional*): None, or one that knows few of the bundled lines, gives random ids.
        sentences (`Path` or `list[str]`, *optional*): the user's own lines; None: of the bundled corpus.
        count (`int`): how many.

    Raises:
        ConversionError: the user's lines are none, or hold nothing that the tokenizer knows.
    """
    if sentences is not None:
        lines = [line for line in (read_lines(sentences) if isinstance(sentences, Path) else sentences) if line.strip()]
        origin = str(sentences) if isinstance(sentences, Path) else "given lines"
        if not lines:
            raise ConversionError(f"{origin} has no lines to check the conversion with.")
        if tokenizer is None:
            raise ConversionError("There is no vocabulary, so lines cannot be encoded: leave `sentences` out.")
        lines = list(islice(lines, count))
    elif tokenizer is not None:
        # Both languages, so that either side of a vocabulary is met.
        pairs = bundled_pairs("test")
        lines, origin = [text for pair in pairs for text in pair][: max(count, 1)], "lines of Tatoeba"
    else:
        return _random_sources(config, count), "random ids"
    most = min(_MOST_COLUMNS, config.max_position_embeddings)
    encoded = [tokenizer(line)["input_ids"][:most] for line in lines]
    # A source vocabulary of its own may have another unknown piece than config.json, which speaks of the target.
    unknown = config.unk_token_id if tokenizer.unk_token_id is None else tokenizer.unk_token_id
    known = [ids for ids in encoded if ids and (unknown is None or ids.count(unknown) <= len(ids) / 4)]
    if sentences is None and len(known) < count:
        drawn = _random_sources(config, count - len(known))
        return known + drawn, f"{len(known)} {origin}, {len(drawn)} of random ids" if known else "random ids"
    encoded = [ids for ids in encoded if ids]
    if not encoded:
        raise ConversionError(f"No line of {origin} has a piece of this vocabulary to check the conversion with.")
    return encoded, origin


def _random_sources(config: Any, count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    end = config.eos_token_id if isinstance(config.eos_token_id, int) else config.eos_token_id[0]
    special = {config.pad_token_id, end, config.bos_token_id, config.decoder_start_token_id}
    allowed = torch.tensor([i for i in range(config.encoder_vocab_size) if i not in special])
    longest = max(3, min(24, config.max_position_embeddings))
    lengths = torch.randint(2, longest, (count,), generator=generator).tolist()
    return [[*allowed[torch.randint(len(allowed), (n,), generator=generator)].tolist(), end] for n in lengths]


def _limit(config: Any) -> int:
    """New tokens of an output in the check; a learned table of positions may end before."""
    # The start token takes a position too.
    return min(LIMIT, config.max_position_embeddings - 1) if config.position_encoding == "learned" else LIMIT


# ---------------------------------------------------------------------- our side
@contextmanager
def quiet_library() -> Iterator[None]:
    """Keep transformers' hints on `generate` to itself while a check sets lengths and beams of its own."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _padded(rows: list[list[int]], pad: int) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad)


def _batches(size: int, *columns: list[list[int]]) -> Iterator[tuple[list[list[int]], ...]]:
    for start in range(0, len(columns[0]), size):
        yield tuple(column[start : start + size] for column in columns)


def _logit_batch(model: Any) -> int:
    """Sentences whose logits are held at a time: at least two, so that there is padding."""
    return max(2, min(_BATCH, _MOST_LOGITS // (LIMIT * model.config.vocab_size)))


def _source(model: Any, rows: list[list[int]]) -> dict[str, torch.Tensor]:
    mask = _padded([[1] * len(row) for row in rows], 0)
    return {"input_ids": _padded(rows, model.config.pad_token_id), "attention_mask": mask}


@torch.no_grad()
def own_logits(model: Any, sources: list[list[int]], targets: list[list[int]]) -> Iterator[np.ndarray]:
    """Our logits of each pair, [T, V], computed in padded batches; targets begin with the start token."""
    for src, tgt in _batches(_logit_batch(model), sources, targets):
        logits = model(**_source(model, src), decoder_input_ids=_padded(tgt, model.config.pad_token_id)).logits
        yield from (row[: len(ids)].float().numpy() for row, ids in zip(logits, tgt, strict=True))


@torch.no_grad()
def own_search(model: Any, sources: list[list[int]], beams: int) -> list[list[int]]:
    """New tokens of each source by `generate()`, the end token included."""
    end = model.config.eos_token_id
    ends = set(end if isinstance(end, list) else [end])
    found: list[list[int]] = []
    settings: dict[str, Any] = {"num_beams": beams, "max_new_tokens": _limit(model.config)}
    # A model's own settings may ask for samples or for several outputs, which cannot be compared.
    settings |= {"do_sample": False, "num_return_sequences": 1}
    if beams > 1:
        settings["early_stopping"] = "never"
    for (src,) in _batches(_BATCH, sources):
        rows = model.generate(**_source(model, src), **settings)
        for row in rows[:, 1:].tolist():
            stop = next((n + 1 for n, token in enumerate(row) if token in ends), None)
            found.append(row[:stop] if stop else _without_padding(row, model.config.pad_token_id))
    return found


def _without_padding(row: list[int], pad: int) -> list[int]:
    while row and row[-1] == pad:
        row = row[:-1]
    return row


def _scores(model: Any, sources: list[list[int]], outputs: list[list[int]]) -> list[float]:
    """log P / penalty of given outputs under our model."""
    settings = model.generation_config
    kind = getattr(settings, "length_penalty_type", "power")
    start = model.config.decoder_start_token_id
    targets = [[start, *row[:-1]] for row in outputs]
    scores = []
    for logits, row in zip(own_logits(model, sources, targets), outputs, strict=True):
        picked = torch.from_numpy(logits).log_softmax(-1)[torch.arange(len(row)), torch.tensor(row)]
        scores.append(float(picked.sum()) / length_penalty_factor(len(row), settings.length_penalty, kind))
    return scores


# ---------------------------------------------------------------------- the other side
def plain_program(model: Any, tensors: dict[str, torch.Tensor]) -> Program:
    """The plain float64 forward pass over the file's own tensors, with the search settings of `model`."""
    settings = model.generation_config
    plain = PlainTransformer(model.config, tensors)
    end = model.config.eos_token_id
    barred = list(settings.suppress_tokens or []) + [word[0] for word in settings.bad_words_ids or [] if len(word) == 1]

    def search(sources: list[list[int]], beams: int) -> list[list[int]]:
        return [
            plain_beam_search(
                plain,
                source,
                beams=beams,
                limit=_limit(model.config),
                end=set(end if isinstance(end, list) else [end]),
                alpha=float(settings.length_penalty),
                kind=getattr(settings, "length_penalty_type", "power"),
                barred=barred,
                last=settings.forced_eos_token_id,
                least=max(settings.min_new_tokens or 0, (settings.min_length or 0) - 1),
            )[0]
            for source in sources
        ]

    return Program(
        name="a plain float64 forward pass",
        logits=lambda sources, targets: [plain.logits(s, t) for s, t in zip(sources, targets, strict=True)],
        search=search,
    )


# ---------------------------------------------------------------------- the comparison
def compare(
    model: Any, program: Program, sources: list[list[int]], origin: str, tolerance: float = TOLERANCE
) -> Parity:
    """Hold our model against a program.

    Args:
        model (`VaswaniForConditionalGeneration`): in evaluation mode.
        program (`Program`): the other side.
        sources (`list[list[int]]`): source ids. origin (`str`): where they are from.
        tolerance (`float`): of logits.

    Returns:
        `Parity`, whatever it says; `faults` judges.
    """
    start = model.config.decoder_start_token_id
    greedy = own_search(model, sources, 1)
    targets = [[start, *row] for row in greedy]
    difference, margins = 0.0, []
    for src, tgt in _batches(_logit_batch(model), sources, targets):
        theirs = program.logits(src, tgt)
        for own, other in zip(own_logits(model, src, tgt), theirs, strict=True):
            other = np.asarray(other)[: len(own)]
            gap = float(np.abs(own - other).max())
            difference = max(difference, gap if np.isfinite(gap) else float("inf"))  # max() would pass over a NaN
            best = np.partition(other, -2, axis=-1)[:, -2:]
            margins.append(best[:, 1] - best[:, 0])
    parity = Parity(program.name, len(sources), origin, logit_difference=difference)
    if program.search is None:
        return parity
    parity.greedy_compared, parity.greedy_equal = len(sources), 0
    for row, other, margin in zip(greedy, program.search(sources, 1), margins, strict=True):
        parting = next((n for n, (a, b) in enumerate(zip(row, other, strict=False)) if a != b), None)
        is_tie = parting is not None and margin[parting] < 10 * tolerance
        # The limits of both sides may differ: an output that never ended is compared as far as it goes.
        parity.greedy_equal += is_tie or (
            parting is None and (len(row) == len(other) or min(len(row), len(other)) > 20)
        )
        parity.ties += is_tie
    ours, theirs_4 = own_search(model, sources, 4), program.search(sources, 4)
    parity.beam_compared = len(sources)
    parity.beam_equal = sum(a == b for a, b in zip(ours, theirs_4, strict=True))
    scored = zip(_scores(model, sources, ours), _scores(model, sources, theirs_4), strict=True)
    parity.score_difference = max(abs(a - b) for a, b in scored)
    return parity


def faults(parity: Parity, tolerance: float = TOLERANCE) -> list[str]:
    """What of a float32 conversion's check is not as it must be; beam outputs may differ where search rules do."""
    found = []
    if parity.logit_difference is not None and not parity.logit_difference <= tolerance:
        found.append(f"logits differ by up to {parity.logit_difference:.3g}, {tolerance:g} is allowed")
    if parity.greedy_equal is not None and parity.greedy_equal < parity.greedy_compared:
        found.append(
            f"{parity.greedy_compared - parity.greedy_equal} of {parity.greedy_compared} greedy outputs differ"
        )
    return found
