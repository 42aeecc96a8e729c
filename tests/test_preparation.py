"""Encoding corpora to disk: what is kept, what is dropped and counted, and when the cache is believed."""

import errno
import io
import os
import pickle
import signal
import subprocess
import sys

import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

from hf_vaswani import VaswaniTokenizer
from hf_vaswani.data import (
    CorpusError,
    CorpusSource,
    TokenBatchSampler,
    prepare_corpus,
    progress,
    read_source,
    tokenize_pairs,
)
from hf_vaswani.data import preparation as module


@pytest.fixture(scope="module")
def tokenizer():
    texts = [f"wort {i} und noch ein wort, one word and {i * 7} more" for i in range(200)]
    return VaswaniTokenizer.train(iter(texts), 290)


def two_files(tmp_path, pairs, name="a"):
    paths = [tmp_path / f"{name}.{side}" for side in ("de", "en")]
    for path, lines in zip(paths, zip(*pairs, strict=True), strict=True):
        path.write_bytes("".join(line + "\n" for line in lines).encode())
    return CorpusSource(src=str(paths[0]), tgt=str(paths[1]))


def many_pairs(count, name=""):
    return [(f"{name} satz {i}" + " wort" * (i % 9), f"{name} sentence {i}" + " word" * (i % 7)) for i in range(count)]


def folders(cache):
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


# ------------------------------------------------------------------ what is kept
def test_pairs_come_back_as_the_tokenizer_gives_them(tmp_path, tokenizer):
    source = two_files(tmp_path, [*many_pairs(50), ("</s> und <pad>", "a\tb")])
    data = prepare_corpus([source], tokenizer, tmp_path / "cache")
    expected = tokenize_pairs(read_source(source), tokenizer)
    assert [data[i] for i in range(len(data))] == [expected[i] for i in range(len(expected))]
    assert data[-1] == expected[50]
    for side in ("src_lengths", "tgt_lengths"):
        assert getattr(data, side).dtype == torch.int32
        assert torch.equal(getattr(data, side), getattr(expected, side))
    assert data.weights is None
    for outside in (51, -52):
        with pytest.raises(IndexError):
            data[outside]


@pytest.mark.parametrize("workers", [1, 3])
def test_many_chunks_and_threads_keep_the_order(tmp_path, tokenizer, monkeypatch, workers):
    monkeypatch.setattr(module, "_PAIRS_AT_ONCE", 7)
    monkeypatch.setattr(module, "_LETTERS_AT_ONCE", 150)
    source = two_files(tmp_path, many_pairs(100))
    data = prepare_corpus([source], tokenizer, tmp_path / "cache", workers=workers)
    expected = tokenize_pairs(read_source(source), tokenizer)
    assert [data[i] for i in range(len(data))] == [expected[i] for i in range(len(expected))]


class Plain:
    """A tokenizer without a library below, whose targets differ from its sources."""

    eos_token_id = 1
    first_word = "a"

    def get_vocab(self):
        return {self.first_word: 97}

    def __call__(self, text=None, text_target=None, verbose=True):
        first = [] if text_target is None else [7]
        return {"input_ids": [[*first, *(ord(c) for c in line), 1] for line in (text or text_target)]}


def test_targets_of_another_form_than_sources_are_encoded_as_the_call_does(tmp_path, tokenizer):
    source = two_files(tmp_path, [("ab", "c"), ("d", "e f")])
    assert prepare_corpus([source], Plain(), tmp_path / "cache")[0] == {"input_ids": [97, 98, 1], "labels": [7, 99, 1]}

    class Marked(VaswaniTokenizer):
        def _switch_to_target_mode(self):
            self.is_target = True

        def _switch_to_input_mode(self):
            self.is_target = False

        def __call__(self, text=None, text_target=None, **kwargs):
            found = super().__call__(text, text_target=text_target, **kwargs)
            if text_target is not None:
                found["input_ids"] = [[2, *ids] for ids in found["input_ids"]]
            return found

    marked = Marked(tokenizer_object=tokenizer.backend_tokenizer)
    data = prepare_corpus([source], marked, tmp_path / "cache", workers=2)
    assert data[1]["labels"] == [2, *tokenizer("e f")["input_ids"]]
    assert data[1]["input_ids"] == tokenizer("d")["input_ids"]


def test_a_tokenizer_that_differs_from_its_library_in_rare_texts_alone_is_called(tmp_path, tokenizer):
    class Careful(VaswaniTokenizer):
        def __call__(self, text=None, text_target=None, **kwargs):
            found = super().__call__(text, text_target=text_target, **kwargs)
            for ids, line in zip(found["input_ids"], text or text_target, strict=True):
                if "</s>" in line:
                    ids[:] = [2, 1]
            return found

    careful = Careful(tokenizer_object=tokenizer.backend_tokenizer)
    source = two_files(tmp_path, [*many_pairs(120), ("a</s>", "b")])  # the last is in no first sample of the text
    assert prepare_corpus([source], careful, tmp_path / "cache")[120]["input_ids"] == [2, 1]


def test_long_lines_make_small_chunks(monkeypatch):
    monkeypatch.setattr(module, "_LETTERS_AT_ONCE", 10)
    pairs = [(number, "a" * size, "b") for number, size in enumerate((3, 3, 3, 20, 1), start=1)]
    assert [[pair[0] for pair in chunk] for chunk in module._chunks(iter(pairs))] == [[1, 2, 3], [4], [5]]


def test_arrow_files_open_as_a_dataset(tmp_path, tokenizer):
    import datasets

    data = prepare_corpus([two_files(tmp_path, many_pairs(9))], tokenizer, tmp_path / "cache")
    opened = datasets.Dataset.from_file(str(data.folders[0] / "pairs.arrow"))
    assert [opened[i] for i in range(9)] == [data[i] for i in range(9)]
    assert opened.features["labels"].feature.dtype == "int32"


def test_a_prepared_corpus_travels_to_another_process(tmp_path, tokenizer):
    data = prepare_corpus([two_files(tmp_path, many_pairs(9))], tokenizer, tmp_path / "cache")
    data[0]  # which maps the files
    copy = pickle.loads(pickle.dumps(data))
    assert [copy[i] for i in range(9)] == [data[i] for i in range(9)]


# ------------------------------------------------------------------ what is dropped
def test_dropped_pairs_are_counted_by_reason_with_their_first_lines(tmp_path, tokenizer):
    pairs = many_pairs(40)
    for line in (3, 5, 6, 9, 12, 20):
        pairs[line - 1] = (" ", "not blank") if line % 2 else ("nicht leer", "\u2003")
    pairs[6] = ("x" * 100_000, "much too long")
    pairs[9] = ("ja", "yes and no and yes and no")
    pairs[14] = ("\ufeffein\x00 wort", "one\x07 word")
    source = two_files(tmp_path, pairs)
    data = prepare_corpus([source], tokenizer, tmp_path / "cache", max_length=120, max_ratio=3)
    (report,) = data.report
    assert (report.read_count, report.kept_count, len(data)) == (40, 32, 32)
    assert report.dropped == {"blank on one side": 6, "over length": 1, "off in ratio": 1}
    assert report.first_lines == {
        "blank on one side": [3, 5, 6, 9, 12],
        "over length": [7],
        "off in ratio": [10],
    }
    assert report.removed == {"byte order marks": 1, "control characters": 2}
    assert data[4]["labels"] == tokenizer(pairs[10][1])["input_ids"]
    assert data[7] == {"input_ids": tokenizer("ein wort")["input_ids"], "labels": tokenizer("one word")["input_ids"]}
    assert str(report) == (
        f"{source.name}: 40 pairs read, 32 kept; 6 dropped as blank on one side (lines 3, 5, 6, 9, 12, ...); "
        "1 dropped as over length (line 7); 1 dropped as off in ratio (line 10); "
        "1 byte order marks removed; 2 control characters removed"
    )
    # The same again, from the cache.
    assert prepare_corpus([source], tokenizer, tmp_path / "cache", max_length=120, max_ratio=3).report == [report]


def test_length_and_ratio_are_bounds_that_may_be_reached(tmp_path, tokenizer):
    source = two_files(tmp_path, [("a", "b c d e"), ("f", "g")])
    sizes = [len(tokenizer(text)["input_ids"]) for text in ("a", "b c d e")]
    ratio = sizes[1] / sizes[0]
    count = lambda **limits: len(prepare_corpus([source], tokenizer, tmp_path / "cache", **limits))  # noqa: E731
    assert (count(max_length=sizes[1]), count(max_length=sizes[1] - 1)) == (2, 1)
    assert (count(max_ratio=ratio), count(max_ratio=ratio - 0.01)) == (2, 1)


def test_a_long_line_of_a_script_without_blanks_is_used_or_named(tmp_path, tokenizer):
    pairs = [*many_pairs(50), ("ภาษา" * 375, "Thai " * 300)]
    source = two_files(tmp_path, pairs)
    assert len(prepare_corpus([source], tokenizer, tmp_path / "cache", max_length=20_000)) == 51
    (report,) = prepare_corpus([source], tokenizer, tmp_path / "cache", max_length=256).report
    assert report.first_lines == {"over length": [51]}


@pytest.mark.parametrize(
    ("src", "tgt", "message"),
    [
        (b"", b"", "the corpus is empty"),
        (b"\n \n", b"a\nb\n", r"No pair is left.*2 dropped as blank on one side \(lines 1, 2\)"),
        (b"a\nb\n", b"c\n", r"a\.de has 2 lines, .*b\.en has 1"),
        (b"a\nb\n", b"a\nb\n", "hold the same text"),
        (b"ok\nf\xfcr\n", b"ok\nfor\n", r"a\.de, line 2: byte 2 \(0xfc\) is not UTF-8"),
        (bytes(range(30)) * 50, b"a\n", "holds binary data"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_named_and_leaves_nothing(tmp_path, tokenizer, src, tgt, message):
    (tmp_path / "a.de").write_bytes(src)
    (tmp_path / "b.en").write_bytes(tgt)
    source = CorpusSource(src=str(tmp_path / "a.de"), tgt=str(tmp_path / "b.en"))
    with pytest.raises(CorpusError, match=message):
        prepare_corpus([source], tokenizer, tmp_path / "cache")
    assert folders(tmp_path / "cache") == []


def test_a_missing_file_is_named(tmp_path, tokenizer):
    with pytest.raises(CorpusError, match=r"gone\.de: no such file"):
        prepare_corpus([CorpusSource(src=str(tmp_path / "gone.de"), tgt="b")], tokenizer, tmp_path / "cache")


@pytest.mark.parametrize("limits", [{"max_length": 0}, {"max_ratio": 0.5}, {"workers": 0}, {"max_ratio": float("nan")}])
def test_limits_that_make_no_sense_are_refused(tmp_path, tokenizer, limits):
    with pytest.raises(ValueError, match=next(iter(limits))):
        prepare_corpus([two_files(tmp_path, many_pairs(3))], tokenizer, tmp_path / "cache", **limits)


def test_a_tokenizer_that_leaves_out_the_end_token_and_no_corpus_are_refused(tmp_path):
    class Endless(Plain):
        eos_token_id = 5

    with pytest.raises(ValueError, match="does not close a sentence with its end token"):
        prepare_corpus([two_files(tmp_path, many_pairs(3))], Endless(), tmp_path / "cache")
    Endless.eos_token_id = None
    with pytest.raises(ValueError, match="has no end token"):
        prepare_corpus([two_files(tmp_path, many_pairs(3))], Endless(), tmp_path / "cache")
    with pytest.raises(ValueError, match="no corpus"):
        prepare_corpus([], Plain(), tmp_path / "cache")


def test_corpora_of_which_no_pair_would_ever_come_are_refused(tmp_path, tokenizer):
    source = two_files(tmp_path, many_pairs(3))
    source.weight = 0
    with pytest.raises(CorpusError, match="Every corpus has the weight 0"):
        prepare_corpus([source], tokenizer, tmp_path / "cache")


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path, tokenizer):
    source = two_files(tmp_path, many_pairs(3))
    (tmp_path / "a.en").unlink()
    os.mkfifo(tmp_path / "a.en")
    with pytest.raises(CorpusError, match=r"a\.en: a pipe or a device cannot be read more than once"):
        prepare_corpus([source], tokenizer, tmp_path / "cache")


# ------------------------------------------------------------------ several corpora
def test_corpora_are_mixed_by_weight(tmp_path, tokenizer):
    one, two = two_files(tmp_path, many_pairs(6, "x"), "x"), two_files(tmp_path, many_pairs(4, "y"), "y")
    two.weight = 3
    data = prepare_corpus([one, two], tokenizer, tmp_path / "cache")
    assert len(data) == 10
    assert data.weights.tolist() == [1.0] * 6 + [3.0] * 4
    assert data[6]["input_ids"] == tokenizer("y satz 0")["input_ids"]
    assert [report.weight for report in data.report] == [1, 3]
    sampler = TokenBatchSampler(data.src_lengths, data.tgt_lengths, 90, 90, weights=data.weights)
    assert sorted(i for batch in sampler for i in batch) == sorted(
        [*range(6), *range(6, 10), *range(6, 10), *range(6, 10)]
    )
    # A weight is no reason to encode again.
    two.weight = 1
    assert prepare_corpus([one, two], tokenizer, tmp_path / "cache").weights is None
    assert len(folders(tmp_path / "cache")) == 2


def test_every_pair_of_three_files_is_seen_once_by_two_ranks_with_two_workers(tmp_path, tokenizer):
    sources = [two_files(tmp_path, many_pairs(7, name), name) for name in ("x", "y", "z")]
    data = prepare_corpus(sources, tokenizer, tmp_path / "cache")
    expected = sorted(tuple(data[i]["labels"]) for i in range(21))
    assert len(set(expected)) == 21
    for epoch in (0, 1):
        plan = TokenBatchSampler(data.src_lengths, data.tgt_lengths, 60, 60, seed=3, multiple_of=2).plan(epoch)
        seen = []
        for rank in (0, 1):
            loader = DataLoader(data, batch_sampler=plan[rank::2], num_workers=2, collate_fn=list)
            seen += [tuple(pair["labels"]) for batch in loader for pair in batch]
        assert sorted(seen) == expected


# ------------------------------------------------------------------ the cache
def test_the_same_text_is_encoded_once_wherever_it_lies(tmp_path, tokenizer, capsys, monkeypatch):
    prepare_corpus([two_files(tmp_path, many_pairs(20))], tokenizer, tmp_path / "cache")
    assert "a.en: 20 pairs read, 20 kept\n" in capsys.readouterr().err
    (tmp_path / "elsewhere").mkdir()
    moved = two_files(tmp_path / "elsewhere", many_pairs(20), "b")
    monkeypatch.setattr(module, "_encode", None)  # which cannot be called
    data = prepare_corpus([moved], tokenizer, tmp_path / "cache")
    printed = capsys.readouterr()
    assert f"{moved.name}: encoded before, 20 pairs of 20" in printed.err
    assert printed.out == ""
    assert data.report[0].name == moved.name
    assert len(data) == 20


def test_another_text_tokenizer_or_limit_is_encoded_anew(tmp_path, tokenizer):
    cache = tmp_path / "cache"
    source = two_files(tmp_path, many_pairs(20))
    prepare_corpus([source], tokenizer, cache)
    prepare_corpus([source], tokenizer, cache, max_length=99)
    prepare_corpus([source], tokenizer, cache, max_ratio=9)
    other = VaswaniTokenizer.train(iter(["another text of few words"] * 3), 262)
    data = prepare_corpus([source], other, cache)
    assert data[3]["labels"] == other(many_pairs(20)[3][1])["input_ids"]
    assert len(folders(cache)) == 4
    # Tokenizers without a library below that differ in a word that no sample holds.
    plain = Plain()
    prepare_corpus([source], plain, cache)
    plain.first_word = "b"
    prepare_corpus([source], plain, cache)
    assert len(folders(cache)) == 6
    # One letter, with size and date as before.
    path = tmp_path / "a.en"
    path.write_bytes(path.read_bytes().replace(b"sentence 3", b"sentence 8"))
    data = prepare_corpus([source], tokenizer, cache)
    assert data[3]["labels"] == tokenizer(many_pairs(20)[3][1].replace("3", "8"))["input_ids"]
    assert len(folders(cache)) == 7


def test_a_bar_shows_on_a_terminal_once_the_work_takes_long(tmp_path, tokenizer, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for seconds, is_shown in ((60, False), (0, True)):
        monkeypatch.setattr(progress, "SILENT_S", seconds)
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        prepare_corpus([two_files(tmp_path, many_pairs(20))], tokenizer, tmp_path / f"cache{seconds}")
        assert [word in terminal.getvalue() for word in ("checking a.de", "counting", "encoding:")] == [is_shown] * 3


@pytest.mark.parametrize("damage", ["cut", "gone", "no summary"])
def test_a_damaged_cache_is_not_believed(tmp_path, tokenizer, damage):
    source = two_files(tmp_path, many_pairs(20))
    data = prepare_corpus([source], tokenizer, tmp_path / "cache")
    expected = [data[i] for i in range(20)]
    name = {"cut": "pairs.arrow", "gone": "lengths.npy", "no summary": "summary.json"}[damage]
    path = data.folders[0] / name
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])  # more than the mark at the end, which no reader needs
    again = prepare_corpus([source], tokenizer, tmp_path / "cache")
    assert [again[i] for i in range(20)] == expected


@pytest.mark.parametrize("file", ["pairs.arrow", "lengths.npy", "summary.json"])
def test_a_full_disk_is_named_and_leaves_no_half_cache(tmp_path, tokenizer, monkeypatch, file):
    source = two_files(tmp_path, many_pairs(20))
    open_file = pa.OSFile

    def no_room(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if file == "pairs.arrow":
            if not os.path.exists("/dev/full"):
                pytest.skip("needs the device /dev/full")
            patch.setattr(pa, "OSFile", lambda path, mode: open_file("/dev/full", mode))
        else:
            patch.setattr(*((module.np, "save") if file == "lengths.npy" else (module, "write_summary")), no_room)
        with pytest.raises(CorpusError, match=r"cache: cannot keep the encoded text \(.*No space left on device"):
            prepare_corpus([source], tokenizer, tmp_path / "cache")
    assert folders(tmp_path / "cache") == []
    assert len(prepare_corpus([source], tokenizer, tmp_path / "cache")) == 20


def test_a_folder_that_cannot_be_made_is_named(tmp_path, tokenizer):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CorpusError, match="cannot keep the encoded text"):
        prepare_corpus([two_files(tmp_path, many_pairs(3))], tokenizer, tmp_path / "file" / "cache")


_SLOW = """
import sys, time
from hf_vaswani import VaswaniTokenizer
from hf_vaswani.data import CorpusSource, prepare_corpus
from hf_vaswani.data import preparation
summary = preparation.write_summary
def slow(folder, report):
    print("encoding", flush=True)
    time.sleep(float(sys.argv[4]))
    summary(folder, report)
preparation.write_summary = slow
tokenizer = VaswaniTokenizer.from_pretrained(sys.argv[3])
data = prepare_corpus([CorpusSource(src=sys.argv[1] + ".de", tgt=sys.argv[1] + ".en")], tokenizer, sys.argv[2])
print(len(data), flush=True)
"""


def start(tmp_path, seconds):
    arguments = [str(tmp_path / "a"), str(tmp_path / "cache"), str(tmp_path / "tokenizer"), str(seconds)]
    return subprocess.Popen([sys.executable, "-c", _SLOW, *arguments], stdout=-1, stderr=-1, text=True)


def test_a_killed_preparation_leaves_nothing_that_is_believed(tmp_path, tokenizer):
    source = two_files(tmp_path, many_pairs(20))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with start(tmp_path, 60) as process:
        assert process.stdout.readline() == "encoding\n"
        process.send_signal(signal.SIGKILL)
    assert [name.endswith(".partial") for name in folders(tmp_path / "cache")] == [True]
    assert len(prepare_corpus([source], tokenizer, tmp_path / "cache")) == 20
    assert [name.endswith(".partial") for name in folders(tmp_path / "cache")] == [False]


def test_of_two_processes_one_encodes_and_the_other_waits(tmp_path, tokenizer, capsys):
    source = two_files(tmp_path, many_pairs(20))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with start(tmp_path, 4) as process:
        assert process.stdout.readline() == "encoding\n"
        assert len(prepare_corpus([source], tokenizer, tmp_path / "cache")) == 20
        assert process.stdout.readline() == "20\n"
    printed = capsys.readouterr().err
    assert "waiting for another process that encodes it" in printed
    assert "encoded by another process" in printed
