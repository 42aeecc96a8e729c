"""Reads a folder of CTranslate2: weights in any of its precisions, vocabularies and special tokens."""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .ctranslate2_file import Ct2Folder, ModelFile, read_model_file, read_settings, read_vocabularies, with_unknown
from .ctranslate2_weights import HEADS, Weights, sizes, tensors_of
from .foreign import (
    ConversionError,
    ForeignModel,
    ImportOptions,
    Program,
    TensorReader,
    check_values,
    check_vocabulary,
)

OPTIONS = frozenset({"source_spm", "target_spm", "codes", "moses", "source_language", "target_language", "lowercase"})

# Parts of variable names that mean another architecture, and what it is called.
_FOREIGN = {
    "relative_position_keys": "relative positions", "relative_position_values": "relative positions",
    "relative_attention_bias": "relative attention biases", "relative_attention_max_distance": "relative positions",
    "relative_asymmetric_position_keys": "relative positions", "rotary_dim": "rotary positions",
    "alibi": "ALiBi positions", "linear_0_noact": "gated feed-forward layers",
    "layernorm_embedding": "a norm over the embeddings", "project_in": "a map behind the embeddings",
    "project_out": "a map before the output", "scale_outputs": "scaled outputs",
    "final_logit_softcapping": "capped logits", "q_norm": "norms of queries and keys",
    "k_norm": "norms of queries and keys", "v_norm": "norms of values", "shared_layer_norm": "parallel residuals",
    "input_layer_norm": "parallel or doubled norms", "post_attention_layer_norm": "parallel or doubled norms",
    "pre_feedforward_layer_norm": "doubled norms", "post_feedforward_layer_norm": "doubled norms",
    "external_post_encoder_attention_layer_norm": "doubled norms", "layer_norm_use_residual": "RMS norms",
    "external_pre_encoder_attention_layer_norm": "doubled norms", "merged_encoder_attention": "merged attention",
    "memory_kv": "merged attention", "sliding_window": "a sliding window", "num_heads_kv": "grouped queries",
    "layer_scalar": "scaled layers", "weight_zero": "4-bit weights", "multi_query": "multi-query attention",
    "multi_query_attention": "multi-query attention",
    "conv1": "convolutions", "conv2": "convolutions", "embeddings_1": "source factors",
}  # fmt: skip
# Settings that do not change a translation.
_WITHOUT_EFFECT = {
    "alibi_use_positive_positions": "only with ALiBi", "scale_alibi": "only with ALiBi",
    "alignment_layer": "only for alignments", "alignment_heads": "only for alignments",
    "embeddings_merge": "only with source factors",
}  # fmt: skip

# CTranslate2's own defaults of `translate_batch`.
_SEARCH = {
    "num_beams": 2, "length_penalty": 1.0, "length_penalty_type": "power", "early_stopping": True,
    "max_length_offset": None, "max_new_tokens": 256, "min_new_tokens": 1,
}  # fmt: skip


def read(path: Path, options: ImportOptions) -> ForeignModel:
    """Read a folder with `model.bin` and its vocabularies.

    Args:
        path (`Path`): the folder. options (`ImportOptions`): `source_spm` and `target_spm`, or `codes`, tell how text
            becomes pieces; without them pieces are characters or words, whichever the vocabulary looks like.

    Raises:
        ConversionError: not such a folder, damaged, or of another architecture, which is named.
    """
    folder = path.parent if path.name == "model.bin" else path
    if not (folder / "model.bin").is_file():
        raise ConversionError(f"{folder} has no model.bin, so it is not a folder of CTranslate2.")
    stored = read_model_file(folder / "model.bin")
    _refuse_foreign(stored, folder)
    settings = _settings(stored, read_settings(folder))
    reader = TensorReader(stored.tensors, folder / "model.bin")
    weights = Weights(reader, stored)
    source, target, is_shared = read_vocabularies(folder)
    source, target = with_unknown(source, settings["unk_token"]), with_unknown(target, settings["unk_token"])
    config = sizes(weights, settings)
    unused = _check_rows(source, target, weights, config, folder)
    tensors = tensors_of(weights, config)
    _special_ids(config, settings, source, target, is_shared, weights.choices)
    for name in stored.tensors:
        last = name.rsplit("/", 1)[-1]
        if last in _WITHOUT_EFFECT or last in _FOREIGN:  # of the latter only those that are switched off got here
            reader.ignore(name, _WITHOUT_EFFECT.get(last, "switched off"))
    reader.finish()
    tokenizer = _tokenizer(folder, options, settings, source, None if is_shared else target, config, weights.choices)
    losses = []
    if weights.rounded:
        kinds = ", ".join(sorted(weights.rounded))
        losses.append(f"The file holds weights as {kinds}; they were put into float32 as they are, rounding included.")
    if weights.has_rounded_positions:
        losses.append("The table of positions is rounded there and exact here, so logits differ by that rounding.")
    if (folder / "vmap.txt").is_file():
        losses.append("The vocabulary map (vmap.txt) only makes CTranslate2 faster; it is not carried over.")
    generation: dict[str, Any] = dict(_SEARCH)
    if unused:
        generation["suppress_tokens"] = unused
    weights.choices.append("The search is CTranslate2's default: 2 beams, length penalty 1, 1 to 256 tokens.")
    return ForeignModel(
        kind="ctranslate2",
        config=config,
        tensors=tensors,
        generation=generation,
        tokenizer=tokenizer,
        choices=weights.choices,
        losses=losses,
        # A rounded table of positions would show in a comparison, which asks for float32's precision.
        program=None if weights.has_rounded_positions else lambda: _program(folder, generation, unused),
        tensors_read=len(reader.taken),
    )


def _program(folder: Path, generation: dict[str, Any], unused: Sequence[int]) -> Program | None:
    if importlib.util.find_spec("ctranslate2") is None:
        return None
    # In float32, as the weights here are; patience 2 is what `early_stopping="never"` comes to.
    try:
        running = Ct2Folder(folder, compute_type="float32")
    except RuntimeError as error:
        raise ConversionError(f"{folder}: CTranslate2 itself cannot load it ({error}).") from error
    return running.program(length_penalty=generation["length_penalty"], patience=2.0, min_length=1, suppressed=unused)


# --------------------------------------------------------------------------- refusal and settings
def _refuse_foreign(stored: ModelFile, folder: Path) -> None:
    path = folder / "model.bin"
    if stored.spec not in HEADS:
        raise ConversionError(f"{path}: a model of the kind {stored.spec!r}, not an encoder-decoder (TransformerSpec).")
    for name, tensor in stored.tensors.items():
        for part in name.split("/"):
            if part in _FOREIGN and not (tensor.dim() == 0 and not tensor):
                raise ConversionError(
                    f"{path}: `{name}` means {_FOREIGN[part]}, which this architecture does not have."
                )
        if name.endswith("layer_norm/gamma") and name.replace("gamma", "beta") not in stored.tensors:
            raise ConversionError(f"{path}: `{name}` has no beta, which means RMS norms; this architecture has none.")


def _settings(stored: ModelFile, settings: dict[str, Any]) -> dict[str, Any]:
    """Special tokens and epsilon, from `config.json`, or from the variables of files older than that."""
    tensors = stored.tensors

    def word(name: str, default: str) -> str:
        return bytes(tensors.pop(name).view(torch.uint8).tolist()).decode() if name in tensors else default

    def flag(name: str, default: bool) -> bool:
        return bool(tensors.pop(name)) if name in tensors else default

    old: dict[str, Any] = {
        "unk_token": word("unk_token", "<unk>"),
        "bos_token": word("bos_token", "<s>"),
        "eos_token": word("eos_token", "</s>"),
        "add_source_bos": flag("with_source_bos", False),
        "add_source_eos": flag("with_source_eos", False),
        "layer_norm_epsilon": None,
    }
    with_bos = flag("with_target_bos", True)
    old["decoder_start_token"] = old["bos_token"] if with_bos else old["eos_token"]
    if flag("user_decoder_start_tokens", False):
        old["decoder_start_token"] = None
    words = ("unk_token", "bos_token", "eos_token", "decoder_start_token")
    check_values(settings, dict.fromkeys(words, "word"), "config.json")
    check_values(settings, {"add_source_bos": "flag", "add_source_eos": "flag"}, "config.json")
    if settings.get("layer_norm_epsilon") is not None:
        check_values(settings, {"layer_norm_epsilon": "number"}, "config.json")
    found = {**old, **settings}
    for name in words[:3]:
        if found[name] is None:
            raise ConversionError(f"config.json: `{name}` is null, and every model of this package needs one.")
    for name in ("multi_query_attention", "quantization_type"):
        if found.get(name):
            raise ConversionError(f"config.json: `{name}` is {found[name]!r}, which this architecture does not have.")
    return found


# --------------------------------------------------------------------------- vocabularies
def _check_rows(
    source: list[str], target: list[str], weights: Weights, config: dict[str, Any], folder: Path
) -> list[int]:
    """Compare pieces and rows; returns ids of target rows that have no piece, and fills both lists up."""
    sides = (
        ("source", source, config["source_vocab_size"] or config["vocab_size"]),
        ("target", target, config["vocab_size"]),
    )
    unused: list[int] = []
    for name, pieces, rows in sides:
        unused = check_vocabulary(len(pieces), rows, f"{folder}, {name} side")
        for number in unused if len(pieces) < rows else ():
            pieces.append(f"<unused_{number}>")
    # What an export has named so is never to be written either.
    marked = [number for number, piece in enumerate(target) if re.fullmatch(r"<unused_\d+>_*", piece)]
    return sorted({*unused, *marked})


def _special_ids(
    config: dict[str, Any],
    settings: dict[str, Any],
    source: list[str],
    target: list[str],
    is_shared: bool,
    choices: list[str],
) -> None:
    """The special ids, as fields of `VaswaniConfig`."""
    ids = {piece: number for number, piece in enumerate(target)}
    start = settings["decoder_start_token"]
    if start is None:
        raise ConversionError(
            "config.json: `decoder_start_token` is null, so each call says what a translation starts with, such as the "
            "target language. This package has one start token: write it into config.json."
        )
    for name, piece in (("decoder_start_token", start), ("eos_token", settings["eos_token"])):
        if piece not in ids:
            raise ConversionError(f"config.json: `{name}` is {piece!r}, which the target vocabulary does not have.")
    both = ids if is_shared else {piece: n for n, piece in enumerate(source) if ids.get(piece) == n}
    candidates = ("<pad>", "<blank>", "[PAD]", settings["unk_token"], settings["bos_token"], settings["eos_token"])
    pad = next((piece for piece in candidates if piece in both), None)
    if pad is None:
        raise ConversionError(
            "Neither a piece for padding nor another special one has the same id in both vocabularies, and a model "
            "has one padding id for both. Reorder one vocabulary, with the rows of its matrix."
        )
    config.update(
        pad_token_id=ids[pad],
        eos_token_id=ids[settings["eos_token"]],
        bos_token_id=ids.get(settings["bos_token"]),
        unk_token_id=ids[settings["unk_token"]] if settings["unk_token"] in both else None,
        decoder_start_token_id=ids[start],
    )
    if pad not in ("<pad>", "<blank>", "[PAD]"):
        choices.append(f"CTranslate2 has no padding token; {pad!r} fills batches here, behind a mask.")


def _tokenizer(
    folder: Path,
    options: ImportOptions,
    settings: dict[str, Any],
    source: list[str],
    target: list[str] | None,
    config: dict[str, Any],
    choices: list[str],
) -> Any:
    """The tokenizer beside the model, where it has these very pieces; else one made from the vocabularies."""
    saved = _saved_tokenizer(folder, source, target)
    if saved is not None:
        if saved.unk_token_id is None:
            config["unk_token_id"] = None
        choices.append("The tokenizer's files lie in the folder and have the same pieces; they were taken.")
        return saved
    from .vocabulary import build_tokenizer

    both = [*source, *(target or [])]
    if options.source_spm is not None or options.target_spm is not None:
        segmentation = "sentencepiece"
    elif options.codes is not None:
        segmentation = "subword-nmt"
    else:
        special = {settings[f"{name}_token"] for name in ("unk", "bos", "eos")} | {settings["decoder_start_token"]}
        ordinary = [piece for piece in both if piece not in special and not re.fullmatch(r"<\w+>_*", piece)]
        segmentation = "characters" if all(len(piece) == 1 for piece in ordinary) else "words"
        choices.append(
            f"The folder does not say how text becomes pieces; its vocabulary looks like {segmentation}. If that is "
            "wrong, name the SentencePiece model or the BPE codes."
        )
    names = target if target is not None else source
    eos = settings["eos_token"]
    prefix = [settings["bos_token"]] if settings["add_source_bos"] else []
    suffix = [eos] if settings["add_source_eos"] else []
    if not suffix:
        choices.append("CTranslate2 does not end a source by itself (`add_source_eos`), so nothing is put behind it.")
    return build_tokenizer(
        source,
        target,
        segmentation=segmentation,
        codes=options.codes,
        source_spm=options.source_spm or options.target_spm,
        target_spm=options.target_spm if options.source_spm is not None else None,
        pad=names[config["pad_token_id"]],
        eos=eos,
        unk=settings["unk_token"],
        bos=settings["bos_token"] if config["bos_token_id"] is not None else None,
        start=settings["decoder_start_token"],
        source_prefix=prefix,
        source_suffix=suffix,
        target_suffix=[eos],
        moses=options.moses_languages(),
        lowercase=options.lowercase,
    )


def _saved_tokenizer(folder: Path, source: list[str], target: list[str] | None) -> Any:
    if not (folder / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer

    from .ctranslate2_export import piece_ids

    try:
        found = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError):  # another program's files: they are not needed
        return None
    for ids, pieces in zip(piece_ids(found), (source, source if target is None else target), strict=True):
        if any(number >= len(pieces) or pieces[number] != piece for piece, number in ids.items()):
            return None
    return found
