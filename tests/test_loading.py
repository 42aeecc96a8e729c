"""What is saved comes back the same bit for bit, and what cannot come back is refused by name."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from pickle import UnpicklingError

import pytest
import torch
from conftest import TINY
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSeq2SeqLM, GenerationConfig, MarianConfig, MarianMTModel

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniModel
from hf_vaswani.generation_vaswani import VaswaniGenerationMixin
from hf_vaswani.modeling_vaswani import VaswaniEncoder

MATRICES = ("model.shared.weight", "model.encoder.embed_tokens.weight", "lm_head.weight")
PARENT = Path(__file__).parents[1]

# tie_word_embeddings, tie_encoder_decoder_embeddings, source_vocab_size
TYINGS = [
    tying for tying in itertools.product((True, False), (None, True, False), (None, 41)) if tying[1:] != (True, 41)
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build(seed=0, **changes):
    torch.manual_seed(seed)
    return VaswaniForConditionalGeneration(VaswaniConfig(**{**TINY, **changes})).eval()


def example():
    ids = torch.tensor([[3, 9, 17, 25, 36, 8, 1], [30, 4, 21, 1, 0, 0, 0]])
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "decoder_input_ids": torch.tensor([[2, 5, 11, 36, 20], [2, 7, 7, 3, 1]]),
    }


@torch.no_grad()
def logits_of(model):
    return model.eval()(**example()).logits


def keys_of(folder):
    with safe_open(Path(folder) / "model.safetensors", "pt") as file:
        return sorted(file.keys())


def tables_of(model):
    return [module.table for module in model.modules() if hasattr(module, "table")]


def formula(length, width, layout="interleaved"):
    """The position table in float64 by numpy-free loops over the formula, rounded once."""
    pos = torch.arange(length, dtype=torch.float64)[:, None]
    rate = 10000.0 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    table = torch.empty(length, width, dtype=torch.float64)
    sines, cosines = (slice(0, None, 2), slice(1, None, 2)) if layout == "interleaved" else (
        slice(0, width // 2), slice(width // 2, None)
    )  # fmt: skip
    table[:, sines], table[:, cosines] = (pos / rate).sin(), (pos / rate).cos()
    return table.float()


# ------------------------------------------------------------------ one subprocess that loads all folders
FRESH_PROCESS = """
import json, sys, torch
from hf_vaswani import VaswaniForConditionalGeneration
from test_loading import logits_of, tables_of
report = {}
for folder in sys.argv[2:]:
    model = VaswaniForConditionalGeneration.from_pretrained(folder)
    own = torch.load(folder + "/expected.pt")
    pointers = [one.weight.data_ptr() for one in
                (model.model.shared, model.model.encoder.embed_tokens, model.model.decoder.embed_tokens, model.lm_head)]
    report[folder] = {
        "dtype": str(model.dtype),
        "is_equal": torch.equal(logits_of(model), own["logits"]),
        "tables_are_equal": all(torch.equal(one, own["table"]) for one in tables_of(model)) and len(tables_of(model)),
        "shared_with": [pointers.index(one) for one in pointers],
    }
with open(sys.argv[1], "w") as file:
    json.dump(report, file)
"""


def name_of(tying, dtype):
    return "-".join(map(str, (*tying, dtype)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Every combination of tying in two precisions, saved here and loaded by one fresh process: folder and report."""
    root = tmp_path_factory.mktemp("tyings")
    for tying, dtype in itertools.product(TYINGS, DTYPES):
        word, source_and_target, source_vocab_size = tying
        model = build(
            tie_word_embeddings=word,
            tie_encoder_decoder_embeddings=source_and_target,
            source_vocab_size=source_vocab_size,
        ).to(DTYPES[dtype])
        folder = root / name_of(tying, dtype)
        model.save_pretrained(folder)
        torch.save({"logits": logits_of(model), "table": formula(64, 16)}, folder / "expected.pt")
    environment = {**os.environ, "PYTHONPATH": f"{PARENT}{os.pathsep}{PARENT / 'tests'}"}
    subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, str(root / "report.json"), *map(str, sorted(root.glob("*-*")))],
        env=environment, cwd=root, check=True, timeout=120,
    )  # fmt: skip
    report = json.loads((root / "report.json").read_text())
    return root, {Path(folder).name: one for folder, one in report.items()}


def expected_matrices(word, source_and_target, source_vocab_size):
    if source_and_target is None:
        source_and_target = word and source_vocab_size is None
    return [name for name, is_saved in zip(MATRICES, (True, not source_and_target, not word), strict=True) if is_saved]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tying", TYINGS, ids=str)
def test_every_tying_comes_back_equal_in_a_fresh_process(saved, tying, dtype):
    root, report = saved
    found = report[name_of(tying, dtype)]
    assert found["dtype"] == f"torch.{dtype}"
    assert found["is_equal"]
    assert found["tables_are_equal"] == 2  # two tables, both equal
    names = expected_matrices(*tying)
    assert [key for key in keys_of(root / name_of(tying, dtype)) if key in MATRICES] == sorted(names)
    # Of shared, source, target and output matrix, each by the first that it shares its storage with.
    assert found["shared_with"] == [0, 1 if MATRICES[1] in names else 0, 0, 3 if MATRICES[2] in names else 0]


@pytest.mark.parametrize("tying", TYINGS, ids=str)
def test_a_missing_matrix_is_refused_by_name(saved, tying, tmp_path):
    root, _ = saved
    for name in expected_matrices(*tying):
        folder = tmp_path / name
        shutil.copytree(root / name_of(tying, "float32"), folder)
        weights = load_file(folder / "model.safetensors")
        del weights[name]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"lacks .*{name}"):
            VaswaniForConditionalGeneration.from_pretrained(folder)


def test_untied_matrices_stay_three_different_ones(saved):
    root, _ = saved
    model = VaswaniForConditionalGeneration.from_pretrained(root / name_of((False, None, None), "float32"))
    source, target, output = (
        one.weight for one in (model.model.encoder.embed_tokens, model.model.decoder.embed_tokens, model.lm_head)
    )
    assert not torch.equal(source, target)
    assert not torch.equal(target, output)
    assert not torch.equal(source, output)


# ------------------------------------------------------------------ the position table
def folder_of(model, path):
    model.save_pretrained(path)
    return path


ROADS = {
    "fresh": lambda folder: build(),
    "from_config": lambda folder: AutoModelForSeq2SeqLM.from_config(VaswaniConfig(**TINY)),
    "base_from_config": lambda folder: AutoModel.from_config(VaswaniConfig(**TINY)),
    "from_config_bf16": lambda folder: AutoModelForSeq2SeqLM.from_config(VaswaniConfig(**TINY), dtype=torch.bfloat16),
    "plain": lambda folder: VaswaniForConditionalGeneration.from_pretrained(folder),
    "bf16": lambda folder: VaswaniForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16),
    "device_map_cpu": lambda folder: VaswaniForConditionalGeneration.from_pretrained(folder, device_map="cpu"),
    "device_map_auto": lambda folder: VaswaniForConditionalGeneration.from_pretrained(folder, device_map="auto"),
    "auto": lambda folder: AutoModelForSeq2SeqLM.from_pretrained(folder),
    "base": lambda folder: VaswaniModel.from_pretrained(folder),
    "encoder_alone": lambda folder: VaswaniEncoder.from_pretrained(folder_of(build().model.encoder, folder / "part")),
    "to_bf16": lambda folder: build().to(torch.bfloat16),
    "half": lambda folder: build().half(),
    "there_and_back": lambda folder: build().half().float(),
    "double": lambda folder: build().double(),
}


@pytest.mark.parametrize("road", ROADS)
def test_the_position_table_is_the_formula_on_every_road(road, tmp_path):
    expected = formula(64, 16)
    tables = tables_of(ROADS[road](folder_of(build(), tmp_path)))
    assert tables
    for table in tables:
        assert table.dtype == torch.float32
        assert torch.equal(table, expected)


@pytest.mark.parametrize("road", ["plain", "device_map_cpu", "device_map_auto", "auto"])
def test_logits_are_equal_bit_for_bit_on_every_road_that_keeps_the_precision(road, tmp_path):
    assert torch.equal(logits_of(ROADS[road](folder_of(build(), tmp_path))), logits_of(build()))


def test_the_file_holds_no_position_table_and_one_matrix_of_three(tmp_path):
    model = build()
    keys = keys_of(folder_of(model, tmp_path))
    assert not [key for key in keys if "position" in key or "table" in key]
    assert [key for key in keys if "shared" in key or "embed" in key or "lm_head" in key] == ["model.shared.weight"]
    stored = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    assert stored == model.num_parameters()


def test_a_table_that_has_grown_is_not_saved(tmp_path):
    model = build(max_position_embeddings=8)
    long_source = torch.full((1, 30), 5)
    model(input_ids=long_source, attention_mask=torch.ones_like(long_source), decoder_input_ids=long_source[:, :3])
    assert torch.equal(model.model.encoder.embed_positions.table[:30], formula(30, 16))
    again = VaswaniForConditionalGeneration.from_pretrained(folder_of(model, tmp_path))
    assert torch.equal(again.model.encoder.embed_positions.table, formula(8, 16))


def test_a_learned_table_is_saved(tmp_path):
    model = build(position_encoding="learned")
    again = VaswaniForConditionalGeneration.from_pretrained(folder_of(model, tmp_path))
    assert "model.encoder.embed_positions.weight" in keys_of(tmp_path)
    assert torch.equal(logits_of(again), logits_of(model))


def test_the_layout_of_the_table_is_saved_and_restored(tmp_path):
    model = build(sinusoid_layout="halves")
    again = VaswaniForConditionalGeneration.from_pretrained(folder_of(model, tmp_path))
    assert again.config.sinusoid_layout == "halves"
    assert all(torch.equal(table, formula(64, 16, "halves")) for table in tables_of(again))
    assert torch.equal(logits_of(again), logits_of(model))
    assert not torch.equal(logits_of(again), logits_of(build()))  # the same weights under the other layout


# ------------------------------------------------------------------ resizing
@pytest.mark.parametrize(
    ("changes", "source_rows", "share_count"),
    [
        ({}, 40, 1),
        ({"output_bias": True}, 40, 1),
        ({"tie_encoder_decoder_embeddings": False}, 40, 2),
        ({"tie_word_embeddings": False}, 40, 3),
        ({"source_vocab_size": 41}, 41, 2),
        ({"source_vocab_size": 41, "tie_word_embeddings": False, "output_bias": True}, 41, 3),
    ],
    ids=str,
)
def test_resizing_keeps_tying_loss_and_saving_right(changes, source_rows, share_count, tmp_path):
    model = build(**changes)
    before = logits_of(model)
    model.resize_token_embeddings(40)
    assert model.config.vocab_size == model.lm_head.out_features == 40
    torch.testing.assert_close(logits_of(model)[..., :37], before, atol=1e-6, rtol=0)

    def matrices(one):
        return [one.model.encoder.embed_tokens.weight, one.model.decoder.embed_tokens.weight, one.lm_head.weight]

    assert [len(weight) for weight in matrices(model)] == [source_rows, 40, 40]
    assert len({weight.data_ptr() for weight in matrices(model)}) == share_count
    assert model.lm_head.bias is None or model.lm_head.bias.shape == (40,)
    batch = {key: value for key, value in example().items() if key != "decoder_input_ids"}
    batch["input_ids"][0, 0] = batch["input_ids"].new_tensor(source_rows - 1)
    loss = model.train()(**batch, labels=torch.tensor([[38, 39, 37, 1], [39, 1, -100, -100]])).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert model.lm_head.weight.grad[39].abs().sum() > 0

    again = VaswaniForConditionalGeneration.from_pretrained(folder_of(model.eval(), tmp_path))
    assert again.config.vocab_size == 40
    assert again.config.source_vocab_size == changes.get("source_vocab_size")
    assert len({weight.data_ptr() for weight in matrices(again)}) == share_count
    assert torch.equal(logits_of(again), logits_of(model))


# ------------------------------------------------------------------ generation settings
def test_the_search_of_the_paper_is_used_without_arguments_after_loading(tmp_path, monkeypatch):
    used = []
    search = VaswaniGenerationMixin._beam_search

    def spy(self, *args, generation_config, **kwargs):
        used.append((generation_config.num_beams, float(generation_config.length_penalty)))
        used.append((generation_config.length_penalty_type, generation_config.max_length_offset))
        return search(self, *args, generation_config=generation_config, **kwargs)

    monkeypatch.setattr(VaswaniGenerationMixin, "_beam_search", spy)
    again = AutoModelForSeq2SeqLM.from_pretrained(folder_of(build(), tmp_path))
    batch = {key: value for key, value in example().items() if key != "decoder_input_ids"}
    again.generate(**batch)
    assert used == [(4, 0.6), ("gnmt", 50)]


def test_changed_generation_settings_survive(tmp_path):
    model = build()
    model.generation_config.update(num_beams=3, length_penalty_type="power", max_length_offset=7)
    again = VaswaniForConditionalGeneration.from_pretrained(folder_of(model, tmp_path)).generation_config
    assert (again.num_beams, again.length_penalty_type, again.max_length_offset) == (3, "power", 7)


def test_without_a_generation_file_the_paper_is_the_default(tmp_path):
    (folder_of(build(), tmp_path) / "generation_config.json").unlink()
    again = VaswaniForConditionalGeneration.from_pretrained(tmp_path).generation_config
    assert (again.num_beams, again.length_penalty_type) == (4, "gnmt")


def test_a_head_is_put_on_a_base_model_where_tying_gives_its_weights(tmp_path):
    folder = folder_of(build().model, tmp_path / "tied")
    assert torch.equal(logits_of(VaswaniForConditionalGeneration.from_pretrained(folder)), logits_of(build()))
    folder = folder_of(build(tie_word_embeddings=False).model, tmp_path / "untied")
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        VaswaniForConditionalGeneration.from_pretrained(folder)


def test_a_training_state_is_loaded_from_memory(tmp_path):
    model = build()
    again = VaswaniForConditionalGeneration.from_pretrained(None, config=model.config, state_dict=model.state_dict())
    assert torch.equal(logits_of(again), logits_of(model))
    assert torch.equal(tables_of(again)[0], formula(64, 16))


# ------------------------------------------------------------------ folders that do not fit
def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_key_left_over_is_refused_by_name(tmp_path):
    folder = folder_of(build(), tmp_path)
    change_weights(folder, lambda weights: weights.update({"model.encoder.layers.2.extra": torch.zeros(3)}))
    with pytest.raises(ValueError, match=r"also has model\.encoder\.layers\.2\.extra"):
        VaswaniForConditionalGeneration.from_pretrained(folder)


def test_the_lists_of_keys_are_given_on_demand(tmp_path):
    folder = folder_of(build(), tmp_path)
    name = "model.decoder.layers.1.feed_forward.fc2.weight"
    change_weights(folder, lambda weights: weights.update(extra=weights.pop(name)))
    _, info = VaswaniForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert (list(info["missing_keys"]), list(info["unexpected_keys"])) == ([name], ["extra"])


def cut(name, keep):
    def spoil(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep)])

    return spoil


def remove(name):
    return lambda folder: (folder / name).unlink()


def configure(**changes):
    def spoil(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return spoil


def pickle_it(payload):
    def spoil(folder):
        torch.save(payload(folder), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()

    return spoil


class Payload:
    """Would make a file on the way in, if a pickle of it were obeyed."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


FAULTS = {
    "half_weights": (cut("model.safetensors", 0.5), ValueError, "half written"),
    "header_only": (cut("model.safetensors", 0.01), ValueError, "half written"),
    "empty_weights": (cut("model.safetensors", 0), ValueError, "half written"),
    "no_weights": (remove("model.safetensors"), OSError, "model.safetensors"),
    "half_config": (cut("config.json", 0.5), OSError, "config.json"),
    "empty_config": (cut("config.json", 0), OSError, "config.json"),
    "no_config": (remove("config.json"), OSError, "has no config.json"),
    "half_generation_config": (cut("generation_config.json", 0.5), OSError, "generation_config.json"),
    "other_width": (configure(d_ff=32), RuntimeError, r"fc1.weight \(24, 16\), not \(32, 16\)"),
    "more_layers": (configure(encoder_layers=3), ValueError, "lacks model.encoder.layers.2"),
    "fewer_layers": (configure(decoder_layers=2), ValueError, "also has model.decoder.layers.2"),
    "hostile_pickle": (pickle_it(lambda folder: Payload(folder / "obeyed")), UnpicklingError, "Weights only"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_spoilt_folder_is_refused_with_a_reason(fault, tmp_path):
    spoil, error, message = FAULTS[fault]
    spoil(folder_of(build(), tmp_path))
    with pytest.raises(error, match=message):
        VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    assert not (tmp_path / "obeyed").exists()


def test_other_shapes_are_loaded_on_demand(tmp_path):
    configure(vocab_size=40)(folder_of(build(), tmp_path))
    model = VaswaniForConditionalGeneration.from_pretrained(tmp_path, ignore_mismatched_sizes=True)
    assert model.lm_head.out_features == 40


def test_a_pickle_of_plain_tensors_is_read(tmp_path):
    folder = folder_of(build(), tmp_path)
    pickle_it(lambda folder: load_file(folder / "model.safetensors"))(folder)
    assert torch.equal(logits_of(VaswaniForConditionalGeneration.from_pretrained(folder)), logits_of(build()))


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path):
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = MarianConfig(
        vocab_size=37, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, pad_token_id=36, decoder_start_token_id=36,
        forced_eos_token_id=0, **sizes,
    )  # fmt: skip
    MarianMTModel(config).save_pretrained(tmp_path)
    for cls in (VaswaniConfig, VaswaniModel, VaswaniForConditionalGeneration):
        with pytest.raises(ValueError, match="'marian', not 'vaswani'"):
            cls.from_pretrained(tmp_path)


def test_attributes_that_tools_put_on_a_configuration_do_not_stop_loading(tmp_path):
    model = build()
    model.config.norm_epsilon, model.config.layer_norm_epsilon = 0.5, 1e-5
    again = VaswaniForConditionalGeneration.from_pretrained(folder_of(model, tmp_path)).config
    assert (again.norm_epsilon, again.layer_norm_eps) == (0.5, 1e-5)


def test_the_weights_are_saved_in_the_safe_format_only(tmp_path):
    names = {path.name for path in folder_of(build(), tmp_path).iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json"} <= names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]
    assert GenerationConfig.from_pretrained(tmp_path).num_beams == 4
