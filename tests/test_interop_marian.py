"""MarianMTModel folders: in, out and round, against transformers' own MarianMTModel."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from imported_models import loaded
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
)

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer
from hf_vaswani.interop.foreign import ConversionError, ImportOptions
from hf_vaswani.interop.importing import import_model
from hf_vaswani.interop.marian import read
from hf_vaswani.interop.marian_export import RESTORE_KEY, export, reorder_width

SHARED = Path(__file__).parents[2] / "shared" / "data"
SMALL = {
    "vocab_size": 43, "d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "activation_function": "swish",
    "scale_embedding": True, "pad_token_id": 42, "eos_token_id": 0, "decoder_start_token_id": 42,
    "forced_eos_token_id": 0, "max_position_embeddings": 64,
}  # fmt: skip
SPLIT = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 51}
SHAPES = {
    "shared": {},
    "relu, unscaled": {"activation_function": "relu", "scale_embedding": False, "encoder_layers": 1},
    "split": SPLIT,
    "smaller target": {**SPLIT, "vocab_size": 60, "decoder_vocab_size": 47},
    "three matrices": {**SPLIT, "tie_word_embeddings": False},
    "shared name, three matrices": {"tie_word_embeddings": False},
}


def marian(folder, changes=None, seed=0, **settings):
    """A small random MarianMTModel, saved by transformers."""
    torch.manual_seed(seed)
    model = MarianMTModel(MarianConfig(**{**SMALL, **(changes or {})})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                parameter.normal_(0, 0.4 if parameter.dim() > 1 else 0.2)
            if "layer_norm.weight" in name:
                parameter.add_(1)
        model.final_logits_bias.normal_(0, 0.5)
        model.final_logits_bias[0, 0] += 2  # so that some outputs end
    bad = [[model.config.pad_token_id]]
    model.generation_config.update(num_beams=3, max_length=20, bad_words_ids=bad, **settings)
    model.save_pretrained(folder)
    return model


def random_batch(config, count, seed=1):
    """Sources of unlike lengths with their end token, padded on the right, and targets for them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 10, (count,), generator=generator).tolist()
    source = torch.full((count, 10), config.pad_token_id)
    for row, length in zip(source, lengths, strict=True):
        row[:length] = torch.randint(1, min(config.vocab_size, 42), (length,), generator=generator)
        row[length - 1] = 0
    target = torch.randint(1, 42, (count, 6), generator=generator)
    target[:, 0] = config.decoder_start_token_id
    mask = torch.zeros_like(source)
    for row, length in zip(mask, lengths, strict=True):
        row[:length] = 1
    return source, mask, target


@torch.no_grad()
def difference(one, other, count=20):
    source, mask, target = random_batch(one.config, count)
    inputs = {"input_ids": source, "attention_mask": mask, "decoder_input_ids": target}
    return float((one(**inputs).logits - other(**inputs).logits).abs().max())


# ---------------------------------------------------------------------- in
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_searches_are_those_of_the_original(tmp_path, shape):
    original = marian(tmp_path / "m", SHAPES[shape])
    model = loaded(read(tmp_path / "m", ImportOptions()))
    assert difference(original, model) < 1e-4
    source, mask, _ = random_batch(original.config, 50, seed=4)
    outputs = {}
    for beams in (1, 3):
        arguments = {"input_ids": source, "attention_mask": mask, "num_beams": beams}
        outputs[beams] = original.generate(**arguments)
        assert model.generate(**arguments).tolist() == outputs[beams].tolist()
    assert len({tuple(row) for row in outputs[1].tolist()}) > 1


def test_whole_import_is_checked_against_marianmt_and_loads_anywhere(tmp_path):
    original = marian(tmp_path / "m")
    report = import_model("marian", tmp_path / "m", tmp_path / "out", count=12)
    parity = report.parities[0]
    assert "MarianMTModel" in parity.against
    assert parity.logit_difference < 1e-4
    assert (parity.greedy_equal, parity.beam_equal) == (12, 12)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert isinstance(model, VaswaniForConditionalGeneration)
    settings = model.generation_config
    assert (settings.num_beams, settings.max_length, settings.length_penalty, settings.forced_eos_token_id) == (
        3,
        20,
        1,
        0,
    )
    assert settings.bad_words_ids == [[42]]
    assert settings.max_length_offset is None
    assert difference(original, model) < 1e-4


def test_settings_of_old_folders_are_in_their_config(tmp_path):
    marian(tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").unlink()
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config |= {"num_beams": 6, "max_length": 77, "bad_words_ids": [[42]], "renormalize_logits": True}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    foreign = read(tmp_path / "m", ImportOptions())
    found = {
        name: foreign.generation[name] for name in ("num_beams", "max_length", "bad_words_ids", "renormalize_logits")
    }
    assert found == {"num_beams": 6, "max_length": 77, "bad_words_ids": [[42]], "renormalize_logits": True}
    assert foreign.config["activation_function"] == "silu"


def test_training_options_are_carried_or_named(tmp_path):
    marian(tmp_path / "m", {"dropout": 0.2, "attention_dropout": 0.05, "encoder_layerdrop": 0.1})
    foreign = read(tmp_path / "m", ImportOptions())
    assert (foreign.config["dropout"], foreign.config["attention_dropout"]) == (0.2, 0.05)
    assert any("encoder_layerdrop" in line for line in foreign.losses)


@pytest.mark.parametrize("form", ["torch", "sharded torch", "sharded safetensors", "half precision"])
def test_every_way_that_weights_are_saved_is_read(tmp_path, form):
    folder = tmp_path / "m"
    original = marian(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if form == "half precision":
        save_file({name: tensor.half() for name, tensor in tensors.items()}, file, {"format": "pt"})
        original = MarianMTModel.from_pretrained(folder, dtype=torch.float32).eval()
    elif form == "sharded safetensors":
        shutil.rmtree(folder)
        original.save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
    else:
        file.unlink()
        if form == "torch":
            # As files of before safetensors: every tied matrix under all of its names.
            tied = dict.fromkeys(original.all_tied_weights_keys, tensors["model.shared.weight"])
            torch.save({**tensors, **tied}, folder / "pytorch_model.bin")
        else:
            halves = {"a.bin": dict(list(tensors.items())[:50]), "b.bin": dict(list(tensors.items())[50:])}
            for name, part in halves.items():
                torch.save(part, folder / name)
            index = {"metadata": {}, "weight_map": {key: name for name, part in halves.items() for key in part}}
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    report = import_model("marian", folder, tmp_path / "out", count=1)
    assert report.parities[0].logit_difference < 1e-4
    assert difference(original, VaswaniForConditionalGeneration.from_pretrained(tmp_path / "out").eval()) < 1e-4


def test_saved_sinusoids_are_left_out_and_trained_positions_refused(tmp_path):
    original = marian(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    table = original.model.encoder.embed_positions.weight.detach()
    names = [f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")]
    save_file({**tensors, **{name: table.half() for name in names}}, file)
    foreign = read(tmp_path / "m", ImportOptions())
    assert any("position table" in line for line in foreign.choices)
    assert difference(original, loaded(foreign)) < 1e-4
    assert import_model("marian", tmp_path / "m", tmp_path / "out", count=3).parities[0].logit_difference < 1e-4
    save_file({**tensors, **{name: table + n + 0.5 for n, name in enumerate(names)}}, file)
    with pytest.raises(ConversionError, match="trained positions"):
        read(tmp_path / "m", ImportOptions())


def test_distinct_source_target_and_output_matrices_stay_three(tmp_path):
    """A file whose matrices differ although its configuration calls them one, as older conversions were."""
    folder = tmp_path / "m"
    marian(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    names = ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"]
    for name in names:
        tensors[name] = torch.randn(43, 16)
    save_file(tensors, file, {"format": "pt"})
    original = MarianMTModel.from_pretrained(folder).eval()
    for name in names:
        torch.testing.assert_close(original.state_dict()[name], tensors[name])
    foreign = read(folder, ImportOptions())
    assert not foreign.config["tie_word_embeddings"]
    assert not foreign.config["tie_encoder_decoder_embeddings"]
    assert sum("two are used" in line for line in foreign.choices) == 2
    assert difference(original, loaded(foreign)) < 1e-4


def test_reading_takes_no_memory_of_its_own(tmp_path):
    marian(tmp_path / "m")
    foreign = read(tmp_path / "m", ImportOptions())
    from_file = load_file(tmp_path / "m" / "model.safetensors")
    assert sum(tensor.nbytes for tensor in foreign.tensors.values()) == sum(t.nbytes for t in from_file.values())
    pointers = [tensor.data_ptr() for tensor in foreign.tensors.values()]
    assert len(set(pointers)) == len(pointers)


# ---------------------------------------------------------------------- refusals and damage
REFUSED = {
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 20,
    "normalize_embedding": True,
    "normalize_before": True,
    "add_final_layer_norm": True,
    "static_position_embeddings": False,
    "extra_pos_embeddings": 2,
    "is_encoder_decoder": False,
    "architectures": ["MarianForCausalLM"],
}


@pytest.mark.parametrize("option", REFUSED)
def test_what_cannot_be_represented_is_refused_by_name(tmp_path, option):
    marian(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, option: REFUSED[option]}))
    with pytest.raises(ConversionError, match=f"`{option}`"):
        import_model("marian", tmp_path / "m", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_folders_and_damaged_ones_are_plain_errors(tmp_path):
    folder = tmp_path / "m"
    marian(folder)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"marian"', '"bart"'))
    with pytest.raises(ConversionError, match="'bart'"):
        read(folder, ImportOptions())
    (folder / "config.json").write_text(config[:-20])
    with pytest.raises(ConversionError, match="is not JSON"):
        read(folder, ImportOptions())
    (folder / "config.json").write_text(config)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConversionError, match="cut off"):
        read(folder, ImportOptions())
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConversionError, match="has no weights"):
        read(folder, ImportOptions())
    torch.save([1, 2], folder / "pytorch_model.bin")
    with pytest.raises(ConversionError, match="something else than tensors"):
        read(folder, ImportOptions())
    with pytest.raises(ConversionError, match=r"should hold one model of Marian, an \.npz; it holds none"):
        read(tmp_path, ImportOptions())


def test_weights_that_hide_code_are_not_run(tmp_path):
    folder = tmp_path / "m"
    marian(folder)
    (folder / "model.safetensors").unlink()
    torch.save({"model.shared.weight": torch.zeros(2), "extra": Path("x")}, folder / "pytorch_model.bin")
    with pytest.raises(ConversionError, match="save_pretrained"):
        read(folder, ImportOptions())


def test_tensors_left_over_missing_or_of_another_size_are_errors(tmp_path):
    folder = tmp_path / "m"
    marian(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.encoder.layernorm_embedding.weight": torch.zeros(16)}, file)
    with pytest.raises(ConversionError, match="layernorm_embedding"):
        read(folder, ImportOptions())
    save_file({name: tensor for name, tensor in tensors.items() if "encoder_attn.q_proj.weight" not in name}, file)
    with pytest.raises(ConversionError, match=r"encoder_attn\.q_proj\.weight"):
        read(folder, ImportOptions())
    save_file({**tensors, "model.shared.weight": torch.zeros(44, 16)}, file)
    with pytest.raises(ConversionError, match=r"\(44, 16\), the hyper-parameters ask for \(43, 16\)"):
        read(folder, ImportOptions())


def test_options_for_the_toolkits_files_are_refused_for_a_folder(tmp_path):
    marian(tmp_path / "m")
    with pytest.raises(ConversionError, match="`source_vocab` means nothing here"):
        read(tmp_path / "m", ImportOptions(source_vocab=tmp_path / "v.yml"))


# ---------------------------------------------------------------------- a real tokenizer and configuration
def opus_folder(folder, pieces=None):
    """The real files of an OPUS-MT model, with few and small random weights."""
    real = SHARED / "tokenizers" / "opus_mt_tc_big_fr_en"
    if not real.is_dir():
        pytest.skip("the real tokenizer files are not in shared/data")
    pytest.importorskip("sentencepiece", reason="needs sentencepiece (pip install sentencepiece)")
    config = json.loads((real / "config.json").read_text())
    small = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "num_hidden_layers": 1, "encoder_ffn_dim": 8,
             "decoder_ffn_dim": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2}  # fmt: skip
    if pieces is not None:
        small |= {"vocab_size": pieces, "decoder_vocab_size": pieces}
        for name in ("pad_token_id", "decoder_start_token_id", "eos_token_id", "forced_eos_token_id"):
            small[name] = min(config[name], pieces - 1)
    changes = {**config, **small}
    settings = {"bad_words_ids", "max_length", "num_beams", "num_hidden_layers", "torch_dtype"}
    model = MarianMTModel(MarianConfig(**{name: value for name, value in changes.items() if name not in settings}))
    model.half().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(changes))
    for name in ("source.spm", "target.spm", "vocab.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(real / name, folder / name)
    if pieces is None:
        shutil.copy(real / "generation_config.json", folder / "generation_config.json")
    return real


def test_a_real_tokenizer_comes_along_as_it_is(tmp_path):
    real = opus_folder(tmp_path / "m")
    import_model("marian", tmp_path / "m", tmp_path / "out", count=4)
    before, after = AutoTokenizer.from_pretrained(tmp_path / "m"), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert type(after).__name__ == "MarianTokenizer"
    assert AutoConfig.from_pretrained(tmp_path / "out").model_type == "vaswani"
    for name in ("source.spm", "target.spm"):
        assert (tmp_path / "out" / name).read_bytes() == (real / name).read_bytes()
    assert json.loads((tmp_path / "out" / "vocab.json").read_text()) == json.loads((real / "vocab.json").read_text())
    lines = ["Où est l'arrêt de bus ?", "C'est la vie & 12:30.", "日本", "Il a dit : « non »."]
    for line in lines:
        assert after(line)["input_ids"] == before(line)["input_ids"]
        assert after(text_target=line)["input_ids"] == before(text_target=line)["input_ids"]
    model = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert model.generation_config.num_beams == 4
    assert model.generation_config.max_length == 512
    assert model.config.eos_token_id == 43311
    assert model.config.unk_token_id == after.unk_token_id
    tokens = model.generate(**after(lines[:2], return_tensors="pt", padding=True), max_length=6)
    assert len(after.batch_decode(tokens, skip_special_tokens=True)) == 2


def test_a_tokenizer_with_more_pieces_than_rows_is_refused(tmp_path):
    opus_folder(tmp_path / "m", pieces=53000)
    with pytest.raises(ConversionError, match="53017 pieces, the source embedding 53000 rows"):
        read(tmp_path / "m", ImportOptions())


def test_without_sentencepiece_the_error_says_what_to_install(tmp_path, monkeypatch):
    marian(tmp_path / "m")
    (tmp_path / "m" / "source.spm").write_bytes(b"")
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    with pytest.raises(ConversionError, match="pip install sentencepiece"):
        read(tmp_path / "m", ImportOptions())


# ---------------------------------------------------------------------- out
OURS = {
    "vocab_size": 45, "d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "num_attention_heads": 4, "d_ff": 24,
    "max_position_embeddings": 64, "layer_norm_eps": 1e-5,
}  # fmt: skip
OUR_SHAPES = {
    "paper": {},
    "halves": {"sinusoid_layout": "halves"},
    "biases": {"attention_bias": True, "output_bias": True},
    "split vocabularies": {"source_vocab_size": 50},
    "two embeddings": {"tie_encoder_decoder_embeddings": False},
    "output of its own": {"tie_word_embeddings": False, "tie_encoder_decoder_embeddings": True},
    "three matrices": {"tie_word_embeddings": False, "tie_encoder_decoder_embeddings": False},
    "relatives": {"activation_function": "gelu", "scale_embedding": False, "unk_token_id": 3, "dropout": 0.3},
}  # fmt: skip


def ours(changes=None, seed=0):
    torch.manual_seed(seed)
    model = VaswaniForConditionalGeneration(VaswaniConfig(**{**OURS, **(changes or {})})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.3)
            if "layer_norm.weight" in name:
                parameter.add_(1)
    return model


def written(model, folder, tokenizer=None):
    folder.mkdir(exist_ok=True)
    return export(model, tokenizer, folder)


@pytest.mark.parametrize("shape", OUR_SHAPES)
def test_exported_models_compute_the_same_and_come_back_bit_for_bit(tmp_path, shape):
    model = ours(OUR_SHAPES[shape])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    facts, _ = written(model, tmp_path / "m")
    exported = MarianMTModel.from_pretrained(tmp_path / "m").eval()
    source, mask, target = random_batch(exported.config, 20)
    source[source == exported.config.pad_token_id] = 0
    target = target.clamp(max=44)
    inputs = {"input_ids": source, "attention_mask": mask, "decoder_input_ids": target}
    with torch.no_grad():
        torch.testing.assert_close(exported(**inputs).logits, model(**inputs).logits, atol=1e-4, rtol=0)
    assert facts["tensors"] == len(load_file(tmp_path / "m" / "model.safetensors"))

    import_model("marian", tmp_path / "m", tmp_path / "back", count=1)
    back = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "back")
    after = back.state_dict()
    assert set(after) == set(before)
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]), name
    names = VaswaniConfig.__annotations__
    assert {n: getattr(back.config, n) for n in names} | {"tie_encoder_decoder_embeddings": None} == {
        n: getattr(model.config, n) for n in names
    } | {"tie_encoder_decoder_embeddings": None}
    assert back.config.ties_source_and_target == model.config.ties_source_and_target
    settings, own = back.generation_config, model.generation_config
    for name in ("num_beams", "length_penalty", "length_penalty_type", "max_length_offset", "early_stopping"):
        assert getattr(settings, name) == getattr(own, name)


def test_the_epsilon_of_the_paper_is_named_as_lost_and_comes_back(tmp_path):
    model = ours({"layer_norm_eps": 1e-6})
    _, losses = written(model, tmp_path / "m")
    assert any("layer_norm_eps" in line for line in losses)
    foreign = read(tmp_path / "m", ImportOptions())
    assert foreign.config["layer_norm_eps"] == 1e-6
    assert foreign.program is None  # MarianMTModel computes another function than what comes back
    exported = MarianMTModel.from_pretrained(tmp_path / "m").eval()
    source, mask, target = random_batch(exported.config, 20)
    inputs = {"input_ids": source.clamp(min=1, max=42), "attention_mask": mask, "decoder_input_ids": target}
    with torch.no_grad():
        apart = (exported(**inputs).logits - model(**inputs).logits).abs().max()
    assert 0 < apart < 1e-2


def test_what_of_the_papers_search_is_lost_is_said(tmp_path):
    model = ours()
    model.generation_config.forced_prefix_ids = [4]
    _, losses = written(model, tmp_path / "m")
    text = " ".join(losses)
    for word in ("length penalty", "source length + n", "forced_prefix_ids", "label_smoothing"):
        assert word in text
    settings = GenerationConfig.from_pretrained(tmp_path / "m")
    assert (settings.num_beams, settings.length_penalty, settings.max_length) == (4, 0.6, 64)
    assert settings.decoder_start_token_id == model.config.decoder_start_token_id
    assert not hasattr(settings, "length_penalty_type")
    model.generation_config.length_penalty = 0.0
    assert "length penalty" not in " ".join(written(model, tmp_path / "other")[1])


NOT_MARIAN = {
    "norm_position": {"norm_position": "pre"},
    "final_norm": {"final_norm": True},
    "position_encoding": {"position_encoding": "learned"},
    "sinusoid_exponent": {"sinusoid_exponent": "2i/(d-2)"},
    "position_offset": {"position_offset": 2},
    "d_k": {"d_k": 8, "d_v": 4},
    "d_v": {"d_k": 4, "d_v": 8},
    "eos_token_id": {"eos_token_id": [1, 3]},
    "zero_start_embedding": {"zero_start_embedding": True},
}


@pytest.mark.parametrize("option", NOT_MARIAN)
def test_shapes_that_marianmt_does_not_have_are_refused_by_name(tmp_path, option):
    with pytest.raises(ConversionError, match=f"`{option}`"):
        written(ours(NOT_MARIAN[option]), tmp_path / "m")
    assert not any((tmp_path / "m").iterdir())


def test_a_zero_start_vector_needs_a_zero_row_only(tmp_path):
    model = ours({"zero_start_embedding": True})
    with torch.no_grad():
        model.model.shared.weight[model.config.decoder_start_token_id] = 0
    written(model, tmp_path / "m")
    exported = MarianMTModel.from_pretrained(tmp_path / "m").eval()
    target = torch.tensor([[model.config.decoder_start_token_id, 4, 5]])
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor([[7, 8, 1]]), "decoder_input_ids": target}
        torch.testing.assert_close(exported(**inputs).logits, model(**inputs).logits, atol=1e-4, rtol=0)


def test_reordering_the_width_leaves_the_function_and_undoes_itself():
    model = ours()
    state = model.state_dict()
    moved = reorder_width(state, "sines first")
    assert not torch.equal(moved["model.shared.weight"], state["model.shared.weight"])
    back = reorder_width(moved, "sines first", undo=True)
    assert all(torch.equal(back[name], state[name]) for name in state)
    other = ours({"sinusoid_layout": "halves"})
    other.load_state_dict(moved)
    inputs = {"input_ids": torch.tensor([[7, 8, 9, 1]]), "decoder_input_ids": torch.tensor([[2, 5, 6]])}
    with torch.no_grad():
        torch.testing.assert_close(other(**inputs).logits, model(**inputs).logits, atol=1e-5, rtol=0)
    same = reorder_width(state, "unchanged")
    assert all(same[name] is state[name] for name in state)


def test_an_exported_model_that_was_trained_on_keeps_what_it_learned(tmp_path):
    model = ours()
    written(model, tmp_path / "m")
    exported = MarianMTModel.from_pretrained(tmp_path / "m").eval()
    with torch.no_grad():
        exported.model.encoder.layers[0].self_attn.q_proj.bias.normal_()
        exported.final_logits_bias.normal_()
    exported.save_pretrained(tmp_path / "m")
    foreign = read(tmp_path / "m", ImportOptions())
    assert foreign.config["attention_bias"]
    assert foreign.config["output_bias"]
    back = loaded(foreign)
    inputs = {"input_ids": torch.tensor([[7, 8, 9, 1]]), "decoder_input_ids": torch.tensor([[2, 5, 6]])}
    with torch.no_grad():
        torch.testing.assert_close(back(**inputs).logits, exported(**inputs).logits, atol=1e-4, rtol=0)


def test_a_damaged_or_outdated_restore_entry_is_refused(tmp_path):
    written(ours(), tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    for entry in ([], {"width_order": "at random"}, {**config[RESTORE_KEY], "config": None}):
        (tmp_path / "m" / "config.json").write_text(json.dumps({**config, RESTORE_KEY: entry}))
        with pytest.raises(ConversionError, match="is not as an export writes it"):
            read(tmp_path / "m", ImportOptions())
    config[RESTORE_KEY]["config"]["vocab_size"] = 46
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match="of another size"):
        read(tmp_path / "m", ImportOptions())


def test_our_tokenizer_loads_without_the_package_and_comes_back(tmp_path):
    lines = ["A small cat sleeps in the garden.", "Two dogs run through the old house.", "Eine Katze schläft."] * 9
    tokenizer = VaswaniTokenizer.train(iter(lines), 320, allow_fewer=True, reserved=["{name}"])
    model = ours({"vocab_size": len(tokenizer)})
    written(model, tmp_path / "m", tokenizer)
    assert not list((tmp_path / "m").glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    plain = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert type(plain).__module__.startswith("transformers.")
    texts = [*lines[:3], "Dear {name}, 日本 </s> & so on", ""]
    for text in texts:
        assert plain(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert plain.decode(plain(text)["input_ids"], skip_special_tokens=True) == text
    assert (plain.pad_token_id, plain.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    import_model("marian", tmp_path / "m", tmp_path / "back", count=4)
    back = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert isinstance(back, VaswaniTokenizer)
    assert [back(text)["input_ids"] for text in texts] == [tokenizer(text)["input_ids"] for text in texts]


def test_other_tokenizers_are_saved_with_what_they_need(tmp_path):
    opus_folder(tmp_path / "opus")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "opus")
    model = ours({"vocab_size": 53017, "pad_token_id": 53016, "eos_token_id": 43311, "bos_token_id": None,
                  "decoder_start_token_id": 53016, "d_model": 8, "num_attention_heads": 2})  # fmt: skip
    _, losses = written(model, tmp_path / "m", tokenizer)
    again = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert type(again).__name__ == "MarianTokenizer"
    assert again("le chat")["input_ids"] == tokenizer("le chat")["input_ids"]
    assert not any("package" in line for line in losses)


def test_a_pipeline_of_transformers_parts_translates_with_an_export(tmp_path):
    tokenizer = VaswaniTokenizer.train(iter(["ein Haus", "a house"] * 9), 300, allow_fewer=True)
    model = ours({"vocab_size": len(tokenizer)})
    written(model, tmp_path / "m", tokenizer)
    exported, plain = MarianMTModel.from_pretrained(tmp_path / "m"), AutoTokenizer.from_pretrained(tmp_path / "m")
    batch = plain(["ein Haus", "Haus"], return_tensors="pt", padding=True)
    found = exported.generate(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_length=9, num_beams=1
    )
    wanted = model.generate(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_length=9, num_beams=1
    )  # fmt: skip
    np.testing.assert_array_equal(found.numpy(), wanted.numpy())


@pytest.mark.parametrize(
    ("name", "value"),
    [("encoder_layers", "six"), ("scale_embedding", "yes"), ("d_model", None), ("dropout", []), ("architectures", 5)],
)
def test_a_value_of_another_kind_is_refused_by_name(tmp_path, name, value):
    marian(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, name: value}))
    with pytest.raises(ConversionError, match=name):
        read(tmp_path, ImportOptions())


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["[" * 200_000, "[1, 2]", "null"], ids=["depth", "list", "null"])
def test_a_settings_file_that_holds_something_else_is_named(tmp_path, name, text):
    marian(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ConversionError, match=name):
        read(tmp_path, ImportOptions())
