"""Checkpoints and validation while a run goes, ends and goes on."""

import json

import pytest
import torch
from accelerate.state import AcceleratorState
from test_checkpoint import names
from test_training import FixedBatches, PadTo, copying_pairs, run

from hf_vaswani.training import CheckpointError, CheckpointFolder, Recipe, train
from hf_vaswani.training.config import CheckpointConfig, ValidationConfig


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


def test_a_run_that_patience_ended_goes_on_only_with_more_patience(make_model, tmp_path, capsys):
    def go(patience, values):
        plan = ValidationConfig(every_updates=2, patience=patience)
        options = {"validation_plan": plan, **keep(tmp_path, every_updates=2)}
        return run(make_model(), Recipe(updates=20), validate=scores(values), resume=True, **options)

    assert go(1, [2.0, 3.0]).updates == 4
    again = go(1, [])
    assert (again.updates, again.from_update, again.ended_by) == (4, 4, "patience")
    assert "raise `validation.patience`" in capsys.readouterr().err
    assert go(2, [3.0]).updates == 6


def test_another_metric_or_text_of_validation_counts_anew(make_model, tmp_path, capsys):
    def go(updates, metric, values, text_key="a"):
        left = iter(values)

        def validate(model, accelerator):
            return {"perplexity": 30.0, "bleu": 1.0, metric: next(left)}

        validate.text_key = text_key
        plan = ValidationConfig(every_updates=1, metric=metric, patience=2)
        options = {"validation_plan": plan, **keep(tmp_path, every_updates=1)}
        return run(make_model(), Recipe(updates=updates), validate=validate, resume=True, **options)

    assert go(2, "bleu", [25.0, 24.0]).best_update == 1
    assert "Validation is another" not in capsys.readouterr().err
    # A perplexity counts downwards, and none would ever beat a BLEU of 25.
    assert go(4, "perplexity", [9.0, 8.0]).best_update == 4
    assert "Validation is another than before" in capsys.readouterr().err
    assert go(5, "perplexity", [8.5]).best_update == 4
    assert go(6, "perplexity", [50.0], text_key="b").best_update == 6


def test_what_is_no_number_is_never_the_best(make_model, tmp_path):
    plan = ValidationConfig(every_updates=1)
    values = [float("nan"), 7.0, float("nan"), 6.0]
    result = run(make_model(), Recipe(updates=4), validate=scores(values), validation_plan=plan, **keep(tmp_path))
    assert result.best_update == 4
    lines = run(make_model(), Recipe(updates=1), validate=scores([float("nan")]), validation_plan=plan)
    assert lines.best_update is None


def updates_of(folder):
    return [update for update, _ in CheckpointFolder(folder / "c").due()]


def test_the_last_weights_are_in_the_mean_even_where_they_are_the_best_and_not_due(make_model, tmp_path):
    plan = ValidationConfig(every_updates=1)
    values = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0]
    run(make_model(), Recipe(updates=7), validate=scores(values), validation_plan=plan,
        **keep(tmp_path, every_updates=3))  # fmt: skip
    assert updates_of(tmp_path) == [3, 6, 7]


def test_where_a_run_paused_does_not_change_the_mean(make_model, tmp_path):
    for name, stops in (("whole", [12]), ("broken", [4, 7, 11, 12])):
        for updates in stops:
            run(make_model(), Recipe(updates=updates), resume=True, **keep(tmp_path / name, every_updates=3))
    assert updates_of(tmp_path / "whole") == updates_of(tmp_path / "broken") == [6, 9, 12]
    run(make_model(), Recipe(updates=4, max_minutes=1e-9), **keep(tmp_path / "none", every_updates=2))
    assert updates_of(tmp_path / "none") == [0]  # all there is
    run(make_model(), Recipe(updates=4), resume=True, **keep(tmp_path / "none", every_updates=2))
    assert updates_of(tmp_path / "none") == [2, 4]


def test_time_and_tokens_are_counted_over_all_starts(make_model, tmp_path):
    first = run(make_model(), Recipe(updates=2), **keep(tmp_path))
    path = tmp_path / "c" / "update-00000002" / "progress.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 5000.0}))
    second = run(make_model(), Recipe(updates=3), resume=True, **keep(tmp_path))
    assert 5000 < second.seconds < 6000
    assert second.tgt_tokens > first.tgt_tokens > 0


class EmptyEpochs(FixedBatches):
    """Every second epoch has no batch, as small weights may draw it."""

    def plan(self, epoch):
        return self.batches if epoch % 2 else []


def test_an_epoch_without_a_batch_is_passed_over_and_resuming_stays_exact(make_model, tmp_path):
    def go(updates, name, sampler):
        options = keep(tmp_path / name, every_updates=1)
        return run(make_model(dropout=0.3), Recipe(updates=updates, seed=3), sampler, resume=True, **options)

    whole = go(7, "whole", EmptyEpochs([0, 1], [2, 3]))
    parts = [loss for n in range(1, 8) for loss in go(n, "broken", EmptyEpochs([0, 1], [2, 3])).losses]
    assert parts == whole.losses
    assert go(7, "whole", EmptyEpochs([0, 1], [2, 3])).epochs == 7.5


def test_other_weights_of_corpora_are_another_run(make_model, tmp_path):
    def go(chosen):
        data = copying_pairs()
        data.weights = chosen
        return run(make_model(), Recipe(updates=1), data=data, resume=True, **keep(tmp_path))

    go(torch.full((24,), 2.0))
    for other in (torch.full((24,), 3.0), None):
        with pytest.raises(CheckpointError, match=r"is of another run: `weights` was"):
            go(other)


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
