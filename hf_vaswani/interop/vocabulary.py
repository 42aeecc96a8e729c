"""The tokenizer of an imported model, from the pieces and rules of the toolkit that made it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, processors

from ..foreign_tokenization_vaswani import VaswaniForeignTokenizer
from .foreign import ConversionError

SEGMENTATIONS = ("words", "characters", "subword-nmt", "sentencepiece", "subtokens")


def build_tokenizer(
    source: Sequence[str],
    target: Sequence[str] | None,
    *,
    segmentation: str,
    codes: Path | None = None,
    target_codes: Path | None = None,
    source_spm: Path | None = None,
    target_spm: Path | None = None,
    pad: str,
    eos: str,
    unk: str | None,
    bos: str | None = None,
    start: str | None = None,
    source_prefix: Sequence[str] = (),
    source_suffix: Sequence[str] = ("</s>",),
    target_prefix: Sequence[str] = (),
    target_suffix: Sequence[str] = ("</s>",),
    moses: tuple[str, str] | None = None,
    moses_aggressive_hyphens: bool = False,
    moses_escape: bool = True,
    moses_normalize: bool = False,
    lowercase: bool = False,
    continuation: str = "@@",
    character_space: str | None = None,
    restrict: bool = False,
    model_max_length: int | None = None,
) -> VaswaniForeignTokenizer:
    """Make the tokenizer of a model whose text was prepared by another toolkit.

    Args:
        source (`Sequence[str]`): the piece of each id, from 0.
        target (`Sequence[str]`, *optional*): those of the target; None: the source's serve both sides.
        segmentation (`str`): one of `SEGMENTATIONS`; "subtokens" are Tensor2Tensor's.
        codes, target_codes (`Path`, *optional*): codes of subword-nmt, with that segmentation; one file serves both.
        source_spm, target_spm (`Path`, *optional*): SentencePiece models, with that segmentation; one serves both.
        pad, eos (`str`), unk, bos, start (`str`, *optional*): control pieces; `start` where the decoder's start is
            neither `eos` nor `bos`. None: the toolkit has none.
        source_prefix, source_suffix, target_prefix, target_suffix (`Sequence[str]`): control pieces around each text.
        moses (`tuple[str, str]`, *optional*): source and target language of Moses' tokenisation.
        moses_aggressive_hyphens, moses_escape, moses_normalize (`bool`): its options: hyphens in words split off
            as "@-@", "&" and others escaped, punctuation normalised before.
        lowercase (`bool`): text is lowercased, after Moses.
        continuation (`str`): what a subword-nmt piece ends in that does not end its word.
        character_space (`str`, *optional*): how a blank is spelled among characters; None: as itself.
        restrict (`bool`): pieces that the vocabulary lacks are cut further, as subword-nmt and SentencePiece do when
            they are given a vocabulary; else such a piece is unknown.
        model_max_length (`int`, *optional*): pieces that `truncation=True` keeps; None: all.

    Returns:
        `VaswaniForeignTokenizer`.

    Raises:
        ConversionError: an empty or repeated piece, a control piece that is missing or whose id differs between the
            sides, a file that is missing, damaged or not needed.
    """
    if segmentation not in SEGMENTATIONS:
        raise ValueError(f"`segmentation` must be one of {', '.join(SEGMENTATIONS)}, got {segmentation!r}.")
    files = {"codes": codes, "target_codes": target_codes, "source_spm": source_spm, "target_spm": target_spm}
    kinds = {"subword-nmt": ("codes", "target_codes"), "sentencepiece": ("source_spm", "target_spm")}
    wanted = kinds.get(segmentation, ())
    for name, path in files.items():
        if path is not None and name not in wanted:
            raise ConversionError(f"{path}: `{name}` has no use with pieces of the kind {segmentation!r}.")
        if path is not None and not Path(path).is_file():
            raise ConversionError(f"{path} (`{name}`) is not a file.")
    if wanted and files[wanted[0]] is None:
        raise ConversionError(f"Pieces of the kind {segmentation!r} need `{wanted[0]}`.")
    if (character_space is not None and segmentation != "characters") or (restrict and not wanted):
        name = "restrict" if restrict else "character_space"
        raise ValueError(f"`{name}` has no use with pieces of the kind {segmentation!r}.")
    if moses is None and (moses_aggressive_hyphens or moses_normalize or not moses_escape):
        raise ValueError("Options of Moses need the languages, `moses=(source, target)`.")

    sides = {"source": _ids(source, "shared" if target is None else "source")}
    if target is not None:
        sides["target"] = _ids(target, "target")
    controls = {"pad": pad, "eos": eos, "unk": unk, "bos": bos, "start": start}
    named = {name: piece for name, piece in controls.items() if piece is not None}
    around = {"source": (*source_prefix, *source_suffix), "target": (*target_prefix, *target_suffix)}
    last = list(sides)[-1]
    called = {side: side if target is not None else "shared" for side in ("source", "target")}
    for name, piece in named.items():
        # Only the start, and the end where no source text has one, may be the target's alone.
        for side in sides if name in ("pad", "unk") else (last,):
            _need(sides[side], piece, name, called[side])
        ids = {side: found[piece] for side, found in sides.items() if piece in found}
        if name in ("pad", "eos", "bos") and len(set(ids.values())) > 1:
            raise ConversionError(
                f"The {name} piece {piece!r} has id {ids['source']} in the source vocabulary and {ids['target']} in "
                "the target's. A model has one such id for both. Reorder one vocabulary, with the rows of its matrix."
            )
    for side, pieces in around.items():
        for piece in pieces:
            _need(sides.get(side, sides["source"]), piece, f"{side} prefix or suffix", called[side])

    backends = {}
    for side, ids in sides.items():
        listed = {*named.values(), *around[side], *(around["target"] if target is None else ())}
        backends[side] = _backend(ids, [piece for piece in ids if piece in listed], unk)
    shared_template = (tuple(source_prefix), tuple(source_suffix)) == (tuple(target_prefix), tuple(target_suffix))
    if target is None and not shared_template:
        # One vocabulary, but what is put around a text differs by side.
        sides["target"], backends["target"] = sides["source"], Tokenizer.from_str(backends["source"].to_str())
    templates = {"source": (source_prefix, source_suffix), "target": (target_prefix, target_suffix)}
    for side, backend in backends.items():
        backend.post_processor = _template(*templates[side], sides[side])
    extra = [
        piece for piece in dict.fromkeys((start, *around[list(sides)[-1]])) if piece and piece not in named.values()
    ]
    options: dict[str, Any] = {}
    if moses is not None:
        options["moses"] = {
            "source": moses[0],
            "target": moses[1],
            "aggressive_hyphens": moses_aggressive_hyphens,
            "escape": moses_escape,
            "normalize": moses_normalize,
        }
    used = [Path(path).read_bytes() for name in wanted if (path := files[name]) is not None]
    try:
        return VaswaniForeignTokenizer(
            tokenizer_object=backends["source"],
            target_tokenizer_object=backends.get("target"),
            separate_vocabularies="target" in backends,
            segmentation=segmentation,
            continuation=continuation,
            character_space=character_space,
            codes_file=codes,
            target_codes_file=target_codes,
            source_spm_file=source_spm,
            target_spm_file=target_spm,
            separate_segmentation=len(set(used)) > 1,
            lowercase=lowercase,
            restrict=restrict,
            pad_token=pad,
            eos_token=eos,
            unk_token=unk,
            bos_token=bos,
            extra_special_tokens=extra,
            model_max_length=model_max_length,
            **options,
        )
    except ValueError as error:
        # The tokenizer knows these files by the names under which it saves them.
        given = {VaswaniForeignTokenizer.vocab_files_names[f"{name}_file"]: path for name, path in files.items()}
        name, _, problem = str(error).partition(": ")
        raise ConversionError(f"{given[name]}: {problem}" if name in given else str(error)) from None


def _ids(pieces: Sequence[str], side: str) -> dict[str, int]:
    ids: dict[str, int] = {}
    for i, piece in enumerate(pieces):
        if not piece:
            raise ConversionError(f"The {side} vocabulary's piece with id {i} is empty.")
        if piece in ids:
            raise ConversionError(f"The {side} vocabulary has {piece!r} twice, with the ids {ids[piece]} and {i}.")
        ids[piece] = i
    return ids


def _need(ids: dict[str, int], piece: str, name: str, side: str) -> None:
    if piece not in ids:
        first = ", ".join(map(repr, list(ids)[:5]))
        raise ConversionError(f"The {side} vocabulary has no {piece!r} (the {name} piece); it begins {first}.")


def _backend(ids: dict[str, int], controls: Sequence[str], unk: str | None) -> Tokenizer:
    backend = Tokenizer(models.WordLevel(ids, **({} if unk is None else {"unk_token": unk})))
    backend.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in controls])
    return backend


def _template(prefix: Sequence[str], suffix: Sequence[str], ids: dict[str, int]) -> processors.TemplateProcessing:
    """What is put around one text, and around two that follow each other."""

    def sequence(*texts: str) -> list[str]:
        return [*prefix, *texts, *suffix]

    around = [(piece, ids[piece]) for piece in dict.fromkeys((*prefix, *suffix))]
    return processors.TemplateProcessing(single=sequence("$A"), pair=sequence("$A", "$B"), special_tokens=around)
