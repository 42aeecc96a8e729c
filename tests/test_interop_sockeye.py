"""Import of Sockeye 3 models: judged by Sockeye's own equations, written out here from Sockeye's tensor names."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign_programs import environment, run_program
from imported_models import loaded, our_logits

from hf_vaswani.configuration_vaswani import VaswaniConfig
from hf_vaswani.interop.foreign import ConversionError, ImportOptions
from hf_vaswani.interop.sockeye import read

REAL = Path(__file__).parents[2] / "shared" / "data" / "weights" / "sockeye_seqcopy"
BASE = {
    "source_rows": 13, "target_rows": 17, "source_word": "s", "target_word": "t", "longest": 24, "longest_target": 24,
    "width": 12, "heads": 3, "inner": 20, "activation": "relu", "positions": "fixed", "pre": "n", "post": "dr",
    "encoder_layers": 2, "decoder_layers": 1, "tying": "trg_softmax", "dtype": "float32", "seed": 3,
}  # fmt: skip
CONFIG = """!ModelConfig
config_data: !DataConfig
  data_statistics: !DataStatistics
    buckets:
    - !!python/tuple
      - 8
      - 8
    length_ratio_mean: 1.25
    length_ratio_std: 0.5
    length_ratio_stats_per_bucket:
    - &id001 !!python/tuple
      - null
      - null
    - *id001
  max_seq_len_source: {longest}
  max_seq_len_target: {longest_target}
  num_source_factors: 1
  num_target_factors: 1
config_decoder: !TransformerConfig
  act_type: {activation}
  attention_heads: {heads}
  decoder_type: transformer
  depth_key_value: {width}
  dropout_act: 0.05
  dropout_attention: 0.15
  dropout_prepost: 0.2
  feed_forward_num_hidden: {inner}
  max_seq_len_source: {longest}
  max_seq_len_target: {longest_target}
  model_size: {width}
  num_layers: {decoder_layers}
  positional_embedding_type: {positions}
  postprocess_sequence: '{post}'
  preprocess_sequence: '{pre}'
  use_glu: false
  use_lhuc: false
config_embed_source: !EmbeddingConfig
  allow_sparse_grad: false
  dropout: 0.0
  factor_configs: null
  num_embed: {width}
  num_factors: 1
  vocab_size: {source_rows}
config_embed_target: !EmbeddingConfig
  allow_sparse_grad: false
  dropout: 0.0
  factor_configs: null
  num_embed: {width}
  num_factors: 1
  vocab_size: {target_rows}
config_encoder: !TransformerConfig
  act_type: {activation}
  attention_heads: {heads}
  decoder_type: transformer
  depth_key_value: {width}
  dropout_act: 0.05
  dropout_attention: 0.15
  dropout_prepost: 0.2
  feed_forward_num_hidden: {inner}
  max_seq_len_source: {longest}
  max_seq_len_target: {longest_target}
  model_size: {width}
  num_layers: {encoder_layers}
  positional_embedding_type: {positions}
  postprocess_sequence: '{post}'
  preprocess_sequence: '{pre}'
  use_glu: false
  use_lhuc: false
config_length_task: null
dtype: {dtype}
lhuc: false
vocab_source_size: {source_rows}
vocab_target_size: {target_rows}
weight_tying_type: {tying}
"""


def words(prefix: str, rows: int) -> dict[str, int]:
    pieces = ["<pad>", "<unk>", "<s>", "</s>", *(f"{prefix}{n}" for n in range(rows - 4))]
    return {piece: number for number, piece in enumerate(pieces)}


def sinusoid(length: int, width: int) -> torch.Tensor:
    table = torch.zeros(length, width, dtype=torch.float64)
    for position in range(length):
        for i in range(width // 2):
            angle = position / 10000 ** (2 * i / width)
            table[position, i], table[position, width // 2 + i] = math.sin(angle), math.cos(angle)
    return table


def weights(shape: dict) -> dict[str, torch.Tensor]:
    """What `SockeyeModel.save_parameters` writes: keys and values in turn by head, tied matrices under each name."""
    torch.manual_seed(shape["seed"])
    width, inner = shape["width"], shape["inner"]
    found: dict[str, torch.Tensor] = {}

    def add(name: str, *sizes: int, std: float = 0.4) -> None:
        found[name] = torch.randn(*sizes) * std

    def norm(name: str) -> None:
        found[f"{name}.layer_norm.weight"] = 1 + 0.3 * torch.randn(width)
        add(f"{name}.layer_norm.bias", width)

    add("embedding_source.embedding.weight", shape["source_rows"], width)
    shares = "src_trg" in shape["tying"]
    add("embedding_target.embedding.weight", shape["target_rows"], width)
    if shares:
        found["embedding_target.embedding.weight"] = found["embedding_source.embedding.weight"]
    when = "pre" if "n" in shape["pre"] else "post"
    for side, own in (("encoder", "self_attention"), ("decoder", "autoregr_layer")):
        rows = shape["longest" if side == "encoder" else "longest_target"]
        add(f"{side}.pos_embedding.weight", rows, width)
        if shape["positions"] == "fixed":
            found[f"{side}.pos_embedding.weight"] = sinusoid(rows, width).float()
        for n in range(shape[f"{side}_layers"]):
            layer = f"{side}.layers.{n}"
            add(f"{layer}.{own}.ff_in.weight", 3 * width, width)
            add(f"{layer}.{own}.ff_out.weight", width, width)
            norm(f"{layer}.{when}_{own}")
            if side == "decoder":
                add(f"{layer}.enc_attention.ff_q.weight", width, width)
                add(f"{layer}.enc_attention.ff_kv.weight", 2 * width, width)
                add(f"{layer}.enc_attention.ff_out.weight", width, width)
                norm(f"{layer}.{when}_enc_attention")
            for name, sizes in (("ff1", (inner, width)), ("ff2", (width, inner))):
                add(f"{layer}.ff.{name}.weight", *sizes)
                add(f"{layer}.ff.{name}.bias", sizes[0])
            norm(f"{layer}.{when}_ff")
        if when == "pre":
            norm(f"{side}.final_process")
    add("output_layer.weight", shape["target_rows"], width)
    if "softmax" in shape["tying"]:
        found["output_layer.weight"] = found["embedding_target.embedding.weight"]
    add("output_layer.bias", shape["target_rows"])
    dtype = {"float32": torch.float32, "float16": torch.float16}[shape["dtype"]]
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def write(folder: Path, **changes) -> dict:
    """A model folder as Sockeye's trainer leaves it."""
    shape = {**BASE, **changes}
    folder.mkdir(exist_ok=True)
    (folder / "config").write_text(CONFIG.format(**shape))
    (folder / "version").write_text("3.1.34")
    torch.save(weights(shape), folder / "params.best")
    for side, short in (("source", "src"), ("target", "trg")):
        vocabulary = words(shape[f"{side}_word"], shape[f"{side}_rows"])
        (folder / f"vocab.{short}.0.json").write_text(json.dumps(vocabulary, indent=4, ensure_ascii=False))
    return shape


class Plain:
    """Sockeye's forward pass at inference, one pair at a time, in float64."""

    def __init__(self, folder: Path, shape: dict):
        self.t = {k: v.double() for k, v in torch.load(folder / "params.best", weights_only=True).items()}
        self.shape = shape

    def norm(self, x, name):
        gain, bias = self.t[f"{name}.layer_norm.weight"], self.t[f"{name}.layer_norm.bias"]
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt() * gain + bias

    def process(self, steps, x, before, name):
        for step in steps:
            x = {"n": lambda y: self.norm(y, name), "r": lambda y: y + before, "d": lambda y: y}[step](x)
        return x

    def attend(self, queries, keys_values, name, is_causal=False):
        heads, width = self.shape["heads"], self.shape["width"]
        size = width // heads
        both = keys_values.reshape(-1, heads, 2, size)
        parts = []
        for head in range(heads):
            query = queries[:, head * size : (head + 1) * size] * size**-0.5
            scores = query @ both[:, head, 0].T
            if is_causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
            parts.append(scores.softmax(-1) @ both[:, head, 1])
        return torch.cat(parts, -1) @ self.t[f"{name}.ff_out.weight"].T

    def own(self, x, name, is_causal):
        whole = x @ self.t[f"{name}.ff_in.weight"].T
        width = self.shape["width"]
        return self.attend(whole[:, :width], whole[:, width:], name, is_causal)

    def feed_forward(self, x, name):
        act = {"relu": torch.relu, "swish1": lambda y: y * torch.sigmoid(y), "gelu": torch.nn.functional.gelu}
        inner = act[self.shape["activation"]](x @ self.t[f"{name}.ff1.weight"].T + self.t[f"{name}.ff1.bias"])
        return inner @ self.t[f"{name}.ff2.weight"].T + self.t[f"{name}.ff2.bias"]

    def sublayer(self, x, layer, name, function):
        before = self.process(self.shape["pre"], x, None, f"{layer}.pre_{name}")
        return self.process(self.shape["post"], function(before), x, f"{layer}.post_{name}")

    def embed(self, ids, side):
        table = self.t[
            "embedding_source.embedding.weight" if side == "encoder" else "embedding_target.embedding.weight"
        ]
        positions = self.t[f"{side}.pos_embedding.weight"]
        steps = torch.arange(len(ids)).clip(max=len(positions) - 1)
        return table[ids] * self.shape["width"] ** 0.5 + positions[steps]

    def logits(self, source, target):
        x = self.embed(source, "encoder")
        for n in range(self.shape["encoder_layers"]):
            layer = f"encoder.layers.{n}"
            x = self.sublayer(x, layer, "self_attention", lambda y, m=layer: self.own(y, f"{m}.self_attention", False))
            x = self.sublayer(x, layer, "ff", lambda y, m=layer: self.feed_forward(y, f"{m}.ff"))
        memory = self.process(self.shape["pre"], x, None, "encoder.final_process")
        y = self.embed(target, "decoder")
        for n in range(self.shape["decoder_layers"]):
            layer = f"decoder.layers.{n}"
            y = self.sublayer(y, layer, "autoregr_layer", lambda z, m=layer: self.own(z, f"{m}.autoregr_layer", True))
            y = self.sublayer(
                y, layer, "enc_attention",
                lambda z, m=f"{layer}.enc_attention": self.attend(
                    z @ self.t[f"{m}.ff_q.weight"].T, memory @ self.t[f"{m}.ff_kv.weight"].T, m
                ),
            )  # fmt: skip
            y = self.sublayer(y, layer, "ff", lambda z, m=layer: self.feed_forward(z, f"{m}.ff"))
        top = self.process(self.shape["pre"], y, None, "decoder.final_process")
        return top @ self.t["output_layer.weight"].T + self.t["output_layer.bias"]


def drawn(shape: dict, count: int, longest: int = 9) -> tuple[list[list[int]], list[list[int]]]:
    generator = torch.Generator().manual_seed(11)

    def some(rows):
        length = int(torch.randint(1, longest, (), generator=generator))
        return torch.randint(4, rows, (length,), generator=generator).tolist()

    return (
        [[*some(shape["source_rows"]), 3] for _ in range(count)],
        [[2, *some(shape["target_rows"])] for _ in range(count)],
    )


SHAPES = {
    "as the trainer makes it": {},
    "post-norm": {"pre": "", "post": "drn"},
    "post-norm, dropout elsewhere": {"pre": "d", "post": "rdn"},
    "one matrix for all": {"tying": "src_trg_softmax", "target_rows": 13, "target_word": "s"},
    "source and target tied, output apart": {"tying": "src_trg", "target_rows": 13, "target_word": "s"},
    "nothing tied, one vocabulary": {"tying": "none", "target_rows": 13, "target_word": "s"},
    "nothing tied, two vocabularies of one size": {"tying": "none", "target_rows": 13},
    "learned positions": {"positions": "learned", "post": "r"},
    "learned positions, fewer for the target": {"positions": "learned", "longest_target": 5},
    "swish": {"activation": "swish1", "heads": 1},
    "gelu": {"activation": "gelu", "heads": 6, "pre": "", "post": "rn", "decoder_layers": 3},
}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_sockeyes_in_padded_batches(tmp_path, name):
    shape = write(tmp_path, **SHAPES[name])
    foreign = read(tmp_path, ImportOptions())
    plain = Plain(tmp_path, shape)
    sources, targets = drawn(shape, 7)
    for ours, source, target in zip(our_logits(loaded(foreign), sources, targets), sources, targets, strict=True):
        assert np.abs(ours - plain.logits(source, target).numpy()).max() < 1e-4
    assert foreign.tensors_read == len(plain.t)


def test_hyperparameters_and_search_are_carried(tmp_path):
    write(tmp_path)
    foreign = read(tmp_path, ImportOptions())
    config = VaswaniConfig(**foreign.config)
    assert (config.pad_token_id, config.unk_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2, 3)
    assert config.decoder_start_token_id == 2
    assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0.2, 0.15, 0.05)
    assert (config.source_vocab_size, config.vocab_size, config.final_norm) == (13, 17, True)
    assert foreign.generation["num_beams"] == 5
    assert (foreign.generation["length_penalty"], foreign.generation["length_penalty_type"]) == (1.0, "power")
    assert any("2.25 times" in loss for loss in foreign.losses)  # 1.25 + 2 * 0.5


def test_half_precision_is_widened_and_said(tmp_path):
    shape = write(tmp_path, dtype="float16")
    foreign = read(tmp_path, ImportOptions())
    assert all(tensor.dtype == torch.float32 for tensor in foreign.tensors.values())
    assert any("float16" in choice for choice in foreign.choices)
    sources, targets = drawn(shape, 3)
    plain = Plain(tmp_path, shape)
    # The stored table of positions is rounded too; ours is exact.
    plain.t.update({f"{side}.pos_embedding.weight": sinusoid(24, 12) for side in ("encoder", "decoder")})
    for ours, source, target in zip(our_logits(loaded(foreign), sources, targets), sources, targets, strict=True):
        assert np.abs(ours - plain.logits(source, target).numpy()).max() < 1e-4


def test_rows_without_a_piece_are_named_and_never_generated(tmp_path):
    shape = write(tmp_path)
    (tmp_path / "vocab.trg.0.json").write_text(json.dumps(words("t", 14)))
    foreign = read(tmp_path, ImportOptions())
    assert foreign.config["vocab_size"] == shape["target_rows"]
    assert foreign.generation["suppress_tokens"] == [14, 15, 16]
    assert any("3 rows" in choice for choice in foreign.choices)


def test_one_checkpoint_of_several_and_files_from_elsewhere(tmp_path):
    model, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    elsewhere.mkdir()
    write(model, target_rows=13, target_word="s", tying="src_trg_softmax")
    (model / "params.best").rename(model / "params.00012")
    for name in ("config", "vocab.src.0.json"):
        (model / name).rename(elsewhere / name)
    (model / "vocab.trg.0.json").unlink()
    options = ImportOptions(config=elsewhere / "config", source_vocab=elsewhere / "vocab.src.0.json")
    assert read(model / "params.00012", options).config["vocab_size"] == 13
    with pytest.raises(ConversionError, match=r"params\.best does not exist"):
        read(model, options)


def test_tokenizer_gives_sockeyes_ids_and_text_back(tmp_path):
    write(tmp_path)
    tokenizer = read(tmp_path, ImportOptions()).tokenizer
    assert tokenizer("s0 s2 nothing")["input_ids"] == [4, 6, 1, 3]
    assert tokenizer.decode([2, 5, 6, 3], skip_special_tokens=True) == "t1 t2"


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("decoder_type: transformer", "decoder_type: ssru_transformer", "`decoder_type` of `config_decoder`"),
        ("num_source_factors: 1", "num_source_factors: 2", "`num_source_factors` of `config_data`"),
        ("num_target_factors: 1", "num_target_factors: 3", "`num_target_factors`"),
        ("  num_factors: 1\n  vocab_size: 13", "  num_factors: 2\n  vocab_size: 13", "`num_factors`"),
        ("use_glu: false", "use_glu: true", "`use_glu`"),
        ("use_lhuc: false", "use_lhuc: true", "`use_lhuc`"),
        ("\nlhuc: false", "\nlhuc: true", "`lhuc` is True"),
        ("dtype: float32", "dtype: int8", "`dtype` is 'int8'"),
        ("config_length_task: null", "config_length_task: !LengthRatioConfig\n  num_layers: 1\n  weight: 1.0",
         "`config_length_task`"),
        ("config_length_task: null", "neural_vocab_selection: eos", "`neural_vocab_selection` is 'eos'"),
        ("  use_glu: false", "  use_glu: false\n  block_prepended_cross_attention: true",
         "`block_prepended_cross_attention`"),
        ("positional_embedding_type: fixed", "positional_embedding_type: none", "`positional_embedding_type`"),
        ("act_type: relu", "act_type: softplus", "`act_type`"),
        ("postprocess_sequence: 'dr'", "postprocess_sequence: 'drn'", "order of norm and sum"),
        ("preprocess_sequence: 'n'", "preprocess_sequence: ''", "order of norm and sum"),
        ("weight_tying_type: trg_softmax", "weight_tying_type: src_softmax", "`weight_tying_type`"),
        ("num_embed: 12", "num_embed: 8", "`num_embed` of `config_embed_source`"),
    ],
)  # fmt: skip
def test_what_the_architecture_lacks_is_refused_by_name(tmp_path, old, new, names):
    write(tmp_path)
    text = (tmp_path / "config").read_text()
    assert old in text
    (tmp_path / "config").write_text(text.replace(old, new))
    with pytest.raises(ConversionError) as error:
        read(tmp_path, ImportOptions())
    assert names in str(error.value)
    assert str(tmp_path / "config") in str(error.value)


@pytest.mark.parametrize("name", ["attention_heads", "feed_forward_num_hidden", "model_size"])
def test_encoder_and_decoder_that_differ_are_refused(tmp_path, name):
    write(tmp_path)
    before, section = (tmp_path / "config").read_text().split("config_encoder:")
    value = {"attention_heads": 3, "feed_forward_num_hidden": 20, "model_size": 12}[name]
    (tmp_path / "config").write_text(before + "config_encoder:" + section.replace(f"{name}: {value}", f"{name}: 6"))
    with pytest.raises(ConversionError, match=f"`{name}` is 6 in the encoder and {value} in the decoder"):
        read(tmp_path, ImportOptions())


def change_params(folder: Path, change) -> None:
    state = torch.load(folder / "params.best", weights_only=True)
    change(state)
    torch.save(state, folder / "params.best")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop("decoder.layers.0.enc_attention.ff_kv.weight"), r"no tensor 'decoder\.layers\.0\.enc_att"),
        (lambda s: s.update({"nvs.project_vocab.weight": torch.ones(2)}), r"no place .*nvs\.project_vocab"),
        (lambda s: s.update({"encoder.layers.0.lhuc.weight": torch.ones(12)}), r"no place .*lhuc"),
        (lambda s: s.update({"output_layer.weight": torch.zeros(17, 12)}), "should be one matrix, but differ"),
        (lambda s: s.update({"embedding_source.embedding.weight": torch.zeros(9, 12)}), r"\(9, 12\), .* \(13, 12\)"),
        (lambda s: s.update({"encoder.layers.1.ff.ff1.weight": torch.zeros(21, 12)}), r"is \(21, 12\), .* \(20, 12\)"),
        (lambda s: s["encoder.pos_embedding.weight"].add_(0.01), "away from the sinusoid"),
        (lambda s: s.update({"epoch": 3}), "more than named tensors"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_an_error(tmp_path, change, said):
    write(tmp_path)
    change_params(tmp_path, change)
    with pytest.raises(ConversionError, match=said):
        read(tmp_path, ImportOptions())


def test_traced_copies_of_old_versions_are_left_alone(tmp_path):
    write(tmp_path)
    change_params(tmp_path, lambda s: s.update({"traced_encoder.layers.0.ff.ff1.weight": torch.ones(2)}))
    assert read(tmp_path, ImportOptions()).tensors_read > 20


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"<pad>": 0, "<unk>": 1, "<s>": 2, "</s>": 3, "a": 4, "a": 5}', "'a' stands there twice, with 4 and 5"),
        ('{"<pad>": 0, "<unk>": 1, "<s>": 2, "</s>": 3, "a": 5}', "no piece has the number 4; 'a' is the next"),
        ('{"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}', "does not begin with <pad>, <unk>, <s>, </s>"),
        ('{"<pad>": "0"}', "no mapping of pieces to numbers"),
        ("<pad> 0", "is not JSON"),
    ],
)
def test_a_bad_vocabulary_is_named(tmp_path, text, said):
    write(tmp_path)
    (tmp_path / "vocab.src.0.json").write_text(text)
    with pytest.raises(ConversionError, match=said) as error:
        read(tmp_path, ImportOptions())
    assert "vocab.src.0.json" in str(error.value)


def test_a_vocabulary_larger_than_its_matrix_is_an_error(tmp_path):
    write(tmp_path)
    (tmp_path / "vocab.src.0.json").write_text(json.dumps(words("s", 14)))
    with pytest.raises(ConversionError, match="14 pieces, its matrix 13 rows"):
        read(tmp_path, ImportOptions())


def test_damaged_and_foreign_files_are_plain_errors(tmp_path):
    write(tmp_path)
    whole = (tmp_path / "params.best").read_bytes()
    (tmp_path / "params.best").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConversionError, match="is not a torch checkpoint, or is damaged"):
        read(tmp_path, ImportOptions())
    (tmp_path / "params.best").write_bytes(b"\x12\x01\x00\x00 parameters of MXNet")
    (tmp_path / "version").write_text("2.3.24")
    with pytest.raises(ConversionError, match=r"Sockeye 2\.3\.24, whose parameters are MXNet's.*mx_to_pt"):
        read(tmp_path, ImportOptions())
    (tmp_path / "config").write_text("model:\n  encoder:\n    type: recurrent\n")
    with pytest.raises(ConversionError, match="has no sections config_encoder"):
        read(tmp_path, ImportOptions())
    (tmp_path / "config").unlink()
    with pytest.raises(ConversionError, match=r"is .* a model folder of Sockeye"):
        read(tmp_path, ImportOptions())


def test_code_in_a_configuration_never_runs(tmp_path):
    write(tmp_path)
    trap = tmp_path / "trap"
    (tmp_path / "config").write_text(f"!ModelConfig\nlhuc: !!python/object/apply:os.mkdir ['{trap}']\n")
    with pytest.raises(ConversionError, match=r"no configuration of Sockeye .*python/object"):
        read(tmp_path, ImportOptions())
    assert not trap.exists()


def test_a_lacking_hyperparameter_is_named(tmp_path):
    write(tmp_path)
    text = (tmp_path / "config").read_text()
    (tmp_path / "config").write_text(text.replace("  num_layers: 2\n", ""))
    with pytest.raises(ConversionError, match="has no `num_layers` under `config_encoder`"):
        read(tmp_path, ImportOptions())


def test_moses_needs_its_languages(tmp_path):
    write(tmp_path)
    with pytest.raises(ConversionError, match="`moses` needs `source_language` and `target_language`"):
        read(tmp_path, ImportOptions(moses=True))


# --------------------------------------------------------------------------- a trained model of Sockeye's own tests
REAL_SHAPE = {**BASE, "source_rows": 16, "target_rows": 16, "width": 16, "heads": 2, "inner": 16, "encoder_layers": 1}


@pytest.mark.skipif(not REAL.is_dir(), reason="the trained copying model of Sockeye's own tests is not here")
def test_the_trained_copying_model_copies():
    foreign = read(REAL, ImportOptions())
    model = loaded(foreign)
    plain = Plain(REAL, REAL_SHAPE)
    lines = (REAL / "model_input").read_text().splitlines()
    batch = foreign.tokenizer(lines, padding=True, return_tensors="pt")
    rows = foreign.tokenizer(lines)["input_ids"]
    targets = [[2, *row[:-1]] for row in rows]
    for ours, source, target in zip(our_logits(model, rows, targets), rows, targets, strict=True):
        assert np.abs(ours - plain.logits(source, target).numpy()).max() < 1e-4
    for beams in (1, 5):
        found = model.generate(**batch, num_beams=beams, max_new_tokens=40)
        assert foreign.tokenizer.batch_decode(found, skip_special_tokens=True) == lines


# --------------------------------------------------------------------------- Sockeye itself
MADE = {
    "pre-norm": {"tying": "src_trg_softmax", "target_rows": 61, "target_word": "s"},
    "post-norm, learned, swish": {"pre": "", "post": "drn", "positions": "learned", "activation": "swish1"},
    "all apart, gelu": {"tying": "none", "activation": "gelu", "encoder_layers": 1, "decoder_layers": 3, "heads": 4},
}


@pytest.fixture(scope="module")
def sockeye():
    """Sockeye's program, as a function of its arguments."""
    needs = ["torch==2.13.0", "numpy<2", "pyyaml", "sacrebleu", "setuptools"]
    # Its own requirements name a torch of 2022; the code runs with this one.
    python = environment("sockeye", needs, without_dependencies=["sockeye==3.1.34"])
    return partial(run_program, python, "sockeye_program.py")


def compare_with_program(run, folder: Path, work: Path, lines: list[str], limit: int) -> tuple[float, int, int]:
    """Largest logit difference, and how many greedy and beam outputs are equal."""
    foreign = read(folder, ImportOptions())
    model, tokenizer = loaded(foreign), foreign.tokenizer
    rows = tokenizer(lines)["input_ids"]
    generator = torch.Generator().manual_seed(2)
    last = foreign.config["vocab_size"]
    targets = [[2, *torch.randint(4, last, (1 + n % 9,), generator=generator).tolist()] for n in range(len(lines))]
    (work / "asked.json").write_text(json.dumps({"lines": lines, "targets": targets, "limit": limit}))
    run("ask", folder, work / "asked.json", work / "answers.npz")
    answers = np.load(work / "answers.npz")
    apart = max(np.abs(ours - answers[f"logits_{n}"]).max() for n, ours in enumerate(our_logits(model, rows, targets)))
    batch = tokenizer(lines, padding=True, return_tensors="pt")
    equal = []
    for name, beams in (("greedy", 1), ("beam", 5)):
        settings = {"num_beams": beams, "max_new_tokens": limit}
        if beams > 1:
            settings |= {k: v for k, v in foreign.generation.items() if k.startswith(("length_penalty", "early"))}
        found = tokenizer.batch_decode(model.generate(**batch, **settings), skip_special_tokens=True)
        equal.append(sum(a == b for a, b in zip(found, answers[name].tolist(), strict=True)))
    return float(apart), *equal


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MADE)
def test_equal_to_sockeye_itself(tmp_path, sockeye, name):
    shape = {
        **BASE,
        "source_rows": 61,
        "target_rows": 53,
        "width": 24,
        "inner": 40,
        "longest": 40,
        "steps": 150,
        **MADE[name],
    }
    (tmp_path / "shape.json").write_text(json.dumps(shape))
    sockeye("make", tmp_path / "model", tmp_path / "shape.json")
    sources, _ = drawn(shape, 50, longest=20)
    lines = [" ".join(f"s{number - 4}" for number in row[:-1]) for row in sources]
    apart, greedy, beam = compare_with_program(sockeye, tmp_path / "model", tmp_path, lines, 30)
    print(f"\n{name}: logits {apart:.2g} apart, greedy {greedy}/50, beam 5 {beam}/50")
    assert apart < 1e-4
    assert greedy == 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not REAL.is_dir(), reason="the trained copying model of Sockeye's own tests is not here")
def test_the_trained_model_equals_sockeye_itself(tmp_path, sockeye):
    sources, _ = drawn(REAL_SHAPE, 40, longest=20)
    digits = list(json.loads((REAL / "vocab.src.0.json").read_text()))
    lines = [" ".join(digits[number] for number in row[:-1] if number != 15) or "1" for row in sources]
    lines += (REAL / "model_input").read_text().splitlines()
    apart, greedy, beam = compare_with_program(sockeye, REAL, tmp_path, lines, 40)
    print(f"\ntrained: logits {apart:.2g} apart, greedy {greedy}/{len(lines)}, beam 5 {beam}/{len(lines)}")
    assert len(lines) == 50
    assert apart < 1e-4
    assert greedy == 50


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("num_layers: 2", "num_layers: six", "num_layers"),
        ("model_size: 12", "model_size: []", "model_size"),
        ("vocab_target_size: 17", "vocab_target_size: many", "vocab_target_size"),
        ("preprocess_sequence: 'n'", "preprocess_sequence: 5", "preprocess_sequence"),
        ("dropout_act: 0.05", "dropout_act: {}", "dropout_act"),
        ("length_ratio_std: 0.5", "length_ratio_std: wide", "length_ratio_std"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(tmp_path, old, new, name):
    write(tmp_path / "model")
    config = tmp_path / "model" / "config"
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new))
    with pytest.raises(ConversionError, match=f"config.*`{name}` is .* and should be"):
        read(tmp_path / "model", ImportOptions())


def test_files_that_readers_stumble_over_are_one_plain_error(tmp_path):
    folder = tmp_path / "model"
    write(folder)
    for name, text in (
        ("config", "a: 2020-99-99"), ("config", "[" * 5000), ("vocab.src.0.json", "[" * 200_000),
        ("vocab.src.0.json", '{"a": ' + "9" * 5000 + "}"),
    ):  # fmt: skip
        before = (folder / name).read_text()
        (folder / name).write_text(text)
        with pytest.raises(ConversionError, match=f"{name} is n"):
            read(folder, ImportOptions())
        (folder / name).write_text(before)
    (folder / "vocab.src.0.json").write_bytes(b"\xef\xbb\xbf" + (folder / "vocab.src.0.json").read_bytes())
    (folder / "version").write_bytes(b"3.1\xff")
    assert read(folder, ImportOptions()).tokenizer.get_src_vocab()["<pad>"] == 0
