"""Table 2: the paper's own numbers, the count against a real pass and against one by hand, and devices' rates."""

import argparse
import json

import pytest
import torch
import yaml
from conftest import TINY

from hf_vaswani import VaswaniConfig
from hf_vaswani.analysis.training_cost import (
    PEAK_TFLOPS,
    TABLE_2,
    CostRow,
    count_training,
    device_rate,
    paper_rows,
)
from hf_vaswani.cli import cost
from hf_vaswani.cli.output import UserError
from hf_vaswani.cli.quickstart import bundled_pairs
from hf_vaswani.training.dry_run_cost import count_flops


@pytest.fixture(scope="module")
def rows():
    return paper_rows()


# ------------------------------------------------------------------ the paper's rows
def test_the_papers_costs_follow_from_its_time_devices_and_rate(rows):
    base, big = rows
    for row, published in ((base, 3.3e18), (big, 2.3e19)):
        assert f"{row.paper_method:.1e}" == f"{published:.1e}"
        assert row.published.flops == published
    assert base.paper_method == pytest.approx(12 * 3600 * 8 * 9.5e12)
    assert big.paper_method == pytest.approx(3.5 * 86400 * 8 * 9.5e12)
    assert (TABLE_2["base"].bleu_en_de, TABLE_2["big"].bleu_en_fr) == (27.3, 41.8)


def test_the_count_of_base_is_its_matrices_by_hand(rows):
    # Multiply-adds of a pair of 32 + 32 tokens; twice as many for the gradients, and each is two operations.
    d, f, v, n = 512, 2048, 37_000, 32
    attention = 4 * n * d * d + 2 * n * n * d
    feed_forward = 2 * n * d * f
    forward = 6 * (attention + feed_forward) + 6 * (2 * attention + feed_forward) + n * d * v
    pairs = 25_000 // n
    assert rows[0].counted == 2 * 3 * forward * pairs * 100_000
    assert 0.2 < rows[0].counted_share < 0.5  # of what eight P100 sustain by the paper's figure
    assert rows[0].hours_at_rate == pytest.approx(12 * rows[0].counted_share)


# ------------------------------------------------------------------ counting
@pytest.mark.parametrize("changes", [{}, {"norm_position": "pre"}, {"source_vocab_size": 29}])
def test_the_count_is_that_of_a_real_pass_times_the_pairs(make_model, changes):
    counted = count_training(VaswaniConfig(**{**TINY, **changes}), 11, 100, 80, src_length=7, tgt_length=5)
    model = make_model(**changes).train()
    one = count_flops(model, {"input_ids": torch.full((1, 7), 2), "labels": torch.full((1, 5), 2)})
    assert counted.pairs == 14  # 100 // 7; 80 // 5 would be 16
    assert counted.flops == 11 * 14 * one
    assert counted.parameters == model.num_parameters()


def test_gradient_checkpointing_counts_its_second_forward_pass():
    config = VaswaniConfig(**TINY)
    plain, twice = (count_training(config, 1, 70, 50, 7, 5, is_on).flops for is_on in (False, True))
    assert 1.1 < twice / plain < 4 / 3


def test_a_count_without_sense_is_refused():
    with pytest.raises(ValueError, match="does not fit into an update of 10 and 80"):
        count_training(VaswaniConfig(**TINY), 1, 10, 80, src_length=11)
    with pytest.raises(ValueError, match="`updates` must be at least 1"):
        count_training(VaswaniConfig(**TINY), 0)


# ------------------------------------------------------------------ devices
@pytest.mark.parametrize(("name", "rate"), [("K80", 2.8), ("k40", 3.7), ("M40", 6.0), ("p100", 9.5)])
def test_the_papers_devices_have_its_rates(name, rate):
    assert device_rate(name) == (rate, "the paper's figure")


@pytest.mark.parametrize("name", PEAK_TFLOPS)
def test_a_peak_is_never_taken_for_a_sustained_rate(name):
    with pytest.raises(ValueError, match="--sustained-tflops"):
        device_rate(name)
    half, single = PEAK_TFLOPS[name]
    assert device_rate(name.lower(), "bf16", utilisation=0.5)[0] == half / 2
    assert device_rate(name, None, utilisation=0.5)[0] == single / 2
    assert device_rate(name, "bf16", sustained=77.0) == (77.0, "as given")


def test_this_machine_is_measured():
    rate, how = device_rate("cpu")
    assert rate > 0
    assert "matrix product" in how


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "X9"}, "Nothing is known of a device 'X9'"),
        ({"name": "P100", "utilisation": 0.5}, "No peak is on record for P100"),
        ({"name": "A100", "utilisation": 1.5}, "at most 1"),
        ({"name": "A100", "utilisation": 0.5, "sustained": 3.0}, "give one of them"),
        ({"name": "A100", "sustained": -3.0}, "above 0"),
    ],
)
def test_rates_without_ground_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        device_rate(**arguments)


def test_a_row_without_time_or_rate_claims_no_cost():
    assert CostRow("x", counted=3.6e15).paper_method is None
    row = CostRow("x", counted=3.6e15, device="a", device_count=2, sustained_tflops=0.5)
    assert (row.paper_method, row.hours_at_rate) == (None, 1.0)
    timed = CostRow("x", counted=3.6e15, device="a", device_count=2, sustained_tflops=0.5, hours=4.0)
    assert (timed.paper_method, timed.counted_share) == (1.44e16, 0.25)


# ------------------------------------------------------------------ the command
@pytest.fixture
def fast_paper(monkeypatch, rows):
    """Table 2's rows, counted once for all tests."""
    monkeypatch.setattr("hf_vaswani.analysis.training_cost.paper_rows", lambda *_: list(rows))


def call_command(*arguments):
    parser = argparse.ArgumentParser()
    cost.add_parser(parser.add_subparsers())
    args = parser.parse_args(["cost", *map(str, arguments)])
    return args.run(args)


def recipe(folder, **training):
    pairs = bundled_pairs("train")[:40]
    for side, language in enumerate(("de", "en")):
        (folder / f"train.{language}").write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    content = {
        "output": str(folder / "run"),
        "source_language": "de",
        "target_language": "en",
        "data": {
            "train": [{"src": str(folder / "train.de"), "tgt": str(folder / "train.en")}],
            "max_length": 60,
            "workers": 1,
        },
        "tokenizer": {"vocab_size": 330},
        "model": {"d_model": 16, "d_ff": 24, "encoder_layers": 1, "decoder_layers": 1, "num_attention_heads": 2},
        "batches": {"src_tokens": 150, "tgt_tokens": 140},
        "training": {"updates": 6, "warmup_updates": 5, **training},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def test_a_recipe_stands_beside_the_papers_rows(fast_paper, tmp_path, capsys):
    found = tmp_path / "cost.json"
    arguments = [
        "--device",
        "a100",
        "--utilisation",
        0.25,
        "--devices",
        2,
        "--seconds-per-update",
        600,
        "--json",
        found,
    ]
    assert call_command(recipe(tmp_path, precision="bf16"), *arguments) == 0
    out = capsys.readouterr().out
    values = json.loads(found.read_text())
    base, big, own = values["rows"]
    assert [f"{row['paper_method']:.1e}" for row in (base, big)] == ["3.3e+18", "2.3e+19"]
    assert own["hours"] == 1.0  # six updates of ten minutes
    assert own["paper_method"] == pytest.approx(3600 * 2 * 0.25 * 312e12)
    config = VaswaniConfig(
        d_model=16, d_ff=24, encoder_layers=1, decoder_layers=1, num_attention_heads=2, vocab_size=330
    )
    assert own["counted"] == count_training(config, 6, 150, 140).flops
    assert not (tmp_path / "run").exists()
    table = [line.split() for line in out.splitlines()]
    assert next(row for row in table if row[2:3] == ["base"])[5:9] == ["12", "9.5", "3.28e18", "3.3e18"]
    assert next(row for row in table if row[2:3] == ["big"])[5:9] == ["84", "9.5", "2.30e19", "2.3e19"]
    assert "25 % of the published half-precision peak of 312" in out


def test_each_option_changes_what_is_counted(fast_paper, tmp_path, capsys):
    path, found = recipe(tmp_path), tmp_path / "cost.json"

    def counted(*arguments):
        assert call_command(path, *arguments, "--json", found) == 0
        return json.loads(found.read_text())["rows"][-1]["counted"]

    plain = counted()
    assert counted("--set", "training.updates=12") == 2 * plain
    assert counted("--vocab-size", 660) > plain
    assert counted("--src-length", 30) != plain
    assert counted("--tgt-length", 30) != plain


def test_the_recipes_own_text_is_counted_and_timed(fast_paper, tmp_path, capsys):
    found = tmp_path / "cost.json"
    assert call_command(recipe(tmp_path), "--text", "--json", found) == 0
    values = json.loads(found.read_text())
    own, plan = values["rows"][-1], values["run"]
    assert own["counted"] == plan["cost"]["counted"] > 0
    assert own["hours"] == plan["time"]["hours"] > 0
    assert own["paper_method"] == pytest.approx(plan["cost"]["paper_method"])
    assert "measured here" in capsys.readouterr().out


def test_a_preset_on_the_papers_devices_has_the_papers_time(fast_paper, tmp_path, capsys, rows):
    found = tmp_path / "cost.json"
    assert call_command("base", "--device", "p100", "--json", found) == 0
    own = json.loads(found.read_text())["rows"][-1]
    assert (own["hours"], own["counted"]) == (12.0, rows[0].counted)
    # Of another number of devices or updates the paper's time says nothing.
    assert call_command("tiny", "--device", "p100", "--updates", 5, "--json", found) == 0
    own = json.loads(found.read_text())["rows"][-1]
    assert own["hours"] is None
    assert own["hours_at_rate"] > 0
    assert "time: not given" in capsys.readouterr().out


def test_a_tokenizer_that_is_not_here_is_told_without_a_look_at_the_network(fast_paper, tmp_path, capsys):
    path = recipe(tmp_path)
    assert call_command(path, "--set", "tokenizer.path=nobody/nothing") == 0
    assert "nobody/nothing is not here: 330 pieces" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bse"], "Did you mean 'base'"),
        (["missing.yaml"], "cannot be read"),
        (["base", "--hours", 3], "needs a device"),
        (["base", "--device", "h200", "--updates", 1], "--utilisation"),
        (["base", "--utilisation", 0.4], "give --device"),
        (["base", "--hours", 3, "--seconds-per-update", 1, "--device", "p100"], "give one of them"),
        (["base", "--text"], "needs a recipe"),
        (["base", "--set", "a=1"], "a preset has none"),
        (["base", "--json", "/no/such/folder/x.json"], "no folder"),
    ],
)
def test_what_cannot_be_told_is_said_in_a_sentence(fast_paper, arguments, message):
    with pytest.raises(UserError, match=message):
        call_command(*arguments)
