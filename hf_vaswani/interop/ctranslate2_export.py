"""Writes a model as a CTranslate2 folder, through a loader for that library's own converter.

`hf-vaswani export ctranslate2 MODEL OUT` is the short way. CTranslate2's converter itself takes our folders too, once
the loader is registered. Its console script runs the code that `save_pretrained` puts into a folder, which does that:

    ct2-transformers-converter --model FOLDER --trust_remote_code --output_dir OUT --quantization int8

For a folder without code, `python -m hf_vaswani.interop.ctranslate2_export` takes the same arguments. In Python, call
`register()` before `TransformersConverter(FOLDER).convert(OUT)`.
"""

import functools
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .foreign import ConversionError, check_all_heads, check_vocabulary

QUANTIZATIONS = (
    "float32", "float16", "bfloat16", "int16", "int8", "int8_float32", "int8_float16", "int8_bfloat16",
)  # fmt: skip

# Choice: rows of a sinusoid's table. CTranslate2 cuts a source at 1,024 tokens unless told otherwise, and the paper's
# limit of source + 50 stays well below this.
_LEAST_POSITIONS = 2048

# transformers' names of the activations that CTranslate2 computes, and its own.
_ACTIVATIONS = {
    "relu": "RELU", "gelu": "GELU", "gelu_python": "GELU", "gelu_new": "GELUTanh", "gelu_fast": "GELUTanh",
    "gelu_pytorch_tanh": "GELUTanh", "quick_gelu": "GELUSigmoid", "silu": "SWISH", "swish": "SWISH",
    "tanh": "Tanh", "sigmoid": "Sigmoid",
}  # fmt: skip

_MISSING = "CTranslate2 is not installed. Run: pip install 'hf-vaswani[ctranslate2]', or pip install ctranslate2"


# --------------------------------------------------------------------------- the public ways in
def export(model: Any, tokenizer: Any, out: Path, quantization: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """Write `model.bin`, `config.json`, the vocabularies and the tokenizer's files into a folder.

    Args:
        model (`VaswaniForConditionalGeneration`): in any precision; it is not changed.
        tokenizer: of one vocabulary or of two (`get_src_vocab`, `get_tgt_vocab`, or transformers' MarianTokenizer).
        out (`Path`): is made where it does not exist; files of these names are overwritten.
        quantization (`str`, *optional*): one of `QUANTIZATIONS`; None: the model's own precision.

    Returns:
        facts for a report (`tensors`, `choices`, `quantization`, `position_rows`; `translate_batch`, the arguments that
        carry over the model's search, and `search`, the same for `Ct2Folder.search`), and one sentence for each thing
        that is lost.

    Raises:
        ConversionError: what CTranslate2 cannot represent, named. ImportError: it is not installed.
    """
    if quantization not in (None, *QUANTIZATIONS):
        raise ConversionError(f"CTranslate2 has no format {quantization!r}. It has {', '.join(QUANTIZATIONS)}.")
    if tokenizer is None:
        raise ConversionError("The model has no tokenizer, and CTranslate2 asks for the name of every piece.")
    loader = register()
    with torch.no_grad():
        spec = loader(model, tokenizer)
    read = len({tensor.data_ptr() for tensor in model.state_dict().values()})  # a tied one counts once
    spec.validate()
    spec.optimize(quantization=quantization)
    out.mkdir(parents=True, exist_ok=True)
    spec.save(str(out))
    tokenizer.save_pretrained(out)
    choices, losses = _words(model, tokenizer)
    arguments, more = _search(model, tokenizer)
    facts = {
        "tensors": read,
        "choices": choices,
        "quantization": quantization or str(model.dtype).removeprefix("torch."),
        "position_rows": _position_rows(model),
        "translate_batch": arguments,
        "search": search_options(model),
    }
    return facts, losses + more


@functools.cache
def register() -> Any:
    """Tell CTranslate2's converter about `VaswaniConfig`.

    Returns:
        the loader: called with a model and its tokenizer, it gives a `TransformerSpec`.

    Raises:
        ImportError: CTranslate2 is not installed.
    """
    try:
        from ctranslate2.converters import transformers as converters
    except ImportError as error:
        raise ImportError(_MISSING) from error

    class VaswaniLoader(converters.ModelLoader):
        """From our class to CTranslate2's description of a Transformer."""

        architecture_name = "AutoModelForSeq2SeqLM"

        def get_model_spec(self, model: Any) -> Any:
            return _spec(model)

        def set_config(self, config: Any, model: Any, tokenizer: Any) -> None:
            _, target = vocabularies(model, tokenizer)
            start, eos = model.config.decoder_start_token_id, _end(model.config)
            bos = start if model.config.bos_token_id is None else model.config.bos_token_id
            config.decoder_start_token, config.eos_token, config.bos_token = target[start], target[eos], target[bos]
            config.unk_token = target[_unknown(model, tokenizer)]
            config.layer_norm_epsilon = model.config.layer_norm_eps
            # The tokenizer's call already ends a source as the model was trained to see it.
            config.add_source_bos = config.add_source_eos = False

        def get_vocabulary(self, model: Any, tokenizer: Any) -> tuple[list[str], list[str]]:
            return vocabularies(model, tokenizer)

        def set_vocabulary(self, spec: Any, tokens: tuple[list[str], list[str]]) -> None:
            spec.register_source_vocabulary(tokens[0])
            spec.register_target_vocabulary(tokens[1])

    converters.register_loader("VaswaniConfig")(VaswaniLoader)
    return converters._MODEL_LOADERS["VaswaniConfig"]


def main() -> None:
    """CTranslate2's `ct2-transformers-converter`, with our class known to it."""
    import hf_vaswani  # noqa: F401  (registers the Auto classes)

    try:
        register()
    except ImportError as error:
        sys.exit(str(error))
    from ctranslate2.converters.transformers import main as converter

    converter()


# --------------------------------------------------------------------------- vocabularies
def vocabularies(model: Any, tokenizer: Any) -> tuple[list[str], list[str]]:
    """The pieces of source and target in the order of their ids, one for each row of the matrices.

    Raises:
        ConversionError: a piece without a row, or two pieces of one id.
    """
    source, target = piece_ids(tokenizer)
    config = model.config
    rows = (config.encoder_vocab_size, config.vocab_size)
    if source is target and rows[0] == rows[1]:
        names = _in_order(source, rows[0], "the vocabulary")
        return names, names
    return _in_order(source, rows[0], "the source vocabulary"), _in_order(target, rows[1], "the target vocabulary")


def piece_ids(tokenizer: Any) -> tuple[Mapping[str, int], Mapping[str, int]]:
    if getattr(tokenizer, "separate_vocabs", False):  # transformers' MarianTokenizer
        return tokenizer.encoder, tokenizer.target_encoder
    joint = tokenizer.get_vocab()
    source = tokenizer.get_src_vocab() if hasattr(tokenizer, "get_src_vocab") else joint
    target = tokenizer.get_tgt_vocab() if hasattr(tokenizer, "get_tgt_vocab") else joint
    return (joint, joint) if source == target == joint else (source, source) if source == target else (source, target)


def _in_order(pieces: Mapping[str, int], rows: int, where: str) -> list[str]:
    names: dict[int, str] = {}
    for piece, number in pieces.items():
        if number in names:
            raise ConversionError(f"{where}: {names[number]!r} and {piece!r} both have the id {number}.")
        names[number] = piece
    check_vocabulary(max(names, default=-1) + 1, rows, where)
    for number in range(rows):
        if number not in names:  # a row that no text can reach still has its place in the softmax
            name = f"<unused_{number}>"
            while name in pieces:
                name += "_"
            names[number] = name
    return [names[number] for number in range(rows)]


def _end(config: Any) -> int:
    eos = config.eos_token_id
    if eos is None:
        raise ConversionError("`eos_token_id` is None: CTranslate2 cannot end a sentence without an end token.")
    return eos[0] if isinstance(eos, list) else eos


def _unknown(model: Any, tokenizer: Any) -> int:
    """Id of the piece that stands for unknown ones: CTranslate2 asks for one, byte-level vocabularies have none."""
    config = model.config
    if config.unk_token_id is not None:
        return config.unk_token_id
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id < config.vocab_size:
        return tokenizer.unk_token_id
    return config.pad_token_id if config.pad_token_id is not None else _end(config)


def _words(model: Any, tokenizer: Any) -> tuple[list[str], list[str]]:
    """What was chosen and what is lost beside the search, as sentences."""
    config = model.config
    source, target = vocabularies(model, tokenizer)
    names = piece_ids(tokenizer)[1]
    choices = [
        f"A source is the tokenizer's own output as pieces, end token included; CTranslate2 adds nothing to it. "
        f"Decoding starts from {target[config.decoder_start_token_id]!r} and ends with {target[_end(config)]!r}.",
    ]
    if config.unk_token_id is None and tokenizer.unk_token_id is None:
        choices.append(
            f"No piece is unknown here; CTranslate2 asks for one, so a piece that it does not know counts as "
            f"{target[_unknown(model, tokenizer)]!r}."
        )
    if config.query_key_width != config.value_width:
        width = max(config.query_key_width, config.value_width)
        choices.append(
            f"Heads of d_k {config.query_key_width} and d_v {config.value_width} were filled up to {width} with zeros, "
            "which changes no result, as CTranslate2 has one width for both."
        )
    if config.zero_start_embedding:
        choices.append("The zero embedding belongs to the first position, not to the start token wherever it stands.")
    losses = [
        f"Positions end at {_position_rows(model)} tokens: a longer source or translation is an error"
        + ("" if config.position_encoding == "learned" else ", where this package's sinusoid goes on")
        + "."
    ]
    if isinstance(config.eos_token_id, list) and len(config.eos_token_id) > 1:
        losses.append(f"Of the end tokens {config.eos_token_id} only the first ends a sentence; pass `end_token` too.")
    unused = [piece for piece in dict.fromkeys([*source, *target]) if piece not in names and "unused_" in piece]
    if unused:
        losses.append(f"{len(unused)} rows have no piece and are named <unused_ID>; nothing but a call forbids them.")
    return choices, losses


def search_options(model: Any) -> dict[str, Any]:
    """The model's own search settings, as `Ct2Folder.search` takes them beside beams and limits."""
    generation = model.generation_config
    barred = [*(generation.suppress_tokens or ()), *(ids[0] for ids in generation.bad_words_ids or () if len(ids) == 1)]
    return {
        "length_penalty": float(generation.length_penalty or 0.0),
        "length_penalty_type": getattr(generation, "length_penalty_type", "power"),
        # Measured: 2 finds what a search finds that only ends when nothing can win any more.
        "patience": 1.0 if generation.early_stopping is True else 2.0,
        "min_length": generation.min_new_tokens or 0,
        "suppressed": sorted(set(barred)),
    }


def _search(model: Any, tokenizer: Any) -> tuple[dict[str, Any], list[str]]:
    """The arguments of `translate_batch` nearest to the model's own search, and what they cannot say."""
    generation, target = model.generation_config, vocabularies(model, tokenizer)[1]
    options, beams = search_options(model), generation.num_beams or 1
    alpha = options["length_penalty"]
    arguments: dict[str, Any] = {
        "beam_size": beams,
        "length_penalty": alpha,
        "patience": options["patience"],
        "min_decoding_length": options["min_length"],
        "max_input_length": 0,
    }
    losses = [
        "CTranslate2 keeps no search settings in its folder; left alone it takes beam_size 2, length_penalty 1, 1 to "
        "256 tokens, and cuts a source at 1,024 tokens without a word. Pass to `translate_batch` what is listed here."
    ]
    offset = getattr(generation, "max_length_offset", None)
    if offset is not None:
        losses.append(
            f"The limit of source length + {offset} tokens does not exist: pass max_decoding_length, one number for a "
            f"whole call, such as the longest source of the call + {offset}."
        )
    if beams > 1 and options["length_penalty_type"] == "gnmt" and alpha:
        arguments.update(length_penalty=0, num_hypotheses=beams, return_scores=True, return_end_token=True)
        losses.append(
            f"The paper's length rule does not exist: CTranslate2 divides by length^{alpha:g}. With these arguments "
            "it hands over the whole final beam with sums of log-probabilities; divide each by "
            f"((5 + length) / 6)^{alpha:g}, length with the end token, and take the largest."
        )
    if beams > 1:
        losses.append("CTranslate2's beam ends by a rule of its own (`patience`), so a few beam outputs may differ.")
    suppressed = [target[one] for one in options["suppressed"]]
    suppressed += [piece for piece in target if piece.startswith("<unused_") and piece not in suppressed]
    if suppressed:
        arguments["suppress_sequences"] = [[piece] for piece in suppressed]
        losses.append(f"{len(suppressed)} pieces must never be written: pass `suppress_sequences` as listed.")
    for name in ("no_repeat_ngram_size", "repetition_penalty"):
        if getattr(generation, name, None) not in (None, 0, 1.0):
            arguments[name] = getattr(generation, name)
    prefix = getattr(generation, "forced_prefix_ids", None)
    if prefix:
        losses.append(f"The forced beginning {[target[one] for one in prefix]} must be passed as `target_prefix`.")
    elif generation.forced_bos_token_id is not None:
        first = target[generation.forced_bos_token_id]
        losses.append(f"The forced first piece {first!r} must be passed as `target_prefix`.")
    for name in ("forced_eos_token_id", "begin_suppress_tokens"):
        if getattr(generation, name, None):
            losses.append(f"`{name}` {getattr(generation, name)} does not exist there.")
    return arguments, losses


# --------------------------------------------------------------------------- weights
def _position_rows(model: Any) -> int:
    rows = model.config.max_position_embeddings
    return rows if model.config.position_encoding == "learned" else max(rows, _LEAST_POSITIONS)


def _spec(model: Any) -> Any:
    from ctranslate2.specs import common_spec, transformer_spec

    config = model.config
    check_all_heads(config, "CTranslate2")
    if config.activation_function not in _ACTIVATIONS:
        raise ConversionError(
            f"`activation_function` is {config.activation_function!r}, which CTranslate2 does not compute; it has "
            f"{', '.join(sorted(_ACTIVATIONS))}."
        )
    width = max(config.query_key_width, config.value_width)
    shape = {
        # `pre_norm` also asks for the final norms; where the norms stand is set below.
        "pre_norm": True,
        "no_final_norm": not config.has_final_norm,
        "activation": getattr(common_spec.Activation, _ACTIVATIONS[config.activation_function]),
        "head_dim": None if width * config.num_attention_heads == config.d_model else width,
    }
    spec = transformer_spec.TransformerSpec(
        transformer_spec.TransformerEncoderSpec(config.encoder_layers, config.num_attention_heads, **shape),
        transformer_spec.TransformerDecoderSpec(config.decoder_layers, config.num_attention_heads, **shape),
    )
    copies = _Copies()
    for side, stack in ((spec.encoder, model.model.encoder), (spec.decoder, model.model.decoder)):
        side.pre_norm = config.norm_position == "pre"
        side.scale_embeddings = config.scale_embedding
        embeddings = side.embeddings[0] if isinstance(side.embeddings, list) else side.embeddings
        embeddings.weight = copies.of(stack.embed_tokens.weight)
        rows = _position_rows(model)
        places = torch.arange(rows, device=model.device)
        side.position_encodings.encodings = stack.embed_positions(places, rows).detach().float().cpu().contiguous()
        if config.has_final_norm:
            copies.norm(side.layer_norm, stack.layer_norm)
        for written, layer in zip(side.layer, stack.layers, strict=True):
            copies.attention(written.self_attention, layer.self_attn, layer.self_attn_residual.layer_norm, config)
            if side is spec.decoder:
                cross = layer.encoder_attn_residual.layer_norm
                copies.attention(written.attention, layer.encoder_attn, cross, config)
            copies.norm(written.ffn.layer_norm, layer.feed_forward_residual.layer_norm)
            copies.linear(written.ffn.linear_0, layer.feed_forward.fc1)
            copies.linear(written.ffn.linear_1, layer.feed_forward.fc2)
    copies.linear(spec.decoder.projection, model.lm_head)
    spec.decoder.start_from_zero_embedding = config.zero_start_embedding
    return spec


class _Copies:
    """Fills a specification with copies: the quantizer of CTranslate2 scales what it is given in place."""

    def __init__(self) -> None:
        self.made: dict[int, torch.Tensor] = {}

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        # One copy for a matrix that is used twice, so that it is also stored once.
        if id(parameter) not in self.made:
            self.made[id(parameter)] = parameter.detach().cpu().clone().contiguous()
        return self.made[id(parameter)]

    def linear(self, spec: Any, module: torch.nn.Linear) -> None:
        spec.weight = self.of(module.weight)
        if module.bias is not None:
            spec.bias = self.of(module.bias)

    def norm(self, spec: Any, module: torch.nn.LayerNorm) -> None:
        spec.gamma, spec.beta = self.of(module.weight), self.of(module.bias)

    def attention(self, spec: Any, module: Any, norm: torch.nn.LayerNorm, config: Any) -> None:
        """Query, key and value maps in one matrix (the query's apart over another sequence), then the output map."""
        self.norm(spec.layer_norm, norm)
        heads, d_k, d_v = config.num_attention_heads, config.query_key_width, config.value_width
        width = max(d_k, d_v)
        maps = [(module.q_proj, d_k), (module.k_proj, d_k), (module.v_proj, d_v)]
        groups = [maps] if len(spec.linear) == 2 else [maps[:1], maps[1:]]
        for linear, group in zip(spec.linear, groups, strict=False):
            linear.weight = torch.cat([_filled(one.weight, heads, own, width) for one, own in group])
            if group[0][0].bias is not None:
                linear.bias = torch.cat([_filled(one.bias, heads, own, width) for one, own in group])
        out = spec.linear[-1]
        out.weight = _filled(module.out_proj.weight.T, heads, d_v, width).T.contiguous()
        if module.out_proj.bias is not None:
            out.bias = self.of(module.out_proj.bias)
        if d_k != width or width * heads != config.d_model:
            import numpy as np

            spec.queries_scale = np.float32(1.0 / math.sqrt(d_k))


def _filled(tensor: torch.Tensor, heads: int, own: int, width: int) -> torch.Tensor:
    """Rows of each head, with zero rows behind them up to the common width: [H * own, ...] -> [H * width, ...]."""
    by_head = tensor.detach().cpu().reshape(heads, own, -1)
    filled = torch.cat([by_head, by_head.new_zeros(heads, width - own, by_head.shape[2])], dim=1)
    return filled.reshape(heads * width, *tensor.shape[1:]).contiguous()


if __name__ == "__main__":
    main()
