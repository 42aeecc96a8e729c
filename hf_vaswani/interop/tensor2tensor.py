"""Reads Transformer models of Tensor2Tensor, the paper's own code: a checkpoint, hyper-parameters, subwords.

Tensor2Tensor adds one more vector to every source position, the embedding of the target's "space" (its language, or 0).
It is the same for a whole model, so it goes into the source embedding, which thereby parts from the target's.
"""

import math
import re
from pathlib import Path
from typing import Any

import torch

from .foreign import ConversionError, ForeignModel, ImportOptions, TensorReader, check_vocabulary
from .tensor2tensor_hparams import architecture, check_hparams, read_hparams
from .tensorflow_checkpoint import TensorFlowCheckpoint, find_checkpoint

OPTIONS = frozenset({"config", "source_vocab", "target_vocab"})

# What the trainer keeps beside the weights: its own counters, and the optimizer's running means.
_BOOKKEEPING = re.compile(
    r"^(training|losses_avg|train_stats|OptimizeLoss)/|^(global_step|learning_rate|loss_scale.*|beta[12]_power(_1)?)$"
    r"|/(Adam|Adam_1|Adafactor|Adafactor_1|Momentum|ExponentialMovingAverage|_slot_\w+|AdamAccumulator|AccumGrad)$"
)
_ATTENTION = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "output_transform"}
_SPACES = "German 8, English 3, French 6, Czech 21, Chinese 16, Macedonian 20"


def read(path: Path, options: ImportOptions) -> ForeignModel:
    """A Tensor2Tensor Transformer in this package's terms.

    Args:
        path (`Path`): the training folder, or one checkpoint in it.
        options (`ImportOptions`): `config`, an hparams.json or a flags.txt, where neither is beside the checkpoint;
            `source_vocab` and `target_vocab`, subword files, where none is.

    Returns:
        `ForeignModel`.

    Raises:
        ConversionError: for what cannot be read or represented.
    """
    prefix = find_checkpoint(path)
    config_path, hparams = read_hparams(prefix.parent, options)
    check_hparams(hparams, config_path)
    checkpoint = TensorFlowCheckpoint(prefix)
    body = _body(checkpoint, prefix)
    reader = TensorReader(checkpoint, prefix)
    for name in checkpoint:
        if _BOOKKEEPING.search(name):
            reader.ignore(name, "optimizer or counter")

    choices: list[str] = []
    losses: list[str] = []
    config = architecture(hparams, config_path)
    computed = hparams.get("activation_dtype", "float32")
    if computed != "float32":
        choices.append(f"It was trained with activations in {computed}; here they are in the dtype that you load.")
    source, target = _vocabularies(prefix.parent, options, choices)
    tensors, tying = _embeddings(reader, hparams, source, target)
    tensors.update(_layers(reader, body, config))
    _target_space(reader, body, hparams, config, tensors, tying, choices)
    if config["position_encoding"] == "learned":
        rows = config["max_position_embeddings"] = hparams["max_length"]
        for side, name in (("encoder", "inputs"), ("decoder", "targets")):
            table = reader.take(f"{body}{name}_positional_embedding", rows, config["d_model"])
            tensors[f"model.{side}.embed_positions.weight"] = table.float()
        losses.append(f"Tensor2Tensor reads zero positions past its {rows} learned ones; here they are refused.")
    reader.finish()

    unused: list[int] = []
    tokenizer = None
    if source is not None:
        shared_target = source if target is None else target
        unused = check_vocabulary(len(shared_target), tying["vocab_size"], f"{prefix} and the target vocabulary")
        check_vocabulary(len(source), tying["source_vocab_size"] or tying["vocab_size"], f"{prefix} and its vocabulary")
        tokenizer = _tokenizer(source, target)
    else:
        losses.append("No subword file was given or found, so the folder has no tokenizer.")
    if unused:
        choices.append(f"{len(unused)} rows of the target matrix have no piece and are never generated.")
    return ForeignModel(
        kind="tensor2tensor",
        config={**config, **tying},
        tensors=tensors,
        generation={
            "num_beams": 4,
            "length_penalty": 0.6,
            "length_penalty_type": "gnmt",
            "early_stopping": "never",
            "max_length_offset": 100,  # `extra_length` of its decoding; the paper's own is 50
            **({"suppress_tokens": unused} if unused else {}),
        },
        tokenizer=tokenizer,
        choices=choices,
        losses=losses,
        tensors_read=len(reader.taken),
    )


# --------------------------------------------------------------------------- tensors
def _body(checkpoint: TensorFlowCheckpoint, prefix: Path) -> str:
    """The scope that the two stacks are in, as in "transformer/body/"."""
    found = {name.split("encoder/layer_0/")[0] for name in checkpoint if "/layer_0/" in name and "encoder/" in name}
    scopes = sorted(scope for scope in found if not _BOOKKEEPING.search(scope))
    if len(scopes) != 1:
        raise ConversionError(
            f"{prefix} should hold one encoder, but holds {len(scopes)} ({', '.join(scopes) or 'none'}): is it of a "
            "Tensor2Tensor `transformer`?"
        )
    model = scopes[0].split("/")[0]
    if model != "transformer":
        raise ConversionError(f"{prefix} is of the model `{model}`, which this architecture is not.")
    if any("qkv_transform" in name for name in checkpoint):
        raise ConversionError(
            f"{prefix} has `qkv_transform`, so a version of Tensor2Tensor before 1.4 wrote it, whose names are not "
            "known here."
        )
    return scopes[0]


def _layers(reader: TensorReader, body: str, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    width, inner, heads = config["d_model"], config["d_ff"], config["num_attention_heads"]
    keys, values = heads * config["d_k"], heads * config["d_v"]
    shapes = {"q": (width, keys), "k": (width, keys), "v": (width, values), "output_transform": (values, width)}
    # Each sublayer opens a scope for what comes before it and a second one for what comes after.
    scope = "layer_prepostprocess" if config["norm_position"] == "pre" else "layer_postprocess"
    tensors: dict[str, torch.Tensor] = {}

    def norm(ours: str, theirs: str) -> None:
        for kind, name in (("weight", "scale"), ("bias", "bias")):
            tensors[f"{ours}.{kind}"] = reader.take(f"{theirs}/layer_norm/layer_norm_{name}", width).float()

    def attention(ours: str, theirs: str) -> None:
        for own, name in _ATTENTION.items():
            kernel = reader.take(f"{theirs}/multihead_attention/{name}/kernel", *shapes[name])
            tensors[f"{ours}.{own}.weight"] = kernel.float().T
        norm(f"{ours}_residual.layer_norm", f"{theirs}/{scope}")

    for side in ("encoder", "decoder"):
        for n in range(config[f"{side}_layers"]):
            ours, theirs = f"model.{side}.layers.{n}", f"{body}{side}/layer_{n}"
            attention(f"{ours}.self_attn", f"{theirs}/self_attention")
            if side == "decoder":
                attention(f"{ours}.encoder_attn", f"{theirs}/encdec_attention")
            for own, name, sizes in (("fc1", "conv1", (width, inner)), ("fc2", "conv2", (inner, width))):
                kernel = reader.take(f"{theirs}/ffn/{name}/kernel", *sizes)
                tensors[f"{ours}.feed_forward.{own}.weight"] = kernel.float().T
                bias = reader.take(f"{theirs}/ffn/{name}/bias", sizes[1])
                tensors[f"{ours}.feed_forward.{own}.bias"] = bias.float()
            norm(f"{ours}.feed_forward_residual.layer_norm", f"{theirs}/ffn/{scope}")
        if config["final_norm"]:
            norm(f"model.{side}.layer_norm", f"{body}{side}/layer_prepostprocess")
    return tensors


def _embeddings(
    reader: TensorReader, hparams: dict[str, Any], source: list[str] | None, target: list[str] | None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Embedding and softmax matrices, put together from their shards, and the fields that say how they are tied."""
    pattern = re.compile(r"^(.*symbol_modality_(\d+)_\d+)/(\w+)/weights_(\d+)$")
    shards: dict[tuple[str, str], dict[int, str]] = {}
    rows: dict[tuple[str, str], int] = {}
    for name in reader.tensors:
        if name not in reader.ignored and (match := pattern.match(name)):
            key = (match[3], match[1])
            rows[key] = int(match[2])
            shards.setdefault(key, {})[int(match[4])] = name

    def matrix(key: tuple[str, str]) -> torch.Tensor:
        parts = [reader.take(shards[key].get(n, f"{key[1]}/{key[0]}/weights_{n}")) for n in range(len(shards[key]))]
        whole = torch.cat(parts).float()
        if tuple(whole.shape) != (rows[key], hparams["hidden_size"]):
            raise ConversionError(
                f"{reader.path}: the {len(parts)} shards of {key[1]}/{key[0]} are {tuple(whole.shape)} together, not "
                f"({rows[key]}, {hparams['hidden_size']})."
            )
        return whole

    def one(kind: str) -> tuple[str, str]:
        found = [key for key in shards if key[0] == kind]
        if len(found) != 1:
            raise ConversionError(f"{reader.path} has {len(found)} matrices called {kind!r}, but needs one.")
        return found[0]

    shares_softmax = bool(hparams["shared_embedding_and_softmax_weights"])
    tensors: dict[str, torch.Tensor] = {}
    if shares_softmax or hparams["shared_embedding"]:
        shared = [key for key in shards if key[0] == "shared"]
        if len(shared) == 2:  # one for each vocabulary; only the vocabularies tell which is whose
            of_source, of_target = _by_size(reader, {rows[key]: key for key in shared}, source, target)
            tensors["model.encoder.embed_tokens.weight"] = matrix(of_source)
        else:
            of_source = of_target = one("shared")
    else:
        of_source, of_target = one("input_emb"), one("target_emb")
        tensors["model.encoder.embed_tokens.weight"] = matrix(of_source)
    tensors["model.shared.weight"] = matrix(of_target)
    if not shares_softmax:
        tensors["lm_head.weight"] = matrix(one("softmax"))
    is_split = (target is not None and target != source) or rows[of_source] != rows[of_target]
    return tensors, {
        "vocab_size": rows[of_target],
        "source_vocab_size": rows[of_source] if is_split else None,
        "tie_word_embeddings": shares_softmax,
        "tie_encoder_decoder_embeddings": "model.encoder.embed_tokens.weight" not in tensors,
    }


def _by_size(reader: TensorReader, keys: dict[int, Any], source: list[str] | None, target: list[str] | None) -> Any:
    if source is None or target is None or len(keys) != 2:
        raise ConversionError(
            f"{reader.path} has two vocabularies, of {' and '.join(map(str, keys))} rows, and does not say which is "
            "the source's. Give both subword files."
        )
    small, large = sorted(keys)
    return (keys[small], keys[large]) if len(source) <= len(target) else (keys[large], keys[small])


def _target_space(
    reader: TensorReader,
    body: str,
    hparams: dict[str, Any],
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    tying: dict[str, Any],
    choices: list[str],
) -> None:
    """Put the embedding of the target's language into the source embedding."""
    name = f"{body}target_space_embedding/kernel"
    if not hparams["use_target_space_embedding"]:
        reader.ignore(name, "not used")
        return
    table = reader.take(name, None, config["d_model"]).float()
    row, reason = hparams.get("target_space_id"), "as `target_space_id` of the hyper-parameters says"
    # Only the row in use has ever had a gradient, so its running means alone are not zero.
    slot = next((one for one in reader.tensors if one.endswith(f"{name}/Adam_1") or one.endswith(f"{name}/Adam")), None)
    if row is None and slot is not None:
        trained = reader.tensors[slot].any(dim=1).nonzero().flatten().tolist()
        if len(trained) == 1:
            row, reason = trained[0], "the only one that the optimizer has moved"
    if row is None:
        row = 0
        reason = (
            "as Tensor2Tensor has it for text since version 1.5. Before, each language had its own "
            f"({_SPACES}): for a model of that age put the number as `target_space_id` into its hparams.json"
        )
    if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < len(table):
        raise ConversionError(f"{reader.path}: `target_space_id` {row!r} is no row of the {len(table)} in {name!r}.")
    if not table[row].any():
        choices.append(f"Row {row} of the target space embedding is all zeros, so nothing is added to the source.")
        return
    own = "model.encoder.embed_tokens.weight"
    scale = math.sqrt(config["d_model"]) if config["scale_embedding"] else 1.0
    tensors[own] = tensors.get(own, tensors["model.shared.weight"]) + table[row] / scale
    tying["tie_encoder_decoder_embeddings"] = False
    choices.append(
        f"The source embedding includes row {row} of the target space embedding, {reason}; so it is no longer one "
        "matrix with the target embedding."
    )


# --------------------------------------------------------------------------- vocabulary
def _vocabularies(
    folder: Path, options: ImportOptions, choices: list[str]
) -> tuple[list[str] | None, list[str] | None]:
    if options.target_vocab is not None and options.source_vocab is None:
        raise ConversionError("`target_vocab` needs `source_vocab` too; `source_vocab` alone serves both sides.")
    if options.source_vocab is not None:
        target = None if options.target_vocab is None else _pieces(options.target_vocab)
        return _pieces(options.source_vocab), target
    found = sorted(folder.glob("vocab.*.subwords"))
    if len(found) != 1:
        return None, None
    choices.append(f"{found[0].name} beside the checkpoint is the vocabulary of both sides.")
    return _pieces(found[0]), None


def _pieces(path: Path) -> list[str]:
    if not path.is_file():
        raise ConversionError(f"{path} is not a file.")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConversionError(f"{path} is not UTF-8 text ({error}).") from error
    pieces: dict[str, int] = {}
    for number, line in enumerate(lines[: -1 if lines[-1] == "" else None], start=1):
        piece = line.rstrip()
        if len(piece) > 1 and piece[0] == piece[-1] and piece[0] in "'\"":
            piece = piece[1:-1]
        if piece in pieces:
            raise ConversionError(f"{path}, line {number}: the piece {piece!r} stands on line {pieces[piece]} already.")
        pieces[piece] = number
    names = list(pieces)
    if len(names) < 3 or names[0].rstrip("_") != "<pad>" or names[1].rstrip("_") != "<EOS>":
        raise ConversionError(f"{path} does not begin with <pad> and <EOS>, so it is no subword file of Tensor2Tensor.")
    return names


def _tokenizer(source: list[str], target: list[str] | None) -> Any:
    from .vocabulary import build_tokenizer

    pad, end = source[:2]
    return build_tokenizer(
        source,
        target,
        segmentation="subtokens",
        pad=pad,
        eos=end,
        unk=None,
        source_suffix=(end,),
        target_suffix=(end,),
    )
