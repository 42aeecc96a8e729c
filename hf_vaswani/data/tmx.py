"""A small reader of translation memories (TMX 1.4): the text of two languages, unit by unit."""

from collections import Counter
from collections.abc import Iterator
from typing import Any
from xml.parsers import expat

from .corpus import CorpusError, NumberedPair, TextPath, clean_line, open_text

# Elements inside a segment that hold formatting codes of another program, not text.
_CODES = frozenset({"bpt", "ept", "it", "ph", "ut"})
_CHUNK = 2**16


def tmx_pairs(
    path: TextPath, source_language: str, target_language: str, removed: Counter[str] | None = None
) -> Iterator[NumberedPair]:
    """Yield the pairs of a translation memory, each after the line where its unit begins.

    Text inside `hi` and inside elements that TMX does not know is kept; codes are not text and are left out. A unit
    without a segment in one of the languages gives an empty text on that side.

    Args:
        path: plain, ".gz" or ".zst". source_language, target_language (`str`): codes; "en" also takes "en-GB".
        removed (`Counter`, *optional*): counts "inline codes", "unknown elements" and what `clean_line` removes.

    Yields:
        `tuple[int, str, str]`: line, source, target.

    Raises:
        CorpusError: broken XML (with its line), entities of the file's own, or no unit in both languages.
    """
    reader = _Reader(str(path), removed if removed is not None else Counter())
    found: Counter[str] = Counter()
    pair_count = 0
    with open_text(path) as stream:
        is_last = False
        while not is_last:
            chunk = stream.read(_CHUNK)
            is_last = not chunk
            reader.feed(chunk, is_last)
            for number, texts in reader.take():
                found.update(texts.keys())
                src, tgt = (_in_language(texts, language) for language in (source_language, target_language))
                pair_count += bool(src and tgt)
                yield number, src, tgt
    if not pair_count:
        languages = ", ".join(sorted(found)) or "none"
        raise CorpusError(
            f"{path}: no unit holds both {source_language!r} and {target_language!r}; languages found: {languages}."
        )


def _in_language(texts: dict[str, str], language: str) -> str:
    """The text whose code is the language, or the language with a region; empty where there is none."""
    wanted = language.lower().replace("_", "-")
    near = (text for code, text in texts.items() if code.startswith(wanted + "-"))
    return texts.get(wanted) or next(near, "")


class _Reader:
    """Collects (line, texts by language) of the units that are complete."""

    def __init__(self, name: str, removed: Counter[str]):
        self.name, self.removed = name, removed
        self._units: list[tuple[int, dict[str, str]]] = []
        self._texts: dict[str, str] = {}
        self._line, self._language = 0, ""
        self._letters: list[str] | None = None  # of the segment being read
        self._code_depth = 0
        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._text
        self._parser.EntityDeclHandler = self._refuse_entity
        self._parser.SkippedEntityHandler = self._refuse_unknown_entity

    def feed(self, chunk: bytes, is_last: bool) -> None:
        try:
            self._parser.Parse(chunk, is_last)
        except expat.ExpatError as error:
            raise CorpusError(
                f"{self.name}, line {error.lineno}: broken XML ({expat.ErrorString(error.code)}). Repair the unit "
                "there, or export the memory again."
            ) from error

    def take(self) -> list[tuple[int, dict[str, str]]]:
        units, self._units = self._units, []
        return units

    # ------------------------------------------------------------------ what the parser calls
    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        if self._letters is not None:
            if tag in _CODES or self._code_depth:
                self.removed["inline codes"] += not self._code_depth
                self._code_depth += 1
            elif tag != "hi":
                self.removed["unknown elements"] += 1
        elif tag == "tu":
            self._line, self._texts = self._parser.CurrentLineNumber, {}
        elif tag == "tuv":
            code = attributes.get("xml:lang") or attributes.get("lang") or ""
            self._language = code.lower().replace("_", "-")
        elif tag == "seg":
            self._letters = []

    def _end(self, tag: str) -> None:
        if self._code_depth:
            self._code_depth -= 1
        elif tag == "seg" and self._letters is not None:
            text = clean_line("".join(self._letters), self.removed).strip(" \t")
            # The first segment of a language counts; a second one is another variant of the same unit.
            self._texts.setdefault(self._language, text)
            self._letters = None
        elif tag == "tu":
            self._units.append((self._line, self._texts))

    def _text(self, data: str) -> None:
        if self._letters is not None and not self._code_depth:
            self._letters.append(data)

    def _refuse_entity(self, name: str, *_: Any) -> None:
        # A few lines of nested entities can stand for gigabytes, and one can stand for any file of this machine.
        line = self._parser.CurrentLineNumber
        raise CorpusError(f"{self.name}, line {line}: the file defines an entity ({name!r}). Write its text instead.")

    def _refuse_unknown_entity(self, name: str, *_: Any) -> None:
        line = self._parser.CurrentLineNumber
        raise CorpusError(f"{self.name}, line {line}: unknown entity &{name};. Write the character itself.")
