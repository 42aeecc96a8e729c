"""Cutting a corpus into batches by a budget of tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_vaswani.data import TokenBatchSampler


def padded(batch, src, tgt):
    return len(batch) * int(src[batch].max()), len(batch) * int(tgt[batch].max())


lengths_strategy = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=80)


@given(
    lengths=lengths_strategy,
    seed=st.integers(0, 9),
    budgets=st.tuples(st.integers(60, 200), st.integers(60, 200)),
    multiple_of=st.integers(1, 5),
)
@settings(max_examples=80, deadline=None)
def test_no_batch_is_over_either_budget_and_every_pair_comes_once(lengths, seed, budgets, multiple_of):
    # Enough short pairs that some batches can be split.
    src, tgt = torch.tensor(lengths + [(2, 3)] * 10).T
    sampler = TokenBatchSampler(src, tgt, *budgets, seed=seed, multiple_of=multiple_of)
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert len(batches) % multiple_of == 0
        assert sorted(i for batch in batches for i in batch) == list(range(len(src)))
        for batch in batches:
            src_size, tgt_size = padded(batch, src, tgt)
            assert src_size <= budgets[0]
            assert tgt_size <= budgets[1]


@given(lengths=lengths_strategy, seed=st.integers(0, 9), epoch=st.integers(0, 3), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_pair_comes_as_often_as_its_weight_says(lengths, seed, epoch, data):
    weights = data.draw(st.lists(st.sampled_from([0, 0.25, 1, 1.5, 3]), min_size=len(lengths), max_size=len(lengths)))
    src, tgt = torch.tensor(lengths).T
    plan = TokenBatchSampler(src, tgt, 99, 99, seed=seed, weights=torch.tensor(weights)).plan(epoch)
    counts = torch.bincount(torch.tensor([i for batch in plan for i in batch], dtype=torch.long), minlength=len(src))
    for count, weight in zip(counts.tolist(), weights, strict=True):
        assert int(weight) <= count <= -(-weight // 1)
    assert plan.pair_count == int(counts.sum())
    for batch in plan:
        assert max(padded(batch, src, tgt)) <= 99


def many_lengths(count=4000):
    generator = torch.Generator().manual_seed(3)
    src = torch.randint(1, 61, (count,), generator=generator)
    return src, (src + torch.randint(-3, 4, (count,), generator=generator)).clamp(1, 60)


def test_pairs_of_like_length_share_a_batch_and_fill_it():
    src, tgt = many_lengths()
    sampler = TokenBatchSampler(src, tgt, 900, 900)
    used = sum(padded(batch, src, tgt)[0] for batch in sampler)
    assert int(src.sum()) / used > 0.95
    assert len(sampler) < 1.3 * int(src.sum()) / 900


def test_the_order_is_a_function_of_seed_and_epoch():
    src, tgt = many_lengths(400)
    make = lambda seed, epoch: _at_epoch(TokenBatchSampler(src, tgt, 300, 300, seed=seed), epoch)  # noqa: E731
    assert make(1, 2) == make(1, 2)
    assert make(1, 2) != make(1, 3)
    assert make(1, 2) != make(2, 2)


def _at_epoch(sampler, epoch):
    sampler.set_epoch(epoch)
    return list(sampler)


def test_pairs_of_equal_lengths_meet_others_in_the_next_epoch():
    src = tgt = torch.full((64,), 5)
    sampler = TokenBatchSampler(src, tgt, 40, 40)
    together = [{frozenset(batch) for batch in _at_epoch(sampler, epoch)} for epoch in (0, 1)]
    assert together[0] != together[1]


def test_without_shuffling_the_shortest_come_first_in_every_epoch():
    src, tgt = torch.tensor([9, 2, 5, 2]), torch.tensor([1, 8, 1, 3])
    sampler = TokenBatchSampler(src, tgt, 9, 9, shuffle=False)
    assert _at_epoch(sampler, 0) == _at_epoch(sampler, 7) == [[3], [1], [2], [0]]


def test_a_pair_over_the_budget_is_refused_with_its_number_or_dropped_and_counted():
    src, tgt = torch.tensor([3, 4, 50, 5]), torch.tensor([3, 40, 5, 5])
    with pytest.raises(ValueError, match=r"2 pair\(s\) .* pair 2, with 4 source and 40 target tokens"):
        TokenBatchSampler(src, tgt, 30, 30)
    sampler = TokenBatchSampler(src, tgt, 30, 30, too_long="drop")
    assert sampler.dropped_count == 2
    assert sorted(i for batch in sampler for i in batch) == [0, 3]


def test_accelerate_finds_no_batch_size_to_complete_batches_by():
    sampler = TokenBatchSampler(torch.tensor([2]), torch.tensor([2]))
    assert not hasattr(sampler, "batch_size")
    assert (sampler.src_tokens, sampler.tgt_tokens) == (25_000, 25_000)


@pytest.mark.parametrize(
    "changes",
    [
        {"src_tokens": 0},
        {"tgt_tokens": -1},
        {"too_long": "cut"},
        {"tgt_lengths": torch.tensor([1])},
        {"multiple_of": 0},
    ],
)
def test_nonsense_is_refused_by_the_sampler(changes):
    given_values = {"src_lengths": torch.tensor([1, 2]), "tgt_lengths": torch.tensor([1, 2]), **changes}
    with pytest.raises(ValueError, match=r"tokens|too_long|lengths|multiple_of"):
        TokenBatchSampler(**given_values)


# ------------------------------------------------------------------ plans
def test_a_plan_is_read_in_any_order_and_gives_the_order_of_its_epoch():
    src, tgt = many_lengths(300)
    sampler = TokenBatchSampler(src, tgt, 200, 250, seed=4)
    plan = sampler.plan(6)
    assert list(plan) == [plan[i] for i in range(len(plan))] == _at_epoch(sampler, 6)
    assert plan[-1] == plan[len(plan) - 1]
    assert plan[1::3] == list(plan)[1::3]
    with pytest.raises(IndexError):
        plan[len(plan)]


def test_a_plan_does_not_depend_on_what_was_asked_before():
    src, tgt = many_lengths(300)
    weights = torch.full((300,), 1.5)
    used = TokenBatchSampler(src, tgt, 200, 200, weights=weights)
    for epoch in (3, 0, 2):
        used.plan(epoch)
    list(used)
    assert list(used.plan(1)) == list(TokenBatchSampler(src, tgt, 200, 200, weights=weights).plan(1))
    assert list(used.plan(1)) != list(used.plan(2))


def test_fractions_of_weights_are_drawn_anew_and_add_up_over_epochs():
    src = tgt = torch.full((50,), 7)
    sampler = TokenBatchSampler(src, tgt, 70, 70, weights=torch.full((50,), 2.25))
    drawn = [sorted(i for batch in sampler.plan(epoch) for i in batch) for epoch in range(40)]
    assert drawn[0] != drawn[1]
    assert sum(map(len, drawn)) / 40 == pytest.approx(2.25 * 50, abs=3)
    sampler.set_epoch(1)
    assert len(sampler) == len(list(sampler)) == len(sampler.plan(1))


def test_token_counts_are_those_of_the_batches():
    src, tgt = many_lengths(500)
    plan = TokenBatchSampler(src, tgt, 300, 300).plan(0)
    counts = plan.token_counts()
    assert (counts.src_tokens, counts.tgt_tokens) == (int(src.sum()), int(tgt.sum()))
    sizes = torch.tensor([padded(batch, src, tgt) for batch in plan]).sum(0).tolist()
    assert [counts.src_padded, counts.tgt_padded] == sizes
    assert counts.padding == pytest.approx(1 - float(src.sum() + tgt.sum()) / sum(sizes))


def test_ranks_get_equal_numbers_of_batches_and_together_every_pair():
    src = tgt = torch.arange(1, 8)
    for ranks in (2, 3, 7):
        plan = TokenBatchSampler(src, tgt, 9, 9, multiple_of=ranks).plan(0)
        shares = [plan[rank::ranks] for rank in range(ranks)]
        assert len({len(share) for share in shares}) == 1
        assert sorted(i for share in shares for batch in share for i in batch) == list(range(7))


@pytest.mark.parametrize(("pair_count", "ranks"), [(2, 3), (5, 2)])
def test_a_number_of_ranks_that_no_split_can_serve_is_refused(pair_count, ranks):
    lengths = torch.full((pair_count,), 6)  # each a batch of its own
    with pytest.raises(
        ValueError, match=rf"{pair_count} pair\(s\) cannot fill {ranks * -(-pair_count // ranks)} batch"
    ):
        TokenBatchSampler(lengths, lengths, 10, 10, multiple_of=ranks)


def test_both_sides_are_padded_little_though_their_lengths_differ():
    generator = torch.Generator().manual_seed(0)
    src = (torch.randn(20_000, generator=generator) * 0.6 + 3.2).exp().clamp(1, 200).round().int()
    tgt = (src * (torch.randn(20_000, generator=generator) * 0.18).exp() + 1).clamp(1, 200).int()
    plan = TokenBatchSampler(src, tgt, 4096, 4096).plan(0)
    # Sorted by the source alone, a third of the target side here is padding.
    assert plan.token_counts().padding < 0.07


def test_an_empty_corpus_has_an_empty_plan():
    sampler = TokenBatchSampler(torch.tensor([]), torch.tensor([]), multiple_of=2)
    assert list(sampler) == []
    assert sampler.plan(0).token_counts() == (0, 0, 0, 0)


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [1.0, float("nan")], [float("inf"), 1.0]])
def test_weights_that_make_no_sense_are_refused(weights):
    with pytest.raises(ValueError, match="weight"):
        TokenBatchSampler(torch.tensor([1, 2]), torch.tensor([1, 2]), weights=torch.tensor(weights))


def test_planning_many_pairs_takes_few_bytes_each_and_pads_little():
    script = Path(__file__).parents[1] / "benchmarks" / "plan_memory.py"
    arguments = ["--pairs", "400000", "--budget", "8000", "--processes", "3"]
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)
    assert figures["padding"] < 0.05
    assert figures["batches"] % 3 == 0
    assert figures["peak_mib_above_imports"] * 2**20 / 400_000 < 250


def test_weights_that_make_an_epoch_without_end_are_refused():
    lengths = torch.full((2,), 6)
    with pytest.raises(ValueError, match=r"`weights` make an epoch of 3,000,000,001 pairs"):
        TokenBatchSampler(lengths, lengths, 12, 12, weights=torch.tensor([3e9, 1.0], dtype=torch.float64))
