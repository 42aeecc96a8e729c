"""Export to ONNX: graphs that compute the model's logits, step by step too, and a search that is the package's own."""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch
from transformers import AutoTokenizer, StaticCache, pipeline
from transformers.cache_utils import EncoderDecoderCache

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer
from hf_vaswani.evaluation import evaluate_model
from hf_vaswani.interop.foreign import ConversionError
from hf_vaswani.interop.onnx_export import (
    DATA_FILE,
    DECODER,
    DECODER_WITH_PAST,
    ENCODER,
    OPSET,
    cache_names,
    export,
)
from hf_vaswani.interop.onnx_runtime import VaswaniOnnxModel, program

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "checkpoints" / "tatoeba-de-en"
PAIRS = ROOT.parent / "shared" / "data" / "tatoeba_en_de" / "pairs.tsv.gz"
GRAPHS = (ENCODER, DECODER, DECODER_WITH_PAST)
SIZES = {
    "vocab_size": 41, "d_model": 12, "d_ff": 20, "encoder_layers": 2, "decoder_layers": 3, "num_attention_heads": 3,
    "max_position_embeddings": 16,
}  # fmt: skip
SHAPES = {
    "the paper's": {},
    "pre-norm with all biases": {"norm_position": "pre", "attention_bias": True, "output_bias": True},
    "pre-norm without final norm": {"norm_position": "pre", "final_norm": False, "decoder_layers": 1},
    "learned positions": {"position_encoding": "learned", "final_norm": True, "d_model": 15},
    "split vocabularies, odd heads": {"source_vocab_size": 23, "d_k": 5, "d_v": 7},
    "no matrix twice": {"tie_word_embeddings": False, "tie_encoder_decoder_embeddings": False},
    "a descendant's": {
        "zero_start_embedding": True, "sinusoid_layout": "halves", "sinusoid_exponent": "2i/(d-2)",
        "position_offset": 2, "scale_embedding": False, "layer_norm_eps": 1e-3, "activation_function": "silu",
    },
}  # fmt: skip


def make(**fields):
    config = VaswaniConfig(**{**SIZES, **fields})
    torch.manual_seed(3)
    model = VaswaniForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too: fresh ones would hide a mix-up
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch_of(config, rows=5, width=9):
    """Sources with padding on the right, on the left, and without any."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, config.encoder_vocab_size, (rows, width), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    mask[2, :5] = 0
    mask[3, 1:] = 0
    return {"input_ids": ids.masked_fill(mask == 0, config.pad_token_id), "attention_mask": mask}


def targets_of(config, rows=5, columns=6):
    ids = torch.randint(3, config.vocab_size, (rows, columns), generator=torch.Generator().manual_seed(5))
    ids[:, 0] = config.decoder_start_token_id
    return ids


def logits_of(model, batch, targets, **more):
    with torch.no_grad():
        return model(**batch, decoder_input_ids=targets, **more).logits


@pytest.fixture(scope="module", params=list(SHAPES))
def both(request, tmp_path_factory):
    """A model and the same one in ONNX Runtime."""
    model = make(**SHAPES[request.param])
    folder = tmp_path_factory.mktemp("onnx")
    export(model, None, folder)
    return model, VaswaniOnnxModel.from_pretrained(folder, threads=1)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    model = make()
    folder = tmp_path_factory.mktemp("plain")
    export(model, None, folder)
    return model, folder


@pytest.fixture
def sessions(plain):
    _, folder = plain
    return [onnxruntime.InferenceSession(str(folder / n), providers=["CPUExecutionProvider"]) for n in GRAPHS]


def run(session, **feed):
    names = [one.name for one in session.get_outputs()]
    feed = {name: np.asarray(value) for name, value in feed.items()}
    return dict(zip(names, session.run(names, feed), strict=True))


# ---------------------------------------------------------------------- the same numbers
def test_logits_are_the_models_with_padding_on_either_side(both):
    model, served = both
    batch, targets = batch_of(model.config), targets_of(model.config)
    expected = logits_of(model, batch, targets)
    found = logits_of(served, batch, targets)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert expected.std() > 0.1
    alone = {"input_ids": batch["input_ids"][2:3, 5:]}
    torch.testing.assert_close(logits_of(served, alone, targets[2:3])[0], expected[2], rtol=0, atol=2e-5)


def test_columns_after_a_cache_are_those_of_one_pass(both):
    model, served = both
    batch, targets = batch_of(model.config), targets_of(model.config, columns=8)
    expected = logits_of(model, batch, targets)
    first = served(**batch, decoder_input_ids=targets[:, :3])
    second = served(**batch, decoder_input_ids=targets[:, 3:7], cache=first.cache)  # four columns at once
    third = served(**batch, decoder_input_ids=targets[:, 7:], cache=second.cache)
    found = torch.cat([first.logits, second.logits, third.logits], dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert third.cache.get_seq_length() == 8


@pytest.mark.parametrize("num_beams", [1, 4])
def test_searches_find_the_same(both, num_beams):
    model, served = both
    batch = batch_of(model.config)
    settings = {"num_beams": num_beams, "num_return_sequences": 3 if num_beams > 1 else 1}
    settings |= {"max_new_tokens": 12} if model.config.position_encoding == "learned" else {"max_length_offset": 8}
    settings |= {"return_dict_in_generate": True, "output_scores": True}
    expected, found = (one.generate(**batch, **settings) for one in (model, served))
    assert found.sequences.tolist() == expected.sequences.tolist()
    if num_beams > 1:
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, rtol=0, atol=1e-5)


def test_the_papers_limit_and_length_rule_hold_in_the_served_search(plain):
    model, folder = plain
    served = VaswaniOnnxModel.from_pretrained(folder)
    batch = batch_of(model.config)
    lengths = batch["attention_mask"].sum(-1)
    model.generation_config.suppress_tokens = served.generation_config.suppress_tokens = [model.config.eos_token_id]
    try:
        found = served.generate(**batch, max_length_offset=3, num_beams=2)
        assert [(row != 0).sum().item() - 1 for row in found] == (lengths + 3).tolist()
        assert found.tolist() == model.generate(**batch, max_length_offset=3, num_beams=2).tolist()
    finally:
        model.generation_config.suppress_tokens = None
    by_kind = [
        served.generate(
            **batch, length_penalty_type=kind, length_penalty=2.0, return_dict_in_generate=True, output_scores=True
        ).sequences_scores
        for kind in ("gnmt", "power")
    ]
    assert not torch.allclose(*by_kind)


def test_the_number_of_threads_reaches_every_session(plain):
    served = VaswaniOnnxModel.from_pretrained(plain[1], threads=3)
    assert [one.get_session_options().intra_op_num_threads for one in served.sessions.values()] == [3, 3, 3]


def test_sources_longer_than_the_models_table_are_computed(plain):
    model, folder = plain
    served = VaswaniOnnxModel.from_pretrained(folder)
    width = 10 * SIZES["max_position_embeddings"]
    batch, targets = batch_of(model.config, width=width), targets_of(model.config, columns=40)
    torch.testing.assert_close(logits_of(served, batch, targets), logits_of(model, batch, targets), rtol=0, atol=2e-5)


def test_a_row_without_text_is_defined(both):
    model, served = both
    batch, targets = batch_of(model.config), targets_of(model.config)
    batch["attention_mask"][4] = 0
    torch.testing.assert_close(logits_of(served, batch, targets), logits_of(model, batch, targets), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "activation", ["relu", "relu2", "gelu", "gelu_new", "gelu_fast", "quick_gelu", "tanh", "sigmoid", "linear"]
)
def test_each_activation_is_the_models(activation, tmp_path):
    model = make(activation_function=activation, encoder_layers=1, decoder_layers=1)
    export(model, None, tmp_path)
    batch, targets = batch_of(model.config), targets_of(model.config)
    found = logits_of(VaswaniOnnxModel.from_pretrained(tmp_path), batch, targets)
    torch.testing.assert_close(found, logits_of(model, batch, targets), rtol=0, atol=2e-5)


# ---------------------------------------------------------------------- the graphs themselves
def test_twelve_steps_with_the_cache_fed_back_give_the_models_ids(plain, sessions):
    model, _ = plain
    encoder, first, further = sessions
    batch = {name: value.numpy() for name, value in batch_of(model.config).items()}
    states = run(encoder, **batch)["last_hidden_state"]
    ids = np.full((5, 1), model.config.decoder_start_token_id)
    found = run(first, input_ids=ids, encoder_hidden_states=states, encoder_attention_mask=batch["attention_mask"])
    cache = {name.replace("present", "past_key_values"): v for name, v in found.items() if name != "logits"}
    for step in range(12):
        expected = logits_of(model, batch_of(model.config), torch.from_numpy(ids))[:, -1]
        np.testing.assert_allclose(found["logits"][:, -1], expected, rtol=0, atol=2e-5)
        new = found["logits"][:, -1:].argmax(-1)
        assert new[:, 0].tolist() == expected.argmax(-1).tolist(), step
        ids = np.concatenate([ids, new], axis=1)
        found = run(further, input_ids=new, encoder_attention_mask=batch["attention_mask"], **cache)
        cache |= {name.replace("present", "past_key_values"): v for name, v in found.items() if name != "logits"}
        assert cache["past_key_values.2.decoder.key"].shape == (5, 3, step + 2, 4)


@pytest.mark.parametrize("past", [0, 1, 5])
def test_the_cache_length_is_the_next_position(plain, sessions, past):
    model, _ = plain
    batch = batch_of(model.config)
    ids = torch.tensor([[7]] * 5)
    generator = torch.Generator().manual_seed(6)
    shapes = {"decoder": (5, 3, past, 4), "encoder": (5, 3, 9, 4)}
    cache = {
        name: torch.randn(shapes[part], generator=generator)
        for n in range(3)
        for part in ("decoder", "encoder")
        for name in cache_names("past_key_values", n, (part,))
    }
    found = run(sessions[2], input_ids=ids, encoder_attention_mask=batch["attention_mask"], **cache)
    # The model with the position said outright, by a mask over the target with `past` columns before the new one.
    own = EncoderDecoderCache([tuple(cache[name] for name in cache_names("past_key_values", n)) for n in range(3)])
    with torch.no_grad():
        expected = model(
            decoder_input_ids=ids,
            decoder_attention_mask=torch.ones(5, past + 1, dtype=torch.long),
            encoder_outputs=(torch.zeros(5, 9, 12),),
            attention_mask=batch["attention_mask"],
            cache=own,
        ).logits
    np.testing.assert_allclose(found["logits"], expected, rtol=0, atol=2e-5)


def test_names_and_axes_are_optimums(plain, sessions):
    described = [
        ({one.name: one.shape for one in s.get_inputs()}, {one.name: one.shape for one in s.get_outputs()})
        for s in sessions
    ]
    batch, source, target = "batch_size", "encoder_sequence_length", "decoder_sequence_length"
    past = "past_decoder_sequence_length"
    kinds = ("key", "value")
    layers = range(3)
    assert described[0] == (
        {"input_ids": [batch, source], "attention_mask": [batch, source]},
        {"last_hidden_state": [batch, source, 12]},
    )
    assert described[1][0] == {
        "input_ids": [batch, target],
        "encoder_hidden_states": [batch, source, 12],
        "encoder_attention_mask": [batch, source],
    }
    # optimum goes by the order: each layer's own keys and values, then those of the source.
    assert list(described[1][1]) == [
        "logits", *(f"present.{n}.{part}.{kind}" for n in layers for part in ("decoder", "encoder") for kind in kinds)
    ]  # fmt: skip
    assert list(described[2][0]) == [
        "input_ids", "encoder_attention_mask",
        *(f"past_key_values.{n}.{part}.{kind}" for n in layers for part in ("decoder", "encoder") for kind in kinds),
    ]  # fmt: skip
    assert list(described[2][1]) == ["logits", *(f"present.{n}.decoder.{kind}" for n in layers for kind in kinds)]
    assert described[2][0]["past_key_values.1.decoder.value"] == [batch, 3, past, 4]
    assert described[2][0]["past_key_values.1.encoder.value"] == [batch, 3, source, 4]
    assert described[2][1]["present.1.decoder.key"] == [batch, 3, f"{past} + {target}", 4]


def test_every_weight_lies_once_on_disk(tmp_path):
    model = make(vocab_size=900)  # one matrix for source, target and softmax
    facts, _ = export(model, None, tmp_path)
    numbers = sum(weight.numel() for weight in model.parameters())
    assert facts["bytes"][DATA_FILE] == (tmp_path / DATA_FILE).stat().st_size
    assert 900 * 12 * 4 <= facts["bytes"][DATA_FILE] < 4 * numbers + 4096
    assert facts["tensors"] == len(model.state_dict())
    found = logits_of(VaswaniOnnxModel.from_pretrained(tmp_path), batch_of(model.config), targets_of(model.config))
    torch.testing.assert_close(
        found, logits_of(model, batch_of(model.config), targets_of(model.config)), rtol=0, atol=2e-5
    )


def test_the_files_say_their_versions_and_nothing_of_where_they_were_made(plain):
    _, folder = plain
    for name in GRAPHS:
        graph = onnx.load(str(folder / name), load_external_data=False)
        assert [(one.domain, one.version) for one in graph.opset_import] == [("", OPSET)]
        assert graph.ir_version == 8
        content = (folder / name).read_bytes()
        assert str(folder).encode() not in content
        assert str(ROOT).encode() not in content


def test_the_same_model_gives_the_same_files(plain, tmp_path):
    model, folder = plain
    export(model, None, tmp_path)
    for name in (*GRAPHS, DATA_FILE):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_a_weight_without_a_place_is_an_error_and_writes_nothing(tmp_path):
    model = make()
    model.model.decoder.layers[1].stray = torch.nn.Parameter(torch.randn(3, 4))
    with pytest.raises(ConversionError, match=r"1 weights have no place.*decoder\.layers\.1\.stray"):
        export(model, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_has_no_form_is_refused_by_name_before_anything_is_written(tmp_path):
    with pytest.raises(ConversionError, match=r"`activation_function` 'mish'"):
        export(make(activation_function="mish"), None, tmp_path / "out")
    with pytest.raises(ConversionError, match=r"no quantization 'int3'.*int8"):
        export(make(), None, tmp_path / "out", quantization="int3")
    assert not (tmp_path / "out").exists()


def test_half_precision_is_exported_in_full_and_said(tmp_path):
    model = make().to(torch.bfloat16)
    facts, _ = export(model, None, tmp_path)
    assert any("were bfloat16" in one for one in facts["choices"])
    assert model.dtype == torch.bfloat16
    full = make()
    full.load_state_dict(model.state_dict())
    batch, targets = batch_of(full.config), targets_of(full.config)
    found = logits_of(VaswaniOnnxModel.from_pretrained(tmp_path), batch, targets)
    torch.testing.assert_close(found, logits_of(full, batch, targets), rtol=0, atol=2e-5)


def test_losses_name_the_learned_table_and_the_batch_scales(tmp_path):
    _, losses = export(make(position_encoding="learned"), None, tmp_path, quantization="int8")
    assert any("16 positions" in one for one in losses)
    assert any("neighbours" in one for one in losses)
    _, losses = export(make(), None, tmp_path)
    assert not any("positions" in one or "neighbours" in one for one in losses)


def test_files_that_are_in_use_can_be_exported_over(tmp_path):
    model = make(vocab_size=900)
    batch, targets = batch_of(model.config), targets_of(model.config)
    export(model, None, tmp_path)
    served = VaswaniOnnxModel.from_pretrained(tmp_path)
    before = logits_of(served, batch, targets)
    other = make(vocab_size=30)
    export(other, None, tmp_path)
    assert torch.equal(logits_of(served, batch, targets), before)
    assert VaswaniOnnxModel.from_pretrained(tmp_path).config.vocab_size == 30
    assert not list(tmp_path.glob("*.new"))


# ---------------------------------------------------------------------- int8
@pytest.mark.parametrize("shape", ["the paper's", "no matrix twice", "split vocabularies, odd heads"])
def test_int8_is_small_and_near(shape, tmp_path):
    model = make(**{**SHAPES[shape], "vocab_size": 900, "d_model": 48, "d_ff": 96})
    with torch.no_grad():  # as other toolkits have it: no scale can be found in such a row
        for table in {model.model.encoder.embed_tokens, model.model.shared}:
            table.weight[model.config.pad_token_id] = 0.0
    batch, targets = batch_of(model.config), targets_of(model.config)
    full, _ = export(model, None, tmp_path / "full")
    small, _ = export(model, None, tmp_path / "small", quantization="int8")
    assert small["quantization"] == "int8"
    assert small["bytes"][DATA_FILE] < 0.35 * full["bytes"][DATA_FILE]
    expected = logits_of(model, batch, targets)
    found = logits_of(VaswaniOnnxModel.from_pretrained(tmp_path / "small"), batch, targets)
    assert (found - expected).abs().max() > 0
    assert (found - expected).std() < 0.05 * expected.std()


def test_int8_stores_a_tied_matrix_once_and_rounds_it_to_a_step(tmp_path):
    model = make(vocab_size=2000, encoder_layers=1, decoder_layers=1)
    facts, _ = export(model, None, tmp_path, quantization="int8")
    matrix = model.lm_head.weight.detach().numpy()
    # One byte a number, a scale and a zero point a row; the encoder has no other table.
    assert facts["bytes"][DATA_FILE] < 1.2 * (matrix.size + 2000 * (4 + 1) * 2)
    graph = onnx.load(str(tmp_path / ENCODER))
    stored = {one.name: onnx.numpy_helper.to_array(one) for one in graph.graph.initializer}
    rows, scale, zero = (stored[f"model.encoder.embed_tokens.weight.{part}"] for part in ("rows", "scale", "zero"))
    assert rows.dtype == np.uint8
    assert {one.op_type for one in graph.graph.node} >= {"MatMulInteger", "DynamicQuantizeLinear"}
    assert [(one.domain, one.version) for one in graph.opset_import] == [("", OPSET)]
    restored = (rows.astype(np.float32) - zero.astype(np.float32)) * scale
    assert np.abs(restored - matrix).max() <= 0.51 * scale.max()
    assert scale.shape == (2000, 1)


# ---------------------------------------------------------------------- bad input
@pytest.fixture(scope="module")
def served(plain):
    return VaswaniOnnxModel.from_pretrained(plain[1])


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learned")
    export(make(position_encoding="learned"), None, folder)
    return VaswaniOnnxModel.from_pretrained(folder)


def test_more_positions_than_a_learned_table_are_refused(learned):
    config = learned.config
    full = batch_of(config, width=16)
    assert logits_of(learned, full, targets_of(config, columns=16)).shape == (5, 16, 41)
    with pytest.raises(ValueError, match="17 positions, but the learned position table has 16 rows"):
        logits_of(learned, batch_of(config, width=17), targets_of(config))
    with pytest.raises(ValueError, match="17 positions, but the learned"):
        logits_of(learned, full, targets_of(config, columns=17))
    cache = learned(**full, decoder_input_ids=targets_of(config, columns=15)).cache
    with pytest.raises(ValueError, match="17 positions, but the learned"):
        learned(**full, decoder_input_ids=targets_of(config, columns=2), cache=cache)
    with pytest.raises(ValueError, match="learned position table"):
        learned.generate(**full, max_new_tokens=20)
    assert learned.generate(**full, num_beams=1).shape[1] <= 17  # the paper's limit yields to the table


@pytest.mark.parametrize("wrong", [41, -1])
def test_ids_outside_the_vocabulary_are_named(served, wrong):
    batch, targets = batch_of(served.config), targets_of(served.config)
    targets[2, 3] = wrong
    with pytest.raises(IndexError, match=rf"Token id {wrong} in `decoder_input_ids`.*41 rows"):
        logits_of(served, batch, targets)
    batch["input_ids"][0, 0] = wrong
    with pytest.raises(IndexError, match=rf"Token id {wrong} in `input_ids`"):
        served.generate(**batch)


def test_empty_batches_and_empty_sources_are_refused(served):
    none = torch.zeros(0, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"`input_ids` is empty: its shape is \(0, 4\)"):
        served(input_ids=none, attention_mask=none, decoder_input_ids=none)
    with pytest.raises(ValueError, match=r"`input_ids` is empty: its shape is \(2, 0\)"):
        served.get_encoder()(input_ids=torch.zeros(2, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="`decoder_input_ids` is empty"):
        served(**batch_of(served.config), decoder_input_ids=torch.zeros(5, 0, dtype=torch.long))


def test_what_the_graphs_cannot_follow_is_refused(served):
    config = served.config
    batch, targets = batch_of(config), targets_of(config)
    with pytest.raises(ValueError, match="holds the padding id 0, but there is no `attention_mask`"):
        served(input_ids=batch["input_ids"], decoder_input_ids=targets)
    mask = torch.ones_like(targets)
    torch.testing.assert_close(
        logits_of(served, batch, targets, decoder_attention_mask=mask), logits_of(served, batch, targets)
    )
    mask[1, 0] = 0
    with pytest.raises(ValueError, match="no mask over the target"):
        served(**batch, decoder_input_ids=targets, decoder_attention_mask=mask)
    with pytest.raises(ValueError, match="`output_attentions` cannot be used"):
        served.generate(**batch, output_attentions=True, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="`labels` cannot be used"):
        served(**batch, decoder_input_ids=targets, labels=targets)
    with pytest.raises(ValueError, match="Pass `decoder_input_ids`"):
        served(**batch)
    with pytest.raises(ValueError, match="StaticLayer"):
        served.generate(**batch, cache_implementation="static", max_new_tokens=3)
    own = StaticCache(config=config, max_cache_len=9)
    with pytest.raises(ValueError, match="StaticLayer"):
        served(**batch, decoder_input_ids=targets, cache=EncoderDecoderCache(own, own))
    with pytest.raises(ValueError, match="must be an `EncoderDecoderCache`, not StaticCache"):
        served(**batch, decoder_input_ids=targets, cache=own)
    with pytest.raises(ValueError, match="bfloat16"):
        served.to(torch.bfloat16)


def test_folders_that_are_none_are_refused(plain, tmp_path):
    _, folder = plain
    with pytest.raises(OSError, match=r"has no encoder_model\.onnx.*hf-vaswani export onnx"):
        VaswaniOnnxModel.from_pretrained(tmp_path)
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="`threads` must be at least 1"):
        VaswaniOnnxModel.from_pretrained(tmp_path, threads=0)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 43, "decoder_layers": 2}))
    with pytest.raises(ValueError, match="vocab_size 41, not 43; decoder_layers 3, not 2"):
        VaswaniOnnxModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = (tmp_path / DECODER).read_bytes()
    (tmp_path / DECODER).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cannot open .*decoder_model\.onnx"):
        VaswaniOnnxModel.from_pretrained(tmp_path)
    (tmp_path / DECODER).write_bytes(whole)
    (tmp_path / DATA_FILE).unlink()
    with pytest.raises(ValueError, match=r"cannot open .*encoder_model\.onnx"):
        VaswaniOnnxModel.from_pretrained(tmp_path)


def test_a_missing_library_is_said_with_its_command(plain, tmp_path, monkeypatch):
    model, folder = plain
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-vaswani\[onnx\]'"):
        VaswaniOnnxModel.from_pretrained(folder)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-vaswani\[onnx\]'"):
        export(model, None, tmp_path)


# ---------------------------------------------------------------------- in use
def test_the_pipeline_and_the_scores_are_the_models(tmp_path):
    texts = ["ein kleines Haus am See", "a small house by the lake", "Zwei Hunde laufen über die Wiese.", "ab" * 9]
    tokenizer = VaswaniTokenizer.train(texts * 9, 300, allow_fewer=True, show_progress=False)
    model = make(vocab_size=len(tokenizer))
    export(model, tokenizer, tmp_path)
    served, loaded = VaswaniOnnxModel.from_pretrained(tmp_path, threads=1), AutoTokenizer.from_pretrained(tmp_path)
    options = {"max_length_offset": 4, "return_scores": True, "num_return_sequences": 2}
    expected = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu")(texts, **options)
    found = pipeline("translation", model=served, tokenizer=loaded, device="cpu")(texts, **options)
    assert [[one["translation_text"] for one in row] for row in found] == [
        [one["translation_text"] for one in row] for row in expected
    ]
    scores = [[one["score"] for one in row] for row in found]
    assert scores == [[pytest.approx(one["score"], abs=1e-4) for one in row] for row in expected]
    arguments = (texts, texts[::-1])
    theirs = evaluate_model(served, loaded, *arguments, max_length_offset=4)
    assert (
        theirs["sacreBLEU"].score
        == evaluate_model(model, tokenizer, *arguments, max_length_offset=4)["sacreBLEU"].score
    )


def test_a_saved_copy_translates_with_the_settings_of_now(plain, tmp_path):
    model, folder = plain
    served = VaswaniOnnxModel.from_pretrained(folder)
    served.generation_config.num_beams = 2
    served.save_pretrained(tmp_path / "copy")
    copied = VaswaniOnnxModel.from_pretrained(tmp_path / "copy")
    batch = batch_of(model.config)
    assert copied.generate(**batch).tolist() == model.generate(**batch, num_beams=2).tolist()
    assert sum(weight.numel() for weight in copied.parameters()) == 0
    served.save_pretrained(folder)  # onto itself: nothing is lost
    assert VaswaniOnnxModel.from_pretrained(folder).generation_config.num_beams == 2
    model.generation_config.save_pretrained(folder)


def test_the_program_for_the_proof_takes_and_gives_lists(plain):
    model, folder = plain
    foreign = program(folder, limit=7)
    sources = [[5, 6, 7, 1], [8, 1], *([[9, n, 1] for n in range(3, 23)])]
    targets = [[2, 4, 5], [2], *([[2, n] for n in range(3, 23)])]
    found = foreign.logits(sources, targets)
    assert [one.shape for one in found] == [(len(row), 41) for row in targets]
    for source, target, rows in zip(sources, targets, found, strict=True):
        expected = logits_of(model, {"input_ids": torch.tensor([source])}, torch.tensor([target]))[0]
        np.testing.assert_allclose(rows, expected, rtol=0, atol=2e-5)
    for beams in (1, 4):
        for source, row in zip(sources, foreign.search(sources, beams), strict=True):
            expected = model.generate(torch.tensor([source]), num_beams=beams, max_new_tokens=7)[0, 1:]
            assert row == expected.tolist()
    assert onnxruntime.__version__ in foreign.name


@pytest.mark.slow  # two hundred lines, four times
def test_the_shipped_model_translates_alike_and_nearly_alike_in_int8(tmp_path):
    if not PAIRS.is_file():
        pytest.skip("the Tatoeba pairs are not here")
    with gzip.open(PAIRS, "rt", encoding="utf-8", newline="\n") as stream:
        rows = [line.rstrip("\n").split("\t") for line in stream]
    lines, references = zip(*[(de, en) for part, en, de in rows if part == "test"][:200], strict=True)
    model = VaswaniForConditionalGeneration.from_pretrained(SHIPPED).eval()
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)

    def translate(one, num_beams):
        found = []
        for at in range(0, len(lines), 32):
            batch = tokenizer(lines[at : at + 32], padding=True, return_tensors="pt")
            ids = one.generate(input_ids=batch.input_ids, attention_mask=batch.attention_mask, num_beams=num_beams)
            found += tokenizer.batch_decode(ids, skip_special_tokens=True)
        return found

    def bleu(found):
        return sacrebleu.corpus_bleu(found, [references]).score

    greedy, beam = translate(model, 1), translate(model, 4)
    for quantization, least, most in ((None, 1.0, 0.1), ("int8", 0.9, 0.3)):
        export(model, tokenizer, tmp_path, quantization=quantization)
        served = VaswaniOnnxModel.from_pretrained(tmp_path, threads=1)
        found = translate(served, 1), translate(served, 4)
        same = [sum(a == b for a, b in zip(*two, strict=True)) for two in zip(found, (greedy, beam), strict=True)]
        print(f"{quantization or 'float32'}: {same} of 200 lines equal, BLEU {bleu(found[1]):.2f} ({bleu(beam):.2f})")
        assert min(same) >= least * 200
        assert abs(bleu(found[1]) - bleu(beam)) <= most
