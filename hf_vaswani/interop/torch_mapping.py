"""The mapping file of a state dict: its keys, its pieces and special tokens, and the tokenizer they make."""

import contextlib
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .foreign import ConversionError, check_vocabulary
from .vocabulary import SEGMENTATIONS

# The keys of a mapping file: type, and default (`...`: must be there).
_KEYS: dict[str, tuple[type | tuple[type, ...], Any]] = {
    "state_dict": (str, None), "source_embedding": (str, ...), "target_embedding": (str, ...), "output": (str, None),
    "transformer": (str, "transformer."), "encoder": (str, None), "decoder": (str, None), "heads": (int, ...),
    "activation": (str, "relu"), "norm_first": (bool, False), "layer_norm_eps": (float, 1e-5),
    "scale_embedding": (bool, ...), "positions": (str, ...), "position_exponent": (str, "2i/d"),
    "position_offset": (int, 0), "position_table": ((str, dict), None), "dropout": (float, 0.1),
    "pieces": ((str, list, dict), None), "special": (dict, ...), "segmentation": (str, "words"),
    "codes": (str, None), "source_spm": (str, None), "target_spm": (str, None), "character_space": (str, None),
    "source_prefix": (list, []), "source_suffix": (list, []), "moses": (list, None), "lowercase": (bool, False),
}  # fmt: skip
_SPECIALS = ("pad", "eos", "bos", "unk", "start")
_POSITIONS = ("interleaved", "halves", "learned")
_ACTIVATIONS = ("relu", "gelu", "silu", "tanh")


def read_mapping(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConversionError(f"{path} is not a YAML file ({error}).") from error
    if not isinstance(found, dict):
        raise ConversionError(f"{path} is not a mapping of keys to values.")
    refuse_unknown(found, _KEYS, str(path))
    mapping = {}
    for key, (kind, default) in _KEYS.items():
        value = found.get(key)
        if value is None:
            if default is ...:
                raise ConversionError(f"{path} has no `{key}`, and nothing can stand for it.")
            mapping[key] = default
            continue
        if (
            kind is float and isinstance(value, int | str) and not isinstance(value, bool)
        ):  # YAML reads 1e-5 as a string
            with contextlib.suppress(ValueError):
                value = float(value)
        is_odd = kind is int and (type(value) is not int or not 0 <= value < 2**31)
        if is_odd or not isinstance(value, kind):
            raise ConversionError(f"{path}: `{key}` is {value!r}, which is not what belongs there.")
        mapping[key] = value
    if mapping["heads"] < 1:
        raise ConversionError(f"{path}: `heads` is {mapping['heads']}, and must be at least 1.")
    for key in ("source_prefix", "source_suffix", "moses"):
        if not all(isinstance(one, str) for one in mapping[key] or ()):
            raise ConversionError(f"{path}: `{key}` is {mapping[key]!r}, and should be a list of words.")
    if mapping["moses"] is not None and len(mapping["moses"]) != 2:
        raise ConversionError(f"{path}: `moses` is {mapping['moses']!r}, and should name source and target language.")
    choices = {
        "positions": _POSITIONS,
        "segmentation": SEGMENTATIONS,
        "activation": _ACTIVATIONS,
        "position_exponent": ("2i/d", "2i/(d-2)"),
    }
    for key, allowed in choices.items():
        if mapping[key] not in allowed:
            raise ConversionError(f"{path}: `{key}` is {mapping[key]!r}; this architecture has {', '.join(allowed)}.")
    refuse_unknown(mapping["special"], _SPECIALS, f"{path}, `special`")
    return mapping


def refuse_unknown(found: Mapping[Any, Any], known: Any, where: str) -> None:
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(str(key), list(known), n=1, cutoff=0.5)
            hint = f" Did you mean `{near[0]}`?" if near else f" Keys: {', '.join(known)}."
            raise ConversionError(f"{where} has the key `{key}`, which means nothing.{hint}")


# --------------------------------------------------------------------------- vocabulary
def pieces_of(mapping: dict[str, Any], folder: Path, where: Path) -> tuple[list[str], list[str] | None] | None:
    """Pieces by id: of both sides, or of source and target."""
    given = mapping["pieces"]
    if given is None:
        return None
    if not isinstance(given, dict):
        return _list(given, folder, f"{where}, `pieces`"), None
    refuse_unknown(given, ("source", "target"), f"{where}, `pieces`")
    if len(given) < 2:
        raise ConversionError(f"{where}: `pieces` names only one of source and target.")
    source, target = (_list(given[side], folder, f"{where}, `pieces`, {side}") for side in ("source", "target"))
    return source, target


def _list(given: Any, folder: Path, where: str) -> list[str]:
    if isinstance(given, str):
        path = folder / given
        where = str(path)
        try:
            text = path.read_bytes().decode("utf-8-sig")
            given = json.loads(text, object_pairs_hook=_once) if path.suffix == ".json" else _lines(text)
        except (OSError, ValueError, RecursionError) as error:
            raise ConversionError(f"{path} cannot be read as pieces: {error}.") from error
    if isinstance(given, dict):  # pieces to ids
        if any(type(one) is not int for one in given.values()) or sorted(given.values()) != list(range(len(given))):
            raise ConversionError(f"{where}: the ids are not 0 to {len(given) - 1}, each once.")
        ids = given
        given = sorted(ids, key=lambda piece: ids[piece])
    if not isinstance(given, list):
        raise ConversionError(f"{where} is no list of pieces.")
    seen: dict[str, int] = {}
    for number, piece in enumerate(given):
        if not isinstance(piece, str):
            raise ConversionError(f"{where}: the piece of id {number} is {piece!r}, no string. In YAML, quote it.")
        if piece in seen:
            raise ConversionError(f"{where}: the piece {piece!r} has the ids {seen[piece]} and {number}.")
        seen[piece] = number
    return given


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for piece, number in pairs:
        if piece in found:
            raise ValueError(f"{piece!r} stands there twice, with {found[piece]} and {number}")
        found[piece] = number
    return found


def _lines(text: str) -> list[str]:
    """Only a line feed ends a line; a carriage return before each of them is another system's way to end one."""
    lines = text.removesuffix("\n").split("\n")
    return [line[:-1] for line in lines] if all(line.endswith("\r") for line in lines) else lines


def special_ids(
    mapping: dict[str, Any], config: dict[str, Any], pieces: tuple[list[str], list[str] | None] | None, where: Path
) -> dict[str, Any]:
    """Special ids go into `config`; returns the generation settings: rows without a piece are never written."""
    target = None if pieces is None else pieces[1] if pieces[1] is not None else pieces[0]
    ids: dict[str, int | None] = dict.fromkeys(_SPECIALS)
    for name, value in mapping["special"].items():
        if isinstance(value, str) and target is not None and value in target:
            ids[name] = target.index(value)
        elif isinstance(value, int) and not isinstance(value, bool) and 0 <= value < config["vocab_size"]:
            ids[name] = value
        else:
            raise ConversionError(
                f"{where}: `special`, `{name}` is {value!r}, which is "
                + ("no piece and no id of the target." if target is not None else "no id; without `pieces` it must be.")
            )
    ids["start"] = ids["bos"] if ids["start"] is None else ids["start"]
    for name in ("pad", "eos", "start"):
        if ids[name] is None:
            raise ConversionError(f"{where}: `special` has no `{name}`, and every model needs one.")
    config.update({f"{name}_token_id": ids[name] for name in ("pad", "eos", "bos", "unk")})
    config["decoder_start_token_id"] = ids["start"]
    if pieces is None:
        return {}
    check_vocabulary(len(pieces[0]), config["source_vocab_size"] or config["vocab_size"], f"{where}, source")
    unused = check_vocabulary(len(target or ()), config["vocab_size"], f"{where}, target")
    return {"suppress_tokens": unused} if unused else {}


def tokenizer_of(
    mapping: dict[str, Any],
    folder: Path,
    pieces: tuple[list[str], list[str] | None] | None,
    config: dict[str, Any],
) -> Any:
    if pieces is None:
        return None
    from .vocabulary import build_tokenizer

    source, target = pieces
    names = target if target is not None else source

    def name(field: str) -> str | None:
        return None if config[field] is None else names[config[field]]

    eos = names[config["eos_token_id"]]
    return build_tokenizer(
        source,
        target,
        segmentation=mapping["segmentation"],
        **{key: folder / mapping[key] for key in ("codes", "source_spm", "target_spm") if mapping[key] is not None},
        pad=names[config["pad_token_id"]],
        eos=eos,
        unk=name("unk_token_id"),
        bos=name("bos_token_id"),
        start=name("decoder_start_token_id"),
        source_prefix=mapping["source_prefix"],
        source_suffix=mapping["source_suffix"],
        target_suffix=[eos],
        moses=tuple(mapping["moses"]) if mapping["moses"] is not None else None,
        lowercase=mapping["lowercase"],
        character_space=mapping["character_space"],
    )
