"""The configuration of a Vaswani et al. (2017) encoder-decoder, and the paper's own settings by name.

Letters of the paper and the fields that hold them: N `encoder_layers`, `decoder_layers`; d_model `d_model`; d_ff
`d_ff`; h `num_attention_heads`; d_k `d_k`; d_v `d_v`; P_drop `dropout`; epsilon_ls `label_smoothing`; V `vocab_size`.
"""

import difflib
import importlib.util
import sys
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

# Table 3 of the paper, and the two big models of Table 2. Every row is "base, with these fields changed".
_BIG = {"d_model": 1024, "d_ff": 4096, "num_attention_heads": 16}
PRESETS: dict[str, dict[str, Any]] = {
    "base": {},
    "big": {**_BIG, "dropout": 0.3},
    # The paper's En-Fr model keeps the base dropout and has 32,000 word pieces.
    "big-en-fr": {**_BIG, "dropout": 0.1, "vocab_size": 32000},
    # Not a row of the paper: the size that the quickstart trains in minutes on two CPU cores.
    "tiny": {
        "d_model": 128,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "num_attention_heads": 4,
        "d_ff": 512,
        "vocab_size": 2000,
    },
    "table3-base": {},
    "table3-A-h1": {"num_attention_heads": 1, "d_k": 512, "d_v": 512},
    "table3-A-h4": {"num_attention_heads": 4, "d_k": 128, "d_v": 128},
    "table3-A-h16": {"num_attention_heads": 16, "d_k": 32, "d_v": 32},
    "table3-A-h32": {"num_attention_heads": 32, "d_k": 16, "d_v": 16},
    "table3-B-dk16": {"d_k": 16, "d_v": 64},
    "table3-B-dk32": {"d_k": 32, "d_v": 64},
    "table3-C-N2": {"encoder_layers": 2, "decoder_layers": 2},
    "table3-C-N4": {"encoder_layers": 4, "decoder_layers": 4},
    "table3-C-N8": {"encoder_layers": 8, "decoder_layers": 8},
    "table3-C-d256": {"d_model": 256, "d_k": 32, "d_v": 32},
    "table3-C-d1024": {"d_model": 1024, "d_k": 128, "d_v": 128},
    "table3-C-dff1024": {"d_ff": 1024},
    "table3-C-dff4096": {"d_ff": 4096},
    "table3-D-dropout0.0": {"dropout": 0.0},
    "table3-D-dropout0.2": {"dropout": 0.2},
    "table3-D-smoothing0.0": {"label_smoothing": 0.0},
    "table3-D-smoothing0.2": {"label_smoothing": 0.2},
    "table3-E-learned": {"position_encoding": "learned"},
    "table3-big": {**_BIG, "dropout": 0.3},
}

# Keys that the library or its tools write into a config and that are no field of the architecture.
_LIBRARY_KEYS = {
    "_name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_internal", "attn_implementation",
    "_experts_implementation", "experts_implementation", "auto_map", "custom_pipelines", "model_type", "name_or_path",
    "num_labels", "output_attentions", "quantization_config", "tokenizer_class", "torch_dtype", "prefix",
    "task_specific_params", "base_model_tp_plan", "base_model_pp_plan", "base_model_fsdp_plan",
    "torchscript", "use_return_dict", "tf_legacy_loss", "use_bfloat16", "finetuning_task", "sep_token_id",
}  # fmt: skip

_CHOICES = {
    "norm_position": ("post", "pre"),
    "position_encoding": ("sinusoidal", "learned"),
    "sinusoid_layout": ("interleaved", "halves"),
    "sinusoid_exponent": ("2i/d", "2i/(d-2)"),
}


@strict
class VaswaniConfig(PreTrainedConfig):
    r"""All that defines a model of the 2017 paper and of its close descendants.

    The defaults are the paper's base model (Table 3, row "base") at V = 37,000.

    Args:
        vocab_size (`int`): V, pieces of the target vocabulary, which is also the source's unless split.
        source_vocab_size (`int`, *optional*): pieces of a separate source vocabulary; None: one joint vocabulary.
        d_model (`int`): width of every sublayer's output.
        encoder_layers, decoder_layers (`int`): N of each stack.
        num_attention_heads (`int`): h.
        d_k, d_v (`int`, *optional*): width of one head's queries and keys, and of its values; None: d_model / h.
        kept_heads (`dict[str, list[int]]`, *optional*): of attentions that were pruned, which of the h heads are left,
            by their numbers before any pruning: {"encoder.0": [0, 5], "cross.1": [2]}. The kinds are "encoder",
            "decoder" and "cross". d_k and d_v stay what they were. An attention that is not named has all h heads.
            Choice: an attention keeps at least one head; `hf_vaswani.analysis.pruning` writes this field.
        d_ff (`int`): inner width of the feed-forward sublayer.
        activation_function (`str`): name in transformers' `ACT2FN`; the paper's is "relu".
        dropout (`float`): P_drop of section 5.4, on sublayer outputs and on the sums of embeddings and positions.
        attention_dropout, activation_dropout (`float`): dropout on attention weights and after the activation.
            Choice: 0, as in the paper's text; Tensor2Tensor's later presets use 0.1.
        label_smoothing (`float`): epsilon_ls of section 5.4, spread evenly over all V classes.
        norm_position (`str`): "post", LayerNorm(x + Sublayer(x)) as in section 3.1, or "pre" for descendants.
        final_norm (`bool`, *optional*): one more LayerNorm on top of each stack. None: as `norm_position` needs,
            that is False for "post" (the paper) and True for "pre".
        layer_norm_eps (`float`): Choice: 1e-6, the authors' code; the paper names none.
        position_encoding (`str`): "sinusoidal" (section 3.5) or "learned" (Table 3, row E).
        sinusoid_layout (`str`): "interleaved" (sine and cosine in turn, the paper) or "halves" (all sines first).
        sinusoid_exponent (`str`): power of 10000 in the sinusoid: "2i/d" (the paper) or "2i/(d-2)", with which the last
            wavelength is exactly 10000 times 2 pi; the authors' code has it, and with it many descendants.
        position_offset (`int`): number of the first position in the sinusoid; the paper does not say, and 0 is usual.
        max_position_embeddings (`int`): rows of the position table at the start. A sinusoid grows past it on
            demand; a learned table cannot.
        scale_embedding (`bool`): multiply embeddings by sqrt(d_model) (section 3.4).
        tie_word_embeddings (`bool`): the pre-softmax matrix is the target embedding (section 3.4).
        tie_encoder_decoder_embeddings (`bool`, *optional*): source and target embedding are one matrix. None: as
            `tie_word_embeddings`, unless a separate source vocabulary makes it impossible.
        zero_start_embedding (`bool`): the decoder reads a zero vector, plus its position, where the start token stands.
        attention_bias, output_bias (`bool`): biases of the attention's four maps and of the pre-softmax map.
        pad_token_id, eos_token_id, bos_token_id, unk_token_id (`int`, *optional*): special pieces.
        decoder_start_token_id (`int`, *optional*): what stands before the first target piece. None: the bos id, or
            the pad id where there is no bos.
        use_cache (`bool`): keep keys and values while decoding.

    Raises:
        StrictDataclassError: at construction, for a value that no model can have; the message names the field.
        TypeError: for a keyword that is no field, with the nearest one named.

    Source: Vaswani et al. 2017, sections 3 and 5.4, Table 3.
    """

    model_type = "vaswani"
    keys_to_ignore_at_inference = ["cache"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
        "encoder_attention_heads": "num_attention_heads",
        "decoder_attention_heads": "num_attention_heads",
        "encoder_ffn_dim": "d_ff",
        "decoder_ffn_dim": "d_ff",
        "intermediate_size": "d_ff",
        "layer_norm_epsilon": "layer_norm_eps",
    }

    vocab_size: int = 37000
    source_vocab_size: int | None = None
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    num_attention_heads: int = 8
    kept_heads: dict[str, list[int]] | None = None
    d_k: int | None = None
    d_v: int | None = None
    d_ff: int = 2048
    activation_function: str = "relu"
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    label_smoothing: float | int = 0.1
    norm_position: str = "post"
    final_norm: bool | None = None
    layer_norm_eps: float = 1e-6
    position_encoding: str = "sinusoidal"
    sinusoid_layout: str = "interleaved"
    sinusoid_exponent: str = "2i/d"
    position_offset: int = 0
    max_position_embeddings: int = 1024
    scale_embedding: bool = True
    tie_word_embeddings: bool = True
    tie_encoder_decoder_embeddings: bool | None = None
    zero_start_embedding: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    use_cache: bool = True
    is_encoder_decoder: bool = True
    pad_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    bos_token_id: int | None = 2
    unk_token_id: int | None = None
    decoder_start_token_id: int | None = None

    # ------------------------------------------------------------------ construction
    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> "VaswaniConfig":
        """The paper's settings by name, with further fields changed at will.

        Args:
            name (`str`): "base", "big", "big-en-fr", "tiny", or a row of Table 3 such as "table3-A-h1".
            changes: fields that override the preset's.

        Returns:
            `VaswaniConfig`.

        Raises:
            ValueError: for an unknown name; the message lists all of them.

        Source: Vaswani et al. 2017, Table 3 and section 5.4.
        """
        if name not in PRESETS:
            near = difflib.get_close_matches(str(name), PRESETS, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"Unknown preset {name!r}.{hint} Presets: {', '.join(PRESETS)}.")
        return cls(**{**PRESETS[name], **changes})

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        # The library goes on with default values where config.json is missing, and only warns of another architecture.
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if not config_dict:
            raise OSError(f"{pretrained_model_name_or_path} has no config.json, so the model's shape is not known.")
        found = config_dict.get("model_type", cls.model_type)
        if found != cls.model_type:
            raise ValueError(
                f"{pretrained_model_name_or_path} holds a model of type {found!r}, not {cls.model_type!r}. Load it "
                "with AutoModelForSeq2SeqLM, or convert it with `hf-vaswani import`."
            )
        return config_dict, kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        # Other tools add keys of their own to a saved config; they are kept as attributes. Only a key that looks
        # like a misspelt field of ours is refused, by the constructor.
        # Settings of generate() belong in generation_config.json and have no effect here, as in the library.
        misplaced = cls._generation_keys()
        config_dict = {k: v for k, v in config_dict.items() if k not in misplaced}
        extra = {k: v for k, v in config_dict.items() if not cls._is_known_key(k) and not cls._nearest_field(k)}
        known = {k: v for k, v in config_dict.items() if k not in extra}
        result = super().from_dict(known, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        for key, value in extra.items():
            setattr(config, key, value)
        return result

    def __post_init__(self, **kwargs: Any) -> None:
        # An installed package needs no code from a checkpoint, so the entry that asks for it is dropped; a class
        # that itself came from a checkpoint keeps it.
        if not type(self).__module__.startswith("transformers_modules."):
            kwargs.pop("custom_pipelines", None)
        for key in kwargs:
            if key in self._generation_keys():
                raise TypeError(f"`{key}` is a setting of generate(): set it on `model.generation_config` instead.")
            if not self._is_known_key(key):
                near = self._nearest_field(key)
                hint = (
                    f" Did you mean `{near}`?"
                    if near
                    else f" Fields: {', '.join(sorted(VaswaniConfig.__annotations__))}."
                )
                raise TypeError(f"VaswaniConfig has no field `{key}`.{hint}")
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.bos_token_id if self.bos_token_id is not None else self.pad_token_id
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        # Makes a saved folder usable by `pipeline("translation", folder, trust_remote_code=True)` where the package
        # is not installed.
        return {
            **super().to_dict(),
            "custom_pipelines": {
                "translation": {
                    "impl": "pipeline_vaswani.VaswaniTranslationPipeline",
                    "pt": ["AutoModelForSeq2SeqLM"],
                    "type": "text",
                }
            },
        }

    # ------------------------------------------------------------------ derived values
    @property
    def query_key_width(self) -> int:
        """Width d_k of one head's queries and keys."""
        return self.d_k if self.d_k is not None else self.d_model // self.num_attention_heads

    @property
    def value_width(self) -> int:
        """Width d_v of one head's values."""
        return self.d_v if self.d_v is not None else self.d_model // self.num_attention_heads

    def heads_of(self, kind: str, layer: int) -> list[int]:
        """Numbers, before any pruning, of the heads of one attention, in the order of its weights.

        Args:
            kind (`str`): "encoder", "decoder" (self-attention) or "cross". layer (`int`): from 0.
        """
        kept = (self.kept_heads or {}).get(f"{kind}.{layer}")
        return list(range(self.num_attention_heads)) if kept is None else list(kept)

    @property
    def has_final_norm(self) -> bool:
        """Whether each stack ends in a LayerNorm of its own."""
        return self.final_norm if self.final_norm is not None else self.norm_position == "pre"

    @property
    def encoder_vocab_size(self) -> int:
        """Rows of the source embedding."""
        return self.source_vocab_size if self.source_vocab_size is not None else self.vocab_size

    @property
    def ties_source_and_target(self) -> bool:
        """Whether source and target embedding are one matrix."""
        if self.tie_encoder_decoder_embeddings is not None:
            return self.tie_encoder_decoder_embeddings
        return self.tie_word_embeddings and self.encoder_vocab_size == self.vocab_size

    # ------------------------------------------------------------------ checks (run by the library after __init__)
    def validate_sizes(self) -> None:
        for name in (
            "vocab_size", "source_vocab_size", "d_model", "encoder_layers", "decoder_layers", "num_attention_heads",
            "d_k", "d_v", "d_ff", "max_position_embeddings",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or value < 1):
                raise ValueError(f"`{name}` must be a whole number of at least 1, got {value!r}.")
        if (self.d_k is None or self.d_v is None) and self.d_model % self.num_attention_heads:
            raise ValueError(
                f"`d_model` ({self.d_model}) must be divisible by `num_attention_heads` ({self.num_attention_heads}) "
                "unless `d_k` and `d_v` are both given."
            )
        if self.position_encoding == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"`d_model` must be even for sinusoidal positions, got {self.d_model}.")
        if self.sinusoid_exponent == "2i/(d-2)" and self.d_model < 4:
            raise ValueError(f'`sinusoid_exponent` "2i/(d-2)" needs a `d_model` of at least 4, got {self.d_model}.')
        if self.position_offset < 0 or (self.position_offset and self.position_encoding != "sinusoidal"):
            raise ValueError(
                f"`position_offset` ({self.position_offset}) must be 0 or more, and 0 with a learned table: leave out "
                "the table's first rows instead."
            )

    def validate_kept_heads(self) -> None:
        layers = {"encoder": self.encoder_layers, "decoder": self.decoder_layers, "cross": self.decoder_layers}
        places = [f"{kind}.{layer}" for kind, count in layers.items() for layer in range(count)]
        for place, heads in (self.kept_heads or {}).items():
            if place not in places:
                raise ValueError(f"`kept_heads` names {place!r}; this model has {', '.join(places)}.")
            known = list(range(self.num_attention_heads))
            if not heads or heads != [one for one in known if one in heads]:
                raise ValueError(
                    f"`kept_heads` of {place!r} must be ascending numbers from 0 to {known[-1]}, at least one, got "
                    f"{heads!r}."
                )

    def validate_rates(self) -> None:
        for name in ("dropout", "attention_dropout", "activation_dropout", "label_smoothing"):
            value = getattr(self, name)
            if isinstance(value, bool) or not 0.0 <= value < 1.0:
                raise ValueError(f"`{name}` must be at least 0 and below 1, got {value!r}.")
        if not 0.0 < self.layer_norm_eps <= 1.0:
            raise ValueError(f"`layer_norm_eps` must be above 0 and at most 1, got {self.layer_norm_eps!r}.")

    def validate_choices(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {allowed}, got {getattr(self, name)!r}.")
        from transformers.activations import ACT2FN

        if self.activation_function not in ACT2FN:
            near = difflib.get_close_matches(self.activation_function, list(ACT2FN), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(sorted(ACT2FN))}."
            raise ValueError(f"`activation_function` {self.activation_function!r} is not known.{hint}")
        if not self.is_encoder_decoder:
            raise ValueError("`is_encoder_decoder` must be True: this architecture has both halves.")

    def validate_tying(self) -> None:
        if self.tie_encoder_decoder_embeddings and self.encoder_vocab_size != self.vocab_size:
            raise ValueError(
                f"`tie_encoder_decoder_embeddings` needs one vocabulary, but `source_vocab_size` is "
                f"{self.source_vocab_size} and `vocab_size` is {self.vocab_size}."
            )

    def validate_special_ids(self) -> None:
        for name in ("pad_token_id", "eos_token_id", "bos_token_id", "unk_token_id", "decoder_start_token_id"):
            value = getattr(self, name)
            for one in value if isinstance(value, list) else [value]:
                if one is not None and not 0 <= one < self.vocab_size:
                    raise ValueError(f"`{name}` ({one}) is outside the vocabulary of `vocab_size` {self.vocab_size}.")
        if self.zero_start_embedding and self.decoder_start_token_id is None:
            raise ValueError("`zero_start_embedding` needs a `decoder_start_token_id` to know the start by.")
        if self.pad_token_id is not None and self.pad_token_id >= self.encoder_vocab_size:
            raise ValueError(f"`pad_token_id` ({self.pad_token_id}) is outside the source vocabulary.")

    # ------------------------------------------------------------------ names
    @classmethod
    def _field_names(cls) -> set[str]:
        return {name for name in cls.__dataclass_fields__ if not name.startswith("_")} | set(cls.attribute_map)

    @classmethod
    def _generation_keys(cls) -> set[str]:
        from transformers import GenerationConfig

        return set(GenerationConfig().to_dict()) - cls._field_names() - _LIBRARY_KEYS - {"transformers_version"}

    @classmethod
    def _is_known_key(cls, key: str) -> bool:
        return key in cls._field_names() or key in _LIBRARY_KEYS or key.startswith("_")

    @classmethod
    def _nearest_field(cls, key: str) -> str | None:
        near = difflib.get_close_matches(key, cls._field_names() - {"layer_norm_epsilon"}, n=1, cutoff=0.82)
        return near[0] if near else None


VaswaniConfig.register_for_auto_class("AutoConfig")

# CTranslate2's console converter looks our class up in a table of its own and has no hook for packages. With
# `--trust_remote_code` it runs this file out of the model's folder, which can then bring the loader along.
if (
    __name__.startswith("transformers_modules.")
    and "ctranslate2.converters.transformers" in sys.modules
    and importlib.util.find_spec("hf_vaswani") is not None
):
    importlib.import_module("hf_vaswani.interop.ctranslate2_export").register()
