"""Reads a model of the Marian toolkit: an .npz with its options inside, settings and vocabularies beside it.

Facts that no file says, from Marian's sources and held against Marian 1.12: LayerNorm has epsilon 1e-6; the sinusoid
has all sines first, with the exponent 2i / (d - 2), from position 0; embeddings are multiplied by sqrt(d); the decoder
reads a zero vector, plus its position, before the first word.
"""

import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from .foreign import UNUSED_ROW_BIAS, ConversionError, ForeignModel, ImportOptions, TensorReader, check_values
from .marian_vocabulary import PAD, MarianVocabulary

OPTIONS = frozenset(
    {"config", "source_vocab", "target_vocab", "codes", "source_spm", "target_spm", "source_language",
     "target_language", "moses", "lowercase"}
)  # fmt: skip
_CONFIG_ENTRY = "special:model.yml"
# Marian's marian-decoder where nobody says anything.
_SEARCH = {"beam-size": 12, "normalize": 0.0, "word-penalty": 0.0, "allow-unk": False, "max-length-factor": 3.0}
# Options that change the function, with the values that this architecture has. Others are for training or for RNNs.
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "type": ("transformer",),
    "transformer-decoder-autoreg": ("self-attention",),
    "transformer-ffn-depth": (2,),
    "transformer-decoder-ffn-depth": (0, 2),
    "transformer-pool": (False,),
    "transformer-disable-position-embeddings": (False,),
    "transformer-alibi-shift": (False,),
    "transformer-alibi-trainable": (False,),
    "transformer-attention-mask": ("default",),
    "transformer-no-bias": (False,),
    "transformer-no-affine": (False,),
    "transformer-ffn-activation": ("relu", "swish", "gelu"),
    "transformer-postprocess-emb": ("", "d"),
    "right-left": (False,),
    "input-reorder": ([],),
    "input-join-fields": (False,),
    "ulr": (False,),
    "lemma-dim-emb": (0,),
    "lemma-dependency": ("",),
    "factors-dim-emb": (0,),
    "special-vocab": ([],),
}
# What the values of others must be, and those of a search.
_VALUES = {
    "dim-emb": "size", "enc-depth": "size", "dec-depth": "size", "transformer-heads": "size",
    "transformer-dim-ffn": "size", "input-types": "words", "tied-embeddings": "flag", "tied-embeddings-all": "flag",
    "tied-embeddings-src": "flag", "output-omit-bias": "flag", "transformer-no-projection": "flag",
    "transformer-ffn-activation": "word",
}  # fmt: skip
_SEARCH_VALUES = {
    "beam-size": "size", "normalize": "number", "word-penalty": "number", "max-length-factor": "number",
    "allow-unk": "flag", "allow-special": "flag", "vocabs": "words",
}  # fmt: skip
# What else marian-decoder may be told, and what is not carried over then.
_SEARCH_LOSSES = {
    "shortlist": "the list of likely words (`shortlist`) only makes Marian faster; all words are tried here",
    "output-sampling": "`output-sampling`: Marian draws words at random; here the most probable are taken",
}
_NORMS = {"self_attn": "self_Wo", "encoder_attn": "context_Wo", "feed_forward": "ffn_ffn"}
_ATTENTION = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "o"}
_CONTROL = re.compile(r"<0x[01][0-9A-F]>")  # bytes that are control characters


def read(path: Path, options: ImportOptions) -> ForeignModel:
    """A model of the Marian toolkit in this package's terms.

    Args:
        path (`Path`): the .npz, or a folder with one.
        options (`ImportOptions`): `config`, the .decoder.yml, where it is not beside the model; vocabularies and
            SentencePiece models where they are not there either; codes where words were cut by subword-nmt.

    Returns:
        `ForeignModel`; Marian is a program of its own, so no program to compare with.

    Raises:
        ConversionError: for what cannot be read or represented.
    """
    path = find_model(path)
    tensors, model = _open(path, options)
    choices: list[str] = []
    losses: list[str] = []
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()} - {"float32"}
    if kinds:
        choices.append(f"Weights of type {', '.join(sorted(kinds))} became float32.")
        tensors = {name: tensor.float() for name, tensor in tensors.items()}
    config = _architecture(model, tensors, path, choices)
    settings = _settings(path, options)
    reader = TensorReader(tensors, path)
    weights, rows = _weights(reader, model, config, choices)
    reader.finish()
    vocabulary = MarianVocabulary(path, options, settings, rows)

    pad = max(rows)
    config.update(
        vocab_size=pad + 1, pad_token_id=pad, decoder_start_token_id=pad, bos_token_id=None,
        eos_token_id=vocabulary.end_id, unk_token_id=vocabulary.unknown_id,
    )  # fmt: skip
    _add_padding(weights, config, pad)
    choices.append(
        f"Marian has no padding piece and no start piece: row {pad}, {PAD}, is new in every matrix, a zero vector with "
        f"output bias {UNUSED_ROW_BIAS:g}. Decoding starts with it, and it is never generated."
    )
    if rows[0] != rows[1]:
        choices.append(
            f"The vocabularies have {rows[0]} and {rows[1]} rows, and {PAD} needs one id for both: "
            f"{abs(rows[0] - rows[1])} rows of the shorter side mean nothing."
        )
    tokenizer = vocabulary.tokenizer(pad, options)
    generation = _search(settings, vocabulary, pad, choices, losses)
    return ForeignModel(
        kind="marian",
        config=config,
        tensors=weights,
        generation=generation,
        tokenizer=tokenizer,
        choices=choices,
        losses=losses,
        tensors_read=len(reader.taken),
    )


# ---------------------------------------------------------------------- files
def find_model(path: Path) -> Path:
    """The .npz that is meant.

    Raises:
        ConversionError: it is another file of Marian's, or a folder without one or with several models.
    """
    if path.is_dir():
        found = sorted(one for one in path.glob("*.npz") if not one.name.endswith(".optimizer.npz"))
        if len(found) != 1:
            names = ", ".join(one.name for one in found) or "none"
            binary = sorted(one.name for one in path.glob("*.bin"))
            if not found and binary:
                return find_model(path / binary[0])
            raise ConversionError(f"{path} should hold one model of Marian, an .npz; it holds {names}. Name the file.")
        return found[0]
    if path.suffix == ".bin":
        raise ConversionError(
            f"{path.name} is no .npz. In Marian's own binary format (.bin) weights are packed or rounded to 8 or 16 "
            "bits for one kind of machine. Convert the .npz that it was made from by marian-conv; there is no way back."
        )
    if path.name.endswith(".optimizer.npz"):
        raise ConversionError(f"{path} holds the optimizer's state; the model is beside it, without `.optimizer`.")
    return path


def _open(path: Path, options: ImportOptions) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and options of a model file."""
    if not path.exists():
        raise ConversionError(f"{path} does not exist.")
    if not zipfile.is_zipfile(path):
        raise ConversionError(f"{path} is not an .npz of Marian, or is damaged or cut off (it is no archive).")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # a damaged archive fails in any way, a false size by asking for too much memory
        raise ConversionError(f"{path} is not an .npz of Marian, or is damaged or cut off ({error}).") from error
    stored = arrays.pop(_CONFIG_ENTRY, None)
    if stored is not None:
        where = f"{path}, entry {_CONFIG_ENTRY}"
        model = _yaml(stored.astype(np.uint8).tobytes().rstrip(b"\0"), where)
    else:
        beside = options.config or path.with_name(path.name + ".yml")
        if not beside.is_file():
            raise ConversionError(
                f"{path} has no entry {_CONFIG_ENTRY!r}, so it is not a model that Marian saved, or is one of before "
                f"2017. Its options may be in a YAML file, by `config`; {beside.name} is not there."
            )
        model = _yaml(beside.read_bytes(), str(beside))
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ConversionError(f"{path}: {name!r} is no array, so Marian did not write this file.")
        if array.dtype.kind != "f":
            raise ConversionError(
                f"{path}: {name!r} holds {array.dtype} numbers, so this model is quantized. Convert the one in float32 "
                "that it was made from."
            )
    return {
        name: torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
        for name, array in arrays.items()
    }, model


def _yaml(content: bytes, where: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(content.decode("utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConversionError(f"{where} is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise ConversionError(f"{where} holds no options.")
    return found


def _settings(path: Path, options: ImportOptions) -> dict[str, Any]:
    """What marian-decoder would be run with, and under "folder" the one that its paths are relative to."""
    beside = [path.with_name(name) for name in (f"{path.name}.decoder.yml", "decoder.yml", f"{path.name}.yml")]
    if options.config is not None and not options.config.is_file():
        raise ConversionError(f"{options.config} is not a file.")
    found = options.config or next((one for one in beside if one.is_file()), None)
    given = _yaml(found.read_bytes(), str(found)) if found is not None else {}
    if found is not None and found == beside[2]:  # training options: those of its search are for validation
        given = {key: value for key, value in given.items() if key in ("vocabs", "relative-paths")}
    check_values(given, _SEARCH_VALUES, str(found))
    return {**_SEARCH, **given, "folder": found.parent if found is not None else path.parent, "file": found}


# ---------------------------------------------------------------------- options to fields
def _architecture(
    model: dict[str, Any], tensors: dict[str, torch.Tensor], path: Path, choices: list[str]
) -> dict[str, Any]:
    """Fields of the configuration that need no vocabulary."""

    def refuse(name: str, why: str = "which this architecture does not have") -> ConversionError:
        return ConversionError(f"{path}: `{name}` is {model.get(name)!r}, {why}. Nothing was converted.")

    check_values(model, _VALUES, str(path))
    for name, allowed in _ALLOWED.items():
        value = model.get(name)
        if value is not None and value not in allowed:
            raise refuse(name)
    if any(kind != "sequence" for kind in model.get("input-types") or []):
        raise refuse("input-types", "and only text (`sequence`) is read here")
    sizes = model.get("dim-vocabs")
    if not isinstance(sizes, list) or len(sizes) != 2:
        raise refuse("dim-vocabs", "and one source and one target are needed")
    for size in sizes:
        check_values({"dim-vocabs": size}, {"dim-vocabs": "size"}, str(path))
    for name in ("dim-emb", "enc-depth", "dec-depth", "transformer-heads", "transformer-dim-ffn"):
        if name not in model:
            raise ConversionError(f"{path}: the option `{name}` is missing.")
    if model.get("transformer-decoder-dim-ffn") not in (None, 0, model["transformer-dim-ffn"]):
        raise refuse("transformer-decoder-dim-ffn", "but both sides need one size")
    if "Wpos" in tensors:
        raise ConversionError(
            f"{path}: tensor 'Wpos' holds trained positions (`transformer-train-position-embeddings`). Of them "
            "Marian's decoder reads the first at every step, which this architecture does not. Nothing was converted."
        )
    if model.get("transformer-train-position-embeddings"):
        choices.append(
            "The model was to be trained with `transformer-train-position-embeddings`, but holds none: as in Marian, "
            "the sinusoid is used."
        )
    version = _version(model)
    activation = {"swish": "silu"}.get(name := model.get("transformer-ffn-activation", "swish"), name)
    if activation == "gelu" and version <= (1, 12, 0):
        raise refuse("transformer-ffn-activation", "which before Marian 1.12.1 was another function than GELU")

    before, after = (
        str(model.get(f"transformer-{name}", "")).replace("d", "") for name in ("preprocess", "postprocess")
    )
    is_pre = (before, after) == ("n", "a")
    if not is_pre and (before, after) != ("", "an"):
        raise refuse("transformer-postprocess" if not before else "transformer-preprocess")
    top = str(model.get("transformer-postprocess-top") or "").replace("d", "")
    if top not in ("", "n"):
        raise refuse("transformer-postprocess-top")
    if is_pre:
        if version <= (1, 12, 0):
            raise refuse("transformer-preprocess", "and before Marian 1.12.1 left keys and values without the norm")
        choices.append(
            "Pre-norm as Marian trains and scores. marian-decoder itself leaves keys and values of earlier columns "
            "without the norm while it translates, so its translations may differ from those here."
        )
    return {
        "d_model": model["dim-emb"],
        "encoder_layers": model["enc-depth"],
        "decoder_layers": model["dec-depth"],
        "num_attention_heads": model["transformer-heads"],
        "d_ff": model["transformer-dim-ffn"],
        "activation_function": activation,
        "norm_position": "pre" if is_pre else "post",
        "final_norm": top == "n",
        "layer_norm_eps": 1e-6,
        "position_encoding": "sinusoidal",
        "sinusoid_layout": "halves",
        "sinusoid_exponent": "2i/(d-2)",
        "position_offset": 0,
        "scale_embedding": True,
        "zero_start_embedding": True,
        "attention_bias": True,
        "output_bias": True,
    }


def _version(model: dict[str, Any]) -> tuple[int, ...]:
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", str(model.get("version", "")))
    return tuple(map(int, found.groups())) if found else (0, 0, 0)


# ---------------------------------------------------------------------- tensors
def _weights(
    reader: TensorReader, model: dict[str, Any], config: dict[str, Any], choices: list[str]
) -> tuple[dict[str, torch.Tensor], tuple[int, int]]:
    """Tensors under our names, and the rows of source and target; fills in what ties the embeddings."""
    width, inner = config["d_model"], config["d_ff"]
    sizes = model["dim-vocabs"]
    found: dict[str, torch.Tensor] = {}

    def vector(name: str, size: int) -> torch.Tensor:
        return reader.take(name, 1, size)[0]

    def norm(ours: str, theirs: str) -> None:
        suffix = "_pre" if config["norm_position"] == "pre" and not theirs.endswith("_top") else ""
        found[f"{ours}.weight"] = vector(f"{theirs}_ln_scale{suffix}", width)
        found[f"{ours}.bias"] = vector(f"{theirs}_ln_bias{suffix}", width)

    def attention(ours: str, theirs: str) -> None:
        for part, letter in _ATTENTION.items():
            if letter == "o" and model.get("transformer-no-projection"):
                found[f"{ours}.{part}.weight"], found[f"{ours}.{part}.bias"] = torch.eye(width), torch.zeros(width)
                continue
            found[f"{ours}.{part}.weight"] = reader.take(f"{theirs}_W{letter}", width, width).t()
            found[f"{ours}.{part}.bias"] = vector(f"{theirs}_b{letter}", width)

    if model.get("transformer-no-projection"):
        choices.append("`transformer-no-projection`: the output map of every attention is the identity.")
    shared_all, shared_inputs = model.get("tied-embeddings-all"), model.get("tied-embeddings-src")
    one_input = bool(shared_all or shared_inputs)
    target = reader.take("Wemb" if one_input else "decoder_Wemb", sizes[1], width)
    found["model.shared.weight"] = target
    if not one_input:
        found["model.encoder.embed_tokens.weight"] = reader.take("encoder_Wemb", sizes[0], width)
    elif sizes[0] != sizes[1]:
        raise ConversionError(f"{reader.path}: `dim-vocabs` is {sizes}, but both sides have one matrix.")
    is_tied = bool(shared_all or model.get("tied-embeddings"))
    if not is_tied:
        legacy = "decoder_ff_logit_out_W"
        if legacy in reader:
            found["lm_head.weight"] = reader.take(legacy, width, sizes[1]).t()
        else:
            found["lm_head.weight"] = reader.take("decoder_ff_logit_out_Wt", sizes[1], width)
    if model.get("output-omit-bias"):
        found["lm_head.bias"] = torch.zeros(sizes[1], dtype=target.dtype)
        choices.append("`output-omit-bias`: the output bias is zero but for rows without a piece.")
    else:
        found["lm_head.bias"] = vector("decoder_ff_logit_out_b", sizes[1])
    config.update(tie_word_embeddings=is_tied, tie_encoder_decoder_embeddings=one_input)

    tied = model.get("transformer-tied-layers") or list(range(1, config["decoder_layers"] + 1))
    if not isinstance(tied, list) or any(type(one) is not int for one in tied):
        raise ConversionError(f"{reader.path}: `transformer-tied-layers` is {tied!r}, and should list numbers.")
    if len(tied) != config["decoder_layers"]:
        raise ConversionError(f"{reader.path}: `transformer-tied-layers` is {tied}, but `dec-depth` is {len(tied)}.")
    stacks = {"encoder": list(range(1, config["encoder_layers"] + 1)), "decoder": tied}
    for side, layers in stacks.items():
        for number, theirs in enumerate(layers):
            parts = ("self_attn", "encoder_attn") if side == "decoder" else ("self_attn",)
            ours, prefix = f"model.{side}.layers.{number}", f"{side}_l{theirs}"
            first = len(found)
            for part in parts:
                attention(f"{ours}.{part}", f"{prefix}_{'self' if part == 'self_attn' else 'context'}")
            for fc, size in (("1", (width, inner)), ("2", (inner, width))):
                found[f"{ours}.feed_forward.fc{fc}.weight"] = reader.take(f"{prefix}_ffn_W{fc}", *size).t()
                found[f"{ours}.feed_forward.fc{fc}.bias"] = vector(f"{prefix}_ffn_b{fc}", size[1])
            for part in (*parts, "feed_forward"):
                norm(f"{ours}.{part}_residual.layer_norm", f"{prefix}_{_NORMS[part]}")
            if theirs in layers[:number]:  # the same numbers once more, in memory of their own
                for name in list(found)[first:]:
                    found[name] = found[name].clone()
        if config["final_norm"]:
            norm(f"model.{side}.layer_norm", f"{side}_top")
    if len(set(tied)) < len(tied):
        choices.append(f"`transformer-tied-layers` {tied}: decoder layers that were one are copies here.")
    return found, (sizes[0], sizes[1])


def _add_padding(weights: dict[str, torch.Tensor], config: dict[str, Any], pad: int) -> None:
    """Make every matrix over a vocabulary `pad` + 1 rows long."""
    for name in ("model.shared.weight", "model.encoder.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            matrix = weights[name]
            weights[name] = torch.cat([matrix, matrix.new_zeros(pad + 1 - len(matrix), matrix.shape[1])])
    bias = weights["lm_head.bias"]
    weights["lm_head.bias"] = torch.cat([bias, bias.new_full((pad + 1 - len(bias),), UNUSED_ROW_BIAS)])
    config["source_vocab_size"] = None


# ---------------------------------------------------------------------- search
def _search(
    settings: dict[str, Any], vocabulary: MarianVocabulary, pad: int, choices: list[str], losses: list[str]
) -> dict[str, Any]:
    if settings["file"] is None:
        choices.append("No .decoder.yml is beside the model: the search settings are marian-decoder's own.")
    read: Callable[[str], float] = lambda name: float(settings[name])  # noqa: E731
    if read("word-penalty"):
        losses.append(f"`word-penalty` {settings['word-penalty']}: there is no bonus for each word here.")
    losses += [f"Search: {told}." for name, told in _SEARCH_LOSSES.items() if settings.get(name)]
    if isinstance(models := settings.get("models"), list) and len(models) > 1:
        losses.append(f"Search: the settings name {len(models)} models that vote together; this is one of them alone.")
    losses.append(
        f"Marian lets a translation be {settings['max-length-factor']} times as long as its source, here it may be 50 "
        "pieces longer; and its beam grows narrower with each hypothesis that ends."
    )
    barred = {pad, *vocabulary.unused, *range(len(vocabulary.target), pad)}
    if not settings["allow-unk"]:
        barred.add(vocabulary.unknown_id)
    if not settings.get("allow-special"):
        barred |= {n for n, piece in enumerate(vocabulary.target) if vocabulary.is_spm and _CONTROL.fullmatch(piece)}
    return {
        "num_beams": int(settings["beam-size"]),
        "length_penalty": read("normalize"),
        "length_penalty_type": "power",
        "early_stopping": "never",
        "suppress_tokens": sorted(barred),
    }
