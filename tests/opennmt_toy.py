"""A small OpenNMT-py model: its file as versions 1, 2 and 3 write it, and its equations in plain float64."""

import collections
import contextlib
import functools
import math
import sys
import types
from argparse import Namespace

import torch

D, FF, HEADS = 8, 12, 2
WORDS = ["no", "12:30", "#", "&", "~"]
TARGET_WORDS = ["one", "two", "three", "null", "'", "yes", "4"]


def options(version=3, **changes):
    """The options that a checkpoint of that version carries, as far as they matter; None leaves one out."""
    given = {
        "model_type": "text", "model_task": "seq2seq", "encoder_type": "transformer", "decoder_type": "transformer",
        "enc_layers": 2, "dec_layers": 3, "heads": HEADS, "transformer_ff": FF, "position_encoding": True,
        "max_relative_positions": 0, "self_attn_type": "scaled-dot", "copy_attn": False, "share_embeddings": False,
        "share_decoder_embeddings": False, "dropout": [0.2], "attention_dropout": [0.1], "label_smoothing": 0.1,
        "generator_function": "softmax", "save_model": "model", "optim": "adam",
    }  # fmt: skip
    if version == 3:
        given |= {
            "position_encoding_type": "SinusoidalInterleaved", "pos_ffn_activation_fn": "relu", "add_qkvbias": False,
            "add_ffnbias": False, "layer_norm": "standard", "norm_eps": 1e-6, "hidden_size": D, "num_kv": 0,
            "lora_layers": [], "quant_type": "", "transforms": [], "_all_transform": {"filtertoolong"},
            "data": {"corpus_1": {"path_src": "train.src"}}, "num_experts": 0, "parallel_residual": False,
        }  # fmt: skip
    else:
        given["rnn_size"] = D
    return {name: value for name, value in {**given, **changes}.items() if value is not None}


def vocabularies(version=3, shared=False):
    """Pieces of source and target by id, with the special ones that each version puts in."""
    every = ["<unk>", "<blank>", "<s>", "</s>"]
    if shared:
        return (pieces := [*every, *WORDS, *TARGET_WORDS]), pieces
    return [*(every if version == 3 else every[:2]), *WORDS], [*every, *TARGET_WORDS]


def weights(opt, source, target, version=3, seed=0):
    """State dicts of model and generator with OpenNMT-py's names, all numbers random, norms too."""
    generator = torch.Generator().manual_seed(seed)
    state = {}

    def make(name, *shape, around=0.0):
        state[name] = torch.randn(*shape, generator=generator) * 0.4 + around

    def linear(name, rows, columns, bias):
        make(f"{name}.weight", rows, columns)
        if bias:
            make(f"{name}.bias", rows)

    def norm(name):
        make(f"{name}.weight", D, around=1.0)
        make(f"{name}.bias", D)

    old = version != 3
    tables = [f"{side}.embeddings.make_embedding.emb_luts.0.weight" for side in ("encoder", "decoder")]
    for table, pieces in zip(tables, (source, target), strict=True):
        make(table, len(pieces), D)
    if opt["share_embeddings"]:
        state[tables[1]] = state[tables[0]]
    for side, stack, layers in (
        ("encoder", "transformer", "enc_layers"),
        ("decoder", "transformer_layers", "dec_layers"),
    ):
        state[f"{side}.embeddings.make_embedding.pe.pe"] = positions(opt, 40)[:, None].float()
        for i in range(opt[layers]):
            layer = f"{side}.{stack}.{i}"
            for attention in ["self_attn"] if side == "encoder" else ["self_attn", "context_attn"]:
                for part in ("linear_keys", "linear_values", "linear_query", "final_linear"):
                    linear(f"{layer}.{attention}.{part}", D, D, old or opt["add_qkvbias"])
            for one in ["layer_norm"] if side == "encoder" else ["layer_norm_1", "layer_norm_2"]:
                norm(f"{layer}.{one}")
            linear(f"{layer}.feed_forward.w_1", FF, D, old or opt["add_ffnbias"])
            linear(f"{layer}.feed_forward.w_2", D, FF, old or opt["add_ffnbias"])
            norm(f"{layer}.feed_forward.layer_norm")
        norm(f"{side}.layer_norm")
    prefix = "0." if old else ""
    output = {f"{prefix}weight": torch.randn(len(target), D, generator=generator) * 0.4}
    output[f"{prefix}bias"] = torch.randn(len(target), generator=generator)
    if opt["share_decoder_embeddings"]:
        output[f"{prefix}weight"] = state[tables[1]]
    return state, output


# ---------------------------------------------------------------------- the file
def _class(module, name, monkey):
    """A class that pickles under another program's name."""
    parts = module.split(".")
    for i in range(1, len(parts) + 1):
        monkey.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
    made = type(name, (), {"__module__": module, "__qualname__": name})
    setattr(monkey[module], name, made)
    return made


@contextlib.contextmanager
def torchtext_modules():
    """Empty modules under the names of torchtext and OpenNMT-py, for as long as a file is written."""
    modules: dict[str, types.ModuleType] = {}
    classes = {
        "Vocab": _class("torchtext.vocab", "Vocab", modules),
        "Field": _class("torchtext.data.field", "Field", modules),
        "TextMultiField": _class("onmt.inputters.text_dataset", "TextMultiField", modules),
        "_feature_tokenize": _class("onmt.inputters.text_dataset", "_feature_tokenize", modules),
    }
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield classes
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def fields_of_torchtext(classes, source, target, features=()):
    """The vocabularies of versions 1 and 2: fields in a container for each side."""

    def made(name, **attributes):
        one = classes[name]()
        one.__dict__.update(attributes)
        return one

    def field(pieces, init_token=None, eos_token=None):
        vocabulary = made(
            "Vocab", freqs=collections.Counter(pieces), itos=list(pieces), stoi={p: i for i, p in enumerate(pieces)},
            vectors=None, unk_index=0,
        )  # fmt: skip
        tokenize = functools.partial(classes["_feature_tokenize"], layer=0, truncate=None)
        return made(
            "Field", vocab=vocabulary, init_token=init_token, eos_token=eos_token, pad_token="<blank>", lower=False,
            unk_token="<unk>", include_lengths=True, stop_words={"x"}, preprocessing=tokenize, dtype="torch.int64",
        )  # fmt: skip

    src = [("src", field(source)), *((name, field(["<unk>", "<blank>", "x"])) for name in features)]
    return {
        "src": made("TextMultiField", fields=src, preprocessing=None),
        "tgt": made("TextMultiField", fields=[("tgt", field(target, "<s>", "</s>"))]),
        "indices": made("Field", sequential=False, use_vocab=False),
    }


def write(path, opt, state, output, source, target, version=3, **more):
    """A checkpoint as that version saves it."""
    saved = {"model": state, "generator": output, "opt": Namespace(**opt), "optim": {"training_step": 9}}
    if version == 3:
        vocabulary = {"src": source, "tgt": target, "data_task": "seq2seq", "decoder_start_token": "<s>"}
        torch.save({**saved, "vocab": vocabulary, **more}, path)
    else:
        features = more.pop("features", ())
        with torchtext_modules() as classes:
            vocabulary = fields_of_torchtext(classes, source, target, features)
            torch.save({**saved, "vocab": vocabulary, **more}, path)
    return path


# ---------------------------------------------------------------------- OpenNMT-py's equations, in float64
def positions(opt, length):
    table = torch.zeros(length, D, dtype=torch.float64)
    halves = opt.get("position_encoding_type") == "SinusoidalConcat"
    for pos in range(length):
        for i in range(D // 2):
            angle = pos * math.exp(-i * math.log(10000.0) / (D // 2 - 1 if halves else D // 2))
            table[pos, i if halves else 2 * i] = math.sin(angle)
            table[pos, i + D // 2 if halves else 2 * i + 1] = math.cos(angle)
    return table


def logits(opt, state, output, source_ids, target_ids):
    """One sentence, no padding: [T, V]."""
    w = {name: tensor.double() for name, tensor in {**state, **{f"out.{n}": t for n, t in output.items()}}.items()}
    activate = torch.nn.functional.gelu if opt.get("pos_ffn_activation_fn") == "gelu" else torch.relu

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def norm(name, x):
        spread = (x.var(-1, unbiased=False, keepdim=True) + opt.get("norm_eps", 1e-6)).sqrt()
        return (x - x.mean(-1, keepdim=True)) / spread * w[f"{name}.weight"] + w[f"{name}.bias"]

    def attention(name, query, memory, causal=False):
        size, out = D // HEADS, []
        q, k, v = (linear(f"{name}.linear_{p}", x) for p, x in (("query", query), ("keys", memory), ("values", memory)))
        for head in range(HEADS):
            rows = slice(head * size, (head + 1) * size)
            scores = (q[:, rows] / math.sqrt(size)) @ k[:, rows].T
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            out.append(scores.softmax(-1) @ v[:, rows])
        return linear(f"{name}.final_linear", torch.cat(out, 1))

    def feed_forward(name, x):
        return x + linear(f"{name}.w_2", activate(linear(f"{name}.w_1", norm(f"{name}.layer_norm", x))))

    def embedded(side, ids):
        return w[f"{side}.embeddings.make_embedding.emb_luts.0.weight"][ids] * math.sqrt(D) + positions(opt, len(ids))

    memory = embedded("encoder", source_ids)
    for i in range(opt["enc_layers"]):
        layer = f"encoder.transformer.{i}"
        normed = norm(f"{layer}.layer_norm", memory)
        memory = feed_forward(f"{layer}.feed_forward", memory + attention(f"{layer}.self_attn", normed, normed))
    memory = norm("encoder.layer_norm", memory)
    x = embedded("decoder", target_ids)
    for i in range(opt["dec_layers"]):
        layer = f"decoder.transformer_layers.{i}"
        normed = norm(f"{layer}.layer_norm_1", x)
        x = x + attention(f"{layer}.self_attn", normed, normed, causal=True)
        x = x + attention(f"{layer}.context_attn", norm(f"{layer}.layer_norm_2", x), memory)
        x = feed_forward(f"{layer}.feed_forward", x)
    return linear("out.0" if "out.0.weight" in w else "out", norm("decoder.layer_norm", x))
