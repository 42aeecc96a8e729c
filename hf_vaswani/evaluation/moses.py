"""Moses' way from raw text to tokens, for scores of tokenised text; and how to see that text went it already."""

import re
from collections.abc import Iterable
from typing import Any

_HYPHEN_IN_WORD = re.compile(r"(\S)-(\S)")


class MosesText:
    """Lowercases, normalises and tokenises a line, in this order, as Moses' scripts do.

    Args:
        language (`str`): two-letter code. Choice: a language that Moses has no rules for is treated by its English
            ones, as Moses does.
        lowercase (`bool`), normalize_punctuation (`bool`): whether those steps are done.
    """

    def __init__(self, language: str = "en", lowercase: bool = False, normalize_punctuation: bool = False):
        import sacremoses

        self.lowercase, self.version = lowercase, sacremoses.__version__
        self._tokenizer: Any = sacremoses.MosesTokenizer(language)
        self._normalizer: Any = None
        if normalize_punctuation:
            self._normalizer = sacremoses.MosesPunctNormalizer(language, perl_parity=True)
        self.tokenizer = f"moses-{language}"
        self.normalizer = f"moses-{language}" if normalize_punctuation else "no"

    def __call__(self, line: str) -> str:
        if self.lowercase:
            line = line.lower()
        if self._normalizer is not None:
            # Moses' script sees the line feed too, and one of its rules looks one character past a closing quote.
            line = self._normalizer.normalize(line + "\n")
        return self._tokenizer.tokenize(line, return_str=True)


def split_compounds(tokens: str) -> str:
    """Split words at their hyphens: "rot-grün" becomes "rot ##AT##-##AT## grün".

    Of neighbouring hyphens with one letter between them only the first splits, because the search goes on behind that
    letter: "a-b-c" becomes "a ##AT##-##AT## b-c". The paper's figures were measured so.
    """
    return _HYPHEN_IN_WORD.sub(r"\1 ##AT##-##AT## \2", tokens)


def looks_tokenised(lines: Iterable[str]) -> str | None:
    """What in a text (iterable of `str`) says that it is tokenised or cut into pieces; None if nothing does.

    Returns:
        `str`, *optional*: the tell-tale sign, such as "@@ ".
    """
    signs = dict.fromkeys(("##AT##", " @-@ ", "@@ ", "\u2581", "&apos;", "&quot;"), 0)
    spaced = glued = count = 0
    for line in lines:
        count += 1
        for sign in signs:
            signs[sign] += sign in line
        spaced += len(re.findall(r"\w [.,](?=\s|$)", line))
        glued += len(re.findall(r"\w[.,](?=\s|$)", line))
    for sign, lines_with_it in signs.items():
        if lines_with_it > count / 100:
            return sign
    return " ," if spaced >= 2 and spaced > 9 * glued else None
