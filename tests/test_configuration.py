import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.configuration_vaswani import PRESETS


def parameters(name: str, **changes) -> int:
    with torch.device("meta"):
        return VaswaniForConditionalGeneration(VaswaniConfig.from_preset(name, **changes)).num_parameters()


def test_base_has_the_papers_parameter_count():
    assert parameters("base") == 63_045_632
    # With biases in the attention's maps as well, as transformers' Marian has them.
    assert parameters("base", attention_bias=True) == 63_082_496


@pytest.mark.parametrize(
    ("larger", "smaller", "millions"),
    [
        ("table3-C-N8", "table3-C-N2", 80 - 36),
        ("table3-C-N8", "base", 80 - 65),
        ("base", "table3-C-N4", 65 - 50),
        ("table3-C-dff4096", "table3-C-dff1024", 90 - 53),
        ("table3-C-dff4096", "base", 90 - 65),
        ("base", "table3-B-dk32", 65 - 60),
        ("base", "table3-B-dk16", 65 - 58),
    ],
)
def test_differences_of_table_3s_parameter_column(larger, smaller, millions):
    # Each figure of the column is rounded to a million, so a difference is off by at most one. The rows that change
    # d_model are left out: the column holds about two million that the paper does not explain.
    assert abs((parameters(larger) - parameters(smaller)) / 1e6 - millions) <= 1.0


def test_rows_that_keep_the_size_keep_the_parameter_count():
    for row in ("A-h1", "A-h4", "A-h16", "A-h32", "D-dropout0.0", "D-dropout0.2", "D-smoothing0.0", "D-smoothing0.2"):
        assert parameters(f"table3-{row}") == parameters("base"), row


def test_every_row_of_table_3_changes_what_the_paper_says():
    assert len([name for name in PRESETS if name.startswith("table3-")]) == 20
    row = VaswaniConfig.from_preset
    assert (row("table3-A-h1").num_attention_heads, row("table3-A-h1").query_key_width) == (1, 512)
    assert (row("table3-B-dk16").query_key_width, row("table3-B-dk16").value_width) == (16, 64)
    assert row("table3-C-d1024").query_key_width == 128
    assert row("table3-E-learned").position_encoding == "learned"
    assert row("table3-D-smoothing0.2").label_smoothing == 0.2
    assert row("big").dropout == 0.3
    # The En-Fr model kept 0.1; retellings give 0.3.
    assert (row("big-en-fr").dropout, row("big-en-fr").vocab_size) == (0.1, 32000)


def test_unknown_preset_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'bsae'.*Did you mean 'base'.*table3-E-learned"):
        VaswaniConfig.from_preset("bsae")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0), ("d_model", -4), ("d_model", "512"), ("encoder_layers", 0), ("decoder_layers", True),
        ("num_attention_heads", 7), ("d_k", 0), ("d_v", -1), ("d_ff", 0), ("dropout", 1.0), ("dropout", -0.1),
        ("attention_dropout", 2), ("activation_dropout", 1.5), ("label_smoothing", 1.0), ("layer_norm_eps", 0.0),
        ("norm_position", "middle"), ("position_encoding", "rotary"), ("sinusoid_layout", "mixed"),
        ("activation_function", "rellu"), ("max_position_embeddings", 0), ("eos_token_id", 37000),
        ("pad_token_id", -1), ("decoder_start_token_id", 99999), ("source_vocab_size", 0),
        ("is_encoder_decoder", False), ("sinusoid_exponent", "i/d"), ("position_offset", -1),
    ],
)  # fmt: skip
def test_a_nonsensical_value_is_refused_by_name(field, value):
    with pytest.raises(StrictDataclassError, match=field):
        VaswaniConfig(**{field: value})


def test_an_odd_width_is_refused_for_sinusoids_only():
    with pytest.raises(StrictDataclassError, match="d_model"):
        VaswaniConfig(d_model=15, num_attention_heads=3)
    VaswaniConfig(d_model=15, num_attention_heads=3, position_encoding="learned")


@pytest.mark.parametrize(
    "fields",
    [
        {"sinusoid_exponent": "2i/(d-2)", "d_model": 2, "num_attention_heads": 1},
        {"position_offset": 2, "position_encoding": "learned"},
        {"zero_start_embedding": True, "bos_token_id": None, "pad_token_id": None},
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name(fields):
    with pytest.raises(StrictDataclassError, match=next(iter(fields))):
        VaswaniConfig(**fields)


def test_tying_two_vocabularies_of_unlike_size_is_refused():
    with pytest.raises(StrictDataclassError, match="source_vocab_size"):
        VaswaniConfig(vocab_size=37, source_vocab_size=41, tie_encoder_decoder_embeddings=True)
    assert not VaswaniConfig(vocab_size=37, source_vocab_size=41).ties_source_and_target


@pytest.mark.parametrize(
    ("field", "near"), [("d_modle", "d_model"), ("droput", "dropout"), ("vocabsize", "vocab_size")]
)
def test_a_misspelt_field_is_refused_with_the_nearest_one(field, near):
    with pytest.raises(TypeError, match=f"`{field}`.*`{near}`"):
        VaswaniConfig(**{field: 8})


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="n_heads"):
        VaswaniConfig(n_heads=8)


def test_a_misspelt_field_in_a_saved_file_is_refused_and_a_strange_one_kept(tmp_path):
    VaswaniConfig(vocab_size=37).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    text = path.read_text()
    path.write_text(text.replace("{", '{"zz_written_by_a_tool": 3,', 1))
    assert VaswaniConfig.from_pretrained(tmp_path).zz_written_by_a_tool == 3
    path.write_text(text.replace('"dropout"', '"dropuot"'))
    with pytest.raises(TypeError, match="dropuot"):
        VaswaniConfig.from_pretrained(tmp_path)


def test_names_of_other_code_read_and_write_the_same_fields():
    config = VaswaniConfig(hidden_size=24, num_hidden_layers=3, encoder_attention_heads=4, decoder_ffn_dim=40)
    assert (config.d_model, config.encoder_layers, config.num_attention_heads, config.d_ff) == (24, 3, 4, 40)
    assert (config.hidden_size, config.decoder_attention_heads, config.encoder_ffn_dim) == (24, 4, 40)


def test_a_saved_configuration_comes_back_equal(tmp_path):
    config = VaswaniConfig.from_preset("table3-B-dk16", attention_bias=True, source_vocab_size=41)
    config.save_pretrained(tmp_path)
    assert VaswaniConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_the_start_token_follows_bos_then_pad():
    assert VaswaniConfig().decoder_start_token_id == 2
    assert VaswaniConfig(bos_token_id=None, pad_token_id=5).decoder_start_token_id == 5
    assert VaswaniConfig(decoder_start_token_id=0).decoder_start_token_id == 0
