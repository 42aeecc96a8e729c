"""Corpora of every kind, and what is said of those that cannot be used."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from huggingface_hub.errors import StrictDataclassError

from hf_vaswani.data import CorpusError, CorpusSource, bundled_pairs, read_source
from hf_vaswani.data.sources import content_key, numbered_pairs, pair_count

PAIRS = [("Guten Tag", "Good day"), ("", "blank"), ("日本", "Japan\u2028")]


def write(path, text):
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def saved_dataset(folder, rows, split=None):
    import datasets

    data = datasets.Dataset.from_list(rows)
    (datasets.DatasetDict({split: data}) if split else data).save_to_disk(folder)
    return str(folder)


def source_of(kind, tmp_path):
    """The same three pairs in a corpus of one kind."""
    if kind == "two files":
        src, tgt = ("".join(pair[side] + "\n" for pair in PAIRS) for side in (0, 1))
        return CorpusSource(src=write(tmp_path / "a.de", src), tgt=write(tmp_path / "a.en.gz", tgt))
    if kind == "tsv":
        text = "".join(f"{tgt}\tCC-BY\t{src}\n" for src, tgt in PAIRS)
        return CorpusSource(tsv=write(tmp_path / "a.tsv.gz", text), src_column=2, tgt_column=0)
    if kind == "tsv with where":
        text = "test\tx\ty\n" + "".join(f"train\t{src}\t{tgt}\n" for src, tgt in PAIRS) + "test\tu\tv\n"
        return CorpusSource(tsv=write(tmp_path / "a.tsv", text), src_column=1, tgt_column=2, where="train")
    if kind == "jsonl by language":
        text = "".join(json.dumps({"id": 1, "de": src, "en": tgt}) + "\n" for src, tgt in PAIRS)
        return CorpusSource(jsonl=write(tmp_path / "a.jsonl", text))
    if kind == "jsonl translation":
        rows = [json.dumps({"translation": {"de": src, "en": tgt}}, ensure_ascii=False) for src, tgt in PAIRS]
        return CorpusSource(jsonl=write(tmp_path / "a.jsonl.gz", "\n\n".join(rows)))
    if kind == "jsonl by field":
        text = "".join(json.dumps({"from": src, "to": {"text": tgt}}) + "\n" for src, tgt in PAIRS)
        return CorpusSource(jsonl=write(tmp_path / "a.jsonl", text), src_field="from", tgt_field="to.text")
    if kind == "dataset translation":
        rows = [{"translation": {"de": src, "en": tgt}} for src, tgt in PAIRS]
        return CorpusSource(dataset=saved_dataset(tmp_path / "d", rows, split="valid"), split="valid")
    if kind == "dataset columns":
        rows = [{"x": src, "y": tgt} for src, tgt in PAIRS]
        return CorpusSource(dataset=saved_dataset(tmp_path / "d", rows), src_field="x", tgt_field="y")
    assert kind == "tmx"
    return CorpusSource(tmx=write(tmp_path / "a.tmx", tmx(*(unit(src, tgt) for src, tgt in PAIRS))))


KINDS = [
    "two files",
    "tsv",
    "tsv with where",
    "jsonl by language",
    "jsonl translation",
    "jsonl by field",
    "dataset translation",
    "dataset columns",
    "tmx",
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_corpus_gives_the_same_pairs(tmp_path, kind):
    source = source_of(kind, tmp_path)
    assert list(read_source(source, "de", "en")) == PAIRS
    assert pair_count(source) in (3, 5, None)  # 5 lines of JSON, two of them blank


@pytest.mark.parametrize("kind", KINDS)
def test_the_key_of_a_corpus_follows_its_content_and_not_its_place(tmp_path, kind):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = (source_of(kind, tmp_path / name) for name in ("one", "two"))
    before = content_key(one, "de", "en")
    assert content_key(two, "de", "en") == before
    if kind.startswith("dataset"):  # what the library keeps beside the text for itself
        for folder in {p.parent for p in (tmp_path / "two").rglob("*.arrow")}:
            (folder / "cache-0123.arrow").write_bytes(b"x")
        assert content_key(two, "de", "en") == before
    path = next(p for p in (tmp_path / "one").rglob("*.arrow" if kind.startswith("dataset") else "*") if p.is_file())
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1
    path.write_bytes(raw)
    assert content_key(one, "de", "en") != before


def test_the_bundled_corpus_is_read_in_either_direction():
    source = CorpusSource(bundled="valid")
    assert list(read_source(source, "en", "de")) == bundled_pairs("valid", "en-de")
    assert list(read_source(source)) == bundled_pairs("valid", "de-en")
    with pytest.raises(CorpusError, match="English-German, not en-fr"):
        read_source(source, "en", "fr")
    assert content_key(source, "en", "de") != content_key(source, "de", "en")


def test_lines_are_numbered_as_in_the_file(tmp_path):
    source = source_of("tsv with where", tmp_path)
    assert [number for number, _, _ in numbered_pairs(source)] == [2, 3, 4]


def test_two_files_of_unequal_length_are_refused_before_any_work(tmp_path):
    source = CorpusSource(src=write(tmp_path / "a.de", "eins\n\n"), tgt=write(tmp_path / "a.en", "one\ntwo\nthree"))
    with pytest.raises(CorpusError, match=r"a\.de has 2 lines, .*a\.en has 3.*line 2, blank in .*a\.de alone"):
        pair_count(source)


# ------------------------------------------------------------------ faults
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "got none"),
        ({"tgt": "b"}, "got none"),
        ({"src": "a"}, "`src` needs `tgt`"),
        ({"src": "a", "tgt": "b", "tsv": "c"}, "got `src` and `tsv`"),
        ({"tsv": "c", "src_field": "de", "tgt_field": "en"}, "`src_field` has no meaning for `tsv`"),
        ({"jsonl": "c", "where": "train"}, "`where` has no meaning for `jsonl`"),
        ({"jsonl": "c", "src_field": "de"}, "must name two fields"),
        ({"jsonl": "c", "src_field": "de", "tgt_field": "de"}, "must name two fields"),
        ({"tsv": "c", "tgt_column": 0}, "must be two columns"),
        ({"tsv": "c", "src_column": -1}, "must be two columns"),
        ({"tsv": "c", "where_column": 2}, "`where_column` needs `where`"),
        ({"bundled": "all"}, "must be .*, got 'all'"),
        ({"bundled": "train", "weight": -1.0}, "`weight` must be a number from 0 up"),
        ({"bundled": "train", "weight": "much"}, "weight"),
        ({"tsv": 3}, "tsv"),
    ],
)
def test_a_source_that_names_no_corpus_is_refused(fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        CorpusSource(**fields)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"a\.jsonl, line 2: no valid JSON"),
        pytest.param("[" * 200_000, r"a\.jsonl, line 2: no valid JSON", id="deep"),
        ("[1]", r"a\.jsonl, line 2: each line must be one JSON object"),
        ('{"de": "x"}', r"a\.jsonl, line 2: no field 'en'; fields there: de"),
        ('{"de": "x", "en": 4}', r"a\.jsonl, line 2: field 'en' must be a text, got int"),
        ('{"de": "x", "en": "\\ud800"}', r"a\.jsonl, line 2: field 'en' holds half a character"),
    ],
)
def test_a_faulty_line_of_json_is_named(tmp_path, line, message):
    source = CorpusSource(jsonl=write(tmp_path / "a.jsonl", '{"de": "x", "en": "y"}\n' + line + "\n"))
    with pytest.raises(CorpusError, match=message):
        list(read_source(source, "de", "en"))


def test_text_of_json_is_one_clean_line_and_what_is_null_is_blank(tmp_path):
    text = json.dumps({"de": "a\nb\r\nc\x00", "en": "\ufeffd"}) + "\n" + '{"de": null, "en": "e"}'
    removed = Counter()
    source = CorpusSource(jsonl=write(tmp_path / "a.jsonl", text))
    assert [pair[1:] for pair in numbered_pairs(source, "de", "en", removed)] == [("a b c", "d"), ("", "e")]
    assert removed == {"control characters": 1, "byte order marks": 1}


def test_fields_named_by_language_need_the_languages(tmp_path):
    for source in (CorpusSource(jsonl=write(tmp_path / "a.jsonl", "{}")), source_of("tmx", tmp_path)):
        with pytest.raises(CorpusError, match=r"a\.\w+.*: set .*language"):
            list(read_source(source, "de", None))


def test_a_column_that_never_holds_the_wanted_value_shows_what_it_holds(tmp_path):
    path = write(tmp_path / "a.tsv", "train\ta\tb\ntest\tc\td\n")
    with pytest.raises(CorpusError, match=r"column 0 never holds 'dev', but for example 'train', 'test'"):
        list(read_source(CorpusSource(tsv=path, src_column=1, tgt_column=2, where="dev")))


def test_a_dataset_that_is_not_there_or_lacks_the_split_is_named(tmp_path):
    folder = source_of("dataset translation", tmp_path).dataset
    with pytest.raises(CorpusError, match=r"no split 'test'; splits there: valid"):
        list(read_source(CorpusSource(dataset=folder, split="test"), "de", "en"))
    with pytest.raises(CorpusError, match=r"row 1: no field 'fr'; fields there: de, en"):
        list(read_source(CorpusSource(dataset=folder, split="valid"), "de", "fr"))
    single = saved_dataset(tmp_path / "single", [{"de": "a", "en": "b"}])
    assert list(read_source(CorpusSource(dataset=single), "de", "en")) == [("a", "b")]
    with pytest.raises(CorpusError, match=r"no split 'valid'; the folder holds a single dataset"):
        list(read_source(CorpusSource(dataset=single, split="valid"), "de", "en"))
    with pytest.raises(CorpusError, match="`config` has no meaning for a folder"):
        list(read_source(CorpusSource(dataset=single, config="x"), "de", "en"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorpusError, match="empty: cannot be read"):
        list(read_source(CorpusSource(dataset=str(tmp_path / "empty"))))


def test_a_dataset_of_the_hub_is_loaded_by_name_config_and_split(monkeypatch):
    import datasets

    asked = []

    def load(name, config, split):
        asked.append((name, config, split))
        if config == "gone":
            raise ConnectionError("no\nroute")
        return datasets.Dataset.from_dict({"de": ["eins"], "en": ["one" if config == "a" else "two"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = CorpusSource(dataset="owner/name", config="a", split="dev")
    assert list(read_source(source, "de", "en")) == [("eins", "one")]
    assert asked == [("owner/name", "a", "dev")]
    keys = [content_key(CorpusSource(dataset="owner/name", config=c), "de", "en") for c in ("a", "b", "b")]
    assert keys[0] != keys[1] == keys[2]
    with pytest.raises(CorpusError, match=r"owner/name: no such folder, and not to be had from the Hub \(no route\)"):
        list(read_source(CorpusSource(dataset="owner/name", config="gone"), "de", "en"))


def test_one_split_of_a_real_corpus_is_read_whole():
    path = Path(__file__).parents[2] / "shared" / "data" / "tatoeba_en_de" / "pairs.tsv.gz"
    if not path.exists():
        pytest.skip("needs shared/data/tatoeba_en_de beside the repository")
    source = CorpusSource(tsv=str(path), src_column=2, tgt_column=1, where="valid")
    pairs = list(read_source(source))
    assert len(pairs) == 2001
    assert all(src and tgt for src, tgt in pairs)


# ------------------------------------------------------------------ translation memories
def unit(src, tgt, langs=("de-DE", "EN-us")):
    segments = "".join(
        f'<tuv xml:lang="{lang}"><seg>{text}</seg></tuv>\n' for lang, text in zip(langs, (src, tgt), strict=True)
    )
    return f"<tu>\n{segments}</tu>\n"


def tmx(*units, head=""):
    return f'<?xml version="1.0"?>\n{head}<tmx version="1.4"><header/><body>\n{"".join(units)}</body></tmx>'


def read_tmx(tmp_path, text):
    removed = Counter()
    source = CorpusSource(tmx=write(tmp_path / "a.tmx", text))
    return list(numbered_pairs(source, "de", "en", removed)), removed


def test_inline_codes_are_stripped_and_counted_and_their_text_is_kept(tmp_path):
    bold = '<bpt i="1">x</bpt>fett<ept i="1">y</ept>'
    text = tmx(unit(bold, "bold"), unit("a <hi>b</hi> <ph>c<sub>d</sub></ph>&amp; <wild>e</wild>", "f\ng"))
    pairs, removed = read_tmx(tmp_path, text)
    assert pairs == [(3, "fett", "bold"), (7, "a b & e", "f g")]
    assert removed == {"inline codes": 3, "unknown elements": 1}


def test_a_unit_without_a_segment_is_blank_on_that_side(tmp_path):
    hollow = '<tu><tuv xml:lang="de"></tuv><tuv xml:lang="en"><seg>b</seg></tuv></tu>\n'
    pairs, _ = read_tmx(tmp_path, tmx(hollow, unit("c", "d"), unit("e", "f", ("fr", "en"))))
    assert [pair[1:] for pair in pairs] == [("", "b"), ("c", "d"), ("", "f")]


def test_of_two_segments_in_one_language_the_first_counts(tmp_path):
    variants = unit("a", "b").replace("</tu>", '<tuv xml:lang="de-DE"><seg>c</seg></tuv>\n</tu>')
    assert read_tmx(tmp_path, tmx(variants))[0] == [(3, "a", "b")]


def test_broken_xml_is_named_by_its_line(tmp_path):
    text = tmx(unit("a", "b"), unit("c", "d").replace("<tu>\n", ""))
    with pytest.raises(CorpusError, match=r"a\.tmx, line 9: broken XML \(mismatched tag\)"):
        read_tmx(tmp_path, text)
    with pytest.raises(CorpusError, match=r"a\.tmx, line \d+: broken XML \(unclosed token\)"):
        read_tmx(tmp_path, text[:60])


def test_entities_of_the_file_and_unknown_ones_are_refused(tmp_path):
    bomb = '<!DOCTYPE tmx [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]>\n'
    with pytest.raises(CorpusError, match=r"line 2: the file defines an entity \('a'\)"):
        read_tmx(tmp_path, tmx(unit("&b;", "c"), head=bomb))
    with pytest.raises(CorpusError, match="line 5: unknown entity &nbsp;"):
        read_tmx(tmp_path, tmx(unit("a&nbsp;b", "c"), head='<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n'))


def test_languages_that_a_memory_lacks_are_named_with_those_it_has(tmp_path):
    with pytest.raises(CorpusError, match=r"no unit holds both 'de' and 'en'; languages found: cs, en"):
        read_tmx(tmp_path, tmx(unit("a", "b", ("cs", "en"))))
