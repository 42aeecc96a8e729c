"""Writes a model as the folder of a transformers MarianMTModel, which tools for OPUS-MT models load.

A MarianMTModel has its sines before its cosines, where the paper has them in turn. No option changes that, but all else
in the model is blind to the order of the d_model columns: LayerNorm, residuals and tied embeddings commute with any
permutation of them. So the columns of all tensors change place, and the function stays.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..configuration_vaswani import VaswaniConfig
from .foreign import ConversionError, check_all_heads

# Entry of config.json with all that an import needs to undo the export.
RESTORE_KEY = "vaswani"
WIDTH_ORDERS = ("unchanged", "sines first")
# LayerNorm's epsilon, a constant in MarianMTModel's code.
_EPS = 1e-5
# A table of positions cannot grow there, so a translation has an absolute limit.
_MAX_LENGTH = 512
_READS_WIDTH = ("embed_tokens.weight", "shared.weight", "lm_head.weight", "q_proj.weight", "k_proj.weight",
                "v_proj.weight", "fc1.weight")  # fmt: skip
_ATTENTION_MAPS = ("q_proj", "k_proj", "v_proj", "out_proj")
_WRITES_WIDTH = ("out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias", "layer_norm.weight", "layer_norm.bias")
_RENAMED = (
    ("self_attn_residual.layer_norm", "self_attn_layer_norm"),
    ("encoder_attn_residual.layer_norm", "encoder_attn_layer_norm"),
    ("feed_forward_residual.layer_norm", "final_layer_norm"),
    ("feed_forward.", ""),
)


def export(model: Any, tokenizer: Any, out: Path) -> tuple[dict[str, Any], list[str]]:
    """Write a MarianMTModel that computes what a model of ours computes.

    Args:
        model (`VaswaniForConditionalGeneration`): stays as it is.
        tokenizer (*optional*): saved so that it loads without this package, where it can be.
        out (`Path`): an existing, empty folder.

    Returns:
        Facts for the report ("tensors", "choices") and a sentence for each thing that is lost.

    Raises:
        ConversionError: the shape cannot be a MarianMTModel's; nothing has been written.
    """
    from transformers import MarianConfig, MarianMTModel

    config: VaswaniConfig = model.config
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    choices, losses = _check(config, state), []
    order = "sines first" if config.sinusoid_layout == "interleaved" else "unchanged"
    if order == "sines first":
        choices.append(
            "The columns of the model width are reordered, sines first, in all tensors: the function is one."
        )
    tensors = _tensors(config, reorder_width(state, order), choices)
    settings, more = _generation(model)
    losses += more + _losses(config)

    fields = {**_fields(config), RESTORE_KEY: _restore_entry(model, order, tokenizer)}
    marian = MarianConfig(**fields)
    with torch.device("meta"):
        target: Any = MarianMTModel(marian)
    wanted = {name for name in target.state_dict() if name not in target.all_tied_weights_keys}
    wanted -= {f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")}
    if set(tensors) != wanted:
        raise ConversionError(
            f"This transformers has other tensors in a MarianMTModel: {sorted(set(tensors) ^ wanted)}."
        )
    target.load_state_dict(tensors, strict=False, assign=True)
    target.tie_weights()
    target.generation_config = settings
    target.save_pretrained(out)
    if tokenizer is not None:
        losses += _save_tokenizer(tokenizer, out)
    return {"tensors": len(tensors), "choices": choices}, losses


def reorder_width(tensors: Mapping[str, torch.Tensor], order: str, undo: bool = False) -> dict[str, torch.Tensor]:
    """Put the columns of d_model into another order, in every tensor that has them.

    Args:
        tensors (`Mapping[str, Tensor]`): by the names of `VaswaniForConditionalGeneration.state_dict()`.
        order (`str`): one of `WIDTH_ORDERS`; "sines first" takes interleaved sinusoids to halves. undo (`bool`): back.

    Returns:
        `dict`: new tensors where the order changes; the same ones for "unchanged".
    """
    if order == "unchanged":
        return dict(tensors)
    width = tensors["model.shared.weight"].shape[1]
    columns = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    if undo:
        columns = torch.argsort(columns)
    moved = {}
    for name, tensor in tensors.items():
        if name.endswith(_READS_WIDTH):
            tensor = tensor[:, columns.to(tensor.device)]
        elif name.endswith(_WRITES_WIDTH):
            tensor = tensor[columns.to(tensor.device)]
        moved[name] = tensor
    return moved


def restore(
    raw: dict[str, Any],
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    generation: dict[str, Any],
    path: Path,
    choices: list[str],
) -> bool:
    """Undo an export, if a MarianMTModel's folder is one.

    Args:
        raw (`dict`): its config.json. path (`Path`): the folder, for errors.
        config, tensors, generation (`dict`): what an import made of it, as of any other; changed in place.
        choices (`list`): gets a sentence for what was done.

    Returns:
        `bool`: whether it is an export of this package.

    Raises:
        ConversionError: the entry is damaged, or is of a model of another size.
    """
    left = raw.get(RESTORE_KEY)
    if left is None:
        return False
    order = str(left.get("width_order")) if isinstance(left, dict) else ""
    own = left.get("config") if order in WIDTH_ORDERS else None
    if not isinstance(own, dict) or not isinstance(left.get("generation"), dict):
        raise ConversionError(f"{path / 'config.json'}: `{RESTORE_KEY}` is not as an export writes it.")
    sizes = ("vocab_size", "d_model", "encoder_layers", "decoder_layers", "d_ff")
    if any(own.get(name) != config[name] for name in sizes):
        raise ConversionError(
            f"{path / 'config.json'}: `{RESTORE_KEY}` is of a model of another size, so this one was changed after its "
            "export. Take that entry out to import it as any MarianMTModel."
        )
    for name, tensor in reorder_width(tensors, order, undo=True).items():
        tensors[name] = tensor
    for flag, endings in (("attention_bias", _ATTENTION_MAPS), ("output_bias", ("lm_head",))):
        if own.get(flag):
            continue
        biases = [name for name in tensors if name.endswith(tuple(f"{one}.bias" for one in endings))]
        if any(bool(tensors[name].any()) for name in biases):
            own = {**own, flag: True}
            choices.append(
                f"`{flag}`: the biases that the export filled with zeros are not zero any more, so they stay."
            )
            continue
        for name in biases:
            del tensors[name]
    for name in ("tie_word_embeddings", "tie_encoder_decoder_embeddings"):
        own = {**own, name: own.get(name) if own.get(name) is not None else config[name]}
    for flag, name in (
        ("tie_encoder_decoder_embeddings", "model.encoder.embed_tokens.weight"),
        ("tie_word_embeddings", "lm_head.weight"),
    ):
        if own[flag] and name in tensors:
            if not torch.equal(tensors[name], tensors["model.shared.weight"]):
                own = {**own, flag: False}
                choices.append(f"`{flag}`: the two matrices have become unlike, so they stay two.")
            else:
                del tensors[name]
        elif not own[flag] and name not in tensors:
            tensors[name] = tensors["model.shared.weight"].clone()
    config.clear()
    config.update({name: value for name, value in own.items() if name in VaswaniConfig.__annotations__})
    generation.clear()
    generation.update(left["generation"])
    choices.append("The folder is an export of this package: what it was before is restored.")
    return True


# ---------------------------------------------------------------------- what can be
def _check(config: VaswaniConfig, state: Mapping[str, torch.Tensor]) -> list[str]:
    """Refuse by name what a MarianMTModel cannot be; sentences for what it can be all the same."""
    check_all_heads(config, "a MarianMTModel")
    width, heads = config.d_model, config.num_attention_heads
    wrong: dict[str, bool] = {
        "norm_position": config.norm_position != "post",
        "final_norm": config.has_final_norm,
        "position_encoding": config.position_encoding != "sinusoidal",
        "sinusoid_exponent": config.sinusoid_exponent != "2i/d",
        "position_offset": config.position_offset != 0,
        "d_k": config.query_key_width * heads != width,
        "d_v": config.value_width * heads != width,
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise ConversionError(
                f"`{name}` is {getattr(config, name)!r}, which a MarianMTModel cannot have; ctranslate2 or onnx may "
                "serve. Nothing was written."
            )
    if isinstance(config.eos_token_id, list):
        raise ConversionError("`eos_token_id` is a list, and a MarianMTModel has one end token. Nothing was written.")
    choices = []
    if config.zero_start_embedding:
        start = state["model.shared.weight"][config.decoder_start_token_id]
        if bool(start.any()):
            raise ConversionError(
                "`zero_start_embedding` is True, but the start token's row is not zero, as a MarianMTModel would need "
                "it. Nothing was written."
            )
        choices.append("The start token's embedding is zero, so no option is needed for it.")
    return choices


def _tensors(config: VaswaniConfig, state: Mapping[str, torch.Tensor], choices: list[str]) -> dict[str, torch.Tensor]:
    """Under MarianMTModel's names, each tied matrix once, contiguous."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if ".layers." not in name:
            continue
        for ours, theirs in _RENAMED:
            name = name.replace(ours, theirs)
        found[name] = tensor.contiguous()
    if not config.attention_bias:
        for name in [name for name in found if name.endswith("_proj.weight")]:
            found[name.replace("weight", "bias")] = found[name].new_zeros(found[name].shape[0])
        choices.append("A MarianMTModel has biases in attention: they are zeros.")
    matrix = state["model.shared.weight"].contiguous()
    bias = state.get("lm_head.bias")
    if bias is None:
        choices.append("A MarianMTModel has an output bias: it is zeros.")
        bias = matrix.new_zeros(matrix.shape[0])
    found["final_logits_bias"] = bias[None].contiguous()
    if config.ties_source_and_target and config.tie_word_embeddings:
        found["model.shared.weight"] = matrix
        return found
    # What transformers does with one embedding and another output matrix has changed between its versions, so the
    # embeddings are two then.
    source = state["model.encoder.embed_tokens.weight"].contiguous()
    if config.ties_source_and_target:
        source = source.clone()
        choices.append("Source and target embedding, one matrix here, are written as two equal ones.")
    found |= {"model.encoder.embed_tokens.weight": source, "model.decoder.embed_tokens.weight": matrix}
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = state["lm_head.weight"].contiguous()
    return found


# ---------------------------------------------------------------------- config.json
def _fields(config: VaswaniConfig) -> dict[str, Any]:
    """Of `MarianConfig`."""
    is_one = config.ties_source_and_target and config.tie_word_embeddings
    same = ("d_model", "encoder_layers", "decoder_layers", "activation_function", "dropout", "attention_dropout",
            "activation_dropout", "scale_embedding", "max_position_embeddings", "tie_word_embeddings", "pad_token_id",
            "eos_token_id", "bos_token_id", "decoder_start_token_id")  # fmt: skip
    fields = {name: getattr(config, name) for name in same}
    for side in ("encoder", "decoder"):
        fields[f"{side}_attention_heads"] = config.num_attention_heads
        fields[f"{side}_ffn_dim"] = config.d_ff
    return {
        **fields,
        "vocab_size": config.encoder_vocab_size,
        "decoder_vocab_size": config.vocab_size,
        "share_encoder_decoder_embeddings": is_one,
        "static_position_embeddings": True,
        "forced_eos_token_id": None,
        "dtype": config.dtype,
    }


def _restore_entry(model: Any, order: str, tokenizer: Any) -> dict[str, Any]:
    """What an import needs to undo this export."""
    config: VaswaniConfig = model.config
    names = [name for name in VaswaniConfig.__annotations__ if name in config.__dict__]
    settings = {
        name: value
        for name, value in model.generation_config.to_diff_dict().items()
        if not name.startswith("_") and name != "transformers_version" and not name.endswith("_token_id")
    }
    return {
        "width_order": order,
        "config": {name: getattr(config, name) for name in names},
        "generation": settings,
        "tokenizer": type(tokenizer).__name__,
    }


def _losses(config: VaswaniConfig) -> list[str]:
    losses = []
    if config.layer_norm_eps != _EPS:
        losses.append(
            f"`layer_norm_eps` {config.layer_norm_eps:g}: it is {_EPS:g} in MarianMTModel's code, which moves the "
            "logits a little."
        )
    if config.label_smoothing:
        losses.append(f"`label_smoothing` {config.label_smoothing:g}: MarianMTModel's own loss has none.")
    losses.append(f"A source or a translation of over {config.max_position_embeddings} pieces is an error there.")
    return losses


def _generation(model: Any) -> tuple[Any, list[str]]:
    """Settings of `generate()` as far as transformers' own search has them, and what it has not."""
    from transformers import GenerationConfig

    config: VaswaniConfig = model.config
    own = {k: v for k, v in model.generation_config.to_diff_dict().items() if not k.startswith("_")}
    own.pop("transformers_version", None)
    losses = []
    kind = own.pop("length_penalty_type", "power")
    alpha = float(own.get("length_penalty", 1.0))
    if kind == "gnmt" and alpha and own.get("num_beams", 1) > 1:
        losses.append(
            f"The length penalty ((5 + n) / 6)^{alpha:g}: MarianMTModel's search knows n^{alpha:g} only, and may "
            "choose another of its beams."
        )
    limit = min(_MAX_LENGTH, config.max_position_embeddings)
    if own.pop("max_length_offset", None) is not None:
        losses.append(f"The limit of source length + n new pieces: there the limit is {limit} pieces for any source.")
        own.setdefault("max_length", limit)
    if own.pop("forced_prefix_ids", None):
        losses.append("`forced_prefix_ids`: pass them as `decoder_input_ids` there.")
    return GenerationConfig(**own), losses


# ---------------------------------------------------------------------- tokenizer
def _save_tokenizer(tokenizer: Any, out: Path) -> list[str]:
    """Save it so that no code of this package is needed; otherwise say what is."""
    from transformers import PreTrainedTokenizerFast

    from ..tokenization_vaswani import VaswaniTokenizer

    if type(tokenizer).__module__.startswith("transformers."):
        tokenizer.save_pretrained(out)
        return []
    if type(tokenizer).__name__ == VaswaniTokenizer.__name__:
        names = ("pad_token", "eos_token", "bos_token", "unk_token")
        plain = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer,
            **{name: getattr(tokenizer, name) for name in names if getattr(tokenizer, name) is not None},
            model_max_length=tokenizer.model_max_length,
            split_special_tokens=tokenizer.split_special_tokens,
            clean_up_tokenization_spaces=False,
            extra_special_tokens=list(tokenizer.extra_special_tokens),
        )
        plain.backend_tokenizer.no_truncation()
        plain.backend_tokenizer.no_padding()
        plain.save_pretrained(out)
        return []
    tokenizer.save_pretrained(out)
    return [
        f"{type(tokenizer).__name__} is code of this package: who loads the tokenizer needs the package, or "
        "`trust_remote_code=True`."
    ]
