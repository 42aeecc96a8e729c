"""Reads model folders of Sockeye 3: `params.best`, `config`, two JSON vocabularies.

Sockeye saves keys and values of one attention in one matrix, head by head in turn, and the table of its fixed positions
among the weights.
"""

import json
from pathlib import Path
from typing import Any

import torch
import yaml

from .foreign import (
    ConversionError,
    ForeignModel,
    ImportOptions,
    TensorReader,
    check_values,
    check_vocabulary,
    load_torch_file,
)
from .positions import first_other_row

OPTIONS = frozenset(
    {"config", "source_vocab", "target_vocab", "codes", "source_spm", "target_spm", "source_language",
     "target_language", "moses", "lowercase"}
)  # fmt: skip

_SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")
_ACTIVATIONS = {"relu": "relu", "swish1": "silu", "gelu": "gelu"}
_TYINGS = {"none": (False, False), "trg_softmax": (True, False), "src_trg": (False, True),
           "src_trg_softmax": (True, True)}  # fmt: skip  # softmax with target, source with target
_SEARCH = {"num_beams": 5, "length_penalty": 1.0, "length_penalty_type": "power", "early_stopping": True,
           "max_length_offset": 50}  # fmt: skip
# Hyper-parameters that change the function, by section, and the values with which it is this architecture's; a missing
# one has the first.
_NEEDED: dict[str, dict[str, tuple[Any, ...]]] = {
    "": {
        "lhuc": (False,),
        "neural_vocab_selection": (None,),
        "config_length_task": (None,),
        "dtype": ("float32", "float16", "bfloat16"),
        "weight_tying_type": ("src_trg_softmax", "src_trg", "trg_softmax", "none"),
    },
    "config_data": {"num_source_factors": (1,), "num_target_factors": (1,)},
    "config_embed_source": {"num_factors": (1,), "factor_configs": (None, [])},
    "config_embed_target": {"num_factors": (1,), "factor_configs": (None, [])},
    "config_encoder": {
        "act_type": ("relu", "swish1", "gelu"),
        "positional_embedding_type": ("fixed", "learned"),
        "use_lhuc": (False,),
        "use_glu": (False,),
    },
    "config_decoder": {
        "decoder_type": ("transformer",),
        "block_prepended_cross_attention": (False,),
        "use_lhuc": (False,),
        "use_glu": (False,),
    },
}
# What the values of the others must be.
_VALUES = {
    "": {"vocab_source_size": "size", "vocab_target_size": "size", "config_data": "section"},
    **{
        f"config_{side}": {
            "model_size": "size", "attention_heads": "size", "feed_forward_num_hidden": "size", "num_layers": "size",
            "preprocess_sequence": "word", "postprocess_sequence": "word", "dropout_prepost": "number",
            "dropout_attention": "number", "dropout_act": "number",
        }
        for side in ("encoder", "decoder")
    },
}  # fmt: skip
# What encoder and decoder must have in common, as this architecture has one value for both.
_SHARED = ("model_size", "attention_heads", "feed_forward_num_hidden", "act_type", "positional_embedding_type")


def read(path: Path, options: ImportOptions) -> ForeignModel:
    """A Sockeye model in this package's terms.

    Args:
        path (`Path`): the model folder, or one of its parameter files, as in MODEL/params.00012.
        options (`ImportOptions`): `config` and vocabularies where they are not in the folder; subword codes or
            SentencePiece models, Moses and lowercase, as the text was prepared before Sockeye saw it.

    Returns:
        `ForeignModel`.

    Raises:
        ConversionError: for what cannot be read or represented.
    """
    folder, params = (path, path / "params.best") if path.is_dir() else (path.parent, path)
    config_path = options.config or folder / "config"
    config = _read_config(config_path)
    _check(config, config_path)
    encoder, decoder = config["config_encoder"], config["config_decoder"]
    order = _order(encoder, decoder, config_path)
    reader = TensorReader(_load(params, folder), params)

    source_path = options.source_vocab or folder / "vocab.src.0.json"
    target_path = options.target_vocab or (options.source_vocab or folder / "vocab.trg.0.json")
    source, target = _pieces(source_path), _pieces(target_path)
    rows, source_rows = config["vocab_target_size"], config["vocab_source_size"]
    unused = check_vocabulary(len(target), rows, f"{target_path} and `vocab_target_size` of {config_path}")
    check_vocabulary(len(source), source_rows, f"{source_path} and `vocab_source_size` of {config_path}")
    is_split = source != target or rows != source_rows

    choices = ["Sockeye's own defaults of search: beam 5, log P over the number of tokens."]
    losses = _search_losses(config)
    ties_softmax, ties_source = _TYINGS[config.get("weight_tying_type", "src_trg_softmax")]
    fields = {
        "vocab_size": rows,
        "source_vocab_size": source_rows if is_split else None,
        "tie_word_embeddings": ties_softmax,
        "tie_encoder_decoder_embeddings": ties_source,
        "d_model": encoder["model_size"],
        "d_ff": encoder["feed_forward_num_hidden"],
        "num_attention_heads": encoder["attention_heads"],
        "encoder_layers": encoder["num_layers"],
        "decoder_layers": decoder["num_layers"],
        "activation_function": _ACTIVATIONS[encoder.get("act_type", "relu")],
        "dropout": decoder.get("dropout_prepost", 0.1),
        "attention_dropout": decoder.get("dropout_attention", 0.1),
        "activation_dropout": decoder.get("dropout_act", 0.1),
        "norm_position": order,
        "final_norm": order == "pre",
        "layer_norm_eps": 1e-6,
        "position_encoding": "learned" if encoder.get("positional_embedding_type") == "learned" else "sinusoidal",
        "sinusoid_layout": "halves",
        "sinusoid_exponent": "2i/d",
        "scale_embedding": True,
        "attention_bias": False,
        "output_bias": True,
        **{f"{name}_token_id": number for number, name in enumerate(("pad", "unk", "bos", "eos"))},
        "decoder_start_token_id": 2,
    }
    tensors = _layers(reader, fields)
    tensors.update(_embeddings(reader, fields, source_rows))
    tensors.update(_positions(reader, fields, choices, losses))
    reader.finish()
    if config.get("dtype", "float32") != "float32":
        choices.append(f"The weights are stored in {config['dtype']}, and are written in float32.")
    if unused:
        choices.append(f"{len(unused)} rows of the target matrix have no piece and are never generated.")
    return ForeignModel(
        kind="sockeye",
        config=fields,
        tensors=tensors,
        generation={**_SEARCH, **({"suppress_tokens": unused} if unused else {})},
        tokenizer=_tokenizer(source, target if is_split else None, options),
        choices=choices,
        losses=losses,
        tensors_read=len(reader.taken),
    )


# --------------------------------------------------------------------------- configuration
class _PlainLoader(yaml.SafeLoader):
    """Reads Sockeye's tagged mappings and tuples as plain ones; any other tag is an error, and no code ever runs."""


def _plain_mapping(loader: Any, suffix: str, node: Any) -> Any:
    return loader.construct_mapping(node, deep=True)


_PlainLoader.add_multi_constructor("!", _plain_mapping)
_PlainLoader.add_constructor(
    "tag:yaml.org,2002:python/tuple", lambda loader, node: loader.construct_sequence(node, deep=True)
)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConversionError(f"{path} does not exist: is {path.parent} a model folder of Sockeye?")
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), Loader=_PlainLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConversionError(f"{path} is no configuration of Sockeye ({' '.join(str(error).split())}).") from error
    sections = ("config_encoder", "config_decoder", "config_embed_source", "config_embed_target")
    if not isinstance(config, dict) or not all(isinstance(config.get(name), dict) for name in sections):
        raise ConversionError(f"{path} has no sections {', '.join(sections)}, so it is none of a Sockeye Transformer.")
    needed = {
        "": ("vocab_source_size", "vocab_target_size"),
        **dict.fromkeys(sections[:2], (*_SHARED[:3], "num_layers", "preprocess_sequence", "postprocess_sequence")),
    }
    for section, names in needed.items():
        for name in names:
            if name not in (config[section] if section else config):
                where = f" under `{section}`" if section else ""
                raise ConversionError(f"{path} has no `{name}`{where}, so it is none of a Sockeye Transformer.")
    for section, values in _VALUES.items():
        check_values(config[section] if section else config, values, f"{path}, `{section}`" if section else str(path))
    check_values(config.get("config_data") or {}, {"data_statistics": "section"}, f"{path}, `config_data`")
    statistics = (config.get("config_data") or {}).get("data_statistics") or {}
    check_values(statistics, {"length_ratio_mean": "number", "length_ratio_std": "number"}, f"{path}, statistics")
    return config


def _check(config: dict[str, Any], path: Path) -> None:
    for section, needed in _NEEDED.items():
        found = config.get(section) or {} if section else config
        for name, allowed in needed.items():
            value = found.get(name, allowed[0])
            if value not in allowed:
                raise ConversionError(
                    f"{path}: `{name}`{f' of `{section}`' if section else ''} is {value!r}, which this architecture "
                    f"does not have; it has {' or '.join(repr(one) for one in allowed)}."
                )
    encoder, decoder = config["config_encoder"], config["config_decoder"]
    for name in _SHARED:
        if encoder.get(name) != decoder.get(name):
            raise ConversionError(
                f"{path}: `{name}` is {encoder.get(name)!r} in the encoder and {decoder.get(name)!r} in the decoder; "
                "this architecture has one for both."
            )
    width = encoder["model_size"]
    widths = {
        "config_embed_source": "num_embed",
        "config_embed_target": "num_embed",
        "config_decoder": "depth_key_value",
    }
    for section, name in widths.items():
        if (found := config[section].get(name, width)) not in (width, 0):
            raise ConversionError(
                f"{path}: `{name}` of `{section}` is {found}, `model_size` {width}; this architecture has one width."
            )


def _order(encoder: dict[str, Any], decoder: dict[str, Any], path: Path) -> str:
    """Whether norms come before or behind; dropout does nothing in translation, so only norms and sums count."""
    found = []
    for section in (encoder, decoder):
        steps = [section[f"{when}process_sequence"] or "" for when in ("pre", "post")]
        order = {("n", "r"): "pre", ("", "rn"): "post"}.get((steps[0].replace("d", ""), steps[1].replace("d", "")))
        if order is None:
            raise ConversionError(
                f"{path}: `preprocess_sequence` {steps[0]!r} with `postprocess_sequence` {steps[1]!r} is an order of "
                "norm and sum that this architecture does not have; it has 'n' with 'dr' and '' with 'drn'."
            )
        found.append(order)
    if found[0] != found[1]:
        raise ConversionError(f"{path}: `preprocess_sequence` of encoder and decoder differ; here they are the same.")
    return found[0]


def _search_losses(config: dict[str, Any]) -> list[str]:
    losses = ["Beam search: Sockeye keeps finished hypotheses in the beam until all have finished; here it ends then."]
    statistics = (config.get("config_data") or {}).get("data_statistics") or {}
    if "length_ratio_mean" in statistics and "length_ratio_std" in statistics:
        ratio = float(statistics["length_ratio_mean"]) + 2 * float(statistics["length_ratio_std"])
        losses.append(f"A translation had at most {ratio:.2f} times its source's tokens; here it has 50 more at most.")
    return losses


# --------------------------------------------------------------------------- files
def _load(params: Path, folder: Path) -> dict[str, torch.Tensor]:
    version_path = folder / "version"
    version = (
        version_path.read_text(encoding="utf-8", errors="replace").strip() if version_path.is_file() else "unknown"
    )
    if not params.is_file():
        raise ConversionError(f"{params} does not exist; name another file of parameters, as in params.00012.")
    with params.open("rb") as file:
        is_torch = file.read(2) == b"PK"
    if not is_torch and version.split(".")[0] in ("1", "2"):
        raise ConversionError(
            f"{params} is of Sockeye {version}, whose parameters are MXNet's. Sockeye 3.0 converts those of 2.3: "
            f"`python -m sockeye.mx_to_pt --model {folder}`."
        )
    way_round = "A model quantised to int8 is such a file: import the float32 parameters that it was made from."
    loaded = load_torch_file(params, way_round)
    if not isinstance(loaded, dict) or not all(torch.is_tensor(value) for value in loaded.values()):
        raise ConversionError(f"{params} holds more than named tensors, so Sockeye did not write it.")
    # Versions before 3.1 may have saved the traced copies of some modules as well.
    return {name: value for name, value in loaded.items() if "traced" not in name}


def _pieces(path: Path) -> list[str]:
    if not path.is_file():
        raise ConversionError(f"{path} does not exist.")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for piece, number in pairs:
            if piece in seen:
                raise ConversionError(
                    f"{path}: the piece {piece!r} stands there twice, with {seen[piece]} and {number}."
                )
            seen[piece] = number
        return seen

    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=once)
    except ConversionError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{path} is not JSON ({error}).") from error
    if not isinstance(found, dict) or not all(type(number) is int for number in found.values()):
        raise ConversionError(f"{path} is no mapping of pieces to numbers.")
    pieces = sorted(found, key=found.__getitem__)
    for number, piece in enumerate(pieces):
        if found[piece] != number:
            raise ConversionError(f"{path}: no piece has the number {number}; {piece!r} is the next, {found[piece]}.")
    if tuple(pieces[:4]) != _SPECIALS:
        raise ConversionError(f"{path} does not begin with {', '.join(_SPECIALS)}, so it is none of Sockeye's.")
    return pieces


def _tokenizer(source: list[str], target: list[str] | None, options: ImportOptions) -> Any:
    from .vocabulary import build_tokenizer

    kinds = {"subword-nmt": options.codes, "sentencepiece": options.source_spm, "words": True}
    segmentation = next(kind for kind, file in kinds.items() if file is not None)
    pad, unk, bos, eos = _SPECIALS
    return build_tokenizer(
        source,
        target,
        segmentation=segmentation,
        codes=options.codes,
        source_spm=options.source_spm,
        target_spm=options.target_spm,
        pad=pad,
        eos=eos,
        unk=unk,
        bos=bos,
        start=bos,
        moses=options.moses_languages(),
        lowercase=options.lowercase,
    )


# --------------------------------------------------------------------------- tensors
def _layers(reader: TensorReader, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    width, inner, heads = fields["d_model"], fields["d_ff"], fields["num_attention_heads"]
    if width % heads:
        raise ConversionError(f"{reader.path}: `attention_heads` {heads} does not divide `model_size` {width}.")
    when = fields["norm_position"]
    tensors: dict[str, torch.Tensor] = {}

    def norm(ours: str, theirs: str) -> None:
        for kind in ("weight", "bias"):
            tensors[f"{ours}.{kind}"] = reader.take(f"{theirs}.layer_norm.{kind}", width).float()

    def attention(ours: str, theirs: str) -> None:
        if f"{theirs}.ff_q.weight" in reader:
            query = reader.take(f"{theirs}.ff_q.weight", width, width)
            both = reader.take(f"{theirs}.ff_kv.weight", 2 * width, width)
        else:
            query, both = reader.take(f"{theirs}.ff_in.weight", 3 * width, width).split([width, 2 * width])
        by_head = both.float().reshape(heads, 2, width // heads, width)  # in each head: keys, then values
        tensors[f"{ours}.q_proj.weight"] = query.float()
        tensors[f"{ours}.k_proj.weight"] = by_head[:, 0].reshape(width, width)
        tensors[f"{ours}.v_proj.weight"] = by_head[:, 1].reshape(width, width)
        tensors[f"{ours}.out_proj.weight"] = reader.take(f"{theirs}.ff_out.weight", width, width).float()

    for side in ("encoder", "decoder"):
        own = "self_attention" if side == "encoder" else "autoregr_layer"
        for n in range(fields[f"{side}_layers"]):
            ours, theirs = f"model.{side}.layers.{n}", f"{side}.layers.{n}"
            attention(f"{ours}.self_attn", f"{theirs}.{own}")
            norm(f"{ours}.self_attn_residual.layer_norm", f"{theirs}.{when}_{own}")
            if side == "decoder":
                attention(f"{ours}.encoder_attn", f"{theirs}.enc_attention")
                norm(f"{ours}.encoder_attn_residual.layer_norm", f"{theirs}.{when}_enc_attention")
            for mine, name, sizes in (("fc1", "ff1", (inner, width)), ("fc2", "ff2", (width, inner))):
                weight = reader.take(f"{theirs}.ff.{name}.weight", *sizes)
                tensors[f"{ours}.feed_forward.{mine}.weight"] = weight.float()
                bias = reader.take(f"{theirs}.ff.{name}.bias", sizes[0])
                tensors[f"{ours}.feed_forward.{mine}.bias"] = bias.float()
            norm(f"{ours}.feed_forward_residual.layer_norm", f"{theirs}.{when}_ff")
        if fields["final_norm"]:
            norm(f"model.{side}.layer_norm", f"{side}.final_process")
    return tensors


def _embeddings(reader: TensorReader, fields: dict[str, Any], source_rows: int) -> dict[str, torch.Tensor]:
    """Sockeye saves a tied matrix under each of its names."""
    names = {"source": "embedding_source.embedding.weight", "target": "embedding_target.embedding.weight"}
    rows, width = fields["vocab_size"], fields["d_model"]
    ours = {"target": "model.shared.weight", "source": "model.encoder.embed_tokens.weight", "output": "lm_head.weight"}
    groups = [["target"]]
    for field, part in (("tie_encoder_decoder_embeddings", "source"), ("tie_word_embeddings", "output")):
        groups[0].append(part) if fields[field] else groups.append([part])
    tensors = {}
    for group in groups:
        matrix = reader.take_equal(*(names.get(part, "output_layer.weight") for part in group))
        wanted = (source_rows if "source" in group else rows, width)
        if tuple(matrix.shape) != wanted:
            raise ConversionError(
                f"{reader.path}: the {group[0]} matrix is {tuple(matrix.shape)}, the configuration asks for {wanted}."
            )
        tensors[ours[group[0]]] = matrix.float()
    tensors["lm_head.bias"] = reader.take("output_layer.bias", rows).float()
    return tensors


def _positions(
    reader: TensorReader, fields: dict[str, Any], choices: list[str], losses: list[str]
) -> dict[str, torch.Tensor]:
    width = fields["d_model"]
    names = {side: f"{side}.pos_embedding.weight" for side in ("encoder", "decoder")}
    tables = {side: reader.take(name, None, width) for side, name in names.items()}
    lengths = {side: len(table) for side, table in tables.items()}
    longest = max(lengths.values())
    if fields["position_encoding"] == "learned":
        fields["max_position_embeddings"] = longest
        # Past the end of its table Sockeye reads the last row once more.
        for side, table in tables.items():
            if len(table) < longest:
                tables[side] = torch.cat([table, table[-1:].expand(longest - len(table), width)])
                choices.append(f"The {side}'s last position is repeated from {len(table)} to {longest} rows.")
        return {f"model.{side}.embed_positions.weight": table.float() for side, table in tables.items()}
    for side, table in tables.items():
        if (other := first_other_row(table, "halves")) is not None:
            raise ConversionError(
                f"{reader.path}: {side}.pos_embedding.weight is up to {other[1]:.2g} away from the sinusoid that "
                f'`positional_embedding_type` "fixed" stands for (row {other[0]}).'
            )
    losses.append(
        f"Sockeye reads at most {lengths['encoder']} source positions, and its last target position again and again "
        f"after {lengths['decoder']}; here the sinusoid goes on."
    )
    return {}
