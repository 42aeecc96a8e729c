"""A folder of CTranslate2: its `model.bin`, its vocabularies, and the program that runs it."""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..generation_vaswani import length_penalty_factor
from .foreign import ConversionError, Program

# Versions of the binary format that are read. From 4 on a variable names its type; before, only the width of an item.
_VERSIONS = range(1, 7)
_TYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)
_TYPES_BY_WIDTH = {4: torch.float32, 2: torch.int16, 1: torch.int8}
# What the oldest files call things, in the order in which the words are put right.
_OLD_NAMES = (
    ("transformer/", ""), (":0", ""), ("w_embs", "embeddings/weight"), ("kernel", "weight"),
    ("LayerNorm", "layer_norm"), ("dense", "projection"), ("conv1d_", "linear_"), ("conv1d/", "linear_0/"),
)  # fmt: skip


@dataclass
class ModelFile:
    """What a `model.bin` holds.

    Args:
        version (`int`): of the binary format. spec (`str`): kind of model. revision (`int`): of that kind's names.
        tensors (`dict`): by name, integers and their scales as stored; aliases share memory.
        aliases (`dict`): alias to name.
    """

    version: int
    spec: str
    revision: int
    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str] = field(default_factory=dict)


class _Bytes:
    """Takes values from the front of a file, and says where a cut-off file ends."""

    def __init__(self, path: Path):
        self.path, self.data, self.at = path, bytearray(path.read_bytes()), 0

    def take(self, size: int, what: str) -> memoryview:
        if self.at + size > len(self.data):
            raise ConversionError(
                f"{self.path} is cut off: {what} needs {size} bytes at position {self.at}, the file has "
                f"{len(self.data)} in all. Copy it again."
            )
        self.at += size
        return memoryview(self.data)[self.at - size : self.at]

    def number(self, code: str, what: str) -> int:
        return struct.unpack("<" + code, self.take(struct.calcsize(code), what))[0]

    def text(self, what: str) -> str:
        raw = bytes(self.take(self.number("H", what), what))
        try:
            return raw.rstrip(b"\0").decode("utf-8")
        except UnicodeDecodeError:
            raise ConversionError(f"{self.path} is damaged, or no CTranslate2 model: {what} is no text.") from None


def read_model_file(path: Path) -> ModelFile:
    """Read a `model.bin` of versions 1 to 6.

    Raises:
        ConversionError: not such a file, cut off, of a later version, or with bytes left over.
    """
    data = _Bytes(path)
    version = data.number("I", "the version")
    if version not in _VERSIONS:
        if version < 1000:
            raise ConversionError(f"{path} has the format version {version}; versions 1 to {_VERSIONS[-1]} are read.")
        raise ConversionError(f"{path} is not a model file of CTranslate2: it does not begin with a version number.")
    spec = data.text("the name of the model's kind") if version >= 2 else ""
    revision = data.number("I", "the revision") if version >= 2 else 1
    tensors: dict[str, torch.Tensor] = {}
    for number in range(data.number("I", "the number of variables")):
        name = data.text(f"the name of variable {number + 1}")
        shape = [data.number("I", name) for _ in range(data.number("B", name))]
        code, count = data.number("B", name), data.number("I", name)
        if version >= 4:
            kind = _TYPES[code] if code < len(_TYPES) else None
        else:
            kind = _TYPES_BY_WIDTH.get(code)
            count *= code
        if kind is None:
            raise ConversionError(f"{path}: variable {name!r} is of the unknown type {code}.")
        items = math.prod(shape)
        if count != items * kind.itemsize:
            raise ConversionError(f"{path} is damaged: variable {name!r} of shape {shape} has {count} bytes.")
        found = data.take(count, f"variable {name!r}")
        if not items and max(shape) > 2**31:
            raise ConversionError(f"{path} is damaged: variable {name!r} has the shape {shape}.")
        tensor = torch.frombuffer(found, dtype=kind) if items else torch.empty(0, dtype=kind)
        tensors[_new_name(name) if revision == 1 and version == 1 else name] = tensor.reshape(shape)
    aliases = {}
    if version >= 3:
        for _ in range(data.number("I", "the number of aliases")):
            alias, name = data.text("an alias"), data.text("the name behind an alias")
            if name not in tensors:
                raise ConversionError(f"{path}: {alias!r} should be the same as {name!r}, which it does not hold.")
            aliases[alias] = name
            tensors[alias] = tensors[name]
            if name + "_scale" in tensors:
                tensors[alias + "_scale"] = tensors[name + "_scale"]
    if data.at != len(data.data):
        raise ConversionError(f"{path} is damaged: {len(data.data) - data.at} bytes follow the last variable.")
    return ModelFile(version, spec, revision, tensors, aliases)


def _new_name(name: str) -> str:
    for old, new in _OLD_NAMES:
        name = name.replace(old, new)
    if name.startswith("encoder/"):
        return name.replace("/multi_head/", "/self_attention/")
    return name.replace("/masked_multi_head/", "/self_attention/").replace("/multi_head/", "/attention/")


# --------------------------------------------------------------------------- vocabularies and settings
def read_settings(folder: Path) -> dict[str, Any]:
    """`config.json` of the folder; empty where it is older than that file."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    found = _json(path)
    if not isinstance(found, dict):
        raise ConversionError(f"{path} is not a JSON object.")
    return found


def read_vocabularies(folder: Path) -> tuple[list[str], list[str], bool]:
    """Pieces of source and target in the order of their ids, and whether the two are one file.

    Raises:
        ConversionError: a file is missing, repeats a piece, or the model reads several sources at once.
    """
    shared = _vocabulary(folder, "shared_vocabulary")
    if shared is not None:
        return shared, shared, True
    found = [_vocabulary(folder, name) for name in ("source_vocabulary", "target_vocabulary")]
    if found[0] is None and _vocabulary(folder, "source_1_vocabulary") is not None:
        raise ConversionError(f"{folder}: source factors (source_1_vocabulary, ...), which this architecture lacks.")
    for pieces, name in zip(found, ("source", "target"), strict=True):
        if pieces is None:
            raise ConversionError(f"{folder} has neither shared_vocabulary nor {name}_vocabulary (.json or .txt).")
    return found[0] or [], found[1] or [], False


def _vocabulary(folder: Path, name: str) -> list[str] | None:
    path = folder / f"{name}.json"
    if path.is_file():
        pieces = _json(path)
        if not isinstance(pieces, list) or not all(isinstance(piece, str) for piece in pieces):
            raise ConversionError(f"{path} is not a JSON list of strings.")
    else:
        path = folder / f"{name}.txt"
        if not path.is_file():
            return None
        try:
            pieces = path.read_bytes().decode("utf-8-sig").split("\n")
        except UnicodeDecodeError as error:
            raise ConversionError(f"{path} is not UTF-8 ({error}).") from None
        if pieces and not pieces[-1]:
            pieces.pop()
    first: dict[str, int] = {}
    for number, piece in enumerate(pieces):
        if piece in first:
            raise ConversionError(
                f"{path}: the piece {piece!r} stands in places {first[piece] + 1} and {number + 1}; a piece has one id."
            )
        first[piece] = number
    return pieces


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{path} is not JSON ({error}).") from error


def with_unknown(pieces: list[str], unknown: str) -> list[str]:
    """As CTranslate2 does: a vocabulary without the piece for unknown ones gets it behind the last one."""
    return pieces if unknown in pieces else [*pieces, unknown]


# --------------------------------------------------------------------------- the program
class Found(NamedTuple):
    """One output of a search: new ids with the end token, and the sum of their log-probabilities over length^alpha."""

    ids: list[int]
    score: float


class Ct2Folder:
    """A folder, loaded by CTranslate2 on the CPU, that is asked in ids of the folder's vocabularies.

    Args:
        folder (`Path`): with `model.bin`.
        compute_type (`str`): CTranslate2's name; "default" keeps the stored precision as far as the machine has it.

    Raises:
        ImportError: CTranslate2 is not installed.
    """

    def __init__(self, folder: Path, compute_type: str = "default"):
        import ctranslate2

        settings = read_settings(folder)
        unknown = settings.get("unk_token", "<unk>")
        source, target, _ = read_vocabularies(folder)
        self.source, self.target = with_unknown(source, unknown), with_unknown(target, unknown)
        # What the program puts around a source by itself.
        self.first = settings.get("bos_token", "<s>") if settings.get("add_source_bos") else None
        self.last = settings.get("eos_token", "</s>") if settings.get("add_source_eos") else None
        self.ids = {piece: number for number, piece in enumerate(self.target)}
        threads = torch.get_num_threads()
        self.translator = ctranslate2.Translator(str(folder), "cpu", compute_type=compute_type, intra_threads=threads)
        self.compute_type = self.translator.compute_type
        self.name = f"CTranslate2 {ctranslate2.__version__}, {self.compute_type}"

    def _pieces(self, source: Sequence[int]) -> list[str]:
        """A source as the program takes it: without the bos or end token that it adds."""
        pieces = [self.source[one] for one in source]
        if self.first is not None and pieces[:1] == [self.first]:
            pieces = pieces[1:]
        if self.last is not None and pieces[-1:] == [self.last]:
            pieces = pieces[:-1]
        return pieces

    def search(
        self,
        sources: Sequence[Sequence[int]],
        num_beams: int,
        max_lengths: Sequence[int],
        length_penalty: float = 1.0,
        length_penalty_type: str = "power",
        patience: float = 1.0,
        min_length: int = 0,
        suppressed: Sequence[int] = (),
        batch_size: int = 32,
    ) -> list[Found]:
        """Translate lists of source ids, each up to its own number of new tokens, end token included.

        Args:
            length_penalty_type (`str`): "power" is CTranslate2's own rule; for "gnmt" it hands over the whole final
                beam with sums of log-probabilities, and the rule is applied here.
            patience (`float`): the beam ends when `num_beams` times this many outputs have ended. 1 is transformers'
                `early_stopping=True`; 2 finds what `early_stopping="never"` finds.
            min_length (`int`): new tokens before the end token.
            suppressed (`Sequence[int]`): target ids that are never written.

        Returns:
            for each source its best output.
        """
        is_gnmt = length_penalty_type == "gnmt" and num_beams > 1
        # One call has one limit, so sources of one limit go together.
        groups: dict[int, list[int]] = {}
        for index, limit in enumerate(max_lengths):
            groups.setdefault(limit, []).append(index)
        results: dict[int, Found] = {}
        for limit, members in groups.items():
            found = self.translator.translate_batch(
                [self._pieces(sources[index]) for index in members],
                max_batch_size=batch_size,
                beam_size=num_beams,
                num_hypotheses=num_beams if is_gnmt else 1,
                length_penalty=0.0 if is_gnmt else length_penalty,
                patience=patience,
                suppress_sequences=[[self.target[one]] for one in suppressed] or None,
                return_end_token=True,
                return_scores=True,
                max_input_length=0,
                max_decoding_length=limit,
                min_decoding_length=min_length,
            )
            for index, result in zip(members, found, strict=True):
                ended = [
                    Found([self.ids[piece] for piece in pieces], score)
                    for pieces, score in zip(result.hypotheses, result.scores, strict=True)
                ]
                if is_gnmt:
                    ended = [
                        Found(ids, score / length_penalty_factor(len(ids), length_penalty)) for ids, score in ended
                    ]
                results[index] = max(ended, key=lambda one: one.score)
        return [results[index] for index in range(len(sources))]

    def logits(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[Any]:
        """Logits [T, V] after each of a target's T tokens, of which the first is the start token."""
        import numpy as np

        found = self.translator.translate_batch(
            [self._pieces(source) for source in sources],
            target_prefix=[[self.target[one] for one in target[1:]] for target in targets],
            beam_size=1,
            return_logits_vocab=True,
            max_input_length=0,
            max_decoding_length=max(map(len, targets)),
            min_decoding_length=0,
        )
        return [
            np.stack([np.asarray(step, dtype=np.float32) for step in result.logits[0][: len(target)]])
            for result, target in zip(found, targets, strict=True)
        ]

    def program(self, limit: int = 60, **options: Any) -> Program:
        """This folder as a program to compare with; `options` are those of `search`."""

        def search(sources: list[list[int]], num_beams: int) -> list[list[int]]:
            return [best.ids for best in self.search(sources, num_beams, [limit] * len(sources), **options)]

        return Program(name=self.name, logits=self.logits, search=search)


def translate_ids(
    out: Path, sources: Sequence[Sequence[int]], num_beams: int, max_lengths: Sequence[int], **options: Any
) -> list[list[int]]:
    """New token ids, end token included, that an exported folder gives for each source; see `Ct2Folder.search`."""
    return [best.ids for best in Ct2Folder(out).search(sources, num_beams, max_lengths, **options)]
