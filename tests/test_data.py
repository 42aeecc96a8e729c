"""Reading parallel text, and sentence pairs in memory."""

import gzip
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_vaswani.data import (
    CorpusError,
    TokenizedPairs,
    bundled_pairs,
    read_lines,
    read_tsv,
    read_two_files,
    tokenize_pairs,
)
from hf_vaswani.data.corpus import count_lines, decode_lines


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def write(path, content: bytes):
    pack = {".gz": gzip.compress, ".zst": zstd}.get(path.suffix, bytes)
    path.write_bytes(pack(content))
    return path


# ------------------------------------------------------------------ lines
def test_only_a_line_feed_ends_a_line(tmp_path):
    text = "a\u2028b\x0bc\x0cd\x1ce\x85f\u2029g\nh"
    assert list(read_lines(write(tmp_path / "t", text.encode()))) == ["a\u2028b c d e f\u2029g", "h"]


def test_marks_and_control_characters_are_removed_and_counted_and_tabs_stay(tmp_path):
    removed = Counter()
    # Two files with a byte order mark each, joined.
    path = write(tmp_path / "t", "\ufeffa b\n\ufeffc\ufeff d\nx\x00y\tz\x07\x7f\x9f\n".encode())
    assert list(read_lines(path, removed)) == ["a b", "c\ufeff d", "xy\tz"]
    assert removed == {"byte order marks": 2, "control characters": 4}


@given(lines=st.lists(st.text(max_size=20).map(lambda text: text.replace("\n", " ")), max_size=5))
def test_no_line_is_lost_whatever_it_holds(lines):
    assert len(list(decode_lines([f"{line}\n".encode() for line in lines], "t"))) == len(lines)


def test_carriage_returns_neither_end_a_line_nor_reach_the_text(tmp_path):
    src = write(tmp_path / "src", b"one\r\ntwo\rstill two\r\nthree")
    tgt = write(tmp_path / "tgt", b"eins\nzwei\ndrei\n")
    assert list(read_two_files(src, tgt)) == [("one", "eins"), ("two still two", "zwei"), ("three", "drei")]


@pytest.mark.parametrize("name", ["t.txt", "t.txt.gz", "t.txt.zst"])
def test_plain_and_packed_files_read_alike(tmp_path, name):
    path = write(tmp_path / name, "\ufeffGrüße\n\n日本\r\nende".encode())
    assert list(read_lines(path)) == list(read_lines(str(path))) == ["Grüße", "", "日本", "ende"]


@pytest.mark.parametrize("content", [b"", b"\n", b"a", b"a\n", b"a\n\n", b"a\nb", b"a\rb\r\nc"])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_lines_are_counted_as_they_are_read(tmp_path, content, suffix):
    path = write(tmp_path / f"t{suffix}", content)
    assert count_lines(path) == len(list(read_lines(path)))


def test_a_packed_file_may_be_several_joined(tmp_path):
    for suffix, pack in ((".gz", gzip.compress), (".zst", zstd)):
        path = tmp_path / f"joined{suffix}"
        path.write_bytes(pack(b"one\ntwo") + pack(b" and more\nthree\n"))
        assert list(read_lines(path)) == ["one", "two and more", "three"]


def test_a_byte_that_is_not_utf8_is_named_with_file_line_and_place(tmp_path):
    path = write(tmp_path / "bad.txt", b"fine\nab\xffc\n")
    with pytest.raises(CorpusError, match=r"bad\.txt, line 2: byte 3 \(0xff\)"):
        list(read_lines(path))


@pytest.mark.parametrize(("kind", "pack"), [("gzip", gzip.compress), ("zstd", zstd)])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_damaged_packed_file_is_refused_by_name(tmp_path, kind, pack, is_cut):
    path = tmp_path / f"cut.{'gz' if kind == 'gzip' else 'zst'}"
    path.write_bytes(pack(bytes(range(65, 90)) * 4000)[:-9] if is_cut else b"not packed at all\n")
    with pytest.raises(CorpusError, match=rf"cut\..*: the file is not a whole {kind} file"):
        list(read_lines(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"text\n", mtime=0), r"holds gzip data, not plain text. Give it a name that ends in \.gz"),
        (zstd(b"text\n"), r"holds zstd data, not plain text. Give it a name that ends in \.zst"),
        (b"PK\x03\x04rest", "holds a zip archive"),
        (b"\xfd7zXZ\x00", "holds xz data"),
        ("text\n".encode("utf-16"), "holds UTF-16 text"),
        (bytes(range(128)) * 9, "holds binary data"),
        (b"\x89PNG\r\n" + bytes(range(256)) * 9, "holds binary data"),
    ],
)
def test_what_is_no_text_is_called_by_its_kind(tmp_path, content, message):
    plain, packed = tmp_path / "t.txt", tmp_path / "t.gz"
    plain.write_bytes(content)
    packed.write_bytes(gzip.compress(content))
    for path in (plain, packed):
        with pytest.raises(CorpusError, match=rf"{path.name}: the file {message}"):
            list(read_lines(path))


def test_text_with_many_stray_control_characters_is_still_text(tmp_path):
    path = write(tmp_path / "t", b"some words\x00 and more of them\n" * 400)
    assert list(read_lines(path)) == ["some words and more of them"] * 400


def test_latin_1_text_is_refused_with_its_place(tmp_path):
    path = write(tmp_path / "old.de", "eins\nzwei\nfür\n".encode("latin-1"))
    with pytest.raises(CorpusError, match=r"old\.de, line 3: byte 2 \(0xfc\) is not UTF-8"):
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


@pytest.mark.parametrize(
    ("src", "tgt", "place"),
    [
        (["a", "", "c", "d"], ["x", "y", "z"], r"is line 2, blank in .*a\.de alone"),
        (["a", "b", "c"], ["x", "y" * 70, "", "z"], r"is line 2, with 1 letters in .*a\.de and 70 in .*b\.en"),
        (["a", "b" * 10, "c" * 10], ["x", "y" * 60, "z" * 61, "z"], r"is line 3, with 10 letters in .* and 61 in"),
        (["a", "b"], ["x", "y", "z"], "no line is blank or much longer in one file alone"),
    ],
)
def test_sides_of_unequal_length_name_the_first_line_that_differs_in_kind(tmp_path, src, tgt, place):
    paths = write(tmp_path / "a.de", "\n".join(src).encode()), write(tmp_path / "b.en", "\n".join(tgt).encode())
    with pytest.raises(CorpusError, match=place):
        list(read_two_files(*paths))


def test_the_same_text_on_both_sides_is_refused(tmp_path):
    src, copy = write(tmp_path / "a.de", b"x\ny\n"), write(tmp_path / "b.en.gz", b"x\ny")
    for tgt in (src, copy):
        with pytest.raises(CorpusError, match="hold the same text"):
            list(read_two_files(src, tgt))
    assert list(read_two_files(src, write(tmp_path / "c.en", b"x\nz\n"))) == [("x", "x"), ("y", "z")]


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
