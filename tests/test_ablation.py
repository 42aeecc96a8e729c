"""Table 3 as a sweep: rows of any base, runs that are never done twice, the table and its orderings."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hf_vaswani import VaswaniConfig
from hf_vaswani.analysis.ablation import MEASURED, Measured, make_sweep, run_sweep
from hf_vaswani.analysis.ablation_rows import PAPER, choose_rows, row_changes, update_factor
from hf_vaswani.analysis.ablation_table import TableRow, as_markdown, as_tsv, orderings, table_rows
from hf_vaswani.configuration_vaswani import PRESETS
from hf_vaswani.training import ConfigError, load_config

SCRIPT = Path(__file__).parents[1] / "examples" / "ablation.py"
BASE = {"preset": "base", "d_model": 24, "d_ff": 40, "encoder_layers": 3, "decoder_layers": 3, "num_attention_heads": 4}


# --------------------------------------------------------------------------- rows
@pytest.mark.parametrize("row", PAPER)
def test_at_the_papers_size_each_row_is_the_papers_row(row):
    changed = VaswaniConfig.from_preset("base", **row_changes(row, VaswaniConfig()))
    expected = VaswaniConfig.from_preset(f"table3-{row}")
    for name in PRESETS["big"].keys() | PRESETS[f"table3-{row}"].keys() | {"d_model", "d_ff", "label_smoothing"}:
        assert getattr(changed, name) == getattr(expected, name), name
    assert (changed.query_key_width, changed.value_width) == (expected.query_key_width, expected.value_width)


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        ("base", {}),
        ("A-h1", {"num_attention_heads": 1, "d_k": 128, "d_v": 128}),
        ("A-h16", {"num_attention_heads": 16, "d_k": 8, "d_v": 8}),
        ("B-dk16", {"d_k": 4, "d_v": 16}),
        ("C-N2", {"encoder_layers": 1, "decoder_layers": 1}),
        ("C-N8", {"encoder_layers": 4, "decoder_layers": 4}),
        ("C-dff1024", {"d_ff": 192}),
        ("D-dropout0.0", {"dropout": 0.0}),
        ("D-dropout0.2", {"dropout": 0.2}),
        ("D-smoothing0.2", {"label_smoothing": 0.2}),
        ("E-learned", {"position_encoding": "learned"}),
    ],
)
def test_a_small_base_is_changed_in_the_same_proportions(row, changes):
    base = VaswaniConfig(d_model=128, d_ff=384, encoder_layers=3, decoder_layers=3, num_attention_heads=8)
    assert row_changes(row, base) == pytest.approx(changes)


def test_big_has_twice_the_widths_and_three_times_the_updates():
    base = VaswaniConfig(d_model=64, d_ff=96, num_attention_heads=4, dropout=0.2)
    found = row_changes("big", base)
    assert (found["d_model"], found["d_ff"], found["num_attention_heads"]) == (128, 192, 8)
    assert found["dropout"] == pytest.approx(0.6)
    assert (update_factor("big"), update_factor("C-d1024")) == (3, 1)


def test_a_base_that_cannot_be_divided_is_named():
    with pytest.raises(ValueError, match=r"^Row A-h16: 16 heads cannot share a width of 24"):
        row_changes("A-h16", VaswaniConfig(d_model=24, d_ff=40, num_attention_heads=8))
    with pytest.raises(ValueError, match="Row C-dff1024 takes 1024/2048 of `d_ff`, and 41"):
        row_changes("C-dff1024", VaswaniConfig(d_model=24, d_ff=41, num_attention_heads=4))


def test_rows_and_groups_are_chosen_by_name_with_the_base_among_them():
    assert choose_rows(["E", "A-h1"]) == ["base", "A-h1", "E-learned"]
    assert choose_rows(["D"]) == ["base", "D-dropout0.0", "D-dropout0.2", "D-smoothing0.0", "D-smoothing0.2"]
    assert choose_rows(["all"]) == list(PAPER)
    with pytest.raises(ValueError, match=r"no row 'A-h2'[.] Did you mean 'A-h32'"):
        choose_rows(["A-h2"])
    with pytest.raises(ValueError, match="no row ''"):
        choose_rows([""])


# --------------------------------------------------------------------------- a sweep
def recipe(folder, **changes):
    content = {
        "output": str(folder / "sweep"),
        "source_language": "de",
        "target_language": "en",
        "data": {"train": [{"bundled": "valid"}], "valid": [{"bundled": "valid"}], "workers": 1},
        "tokenizer": {"vocab_size": 400},
        "model": {**BASE, "encoder_layers": 1, "decoder_layers": 1},
        "batches": {"src_tokens": 500, "tgt_tokens": 500},
        "training": {"updates": 3, "warmup_updates": 5},
        "checkpoints": {"every_updates": 2, "average_last": 2},
        **changes,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def files_with_times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Two rows and two seeds, the second seed by a second start."""
    folder = tmp_path_factory.mktemp("sweep")
    config = load_config(recipe(folder), [])
    assert run_sweep(make_sweep(config, ["A-h1"], [1])) == {}
    first = files_with_times(folder)
    assert len(first) >= 2
    sweep = make_sweep(config, ["A-h1"], [2, 1, 2])
    assert run_sweep(sweep, parallel=2) == {}
    assert {path: time for path, time in files_with_times(folder).items() if path in first} == first
    return sweep


def test_each_row_and_seed_is_trained_once_and_measured(swept):
    found = swept.measured()
    assert [(one.row, one.seed) for one in found] == [("base", 1), ("base", 2), ("A-h1", 1), ("A-h1", 2)]
    assert all(one.updates == 3 and one.seconds > 0 and one.perplexity > 1 for one in found)
    assert len({one.perplexity for one in found}) == 4
    assert all("tok:13a" in one.bleu_signature for one in found)
    assert len(swept.hypotheses("base", 1)) == len(swept.references()) > 100
    saved = VaswaniConfig.from_pretrained(swept.folder("A-h1", 2) / "model")
    assert (saved.num_attention_heads, saved.d_k) == (1, 24)


def test_the_measured_perplexity_is_the_evaluations(swept):
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq

    from hf_vaswani import VaswaniForConditionalGeneration
    from hf_vaswani.data import bundled_pairs
    from hf_vaswani.data.dataset import tokenize_pairs
    from hf_vaswani.evaluation import perplexity

    folder = swept.folder("base", 2) / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = VaswaniForConditionalGeneration.from_pretrained(folder)
    encoded = tokenize_pairs(bundled_pairs("valid"), tokenizer)
    expected = perplexity(model, encoded, DataCollatorForSeq2Seq(tokenizer))
    assert swept.measured()[1].perplexity == pytest.approx(expected)


def test_the_table_of_the_sweep_stands_beside_the_papers(swept):
    rows = table_rows(swept)
    assert [one.row for one in rows] == ["base", "A-h1"]
    assert rows[0].p_values is None
    assert len(rows[1].p_values) == 2
    assert all(0 < p <= 1 for p in rows[1].p_values)
    assert rows[0].perplexity == pytest.approx(sum(one.perplexity for one in swept.measured()[:2]) / 2)
    text = as_markdown(rows, "the signature")
    assert "| A-h1 | num_attention_heads 1, d_k 24, d_v 24 |" in text
    assert "5.29 | 24.9" in text
    assert "4.92 | 25.8 | 65" in text
    assert "the signature" in text
    head, *lines = as_tsv(rows).splitlines()
    assert len(lines) == 2
    assert {len(line.split("\t")) for line in (head, *lines)} == {14}


def test_a_folder_of_another_recipe_is_not_gone_on_with(swept):
    other = replace(swept.config, training=replace(swept.config.training, updates=4))
    with pytest.raises(ConfigError, match="sweep of another recipe"):
        make_sweep(other, ["base"], [1])


@pytest.fixture
def script(monkeypatch):
    """The script's `main` with arguments."""
    spec = importlib.util.spec_from_file_location("ablation_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        return module.main()

    return call


def test_the_script_prints_the_table_of_what_there_is(swept, script, capsys):
    assert script(swept.output.parent / "recipe.yaml", "--rows", "A-h1", "--seeds", "1,2", "--table") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("| row | change |")
    assert (swept.output / "table.md").read_text(encoding="utf-8") == printed
    data = json.loads((swept.output / "table.json").read_text(encoding="utf-8"))
    assert [one["row"] for one in data["rows"]] == ["base", "A-h1"]
    assert data["rows"][1]["paper"]["bleu"] == 24.9
    assert (swept.output / "table.tsv").is_file()


def test_a_run_that_fails_is_named_and_done_at_the_next_start(swept):
    sweep = make_sweep(swept.config, ["C-dff1024"], [1])
    broken = sweep.folder("C-dff1024", 1) / "model"
    broken.parent.mkdir(parents=True)
    broken.write_text("a file where a folder is to be")
    failed = run_sweep(sweep)
    assert list(failed) == ["C-dff1024-seed1"]
    assert "log.txt" in failed["C-dff1024-seed1"]
    assert [one.row for one in sweep.measured()] == ["base"]
    broken.unlink()
    assert run_sweep(sweep) == {}
    assert sweep.measured()[1].model == {"d_ff": 20}


@pytest.mark.parametrize(
    ("changes", "rows", "seeds", "message"),
    [
        ({}, ["F"], [1], "no row 'F'"),
        ({}, ["base"], [], "at least one seed"),
        ({"data": {"train": [{"bundled": "valid"}], "valid": []}}, ["base"], [1], "data.valid names no corpus"),
        ({"start_from": "somewhere", "model": {}, "tokenizer": {}}, ["base"], [1], "start_from"),
        ({"model": {**BASE, "d_ff": 41}}, ["C-dff1024"], [1], "^Row C-dff1024 takes 1024/2048 of `d_ff`, and 41"),
    ],
)
def test_a_sweep_is_checked_before_its_first_run(tmp_path, changes, rows, seeds, message):
    with pytest.raises(ConfigError, match=message):
        make_sweep(load_config(recipe(tmp_path, **changes), []), rows, seeds)
    assert not (tmp_path / "sweep").exists()


def test_the_script_says_what_is_wrong_with_an_option(tmp_path, script):
    with pytest.raises(ConfigError, match="whole numbers"):
        script(recipe(tmp_path), "--seeds", "1,b")
    with pytest.raises(ConfigError, match="at least 1"):
        script(recipe(tmp_path), "--parallel", 0)
    with pytest.raises(ConfigError, match="no run that has been measured"):
        script(recipe(tmp_path), "--table", "--rows", "base")


def test_a_fault_ends_the_script_with_one_line(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, tmp_path / "none.yaml"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("ablation.py: ")
    assert len(done.stderr.strip().splitlines()) == 1


# --------------------------------------------------------------------------- orderings
def row(name, perplexity, bleu, spread=(0.1, 0.2)):
    return TableRow(name, [1, 2, 3], "", perplexity, spread[0], bleu, spread[1], 1.0, None, 1000, 5, 1.0)


def test_orderings_hold_are_reversed_or_are_within_noise():
    rows = [row("base", 5.0, 30.0), row("A-h1", 6.0, 30.1), row("C-N2", 4.0, 28.0)]
    found = {(one.better, one.worse, one.measure): one for one in orderings(rows)}
    assert found["base", "A-h1", "perplexity"].verdict == "holds"
    assert found["base", "A-h1", "perplexity"].difference == pytest.approx(1.0)
    # 2 sqrt(2 * 0.2^2 / 3) = 0.327
    assert found["base", "A-h1", "BLEU"].verdict == "within noise"
    assert found["base", "C-N2", "perplexity"].verdict == "reversed"
    assert found["base", "C-N2", "BLEU"].verdict == "holds"
    assert not any("A-h1" in key and "C-N2" in key for key in found)  # the paper compares within groups


def test_rows_that_the_paper_ties_have_no_order_and_a_group_is_compared_within():
    rows = [row("base", 5.0, 30.0), row("A-h16", 5.0, 31.0), row("A-h32", 5.1, 30.9)]
    found = {(one.better, one.worse, one.measure) for one in orderings(rows)}
    assert ("A-h16", "base", "perplexity") in found
    assert not any({"A-h16", "base"} == {one[0], one[1]} and one[2] == "BLEU" for one in found)
    assert ("A-h16", "A-h32", "BLEU") in found


def test_a_single_seed_is_told_without_a_spread():
    one = replace(row("base", 5.0, 30.0), seeds=[1], perplexity_spread=None, bleu_spread=None)
    text = as_markdown([one], "s")
    assert "| 5.00 | 30.00 | 1.00 |" in text
    assert "Means over 1 seed(s)" in text


def test_measurements_are_kept_as_they_were_written(swept):
    one = swept.measured()[0]
    content = json.loads((swept.folder("base", 1) / MEASURED).read_text(encoding="utf-8"))
    assert Measured(**content) == one
