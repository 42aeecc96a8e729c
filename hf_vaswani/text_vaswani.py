"""Text, cut and put together without any model: lines, paragraphs, sentences, and what has nothing to translate."""

import re
import unicodedata
from collections.abc import Callable

_CJK = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef"
_CJK_MARKS = "。！？｡，、；："
# End marks with the closing quotes and brackets behind them, then blanks; Chinese and Japanese need no blank.
_SENTENCE_END = re.compile(
    r"((?<![.!?…؟۔।։])[.!?…؟۔।։]+(?:[\"'”“’‘»›)\]]|[ \u00a0\u202f][»›])*)(\s+)|([。！？｡]+[\"'”’」』）》】]*)(\s*)"
)
_OPENERS = "\"'“„«‹‘‚([¿¡-–— \u00a0\u202f"
# Words whose full stop ends no sentence: J. | z.B. | 3. | Dr. | and, before a number, No. | p.
_ABBREVIATION = re.compile(
    r"(?:[^\W\d_]|(?:\w\.)+\w|\d\d?|mrs?|ms|drs?|prof|st|vs|fig|jr|sr|gen|col|lt|sgt|capt|gov|sen|rep|rev|hon|approx|dept"
    r"|bzw|ca|vgl|evtl|ggf|inkl|zzgl|abb|bsp|geb|hrsg|dipl|ing|hl|jh|mio|mrd|str|tel|sog|mme|mlle|sra|srta|dott|sig|cf"
    r"|resp|bzgl)\s.?|(?:no|nr|vol|pp?|art|abs|kap|sec|ch|par)\s\d",
    re.IGNORECASE,
)
_CLAUSE_END = re.compile(rf"((?<=[,;:،؛–—])\s+|(?<=[{_CJK_MARKS}])(?!\Z))")
_BLANK_LINES = re.compile(r"(\r?\n(?:[ \t]*\r?\n)+)")
_ADDRESS = re.compile(r"(?:[a-z][a-z0-9+.-]*://|www\.|mailto:)\S+|[^\s@]+@[^\s@]+\.[^\s@]+", re.IGNORECASE)
_PHONETIC = re.compile(r"\[[^\]]*\]|/[^/]*/")


def split_into_sentences(text: str) -> list[str]:
    """Cut a text (`str`) behind its sentences, by rules that hold in most languages.

    Choice: in doubt (after an abbreviation, an initial, a number of one or two digits) the text stays in one piece.

    Returns:
        `list[str]`: sentences at the even places, the blanks between them at the odd ones; joined, they are the text.
    """
    parts, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        if match.end() == len(text):
            break
        following = text[match.end() : match.end() + 8].lstrip(_OPENERS)[:1]
        if match.group(1):
            word = (text[max(start, match.start() - 40) : match.start()].split() or [""])[-1].lstrip(_OPENERS)
            is_short = match.group(1) == "." and _ABBREVIATION.fullmatch(f"{word} {following}")
            if following.islower() or is_short:
                continue
        end = match.start(2) if match.group(1) else match.start(4)
        parts += [text[start:end], text[end : match.end()]]
        start = match.end()
    return [*parts, text[start:]]


def _cut_anywhere(text: str) -> list[str]:
    """Cut between letters, never before a mark that belongs to the letter in front."""
    places = (m.start() for m in re.finditer(r"(?<!\u200d)[^\u200d\ufe00-\ufe0f\U0001f3fb-\U0001f3ff]", text))
    inside = [i for i in places if i and not unicodedata.category(text[i]).startswith("M")]
    middle = min(inside, key=lambda i: abs(i - len(text) // 2), default=None)
    return [text] if middle is None else [text[:middle], "", text[middle:]]


# Ever finer cuts; each gives pieces at the even places and what stood between them at the odd ones.
CUTTERS: list[Callable[[str], list[str]]] = [
    split_into_sentences, _CLAUSE_END.split, re.compile(r"(\s+)").split, _cut_anywhere,
]  # fmt: skip


def cut_text(text: str, lines: str, split_sentences: bool, passthrough: bool) -> list[tuple[str, bool]]:
    """A text as its pieces, each with whether it is copied: line ends, blanks, what has nothing to translate."""
    if lines == "keep":
        units = re.split(r"(\r?\n)", text)
    else:
        body = text.strip("\r\n")
        start = text.index(body)
        units = [_unwrap(part) if i % 2 == 0 else part for i, part in enumerate(_BLANK_LINES.split(body))]
        units = ["", text[:start], *units, text[start + len(body) :], ""]
    parts: list[tuple[str, bool]] = []
    for i, unit in enumerate(units):
        if i % 2 or not unit.strip():
            parts.append((unit if i % 2 else "", True))
        else:
            pieces = split_into_sentences(unit) if split_sentences else [unit]
            parts += [(one, bool(j % 2) or (passthrough and not _has_words(one))) for j, one in enumerate(pieces)]
    return parts


def _unwrap(paragraph: str) -> str:
    """Lines of one paragraph as one line; Chinese and Japanese lines meet without a blank."""
    joined = " ".join(line.strip() for line in paragraph.split("\n"))
    return re.sub(rf"(?<=[{_CJK}]) (?=[{_CJK}])", "", joined) if "\n" in paragraph else paragraph


def _has_words(text: str) -> bool:
    """Whether there is anything to translate: a letter, in something else than an address or phonetic writing."""
    bare = text.strip()
    if not any(letter.isalpha() for letter in bare) or _ADDRESS.fullmatch(bare):
        return False
    if not _PHONETIC.fullmatch(bare) or bare != bare.lower():  # phonetic letters have no capitals
        return True
    has_stress = any(mark in bare for mark in "ˈˌːˑ")
    return not has_stress and (" " in bare or not any("\u0250" <= letter <= "\u02af" for letter in bare))


def needs_blank(source: str, before: str, after: str) -> bool:
    """Whether pieces that met without a blank in Chinese or Japanese need one in the language of the translation."""
    if not re.search(rf"[{_CJK_MARKS}][」』）》】”’]*\Z", source[-8:]) or not before or not after:
        return False
    return not any(letter.isspace() or re.match(f"[{_CJK}]", letter) for letter in (before[-1], after[0]))
