"""What the page asks of a model, and the candidates that it finds: bounded in length and in time.

Letters: S source length, T target length.
"""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from ..analysis.weights import AttentionWeights, attention_of
from .alternatives import Step, forced_log_probs, log_probs_of, steps_of

MOST_BEAMS = 16
MOST_CANDIDATES = 8
MOST_ALPHA = 2.0
# Text beyond this is not even cut into pieces: no sentence is so long, and a pasted book would hold the others up.
MOST_CHARACTERS = 100_000


class Refusal(ValueError):
    """Something that the reader of the page must put right, in a sentence."""


@dataclass(frozen=True)
class Request:
    """What a reader asked for.

    Args:
        text (`str`): one sentence or paragraph. Line breaks count as blanks.
        beams (`int`): width of the search. alpha (`float`): exponent of the length penalty; 0 is none.
        count (`int`): candidates wanted.
        max_pieces (`int`): most source pieces, the end token included. time_limit (`float`): seconds of searching.
    """

    text: str
    beams: int = 4
    alpha: float = 0.6
    count: int = 4
    max_pieces: int = 256
    time_limit: float = 30.0


@dataclass(frozen=True)
class Candidate:
    """One translation.

    Args:
        text (`str`): plain text. ids (`tuple[int, ...]`): its T pieces, the end token included, the start token not.
        log_prob (`float`): of all pieces together, in nats. score (`float`): log_prob / length penalty's factor.
        is_complete (`bool`): whether it ends with an end token; else it was stopped by its length or the time.
    """

    text: str
    ids: tuple[int, ...]
    log_prob: float
    score: float
    is_complete: bool


@dataclass(frozen=True)
class Found:
    """The candidates of one request, best first, and what is needed to look at them again.

    Args:
        source_ids (`tuple[int, ...]`): S source pieces, the end token included. start_id (`int`): what the decoder
            begins with. candidates (`tuple[Candidate, ...]`). seconds (`float`): that the search took.
        notes (`tuple[str, ...]`): what the reader should know about this result. chosen (`int`): the candidate that is
            looked at.
    """

    source_ids: tuple[int, ...]
    start_id: int
    candidates: tuple[Candidate, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    chosen: int = 0

    @property
    def candidate(self) -> Candidate:
        return self.candidates[self.chosen]


@dataclass
class LoadedModel:
    """A model that several readers share.

    Args:
        name (`str`): what the page calls it. model, tokenizer: of transformers.
        longest_input (`int`, *optional*): source pieces that the model can take at all; None: no limit of its own.
    """

    name: str
    model: Any
    tokenizer: Any
    longest_input: int | None = None
    # Reading the attention switches the whole model to its eager form for a moment: no search may run beside it.
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _is_stopping: threading.Event = field(default_factory=threading.Event, repr=False)

    def __post_init__(self) -> None:
        self.model.eval()

    @classmethod
    def from_pipeline(cls, name: str, translator: Any) -> "LoadedModel":
        """From `VaswaniTranslationPipeline`."""
        return cls(name, translator.model, translator.tokenizer, translator._longest_input())

    @property
    def is_computing(self) -> bool:
        return self.lock.locked()

    def stop(self) -> None:
        """Have a search that is under way end at its next step, as at the end of the program."""
        self._is_stopping.set()

    def steps(self, found: Found) -> list[Step]:
        """The alternatives at each step of the chosen candidate."""
        ids = found.candidate.ids
        with self.lock:
            log_probs = forced_log_probs(self.model, found.source_ids, (found.start_id, *ids))
        return steps_of(self.tokenizer, log_probs, ids)

    def attention(self, found: Found) -> AttentionWeights:
        """What each piece of the chosen candidate and of its source looked at."""
        with self.lock:
            return attention_of(self.model, self.tokenizer, list(found.source_ids), list(found.candidate.ids))


class _TimeLimit(StoppingCriteria):
    """Ends a search when its time is over, and remembers that it did."""

    def __init__(self, seconds: float, is_stopping: threading.Event):
        self.end = time.monotonic() + seconds
        self.is_stopping = is_stopping
        self.has_struck = False

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        self.has_struck = self.has_struck or time.monotonic() > self.end or self.is_stopping.is_set()
        return torch.full((input_ids.shape[0],), self.has_struck, dtype=torch.bool, device=input_ids.device)


def length_factor(model: Any, length: int, alpha: float) -> float:
    """What log-probabilities of hypotheses are divided by, as the model's own search does.

    Args:
        model: of transformers. length (`int`): generated pieces, the end token included. alpha (`float`): exponent.

    Source: Wu et al. 2016, eq. (14), for models with `length_penalty_type` "gnmt"; length^alpha for all others.
    """
    from ..generation_vaswani import length_penalty_factor

    kind = getattr(model.generation_config, "length_penalty_type", None) or "power"
    return float(length_penalty_factor(length, alpha, kind))


def find_candidates(loaded: LoadedModel, request: Request) -> Found:
    """Search for translations of a text.

    Args:
        loaded (`LoadedModel`). request (`Request`).

    Returns:
        `Found`: at most `request.count` candidates, best first. There are fewer where the beam is narrower.

    Raises:
        Refusal: the text is blank or too long, or a setting is out of its range.
        FloatingPointError: the model's scores are not numbers.
    """
    text, notes = _readable(request.text)
    _check_settings(request)
    source_ids = _source_ids(loaded, text, request.max_pieces)
    count = min(request.count, request.beams)
    if count < request.count:
        notes.append(f"A beam of {request.beams} has at most {request.beams} candidates.")
    model = loaded.model
    with loaded.lock:
        start = time.monotonic()
        limit = _TimeLimit(request.time_limit, loaded._is_stopping)
        # Only beams have a length penalty; the library warns where it is given without them.
        options = {"length_penalty": request.alpha} if request.beams > 1 else {}
        with torch.inference_mode():
            inputs = torch.tensor([source_ids], device=model.device)  # [1, S]
            sequences = model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                num_beams=request.beams,
                num_return_sequences=count,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([limit]),
                **options,
            ).tolist()
        seconds = time.monotonic() - start
        rows = [_without_padding(model, row) for row in sequences]
        candidates = [_candidate(loaded, source_ids, row, request.alpha) for row in rows]
    if limit.has_struck:
        notes.append(f"The search was stopped after {request.time_limit:g} seconds; what it had by then is shown.")
    return Found(tuple(source_ids), sequences[0][0], tuple(candidates), seconds, tuple(notes))


def _readable(text: str) -> tuple[str, list[str]]:
    """The text as a single line, and what was done to it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Refusal(
            f"Character {error.start + 1} is half of a pair that Unicode does not allow alone: remove it."
        ) from error
    if not text.strip():
        raise Refusal("There is nothing to translate yet: type a sentence, then press Enter.")
    if len(text) > MOST_CHARACTERS:
        raise Refusal(f"This text has {len(text):,} characters; the page reads at most {MOST_CHARACTERS:,}.")
    lines = [line.strip() for line in text.replace("\r", "\n").split("\n") if line.strip()]
    return " ".join(lines), ["Line breaks were read as blanks."] if len(lines) > 1 else []


def _check_settings(request: Request) -> None:
    for name, value, least, most in (
        ("The beam", request.beams, 1, MOST_BEAMS),
        ("The number of candidates", request.count, 1, MOST_CANDIDATES),
        ("Alpha", request.alpha, 0, MOST_ALPHA),
    ):
        if not least <= value <= most:
            raise Refusal(f"{name} must be from {least} to {most:g}, not {value:g}.")


def _source_ids(loaded: LoadedModel, text: str, max_pieces: int) -> list[int]:
    ids: list[int] = loaded.tokenizer(text, truncation=False, verbose=False)["input_ids"]
    most = max_pieces if loaded.longest_input is None else min(max_pieces, loaded.longest_input)
    if len(ids) > most:
        whose = "the page takes" if most == max_pieces else f"{loaded.name} can take"
        raise Refusal(
            f"This text has {len(ids):,} pieces; {whose} at most {most:,}. Nothing was translated: shorten it, or "
            "translate a file with `hf-vaswani translate`, which splits long text at its sentences."
        )
    return ids


def _ends(model: Any) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends}


def _without_padding(model: Any, row: list[int]) -> list[int]:
    """A sequence up to its end token; without one, up to where padding begins. The start token stays in front."""
    ends = _ends(model)
    for place, one in enumerate(row[1:], start=1):
        if one in ends:
            return row[: place + 1]
    length = len(row)
    while length > 2 and row[length - 1] == model.generation_config.pad_token_id:
        length -= 1
    return row[:length]


def _candidate(loaded: LoadedModel, source_ids: list[int], row: list[int], alpha: float) -> Candidate:
    ids = tuple(row[1:])
    log_prob = float(log_probs_of(forced_log_probs(loaded.model, source_ids, row), ids).double().sum())
    return Candidate(
        text=loaded.tokenizer.decode(ids, skip_special_tokens=True),
        ids=ids,
        log_prob=log_prob,
        score=log_prob / length_factor(loaded.model, len(ids), alpha),
        is_complete=ids[-1] in _ends(loaded.model),
    )
