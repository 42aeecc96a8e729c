"""Import of OpenNMT-py checkpoints: held against its equations, its refusals, and (slow) the real programs."""

import importlib
import json
import os
import random
import subprocess
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch
import yaml
from foreign_programs import environment, run_program
from imported_models import loaded
from joeynmt_toy import largest_difference, padded
from opennmt_toy import TARGET_WORDS, WORDS, D, logits, options, vocabularies, weights, write
from safetensors.torch import save_file
from transformers import AutoTokenizer

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.interop.foreign import ConversionError, ImportOptions
from hf_vaswani.interop.importing import import_model
from hf_vaswani.interop.opennmt import read


def toy(folder, version=3, shared=False, name="model_step_9.pt", change=None, more=None, **changes):
    """A checkpoint in a folder; its path, and what went in."""
    opt = options(version, **changes)
    source, target = vocabularies(version, shared)
    state, output = weights(opt, source, target, version)
    if change is not None:
        change(state, output)
    path = write(folder / name, opt, state, output, source, target, version, **(more or {}))
    return path, opt, state, output


CASES = {
    "version 3, no biases": (3, False, {}),
    "version 3, halves, gelu, biases of attention": (
        3,
        False,
        {"position_encoding_type": "SinusoidalConcat", "pos_ffn_activation_fn": "gelu", "add_qkvbias": True},
    ),
    "version 3, all shared, larger epsilon": (
        3,
        True,
        {"share_embeddings": True, "share_decoder_embeddings": True, "add_ffnbias": True, "norm_eps": 0.1},
    ),
    "version 2, split": (2, False, {"pos_ffn_activation_fn": "gelu"}),
    "version 2, embeddings shared": (2, True, {"share_embeddings": True}),
    "version 1, output shared": (1, False, {"share_decoder_embeddings": True, "model_task": None}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_opennmt_pys_equations(case, tmp_path):
    version, shared, changes = CASES[case]
    path, opt, state, output = toy(tmp_path, version, shared, **changes)
    foreign = read(path, ImportOptions())
    ours = loaded(foreign)
    sources, targets = [[4, 5, 2, 6], [2], [5, 4]], [[2, 5], [2, 7, 8, 9, 10, 4], [2, 6, 6]]
    expected = [logits(opt, state, output, s, t) for s, t in zip(sources, targets, strict=True)]
    assert largest_difference(ours, sources, targets, expected) < 1e-4
    assert foreign.config["attention_bias"] == (version != 3 or bool(changes.get("add_qkvbias")))
    assert any("one of zeros" in choice for choice in foreign.choices) == (version == 3 and not opt["add_ffnbias"])


@pytest.mark.parametrize("version", [2, 3])
def test_folder_translates_text_without_an_end_token_on_the_source(version, tmp_path):
    path, *_ = toy(tmp_path, version)
    report = import_model("opennmt-py", path, tmp_path / "out", count=4)
    model = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    first = 4 if version == 3 else 2  # versions 1 and 2 have no start and end among source words
    assert tokenizer("no & 12:30")["input_ids"] == [first, first + 3, first + 1]
    assert tokenizer(text_target="null 4")["input_ids"] == [7, 10, 3]
    assert model.config.decoder_start_token_id == 2
    settings = model.generation_config
    if version == 3:
        assert (settings.num_beams, settings.length_penalty, settings.length_penalty_type) == (5, 1.0, "power")
        assert settings.max_length_offset == 50
    else:
        assert (settings.num_beams, settings.length_penalty, settings.max_new_tokens) == (5, 0.0, 100)
    assert (model.config.dropout, model.config.attention_dropout, model.config.label_smoothing) == (0.2, 0.1, 0.1)
    rows = model.generate(**tokenizer(["no &", "~"], return_tensors="pt", padding=True), max_new_tokens=5)
    assert all(row[0] == 2 for row in rows.tolist())
    assert any("names none" in choice for choice in report.choices)


@pytest.mark.parametrize("name", ["model_step_9.safetensors", "model_step_9.00.safetensors"])
def test_weights_beside_the_checkpoint_are_read(name, tmp_path):
    path, _, state, output = toy(tmp_path)
    whole = read(path, ImportOptions())
    # The file is mapped into memory, and must not change under its tensors.
    whole.tensors = {key: value.clone() for key, value in whole.tensors.items()}
    saved = torch.load(path, weights_only=False)
    torch.save({key: saved[key] for key in ("vocab", "opt", "optim")}, path)
    with pytest.raises(ConversionError, match=r"holds no weights, and model_step_9.safetensors is not beside it"):
        read(path, ImportOptions())
    save_file({**state, **{f"generator.{key}": value for key, value in output.items()}}, tmp_path / name)
    apart = read(path, ImportOptions())
    assert apart.config == whole.config
    assert all(torch.equal(apart.tensors[key], value) for key, value in whole.tensors.items())
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-40])
    with pytest.raises(ConversionError, match="is not a safetensors file, or is damaged"):
        read(path, ImportOptions())


def test_half_precision_becomes_single(tmp_path):
    def halve(state, output):
        for tensors in (state, output):
            tensors.update({name: value.half() for name, value in tensors.items()})

    path, *_ = toy(tmp_path, change=halve)
    assert {value.dtype for value in read(path, ImportOptions()).tensors.values()} == {torch.float32}


def test_norms_under_their_first_names_are_read(tmp_path):
    def rename(state, output):
        for name in [name for name in state if ".layer_norm" in name]:
            state[name.replace(".weight", ".a_2").replace(".bias", ".b_2")] = state.pop(name)

    named, renamed = (toy(tmp_path, 2, name=f"{i}.pt", change=change)[0] for i, change in enumerate((None, rename)))
    first, second = read(named, ImportOptions()), read(renamed, ImportOptions())
    assert all(torch.equal(second.tensors[name], value) for name, value in first.tensors.items())
    assert any("before 1.0" in choice for choice in second.choices)


def test_own_start_token_and_rows_without_a_piece(tmp_path):
    source, target = vocabularies()
    vocabulary = {"src": source, "tgt": target, "data_task": "seq2seq", "decoder_start_token": "</s>"}
    path, *_ = toy(tmp_path, more={"vocab": {**vocabulary, "tgt": target[:-2], "src": source[:-1]}})
    foreign = read(path, ImportOptions())
    assert (foreign.config["decoder_start_token_id"], foreign.config["bos_token_id"]) == (3, 2)
    assert foreign.generation["suppress_tokens"] == [9, 10]
    assert foreign.config["source_vocab_size"] == len(source)


def test_files_for_splitting_words_are_used_or_missed(tmp_path):
    pieces = ["<unk>", "<blank>", "<s>", "</s>", "lo@@", "w", "no"]
    vocabulary = {"src": pieces, "tgt": pieces, "data_task": "seq2seq", "decoder_start_token": "<s>"}
    opt = options(transforms=["bpe", "prefix", "filtertoolong"], src_subword_model="/elsewhere/bpe.codes")
    state, output = weights(opt, pieces, pieces)
    path = write(tmp_path / "m.pt", opt, state, output, pieces, pieces, vocab=vocabulary)
    foreign = read(path, ImportOptions())
    assert foreign.tokenizer("low no")["input_ids"] == [0, 6]
    assert "trained behind `bpe`" in foreign.losses[0]
    assert "prefix" in foreign.losses[1]
    (tmp_path / "bpe.codes").write_text("#version: 0.2\nl o\nn o</w>\n", encoding="utf-8")
    languages = {"source_language": "en", "target_language": "en"}
    given = ImportOptions(codes=tmp_path / "bpe.codes", lowercase=True, moses=True, **languages)
    for options_given in (ImportOptions(), given):
        foreign = read(path, options_given)
        assert foreign.tokenizer("low no")["input_ids"] == [4, 5, 6]
        assert not any("trained behind" in loss for loss in foreign.losses)
    assert foreign.tokenizer("LOW NO")["input_ids"] == [4, 5, 6]


REFUSALS = [
    ({"encoder_type": "brnn"}, "`encoder_type` is 'brnn'"),
    ({"encoder_type": None}, "`encoder_type` is 'rnn'"),
    ({"decoder_type": "transformer_lm"}, "`decoder_type` is 'transformer_lm'"),
    ({"decoder_type": "cnn"}, "`decoder_type` is 'cnn'"),
    ({"model_task": "lm"}, "`model_task` is 'lm', a language model without encoder"),
    ({"model_type": "audio"}, "`model_type` is 'audio'"),
    ({"max_relative_positions": 20}, "`max_relative_positions` is 20"),
    ({"max_relative_positions": -1, "position_encoding": False}, "`position_encoding` is False, no positions"),
    ({"max_relative_positions": -1}, "`max_relative_positions` is -1, rotary positions"),
    ({"max_relative_positions": -2}, r"`max_relative_positions` is -2, linear biases \(ALiBi\)"),
    ({"relative_positions_buckets": 32}, "`relative_positions_buckets` is 32"),
    ({"self_attn_type": "average"}, "`self_attn_type` is 'average', averaging"),
    ({"layer_norm": "rms"}, "`layer_norm` is 'rms'"),
    ({"pos_ffn_activation_fn": "silu"}, "`pos_ffn_activation_fn` is 'silu', a gated feed-forward"),
    ({"pos_ffn_activation_fn": "gated-gelu"}, "`pos_ffn_activation_fn` is 'gated-gelu', a gated feed-forward"),
    ({"parallel_residual": True}, "`parallel_residual` is True"),
    ({"num_experts": 8}, "`num_experts` is 8"),
    ({"num_kv": 1}, "`num_kv` is 1; here each of the 2 heads"),
    ({"multiquery": True}, "`multiquery` is True"),
    ({"sliding_window": 128}, "`sliding_window` is 128"),
    ({"copy_attn": True}, "`copy_attn` is True"),
    ({"coverage_attn": True}, "`coverage_attn` is True"),
    ({"generator_function": "sparsemax"}, "`generator_function` is 'sparsemax'"),
    ({"n_src_feats": 2}, "`n_src_feats` is 2"),
    ({"lora_layers": ["linear_values"]}, r"`lora_layers` is \['linear_values'\]"),
    ({"quant_type": "awq_gemm"}, "`quant_type` is 'awq_gemm'"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_what_cannot_be_represented_is_refused_by_name(changes, message, tmp_path):
    kept = {name: value for name, value in changes.items() if value is not None}
    path, *_ = toy(tmp_path)
    saved = torch.load(path, weights_only=False)
    opt = vars(saved["opt"])
    opt.update(kept)
    for name in set(changes) - set(kept):
        del opt[name]
    torch.save(saved, path)
    with pytest.raises(ConversionError, match=message):
        import_model("opennmt-py", path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, g: s.pop("decoder.layer_norm.bias"), "has no tensor 'decoder.layer_norm.bias'"),
        (lambda s, g: s.update({"encoder.transformer.2.layer_norm.weight": torch.ones(D)}), "encoder.transformer.2"),
        (
            lambda s, g: s.update({"encoder.embeddings.make_embedding.emb_luts.1.weight": torch.ones(3, D)}),
            "emb_luts.1",
        ),
        (lambda s, g: g.pop("bias"), "has no tensor 'generator.bias'"),
        (lambda s, g: g.update({"weight": torch.ones(4, D)}), r"'generator.weight' is \(4, 8\)"),
        (lambda s, g: s["encoder.embeddings.make_embedding.pe.pe"].add_(1.0), "pe.pe' is not the sinusoid"),
    ],
)
def test_tensors_that_do_not_fit_are_an_error(change, message, tmp_path):
    path, *_ = toy(tmp_path, change=change)
    with pytest.raises(ConversionError, match=message):
        read(path, ImportOptions())


def bad_file(kind, folder):
    source, target = vocabularies()
    plain = {"src": source, "tgt": target, "data_task": "seq2seq", "decoder_start_token": "<s>"}
    more = {
        "repeated": {**plain, "tgt": [*target[:-1], "two"]},
        "too many": {**plain, "tgt": [*target, "five"]},
        "no end": {**plain, "tgt": [word for word in target if word != "</s>"]},
        "other pad": {**plain, "src": ["<blank>", "<unk>", *source[2:]]},
        "language model": {**plain, "data_task": "lm"},
        "features": {**plain, "src_feats": [["<unk>"]]},
        "strange": {"src": 5, "tgt": 5},
    }
    if kind in more:
        return toy(folder, more={"vocab": more[kind]})[0]
    if kind == "features of version 2":
        return toy(folder, 2, more={"features": ("part_of_speech",)})[0]
    path, *_ = toy(folder)
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:-900])
    elif kind == "text":
        path.write_text("not a checkpoint")
    elif kind == "other toolkit":
        torch.save({"model_state": {}, "optimizer_state": {}}, path)
    elif kind == "fairseq":
        torch.save({"model": {}, "args": Namespace(arch="transformer")}, path)
    return folder if kind == "folder" else path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut", "model_step_9.pt is not a torch checkpoint, or is damaged"),
        ("text", "model_step_9.pt is not a torch checkpoint, or is damaged"),
        ("other toolkit", "has no `opt`, so OpenNMT-py did not write it; it holds: model_state, optimizer_state"),
        ("fairseq", "has no `opt`, so OpenNMT-py did not write it; it holds: model, args"),
        ("folder", "is a folder. Give the .pt file of one step"),
        ("repeated", "the tgt vocabulary has 'two' more than once"),
        ("too many", "the vocabulary has 12 pieces, its matrix 11 rows"),
        ("no end", "the target vocabulary has no '</s>'"),
        ("other pad", "'<blank>' must have one id in both vocabularies"),
        ("language model", "`data_task` is 'lm'"),
        ("features", "`src_feats`: features of source words"),
        ("features of version 2", "the src side has word features"),
        ("strange", "no list of words was found for the side 'src'"),
    ],
)
def test_bad_input_is_one_plain_error(kind, message, tmp_path):
    with pytest.raises(ConversionError, match=message):
        read(bad_file(kind, tmp_path), ImportOptions())


def test_a_checkpoint_with_more_than_weights_is_refused_and_the_way_round_works(tmp_path, monkeypatch):
    (tmp_path / "its_own.py").write_text("class Unknown: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "its_own", raising=False)
    unknown = importlib.import_module("its_own").Unknown()
    path, *_ = toy(tmp_path, more={"trainer": unknown})
    with pytest.raises(ConversionError, match="holds more than weights") as caught:
        read(path, ImportOptions())
    program = str(caught.value).split('python -c "')[1].split('"')[0]
    # Where OpenNMT-py runs there is a module of that name, and torch loads whole files when told so.
    (tmp_path / "onmt.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, env=environment, timeout=250)
    assert read(tmp_path / "plain.pt", ImportOptions()).config["vocab_size"] == len(TARGET_WORDS) + 4
    assert len(WORDS) + 4 == read(tmp_path / "plain.pt", ImportOptions()).config["source_vocab_size"]


# ---------------------------------------------------------------------- the real programs
_TOY_WORDS = ["ba", "ce", "di", "fo", "gu", "ha", "je", "ki", "lo", "mu"]
PROGRAM_CASES = {
    "3.5.1, split": ("3.5.1", {}),
    "3.5.1, all shared, halves, biases, gelu": (
        "3.5.1",
        {"share_vocab": True, "share_embeddings": True, "share_decoder_embeddings": True, "add_qkvbias": True,
         "position_encoding_type": "SinusoidalConcat", "add_ffnbias": True, "pos_ffn_activation_fn": "gelu"},
    ),
    "3.5.1, safetensors": ("3.5.1", {"save_format": "safetensors", "share_decoder_embeddings": False}),
    "1.2.0, output shared": ("1.2.0", {"share_decoder_embeddings": True}),
    "2.3.0, split": ("2.3.0", {}),
    "2.3.0, all shared": (
        "2.3.0", {"share_vocab": True, "share_embeddings": True, "share_decoder_embeddings": True}
    ),
}  # fmt: skip


def program_files(folder, version, changes):
    chooser = random.Random(7)
    for name, count in (("train", 400), ("dev", 20)):
        lines = [chooser.choices(_TOY_WORDS, k=chooser.randint(1, 8)) for _ in range(count)]
        (folder / f"{name}.src").write_text("".join(" ".join(line) + "\n" for line in lines))
        (folder / f"{name}.tgt").write_text("".join(" ".join(line[::-1]).upper() + "\n" for line in lines))
    lines = [chooser.choices(_TOY_WORDS, k=chooser.randint(1, 8)) for _ in range(50)]
    (folder / "sources.txt").write_text("".join(" ".join(line) + "\n" for line in lines))
    words, upper = _TOY_WORDS, [word.upper() for word in _TOY_WORDS]
    if changes.get("share_vocab"):
        words = upper = [*words, *upper]
    for name, column in (("src", words), ("tgt", upper)):
        (folder / f"{name}.vocab").write_text("".join(f"{word}\t{99 - i}\n" for i, word in enumerate(column)))
    config = {
        "save_data": "data", "src_vocab": "src.vocab", "tgt_vocab": "tgt.vocab", "save_model": "model", "seed": 3,
        "data": {"corpus_1": {"path_src": "train.src", "path_tgt": "train.tgt"},
                 "valid": {"path_src": "dev.src", "path_tgt": "dev.tgt"}},
        "train_steps": 200, "save_checkpoint_steps": 200, "valid_steps": 200, "report_every": 100, "world_size": 1,
        "encoder_type": "transformer", "decoder_type": "transformer", "position_encoding": True, "layers": 2,
        "heads": 4, "word_vec_size": 32, "transformer_ff": 48, "dropout": [0.1], "attention_dropout": [0.1],
        "optim": "adam", "learning_rate": 0.01, "batch_size": 20, "batch_type": "sents", "label_smoothing": 0.1,
        "normalization": "sents", "param_init": 0.0, "param_init_glorot": True, "num_workers": 0,
        "hidden_size" if version.startswith("3") else "rnn_size": 32, **changes,
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("case", PROGRAM_CASES)
def test_equals_the_real_program(case, tmp_path):
    version, changes = PROGRAM_CASES[case]
    needs = [f"torch=={torch.__version__.split('+')[0]}", "numpy", "configargparse", "pyyaml", "six", "sacrebleu",
             "tensorboard", "pyonmttok<2", "requests", "tqdm"]  # fmt: skip
    alone = [f"OpenNMT-py=={version}"]
    if version.startswith("3"):
        needs += ["rapidfuzz", "pyahocorasick", "safetensors"]
    else:
        needs += ["flask", "waitress", "future"]
        alone.append("torchtext==0.4.0" if version.startswith("1") else "torchtext==0.5.0")
    python = environment(f"opennmt-{version}", needs, alone)
    program_files(tmp_path, version, changes)
    run_program(python, "opennmt_program.py", tmp_path)

    answers = json.loads((tmp_path / "answers.json").read_text(encoding="utf-8"))
    import_model("opennmt-py", tmp_path / answers["checkpoint"], tmp_path / "out", count=8)
    ours = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    expected = list(np.load(tmp_path / "logits.npz").values())
    difference = largest_difference(ours, answers["sources"], answers["targets"], expected)
    texts = (tmp_path / "sources.txt").read_text(encoding="utf-8").splitlines()
    assert tokenizer(texts)["input_ids"] == answers["sources"]
    inputs, mask = padded(answers["sources"])
    equal = {}
    for name, beams in (("greedy", 1), ("beam", 4)):
        rows = ours.generate(inputs, attention_mask=mask, num_beams=beams, length_penalty=0.0, max_new_tokens=40)
        rows = [row[: row.index(3) + 1] if 3 in row else row for row in rows[:, 1:].tolist()]
        equal[name] = sum(a == b for a, b in zip(rows, answers[name], strict=True))
    read_back = [tokenizer.decode(row, skip_special_tokens=True) for row in answers["greedy"]]
    print(f"\n{case}: logits {difference:.1e}, greedy {equal['greedy']}, beam 4 {equal['beam']} of 50")
    assert difference < 1e-4
    assert equal["greedy"] == 50
    assert equal["beam"] >= 40
    assert read_back == answers["greedy_texts"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("heads", None), ("enc_layers", "six"), ("transformer_ff", 0), ("norm_eps", "small"), ("dropout", [[1]]),
        ("label_smoothing", []), ("transforms", "bpe"), ("src_subword_model", 5),
    ],
)  # fmt: skip
def test_an_option_of_another_kind_is_refused_by_name(tmp_path, name, value):
    path, opt, *_ = toy(tmp_path)
    saved = torch.load(path, weights_only=False)
    torch.save({**saved, "opt": Namespace(**{**opt, name: value})}, path)
    with pytest.raises(ConversionError, match=f"`{name}` is .* and should be"):
        read(path, ImportOptions())


@pytest.mark.parametrize("key", ["opt", "model", "generator", "vocab"])
@pytest.mark.parametrize(
    "value", [None, 5, "text", [1, 2], torch.zeros(2)], ids=["null", "5", "text", "list", "tensor"]
)
def test_a_part_of_another_kind_is_one_plain_error(tmp_path, key, value):
    path, *_ = toy(tmp_path)
    torch.save({**torch.load(path, weights_only=False), key: value}, path)
    with pytest.raises(ConversionError, match=f"`{key}` holds no .*so OpenNMT-py did not write it"):
        read(path, ImportOptions())


def test_a_mapping_where_a_word_belongs_and_words_that_are_equal_as_text(tmp_path):
    path, *_ = toy(tmp_path, model_task={"a": 1})
    with pytest.raises(ConversionError, match=r"`model_task` is {'a': 1}"):
        read(path, ImportOptions())
    source, target = vocabularies()
    path, *_ = toy(tmp_path, more={"vocab": {"src": source, "tgt": [*target[:-2], "5", 5]}})
    with pytest.raises(ConversionError, match="the tgt vocabulary has '5' more than once"):
        read(path, ImportOptions())


def test_moses_without_languages_is_asked_about(tmp_path):
    path, *_ = toy(tmp_path)
    with pytest.raises(ConversionError, match="`moses` needs `source_language` and `target_language`"):
        read(path, ImportOptions(moses=True, source_language="de"))
