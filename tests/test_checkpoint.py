"""Checkpoints: whole or absent, the right ones kept, and damage named."""

import json
import os
import shutil

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from test_training import FixedBatches, PadTo, copying_pairs, run, weights

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.training import (
    AveragingError,
    CheckpointError,
    CheckpointFolder,
    Progress,
    Recipe,
    average_weights,
    paper_optimizer,
    train,
)
from hf_vaswani.training import checkpoint as module
from hf_vaswani.training.config import CheckpointConfig, ValidationConfig


@pytest.fixture
def parts(make_model):
    """A model and an optimizer that has taken a step."""
    model = make_model()
    optimizer = paper_optimizer(model.parameters())
    model(input_ids=torch.tensor([[4, 5, 1]]), labels=torch.tensor([[6, 1]])).loss.backward()
    optimizer.step()
    return model, optimizer, Accelerator(cpu=True)


def names(folder):
    return [update for update, _ in folder.all()]


def test_a_checkpoint_is_a_model_that_loads_and_says_where_the_run_stood(parts, tmp_path):
    model, optimizer, accelerator = parts
    folder = CheckpointFolder(tmp_path / "c")
    progress = Progress(update=12, epoch=3, batch=4, tgt_tokens=77, best_value=-2.5, best_update=8, run={"seed": 1})
    path = folder.save(progress, *parts)
    assert path == tmp_path / "c" / "update-00000012"
    loaded = VaswaniForConditionalGeneration.from_pretrained(path)
    assert torch.equal(weights(loaded), weights(model))
    fresh = type(model)(model.config)
    other = paper_optimizer(fresh.parameters())
    assert folder.load(path, fresh, other, accelerator) == progress
    assert torch.equal(weights(fresh), weights(model))
    for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[theirs].items():
            assert torch.equal(other.state[mine][key], value)


def test_the_last_and_the_best_are_kept_and_older_ones_keep_only_weights(parts, tmp_path):
    folder = CheckpointFolder(tmp_path, keep_last=3)
    for update in range(1, 8):
        folder.save(Progress(update=update, best_update=2), *parts)
    assert names(folder) == [2, 5, 6, 7]
    has_moments = {update: (path / "optimizer.safetensors").exists() for update, path in folder.all()}
    assert has_moments == {2: False, 5: False, 6: True, 7: True}
    assert folder.resumable().name == "update-00000007"
    assert not list(tmp_path.glob(".*"))


def test_one_that_is_only_the_best_does_not_crowd_out_those_that_are_due(parts, tmp_path):
    folder = CheckpointFolder(tmp_path, keep_last=2)
    for update, is_due in [(2, True), (4, True), (5, False), (6, True), (7, False)]:
        folder.save(Progress(update=update, best_update=5), *parts, is_due=is_due)
    assert names(folder) == [4, 5, 6, 7]
    assert [update for update, _ in folder.due()] == [4, 6]
    folder.save(Progress(update=8, best_update=8), *parts)
    assert names(folder) == [6, 7, 8]


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")])
@pytest.mark.parametrize("place", ["save_file", "_sync_folder", "mkdir"])
def test_what_cannot_be_written_leaves_the_earlier_ones_as_they_were(
    parts, tmp_path, monkeypatch, capsys, fault, place
):
    folder = CheckpointFolder(tmp_path / "c")
    folder.save(Progress(update=1), *parts)
    before = {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()}

    def broken(*args, **kwargs):
        raise fault

    if place == "mkdir":
        monkeypatch.setattr(module.Path, "mkdir", broken)
    elif place == "_sync_folder":
        monkeypatch.setattr(CheckpointFolder, "_seal", broken)
    else:
        monkeypatch.setattr(module, place, broken)
    assert folder.save(Progress(update=2), *parts) is None
    assert fault.strerror in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()} == before
    monkeypatch.undo()
    assert folder.save(Progress(update=2), *parts) is not None
    assert names(folder) == [1, 2]


def test_a_half_written_folder_is_no_checkpoint_and_is_removed(parts, tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save(Progress(update=3), *parts)
    shutil.copytree(tmp_path / "update-00000003", tmp_path / ".update-00000004.unfinished")
    (tmp_path / "notes").mkdir()
    assert names(folder) == [3]
    folder.save(Progress(update=5), *parts)
    assert not (tmp_path / ".update-00000004.unfinished").exists()
    assert (tmp_path / "notes").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "config.json"])
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_damaged_checkpoint_is_named_with_the_way_out(parts, tmp_path, name, is_cut):
    folder = CheckpointFolder(tmp_path)
    path = folder.save(Progress(update=3), *parts)
    if is_cut:
        os.truncate(path / name, 10)
    else:
        (path / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} (has 10 bytes|is missing).*Remove .*update-00000003"):
        folder.load(path, *parts)


def test_a_checkpoint_of_another_model_does_not_fit(parts, tmp_path, make_model):
    folder = CheckpointFolder(tmp_path)
    path = folder.save(Progress(update=3), *parts)
    other = make_model(d_model=32, d_k=8, d_v=8)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        folder.load(path, other, paper_optimizer(other.parameters()), parts[2])


def test_a_folder_that_is_no_checkpoint_is_refused(parts, tmp_path):
    (tmp_path / "update-00000001").mkdir()
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        module.read_progress(tmp_path / "update-00000001")
    (tmp_path / "update-00000001" / "progress.json").write_text("{}")
    with pytest.raises(CheckpointError, match="lacks batch"):
        module.read_progress(tmp_path / "update-00000001")
    with pytest.raises(ValueError, match="keep_last"):
        CheckpointFolder(tmp_path, keep_last=0)


# ------------------------------------------------------------------ in a run
def keep(tmp_path, **plan):
    return {
        "checkpoints": CheckpointFolder(tmp_path / "c", 3),
        "checkpoint_plan": CheckpointConfig(**{"keep_last": 3, "average_last": 0, **plan}),
    }


def test_checkpoints_are_due_by_updates_by_minutes_and_at_the_end(make_model, tmp_path):
    run(make_model(), Recipe(updates=7), **keep(tmp_path / "a", every_updates=3))
    assert names(CheckpointFolder(tmp_path / "a" / "c")) == [3, 6, 7]
    run(make_model(), Recipe(updates=2), **keep(tmp_path / "b", every_updates=100, every_minutes=1e-9))
    assert names(CheckpointFolder(tmp_path / "b" / "c")) == [1, 2]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 4}, "seed"),
        ({"data": 25}, "pairs"),
        ({"data": "other"}, "text"),
        ({"batches_per_update": 2}, "batches_per_update"),
    ],
)
def test_a_folder_of_another_run_is_refused_by_what_differs(make_model, tmp_path, change, name):
    def go(seed=3, data=24, batches_per_update=1, resume=False):
        pairs = copying_pairs(seed=6) if data == "other" else copying_pairs(count=data)
        sampler = FixedBatches([0, 1], [2, 3])
        recipe = Recipe(updates=2, seed=seed, batches_per_update=batches_per_update)
        return train(make_model(), pairs, sampler, PadTo(), recipe, resume=resume, **keep(tmp_path, every_updates=1))

    go()
    with pytest.raises(CheckpointError, match=rf"is of another run: `{name}` was"):
        go(**change, resume=True)
    assert go(resume=True).from_update == 2


def test_a_run_whose_optimizer_states_are_gone_says_so(make_model, tmp_path):
    run(make_model(), Recipe(updates=1), **keep(tmp_path))
    (tmp_path / "c" / "update-00000001" / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint that a run can go on from"):
        run(make_model(), Recipe(updates=2), resume=True, **keep(tmp_path))


def scores(values):
    """A stand-in for validation that gives one value after the other."""
    left = iter(values)
    return lambda model, accelerator: {"perplexity": next(left), "bleu": 1.0}


def test_the_best_is_kept_and_patience_ends_the_run(make_model, tmp_path):
    result = run(
        make_model(), Recipe(updates=20), metrics_path=tmp_path / "m.jsonl",
        validate=scores([9.0, 5.0, 6.0, 5.0, 7.0, 1.0]), validation_plan=ValidationConfig(every_updates=2, patience=3),
        **keep(tmp_path, every_updates=3),
    )  # fmt: skip
    assert (result.updates, result.ended_by, result.best_update) == (10, "patience", 4)
    assert [one["perplexity"] for one in result.validations] == [9.0, 5.0, 6.0, 5.0, 7.0]
    # The best was written although none was due, and outlives the limit of three.
    assert names(CheckpointFolder(tmp_path / "c")) == [4, 6, 9, 10]
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["is_best"] for line in lines if "validated_update" in line] == [True, True, False, False, False]


def test_bleu_counts_upwards_and_perplexity_downwards(make_model, tmp_path):
    plan = ValidationConfig(every_updates=1, metric="bleu")
    values = iter([3.0, 8.0, 5.0])
    result = run(
        make_model(), Recipe(updates=3), validation_plan=plan,
        validate=lambda model, accelerator: {"perplexity": 1.0, "bleu": next(values)}, **keep(tmp_path),
    )  # fmt: skip
    assert result.best_update == 2


def test_patience_goes_on_counting_after_a_resume(make_model, tmp_path):
    options = {"validation_plan": ValidationConfig(every_updates=1, patience=3), **keep(tmp_path, every_updates=1)}
    first = run(make_model(), Recipe(updates=3), validate=scores([2.0, 3.0, 3.0]), **options)
    assert first.ended_by == "plan"
    second = run(make_model(), Recipe(updates=9), validate=scores([4.0]), resume=True, **options)
    assert (second.updates, second.ended_by, second.best_update) == (4, "patience", 1)


def test_validation_does_not_change_the_training(make_model, tmp_path):
    def measure(model, accelerator):
        torch.rand(3)
        assert not model.training
        return {"perplexity": 1.0}

    plain = run(make_model(), Recipe(updates=4))
    measured = run(make_model(), Recipe(updates=4), validate=measure, validation_plan=ValidationConfig(every_updates=1))
    assert measured.losses == plain.losses


@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"precision": "bf16"}])
def test_memory_saving_and_half_precision_train_alike(make_model, options):
    plain = run(make_model(), Recipe(updates=4, warmup_updates=9))
    AcceleratorState._reset_state(reset_partial_state=True)
    other = run(make_model(), Recipe(updates=4, warmup_updates=9, **options))
    tolerance = 1e-5 if "gradient_checkpointing" in options else 3e-2
    assert other.losses == pytest.approx(plain.losses, rel=tolerance)
    assert options.get("precision") is None or other.losses != plain.losses


# ------------------------------------------------------------------ averaging
def write(folder, **tensors):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_the_mean_of_ones_and_threes_is_two(tmp_path):
    folders = [
        write(tmp_path / str(value), a=torch.full((2, 3), value), b=torch.full((4,), value)) for value in (1.0, 3.0)
    ]
    mean = average_weights(folders)
    assert {name: value.tolist() for name, value in mean.items()} == {"a": [[2.0] * 3] * 2, "b": [2.0] * 4}


def test_the_mean_is_summed_in_float64(tmp_path):
    values = [1e8, 1.0, 1.0, -1e8]
    folders = [write(tmp_path / str(i), a=torch.tensor([value])) for i, value in enumerate(values)]
    assert average_weights(folders)["a"].item() == 0.5


def test_what_does_not_belong_together_is_not_averaged(tmp_path):
    good, other = write(tmp_path / "1", a=torch.ones(2)), write(tmp_path / "2", b=torch.ones(2))
    wide, none = write(tmp_path / "3", a=torch.ones(3)), tmp_path / "4"
    none.mkdir()
    damaged = write(tmp_path / "5", a=torch.ones(2))
    os.truncate(damaged / "model.safetensors", 11)
    for folders, message in [
        ([], "no checkpoint"), ([good, other], "different models"), ([good, wide], r"a is \(3,\)"),
        ([good, none], "has no model.safetensors"), ([damaged, good], "is damaged"),
    ]:  # fmt: skip
        with pytest.raises(AveragingError, match=message):
            average_weights(folders)
    assert load_file(good / "model.safetensors")["a"].tolist() == [1, 1]
