"""SentencePiece models, unigram and BPE: read, applied and undone as the library does, but without it."""

import heapq
import re
import struct
import sys
from array import array
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from typing import Any

_SPACE = "\u2581"  # a blank in pieces
# Kinds of pieces in the file.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


class SentencePiece:
    """Raw text cut by a SentencePiece model, unigram or BPE, read without its library.

    Args:
        model (`bytes`): content of a .model or .spm file.
        known (`Collection[str]`, *optional*): pieces that may be used, as the library does when it is given a
            vocabulary; None: all.

    Raises:
        ValueError: no such file, a damaged one, or one of a kind that is not known here.
    """

    def __init__(self, model: bytes, known: Collection[str] | None = None):
        entries, trainer, normalizer = _read(model)
        self._is_bpe, self._has_bytes = trainer.get(3, 1) == 2, bool(trainer.get(35, 0))
        self._is_suffix = bool(trainer.get(24, 0))
        self._unknown_surface = trainer.get(44, " \u2047 ".encode()).decode()
        self._adds_blank, self._drops_blanks = bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1))
        self._space = _SPACE if normalizer.get(5, 1) else " "
        self._rules = _Rules(normalizer.get(2, b""))

        self._controls = {name for name, _, kind in entries if kind == _CONTROL}
        self._unknown = next((name for name, _, kind in entries if kind == _UNKNOWN), "<unk>")
        self._bytes = {name: int(name[3:5], 16) for name, _, kind in entries if kind == _BYTE}
        self._scores = {name: score for name, score, kind in entries if kind in (_NORMAL, _USER_DEFINED, _UNUSED)}
        self._unused = {name for name, _, kind in entries if kind == _UNUSED}
        if known is not None:  # which also brings back pieces that the file leaves unused
            changeable = (name for name, _, kind in entries if kind in (_NORMAL, _UNUSED))
            self._unused = {name for name in changeable if len(name) > 1 and name not in known}
        fixed = sorted((name for name, _, kind in entries if kind == _USER_DEFINED), key=len, reverse=True)
        self._fixed = re.compile("|".join(map(re.escape, fixed))) if fixed else None
        if not self._is_bpe:
            normal = [score for _, score, kind in entries if kind == _NORMAL]
            self._unknown_score = _float32(min(normal, default=0.0) - 10.0)
            # The library looks for the highest score from 0 up, which logarithms never reach.
            self._scores |= {name: len(name.encode()) * max(0.0, *normal, 0.0) - 0.1 for name in fixed}
            # All beginnings of pieces, so that the search for the longest one stops early.
            self._beginnings = {name[:i] for name in self._scores for i in range(1, len(name) + 1)}

    def split(self, text: str) -> list[str]:
        normalized = self.normalize(text)
        pieces: list[str] = []
        is_unknown_before = False
        for piece in (self._bpe if self._is_bpe else self._unigram)(normalized) if normalized else ():
            is_unknown = piece not in self._scores
            if is_unknown and self._has_bytes:
                pieces += [f"<0x{byte:02X}>" for byte in piece.encode()]
            elif is_unknown and is_unknown_before:  # neighbours are one unknown piece
                pieces[-1] += piece
            else:
                pieces.append(piece)
            is_unknown_before = is_unknown
        return pieces

    def join(self, pieces: Iterable[str]) -> str:
        text, held, is_start, is_blank_taken = "", bytearray(), True, False
        for piece in [*pieces, None]:
            if piece is not None and piece in self._bytes:
                held.append(self._bytes[piece])
                continue
            text += _decoded(bytes(held))
            held.clear()
            if piece is None or piece in self._controls:
                continue
            is_start = is_start and not is_blank_taken and not text
            if piece == self._unknown:
                text += self._unknown_surface
                continue
            if is_start and (self._adds_blank or self._drops_blanks) and not self._is_suffix:
                is_blank_taken = piece.startswith(_SPACE) and not self._drops_blanks
                piece = piece.removeprefix(_SPACE)
            text += piece.replace(_SPACE, " ")
        return text

    def normalize(self, text: str) -> str:
        """What the pieces of a text are cut from."""
        steps = list(self._steps(text))
        start = 0
        while self._drops_blanks and start < len(steps) and steps[start] == " ":
            start += 1
        if start == len(steps):
            return ""
        parts = [self._space] if self._adds_blank and not self._is_suffix else []
        is_after_blank = self._drops_blanks
        for step in steps[start:]:
            step = step.lstrip(" ") if is_after_blank else step
            if step:
                parts.append(step.replace(" ", self._space))
                is_after_blank = self._drops_blanks and step.endswith(" ")
        normalized = "".join(parts)
        if self._drops_blanks:
            normalized = normalized.rstrip(self._space)
        return normalized + self._space if self._adds_blank and self._is_suffix else normalized

    def _steps(self, text: str) -> Iterator[str]:
        """The text in parts, each by the longest rule for it; user-defined symbols stay."""
        place = 0
        for match in self._fixed.finditer(text) if self._fixed else ():
            yield from self._rules.apply(text[place : match.start()])
            yield match[0]
            place = match.end()
        yield from self._rules.apply(text[place:])

    def _unigram(self, text: str) -> list[str]:
        """The best path. Sums are rounded to float32 where the library stores them, as ties fall by that."""
        best = array("f", bytes(4 * (len(text) + 1)))
        starts = [-1] * (len(text) + 1)
        scores, beginnings, unused = self._scores, self._beginnings, self._unused
        for start in range(len(text)):
            here, has_single = best[start], False
            for end in range(start + 1, len(text) + 1):
                piece = text[start:end]
                if piece not in beginnings:
                    break
                if piece in scores and piece not in unused:
                    if starts[end] < 0 or scores[piece] + here > best[end]:
                        best[end], starts[end] = scores[piece] + here, start
                    has_single = has_single or end == start + 1
            if not has_single:
                score = _float32(self._unknown_score + here)
                if starts[start + 1] < 0 or score > best[start + 1]:
                    best[start + 1], starts[start + 1] = score, start
        pieces, end = [], len(text)
        while end:
            pieces.append(text[starts[end] : end])
            end = starts[end]
        return pieces[::-1]

    def _bpe(self, text: str) -> list[str]:
        """Neighbours merged while their union is a piece, that of the highest score first, then the leftmost."""
        pattern = re.compile((self._fixed.pattern + "|" if self._fixed else "") + ".", re.DOTALL)
        symbols = [match[0] for match in pattern.finditer(text)]
        is_fixed = [self._fixed is not None and bool(self._fixed.fullmatch(symbol)) for symbol in symbols]
        following, previous = [*range(1, len(symbols)), -1], [*range(-1, len(symbols) - 1)]
        parents: dict[str, tuple[str, str]] = {}
        agenda: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left < 0 or right < 0 or is_fixed[left] or is_fixed[right]:
                return
            union = symbols[left] + symbols[right]
            if union in self._scores:
                heapq.heappush(agenda, (-self._scores[union], left, right, union))
                if union in self._unused:
                    parents[union] = (symbols[left], symbols[right])

        for i in range(1, len(symbols)):
            offer(i - 1, i)
        while agenda:
            _, left, right, union = heapq.heappop(agenda)
            if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != union:
                continue  # one of them was merged otherwise
            symbols[left], symbols[right] = union, ""
            following[left] = following[right]
            if following[right] >= 0:
                previous[following[right]] = left
            offer(previous[left], left)
            offer(left, following[left])

        def cut_back(symbol: str) -> Iterator[str]:
            if symbol in self._unused and symbol in parents:
                for part in parents[symbol]:
                    yield from cut_back(part)
            else:
                yield symbol

        return [piece for symbol in symbols if symbol for piece in cut_back(symbol)]


class _Rules:
    """SentencePiece's rules for characters, a trie of bytes in the arrays of its file.

    Args:
        blob (`bytes`): size of the trie, the trie, then the replacements, each closed by a zero byte.
    """

    def __init__(self, blob: bytes):
        size = int.from_bytes(blob[:4], "little")
        if blob and (size % 4 or 4 + size >= len(blob)):
            raise ValueError("a SentencePiece model with a damaged table of character rules.")
        self._units = array("I", blob[4 : 4 + size])
        if sys.byteorder == "big":
            self._units.byteswap()
        self._texts = blob[4 + size :]
        self._first = lru_cache(None)(lambda letter: self._walk(self._offset(0) if self._units else 0, letter))

    def apply(self, text: str) -> Iterator[str]:
        """The text, part by part, each replaced by the longest rule that fits."""
        if not self._units:
            yield from text
            return
        i = 0
        while i < len(text):
            place, value = self._first(text[i])
            found, end = value, i + 1
            following = end
            while place is not None and following < len(text):
                place, value = self._walk(place, text[following])
                following += 1
                if value is not None:
                    found, end = value, following
            yield text[i:end] if found is None else self._texts[found : self._texts.index(b"\0", found)].decode()
            i = end

    def _walk(self, place: int, letter: str) -> tuple[int | None, int | None]:
        """Where the trie goes from a place by the bytes of a letter, and the value there; None each if nowhere."""
        value = None
        for byte in letter.encode():
            place ^= byte
            if place >= len(self._units) or (self._units[place] & 0x800000FF) != byte:
                return None, None
            unit = self._units[place]
            place ^= self._offset(place)
            value = self._units[place] & 0x7FFFFFFF if unit >> 8 & 1 else None
        return place, value

    def _offset(self, place: int) -> int:
        unit = self._units[place]
        return unit >> 10 << ((unit & 0x200) >> 6)


# ---------------------------------------------------------------------- helpers
def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protocol buffer message."""
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(message):
        tag = number()
        if tag & 7 == 0:
            yield tag >> 3, number()
            continue
        size = number() if tag & 7 == 2 else {1: 8, 5: 4}[tag & 7]
        if place + size > len(message):
            raise IndexError("the file ends within a field")
        value: Any = message[place : place + size]
        place += size
        yield tag >> 3, struct.unpack("<f", value)[0] if tag & 7 == 5 else value


def _read(model: bytes) -> tuple[list[tuple[str, float, int]], dict[int, Any], dict[int, Any]]:
    """Name, score and kind of each piece, the fields on training, and those on normalization."""
    try:
        fields = list(_fields(model))
        pieces = [dict(_fields(value)) for number, value in fields if number == 1]
        entries = [(one[1].decode(), float(one.get(2, 0.0)), int(one.get(3, _NORMAL))) for one in pieces]
        specs = {number: dict(_fields(value)) for number, value in fields if number in (2, 3, 5)}
        trainer, normalizer = specs[2], specs[3]
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise ValueError(f"no SentencePiece model, or a damaged one ({type(error).__name__}: {error}).") from None
    if trainer.get(3, 1) not in (1, 2):
        kind = {3: "word", 4: "char"}.get(trainer[3], trainer[3])
        raise ValueError(f"a SentencePiece model of the type {kind!r}; unigram and bpe are known.")
    if specs.get(5, {}).get(2):
        raise ValueError("a SentencePiece model with rules for the way back (denormalizer), which are not known here.")
    return entries, trainer, normalizer


def _float32(number: float) -> float:
    return struct.unpack("<f", struct.pack("<f", number))[0]


def _decoded(content: bytes) -> str:
    """Text of byte pieces, each byte that is no part of a character as U+FFFD."""
    text = ""
    while content:
        try:
            return text + content.decode()
        except UnicodeDecodeError as error:
            text += content[: error.start].decode() + "\ufffd"
            content = content[error.start + 1 :]
    return text
