"""Checkpoints: whole or absent, the right ones kept, and damage named."""

import os
import shutil

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from test_training import weights

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.training import (
    AveragingError,
    CheckpointError,
    CheckpointFolder,
    Progress,
    average_weights,
    paper_optimizer,
)
from hf_vaswani.training import checkpoint as module


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


def test_every_file_is_on_the_disk_before_the_folder_has_its_name(parts, tmp_path, monkeypatch):
    synced, plain = set(), os.fsync

    def fsync(handle):
        assert names(CheckpointFolder(tmp_path / "c")) == [] or os.path.isdir(handle)
        synced.add(os.fstat(handle).st_ino)
        plain(handle)

    monkeypatch.setattr(module.os, "fsync", fsync)
    path = CheckpointFolder(tmp_path / "c").save(Progress(update=3), *parts)
    files = [one for one in path.rglob("*") if one.is_file()]
    assert len(files) > 3
    assert {one.stat().st_ino for one in files} <= synced


def test_the_scale_of_half_precision_is_kept(parts, tmp_path, monkeypatch):
    class Scaler:
        scale = 1024.0

        def state_dict(self):
            return {"scale": self.scale}

        def load_state_dict(self, state):
            self.scale = state["scale"]

    monkeypatch.setattr(parts[2], "scaler", Scaler())
    folder = CheckpointFolder(tmp_path)
    path = folder.save(Progress(update=3), *parts)
    parts[2].scaler.scale = 2.0
    folder.load(path, *parts)
    assert parts[2].scaler.scale == 1024.0


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
    for content in ("{}", "[]", "5"):
        (tmp_path / "update-00000001" / "progress.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"lacks batch.*Remove the folder"):
            module.read_progress(tmp_path / "update-00000001")
    with pytest.raises(ValueError, match="keep_last"):
        CheckpointFolder(tmp_path, keep_last=0)


def test_a_run_that_the_clock_ends_at_its_best_has_it_in_the_mean(parts, tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save(Progress(update=4), *parts)
    folder.save(Progress(update=5), *parts, is_due=False)
    assert [update for update, _ in folder.due()] == [4]
    folder.save(Progress(update=5), *parts, is_due=False, is_end=True)
    assert [update for update, _ in folder.due()] == [4, 5]
    folder.save(Progress(update=8), *parts)
    assert [update for update, _ in folder.due()] == [4, 8]


def test_what_can_no_longer_be_removed_does_not_cost_the_new_one(parts, tmp_path, monkeypatch, capsys):
    folder = CheckpointFolder(tmp_path, keep_last=1)
    for update in (1, 2):
        folder.save(Progress(update=update), *parts)

    def denied(path, target):
        raise PermissionError(13, "Permission denied")

    plain = module.Path.rename
    monkeypatch.setattr(
        module.Path, "rename", lambda path, target: (denied if "unfinished" in str(target) else plain)(path, target)
    )
    assert folder.save(Progress(update=3), *parts) == tmp_path / "update-00000003"
    error = capsys.readouterr().err
    assert "could not be removed" in error
    assert "could not be written" not in error


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
