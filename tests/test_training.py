"""The paper's schedule, and the loop that trains."""

import json
import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from huggingface_hub.errors import StrictDataclassError

from hf_vaswani.data import TokenBatchSampler, TokenizedPairs
from hf_vaswani.training import Recipe, SnapshotAverage, TrainingDiverged, learning_rate, paper_optimizer, train

PAD, EOS, FIRST = 0, 1, 3


def copying_pairs(count=24, seed=5):
    """Targets that repeat their source, 1 to 6 tokens and the end token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (count,), generator=generator).tolist()
    ids = [[*torch.randint(FIRST, 37, (n,), generator=generator).tolist(), EOS] for n in lengths]
    return TokenizedPairs(ids, ids)


class PadTo:
    """Pads a batch, with `extra` more columns than it needs."""

    def __init__(self, extra=0):
        self.extra = extra

    def __call__(self, examples):
        def pad(name, filler):
            width = max(len(one[name]) for one in examples) + self.extra
            return torch.tensor([one[name] + [filler] * (width - len(one[name])) for one in examples])

        input_ids = pad("input_ids", PAD)
        return {"input_ids": input_ids, "attention_mask": (input_ids != PAD).long(), "labels": pad("labels", -100)}


class FixedBatches:
    """The same lists of indices in every epoch, and a record of the epochs asked for."""

    src_tokens = tgt_tokens = 40

    def __init__(self, *batches):
        self.batches, self.epochs = batches, []

    def plan(self, epoch):
        self.epochs.append(epoch)
        return self.batches

    def __len__(self):
        return len(self.batches)


def run(model, recipe=None, sampler=None, data=None, collator=None, **kwargs):
    data = data or copying_pairs()
    if sampler is None:
        sampler = TokenBatchSampler(data.src_lengths, data.tgt_lengths, 40, 40, seed=7)
    recipe = recipe or Recipe(updates=8, warmup_updates=20, average_last=0, seed=3)
    return train(model, data, sampler, collator or PadTo(), recipe, **kwargs)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# ------------------------------------------------------------------ schedule and optimizer
@pytest.mark.parametrize(
    ("update", "d_model", "warmup", "rate"),
    [
        (1, 4, 4, 0.0625),  # 1/2 * 1 * 4^-1.5 = 1/2 * 1/8
        (4, 4, 4, 0.25),  # the peak: 1/2 * 4^-0.5
        (16, 4, 4, 0.125),  # 1/2 * 16^-0.5
        (4000, 512, 4000, 6.98771242968684e-4),  # the paper's base run
        (100_000, 512, 4000, 1.397542485937368e-4),
    ],
)
def test_the_rate_is_the_formula_worked_by_hand(update, d_model, warmup, rate):
    assert learning_rate(update, d_model, warmup) == pytest.approx(rate, rel=1e-12)
    assert learning_rate(update, d_model, warmup, factor=3.0) == pytest.approx(3 * rate, rel=1e-12)


def test_the_rate_rises_in_equal_steps_to_its_peak_and_falls_after_it():
    rates = [learning_rate(k, 512, 100) for k in range(1, 301)]
    assert rates.index(max(rates)) == 99
    assert all(b - a == pytest.approx(rates[0]) for a, b in pairwise(rates[:100]))
    assert all(b < a for a, b in pairwise(rates[99:]))


@pytest.mark.parametrize(("update", "warmup"), [(0, 10), (1, 0)])
def test_updates_count_from_one(update, warmup):
    with pytest.raises(ValueError, match="at least 1"):
        learning_rate(update, 512, warmup)


def test_the_optimizer_is_the_papers_adam():
    optimizer = paper_optimizer([torch.nn.Parameter(torch.zeros(2))])
    assert isinstance(optimizer, torch.optim.Adam)
    settings = optimizer.param_groups[0]
    assert (settings["betas"], settings["eps"], settings["weight_decay"]) == ((0.9, 0.98), 1e-9, 0)


# ------------------------------------------------------------------ the loop
def test_each_update_has_the_rate_of_its_number_and_a_line_in_the_metrics(make_model, tmp_path):
    result = run(make_model(), Recipe(updates=5, warmup_updates=3, rate_factor=0.5), metrics_path=tmp_path / "m.jsonl")
    head, *lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert (head["start_after_update"], head["batches_per_update"], head["processes"]) == (0, 1, 1)
    assert [line["update"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["learning_rate"] for line in lines] == [learning_rate(k, 16, 3, 0.5) for k in range(1, 6)]
    assert [line["loss"] for line in lines] == result.losses
    assert sum(line["tgt_tokens"] for line in lines) == result.tgt_tokens


def test_the_rate_of_an_update_is_the_one_that_is_applied(make_model):
    # Adam's first step is rate * sign(gradient), whatever the gradient's size.
    model = make_model(dropout=0.0)
    before = weights(model)
    run(model, Recipe(updates=1, warmup_updates=3, average_last=0))
    assert (weights(model) - before).abs().max().item() == pytest.approx(learning_rate(1, 16, 3), rel=1e-3)


def test_the_same_seed_gives_the_same_losses_and_weights_bit_for_bit(make_model):
    first, second = make_model(), make_model()
    torch.rand(11)  # the state of the global generator must not matter
    losses = [run(first).losses, run(second).losses]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8
    assert torch.equal(weights(first), weights(second))


def test_another_seed_gives_other_losses(make_model):
    seeds = [run(make_model(), Recipe(updates=4, average_last=0, seed=seed)).losses for seed in (3, 4)]
    assert seeds[0] != seeds[1]


def test_a_longer_plan_begins_with_the_losses_of_a_shorter_one(make_model):
    short, long = (
        run(make_model(), Recipe(updates=n, warmup_updates=20, average_last=2, average_every=1)) for n in (3, 9)
    )
    assert long.losses[:3] == short.losses


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_and_the_step_do_not_depend_on_how_an_update_is_split(make_model, smoothing):
    data = TokenizedPairs([[4, 5, EOS], [6, EOS], [7, EOS], [8, EOS]], [[9] * 30 + [EOS], [6, 4, EOS], [7, EOS], [EOS]])
    found = []
    for micro, batches in [(1, ([0, 1, 2, 3],)), (2, ([0], [1, 2, 3])), (4, ([3], [2], [1], [0]))]:
        model = make_model(dropout=0.0, label_smoothing=smoothing)
        recipe = Recipe(updates=3, warmup_updates=5, batches_per_update=micro, average_last=0)
        result = run(model, recipe, FixedBatches(*batches), data)
        assert result.epochs == 3
        assert result.tgt_tokens == 3 * 37
        found.append((torch.tensor(result.losses), weights(model)))
    for losses, values in found[1:]:
        torch.testing.assert_close(losses, found[0][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(values, found[0][1], atol=1e-4, rtol=1e-3)


def test_padding_columns_do_not_change_the_loss(make_model):
    recipe = Recipe(updates=3, warmup_updates=20, average_last=0)
    losses = [run(make_model(dropout=0.0), recipe, collator=PadTo(extra)).losses for extra in (0, 10)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_epochs_are_counted_and_told_to_the_sampler(make_model):
    sampler = FixedBatches([0, 1], [2, 3], [4, 5])
    result = run(make_model(), Recipe(updates=7, average_last=0), sampler)
    assert [*dict.fromkeys(sampler.epochs)] == [0, 1, 2]
    assert result.epochs == pytest.approx(7 / 3)


def test_training_leaves_the_model_in_the_mode_it_was_in(make_model):
    model = make_model()
    run(model, Recipe(updates=1))
    assert not model.training


def test_the_model_learns_to_copy(make_model):
    data = copying_pairs(count=120)
    sampler = TokenBatchSampler(data.src_lengths, data.tgt_lengths, 150, 150)
    recipe = Recipe(updates=120, warmup_updates=40, rate_factor=0.4, average_last=3, average_every=5)
    model = make_model(dropout=0.0, label_smoothing=0.0, d_model=32, d_k=8, d_v=8, d_ff=64)
    losses = run(model, recipe, sampler, data).losses
    assert losses[0] > 3.0
    assert sum(losses[-5:]) / 5 < 2.0


# ------------------------------------------------------------------ ends
def test_the_clock_ends_a_run_and_nothing_else_changes(make_model, tmp_path):
    model = make_model()
    before = weights(model)
    result = run(model, Recipe(updates=8, max_minutes=1e-9))
    assert (result.updates, result.stopped_early, result.averaged_count) == (0, True, 0)
    assert torch.equal(weights(model), before)
    assert not run(model, Recipe(updates=2, max_minutes=1e6)).stopped_early


def spoil(model, is_spoilt):
    """Make the loss of some calls, counted from 1, not a number."""
    plain, calls = model.loss_function, []

    def loss_function(**kwargs):
        calls.append(1)
        loss = plain(**kwargs)
        return loss * float("nan") if is_spoilt(len(calls)) else loss

    model.loss_function = loss_function
    return model


def test_an_update_without_a_finite_gradient_is_skipped_and_counted(make_model, tmp_path):
    model = spoil(make_model(), lambda call: call in (2, 3))
    result = run(model, Recipe(updates=4, warmup_updates=9, average_last=0), metrics_path=tmp_path / "m.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()][1:]
    assert (result.updates, result.skipped_count) == (4, 2)
    assert [line.get("update", "skipped") for line in lines] == [1, "skipped", "skipped", 2, 3, 4]
    assert (lines[1]["skipped_update"], lines[1]["loss"]) == (2, "nan")
    assert all(map(math.isfinite, result.losses))
    assert weights(model).isfinite().all()


def test_a_run_that_no_longer_has_finite_gradients_ends_with_advice(make_model):
    model = spoil(make_model(), lambda call: call > 2)
    with pytest.raises(TrainingDiverged, match=r"3 updates in a row, at update 3, .*warmup_updates"):
        run(model, Recipe(updates=50, nonfinite_limit=3))
    assert weights(model).isfinite().all()


def test_only_updates_in_a_row_count_towards_the_limit(make_model):
    model = spoil(make_model(), lambda call: call in (2, 3, 5, 6, 8, 9))
    result = run(model, Recipe(updates=5, nonfinite_limit=3))
    assert (result.updates, result.skipped_count) == (5, 6)


def test_a_gradient_is_clipped_only_where_that_is_asked_for(make_model):
    steps = []
    for norm in (None, 1e-9):
        model = make_model(dropout=0.0)
        before = weights(model)
        run(model, Recipe(updates=1, warmup_updates=3, average_last=0, max_grad_norm=norm))
        steps.append((weights(model) - before).abs().max().item())
    # Adam's epsilon (1e-9) makes its step short only where the gradient is as small as that.
    assert steps[1] < 0.5 * steps[0]


def test_a_parameter_without_a_part_in_the_loss_is_named_unless_it_is_frozen(make_model):
    model = make_model()
    model.extra = torch.nn.Linear(2, 3, bias=False)
    with pytest.raises(ValueError, match=r"1 parameter\(s\) have no part in the loss: extra\.weight\. Set"):
        run(model)
    model.extra.requires_grad_(False)
    assert run(model, Recipe(updates=2)).updates == 2


def test_a_frozen_part_stays_as_it_is_and_the_rest_learns(make_model):
    model = make_model()
    model.model.encoder.requires_grad_(False)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    run(model, Recipe(updates=2))
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {name for name, value in model.named_parameters() if value.requires_grad}


def test_an_empty_corpus_is_refused(make_model):
    with pytest.raises(ValueError, match="nothing to train on"):
        run(make_model(), sampler=FixedBatches())


@pytest.mark.parametrize(
    "changes",
    [
        {"updates": 0}, {"batches_per_update": 0}, {"warmup_updates": 0}, {"average_last": -1}, {"average_every": 0},
        {"nonfinite_limit": 0}, {"max_minutes": 0.0}, {"max_grad_norm": -1.0},
        {"rate_factor": float("nan")}, {"precision": "fp8"}, {"loader_workers": -1}, {"seed": -1},
    ],
)  # fmt: skip
def test_nonsense_in_a_recipe_is_refused_by_name(changes):
    with pytest.raises(StrictDataclassError) as caught:
        Recipe(**changes)
    assert f"`{next(iter(changes))}` must be" in str(caught.value.__cause__ or caught.value)


def test_a_wrong_type_in_a_recipe_is_refused_by_name():
    with pytest.raises(StrictDataclassError, match="updates"):
        Recipe(updates="many")


# ------------------------------------------------------------------ averaging
def test_the_mean_of_the_last_snapshots_is_exact_and_older_ones_are_forgotten():
    layer = torch.nn.Linear(2, 1, bias=False)
    average = SnapshotAverage(3)
    for value in (100.0, 1.0, 2.0, 6.0):
        with torch.no_grad():
            layer.weight.fill_(value)
        average.add(layer)
    assert len(average) == 3
    average.write_into(layer)
    assert layer.weight.tolist() == [[3.0, 3.0]]


def test_an_average_of_nothing_is_refused():
    with pytest.raises(RuntimeError, match="no snapshot"):
        SnapshotAverage(2).write_into(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="at least 1"):
        SnapshotAverage(0)


def test_a_run_ends_with_the_mean_of_its_last_snapshots(make_model):
    last = []
    for updates in (3, 6, 7):
        model = make_model()
        run(model, Recipe(updates=updates, warmup_updates=5, average_last=0))
        last.append(weights(model).double())
    model = make_model()
    # Snapshots after updates 3, 6 and, as the last, 7.
    result = run(model, Recipe(updates=7, warmup_updates=5, average_last=5, average_every=3))
    assert result.averaged_count == 3
    assert torch.equal(weights(model), (sum(last) / 3).float())
    assert model.lm_head.weight is model.model.shared.weight


# ------------------------------------------------------------------ several processes
TWO_PROCESSES = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from accelerate import Accelerator
from conftest import TINY
from test_training import FixedBatches, PadTo, copying_pairs
from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.training import Recipe, train
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = VaswaniForConditionalGeneration(VaswaniConfig(**{**TINY, "dropout": 0.2}))
batches = FixedBatches([0], [1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11, 12])
recipe = Recipe(updates=7, warmup_updates=5, batches_per_update=2, average_last=2, average_every=1)
result = train(model, copying_pairs(), batches, PadTo(), recipe, accelerator=accelerator)
if accelerator.is_main_process:
    total = sum(p.double().sum().item() for p in model.parameters())
    print(json.dumps([accelerator.num_processes, result.losses, result.tgt_tokens, result.epochs, total]))
"""


def test_two_processes_train_like_one_with_the_same_tokens(make_model, tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES)
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(here.parent), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*launch, str(script), str(here)], capture_output=True, text=True, env=environment, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    processes, losses, tokens, epochs, total = json.loads(done.stdout.splitlines()[-1])
    model = make_model(dropout=0.2)  # dropout too is a function of the batch, not of the process
    batches = FixedBatches([0], [1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11, 12])
    recipe = Recipe(updates=7, warmup_updates=5, batches_per_update=2, average_last=2, average_every=1)
    alone = run(model, recipe, batches)
    assert processes == 2
    assert losses == pytest.approx(alone.losses, abs=1e-5)
    assert (tokens, epochs) == (alone.tgt_tokens, alone.epochs)
    assert total == pytest.approx(sum(p.double().sum().item() for p in model.parameters()), abs=1e-2)


# ------------------------------------------------------------------ compiled
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within torch's compiler
@pytest.mark.slow  # the compiler takes half a minute
def test_a_compiled_model_trains_alike_and_is_compiled_once_for_all_widths(make_model):
    from torch._dynamo.utils import counters

    plain = run(make_model(dropout=0.0), Recipe(updates=8, warmup_updates=9))
    AcceleratorState._reset_state(reset_partial_state=True)
    counters.clear()
    compiled = run(make_model(dropout=0.0), Recipe(updates=8, warmup_updates=9, compile=True))
    assert compiled.losses == pytest.approx(plain.losses, abs=1e-4)
    assert counters["stats"]["unique_graphs"] <= 2
