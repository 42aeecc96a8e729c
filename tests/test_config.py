"""Recipes: every key is known, every value has its type, and the message names the place."""

import pytest

from hf_vaswani.training import ConfigError, load_config
from hf_vaswani.training.config import BatchConfig

RECIPE = """
output: runs/x
source_language: de
target_language: en
data:
  train: [{src: a.de, tgt: a.en, weight: 2.0}, {bundled: train}]
  valid: [{bundled: valid}]
model: {preset: base, d_model: 32, num_attention_heads: 2, d_ff: 48}
training: {updates: 7, rate_factor: 1e-1}
"""


def load(tmp_path, text=RECIPE, *overrides):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def test_a_recipe_is_read_and_the_rest_is_the_papers(tmp_path):
    config = load(tmp_path)
    assert (config.output, config.data.train[0].weight, config.data.train[1].bundled) == ("runs/x", 2.0, "train")
    assert (config.training.updates, config.training.rate_factor, config.training.warmup_updates) == (7, 0.1, 4000)
    assert (config.batches.src_tokens, config.batches.tgt_tokens) == (25_000, 25_000)
    assert (config.checkpoints.average_last, config.tokenizer.vocab_size) == (5, 37_000)
    assert config.model_config(None).d_model == 32


def test_a_value_can_be_changed_from_outside(tmp_path):
    config = load(tmp_path, RECIPE, "training.updates=9", "data.train.0.src=b.de", "tokenizer.vocab_size=300")
    assert (config.training.updates, config.data.train[0].src, config.tokenizer.vocab_size) == (9, "b.de", 300)


def test_anchors_and_merged_keys_are_yaml_like_any_other(tmp_path):
    text = "output: x\ndata: {train: [&one {src: a.de, tgt: a.en}, {<<: *one, src: b.de}]}\n"
    first, second = load(tmp_path, text).data.train
    assert (first.src, first.tgt, second.src, second.tgt) == ("a.de", "a.en", "b.de", "a.en")


def test_a_recipe_survives_as_plain_values(tmp_path):
    import yaml

    config = load(tmp_path)
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(config.to_dict()), encoding="utf-8")
    assert load_config(tmp_path / "again.yaml").to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("outptu: y", r"outptu: unknown key; did you mean `output`"),
        ("training: {warmup_update: 3}", r"training\.warmup_update: unknown key; did you mean `warmup_updates`"),
        ("training: {updates: many}", r"training: .*'updates' expected int, got str"),
        ("training: {updates: 0}", r"training: .*`updates` must be at least 1"),
        ("training: {updates: 1.5}", r"'updates' expected int, got float"),
        ("training: [1]", r"training: a mapping is needed"),
        ("data: {train: a.de}", r"data\.train: a list is needed"),
        ("data: {train: [{sorce: a}]}", r"data\.train\.0\.sorce: unknown key"),
        ("data: {}", r"`train` names no corpus"),
        ("data: {train: [{bundled: train}], max_length: 0}", r"`max_length` must be at least 1"),
        ("model: {d_modle: 32}", r"d_modle"),
        ("model: {vocab_size: 32}", r"the tokenizer decides"),
        ("model: {preset: huge}", r"huge"),
        ("checkpoints: {keep_last: 2, average_last: 3}", r"only `keep_last` = 2 are kept"),
        ("batches: {max_batch_tokens: 10, batches_per_update: 2}", r"the same thing twice"),
        ("validation: {metric: bleu, bleu: false}", r"nothing would be translated"),
        ("validation: {patience: soon}", r"patience"),
        ("tokenizer: {normalization: nfd}", r"`normalization` must be"),
        ("start_from: some/model", r"`model` must be left out"),
        ("output: ' '", r"`output` is blank"),
        ("training: {batches_per_update: 2}", r"the recipe of a whole run has `batches\.batches_per_update`"),
        ("training: {average_last: 2}", r"has `checkpoints\.average_last`"),
        ("training: {seed: 9223372036854775808}", r"`seed` must be below 2\*\*63"),
    ],
)
def test_what_makes_no_sense_is_refused_by_key(tmp_path, change, message):
    key = change.split(":")[0]
    text = "\n".join(line for line in RECIPE.splitlines() if not line.startswith(f"{key}:"))
    if key == "data":
        text = "\n".join(line for line in text.splitlines() if not line.startswith("  "))
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, text + "\n" + change + "\n")
    assert "recipe.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [", "no valid YAML"),
        (b"output: x\ntraining: {updates: 1}\ntraining: {updates: 2}", "`training` stands twice"),
        (b"training: {updates: 1, 'updates': 2}", "`updates` stands twice"),
        (b"- 1", "a recipe is a mapping"),
        (b"a: \xff", "not UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, content, message):
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


@pytest.mark.parametrize("change", ["updates", "=3", "data.train.7.src=x", "output.x=1", "a..b=1"])
def test_a_change_that_makes_no_sense_is_refused(tmp_path, change):
    with pytest.raises(ConfigError):
        load(tmp_path, RECIPE, change)


@pytest.mark.parametrize(
    ("settings", "processes", "count"),
    [({}, 1, 1), ({}, 8, 8), ({"max_batch_tokens": 5000}, 1, 5), ({"max_batch_tokens": 5000}, 4, 8),
     ({"max_batch_tokens": 4999}, 1, 6), ({"batches_per_update": 3}, 2, 3)],
)  # fmt: skip
def test_an_update_is_cut_so_that_every_process_has_the_same_number_of_batches(settings, processes, count):
    assert BatchConfig(**settings).count_for(processes) == count
