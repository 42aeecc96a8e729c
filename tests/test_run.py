"""A whole run from its recipe, through the command."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from hf_vaswani import VaswaniForConditionalGeneration, VaswaniTokenizer
from hf_vaswani.cli.main import main
from hf_vaswani.data import bundled_pairs
from hf_vaswani.evaluation import perplexity
from hf_vaswani.evaluation.scoring import evaluate_model
from hf_vaswani.training import load_config
from hf_vaswani.training.run import load_tokenizer, prepare_run

HERE = Path(__file__).parent


def recipe(folder, **changes):
    """A recipe file over 60 real pairs, 12 of them for validation."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = bundled_pairs("train")[:60]
    for name, part in (("train", pairs), ("valid", pairs[:12])):
        for side, language in enumerate(("de", "en")):
            lines = "".join(f"{pair[side]}\n" for pair in part)
            (folder / f"{name}.{language}").write_text(lines, encoding="utf-8", newline="\n")
    source = {
        name: {"src": str(folder / f"{name}.de"), "tgt": str(folder / f"{name}.en")} for name in ("train", "valid")
    }
    content = {
        "output": str(folder / "run"),
        "source_language": "de",
        "target_language": "en",
        "data": {"train": [source["train"]], "valid": [source["valid"]], "max_length": 60, "workers": 1},
        "tokenizer": {"vocab_size": 330},
        "model": {"d_model": 16, "d_ff": 24, "encoder_layers": 1, "decoder_layers": 1, "num_attention_heads": 2},
        "batches": {"src_tokens": 150, "tgt_tokens": 150},
        "training": {"updates": 6, "warmup_updates": 5, "seed": 2},
        "validation": {"every_updates": 3, "num_beams": 1},
        "checkpoints": {"every_updates": 2, "keep_last": 4, "average_last": 2},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            content[section][name] = value
        else:
            content[section] = value
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def losses(folder):
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "update" in line]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("done")
    assert main(["train", str(recipe(folder))]) == 0
    return folder


def test_a_run_leaves_a_model_that_is_the_mean_of_its_last_checkpoints(done):
    run = done / "run"
    # The one of update 3 was the best of its time and not due: it went when update 6 was better.
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [f"update-{n:08d}" for n in (2, 4, 6)]
    model = VaswaniForConditionalGeneration.from_pretrained(run / "model")
    parts = [
        VaswaniForConditionalGeneration.from_pretrained(run / "checkpoints" / f"update-0000000{n}") for n in (4, 6)
    ]
    for name, value in model.named_parameters():
        mean = sum(dict(part.named_parameters())[name].double() for part in parts) / 2
        assert torch.equal(value, mean.float())
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert isinstance(tokenizer, VaswaniTokenizer)
    assert len(tokenizer) == 330 == model.config.vocab_size
    result = json.loads((run / "result.json").read_text())
    assert (result["updates"], result["averaged"]) == (6, ["update-00000004", "update-00000006"])
    assert len(losses(done)) == 6


def test_validation_in_the_run_is_what_the_command_line_finds_afterwards(done):
    lines = [json.loads(line) for line in (done / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if "validated_update" in line]
    assert [line["validated_update"] for line in measured] == [3, 6]
    folder = done / "run" / "checkpoints" / "update-00000006"
    model, tokenizer = VaswaniForConditionalGeneration.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    pairs = bundled_pairs("train")[:12]
    found = evaluate_model(
        model, tokenizer, [s for s, _ in pairs], [t for _, t in pairs], target_language="en", num_beams=1
    )
    assert found["sacreBLEU"].score == pytest.approx(measured[-1]["bleu"], abs=1e-9)
    assert measured[-1]["perplexity"] > 1
    assert callable(perplexity)


def test_averaging_is_a_command(done, tmp_path, capsys):
    run = done / "run"
    assert main(["average", str(run), "--last", "2", "--output", str(tmp_path / "two")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'two'}\n"
    two = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "two")
    ours = VaswaniForConditionalGeneration.from_pretrained(run / "model")
    assert all(torch.equal(a, b) for a, b in zip(two.parameters(), ours.parameters(), strict=True))
    named = [str(run / "checkpoints" / f"update-0000000{n}") for n in (4, 6)]
    half = tmp_path / "half"
    assert main(["average", *named, "--output", str(half), "--store-as", "float16"]) == 0
    size, whole = ((folder / "model.safetensors").stat().st_size for folder in (half, tmp_path / "two"))
    assert size < 0.6 * whole
    loaded = VaswaniForConditionalGeneration.from_pretrained(half)
    assert loaded.dtype == torch.float32
    for mine, theirs in zip(loaded.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_what_cannot_be_averaged_is_one_sentence(done, tmp_path, capsys):
    run = done / "run"
    for arguments, message in [
        ([str(run), "--last", "9"], "holds 3 checkpoint(s), and 9 were asked for"),
        ([str(run)], "holds 3 checkpoint(s), and 5 were asked for"),
        ([str(tmp_path / "gone")], "no such folder"),
        ([str(run / "model"), str(run / "model")], "Name the new folder with --output"),
        ([str(run / "model"), str(run / "model"), "--last", "2"], "--last counts the checkpoints of one run"),
        ([str(run / "model"), str(run / "cache"), "--output", str(tmp_path / "x")], "has no model.safetensors"),
        ([str(run), "--last", "2", "--output", str(run / "cache")], "is not empty"),
    ]:
        assert main(["average", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_a_taken_folder_is_refused_gone_on_with_or_replaced(tmp_path, capsys):
    path = recipe(tmp_path, data__valid=[])
    assert main(["train", str(path)]) == 0
    first = losses(tmp_path)
    assert main(["train", str(path)]) == 2
    assert "holds a run already, up to update 6" in capsys.readouterr().err
    assert main(["train", str(path), "--resume", "--set", "training.updates=9"]) == 0
    assert losses(tmp_path)[:6] == first
    assert len(losses(tmp_path)) == 9
    assert main(["train", str(path), "--overwrite"]) == 0
    assert losses(tmp_path) == first
    assert "9 updates" in capsys.readouterr().out
    assert main(["train", str(path), "--resume", "--overwrite"]) == 2
    prepare_run(load_config(path), overwrite=True)  # from here on nothing of the old run is taken for the new one's
    assert not [name for name in ("model", "result.json") if (tmp_path / "run" / name).exists()]
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_resuming_where_there_is_nothing_yet_begins(tmp_path):
    assert main(["train", str(recipe(tmp_path, data__valid=[])), "--resume"]) == 0
    assert len(losses(tmp_path)) == 6


def test_a_run_of_another_recipe_is_not_gone_on_with(tmp_path, capsys):
    path = recipe(tmp_path, data__valid=[])
    assert main(["train", str(path)]) == 0
    for change in ("training.seed=9", "batches.src_tokens=140", "data.max_length=12"):
        assert main(["train", str(path), "--resume", "--set", change]) == 2
        assert "is of another run" in capsys.readouterr().err
    assert main(["train", str(path), "--resume", "--set", "model.d_ff=25"]) == 2
    assert "does not fit this model" in capsys.readouterr().err


def test_a_refused_recipe_leaves_the_runs_own_on_disk(tmp_path):
    path = recipe(tmp_path, data__valid=[], training__updates=2)
    assert main(["train", str(path)]) == 0
    before = (tmp_path / "run" / "config.json").read_bytes()
    assert main(["train", str(path), "--resume", "--set", "training.seed=9"]) == 2
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_the_batches_of_an_update_stay_and_are_said_or_refused(tmp_path, capsys):
    path = recipe(tmp_path, data__valid=[], training__updates=2)
    assert main(["train", str(path)]) == 0
    resume = ["train", str(path), "--resume", "--set", "training.updates=3", "--set"]
    assert main([*resume, "batches.batches_per_update=2"]) == 2
    assert "`batches_per_update` was 1 and is now 2" in capsys.readouterr().err
    assert main([*resume, "batches.max_batch_tokens=75"]) == 0
    assert "An update stays 1 batches" in capsys.readouterr().err


def test_files_that_are_not_of_a_run_are_never_replaced(tmp_path, capsys):
    path, output = recipe(tmp_path, data__valid=[], training__updates=2), tmp_path / "run"
    mine = [output / "model" / "thesis.txt", output / "checkpoints" / "mine" / "thesis.txt"]
    for own in mine:
        own.parent.mkdir(parents=True)
        own.write_text("mine")
    for option in ([], ["--overwrite"], ["--resume"]):
        assert main(["train", str(path), *option]) == 2
        assert "model is there already and not of a run" in capsys.readouterr().err
    mine[0].unlink()
    mine[0].parent.rmdir()
    for _ in range(2):
        assert main(["train", str(path), "--overwrite"]) == 0
        assert mine[1].read_text() == "mine"
    assert main(["train", str(path), "--set", f"output={output / 'model'}"]) == 2
    assert "config.json is not of a run" in capsys.readouterr().err
    assert VaswaniForConditionalGeneration.from_pretrained(output / "model").config.d_model == 16


def test_a_finished_run_without_its_checkpoints_is_not_begun_anew_by_chance(done, tmp_path, capsys):
    path = recipe(tmp_path)
    shutil.copytree(done / "run", tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    for option in ([], ["--resume"]):
        assert main(["train", str(path), *option]) == 2
        assert "holds the model of a finished run, but no checkpoint" in capsys.readouterr().err
    assert len(losses(tmp_path)) == 6


def test_a_finished_run_that_is_resumed_says_that_nothing_is_left(tmp_path, capsys):
    path = recipe(tmp_path, data__valid=[], training__updates=2)
    assert main(["train", str(path)]) == 0
    assert main(["train", str(path), "--resume"]) == 0
    assert "Nothing is left to train: 2 updates are planned" in capsys.readouterr().err
    assert len(losses(tmp_path)) == 2


def test_a_model_that_cannot_be_written_is_one_sentence_and_resuming_writes_it(tmp_path, capsys, monkeypatch):
    path = recipe(tmp_path, data__valid=[], training__updates=2)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_vaswani.training.run.average_folder", full)
    assert main(["train", str(path)]) == 2
    assert "model cannot be written (No space left on device). The checkpoints are whole" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["train", str(path), "--resume"]) == 0
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_the_mean_of_a_trainers_checkpoints_has_only_what_is_of_the_model(done, tmp_path):
    folders = []
    for number in (4, 6):
        folders.append(tmp_path / f"checkpoint-{number}")
        shutil.copytree(done / "run" / "checkpoints" / f"update-0000000{number}", folders[-1])
        for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "trainer_state.json", "training_args.bin"):
            (folders[-1] / name).write_text("large")
    assert main(["average", *map(str, folders), "--output", str(tmp_path / "mean")]) == 0
    names = {path.name for path in (tmp_path / "mean").iterdir()}
    assert names == {path.name for path in (done / "run" / "model").iterdir()}


def test_a_checkpoint_that_its_run_removes_meanwhile_is_named(done, tmp_path, capsys, monkeypatch):
    def gone(path, target):
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr("hf_vaswani.training.run.shutil.copy", gone)
    assert main(["average", str(done / "run"), "--last", "2", "--output", str(tmp_path / "two")]) == 2
    assert "update-00000006 was removed while it was read" in capsys.readouterr().err
    assert not (tmp_path / "two").exists()


def test_a_dry_run_needs_no_free_folder_and_leaves_the_run_in_it(done, tmp_path, capsys):
    path = recipe(tmp_path)
    shutil.copytree(done / "run", tmp_path / "run")
    for option in ([], ["--overwrite"], ["--resume"]):
        assert main(["train", str(path), "--dry-run", *option]) == 0
        printed = capsys.readouterr()
        assert "6 updates" in printed.out
        assert f"Kept for the run: its tokenizer and its encoded text, in {tmp_path / 'run' / 'cache'}" in printed.err
    for name in ("checkpoints", "model", "metrics.jsonl", "result.json", "config.json"):
        assert (tmp_path / "run" / name).exists()


def test_a_dry_run_plans_and_trains_nothing(tmp_path, capsys):
    assert main(["train", str(recipe(tmp_path)), "--dry-run"]) == 0
    out = capsys.readouterr().out
    for word in ("6 updates", "parameters", "FLOPs", "checkpoints"):
        assert word in out
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not (tmp_path / "run" / "model").exists()


def test_training_further_from_a_model_takes_its_tokenizer_and_weights(done, tmp_path):
    base = done / "run" / "model"
    path = recipe(tmp_path, model={}, tokenizer={}, start_from=str(base), training__updates=1, data__valid=[])
    run = prepare_run(load_config(path))
    loaded = VaswaniForConditionalGeneration.from_pretrained(base)
    assert run.tokenizer.get_vocab() == AutoTokenizer.from_pretrained(base).get_vocab()
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), loaded.parameters(), strict=True))


def test_ratio_weights_and_seed_of_a_recipe_are_heeded(tmp_path):
    source = {"src": str(tmp_path / "train.de"), "tgt": str(tmp_path / "train.en"), "weight": 2.0}
    path = recipe(tmp_path, data__train=[source], data__max_ratio=1.2, data__valid=[])
    first, again, other = (
        prepare_run(load_config(path, [f"training.seed={seed}"]), dry_run=True) for seed in (2, 2, 3)
    )
    assert first.corpus.report[0].dropped["off in ratio"] == 60 - len(first.corpus) > 0
    assert first.sampler.plan(0).pair_count == 2 * len(first.corpus)
    weights = [torch.cat([p.flatten() for p in run.model.parameters()]) for run in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert first.sampler.plan(0)[0:5] == again.sampler.plan(0)[0:5] != other.sampler.plan(0)[0:5]


def test_a_tokenizer_that_does_not_belong_to_the_model_is_refused(done, tmp_path, capsys):
    other = tmp_path / "other"
    VaswaniTokenizer.train(["a b c d"] * 9, vocab_size=263, allow_fewer=True, show_progress=False).save_pretrained(
        other
    )
    path = recipe(tmp_path, model={}, tokenizer={"path": str(other)}, start_from=str(done / "run" / "model"))
    assert main(["train", str(path)]) == 2
    assert "do not belong together" in capsys.readouterr().err


def test_the_tokenizer_is_learnt_once_and_again_when_the_text_changes(tmp_path, capsys):
    path = recipe(tmp_path)
    first = load_tokenizer(load_config(path))
    again = load_tokenizer(load_config(path))
    assert first.get_vocab() == again.get_vocab()
    assert capsys.readouterr().err.count("Learning") == 1
    with (tmp_path / "train.de").open("a", encoding="utf-8") as stream:
        stream.write("Und noch ein Satz.\n")
    with (tmp_path / "train.en").open("a", encoding="utf-8") as stream:
        stream.write("And another sentence.\n")
    load_tokenizer(load_config(path))
    assert capsys.readouterr().err.count("Learning") == 1


LITTLE = {"d_model": 16, "d_ff": 24, "encoder_layers": 1, "decoder_layers": 1, "num_attention_heads": 2}
LONG = [{"jsonl": "long.jsonl"}]


@pytest.mark.parametrize("end", [None, "</s>"])
def test_a_tokenizer_that_does_not_fit_is_one_sentence(tmp_path, capsys, end):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    others = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, **others).save_pretrained(tmp_path / "words")
    assert main(["train", str(recipe(tmp_path, tokenizer={"path": str(tmp_path / "words")}))]) == 2
    error = capsys.readouterr().err
    assert ("has no `eos_token`" if end is None else "does not close a sentence with its end token") in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": {"path": "no/such"}}, "tokenizer.path: no/such"),
        ({"data__train": [{"src": "no.de", "tgt": "no.en"}]}, "no.de: no such file"),
        ({"data__valid": [{"src": "no.de", "tgt": "no.en"}]}, "no.de: no such file"),
        ({"tokenizer__vocab_size": 90_000}, "vocab_size"),
        ({"data__max_length": 2}, "over length"),
        ({"model": {"preset": "base", "position_encoding": "learned", "max_position_embeddings": 40}}, "40 learned"),
        ({"target_language": "ja"}, "validation: "),
        ({"output": "/proc/nothing"}, "cannot be written to"),
        ({"data__cache": "/proc/nothing"}, "/proc/nothing cannot be written to"),
        ({"batches": {"src_tokens": 2, "tgt_tokens": 2}}, "no pair fits into a batch of 2 source and 2 target tokens"),
        ({"start_from": "no/such", "model": {}}, "start_from: no/such holds no tokenizer"),
        (
            {"model": {"position_encoding": "learned", "max_position_embeddings": 60, **LITTLE}, "data__valid": LONG},
            "its longest side has 401 tokens, but the model has 60 learned positions",
        ),
        ({"training__log_with": ["no_such_tracker"]}, "no_such_tracker"),
    ],
)
def test_what_does_not_work_is_one_sentence(tmp_path, capsys, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    Path("long.jsonl").write_text(json.dumps({"de": "x " * 200, "en": "y"}) + "\n", encoding="utf-8")
    assert main(["train", str(recipe(tmp_path, **changes))]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_tracker_that_is_not_installed_is_named(tmp_path, capsys, monkeypatch):
    import accelerate.tracking

    monkeypatch.setattr(accelerate.tracking, "get_available_trackers", lambda: [])
    assert main(["train", str(recipe(tmp_path, training__log_with=["tensorboard"]))]) == 2
    assert "tensorboard is not installed" in capsys.readouterr().err


def test_trackers_are_told_the_losses(tmp_path):
    pytest.importorskip("tensorboard", reason="the tracker is optional")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main(["train", str(recipe(tmp_path, training__log_with=["tensorboard"], data__valid=[]))]) == 0
    (folder,) = {path.parent for path in (tmp_path / "run").rglob("events.out*") if path.parent.name == "run"}
    events = EventAccumulator(str(folder)).Reload()
    assert [round(e.value, 4) for e in events.Scalars("loss")] == [round(v, 4) for v in losses(tmp_path)]


# ------------------------------------------------------------------ several processes
SLOW_PREPARATION = """
import sys, time, datetime
import torch
torch.set_num_threads(1)
from accelerate import Accelerator, InitProcessGroupKwargs
import hf_vaswani.training.run as module
from hf_vaswani import VaswaniTokenizer
plain = VaswaniTokenizer.train
def slow(*args, **kwargs):
    time.sleep(14)
    return plain(*args, **kwargs)
VaswaniTokenizer.train = slow
limit = InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=10))
module.make_accelerator = lambda recipe, folder: Accelerator(cpu=True, kwargs_handlers=[limit])
from hf_vaswani.cli.main import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_processes_wait_for_the_preparation_longer_than_their_time_limit(tmp_path):
    script = tmp_path / "slow.py"
    script.write_text(SLOW_PREPARATION)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    ended = subprocess.run(
        [*launch, str(script), str(recipe(tmp_path, training__updates=2))],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stderr.count("Learning") == 1
    assert ended.stdout.count("updates (plan)") == 1
    assert len(losses(tmp_path)) == 2
