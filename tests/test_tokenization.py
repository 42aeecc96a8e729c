import gzip
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, PreTrainedTokenizerFast
from transformers.utils import logging

from hf_vaswani import VaswaniConfig, VaswaniTokenizer

ROOT = Path(__file__).parents[1]
RESERVED = ["%1$s", "{name}", "{{n}}", "{n}", "${x}", "{größe}"]
TEXTS = [
    f"{subject} {verb} {number} {thing}{end}"
    for subject in ("Ein Mann", "Eine Frau", "A man", "The woman")
    for verb in ("schläft auf", "sieht", "sees", "is sleeping on")
    for number, thing in enumerate(("dem Sofa", "the couch", "<br />", "das Boot", "a boat", "你好，世界"))
    for end in (".", " ?", "!")
]
HARD = [
    "",
    " ",
    "  two  blanks  ",
    "\ttab\nline\r\nend\r",
    "a\x00b\x85c\u2028d",
    "no\u00a0break\u202fspace\u3000wide",
    "Ça va ? Oui : « d'accord » !",
    "caf\u00e9 cafe\u0301 \u0301",
    "你好，世界！",
    "ภาษาไทยไม่มีช่องว่าง",
    "מה זה?\u200f اشترِ USB 3.0 \u202eabc\u202c",
    "می‌خواهم \U0001f469\u200d\U0001f4bb ❤️‍🔥 1️⃣",
    "</s> <pad><s> <unk> a </s>b",
    "a <b>b</b> c x<br />y 1 < 2 & 3",
    "Ġ Ċ ▁ Ã© �\ufeff",
    "\U0010ffff\ufdd0\ue000",
]


@pytest.fixture(scope="module")
def tokenizer():
    return VaswaniTokenizer.train(iter(TEXTS), 320)


@pytest.fixture(scope="module")
def guarded():
    """A tokenizer with all that can be lost on the way: normalization, language tags, reserved pieces."""
    return VaswaniTokenizer.train(
        iter(TEXTS),
        320,
        normalization="nfc",
        reserved=RESERVED,
        extra_special_tokens=["<2de>", "<2en>"],
        model_max_length=50,
    )


@pytest.fixture(scope="module")
def folder(guarded, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    guarded.save_pretrained(path)
    VaswaniConfig(vocab_size=len(guarded)).save_pretrained(path)
    return path


def run_python(code: str, *args: object, **env: str) -> str:
    """Standard output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


# ---------------------------------------------------------------------- ids
def test_special_ids_are_the_configs_and_nothing_is_unknown(tokenizer):
    config = VaswaniConfig()
    assert tokenizer.convert_tokens_to_ids(["<pad>", "</s>", "<s>"]) == [0, 1, 2]
    for name in ("pad_token_id", "eos_token_id", "bos_token_id", "unk_token_id"):
        assert getattr(tokenizer, name) == getattr(config, name)
    assert "<unk>" not in tokenizer.get_vocab()
    assert sorted(tokenizer.get_vocab().values()) == list(range(320))


def test_every_text_ends_in_the_end_token_and_nothing_is_put_before_it(tokenizer):
    ids = tokenizer("Ein Mann")["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    assert ids[:-1] == tokenizer.encode("Ein Mann", add_special_tokens=False)
    assert tokenizer.encode("") == [tokenizer.eos_token_id]


def test_asking_for_a_start_token_keeps_the_end_token(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    for loaded in (
        VaswaniTokenizer.from_pretrained(tmp_path, add_bos_token=True),
        VaswaniTokenizer.from_pretrained(tmp_path),
    ):
        loaded.add_bos_token = True
        ids = loaded.encode("Boot")
        assert (ids[0], ids[-1]) == (loaded.bos_token_id, loaded.eos_token_id)
        assert loaded.decode(ids) == "Boot"


def test_both_vocabulary_accessors_work(tokenizer):
    assert tokenizer.get_src_vocab() == tokenizer.get_tgt_vocab() == tokenizer.get_vocab()
    both = tokenizer("doctor", text_target="doctor")
    assert both["input_ids"] == both["labels"]


def test_training_twice_gives_the_same_file(tokenizer):
    again = VaswaniTokenizer.train(iter(TEXTS), 320)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


# ---------------------------------------------------------------------- lossless
@pytest.mark.parametrize("text", HARD)
def test_hard_texts_come_back_unchanged(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text
    assert tokenizer.batch_decode(tokenizer([text, "x"])["input_ids"]) == [text, "x"]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_any_text_comes_back_unchanged(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.sampled_from([*RESERVED, "</s>", "<2de>", "{", "}", " ", "é", "Ã", "ö", "\u00df", "a1", "$"])))
def test_reserved_pieces_in_any_surroundings_come_back_unchanged(parts):
    text = "".join(parts)
    tokenizer = _reserved_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


_kept: list[VaswaniTokenizer] = []


def _reserved_tokenizer() -> VaswaniTokenizer:
    if not _kept:
        _kept.append(VaswaniTokenizer.train(iter(TEXTS), 320, reserved=RESERVED, extra_special_tokens=["<2de>"]))
    return _kept[0]


def test_text_that_spells_a_special_token_is_text(tokenizer):
    for text in ("</s>", "a<pad>b", " <s> "):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert not set(ids) & set(tokenizer.all_special_ids)
    # No training text can make a piece of one either.
    often = VaswaniTokenizer.train(
        iter(["</s> <pad> <2de>"] * 500), 290, extra_special_tokens=["<2de>"], allow_fewer=True
    )
    assert not set(often.encode("</s> <pad> <2de>", add_special_tokens=False)) & set(often.all_special_ids)


def test_control_tokens_in_a_text_can_be_asked_for(guarded):
    ids = guarded.encode("<2de>Boot", split_special_tokens=False)
    assert ids[0] == guarded.convert_tokens_to_ids("<2de>")
    assert guarded.decode(ids) == "Boot"
    assert guarded.encode("<2de>Boot")[0] != ids[0]


def test_a_lone_surrogate_is_refused_with_its_place(tokenizer):
    with pytest.raises(ValueError, match=r"text, character 3: U\+D83D"):
        tokenizer("ab\ud83d")
    with pytest.raises(ValueError, match=r"text 2, character 1: U\+DFFF"):
        tokenizer(["ok", "\udfff"])
    with pytest.raises(ValueError, match=r"text pair, character 1"):
        tokenizer("ok", "\udfff")
    with pytest.raises(ValueError, match=r"text, character 2"):
        tokenizer("ok", text_target="x\ud800")
    with pytest.raises(ValueError, match=r"text 2, character 1: U\+D800"):
        VaswaniTokenizer.train(iter(["a", "\ud800"]))


def test_spaces_before_french_signs_survive_a_request_to_clean_up(tokenizer, tmp_path):
    text = "Ça va ? Oui : « d'accord » !"
    tokenizer.save_pretrained(tmp_path)
    loaded = VaswaniTokenizer.from_pretrained(tmp_path, clean_up_tokenization_spaces=True)
    assert loaded.clean_up_tokenization_spaces is False
    assert loaded.decode(loaded.encode(text)) == text
    assert json.loads((tmp_path / "tokenizer_config.json").read_text("utf-8"))["clean_up_tokenization_spaces"] is False


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("Hello  world 2017", ["Hello", " ", " world", " 2", "0", "1", "7"]),
        ("x</s>y", ["x", "</", "s", ">", "y"]),
        ("cafe\u0301s", ["cafe\u0301s"]),
        ("می\u200cخواهم", ["می\u200cخواهم"]),
        (
            "\U0001f469\u200d\U0001f4bb ❤\ufe0f\u200d\U0001f525",
            ["\U0001f469\u200d\U0001f4bb", " ❤\ufe0f\u200d\U0001f525"],
        ),
        ("a\n\n b\tc", ["a", "\n\n", " b", "\t", "c"]),
    ],
)
def test_pieces_never_cross_these_borders(tokenizer, text, runs):
    found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in found] == runs


# ---------------------------------------------------------------------- normalization
def test_nothing_is_normalized_unless_asked(tokenizer):
    assert tokenizer.normalization is None
    assert tokenizer.encode("\u00e9") != tokenizer.encode("e\u0301")


@pytest.mark.parametrize(("name", "wide"), [("nfc", "你好，世界！"), ("nfkc", "你好,世界!")])
def test_normalization_is_a_named_choice_that_is_saved(name, wide, tmp_path):
    VaswaniTokenizer.train(iter(TEXTS), 300, normalization=name).save_pretrained(tmp_path)
    loaded = VaswaniTokenizer.from_pretrained(tmp_path)
    assert loaded.normalization == name
    assert loaded.encode("\u00e9") == loaded.encode("e\u0301")
    assert loaded.decode(loaded.encode("e\u0301")) == "\u00e9"
    assert loaded.decode(loaded.encode("你好，世界！")) == wide


def test_normalization_is_the_same_in_training():
    composed = VaswaniTokenizer.train(iter(["caf\u00e9 th\u00e9"] * 9), 300, normalization="nfc", allow_fewer=True)
    decomposed = VaswaniTokenizer.train(iter(["cafe\u0301 the\u0301"] * 9), 300, normalization="nfc", allow_fewer=True)
    assert composed.get_vocab() == decomposed.get_vocab()


def test_an_unknown_normalization_is_refused():
    with pytest.raises(ValueError, match=r"`normalization` must be None, 'nfc' or 'nfkc', got 'NFD'"):
        VaswaniTokenizer.train(iter(TEXTS), 300, normalization="NFD")


# ---------------------------------------------------------------------- decoding
def test_decoding_takes_the_ignored_label_as_padding(tokenizer):
    ids = tokenizer.encode("A man sees")
    padded = [*ids, -100, -100]
    for one in (padded, tuple(padded), np.array(padded), torch.tensor(padded), [np.int64(i) for i in padded]):
        assert tokenizer.decode(one) == "A man sees"
    for many in ([padded, padded], np.array([padded] * 2), torch.tensor([padded] * 2), [np.array(padded), ids]):
        assert tokenizer.batch_decode(many) == tokenizer.decode(many) == ["A man sees"] * 2
    assert tokenizer.decode([-100], skip_special_tokens=False) == "<pad>"
    assert tokenizer.decode(-100) == ""
    assert tokenizer.batch_decode([]) == []


def test_special_tokens_are_shown_on_request(tokenizer):
    ids = tokenizer.encode("Boot")
    assert tokenizer.decode(ids, skip_special_tokens=False) == "Boot</s>"
    assert tokenizer.batch_decode([ids], skip_special_tokens=False) == ["Boot</s>"]


# ---------------------------------------------------------------------- reserved pieces
def test_reserved_strings_are_one_piece_each_with_the_last_ids(guarded):
    assert len(guarded) == 320
    assert guarded.reserved == RESERVED
    ids = guarded.convert_tokens_to_ids(RESERVED)
    assert ids == list(range(320 - len(RESERVED), 320))
    for piece, index in zip(RESERVED, ids, strict=True):
        for text in (piece, f"x{piece}y", f"Hello {piece}, good", f"{piece}{piece}"):
            assert guarded.encode(text).count(index) == text.count(piece)
            assert guarded.decode(guarded.encode(text)) == text
        assert guarded.decode([index]) == piece


def test_the_longer_of_two_reserved_strings_at_one_place_counts(guarded):
    assert guarded.tokenize("{{n}}{n}") == ["{{n}}", "{n}"]


def test_reserved_strings_teach_the_other_pieces_nothing():
    texts = ["NASA NASA"] * 50 + ["NASAL"]
    often = VaswaniTokenizer.train(iter(texts), 300, reserved=["NA", "NASA"], allow_fewer=True)
    assert sorted(piece for piece in often.get_vocab() if "A" in piece and len(piece) > 1) == ["NA", "NASA"]
    assert often.tokenize("NASAL")[0] == "NASA"


def test_a_lost_or_doubled_reserved_string_is_reported(guarded):
    assert guarded.reserved_mismatch("Hello %1$s {name}", "Hallo {name} %1$s") == {}
    assert guarded.reserved_mismatch("Hello %1$s {{n}}", "Hallo {n} {n}") == {
        "%1$s": (1, 0),
        "{{n}}": (1, 0),
        "{n}": (0, 2),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reserved": ["a b", "a b"]}, "distinct"),
        ({"reserved": [""]}, "non-empty"),
        ({"reserved": ["</s>"]}, "distinct"),
        ({"reserved": ["é"]}, "'é' is a piece that ordinary text can give"),
        ({"extra_special_tokens": ["de"]}, "Text could spell the special token 'de'"),
        ({"extra_special_tokens": ["«größe»"]}, "Text could spell"),
    ],
)
def test_strings_that_text_could_spell_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        VaswaniTokenizer.train(iter(TEXTS), 300, **options)


def test_one_string_for_a_list_is_refused():
    with pytest.raises(TypeError, match="lists of strings"):
        VaswaniTokenizer.train(iter(TEXTS), 300, reserved="{n}")


def test_a_piece_of_the_vocabulary_cannot_become_special(tokenizer):
    copy = pickle.loads(pickle.dumps(tokenizer))
    piece = copy.convert_ids_to_tokens(300)
    with pytest.raises(ValueError, match="ordinary text can give"):
        copy.add_special_tokens({"extra_special_tokens": [piece]})


def test_language_tags_added_later_get_lasting_ids(tokenizer, tmp_path):
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.add_special_tokens({"extra_special_tokens": ["<2fr>", "<größe>"]}) == 2
    copy.save_pretrained(tmp_path)
    loaded = VaswaniTokenizer.from_pretrained(tmp_path)
    assert loaded.convert_tokens_to_ids(["<2fr>", "<größe>"]) == [320, 321]
    assert loaded.extra_special_tokens == ["<2fr>", "<größe>"]
    assert loaded.encode("Boot<2fr>") == tokenizer.encode("Boot<2fr>")
    assert loaded.decode([320, 321], skip_special_tokens=False) == "<2fr><größe>"
    assert loaded.decode([320, 321]) == ""


def test_language_tags_of_training_follow_the_three_control_tokens(guarded):
    assert guarded.convert_tokens_to_ids(["<2de>", "<2en>"]) == [3, 4]


# ---------------------------------------------------------------------- what training reads
def test_files_end_lines_at_line_feeds_only(tmp_path):
    plain, packed = tmp_path / "a.txt", tmp_path / "b.gz"
    plain.write_bytes("\ufeffeins\u2028zwei\x85\r\ndrei\n".encode())
    packed.write_bytes(gzip.compress("vier\rfünf".encode()))
    seen = _texts_seen(plain, [str(plain), packed])
    first = ["\ufeffeins\u2028zwei\x85", "drei"]
    assert seen == [first, [*first, "vier\rfünf"]]


def _texts_seen(*sources):
    from hf_vaswani.tokenization_vaswani import _texts

    return [list(_texts(source)[0]) for source in sources]


def test_files_and_iterators_give_the_same_vocabulary(tokenizer, tmp_path):
    (tmp_path / "de.txt").write_bytes("\r\n".join(TEXTS[::2]).encode())
    (tmp_path / "en.gz").write_bytes(gzip.compress("\n".join(TEXTS[1::2]).encode()))
    paths = [str(tmp_path / "de.txt"), tmp_path / "en.gz"]
    for source in (paths, TEXTS, (text for text in TEXTS)):
        trained = VaswaniTokenizer.train(source, 320)
        assert trained.get_vocab() == tokenizer.get_vocab()
        assert trained.training_report == {
            "texts_read": len(TEXTS),
            "texts_used": len(TEXTS),
            "byte_order_marks": 0,
            "control_characters": 0,
            "min_frequency": 2,
        }


def test_a_column_of_a_dataset_is_read(tokenizer):
    datasets = pytest.importorskip("datasets")
    column = datasets.Dataset.from_dict({"text": TEXTS})["text"]
    assert VaswaniTokenizer.train(column, 320).get_vocab() == tokenizer.get_vocab()


def test_a_list_of_files_with_a_misspelt_one_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a", "utf-8")
    with pytest.raises(ValueError, match=r"Only some of the list are files: .*b\.txt"):
        VaswaniTokenizer.train([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], 300)
    with pytest.raises(FileNotFoundError):
        VaswaniTokenizer.train(str(tmp_path / "b.txt"), 300)
    with pytest.raises(ValueError, match="taken as texts, since none of it is an existing file"):
        VaswaniTokenizer.train([str(tmp_path / "b.txt")], 300)


def test_zstandard_files_are_read_line_by_line(tokenizer, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    with pyarrow.output_stream(tmp_path / "first.zst", compression="zstd") as stream:
        stream.write("\ufeffeins\u2028zwei\r\ndrei".encode())
    content = (tmp_path / "first.zst").read_bytes()
    (tmp_path / "twice.zst").write_bytes(content * 2)  # as `cat a.zst b.zst` joins them
    assert _texts_seen(tmp_path / "first.zst", str(tmp_path / "twice.zst")) == [
        ["\ufeffeins\u2028zwei", "drei"],
        ["\ufeffeins\u2028zwei", "drei\ufeffeins\u2028zwei", "drei"],
    ]
    with pyarrow.output_stream(tmp_path / "texts.zst", compression="zstd") as stream:
        stream.write("\n".join(TEXTS).encode())
    assert VaswaniTokenizer.train(tmp_path / "texts.zst", 320).get_vocab() == tokenizer.get_vocab()
    (tmp_path / "cut.zst").write_bytes(content[:-5])
    (tmp_path / "plain.zst").write_bytes(b"no archive")
    for name in ("cut.zst", "plain.zst"):
        with pytest.raises(ValueError, match=rf"{name}, after line 0: damaged Zstandard data"):
            VaswaniTokenizer.train(tmp_path / name, 300)
    with pytest.raises(FileNotFoundError):
        VaswaniTokenizer.train(tmp_path / "missing.zst", 300)


def test_a_zstandard_file_without_the_library_for_it_is_told(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.zst").write_bytes(b"")
    with pytest.raises(ImportError, match=r"a\.zst: a \.zst file is read through pyarrow"):
        VaswaniTokenizer.train(tmp_path / "a.zst", 300)


def test_a_damaged_file_is_named_with_its_line(tmp_path):
    latin, cut = tmp_path / "latin.txt", tmp_path / "cut.gz"
    latin.write_bytes(b"gut\nsch\xf6n\n")
    cut.write_bytes(gzip.compress(os.urandom(5000).hex().encode())[:-2000])
    with pytest.raises(ValueError, match=r"latin\.txt, line 2, byte 4: not UTF-8"):
        VaswaniTokenizer.train(latin, 300)
    with pytest.raises(ValueError, match=r"cut\.gz, after line 0: damaged gzip data"):
        VaswaniTokenizer.train(cut, 300, max_memory_mib=None)


def test_an_item_that_is_no_string_is_named():
    with pytest.raises(TypeError, match="Text 2 is of type dict, expected str"):
        VaswaniTokenizer.train(iter(["a", {"de": "b"}]), 300)


# Case 103: stray characters of joined files.
def test_byte_order_marks_and_control_characters_are_counted_and_never_learned(tmp_path):
    (tmp_path / "one.txt").write_bytes("\ufeffa b\n".encode() * 20)
    (tmp_path / "two.txt").write_bytes("\ufeffc d\n".encode() * 20)
    (tmp_path / "joined.txt").write_bytes("\ufeffa b\n\ufeffc d\n".encode())
    odd = "x\0\a y"
    trained = VaswaniTokenizer.train(tmp_path / "joined.txt", 300, allow_fewer=True, min_frequency=1)
    assert trained.training_report["byte_order_marks"] == 2
    assert trained.training_report["control_characters"] == 0
    files = [tmp_path / "one.txt", tmp_path / "two.txt", tmp_path / "joined.txt"]
    texts = [*(line for file in files for line in _texts_seen(file)[0]), odd]
    trained = VaswaniTokenizer.train(iter(texts), 300, allow_fewer=True, min_frequency=1)
    assert (trained.training_report["byte_order_marks"], trained.training_report["control_characters"]) == (42, 2)
    # What is learned is what the same texts teach without them; each byte alone is a piece in any case.
    clean = [text.replace("\ufeff", "").replace("\0\a", "") for text in texts]
    assert (
        trained.get_vocab() == VaswaniTokenizer.train(iter(clean), 300, allow_fewer=True, min_frequency=1).get_vocab()
    )
    assert len(trained.get_vocab()) > 259
    for text in texts:
        assert trained.decode(trained.encode(text)) == text


def test_a_control_character_that_parts_words_still_parts_them():
    trained = VaswaniTokenizer.train(iter(["ab\x85cd\x0bef\x9fgh\tij"] * 5), 400, allow_fewer=True)
    assert {"ab", "Ġcd", "Ġefgh", "ij"} <= set(trained.get_vocab())
    assert trained.training_report["control_characters"] == 15


# Case 106: long lines, and scripts without blanks.
@pytest.mark.parametrize("letters", ["ภาษาไทยไม่มีช่องว่าง", "我们今天去公园散步因为天气很好"])
def test_a_long_line_without_blanks_is_used(letters):
    line = (letters * 150)[:1500]
    trained = VaswaniTokenizer.train(iter([*TEXTS[:50], line]), 340, allow_fewer=True)
    assert len(trained.encode(line)) < len(line) / 3
    assert trained.training_report["texts_read"] == trained.training_report["texts_used"] == 51


def test_a_line_of_100_000_letters_is_used_in_seconds_and_not_in_minutes(tmp_path):
    generator = np.random.default_rng(0)
    run = "".join(map(chr, generator.integers(0x4E00, 0x4E00 + 3000, 100_000)))
    words = "zusammen und " * 7700
    blanks = " " * 100_000
    (tmp_path / "long.txt").write_text("\n".join([run, words, blanks, *TEXTS]), "utf-8")
    start = time.perf_counter()
    trained = VaswaniTokenizer.train(tmp_path / "long.txt", 6000, allow_fewer=True)
    assert time.perf_counter() - start < 15  # whole, the run would take more than a minute
    assert trained.training_report["texts_used"] == len(TEXTS) + 3
    assert "Ġzusammen" in trained.get_vocab()
    assert len(trained.encode(run)) < 2 * len(run)  # three bytes a letter
    for line in (run, words, blanks):
        assert trained.decode(trained.encode(line)) == line


def test_a_long_run_is_learned_in_parts_that_make_it_up_again():
    from hf_vaswani.tokenization_vaswani import _LONG_RUN, _parts

    run = "ab" * 300
    for text in (run, f"kurz {run} kurz", " " * 500 + run, "kurze Wörter " * 90, "a" * _LONG_RUN):
        parts = _parts(text)
        assert "".join(parts) == text
        assert max(len(word) for part in parts for word in part.split() or [""]) <= _LONG_RUN
    assert _parts("a" * _LONG_RUN) == ["a" * _LONG_RUN]
    assert _parts("kurze Wörter " * 90) == ["kurze Wörter " * 90]


# Case 105: too many pieces asked for, and too much text.
def test_more_pieces_than_the_text_gives_are_refused_with_the_largest_number():
    lines = [f"Zeile {number} von tausend" for number in range(1000)]
    start = time.perf_counter()
    with pytest.raises(ValueError, match=r"can give at most \d+ pieces, `vocab_size` is 32000") as error:
        VaswaniTokenizer.train(iter(lines), 32000)
    assert time.perf_counter() - start < 1
    most = int(str(error.value).split("at most ")[1].split()[0])
    assert len(VaswaniTokenizer.train(iter(lines), most)) == most
    assert len(VaswaniTokenizer.train(iter(lines), 32000, allow_fewer=True)) == most
    with pytest.raises(ValueError, match=f"at most {most} pieces"):
        VaswaniTokenizer.train(iter(lines), most + 1)


def test_rare_pairs_become_pieces_only_on_request():
    assert "selten" not in VaswaniTokenizer.train(iter(["selten"]), 400, allow_fewer=True).get_vocab()
    assert "selten" in VaswaniTokenizer.train(iter(["selten"]), 400, min_frequency=1, allow_fewer=True).get_vocab()


def test_too_few_pieces_for_the_bytes_are_refused_with_the_least_number():
    with pytest.raises(ValueError, match=r"at least 261 .*2 reserved pieces\), got 260"):
        VaswaniTokenizer.train(iter(TEXTS), 260, reserved=["{a}", "{b}"])
    assert len(VaswaniTokenizer.train(iter(TEXTS), 261, reserved=["{a}", "{b}"])) == 261


def test_a_corpus_past_the_memory_limit_is_sampled_evenly_and_reported(monkeypatch):
    from hf_vaswani import tokenization_vaswani as module

    warnings = []
    monkeypatch.setattr(module.logger, "warning", warnings.append)
    report = module._new_report(2)
    texts = (f"{number} {number:x<60}" for number in range(6000))
    kept = sorted(int(text.split()[0]) for text in module._sample(module._checked(texts, report), 1, report))
    assert report == {**module._new_report(2), "texts_read": 6000, "texts_used": len(kept)}
    assert 110 < len(kept) < 140  # a new word of 60 letters weighs 7 KiB, and the rest of a text 0.9 KiB
    assert 2400 < sum(kept) / len(kept) < 3600
    assert "6000 texts, an even sample" in warnings[0]
    trained = VaswaniTokenizer.train(
        (f"{text} {number:x<60}" for number, text in enumerate(TEXTS)), 300, max_memory_mib=1
    )
    assert trained.training_report["texts_used"] < trained.training_report["texts_read"] == len(TEXTS)


def test_the_order_of_texts_and_the_number_of_threads_change_nothing(tmp_path):
    """Also where only a sample is used."""
    code = """if True:
        import sys
        from hf_vaswani import VaswaniTokenizer
        for limit in (4096, 1):
            trained = VaswaniTokenizer.train(sys.argv[1:], 350, max_memory_mib=limit)
            print(trained.training_report["texts_used"], trained.backend_tokenizer.to_str())
    """
    half = len(TEXTS) // 2
    contents = {
        "a.txt": [f"{text} {number % 13}" for number, text in enumerate(TEXTS * 20)],
        "b.txt": [*TEXTS[half:], *["Der Baum ist grün."] * 40],
        "c.txt": [*reversed(TEXTS[:half]), "Der Ball ist rot."],
    }
    for name, lines in contents.items():
        (tmp_path / name).write_text("\n".join(lines), "utf-8")
    files = [tmp_path / name for name in contents]
    found = run_python(code, *files, RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    assert found == run_python(code, *files[::-1], RAYON_NUM_THREADS="3", TOKENIZERS_PARALLELISM="true")
    whole, sample = (int(line.split()[0]) for line in found.splitlines())
    assert whole == sum(map(len, contents.values()))
    assert 1000 < sample < whole


def test_without_a_limit_texts_are_read_one_by_one(tokenizer):
    trained = VaswaniTokenizer.train(iter(TEXTS), 320, max_memory_mib=None)
    assert trained.get_vocab() == tokenizer.get_vocab()
    assert trained.training_report["texts_used"] == len(TEXTS)


def test_words_that_are_met_again_take_no_more_room():
    from hf_vaswani import tokenization_vaswani as module

    kept = {}
    for name, texts in (("new", [f"{n:x<60}" for n in range(4000)]), ("same", ["x" * 60] * 4000)):
        kept[name] = len(list(module._sample(iter(texts), 1, {"texts_read": 4000})))
    assert kept["same"] == 4000
    assert kept["new"] < 200


@pytest.mark.skipif(sys.platform == "win32", reason="no resource module")
@pytest.mark.parametrize("kind", ["runs without blanks", "short words"])
def test_memory_stays_near_the_limit(kind):
    code = """if True:
        import random, resource, sys
        from hf_vaswani import VaswaniTokenizer
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "linux" else 1 / 1024)
        random.seed(0)
        thai = [chr(letter) for letter in range(0xE01, 0xE2F)]
        if sys.argv[1] == "short words":
            word = lambda: "".join(random.choices("abcdefghijklmnop", k=9))
            texts = (" ".join(word() for _ in range(7)) for _ in range(60000))
        else:
            texts = ("".join(random.choices(thai, k=400)) for _ in range(6000))
        before = peak()
        VaswaniTokenizer.train(texts, 270, max_memory_mib=60)
        print((peak() - before) / 1024)
    """
    # All 7 MiB of runs without blanks would take about 850 MiB, the 420,000 words as much as 400.
    assert float(run_python(code, kind)) < 120


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no resource module")
def test_200_000_lines_take_less_than_300_mebibytes():
    code = """if True:
        import resource, sys
        from hf_vaswani import VaswaniTokenizer
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "linux" else 1 / 1024)
        parts = "ka to mi ren sol ba ti lum do fe gra ns ei au st".split()
        words = [a + b + c + d for a in parts for b in parts for c in parts for d in parts]
        pick = lambda line, k: words[(line * 7919 + k * 104729 * (line % 97)) % len(words)]
        lines = (" ".join(pick(line, k) for k in range(5 + line % 11)) for line in range(200_000))
        before = peak()
        trained = VaswaniTokenizer.train(lines, 2000)
        assert trained.training_report["texts_used"] == 200_000
        print((peak() - before) / 1024)
    """
    assert float(run_python(code)) < 300  # the texts alone are 20 MiB, and 50,000 unlike words


@pytest.mark.parametrize(("wish", "shown"), [(None, False), (True, True), (False, False)])
def test_progress_is_shown_on_standard_error_alone(capfd, wish, shown):
    logging.enable_progress_bar()
    try:
        VaswaniTokenizer.train(iter(TEXTS), 300, show_progress=wish)
    finally:
        logging.disable_progress_bar()
    out, err = capfd.readouterr()
    assert out == ""
    assert ("Reading texts" in err) is shown


def test_training_a_new_vocabulary_keeps_the_reserved_strings(guarded):
    fresh = guarded.train_new_from_iterator([["abc abd"] * 20], 280)
    assert fresh.reserved == RESERVED
    assert fresh.normalization == "nfc"
    assert fresh.training_report is None
    assert fresh.decode(fresh.encode("abc {größe}")) == "abc {größe}"


# ---------------------------------------------------------------------- batches
def test_labels_go_through_the_seq2seq_collator(tokenizer):
    rows = [tokenizer(src, text_target=tgt) for src, tgt in (("Ein Boot", "a"), ("x", "The woman sees a boat"))]
    batch = DataCollatorForSeq2Seq(tokenizer)(rows)
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert (batch["labels"][0] == -100).any()
    assert batch["input_ids"][1, -1] == tokenizer.pad_token_id
    assert tokenizer.batch_decode(batch["labels"]) == ["a", "The woman sees a boat"]


def test_nothing_is_cut_unless_asked_and_a_cut_keeps_the_end_token(tokenizer, guarded):
    text = "The woman sees a boat. " * 200
    assert tokenizer.decode(tokenizer.encode(text)) == text
    cut = tokenizer(text, truncation=True, max_length=7)["input_ids"]
    assert len(cut) == 7
    assert cut[-1] == tokenizer.eos_token_id
    assert cut[:-1] == tokenizer.encode(text)[:6]
    assert len(guarded(text, truncation=True)["input_ids"]) == 50
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_lengths_of_the_last_call_are_not_saved(tokenizer, tmp_path):
    tokenizer(["a boat", "b"], padding="max_length", truncation=True, max_length=3)
    tokenizer.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    assert saved["truncation"] is saved["padding"] is None


# ---------------------------------------------------------------------- saved and loaded
def check_same(loaded, original) -> None:
    texts = [*TEXTS[:100], *HARD, *RESERVED, "x<2de>{name}y%1$s"]
    assert loaded(texts)["input_ids"] == original(texts)["input_ids"]
    ids = original(texts)["input_ids"]
    assert loaded.batch_decode(ids, skip_special_tokens=True) == original.batch_decode(ids, skip_special_tokens=True)
    assert loaded.get_vocab() == original.get_vocab()
    assert loaded.split_special_tokens is True
    assert loaded.unk_token is None


def test_auto_tokenizer_finds_the_class_and_all_its_settings(guarded, folder):
    for loaded in (AutoTokenizer.from_pretrained(folder), VaswaniTokenizer.from_pretrained(folder)):
        assert type(loaded) is VaswaniTokenizer
        check_same(loaded, guarded)
        assert (loaded.reserved, loaded.normalization, loaded.model_max_length) == (RESERVED, "nfc", 50)
        assert loaded.training_report == guarded.training_report


def test_auto_tokenizer_needs_no_model_config(guarded, tmp_path):
    guarded.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is VaswaniTokenizer
    check_same(loaded, guarded)


def test_the_generic_class_gives_equal_ids_and_text(guarded, folder):
    loaded = PreTrainedTokenizerFast.from_pretrained(folder)
    assert type(loaded) is PreTrainedTokenizerFast
    check_same(loaded, guarded)


def test_saving_again_after_the_folder_is_gone_gives_equal_files(guarded, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "first")
    loaded = VaswaniTokenizer.from_pretrained(tmp_path / "first")
    shutil.rmtree(tmp_path / "first")
    check_same(loaded, guarded)
    loaded.save_pretrained(tmp_path / "second")
    for name in ("tokenizer.json", "tokenization_vaswani.py"):
        assert (tmp_path / "second" / name).read_bytes() == (folder / name).read_bytes()
    check_same(VaswaniTokenizer.from_pretrained(tmp_path / "second"), guarded)


def test_vocabulary_and_merges_build_the_same_tokenizer(tokenizer):
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    built = VaswaniTokenizer(vocab=model["vocab"], merges=model["merges"])
    for text in [*HARD, *TEXTS[:20]]:
        assert built.encode(text) == tokenizer.encode(text)
        assert built.decode(built.encode(text)) == text


def test_a_foreign_vocabulary_keeps_its_special_tokens():
    words = {"<s>": 0, "<pad>": 1, "</s>": 2, "größe": 3}
    foreign = VaswaniTokenizer(tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")))
    assert (foreign.bos_token_id, foreign.pad_token_id, foreign.eos_token_id) == (0, 1, 2)
    assert foreign.encode("größe") == [3, 2]


def test_a_pickled_tokenizer_is_the_same(guarded):
    check_same(pickle.loads(pickle.dumps(guarded)), guarded)


def _encode_elsewhere(tokenizer, texts):
    return tokenizer(texts)["input_ids"]


def test_a_spawned_worker_gives_equal_ids(guarded):
    texts = [*HARD, *RESERVED]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_encode_elsewhere, (guarded, texts)) == guarded(texts)["input_ids"]


def test_dataset_map_with_two_processes_gives_equal_ids(guarded):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"text": TEXTS[:20]})
    mapped = rows.map(lambda row: guarded(row["text"]), num_proc=2)
    assert list(mapped["input_ids"]) == guarded(TEXTS[:20])["input_ids"]


FOREIGN = """if True:
    import json, sys
    sys.modules["hf_vaswani"] = None  # an import of it fails, installed or not
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    folder, texts = sys.argv[1], json.loads(sys.argv[2])
    trusting = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    trusting.save_pretrained(folder + "/again")
    again = AutoTokenizer.from_pretrained(folder + "/again", trust_remote_code=True)
    found = []
    for tokenizer in (trusting, again, PreTrainedTokenizerFast.from_pretrained(folder)):
        ids = tokenizer(texts)["input_ids"]
        found.append([type(tokenizer).__name__, ids, tokenizer.batch_decode(ids, skip_special_tokens=True)])
    assert trusting.decode([*ids[0], -100]) == texts[0]
    print(json.dumps(found))
"""


def test_a_process_without_the_package_gives_equal_ids_and_text(guarded, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "saved")
    texts = ["x<2de>{größe} </s>", "café", *HARD[1:]]
    out = run_python(FOREIGN, tmp_path / "saved", json.dumps(texts), HF_HOME=str(tmp_path / "cache"))
    ids = guarded(texts)["input_ids"]
    names = ["VaswaniTokenizer", "VaswaniTokenizer", "TokenizersBackend"]
    assert json.loads(out) == [[name, ids, guarded.batch_decode(ids)] for name in names]


def test_a_western_code_page_as_preferred_encoding_changes_nothing(tmp_path):
    code = """if True:
        import locale, sys, _locale
        locale.getpreferredencoding = lambda do_setlocale=True: "cp1252"
        import io, builtins
        plain_open = io.open
        def code_page_open(file, mode="r", buffering=-1, encoding=None, *args, **kwargs):
            if "b" not in mode and encoding in (None, "locale"):
                encoding = "cp1252"
            return plain_open(file, mode, buffering, encoding, *args, **kwargs)
        io.open = builtins.open = code_page_open
        from transformers import AutoTokenizer
        from hf_vaswani import VaswaniTokenizer
        folder = sys.argv[1]
        with open(folder + "/probe.txt", "w") as probe:
            probe.write("\\u00e9")
        assert open(folder + "/probe.txt", "rb").read() == b"\\xe9"
        reserved = ["{gr\\u00f6\\u00dfe}", "\\u2039x\\u203a"]
        trained = VaswaniTokenizer.train(folder + "/corpus.txt", 300, reserved=reserved)
        trained.save_pretrained(folder)
        loaded = AutoTokenizer.from_pretrained(folder)
        text = open(folder + "/corpus.txt", encoding="utf-8", newline="").read() + "{gr\\u00f6\\u00dfe}\\u2039x\\u203a"
        assert loaded.encode(text) == trained.encode(text)
        assert loaded.decode(loaded.encode(text)) == text
        print(ascii(loaded.reserved))
    """
    (tmp_path / "corpus.txt").write_bytes("\n".join(["Ďakujem, šťastie; 你好", *TEXTS]).encode())
    out = run_python(code, tmp_path, PYTHONUTF8="0", PYTHONIOENCODING="cp1252", LC_ALL="C")
    assert out.strip() == ascii(["{größe}", "‹x›"])
    # Line ends and encoding of what was written: as on every other system.
    for name in ("tokenizer.json", "tokenizer_config.json"):
        written = (tmp_path / name).read_bytes()
        assert b"\r" not in written
        json.loads(written.decode("utf-8"))


def test_the_bundled_corpora_come_back_unchanged():
    path = ROOT.parent / "shared" / "data" / "ntrex"
    files = sorted(file for file in path.glob("**/*.txt*") if file.suffix in (".txt", ".gz"))[:6]
    if not files:
        pytest.skip("the shared corpora are not here")
    trained = VaswaniTokenizer.train(files, 1000)
    for file in files:
        with gzip.open(file, "rb") if file.suffix == ".gz" else open(file, "rb") as stream:
            lines = stream.read().decode("utf-8").split("\n")[:300]
        assert trained.batch_decode(trained(lines)["input_ids"]) == lines
