"""What a run will take, against counts by hand, against the real thing, and without a trace on the caller's model."""

import json
import random
import re
import shutil
from collections import namedtuple
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY
from safetensors.torch import load_file
from torch import nn

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.data import TokenBatchSampler, TokenizedPairs
from hf_vaswani.training import dry_run_measure, dry_run_text, paper_optimizer
from hf_vaswani.training.checkpoint import CheckpointFolder, Progress
from hf_vaswani.training.config import CheckpointConfig
from hf_vaswani.training.dry_run import _checkpoint_plan, checkpoint_updates, dry_run
from hf_vaswani.training.dry_run_cost import (
    SUSTAINED_TFLOPS,
    count_flops,
    count_parameters,
    paper_flops,
    paper_size,
    sustained_tflops,
)
from hf_vaswani.training.dry_run_measure import Bench
from hf_vaswani.training.recipe import Recipe

PAD, EOS, FIRST = 0, 1, 3


def pairs_of(src_lengths, tgt_lengths):
    generator = torch.Generator().manual_seed(4)

    def ids(lengths):
        return [[*torch.randint(FIRST, 37, (n - 1,), generator=generator).tolist(), EOS] for n in lengths]

    return TokenizedPairs(ids(src_lengths), ids(tgt_lengths))


class PadTo:
    """Pads a batch; it draws from all generators, as a collator with noise would."""

    def __call__(self, examples):
        random.random(), np.random.rand(), torch.rand(1)

        def pad(name, filler):
            width = max(len(one[name]) for one in examples)
            return torch.tensor([one[name] + [filler] * (width - len(one[name])) for one in examples])

        input_ids = pad("input_ids", PAD)
        return {"input_ids": input_ids, "attention_mask": (input_ids != PAD).long(), "labels": pad("labels", -100)}


SRC_LENGTHS, TGT_LENGTHS = [2, 3, 5, 6, 7, 7, 4, 2, 3, 6, 5, 4, 2], [3, 2, 4, 6, 5, 7, 4, 2, 2, 5, 6, 3, 3]


def run(model, recipe=None, checkpoints=None, data=None, budgets=(20, 16), **kwargs):
    data = pairs_of(SRC_LENGTHS, TGT_LENGTHS) if data is None else data
    sampler = TokenBatchSampler(data.src_lengths, data.tgt_lengths, *budgets, seed=7)
    return dry_run(model, sampler, data, PadTo(), recipe or Recipe(updates=30), checkpoints, **kwargs)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Fewer repeats, and no search for garbage in a heap as large as that of the tests."""
    monkeypatch.setattr(dry_run_measure, "_REPEATS", 1)
    monkeypatch.setattr(dry_run_measure, "gc", SimpleNamespace(collect=int))


@pytest.fixture
def make_model(make_model):
    """The tiny model with fewer layers, of unlike number."""
    return lambda **changes: make_model(**{"encoder_layers": 1, "decoder_layers": 2, **changes})


@pytest.fixture(scope="module")
def plain_run():
    """What is found for a tiny model with nothing special about it."""
    torch.manual_seed(0)
    return run(VaswaniForConditionalGeneration(VaswaniConfig(**TINY)))


@pytest.fixture
def fixed_times(monkeypatch):
    """Every batch takes 2 seconds and every step of the optimizer half a second."""
    plain_batch, plain_step = Bench.forward_backward, Bench.step
    monkeypatch.setattr(Bench, "forward_backward", lambda self, number: plain_batch(self, number) * 0 + 2.0)
    monkeypatch.setattr(Bench, "step", lambda self: plain_step(self) * 0 + 0.5)


# ------------------------------------------------------------------ length and text
def test_tokens_of_an_update_are_devices_times_budget_times_accumulation(make_model):
    text = run(make_model(), Recipe(updates=30, batches_per_update=6), process_count=2).text
    assert (text.device_count, text.accumulation, text.src_budget, text.tgt_budget) == (2, 3, 20, 16)
    assert text.src_limit == 2 * 20 * 3
    assert text.tgt_limit == 2 * 16 * 3


def test_the_identity_is_printed_with_its_factors(make_model):
    printed = str(run(make_model(), Recipe(updates=30, batches_per_update=6), process_count=2))
    assert "120 tokens = 2 devices x 20 tokens a batch x 3 batches accumulated\n" in printed
    assert "96 tokens = 2 devices x 16 tokens a batch x 3 batches accumulated\n" in printed


def test_batches_that_cannot_be_shared_evenly_are_taken_off_the_product_and_warned_of(make_model):
    found = run(make_model(), Recipe(updates=30, batches_per_update=5), process_count=2)
    assert (found.text.accumulation, found.text.src_limit) == (3, 100)
    assert "100 tokens = 2 devices x 20 tokens a batch x 3 batches accumulated - 1 x 20 tokens" in str(found)
    assert any("5 batches an update cannot be shared evenly by 2 devices" in one for one in found.warnings)
    assert not any("shared" in one for one in run(make_model(), Recipe(updates=30), process_count=1).warnings)


def test_mean_tokens_and_padding_are_those_of_the_plan(make_model):
    # One batch holds all: 3 pairs, 4 source places and 5 target places each.
    data = pairs_of([4, 2, 3], [5, 5, 1])
    text = run(make_model(), Recipe(updates=2), data=data).text
    assert (text.src_tokens, text.tgt_tokens) == (9, 11)
    assert text.padding == pytest.approx(1 - 20 / 27)


def test_an_epoch_is_so_many_updates_and_its_last_may_be_short(make_model):
    data = pairs_of([3] * 7, [3] * 7)  # budgets for one pair: seven batches
    found = run(make_model(), Recipe(updates=30, batches_per_update=3), data=data, budgets=(3, 3))
    assert (found.text.batches_per_epoch, found.updates_per_epoch, found.epochs) == (7, 3, 10.0)
    assert found.text.tgt_tokens == 7


def test_an_empty_corpus_and_no_process_are_refused(make_model):
    empty = TokenizedPairs([], [])
    with pytest.raises(ValueError, match="no batch"):
        run(make_model(), data=empty)
    with pytest.raises(ValueError, match="process_count"):
        run(make_model(), process_count=0)


# ------------------------------------------------------------------ parameters
def test_parameters_are_those_of_the_model_and_a_shared_matrix_counts_once(make_model):
    model = make_model()
    found = run(model).parameters
    assert found.total == model.num_parameters() == found.trained
    assert found.embedding == 37 * 16
    assert found.other == model.num_parameters(exclude_embeddings=True)


def test_every_table_and_an_untied_pre_softmax_matrix_are_embedding(make_model):
    model = make_model(tie_word_embeddings=False, source_vocab_size=41, position_encoding="learned")
    found = count_parameters(model)
    assert found.total == model.num_parameters()
    assert found.embedding == 16 * (41 + 37 + 37 + 64 + 64)


def test_frozen_weights_have_neither_gradient_nor_moments(make_model):
    model = make_model()
    frozen = model.model.encoder.layers[0].feed_forward.fc1.weight.requires_grad_(False)
    found = run(model)
    assert found.parameters.trained == found.parameters.total - 16 * 24
    assert found.memory.weights_bytes - found.memory.gradient_bytes == 16 * 24 * 4
    assert not frozen.requires_grad
    assert f"{found.parameters.trained:,} parameters; the others are frozen" in str(found)


# ------------------------------------------------------------------ FLOPs
class OneMap(nn.Module):
    """A single linear map of an embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.map = nn.Embedding(11, 6), nn.Linear(6, 5)

    def forward(self, ids):
        return SimpleNamespace(loss=self.map(self.embed(ids)).sum())


def test_flops_of_a_linear_map_are_six_for_each_weight_and_token():
    # Forward, gradient of the weight and gradient of the input: a multiply and an add for each weight and token.
    assert count_flops(OneMap(), {"ids": torch.zeros(2, 7, dtype=torch.long)}) == 6 * (6 * 5) * (2 * 7)


def flops_by_hand(c, rows, src, tgt):
    """Forward and backward of the whole model, from the equations of the paper."""
    heads, d_k, d_v = c.num_attention_heads, c.query_key_width, c.value_width

    def attention(queries, keys):
        maps = queries * c.d_model * heads * (d_k + d_v) + keys * c.d_model * heads * (d_k + d_v)
        return maps + heads * queries * keys * (d_k + d_v)

    def feed_forward(length):
        return 2 * length * c.d_model * c.d_ff

    encoder = c.encoder_layers * (attention(src, src) + feed_forward(src))
    decoder = c.decoder_layers * (attention(tgt, tgt) + attention(tgt, src) + feed_forward(tgt))
    return 6 * rows * (encoder + decoder + tgt * c.d_model * c.vocab_size)


@pytest.mark.parametrize("widths", [{}, {"d_k": 8, "d_v": 8}], ids=["unlike widths", "fused kernel"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_flops_of_the_model_are_those_of_its_equations_whatever_kernel_computes_it(
    make_model, batch, widths, attention
):
    model = make_model(attn_implementation=attention, **widths).train()
    assert count_flops(model, batch) == flops_by_hand(model.config, 3, 7, 5)


def test_flops_of_a_training_are_those_of_its_batches_padding_included(make_model):
    model, data = make_model(), pairs_of(SRC_LENGTHS, TGT_LENGTHS)
    sampler = TokenBatchSampler(data.src_lengths, data.tgt_lengths, 30, 24, seed=7)
    batches = sampler.plan(0)
    assert 2 < len(batches) <= 8
    by_hand = 0
    for number in range(len(batches)):
        pairs = batches[number]
        widths = [int(lengths[pairs].max()) for lengths in (data.src_lengths, data.tgt_lengths)]
        by_hand += flops_by_hand(model.config, len(pairs), *widths)
    found = dry_run(model, sampler, data, PadTo(), Recipe(updates=5 * len(batches)))
    assert found.epochs == 5
    assert found.cost.counted == pytest.approx(5 * by_hand)


def test_many_batches_are_counted_from_a_few_of_each_length(make_model):
    generator = torch.Generator().manual_seed(2)
    src = torch.randint(2, 30, (400,), generator=generator).tolist()
    tgt = [max(2, n + k % 5 - 2) for k, n in enumerate(src)]
    model, data = make_model(), pairs_of(src, tgt)
    sampler = TokenBatchSampler(data.src_lengths, data.tgt_lengths, 90, 90)
    batches = sampler.plan(0)
    by_hand = sum(
        flops_by_hand(model.config, len(b), int(data.src_lengths[b].max()), int(data.tgt_lengths[b].max()))
        for b in batches
    )
    assert len(batches) > 60
    found = dry_run(model, sampler, data, PadTo(), Recipe(updates=len(batches)))
    assert found.cost.counted == pytest.approx(by_hand, rel=0.02)


def test_gradient_checkpointing_is_counted_and_not_switched_on_in_the_callers_model(make_model):
    model = make_model()
    plain, twice = run(model), run(model, Recipe(updates=30, gradient_checkpointing=True))
    assert 1.1 < twice.cost.counted / plain.cost.counted < 4 / 3
    assert any("gradient checkpointing" in note for note in twice.notes)
    assert not model.is_activation_checkpointing


def test_the_papers_method_gives_the_papers_figures():
    assert f"{paper_flops(12, 8, SUSTAINED_TFLOPS['P100']):.1e}" == "3.3e+18"
    assert f"{paper_flops(3.5 * 24, 8, 9.5):.1e}" == "2.3e+19"
    assert paper_flops(1, 1, SUSTAINED_TFLOPS["K80"]) / 3600 == pytest.approx(2.8e12)
    assert paper_flops(2, 3, 4.0) == 2 * 3600 * 3 * 4e12


def test_the_papers_method_is_applied_to_the_run(make_model, fixed_times):
    found = run(make_model(), Recipe(updates=720, batches_per_update=4), process_count=4)
    assert found.cost.sustained_tflops > 0
    assert found.cost.paper_method == paper_flops(found.time.hours, 4, found.cost.sustained_tflops)
    assert re.search(
        r"the paper's method +\S+ FLOPs = \S+ \S+ x 4 devices x \S+ TFLOPS sustained \(a float32", str(found)
    )


def test_the_papers_rate_is_taken_for_the_papers_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla P100-SXM2-16GB")
    assert sustained_tflops(torch.device("cuda"), "no") == (9.5, "the paper's figure for a P100")


@pytest.mark.parametrize(
    ("preset", "size"),
    [
        ("base", "base"),
        ("table3-D-dropout0.0", "base"),
        ("big", "big"),
        ("big-en-fr", "big"),
        ("tiny", None),
        ("table3-A-h4", None),
    ],
)
def test_the_papers_sizes_are_recognised(preset, size):
    assert paper_size(VaswaniConfig.from_preset(preset, vocab_size=50)) == size


def test_the_papers_own_figure_stands_beside_a_model_of_its_size(plain_run):
    found = plain_run
    assert "P100" not in str(found)
    base, big = (replace(found.cost, paper_size=size) for size in ("base", "big"))
    assert "3.28e18 FLOPs = 12.0 h x 8 P100 x 9.5 TFLOPS sustained, 100,000 updates" in str(replace(found, cost=base))
    assert "2.30e19 FLOPs = 84.0 h x 8 P100 x 9.5 TFLOPS sustained, 300,000 updates" in str(replace(found, cost=big))


# ------------------------------------------------------------------ nothing is changed
def test_the_callers_model_gradients_generators_and_sampler_are_untouched(make_model):
    model = make_model(attention_dropout=0.1)
    model.model.encoder.eval()
    model.model.decoder.train()
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = None if number == 2 else torch.full_like(parameter, 0.25)
    data = pairs_of([*SRC_LENGTHS, 70], [*TGT_LENGTHS, 70])  # longer than the position table, which grows in use
    sampler = TokenBatchSampler(data.src_lengths, data.tgt_lengths, 80, 80)
    sampler.set_epoch(3)
    order = list(sampler)
    before = deepcopy((model.state_dict(), dict(model.named_buffers()), [p.grad for p in model.parameters()]))
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()

    dry_run(model, sampler, data, PadTo(), Recipe(updates=3, max_grad_norm=0.1), CheckpointConfig())

    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    after = (model.state_dict(), dict(model.named_buffers()), [p.grad for p in model.parameters()])
    for old, new in zip(before[:2], after[:2], strict=True):
        assert old.keys() == new.keys()
        assert all(torch.equal(old[name], new[name]) for name in old)
    assert all(o is n is None or torch.equal(o, n) for o, n in zip(before[2], after[2], strict=True))
    assert [module.training for module in model.modules()] == modes
    assert (sampler.epoch, list(sampler)) == (3, order)


def test_nothing_is_written(make_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(make_model(), None, CheckpointConfig(), output="runs/mine")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ memory
def test_weights_gradients_and_states_are_counted_to_the_byte(make_model):
    model = make_model()
    memory = run(model).memory
    optimizer = paper_optimizer(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert memory.weights_bytes == memory.gradient_bytes == 4 * model.num_parameters()
    assert memory.adam_bytes == sum(v.nbytes for state in optimizer.state.values() for v in state.values())
    assert memory.total_bytes == 4 * memory.weights_bytes + 4 * len(optimizer.state) + memory.activation_bytes


def test_activations_are_measured_with_the_largest_batch(make_model):
    model = make_model(d_model=64, d_ff=256, vocab_size=1500)
    data = pairs_of([3, 3, *[20] * 60], [3, 3, *[23] * 60])
    memory = run(model, data=data, budgets=(1200, 1380)).memory
    assert (memory.largest_rows, memory.largest_src, memory.largest_tgt) == (60, 20, 23)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    batch = PadTo()([data[i] for i in range(2, 62)])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.train()(**batch).loss
    least = sum(kept.values()) - memory.weights_bytes
    del loss
    assert least > 20 * 2**20
    # Above what is kept for the backward pass come its own temporaries and the buffers of the matrix library, whose
    # size depends on the processor.
    assert least < memory.activation_bytes < 3 * least + 32 * 2**20


def test_on_an_accelerator_its_own_peak_is_taken_from_the_state_before():
    calls = []
    backend = SimpleNamespace(
        synchronize=lambda: None,
        reset_peak_memory_stats=lambda device: calls.append("reset"),
        memory_allocated=lambda device: 100,
        max_memory_allocated=lambda device: 350 if calls == ["reset", "work"] else 9999,
    )
    bench = SimpleNamespace(device=torch.device("cuda"), backend=backend)
    assert Bench.peak_bytes_of(bench, lambda: calls.append("work") or "given") == (250, "given")
    # A back end that keeps no such count: nothing is claimed.
    bench.backend = SimpleNamespace()
    assert Bench.peak_bytes_of(bench, lambda: "given") == (None, "given")


def test_snapshots_in_memory_are_counted_where_they_are_taken(make_model, plain_run):
    model = make_model()
    assert plain_run.memory.snapshot_bytes == 0
    for updates, count in [(30, 4), (6, 2)]:  # after updates 5 and 6 in the second
        found = run(model, Recipe(updates=updates, average_last=4, average_every=5))
        assert found.memory.snapshot_bytes == count * found.memory.weights_bytes
        assert "of main memory" in str(found)


class TooLarge(nn.Module):
    """Takes the place of a model's forward pass and has memory for a single row."""

    def __init__(self, plain, error):
        super().__init__()
        self.plain, self.error = plain, error

    @property
    def config(self):
        return self.plain.config

    def forward(self, **batch):
        if len(batch["input_ids"]) > 1:
            raise self.error
        return self.plain(**batch)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:113] . DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_batch_that_does_not_fit_is_a_warning_that_names_its_size_and_the_way_out(make_model, error):
    data = pairs_of([4, 2, 3], [5, 5, 1])
    rule = CheckpointConfig(every_updates=10, every_minutes=1)
    found = run(TooLarge(make_model(), error), Recipe(updates=30), rule, data)
    assert found.time is None
    assert found.memory.activation_bytes is None
    assert found.cost.counted > 0
    assert found.checkpoints.written == [10, 20, 30]
    assert "A batch of 3 pairs of 4 source and 5 target tokens does not fit into the memory of cpu" in found.warnings[0]
    assert "max_batch_tokens" in found.warnings[0]
    assert "every_minutes" in found.warnings[-1]
    assert "more than" in str(found)


def test_another_fault_of_the_model_is_not_taken_for_want_of_memory(make_model):
    with pytest.raises(RuntimeError, match="something else"):
        run(TooLarge(make_model(), RuntimeError("something else")))


def test_more_memory_than_there_is_is_warned_of(make_model, monkeypatch):
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2**20))
    model = make_model(vocab_size=20_000)  # 1.2 MiB of weights alone
    assert any(re.search(r"MiB of memory are needed, but cpu has 1\.0 MiB", one) for one in run(model).warnings)


# ------------------------------------------------------------------ time
def test_the_time_of_an_update_is_that_of_its_batches_and_one_step(make_model, fixed_times):
    data = pairs_of([4] * 6, [5] * 6)  # three batches of equal size
    found = run(make_model(), Recipe(updates=720, batches_per_update=6), data=data, budgets=(8, 10), process_count=2)
    assert (found.time.mean_s, found.time.step_s) == pytest.approx((6.5, 0.5))  # 3 batches, one step
    assert found.time.hours == pytest.approx(720 * 6.5 / 3600)
    assert found.time.tgt_tokens_per_s == pytest.approx(30 / 6.5)
    assert "the run                1.3 h = 720 updates x 6.50 s" in str(found)


def test_time_is_scaled_to_batches_of_mean_size(make_model, fixed_times):
    # Places: 18 (two pairs), 18, and 9 for the odd one out. 4 s were measured on 36 places.
    data = pairs_of([4] * 5, [5] * 5)
    found = run(make_model(), data=data, budgets=(8, 10))
    assert found.time.mean_s == pytest.approx(4 / 36 * 15 + 0.5)


def test_measured_time_is_real(plain_run):
    found = plain_run.time
    assert 0 < found.step_s < found.mean_s < 5


def test_a_clock_that_ends_the_run_before_its_plan_is_warned_of(make_model, fixed_times):
    found = run(make_model(), Recipe(updates=720, max_minutes=2), data=pairs_of([4] * 6, [5] * 6), budgets=(8, 10))
    assert any("ends the run after about 48 of 720 updates" in one for one in found.warnings)
    assert not run(make_model(), Recipe(updates=3, max_minutes=2)).warnings


# ------------------------------------------------------------------ checkpoints
@pytest.mark.parametrize(
    ("updates", "every", "by_clock", "written"),
    [
        (30, 10, None, [10, 20, 30]),
        (25, 10, None, [10, 20, 25]),
        (7, 10, None, [7]),
        # The clock starts anew with each that is written, for whichever reason.
        (30, 10, 7, [7, 10, 17, 20, 27, 30]),
        (12, 100, 5, [5, 10, 12]),
    ],
)
def test_checkpoints_are_due_by_updates_by_the_clock_and_at_the_end(updates, every, by_clock, written):
    assert checkpoint_updates(updates, every, by_clock) == written


def test_the_checkpoint_plan_by_hand(make_model):
    found = run(make_model(), Recipe(updates=95), CheckpointConfig(every_updates=10, keep_last=4, average_last=3))
    disk, weights = found.checkpoints, found.memory.weights_bytes
    assert disk.written == [10, 20, 30, 40, 50, 60, 70, 80, 90, 95]
    assert disk.kept == [70, 80, 90, 95]
    assert disk.averaged == [80, 90, 95]
    assert (disk.weights_bytes, disk.whole_bytes) == (weights, weights + found.memory.adam_bytes)
    # While the last is written: two whole ones, two without states, the best, and the new one.
    assert disk.peak_bytes == 3 * disk.whole_bytes + 3 * weights
    printed = str(found)
    assert "10 checkpoints, every 10 updates and after the last: updates 10, 20, 30" in printed
    assert "4 checkpoints and the best: updates 70, 80, 90, 95" in printed
    assert "3 checkpoints: updates 80, 90, 95" in printed


@pytest.mark.parametrize(
    ("updates", "keep", "whole", "light"),
    [(10, 5, 1, 0), (20, 5, 2, 0), (40, 5, 3, 1), (60, 5, 3, 3), (70, 5, 3, 4), (40, 1, 2, 1)],
)
def test_the_fullest_moment_of_the_disk(plain_run, tmp_path, updates, keep, whole, light):
    rule = CheckpointConfig(every_updates=10, keep_last=keep, average_last=0)
    disk = _checkpoint_plan(rule, updates, None, plain_run.memory, tmp_path)
    assert (disk.weights_bytes, disk.averaged) == (plain_run.memory.weights_bytes, [])
    assert disk.peak_bytes == whole * disk.whole_bytes + light * disk.weights_bytes
    assert "0 checkpoints: the last weights" in str(replace(plain_run, checkpoints=disk))


def test_the_clock_of_the_checkpoints_goes_by_the_measured_time(make_model, fixed_times):
    rule = CheckpointConfig(every_updates=100, every_minutes=0.5)
    data = pairs_of([4] * 6, [5] * 6)
    found = run(make_model(), Recipe(updates=30), rule, data, budgets=(8, 10))
    assert found.checkpoints.written == [12, 24, 30]  # 30 s are 12 updates of 2.5 s
    assert "every 100 updates or 0.5 minutes" in str(found)


def test_the_bytes_of_a_checkpoint_are_those_that_are_written(make_model, tmp_path):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_model()
    disk = run(model, None, CheckpointConfig()).checkpoints
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model, optimizer = accelerator.prepare(model, paper_optimizer(model.parameters()))
    optimizer.step()
    folder = CheckpointFolder(tmp_path).save(Progress(update=1), model, optimizer, accelerator)
    tensors = [load_file(path) for path in folder.glob("*.safetensors")]
    assert len(tensors) == 2
    assert disk.whole_bytes == sum(tensor.nbytes for file in tensors for tensor in file.values())


def test_too_little_room_on_the_disk_is_a_warning_line(make_model, tmp_path, monkeypatch):
    Usage = namedtuple("Usage", "total used free")
    asked = []

    def disk_usage(path):
        asked.append(path)
        return Usage(2**40, 2**40, 3 * 2**10)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    rule = CheckpointConfig(every_updates=10, average_last=3)
    found = run(make_model(), None, rule, output=tmp_path / "not" / "yet")
    assert asked == [tmp_path]
    [line] = [line for line in str(found).splitlines() if line.startswith("WARNING")]
    assert re.search(r"need 0\.\d MiB at their peak, but the disk of .*not/yet has only 0\.0 MiB free", line)
    assert "keep_last" in line
    monkeypatch.undo()
    assert not run(make_model(), None, rule, output=tmp_path).warnings


def test_fewer_checkpoints_than_are_to_be_averaged_are_warned_of(make_model):
    found = run(make_model(), Recipe(updates=30), CheckpointConfig(every_updates=10, average_last=5))
    assert found.warnings == [
        "5 checkpoints are to be averaged, but the run writes only 3. Lower `every_updates` or `average_last`."
    ]


def test_a_run_without_checkpoints_says_so(plain_run):
    assert plain_run.checkpoints is None
    assert "written                0 checkpoints" in str(plain_run)


# ------------------------------------------------------------------ devices
def accelerator_of(kind="NO", **changes):
    from accelerate.utils import DistributedType

    values = {"num_processes": 4, "device": torch.device("cpu"), "mixed_precision": "no", **changes}
    return SimpleNamespace(distributed_type=DistributedType[kind], **values)


def test_processes_and_precision_are_those_of_the_accelerator_unless_told_otherwise(make_model, plain_run):
    recipe = Recipe(updates=30, batches_per_update=4)
    found = run(make_model(), recipe, accelerator=accelerator_of(mixed_precision="bf16"))
    assert (found.text.device_count, found.text.accumulation) == (4, 1)
    assert plain_run.text.device_count == 1
    assert "bfloat16" in found.cost.sustained_of
    assert run(make_model(), recipe, accelerator=accelerator_of(), process_count=2).text.device_count == 2


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_updates_are_measured_in_the_precision_of_the_recipe(make_model, precision):
    kinds = set()

    class Watched(nn.Module):
        def __init__(self, plain):
            super().__init__()
            self.plain, self.config = plain, plain.config

        def forward(self, **batch):
            kinds.add(self.plain(**batch).logits.dtype)
            return self.plain(**batch)

    run(Watched(make_model()), Recipe(updates=30, precision=precision))
    assert kinds == {torch.bfloat16 if precision == "bf16" else torch.float32}


def test_what_the_figures_leave_out_is_noted(make_model, plain_run):
    assert plain_run.notes == []
    found = run(
        make_model(), Recipe(updates=30, batches_per_update=4, compile=True), accelerator=accelerator_of("FSDP")
    )
    notes = " ".join(found.notes)
    assert "exchanging gradients" in notes
    assert "sharding" in notes
    assert "torch.compile" in notes
    assert all(f"Note: {note}" in str(found) for note in found.notes)


# ------------------------------------------------------------------ for people and programs
def test_every_line_has_a_unit(make_model, plain_run):
    units = r"updates?|epochs?|tokens|%|parameters|FLOPs|MiB|GiB|ms|s|min|h|checkpoints?"
    for found in (run(make_model(), None, CheckpointConfig(every_updates=7)), plain_run):
        lines = [line for line in str(found).splitlines() if line.startswith("  ")]
        assert len(lines) > 18
        for line in lines:
            assert re.search(rf"\d[\d,.e]* ({units})\b|[\d.]+ %", line), line


def test_numbers_are_written_for_people():
    assert [dry_run_text._size(n) for n in (2**19, 5 * 2**20, 3 * 2**30)] == ["0.5 MiB", "5.0 MiB", "3.00 GiB"]
    assert [dry_run_text._seconds(s) for s in (0.0123, 2.5, 1234.5)] == ["12.3 ms", "2.50 s", "1,234.50 s"]
    assert [dry_run_text._hours(h) for h in (0.005, 0.5, 1234)] == ["18.0 s", "30.0 min", "1,234.0 h"]
    assert [dry_run_text._power(n) for n in (3.283e18, 0.0, 12)] == ["3.28e18", "0.00e0", "1.20e1"]
    assert dry_run_text._updates([7]) == "update 7"
    assert dry_run_text._updates(list(range(1000, 20000, 1000))) == (
        "updates 1,000, 2,000, 3,000, ..., 17,000, 18,000, 19,000"
    )


def test_the_figures_come_as_plain_values_too(make_model):
    found = run(make_model(), Recipe(updates=30, batches_per_update=2), CheckpointConfig(every_updates=10))
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert values["updates"] == 30
    assert values["text"]["src_limit"] == 40
    assert values["parameters"]["total"] == found.parameters.total
    assert values["checkpoints"]["written"] == [10, 20, 30]
    assert values["time"]["hours"] == found.time.hours
    assert values["warnings"] == found.warnings
