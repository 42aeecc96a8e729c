"""The text side of a fairseq checkpoint: its dictionaries, the codes that split words, and the tokenizer they make.

A dictionary file has a line for each word, `word count`, from id 4 on; the ids before are fixed. fairseq applies
tokenisation and BPE outside the model, and mostly does not record them, so the files beside the checkpoint decide.
"""

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .foreign import ConversionError, ImportOptions

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
_OVERWRITE = "#fairseq:overwrite"
_CODES = ("bpecodes", "code", "codes", "bpe.codes", "bpe-codes", "*.codes", "code.*", "bpecodes.*")
_PIECE_MODELS = ("sentencepiece.bpe.model", "spm.model", "*spm*.model", "sentencepiece*.model")
_KNOWN_BPE = ("subword_nmt", "fastbpe", "sentencepiece")


@dataclass
class Dictionary:
    """Words in the order of their ids, the four fixed ones first; `notes` says what of the file reads otherwise."""

    path: Path
    pieces: list[str]
    notes: list[str] = field(default_factory=list)


def read_dictionary(path: Path) -> Dictionary:
    """Read a dict.LANGUAGE.txt.

    Args:
        path (`Path`): UTF-8, a word and its count a line; other line separators of Unicode are part of a word.

    Returns:
        `Dictionary`.

    Raises:
        ConversionError: with file and line, for a line without a count, a repeated word, or bytes that are not UTF-8.
    """
    try:
        # Python's own reading of lines, which is fairseq's: \n, \r\n and \r end one, U+2028 and the like do not.
        with open(path, encoding="utf-8") as file:
            lines = file.readlines()
    except UnicodeDecodeError as error:
        raise ConversionError(f"{path} is not UTF-8 text ({error}), so it is no fairseq dictionary.") from error
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error}.") from error
    found = Dictionary(path, list(SPECIAL))
    ids = {word: number for number, word in enumerate(SPECIAL)}
    first_line = dict.fromkeys(SPECIAL, "is one of the four that every dictionary begins with")
    for number, line in enumerate(lines, start=1):
        word, _, count = line.rstrip().rpartition(" ")
        overwrites = count == _OVERWRITE
        if overwrites:
            word, _, count = word.rpartition(" ")
        try:
            int(count)
        except ValueError:
            raise ConversionError(
                f"{path}, line {number}: {line.rstrip()!r} is not a word, a blank and a count, so this is no fairseq "
                "dictionary. Give the dict.LANGUAGE.txt that was made with the model's training data."
            ) from None
        if word in ids:
            if not overwrites:
                raise ConversionError(
                    f"{path}, line {number}: the word {word!r} occurs again; it {first_line[word]}. Every word has one "
                    f"id. If the later line is to count, as in old versions of fairseq, append ` {_OVERWRITE}` to it."
                )
            _overwrite(found, ids, word)
        else:
            ids[word] = len(found.pieces)
            found.pieces.append(word or f"<empty>:{len(found.pieces)}")  # no text is split into empty words
        first_line[word] = f"stands in line {number}"
    return found


def _overwrite(found: Dictionary, ids: dict[str, int], word: str) -> None:
    """Give a word its later id; one name cannot have two ids, so the row that text no longer reaches is renamed."""
    old, new = ids[word], len(found.pieces)
    if word in SPECIAL:
        found.pieces.append(f"{word}{_OVERWRITE}")
        found.notes.append(
            f"{found.path.name} gives {word!r} to id {new} too; that row is named {found.pieces[-1]!r} and text does "
            "not reach it."
        )
        return
    found.pieces[old] = f"{word}{_OVERWRITE}:{old}"
    found.pieces.append(word)
    ids[word] = new
    found.notes.append(
        f"{found.path.name} overwrites {word!r}: id {new} counts, and id {old} is {found.pieces[old]!r}."
    )


@dataclass
class TextSide:
    """What was found of the text side: dictionaries, and the files that split words; languages where known."""

    source: Dictionary
    target: Dictionary | None  # None: one dictionary for both
    codes: Path | None = None
    source_spm: Path | None = None
    target_spm: Path | None = None
    languages: tuple[str | None, str | None] = (None, None)
    choices: list[str] = field(default_factory=list)


def read_text_side(folder: Path, options: ImportOptions, settings: Mapping[str, Any]) -> TextSide:
    """Find and read the dictionaries and the codes.

    Args:
        folder (`Path`): where the checkpoint lies. options (`ImportOptions`): what the user named goes first.
        settings (`Mapping`): hyper-parameters of the checkpoint: `source_lang`, `target_lang`, `data`, `bpe`.

    Raises:
        ConversionError: a dictionary is not there, or it is not clear which; the choices are named.
    """
    languages = (
        options.source_language or settings.get("source_lang"),
        options.target_language or settings.get("target_lang"),
    )
    choices: list[str] = []
    source_path, target_path = options.source_vocab, options.target_vocab
    if source_path is None and target_path is None:
        folders = [folder, *(Path(one) for one in str(settings.get("data") or "").split(":") if one)]
        source_path, target_path = _find_dictionaries(folders, languages, choices)
    source_path = source_path or target_path
    assert source_path is not None
    source = read_dictionary(source_path)
    target = read_dictionary(target_path) if target_path not in (None, source_path) else None
    if target is not None and target.pieces == source.pieces:
        target = None
    side = TextSide(source, target, languages=languages, choices=choices + source.notes)
    side.choices += target.notes if target is not None else []
    _find_codes(side, folder, options, settings)
    return side


def _find_dictionaries(
    folders: Sequence[Path], languages: tuple[str | None, str | None], choices: list[str]
) -> tuple[Path, Path]:
    named = " and ".join(f"dict.{language or 'LANGUAGE'}.txt" for language in languages)
    for place in folders:
        present = sorted(place.glob("dict.*.txt")) if place.is_dir() else []
        if not present:
            continue
        if None in languages and len(present) > 1:
            raise ConversionError(
                f"{place} holds {', '.join(one.name for one in present)}, and the checkpoint does not say from which "
                "language it translates. Name them with --source-vocab and --target-vocab."
            )
        pair = [place / f"dict.{language}.txt" if language else present[0] for language in languages]
        missing = [one.name for one in pair if not one.is_file()]
        if missing:
            raise ConversionError(
                f"{place} has no {' and no '.join(missing)}; it has {', '.join(one.name for one in present)}. Name the "
                "dictionaries with --source-vocab and --target-vocab (one alone serves both sides)."
            )
        if place != folders[0]:
            choices.append(f"The dictionaries are those of {place}, which the checkpoint names as its data.")
        return pair[0], pair[1]
    raise ConversionError(
        f"{folders[0]} has no {named}, and without it nobody knows which word an id stands for. Copy the file from the "
        "model's training data there, or name it with --source-vocab and --target-vocab."
    )


def _find_codes(side: TextSide, folder: Path, options: ImportOptions, settings: Mapping[str, Any]) -> None:
    """Fill in how words were split; a dictionary that shows it while no file does is an error."""
    bpe = settings.get("bpe")
    if bpe and bpe not in _KNOWN_BPE:
        raise ConversionError(
            f"{folder}: `bpe` is {bpe!r}, a way to split words that cannot be carried over; known are "
            f"{', '.join(_KNOWN_BPE)}."
        )
    side.codes = options.codes
    side.source_spm = options.source_spm or options.target_spm
    side.target_spm = options.target_spm or options.source_spm
    if not (side.codes or side.source_spm):
        side.codes = _one_file(folder, _CODES, "--codes") if bpe != "sentencepiece" else None
        found = _one_file(folder, _PIECE_MODELS, "--source-spm") if not side.codes else None
        side.source_spm = side.target_spm = found
        if side.codes or found:
            side.choices.append(f"Words are split by {(side.codes or found).name}, found beside the checkpoint.")  # type: ignore[union-attr]
    elif side.codes and side.source_spm:
        raise ConversionError("Words are split either by BPE codes (--codes) or by SentencePiece, not by both.")
    for path in (side.codes, side.source_spm, side.target_spm):
        if path is not None and not path.is_file():
            raise ConversionError(f"{path} is not a file.")
    if side.codes or side.source_spm:
        return
    separator = settings.get("bpe_separator") or "@@"
    words = [word for one in (side.source, side.target) if one for word in one.pieces[len(SPECIAL) :]]
    for signs, what, option in (
        (
            [one.endswith(separator) and one != separator for one in words],
            f"end in {separator!r}",
            "codes with --codes",
        ),
        ([one.startswith("▁") for one in words], "begin with '▁'", "SentencePiece model with --source-spm"),
    ):
        if bpe or 20 * sum(signs) > len(words):
            raise ConversionError(
                f"{side.source.path.name}: {sum(signs)} of {len(words)} words {what}, so words were split before "
                f"training, but {folder} has no file that says how. Give the {option}."
            )
    side.choices.append("No BPE codes and no SentencePiece model were found: a word is what stands between blanks.")


def _one_file(folder: Path, patterns: Sequence[str], option: str) -> Path | None:
    for pattern in patterns:
        found = sorted(one for one in folder.glob(pattern) if one.is_file())
        if len(found) > 1 and len({one.read_bytes() for one in found}) > 1:
            raise ConversionError(
                f"{folder} holds {', '.join(one.name for one in found)}; say with {option} which one splits the words."
            )
        if found:
            return found[0]
    return None


def build(
    side: TextSide,
    options: ImportOptions,
    settings: Mapping[str, Any],
    choices: list[str],
    model_max_length: int | None = None,
) -> Any:
    """The tokenizer of a checkpoint.

    Args:
        side (`TextSide`): files. options (`ImportOptions`): `moses`, `lowercase`.
        settings (`Mapping`): hyper-parameters; `tokenizer` may ask for Moses.
        choices (`list[str]`): sentences for the report are appended.
        model_max_length (`int`, *optional*): pieces that a source may have, where there is a bound.

    Raises:
        ConversionError: Moses tokenisation without languages, or a way to tokenise that is not known.
    """
    from .vocabulary import build_tokenizer

    named = settings.get("tokenizer")
    if named not in (None, "", "space", "moses"):
        raise ConversionError(f"`tokenizer` is {named!r}, a way to tokenise that cannot be carried over.")
    moses: dict[str, Any] = {}
    if options.moses or named == "moses":
        source, target = side.languages
        if not source or not target:
            raise ConversionError(
                "Moses tokenisation depends on the languages, and the checkpoint does not say which: give "
                "--source-language and --target-language."
            )
        # fairseq's own call of Moses, unless the checkpoint, or the file of --config, says otherwise.
        keeps_hyphens, keeps_signs = (bool(settings.get(f"moses_no_{name}")) for name in ("dash_splits", "escape"))
        moses = {
            "moses": (source, target),
            "moses_aggressive_hyphens": not keeps_hyphens,
            "moses_escape": not keeps_signs,
        }
        choices.append(
            f"Moses tokenisation for {source} and detokenisation for {target}, with hyphens in words "
            f"{'kept' if keeps_hyphens else 'split off'} and signs {'kept' if keeps_signs else 'escaped'}."
        )
    elif not side.source_spm:
        choices.append("Text is expected as the model was trained on it, that is tokenised, unless --moses is given.")
    segmentation = "subword-nmt" if side.codes else "sentencepiece" if side.source_spm else "words"
    with tempfile.TemporaryDirectory() as scratch:
        return build_tokenizer(
            side.source.pieces,
            side.target.pieces if side.target is not None else None,
            segmentation=segmentation,
            codes=_subword_nmt_codes(side.codes, Path(scratch)) if side.codes else None,
            source_spm=side.source_spm,
            target_spm=side.target_spm,
            pad="<pad>",
            eos="</s>",
            unk="<unk>",
            bos="<s>",
            start="</s>",
            lowercase=options.lowercase,
            model_max_length=model_max_length,
            **moses,
            continuation=settings.get("bpe_separator") or "@@",
        )


def _subword_nmt_codes(path: Path, scratch: Path) -> Path:
    """fastBPE's codes have a third column, a count, and no head; the merges are those of subword-nmt's version 0.2."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConversionError(f"{path} is not UTF-8 text ({error}), so it holds no BPE codes.") from error
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines or not all(re.fullmatch(r"\S+ \S+ \d+", line.strip("\r ")) for line in lines):
        return path
    converted = scratch / "codes"
    text = "\n".join(["#version: 0.2", *(" ".join(line.strip("\r ").split(" ")[:2]) for line in lines), ""])
    converted.write_text(text, encoding="utf-8")
    return converted
