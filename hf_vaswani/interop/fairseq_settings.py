"""Hyper-parameters of a fairseq checkpoint: where they stand, what a name leaves out, and which have no place here."""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .foreign import ConversionError

PAD = 1
# Default sizes by architecture name: `_BASE` with these changed.
_BASE: dict[str, Any] = {
    "encoder_embed_dim": 512, "encoder_ffn_embed_dim": 2048, "encoder_layers": 6, "encoder_attention_heads": 8,
    "decoder_embed_dim": 512, "decoder_ffn_embed_dim": 2048, "decoder_layers": 6, "decoder_attention_heads": 8,
    "encoder_normalize_before": False, "decoder_normalize_before": False, "encoder_learned_pos": False,
    "decoder_learned_pos": False, "share_all_embeddings": False, "share_decoder_input_output_embed": False,
    "no_scale_embedding": False, "no_decoder_final_norm": False, "activation_fn": "relu", "dropout": 0.1,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "max_source_positions": 1024, "max_target_positions": 1024,
}  # fmt: skip
_BIG = {
    "encoder_embed_dim": 1024, "encoder_ffn_embed_dim": 4096, "encoder_attention_heads": 16,
    "decoder_embed_dim": 1024, "decoder_ffn_embed_dim": 4096, "decoder_attention_heads": 16, "dropout": 0.3,
}  # fmt: skip
_IWSLT = {
    "encoder_ffn_embed_dim": 1024, "encoder_attention_heads": 4, "decoder_ffn_embed_dim": 1024,
    "decoder_attention_heads": 4,
}  # fmt: skip
_TINY = {
    "encoder_embed_dim": 64, "encoder_ffn_embed_dim": 64, "encoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_layers": 2, "decoder_attention_heads": 2,
}  # fmt: skip
_T2T = {"encoder_normalize_before": True, "decoder_normalize_before": True, "activation_dropout": 0.1}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "transformer": {},
    "transformer_tiny": _TINY,
    "transformer_iwslt_de_en": _IWSLT,
    "transformer_wmt_en_de": {},
    "transformer_vaswani_wmt_en_de_big": _BIG,
    "transformer_vaswani_wmt_en_fr_big": {**_BIG, "dropout": 0.1},
    "transformer_wmt_en_de_big": {**_BIG, "attention_dropout": 0.1},
    "transformer_wmt_en_de_big_t2t": {**_BIG, **_T2T, "attention_dropout": 0.1},
    # The same function; one attention head was also trained to align.
    "transformer_align": {},
    "transformer_wmt_en_de_big_align": {**_BIG, "attention_dropout": 0.1},
}

# Words in the name of an architecture or a task that is something else, and what that is.
_FAMILIES = {
    "lstm": "a recurrent network", "gru": "a recurrent network", "fconv": "a convolutional network",
    "lightconv": "lightweight convolutions in place of attention", "dynamicconv": "dynamic convolutions",
    "levenshtein": "a decoder that edits", "insertion": "a decoder that inserts",
    "cmlm": "a decoder without order", "nonautoregressive": "a decoder without order",
    "nacrf": "a decoder without order", "nat_": "a decoder without order", "translation_lev": "a decoder that edits",
    "bart": "a norm on the embeddings, and language tags", "_lm": "a language model without an encoder",
    "roberta": "an encoder alone", "language_modeling": "a language model without an encoder",
    "multilingual_transformer": "a stack for each language", "multilingual_translation": "a stack for each language",
    "multi_simple_epoch": "language tags", "_moe": "a mixture of experts", "_pg": "a pointer generator",
    "monotonic": "monotonic attention", "s2t": "an encoder of speech", "speech": "an encoder of speech",
    "linformer": "attention of low rank", "latent": "layers that are chosen by the language",
}  # fmt: skip

# What must be off: hyper-parameters that add to the function.
_REFUSED = (
    "layernorm_embedding", "no_token_positional_embeddings", "adaptive_input", "adaptive_softmax_cutoff",
    "cross_self_attention", "no_cross_attention", "encoder_layers_to_keep", "decoder_layers_to_keep",
    "quant_noise_pq", "quant_noise_scalar", "base_layers", "char_inputs", "encoder_xformers_att_config",
    "decoder_xformers_att_config", "scale_attn", "scale_fc", "scale_heads", "scale_resids", "encoder_moe_freq",
    "decoder_moe_freq", "moe_freq", "moe_expert_count", "use_stable_embedding", "deepnorm", "subln",
    "max_relative_length", "encoder_max_relative_length", "decoder_max_relative_length", "use_alibi", "alibi",
    "encoder_embed_linear", "decoder_embed_linear", "add_bias_kv", "add_zero_attn",
)  # fmt: skip
# What must be alike in encoder and decoder.
_ALIKE = ("embed_dim", "ffn_embed_dim", "attention_heads", "normalize_before", "learned_pos")
ACTIVATIONS = {
    "relu": "relu", "gelu": "gelu", "gelu_fast": "gelu_new", "gelu_accurate": "gelu_new", "tanh": "tanh",
    "linear": "linear", "relu_squared": "relu2",
}  # fmt: skip
# Settings of a search that have no counterpart, and the value at which they do nothing.
_SEARCH_LOSSES = {
    "unkpen": 0, "temperature": 1, "sampling": False, "diverse_beam_groups": -1, "diversity_rate": -1,
    "match_source_len": False, "replace_unk": None, "lm_path": None, "prefix_size": 0, "constraints": None,
}  # fmt: skip


def _plain(section: Any) -> dict[str, Any]:
    if isinstance(section, argparse.Namespace):
        return vars(section)
    return dict(section) if isinstance(section, Mapping) else {}


def _flat(section: Any) -> Iterator[tuple[str, Any]]:
    """Hyper-parameters of a section by their flat names, also where the file nests those of encoder and decoder."""
    for name, value in _plain(section).items():
        if name in ("encoder", "decoder", "quant_noise") and isinstance(value, Mapping):
            yield from ((f"{name}_{inner}", one) for inner, one in value.items())
        else:
            yield name, value


def read_settings(saved: Any, path: Path, overrides: Path | None) -> dict[str, Any]:
    """All that a checkpoint says, by the names of fairseq's command line; of two sections the earlier counts."""
    if not isinstance(saved, Mapping) or not isinstance(saved.get("model"), Mapping):
        keys = ", ".join(map(str, list(saved)[:8])) if isinstance(saved, Mapping) else type(saved).__name__
        raise ConversionError(
            f"{path} is no fairseq checkpoint, which holds `model` and `args` or `cfg`; it holds: {keys}. Is it of "
            "another toolkit?"
        )
    if saved.get("fsdp_metadata") or "shard_weights" in saved:
        raise ConversionError(
            f"{path}: `fsdp_metadata` says that this is one shard of a model. Put the shards together first, with "
            "fairseq's scripts/consolidate_fsdp_shards.py."
        )
    args, cfg = saved.get("args"), saved.get("cfg")
    if args is not None:
        found = dict(_flat(args))
    elif isinstance(cfg, Mapping) and _plain(cfg.get("model")):
        found = dict(_flat(cfg["model"]))
        for section in ("task", "criterion", "generation", "bpe", "tokenizer"):
            inner = cfg.get(section)
            name = inner if isinstance(inner, str) else _plain(inner).get("_name")
            if section != "generation":
                found[section] = name
            if inner is not None and not isinstance(inner, str):
                languages = ("source_lang", "target_lang") if section == "tokenizer" else ()  # "en" unless changed
                for key, value in _plain(inner).items():
                    if key not in languages:
                        found.setdefault(key, value)
    else:
        raise ConversionError(f"{path} has neither `args` nor `cfg`, so the model's shape is not known.")
    if overrides is not None:
        try:
            changed = json.loads(overrides.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConversionError(f"{overrides} cannot be read as JSON: {error}.") from error
        if not isinstance(changed, dict):
            raise ConversionError(
                f'{overrides} must hold an object of hyper-parameters, as in {{"arch": "transformer"}}.'
            )
        found.update(changed)
    found["arch"] = found.get("arch") or found.get("_name")
    if not found["arch"]:
        raise ConversionError(
            f"{path} does not say its `arch`, so its shape is not known. If you know it, give a JSON file such as "
            '{"arch": "transformer_wmt_en_de"} with --config.'
        )
    return found


class Settings(dict[str, Any]):
    """Hyper-parameters with the defaults of their architecture; a stated None is fairseq's own default."""

    def __missing__(self, name: str) -> Any:
        default = ARCHITECTURES[self["arch"]].get(name)
        if default is None and name in ("decoder_embed_dim", "decoder_ffn_embed_dim"):
            return self["en" + name.removeprefix("de")]
        return _BASE[name] if default is None else default

    def __init__(self, values: Mapping[str, Any]):
        super().__init__({name: value for name, value in values.items() if value is not None})
        self.update({name: _BASE[name] for name in _BASE if values.get(name, 0) is None})


def is_on(value: Any) -> bool:
    return bool(value) and value not in ("None", "none", "[]", "False")


def refuse(found: Mapping[str, Any], path: Path) -> None:
    """Stop at the first hyper-parameter that the architecture cannot represent."""
    arch, task = found["arch"], found.get("task") or "translation"
    for name, value, known in (("arch", arch, ARCHITECTURES), ("task", task, ("translation",))):
        if value in known:
            continue
        kind = next((what for word, what in _FAMILIES.items() if word in str(value)), None)
        raise ConversionError(
            f"{path}: `{name}` is {value!r}, which this architecture does not have ({kind})."
            if kind
            else f"{path}: `{name}` is {value!r}, which is not known; known are {', '.join(known)}. If yours is one of "
            f'them with other sizes, give a JSON file such as {{"{name}": "{next(iter(known))}"}} with --config.'
        )
    for name in _REFUSED:
        if is_on(found.get(name)):
            raise ConversionError(f"{path}: `{name}` is {found[name]!r}, which this architecture does not have.")
    settings = Settings(found)
    for name in _ALIKE:
        encoder, decoder = settings[f"encoder_{name}"], settings[f"decoder_{name}"]
        if encoder != decoder:
            raise ConversionError(
                f"{path}: `encoder_{name}` is {encoder!r} and `decoder_{name}` is {decoder!r}; this architecture has "
                "one for both."
            )
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if settings.get(name, settings["decoder_embed_dim"]) != settings["decoder_embed_dim"]:
            raise ConversionError(
                f"{path}: `{name}` is {settings[name]}, another width than `decoder_embed_dim` "
                f"({settings['decoder_embed_dim']}), which this architecture does not have."
            )
    if settings["activation_fn"] not in ACTIVATIONS:
        raise ConversionError(
            f"{path}: `activation_fn` is {settings['activation_fn']!r}, which this architecture does not have; known "
            f"are {', '.join(ACTIVATIONS)}."
        )


def generation(settings: Settings, positions: int, unused: list[int], losses: list[str]) -> dict[str, Any]:
    """The search that fairseq does with this checkpoint: what it says, else fairseq's defaults."""
    factor, constant = float(settings.get("max_len_a", 0)), int(settings.get("max_len_b", 200))
    shortest = int(settings.get("min_len", 1))
    found = {
        "num_beams": int(settings.get("beam", 5)),
        "length_penalty": 0.0 if is_on(settings.get("unnormalized")) else float(settings.get("lenpen", 1)),
        "length_penalty_type": "power",
        "early_stopping": True,
        "min_new_tokens": shortest if shortest > 0 else None,
        "suppress_tokens": [PAD, *unused],
    }
    if factor == 0.0:
        # At most `max_len_b` words; the end that fairseq forces behind them is no text. The start counts here.
        longest = min(constant, int(settings["max_target_positions"]) - 1, positions - 1 if positions else constant)
        found.update(max_length=longest + 1, max_length_offset=None)
    else:
        found["max_length_offset"] = constant + 1
        if factor != 1.0:
            losses.append(
                f"`max_len_a` ({factor}) has no counterpart: a translation may be {constant + 1} tokens longer than "
                "its source."
            )
    if settings.get("no_repeat_ngram_size"):
        found["no_repeat_ngram_size"] = int(settings["no_repeat_ngram_size"])
    for name, neutral in _SEARCH_LOSSES.items():
        if name in settings and settings[name] != neutral:
            losses.append(f"The search's `{name}` ({settings[name]!r}) has no counterpart, and is left out.")
    return found
