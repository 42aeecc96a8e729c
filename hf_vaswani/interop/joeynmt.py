"""Reads a model folder of JoeyNMT, versions 1 and 2: `config.yaml`, a checkpoint, two vocabularies.

What a section of the configuration does not say follows JoeyNMT's own defaults; they differ between encoder and
decoder, and so do its rules of where the norms are.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .foreign import (
    ConversionError,
    ForeignModel,
    ImportOptions,
    TensorReader,
    check_values,
    check_vocabulary,
    load_torch_file,
)
from .joeynmt_text import SPECIALS, tokenizer, vocabularies
from .positions import check_sinusoid

OPTIONS = frozenset(
    {
        "config", "source_vocab", "target_vocab", "codes", "source_spm", "target_spm", "source_language",
        "target_language", "moses", "lowercase",
    }
)  # fmt: skip

# What an encoder or a decoder of JoeyNMT is where its section says nothing.
_COMMON = {"hidden_size": 512, "ff_size": 2048, "activation": "relu", "alpha": 1.0, "dropout": 0.1}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "encoder": {**_COMMON, "type": "recurrent", "num_layers": 8, "num_heads": 4, "layer_norm": "pre"},
    "decoder": {**_COMMON, "type": "transformer", "num_layers": 4, "num_heads": 8, "layer_norm": "post"},
}
# What their values must be, and those of a search.
_SIDE_VALUES = {
    "type": "word", "num_layers": "size", "num_heads": "size", "hidden_size": "size", "ff_size": "size",
    "activation": "word", "alpha": "number", "dropout": "number", "layer_norm": "word", "embeddings": "section",
}  # fmt: skip
_SEARCH_VALUES = {
    "beam_size": "size", "alpha": "number", "beam_alpha": "number", "min_output_length": "whole",
    "max_output_length": "whole", "generate_unk": "flag", "repetition_penalty": "number",
    "no_repeat_ngram_size": "whole",
}  # fmt: skip
# Keys that this architecture has once for both sides.
_SHARED = ("hidden_size", "ff_size", "num_heads", "activation")
# Keys of forks for speech: anything but "off" changes the function.
_ABSENT = ("subsample", "conv_kernel_sizes", "depthwise_conv_kernel_size", "ctc", "in_channels")
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu", "tanh": "tanh"}
_ATTENTION = {"q_proj": "q_layer", "k_proj": "k_layer", "v_proj": "v_layer", "out_proj": "output_layer"}


def read(path: Path, options: ImportOptions) -> ForeignModel:
    """A JoeyNMT model in this package's terms.

    Args:
        path (`Path`): the model folder, or one of its checkpoints.
        options (`ImportOptions`): `config` where it is not beside the checkpoint; vocabulary, codes and SentencePiece
            files where they are neither in the folder nor where the configuration says.

    Returns:
        `ForeignModel`; JoeyNMT needs an environment of its own, so no program to compare with.

    Raises:
        ConversionError: for what cannot be read or represented.
    """
    if not path.exists():
        raise ConversionError(f"{path} does not exist. Give the model folder of JoeyNMT, or a checkpoint in it.")
    folder = path if path.is_dir() else path.parent
    choices: list[str] = []
    losses: list[str] = []
    where, config = _read_config(folder, options)
    model = config["model"]
    sides = {side: {**_DEFAULTS[side], **(model.get(side) or {})} for side in _DEFAULTS}
    fields = _architecture(model, sides, where, choices)
    source, target, special = vocabularies(config["data"], where, folder, options)
    reader = _open(path, choices)
    fields |= _norms(model, sides, reader, where, choices)
    fields |= {f"{name}_token_id": target.index(special[name]) for name in SPECIALS}
    tensors, tying = _tensors(reader, model, sides, fields)
    reader.finish()

    rows = tensors["model.shared.weight"].shape[0]
    source_rows = tensors.get("model.encoder.embed_tokens.weight", tensors["model.shared.weight"]).shape[0]
    unused = check_vocabulary(len(target), rows, f"{reader.path} and the target vocabulary")
    source_unused = check_vocabulary(len(source), source_rows, f"{reader.path} and the source vocabulary")
    if source_unused:
        choices.append(f"{len(source_unused)} rows of the source matrix have no piece and are never read.")
    if unused:
        choices.append(f"{len(unused)} rows of the target matrix have no piece and are never generated.")
    testing = config.get("testing") or {}
    allowed = ("eos", "unk") if testing.get("generate_unk", True) else ("eos",)
    banned = {target.index(piece) for name, piece in special.items() if name not in allowed} | set(unused)
    return ForeignModel(
        kind="joeynmt",
        config={
            **fields,
            **tying,
            "vocab_size": rows,
            "source_vocab_size": source_rows if source != target or source_rows != rows else None,
            "layer_norm_eps": 1e-6,
            "position_encoding": "sinusoidal",
            "sinusoid_layout": "interleaved",
            "sinusoid_exponent": "2i/d",
            "attention_bias": True,
            "output_bias": False,
            "label_smoothing": float((config.get("training") or {}).get("label_smoothing", 0.0)),
            "decoder_start_token_id": fields["bos_token_id"],
        },
        tensors={name: value.float() for name, value in tensors.items()},  # a copy only where precision was less
        generation={**_generation(testing, choices, losses), "suppress_tokens": sorted(banned)},
        tokenizer=tokenizer(config["data"], folder, options, source, target, special, choices, losses),
        choices=choices,
        losses=losses,
        tensors_read=len(reader.taken),
    )


# ---------------------------------------------------------------------- configuration
def _read_config(folder: Path, options: ImportOptions) -> tuple[Path, dict[str, Any]]:
    import yaml

    where = options.config or folder / "config.yaml"
    if not where.is_file():
        raise ConversionError(f"{where} is not a file. JoeyNMT's settings are needed: give them with --config.")
    try:
        config = yaml.safe_load(where.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConversionError(f"{where} cannot be read as YAML: {' '.join(str(error).split())}") from error
    for section in ("model", "data"):
        if not isinstance(config, dict) or not isinstance(config.get(section), dict):
            raise ConversionError(f"{where} has no section `{section}`, so it is no configuration of JoeyNMT.")
    _check_values(config, str(where))
    return where, config


def _check_values(config: dict[str, Any], where: str) -> None:
    check_values(config, {"testing": "section", "training": "section"}, where)
    check_values(config.get("training") or {}, {"label_smoothing": "number"}, f"{where}, `training`")
    check_values(config.get("testing") or {}, _SEARCH_VALUES, f"{where}, `testing`")
    model = config["model"]
    check_values(model, {"encoder": "section", "decoder": "section", "tied_embeddings": "flag"}, f"{where}, `model`")
    check_values(model, {"tied_softmax": "flag", "initializer": "word"}, f"{where}, `model`")
    for side in _DEFAULTS:
        given = model.get(side) or {}
        check_values(given, _SIDE_VALUES, f"{where}, `model.{side}`")
        inner = given.get("embeddings") or {}
        check_values(inner, {"embedding_dim": "size", "scale": "flag"}, f"{where}, `model.{side}.embeddings`")


def _architecture(model: dict[str, Any], sides: dict[str, dict[str, Any]], where: Path, choices: list[str]) -> dict:
    """The sizes, after everything that cannot be represented was refused by name."""
    encoder, decoder = sides["encoder"], sides["decoder"]
    for side, given in sides.items():
        if given["type"] != "transformer":
            kind = f" ({given['rnn_type']})" if given.get("rnn_type") else ""
            raise ConversionError(
                f"{where}: `model.{side}.type` is {given['type']!r}{kind}, which this architecture does not have; only "
                "transformer models can be imported."
            )
        for key in _ABSENT:
            if given.get(key):
                raise ConversionError(f"{where}: `model.{side}.{key}` is {given[key]!r}, which changes the function.")
    initial = model.get("initializer", "xavier_uniform")
    if initial == "xavier_normal":  # JoeyNMT then sets both factors itself, each time that it builds the model
        encoder["alpha"] = 0.81 * (encoder["num_layers"] ** 4 * decoder["num_layers"]) ** (1 / 16)
        decoder["alpha"] = (3 * decoder["num_layers"]) ** (1 / 4)
    for side, given in sides.items():
        if float(given["alpha"]) != 1.0:
            why = "`model.initializer: xavier_normal` makes" if initial == "xavier_normal" else f"`model.{side}` has"
            raise ConversionError(
                f"{where}: {why} the {side}'s residual factor `alpha` {given['alpha']:.4f}; this architecture adds "
                "residuals with a factor of 1 only."
            )
        if given["activation"] not in _ACTIVATIONS:
            raise ConversionError(f"{where}: `model.{side}.activation` {given['activation']!r} is not known.")
        embeddings = given.get("embeddings") or {}
        if embeddings.get("embedding_dim", 64) != given["hidden_size"]:
            raise ConversionError(
                f"{where}: `model.{side}.embeddings.embedding_dim` is {embeddings.get('embedding_dim', 64)} and "
                f"`hidden_size` {given['hidden_size']}; they must be one width."
            )
        given["scale"] = bool(embeddings.get("scale", False))
    for key in (*_SHARED, "scale"):
        if encoder[key] != decoder[key]:
            name = "embeddings.scale" if key == "scale" else key
            raise ConversionError(
                f"{where}: `{name}` is {encoder[key]} in the encoder and {decoder[key]} in the decoder; this "
                "architecture has one for both."
            )
    if encoder["dropout"] != decoder["dropout"]:
        choices.append(f"dropout: the decoder's {decoder['dropout']}; the encoder had {encoder['dropout']}.")
    dropout = float(decoder["dropout"])
    return {
        "d_model": decoder["hidden_size"],
        "d_ff": decoder["ff_size"],
        "encoder_layers": encoder["num_layers"],
        "decoder_layers": decoder["num_layers"],
        "num_attention_heads": decoder["num_heads"],
        "activation_function": _ACTIVATIONS[decoder["activation"]],
        "scale_embedding": decoder["scale"],
        "dropout": dropout,
        "attention_dropout": dropout,
        "activation_dropout": dropout,
    }


def _norms(
    model: dict[str, Any], sides: dict[str, dict[str, Any]], reader: TensorReader, where: Path, choices: list[str]
) -> dict[str, Any]:
    """Where the norms are. Version 1 wrote no `layer_norm` and was pre-norm; version 2 then has its own defaults."""
    final = {side: f"{side}.layer_norm.weight" in reader for side in sides}
    silent = [side for side in sides if "layer_norm" not in (model.get(side) or {})]
    if len(silent) == 2 and all(final.values()):
        choices.append("`layer_norm` is not given and both stacks end in a norm: pre-norm, as JoeyNMT 1 was.")
        return {"norm_position": "pre", "final_norm": True}
    found = {side: given["layer_norm"] for side, given in sides.items()}
    for side, value in found.items():
        if value not in ("pre", "post"):
            raise ConversionError(f'{where}: `model.{side}.layer_norm` is {value!r}, not "pre" or "post".')
    if found["encoder"] != found["decoder"] or final["encoder"] != final["decoder"]:
        told = ", ".join(
            f"the {side} is {found[side]}-norm{' by default' if side in silent else ''} with"
            f"{'' if final[side] else 'out'} a final norm"
            for side in sides
        )
        raise ConversionError(f"{where}: `layer_norm`: {told}; this architecture has one rule for both.")
    return {"norm_position": found["encoder"], "final_norm": final["encoder"]}


# ---------------------------------------------------------------------- weights
def _open(path: Path, choices: list[str]) -> TensorReader:
    checkpoint = path
    if path.is_dir():
        steps = sorted((one for one in path.glob("*.ckpt") if one.stem.isdigit()), key=lambda one: int(one.stem))
        found = [one for one in (path / "best.ckpt", path / "latest.ckpt", *steps[::-1]) if one.is_file()]
        if not found:
            raise ConversionError(f"{path} has no checkpoint: neither best.ckpt, latest.ckpt nor a numbered one.")
        checkpoint = found[0]
        if len(found) > 1:
            choices.append(f"checkpoint: {checkpoint.name}; there are {len(found) - 1} more.")
    way_round = (
        "If you trust the file, keep its weights alone: python -c \"import torch; c = torch.load('"
        f"{checkpoint}', map_location='cpu', weights_only=False); torch.save({{'model_state': c['model_state']}}, "
        "'weights.ckpt')\", put weights.ckpt beside config.yaml and import that file."
    )
    loaded = load_torch_file(checkpoint, way_round)
    state = loaded.get("model_state") if isinstance(loaded, Mapping) else None
    if not isinstance(state, Mapping):
        held = ", ".join(map(str, list(loaded)[:12])) if isinstance(loaded, Mapping) else type(loaded).__name__
        raise ConversionError(f"{checkpoint} has no `model_state`, so JoeyNMT did not write it; it holds: {held}.")
    return TensorReader({name: value for name, value in state.items() if torch.is_tensor(value)}, checkpoint)


def _tensors(
    reader: TensorReader, model: dict[str, Any], sides: dict[str, dict[str, Any]], fields: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, bool]]:
    d_model, d_ff = fields["d_model"], fields["d_ff"]
    tensors: dict[str, torch.Tensor] = {}

    def take(ours: str, theirs: str, *shape: int) -> None:
        tensors[f"{ours}.weight"] = reader.take(f"{theirs}.weight", *shape)
        tensors[f"{ours}.bias"] = reader.take(f"{theirs}.bias", shape[0])

    def attention(ours: str, theirs: str) -> None:
        for to, name in _ATTENTION.items():
            take(f"{ours}.{to}", f"{theirs}.{name}", d_model, d_model)

    joint, tied = bool(model.get("tied_embeddings", False)), bool(model.get("tied_softmax", False))
    embeddings = ["trg_embed.lut.weight", *(["src_embed.lut.weight"] if joint else [])]
    output = "decoder.output_layer.weight"
    tensors["model.shared.weight"] = reader.take_equal(*embeddings, *([output] if tied else []))
    rows = reader.take("trg_embed.lut.weight", None, d_model).shape[0]
    if not joint:
        tensors["model.encoder.embed_tokens.weight"] = reader.take("src_embed.lut.weight", None, d_model)
    if not tied:
        tensors["lm_head.weight"] = reader.take(output, rows, d_model)

    for side in sides:
        check_sinusoid(reader, f"{side}.pe.pe", d_model)
        if fields["final_norm"]:
            take(f"model.{side}.layer_norm", f"{side}.layer_norm", d_model)
        for layer in range(fields[f"{side}_layers"]):
            ours, theirs = f"model.{side}.layers.{layer}", f"{side}.layers.{layer}"
            if side == "encoder":
                attention(f"{ours}.self_attn", f"{theirs}.src_src_att")
                take(f"{ours}.self_attn_residual.layer_norm", f"{theirs}.layer_norm", d_model)
            else:
                attention(f"{ours}.self_attn", f"{theirs}.trg_trg_att")
                take(f"{ours}.self_attn_residual.layer_norm", f"{theirs}.x_layer_norm", d_model)
                attention(f"{ours}.encoder_attn", f"{theirs}.src_trg_att")
                take(f"{ours}.encoder_attn_residual.layer_norm", f"{theirs}.dec_layer_norm", d_model)
            take(f"{ours}.feed_forward.fc1", f"{theirs}.feed_forward.pwff_layer.0", d_ff, d_model)
            take(f"{ours}.feed_forward.fc2", f"{theirs}.feed_forward.pwff_layer.3", d_model, d_ff)
            take(f"{ours}.feed_forward_residual.layer_norm", f"{theirs}.feed_forward.layer_norm", d_model)
    return tensors, {"tie_word_embeddings": tied, "tie_encoder_decoder_embeddings": joint}


def _generation(testing: dict[str, Any], choices: list[str], losses: list[str]) -> dict[str, Any]:
    alpha = float(testing.get("alpha", testing.get("beam_alpha", -1)))
    generation: dict[str, Any] = {
        "num_beams": int(testing.get("beam_size", 1)),
        "length_penalty": max(alpha, 0.0),
        "length_penalty_type": "gnmt",
        "min_new_tokens": int(testing.get("min_output_length", 1)),
    }
    longest = int(testing.get("max_output_length", -1))
    if longest > 0:
        generation |= {"max_new_tokens": longest, "max_length_offset": None}
    else:
        choices.append(
            "length limit: source length + 50; `max_output_length` is not set, and JoeyNMT then stops at 1.5 times the "
            "longest source of a batch."
        )
    for key, off in (("repetition_penalty", 1.0), ("no_repeat_ngram_size", 1)):
        if float(testing.get(key, -1)) > off:
            losses.append(f"`testing.{key}` {testing[key]}: JoeyNMT applies it to pieces of the source too.")
    return generation
