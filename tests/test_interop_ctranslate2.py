"""Import from CTranslate2: every precision, both vocabularies, and refusals; judged by CTranslate2's own equations."""

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from imported_models import loaded, our_logits
from transformers import AutoTokenizer, pipeline

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer
from hf_vaswani.interop.ctranslate2_import import OPTIONS, read
from hf_vaswani.interop.foreign import ConversionError, ImportOptions
from hf_vaswani.interop.importing import import_model

ROOT = Path(__file__).parents[1]
ARABIC = ROOT.parent / "shared" / "data" / "weights" / "ct2_aren_transliteration"
D, FF, HEADS, SOURCE, TARGET = 12, 20, 3, 9, 11
WORDS = ["<blank>", "<s>", "</s>"]


# ---------------------------------------------------------------------- a folder in their format
def variables(seed=0, *, encoder=2, decoder=1, bias=True, final=True, shared=False, untied=True, table=None, **scalars):
    """Names and arrays of a Transformer as CTranslate2 stores them."""
    rng = np.random.default_rng(seed)
    found: dict[str, np.ndarray] = {}

    def draw(name, *shape, mean=0.0):
        found[name] = (mean + rng.normal(size=shape) / math.sqrt(shape[-1])).astype(np.float32)

    def linear(name, rows, columns, has_bias=True):
        draw(f"{name}/weight", rows, columns)
        if has_bias:
            draw(f"{name}/bias", rows)

    def norm(name):
        draw(f"{name}/gamma", D, mean=1.0)
        draw(f"{name}/beta", D)

    rows = TARGET if shared else SOURCE
    draw("encoder/embeddings/weight", rows, D)
    draw("decoder/embeddings/weight", TARGET, D)
    if shared:
        found["decoder/embeddings/weight"] = found["encoder/embeddings/weight"]
    linear("decoder/projection", TARGET, D, bias)
    if not untied:
        found["decoder/projection/weight"] = found["decoder/embeddings/weight"]
    for side, count in (("encoder", encoder), ("decoder", decoder)):
        for n in range(count):
            layer = f"{side}/layer_{n}"
            linear(f"{layer}/self_attention/linear_0", 3 * D, D, bias)
            linear(f"{layer}/self_attention/linear_1", D, D, bias)
            norm(f"{layer}/self_attention/layer_norm")
            if side == "decoder":
                linear(f"{layer}/attention/linear_0", D, D, bias)
                linear(f"{layer}/attention/linear_1", 2 * D, D, bias)
                linear(f"{layer}/attention/linear_2", D, D, bias)
                norm(f"{layer}/attention/layer_norm")
            linear(f"{layer}/ffn/linear_0", FF, D)
            linear(f"{layer}/ffn/linear_1", D, FF)
            norm(f"{layer}/ffn/layer_norm")
        if final:
            norm(f"{side}/layer_norm")
        if table is not None:
            found[f"{side}/position_encodings/encodings"] = table
        found[f"{side}/num_heads"] = np.int16(HEADS)
        for name, value in scalars.items():
            found[f"{side}/{name}"] = value
    return found


def quantized(arrays, kind):
    """As their converter does it: a scale for each row of int8, one for a matrix of int16."""
    found = {}
    for name, array in arrays.items():
        if not name.endswith("weight"):
            found[name] = array
        elif kind == "int8":
            scale = (127.0 / np.abs(array).max(axis=1)).astype(np.float32)
            found[name], found[name + "_scale"] = np.rint(array * scale[:, None]).astype(np.int8), scale
        else:
            scale = np.float32(1024 / np.abs(array).max())
            found[name], found[name + "_scale"] = np.rint(array * scale).astype(np.int16), scale
    return found


def write(folder, arrays, *, version=6, spec="TransformerSpec", revision=7, aliases=(), settings=None, words=None):
    folder.mkdir(exist_ok=True)
    kinds = ["float32", "int8", "int16", "int32", "float16", "bfloat16"]

    def text(word):
        return struct.pack("<H", len(word) + 1) + word.encode() + b"\0"

    data = struct.pack("<I", version) + text(spec) + struct.pack("<I", revision)
    data += struct.pack("<I", len(arrays))
    for name, array in sorted(arrays.items()):
        array = np.asarray(array)
        data += text(name) + struct.pack("<B", array.ndim) + struct.pack(f"<{array.ndim}I", *array.shape)
        if version >= 4:
            data += struct.pack("<BI", kinds.index(array.dtype.name), array.nbytes)
        else:
            data += struct.pack("<BI", array.itemsize, array.size)
        data += array.tobytes()
    if version >= 3:
        data += struct.pack("<I", len(aliases))
        for alias, name in aliases:
            data += text(alias) + text(name)
    (folder / "model.bin").write_bytes(data)
    target = arrays["decoder/embeddings/weight"]
    for side, count in (("source", len(arrays.get("encoder/embeddings/weight", target))), ("target", len(target))):
        # The piece for unknown ones is not listed: the program puts it behind the last one.
        listed = [*WORDS, *(f"{side[0]}{n}" for n in range(count - 4))]
        (folder / f"{side}_vocabulary.txt").write_text("\n".join((words or {}).get(side, listed)) + "\n")
    if settings is not None:
        (folder / "config.json").write_text(json.dumps(settings))
    return folder


# ---------------------------------------------------------------------- their equations, plainly
def plain_logits(arrays, source, target, *, pre=True, eps=1e-5, scaled=True, activation=lambda x: np.maximum(x, 0)):
    arrays = {name: np.asarray(array).astype(np.float64) for name, array in arrays.items()}

    def linear(x, name):
        return x @ arrays[f"{name}/weight"].T + arrays.get(f"{name}/bias", 0.0)

    def norm(x, name):
        if f"{name}/gamma" not in arrays:
            return x
        centred = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
        return centred / deviation * arrays[f"{name}/gamma"] + arrays[f"{name}/beta"]

    def embed(ids, side):
        x = arrays[f"{side}/embeddings/weight"][ids] * (math.sqrt(D) if scaled else 1.0)
        table = arrays.get(f"{side}/position_encodings/encodings")
        if table is not None:
            return x + table[: len(ids)]
        step = math.log(10000.0) / (D // 2 - 1)
        angles = (np.arange(len(ids))[:, None] + 1) * np.exp(-step * np.arange(D // 2))
        return x + np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

    def attend(query, key, value, is_causal):
        found = np.zeros_like(query)
        for h in range(HEADS):
            part = slice(h * D // HEADS, (h + 1) * D // HEADS)
            scores = query[:, part] @ key[:, part].T / math.sqrt(D // HEADS)
            if is_causal:
                scores = np.where(np.tri(*scores.shape, dtype=bool), scores, -np.inf)
            raised = np.exp(scores - scores.max(-1, keepdims=True))
            found[:, part] = raised / raised.sum(-1, keepdims=True) @ value[:, part]
        return found

    def around(x, name, sublayer):
        return x + sublayer(norm(x, name)) if pre else norm(x + sublayer(x), name)

    def stack(x, side, memory=None):
        layers = {name.split("/")[1] for name in arrays if name.startswith(f"{side}/layer_") and name.count("/") > 2}
        for layer in sorted(layers - {"layer_norm"}):
            there = f"{side}/{layer}"

            def own(y, there=f"{there}/self_attention"):
                parts = np.split(linear(y, f"{there}/linear_0"), 3, axis=1)
                return linear(attend(*parts, is_causal=memory is not None), f"{there}/linear_1")

            def cross(y, there=f"{there}/attention"):
                key, value = np.split(linear(memory, f"{there}/linear_1"), 2, axis=1)
                return linear(attend(linear(y, f"{there}/linear_0"), key, value, False), f"{there}/linear_2")

            x = around(x, f"{there}/self_attention/layer_norm", own)
            if memory is not None:
                x = around(x, f"{there}/attention/layer_norm", cross)
            x = around(
                x,
                f"{there}/ffn/layer_norm",
                lambda y, there=there: linear(activation(linear(y, f"{there}/ffn/linear_0")), f"{there}/ffn/linear_1"),
            )
        return norm(x, f"{side}/layer_norm")

    states = stack(embed(target, "decoder"), "decoder", stack(embed(source, "encoder"), "encoder"))
    return linear(states, "decoder/projection")


SOURCES, TARGETS = [[3, 4, 5, 6], [7], [2, 4, 8]], [[1, 3, 9, 4], [1, 5, 5, 6], [1, 8, 7, 10]]


def assert_same(found, arrays, tolerance=1e-4, **rules):
    logits = our_logits(loaded(found), SOURCES, TARGETS)
    for row, source, target in zip(logits, SOURCES, TARGETS, strict=True):
        assert np.abs(row - plain_logits(arrays, source, target, **rules)).max() < tolerance


NO = np.int8(0)
TABLE = np.random.default_rng(5).normal(size=(14, D)).astype(np.float32)


@pytest.mark.parametrize(
    ("arrays", "rules", "fields"),
    [
        pytest.param({}, {}, {"norm_position": "pre", "position_offset": 1, "sinusoid_layout": "halves"}, id="usual"),
        pytest.param({"pre_norm": NO}, {"pre": False}, {"norm_position": "post", "final_norm": True}, id="post"),
        pytest.param({"pre_norm": NO, "final": False}, {"pre": False}, {"final_norm": False}, id="post, no last norms"),
        pytest.param({"bias": False}, {}, {"attention_bias": False, "output_bias": False}, id="no biases"),
        pytest.param({"table": TABLE}, {}, {"position_encoding": "learned", "max_position_embeddings": 14}, id="table"),
        pytest.param({"scale_embeddings": NO}, {"scaled": False}, {"scale_embedding": False}, id="unscaled"),
        pytest.param({"scale_embeddings": np.float32(D**0.5)}, {}, {"scale_embedding": True}, id="scale by number"),
        pytest.param(
            {"activation": np.int8(2)},
            {"activation": lambda x: x / (1 + np.exp(-x))},
            {"activation_function": "silu"},
            id="swish",
        ),
        pytest.param({"encoder": 1, "decoder": 3}, {}, {"encoder_layers": 1, "decoder_layers": 3}, id="unlike depths"),
        pytest.param({"alignment_layer": np.int16(-1), "alibi": NO}, {}, {}, id="settings without effect"),
    ],
)  # fmt: skip
def test_logits_are_those_of_their_equations(tmp_path, arrays, rules, fields):
    arrays = variables(**arrays)
    found = read(write(tmp_path / "model", arrays), ImportOptions())
    assert {name: found.config[name] for name in fields} == fields
    assert_same(found, arrays, **rules)


@pytest.mark.parametrize(("version", "spec", "revision"), [(2, "TransformerSpec", 3), (3, "TransformerSpec", 4)])
def test_older_versions_of_the_format(tmp_path, version, spec, revision):
    arrays = variables()
    folder = write(tmp_path / "model", arrays, version=version, spec=spec, revision=revision)
    assert_same(read(folder, ImportOptions()), arrays)


def test_settings_of_the_norms_come_from_config_json(tmp_path):
    arrays = variables()
    found = read(write(tmp_path / "model", arrays, settings={"layer_norm_epsilon": 0.02}), ImportOptions())
    assert found.config["layer_norm_eps"] == 0.02
    assert_same(found, arrays, eps=0.02)


@pytest.mark.parametrize("kind", ["int8", "int16"])
def test_integers_are_multiplied_out_with_their_scales(tmp_path, kind):
    arrays = quantized(variables(), kind)
    full = {
        name: array.astype(np.float64) / (scale[:, None] if np.ndim(scale) else scale)
        if (scale := arrays.get(name + "_scale")) is not None
        else array
        for name, array in arrays.items()
    }
    found = read(write(tmp_path / "model", arrays), ImportOptions())
    assert_same(found, full)
    assert any(kind in loss for loss in found.losses)
    assert all(tensor.dtype == torch.float32 for tensor in found.tensors.values())


def test_half_precision_is_read_as_what_it_stands_for(tmp_path):
    arrays = {name: array.astype(np.float16) if array.ndim else array for name, array in variables().items()}
    found = read(write(tmp_path / "model", arrays), ImportOptions())
    assert_same(found, arrays)
    assert any("float16" in loss for loss in found.losses)


def test_aliases_and_equal_matrices_are_tied(tmp_path):
    arrays = variables(shared=True, untied=False)
    names = ("encoder/embeddings/weight", "decoder/projection/weight")
    stored = {name: array for name, array in arrays.items() if name not in names}
    aliases = [(name, "decoder/embeddings/weight") for name in names]
    found = read(write(tmp_path / "model", stored, aliases=aliases), ImportOptions())
    assert found.config["tie_word_embeddings"]
    assert found.config["tie_encoder_decoder_embeddings"]
    assert_same(found, arrays)
    twice = read(write(tmp_path / "twice", arrays), ImportOptions())  # stored in full under every name
    assert set(twice.tensors) == set(found.tensors)


def test_a_bias_that_one_map_lacks_is_zero_and_said(tmp_path):
    arrays = variables()
    del arrays["encoder/layer_1/self_attention/linear_1/bias"]
    del arrays["decoder/layer_0/ffn/linear_0/bias"]
    found = read(write(tmp_path / "model", arrays), ImportOptions())
    assert sum("filled with zeros" in choice for choice in found.choices) == 2
    assert_same(found, arrays)


# ---------------------------------------------------------------------- special tokens and vocabularies
def test_special_tokens_and_what_stands_around_a_source(tmp_path):
    settings = {"add_source_bos": True, "add_source_eos": True, "decoder_start_token": "</s>", "bos_token": "<s>"}
    found = read(write(tmp_path / "model", variables(), settings=settings), ImportOptions())
    assert found.config["decoder_start_token_id"] == 2
    assert (found.config["eos_token_id"], found.config["pad_token_id"]) == (2, 0)
    assert found.tokenizer("s1 s0 zzz")["input_ids"] == [1, 4, 3, SOURCE - 1, 2]  # the unknown piece is the last row
    plain = read(write(tmp_path / "plain", variables()), ImportOptions())
    assert plain.config["decoder_start_token_id"] == 1
    assert plain.tokenizer("s1 s0")["input_ids"] == [4, 3]
    assert any("add_source_eos" in choice for choice in plain.choices)


def test_old_files_keep_special_tokens_among_the_variables(tmp_path):
    arrays = variables() | {
        "with_source_eos": np.int8(1),
        "with_target_bos": np.int8(0),
        "unk_token": np.frombuffer(b"UNK", dtype=np.int8),
    }
    found = read(write(tmp_path / "model", arrays, version=4), ImportOptions())
    assert found.tokenizer("s1")["input_ids"] == [4, 2]
    assert found.config["decoder_start_token_id"] == 2
    assert found.tokenizer.unk_token == "UNK"


def test_characters_are_told_from_words(tmp_path):
    words = {"source": [*WORDS, *"абвгд"], "target": [*WORDS, *"abcdefg"]}
    found = read(write(tmp_path / "model", variables(), words=words), ImportOptions())
    assert found.tokenizer("ба")["input_ids"] == [4, 3]
    assert found.tokenizer.decode([1, 5, 3, 4, 2]) == "cab"
    assert any("looks like characters" in choice for choice in found.choices)


def test_rows_without_a_piece_are_named_and_never_written(tmp_path):
    words = {"target": [*WORDS, "t0", "t1", "<unk>"]}
    found = read(write(tmp_path / "model", variables(), words=words), ImportOptions())
    assert found.generation["suppress_tokens"] == [6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"target": [*WORDS, *"abcdefghi"]}, "target side.*13 pieces.*11 rows.*2 pieces have no row"),
        ({"source": [*WORDS, "a", "b", "a"]}, "source_vocabulary.txt: the piece 'a' stands in places 4 and 6"),
        ({"target": ["<blank>", "<s>", "x"]}, "`eos_token` is '</s>', which the target vocabulary does not have"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path, words, message):
    with pytest.raises(ConversionError, match=message):
        read(write(tmp_path / "model", variables(), words=words), ImportOptions())


def test_a_start_token_that_each_call_gives_is_refused(tmp_path):
    folder = write(tmp_path / "model", variables(), settings={"decoder_start_token": None})
    with pytest.raises(ConversionError, match="`decoder_start_token` is null"):
        read(folder, ImportOptions())


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("encoder/layer_0/self_attention/relative_position_keys", np.zeros((5, 4), np.float32), "relative positions"),
        ("decoder/layer_0/self_attention/relative_attention_bias", np.zeros((5, 3), np.float32), "relative attention"),
        ("encoder/layer_0/self_attention/rotary_dim", np.int32(4), "rotary positions"),
        ("decoder/alibi", np.int8(1), "ALiBi"),
        ("encoder/layer_0/ffn/linear_0_noact/weight", np.zeros((FF, D), np.float32), "gated"),
        ("encoder/layernorm_embedding/gamma", np.ones(D, np.float32), "norm over the embeddings"),
        ("decoder/project_in/weight", np.zeros((D, D), np.float32), "map behind the embeddings"),
        ("decoder/scale_outputs", np.float32(0.5), "scaled outputs"),
        ("encoder/layer_0/self_attention/num_heads_kv", np.int32(1), "grouped queries"),
        ("encoder/multi_query_attention", np.int8(1), "multi-query"),
        ("encoder/embeddings_1/weight", np.zeros((4, D), np.float32), "source factors"),
        ("encoder/layer_0/self_attention/queries_scale", np.float32(0.3), "queries_scale.*differs"),
        ("decoder/num_heads", np.int16(2), "`num_heads` is 3 in the encoder and 2 in the decoder"),
        ("encoder/scale_embeddings", np.float32(2.0), "`scale_embeddings` is 2 in the encoder"),
        ("encoder/activation", np.int8(40), "`activation`"),
        ("decoder/strange", np.zeros(3, np.float32), "no place in this architecture: decoder/strange"),
    ],
)
def test_another_architecture_is_refused_by_name(tmp_path, name, value, message):
    with pytest.raises(ConversionError, match=message):
        read(write(tmp_path / "model", variables() | {name: value}), ImportOptions())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("encoder/layer_0/ffn/layer_norm/beta", "RMS norms"),
        ("decoder/layer_0/attention/linear_1/weight", "no tensor 'decoder/layer_0/attention/linear_1/weight'"),
        ("encoder/layer_norm/", "only one of encoder and decoder ends in a norm"),
    ],
)
def test_a_missing_variable_is_named(tmp_path, name, message):
    arrays = {key: value for key, value in variables().items() if not key.startswith(name)}
    with pytest.raises(ConversionError, match=message):
        read(write(tmp_path / "model", arrays), ImportOptions())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-900], "is cut off: "),
        (lambda data: data[:3], "is cut off: the version"),
        (lambda data: data + b"more", "4 bytes follow the last variable"),
        (lambda data: b"PK\x03\x04" + data, "not a model file of CTranslate2"),
        (lambda data: struct.pack("<I", 9) + data[4:], "format version 9"),
        (lambda data: data.replace(b"TransformerSpec", b"WhisperSpecABCD"), "of the kind 'WhisperSpecABCD'"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(tmp_path, change, message):
    folder = write(tmp_path / "model", variables())
    path = folder / "model.bin"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ConversionError, match=message):
        read(folder, ImportOptions())


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConversionError, match=r"no model\.bin"):
        read(tmp_path, ImportOptions())
    folder = write(tmp_path / "model", variables())
    (folder / "config.json").write_text("{")
    with pytest.raises(ConversionError, match=r"config\.json is not JSON"):
        read(folder, ImportOptions())
    (folder / "config.json").unlink()
    (folder / "target_vocabulary.txt").unlink()
    with pytest.raises(ConversionError, match="neither shared_vocabulary nor target_vocabulary"):
        read(folder, ImportOptions())


def test_an_option_that_means_nothing_here_is_refused(tmp_path):
    assert "mapping" not in OPTIONS
    folder = write(tmp_path / "model", variables())
    with pytest.raises(ConversionError, match="`mapping` means nothing to an import of ctranslate2"):
        import_model("ctranslate2", folder, tmp_path / "out", options=ImportOptions(mapping=Path("x")))
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- through the driver, and back from our export
def test_an_imported_folder_loads_and_is_held_against_the_program(tmp_path):
    pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
    settings = {
        "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "decoder_start_token": "<s>",
        "add_source_bos": False, "add_source_eos": True, "layer_norm_epsilon": 1e-6,
    }  # fmt: skip
    folder = write(tmp_path / "model", variables(), settings=settings)
    report = import_model("ctranslate2", folder, tmp_path / "out", count=6)
    assert report.parities[0].against.startswith("CTranslate2")
    assert report.parities[0].logit_difference < 1e-4
    assert report.parities[0].greedy_equal == 6
    model = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert (model.generation_config.num_beams, model.generation_config.length_penalty_type) == (2, "power")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"d_k": 4, "d_v": 7, "norm_position": "pre", "attention_bias": True},
        {"d_k": 9, "d_v": 3, "position_encoding": "learned", "max_position_embeddings": 128},
        {"final_norm": True, "tie_word_embeddings": False, "output_bias": True, "sinusoid_layout": "halves"},
        {"zero_start_embedding": True, "position_offset": 2, "scale_embedding": False, "activation_function": "gelu"},
    ],
)
def test_our_own_export_comes_back_with_the_same_bits(tmp_path, fields):
    pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
    from hf_vaswani.interop.ctranslate2_export import export

    texts = ["ein kleines Haus am See", "a small house by the lake", "Zwei Hunde laufen"] * 9
    tokenizer = VaswaniTokenizer.train(texts, 290, allow_fewer=True, show_progress=False)
    shape = {"d_model": 24, "d_ff": 40, "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 3}
    config = VaswaniConfig(**{"vocab_size": len(tokenizer), **shape, **fields})
    torch.manual_seed(3)
    model = VaswaniForConditionalGeneration(config).eval()
    export(model, tokenizer, tmp_path / "ct2", "float32")
    import_model("ctranslate2", tmp_path / "ct2", tmp_path / "back", count=4)
    back = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "back")
    before, after = model.state_dict(), back.state_dict()
    assert set(before) == set(after)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    derived = ("query_key_width", "value_width", "has_final_norm", "ties_source_and_target", "encoder_vocab_size")
    assert [getattr(back.config, name) for name in derived] == [getattr(config, name) for name in derived]
    for name in ("pad_token_id", "eos_token_id", "bos_token_id", "unk_token_id", "decoder_start_token_id"):
        assert getattr(back.config, name) == getattr(config, name)
    assert AutoTokenizer.from_pretrained(tmp_path / "back")("See")["input_ids"] == tokenizer("See")["input_ids"]


# ---------------------------------------------------------------------- a real model
@pytest.fixture(scope="module")
def references():
    if not ARABIC.is_dir():
        pytest.skip("the Arabic model is not here")
    return json.loads((ARABIC / "reference_outputs.json").read_text(encoding="utf-8"))["items"]


@pytest.mark.parametrize("name", ["v1_aren-transliteration", "v2_aren-transliteration"])
def test_the_arabic_model_writes_its_reference_outputs(references, tmp_path, name):
    report = import_model("ctranslate2", ARABIC / name, tmp_path / "out", count=8)
    assert report.tensors == 200
    model = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for item in references:
        source = tokenizer(item["source"], return_tensors="pt")
        greedy = model.generate(**source, num_beams=1, return_dict_in_generate=True, output_logits=True)
        assert tokenizer.decode(greedy.sequences[0]) == item["greedy"]
        chosen = zip(greedy.logits, greedy.sequences[0, 1:], strict=True)
        found = [float(logits.log_softmax(-1)[0, token]) for logits, token in chosen]
        assert found == pytest.approx(item["greedy_token_logprobs"], abs=5e-6)
        beam = model.generate(
            **source, num_beams=4, num_return_sequences=4, length_penalty=0.0, return_dict_in_generate=True,
            output_scores=True,
        )  # fmt: skip
        assert tokenizer.batch_decode(beam.sequences) == item["beam4"]
        # The program's own sums over a beam differ from its sums over single tokens by 1e-4.
        assert beam.sequences_scores.tolist() == pytest.approx(item["beam4_sum_logprob"], abs=2e-4)
    # The source has more pieces than the target, which must not look like a tokenizer of another model.
    translate = pipeline("translation", model=str(tmp_path / "out"), num_beams=1)
    assert translate(references[0]["source"]) == [{"translation_text": references[0]["greedy"]}]


@pytest.mark.parametrize(("name", "tolerance"), [("i16", 0.02), ("i8", 0.05)])
def test_its_quantized_copies_come_close(references, tmp_path, name, tolerance):
    report = import_model("ctranslate2", ARABIC / f"v2_aren-transliteration-{name}", tmp_path / "out", count=8)
    assert any("int" in loss for loss in report.losses)
    model = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    equal = 0
    for item in references:
        source = tokenizer(item["source"], return_tensors="pt")
        greedy = model.generate(**source, num_beams=1, return_dict_in_generate=True, output_logits=True)
        if tokenizer.decode(greedy.sequences[0]) == item["greedy"]:
            equal += 1
            chosen = zip(greedy.logits, greedy.sequences[0, 1:], strict=True)
            found = [float(logits.log_softmax(-1)[0, token]) for logits, token in chosen]
            assert found == pytest.approx(item["greedy_token_logprobs"], abs=tolerance)
    assert equal >= 7


@pytest.mark.parametrize(
    ("name", "value"),
    [("unk_token", 5), ("eos_token", ["</s>"]), ("decoder_start_token", {}), ("add_source_eos", "x"),
     ("layer_norm_epsilon", "small"), ("bos_token", None)],
)  # fmt: skip
def test_a_setting_of_another_kind_is_refused_by_name(tmp_path, name, value):
    write(tmp_path, variables(), settings={name: value})
    with pytest.raises(ConversionError, match=f"config.json: `{name}` is "):
        read(tmp_path, ImportOptions())


@pytest.mark.parametrize(
    ("shape", "count"), [([65536] * 4, 0), ([2**32 - 1] * 2, 1), ([0, 2**32 - 1], 0)], ids=["2^64", "most", "none"]
)
def test_sizes_that_do_not_fit_into_memory_are_seen_before_any_is_taken(tmp_path, shape, count):
    write(tmp_path, variables())
    data = struct.pack("<IH", 6, 16) + b"TransformerSpec\0" + struct.pack("<II", 7, 1) + struct.pack("<H", 2) + b"x\0"
    data += struct.pack("<B", len(shape)) + struct.pack(f"<{len(shape)}I", *shape) + struct.pack("<BII", 0, count, 0)
    (tmp_path / "model.bin").write_bytes(data)
    with pytest.raises(ConversionError, match=r"model.bin is damaged: variable 'x'"):
        read(tmp_path, ImportOptions())


def test_a_byte_order_mark_belongs_to_no_piece(tmp_path):
    write(tmp_path, variables(), settings={"unk_token": "<unk>"})
    expected = read(tmp_path, ImportOptions())
    for name in ("source_vocabulary.txt", "target_vocabulary.txt", "config.json"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
    found = read(tmp_path, ImportOptions())
    assert found.config == expected.config
    assert found.tokenizer.get_src_vocab() == expected.tokenizer.get_src_vocab()


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a": ' + "9" * 5000 + "}"], ids=["depth", "digits"])
def test_settings_that_json_itself_stumbles_over_are_one_plain_error(tmp_path, text):
    write(tmp_path, variables())
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConversionError, match=r"config.json is not JSON"):
        read(tmp_path, ImportOptions())
