"""Reading parallel text and cutting it into batches."""

import gzip

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_vaswani.data import (
    CorpusError,
    TokenBatchSampler,
    TokenizedPairs,
    bundled_pairs,
    read_lines,
    read_tsv,
    read_two_files,
    tokenize_pairs,
)


def write(path, content: bytes):
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


# ------------------------------------------------------------------ lines
def test_only_a_line_feed_ends_a_line(tmp_path):
    text = "a\u2028b\x0bc\x0cd\x1ce\x85f\u2029g\nh"
    assert list(read_lines(write(tmp_path / "t", text.encode()))) == ["a\u2028b\x0bc\x0cd\x1ce\x85f\u2029g", "h"]


def test_carriage_returns_neither_end_a_line_nor_reach_the_text(tmp_path):
    src = write(tmp_path / "src", b"one\r\ntwo\rstill two\r\nthree")
    tgt = write(tmp_path / "tgt", b"eins\nzwei\ndrei\n")
    assert list(read_two_files(src, tgt)) == [("one", "eins"), ("two still two", "zwei"), ("three", "drei")]


def test_gzip_and_plain_files_read_alike(tmp_path):
    content = "\ufeffGrüße\n\n日本\r\nende".encode()
    expected = ["Grüße", "", "日本", "ende"]
    assert list(read_lines(write(tmp_path / "t.txt", content))) == expected
    assert list(read_lines(str(write(tmp_path / "t.txt.gz", content)))) == expected


def test_a_byte_that_is_not_utf8_is_named_with_file_line_and_place(tmp_path):
    path = write(tmp_path / "bad.txt", b"fine\nab\xffc\n")
    with pytest.raises(CorpusError, match=r"bad\.txt, line 2: byte 3 \(0xff\)"):
        list(read_lines(path))


@pytest.mark.parametrize("content", [b"no gzip at all\n", gzip.compress(b"x" * 10_000)[:-20]])
def test_a_damaged_gzip_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "cut.gz"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=r"cut\.gz: the file is not a whole gzip file"):
        list(read_lines(path))


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path):
    with pytest.raises(CorpusError, match=r"gone\.txt: no such file"):
        list(read_lines(tmp_path / "gone.txt"))
    with pytest.raises(CorpusError, match="cannot be read"):
        list(read_lines(tmp_path))


# ------------------------------------------------------------------ pairs
def test_tsv_columns_are_chosen_by_number(tmp_path):
    path = write(tmp_path / "t.tsv.gz", b"Hi.\tHallo.\tCC-BY\nGo.\tGeh.\tCC-BY\n")
    assert list(read_tsv(path)) == [("Hi.", "Hallo."), ("Go.", "Geh.")]
    assert list(read_tsv(path, src_column=1, tgt_column=0)) == [("Hallo.", "Hi."), ("Geh.", "Go.")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\tb\nonly one\n", r"t\.tsv, line 2: found 1 tab-separated column"),
        (b"a\tb\nc\td\ne\tf\tg\n", r"t\.tsv, line 3: found 3 tab-separated columns where line 1 has 2"),
        (b"a\tb\n\nc\td\n", r"t\.tsv, line 2: found 1"),
    ],
)
def test_a_wrong_number_of_columns_is_named_with_file_and_line(tmp_path, content, message):
    with pytest.raises(CorpusError, match=message):
        list(read_tsv(write(tmp_path / "t.tsv", content)))


@pytest.mark.parametrize(("src_count", "tgt_count"), [(2, 5), (5, 2), (0, 1)])
def test_sides_of_unequal_length_stop_with_both_files_and_counts(tmp_path, src_count, tgt_count):
    src, tgt = write(tmp_path / "a.de", b"x\n" * src_count), write(tmp_path / "b.en", b"y\n" * tgt_count)
    with pytest.raises(CorpusError, match=rf"a\.de has {src_count} lines, .*b\.en has {tgt_count}"):
        list(read_two_files(src, tgt))


def test_the_bundled_corpus_is_whole_and_its_parts_are_apart():
    sizes = {split: len(bundled_pairs(split)) for split in ("train", "valid", "test")}
    assert sizes == {"train": 19_000, "valid": 500, "test": 500}
    train, test = bundled_pairs("train"), bundled_pairs("test")
    assert test[0] == ("Ich werde nicht gehen.", "I'm not going to go.")
    assert bundled_pairs("test", "en-de")[0] == test[0][::-1]
    for side in (0, 1):
        assert not {pair[side] for pair in train} & {pair[side] for pair in test}


def test_an_unknown_bundled_corpus_is_refused():
    with pytest.raises(ValueError, match="de-en or en-de"):
        bundled_pairs("train", "de-fr")


# ------------------------------------------------------------------ tokens
class SpellingTokenizer:
    """One id per letter and an end token, as much of a tokenizer as encoding needs."""

    def __call__(self, text=None, text_target=None):
        return {"input_ids": [[*(ord(c) for c in line), 1] for line in (text or text_target)]}


def test_pairs_with_a_blank_side_are_left_out_and_counted():
    data = tokenize_pairs([("ab", "c"), (" ", "d"), ("e", ""), ("f", "gh")], SpellingTokenizer())
    assert data.blank_count == 2
    assert [data[i] for i in range(len(data))] == [
        {"input_ids": [97, 98, 1], "labels": [99, 1]},
        {"input_ids": [102, 1], "labels": [103, 104, 1]},
    ]
    assert data.src_lengths.tolist() == [3, 2]
    assert data.tgt_lengths.tolist() == [2, 3]


def test_sources_without_targets_are_refused():
    with pytest.raises(ValueError, match="2 sources and 1 targets"):
        TokenizedPairs([[3], [4]], [[5]])


# ------------------------------------------------------------------ batches
def padded(batch, src, tgt):
    return len(batch) * int(src[batch].max()), len(batch) * int(tgt[batch].max())


lengths_strategy = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=80)


@given(lengths=lengths_strategy, seed=st.integers(0, 9), budgets=st.tuples(st.integers(60, 200), st.integers(60, 200)))
@settings(max_examples=60, deadline=None)
def test_no_batch_is_over_either_budget_and_every_pair_comes_once(lengths, seed, budgets):
    src, tgt = torch.tensor(lengths).T
    sampler = TokenBatchSampler(src, tgt, *budgets, seed=seed)
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
        for batch in batches:
            src_size, tgt_size = padded(batch, src, tgt)
            assert src_size <= budgets[0]
            assert tgt_size <= budgets[1]


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
    "changes", [{"src_tokens": 0}, {"tgt_tokens": -1}, {"too_long": "cut"}, {"tgt_lengths": torch.tensor([1])}]
)
def test_nonsense_is_refused_by_the_sampler(changes):
    given_values = {"src_lengths": torch.tensor([1, 2]), "tgt_lengths": torch.tensor([1, 2]), **changes}
    with pytest.raises(ValueError, match=r"tokens|too_long|lengths"):
        TokenBatchSampler(**given_values)
