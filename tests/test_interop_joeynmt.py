"""Import of JoeyNMT models: held against JoeyNMT's own equations, its refusals, and (slow) the real program."""

import importlib
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from foreign_programs import environment, run_program
from imported_models import loaded
from joeynmt_toy import (
    SOURCE,
    SPECIAL,
    TARGET,
    D,
    bad_folder,
    configuration,
    largest_difference,
    logits,
    padded,
    side,
    weights,
    write,
)
from transformers import AutoTokenizer

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.interop.foreign import ConversionError, ImportOptions
from hf_vaswani.interop.importing import import_model
from hf_vaswani.interop.joeynmt import read

CASES = {
    "post, nothing shared": ({}, {}, {}),
    "pre, output shared": ({"layer_norm": "pre"}, {"tied_softmax": True}, {}),
    "gelu, all shared": ({"activation": "gelu"}, {"tied_softmax": True, "tied_embeddings": True}, {"source": TARGET}),
    "swish, embeddings shared": ({"activation": "swish"}, {"tied_embeddings": True}, {"source": TARGET}),
    "one vocabulary, two matrices": ({"layer_norm": "pre"}, {}, {"source": TARGET}),
    "embeddings not scaled": ({"embeddings": {"embedding_dim": D, "scale": False}}, {}, {}),
    "version 1: no layer_norm, pre": ({"layer_norm": None}, {"tied_softmax": True}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_joeynmts_equations(case, tmp_path):
    sides, model, vocabularies = CASES[case]
    config = configuration(encoder=side(**sides), decoder=side(num_layers=3, **sides), **model)
    state = weights(config, **vocabularies)
    path = write(tmp_path / "model", config, state, **vocabularies)
    ours = loaded(read(path, ImportOptions()))
    sources, targets = [[4, 5, 6, 7, 3], [8, 3], [9, 4, 3]], [[2, 5], [2, 7, 8, 9, 10, 4], [2, 6, 6]]
    expected = [logits(config, state, s, t) for s, t in zip(sources, targets, strict=True)]
    assert largest_difference(ours, sources, targets, expected) < 1e-4
    tied = ours.lm_head.weight.data_ptr() == ours.get_input_embeddings().weight.data_ptr()
    assert ours.config.tie_word_embeddings == bool(model.get("tied_softmax"))
    if not model.get("tied_softmax"):
        assert not tied


def test_folder_translates_text_and_knows_the_settings(tmp_path):
    config = configuration()
    path = write(tmp_path / "model", config, weights(config))
    report = import_model("joeynmt", path, tmp_path / "out", count=4)
    model = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    settings = model.generation_config
    assert (settings.num_beams, settings.length_penalty, settings.length_penalty_type) == (5, 0.8, "gnmt")
    assert (settings.max_new_tokens, settings.max_length_offset, settings.min_new_tokens) == (9, None, 1)
    assert settings.suppress_tokens == [1, 2]
    assert model.config.label_smoothing == 0.2
    assert model.config.dropout == model.config.attention_dropout == model.config.activation_dropout == 0.1
    assert tokenizer("no 12:30 & ~")["input_ids"] == [4, 5, 7, 8, 3]
    assert tokenizer(text_target="null yes 4")["input_ids"] == [7, 9, 10, 3]
    out = model.generate(**tokenizer(["no #", "& ~ no"], return_tensors="pt", padding=True))
    assert all(len(row) <= 10 and row[0] == 2 for row in out.tolist())
    assert report.tensors == len(weights(config)) - 2  # two tables of positions are computed


@pytest.mark.parametrize(
    ("level", "changes", "text", "pieces"),
    [
        ("char", {}, "ab a", ["a", "b", "▁", "a"]),
        ("word", {"lowercase": True}, "AB a", ["ab", "a"]),
        ("word", {"tokenizer_cfg": {"pretokenizer": "moses"}}, "ab, ab.", ["ab", ",", "ab", "."]),
    ],
)
def test_text_is_split_as_the_configuration_says(level, changes, text, pieces, tmp_path):
    vocabulary = [*SPECIAL, "a", "b", "▁", "ab", ",", "."]
    config = configuration()
    for name in ("src", "trg"):
        config["data"][name] |= {"level": level, **changes}
    path = write(tmp_path / "model", config, weights(config, vocabulary, vocabulary), vocabulary, vocabulary)
    foreign = read(path, ImportOptions())
    assert foreign.losses == []
    assert foreign.tokenizer.convert_ids_to_tokens(foreign.tokenizer(text)["input_ids"]) == [*pieces, "</s>"]


def test_codes_of_the_folder_split_words_within_the_vocabulary(tmp_path):
    vocabulary = [*SPECIAL, "low@@", "lo@@", "w@@", "e@@", "r", "low"]
    config = configuration()
    for name in ("src", "trg"):
        config["data"][name] |= {"level": "bpe", "tokenizer_type": "subword-nmt"}
        config["data"][name]["tokenizer_cfg"] = {"codes": "elsewhere/bpe.codes"}
    path = write(tmp_path / "model", config, weights(config, vocabulary, vocabulary), vocabulary, vocabulary)
    (path / "bpe.codes").write_text("#version: 0.2\nl o\nlo w\nlo w</w>\ne r</w>\n", encoding="utf-8")
    foreign = read(path, ImportOptions())
    ids = foreign.tokenizer("lower low")["input_ids"]
    # "er" is no piece of this vocabulary, so it is cut again.
    assert foreign.tokenizer.convert_ids_to_tokens(ids) == ["low@@", "e@@", "r", "low", "</s>"]
    assert foreign.tokenizer.decode(ids, skip_special_tokens=True) == "lower low"
    (path / "bpe.codes").unlink()
    assert "files of subword-nmt are not here" in read(path, ImportOptions()).losses[0]


def test_version_1_has_one_set_of_data_settings(tmp_path):
    config = configuration(
        encoder=side(layer_norm=None), decoder=side(layer_norm=None, num_layers=3), tied_softmax=True
    )
    config["data"] = {"src": "no", "trg": False, "level": "bpe", "lowercase": True, "train": "train.bpe"}
    path = write(tmp_path / "model", config, weights(config), checkpoint="300.ckpt")
    (path / "200.ckpt").write_bytes(b"older")
    foreign = read(path, ImportOptions())
    assert foreign.config["norm_position"] == "pre"
    assert foreign.config["final_norm"] is True
    assert any("300.ckpt" in choice for choice in foreign.choices)
    assert any("split into pieces beforehand" in loss for loss in foreign.losses)
    assert foreign.tokenizer("NO &")["input_ids"] == [4, 7, 3]
    codes = tmp_path / "codes"
    codes.write_text("#version: 0.2\nn o</w>\n", encoding="utf-8")
    with_codes = read(path / "300.ckpt", ImportOptions(codes=codes, moses=True))
    assert with_codes.losses == []
    assert with_codes.tokenizer("no")["input_ids"] == [4, 3]


def test_what_is_not_carried_over_is_said(tmp_path):
    config = configuration()
    config["data"]["src"] |= {"normalize": True, "tokenizer_cfg": {"pretokenizer": "moses"}}
    config["data"]["trg"]["lowercase"] = True
    config["testing"] = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 3, "generate_unk": False}
    config["model"]["encoder"]["dropout"] = 0.3
    path = write(tmp_path / "model", config, weights(config))
    foreign = read(path, ImportOptions())
    said = " ".join(foreign.losses)
    for word in ("normalize", "one side", "repetition_penalty", "no_repeat_ngram_size"):
        assert word in said
    chosen = " ".join(foreign.choices)
    for word in ("length limit", "lowercase", "dropout"):
        assert word in chosen
    assert foreign.generation["suppress_tokens"] == [0, 1, 2]
    assert (foreign.generation["num_beams"], foreign.generation["length_penalty"]) == (1, 0.0)
    config["data"]["trg"]["level"] = "char"
    foreign = read(write(tmp_path / "model", config, weights(config)), ImportOptions())
    assert foreign.tokenizer is None
    assert "no tokenizer" in " ".join(foreign.losses)


def test_rows_without_a_piece_are_never_generated(tmp_path):
    config = configuration()
    path = write(tmp_path / "model", config, weights(config, target=[*TARGET, "a", "b"]))
    foreign = read(path, ImportOptions())
    assert foreign.config["vocab_size"] == len(TARGET) + 2
    assert foreign.generation["suppress_tokens"] == [1, 2, len(TARGET), len(TARGET) + 1]


def test_special_symbols_of_the_configuration_are_used(tmp_path):
    config = configuration()
    config["data"]["special_symbols"] = {
        "unk_token": "[U]", "eos_token": "[E]", "sep_token": "[S]", "sep_id": 4, "lang_tags": ["<de>"]
    }  # fmt: skip
    special = ["[U]", "<pad>", "<s>", "[E]", "[S]", "<de>"]
    pieces = [*special, *TARGET[4:]]
    # A vocabulary file of one's own need not begin with the special pieces.
    state = weights(config, pieces, pieces)
    path = write(tmp_path / "model", config, state, pieces, TARGET[4:])
    foreign = read(path, ImportOptions())
    assert (foreign.config["unk_token_id"], foreign.config["eos_token_id"]) == (0, 3)
    assert foreign.generation["suppress_tokens"] == [1, 2, 4, 5]
    assert foreign.tokenizer("one nothing")["input_ids"] == [6, 0, 3]


REFUSALS = [
    ({"encoder": side(type="recurrent", rnn_type="lstm")}, r"model.encoder.type` is 'recurrent' \(lstm\)"),
    ({"encoder": {name: value for name, value in side().items() if name != "type"}}, "encoder.type` is 'recurrent'"),
    ({"decoder": side(type="conformer", num_layers=3)}, "model.decoder.type` is 'conformer'"),
    ({"encoder": side(alpha=1.2)}, "`model.encoder` has the encoder's residual factor `alpha` 1.2000"),
    (
        {"initializer": "xavier_normal"},
        "initializer: xavier_normal` makes the encoder's residual factor `alpha` 1.0317",
    ),
    (
        {"decoder": side(num_layers=3, layer_norm="pre")},
        "encoder is post-norm without a final norm, the decoder is pre",
    ),
    ({"decoder": side(num_layers=3, num_heads=4)}, "`num_heads` is 2 in the encoder and 4 in the decoder"),
    ({"decoder": side(num_layers=3, ff_size=16)}, "`ff_size` is 12 in the encoder and 16"),
    ({"encoder": side(activation="gelu")}, "`activation` is gelu in the encoder and relu"),
    ({"encoder": side(activation="cubic")}, "`model.encoder.activation` 'cubic' is not known"),
    ({"encoder": side(embeddings={"embedding_dim": D})}, "`embeddings.scale` is False in the encoder and True"),
    ({"encoder": side(embeddings={"embedding_dim": 4, "scale": True})}, "embedding_dim` is 4 and `hidden_size` 8"),
    ({"encoder": side(subsample=True)}, "`model.encoder.subsample` is True"),
    ({"encoder": side(layer_norm="sandwich")}, "`model.encoder.layer_norm` is 'sandwich'"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=[message[:40] for _, message in REFUSALS])
def test_what_cannot_be_represented_is_refused_by_name(changes, message, tmp_path):
    config = configuration()
    state = weights(config)
    config["model"] |= changes
    if config["model"]["decoder"]["layer_norm"] == "pre":
        state |= {f"decoder.layer_norm.{part}": torch.ones(D) for part in ("weight", "bias")}
    path = write(tmp_path / "model", config, state)
    with pytest.raises(ConversionError, match=message):
        import_model("joeynmt", path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_silence_about_norms_means_what_it_means_to_version_2(tmp_path):
    config = configuration(encoder=side(layer_norm=None), decoder=side(num_layers=3, layer_norm=None))
    state = {name: value for name, value in weights(config).items() if "coder.layer_norm" not in name}
    with pytest.raises(
        ConversionError, match="encoder is pre-norm by default without a final norm, the decoder is post"
    ):
        read(write(tmp_path / "model", config, state), ImportOptions())


def test_prompts_are_refused(tmp_path):
    config = configuration()
    config["data"]["trg"]["has_prompt"] = True
    with pytest.raises(ConversionError, match=r"`data.trg.has_prompt` is on"):
        read(write(tmp_path / "model", config, weights(config)), ImportOptions())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s.pop("decoder.layers.2.src_trg_att.v_layer.bias"),
            "no tensor 'decoder.layers.2.src_trg_att.v_layer",
        ),
        (lambda s: s.update({"ctc_layer.weight": torch.zeros(2)}), "no place in this architecture: ctc_layer.weight"),
        (lambda s: s.update({"encoder.layers.2.layer_norm.weight": torch.ones(D)}), "encoder.layers.2.layer_norm"),
        (lambda s: s.update({"decoder.output_layer.weight": torch.zeros(9, D)}), r"is \(9, 8\), the hyper-par"),
        (lambda s: s["decoder.pe.pe"].mul_(2.0), "'decoder.pe.pe' is not the sinusoid"),
    ],
)
def test_tensors_that_do_not_fit_are_an_error(change, message, tmp_path):
    config = configuration()
    state = weights(config)
    change(state)
    with pytest.raises(ConversionError, match=message):
        read(write(tmp_path / "model", config, state), ImportOptions())


def test_matrices_said_to_be_one_must_be_equal(tmp_path):
    config = configuration()
    state = weights(config)
    config["model"]["tied_softmax"] = True
    with pytest.raises(
        ConversionError, match=r"'trg_embed.lut.weight' and 'decoder.output_layer.weight' should be one"
    ):
        read(write(tmp_path / "model", config, state), ImportOptions())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut", "best.ckpt is not a torch checkpoint, or is damaged"),
        ("text", "best.ckpt is not a torch checkpoint, or is damaged"),
        ("other toolkit", "has no `model_state`, so JoeyNMT did not write it; it holds: model, args, extra_state"),
        ("no checkpoint", "has no checkpoint: neither best.ckpt, latest.ckpt nor a numbered one"),
        ("no config", "config.yaml is not a file"),
        ("broken config", r"config.yaml cannot be read as YAML.*line 2"),
        ("other config", "has no section `model`"),
        ("repeated", "trg_vocab.txt, line 13: 'two' stands in line 6 already"),
        ("too many", "the vocabulary has 14 pieces, its matrix 13 rows"),
        ("no vocabulary", "trg_vocab.txt is not a file"),
        ("not text", "trg_vocab.txt is not UTF-8 text"),
        ("nothing", "nothing does not exist"),
    ],
)
def test_bad_input_is_one_plain_error(kind, message, tmp_path):
    with pytest.raises(ConversionError, match=message):
        read(bad_folder(kind, tmp_path), ImportOptions())


def test_lines_of_another_system_and_given_files_are_read(tmp_path):
    config = configuration()
    path = write(tmp_path / "model", config, weights(config))
    given = tmp_path / "given.txt"
    given.write_bytes("".join(f"{piece}\r\n" for piece in SOURCE).encode())
    (path / "src_vocab.txt").unlink()
    foreign = read(path, ImportOptions(source_vocab=given, target_vocab=path / "trg_vocab.txt"))
    assert foreign.tokenizer("no ~")["input_ids"] == [4, 8, 3]


def test_a_checkpoint_with_more_than_weights_is_refused_and_the_way_round_works(tmp_path, monkeypatch):
    (tmp_path / "its_own.py").write_text("class Unknown: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "its_own", raising=False)
    unknown = importlib.import_module("its_own").Unknown()
    config = configuration()
    path = write(tmp_path / "model", config, weights(config), trainer=unknown)
    with pytest.raises(ConversionError, match="holds more than weights") as caught:
        read(path, ImportOptions())
    program = str(caught.value).split('python -c "')[1].split('"')[0]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], cwd=path, check=True, env=environment, timeout=250)
    (path / "best.ckpt").unlink()
    assert read(path / "weights.ckpt", ImportOptions()).tensors_read == len(weights(config)) - 2


# ---------------------------------------------------------------------- the real program
WORDS = ["ba", "ce", "di", "fo", "gu", "ha", "je", "ki", "lo", "mu"]
PROGRAM_CASES = {
    "post, words": ({}, {}, {"level": "word"}),
    "pre, gelu, characters": ({"layer_norm": "pre", "activation": "gelu"}, {"tied_softmax": True}, {"level": "char"}),
    "pre, BPE, all shared": (
        {"layer_norm": "pre"},
        {"tied_softmax": True, "tied_embeddings": True},
        {"level": "bpe", "tokenizer_type": "subword-nmt", "tokenizer_cfg": {"codes": "bpe.codes"}},
    ),
    "post, swish, SentencePiece, all shared": (
        {"activation": "swish"},
        {"tied_softmax": True, "tied_embeddings": True},
        {"level": "bpe", "tokenizer_type": "sentencepiece", "tokenizer_cfg": {"model_file": "spm.model"}},
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("case", PROGRAM_CASES)
def test_equals_the_real_program(case, tmp_path):
    needs = [
        "torch", "numpy", "pyyaml", "importlib_metadata", "subword-nmt", "sacremoses", "sacrebleu", "packaging",
        "matplotlib", "tensorboard", "tqdm", "sentencepiece==0.2.0",  # 0.2.1 and later cannot be told a vocabulary
    ]  # fmt: skip
    needs[0] = f"torch=={torch.__version__.split('+')[0]}"
    python = environment("joeynmt", needs, ["joeynmt==2.3.0"])
    sides, model, text = PROGRAM_CASES[case]
    chooser = random.Random(case)
    data = {name: [chooser.choices(WORDS, k=chooser.randint(1, 8)) for _ in range(n)] for name, n in
            (("train", 400), ("dev", 20), ("sources", 50))}  # fmt: skip
    for name in ("train", "dev"):
        for end, change in (("src", list), ("trg", lambda line: [word.upper() for word in line[::-1]])):
            lines = "".join(" ".join(change(line)) + "\n" for line in data[name])
            (tmp_path / f"{name}.{end}").write_text(lines, encoding="utf-8")
    (tmp_path / "sources.txt").write_text("".join(" ".join(line) + "\n" for line in data["sources"]), encoding="utf-8")
    sizes = {"num_heads": 4, "hidden_size": 32, "ff_size": 48, "embeddings": {"embedding_dim": 32, "scale": True}}
    shared = {"voc_file": "both.vocab"} if text["level"] == "bpe" else {}
    config = {
        "name": "toy", "model_dir": "model", "use_cuda": False, "random_seed": 5,
        "data": {"train": "train", "dev": "dev", "dataset_type": "plain",
                 **{name: {"lang": name, **text, **shared} for name in ("src", "trg")}},
        "testing": {"beam_size": 4, "beam_alpha": 0.6, "max_output_length": 30},
        "training": {"optimizer": "adam", "scheduling": "noam", "learning_rate_factor": 1.0,
                     "learning_rate_warmup": 60, "batch_size": 20, "epochs": 100, "updates": 160,
                     "validation_freq": 80, "logging_freq": 80, "label_smoothing": 0.1},
        "model": {"encoder": side(num_layers=2, **sizes, **sides), "decoder": side(num_layers=1, **sizes, **sides),
                  **model},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    run_program(python, "joeynmt_program.py", tmp_path)

    import_model("joeynmt", tmp_path / "model", tmp_path / "out", count=8)
    ours = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    answers = json.loads((tmp_path / "answers.json").read_text(encoding="utf-8"))
    expected = list(np.load(tmp_path / "logits.npz").values())
    difference = largest_difference(ours, answers["sources"], answers["targets"], expected)
    texts = (tmp_path / "sources.txt").read_text(encoding="utf-8").splitlines()
    assert tokenizer(texts)["input_ids"] == answers["sources"]
    inputs, mask = padded(answers["sources"])
    equal = {}
    for name, beams in (("greedy", 1), ("beam", 4)):
        rows = ours.generate(inputs, attention_mask=mask, num_beams=beams)[:, 1:].tolist()
        rows = [row[: row.index(3) + 1] if 3 in row else row for row in rows]
        equal[name] = sum(a == b for a, b in zip(rows, answers[name], strict=True))
    read_back = [tokenizer.decode(row, skip_special_tokens=True).strip() for row in answers["greedy"]]
    same_text = sum(a == b.strip() for a, b in zip(read_back, answers["greedy_texts"], strict=True))
    print(
        f"\n{case}: logits {difference:.1e}, greedy {equal['greedy']}, beam 4 {equal['beam']}, text {same_text} of 50"
    )
    assert difference < 1e-4
    assert equal["greedy"] == 50
    assert equal["beam"] >= 40
    assert same_text == 50


WRONG_VALUES = {
    "model.encoder.num_layers": "six", "model.decoder.num_heads": 0, "model.decoder.hidden_size": None,
    "model.encoder.dropout": [0.1], "model.encoder": 5, "model.decoder.embeddings": [1], "testing": [1],
    "testing.beam_size": 2.5, "testing.alpha": "much", "training.label_smoothing": {}, "data.special_symbols": [1],
    "data.special_symbols.lang_tags": 3, "data.src.voc_file": 7,
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_a_value_of_another_kind_is_refused_by_name(tmp_path, name):
    config = configuration()
    section = config
    *sections, last = name.split(".")
    for one in sections:
        section = section.setdefault(one, {})
    path = write(tmp_path / "model", configuration(), weights(configuration()))
    section[last] = WRONG_VALUES[name]
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConversionError, match=f"config.yaml.*`{last}` is .* and should be"):
        read(path, ImportOptions())


@pytest.mark.parametrize("text", ["a: 2020-99-99", "[" * 5000, "a: " + "9" * 5000], ids=["date", "depth", "digits"])
def test_settings_that_yaml_itself_stumbles_over_are_one_plain_error(tmp_path, text):
    path = write(tmp_path / "model", configuration(), weights(configuration()))
    (path / "config.yaml").write_text(text)
    with pytest.raises(ConversionError, match=r"config.yaml cannot be read as YAML"):
        read(path, ImportOptions())


def test_an_empty_vocabulary_is_refused_and_a_byte_order_mark_is_no_piece(tmp_path):
    path = write(tmp_path / "model", configuration(), weights(configuration()))
    file = path / "src_vocab.txt"
    content = file.read_bytes()
    pieces = read(path, ImportOptions()).tokenizer.get_src_vocab()
    file.write_bytes(b"\xef\xbb\xbf" + content)
    assert read(path, ImportOptions()).tokenizer.get_src_vocab() == pieces
    file.write_bytes(content[: content.rindex(b"\n", 0, -1) + 1])
    assert any("1 rows of the source matrix have no piece" in choice for choice in read(path, ImportOptions()).choices)
    file.write_bytes(b"")
    with pytest.raises(ConversionError, match=r"src_vocab.txt is empty"):
        read(path, ImportOptions())


def test_moses_without_a_language_is_asked_about(tmp_path):
    config = configuration()
    for name in ("src", "trg"):
        config["data"][name].pop("lang", None)
    path = write(tmp_path / "model", config, weights(config))
    with pytest.raises(ConversionError, match="`source_language` and `target_language`"):
        read(path, ImportOptions(moses=True))
