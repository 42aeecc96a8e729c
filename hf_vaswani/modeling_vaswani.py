"""The encoder-decoder of "Attention Is All You Need", each equation in one place.

Letters: B batch, S source length, T target length, L length of either, H heads, K width of one head, D d_model,
F d_ff, V vocabulary.
"""

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import can_return_tuple, is_torchdynamo_compiling
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention_vaswani import eager_attention_forward, half_attention_on_cpu, is_half_on_cpu
from .configuration_vaswani import VaswaniConfig
from .dropout_vaswani import dropout
from .generation_vaswani import VaswaniGenerationMixin, paper_generation_config
from .loss_vaswani import label_smoothed_cross_entropy, linear_label_smoothed_cross_entropy

if TYPE_CHECKING:
    # Read by transformers' code copier: these files travel with the weights.
    from .pipeline_vaswani import VaswaniTranslationPipeline  # noqa: F401


# --------------------------------------------------------------------------- positions, section 3.5
def sinusoid_table(
    length: int, d_model: int, layout: str = "interleaved", exponent: str = "2i/d", offset: int = 0
) -> torch.Tensor:
    """The fixed position encodings of the paper.

        PE(pos, 2i) = sin(pos / 10000^(2i / d_model)),  PE(pos, 2i + 1) = cos(pos / 10000^(2i / d_model))

    Args:
        length (`int`): number of positions.
        d_model (`int`): even width.
        layout (`str`): "interleaved" as in the formula; "halves" puts all sines before all cosines.
        exponent (`str`): "2i/d" as in the formula, or "2i/(d-2)" of the authors' code.
        offset (`int`): number of the first position.

    Returns:
        `torch.Tensor` of shape (length, d_model), float32, computed in float64.

    Source: Vaswani et al. 2017, section 3.5.
    """
    pos = torch.arange(offset, offset + length, dtype=torch.float64, device="cpu")[:, None]
    two_i = torch.arange(0, d_model, 2, dtype=torch.float64, device="cpu")
    power = two_i / (d_model if exponent == "2i/d" else d_model - 2)
    angle = pos / torch.pow(torch.tensor(10000.0, dtype=torch.float64, device="cpu"), power)
    if layout == "halves":
        return torch.cat([angle.sin(), angle.cos()], dim=1).float()  # [L, D]
    return torch.stack([angle.sin(), angle.cos()], dim=2).reshape(length, d_model).float()  # [L, D]


class VaswaniSinusoid(nn.Module):
    """Looks positions up in a sinusoid table that is never saved, always float32, and grows on demand."""

    table: torch.Tensor

    def __init__(self, config: VaswaniConfig):
        super().__init__()
        self.kind = (config.d_model, config.sinusoid_layout, config.sinusoid_exponent, config.position_offset)
        table = self.build(config.max_position_embeddings)
        self.register_buffer("table", table.to(torch.get_default_device()), persistent=False)

    def build(self, length: int) -> torch.Tensor:
        return sinusoid_table(length, *self.kind)

    def _apply(self, fn: Callable, recurse: bool = True) -> "VaswaniSinusoid":
        # `model.to(bfloat16)` must not round the table: rebuild it in float32 where it now lives.
        super()._apply(fn, recurse)
        if self.table.dtype != torch.float32 and self.table.device.type != "meta":
            self.table = self.build(len(self.table)).to(self.table.device)
        return self

    def forward(self, position_ids: torch.Tensor, length: int) -> torch.Tensor:
        if length > len(self.table):
            self.table = self.build(max(length, 2 * len(self.table))).to(self.table.device)
        return self.table[position_ids]  # [..., L, D]


class VaswaniLearnedPositions(nn.Embedding):
    """A trained table of positions (Table 3, row E); it cannot be longer than it was made."""

    def __init__(self, config: VaswaniConfig):
        super().__init__(config.max_position_embeddings, config.d_model)

    def forward(self, position_ids: torch.Tensor, length: int) -> torch.Tensor:  # type: ignore[override]
        if length > self.num_embeddings:
            raise ValueError(
                f"The sequence has {length} positions, but the learned position table has {self.num_embeddings} rows "
                "(`max_position_embeddings`). Split the text, or use a model with sinusoidal positions."
            )
        return super().forward(position_ids)


def positions_from_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """Number the real tokens of each row from 0, whichever side the padding is on: [B, L] -> [B, L]."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def attend_somewhere(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Give a row that is all padding a defined result: it attends to its padding instead of to nothing.

    Softmax over no key at all is NaN, forward and backward, in some attention kernels and precisions.
    """
    if attention_mask is None or attention_mask.dim() != 2:
        return attention_mask
    is_real = attention_mask.bool()
    return is_real | ~is_real.any(dim=-1, keepdim=True)  # [B, L]


# --------------------------------------------------------------------------- attention, section 3.2
class VaswaniAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1 .. head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    The h projections of one kind are one matrix: rows i d_k to (i + 1) d_k of `q_proj` are W_i^Q. An attention whose
    heads were pruned (`config.kept_heads`) has fewer of these rows; `kind` says where it stands: "encoder", "decoder"
    or "cross".

    Source: Vaswani et al. 2017, section 3.2.2.
    """

    def __init__(self, config: VaswaniConfig, is_causal: bool = False, layer_idx: int = 0, kind: str = "encoder"):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        # Read by the library's kernels when there is no mask to tell them.
        self.is_causal = is_causal
        self.d_k, self.d_v = config.query_key_width, config.value_width
        self.scaling = self.d_k**-0.5
        self.dropout = config.attention_dropout
        heads, bias = len(config.heads_of(kind, layer_idx)), config.attention_bias
        self.q_proj = nn.Linear(config.d_model, heads * self.d_k, bias=bias)
        self.k_proj = nn.Linear(config.d_model, heads * self.d_k, bias=bias)
        self.v_proj = nn.Linear(config.d_model, heads * self.d_v, bias=bias)
        self.out_proj = nn.Linear(heads * self.d_v, config.d_model, bias=bias)

    def split_heads(self, x: torch.Tensor, width: int) -> torch.Tensor:
        return x.view(*x.shape[:-1], -1, width).transpose(1, 2)  # [B, L, H*K] -> [B, H, L, K]

    def keys_and_values(self, states: torch.Tensor, is_cross: bool, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Project the attended states, or take them from the cache: [B, H, S, d_k] and [B, H, S, d_v]."""
        if isinstance(cache, EncoderDecoderCache):
            if is_cross and cache.is_updated.get(self.layer_idx):
                layer: Any = cache.cross_attention_cache.layers[self.layer_idx]
                return layer.keys, layer.values
            own: Any = cache.cross_attention_cache if is_cross else cache.self_attention_cache
        else:
            own = None if is_cross else cache
        key = self.split_heads(self.k_proj(states), self.d_k)
        value = self.split_heads(self.v_proj(states), self.d_v)
        if own is not None:
            key, value = own.update(key, value, self.layer_idx)
            if is_cross:
                cache.is_updated[self.layer_idx] = True
        return key, value

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query = self.split_heads(self.q_proj(hidden_states), self.d_k)  # [B, H, T, d_k]
        attended = hidden_states if key_value_states is None else key_value_states
        key, value = self.keys_and_values(attended, key_value_states is not None, cache)
        # The library looks for this very call to see that other kernels can be put in.
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        if is_half_on_cpu(self.config._attn_implementation, query):
            attend = half_attention_on_cpu
        heads, weights = attend(
            self, query, key, value, attention_mask,
            dropout=self.dropout if self.training else 0.0, scaling=self.scaling, **kwargs,
        )  # fmt: skip
        return self.out_proj(heads.reshape(*hidden_states.shape[:-1], -1)), weights  # [B, T, D], [B, H, T, S] | None


# --------------------------------------------------------------------------- sublayers, sections 3.1, 3.3 and 5.4
class VaswaniFeedForward(nn.Module):
    """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2.

    Source: Vaswani et al. 2017, section 3.3, eq. (2).
    """

    def __init__(self, config: VaswaniConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.d_model, config.d_ff)
        self.fc2 = nn.Linear(config.d_ff, config.d_model)
        self.activation = ACT2FN[config.activation_function]
        self.dropout = config.activation_dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = dropout(self.activation(self.fc1(x)), self.dropout, self.training)
        return self.fc2(inner)  # [B, L, D]


class VaswaniResidual(nn.Module):
    """The wrapping of every sublayer: LayerNorm(x + Dropout(Sublayer(x))).

    With `norm_position="pre"`, as descendants of the paper have it: x + Dropout(Sublayer(LayerNorm(x))).

    Source: Vaswani et al. 2017, sections 3.1 (residual, norm) and 5.4 (dropout).
    """

    def __init__(self, config: VaswaniConfig):
        super().__init__()
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.is_post = config.norm_position == "post"
        self.dropout = config.dropout

    def forward(self, x: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        written = sublayer(x if self.is_post else self.layer_norm(x))
        total = x + dropout(written, self.dropout, self.training)
        return self.layer_norm(total) if self.is_post else total


class VaswaniEncoderLayer(GradientCheckpointingLayer):
    """Self-attention, then feed-forward (section 3.1, encoder)."""

    def __init__(self, config: VaswaniConfig, layer_idx: int):
        super().__init__()
        self.self_attn = VaswaniAttention(config, layer_idx=layer_idx)
        self.self_attn_residual = VaswaniResidual(config)
        self.feed_forward = VaswaniFeedForward(config)
        self.feed_forward_residual = VaswaniResidual(config)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        hidden_states = self.self_attn_residual(
            hidden_states, lambda x: self.self_attn(x, attention_mask=attention_mask, **kwargs)[0]
        )
        return self.feed_forward_residual(hidden_states, self.feed_forward)


class VaswaniDecoderLayer(GradientCheckpointingLayer):
    """Masked self-attention, attention over the encoder's output, then feed-forward (section 3.1, decoder)."""

    def __init__(self, config: VaswaniConfig, layer_idx: int):
        super().__init__()
        self.self_attn = VaswaniAttention(config, is_causal=True, layer_idx=layer_idx, kind="decoder")
        self.self_attn_residual = VaswaniResidual(config)
        self.encoder_attn = VaswaniAttention(config, layer_idx=layer_idx, kind="cross")
        self.encoder_attn_residual = VaswaniResidual(config)
        self.feed_forward = VaswaniFeedForward(config)
        self.feed_forward_residual = VaswaniResidual(config)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        hidden_states = self.self_attn_residual(
            hidden_states, lambda x: self.self_attn(x, attention_mask=attention_mask, cache=cache, **kwargs)[0]
        )
        if encoder_hidden_states is not None:
            hidden_states = self.encoder_attn_residual(
                hidden_states,
                lambda x: self.encoder_attn(
                    x, encoder_hidden_states, attention_mask=encoder_attention_mask, cache=cache, **kwargs
                )[0],
            )
        return self.feed_forward_residual(hidden_states, self.feed_forward)


# --------------------------------------------------------------------------- stacks
class VaswaniPreTrainedModel(PreTrainedModel):
    """Loading, saving and initial weights, common to all classes of the architecture."""

    config: VaswaniConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["VaswaniEncoderLayer", "VaswaniDecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def _init_weights(self, module: nn.Module) -> None:
        # Choice: Glorot uniform for maps, N(0, d_model^-0.5) for embeddings, as in the authors' code; the paper is
        # silent. A shared matrix of larger spread would make the first logits explode.
        if isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, VaswaniSinusoid):
            # Loading leaves buffers that are not in the file uninitialised.
            init.copy_(module.table, module.build(len(module.table)))

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        ids = torch.tensor([[min(3, self.config.vocab_size - 1)] * 3], device=self.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids}

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As the library's, but weights that are missing in a checkpoint, or left over, are an error.

        Ask for `output_loading_info=True` to receive the lists instead. A class that is a part of the saved one
        (the base model of a whole one, say) leaves the rest of the file alone.

        Raises:
            ValueError: naming the keys, the model type where the folder holds another architecture, or damaged weights.
            RuntimeError: naming the tensors whose shape is not that of the configuration.
            OSError: for a file that is missing, or is not JSON.
        """
        if pretrained_model_name_or_path is None:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        allows_other_shapes = kwargs.pop("ignore_mismatched_sizes", False)
        kwargs.update(output_loading_info=True, ignore_mismatched_sizes=True)
        try:
            loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except Exception as error:
            if type(error).__name__ != "SafetensorError":
                raise
            raise ValueError(
                f"The weights at {pretrained_model_name_or_path} are damaged or were only half written ({error}). Save "
                "or download them again."
            ) from error
        model, info = loaded
        if info["mismatched_keys"] and not allows_other_shapes:
            shapes = [f"{key} {tuple(saved)}, not {tuple(own)}" for key, saved, own in sorted(info["mismatched_keys"])]
            raise RuntimeError(
                f"The checkpoint at {pretrained_model_name_or_path} has other shapes than its config.json asks for: "
                f"{'; '.join(shapes)}."
            )
        if cls.can_generate() and model.generation_config._from_model_config:
            if os.path.isfile(os.path.join(pretrained_model_name_or_path, "generation_config.json")):
                GenerationConfig.from_pretrained(pretrained_model_name_or_path)  # says what is wrong with the file
            # No generation_config.json: the library has put its own defaults, not the paper's.
            model.generation_config = paper_generation_config(model.config)
        if wants_info:
            return model, info
        faults = {"lacks": sorted(info["missing_keys"])}
        if cls.can_generate():
            faults["also has"] = sorted(info["unexpected_keys"])
        if any(faults.values()):
            raise ValueError(
                f"The checkpoint at {pretrained_model_name_or_path} does not fit {cls.__name__}: it "
                + " and ".join(f"{verb} {', '.join(keys)}" for verb, keys in faults.items() if keys)
                + ". Compare its config.json with the weights; `output_loading_info=True` loads it all the same and "
                "returns these lists."
            )
        return model


class VaswaniStack(VaswaniPreTrainedModel):
    """What encoder and decoder share: embeddings, positions, N layers, and for descendants a last norm."""

    def __init__(self, config: VaswaniConfig, layer: type[nn.Module], layer_count: int, vocab_size: int):
        super().__init__(config)
        is_learned = config.position_encoding == "learned"
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model)
        self.embed_positions = VaswaniLearnedPositions(config) if is_learned else VaswaniSinusoid(config)
        self.layers = nn.ModuleList([layer(config, n) for n in range(layer_count)])
        self.layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps) if config.has_final_norm else None
        self.gradient_checkpointing = False
        self.post_init()

    def embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """Look token ids up, with a plain message for an id that has no row: [B, L] -> [B, L, D]."""
        if (input_ids is None) == (inputs_embeds is None):
            side = "decoder_" if isinstance(self, VaswaniDecoder) else ""
            raise ValueError(f"Pass exactly one of `{side}input_ids` and `{side}inputs_embeds`.")
        if input_ids is None:
            assert inputs_embeds is not None
            return inputs_embeds
        if is_torchdynamo_compiling() or input_ids.device.type != "cpu":
            return self.embed_tokens(input_ids)
        try:
            return self.embed_tokens(input_ids)
        except IndexError:
            rows = self.embed_tokens.weight.shape[0]
            outside = input_ids[(input_ids < 0) | (input_ids >= rows)]
            raise IndexError(
                f"Token id {int(outside[0])} is outside the vocabulary of {rows} rows in {type(self).__name__}. "
                "Do tokenizer and model belong together? `resize_token_embeddings` adds rows for added tokens."
            ) from None

    def place(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, length: int) -> torch.Tensor:
        """Dropout(sqrt(d_model) E + PE), [B, L, D] -> [B, L, D].

        Source: Vaswani et al. 2017, sections 3.4, 3.5 and 5.4.
        """
        if self.config.scale_embedding:
            inputs_embeds = inputs_embeds * math.sqrt(self.config.d_model)
        placed = inputs_embeds + self.embed_positions(position_ids, length).to(inputs_embeds)
        return dropout(placed, self.config.dropout, self.training)


class VaswaniEncoder(VaswaniStack):
    """A stack of N encoder layers (section 3.1)."""

    _can_record_outputs = {"hidden_states": VaswaniEncoderLayer, "attentions": VaswaniAttention}

    def __init__(self, config: VaswaniConfig):
        super().__init__(config, VaswaniEncoderLayer, config.encoder_layers, config.encoder_vocab_size)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        r"""
        Args:
            input_ids (`torch.LongTensor`): [B, S].
            attention_mask (`torch.Tensor`, *optional*): [B, S], 1 for real tokens; positions are counted over them.
            inputs_embeds (`torch.Tensor`, *optional*): [B, S, D], before the multiplication by sqrt(d_model).
        """
        self.refuse_padding_without_mask(input_ids, attention_mask)
        inputs_embeds = self.embed(input_ids, inputs_embeds)
        length = inputs_embeds.shape[1]
        if attention_mask is not None and attention_mask.dim() == 2:
            position_ids = positions_from_mask(attention_mask)  # [B, S]
        else:
            position_ids = torch.arange(length, device=inputs_embeds.device)  # [S]
        hidden_states = self.place(inputs_embeds, position_ids, length)
        mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=inputs_embeds, attention_mask=attend_somewhere(attention_mask)
        )
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, **kwargs)
        if self.layer_norm is not None:
            hidden_states = self.layer_norm(hidden_states)
        return BaseModelOutput(last_hidden_state=hidden_states)

    def refuse_padding_without_mask(self, input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None) -> None:
        pad = self.config.pad_token_id
        if input_ids is None or attention_mask is not None or pad is None or is_torchdynamo_compiling():
            return
        padded_rows = int((input_ids == pad).any(dim=-1).sum())
        if padded_rows:
            raise ValueError(
                f"{padded_rows} of {len(input_ids)} rows of `input_ids` hold the padding id {pad}, but there is no "
                "`attention_mask`, so the padding would be read as text. Pass the tokenizer's `attention_mask` too."
            )


class VaswaniDecoder(VaswaniStack):
    """A stack of N decoder layers (section 3.1)."""

    _can_record_outputs = {
        "hidden_states": VaswaniDecoderLayer,
        "attentions": OutputRecorder(VaswaniAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(VaswaniAttention, index=1, layer_name="encoder_attn"),
    }

    def __init__(self, config: VaswaniConfig):
        super().__init__(config, VaswaniDecoderLayer, config.decoder_layers, config.vocab_size)

    @merge_with_config_defaults
    @capture_outputs
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        r"""
        Args:
            input_ids (`torch.LongTensor`): [B, T], the target shifted right; with a cache, only the new columns.
            attention_mask (`torch.Tensor`, *optional*): [B, past + T] over the target.
            encoder_hidden_states (`torch.Tensor`): [B, S, D]. encoder_attention_mask: [B, S].
            cache (`Cache`, *optional*): keys and values of earlier columns.
        """
        inputs_embeds = self.embed(input_ids, inputs_embeds)
        start = self.config.decoder_start_token_id
        if self.config.zero_start_embedding and input_ids is not None and start is not None:
            is_start = torch.eq(input_ids, start)  # [B, T]
            inputs_embeds = inputs_embeds.masked_fill(is_start[..., None], 0.0)
        if use_cache and cache is None:
            cache = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        own_cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache

        length = inputs_embeds.shape[1]
        past = own_cache.get_seq_length() if own_cache is not None else 0
        if attention_mask is not None and attention_mask.dim() == 2:
            position_ids = positions_from_mask(attention_mask)[:, -length:]  # [B, T]
        else:
            position_ids = torch.arange(length, device=inputs_embeds.device) + past  # [T]
        # A static cache counts its columns in a tensor; its size is the bound that needs no look inside.
        reach = past + length if isinstance(past, int) else own_cache.get_max_length()
        hidden_states = self.place(inputs_embeds, position_ids, reach)

        causal_mask = create_causal_mask(
            config=self.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask, cache=own_cache
        )
        if encoder_hidden_states is not None:
            encoder_attention_mask = create_bidirectional_mask(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attend_somewhere(encoder_attention_mask),
                encoder_hidden_states=encoder_hidden_states,
            )
        for layer in self.layers:
            # The encoder's states go in by position: gradient checkpointing sees only those.
            hidden_states = layer(
                hidden_states,
                causal_mask,
                encoder_hidden_states,
                encoder_attention_mask=encoder_attention_mask,
                cache=cache,
                use_cache=use_cache,
                **kwargs,
            )
        if self.layer_norm is not None:
            hidden_states = self.layer_norm(hidden_states)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_states, cache=cache)


class VaswaniModel(VaswaniPreTrainedModel):
    """Encoder and decoder without the pre-softmax map (Figure 1 of the paper, up to the last linear box)."""

    _tied_weights_keys = {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }

    def __init__(self, config: VaswaniConfig):
        super().__init__(config)
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = VaswaniEncoder(config)
        self.decoder = VaswaniDecoder(config)
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        # `shared` is the target embedding in every configuration; only the source side can be split off.
        tied = dict(self._tied_weights_keys)
        if not self.config.ties_source_and_target:
            del tied["encoder.embed_tokens.weight"]
        return tied

    def get_input_embeddings(self) -> nn.Module:
        return self.shared

    def set_input_embeddings(self, value: Any) -> None:
        self.shared = value
        self.decoder.embed_tokens = value
        if self.config.ties_source_and_target:
            self.encoder.embed_tokens = value

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        r"""
        Args:
            input_ids (`torch.LongTensor`): [B, S]. attention_mask: [B, S], 1 for real tokens.
            decoder_input_ids (`torch.LongTensor`): [B, T]. decoder_attention_mask: [B, T], *optional*.
            encoder_outputs (*optional*): of an earlier call, in place of the source.
        """
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs[:3])
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            cache=cache,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            cache=decoder_outputs.cache,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


# --------------------------------------------------------------------------- the whole model
def shift_right(labels: torch.Tensor, decoder_start_token_id: int | None, pad_token_id: int | None) -> torch.Tensor:
    """What the decoder reads so that column t predicts label t: the start token, then labels but the last: [B, T]."""
    if decoder_start_token_id is None:
        raise ValueError("`decoder_start_token_id` is None, so the decoder has nothing to start from; set it.")
    shifted = torch.cat([torch.full_like(labels[:, :1], decoder_start_token_id), labels[:, :-1]], dim=1)
    filler = pad_token_id if pad_token_id is not None else decoder_start_token_id
    return shifted.masked_fill(shifted == -100, filler)


class VaswaniForConditionalGeneration(VaswaniPreTrainedModel, VaswaniGenerationMixin, GenerationMixin):
    """The whole model of Figure 1: encoder, decoder and the pre-softmax map, with the paper's loss and search."""

    _tied_weights_keys = {"lm_head.weight": "model.shared.weight"}

    def __init__(self, config: VaswaniConfig):
        super().__init__(config)
        self.model = VaswaniModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=config.output_bias)
        # The library would pick a loss by the class's name, and a wrong one; a caller may still put another here.
        self.loss_function = label_smoothed_cross_entropy
        self.generation_config = paper_generation_config(config)
        self.post_init()

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        resized = super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        encoder = self.model.encoder
        if not self.config.ties_source_and_target and self.config.source_vocab_size is None:
            # One vocabulary, two matrices: both get the new rows.
            encoder.embed_tokens = self._get_resized_embeddings(
                encoder.embed_tokens, resized.weight.shape[0], mean_resizing=mean_resizing
            )
        return resized

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """The decoder's input for teacher forcing; collators call it: [B, T] -> [B, T]."""
        return shift_right(labels, self.config.decoder_start_token_id, self.config.pad_token_id)

    def _can_fuse_loss(self) -> bool:
        """Whether the pre-softmax map is a plain matrix at hand, and the loss the paper's."""
        head = self.lm_head
        is_plain = type(head) is nn.Linear and not (head._forward_hooks or head._forward_pre_hooks)
        # DeepSpeed's third stage keeps weights elsewhere until a module is called; a compiler fuses by itself.
        is_here = type(head.weight.data) is torch.Tensor and not hasattr(head.weight, "ds_id")
        is_ours = self.loss_function is label_smoothed_cross_entropy
        return is_plain and is_here and is_ours and not is_torchdynamo_compiling()

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        skip_logits: bool = False,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        r"""Predict target tokens, and measure the loss where labels are given.

        Args:
            input_ids (`torch.LongTensor`): [B, S]. attention_mask: [B, S], 1 for real tokens, padding on either side.
            decoder_input_ids (`torch.LongTensor`, *optional*): [B, T]; made from `labels` where left out.
            labels (`torch.LongTensor`, *optional*): [B, T], not shifted, -100 where nothing is to be predicted.
            num_items_in_batch (*optional*): target tokens of the whole update, by which the loss is divided.
            logits_to_keep (`int`): only the last n columns get logits; 0 means all.
            skip_logits (`bool`): with labels, give the loss alone, in less time and memory; `logits` is then None.

        Returns:
            `Seq2SeqLMOutput`: `logits` [B, T, V]; `loss` in training mode label-smoothed (section 5.4), in evaluation
            mode the plain negative log-likelihood per token, so that exp(loss) is the paper's perplexity.

        Raises:
            ValueError: padding in `input_ids` without a mask. IndexError: an id outside the vocabulary.
        """
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            cache=cache,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        loss, logits = None, None
        smoothing = self.config.label_smoothing if self.training else 0.0
        if labels is not None and skip_logits and self._can_fuse_loss():
            loss = linear_label_smoothed_cross_entropy(
                outputs.last_hidden_state, self.lm_head.weight, self.lm_head.bias, labels, smoothing, num_items_in_batch
            )
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(outputs.last_hidden_state[:, kept, :])  # [B, T, V]
        if labels is not None and loss is None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                label_smoothing=smoothing,
                num_items_in_batch=num_items_in_batch,
            )
            logits = None if skip_logits else logits
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )


# What a model may be made of for the decoding that goes around the modules' own `forward`.
VaswaniForConditionalGeneration._plain_classes = (
    VaswaniForConditionalGeneration, VaswaniModel, VaswaniDecoder, VaswaniDecoderLayer, VaswaniAttention,
    VaswaniFeedForward, VaswaniResidual, VaswaniSinusoid, VaswaniLearnedPositions,
    nn.Linear, nn.LayerNorm, nn.Embedding, nn.ModuleList,
)  # fmt: skip
VaswaniModel.register_for_auto_class("AutoModel")
VaswaniForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
