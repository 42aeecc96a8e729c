"""Reads a checkpoint of fairseq's `transformer` model, in any of the layouts that its versions have written.

fairseq's architecture names are sets of default sizes for one model; a checkpoint states what it was made with, and a
name gives what it leaves out. Everything that changes the function and has no field here is refused by name.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import fairseq_dictionary
from .fairseq_settings import ACTIVATIONS, PAD, Settings, is_on, read_settings, refuse
from .fairseq_settings import generation as find_generation
from .foreign import ConversionError, ForeignModel, ImportOptions, TensorReader, check_vocabulary, load_torch_file

try:
    from numpy._core import multiarray as _numpy_pickle
except ImportError:  # before NumPy 2
    from numpy.core import multiarray as _numpy_pickle  # type: ignore[no-redef]

OPTIONS = frozenset(
    {"config", "source_vocab", "target_vocab", "codes", "source_spm", "target_spm"}
    | {"source_language", "target_language", "moses", "lowercase"}
)

# Tensors of each encoder layer of version 0.12 that repeat others for a fast path, and are filled anew on loading.
_FAST_PATH = [f"{part}_{kind}" for part in ("in_proj", "out_proj", "fc1", "fc2") for kind in ("weight", "bias")]
# What a checkpoint may hold beside tensors and plain values: a namespace of settings, and the counts of a BLEU score
# among the metrics, which are arrays of NumPy, by the names that its versions give to one function.
_HARMLESS: list[Any] = [
    argparse.Namespace,
    np.ndarray,
    np.dtype,
    *(getattr(np.dtypes, f"{name}DType") for name in ("Bool", "Int32", "Int64", "Float32", "Float64")),
    *(
        (getattr(_numpy_pickle, name), f"{module}.{name}")
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
        for name in ("_reconstruct", "scalar")
    ),
]
_CHECKPOINTS = ("checkpoint_best.pt", "model.pt", "checkpoint_last.pt", "checkpoint*.pt", "*.pt")
_LONGEST_TABLE = 4096  # of a sinusoid at the start; it grows on demand


# --------------------------------------------------------------------------- the file
def _checkpoint_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConversionError(f"{path} does not exist.")
    for pattern in _CHECKPOINTS:
        found = sorted(path.glob(pattern))
        if len(found) > 1:
            raise ConversionError(
                f"{path} holds {', '.join(one.name for one in found)}: name one of them. Several models together (an "
                "ensemble) cannot be one model; fairseq's scripts/average_checkpoints.py makes one of a single run's."
            )
        if found:
            return found[0]
    raise ConversionError(f"{path} holds no checkpoint (*.pt) of fairseq.")


def _way_round(path: Path) -> str:
    plain = f"{path.stem}.plain.pt"
    program = (
        "import os; os.environ['TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'] = '1'; import argparse, json, torch; "
        f"from omegaconf import OmegaConf as O; s = torch.load({path.name!r}, map_location='cpu'); "
        "v = lambda x: O.to_container(x, resolve=True) if O.is_config(x) else "
        "vars(x) if isinstance(x, argparse.Namespace) else str(x); "
        "p = lambda x: json.loads(json.dumps(x, default=v)); "
        f"torch.save({{'args': p(s.get('args')), 'cfg': p(s.get('cfg')), 'model': s['model']}}, {plain!r})"
    )
    return (
        "If you trust the file, this command, run in its folder where fairseq is installed, writes its weights and "
        f'settings as plain values: python -c "{program}". Then import {plain}.'
    )


# --------------------------------------------------------------------------- tensors
class _Tensors(TensorReader):
    """By today's names, from whichever names the file has, in float32."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], path: Path, width: int, inner: int):
        super().__init__(tensors, path)
        self.width, self.inner = width, inner
        self.out: dict[str, torch.Tensor] = {}

    def put(self, new: str, tensor: torch.Tensor) -> None:
        self.out[new] = tensor.float()

    def linear(self, old: str, new: str, rows: int, columns: int) -> None:
        self.put(f"{new}.weight", self.take(f"{old}.weight", rows, columns))
        self.put(f"{new}.bias", self.take(f"{old}.bias", rows))

    def norm(self, old: str, older: str, new: str) -> None:
        name = older if f"{older}.weight" in self and f"{old}.weight" not in self else old
        for part in ("weight", "bias"):
            self.put(f"{new}.{part}", self.take(f"{name}.{part}", self.width))

    def attention(self, old: str, new: str) -> None:
        size = self.width
        if f"{old}.in_proj_weight" in self:  # before version 0.8: three maps in one
            weight, bias = (
                self.take(f"{old}.in_proj_weight", 3 * size, size),
                self.take(f"{old}.in_proj_bias", 3 * size),
            )
            for index, part in enumerate("qkv"):
                rows = slice(index * size, (index + 1) * size)
                self.put(f"{new}.{part}_proj.weight", weight[rows])
                self.put(f"{new}.{part}_proj.bias", bias[rows])
        else:
            for part in "qkv":
                self.linear(f"{old}.{part}_proj", f"{new}.{part}_proj", size, size)
        self.linear(f"{old}.out_proj", f"{new}.out_proj", size, size)

    def layer(self, side: str, index: int) -> None:
        old, new = f"{side}.layers.{index}", f"model.{side}.layers.{index}"
        parts = ["self_attn"] if side == "encoder" else ["self_attn", "encoder_attn"]
        for number, part in enumerate(parts):
            self.attention(f"{old}.{part}", f"{new}.{part}")
            self.norm(f"{old}.{part}_layer_norm", f"{old}.layer_norms.{number}", f"{new}.{part}_residual.layer_norm")
        self.linear(f"{old}.fc1", f"{new}.feed_forward.fc1", self.inner, self.width)
        self.linear(f"{old}.fc2", f"{new}.feed_forward.fc2", self.width, self.inner)
        self.norm(
            f"{old}.final_layer_norm", f"{old}.layer_norms.{len(parts)}", f"{new}.feed_forward_residual.layer_norm"
        )
        if side == "encoder":
            for name in _FAST_PATH:
                self.ignore(f"{old}.{name}", "repeats other tensors for fairseq's fast path")

    def has_last_norm(self, side: str, is_pre_norm: bool, is_left_out: bool) -> bool:
        """Whether a stack ends in a norm: the oldest pre-norm files do not, which their version says."""
        named = f"{side}.layer_norm.weight" in self
        version = float(self.tensors[f"{side}.version"].reshape(-1)[0]) if f"{side}.version" in self else 1.0
        self.ignore(f"{side}.version", "says which layout the file has")
        is_old = version < 2 or (side == "decoder" and version == 2)
        return is_pre_norm and not is_left_out and (named or not is_old)


def read(path: Path, options: ImportOptions) -> ForeignModel:
    """Read a checkpoint of fairseq's transformer.

    Args:
        path (`Path`): a .pt file, or the folder with `checkpoint_best.pt`, dict.SOURCE.txt, dict.TARGET.txt and codes.
        options (`ImportOptions`): those of `OPTIONS`; `config` is a JSON file of hyper-parameters that go before the
            checkpoint's own.

    Returns:
        `ForeignModel`.

    Raises:
        ConversionError: what cannot be read or represented, by name.
    """
    file = _checkpoint_file(path)
    saved = load_torch_file(file, _way_round(file), _HARMLESS)
    found = read_settings(saved, file, options.config)
    refuse(found, file)
    settings = Settings(found)
    side = fairseq_dictionary.read_text_side(file.parent, options, settings)
    choices, losses = list(side.choices), list[str]()

    width = int(settings["encoder_embed_dim"])
    tensors = _Tensors(saved["model"], file, width, int(settings["encoder_ffn_embed_dim"]))
    rows = tensors.take("encoder.embed_tokens.weight", None, width).shape[0]
    target_rows = tensors.take("decoder.embed_tokens.weight", None, width).shape[0]
    check_vocabulary(len(side.source.pieces), rows, f"{side.source.path.name} and `encoder.embed_tokens`")
    target = side.target or side.source
    unused = check_vocabulary(len(target.pieces), target_rows, f"{target.path.name} and `decoder.embed_tokens`")

    is_pre_norm = bool(settings["encoder_normalize_before"])
    last = [
        tensors.has_last_norm(one, is_pre_norm, one == "decoder" and is_on(settings["no_decoder_final_norm"]))
        for one in ("encoder", "decoder")
    ]
    if last[0] != last[1]:
        raise ConversionError(
            f"{file}: the encoder {'ends' if last[0] else 'does not end'} in a norm, the decoder "
            f"{'ends' if last[1] else 'does not end'} in one (`no_decoder_final_norm`, or an old `version`); this "
            "architecture has both or neither."
        )
    _take_embeddings(tensors, settings, side, rows, target_rows)
    is_learned = bool(settings["encoder_learned_pos"])
    positions = _take_positions(tensors, settings, is_learned, losses)
    for stack in ("encoder", "decoder"):
        for index in range(int(settings[f"{stack}_layers"])):
            tensors.layer(stack, index)
        if last[0]:
            tensors.norm(f"{stack}.layer_norm", "", f"model.{stack}.layer_norm")
    tensors.finish()

    is_shared = is_on(settings["share_all_embeddings"])
    config: dict[str, Any] = {
        "vocab_size": target_rows,
        "source_vocab_size": rows if side.target is not None or rows != target_rows else None,
        "d_model": width,
        "encoder_layers": int(settings["encoder_layers"]),
        "decoder_layers": int(settings["decoder_layers"]),
        "num_attention_heads": int(settings["encoder_attention_heads"]),
        "d_ff": tensors.inner,
        "activation_function": ACTIVATIONS[settings["activation_fn"]],
        "dropout": float(settings["dropout"]),
        "attention_dropout": float(settings["attention_dropout"]),
        "activation_dropout": float(settings["activation_dropout"] or settings.get("relu_dropout") or 0.0),
        "label_smoothing": float(settings.get("label_smoothing", 0.0)),
        "norm_position": "pre" if is_pre_norm else "post",
        "final_norm": last[0],
        "layer_norm_eps": 1e-5,
        "position_encoding": "learned" if is_learned else "sinusoidal",
        "max_position_embeddings": positions,
        "scale_embedding": not is_on(settings["no_scale_embedding"]),
        "tie_word_embeddings": is_shared or is_on(settings["share_decoder_input_output_embed"]),
        "tie_encoder_decoder_embeddings": is_shared,
        "attention_bias": True,
        "output_bias": False,
        "bos_token_id": 0,
        "pad_token_id": PAD,
        "eos_token_id": 2,
        "unk_token_id": 3,
        "decoder_start_token_id": 2,
    }
    if not is_learned:
        config.update(sinusoid_layout="halves", sinusoid_exponent="2i/(d-2)", position_offset=PAD + 1)
    generation = find_generation(settings, positions if is_learned else 0, unused, losses)
    for name in ("encoder_layerdrop", "decoder_layerdrop"):
        if is_on(settings.get(name)):
            losses.append(f"`{name}` ({settings[name]}) works in training only, and is not carried over.")
    if settings["arch"].endswith("_align"):
        losses.append("The attention head that was trained to align is a head like others.")
    tokenizer = fairseq_dictionary.build(side, options, settings, choices, positions if is_learned else None)
    return ForeignModel(
        kind="fairseq",
        config=config,
        tensors=tensors.out,
        generation=generation,
        tokenizer=tokenizer,
        choices=choices,
        losses=losses,
        tensors_read=len(tensors.taken),
    )


def _take_embeddings(
    tensors: _Tensors, settings: Settings, side: fairseq_dictionary.TextSide, rows: int, target_rows: int
) -> None:
    is_shared = is_on(settings["share_all_embeddings"])
    is_tied = is_shared or is_on(settings["share_decoder_input_output_embed"])
    if is_shared and side.target is not None:
        raise ConversionError(
            f"{tensors.path}: `share_all_embeddings` needs one dictionary for both sides, but {side.source.path.name} "
            f"and {side.target.path.name} differ."
        )
    names = ["decoder.embed_tokens.weight"]
    if is_tied:
        names.append("decoder.output_projection.weight")
    else:
        older = "decoder.embed_out"
        name = older if older in tensors else "decoder.output_projection.weight"
        tensors.put("lm_head.weight", tensors.take(name, target_rows, tensors.width))
    if is_shared:
        names.append("encoder.embed_tokens.weight")
    else:
        tensors.put("model.encoder.embed_tokens.weight", tensors.take("encoder.embed_tokens.weight", rows, None))
    tensors.put("model.shared.weight", tensors.take_equal(*names))


def _take_positions(tensors: _Tensors, settings: Settings, is_learned: bool, losses: list[str]) -> int:
    """Take or leave the position tables; returns how many positions there are."""
    limits = [int(settings["max_source_positions"]), int(settings["max_target_positions"])]
    if not is_learned:
        for side in ("encoder", "decoder"):
            for name in ("_float_tensor", "weights"):
                tensors.ignore(f"{side}.embed_positions.{name}", "a sinusoid, which is computed")
        return min(max(limits), _LONGEST_TABLE)
    # Rows 0 and 1 are never read by a token: numbers begin behind the padding id.
    tables = [
        tensors.take(f"{side}.embed_positions.weight", None, tensors.width)[PAD + 1 :]
        for side in ("encoder", "decoder")
    ]
    count = min(len(table) for table in tables)
    for side, table in zip(("encoder", "decoder"), tables, strict=True):
        tensors.put(f"model.{side}.embed_positions.weight", table[:count])
        if len(table) > count:
            losses.append(f"The {side}'s learned positions end at {count}, as the other side's; it had {len(table)}.")
    return count
