"""A small JoeyNMT model: its files as JoeyNMT writes them, and its equations in plain float64."""

import math

import torch
import yaml

D, FF, HEADS = 8, 12, 2
SPECIAL = ["<unk>", "<pad>", "<s>", "</s>"]
# Words that YAML or a careless reader of lines would turn into something else.
SOURCE = [*SPECIAL, "no", "12:30", "#", "&", "~", "ein\u2028e"]
TARGET = [*SPECIAL, "one", "two", "three", "null", "'", "yes", "4", "five", "six"]


# ---------------------------------------------------------------------- files as JoeyNMT writes them
def side(**changes):
    given = {
        "type": "transformer", "num_layers": 2, "num_heads": HEADS, "hidden_size": D, "ff_size": FF, "dropout": 0.1,
        "embeddings": {"embedding_dim": D, "scale": True}, "layer_norm": "post",
    }  # fmt: skip
    return {name: value for name, value in {**given, **changes}.items() if value is not None}


def configuration(**model):
    return {
        "name": "toy",
        "data": {"src": {"lang": "de", "level": "word"}, "trg": {"lang": "en", "level": "word"}},
        "testing": {"beam_size": 5, "beam_alpha": 0.8, "max_output_length": 9},
        "training": {"label_smoothing": 0.2},
        "model": {"encoder": side(), "decoder": side(num_layers=3), **model},
    }


def weights(config, source=SOURCE, target=TARGET, seed=0):
    """A state dict with JoeyNMT's names, all numbers random, norms too."""
    generator = torch.Generator().manual_seed(seed)
    state = {}

    def make(name, *shape, around=0.0):
        state[name] = torch.randn(*shape, generator=generator) * 0.4 + around

    def linear(name, rows, columns):
        make(f"{name}.weight", rows, columns)
        make(f"{name}.bias", rows)

    def norm(name):
        make(f"{name}.weight", D, around=1.0)
        make(f"{name}.bias", D)

    model = config["model"]
    make("src_embed.lut.weight", len(source), D)
    make("trg_embed.lut.weight", len(target), D)
    make("decoder.output_layer.weight", len(target), D)
    if model.get("tied_embeddings"):
        state["trg_embed.lut.weight"] = state["src_embed.lut.weight"]
    if model.get("tied_softmax"):
        state["decoder.output_layer.weight"] = state["trg_embed.lut.weight"]
    for name in ("encoder", "decoder"):
        given = model[name]
        for i in range(given["num_layers"]):
            layer = f"{name}.layers.{i}"
            attentions = ["src_src_att"] if name == "encoder" else ["trg_trg_att", "src_trg_att"]
            for attention in attentions:
                for part in ("k_layer", "v_layer", "q_layer", "output_layer"):
                    linear(f"{layer}.{attention}.{part}", D, D)
            for one in ["layer_norm"] if name == "encoder" else ["x_layer_norm", "dec_layer_norm"]:
                norm(f"{layer}.{one}")
            norm(f"{layer}.feed_forward.layer_norm")
            linear(f"{layer}.feed_forward.pwff_layer.0", FF, D)
            linear(f"{layer}.feed_forward.pwff_layer.3", D, FF)
        state[f"{name}.pe.pe"] = positions(40)[None].float()
        if given.get("layer_norm", "pre") == "pre":
            norm(f"{name}.layer_norm")
    return state


def write(folder, config, state, source=SOURCE, target=TARGET, checkpoint="best.ckpt", **more):
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    for name, pieces in (("src_vocab.txt", source), ("trg_vocab.txt", target)):
        (folder / name).write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8", newline="\n")
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
    torch.save({"model_state": state, "optimizer_state": optimizer.state_dict(), **more}, folder / checkpoint)
    return folder


def bad_folder(kind, tmp_path):
    """A model folder with one fault."""
    config = configuration()
    path = write(tmp_path / "model", config, weights(config))
    checkpoint, vocabulary = path / "best.ckpt", path / "trg_vocab.txt"
    if kind == "cut":
        checkpoint.write_bytes(checkpoint.read_bytes()[:-900])
    elif kind == "text":
        checkpoint.write_text("not a checkpoint")
    elif kind == "other toolkit":
        torch.save({"model": {}, "args": None, "extra_state": {}}, checkpoint)
    elif kind == "no checkpoint":
        checkpoint.unlink()
    elif kind == "no config":
        (path / "config.yaml").unlink()
    elif kind == "broken config":
        (path / "config.yaml").write_text("model: [1, 2\ndata: {", encoding="utf-8")
    elif kind == "other config":
        (path / "config.yaml").write_text("architectures: [Marian]\n", encoding="utf-8")
    elif kind == "repeated":
        vocabulary.write_text("".join(f"{piece}\n" for piece in [*TARGET[:-1], "two"]), encoding="utf-8")
    elif kind == "too many":
        vocabulary.write_text("".join(f"{piece}\n" for piece in [*TARGET, "seven"]), encoding="utf-8")
    elif kind == "no vocabulary":
        vocabulary.unlink()
    elif kind == "not text":
        vocabulary.write_bytes(b"\xff\xfe\x00\n")
    elif kind == "nothing":
        return tmp_path / "nothing"
    return path


# ---------------------------------------------------------------------- JoeyNMT's equations, in float64
def positions(length):
    table = torch.zeros(length, D, dtype=torch.float64)
    for pos in range(length):
        for i in range(0, D, 2):
            table[pos, i] = math.sin(pos * math.exp(-i * math.log(10000.0) / D))
            table[pos, i + 1] = math.cos(pos * math.exp(-i * math.log(10000.0) / D))
    return table


def logits(config, state, source_ids, target_ids):
    """One sentence, no padding: [T, V]."""
    w = {name: tensor.double() for name, tensor in state.items()}
    model = config["model"]

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name, x):
        spread = (x.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
        return (x - x.mean(-1, keepdim=True)) / spread * w[f"{name}.weight"] + w[f"{name}.bias"]

    def attention(name, query, memory, causal=False):
        size = D // HEADS
        q, k, v = (linear(f"{name}.{part}_layer", x) for part, x in (("q", query), ("k", memory), ("v", memory)))
        out = []
        for head in range(HEADS):
            rows = slice(head * size, (head + 1) * size)
            scores = (q[:, rows] / math.sqrt(size)) @ k[:, rows].T
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            out.append(scores.softmax(-1) @ v[:, rows])
        return linear(f"{name}.output_layer", torch.cat(out, 1))

    def wrapped(where, name, x, function):
        return norm(name, x + function(x)) if where == "post" else x + function(norm(name, x))

    def stack(name, ids, memory=None):
        given = model[name]
        version_1 = "layer_norm" not in given
        where = "pre" if version_1 else given["layer_norm"]
        activate = {"gelu": torch.nn.functional.gelu, "swish": torch.nn.functional.silu}.get(
            given.get("activation"), torch.relu
        )
        x = w[f"{'src' if name == 'encoder' else 'trg'}_embed.lut.weight"][ids]
        x = x * (math.sqrt(D) if given["embeddings"]["scale"] else 1.0) + positions(len(ids))
        for i in range(given["num_layers"]):
            layer = f"{name}.layers.{i}"
            if name == "encoder":
                x = wrapped(where, f"{layer}.layer_norm", x, lambda y, n=layer: attention(f"{n}.src_src_att", y, y))
            else:
                x = wrapped(
                    where, f"{layer}.x_layer_norm", x, lambda y, n=layer: attention(f"{n}.trg_trg_att", y, y, True)
                )
                x = wrapped(
                    where, f"{layer}.dec_layer_norm", x, lambda y, n=layer: attention(f"{n}.src_trg_att", y, memory)
                )
            inner = f"{layer}.feed_forward"
            x = wrapped(
                where,
                f"{inner}.layer_norm",
                x,
                lambda y, n=inner: linear(f"{n}.pwff_layer.3", activate(linear(f"{n}.pwff_layer.0", y))),
            )
        return norm(f"{name}.layer_norm", x) if where == "pre" else x

    memory = stack("encoder", source_ids)
    return stack("decoder", target_ids, memory) @ w["decoder.output_layer.weight"].T


# ---------------------------------------------------------------------- our side
def padded(rows):
    longest = max(map(len, rows))
    ids = torch.tensor([row + [1] * (longest - len(row)) for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])


def largest_difference(model, sources, targets, expected):
    """Largest difference of logits, from one padded batch."""
    (ids, mask), (start, start_mask) = padded(sources), padded(targets)
    with torch.no_grad():
        found = model(
            input_ids=ids, attention_mask=mask, decoder_input_ids=start, decoder_attention_mask=start_mask
        ).logits
    return max(
        float((found[i, : len(row)] - torch.as_tensor(expected[i])).abs().max()) for i, row in enumerate(targets)
    )
