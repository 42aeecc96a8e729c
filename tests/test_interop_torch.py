"""Import of state dicts around `torch.nn.Transformer`, judged by that class itself; one of them is a trained model."""

import json
import math
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from imported_models import loaded, our_logits
from safetensors.torch import save_file
from torch import nn
from transformers import AutoTokenizer

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.interop.foreign import ConversionError, ImportOptions
from hf_vaswani.interop.importing import import_model
from hf_vaswani.interop.torch_state import OPTIONS, read

TRANSLITERATION = Path(__file__).parents[2] / "shared" / "data" / "weights" / "tg2fa_translit"
# Torch says of most shapes that its fast path for padding is off.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
SOURCE, TARGET = 11, 13


class Seq2Seq(nn.Module):
    """What people write around nn.Transformer, after the tutorials."""

    def __init__(self, d_model=12, heads=3, layers=(2, 1), ff=20, vocabularies=(SOURCE, TARGET), scaled=True,
                 positions="interleaved", out_bias=True, rows=70, **options):  # fmt: skip
        super().__init__()
        self.scale = math.sqrt(d_model) if scaled else 1.0
        self.src = nn.Embedding(vocabularies[0], d_model)
        self.tgt = nn.Embedding(vocabularies[1], d_model)
        self.trans = nn.Transformer(d_model, heads, *layers, ff, 0.1, batch_first=True, **options)
        self.out = nn.Linear(d_model, vocabularies[1], bias=out_bias)
        if positions == "learned":
            self.pe = nn.Parameter(torch.randn(1, rows, d_model))
        else:
            place = torch.arange(rows)[:, None]
            angles = place * torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
            table = torch.zeros(rows, 1, d_model)
            if positions == "interleaved":
                table[:, 0, 0::2], table[:, 0, 1::2] = angles.sin(), angles.cos()
            else:
                table[:, 0] = torch.cat([angles.sin(), angles.cos()], dim=1)
            self.register_buffer("pe", table)

    def place(self, x):
        return x * self.scale + self.pe.reshape(-1, x.shape[-1])[: x.shape[1]]

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        states = self.trans(self.place(self.src(source)), self.place(self.tgt(target)), tgt_mask=mask)
        return self.out(states)


def mapping(**changes):
    found = {
        "source_embedding": "src.weight",
        "target_embedding": "tgt.weight",
        "output": "out",
        "transformer": "trans.",
        "heads": 3,
        "scale_embedding": True,
        "positions": "interleaved",
        "position_table": "pe",
        "special": {"pad": 0, "eos": 1, "bos": 2, "unk": 3},
    }
    return {key: value for key, value in (found | changes).items() if value is not None}


def make(seed=1, **options):
    torch.manual_seed(seed)
    model = Seq2Seq(**options).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # fresh biases and norms are 0 and 1, and would hide a mix-up
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif name in ("src.weight", "tgt.weight", "out.weight"):
                parameter.mul_(0.3)
    return model


def write(folder, state, **changes):
    """A checkpoint and its mapping file; gives the arguments of `read`."""
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / "model.pt")
    (folder / "names.yaml").write_text(yaml.safe_dump(mapping(**changes), allow_unicode=True), encoding="utf-8")
    return folder / "model.pt", ImportOptions(mapping=folder / "names.yaml")


SOURCES, TARGETS = [[3, 4, 5, 6, 1], [7, 1], [2, 4, 8, 1]], [[2, 3, 9, 4], [2, 5, 5, 6], [2, 8, 7, 10]]


@torch.no_grad()
def assert_same(found, model, tolerance=1e-4):
    logits = our_logits(loaded(found), SOURCES, TARGETS)
    for row, source, target in zip(logits, SOURCES, TARGETS, strict=True):
        wanted = model(torch.tensor([source]), torch.tensor([target]))[0]
        assert (torch.from_numpy(row) - wanted).abs().max() < tolerance


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        pytest.param({}, {}, id="usual"),
        pytest.param({"norm_first": True}, {"norm_first": True}, id="pre-norm"),
        pytest.param({"bias": False, "out_bias": False}, {}, id="without biases"),
        pytest.param({"positions": "learned"}, {"positions": "learned"}, id="learned positions"),
        pytest.param({"positions": "halves"}, {"positions": "halves"}, id="halved sinusoid"),
        pytest.param({"scaled": False}, {"scale_embedding": False}, id="unscaled"),
        pytest.param({"activation": "gelu"}, {"activation": "gelu"}, id="gelu"),
        pytest.param({"activation": nn.functional.silu}, {"activation": "silu"}, id="silu"),
        pytest.param({"layer_norm_eps": 0.01}, {"layer_norm_eps": 0.01}, id="epsilon"),
        pytest.param({"layers": (1, 3), "ff": 7, "d_model": 16, "heads": 4}, {"heads": 4}, id="other sizes"),
        pytest.param({"vocabularies": (13, 13)}, {}, id="equal sizes, two matrices"),
    ],
)
def test_logits_are_those_of_nn_transformer(tmp_path, options, changes):
    model = make(**options)
    found = read(*write(tmp_path / "a", model.state_dict(), **changes))
    assert_same(found, model)
    assert found.tensors_read == len(model.state_dict())


def test_stacks_without_last_norms_and_under_prefixes_of_their_own(tmp_path):
    model = make()
    model.trans.encoder.norm = model.trans.decoder.norm = None
    renamed = {
        name.replace("trans.encoder.", "enc.").replace("trans.decoder.", "dec."): value
        for name, value in model.state_dict().items()
    }
    found = read(*write(tmp_path / "a", renamed, transformer=None, encoder="enc.", decoder="dec."))
    assert found.config["final_norm"] is False
    assert_same(found, model)
    assert_same_program(found, model)


def test_tied_matrices_are_tied_and_an_absent_output_layer_is_the_target_embedding(tmp_path):
    model = make(vocabularies=(13, 13), out_bias=False)
    model.tgt.weight = model.src.weight
    model.out.weight = model.src.weight
    state = model.state_dict()
    found = read(*write(tmp_path / "a", state))
    assert found.config["tie_word_embeddings"]
    assert found.config["tie_encoder_decoder_embeddings"]
    assert_same(found, model)
    del state["out.weight"]
    assert_same(read(*write(tmp_path / "b", state, output=None)), model)


def test_the_program_is_nn_transformer_with_the_same_search(tmp_path):
    model = make()
    found = read(*write(tmp_path / "a", model.state_dict()))
    assert_same_program(found, model)


@torch.no_grad()
def assert_same_program(found, model):
    program = found.program()
    assert "nn.Transformer" in program.name
    logits = program.logits(SOURCES, TARGETS)
    for row, source, target in zip(logits, SOURCES, TARGETS, strict=True):
        wanted = model(torch.tensor([source]), torch.tensor([target]))[0].numpy()
        assert np.abs(row - wanted).max() < 1e-5
    greedy = program.search(SOURCES[:1], 1)[0]
    written = [2]
    for _ in range(len(greedy)):
        written.append(int(model(torch.tensor(SOURCES[:1]), torch.tensor([written]))[0, -1].argmax()))
    assert written[1:] == greedy


def test_where_no_table_is_stored_the_formula_is_used_with_its_exponent_and_offset(tmp_path):
    model = make()
    state = model.state_dict()
    del state["pe"]
    changes = {"position_table": None, "position_exponent": "2i/(d-2)", "position_offset": 3, "positions": "halves"}
    found = read(*write(tmp_path / "a", state, **changes))
    place = torch.arange(70, dtype=torch.float64)[:, None] + 3
    angles = place / 10000.0 ** (torch.arange(0, 12, 2, dtype=torch.float64) / 10)
    model.pe = torch.cat([angles.sin(), angles.cos()], dim=1).float()
    assert_same(found, model)
    assert_same_program(found, model)


def test_other_files_and_places_of_the_state_dict(tmp_path):
    model = make()
    path, options = write(tmp_path / "a", {"step": 3, "net": {"weights": model.state_dict()}}, state_dict="net.weights")
    assert_same(read(path, options), model)
    save_file({name: value.clone() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    _, options = write(tmp_path / "b", {})
    assert_same(read(tmp_path / "model.safetensors", options), model)
    half = {name: value.half() if name != "pe" else value for name, value in model.state_dict().items()}
    path, options = write(tmp_path / "c", half)
    assert_same(read(path, options), model.half().float())


# ---------------------------------------------------------------------- positions that are stored
@pytest.mark.parametrize(
    "changes", [{"positions": "halves"}, {"position_offset": 1}, {"position_exponent": "2i/(d-2)"}], ids=str
)
def test_a_stored_table_that_is_another_sinusoid_is_refused(tmp_path, changes):
    with pytest.raises(ConversionError, match=r"the stored positions are not the sinusoid.*row \d+ differs"):
        read(*write(tmp_path / "a", make().state_dict(), **changes))


def test_a_learned_table_starts_at_its_offset(tmp_path):
    model = make(positions="learned")
    found = read(*write(tmp_path / "a", model.state_dict(), positions="learned", position_offset=2))
    assert found.config["max_position_embeddings"] == 68
    model.pe = nn.Parameter(model.pe[:, 2:])
    assert_same(found, model)
    with pytest.raises(ConversionError, match="`positions` are learned, so `position_table`"):
        read(*write(tmp_path / "b", model.state_dict(), positions="learned", position_table=None))


# ---------------------------------------------------------------------- vocabulary
def test_pieces_and_special_tokens_make_a_tokenizer(tmp_path):
    pieces = {"source": [*SPECIAL, *"абвгдеж"], "target": [*SPECIAL, *"abcdefg", "no", "1:30"]}
    special = {"pad": "<pad>", "eos": "<eos>", "bos": "<bos>", "unk": "<unk>"}
    wrapped = {"source_prefix": ["<bos>"], "source_suffix": ["<eos>"], "segmentation": "characters"}
    found = read(*write(tmp_path / "a", make().state_dict(), pieces=pieces, special=special, **wrapped))
    assert found.tokenizer("ба")["input_ids"] == [2, 5, 4, 1]
    assert found.tokenizer(text_target="ba")["input_ids"] == [5, 4, 1]
    assert found.tokenizer.decode([2, 6, 4, 5, 1]) == "cab"
    assert (found.config["decoder_start_token_id"], found.config["eos_token_id"]) == (2, 1)


def test_pieces_may_lie_in_files_of_any_line_and_of_json(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    words = ["no", "12:30", "&", "#", "~", "'", '"']
    (folder / "source.txt").write_text("\n".join([*SPECIAL, *words]) + "\n", encoding="utf-8")
    target = {piece: number for number, piece in enumerate([*SPECIAL, *words])}
    (folder / "target.json").write_text(json.dumps(target), encoding="utf-8")
    pieces = {"source": "source.txt", "target": "target.json"}
    found = read(*write(folder, make().state_dict(), pieces=pieces))
    assert found.tokenizer("12:30 no &")["input_ids"] == [5, 4, 6]
    assert found.tokenizer.decode([6, 5, 1]) == "& 12:30"
    assert found.generation["suppress_tokens"] == [11, 12]  # two rows have no piece


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (
            {"source": [*SPECIAL, "a"], "target": [*SPECIAL, *"abcdefghijkl"]},
            "16 pieces.*13 rows.*3 pieces have no row",
        ),
        ({"source": [*SPECIAL, "a", "b", "a"], "target": SPECIAL}, "the piece 'a' has the ids 4 and 6"),
        ({"source": [*SPECIAL, False], "target": SPECIAL}, "the piece of id 4 is False, no string. In YAML, quote it"),
        ({"source": SPECIAL}, "`pieces` names only one of source and target"),
        ({"source": SPECIAL, "target": "nowhere.txt"}, r"nowhere\.txt cannot be read as pieces"),
        ({"source": SPECIAL, "target": {"a": 0, "b": 2}}, "the ids are not 0 to 1"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path, pieces, message):
    with pytest.raises(ConversionError, match=message):
        read(*write(tmp_path / "a", make().state_dict(), pieces=pieces))


# ---------------------------------------------------------------------- the mapping file
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": None}, "has no `heads`"),
        ({"head": 3}, "the key `head`, which means nothing. Did you mean `heads`"),
        ({"heads": True}, "`heads` is True"),
        ({"heads": 5}, "`heads` is 5, which does not divide the width 12"),
        ({"layer_norm_eps": "small"}, "`layer_norm_eps` is 'small'"),
        ({"positions": "rotary"}, "`positions` is 'rotary'; this architecture has interleaved, halves, learned"),
        ({"activation": "geglu"}, "`activation` is 'geglu'"),
        ({"special": {"pad": 0, "eos": 1}}, "`special` has no `start`"),
        ({"special": {"pad": 0, "eos": 1, "bos": 99}}, "`special`, `bos` is 99"),
        ({"special": {"pad": 0, "eos": "</s>", "bos": 2}}, "'</s>', which is no id; without `pieces` it must be"),
        ({"special": {"pad": 0, "end": 1}}, "the key `end`, which means nothing"),
        ({"transformer": "model."}, r"the encoder is not under 'model\.encoder\.'.*'trans\.encoder\.'"),
        ({"source_embedding": "emb.weight"}, "no tensor 'emb.weight'; it has"),
        ({"output": None}, "no place in this architecture: out.bias, out.weight"),
        ({"state_dict": "model"}, "has no 'model' .`state_dict`"),
        ({"position_table": None}, "no place in this architecture: pe"),
    ],
)
def test_a_mapping_that_is_wrong_is_refused_with_its_key(tmp_path, changes, message):
    with pytest.raises(ConversionError, match=message):
        read(*write(tmp_path / "a", make().state_dict(), **changes))


def test_the_mapping_file_itself_must_be_given_and_be_yaml(tmp_path):
    path, options = write(tmp_path / "a", make().state_dict())
    with pytest.raises(ConversionError, match="pass `mapping`, a YAML file"):
        read(path, ImportOptions())
    assert options.mapping is not None
    options.mapping.write_text("heads: [3")
    with pytest.raises(ConversionError, match="is not a YAML file"):
        read(path, options)
    options.mapping.write_text("- heads")
    with pytest.raises(ConversionError, match="is not a mapping"):
        read(path, options)


def test_a_number_that_yaml_reads_as_a_word_is_a_number(tmp_path):
    path, options = write(tmp_path / "a", make().state_dict())
    assert options.mapping is not None
    text = options.mapping.read_text() + "layer_norm_eps: 1e-3\n"  # a string to YAML 1.1
    options.mapping.write_text(text)
    assert read(path, options).config["layer_norm_eps"] == 1e-3


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("trans.encoder.layers.0.self_attn.bias_k", (1, 1, 12), "`add_bias_kv`"),
        ("trans.decoder.layers.0.multihead_attn.k_proj_weight", (12, 5), "`kdim` or `vdim` unlike the width"),
        ("rnn.weight_ih_l0", (4, 12), "an LSTM, GRU or RNN"),
        ("extra.weight", (4, 12), "no place in this architecture: extra.weight"),
    ],
)
def test_what_the_architecture_lacks_is_refused_by_name(tmp_path, name, shape, message):
    with pytest.raises(ConversionError, match=message):
        read(*write(tmp_path / "a", make().state_dict() | {name: torch.zeros(shape)}))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("trans.decoder.layers.0.norm3.weight", "no tensor 'trans.decoder.layers.0.norm3.weight'"),
        ("trans.encoder.norm.weight", "only one of encoder and decoder ends in a norm"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path, missing, message):
    state = make().state_dict()
    del state[missing]
    with pytest.raises(ConversionError, match=message):
        read(*write(tmp_path / "a", state))


def test_files_that_are_no_state_dict_are_refused_with_the_way_round(tmp_path):
    path, options = write(tmp_path / "a", make().state_dict())
    torch.save(make(), tmp_path / "whole.pt")  # the object with its class
    with pytest.raises(ConversionError, match=r"torch\.save\(model\.state_dict\(\), PATH\)"):
        read(tmp_path / "whole.pt", options)
    (tmp_path / "cut.pt").write_bytes(path.read_bytes()[:-500])
    with pytest.raises(ConversionError, match=r"not a torch checkpoint, or is damaged|cannot be read, or is cut off"):
        read(tmp_path / "cut.pt", options)
    (tmp_path / "cut.safetensors").write_bytes(b"12345678")
    with pytest.raises(ConversionError, match="not a safetensors file, or is damaged"):
        read(tmp_path / "cut.safetensors", options)
    torch.save({"model_state_dict": make().state_dict(), "epoch": 3}, tmp_path / "nested.pt")
    with pytest.raises(ConversionError, match=r"epoch are no tensors.*name it as `state_dict`"):
        read(tmp_path / "nested.pt", options)


def test_an_option_that_means_nothing_here_is_refused(tmp_path):
    path, options = write(tmp_path / "a", make().state_dict())
    assert frozenset({"mapping"}) == OPTIONS
    options = ImportOptions(mapping=options.mapping, codes=tmp_path / "codes")
    with pytest.raises(ConversionError, match="`codes` means nothing to an import of torch"):
        import_model("torch", path, tmp_path / "out", options=options)


def test_through_the_driver_it_is_held_against_nn_transformer(tmp_path):
    path, options = write(tmp_path / "a", make().state_dict())
    report = import_model("torch", path, tmp_path / "out", options=options, count=6)
    assert "nn.Transformer" in report.parities[0].against
    assert report.parities[0].logit_difference < 1e-4
    assert report.parities[0].greedy_equal == 6
    assert report.parities[0].beam_equal == 6


# ---------------------------------------------------------------------- a trained model
@pytest.mark.slow  # downloads a package
def test_the_trained_transliterator_writes_its_reference_outputs(tmp_path):
    if not TRANSLITERATION.is_dir():
        pytest.skip("its reference outputs are not here")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "tg2fa_translit==1.0",
        "--no-deps",
        "--quiet",
        "-d",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"tg2fa_translit cannot be had here: {done.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        checkpoint = wheel.extract("tg2fa_translit/model_2.9.zip", tmp_path)
    tables = json.loads((TRANSLITERATION / "vocab_and_shape.json").read_text(encoding="utf-8"))
    items = json.loads((TRANSLITERATION / "reference_outputs.json").read_text(encoding="utf-8"))["items"]
    names = {
        "state_dict": "model_state_dict",
        "source_embedding": "src_tok_emb.embedding.weight",
        "target_embedding": "tgt_tok_emb.embedding.weight",
        "output": "generator",
        "heads": tables["heads"],
        "layer_norm_eps": tables["layer_norm_eps"],
        "scale_embedding": True,
        "positions": "interleaved",
        "position_table": "positional_encoding.pos_embedding",
        "pieces": {"source": tables["source_tokens"], "target": tables["target_tokens"]},
        "special": {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>", "unk": "<unk>"},
        "segmentation": "characters",
        "source_prefix": ["<bos>"],
        "source_suffix": ["<eos>"],
    }
    (tmp_path / "names.yaml").write_text(yaml.safe_dump(names, allow_unicode=True), encoding="utf-8")
    report = import_model(
        "torch",
        checkpoint,
        tmp_path / "out",
        options=ImportOptions(mapping=tmp_path / "names.yaml"),
        sentences=[item["source"] for item in items],
    )
    print(report.text())
    assert report.parities[0].greedy_equal == len(items) == 10
    model = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for item in items:
        source = tokenizer(item["source"], return_tensors="pt")
        assert source["input_ids"][0].tolist() == item["source_ids"]
        found = model.generate(**source, num_beams=1, return_dict_in_generate=True, output_logits=True)
        assert found.sequences[0].tolist() == item["greedy_ids"]
        assert tokenizer.decode(found.sequences[0]) == item["greedy"]
        chosen = zip(found.logits, found.sequences[0, 1:], strict=True)
        log_probs = [float(logits.log_softmax(-1)[0, token]) for logits, token in chosen]
        assert log_probs == pytest.approx(item["greedy_token_logprobs"], abs=1e-5)
        assert found.logits[-1][0].tolist() == pytest.approx(item["logits_last_step"], abs=1e-4)


@pytest.mark.parametrize(
    ("name", "value"),
    [("heads", 0), ("heads", 10**12), ("segmentation", "letters"), ("position_table", {"source": 5, "target": "pe"}),
     ("moses", ["en"]), ("source_prefix", [5])],
)  # fmt: skip
def test_a_value_that_means_nothing_is_refused_by_its_key(tmp_path, name, value):
    path, options = write(tmp_path, make().state_dict(), **{name: value})
    with pytest.raises(ConversionError, match=f"`{name}` is"):
        read(path, options)


def test_pieces_are_read_as_they_stand(tmp_path):
    words = [*SPECIAL, *(f"t{n}" for n in range(TARGET - 4))]
    special = dict(zip(("pad", "eos", "bos", "unk"), SPECIAL, strict=True))
    source = [*words[: SOURCE - 1], "x\u2028y"]
    (tmp_path / "src.txt").write_bytes(("\r\n".join(source) + "\r\n").encode())
    (tmp_path / "tgt.json").write_text(json.dumps(dict(zip(words, range(99), strict=False))))
    pieces = {"source": "src.txt", "target": "tgt.json"}
    path, options = write(tmp_path, make().state_dict(), pieces=pieces, special=special)
    assert read(path, options).tokenizer.get_src_vocab() == dict(zip(source, range(99), strict=False))
    for text, message in (
        ('{"a": 0, "b": 1, "a": 0}', "'a' stands there twice"), ('{"a": 0, "b": "1"}', "the ids are not 0 to 1"),
    ):  # fmt: skip
        (tmp_path / "tgt.json").write_text(text)
        with pytest.raises(ConversionError, match=message):
            read(path, options)


@pytest.mark.parametrize("text", ["a: 2020-99-99", "[" * 5000], ids=["date", "depth"])
def test_a_mapping_that_yaml_itself_stumbles_over_is_one_plain_error(tmp_path, text):
    path, options = write(tmp_path, make().state_dict())
    options.mapping.write_text(text)
    with pytest.raises(ConversionError, match=r"names.yaml is not a YAML file"):
        read(path, options)
