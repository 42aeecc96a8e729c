"""How other toolkits cut text into pieces and put it together again, each exactly as its own program does."""

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from itertools import pairwise

_CACHED_WORDS = 2**16


class Words:
    """Text that blanks cut into pieces."""

    def split(self, text: str) -> list[str]:
        return text.split()

    def join(self, pieces: Iterable[str]) -> str:
        return " ".join(pieces)


class Characters:
    """Each character is a piece.

    Args:
        space (`str`, *optional*): how a blank is spelled; None: as itself.
    """

    def __init__(self, space: str | None = None):
        self.space = space

    def split(self, text: str) -> list[str]:
        return list(text) if self.space is None else [self.space if letter == " " else letter for letter in text]

    def join(self, pieces: Iterable[str]) -> str:
        text = "".join(pieces)
        return text if self.space is None else text.replace(self.space, " ")


class SubwordNMT:
    """Words cut by the merges of subword-nmt.

    Args:
        codes (`str`): the codes file, of format 0.1 or 0.2.
        continuation (`str`): what a piece ends in that does not end its word.
        known (`Collection[str]`, *optional*): pieces to which a word is cut further where it can be, as the program
            does when it is given a vocabulary; None: cut by merges alone.

    Raises:
        ValueError: a line of the codes that is no merge, or another format.
    """

    def __init__(self, codes: str, continuation: str = "@@", known: Collection[str] | None = None):
        self.continuation, self.known = continuation, known
        lines = codes.rstrip("\n").split("\n")
        version = "0.1"
        if lines[0].startswith("#version:"):
            version = re.sub(r"(\.0+)*$", "", lines[0].split()[-1])
            if version not in ("0.1", "0.2"):
                raise ValueError(f"line 1: codes of format {version}; 0.1 and 0.2 are known.")
        # Format 0.1 has the end of a word as a symbol of its own, 0.2 on the last letter.
        self._end = ["</w>"] if version == "0.1" else []
        self._ranks: dict[tuple[str, str], int] = {}
        for number, line in enumerate(lines, 1):
            if number == 1 and line.startswith("#version:"):
                continue
            pair = line.strip("\r\n ").split(" ")
            if len(pair) != 2 or not all(pair):
                raise ValueError(f"line {number}: {line!r} is no merge, which is two pieces with a blank between them.")
            self._ranks.setdefault((pair[0], pair[1]), number)
        self._parents = {left + right: (left, right) for left, right in reversed(self._ranks)}
        self._cut = lru_cache(_CACHED_WORDS)(self._cut_word)

    def split(self, text: str) -> list[str]:
        pieces = [piece for word in text.strip("\r\n ").split(" ") if word for piece in self._cut(word)]
        # Only U+0020 ends a word here, but every blank parts the pieces of what the program writes.
        return " ".join(pieces).split()

    def join(self, pieces: Iterable[str]) -> str:
        return (" ".join(pieces) + " ").replace(self.continuation + " ", "").rstrip(" ")

    def _cut_word(self, word: str) -> tuple[str, ...]:
        symbols = [*word, *self._end] if self._end else [*word[:-1], word[-1] + "</w>"]
        while len(word) > 1 and len(symbols) > 1:
            found = [pair for pair in pairwise(symbols) if pair in self._ranks]
            if not found:
                break
            symbols = _merge(symbols, min(found, key=self._ranks.__getitem__))
        last = symbols.pop().removesuffix("</w>")
        symbols += [last] if last else []
        if self.known is not None and len(word) > 1:
            ends = [False] * (len(symbols) - 1) + [True]
            symbols = [part for one, is_end in zip(symbols, ends, strict=True) for part in self._cut_back(one, is_end)]
        return (*(symbol + self.continuation for symbol in symbols[:-1]), symbols[-1])

    def _cut_back(self, symbol: str, is_end: bool) -> Iterator[str]:
        """Undo merges until all parts are known or single letters."""
        parents = self._parents.get(symbol + "</w>" if is_end else symbol)
        if parents is None or (symbol if is_end else symbol + self.continuation) in (self.known or ()):
            yield symbol
            return
        left, right = parents
        yield from self._cut_back(left, False)
        yield from self._cut_back(right[:-4] if is_end else right, is_end)


def _merge(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    """All places of one pair, from left to right."""
    merged, i = [], 0
    while i < len(symbols):
        if i + 1 < len(symbols) and (symbols[i], symbols[i + 1]) == pair:
            merged.append(pair[0] + pair[1])
            i += 2
        else:
            merged.append(symbols[i])
            i += 1
    return merged


class Subtokens:
    r"""The invertible subtokens of Tensor2Tensor: runs of letters and digits and runs of all else, cut greedily.

    Args:
        pieces (`Collection[str]`): the vocabulary without control pieces.
        alphabet (`Collection[str]`): characters that stand for themselves; others are spelled as `\ord;`.
    """

    _ESCAPED = re.compile(r"\\u|\\\\|\\([0-9]+);")

    def __init__(self, pieces: Collection[str], alphabet: Collection[str]):
        self._pieces = frozenset(pieces)
        self._alphabet = frozenset(alphabet) | frozenset("\\_u;0123456789")
        self._longest = max(map(len, self._pieces), default=0)
        self._cut = lru_cache(_CACHED_WORDS)(self._cut_token)

    def split(self, text: str) -> list[str]:
        tokens, start = [], 0
        kinds = [_is_alphanumeric(letter) for letter in text]
        for i in range(1, len(text) + 1):
            if i == len(text) or kinds[i] != kinds[i - 1]:
                # One blank between two words goes without saying.
                if text[start:i] != " " or start == 0 or i == len(text):
                    tokens.append(text[start:i])
                start = i
        return [piece for token in tokens for piece in self._cut(token)]

    def join(self, pieces: Iterable[str]) -> str:
        tokens = [token for part in "".join(pieces).split("_") if (token := self._ESCAPED.sub(_unescape, part))]
        text = tokens[:1]
        for before, token in pairwise(tokens):
            text += [" ", token] if _is_alphanumeric(before[0]) and _is_alphanumeric(token[0]) else [token]
        return "".join(text)

    def _cut_token(self, token: str) -> tuple[str, ...]:
        token = token.replace("\\", "\\\\").replace("_", "\\u")
        is_spelled = (letter in self._alphabet and letter != "\n" for letter in token)
        token = "".join(c if known else f"\\{ord(c)};" for c, known in zip(token, is_spelled, strict=True)) + "_"
        pieces, start = [], 0
        while start < len(token):
            ends = range(min(len(token), start + self._longest), start, -1)
            end = next((end for end in ends if token[start:end] in self._pieces), None)
            if end is None:
                raise ValueError(
                    f"The vocabulary of subtokens has no piece for {token[start]!r}, so it is not complete."
                )
            pieces.append(token[start:end])
            start = end
        return tuple(pieces)


@lru_cache(_CACHED_WORDS)
def _is_alphanumeric(letter: str) -> bool:
    return unicodedata.category(letter)[0] in "LN"


def _unescape(match: re.Match) -> str:
    if match[1] is None:
        return "_" if match[0] == "\\u" else "\\"
    code = int(match[1])
    # No character, or half of one: the program's sign for it.
    return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else "\u3013"
