"""Vocabularies of Marian: YAML and JSON dictionaries, lists of words, SentencePiece models.

Marian writes a dictionary as YAML, but older tools wrote lines that are none (`&: 6`) or another thing than was meant
(`no: 7`, `12:30: 8`), so such a file is read line by line.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from .foreign import ConversionError, ImportOptions, check_vocabulary

PAD = "<pad>"
# Names of the two special words, and those that Nematus used at ids 0 and 1.
_END, _UNKNOWN = ("</s>", "eos"), ("<unk>", "UNK")
_LINE = re.compile(r"(?P<word>.*?)[ \t]*:[ \t]+(?P<id>[0-9]{1,15})[ \t]*")
_ESCAPES = {
    "0": "\0", "a": "\a", "b": "\b", "t": "\t", "\t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "e": "\x1b",
    " ": " ", '"': '"', "/": "/", "\\": "\\", "N": "\x85", "_": "\xa0", "L": "\u2028", "P": "\u2029",
}  # fmt: skip
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL)


def read_vocabulary(path: Path) -> list[str]:
    """Words of a dictionary in the order of their ids.

    Args:
        path (`Path`): .yml, .yaml or .json with a word and its id, or any other text with one word a line.

    Raises:
        ConversionError: no such file, not UTF-8, a line that is no entry, a word or an id that comes twice, or an id
            without a word; the file and the line are named.
    """
    if path.suffix == ".fsv":
        raise ConversionError(f"{path} is a factored vocabulary (.fsv), which this architecture does not have.")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConversionError(f"The vocabulary {path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ConversionError(f"{path}, line {line}: not UTF-8. Is this a vocabulary?") from error
    if not text.strip():
        raise ConversionError(f"The vocabulary {path} is empty.")
    if path.suffix in (".yml", ".yaml", ".json"):
        entries = _json_entries(path, text) or _yaml_entries(path, text)
    else:
        entries = [(word, number, number + 1) for number, word in enumerate(_lines(text))]
    return _in_order(path, entries)


def special_words(words: list[str], path: Path) -> tuple[str, str]:
    """The end and the unknown word of a dictionary, by Marian's own rule.

    Raises:
        ConversionError: there is none.
    """
    found = []
    for number, (name, old_name) in enumerate((_END, _UNKNOWN)):
        if len(words) > number and words[number] == old_name:
            found.append(old_name)
        elif name in words:
            found.append(name)
        else:
            raise ConversionError(f"The vocabulary {path} has no entry {name!r}, which Marian asks for.")
    return found[0], found[1]


def _lines(text: str) -> list[str]:
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def _json_entries(path: Path, text: str) -> list[tuple[str, int, int]]:
    """Entries of a JSON object, without line numbers; none where the text is no JSON object."""
    if not text.lstrip().startswith("{") or _LINE.fullmatch(_lines(text)[0]):
        return []
    try:
        pairs = json.loads(text, object_pairs_hook=list)
    except json.JSONDecodeError as error:
        raise ConversionError(f"{path}, line {error.lineno}: {error.msg}; it begins like JSON.") from error
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{path} begins like JSON, but cannot be read: {error}.") from error
    if not pairs or not all(type(number) is int and number >= 0 for _, number in pairs):
        raise ConversionError(f"{path} must hold words and their ids, whole numbers from 0, and nothing else.")
    return [(word, number, 0) for word, number in pairs]


def _yaml_entries(path: Path, text: str) -> list[tuple[str, int, int]]:
    entries: list[tuple[str, int, int]] = []
    long_word: str | None = None
    for number, line in enumerate(_lines(text), 1):
        if long_word is not None:  # a word of over 1,024 letters stands on a line of its own
            line, long_word = long_word + line, None
        elif line.startswith("? "):
            long_word = line[2:]
            continue
        entry = _LINE.fullmatch(line)
        if entry is None or not entry["word"]:
            if not line.strip() or line.startswith("#") or line in ("---", "..."):
                continue
            raise ConversionError(f"{path}, line {number}: {line[:60]!r} is not a word and its id, as in `word: 5`.")
        entries.append((_unquoted(path, number, entry["word"]), int(entry["id"]), number))
    return entries


def _unquoted(path: Path, line: int, word: str) -> str:
    """A word as it was before YAML's quoting; one that is not quoted is taken as it stands."""
    quote = word[0]
    if quote not in "'\"" or len(word) < 2 or word[-1] != quote:
        return word
    inner = word[1:-1]
    if quote == "'":
        return inner.replace("''", "'")

    def plain(match: re.Match) -> str:
        code = match[1]
        if len(code) > 1:
            number = int(code[1:], 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise ConversionError(f"{path}, line {line}: \\{code} is no character, in {word[:60]}.")
            return chr(number)
        if code not in _ESCAPES:
            raise ConversionError(f"{path}, line {line}: \\{code} is no escape of YAML, in {word[:60]}.")
        return _ESCAPES[code]

    return _ESCAPE.sub(plain, inner)


def _in_order(path: Path, entries: list[tuple[str, int, int]]) -> list[str]:
    by_id: dict[int, tuple[str, int]] = {}
    by_word: dict[str, int] = {}
    for word, number, line in entries:
        where = f"{path}, line {line}" if line else f"{path}"
        if word in by_word:
            earlier = f" (first on line {by_word[word]})" if line else ""
            raise ConversionError(f"{where}: the word {word!r} comes twice{earlier}. Which id is right is not known.")
        if number in by_id:
            raise ConversionError(f"{where}: {word!r} and {by_id[number][0]!r} have the same id {number}.")
        by_word[word], by_id[number] = line, (word, line)
    missing = next((n for n in range(len(by_id)) if n not in by_id), None)
    if missing is not None:
        raise ConversionError(f"{path} has {len(by_id)} words, but none with id {missing}: ids must have no gaps.")
    return [by_id[number][0] for number in range(len(by_id))]


# ---------------------------------------------------------------------- SentencePiece
def sentencepiece_processor(path: Path) -> Any:
    """A SentencePiece model, opened.

    Raises:
        ConversionError: the file is none, or the library is not there.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise ConversionError(f"{path} is read by a library that is not here: pip install sentencepiece") from error
    if not path.is_file():
        raise ConversionError(f"{path} does not exist.")
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise ConversionError(f"{path} is not a SentencePiece model, or is damaged.") from error


def sentencepiece_words(path: Path) -> list[str]:
    """The pieces of a SentencePiece model in the order of their ids."""
    model = sentencepiece_processor(path)
    return [model.id_to_piece(number) for number in range(model.get_piece_size())]


def marian_tokenizer(
    source: list[str], target: list[str] | None, spm: tuple[Path, Path], pad: int, special: tuple[str, str]
) -> Any:
    """transformers' tokenizer of Marian models, from vocabularies that lack a padding piece.

    Args:
        source, target (`list[str]`): pieces by id; `target` None: one vocabulary for both sides.
        spm (`tuple[Path, Path]`): SentencePiece models of source and target. pad (`int`): the id of `PAD` on both.
        special (`tuple[str, str]`): the end and the unknown piece.

    Raises:
        ConversionError: the library is not there, or a piece is spelled like the padding piece.
    """
    sentencepiece_processor(spm[0])  # says what is missing, in words of ours
    from transformers import MarianTokenizer

    with tempfile.TemporaryDirectory() as folder:
        names = []
        for side, pieces in (("source", source), ("target", target or source)):
            if PAD in pieces:
                raise ConversionError(f"The {side} vocabulary has a piece {PAD!r} of its own, at {pieces.index(PAD)}.")
            names.append(Path(folder) / f"{side}.json")
            entries = {piece: number for number, piece in enumerate(pieces)} | {PAD: pad}
            names[-1].write_text(json.dumps(entries, ensure_ascii=False), encoding="utf-8")
        tokenizer = MarianTokenizer(
            source_spm=str(spm[0]),
            target_spm=str(spm[1]),
            vocab=str(names[0]),
            target_vocab_file=str(names[1]) if target is not None else None,
            separate_vocabs=target is not None,
            eos_token=special[0],
            unk_token=special[1],
            pad_token=PAD,
        )
    tokenizer.init_kwargs.pop("target_vocab_file", None)  # a file that is gone
    return tokenizer


def rows_without_piece(pieces: int, rows: int, where: str) -> list[int]:
    """As `check_vocabulary`, for a dictionary that Marian may have used only the first words of."""
    try:
        return check_vocabulary(pieces, rows, where)
    except ConversionError as error:
        raise ConversionError(
            f"{error} If the model was trained with `dim-vocabs` {rows}, so that Marian itself ignored the rest, take "
            f"the entries from id {rows} on out of a copy of the file."
        ) from error


# ---------------------------------------------------------------------- both sides of a model
class MarianVocabulary:
    """Pieces of both sides and how text is cut into them."""

    def __init__(self, path: Path, options: ImportOptions, settings: dict[str, Any], rows: tuple[int, int]):
        given = [options.source_vocab, options.target_vocab or options.source_vocab]
        named = settings.get("vocabs") or []
        if given[0] is None and options.target_vocab is None and not named and options.source_spm is not None:
            given = [options.source_spm, options.target_spm or options.source_spm]
        if given[0] is None and given[1] is not None:
            raise ConversionError("`target_vocab` alone does not say what the source is: give `source_vocab` too.")
        files: list[Path] = []
        for side, (file, size) in enumerate(zip(given, rows, strict=True)):
            if file is None:
                if len(named) != 2:
                    raise ConversionError(
                        f"No vocabularies are known for {path}: {settings['file'] or 'no .decoder.yml'} names "
                        f"{len(named)} instead of 2. Give them by `source_vocab` and `target_vocab`."
                    )
                file = _beside(str(named[side]), settings, "source_vocab" if side == 0 else "target_vocab")
            files.append(file)
            if not file.is_file():
                raise ConversionError(f"The vocabulary {file} does not exist.")
            del size
        is_spm = [file.suffix in (".spm", ".model") for file in files]
        if is_spm[0] != is_spm[1]:
            raise ConversionError(
                f"{files[0]} and {files[1]} are of two kinds; both must be dictionaries or both .spm."
            )
        self.is_spm, self.files = is_spm[0], files
        read = sentencepiece_words if self.is_spm else read_vocabulary
        self.source = read(files[0])
        self.target = self.source if files[0] == files[1] else read(files[1])
        self.unused = rows_without_piece(len(self.target), rows[1], f"{path} and the target vocabulary {files[1]}")
        rows_without_piece(len(self.source), rows[0], f"{path} and the source vocabulary {files[0]}")
        self.special, self.end_id, self.unknown_id = self._special()
        self.spm = self._segmenters(options, path)

    def _special(self) -> tuple[tuple[str, str], int, int]:
        if self.is_spm:
            models = [sentencepiece_processor(file) for file in self.files]
            ids = [(model.eos_id(), model.unk_id()) for model in models]
            if ids[0] != ids[1] or min(ids[0]) < 0:
                raise ConversionError(
                    f"{self.files[0]} and {self.files[1]} have the end and the unknown piece at {ids[0]} and {ids[1]}; "
                    "Marian's own are at (0, 1) on both sides."
                )
            end, unknown = ids[1]
            return (self.target[end], self.target[unknown]), end, unknown
        special = special_words(self.target, self.files[1])
        if special_words(self.source, self.files[0]) != special or any(
            self.source.index(word) != self.target.index(word) for word in special
        ):
            raise ConversionError(f"{self.files[0]} and {self.files[1]} have {' and '.join(special)} at unlike ids.")
        return special, self.target.index(special[0]), self.target.index(special[1])

    def _segmenters(self, options: ImportOptions, path: Path) -> tuple[Path, Path] | None:
        """SentencePiece models: the vocabularies themselves, those named, or those that OPUS-MT puts beside a model."""
        if self.is_spm:
            return self.files[0], self.files[1]
        if options.source_spm is not None or options.target_spm is not None:
            source = options.source_spm or options.target_spm
            assert source is not None
            return source, options.target_spm or source
        beside = path.with_name("source.spm"), path.with_name("target.spm")
        return beside if options.codes is None and all(one.is_file() for one in beside) else None

    def tokenizer(self, pad: int, options: ImportOptions) -> Any:
        """A tokenizer that has `PAD` at `pad`."""
        target = None if self.target == self.source and (self.spm is None or not self.is_spm) else self.target
        if self.is_spm and self.files[0] == self.files[1]:
            target = None
        if self.spm is not None:
            if options.moses or options.lowercase or options.codes is not None:
                raise ConversionError("`moses`, `lowercase` and `codes` have no place beside SentencePiece models.")
            return marian_tokenizer(self.source, target, self.spm, pad, self.special)
        from .vocabulary import build_tokenizer

        def filled(words: list[str]) -> list[str]:
            return [*words, *(f"<unused {n}>" for n in range(len(words), pad)), PAD]

        return build_tokenizer(
            filled(self.source),
            None if target is None else filled(target),
            segmentation="words" if options.codes is None else "subword-nmt",
            codes=options.codes,
            pad=PAD,
            eos=self.special[0],
            unk=self.special[1],
            start=PAD,
            source_suffix=(self.special[0],),
            target_suffix=(self.special[0],),
            moses=options.moses_languages(),
            lowercase=options.lowercase,
        )


def _beside(name: str, settings: dict[str, Any], option: str) -> Path:
    """A file that the settings name: where they say, or, as models are moved, beside them."""
    named = Path(name)
    folder: Path = settings["folder"]
    for candidate in (named if named.is_absolute() else folder / named, folder / named.name):
        if candidate.is_file():
            return candidate
    raise ConversionError(f"{settings['file']} names the vocabulary {name}, which is not there; give `{option}`.")
