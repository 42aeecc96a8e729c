"""What a reader of another program's checkpoint hands over, and the checks that all readers share."""

import argparse
import math
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# What torch says of a class or call that it does not know, in the long text of its error.
_BEYOND_WEIGHTS = re.compile(r"Unsupported (?:global: GLOBAL|class) \S+|Can only (?:build|create|SETITEM)[^.\n]*")

# Output bias of a row that a checkpoint has no piece for: its probability is exactly 0 in float32, and the
# label-smoothed loss of a fine-tuning run stays a small number.
UNUSED_ROW_BIAS = -100.0


class ConversionError(ValueError):
    """A checkpoint that cannot be read, or holds what the model cannot represent; nothing has been written."""


@dataclass(frozen=True)
class ImportOptions:
    """What the user said beside kind and path; every reader lists the ones it uses, others are refused.

    Args:
        config (`Path`, *optional*): hyper-parameters, where they are not beside the weights.
        source_vocab, target_vocab (`Path`, *optional*): vocabulary files; one alone serves both sides.
        codes (`Path`, *optional*): BPE codes of subword-nmt, for both sides.
        source_spm, target_spm (`Path`, *optional*): SentencePiece models; one alone serves both sides.
        mapping (`Path`, *optional*): YAML that names the tensors of a checkpoint without fixed names.
        source_language, target_language (`str`, *optional*): codes such as "de", for Moses tokenisation and the card.
        moses (`bool`): text was tokenised by Moses' scripts before training, so do it here, and undo it behind.
        lowercase (`bool`): text was lowercased before training.
    """

    config: Path | None = None
    source_vocab: Path | None = None
    target_vocab: Path | None = None
    codes: Path | None = None
    source_spm: Path | None = None
    target_spm: Path | None = None
    mapping: Path | None = None
    source_language: str | None = None
    target_language: str | None = None
    moses: bool = False
    lowercase: bool = False

    def moses_languages(self, source: Any = None, target: Any = None) -> tuple[str, str] | None:
        """The languages of Moses' rules, where those were asked for.

        Args:
            source, target (*optional*): what the checkpoint says of them, for what the user did not say.

        Raises:
            ConversionError: Moses was asked for, and a language is not known.
        """
        languages = self.source_language or source, self.target_language or target
        if not self.moses:
            return None
        if not all(isinstance(one, str) and one for one in languages):
            raise ConversionError("`moses` needs `source_language` and `target_language`, as in en and de.")
        return str(languages[0]), str(languages[1])


@dataclass
class Program:
    """The program that made a checkpoint, running on it here, to compare with.

    Args:
        name (`str`): with its version, as in "transformers 5.24.0, MarianMTModel".
        logits: from source ids (list of lists, no padding) and target ids (list of lists, start token first) to one
            float array [T, V] for each sentence, V rows in the order of our vocabulary.
        search (*optional*): from source ids and a number of beams to one list of new token ids for each sentence (end
            token included), with the settings of `ForeignModel.generation`.
    """

    name: str
    logits: Callable[[list[list[int]], list[list[int]]], list[Any]]
    search: Callable[[list[list[int]], int], list[list[int]]] | None = None


@dataclass
class ForeignModel:
    """A checkpoint of another program in this package's terms.

    Args:
        kind (`str`): the word of the command line, as in "fairseq".
        config (`dict`): fields of `VaswaniConfig`, special ids included.
        tensors (`dict`): by the names of `VaswaniForConditionalGeneration.state_dict()`, tied ones once, under
            `model.shared.weight`. Views of the file's memory where possible.
        generation (`dict`): fields of the generation configuration that differ from the paper's.
        tokenizer (*optional*): a saved one must load by `AutoTokenizer` and encode the same. None: no vocabulary.
        choices (`list`): one sentence for each thing chosen where the checkpoint is silent, or filled in.
        losses (`list`): one sentence for each thing of the checkpoint that is not carried over.
        program (*optional*): makes a `Program` where the original can run here; called only for the proof.
        tensors_read (`int`): how many tensors of the file went in.
    """

    kind: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    generation: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    choices: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    program: Callable[[], Program | None] | None = None
    tensors_read: int = 0


def _is_number(value: Any) -> bool:
    try:  # YAML reads 1e-5 as a string
        return not isinstance(value, bool) and isinstance(value, int | float | str) and math.isfinite(float(value))
    except (ValueError, OverflowError):
        return False


_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "size": ("a whole number from 1", lambda value: type(value) is int and 0 < value < 2**31),
    "whole": ("a whole number", lambda value: type(value) is int and abs(value) < 2**31),
    "number": ("a number", _is_number),
    "flag": ("true or false", lambda value: value is None or isinstance(value, bool) or value in (0, 1)),
    "word": ("a word", lambda value: value is None or isinstance(value, str)),
    "words": (
        "a list of words",
        lambda value: value is None or (isinstance(value, list) and all(isinstance(one, str) for one in value)),
    ),
    "section": ("a group of settings", lambda value: value is None or isinstance(value, dict)),
}


def check_values(found: Mapping[str, Any], wanted: Mapping[str, str], where: str) -> None:
    """Refuse settings of a wrong kind by name, before anything computes with them.

    Args:
        found (`Mapping`): settings of a file; those that are not there are not looked at.
        wanted (`Mapping[str, str]`): for a name "size", "whole", "number", "flag", "word", "words" or "section"; null
            stands for "not given" where it is no number.
        where (`str`): named in the error, with the section.

    Raises:
        ConversionError: a value is of another kind.
    """
    for name, kind in wanted.items():
        told, is_right = _VALUES[kind]
        if name in found and not is_right(found[name]):
            raise ConversionError(f"{where}: `{name}` is {str(found[name])[:60]!r}, and should be {told}.")


class TensorReader:
    """Takes tensors out of a checkpoint by name, so that one left over or missing is an error and never a guess.

    Args:
        tensors (`Mapping[str, Tensor]`): all of the file.
        path (`Path`): named in errors.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], path: Path | str):
        self.tensors, self.path = tensors, path
        self.taken: set[str] = set()
        self.ignored: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, *shape: int | None) -> torch.Tensor:
        """One tensor; `shape` is what it must be, None for any size at that place, empty for no check.

        Raises:
            ConversionError: there is no such tensor, or it has another shape.
        """
        if name not in self.tensors:
            raise ConversionError(f"{self.path} has no tensor {name!r}; it has {_some(sorted(self.tensors))}.")
        self.taken.add(name)
        found = self.tensors[name]
        sizes = tuple(found.shape)
        if shape and (len(sizes) != len(shape) or any(w not in (None, s) for s, w in zip(sizes, shape, strict=True))):
            wanted = "(" + ", ".join("any" if size is None else str(size) for size in shape) + ")"
            raise ConversionError(f"{self.path}: tensor {name!r} is {sizes}, the hyper-parameters ask for {wanted}.")
        return found

    def take_equal(self, *names: str) -> torch.Tensor:
        """One matrix that the file holds under several names; all that are there must hold the same numbers.

        Raises:
            ConversionError: none is there, or two differ.
        """
        there = [name for name in names if name in self.tensors]
        if not there:
            raise ConversionError(f"{self.path} has none of the tensors {', '.join(map(repr, names))}.")
        first = self.take(there[0])
        for name in there[1:]:
            if not torch.equal(first, self.take(name)):
                raise ConversionError(f"{self.path}: {there[0]!r} and {name!r} should be one matrix, but differ.")
        return first

    def ignore(self, name: str, reason: str) -> None:
        """Leave a tensor out on purpose, where it is there; the reason goes into the report."""
        if name in self.tensors and name not in self.taken:
            self.ignored[name] = reason

    def finish(self) -> None:
        """Call after the last `take`.

        Raises:
            ConversionError: tensors are left over; they are named.
        """
        left = sorted(set(self.tensors) - self.taken - set(self.ignored))
        if left:
            raise ConversionError(
                f"{self.path} holds {len(left)} tensors that have no place in this architecture: {_some(left)}. "
                "Nothing was converted."
            )


def _some(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else (shown or "nothing")


def load_torch_file(path: Path, way_round: str, allowed: Sequence[Any] = (argparse.Namespace,)) -> Any:
    """Read a torch checkpoint without running any code that is in it.

    Args:
        path (`Path`): of torch.save, zip or legacy.
        way_round (`str`): what to do where the file needs more than that, as a sentence.
        allowed (`Sequence`): harmless classes that may occur beside tensors and plain Python values.

    Returns:
        What was saved; tensors are mapped from the file where its format allows.

    Raises:
        ConversionError: not a torch file, cut off, or in need of classes beyond `allowed`.
    """
    if not path.is_file():
        raise ConversionError(f"{path} is not a file.")
    with torch.serialization.safe_globals(list(allowed)):
        try:
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):  # the legacy format cannot be mapped
                    raise
                return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            found = _BEYOND_WEIGHTS.search(str(error))
            if found is None:
                raise ConversionError(f"{path} is not a torch checkpoint, or is damaged.") from error
            more = f"holds more than weights and plain values ({found[0]})"
            raise ConversionError(f"{path} {more}. {way_round}") from error
        except Exception as error:  # bytes that are no pickle, or too few, make the reader fail in any way
            first = (str(error).strip().splitlines() or [""])[0]
            said = f"{type(error).__name__}: {first}"
            raise ConversionError(f"{path} is not a torch checkpoint, or is damaged ({said}).") from error


def check_vocabulary(pieces: int, rows: int, where: str) -> list[int]:
    """Compare a vocabulary with its matrix before anything else uses them.

    Args:
        pieces (`int`): of the vocabulary. rows (`int`): of the matrix. where (`str`): named in the error.

    Returns:
        `list[int]`: ids of rows without a piece. They take part in the softmax as they did, and are put into
        `generation["suppress_tokens"]` so that they are never decoded.

    Raises:
        ConversionError: a piece without a row.
    """
    if pieces > rows:
        raise ConversionError(
            f"{where}: the vocabulary has {pieces} pieces, its matrix {rows} rows, so {pieces - rows} pieces have no "
            "row. Are they of one model? A token that was added later must be taken out of the vocabulary file."
        )
    return list(range(pieces, rows))


def check_all_heads(config: Any, program: str) -> None:
    """Refuse a model with pruned heads for a program that has one number of heads for all attentions.

    Args:
        config (`VaswaniConfig`): of the model that is to be exported. program (`str`): the other program's name.

    Raises:
        ConversionError: `kept_heads` names an attention that lacks heads.
    """
    all_heads = list(range(config.num_attention_heads))
    pruned = [place for place, kept in (config.kept_heads or {}).items() if kept != all_heads]
    if pruned:
        raise ConversionError(
            f"Heads were pruned from {_some(pruned)} (`kept_heads`), and {program} has {len(all_heads)} heads in every "
            "attention. Export the model from before the pruning."
        )
