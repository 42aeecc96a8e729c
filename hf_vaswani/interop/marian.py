"""Reads Marian models, by either of two roads: the toolkit's own .npz, or the folder of a transformers MarianMTModel.

Of the second, what the installed transformers computes is converted: post-norm, LayerNorm with epsilon 1e-5, a sinusoid
with all sines first and the paper's exponent, from position 0.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError

from ..modeling_vaswani import sinusoid_table
from . import marian_npz
from .foreign import ConversionError, ForeignModel, ImportOptions, Program, TensorReader, load_torch_file
from .marian_export import RESTORE_KEY, restore
from .positions import first_other_row

OPTIONS = marian_npz.OPTIONS
MARIAN_MT_EPS = 1e-5
# Options of older MarianMT configurations that change the function, with the values that this architecture has.
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (True,),
    "normalize_embedding": (False,),
    "normalize_before": (False,),
    "add_final_layer_norm": (False,),
    "static_position_embeddings": (True,),
    "extra_pos_embeddings": (0,),
    "add_cross_attention": (False, True),
}
_CARRIED = (
    "d_model", "encoder_layers", "decoder_layers", "max_position_embeddings", "scale_embedding", "dropout",
    "attention_dropout", "activation_dropout", "pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id",
)  # fmt: skip
_NORMS = {"self_attn": "self_attn_layer_norm", "encoder_attn": "encoder_attn_layer_norm", "ffn": "final_layer_norm"}
_PARTS = ("q_proj", "k_proj", "v_proj", "out_proj")
_WAY_ROUND = (
    "Load it where its code is trusted, by MarianMTModel.from_pretrained(folder), and save it with save_pretrained: "
    "that writes model.safetensors."
)


def read(path: Path, options: ImportOptions) -> ForeignModel:
    """A Marian model in this package's terms.

    Args:
        path (`Path`): an .npz of the toolkit or a folder with one, or the folder of a MarianMTModel.
        options (`ImportOptions`): for the toolkit's files only; a MarianMTModel's folder says all.

    Raises:
        ConversionError: for what cannot be read or represented.
    """
    if path.is_file() and path.name in ("config.json", "model.safetensors", "pytorch_model.bin"):
        path = path.parent
    if not (path.is_dir() and (path / "config.json").is_file()):
        return marian_npz.read(path, options)
    for one in fields(options):
        if getattr(options, one.name) != one.default:
            raise ConversionError(f"`{one.name}` means nothing here: {path} is a transformers folder, which says all.")
    raw = _config(path)
    choices: list[str] = []
    losses: list[str] = []
    config = _architecture(raw, path, losses)
    stored = _tensors(path)
    reader = TensorReader(stored, path)
    tensors = _weights(reader, raw, config, choices)
    reader.finish()
    halves = {str(one.dtype).removeprefix("torch.") for one in stored.values() if one.dtype != torch.float32}
    if halves:
        choices.append(f"Weights of type {', '.join(sorted(halves))} became float32.")
        tensors = {name: tensor.float() for name, tensor in tensors.items()}
    generation = _generation(path, raw)
    is_restored = restore(raw, config, tensors, generation, path, choices)
    tokenizer = _tokenizer(path, raw, config, losses)
    comparable = not is_restored or config["layer_norm_eps"] == MARIAN_MT_EPS
    return ForeignModel(
        kind="marian",
        config=config,
        tensors=tensors,
        generation=generation,
        tokenizer=tokenizer,
        choices=choices,
        losses=losses,
        program=(lambda: program(path)) if comparable else None,
        tensors_read=len(reader.taken),
    )


# ---------------------------------------------------------------------- the folder
def _config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{file} is not JSON: {error}.") from error
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if kind != "marian":
        raise ConversionError(f"{file} is of a model of type {kind!r}; a MarianMTModel's is 'marian'.")
    return raw


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of the folder, mapped from its files."""
    for name in (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ):
        if (path / name).is_file():
            break
    else:
        raise ConversionError(f"{path} has no weights: neither model.safetensors nor pytorch_model.bin.")
    files = [path / name]
    if name.endswith(".index.json"):
        try:
            files = [path / one for one in sorted(set(json.loads(files[0].read_text())["weight_map"].values()))]
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            raise ConversionError(f"{files[0]} is not an index of weights.") from error
    found: dict[str, torch.Tensor] = {}
    for file in files:
        if file.suffix == ".safetensors":
            from safetensors import SafetensorError
            from safetensors.torch import load_file

            try:
                found.update(load_file(file))
            except (SafetensorError, OSError) as error:
                raise ConversionError(f"{file} cannot be read, or is damaged or cut off ({error}).") from error
        else:
            loaded = load_torch_file(file, _WAY_ROUND)
            if not isinstance(loaded, dict) or not all(isinstance(one, torch.Tensor) for one in loaded.values()):
                raise ConversionError(
                    f"{file} holds something else than tensors by name, as a MarianMTModel saves them."
                )
            found.update(loaded)
    return found


def _architecture(raw: dict[str, Any], path: Path, losses: list[str]) -> dict[str, Any]:
    """Fields of the configuration, with the defaults of transformers' own class where the file is silent."""
    from transformers import MarianConfig

    def refuse(name: str, why: str = "which this architecture does not have") -> ConversionError:
        return ConversionError(f"{path}: `{name}` is {raw.get(name)!r}, {why}. Nothing was converted.")

    for name, allowed in _ALLOWED.items():
        if raw.get(name) is not None and raw[name] not in allowed:
            raise refuse(name)
    architectures = raw.get("architectures") or ["MarianMTModel"]
    if not isinstance(architectures, list) or "MarianMTModel" not in architectures:
        raise refuse("architectures", "not a whole translation model")
    try:
        known = MarianConfig(**{k: v for k, v in raw.items() if k in MarianConfig.__dataclass_fields__})
    except (StrictDataclassError, TypeError, ValueError, AttributeError) as error:
        raise ConversionError(f"{path / 'config.json'}: {' '.join(str(error).split())}") from error
    for name in ("attention_heads", "ffn_dim"):
        if getattr(known, f"encoder_{name}") != getattr(known, f"decoder_{name}"):
            raise ConversionError(
                f"{path}: `encoder_{name}` is {getattr(known, f'encoder_{name}')} and `decoder_{name}` "
                f"{getattr(known, f'decoder_{name}')}; this architecture has one for both sides. Nothing was converted."
            )
    if known.d_model % 2:
        raise refuse("d_model", "and its sinusoid needs an even one")
    for name in ("encoder_layerdrop", "decoder_layerdrop"):
        if getattr(known, name):
            losses.append(f"`{name}` {getattr(known, name)}: no layers are dropped in training here.")
    config = {name: getattr(known, name) for name in _CARRIED}
    target_size = known.vocab_size if known.share_encoder_decoder_embeddings else known.decoder_vocab_size
    assert target_size is not None
    if config["bos_token_id"] is not None and not 0 <= config["bos_token_id"] < target_size:
        config["bos_token_id"] = None
    activation = known.activation_function
    return {
        **config,
        "vocab_size": target_size,
        "source_vocab_size": None if known.vocab_size == target_size else known.vocab_size,
        "num_attention_heads": known.encoder_attention_heads,
        "d_ff": known.encoder_ffn_dim,
        "activation_function": "silu" if activation == "swish" else activation,
        "label_smoothing": 0.0,
        "norm_position": "post",
        "final_norm": False,
        "layer_norm_eps": MARIAN_MT_EPS,
        "position_encoding": "sinusoidal",
        "sinusoid_layout": "halves",
        "sinusoid_exponent": "2i/d",
        "position_offset": 0,
        "attention_bias": True,
        "output_bias": True,
        "unk_token_id": None,
    }


# ---------------------------------------------------------------------- tensors
def _weights(
    reader: TensorReader, raw: dict[str, Any], config: dict[str, Any], choices: list[str]
) -> dict[str, torch.Tensor]:
    """Tensors under our names, all of them views; fills in what ties the embeddings."""
    width, inner = config["d_model"], config["d_ff"]
    found = _embeddings(reader, raw, config, choices)

    def linear(ours: str, theirs: str, out: int, into: int) -> None:
        found[f"{ours}.weight"] = reader.take(f"{theirs}.weight", out, into)
        found[f"{ours}.bias"] = reader.take(f"{theirs}.bias", out)

    def norm(ours: str, theirs: str) -> None:
        for part in ("weight", "bias"):
            found[f"{ours}.layer_norm.{part}"] = reader.take(f"{theirs}.{part}", width)

    for name in _layers(config):
        for part in ("self_attn", "encoder_attn") if ".decoder." in name else ("self_attn",):
            for which in _PARTS:
                linear(f"{name}.{part}.{which}", f"{name}.{part}.{which}", width, width)
            norm(f"{name}.{part}_residual", f"{name}.{_NORMS[part]}")
        linear(f"{name}.feed_forward.fc1", f"{name}.fc1", inner, width)
        linear(f"{name}.feed_forward.fc2", f"{name}.fc2", width, inner)
        norm(f"{name}.feed_forward_residual", f"{name}.{_NORMS['ffn']}")
    _positions(reader, config, choices)
    return found


def _layers(config: dict[str, Any]) -> Iterator[str]:
    for side in ("encoder", "decoder"):
        yield from (f"model.{side}.layers.{number}" for number in range(config[f"{side}_layers"]))


def _embeddings(
    reader: TensorReader, raw: dict[str, Any], config: dict[str, Any], choices: list[str]
) -> dict[str, torch.Tensor]:
    """The three matrices and the output bias.

    What the configuration calls tied is one matrix only where the file does not hold two unlike ones: so does
    transformers, and older conversions of Marian models are such files.
    """
    width, target_rows = config["d_model"], config["vocab_size"]
    source_rows = config["source_vocab_size"] or target_rows
    is_shared = raw.get("share_encoder_decoder_embeddings", True)
    is_tied = raw.get("tie_word_embeddings", True)
    names = {
        "source": ["model.encoder.embed_tokens.weight"],
        "target": ["model.decoder.embed_tokens.weight"],
        "output": ["lm_head.weight"],
    }
    if is_shared:
        names = {side: [*own, "model.shared.weight"] for side, own in names.items()}
        if is_tied:  # where only one of a tied set was saved, any of them is it
            names = {side: [*own, "model.decoder.embed_tokens.weight"] for side, own in names.items()}
            names = {side: [*own, "model.encoder.embed_tokens.weight", "lm_head.weight"] for side, own in names.items()}
        else:
            names["output"] = names["output"][:1]
    elif is_tied:
        names["target"].append("lm_head.weight")
        names["output"].append("model.decoder.embed_tokens.weight")
    rows = {"source": source_rows, "target": target_rows, "output": target_rows}
    matrices = {}
    for side, options in names.items():
        there = next((name for name in options if name in reader), options[0])
        matrices[side] = reader.take(there, rows[side], width)
    if "model.shared.weight" in reader and "model.shared.weight" not in reader.taken:
        shared = reader.take("model.shared.weight")
        if not any(torch.equal(shared, one) for one in matrices.values()):
            choices.append("The tensor model.shared.weight is used by neither side, and was left out.")

    def same(one: str, other: str) -> bool:
        a, b = matrices[one], matrices[other]
        return a.shape == b.shape and (a.data_ptr() == b.data_ptr() or torch.equal(a, b))

    config["tie_encoder_decoder_embeddings"] = bool(is_shared) and same("source", "target")
    config["tie_word_embeddings"] = bool(is_tied) and same("target", "output")
    if is_shared and not config["tie_encoder_decoder_embeddings"]:
        choices.append("Source and target embedding should be one matrix, but the file holds two: two are used.")
    if is_tied and not config["tie_word_embeddings"]:
        choices.append("Target embedding and output matrix should be one, but the file holds two: two are used.")
    found = {"model.shared.weight": matrices["target"]}
    if not config["tie_encoder_decoder_embeddings"]:
        found["model.encoder.embed_tokens.weight"] = _own_memory(matrices["source"], found)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = _own_memory(matrices["output"], found)
    if "final_logits_bias" in reader:
        found["lm_head.bias"] = reader.take("final_logits_bias", 1, target_rows)[0]
    else:
        found["lm_head.bias"] = torch.zeros(target_rows, dtype=matrices["target"].dtype)
        choices.append("There is no final_logits_bias in the file, so the output bias is zero.")
    return found


def _own_memory(tensor: torch.Tensor, found: dict[str, torch.Tensor]) -> torch.Tensor:
    return tensor.clone() if any(tensor.data_ptr() == one.data_ptr() for one in found.values()) else tensor


def _positions(reader: TensorReader, config: dict[str, Any], choices: list[str]) -> None:
    """Saved sinusoids are left out, where they are the sinusoids that the model would make.

    Raises:
        ConversionError: they are something else.
    """
    rounded = False
    for side in ("encoder", "decoder"):
        name = f"model.{side}.embed_positions.weight"
        if name not in reader:
            continue
        table = reader.take(name, None, config["d_model"])
        # MarianMTModel computes its angles in float64.
        if first_other_row(table, "halves", rounding_a_row=0.0) is not None:
            raise ConversionError(
                f"{reader.path}: {name} is not the sinusoid that MarianMTModel makes; trained positions are not read "
                "from such a folder. Nothing was converted."
            )
        rounded |= table.dtype != torch.float32
    if rounded:
        choices.append("The file's position table is rounded to half precision; it is computed exactly here.")


# ---------------------------------------------------------------------- generation, tokenizer
def _generation(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """What MarianMTModel's `generate()` would do here, as far as it is not our own default."""
    from transformers import GenerationConfig, MarianConfig

    if (path / "generation_config.json").is_file():
        try:
            settings = GenerationConfig.from_pretrained(path)
        except Exception as error:  # the library raises whatever wrong values lead to
            raise ConversionError(f"{path / 'generation_config.json'} cannot be used: {error}") from error
    else:  # older folders have these among the options of the model, where today's class does not look
        known = GenerationConfig().to_dict()
        settings = GenerationConfig(**{name: value for name, value in raw.items() if name in known})
        settings.forced_eos_token_id = raw.get("forced_eos_token_id", MarianConfig.forced_eos_token_id)
    others = {"pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id", "use_cache"}
    others |= {"transformers_version", "return_dict_in_generate", *settings.extra_output_flags}
    given = {name: value for name, value in settings.to_diff_dict().items() if name not in others and name[0] != "_"}
    defaults = {"num_beams": 1, "length_penalty": 1.0, "early_stopping": False}
    return {**defaults, "length_penalty_type": "power", "max_length_offset": None, "max_length": 20, **given}


def _tokenizer(path: Path, raw: dict[str, Any], config: dict[str, Any], losses: list[str]) -> Any:
    """The folder's tokenizer; its unknown piece goes into the configuration."""
    import importlib.util

    from transformers import AutoTokenizer

    if not any((path / name).is_file() for name in ("source.spm", "vocab.json", "tokenizer.json")):
        losses.append("The folder has no tokenizer, so the model reads and writes ids only.")
        return None
    if (path / "source.spm").is_file() and importlib.util.find_spec("sentencepiece") is None:
        raise ConversionError(f"{path / 'source.spm'} is read by a library that is not here: pip install sentencepiece")
    left = raw.get(RESTORE_KEY) or {}
    try:
        if left.get("tokenizer") == "VaswaniTokenizer":
            from ..tokenization_vaswani import VaswaniTokenizer

            return VaswaniTokenizer.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # the library raises whatever its readers do
        raise ConversionError(f"{path}: its tokenizer cannot be loaded: {type(error).__name__}: {error}") from error
    pieces, rows = max(tokenizer.get_vocab().values()) + 1, config.get("source_vocab_size") or config["vocab_size"]
    if pieces > rows:
        raise ConversionError(
            f"{path}: the tokenizer has {pieces} pieces, the source embedding {rows} rows. Are they of one model?"
        )
    if not left:
        config["unk_token_id"] = tokenizer.unk_token_id
    return tokenizer


# ---------------------------------------------------------------------- the program to compare with
def program(path: Path) -> Program:
    """MarianMTModel itself, in float32, on a folder with config.json and weights."""
    import transformers

    from .proof import LIMIT

    model: Any = transformers.MarianMTModel.from_pretrained(path, dtype=torch.float32).eval()
    for part in (model.model.encoder, model.model.decoder):  # a file in half precision holds them rounded
        table = part.embed_positions.weight
        table.data.copy_(sinusoid_table(len(table), table.shape[1], "halves"))

    @torch.no_grad()
    def logits(sources: list[list[int]], targets: list[list[int]]) -> list[np.ndarray]:
        return [
            model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target])).logits[0].numpy()
            for source, target in zip(sources, targets, strict=True)
        ]

    @torch.no_grad()
    def search(sources: list[list[int]], beams: int) -> list[list[int]]:
        end, pad = model.config.eos_token_id, model.config.pad_token_id
        settings = copy.deepcopy(model.generation_config)
        settings.update(max_length=None, max_new_tokens=LIMIT, num_beams=beams, do_sample=False, num_return_sequences=1)
        settings.early_stopping = "never" if beams > 1 else False
        longest = max(map(len, sources))
        ids = torch.tensor([source + [pad] * (longest - len(source)) for source in sources])
        mask = torch.tensor([[1] * len(source) + [0] * (longest - len(source)) for source in sources])
        rows = model.generate(ids, attention_mask=mask, generation_config=settings)[:, 1:].tolist()
        return [row[: row.index(end) + 1] if end in row else row for row in rows]

    return Program(f"transformers {transformers.__version__}, MarianMTModel", logits, search)
