"""Imports and exports as a whole: options, folders, the proof, the report and the two commands."""

import json
import shutil
from dataclasses import fields

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, MarianConfig, MarianMTModel

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer
from hf_vaswani.cli import export_model as export_command
from hf_vaswani.cli import import_model as import_command
from hf_vaswani.cli.main import build_parser, main
from hf_vaswani.data.corpus import bundled_pairs
from hf_vaswani.interop import exporting, importing, marian, marian_export, proof
from hf_vaswani.interop.exporting import export_model
from hf_vaswani.interop.foreign import (
    UNUSED_ROW_BIAS,
    ConversionError,
    ImportOptions,
    Program,
    TensorReader,
    check_vocabulary,
    load_torch_file,
)
from hf_vaswani.interop.importing import import_model
from hf_vaswani.interop.reference import PlainTransformer, plain_beam_search


def peaked(model):
    """Weights large enough that searches have something to choose between."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def marian_folder(tmp_path_factory):
    """A MarianMT folder without a tokenizer: 2 + 3 layers, width 12, 43 pieces."""
    config = MarianConfig(
        vocab_size=43, decoder_vocab_size=43, d_model=12, encoder_layers=2, decoder_layers=3,
        encoder_attention_heads=3, decoder_attention_heads=3, encoder_ffn_dim=20, decoder_ffn_dim=20,
        activation_function="swish", scale_embedding=True, pad_token_id=42, eos_token_id=0, forced_eos_token_id=0,
        decoder_start_token_id=42, max_position_embeddings=128,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("marian") / "theirs"
    peaked(MarianMTModel(config)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory):
    """A model of ours with its tokenizer: 2 + 1 layers, width 16, 400 pieces."""
    pairs = bundled_pairs("test")[:400]
    tokenizer = VaswaniTokenizer.train([text for pair in pairs for text in pair], vocab_size=400)
    config = VaswaniConfig(
        vocab_size=400, d_model=16, encoder_layers=2, decoder_layers=1, num_attention_heads=2, d_ff=24
    )
    folder = tmp_path_factory.mktemp("ours") / "model"
    peaked(VaswaniForConditionalGeneration(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# ---------------------------------------------------------------------- import
def test_an_import_is_proved_reported_and_loads(marian_folder, tmp_path):
    report = import_model("marian", marian_folder, tmp_path / "out", count=9)
    (parity,) = report.parities
    assert "MarianMTModel" in parity.against
    assert (parity.sentences, parity.source) == (9, "random ids")
    assert parity.logit_difference < 1e-5
    assert parity.greedy_equal == parity.greedy_compared == 9
    assert parity.beam_equal == 9
    assert parity.score_difference == 0.0
    saved = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert saved["parities"][0]["logit_difference"] == parity.logit_difference
    assert saved["options"]["d_model"] == 12
    theirs = MarianMTModel.from_pretrained(marian_folder).num_parameters()
    assert report.parameters == theirs - 2 * 128 * 12 + 43  # no tables of positions; the output bias is a parameter
    model = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert model.config.sinusoid_layout == "halves"
    assert not list(tmp_path.glob(".*"))


def test_an_option_that_the_kind_does_not_use_is_refused_by_name(marian_folder, tmp_path):
    with pytest.raises(ConversionError, match=r"`mapping` means nothing to an import of marian.*source_vocab"):
        import_model("marian", marian_folder, tmp_path / "out", options=ImportOptions(mapping=tmp_path / "m.yaml"))
    assert not (tmp_path / "out").exists()


def test_every_reader_lists_options_that_exist():
    known = {one.name for one in fields(ImportOptions)}
    for kind in importing.KINDS:
        module = importing.reader(kind)
        assert known >= module.OPTIONS, kind
        assert callable(module.read)


def test_a_folder_that_is_there_is_kept_unless_asked_and_of_a_conversion(marian_folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "letter.txt").write_text("mine")
    for overwrite, reason in ((False, "not empty"), (True, "not made by a conversion")):
        with pytest.raises(ConversionError, match=reason):
            import_model("marian", marian_folder, out, overwrite=overwrite)
    assert [path.name for path in out.iterdir()] == ["letter.txt"]
    (out / "letter.txt").unlink()
    import_model("marian", marian_folder, out, count=2)
    first = (out / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(ConversionError, match="--overwrite"):
        import_model("marian", marian_folder, out, count=2)
    assert (out / "model.safetensors").stat().st_mtime_ns == first
    import_model("marian", marian_folder, out, count=2, overwrite=True)
    assert (out / "model.safetensors").stat().st_mtime_ns > first
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConversionError, match="is a file"):
        import_model("marian", marian_folder, tmp_path / "file")


def test_a_failed_check_leaves_nothing_behind(marian_folder, tmp_path, monkeypatch):
    read = marian.read

    def wrong(path, options):
        foreign = read(path, options)
        foreign.config["layer_norm_eps"] = 0.3  # a hyper-parameter read wrongly
        return foreign

    monkeypatch.setattr(marian, "read", wrong)
    with pytest.raises(ConversionError, match=r"does not do what .*MarianMTModel does: logits differ by up to"):
        import_model("marian", marian_folder, tmp_path / "out", count=3)
    assert list(tmp_path.iterdir()) == []


def test_without_the_program_a_plain_forward_pass_is_the_judge(marian_folder, tmp_path, monkeypatch):
    read = marian.read

    def alone(path, options):
        foreign = read(path, options)
        foreign.program = None
        return foreign

    monkeypatch.setattr(marian, "read", alone)
    parity = import_model("marian", marian_folder, tmp_path / "out", count=5).parities[0]
    assert parity.against == "a plain float64 forward pass"
    assert parity.logit_difference < 1e-5
    assert (parity.greedy_equal, parity.beam_equal) == (5, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.tensors.pop("lm_head.bias"), "missing lm_head.bias"),
        (lambda f: f.tensors.update(extra=torch.zeros(2)), "left over extra"),
        (lambda f: f.tensors.update({"lm_head.bias": torch.zeros(44)}), r"lm_head.bias is \(44,\).*\(43,\)"),
        (lambda f: f.tensors.update({"lm_head.bias": torch.full((43,), torch.nan)}), "lm_head.bias.*not finite"),
        (lambda f: f.config.update(d_model=13), "divisible by `num_attention_heads`"),
        (lambda f: f.config.update(dropuot=0.3), "dropuot.*dropout"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(marian_folder, tmp_path, monkeypatch, change, message):
    read = marian.read

    def changed(path, options):
        foreign = read(path, options)
        change(foreign)
        return foreign

    monkeypatch.setattr(marian, "read", changed)
    with pytest.raises(ConversionError, match=message):
        import_model("marian", marian_folder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_unknown_kinds_and_paths_are_refused(tmp_path):
    with pytest.raises(ConversionError, match=r"no import of 'nematus'.*joeynmt"):
        import_model("nematus", tmp_path, tmp_path / "out")
    with pytest.raises(ConversionError, match="does not exist"):
        import_model("fairseq", tmp_path / "nothing.pt", tmp_path / "out")
    with pytest.raises(ConversionError, match="At least one sentence"):
        import_model("fairseq", tmp_path, tmp_path / "out", count=0)
    with pytest.raises(ConversionError, match=r"no export to 'tflite'.*onnx"):
        export_model("tflite", tmp_path, tmp_path / "out")


# ---------------------------------------------------------------------- shared checks of readers
def test_tensors_are_taken_once_and_none_may_be_left_over():
    reader = TensorReader({"a": torch.ones(2, 3), "b": torch.ones(2, 3), "c": torch.zeros(1)}, "file.pt")
    assert reader.take_equal("a", "b", "missing").shape == (2, 3)
    with pytest.raises(ConversionError, match=r"file.pt holds 1 tensors .*: c"):
        reader.finish()
    with pytest.raises(ConversionError, match=r"tensor 'a' is \(2, 3\).*\(2, any, 4\)"):
        reader.take("a", 2, None, 4)
    with pytest.raises(ConversionError, match=r"no tensor 'd'; it has a, b, c"):
        reader.take("d")
    reader.ignore("c", "a step counter")
    reader.finish()
    assert reader.ignored == {"c": "a step counter"}
    with pytest.raises(ConversionError, match="'a' and 'c' should be one matrix"):
        reader.take_equal("a", "c")


class Payload:
    """A class of a pickle's own."""


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_with_classes_of_its_own_is_refused_with_the_way_round(tmp_path, legacy):
    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(2), "x": Payload()}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ConversionError, match=r"more than weights .*Payload.* Save it again\."):
        load_torch_file(path, "Save it again.")
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=not legacy)
    assert load_torch_file(path, "")["w"].tolist() == [1.0, 1.0]
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ConversionError, match=r"damaged|not a torch checkpoint"):
        load_torch_file(path, "")
    path.write_text("some text\n")
    with pytest.raises(ConversionError, match="not a torch checkpoint"):
        load_torch_file(path, "")


def test_a_vocabulary_is_compared_with_its_matrix_first():
    assert check_vocabulary(37, 40, "dict.txt") == [37, 38, 39]
    with pytest.raises(ConversionError, match=r"dict.txt.*37 pieces.*36 rows.*1 pieces have no row"):
        check_vocabulary(37, 36, "dict.txt")


# ---------------------------------------------------------------------- the plain forward pass
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_position": "pre", "activation_function": "gelu_new"},
        {"activation_function": "relu2"},
        {"activation_function": "gelu_fast", "final_norm": True},
        {"tie_word_embeddings": False, "source_vocab_size": 31, "activation_function": "silu"},
        {"position_encoding": "learned", "activation_function": "gelu", "scale_embedding": False},
        {
            "zero_start_embedding": True, "sinusoid_layout": "halves", "sinusoid_exponent": "2i/(d-2)",
            "position_offset": 2, "attention_bias": True, "output_bias": True, "final_norm": True,
        },
    ],
)  # fmt: skip
def test_the_plain_forward_pass_and_search_equal_the_model(make_model, changes):
    model = peaked(make_model(**changes))
    plain = PlainTransformer(
        model.config, {n: t for n, t in model.state_dict().items() if n not in model.all_tied_weights_keys}
    )
    sources, targets = [[5, 6, 7, 1], [8, 9, 10, 11, 12, 13, 1]], [[2, 4, 5, 9], [2, 7, 7, 3]]
    for own, source, target in zip(proof.own_logits(model, sources, targets), sources, targets, strict=True):
        np.testing.assert_allclose(own, plain.logits(source, target), atol=1e-5)
    for beams in (1, 4):
        found = [
            plain_beam_search(plain, s, beams=beams, limit=proof.LIMIT, end={1}, alpha=0.6, kind="gnmt")[0]
            for s in sources
        ]
        assert found == proof.own_search(model, sources, beams)


def test_faults_are_differing_logits_and_outputs_but_not_ties(make_model):
    model = peaked(make_model())
    plain = proof.plain_program(model, model.state_dict())
    sources = [[5, 6, 7, 1], [8, 9, 1]]
    assert proof.faults(proof.compare(model, plain, sources, "given")) == []
    off = Program("x", lambda s, t: [row + 0.01 * np.arange(37) for row in plain.logits(s, t)], plain.search)
    assert "logits differ" in proof.faults(proof.compare(model, off, sources, "given"))[0]
    other = Program("x", plain.logits, lambda s, b: [[9, 9, 1] for _ in s])
    assert proof.faults(proof.compare(model, other, sources, "given")) == ["2 of 2 greedy outputs differ"]
    parity = proof.compare(model, other, sources, "given", tolerance=1e9)  # then every choice is a tie
    assert (parity.ties, parity.greedy_equal, proof.faults(parity)) == (2, 2, [])


# ---------------------------------------------------------------------- export
def test_ours_to_marian_and_back_has_bit_equal_weights(own_folder, tmp_path):
    report = export_model("marian", own_folder, tmp_path / "theirs", count=5)
    assert "MarianMTModel" in report.parities[0].against
    assert any("length penalty" in loss for loss in report.losses)
    import_model("marian", tmp_path / "theirs", tmp_path / "ours", count=5)
    before = VaswaniForConditionalGeneration.from_pretrained(own_folder)
    after = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "ours")
    assert before.state_dict().keys() == after.state_dict().keys()
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[name]), name
    for name in ("norm_position", "sinusoid_layout", "attention_bias", "output_bias", "layer_norm_eps"):
        assert getattr(before.config, name) == getattr(after.config, name), name
    assert after.generation_config.length_penalty_type == "gnmt"
    text = "Ein Mann schläft."
    own, back = AutoTokenizer.from_pretrained(own_folder), AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert own(text)["input_ids"] == back(text)["input_ids"]


def test_an_export_that_does_not_do_the_same_leaves_nothing(own_folder, tmp_path, monkeypatch):
    def wrong(out, facts):
        made = marian.program(out)
        return Program(made.name, lambda s, t: [row + np.arange(400) for row in made.logits(s, t)], made.search)

    monkeypatch.setitem(exporting.KINDS, "marian", exporting.Exporter("marian_export", wrong))
    with pytest.raises(ConversionError, match="exported model does not do what this one does: logits"):
        export_model("marian", own_folder, tmp_path / "out", count=3)
    assert list(tmp_path.iterdir()) == []


def test_exports_refuse_what_is_not_ours_and_formats_that_do_not_exist(own_folder, marian_folder, tmp_path):
    with pytest.raises(ConversionError, match="'int8' means nothing to an export to marian"):
        export_model("marian", own_folder, tmp_path / "out", quantization="int8")
    with pytest.raises(ConversionError, match="cannot be loaded"):
        export_model("marian", marian_folder, tmp_path / "out")
    with pytest.raises(ConversionError, match="cannot be loaded"):
        export_model("marian", tmp_path / "nowhere", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- commands
def test_the_commands_know_the_kinds_of_the_functions():
    assert set(import_command.KINDS) == set(importing.KINDS)
    assert set(export_command.KINDS) == set(exporting.KINDS)
    assert set(export_command.FORMATS) == {name for road in exporting.KINDS.values() for name in road.formats}


def test_the_import_command_has_every_option_and_prints_the_report(marian_folder, tmp_path, capsys):
    arguments = vars(build_parser().parse_args(["import", "marian", "a", "b"]))
    assert {one.name for one in fields(ImportOptions)} <= set(arguments)
    assert main(["import", "marian", str(marian_folder), str(tmp_path / "out"), "--count", "3"]) == 0
    out, err = capsys.readouterr()
    assert "equal greedy outputs: 3 of 3" in out
    assert "comparing both sides" in err
    assert main(["import", "marian", str(marian_folder), str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "is there already" in err


def test_a_folder_without_a_tokenizer_says_so_when_text_is_to_be_translated(marian_folder, tmp_path, capsys):
    import_model("marian", marian_folder, tmp_path / "out", count=2)
    assert main(["translate", str(tmp_path / "out")]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_the_export_command_checks_with_the_users_own_lines(own_folder, tmp_path, capsys):
    (tmp_path / "lines.txt").write_text("Guten Morgen.\n\nWo ist der Bahnhof?\n")
    out = tmp_path / "out"
    arguments = ["export", "marian", str(own_folder), str(out), "--sentences", str(tmp_path / "lines.txt")]
    assert main(arguments) == 0
    assert f"2 sources ({tmp_path / 'lines.txt'})" in capsys.readouterr().out
    assert json.loads((out / "conversion.json").read_text())["direction"] == "export"
    (tmp_path / "lines.txt").write_text("\n")
    assert main([*arguments, "--overwrite"]) == 2
    assert "no lines to check" in capsys.readouterr().err
    assert (out / "conversion.json").exists()
    assert main([*arguments[:-1], str(tmp_path / "none.txt"), "--overwrite"]) == 2
    assert "none.txt" in capsys.readouterr().err


def test_rows_without_a_piece_have_no_probability_and_a_harmless_loss(make_model, batch):
    model = peaked(make_model(output_bias=True, dropout=0.0)).train()
    before = model(**batch).loss.item()
    with torch.no_grad():
        model.lm_head.bias[36] = UNUSED_ROW_BIAS
    labels = batch["labels"].masked_fill(batch["labels"] == 36, 5)
    outputs = model(**{**batch, "labels": labels})
    assert outputs.logits.softmax(-1)[..., 36].max() < 1e-30
    assert abs(outputs.loss.item() - before) < 10


def test_what_is_converted_is_never_replaced_by_its_own_conversion(own_folder, marian_folder, tmp_path):
    kept = tmp_path / "kept"
    shutil.copytree(marian_folder, kept / "inner")
    for folder in (kept, kept / "inner"):
        (folder / "conversion.json").write_text("{}")
        with pytest.raises(ConversionError, match="holds what is to be converted"):
            import_model("marian", kept / "inner", folder, overwrite=True)
    shutil.copytree(own_folder, tmp_path / "ours")
    (tmp_path / "ours" / "conversion.json").write_text("{}")
    with pytest.raises(ConversionError, match="holds what is to be converted"):
        export_model("marian", tmp_path / "ours", tmp_path / "ours", overwrite=True)
    assert (kept / "inner" / "model.safetensors").is_file()
    assert (tmp_path / "ours" / "model.safetensors").is_file()


def test_a_folder_below_a_file_is_refused_before_any_work(marian_folder, tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(ConversionError, match=r"cannot be made: .*file is not a folder"):
        import_model("marian", marian_folder, tmp_path / "file" / "out")


def test_a_program_that_gives_no_numbers_fails_the_check(make_model):
    model = make_model()

    def nothing(sources, targets):
        return [np.full((len(target), model.config.vocab_size), np.nan) for target in targets]

    parity = proof.compare(model, Program("broken", nothing), [[5, 6, 1]], "given ids")
    assert parity.logit_difference == float("inf")
    assert proof.faults(parity)


def test_lines_of_unknown_pieces_only_prove_nothing(make_model):
    class Strange:
        unk_token_id = 4

        def __call__(self, line):
            return {"input_ids": [4] * len(line)}

    config = make_model().config
    assert config.unk_token_id is None
    sources, origin = proof.proof_sources(Strange(), config, None, 5)
    assert origin == "random ids"
    assert len(sources) == 5
    with pytest.raises(ConversionError, match="No line of given lines has a piece"):
        proof.proof_sources(_empty_tokenizer(), config, ["x"], 5)


def _empty_tokenizer():
    class Empty:
        unk_token_id = None

        def __call__(self, line):
            return {"input_ids": []}

    return Empty()


@pytest.mark.parametrize(
    "settings",
    [{"do_sample": True}, {"num_return_sequences": 2}, {"forced_prefix_ids": [7]}],
    ids=lambda settings: next(iter(settings)),
)
def test_search_settings_of_the_model_do_not_disturb_the_check(own_folder, tmp_path, settings):
    shutil.copytree(own_folder, tmp_path / "ours")
    path = tmp_path / "ours" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    parity = export_model("marian", tmp_path / "ours", tmp_path / "out", count=4).parities[0]
    assert parity.greedy_equal == parity.greedy_compared == 4


@pytest.mark.parametrize("damage", ["config", "weights", "tokenizer"])
def test_a_damaged_model_of_ours_is_one_plain_error(own_folder, tmp_path, damage):
    folder = shutil.copytree(own_folder, tmp_path / "ours")
    name, text = {
        "config": ("config.json", '{"bos_token": "<s>"}'),  # as CTranslate2 writes it
        "weights": ("model.safetensors", "cut"),
        "tokenizer": ("tokenizer.json", '{"version": "1.0"}'),
    }[damage]
    (folder / name).write_text(text)
    with pytest.raises(ConversionError, match="cannot be loaded"):
        export_model("onnx", folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [SafetensorError("No space left on device"), OSError(28, "No space left on device")])
def test_a_full_disk_is_one_plain_sentence_and_nothing_is_kept(own_folder, tmp_path, monkeypatch, capsys, error):
    def full(model, tokenizer, out):
        (out / "half").write_text("written")
        raise error

    monkeypatch.setattr(marian_export, "export", full)
    assert main(["export", "marian", str(own_folder), str(tmp_path / "out")]) == 2
    assert "No space left on device. Nothing was kept." in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
