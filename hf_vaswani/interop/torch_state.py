"""Reads the state dict of a model around `torch.nn.Transformer`, whose own names a small YAML file explains.

state_dict: model_state_dict         # where in the file it lies; left out: the file is the state dict
source_embedding: src_emb.weight
target_embedding: tgt_emb.weight
output: generator                    # prefix of the last layer; left out: the target embedding
transformer: transformer.            # prefix of the nn.Transformer
heads: 8
activation: relu
norm_first: false
layer_norm_eps: 1.0e-5
scale_embedding: true                # times sqrt(d_model)
positions: interleaved               # or halves, or learned
position_table: pos.pe               # a stored sinusoid, to be compared; learned: the table, or two
pieces: {source: vocab.src, target: vocab.tgt}
special: {pad: <pad>, eos: <eos>, bos: <bos>, unk: <unk>, start: <bos>}
segmentation: characters
source_prefix: [<bos>]
source_suffix: [<eos>]
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .foreign import ConversionError, ForeignModel, ImportOptions, TensorReader, load_torch_file
from .positions import first_other_row
from .torch_mapping import pieces_of, read_mapping, refuse_unknown, special_ids, tokenizer_of
from .torch_program import TorchTransformer

OPTIONS = frozenset({"mapping"})

_WAY_ROUND = "Load it where it was made and save the weights alone: torch.save(model.state_dict(), PATH)."


def read(path: Path, options: ImportOptions) -> ForeignModel:
    """Read a state dict by its mapping file.

    Args:
        path (`Path`): of torch.save (.pt, .pth, .zip) or .safetensors. options (`ImportOptions`): `mapping` is needed.

    Raises:
        ConversionError: for a mapping or a file that is wrong, and for what the architecture does not have.
    """
    if options.mapping is None:
        raise ConversionError(f"{path}: a state dict has no fixed names, so pass `mapping`, a YAML file that has them.")
    mapping = read_mapping(options.mapping)
    folder = options.mapping.parent
    reader = TensorReader(_state(path, mapping, options.mapping), path)
    prefixes = {side: mapping[side] or f"{mapping['transformer']}{side}." for side in ("encoder", "decoder")}
    _refuse_foreign(reader, prefixes)
    choices: list[str] = []
    config = _sizes(reader, mapping, prefixes, options.mapping)
    tensors = _tensors(reader, mapping, prefixes, config, choices)
    tables = _positions(reader, mapping, config, tensors, choices, options.mapping)
    reader.finish()
    pieces = pieces_of(mapping, folder, options.mapping)
    generation = special_ids(mapping, config, pieces, options.mapping)
    tokenizer = tokenizer_of(mapping, folder, pieces, config)
    choices.append("A state dict has no search settings: the paper's are taken, 4 beams and source length + 50 tokens.")
    return ForeignModel(
        kind="torch",
        config=config,
        tensors=tensors,
        generation=generation,
        tokenizer=tokenizer,
        choices=choices,
        losses=[] if tokenizer is not None else ["There are no `pieces`, so no tokenizer: ids go in and come out."],
        program=lambda: TorchTransformer(dict(reader.tensors), mapping, prefixes, tables, config, generation).program(),
        tensors_read=len(reader.taken),
    )


# --------------------------------------------------------------------------- the two files
def _state(path: Path, mapping: dict[str, Any], where: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            found: Any = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ConversionError(f"{path} is not a safetensors file, or is damaged ({error}).") from error
    else:
        try:
            found = load_torch_file(path, _WAY_ROUND)
        except OSError as error:
            raise ConversionError(f"{path} cannot be read, or is cut off ({error}).") from error
    for key in (mapping["state_dict"] or "").split(".") if mapping["state_dict"] else ():
        if not isinstance(found, Mapping) or key not in found:
            keys = ", ".join(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
            raise ConversionError(f"{path} has no {key!r} (`state_dict` in {where}); it has {keys[:300]}.")
        found = found[key]
    if not isinstance(found, Mapping) or not found:
        raise ConversionError(f"{path} holds no state dict, but {type(found).__name__}.")
    odd = [str(key) for key, value in found.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise ConversionError(
            f"{path}: {', '.join(odd[:8])} are no tensors, so this is not a state dict. If one of them is, name it as "
            f"`state_dict` in {where}."
        )
    # Half precision is read as what it stands for; integers are buffers that belong to no layer.
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.items()}


# --------------------------------------------------------------------------- weights
def _refuse_foreign(reader: TensorReader, prefixes: dict[str, str]) -> None:
    reasons = {
        "bias_k": "`add_bias_kv`, learned keys and values", "bias_v": "`add_bias_kv`, learned keys and values",
        "q_proj_weight": "`kdim` or `vdim` unlike the width", "k_proj_weight": "`kdim` or `vdim` unlike the width",
        "v_proj_weight": "`kdim` or `vdim` unlike the width", "weight_ih_l0": "an LSTM, GRU or RNN",
    }  # fmt: skip
    for name in reader.tensors:
        if (last := name.rsplit(".", 1)[-1]) in reasons:
            raise ConversionError(f"{reader.path}: {name!r} means {reasons[last]}, which this architecture lacks.")
    for side, prefix in prefixes.items():
        if f"{prefix}layers.0.self_attn.in_proj_weight" not in reader:
            there = sorted({key.split("layers.")[0] for key in reader.tensors if "layers." in key})
            raise ConversionError(
                f"{reader.path} has no {prefix}layers.0.self_attn.in_proj_weight, so the {side} is not under "
                f"{prefix!r}. Prefixes before `layers.` in it: {', '.join(map(repr, there)) or 'none'}."
            )


def _sizes(reader: TensorReader, mapping: dict[str, Any], prefixes: dict[str, str], where: Path) -> dict[str, Any]:
    source, target = (reader.take(mapping[f"{side}_embedding"], None, None) for side in ("source", "target"))
    d_model = target.shape[1]
    if source.shape[1] != d_model:
        raise ConversionError(
            f"{reader.path}: embeddings are {source.shape[1]} wide in the source, {d_model} in the target."
        )
    if d_model % mapping["heads"]:
        raise ConversionError(f"{where}: `heads` is {mapping['heads']}, which does not divide the width {d_model}.")
    counts = {}
    for side, prefix in prefixes.items():
        found = [re.match(rf"{re.escape(prefix)}layers\.(\d+)\.", name) for name in reader.tensors]
        numbers = {int(match[1]) for match in found if match}
        if numbers != set(range(len(numbers))):
            raise ConversionError(f"{reader.path}: the {side} has the layers {sorted(numbers)}; some are missing.")
        counts[side] = len(numbers)
    norms = [f"{prefix}norm.weight" in reader for prefix in prefixes.values()]
    if norms[0] != norms[1]:
        raise ConversionError(f"{reader.path}: only one of encoder and decoder ends in a norm.")
    return {
        "vocab_size": target.shape[0],
        "source_vocab_size": None if source.shape[0] == target.shape[0] else source.shape[0],
        "d_model": d_model,
        "d_ff": reader.take(f"{prefixes['encoder']}layers.0.linear1.weight", None, d_model).shape[0],
        "encoder_layers": counts["encoder"],
        "decoder_layers": counts["decoder"],
        "num_attention_heads": mapping["heads"],
        "activation_function": mapping["activation"],
        "dropout": mapping["dropout"],
        # nn.Transformer drops all of these at one rate.
        "attention_dropout": mapping["dropout"],
        "activation_dropout": mapping["dropout"],
        "norm_position": "pre" if mapping["norm_first"] else "post",
        "final_norm": norms[0],
        "layer_norm_eps": mapping["layer_norm_eps"],
        "scale_embedding": mapping["scale_embedding"],
        "attention_bias": any(re.search(r"attn\.(in_proj_|out_proj\.)bias$", name) for name in reader.tensors),
        "output_bias": mapping["output"] is not None and f"{mapping['output'].rstrip('.')}.bias" in reader,
    }


def _tensors(
    reader: TensorReader,
    mapping: dict[str, Any],
    prefixes: dict[str, str],
    config: dict[str, Any],
    choices: list[str],
) -> dict[str, torch.Tensor]:
    source, target = (reader.take(mapping[f"{side}_embedding"]) for side in ("source", "target"))
    rows, width = config["vocab_size"], config["d_model"]
    output = mapping["output"].rstrip(".") if mapping["output"] is not None else None
    matrix = target if output is None else reader.take(f"{output}.weight", rows, width)
    config["tie_word_embeddings"] = torch.equal(matrix, target)
    config["tie_encoder_decoder_embeddings"] = torch.equal(source, target)
    found = {"model.shared.weight": target}
    if not config["tie_encoder_decoder_embeddings"]:
        found["model.encoder.embed_tokens.weight"] = source
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = matrix
    if config["output_bias"]:
        found["lm_head.bias"] = reader.take(f"{output}.bias", rows)
    filled: list[str] = []

    def bias(name: str, size: int) -> torch.Tensor:
        if name in reader:
            return reader.take(name, size)
        filled.append(name)
        return torch.zeros(size)

    def norm(there: str, here: str) -> None:
        found[f"{here}.weight"], found[f"{here}.bias"] = (
            reader.take(f"{there}.weight", width),
            bias(f"{there}.bias", width),
        )

    def attention(there: str, here: str) -> None:
        weights = reader.take(f"{there}.in_proj_weight", 3 * width, width).split(width)
        found.update({f"{here}.{n}_proj.weight": part for n, part in zip("qkv", weights, strict=True)})
        found[f"{here}.out_proj.weight"] = reader.take(f"{there}.out_proj.weight", width, width)
        if config["attention_bias"]:
            biases = bias(f"{there}.in_proj_bias", 3 * width).split(width)
            found.update({f"{here}.{n}_proj.bias": part for n, part in zip("qkv", biases, strict=True)})
            found[f"{here}.out_proj.bias"] = bias(f"{there}.out_proj.bias", width)

    for side, prefix in prefixes.items():
        sublayers = {"self_attn": "self_attn", **({"multihead_attn": "encoder_attn"} if side == "decoder" else {})}
        for n in range(config[f"{side}_layers"]):
            there, here = f"{prefix}layers.{n}", f"model.{side}.layers.{n}"
            for place, (old, new) in enumerate(sublayers.items(), 1):
                attention(f"{there}.{old}", f"{here}.{new}")
                norm(f"{there}.norm{place}", f"{here}.{new}_residual.layer_norm")
            norm(f"{there}.norm{len(sublayers) + 1}", f"{here}.feed_forward_residual.layer_norm")
            for old, new, shape in (
                ("linear1", "fc1", (config["d_ff"], width)),
                ("linear2", "fc2", (width, config["d_ff"])),
            ):
                found[f"{here}.feed_forward.{new}.weight"] = reader.take(f"{there}.{old}.weight", *shape)
                found[f"{here}.feed_forward.{new}.bias"] = bias(f"{there}.{old}.bias", shape[0])
        if config["final_norm"]:
            norm(f"{prefix}norm", f"model.{side}.layer_norm")
    if filled:
        choices.append(
            f"{len(filled)} biases that the model was made without, such as {filled[0]}, were filled with zeros."
        )
    return found


def _positions(
    reader: TensorReader,
    mapping: dict[str, Any],
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    choices: list[str],
    where: Path,
) -> dict[str, torch.Tensor] | None:
    """Learned tables go among the tensors; a stored sinusoid is compared with ours. Returns what the file has."""
    names = mapping["position_table"]
    if isinstance(names, dict):
        if not all(isinstance(one, str) for one in names.values()):
            raise ConversionError(f"{where}: `position_table` is {names!r}, and should name tensors.")
        refuse_unknown(names, ("source", "target"), f"{where}, `position_table`")
        if len(names) < 2:
            raise ConversionError(f"{where}: `position_table` names only one of source and target.")
    sides = {"encoder": "source", "decoder": "target"}
    width, tables = config["d_model"], {}
    if names is not None:
        for here, side in sides.items():
            table = reader.take(names if isinstance(names, str) else names[side])
            if table.shape[-1] != width or table.numel() % width or table.dim() > 3:
                raise ConversionError(f"{reader.path}: the positions are {tuple(table.shape)}, not [rows, {width}].")
            tables[here] = table.reshape(-1, width)
    if mapping["positions"] == "learned":
        if not tables:
            raise ConversionError(f"{where}: `positions` are learned, so `position_table` must name them.")
        offset = mapping["position_offset"]
        config["position_encoding"] = "learned"
        config["max_position_embeddings"] = rows = min(len(table) for table in tables.values()) - offset
        for side, table in tables.items():
            tensors[f"model.{side}.embed_positions.weight"] = table[offset : offset + rows]
        return {side: table[offset:] for side, table in tables.items()}
    config.update(
        sinusoid_layout=mapping["positions"],
        sinusoid_exponent=mapping["position_exponent"],
        position_offset=mapping["position_offset"],
    )
    if not tables:
        return None
    for table in tables.values():
        kind = (mapping["positions"], mapping["position_exponent"], mapping["position_offset"])
        if (other := first_other_row(table.float(), *kind)) is not None:
            raise ConversionError(
                f"{reader.path}: the stored positions are not the sinusoid {', '.join(map(str, kind))} of {where}: row "
                f"{other[0]} differs by {other[1]:.3g}. Is `positions`, `position_exponent` or `position_offset` "
                "another one, or is the table learned?"
            )
    config["max_position_embeddings"] = len(table)
    choices.append(f"The stored table of {len(table)} positions is the sinusoid, which goes on past its end.")
    return tables
