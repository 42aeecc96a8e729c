"""The benchmarks of training run, and what they claim about equal work and FLOPs is so; no time is asserted."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MULTI30K = Path(__file__).parents[2] / "shared" / "data" / "multi30k"


@pytest.fixture
def script(monkeypatch):
    """Imports a benchmark by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module


@pytest.fixture
def run(script, capsys):
    """Runs a benchmark through `main`: its figures from standard output, and its tables."""

    def call(name: str, *arguments: str) -> tuple[dict, str]:
        threads = torch.get_num_threads()
        try:
            assert script(name).main([*arguments]) == 0
        finally:
            torch.set_num_threads(threads)
        out, tables = capsys.readouterr()
        return json.loads(out), tables

    return call


def test_a_training_step_is_the_same_work_for_ours_and_marian(run):
    figures, tables = run("train_step", "--quick", "--repeats", "1", "--threads", "1", "--no-memory")
    assert figures["losses"]["ours"] == pytest.approx(figures["losses"]["marian"], abs=1e-6)
    assert set(figures["systems"]) >= {"ours", "ours bf16", "marian", "marian bf16", "torch"}
    for one in figures["systems"].values():
        assert one["target_tokens_per_s"] * one["seconds"] == pytest.approx(4 * 6)
    systems = figures["systems"]
    speed = figures["ratios"]["ours bf16 / marian"]["speed"]["median"]
    assert speed == pytest.approx(systems["marian"]["seconds"] / systems["ours bf16"]["seconds"], abs=1e-3)
    assert "torch.nn.Transformer" in tables


def test_the_models_of_a_training_step_train_as_many_weights(script):
    train_step = script("train_step")
    size = train_step.Size(True, 211, 3, 5, 4)
    counts = {
        name: sum(one.numel() for one in train_step.make_model(name, size).parameters() if one.requires_grad)
        for name in ("ours", "marian", "torch")
    }
    assert counts["ours"] == counts["marian"]
    # torch has a norm behind either stack, where post-norm needs none: two vectors of 32 each.
    assert counts["torch"] == counts["ours"] + 4 * 32


def test_every_system_learns_from_its_own_step(script):
    train_step = script("train_step")
    size = train_step.Size(True, 61, 3, 5, 4)
    for name in ("ours", "marian", "torch"):
        model = train_step.make_model(name, size)
        optimizer = train_step.make_optimizer(model)
        train_step.set_learning_rate(optimizer, 3e-3)
        step = train_step.make_step(name, model, train_step.random_batch(size), optimizer, False)
        losses = [step() for _ in range(12)]
        assert losses[-1] < losses[0] - 0.1, name


@pytest.mark.slow
def test_memory_of_a_step_grows_with_its_batch_and_holds_no_weights(script):
    train_step = script("train_step")
    small = train_step.Size(True, 3_000, 4, 6, 6)
    large = small._replace(pairs=400)
    peaks = {(name, size.pairs): train_step.peak_of(name, size, False)
             for name in ("ours", "marian") for size in (small, large)}  # fmt: skip
    # The logits of MarianMT alone, of which it holds at least one copy beside their gradient.
    logits = 400 * 6 * 3_000 * 4 / 2**20
    assert peaks["marian", 400] > peaks["marian", 4] + logits
    assert peaks["ours", 400] < peaks["marian", 400]


@pytest.mark.slow
def test_compiled_steps_count_their_compilations(run):
    figures, _ = run("train_step", "--quick", "--repeats", "1", "--threads", "1", "--compile")
    one = figures["float32"]
    assert one["compilations"] == sum(row["compilations"] for row in one["rows"]) >= 1
    assert one["rows"][0]["compilations"] >= 1


@pytest.mark.slow
def test_an_epoch_gives_both_trainers_the_same_text(run):
    if not MULTI30K.is_dir():
        pytest.skip(f"{MULTI30K} is not there")
    figures, tables = run("epoch", "--quick", "--pairs", "60", "--tokens", "200", "--repeats", "1", "--threads", "1")
    ours, peer = figures["systems"].values()
    assert ours["target_tokens"] == peer["target_tokens"] > 60
    assert peer["target_tokens_an_update"] == pytest.approx(ours["target_tokens_an_update"], rel=0.15)
    assert all(0 <= one["padding"] < 1 and one["loss"] > 0 for one in (ours, peer))
    assert figures["ratio"]["median"] == pytest.approx(peer["seconds"] / ours["seconds"], abs=1e-3)
    assert "padding %" in tables


def test_an_epoch_without_text_says_what_to_name(script, tmp_path):
    with pytest.raises(SystemExit, match=r"has no raw/train.en.gz: name the folder of Multi30k with --data"):
        script("epoch").main(["--data", str(tmp_path)])


@pytest.mark.slow
def test_imports_are_timed_in_fresh_processes(run):
    figures, _ = run("import_time", "--quick", "--profile")
    seconds = figures["seconds"]
    assert all(one > 0 for one in seconds.values())
    marian = seconds["transformers with Marian"]
    assert figures["more_s"] == {name: one - marian for name, one in seconds.items() if one != marian}


def test_an_import_that_fails_is_shown(script):
    with pytest.raises(SystemExit, match="No module named 'no_such_module'"):
        script("import_time").seconds_of("import no_such_module")


def test_modules_of_an_import_are_told_by_their_own_time(script):
    rows = script("import_time").top_modules("import json.tool", count=400)
    assert "json.decoder" in {row["module"] for row in rows}
    assert [row["own ms"] for row in rows] == sorted((row["own ms"] for row in rows), reverse=True)


# --------------------------------------------------------------------------- pruning
@pytest.mark.slow
def test_pruning_is_timed_beside_the_masked_model_and_the_two_are_the_same(run):
    figures, tables = run("prune", "--quick")
    for one in figures["choices"].values():
        assert one["gap"] < 1e-5
        assert one["bytes"]["pruned"] < one["bytes"]["whole"]
        assert one["forward_over_masked"]["median"] > 0
        assert set(one["search_s"]) == {"whole", "pruned"}
    assert "bytes, pruned / whole" in tables


# --------------------------------------------------------------------------- scaling
def test_one_factor_changes_at_a_time(script):
    scaling = script("train_scaling")
    usual = scaling.size_at("processes", 2, False)
    assert usual[1:] == (37_000, 64, 32, 32)
    for value in scaling.FACTORS["length"]:
        longer = scaling.size_at("length", value, False)
        assert longer.src_length == longer.tgt_length == value
        assert longer.pairs * longer.src_length == 2048
    assert scaling.size_at("source length", 7, False) == usual._replace(src_length=7)
    assert scaling.size_at("target length", 7, False) == usual._replace(tgt_length=7)
    assert scaling.size_at("tokens a batch", 512, False) == usual._replace(pairs=16)
    assert scaling.size_at("vocabulary", 8_000, False) == usual._replace(vocab_size=8_000)


def test_memory_per_token_is_the_slope_over_tokens_a_batch(script):
    rows = [{"factor": "tokens a batch", "tgt_tokens": n, "peak_mib": 5 + 0.25 * n} for n in (10, 20, 40)]
    other = {"factor": "length", "tgt_tokens": 1, "peak_mib": 99.0}
    assert script("train_scaling").kib_per_token([*rows, other]) == pytest.approx(256)
    assert script("train_scaling").kib_per_token([rows[0], other]) is None


def test_scaling_is_drawn_as_small_multiples(script, tmp_path):
    pytest.importorskip("matplotlib")
    points = [
        {"factor": factor, "value": value, "tokens_per_s": 10.0 * value, "peak_mib": 3.0 * value}
        for factor in ("length", "processes") for value in (1, 2)
    ]  # fmt: skip
    figures = tmp_path / "figures.json"
    figures.write_text(json.dumps({"points": points}), encoding="utf-8")
    scaling = script("train_scaling")
    assert scaling.main(["--from-json", str(figures), "--plot", str(tmp_path / "plot.png")]) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_scaling_counts_the_tokens_of_all_processes(run):
    figures, _ = run("train_scaling", "--quick", "--factors", "processes", "--repeats", "1", "--threads", "1")
    one, two = figures["points"]
    assert (one["value"], two["value"]) == (1, 2)
    assert two["tgt_tokens"] == 2 * one["tgt_tokens"] == 64
    assert two["tokens_per_s"] * two["seconds"] == pytest.approx(128)


# --------------------------------------------------------------------------- GPU
def test_flops_are_those_that_torch_counts(script, make_model):
    from torch.utils.flop_counter import FlopCounterMode

    gpu = script("gpu")
    model = make_model(attn_implementation="eager").train()
    size = gpu.Size(True, 37, 7, 9, 5)
    with FlopCounterMode(display=False) as counter:
        model(**gpu.random_batch(size)).loss.backward()
    model.zero_grad()
    assert gpu.step_flops(model, size) == counter.get_total_flops()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("NVIDIA A10G", 70), ("NVIDIA GeForce RTX 4090", 165),
        ("Tesla T4", None), (None, None),
    ],
)  # fmt: skip
def test_the_peak_of_a_device_is_looked_up_by_its_name(script, name, tflops):
    assert script("gpu").peak_tflops(name) == tflops


def test_what_does_not_fit_into_the_minutes_is_left_out_and_told(script):
    import time

    gpu = script("gpu")
    clock = gpu.Clock(0.05 / 60)
    before = time.monotonic()
    assert gpu.guarded(clock, lambda: time.sleep(30) or {}) == {"left_out": "no time left"}
    assert time.monotonic() - before < 15
    assert gpu.guarded(clock, dict) == {"left_out": "no time left"}
    assert gpu.guarded(gpu.Clock(1), lambda: {"seconds": 1}) == {"seconds": 1}


def test_the_gpu_script_rehearses_on_a_processor(run, tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    figures, tables = run("gpu", "--cpu-rehearsal", "--no-compile", "--peak-tflops", "0.5")
    assert figures == json.loads((tmp_path / "gpu.json").read_text())
    assert [(row["model"], row["compiled"]) for row in figures["training"]] == [("base", False), ("big", False)]
    for row in figures["training"]:
        assert row["utilisation"] == pytest.approx(row["model_tflops"] / 0.5)
    assert [(row["precision"], row["beams"], row["batch"]) for row in figures["decoding"]] == [
        (precision, beams, batch) for precision in ("bf16", "float32") for beams in (1, 4) for batch in (1, 3)
    ]
    for row in figures["decoding"]:
        assert row["ours"]["tokens_per_s"] * row["ours"]["seconds"] == pytest.approx(row["batch"] * 6)
        if row["precision"] == "float32":
            assert row["equal_sentences"] == row["batch"]
    assert (tmp_path / "gpu.txt").read_text() in tables


@pytest.mark.slow
def test_the_gpu_script_ends_by_its_minutes(run):
    figures, tables = run("gpu", "--cpu-rehearsal", "--minutes", "0")
    assert all(row["left_out"] == "no time left" for row in figures["training"] + figures["decoding"])
    assert "no time left" in tables


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="a shell script")
def test_the_whole_gpu_script_runs_compilation_included():
    command = ["bash", str(BENCHMARKS / "gpu.sh"), "--cpu-rehearsal"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": _path()})
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["training"]
    assert [row["compiled"] for row in rows] == [False, False, True, True]
    assert all(row["seconds"] > 0 for row in rows)


@pytest.mark.skipif(os.name != "posix" or torch.cuda.is_available(), reason="for machines with a shell, without a GPU")
def test_the_gpu_script_says_so_where_there_is_no_gpu():
    command = ["bash", str(BENCHMARKS / "gpu.sh")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": _path()})
    assert (done.returncode, done.stdout) == (3, "")
    assert "There is no GPU that torch can use here" in done.stderr


def _path() -> str:
    """PATH with the interpreter of the tests in front."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
