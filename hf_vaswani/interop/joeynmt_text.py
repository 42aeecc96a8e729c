"""Vocabularies of JoeyNMT and how it splits text, from the section `data` of a configuration and the files it names."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from .foreign import ConversionError, ImportOptions, check_values

SPECIALS = {"unk": "<unk>", "pad": "<pad>", "bos": "<s>", "eos": "</s>"}


def _side(data: dict[str, Any], side: str) -> dict[str, Any]:
    """The settings of one side of the data; version 1 has one set of them for both, and the language alone here."""
    given = data.get(side)
    if not isinstance(given, dict):
        given = {
            "lang": given,
            "level": data.get("level", "word"),
            "lowercase": data.get("lowercase", False),
            "voc_file": data.get(f"{side}_vocab"),
            "version 1": True,
        }
    if given.get("lang") is False:  # what YAML makes of the code of Norwegian
        given["lang"] = "no"
    return given


def vocabularies(
    data: dict[str, Any], where: Path, folder: Path, options: ImportOptions
) -> tuple[list[str], list[str], dict[str, str]]:
    """Both vocabularies and their special pieces.

    Args:
        data (`dict`): the section of that name. where (`Path`): its file. folder (`Path`): of the model.
        options (`ImportOptions`): files that win over those of the folder and the configuration.

    Returns:
        Pieces of the source and of the target by id; special pieces by name: unk, pad, bos, eos, and more that are
        never generated.

    Raises:
        ConversionError: a file that is missing or damaged, a repeated piece, prompts, ids that differ by side.
    """
    names = {
        "special_symbols": "section",
        "level": "word",
        "lowercase": "flag",
        "src_vocab": "word",
        "trg_vocab": "word",
    }
    check_values(data, names, f"{where}, `data`")
    symbols = data.get("special_symbols") or {}
    names = {**{f"{name}_token": "word" for name in (*SPECIALS, "sep")}, "lang_tags": "words"}
    check_values(symbols, names, f"{where}, `data.special_symbols`")
    special = {name: symbols.get(f"{name}_token") or piece for name, piece in SPECIALS.items()}
    if symbols.get("sep_token"):
        special["sep"] = symbols["sep_token"]
    special |= {f"language tag {tag}": tag for tag in symbols.get("lang_tags") or []}
    found: list[list[str]] = []
    for side, given in (("src", options.source_vocab), ("trg", options.target_vocab)):
        settings = _side(data, side)
        names = {"voc_file": "word", "level": "word", "lowercase": "flag", "tokenizer_cfg": "section"}
        check_values(settings, {**names, "tokenizer_type": "word", "normalize": "flag"}, f"{where}, `data.{side}`")
        if settings.get("has_prompt"):
            raise ConversionError(
                f"{where}: `data.{side}.has_prompt` is on; this architecture has no prompt embeddings."
            )
        saved = folder / f"{side}_vocab.txt"
        named = Path(str(settings.get("voc_file"))) if settings.get("voc_file") else saved
        candidates = (given, options.source_vocab or options.target_vocab, saved, named, folder / named.name)
        file = next((one for one in candidates if one is not None and one.is_file()), given or saved)
        found.append(_read_vocabulary(file, list(special.values())))
    for name in SPECIALS:
        if found[0].index(special[name]) != found[1].index(special[name]):
            raise ConversionError(f"{where}: {special[name]!r} has another id in each of the two vocabularies.")
    return found[0], found[1], special


def _read_vocabulary(file: Path, special: list[str]) -> list[str]:
    """One piece a line, the special ones first; JoeyNMT puts those before a file that does not begin with them."""
    if not file.is_file():
        raise ConversionError(f"{file} is not a file. Give the vocabularies with --source-vocab and --target-vocab.")
    try:
        with file.open(encoding="utf-8-sig", newline="\n") as stream:
            lines = stream.read().split("\n")
    except UnicodeDecodeError as error:
        raise ConversionError(f"{file} is not UTF-8 text, so it is no vocabulary ({error}).") from error
    if lines and lines[-1] == "":
        lines.pop()
    if lines and all(line.endswith("\r") for line in lines):
        lines = [line[:-1] for line in lines]
    if not lines:
        raise ConversionError(f"{file} is empty, so it is no vocabulary.")
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if line in seen:
            raise ConversionError(f"{file}, line {number}: {line!r} stands in line {seen[line]} already.")
        seen[line] = number
    return [*special, *(line for line in lines if line not in special)]


def tokenizer(
    data: dict[str, Any],
    folder: Path,
    options: ImportOptions,
    source: list[str],
    target: list[str],
    special: dict[str, str],
    choices: list[str],
    losses: list[str],
) -> Any:
    """The tokenizer that splits text as the configuration says, with the files that are here.

    Args:
        data (`dict`): the section of that name. folder (`Path`): where copies of its files lie.
        options (`ImportOptions`): files that win over those of the configuration.
        source, target (`list[str]`): pieces by id. special (`dict[str, str]`): as `vocabularies` returns them.
        choices, losses (`list[str]`): what is chosen, and what is not carried over, is added here.

    Returns:
        `VaswaniForeignTokenizer`, or None where the two sides are split in two ways.

    Raises:
        ConversionError: a way to split text that is not known, or a file that cannot be read.
    """
    from .vocabulary import build_tokenizer

    sides = [_side(data, side) for side in ("src", "trg")]
    settings = [dict(one.get("tokenizer_cfg") or {}) for one in sides]
    kinds = [_kind(one) for one in sides]
    if kinds[0] != kinds[1]:
        losses.append(f"text: source words are split into {kinds[0]}, target words into {kinds[1]}: no tokenizer.")
        return None
    kind = kinds[0]
    if kind not in ("words", "characters", "sentencepiece", "subword-nmt"):
        raise ConversionError(f"{folder}: `tokenizer_type` {kind!r} is not one of JoeyNMT's.")

    def file(given: Path | None, side: int, key: str) -> Path | None:
        named = Path(str(settings[side].get(key, "")))
        return next((one for one in (given, named, folder / named.name) if one is not None and one.is_file()), given)

    found: dict[str, Any] = {}
    if kind == "sentencepiece":
        found["source_spm"] = file(options.source_spm or options.target_spm, 0, "model_file")
        found["target_spm"] = file(options.target_spm or options.source_spm, 1, "model_file")
    elif kind == "subword-nmt":
        found["codes"], other = file(options.codes, 0, "codes"), file(options.codes, 1, "codes")
        if other and found["codes"] and other.read_bytes() != found["codes"].read_bytes():
            losses.append("text: the target has BPE codes of its own; labels for training must be split beforehand.")
    if None in found.values():
        losses.append(f"text: the files of {kind} are not here, so text must be split into pieces beforehand.")
        kind, found = "words", {}
    elif found:
        found["restrict"] = "version 1" not in sides[0]  # version 2 tells both programs its vocabulary
    if kind == "subword-nmt":
        found["continuation"] = str(settings[0].get("separator", "@@"))
    if kind == "characters":
        found["character_space"] = "▁"

    lowercase, normalize = ([bool(one.get(key, False)) for one in sides] for key in ("lowercase", "normalize"))
    pretokenizers = [str(one.get("pretokenizer", "none")).lower() for one in settings]
    if options.moses or "moses" in pretokenizers:
        found["moses"] = replace(options, moses=True).moses_languages(*(one.get("lang") for one in sides))
        found["moses_normalize"] = normalize[0]
        if not options.moses and pretokenizers[0] != pretokenizers[1]:
            losses.append("text: JoeyNMT ran Moses' scripts on one side, the tokenizer runs them on both.")
    if lowercase[0] != lowercase[1] and not options.lowercase:
        choices.append(f"lowercase: {lowercase[0]}, as on the source side; the target's is {lowercase[1]}.")
    if any(normalize):
        losses.append("text: `normalize` (NFKC, quotes, blanks before punctuation) is not carried over.")
    found |= {name: special[name] for name in SPECIALS}
    return build_tokenizer(
        source,
        target if target != source else None,
        segmentation=kind,
        source_suffix=(special["eos"],),
        target_suffix=(special["eos"],),
        lowercase=options.lowercase or lowercase[0],
        **found,
    )


def _kind(side: dict[str, Any]) -> str:
    """How one side splits its words, in the words of `build_tokenizer`."""
    level = side.get("level", "word")
    if level in ("word", "char"):
        return {"word": "words", "char": "characters"}[level]
    default = "subword-nmt" if "version 1" in side else "sentencepiece"
    return str(side.get("tokenizer_type", side.get("bpe_type", default)))
