"""Export to CTranslate2: the same logits and greedy outputs, honest words about the search, and checked formats."""

import copy
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sacrebleu
import torch
from transformers import AutoTokenizer

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer
from hf_vaswani.interop.ctranslate2_export import QUANTIZATIONS, export, search_options, vocabularies
from hf_vaswani.interop.foreign import ConversionError
from hf_vaswani.interop.reduced_formats import check_reduced
from hf_vaswani.interop.vocabulary import build_tokenizer

ctranslate2 = pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")

from hf_vaswani.interop.ctranslate2_file import Ct2Folder, read_model_file, translate_ids  # noqa: E402

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "checkpoints" / "tatoeba-de-en"
PAIRS = ROOT.parent / "shared" / "data" / "tatoeba_en_de" / "pairs.tsv.gz"
TEXTS = ["ein kleines Haus am See", "a small house by the lake", "Zwei Hunde laufen über die Wiese.", "ab" * 9]
SIZES = {"d_model": 24, "d_ff": 40, "encoder_layers": 2, "decoder_layers": 3, "num_attention_heads": 3}


@pytest.fixture(scope="module")
def byte_tokenizer():
    return VaswaniTokenizer.train(TEXTS * 9, 300, allow_fewer=True, show_progress=False)


@pytest.fixture(scope="module")
def word_tokenizer():
    """Two vocabularies of words, of 13 and 17 pieces."""
    special = ["<pad>", "</s>", "<s>", "<unk>"]
    source, target = ([*special, *(f"{side}{n}" for n in range(size))] for side, size in (("s", 9), ("t", 13)))
    return build_tokenizer(source, target, segmentation="words", pad="<pad>", eos="</s>", unk="<unk>", bos="<s>")


def make(tokenizer, **fields):
    config = VaswaniConfig(**{"vocab_size": len(tokenizer), **SIZES, **fields})
    torch.manual_seed(4)
    model = VaswaniForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "layer_norm.weight")):  # fresh ones are 0 and 1, and would hide a mix-up
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def sources_of(model, count=5):
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
    rows = [torch.randint(3, model.config.encoder_vocab_size, (n,), generator=generator).tolist() for n in lengths]
    return [[*row, 1] for row in rows]


@torch.no_grad()
def own_logits(model, source, target):
    return model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target])).logits[0].numpy()


@torch.no_grad()
def own_greedy(model, sources, limits):
    found = []
    for source, limit in zip(sources, limits, strict=True):
        row = model.generate(torch.tensor([source]), attention_mask=torch.ones(1, len(source)), num_beams=1,
                             max_new_tokens=limit)[0, 1:].tolist()  # fmt: skip
        found.append(row)
    return found


def assert_same(model, folder, tolerance=1e-4):
    sources = sources_of(model)
    targets = [[model.config.decoder_start_token_id, *source[:-1][::-1]] for source in sources]
    targets = [[min(one, model.config.vocab_size - 1) for one in target] for target in targets]
    found = folder.logits(sources, targets)  # one padded batch
    for source, target, logits in zip(sources, targets, found, strict=True):
        assert np.abs(logits - own_logits(model, source, target)).max() < tolerance
    limits = [len(source) + 5 for source in sources]
    assert [one.ids for one in folder.search(sources, 1, limits)] == own_greedy(model, sources, limits)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="paper"),
        pytest.param({"norm_position": "pre"}, id="pre-norm"),
        pytest.param({"norm_position": "pre", "final_norm": False}, id="pre-norm without final norms"),
        pytest.param({"final_norm": True, "layer_norm_eps": 1e-3}, id="post-norm with final norms, large epsilon"),
        pytest.param({"attention_bias": True, "output_bias": True}, id="biases"),
        pytest.param({"tie_word_embeddings": False}, id="untied"),
        pytest.param({"position_encoding": "learned", "max_position_embeddings": 20}, id="learned positions"),
        pytest.param({"sinusoid_layout": "halves", "position_offset": 2}, id="halves from 2"),
        pytest.param({"sinusoid_layout": "halves", "sinusoid_exponent": "2i/(d-2)", "position_offset": 1}, id="theirs"),
        pytest.param({"scale_embedding": False, "activation_function": "gelu"}, id="unscaled, gelu"),
        pytest.param({"activation_function": "silu", "zero_start_embedding": True}, id="silu, zero start"),
        pytest.param({"d_k": 5, "d_v": 8}, id="narrow keys"),
        pytest.param({"d_k": 8, "d_v": 3}, id="narrow values"),
        pytest.param({"d_k": 16, "d_v": 16}, id="wide heads"),
        pytest.param({"d_k": 4, "d_v": 6, "attention_bias": True}, id="narrow heads with biases"),
        pytest.param({"num_attention_heads": 1, "encoder_layers": 1}, id="one head"),
    ],
)  # fmt: skip
def test_every_option_of_the_model_gives_the_same_logits_and_greedy_outputs(byte_tokenizer, tmp_path, fields):
    model = make(byte_tokenizer, **fields)
    export(model, byte_tokenizer, tmp_path / "out", "float32")
    assert_same(model, Ct2Folder(tmp_path / "out"))


def test_two_vocabularies_stay_two_and_the_tokenizer_goes_along(word_tokenizer, tmp_path):
    model = make(word_tokenizer, vocab_size=17, source_vocab_size=13, unk_token_id=3)
    export(model, word_tokenizer, tmp_path / "out", "float32")
    folder = Ct2Folder(tmp_path / "out")
    assert folder.source[4:6] == ["s0", "s1"]
    assert folder.target[4:6] == ["t0", "t1"]
    assert_same(model, folder)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["unk_token"] == "<unk>"
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_source_gets_its_end_token_once_and_a_sentence_ends_by_itself(byte_tokenizer, tmp_path):
    # Biased so strongly to end that a wrong end token would run on to the limit.
    model = make(byte_tokenizer, output_bias=True)
    with torch.no_grad():
        model.lm_head.bias[1] = 50.0
    export(model, byte_tokenizer, tmp_path / "out", "float32")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (settings["decoder_start_token"], settings["eos_token"], settings["bos_token"]) == ("<s>", "</s>", "<s>")
    assert settings["add_source_eos"] is False  # the tokenizer's call has put it there
    pieces = byte_tokenizer.convert_ids_to_tokens(byte_tokenizer("Haus").input_ids)
    assert pieces.count("</s>") == 1
    found = ctranslate2.Translator(str(tmp_path / "out"), intra_threads=1).translate_batch([pieces], beam_size=1)
    # At least one token is CTranslate2's default, then it ends.
    assert len(found[0].hypotheses[0]) == 1


def test_rows_without_a_piece_are_named_and_barred(byte_tokenizer, tmp_path):
    pieces = len(byte_tokenizer)
    model = make(byte_tokenizer, vocab_size=pieces + 3, output_bias=True)
    with torch.no_grad():
        model.lm_head.bias[pieces + 1] = 90.0
    facts, losses = export(model, byte_tokenizer, tmp_path / "out", "float32")
    folder = Ct2Folder(tmp_path / "out")
    assert folder.target[pieces:] == [f"<unused_{n}>" for n in range(pieces, pieces + 3)]
    source = byte_tokenizer("Haus").input_ids
    assert translate_ids(tmp_path / "out", [source], 1, [4])[0] == [pieces + 1] * 4
    barred = [folder.ids[piece] for (piece,) in facts["translate_batch"]["suppress_sequences"]]
    assert barred == list(range(pieces, pieces + 3))
    assert pieces + 1 not in translate_ids(tmp_path / "out", [source], 1, [4], suppressed=barred)[0]
    assert any("suppress_sequences" in loss for loss in losses)


def test_a_marian_tokenizer_with_two_vocabularies_is_understood(byte_tokenizer):
    pieces = {"</s>": 0, "a": 1, "<unk>": 2, "<pad>": 3}
    marian = SimpleNamespace(separate_vocabs=True, encoder=pieces, target_encoder={**pieces, "b": 4})
    model = make(byte_tokenizer, vocab_size=5, source_vocab_size=4)
    assert vocabularies(model, marian) == (["</s>", "a", "<unk>", "<pad>"], ["</s>", "a", "<unk>", "<pad>", "b"])


def test_a_piece_without_a_row_is_refused(byte_tokenizer):
    model = make(byte_tokenizer, vocab_size=len(byte_tokenizer) - 1)
    with pytest.raises(ConversionError, match="1 pieces have no row"):
        vocabularies(model, byte_tokenizer)


def test_what_it_cannot_compute_is_refused_before_anything_is_written(byte_tokenizer, tmp_path):
    model = make(byte_tokenizer, activation_function="mish")
    with pytest.raises(ConversionError, match="'mish', which CTranslate2 does not compute"):
        export(model, byte_tokenizer, tmp_path / "out", "float32")
    with pytest.raises(ConversionError, match="no format 'int4'"):
        export(make(byte_tokenizer), byte_tokenizer, tmp_path / "out", "int4")
    with pytest.raises(ConversionError, match="no tokenizer"):
        export(make(byte_tokenizer), None, tmp_path / "out", "float32")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_every_format_leaves_the_model_alone_and_stays_near_it(byte_tokenizer, tmp_path, quantization):
    model = make(byte_tokenizer)
    before = copy.deepcopy(model.state_dict())
    export(model, byte_tokenizer, tmp_path / "out", quantization)
    # CTranslate2's quantizer scales in place what it is given.
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    stored = read_model_file(tmp_path / "out" / "model.bin").tensors
    kind = quantization.split("_")[0]
    assert str(stored["encoder/layer_0/ffn/linear_0/weight"].dtype) == f"torch.{kind}"
    assert_same_within(model, tmp_path / "out", {"float32": 1e-4, "float16": 0.02, "int16": 0.02}.get(kind, 0.1))


def assert_same_within(model, path, tolerance):
    # Computed in float32: on a processor without instructions for int8 the products of 8 bits may overflow, which says
    # nothing about what is stored.
    folder = Ct2Folder(path, compute_type="float32")
    (source, *_), start = sources_of(model), model.config.decoder_start_token_id
    (found,) = folder.logits([source], [[start, 5]])
    assert np.abs(found - own_logits(model, source, [start, 5])).max() < tolerance


def test_a_shared_matrix_is_stored_once(byte_tokenizer, tmp_path):
    sizes = []
    for tied in (True, False):
        export(make(byte_tokenizer, tie_word_embeddings=tied), byte_tokenizer, tmp_path / str(tied), "float32")
        sizes.append((tmp_path / str(tied) / "model.bin").stat().st_size)
    rows = len(byte_tokenizer)
    # Untied there are three matrices instead of one; the table of positions is one in both.
    assert sizes[1] - sizes[0] == pytest.approx(2 * rows * SIZES["d_model"] * 4, abs=200)


@pytest.mark.parametrize(("kind", "stopping"), [("gnmt", "never"), ("power", "never"), ("power", True)])
def test_beam_search_by_the_listed_settings_finds_what_the_model_finds(byte_tokenizer, tmp_path, kind, stopping):
    model = make(byte_tokenizer, output_bias=True)
    with torch.no_grad():
        model.lm_head.bias[1] = 2.0  # so that sentences end
    model.generation_config.length_penalty_type, model.generation_config.early_stopping = kind, stopping
    export(model, byte_tokenizer, tmp_path / "out", "float32")
    sources = sources_of(model, 12)
    limits = [len(source) + 9 for source in sources]
    found = [one.ids for one in Ct2Folder(tmp_path / "out").search(sources, 4, limits, **search_options(model))]
    wanted = []
    for source, limit in zip(sources, limits, strict=True):
        row = model.generate(torch.tensor([source]), attention_mask=torch.ones(1, len(source)), num_beams=4,
                             max_new_tokens=limit)[0, 1:].tolist()  # fmt: skip
        wanted.append(row)
    assert sum(a == b for a, b in zip(found, wanted, strict=True)) >= 11


def test_what_the_search_loses_is_said(byte_tokenizer, tmp_path):
    model = make(byte_tokenizer)
    facts, losses = export(model, byte_tokenizer, tmp_path / "out")
    text = " ".join(losses)
    assert "((5 + length) / 6)^0.6" in text
    assert "source length + 50" in text
    assert "1,024 tokens" in text
    assert facts["translate_batch"]["num_hypotheses"] == 4
    model.generation_config.length_penalty_type = "power"
    model.generation_config.forced_prefix_ids = [7]
    facts, losses = export(model, byte_tokenizer, tmp_path / "out")
    assert "length rule" not in " ".join(losses)
    assert "target_prefix" in " ".join(losses)
    assert facts["translate_batch"]["length_penalty"] == 0.6


def test_positions_end_with_an_error_not_with_a_wrong_translation(byte_tokenizer, tmp_path):
    model = make(byte_tokenizer, position_encoding="learned", max_position_embeddings=6)
    facts, losses = export(model, byte_tokenizer, tmp_path / "out")
    assert facts["position_rows"] == 6
    assert "end at 6 tokens" in " ".join(losses)
    with pytest.raises(RuntimeError, match="position"):
        translate_ids(tmp_path / "out", [[5] * 7], 1, [3])


# ---------------------------------------------------------------------- CTranslate2's own converter
@pytest.mark.parametrize("way", ["its console script", "this package's module"])
def test_their_converter_finds_our_class(byte_tokenizer, tmp_path, way):
    model = make(byte_tokenizer)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer.save_pretrained(tmp_path / "model")
    if way == "its console script":  # which runs the code in the folder
        command = [Path(sys.executable).with_name("ct2-transformers-converter"), "--trust_remote_code"]
    else:
        command = [sys.executable, "-m", "hf_vaswani.interop.ctranslate2_export"]
    command += ["--model", tmp_path / "model", "--output_dir", tmp_path / "out", "--quantization", "float32"]
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")},
    )
    assert done.returncode == 0, done.stderr
    assert_same(model, Ct2Folder(tmp_path / "out"))


# ---------------------------------------------------------------------- reduced formats
FULL = [[4, 5, 1], [6, 7, 8, 1], [9, 1], [5, 1], [7, 7, 1]]
WEIGHTS = {"a": torch.tensor([0.5, -3.0]), "b": torch.tensor([[1.0]])}


def test_a_format_that_says_the_same_passes_with_its_figures():
    reduced = [*FULL[:4], [7, 8, 1]]
    found = check_reduced("int8", FULL, reduced, [9] * 5, WEIGHTS)
    assert (found.equal, found.lines, found.length_ratio, found.endless) == (4, 5, 1.0, 0)
    assert (found.largest_name, found.largest_weight) == ("a", 3.0)
    assert found.faults == ()
    found.require()


@pytest.mark.parametrize(
    ("reduced", "message"),
    [
        ([[4, 4, 1], [6, 6, 6, 1], *FULL[2:]], "2 of 5 lines change"),
        ([[4, 5, 6, 7, 8, 1], *FULL[1:]], "times as long"),
        ([*FULL[:4], [7] * 9], "1 lines run to their limit"),
    ],
)
def test_a_format_that_changes_lengthens_or_never_ends_is_stopped(reduced, message):
    found = check_reduced("int8", FULL, reduced, [9] * 5, WEIGHTS)
    with pytest.raises(ConversionError, match=message):
        found.require()


def test_outputs_of_other_numbers_are_no_comparison():
    with pytest.raises(ValueError, match="cannot be compared"):
        check_reduced("int8", FULL, FULL[:2], [9] * 5, WEIGHTS)


# ---------------------------------------------------------------------- the shipped checkpoint
@pytest.fixture(scope="module")
def shipped():
    if not PAIRS.is_file():
        pytest.skip("the Tatoeba pairs are not here")
    model = VaswaniForConditionalGeneration.from_pretrained(SHIPPED).eval()
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    with gzip.open(PAIRS, "rt", encoding="utf-8", newline="\n") as stream:
        rows = [line.rstrip("\n").split("\t") for line in stream]
    test = [(german, english) for part, english, german in rows if part == "test"]
    return model, tokenizer, tokenizer([german for german, _ in test])["input_ids"], [english for _, english in test]


@torch.no_grad()
def in_batches(model, sources, **settings):
    """New tokens of each source by `generate()`."""
    found = [[]] * len(sources)
    order = sorted(range(len(sources)), key=lambda one: len(sources[one]))
    for start in range(0, len(order), 32):
        part = order[start : start + 32]
        longest = max(len(sources[one]) for one in part)
        ids = torch.tensor([sources[one] + [0] * (longest - len(sources[one])) for one in part])
        rows = model.generate(input_ids=ids, attention_mask=(ids != 0).long(), **settings)[:, 1:].tolist()
        for one, row in zip(part, rows, strict=True):
            found[one] = row[: row.index(1) + 1] if 1 in row else row
    return found


def bleu(tokenizer, outputs, references):
    return sacrebleu.corpus_bleu([tokenizer.decode(ids) for ids in outputs], [references]).score


def test_the_shipped_checkpoint_gives_the_same_greedy_output_on_200_real_lines(shipped, tmp_path):
    model, tokenizer, sources, _ = shipped
    export(model, tokenizer, tmp_path / "out", "float32")
    sources = [*sources[:200], *tokenizer(["Hallo", "Danke"])["input_ids"]]
    found = translate_ids(tmp_path / "out", sources, 1, [len(source) + 50 for source in sources])
    assert found == in_batches(model, sources, num_beams=1)
    assert [row[-1] for row in found[-2:]] == [1, 1]  # sources of one word end by themselves
    assert max(map(len, found[-2:])) < 10


@pytest.mark.parametrize("units", [0, 2])
def test_int8_passes_its_check_and_is_stopped_where_scaled_weights_spoil_it(shipped, tmp_path, units):
    model, tokenizer, sources, _ = shipped
    model, sources = copy.deepcopy(model), sources[:50]
    if units:
        # Every second inner unit 300 times as large, undone by the next matrix: the same function, but int8 has one
        # scale for all inner units of a token. One whole matrix scaled by 300 is no trouble: each row has its scale.
        with torch.no_grad():
            for layer in [*model.model.encoder.layers, *model.model.decoder.layers]:
                inner = layer.feed_forward
                inner.fc1.weight[::units] *= 300
                inner.fc1.bias[::units] *= 300
                inner.fc2.weight[:, ::units] /= 300
    limits = [len(source) + 50 for source in sources]
    full = in_batches(model, sources, num_beams=1)
    checks = {}
    for name in ("bfloat16", "int8"):
        export(model, tokenizer, tmp_path / name, name)
        reduced = translate_ids(tmp_path / name, sources, 1, limits)
        checks[name] = check_reduced(name, full, reduced, limits, model.state_dict())
        print(checks[name].line())
    assert checks["bfloat16"].faults == ()
    if not units:
        assert checks["int8"].faults == ()
        return
    assert checks["int8"].largest_name.endswith("fc1.weight")
    with pytest.raises(ConversionError, match="run to their limit where the full model ends them"):
        checks["int8"].require()


@pytest.mark.slow  # two thousand lines with beam 4, four times
def test_corpus_bleu_is_ours_within_a_tenth_and_in_int8_within_three(shipped, tmp_path):
    model, tokenizer, sources, references = shipped
    limits = [len(source) + 50 for source in sources]
    wanted = in_batches(model, sources)
    score = bleu(tokenizer, wanted, references)
    for name, tolerance in (("float32", 0.1), ("int8", 0.3)):
        export(model, tokenizer, tmp_path / name, name)
        folder = Ct2Folder(tmp_path / name)
        found = [one.ids for one in folder.search(sources, 4, limits, **search_options(model))]
        equal = sum(a == b for a, b in zip(found, wanted, strict=True))
        print(f"{name}: BLEU {bleu(tokenizer, found, references):.2f} ({score:.2f}), {equal} of {len(wanted)} equal")
        assert bleu(tokenizer, found, references) == pytest.approx(score, abs=tolerance)
