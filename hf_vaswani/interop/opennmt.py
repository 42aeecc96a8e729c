"""Reads a checkpoint of OpenNMT-py, versions 1 to 3: weights, options and vocabularies in one `.pt` file.

Versions 1 and 2 keep their vocabularies in objects of torchtext. Their attributes are read into empty objects, so
neither program is needed and nothing of theirs runs. Version 3 has plain lists, and may keep its weights apart.
"""

import re
from argparse import Namespace
from collections import Counter, defaultdict
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
from .positions import check_sinusoid

OPTIONS = frozenset(
    {"codes", "source_spm", "target_spm", "source_language", "target_language", "moses", "lowercase"}
)  # fmt: skip

# Options that change the function, what they mean where a checkpoint has none, and what can be represented.
_RULES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "model_type": ("text", ("text",)),
    "model_task": ("seq2seq", ("seq2seq",)),
    "encoder_type": ("rnn", ("transformer",)),
    "decoder_type": ("rnn", ("transformer",)),
    "self_attn_type": ("scaled-dot", ("scaled-dot", "scaled-dot-flash")),
    "position_encoding": (False, (True,)),
    "position_encoding_type": ("SinusoidalInterleaved", ("SinusoidalInterleaved", "SinusoidalConcat")),
    "max_relative_positions": (0, (0,)),
    "relative_positions_buckets": (0, (0,)),
    "layer_norm": ("standard", ("standard",)),
    "pos_ffn_activation_fn": ("relu", ("relu", "gelu")),
    "parallel_residual": (False, (False,)),
    "multiquery": (False, (False,)),
    "num_experts": (0, (0,)),
    "sliding_window": (0, (0,)),
    "copy_attn": (False, (False,)),
    "coverage_attn": (False, (False,)),
    "generator_function": ("softmax", ("softmax",)),
    "n_src_feats": (0, (0,)),
    "lora_layers": ([], ([],)),
    "lora_embedding": (False, (False,)),
    "quant_type": ("", ("", None)),
}
_MEANINGS = {
    ("max_relative_positions", -1): "rotary positions",
    ("max_relative_positions", -2): "linear biases (ALiBi) for positions",
    ("position_encoding", False): "no positions",
    ("pos_ffn_activation_fn", "silu"): "a gated feed-forward",
    ("pos_ffn_activation_fn", "gated-gelu"): "a gated feed-forward",
    ("self_attn_type", "average"): "averaging in place of self-attention",
    ("model_task", "lm"): "a language model without encoder",
}
# What the values of further options must be; rates are lists where they may change during training.
_VALUES = {
    "heads": "size", "enc_layers": "size", "dec_layers": "size", "transformer_ff": "size", "norm_eps": "number",
    "label_smoothing": "number", "share_embeddings": "flag", "share_decoder_embeddings": "flag",
    "src_subword_model": "word", "tgt_subword_model": "word", "transforms": "words",
}  # fmt: skip
# Steps on text that change what a source looks like, beyond splitting it into pieces.
_TEXT_STEPS = ("normalize", "uppercase", "docify", "terminology", "fuzzymatch", "inlinetags", "prefix", "suffix")
_ATTENTION = {
    "q_proj": "linear_query", "k_proj": "linear_keys", "v_proj": "linear_values", "out_proj": "final_linear",
}  # fmt: skip
_UNK, _PAD, _BOS, _EOS = "<unk>", "<blank>", "<s>", "</s>"


def read(path: Path, options: ImportOptions) -> ForeignModel:
    """An OpenNMT-py model in this package's terms.

    Args:
        path (`Path`): the `.pt` file; weights of version 3 in safetensors lie beside it under the same name.
        options (`ImportOptions`): codes or SentencePiece models, where text is to be split into pieces.

    Returns:
        `ForeignModel`; OpenNMT-py needs an environment of its own, so no program to compare with.

    Raises:
        ConversionError: for what cannot be read or represented.
    """
    choices: list[str] = []
    losses: list[str] = []
    reader, opt, saved = _open(path, choices)
    heads = int(opt.get("heads", 8))
    _refuse(opt, heads, path)
    sides = _vocabularies(saved, path)
    source, target = sides["src"]["pieces"], sides["tgt"]["pieces"]
    start = str(sides["tgt"]["start"])
    for piece in (_PAD, _EOS, start):
        if piece not in target:
            raise ConversionError(f"{path}: the target vocabulary has no {piece!r}.")
    if source.index(_PAD) != target.index(_PAD) if _PAD in source else True:
        raise ConversionError(f"{path}: {_PAD!r} must have one id in both vocabularies, and does not.")

    joint, tied = bool(opt.get("share_embeddings")), bool(opt.get("share_decoder_embeddings"))
    halves = opt.get("position_encoding_type") == "SinusoidalConcat"
    fields: dict[str, Any] = {
        "encoder_layers": int(opt.get("enc_layers", 2)),
        "decoder_layers": int(opt.get("dec_layers", 2)),
        "num_attention_heads": heads,
        "d_ff": int(opt.get("transformer_ff", 2048)),
        "activation_function": str(opt.get("pos_ffn_activation_fn", "relu")),
        "dropout": _first(opt.get("dropout", 0.3)),
        "attention_dropout": _first(opt.get("attention_dropout", opt.get("dropout", 0.3))),
        "activation_dropout": _first(opt.get("dropout", 0.3)),
        "label_smoothing": float(opt.get("label_smoothing", 0.0)),
        "norm_position": "pre",
        "final_norm": True,
        "layer_norm_eps": float(opt.get("norm_eps", 1e-6)),
        "position_encoding": "sinusoidal",
        "sinusoid_layout": "halves" if halves else "interleaved",
        "sinusoid_exponent": "2i/(d-2)" if halves else "2i/d",
        "scale_embedding": True,
        "output_bias": True,
        "tie_word_embeddings": tied,
        "tie_encoder_decoder_embeddings": joint,
        "pad_token_id": target.index(_PAD),
        "eos_token_id": target.index(_EOS),
        "bos_token_id": target.index(_BOS) if _BOS in target else target.index(start),
        "unk_token_id": target.index(_UNK) if _UNK in target else None,
        "decoder_start_token_id": target.index(start),
    }
    tensors = _tensors(reader, fields, choices)
    reader.finish()
    rows = tensors["model.shared.weight"].shape[0]
    source_rows = tensors.get("model.encoder.embed_tokens.weight", tensors["model.shared.weight"]).shape[0]
    unused = check_vocabulary(len(target), rows, f"{path}, target vocabulary")
    check_vocabulary(len(source), source_rows, f"{path}, source vocabulary")
    fields |= {
        "d_model": tensors["model.shared.weight"].shape[1],
        "vocab_size": rows,
        "source_vocab_size": source_rows if source != target or source_rows != rows else None,
    }
    generation = _generation(isinstance(saved, Mapping) and isinstance(saved.get("src"), list), choices)
    if unused:
        generation["suppress_tokens"] = unused
        choices.append(f"{len(unused)} rows of the target matrix have no piece and are never generated.")
    return ForeignModel(
        kind="opennmt-py",
        config=fields,
        tensors={name: value.float() for name, value in tensors.items()},  # a copy only where precision was less
        generation=generation,
        tokenizer=_tokenizer(opt, sides, path, options, losses),
        choices=choices,
        losses=losses,
        tensors_read=len(reader.taken),
    )


def _first(value: Any) -> float:
    """Rates are lists where they may change during training."""
    return float(value[0] if isinstance(value, list) else value)


# ---------------------------------------------------------------------- the file
class _Empty:
    """Stands for a class or a function of torchtext or OpenNMT-py: takes what was saved, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


_EMPTY_NAMES = (
    "torchtext.data.field.Field", "torchtext.data.field.RawField", "torchtext.data.field.LabelField",
    "torchtext.vocab.Vocab", "torchtext.legacy.data.field.Field", "torchtext.legacy.data.field.RawField",
    "torchtext.legacy.vocab.Vocab", "onmt.inputters.text_dataset.TextMultiField",
    "onmt.inputters.text_dataset._feature_tokenize", "onmt.inputters.inputter._feature_tokenize",
    "onmt.inputters.inputter.make_src", "onmt.inputters.inputter.make_tgt", "onmt.inputters.inputter.AlignField",
    "torchtext.data.utils._split_tokenizer", "functools.partial",
)  # fmt: skip


def _open(path: Path, choices: list[str]) -> tuple[TensorReader, dict[str, Any], Any]:
    """All tensors under one reader, the options as a dict, and the vocabularies as they were saved."""
    if path.is_dir():
        raise ConversionError(f"{path} is a folder. Give the .pt file of one step, as in model_step_100000.pt.")
    way_round = (
        "If you trust the file, reduce it where OpenNMT-py runs: python -c \"import torch, onmt; c = torch.load('"
        f"{path}', map_location='cpu'); b = lambda f: getattr(f, 'base_field', f).vocab; v = c['vocab']; v = v if "
        "isinstance(v['src'], list) else {s: list(b(v[s]).itos) for s in ('src', 'tgt')}; torch.save({k: c[k] for k in "
        "('model', 'generator', 'opt')} | {'vocab': v}, 'plain.pt')\", and import plain.pt."
    )
    allowed = [Namespace, Counter, defaultdict, set, *((_Empty, name) for name in _EMPTY_NAMES)]
    loaded = load_torch_file(path, way_round, allowed=allowed)
    missing = [key for key in ("opt", "vocab") if not isinstance(loaded, Mapping) or key not in loaded]
    if missing:
        held = ", ".join(map(str, list(loaded)[:12])) if isinstance(loaded, Mapping) else type(loaded).__name__
        raise ConversionError(f"{path} has no `{missing[0]}`, so OpenNMT-py did not write it; it holds: {held}.")
    opt = vars(loaded["opt"]) if isinstance(loaded["opt"], Namespace) else loaded["opt"]
    for key, value in {**loaded, "opt": opt}.items():
        if key in ("opt", "model", "generator") and not isinstance(value, Mapping):
            raise ConversionError(f"{path}: `{key}` holds no names with values, so OpenNMT-py did not write it.")
    check_values(opt, _VALUES, f"{path}, options")
    for name in ("dropout", "attention_dropout"):
        value = opt.get(name, 0.0)
        check_values({name: value[0] if isinstance(value, list) and value else value}, {name: "number"}, str(path))
    tensors = dict(loaded.get("model", {}))
    if "model" in loaded:
        tensors |= {f"generator.{name}": value for name, value in loaded.get("generator", {}).items()}
    else:
        from safetensors.torch import load_file

        beside = (f"{path.stem}.safetensors", f"{path.stem}.*.safetensors")  # in one, or as shards
        shards = sorted({shard for pattern in beside for shard in path.parent.glob(pattern)})
        if not shards:
            raise ConversionError(f"{path} holds no weights, and {path.stem}.safetensors is not beside it.")
        for shard in shards:
            try:
                tensors |= load_file(shard)
            except Exception as error:  # the library's own class, and whatever a cut file causes
                raise ConversionError(f"{shard} is not a safetensors file, or is damaged ({error}).") from error
    old = [name for name in tensors if re.search(r"\.layer_norm(_\d+)?\.[ab]_2$", name)]
    for name in old:
        tensors[name[:-3] + ("weight" if name.endswith("a_2") else "bias")] = tensors.pop(name)
    if old:
        choices.append("norms of a version before 1.0 are taken as standard ones, as OpenNMT-py itself does since.")
    return (
        TensorReader({name: value for name, value in tensors.items() if torch.is_tensor(value)}, path),
        opt,
        loaded["vocab"],
    )


def _refuse(opt: dict[str, Any], heads: int, path: Path) -> None:
    """Everything that changes the function and has no place here, by name, before a tensor is looked at."""
    for name, (default, allowed) in _RULES.items():
        value = opt.get(name, default)
        if value is None and default in allowed:
            continue
        if value not in allowed:
            meaning = _MEANINGS.get((name, value if isinstance(value, int | str) else None))
            told = f"{value!r}, {meaning}" if meaning else repr(value)
            raise ConversionError(f"{path}: `{name}` is {told}, which this architecture does not have.")
    if opt.get("num_kv") not in (None, 0, heads):
        raise ConversionError(f"{path}: `num_kv` is {opt['num_kv']}; here each of the {heads} heads has its own keys.")


def _vocabularies(saved: Any, path: Path) -> dict[str, dict[str, Any]]:
    """Pieces in the order of their ids, and what is put around them: plain lists, or fields of torchtext."""
    if isinstance(saved, (list, tuple)) and all(isinstance(one, tuple) and len(one) == 2 for one in saved):
        saved = dict(saved)
    if not isinstance(saved, Mapping):
        raise ConversionError(f"{path}: `vocab` holds no vocabularies, so OpenNMT-py did not write it.")
    if saved.get("data_task", "seq2seq") != "seq2seq":
        raise ConversionError(f"{path}: `data_task` is {saved['data_task']!r}, a language model without encoder.")
    if saved.get("src_feats"):
        raise ConversionError(f"{path}: `src_feats`: features of source words, which this architecture does not have.")
    sides: dict[str, dict[str, Any]] = {}
    for side in ("src", "tgt"):
        field = saved.get(side)
        start = saved.get("decoder_start_token") or _BOS
        parts = getattr(field, "fields", None)
        if parts is not None and len(parts) > 1:
            raise ConversionError(f"{path}: the {side} side has word features, which this architecture does not have.")
        field = parts[0][1] if parts else field
        pieces = field if isinstance(field, list) else getattr(getattr(field, "vocab", field), "itos", None)
        if not isinstance(pieces, list):
            raise ConversionError(f"{path}: no list of words was found for the side {side!r} of its vocabulary.")
        pieces = [str(piece) for piece in pieces]
        twice = [piece for piece, count in Counter(pieces).items() if count > 1]
        if twice:
            raise ConversionError(f"{path}: the {side} vocabulary has {twice[0]!r} more than once.")
        before, after = getattr(field, "init_token", None), getattr(field, "eos_token", None)
        if side == "tgt":
            before, after = before or start, _EOS
        sides[side] = {
            "pieces": pieces,
            "start": before,
            "suffix": (after,) if after else (),
            "lowercase": bool(getattr(field, "lower", False)),
        }
    return sides


# ---------------------------------------------------------------------- weights
def _tensors(reader: TensorReader, fields: dict[str, Any], choices: list[str]) -> dict[str, torch.Tensor]:
    """Fills in `attention_bias` of the fields, and zeros where single maps have no bias."""
    tables = {side: f"{side}.embeddings.make_embedding.emb_luts.0.weight" for side in ("encoder", "decoder")}
    output = next((name for name in ("generator.0", "generator") if f"{name}.weight" in reader), "generator.0")
    joint, tied = fields["tie_encoder_decoder_embeddings"], fields["tie_word_embeddings"]
    same = [tables["decoder"], *([tables["encoder"]] if joint else []), *([f"{output}.weight"] if tied else [])]
    tensors = {"model.shared.weight": reader.take_equal(*same)}
    rows, d_model = tensors["model.shared.weight"].shape
    d_ff, zeros = fields["d_ff"], 0
    if not joint:
        tensors["model.encoder.embed_tokens.weight"] = reader.take(tables["encoder"], None, d_model)
    if not tied:
        tensors["lm_head.weight"] = reader.take(f"{output}.weight", rows, d_model)
    tensors["lm_head.bias"] = reader.take(f"{output}.bias", rows)
    fields["attention_bias"] = any(
        name.endswith(f".{linear}.bias") for name in reader.tensors for linear in _ATTENTION.values()
    )

    def take(ours: str, theirs: str, *shape: int, bias: bool = True) -> None:
        nonlocal zeros
        tensors[f"{ours}.weight"] = reader.take(f"{theirs}.weight", *shape)
        if bias and len(shape) == 2 and f"{theirs}.bias" not in reader:
            tensors[f"{ours}.bias"] = torch.zeros(shape[0])
            zeros += 1
        elif bias:
            tensors[f"{ours}.bias"] = reader.take(f"{theirs}.bias", shape[0])

    def attention(ours: str, theirs: str) -> None:
        for to, name in _ATTENTION.items():
            take(f"{ours}.{to}", f"{theirs}.{name}", d_model, d_model, bias=fields["attention_bias"])

    for side, stack, first in (
        ("encoder", "transformer", "layer_norm"),
        ("decoder", "transformer_layers", "layer_norm_1"),
    ):
        table = f"{side}.embeddings.make_embedding.pe.pe"
        check_sinusoid(reader, table, d_model, fields["sinusoid_layout"], fields["sinusoid_exponent"])
        take(f"model.{side}.layer_norm", f"{side}.layer_norm", d_model)
        for layer in range(fields[f"{side}_layers"]):
            ours, theirs = f"model.{side}.layers.{layer}", f"{side}.{stack}.{layer}"
            attention(f"{ours}.self_attn", f"{theirs}.self_attn")
            take(f"{ours}.self_attn_residual.layer_norm", f"{theirs}.{first}", d_model)
            if side == "decoder":
                attention(f"{ours}.encoder_attn", f"{theirs}.context_attn")
                take(f"{ours}.encoder_attn_residual.layer_norm", f"{theirs}.layer_norm_2", d_model)
            take(f"{ours}.feed_forward.fc1", f"{theirs}.feed_forward.w_1", d_ff, d_model)
            take(f"{ours}.feed_forward.fc2", f"{theirs}.feed_forward.w_2", d_model, d_ff)
            take(f"{ours}.feed_forward_residual.layer_norm", f"{theirs}.feed_forward.layer_norm", d_model)
    if zeros:
        choices.append(f"{zeros} maps have no bias in the checkpoint and got one of zeros, which changes nothing.")
    return tensors


# ---------------------------------------------------------------------- search and text
def _generation(version_3: bool, choices: list[str]) -> dict[str, Any]:
    """The defaults of OpenNMT-py's own translate program; a checkpoint does not carry any."""
    choices.append(
        "search: beam 5 and " + ("the mean log-probability (`avg`)" if version_3 else "no length penalty") + ", the "
        "defaults of OpenNMT-py's translate program; the checkpoint names none."
    )
    if not version_3:
        return {"num_beams": 5, "length_penalty": 0.0, "max_new_tokens": 100, "max_length_offset": None}
    choices.append(
        "length limit: source length + 50; OpenNMT-py 3 stops at 250, and at 1.25 times the longest source of a batch "
        "and 5 more."
    )
    return {"num_beams": 5, "length_penalty": 1.0, "length_penalty_type": "power"}


def _tokenizer(
    opt: dict[str, Any], sides: dict[str, dict[str, Any]], path: Path, options: ImportOptions, losses: list[str]
) -> Any:
    from .vocabulary import build_tokenizer

    transforms = list(opt.get("transforms") or [])
    found: dict[str, Any] = {}
    for side, given in (("src", options.source_spm), ("tgt", options.target_spm)):
        named = Path(str(opt.get(f"{side}_subword_model") or ""))
        beside = [one for one in (named, path.parent / named.name) if one.is_file()]
        spm = given or options.source_spm or options.target_spm
        if spm is None and "sentencepiece" in transforms and beside:
            spm = beside[0]
        found[side] = spm
        if "bpe" in transforms and beside:
            found.setdefault("codes", beside[0])
    codes = options.codes or found.get("codes")
    text: dict[str, Any] = {"segmentation": "words"}
    if found["src"] is not None and codes is None:
        text = {"segmentation": "sentencepiece", "source_spm": found["src"], "target_spm": found["tgt"]}
    elif codes is not None:
        text = {"segmentation": "subword-nmt", "codes": codes}
    elif splitters := [one for one in transforms if one in ("sentencepiece", "bpe", "onmt_tokenize")]:
        losses.append(
            f"text: the model was trained behind `{splitters[0]}`, so text must be split into pieces beforehand."
        )
    steps = [one for one in transforms if one in _TEXT_STEPS]
    if steps:
        losses.append(f"text: the steps {', '.join(steps)} of training are not carried over.")
    source, target = sides["src"]["pieces"], sides["tgt"]["pieces"]
    return build_tokenizer(
        source,
        target if target != source else None,
        pad=_PAD,
        eos=_EOS,
        unk=_UNK if _UNK in target else None,
        bos=_BOS if _BOS in target else None,
        start=sides["tgt"]["start"],
        source_prefix=(sides["src"]["start"],) if sides["src"]["start"] else (),
        source_suffix=sides["src"]["suffix"],
        target_suffix=sides["tgt"]["suffix"],
        moses=options.moses_languages(),
        lowercase=options.lowercase or sides["src"]["lowercase"],
        **text,
    )
