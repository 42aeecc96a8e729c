"""Hyper-parameters of Tensor2Tensor, from its files or by the name of a set, in this package's terms."""

import ast
import json
import re
from pathlib import Path
from typing import Any

from .foreign import ConversionError, ImportOptions

# Hyper-parameters that this reader looks at, with their values in Tensor2Tensor's first set, `transformer_base_v1`. A
# checkpoint of an older version lacks the newer ones, and these values are what that version did.
_BASE_V1: dict[str, Any] = {
    "hidden_size": 512, "filter_size": 2048, "num_heads": 8, "num_hidden_layers": 6, "num_encoder_layers": 0,
    "num_decoder_layers": 0, "attention_key_channels": 0, "attention_value_channels": 0,
    "layer_preprocess_sequence": "none", "layer_postprocess_sequence": "dan", "norm_epsilon": 1e-6, "pos": "timing",
    "max_length": 256, "multiply_embedding_mode": "sqrt_depth", "shared_embedding_and_softmax_weights": True,
    "shared_embedding": False, "use_target_space_embedding": True, "layer_prepostprocess_dropout": 0.1,
    "attention_dropout": 0.0, "relu_dropout": 0.0, "label_smoothing": 0.1,
}  # fmt: skip
_V2 = {
    "layer_preprocess_sequence": "n", "layer_postprocess_sequence": "da", "attention_dropout": 0.1, "relu_dropout": 0.1
}  # fmt: skip
_BIG = {**_V2, "hidden_size": 1024, "filter_size": 4096, "num_heads": 16}
_CLEAN = {**_V2, "label_smoothing": 0.0, "layer_prepostprocess_dropout": 0.0, "attention_dropout": 0.0,
          "relu_dropout": 0.0, "max_length": 0}  # fmt: skip
_TINY = {**_V2, "num_hidden_layers": 2, "hidden_size": 128, "filter_size": 512, "num_heads": 4}
_SMALL = {**_TINY, "hidden_size": 256, "filter_size": 1024}
# The named sets for translation, as changes to the first one; used only where no hparams.json was kept.
_SETS: dict[str, dict[str, Any]] = {
    "transformer_base_v1": {},
    "transformer_base_v2": _V2, "transformer_base_v3": _V2, "transformer_base": _V2, "transformer_tpu": _V2,
    "transformer_base_single_gpu": _V2, "transformer_base_multistep8": _V2, "transformer_packed_tpu": _V2,
    "transformer_big": {**_BIG, "layer_prepostprocess_dropout": 0.3},
    "transformer_big_tpu": {**_BIG, "layer_prepostprocess_dropout": 0.3},
    "transformer_big_dr1": _BIG, "transformer_big_single_gpu": _BIG,
    "transformer_big_dr2": {**_BIG, "layer_prepostprocess_dropout": 0.2},
    "transformer_big_enfr": {**_BIG, "filter_size": 8192, "shared_embedding_and_softmax_weights": False},
    "transformer_clean": _CLEAN,
    "transformer_clean_big": {**_CLEAN, "hidden_size": 1024, "filter_size": 4096},
    "transformer_tiny": _TINY, "transformer_tiny_tpu": _TINY, "transformer_small": _SMALL,
    "transformer_small_tpu": _SMALL,
    "transformer_test": {**_TINY, "hidden_size": 16, "filter_size": 8, "num_heads": 2},
    **{f"transformer_l{n}": {**_V2, "num_hidden_layers": n} for n in (2, 4, 8, 10)},
    **{f"transformer_h{n}": {**_V2, "num_heads": n} for n in (1, 4, 16, 32)},
    **{f"transformer_k{n}": {**_V2, "attention_key_channels": n} for n in (128, 256)},
    **{f"transformer_ff{n}": {**_V2, "filter_size": n} for n in (1024, 4096)},
    **{f"transformer_dr{n}": {**_V2, "layer_prepostprocess_dropout": n / 10} for n in (0, 2)},
    **{f"transformer_ls{n}": {**_V2, "label_smoothing": n / 10} for n in (0, 2)},
    **{f"transformer_hs{n}": {**_V2, "hidden_size": n} for n in (256, 1024)},
}  # fmt: skip
# Hyper-parameters that change the function, and the values with which it is this architecture's. Missing is the first.
_NEEDED: dict[str, tuple[Any, ...]] = {
    "norm_type": ("layer",),
    "self_attention_type": ("dot_product",),
    "ffn_layer": ("dense_relu_dense", "conv_hidden_relu"),
    "pos": ("timing", "emb"),
    "proximity_bias": (False,),
    "causal_decoder_self_attention": (True,),
    "unidirectional_encoder": (False,),
    "attention_variables_3d": (False,),
    "hard_attention_k": (0,),
    "num_area_layers": (0,),
    "prepend_mode": ("none",),
    "nbr_decoder_problems": (1,),
    "symbol_modality_skip_top": (False,),
    "weight_dtype": ("float32",),
    "recurrence_type": (None, "none"),
    "input_modalities": ("default", "", None, "inputs:symbol:default"),
    "target_modality": ("default", "", None, "symbol:default"),
    "modality": ({}, None),
    "bottom": ({}, None),
    "top": ({}, None),
}


def read_hparams(folder: Path, options: ImportOptions) -> tuple[Path, dict[str, Any]]:
    """All hyper-parameters that are known, over the first set's, and the file that they are from.

    Args:
        folder (`Path`): of the checkpoint. options (`ImportOptions`): `config` names another file.

    Raises:
        ConversionError: there is no such file, it is of another model, or its set of hyper-parameters is not known.
    """
    given = [options.config] if options.config else [folder / "hparams.json", folder / "flags.txt"]
    path = next((one for one in given if one.is_file()), None)
    if path is None:
        raise ConversionError(
            f"{given[0]} does not exist, so the number of heads and the order of norms are not known. Name the "
            "hparams.json, or the flags.txt, of the training run with `config`."
        )
    flags_path = path if path.suffix == ".txt" else path.with_name("flags.txt")
    flags = {}
    if flags_path.is_file():
        lines = flags_path.read_text(encoding="utf-8").splitlines()
        flags = dict(line[2:].split("=", 1) for line in lines if line.startswith("--") and "=" in line)
    if flags.get("model", "transformer") != "transformer":
        raise ConversionError(
            f"{flags_path}: `model` is {flags['model']}, which this architecture is not; only `transformer` is."
        )
    if path.suffix == ".txt":
        return path, _from_flags(path, flags)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConversionError(f"{path} is not JSON ({error}).") from error
    if not isinstance(found, dict) or not {"hidden_size", "num_heads"} <= set(found):
        raise ConversionError(f"{path} has no `hidden_size` and `num_heads`: is it the hparams.json of a Transformer?")
    return path, {**_BASE_V1, **found}


def _from_flags(path: Path, flags: dict[str, str]) -> dict[str, Any]:
    name = flags.get("hparams_set", "")
    if name not in _SETS:
        raise ConversionError(
            f"{path}: the hyper-parameters of `hparams_set` {name!r} are not known here; known are {', '.join(_SETS)}. "
            "Name the hparams.json of the training run with `config`."
        )
    changes: dict[str, Any] = {}
    # Commas part the changes, and may also stand inside a list's brackets.
    for change in re.findall(r"(\w+=(?:\[[^\]]*\]|[^,]*))", flags.get("hparams", "")):
        key, value = change.split("=", 1)
        try:
            changes[key] = ast.literal_eval(value.capitalize() if value in ("true", "false") else value)
        except (ValueError, SyntaxError):
            changes[key] = value
    return {**_BASE_V1, **_SETS[name], **changes}


def check_hparams(hparams: dict[str, Any], path: Path) -> None:
    """Refuse what changes the function and is not in this architecture.

    Raises:
        ConversionError: naming the hyper-parameter.
    """
    for name, allowed in _NEEDED.items():
        value = hparams.get(name, allowed[0])
        if value not in allowed:
            raise ConversionError(
                f"{path}: `{name}` is {value!r}, which this architecture does not have; it has "
                f"{' or '.join(repr(one) for one in allowed[:2])}."
            )


def architecture(hparams: dict[str, Any], path: Path) -> dict[str, Any]:
    """Fields of `VaswaniConfig`, without the vocabulary's.

    Raises:
        ConversionError: for an order of norm and sum that is neither pre nor post, or heads that do not divide.
    """
    # Dropout does nothing in translation, so only norms and sums count.
    sequences = [
        str(hparams[f"layer_{when}process_sequence"] or "none").replace("none", "").replace("d", "")
        for when in ("pre", "post")
    ]
    orders = {("n", "a"): "pre", ("", "an"): "post"}
    order = orders.get((sequences[0], sequences[1]))
    if order is None:
        raise ConversionError(
            f"{path}: `layer_preprocess_sequence` {hparams['layer_preprocess_sequence']!r} with "
            f"`layer_postprocess_sequence` {hparams['layer_postprocess_sequence']!r} is an order of norm and sum that "
            "this architecture does not have; it has 'n' with 'da' and 'none' with 'dan'."
        )
    heads, width = hparams["num_heads"], hparams["hidden_size"]
    widths = {"d_k": hparams["attention_key_channels"] or width, "d_v": hparams["attention_value_channels"] or width}
    for name, total in widths.items():
        if total % heads:
            raise ConversionError(f"{path}: `num_heads` {heads} does not divide the attention's {total} channels.")
        widths[name] = total // heads
    return {
        "d_model": width,
        "d_ff": hparams["filter_size"],
        "num_attention_heads": heads,
        "encoder_layers": hparams["num_encoder_layers"] or hparams["num_hidden_layers"],
        "decoder_layers": hparams["num_decoder_layers"] or hparams["num_hidden_layers"],
        **widths,
        "norm_position": order,
        "final_norm": order == "pre",
        "layer_norm_eps": hparams["norm_epsilon"],
        "activation_function": "relu",
        "dropout": hparams["layer_prepostprocess_dropout"],
        "attention_dropout": hparams["attention_dropout"],
        "activation_dropout": hparams["relu_dropout"],
        "label_smoothing": hparams["label_smoothing"],
        "position_encoding": "sinusoidal" if hparams["pos"] == "timing" else "learned",
        "sinusoid_layout": "halves",
        "sinusoid_exponent": "2i/(d-2)",
        "position_offset": 0,
        "scale_embedding": hparams["multiply_embedding_mode"] == "sqrt_depth",
        "attention_bias": False,
        "output_bias": False,
        # The decoder starts with the padding id, and the embedding of that is zero.
        "zero_start_embedding": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "unk_token_id": None,
        "decoder_start_token_id": 0,
    }
