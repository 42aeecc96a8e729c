import copy
import json
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, PreTrainedTokenizerFast, pipeline

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.foreign_tokenization_vaswani import VaswaniForeignTokenizer, _moses
from hf_vaswani.interop.vocabulary import build_tokenizer

CONTROLS = ["<s>", "<pad>", "</s>", "<unk>"]  # the order of fairseq
NAMES = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>", "bos": "<s>"}
GERMAN = ["ein", "mann", "hund", "und", "doctor", "auto"]
ENGLISH = ["a", "man", "dog", "and", "the", "doc", "tor", "doctor", "car"]
LETTERS = sorted(set("abcdefghijklmnopqrstuvwxyzäöüßé.,!?&-'\"<>/ 0123456789ABDEFMéл好"))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
MERGES = [
    "e i",
    "ei n</w>",
    "a n</w>",
    "m an</w>",
    "m a",
    "ma n",
    "man n</w>",
    "h u",
    "hu n",
    "hun d</w>",
    "u n",
    "un d</w>",
]
SUBTOKENS = [
    "<pad>_", "<EOS>_", "ein_", "mann_", "man", "ei", "n_", *sorted({*"abcdefghijklmnopqrstuvwxyz .,\\_;0123456789"}),
]  # fmt: skip


def words(**options):
    """Two vocabularies of words, of unequal sizes and orders."""
    return build_tokenizer(CONTROLS + GERMAN, CONTROLS + ENGLISH, segmentation="words", **{**NAMES, **options})


@pytest.fixture(scope="module")
def spm_file(tmp_path_factory):
    """A unigram model, with pieces that the dictionary below lacks."""
    from test_foreign_segmentation import RULES, UNIGRAM, model_of

    path = tmp_path_factory.mktemp("spm") / "made.model"
    path.write_bytes(model_of({**UNIGRAM, ".": -4.5, "<": -5.0, ">": -5.1, "/": -5.2, "s": -5.3}, rules=RULES))
    return path


@pytest.fixture(scope="module")
def codes_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("codes") / "made.code"
    path.write_text("\n".join(["#version: 0.2", *MERGES, ""]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizers(spm_file, codes_file):
    """One of each kind."""
    pieces = ["ein", "ma@@", "mann", "man", "hund", "und", "m@@", "x", *(f"{letter}@@" for letter in "abcdu"), *"abcdn"]
    bpe = {"segmentation": "subword-nmt", "codes": codes_file, **NAMES}
    spm = {"segmentation": "sentencepiece", "source_spm": spm_file, **NAMES}
    unigram = ["▁", "a", "b", "▁a", "▁ab", "bb", "."]
    t2t = {"pad": "<pad>_", "eos": "<EOS>_", "unk": None, "source_suffix": ["<EOS>_"], "target_suffix": ["<EOS>_"]}
    return {
        "words": words(),
        "shared words": build_tokenizer(CONTROLS + GERMAN, None, segmentation="words", **NAMES),
        "characters": build_tokenizer(CONTROLS + LETTERS, CONTROLS + LETTERS[::-1], segmentation="characters", **NAMES),
        "spaced characters": build_tokenizer(
            [*CONTROLS, "▁", *LETTERS], None, segmentation="characters", character_space="▁", **NAMES
        ),
        "subword-nmt": build_tokenizer(CONTROLS + pieces, None, **bpe),
        "two subword-nmt": build_tokenizer(CONTROLS + pieces, CONTROLS + pieces[::2], **bpe, restrict=True),
        "sentencepiece": build_tokenizer(CONTROLS + unigram, None, **spm),
        "two sentencepiece": build_tokenizer(CONTROLS + unigram, CONTROLS + unigram[::-1], target_spm=spm_file, **spm),
        "subtokens": build_tokenizer(SUBTOKENS, None, segmentation="subtokens", **t2t),
        "moses": words(moses=("de", "en"), lowercase=True, moses_aggressive_hyphens=True),
    }


KINDS = [
    "words", "shared words", "characters", "spaced characters", "subword-nmt", "two subword-nmt", "sentencepiece",
    "two sentencepiece", "subtokens", "moses",
]  # fmt: skip
LINES = [
    f"{start} {noun} {rest}{end}"
    for start in ("ein", "a", "Ein", "  ")
    for noun in ("mann", "hund  und", "man", "abba")
    for rest in ("</s>", "doctor", "x-y <unk>", "aab é\u0301")
    for end in ("", ".", " !")
][:100]


def same(one, other):
    """Whether two tokenizers do the same on a hundred lines, both ways."""
    assert one.get_src_vocab() == other.get_src_vocab()
    assert one.get_tgt_vocab() == other.get_tgt_vocab()
    assert (one.pad_token_id, one.eos_token_id, one.all_special_ids) == (
        other.pad_token_id, other.eos_token_id, other.all_special_ids,
    )  # fmt: skip
    found = [each(LINES, text_target=LINES, padding=True, truncation=True, max_length=9) for each in (one, other)]
    assert len(LINES) == 100
    assert found[0].data == found[1].data
    assert one.batch_decode(found[0]["labels"]) == other.batch_decode(found[0]["labels"])


# ------------------------------------------------------------------ two sides
def test_each_side_has_its_ids():
    tokenizer = words()
    assert tokenizer("ein mann und ein hund")["input_ids"] == [4, 5, 7, 4, 6, 2]
    assert tokenizer(text_target="a man and the dog")["input_ids"] == [4, 5, 7, 8, 6, 2]
    both = tokenizer(["ein mann", "hund"], text_target=["a man", "the dog"], padding=True, return_tensors="pt")
    assert both["input_ids"].tolist() == [[4, 5, 2], [6, 2, 1]]
    assert both["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert both["labels"].tolist() == [[4, 5, 2], [8, 6, 2]]


def test_decoding_is_the_targets_unless_asked_otherwise():
    tokenizer = words()
    assert tokenizer.decode([4, 5, 7, 8, 2, 1]) == "a man and the"
    assert tokenizer.decode([4, 5, 7, 2], side="source") == "ein mann und"
    assert tokenizer.convert_tokens_to_string(["a", "man"]) == "a man"
    with pytest.raises(ValueError, match="`side` must be 'source' or 'target'"):
        tokenizer.decode([4], side="left")


def test_the_vocabularies_and_their_sizes_agree():
    tokenizer = words()
    assert tokenizer.get_src_vocab() == {name: i for i, name in enumerate(CONTROLS + GERMAN)}
    assert tokenizer.get_tgt_vocab() == {name: i for i, name in enumerate(CONTROLS + ENGLISH)}
    assert tokenizer.get_vocab() == tokenizer.get_src_vocab()
    # What `resize_token_embeddings(len(tokenizer))` would compare with is the target's matrix.
    assert len(tokenizer) == tokenizer.vocab_size == len(CONTROLS + ENGLISH) != len(CONTROLS + GERMAN)
    assert tokenizer.convert_tokens_to_ids(["mann", "</s>", "man"]) == [5, 2, 3]
    assert tokenizer.convert_ids_to_tokens(tokenizer("ein hund")["input_ids"]) == ["ein", "hund", "</s>"]
    assert tokenizer.tokenize("ein man") == ["ein", "<unk>"]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id) == (
        1,
        2,
        3,
        0,
    )


def test_one_word_may_be_cut_otherwise_on_each_side(codes_file):
    tokenizer = build_tokenizer(
        [*CONTROLS, "ma@@", "n", "man"], [*CONTROLS, "m@@", "a@@", "n"], segmentation="subword-nmt", codes=codes_file,
        restrict=True, **NAMES,
    )  # fmt: skip
    found = tokenizer("man", text_target="man")
    assert (found["input_ids"], found["labels"]) == ([6, 2], [4, 5, 6, 2])


def test_both_vocabularies_are_there_when_one_is_shared():
    tokenizer = build_tokenizer(CONTROLS + ENGLISH, None, segmentation="words", **NAMES)
    assert tokenizer.get_src_vocab() == tokenizer.get_tgt_vocab() == tokenizer.get_vocab()
    found = tokenizer("doctor", text_target="doctor")
    assert found["input_ids"] == found["labels"] == [11, 2]
    assert tokenizer.decode([11]) == tokenizer.decode([11], side="source") == "doctor"


def test_a_failed_target_leaves_the_source_side_on():
    tokenizer = words()
    with pytest.raises(TypeError, match="NoneType"):
        tokenizer(text_target=["a", None])
    assert tokenizer.convert_tokens_to_ids("mann") == 5
    assert tokenizer.tokenize("ein mann") == ["ein", "mann"]


def test_start_and_end_may_be_the_targets_alone():
    """OpenNMT's older vocabularies."""
    tokenizer = build_tokenizer(
        ["<unk>", "<blank>", "ein", "mann", "hund", "und"], ["<unk>", "<blank>", "<s>", "</s>", "a", "man"],
        segmentation="words", pad="<blank>", eos="</s>", unk="<unk>", bos="<s>", source_suffix=(),
    )  # fmt: skip
    assert tokenizer("ein mann hund")["input_ids"] == [2, 3, 4]
    assert tokenizer(text_target="a man")["input_ids"] == [4, 5, 3]
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (3, 2, 1)
    assert tokenizer.decode([2, 4, 5, 3]) == "a man"
    assert tokenizer.decode([2, 3], side="source") == "ein mann"


def test_what_is_put_around_a_text_differs_by_side(tmp_path):
    names = [*CONTROLS, "<2en>", "<go>", *ENGLISH]
    tokenizer = build_tokenizer(
        names, None, segmentation="words", source_prefix=["<2en>"], target_prefix=["<go>"], target_suffix=(),
        start="<go>", **NAMES,
    )  # fmt: skip
    for each in (tokenizer, saved_and_loaded(tokenizer, tmp_path)):
        assert each("a man")["input_ids"] == [4, 6, 7, 2]
        assert each(text_target="a man")["input_ids"] == [5, 6, 7]
        assert each.decode([5, 6, 7, 2]) == "a man"
        assert each("<2en> a")["input_ids"] == [4, 3, 6, 2]
        assert each.num_special_tokens_to_add() == 2


# ------------------------------------------------------------------ text in
def test_text_that_spells_a_control_token_is_text(tokenizers):
    for kind, tokenizer in tokenizers.items():
        controls = {"<EOS>_", "<pad>_"} if kind == "subtokens" else {"<s>", "</s>", "<pad>"}
        for text in ("</s> <pad> <s>", "</s>", "a<s>b</s>", "<EOS>_ <pad>_"):
            found = tokenizer(text, text_target=text, add_special_tokens=False)
            for side, ids in (("source", found["input_ids"]), ("target", found["labels"])):
                vocabulary = tokenizer.get_src_vocab() if side == "source" else tokenizer.get_tgt_vocab()
                assert not {vocabulary[name] for name in controls} & set(ids), (kind, text)
    assert tokenizers["characters"].decode(tokenizers["characters"](text_target="a </s> b")["input_ids"]) == "a </s> b"


def test_control_tokens_in_text_on_purpose(tokenizers):
    tokenizer = tokenizers["words"]
    assert tokenizer("ein </s> mann", split_special_tokens=False)["input_ids"] == [4, 2, 5, 2]
    assert tokenizer("ein </s> mann")["input_ids"] == [4, 3, 5, 2]
    characters = tokenizers["characters"]
    ids = characters(text_target="a<s>b", split_special_tokens=False, add_special_tokens=False)["input_ids"]
    assert characters.decode(ids, skip_special_tokens=False) == "a<s>b"
    assert len(ids) == 3


def test_an_unknown_piece_is_one_unknown_token(tokenizers):
    assert tokenizers["words"]("ein zug fährt")["input_ids"] == [4, 3, 3, 2]
    # "manx" is "man@@ x", of which the dictionary has only the second.
    assert tokenizers["subword-nmt"].tokenize("manx ein") == ["<unk>", "x", "ein"]
    # Unknown characters side by side are one piece in SentencePiece; "ba" is a piece that the dictionary lacks.
    assert tokenizers["sentencepiece"].tokenize("a好好ba") == ["▁a", "<unk>", "<unk>"]


def test_a_vocabulary_without_unknown_token_refuses_what_it_lacks():
    names = ["<pad>", "</s>", *"ab "]
    tokenizer = build_tokenizer(names, names[:4], segmentation="characters", pad="<pad>", eos="</s>", unk=None)
    assert tokenizer("a b")["input_ids"] == [2, 4, 3, 1]
    with pytest.raises(ValueError, match="source vocabulary has no piece 'é', and no unknown token"):
        tokenizer("aé")
    with pytest.raises(ValueError, match="target vocabulary has no piece ' '"):
        tokenizer(text_target="a b")


@pytest.mark.parametrize(
    ("text", "place"),
    [("ab\ud800", "text, character 3: U\\+D800"), (["a", "\udfff"], "text 2, character 1"), ("a\udc80b", "U\\+DC80")],
)
def test_half_a_character_is_refused_with_its_place(tokenizers, text, place):
    for tokenizer in tokenizers.values():
        for call in ({"text": text}, {"text_target": text}):
            with pytest.raises(ValueError, match=f"{place}.*lone surrogate"):
                tokenizer(**call)
    with pytest.raises(ValueError, match="text pair, character 1"):
        tokenizers["words"]("a", "\ud800")


@pytest.mark.parametrize("wrong", [3, ["a", 3], [None], b"a", {"a": 1}])
def test_what_is_no_text_is_refused(tokenizers, wrong):
    with pytest.raises((TypeError, ValueError), match=r"str|text"):
        tokenizers["words"](wrong)


def test_empty_text_is_the_end_token_alone(tokenizers):
    for tokenizer in tokenizers.values():
        assert tokenizer("")["input_ids"] == [tokenizer.eos_token_id]
        assert tokenizer(["", ""])["input_ids"] == [[tokenizer.eos_token_id]] * 2
        assert tokenizer.decode(tokenizer(text_target="")["input_ids"]) == ""


def test_options_of_the_call(tokenizers):
    tokenizer = tokenizers["words"]
    found = tokenizer(
        ["ein mann und hund", "ein"], truncation=True, max_length=3, padding="max_length", padding_side="left",
        return_special_tokens_mask=True, return_length=True,
    )  # fmt: skip
    assert found["input_ids"] == [[4, 5, 2], [1, 4, 2]]
    assert found["special_tokens_mask"] == [[0, 0, 1], [1, 0, 1]]
    assert tokenizer("ein mann", "und hund")["input_ids"] == [4, 5, 7, 6, 2]
    assert tokenizer(["ein", "und"], ["mann", "hund"])["input_ids"] == [[4, 5, 2], [7, 6, 2]]
    assert tokenizer([("ein", "mann"), ("und", "hund")])["input_ids"] == [[4, 5, 2], [7, 6, 2]]
    assert tokenizer(["ein", "mann und"], is_split_into_words=True)["input_ids"] == [4, 5, 7, 2]
    assert tokenizer([["ein"], ["mann", "hund"]], is_split_into_words=True)["input_ids"] == [[4, 2], [5, 6, 2]]
    assert tokenizer("ein mann", add_special_tokens=False)["input_ids"] == [4, 5]
    with pytest.raises(NotImplementedError, match="no offsets"):
        tokenizer("ein", return_offsets_mapping=True)


def test_the_longest_length_is_kept(tmp_path):
    tokenizer = words(model_max_length=3)
    assert tokenizer("ein mann und hund", truncation=True)["input_ids"] == [4, 5, 2]
    assert saved_and_loaded(tokenizer, tmp_path)("ein mann und hund", truncation=True)["input_ids"] == [4, 5, 2]


# ------------------------------------------------------------------ ids out
def test_decoding_takes_every_form_of_ids(tokenizers):
    tokenizer = tokenizers["words"]
    assert tokenizer.decode(torch.tensor([4, 5, 2, -100, -100])) == "a man"
    assert tokenizer.decode(np.array([[4, 2], [5, 2]])) == ["a", "man"]
    assert tokenizer.decode(5) == "man"
    assert tokenizer.batch_decode([[4, -100], [99, 5]]) == ["a", "man"]  # 99 has no piece
    assert tokenizer.batch_decode([]) == []
    assert tokenizer.decode([]) == ""


def test_the_unknown_token_stays_visible(tokenizers):
    assert tokenizers["words"].decode([0, 4, 3, 5, 2]) == "a <unk> man"
    assert tokenizers["subword-nmt"].decode([4, 3, 11]) == "ein <unk> x"
    assert tokenizers["sentencepiece"].decode([7, 3, 10]) == "a \u2047 ."


def test_control_tokens_are_shown_on_demand(tokenizers):
    assert tokenizers["words"].decode([0, 4, 5, 2], skip_special_tokens=False) == "<s> a man </s>"
    assert tokenizers["subtokens"].decode([2, 3, 1], skip_special_tokens=False) == "ein mann<EOS>_"


@given(st.lists(st.sampled_from(ENGLISH), max_size=9))
def test_known_words_come_back(tokenizers, names):
    tokenizer = tokenizers["words"]
    assert tokenizer.decode(tokenizer(text_target="  ".join(names))["input_ids"]) == " ".join(names)


@settings(deadline=None)
@given(st.text(LETTERS, max_size=30))
def test_known_characters_come_back(tokenizers, text):
    for kind in ("characters", "spaced characters"):
        tokenizer = tokenizers[kind]
        assert tokenizer.decode(tokenizer(text_target=text)["input_ids"]) == text
        assert tokenizer.decode(tokenizer(text)["input_ids"], side="source") == text


@settings(deadline=None)
@given(TEXT)
def test_subtokens_give_every_text_back(tokenizers, text):
    tokenizer = tokenizers["subtokens"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


# ------------------------------------------------------------------ Moses
def test_mosess_tokens_are_looked_up_and_put_together_again():
    names = [
        "er",
        "sagt",
        ":",
        "&quot;",
        "a",
        "&amp;",
        "b",
        "rot",
        "@-@",
        "grün",
        "rot-grün",
        ".",
        "&apos;s",
        "it",
        "z.b.",
    ]
    options = {"segmentation": "words", "moses": ("de", "en"), **NAMES}
    tokenizer = build_tokenizer(CONTROLS + names, None, **options)
    text = 'er sagt: "a & b" rot-grün z.b. er.'
    assert tokenizer.tokenize(text) == [
        "er", "sagt", ":", "&quot;", "a", "&amp;", "b", "&quot;", "rot-grün", "z.b.", "er", ".",
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.decode(tokenizer(text_target="it's a.")["input_ids"]) == "it's a."
    split = build_tokenizer(CONTROLS + names, None, moses_aggressive_hyphens=True, **options)
    assert split.tokenize("rot-grün") == ["rot", "@-@", "grün"]
    assert split.decode(split("rot-grün")["input_ids"]) == "rot-grün"
    plain = build_tokenizer([*CONTROLS, "a", "&", "&amp;"], None, moses_escape=False, **options)
    assert plain.tokenize("a&a") == ["a", "&", "a"]
    assert plain.decode(plain("a &amp; a")["input_ids"], skip_special_tokens=True).startswith("a")


def test_punctuation_is_normalised_where_asked():
    names = [*CONTROLS, "&quot;", "a", "„", "“"]
    options = {"segmentation": "words", "moses": ("de", "de"), **NAMES}
    assert build_tokenizer(names, None, **options).tokenize("„a“") == ["„", "a", "“"]
    assert build_tokenizer(names, None, moses_normalize=True, **options).tokenize("„a“") == ["&quot;", "a", "&quot;"]


def test_text_is_lowercased_after_moses():
    names = [*CONTROLS, "mr.", "mr", ".", "ein", "ß", "i̇"]
    lower = {"segmentation": "words", "lowercase": True, **NAMES}
    # Only with its capital does Moses know this to be an abbreviation.
    assert build_tokenizer(names, None, moses=("en", "en"), **lower).tokenize("Mr. Ein") == ["mr.", "ein"]
    assert build_tokenizer(names, None, **lower).tokenize("EIN İ") == ["ein", "i̇"]


def test_moses_comes_before_the_pieces(codes_file):
    tokenizer = build_tokenizer(
        [*CONTROLS, "ein", "mann", ":", "und", "."], None, segmentation="subword-nmt", codes=codes_file, lowercase=True,
        moses=("de", "de"), **NAMES,
    )  # fmt: skip
    assert tokenizer.tokenize("Ein Mann: und.") == ["ein", "mann", ":", "und", "."]
    assert tokenizer.decode(tokenizer("Ein Mann: und.")["input_ids"]) == "ein mann: und."


def test_one_object_of_moses_serves_all(tokenizers):
    tokenizers["moses"](LINES)
    made = _moses.cache_info().misses
    copy.deepcopy(tokenizers["moses"])(LINES)
    assert _moses.cache_info().misses == made


# ------------------------------------------------------------------ saving and loading
def saved_and_loaded(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), "d_model": 16, "num_attention_heads": 2}
    VaswaniConfig(**sizes, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_auto_tokenizer_gives_back_the_same(tokenizers, kind, tmp_path):
    tokenizer = tokenizers[kind]
    loaded = saved_and_loaded(tokenizer, tmp_path / "one")
    assert type(loaded) is VaswaniForeignTokenizer
    same(tokenizer, loaded)
    again = saved_and_loaded(loaded, tmp_path / "two")
    same(tokenizer, again)
    for file in ("tokenizer.json", "target_tokenizer.json", "bpe.codes", "target_bpe.codes", "source.spm"):
        one, two = tmp_path / "one" / file, tmp_path / "two" / file
        assert one.exists() == two.exists()
        assert not one.exists() or one.read_bytes() == two.read_bytes()
    assert str(tmp_path) not in (tmp_path / "two" / "tokenizer_config.json").read_text()


def test_a_folder_has_the_files_that_it_needs_and_no_others(tokenizers, tmp_path):
    extra = {
        "shared words": set(), "words": {"target_tokenizer.json"}, "subword-nmt": {"bpe.codes"},
        "two subword-nmt": {"target_tokenizer.json", "bpe.codes"}, "sentencepiece": {"source.spm"},
        "two sentencepiece": {"target_tokenizer.json", "source.spm"}, "subtokens": set(),
    }  # fmt: skip
    for kind, expected in extra.items():
        written = tokenizers[kind].save_pretrained(tmp_path / kind)
        names = {path.name for path in (tmp_path / kind).iterdir() if path.suffix != ".py"}
        assert names == expected | {"tokenizer.json", "tokenizer_config.json"}
        assert {Path(path).name for path in written} == names


def test_two_sentencepiece_models_stay_two(spm_file, tmp_path):
    from test_foreign_segmentation import model_of

    other = tmp_path / "other.model"
    other.write_bytes(model_of({"▁": -1.0, "a": -1.5, "b": -1.5, "▁ab": -9.0}))
    tokenizer = build_tokenizer(
        [*CONTROLS, "▁ab", "▁", "a", "b"], None, segmentation="sentencepiece", source_spm=spm_file, target_spm=other,
        **NAMES,
    )  # fmt: skip
    for each in (tokenizer, saved_and_loaded(tokenizer, tmp_path / "saved")):
        found = each("ab", text_target="ab")
        assert (found["input_ids"], found["labels"]) == ([4, 2], [5, 6, 7, 2])


def test_two_files_of_codes_stay_two(codes_file, tmp_path):
    other = tmp_path / "other.code"
    other.write_text("#version: 0.2\nn n</w>\n", encoding="utf-8")
    tokenizer = build_tokenizer(
        [*CONTROLS, "mann", "m@@", "a@@", "nn"], None, segmentation="subword-nmt", codes=codes_file, target_codes=other,
        **NAMES,
    )  # fmt: skip
    for each in (tokenizer, saved_and_loaded(tokenizer, tmp_path / "saved")):
        found = each("mann", text_target="mann")
        assert (found["input_ids"], found["labels"]) == ([4, 2], [5, 6, 7, 2])


def test_files_of_an_earlier_tokenizer_in_the_folder_do_no_harm(tokenizers, tmp_path):
    tokenizers["two subword-nmt"].save_pretrained(tmp_path)
    same(tokenizers["shared words"], saved_and_loaded(tokenizers["shared words"], tmp_path))


def test_lengths_of_a_call_are_not_saved(tokenizers, tmp_path):
    tokenizers["words"]("ein mann", text_target="a man", truncation=True, max_length=2, padding="max_length")
    tokenizers["words"].save_pretrained(tmp_path)
    for name in ("tokenizer.json", "target_tokenizer.json"):
        backend = Tokenizer.from_file(str(tmp_path / name))
        assert backend.truncation is None
        assert backend.padding is None


def run(script, *arguments):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


WITHOUT_PACKAGE = """if True:
    import json, sys
    sys.modules["hf_vaswani"] = sys.modules["sacremoses"] = None  # an import of it fails, installed or not
    from transformers import AutoTokenizer
    lines, found = json.loads(sys.argv[1]), []
    for folder in sys.argv[2:]:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        if tokenizer.moses is not None:
            try:
                tokenizer("ein")
            except ImportError as error:
                assert "pip install sacremoses" in str(error)
            else:
                raise AssertionError("no error without sacremoses")
            del sys.modules["sacremoses"]
        tokenizer.save_pretrained(folder + "/again")
        again = AutoTokenizer.from_pretrained(folder + "/again", trust_remote_code=True)
        ids = tokenizer(lines, text_target=lines)
        assert again(lines, text_target=lines).data == ids.data
        found.append([type(tokenizer).__name__, ids["input_ids"], ids["labels"], tokenizer.batch_decode(ids["labels"])])
    print(json.dumps(found))
"""


def test_folders_work_without_the_package_and_all_but_one_without_sacremoses(tokenizers, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    for i, kind in enumerate(KINDS):
        saved_and_loaded(tokenizers[kind], tmp_path / str(i))
    found = json.loads(run(WITHOUT_PACKAGE, json.dumps(LINES), *(tmp_path / str(i) for i in range(len(KINDS)))))
    for kind, (name, sources, targets, texts) in zip(KINDS, found, strict=True):
        expected = tokenizers[kind](LINES, text_target=LINES)
        assert name == "VaswaniForeignTokenizer"
        assert (sources, targets) == (expected["input_ids"], expected["labels"])
        assert texts == tokenizers[kind].batch_decode(expected["labels"])


@pytest.mark.parametrize(
    ("file", "problem"),
    [("target_tokenizer.json", "target_tokenizer.json"), ("bpe.codes", "`codes_file` \\(bpe.codes\\)")],
)
def test_a_missing_file_is_named(tokenizers, tmp_path, file, problem):
    tokenizers["two subword-nmt"].save_pretrained(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(ValueError, match=problem):
        VaswaniForeignTokenizer.from_pretrained(tmp_path)


def test_a_damaged_file_is_named(tokenizers, tmp_path):
    tokenizers["sentencepiece"].save_pretrained(tmp_path)
    content = (tmp_path / "source.spm").read_bytes()
    (tmp_path / "source.spm").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"source\.spm: no SentencePiece model, or a damaged one"):
        VaswaniForeignTokenizer.from_pretrained(tmp_path)


def test_an_unknown_segmentation_is_refused(tokenizers, tmp_path):
    tokenizers["words"].save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`segmentation` must be one of words, .*, got 'syllables'"):
        VaswaniForeignTokenizer.from_pretrained(tmp_path, segmentation="syllables")


# ------------------------------------------------------------------ everyday use
@pytest.mark.parametrize("kind", KINDS)
def test_pickles_and_copies_are_the_same(tokenizers, kind):
    same(pickle.loads(pickle.dumps(tokenizers[kind])), tokenizers[kind])
    same(copy.deepcopy(tokenizers[kind]), tokenizers[kind])


def test_threads_keep_sides_and_lengths_apart(tokenizers):
    tokenizer = tokenizers["words"]

    def work(number):
        found = []
        for _ in range(60):
            if number % 3 == 0:
                found.append(tokenizer("ein mann und hund", truncation=True, max_length=2 + number)["input_ids"])
            elif number % 3 == 1:
                found.append(tokenizer(text_target="the car and dog", padding="max_length", max_length=9)["input_ids"])
            else:
                found.append([sorted(tokenizer.get_vocab()), tokenizer.decode([4, 5])])
        return found

    expected = [work(number)[0] for number in range(9)]
    with ThreadPoolExecutor(9) as threads:
        for result, wanted in zip(threads.map(work, range(9)), expected, strict=True):
            assert result == [wanted] * 60


def test_the_librarys_collator_pads_it(tokenizers):
    tokenizer = tokenizers["words"]
    rows = [tokenizer(*pair[:1], text_target=pair[1]) for pair in (("ein mann", "a"), ("hund", "the dog and car"))]
    batch = DataCollatorForSeq2Seq(tokenizer)(rows)
    assert batch["input_ids"].tolist() == [[4, 5, 2], [6, 2, 1]]
    assert batch["labels"].tolist() == [[4, 2, -100, -100, -100], [8, 6, 7, 12, 2]]
    assert tokenizer.batch_decode(batch["labels"]) == ["a", "the dog and car"]


def test_the_translation_pipeline_uses_both_sides(tokenizers, tmp_path):
    tokenizer = tokenizers["words"]
    config = VaswaniConfig(
        vocab_size=len(tokenizer), source_vocab_size=len(tokenizer.get_src_vocab()), d_model=16, encoder_layers=2,
        decoder_layers=1, num_attention_heads=2, d_k=5, d_v=7, d_ff=24, pad_token_id=1, eos_token_id=2, bos_token_id=0,
        decoder_start_token_id=2,
    )  # fmt: skip
    torch.manual_seed(1)
    model = VaswaniForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    lines = ["ein mann", "hund und auto", "</s> doctor"]
    translate = pipeline("translation", model=str(tmp_path), max_length=6, num_beams=1)
    assert type(translate.tokenizer) is VaswaniForeignTokenizer
    texts = [one["translation_text"] for one in translate(lines)]
    for line, text in zip(lines, texts, strict=True):
        ids = torch.tensor([tokenizer(line)["input_ids"]])
        assert tokenizer.decode(model.generate(ids, max_length=6, num_beams=1)[0]) == text
    assert any(texts)
    assert {word for text in texts for word in text.split()} <= {*ENGLISH, "<unk>"}


def test_a_plain_tokenizer_class_reads_the_vocabulary(tokenizers, tmp_path):
    """Whoever ignores the class still gets ids and names of the source side."""
    tokenizers["shared words"].save_pretrained(tmp_path)
    plain = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert plain.get_vocab() == tokenizers["shared words"].get_vocab()
    assert plain(["ein", "mann"], is_split_into_words=True)["input_ids"] == [4, 5, 2]


def test_tokens_can_be_added_to_one_vocabulary(tmp_path):
    tokenizer = build_tokenizer(CONTROLS + ENGLISH, None, segmentation="words", **NAMES)
    assert tokenizer.add_tokens(["{name}"]) == 1
    assert len(tokenizer) == len(CONTROLS + ENGLISH) + 1
    for each in (tokenizer, saved_and_loaded(tokenizer, tmp_path)):
        assert each("a{name}the")["input_ids"] == [4, 13, 8, 2]
        assert each.decode([4, 13, 8, 2]) == "a {name} the"
        assert each("a</s>the{name}")["input_ids"] == [3, 13, 2]  # one unknown word, as without added tokens
    tokenizer.add_special_tokens({"extra_special_tokens": ["<2de>"]})
    assert tokenizer("<2de> a")["input_ids"] == [3, 4, 2]
    assert tokenizer("<2de> a", split_special_tokens=False)["input_ids"] == [14, 4, 2]


def test_no_token_can_be_added_to_two_vocabularies():
    tokenizer = words()
    with pytest.raises(ValueError, match="'new' would need a row in two matrices"):
        tokenizer.add_tokens(["new"])
    assert tokenizer.add_tokens(["mann"]) == 0
    assert len(tokenizer) == len(CONTROLS + ENGLISH)


def test_no_other_vocabulary_is_learned_in_its_place(tokenizers):
    with pytest.raises(NotImplementedError, match=r"VaswaniTokenizer\.train"):
        tokenizers["words"].train_new_from_iterator(iter(["a"]), 20)


def test_the_code_that_travels_is_whole(tokenizers, tmp_path):
    tokenizers["words"].save_pretrained(tmp_path)
    package = Path(sys.modules["hf_vaswani"].__file__).parent
    names = {path.name for path in tmp_path.glob("*.py")}
    assert "foreign_tokenization_vaswani.py" in names
    for name in names:
        assert (tmp_path / name).read_text() == (package / name).read_text()
