"""Import of Tensor2Tensor models: judged by its own equations, written out here from its variable names."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign_programs import environment, run_program
from imported_models import loaded, our_logits, source_batch
from tensor_bundles import save_bundle

from hf_vaswani.configuration_vaswani import VaswaniConfig
from hf_vaswani.interop.foreign import ConversionError, ImportOptions
from hf_vaswani.interop.tensor2tensor import read
from hf_vaswani.interop.tensorflow_checkpoint import TensorFlowCheckpoint, find_checkpoint

DATA = Path(__file__).parents[2] / "shared" / "data"
REAL = DATA / "weights" / "t2t_transformer_test_ckpt"
SUBWORDS = DATA / "tokenizers" / "t2t" / "vocab.translate_ende_wmt8k.8192.subwords"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="Tensor2Tensor's own test checkpoint is not here")


# --------------------------------------------------------------------------- models of Tensor2Tensor
HPARAMS = {
    "hidden_size": 12, "filter_size": 20, "num_heads": 2, "num_hidden_layers": 2, "layer_preprocess_sequence": "n",
    "layer_postprocess_sequence": "da", "layer_prepostprocess_dropout": 0.25, "attention_dropout": 0.15,
    "relu_dropout": 0.05, "label_smoothing": 0.2, "shared_embedding_and_softmax_weights": True, "max_length": 64,
}  # fmt: skip
POST = {"layer_preprocess_sequence": "none", "layer_postprocess_sequence": "dan"}


BODY, SHARED = "transformer/body/", "transformer/symbol_modality_29_12/shared"


def variables(hparams: dict, rows: tuple[int, int], shards: int = 4, space: int = 3) -> dict[str, torch.Tensor]:
    """What a training run of Tensor2Tensor saves, the optimizer's means included."""
    torch.manual_seed(4)
    width, inner = hparams["hidden_size"], hparams["filter_size"]
    keys, values = (hparams.get(f"attention_{k}_channels", 0) or width for k in ("key", "value"))
    found: dict[str, torch.Tensor] = {}

    def add(name: str, *sizes: int, std: float = 0.4, mean: float = 0.0) -> None:
        found[f"transformer/{name}"] = mean + std * torch.randn(*sizes)

    def norm(scope: str) -> None:
        add(f"{scope}/layer_norm/layer_norm_scale", width, mean=1.0)
        add(f"{scope}/layer_norm/layer_norm_bias", width)

    def matrix(kind: str, size: int) -> None:
        for n in range(shards):
            add(f"symbol_modality_{size}_{width}/{kind}/weights_{n}", size // shards + (n < size % shards), width)

    is_pre = "n" in hparams["layer_preprocess_sequence"].replace("none", "")
    scope = "layer_prepostprocess" if is_pre else "layer_postprocess"
    for side in ("encoder", "decoder"):
        for n in range(hparams.get(f"num_{side}_layers") or hparams["num_hidden_layers"]):
            layer = f"body/{side}/layer_{n}"
            for attention in ("self_attention", "encdec_attention")[: 1 + (side == "decoder")]:
                for name, sizes in {"q": (width, keys), "k": (width, keys), "v": (width, values),
                                    "output_transform": (values, width)}.items():  # fmt: skip
                    add(f"{layer}/{attention}/multihead_attention/{name}/kernel", *sizes)
                norm(f"{layer}/{attention}/{scope}")
            for name, sizes in (("conv1", (width, inner)), ("conv2", (inner, width))):
                add(f"{layer}/ffn/{name}/kernel", *sizes)
                add(f"{layer}/ffn/{name}/bias", sizes[1])
            norm(f"{layer}/ffn/{scope}")
        if is_pre:
            norm(f"body/{side}/layer_prepostprocess")
        if hparams.get("pos") == "emb":
            name = "inputs" if side == "encoder" else "targets"
            add(f"body/{name}_positional_embedding", hparams["max_length"], width)
    if hparams["shared_embedding_and_softmax_weights"]:
        matrix("shared", rows[1])
        if rows[0] != rows[1]:
            matrix("shared", rows[0])
    elif hparams.get("shared_embedding"):
        matrix("shared", rows[1])
        matrix("softmax", rows[1])
    else:
        for kind, size in (("input_emb", rows[0]), ("target_emb", rows[1]), ("softmax", rows[1])):
            matrix(kind, size)
    if hparams.get("use_target_space_embedding", True):
        add("body/target_space_embedding/kernel", 32, width)
    slots = {f"training/{name}/{slot}": tensor.abs() for name, tensor in found.items() for slot in ("Adam", "Adam_1")}
    for slot in ("Adam", "Adam_1"):
        means = slots.get(f"training/transformer/body/target_space_embedding/kernel/{slot}")
        if means is not None:
            means[torch.arange(32) != space] = 0.0
    counters = ("global_step", "training/beta1_power", "losses_avg/problem_0/total_loss", "train_stats/problem_0_steps")
    return {**found, **slots, **dict.fromkeys(counters, torch.tensor(9))}


def pieces(rows: int) -> list[str]:
    return ["<pad>", "<EOS>", *(f"p{n}_" for n in range(rows - 2))]


def write(folder: Path, rows=(29, 29), change=None, subwords=None, space=3, shards=4, **changes) -> dict:
    hparams = {**HPARAMS, **changes}
    folder.mkdir(exist_ok=True)
    tensors = variables(hparams, rows, space=space, shards=shards)
    if change:
        change(tensors)
    save_bundle(folder / "model.ckpt-9", tensors)
    (folder / "hparams.json").write_text(json.dumps(hparams))
    for name, size in (subwords or {}).items():
        (folder / name).write_text("".join(f"'{piece}'\n" for piece in pieces(size)))
    return hparams


class Plain:
    """Tensor2Tensor's forward pass at inference, one pair at a time, in float64; `targets` begin with id 0."""

    def __init__(self, checkpoint, hparams: dict, rows: tuple[int, int], space: int):
        self.t = {n: checkpoint[n].double() for n in checkpoint if n.startswith("transformer/") and "/Adam" not in n}
        self.h = {"multiply_embedding_mode": "sqrt_depth", "pos": "timing", **hparams}
        self.rows, self.space = rows, space
        self.is_pre = self.h["layer_preprocess_sequence"] not in ("none", "")

    def get(self, name):
        return self.t[f"transformer/body/{name}"]

    def matrix(self, kind, rows):
        scope = f"transformer/symbol_modality_{rows}_{self.h['hidden_size']}/{kind}/weights_"
        return torch.cat([self.t[f"{scope}{n}"] for n in range(sum(name.startswith(scope) for name in self.t))])

    def norm(self, x, scope):
        mean = x.mean(-1, keepdim=True)
        scaled = (x - mean) * (((x - mean) ** 2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        return scaled * self.get(f"{scope}/layer_norm/layer_norm_scale") + self.get(
            f"{scope}/layer_norm/layer_norm_bias"
        )

    def around(self, x, scope, function):
        if self.is_pre:
            return x + function(self.norm(x, f"{scope}/layer_prepostprocess"))
        return self.norm(x + function(x), f"{scope}/layer_postprocess")

    def attention(self, x, memory, scope, is_causal=False):
        q, k, v = (
            y @ self.get(f"{scope}/multihead_attention/{n}/kernel") for y, n in ((x, "q"), (memory, "k"), (memory, "v"))
        )
        heads = self.h["num_heads"]
        parts = []
        for query, key, value in zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True):
            scores = query * query.shape[-1] ** -0.5 @ key.T
            if is_causal:
                scores = scores - 1e9 * torch.ones_like(scores).triu(1)
            parts.append(scores.softmax(-1) @ value)
        return torch.cat(parts, -1) @ self.get(f"{scope}/multihead_attention/output_transform/kernel")

    def ffn(self, x, scope):
        inner = torch.relu(x @ self.get(f"{scope}/conv1/kernel") + self.get(f"{scope}/conv1/bias"))
        return inner @ self.get(f"{scope}/conv2/kernel") + self.get(f"{scope}/conv2/bias")

    def embed(self, ids, kind, rows):
        found = self.matrix(kind, rows)[ids] * (torch.tensor(ids) != 0)[:, None]
        return found * (self.h["hidden_size"] ** 0.5 if self.h["multiply_embedding_mode"] == "sqrt_depth" else 1.0)

    def positions(self, length, side):
        if self.h["pos"] == "emb":
            return self.get(f"{side}_positional_embedding")[:length]
        half = self.h["hidden_size"] // 2
        scales = torch.exp(torch.arange(half, dtype=torch.float64) * -(math.log(1e4) / (half - 1)))
        angles = torch.arange(length, dtype=torch.float64)[:, None] * scales
        return torch.cat([angles.sin(), angles.cos()], 1)

    def logits(self, source, target):
        shared = self.h["shared_embedding_and_softmax_weights"]
        inputs, targets = (
            ("shared", "shared") if shared or self.h.get("shared_embedding") else ("input_emb", "target_emb")
        )
        x = self.embed(source, inputs, self.rows[0])
        if self.h.get("use_target_space_embedding", True):
            x = x + self.get("target_space_embedding/kernel")[self.space]
        x = x + self.positions(len(source), "inputs")
        for n in range(self.h.get("num_encoder_layers") or self.h["num_hidden_layers"]):
            own, ffn = (f"encoder/layer_{n}/{part}" for part in ("self_attention", "ffn"))
            x = self.around(x, own, lambda y, s=own: self.attention(y, y, s))
            x = self.around(x, ffn, lambda y, s=ffn: self.ffn(y, s))
        x = self.norm(x, "encoder/layer_prepostprocess") if self.is_pre else x
        y = self.embed(target, targets, self.rows[1]) + self.positions(len(target), "targets")
        for n in range(self.h.get("num_decoder_layers") or self.h["num_hidden_layers"]):
            own, cross, ffn = (f"decoder/layer_{n}/{part}" for part in ("self_attention", "encdec_attention", "ffn"))
            y = self.around(y, own, lambda z, s=own: self.attention(z, z, s, True))
            y = self.around(y, cross, lambda z, s=cross: self.attention(z, x, s))
            y = self.around(y, ffn, lambda z, s=ffn: self.ffn(z, s))
        y = self.norm(y, "decoder/layer_prepostprocess") if self.is_pre else y
        return y @ self.matrix("shared" if shared else "softmax", self.rows[1]).T


def drawn(rows: tuple[int, int], count: int, longest: int = 9) -> tuple[list[list[int]], list[list[int]]]:
    generator = torch.Generator().manual_seed(8)

    def some(last):
        length = int(torch.randint(1, longest, (), generator=generator))
        return torch.randint(2, last, (length,), generator=generator).tolist()

    return [[*some(rows[0]), 1] for _ in range(count)], [[0, *some(rows[1])] for _ in range(count)]


SHAPES = {
    "as a training run leaves it": {},
    "the original order": POST,
    "key and value widths": {"attention_key_channels": 8, "attention_value_channels": 20, "num_heads": 4},
    "original order, all apart, two vocabularies": {
        **POST, "shared_embedding_and_softmax_weights": False, "rows": (23, 29), "attention_key_channels": 6,
    },
    "shared embedding, softmax apart": {"shared_embedding_and_softmax_weights": False, "shared_embedding": True},
    "one matrix for each vocabulary": {
        "rows": (31, 27), "subwords": {"source.subwords": 31, "target.subwords": 27},
    },
    "one matrix for each vocabulary, source smaller": {
        "rows": (27, 31), "subwords": {"source.subwords": 27, "target.subwords": 31},
    },
    "learned positions": {"pos": "emb", "max_length": 10},
    "unscaled, no target space": {"multiply_embedding_mode": "none", "use_target_space_embedding": False},
    "unscaled, target space": {"multiply_embedding_mode": "none", "space": 8},
    "stacks of two depths": {"num_encoder_layers": 1, "num_decoder_layers": 3, "layer_preprocess_sequence": "nd"},
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_tensor2tensors_in_padded_batches(tmp_path, name):
    hparams = write(tmp_path, **SHAPES[name])
    rows, space = SHAPES[name].get("rows", (29, 29)), SHAPES[name].get("space", 3)
    options = {}
    for side in ("source", "target"):
        if (tmp_path / f"{side}.subwords").exists():
            options[f"{side}_vocab"] = tmp_path / f"{side}.subwords"
    foreign = read(tmp_path, ImportOptions(**options))
    plain = Plain(TensorFlowCheckpoint(tmp_path / "model.ckpt-9"), hparams, rows, space)
    sources, targets = drawn(rows, 7)
    for ours, source, target in zip(our_logits(loaded(foreign), sources, targets), sources, targets, strict=True):
        assert np.abs(ours - plain.logits(source, target).numpy()).max() < 1e-4
    assert foreign.tensors_read == len(plain.t)


def test_hyperparameters_and_search_are_carried(tmp_path):
    write(tmp_path)
    foreign = read(tmp_path, ImportOptions())
    config = VaswaniConfig(**foreign.config)
    assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0.25, 0.15, 0.05)
    assert config.label_smoothing == 0.2
    assert (config.pad_token_id, config.eos_token_id, config.decoder_start_token_id) == (0, 1, 0)
    assert config.zero_start_embedding
    assert foreign.generation == {
        "num_beams": 4, "length_penalty": 0.6, "length_penalty_type": "gnmt", "early_stopping": "never",
        "max_length_offset": 100,
    }  # fmt: skip


def test_vocabulary_beside_the_checkpoint_and_rows_without_a_piece(tmp_path):
    write(tmp_path, subwords={"vocab.x.subwords": 27})
    foreign = read(tmp_path, ImportOptions())
    assert foreign.generation["suppress_tokens"] == [27, 28]
    assert any("vocab.x.subwords" in choice for choice in foreign.choices)
    assert foreign.tokenizer("p3 p0")["input_ids"] == [5, 2, 1]
    assert not any("tokenizer" in loss for loss in foreign.losses)


def test_no_vocabulary_is_said(tmp_path):
    write(tmp_path)
    foreign = read(tmp_path, ImportOptions())
    assert foreign.tokenizer is None
    assert any("no tokenizer" in loss for loss in foreign.losses)


# ---- the embedding of the target's language
def without_slots(tensors: dict) -> None:
    for name in [name for name in tensors if name.startswith("training/")]:
        del tensors[name]


def source_shift(folder: Path, **changes) -> tuple[torch.Tensor, str]:
    foreign = read(folder, ImportOptions())
    shift = foreign.tensors["model.encoder.embed_tokens.weight"] - foreign.tensors["model.shared.weight"]
    return shift * 12**0.5, " ".join(foreign.choices)


def test_the_target_space_that_was_trained_is_found(tmp_path):
    write(tmp_path, space=8)
    shift, said = source_shift(tmp_path)
    kernel = TensorFlowCheckpoint(tmp_path / "model.ckpt-9")["transformer/body/target_space_embedding/kernel"]
    assert torch.allclose(shift, kernel[8].expand(29, 12), atol=1e-5)
    assert "row 8" in said
    assert "optimizer" in said


def test_without_the_optimizer_the_target_space_is_the_newer_default_and_said(tmp_path):
    write(tmp_path, space=8, change=without_slots)
    shift, said = source_shift(tmp_path)
    kernel = TensorFlowCheckpoint(tmp_path / "model.ckpt-9")["transformer/body/target_space_embedding/kernel"]
    assert torch.allclose(shift, kernel[0].expand(29, 12), atol=1e-5)
    assert "since version 1.5" in said
    assert "German 8" in said


def test_the_target_space_can_be_given(tmp_path):
    write(tmp_path, change=without_slots, target_space_id=6)
    shift, said = source_shift(tmp_path)
    kernel = TensorFlowCheckpoint(tmp_path / "model.ckpt-9")["transformer/body/target_space_embedding/kernel"]
    assert torch.allclose(shift, kernel[6].expand(29, 12), atol=1e-5)
    assert "`target_space_id`" in said
    write(tmp_path, target_space_id=32)
    with pytest.raises(ConversionError, match="`target_space_id` 32 is no row of the 32"):
        read(tmp_path, ImportOptions())


def test_a_target_space_of_zeros_leaves_the_matrices_one(tmp_path):
    def zero(tensors):
        tensors["transformer/body/target_space_embedding/kernel"][3] = 0.0

    write(tmp_path, change=zero)
    foreign = read(tmp_path, ImportOptions())
    assert foreign.config["tie_encoder_decoder_embeddings"]
    assert "model.encoder.embed_tokens.weight" not in foreign.tensors


# ---- hyper-parameters
def test_hyperparameters_by_the_name_of_their_set(tmp_path):
    write(tmp_path, num_heads=4, hidden_size=16, filter_size=8)
    (tmp_path / "hparams.json").unlink()
    (tmp_path / "flags.txt").write_text(
        "--model=transformer\n--hparams_set=transformer_test\n--hparams=num_heads=4,moe_hidden_sizes=[1,2],pos=timing\n"
    )
    foreign = read(tmp_path, ImportOptions())
    assert foreign.config["num_attention_heads"] == 4
    assert (foreign.config["norm_position"], foreign.config["attention_dropout"]) == ("pre", 0.1)
    (tmp_path / "flags.txt").write_text("--hparams_set=transformer_of_mine\n")
    with pytest.raises(ConversionError, match="`hparams_set` 'transformer_of_mine' are not known here"):
        read(tmp_path, ImportOptions())
    (tmp_path / "flags.txt").unlink()
    with pytest.raises(ConversionError, match=r"hparams\.json does not exist, so the number of heads"):
        read(tmp_path, ImportOptions())


def test_the_first_published_set_is_the_papers_order(tmp_path):
    write(tmp_path, hidden_size=16, filter_size=8, **POST)
    (tmp_path / "hparams.json").unlink()
    (tmp_path / "run.txt").write_text(
        "--hparams_set=transformer_base_v1\n--hparams=num_heads=2,hidden_size=16,filter_size=8,num_hidden_layers=2\n"
    )
    foreign = read(tmp_path, ImportOptions(config=tmp_path / "run.txt"))
    assert (foreign.config["norm_position"], foreign.config["final_norm"]) == ("post", False)
    assert (foreign.config["attention_dropout"], foreign.config["dropout"]) == (0.0, 0.1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("norm_type", "batch"), ("self_attention_type", "dot_product_relative"), ("ffn_layer", "local_moe"),
        ("ffn_layer", "conv_relu_conv"), ("pos", None), ("pos", "timing_from_features"), ("proximity_bias", True),
        ("causal_decoder_self_attention", False), ("unidirectional_encoder", True), ("attention_variables_3d", True),
        ("hard_attention_k", 2), ("num_area_layers", 1), ("prepend_mode", "prepend_inputs_masked_attention"),
        ("nbr_decoder_problems", 2), ("symbol_modality_skip_top", True), ("weight_dtype", "bfloat16"),
        ("recurrence_type", "act"), ("target_modality", "symbol:identity"), ("top", {"targets": "x"}),
    ],
)  # fmt: skip
def test_what_the_architecture_lacks_is_refused_by_name(tmp_path, name, value):
    write(tmp_path, **{name: value})
    with pytest.raises(ConversionError) as error:
        read(tmp_path, ImportOptions())
    assert f"`{name}` is {value!r}" in str(error.value)
    assert str(tmp_path / "hparams.json") in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_postprocess_sequence": "dan"}, "'n' with `layer_postprocess_sequence` 'dan' is an order"),
        ({"layer_postprocess_sequence": "dz"}, "is an order of norm and sum"),
        ({"attention_key_channels": 7}, "`num_heads` 2 does not divide the attention's 7 channels"),
    ],
)
def test_orders_and_widths_that_do_not_fit_are_refused(tmp_path, changes, said):
    write(tmp_path, **changes)
    with pytest.raises(ConversionError, match=said):
        read(tmp_path, ImportOptions())


def test_other_models_are_refused_by_name(tmp_path):
    def rename(tensors):
        for name in list(tensors):
            tensors[name.replace("transformer/", "universal_transformer/")] = tensors.pop(name)

    write(tmp_path, change=rename)
    with pytest.raises(ConversionError, match="is of the model `universal_transformer`"):
        read(tmp_path, ImportOptions())
    (tmp_path / "flags.txt").write_text("--model=evolved_transformer\n")
    with pytest.raises(ConversionError, match=r"flags\.txt: `model` is evolved_transformer"):
        read(tmp_path, ImportOptions())
    save_bundle(tmp_path / "model.ckpt-9", {"lstm/kernel": torch.ones(3)})
    (tmp_path / "flags.txt").unlink()
    with pytest.raises(ConversionError, match="should hold one encoder, but holds 0"):
        read(tmp_path, ImportOptions())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{BODY}encoder/layer_1/ffn/conv1/bias"), "has no tensor 'transformer/body/encoder/layer_1/"),
        (lambda t: t.update({f"{BODY}encoder/layer_2/gate": torch.ones(2)}), "no place.*layer_2/gate"),
        (lambda t: t.pop(f"{SHARED}/weights_1"), "has no tensor .*shared/weights_1"),
        (lambda t: t.pop(f"{SHARED}/weights_3"), r"are \(22, 12\) together, not \(29, 12\)"),
        (lambda t: t.update({f"{BODY}decoder/layer_0/ffn/conv2/kernel": torch.ones(20, 11)}), r"is \(20, 11\), .* ask"),
        (lambda t: t.update({f"{BODY}encoder/layer_0/qkv_transform_single/kernel": torch.ones(1)}), r"before 1\.4"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_an_error(tmp_path, change, said):
    write(tmp_path, change=change)
    with pytest.raises(ConversionError, match=said):
        read(tmp_path, ImportOptions())


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["'<pad>'", "'<EOS>'", "'a_'", "'b'", "'a_'"], "line 5: the piece 'a_' stands on line 3 already"),
        (["'a_'", "'b'"], "does not begin with <pad> and <EOS>"),
        ([f"'{piece}'" for piece in pieces(30)], "30 pieces, its matrix 29 rows"),
    ],
)
def test_a_bad_vocabulary_is_named(tmp_path, lines, said):
    write(tmp_path)
    (tmp_path / "v.subwords").write_text("\n".join(lines) + "\n")
    with pytest.raises(ConversionError, match=said):
        read(tmp_path, ImportOptions(source_vocab=tmp_path / "v.subwords"))


def test_two_vocabularies_need_their_files(tmp_path):
    write(tmp_path, rows=(31, 27))
    with pytest.raises(ConversionError, match="does not say which is the source's"):
        read(tmp_path, ImportOptions())
    with pytest.raises(ConversionError, match="`target_vocab` needs `source_vocab` too"):
        read(tmp_path, ImportOptions(target_vocab=tmp_path / "x"))


def test_hparams_of_something_else_are_an_error(tmp_path):
    write(tmp_path)
    (tmp_path / "hparams.json").write_text('{"n_embd": 12}')
    with pytest.raises(ConversionError, match="has no `hidden_size` and `num_heads`"):
        read(tmp_path, ImportOptions())
    (tmp_path / "hparams.json").write_text("{")
    with pytest.raises(ConversionError, match="is not JSON"):
        read(tmp_path, ImportOptions())


# --------------------------------------------------------------------------- Tensor2Tensor's own files
@needs_real
def test_the_real_checkpoint_gives_tensor2tensors_logits():
    foreign = read(REAL, ImportOptions(source_vocab=SUBWORDS))
    assert "suppress_tokens" not in foreign.generation
    plain = Plain(
        TensorFlowCheckpoint(find_checkpoint(REAL)), json.loads((REAL / "hparams.json").read_text()), (8190, 8190), 8
    )
    assert foreign.tensors_read == len(plain.t) == 81
    sources, targets = drawn((8190, 8190), 5)
    sources.append(foreign.tokenizer("The house is small.")["input_ids"])
    targets.append([0, 17])
    for ours, source, target in zip(our_logits(loaded(foreign), sources, targets), sources, targets, strict=True):
        assert np.abs(ours - plain.logits(source, target).numpy()).max() < 1e-4
    assert any("row 8" in choice for choice in foreign.choices)  # German


TRAINED = {
    "as of later versions": {"set": "transformer_base_v2", "rows": [47, 47], "space": 8, "hparams": {}},
    "as published first": {
        "set": "transformer_base_v1", "rows": [41, 47], "space": 0,
        "hparams": {"shared_embedding_and_softmax_weights": False, "attention_key_channels": 12},
    },
    "learned positions": {"set": "transformer_base_v2", "rows": [47, 47], "space": 6,
                          "hparams": {"pos": "emb", "max_length": 40, "symbol_modality_num_shards": 1}},
}  # fmt: skip
REQUIREMENTS = ["tensorflow-cpu==2.15.1", "numpy<2", "six", "decorator", "scipy", "sympy", "requests", "tqdm", "future",
                "dm-tree", "cloudpickle", "gast", "typeguard<3"]  # fmt: skip
ALONE = ["tensor2tensor==1.15.7", "tf_slim", "tensorflow-probability==0.23.0", "tensorflow-addons==0.23.0",
         "mesh-tensorflow"]  # fmt: skip


@pytest.fixture(scope="module")
def tensor2tensor():
    """Tensor2Tensor's program, as a function of its arguments."""
    # Its own requirements name dozens of packages for images, games and servers; the Transformer runs without.
    python = environment("tensor2tensor", REQUIREMENTS, without_dependencies=ALONE)
    return partial(run_program, python, "tensor2tensor_program.py")


def until_end(ids) -> list[int]:
    row = [int(one) for one in ids]
    return row[: row.index(1)] if 1 in row else row


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TRAINED)
def test_equal_to_tensor2tensor_itself(tmp_path, tensor2tensor, name):
    asked = {**TRAINED[name], "steps": 150, "limit": 10}
    sizes = {"hidden_size": 24, "filter_size": 40, "num_heads": 3, "num_hidden_layers": 2}
    asked["hparams"] = {**sizes, **asked["hparams"]}
    asked["sources"], begun = drawn(asked["rows"], 50, longest=14)
    asked["targets"] = [[*row[1:], 1] for row in begun]
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    tensor2tensor(tmp_path / "model", tmp_path / "asked.json", tmp_path / "answers.npz")
    answers = np.load(tmp_path / "answers.npz")

    foreign = read(tmp_path / "model", ImportOptions())
    model = loaded(foreign)
    apart = max(
        np.abs(a - answers[f"logits_{n}"]).max() for n, a in enumerate(our_logits(model, asked["sources"], begun))
    )
    limit = max(map(len, asked["sources"])) + asked["limit"]
    equal = {}
    for kind, beams in (("greedy", 1), ("beam", 4)):
        settings = {"num_beams": beams, "max_new_tokens": limit}
        if beams > 1:
            settings |= {k: v for k, v in foreign.generation.items() if k.startswith(("length_penalty", "early"))}
        found = model.generate(**source_batch(model, asked["sources"]), **settings)
        equal[kind] = sum(until_end(a[1:]) == until_end(b) for a, b in zip(found, answers[kind], strict=True))
    print(f"\n{name}: logits {apart:.2g} apart, greedy {equal['greedy']}/50, beam 4 {equal['beam']}/50")
    assert any(f"row {asked['space']} " in choice for choice in foreign.choices)
    assert apart < 1e-4
    assert equal["greedy"] == 50
