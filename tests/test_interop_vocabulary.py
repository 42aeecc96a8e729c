"""What a vocabulary of another toolkit must be like, before anything is made of it."""

import pytest
from test_foreign_segmentation import UNIGRAM, model_of

from hf_vaswani.interop.foreign import ConversionError
from hf_vaswani.interop.vocabulary import SEGMENTATIONS, build_tokenizer

CONTROLS = ["<s>", "<pad>", "</s>", "<unk>"]
NAMES = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>", "bos": "<s>"}


def build(source=(*CONTROLS, "a", "b"), target=None, segmentation="words", **options):
    return build_tokenizer(source, target, segmentation=segmentation, **{**NAMES, **options})


@pytest.fixture
def files(tmp_path):
    names = {"codes": "made.code", "source_spm": "one.model", "target_spm": "two.model"}
    paths = {option: tmp_path / name for option, name in names.items()}
    paths["codes"].write_text("#version: 0.2\na b</w>\n")
    paths["source_spm"].write_bytes(model_of(UNIGRAM))
    paths["target_spm"].write_bytes(model_of({**UNIGRAM, "c": -3.0}))
    return paths


@pytest.mark.parametrize("kind", SEGMENTATIONS)
def test_every_segmentation_makes_a_tokenizer(kind, files):
    given = {"subword-nmt": ["codes"], "sentencepiece": ["source_spm", "target_spm"]}.get(kind, [])
    pieces = [*CONTROLS, "ab", *"ab_\\u;0123456789▁"]
    tokenizer = build(pieces, segmentation=kind, **{name: files[name] for name in given})
    assert tokenizer("")["input_ids"] == [2]
    assert tokenizer.segmentation == kind


@pytest.mark.parametrize("side", ["shared", "source", "target"])
def test_a_repeated_piece_is_named_with_both_ids(side):
    good, twice = [*CONTROLS, "a"], [*CONTROLS, "a", "b", "a"]
    sides = {"shared": (twice, None), "source": (twice, good), "target": (good, twice)}[side]
    with pytest.raises(ConversionError, match=f"{side} vocabulary has 'a' twice, with the ids 4 and 6"):
        build(*sides)


def test_an_empty_piece_is_refused_with_its_id():
    with pytest.raises(ConversionError, match="target vocabulary's piece with id 5 is empty"):
        build(CONTROLS, [*CONTROLS, "a", "", "b"])


@pytest.mark.parametrize("name", ["pad", "unk"])
@pytest.mark.parametrize("side", ["source", "target"])
def test_padding_and_unknown_must_be_on_both_sides(name, side):
    less = [piece for piece in CONTROLS if piece != NAMES[name]]
    sides = (less, CONTROLS) if side == "source" else (CONTROLS, less)
    with pytest.raises(
        ConversionError, match=f"{side} vocabulary has no '<{name}>' \\(the {name} piece\\); it begins '<s>'"
    ):
        build(*sides, source_suffix=(), target_suffix=())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"eos": "<end>"}, "no '<end>' \\(the eos piece\\)"),
        ({"bos": "<begin>"}, "no '<begin>' \\(the bos piece\\)"),
        ({"start": "<go>"}, "no '<go>' \\(the start piece\\)"),
        ({"source_prefix": ["<2de>"]}, "no '<2de>' \\(the source prefix or suffix piece\\)"),
        ({"target_suffix": ["<end>"]}, "no '<end>' \\(the target prefix or suffix piece\\)"),
    ],
)
def test_a_missing_control_piece_is_named(options, problem):
    with pytest.raises(ConversionError, match=f"shared vocabulary has {problem}"):
        build(**options)


@pytest.mark.parametrize("name", ["pad", "eos", "bos"])
def test_a_control_piece_with_two_ids_is_refused(name):
    piece = NAMES[name]
    other = [*[one for one in CONTROLS if one != piece], "a", piece]
    place = CONTROLS.index(piece)
    # The others move too, so that the first one in this order is named; each is enough by itself.
    with pytest.raises(ConversionError, match=r"has id \d in the source vocabulary and \d in the target's.*Reorder"):
        build(CONTROLS, other)
    swapped = [*CONTROLS, "a"]
    swapped[place], swapped[4] = swapped[4], swapped[place]
    with pytest.raises(ConversionError, match=f"The {name} piece '{piece}' has id {place} in .* and 4 in the target's"):
        build(CONTROLS, swapped)


def test_the_start_is_the_targets():
    tokenizer = build([*CONTROLS, "a", "<go>"], [*CONTROLS, "<go>", "a"], start="<go>", bos=None)
    assert tokenizer.decode([4, 5, 2]) == "a"
    assert tokenizer("a <go>")["input_ids"] == [4, 3, 2]


def test_the_unknown_piece_may_have_two_ids():
    tokenizer = build([*CONTROLS, "a"], ["<s>", "<pad>", "</s>", "a", "<unk>"])
    assert tokenizer("x", text_target="x")["input_ids"] == [3, 2]
    assert tokenizer(text_target="x a")["input_ids"] == [4, 3, 2]
    assert tokenizer.decode([4, 3]) == "<unk> a"


@pytest.mark.parametrize(
    ("segmentation", "given", "problem"),
    [
        ("words", ["codes"], "made.code: `codes` has no use with pieces of the kind 'words'"),
        ("subtokens", ["source_spm"], "one.model: `source_spm` has no use"),
        ("sentencepiece", ["codes", "source_spm"], "`codes` has no use"),
        ("subword-nmt", [], "'subword-nmt' need `codes`"),
        ("sentencepiece", ["target_spm"], "'sentencepiece' need `source_spm`"),
    ],
)
def test_files_that_lack_or_have_no_use_are_refused(files, segmentation, given, problem):
    with pytest.raises(ConversionError, match=problem):
        build(segmentation=segmentation, **{name: files[name] for name in given})


@pytest.mark.parametrize(("option", "kind"), [("codes", "subword-nmt"), ("source_spm", "sentencepiece")])
def test_a_file_that_is_not_there_is_named(tmp_path, option, kind):
    with pytest.raises(ConversionError, match=f"nowhere.bin \\(`{option}`\\) is not a file"):
        build(segmentation=kind, **{option: tmp_path / "nowhere.bin"})


@pytest.mark.parametrize(
    ("option", "content", "problem"),
    [
        ("codes", b"#version: 0.2\na b c\n", "made.code: line 2: 'a b c' is no merge"),
        ("codes", b"#version: 0.2\na \xff\n", "made.code: .*utf-8"),
        ("codes", b"#version: 7\na b\n", "made.code: line 1: codes of format 7"),
        ("source_spm", b"words and words", "one.model: no SentencePiece model"),
        ("target_spm", model_of(UNIGRAM)[:-9], "two.model: no SentencePiece model, or a damaged one"),
    ],
)
def test_a_damaged_file_is_named(files, option, content, problem):
    files[option].write_bytes(content)
    kind, given = ("subword-nmt", ["codes"]) if option == "codes" else ("sentencepiece", ["source_spm", "target_spm"])
    with pytest.raises(ConversionError, match=problem):
        build(segmentation=kind, **{name: files[name] for name in given})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"segmentation": "syllables"}, "`segmentation` must be one of words, .*, got 'syllables'"),
        ({"character_space": "▁"}, "`character_space` has no use"),
        ({"restrict": True}, "`restrict` has no use"),
        ({"moses_normalize": True}, "need the languages"),
        ({"moses_escape": False}, "need the languages"),
        ({"moses_aggressive_hyphens": True}, "need the languages"),
    ],
)
def test_options_that_would_change_nothing_are_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        build(**options)


def test_pieces_that_need_care_in_json_or_yaml_survive():
    names = ["#", "&", "no", "~", '"', "\\", "12:30", "\u2028", "é", "e\u0301", "好", "👩‍💻"]
    tokenizer = build([*CONTROLS, *names])
    assert tokenizer.get_src_vocab() == {name: i for i, name in enumerate([*CONTROLS, *names])}
    assert tokenizer('# & no ~ " \\ 12:30 é e\u0301 好 👩‍💻')["input_ids"] == [*range(4, 11), *range(12, 16), 2]
