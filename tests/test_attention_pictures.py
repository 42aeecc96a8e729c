"""Figures 3 to 5: pictures of many heads, words instead of pieces, and the command that draws them."""

import json
import sys
from itertools import pairwise

import pytest
import torch

from hf_vaswani import VaswaniTokenizer
from hf_vaswani.analysis import AttentionWeights, attention_weights, draw_attentions, merge_words
from hf_vaswani.analysis.attention import find_piece
from hf_vaswani.analysis.head_masks import Head
from hf_vaswani.analysis.heat_map import MAX_PIECES
from hf_vaswani.analysis.line_drawing import MAX_HEADS, head_colours
from hf_vaswani.analysis.pruning import prune_heads
from hf_vaswani.analysis.words import word_groups
from hf_vaswani.cli.main import main

pytest.importorskip("matplotlib")
SOURCE, TARGET = "Ein Hund schläft, ein Hund.", "A dog is asleep."


def rows_of_ones(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).softmax(dim=-1)


def weights(source, target, layers=2, heads=3, **changes):
    """Random weights over given pieces."""
    s, t = len(source), len(target)
    return AttentionWeights(
        encoder=[rows_of_ones(heads, s, s, seed=i) for i in range(layers)],
        decoder=[rows_of_ones(heads, t, t, seed=10 + i) for i in range(layers)],
        cross=[rows_of_ones(heads, t, s, seed=20 + i) for i in range(layers)],
        source_ids=[*range(s)],
        target_ids=[*range(t)],
        source_pieces=source,
        target_pieces=target,
        decoder_pieces=["</s>", *target[:-1]],
        source="".join(source),
        target="".join(target),
        **changes,
    )


LONG = [f"␣Wort{i}" if i % 3 else "heitsgesetz" for i in range(40)]
LONG[7], LONG[8] = "␣Donaudampfschifffahrtsgesellschaft", "שלום"
FORTY = weights(LONG, [f"␣w{i}" for i in range(43)])


def extents(figure):
    """Every text that is drawn, with its box."""
    from matplotlib.text import Text

    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    shown = [one for one in figure.findobj(Text) if one.get_text() and one.get_visible()]
    return [(one, one.get_window_extent(renderer)) for one in shown]


def lightness(colour):
    red, green, blue = colour[:3]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


# --------------------------------------------------------------------------- what a reader sees
@pytest.mark.parametrize(
    "options",
    [
        {"heads": "mean"},
        {"heads": [0, 2]},
        {"layers": "all"},
        {"kind": "encoder", "layers": [0], "heads": [1]},
        {"kind": "decoder", "picture": "lines"},
        {"picture": "lines", "layers": "all"},
        {"picture": "lines", "query": 7, "kind": "encoder"},
    ],
)
def test_forty_pieces_are_labelled_inside_the_picture_and_no_label_covers_another(options, tmp_path):
    figure = draw_attentions(FORTY, **options)
    boxes = extents(figure)
    for text, box in boxes:
        assert figure.bbox.x0 <= box.x0, text
        assert box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0, text
        assert box.y1 <= figure.bbox.y1, text
    pieces = [(text, box) for text, box in boxes if "w" in text.get_text() or text.get_text() in LONG]
    assert len(pieces) >= 40 + 40
    for (one, a), (other, b) in ((x, y) for i, x in enumerate(pieces) for y in pieces[i + 1 :]):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(across, down) <= 2.5, (one, other)  # of the line height, what no letter fills
    assert all(text.get_fontsize() >= 7 for text, _ in pieces)


def test_a_heat_map_has_a_panel_for_each_layer_and_head_with_its_matrix_on_one_scale():
    figure = draw_attentions(FORTY, layers="all", heads=[2, 0])
    images = [axes.images[0] for axes in figure.axes if axes.images]
    expected = [FORTY.cross[layer][head] for layer in (0, 1) for head in (2, 0)]
    assert len(images) == 4
    for image, matrix in zip(images, expected, strict=True):
        torch.testing.assert_close(torch.tensor(image.get_array().tolist()), matrix)
        assert image.get_clim() == pytest.approx((0, max(float(one.max()) for one in expected)))
    captions = [axes.get_xlabel() for axes in figure.axes if axes.images]
    assert captions == ["layer 0, head 2", "layer 0, head 0", "layer 1, head 2", "layer 1, head 0"]


def test_the_map_grows_darker_all_the_way():
    from matplotlib import colormaps

    shades = [lightness(colormaps["Blues"](i / 50)) for i in range(51)]
    assert all(later < earlier for earlier, later in pairwise(shades))


@pytest.mark.parametrize("count", [2, 3, 8, 16])
def test_heads_are_told_apart_in_grey(count):
    shades = [lightness(colour) for colour in head_colours(count)]
    assert all(later - earlier > 0.5 / count for earlier, later in pairwise(shades))
    assert shades[-1] < 0.75  # still seen on white


def lines_of(figure):
    """(from, to, strength, style) of every line, drawing by drawing and head by head."""
    return [
        [
            (round(path.vertices[0][1]), round(path.vertices[1][1]), round(float(colour[3]), 4), style)
            for path, colour, style in zip(
                group.get_paths(), group.get_colors(), group.get_linestyles() * len(group.get_paths()), strict=False
            )
        ]
        for axes in figure.axes
        for group in axes.collections
    ]


def test_lines_lead_from_each_piece_to_what_it_looks_at_as_strong_as_the_weight():
    found = weights(["a", "b", "c"], ["x", "y"], layers=1, heads=2)
    groups = lines_of(draw_attentions(found, picture="lines"))
    assert len(groups) == 2
    for head, group in enumerate(groups):
        assert {(q, k): s for q, k, s, _ in group} == {
            (q, k): round(float(found.cross[0][head, q, k]), 4) for q in range(2) for k in range(3)
        }
    styles = [str(group[0][3]) for group in groups]
    assert styles[0] != styles[1]


def test_one_query_shows_its_own_lines_alone():
    found = weights(["a", "␣b", "c"], ["x", "␣y"], layers=1, heads=2)
    for query in (1, "␣y", "y"):
        groups = lines_of(draw_attentions(found, picture="lines", query=query))
        assert {q for group in groups for q, *_ in group} == {1}
        assert len(groups) == 2
    with pytest.raises(ValueError, match="no piece is 'z'; name one by its place: 0:x 1:␣y"):
        find_piece(["x", "␣y"], "z")
    with pytest.raises(ValueError, match="several pieces are 'x'"):
        find_piece(["x", "␣x"], "x")
    with pytest.raises(ValueError, match="no piece 2"):
        find_piece(["x", "␣x"], 2)
    with pytest.raises(ValueError, match="`query` is for lines"):
        draw_attentions(found, query=1)


# --------------------------------------------------------------------------- limits
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [2]}, "the decoder has 2 layers"),
        ({"layers": [-3], "kind": "encoder"}, "the encoder has 2 layers"),
        ({"layers": []}, "choose at least one"),
        ({"layers": "none"}, '"all" or numbers'),
        ({"heads": [3]}, "head 3 does not exist: layer 1 .cross. has heads 0 to 2"),
        ({"heads": [-1]}, "head -1 does not exist"),
        ({"heads": []}, "choose at least one"),
        ({"heads": "some"}, '"all", "mean" or numbers'),
        ({"kind": "self"}, "encoder, decoder, cross"),
        ({"picture": "pie"}, "heat, lines"),
    ],
)
def test_what_does_not_exist_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        draw_attentions(FORTY, **options)


@pytest.mark.parametrize("picture", ["heat", "lines"])
def test_a_sentence_longer_than_a_picture_is_refused_with_both_numbers(picture):
    long = weights(["w"] * (MAX_PIECES + 1), ["x"], layers=1, heads=1)
    with pytest.raises(
        ValueError, match=f"holds {MAX_PIECES} pieces on a side, and this sentence has {MAX_PIECES + 1}"
    ):
        draw_attentions(long, picture=picture)


def test_more_panels_or_heads_than_can_be_looked_at_are_refused():
    many = weights(["w"] * 100, ["x"] * 100, layers=6, heads=MAX_HEADS + 1)
    with pytest.raises(ValueError, match="inches, more than can be looked at"):
        draw_attentions(many, layers="all")
    with pytest.raises(ValueError, match=f"tells {MAX_HEADS} heads apart, and {MAX_HEADS + 1}"):
        draw_attentions(many, picture="lines")


def test_heads_keep_their_numbers_after_pruning():
    found = weights(["a", "b"], ["x", "y", "z"], layers=2, heads=2, pruned_heads={"cross.1": [1, 5]})
    assert found.head_numbers("cross", -1) == [1, 5]
    torch.testing.assert_close(found.head("cross", 1, 5), found.cross[1][1])
    figure = draw_attentions(found, heads="all")
    assert [axes.get_xlabel() for axes in figure.axes if axes.images] == ["head 1", "head 5"]
    with pytest.raises(ValueError, match=r"has heads \[1, 5\]"):
        draw_attentions(found, heads=[0])
    with pytest.raises(ValueError, match="different heads"):
        draw_attentions(found, layers="all", picture="lines")


# --------------------------------------------------------------------------- words
def test_pieces_are_grouped_to_words():
    pieces = ["Ein", "␣Hu", "nd", ",", "␣", "␣der", "a␣", "b", "</s>"]
    assert word_groups(pieces) == [[0], [1, 2, 3], [4], [5, 6], [7], [8]]


def test_merged_weights_are_sums_over_what_is_seen_and_means_over_who_sees():
    found = weights(["Ein", "␣Hu", "nd", "</s>"], ["A", "␣d", "o", "g", "</s>"])
    merged = merge_words(found)
    assert merged.source_pieces == ["Ein", "Hund", "</s>"]
    assert merged.target_pieces == ["A", "dog", "</s>"]
    assert merged.decoder_pieces == ["</s>", "A", "dog"]
    sides = {"source": [[0], [1, 2], [3]], "target": [[0], [1, 2, 3], [4]], "decoder": [[0], [1], [2, 3, 4]]}
    for kind, (rows, columns) in {
        "encoder": ("source", "source"),
        "cross": ("target", "source"),
        "decoder": ("target", "decoder"),
    }.items():
        for before, after in zip(found.of_kind(kind), merged.of_kind(kind), strict=True):
            for head in range(3):
                for i, row in enumerate(sides[rows]):
                    for j, column in enumerate(sides[columns]):
                        expected = sum(float(before[head, q, k]) for q in row for k in column) / len(row)
                        assert float(after[head, i, j]) == pytest.approx(expected, abs=1e-6)
            torch.testing.assert_close(after.sum(dim=-1), torch.ones(after.shape[:-1]))


# --------------------------------------------------------------------------- a model
@pytest.fixture(scope="module")
def tokenizer():
    return VaswaniTokenizer.train([SOURCE, TARGET] * 3, vocab_size=280, allow_fewer=True)


@pytest.fixture
def model(make_model, tokenizer):
    return make_model(vocab_size=len(tokenizer))


def test_one_call_gives_the_weights_of_a_forced_pass_over_the_models_own_translation(model, tokenizer):
    """Row 62: not the pieces of weights that `generate` gives step by step, and with SDPA as the model came."""
    model.generation_config.max_length_offset = 3
    assert model.config._attn_implementation == "sdpa"
    found = attention_weights(model, tokenizer, SOURCE, num_beams=3)
    assert model.config._attn_implementation == "sdpa"
    s, t = len(found.source_ids), len(found.target_ids)
    assert s != t
    shapes = {"encoder": (s, s), "decoder": (t, t), "cross": (t, s)}
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor([found.source_ids]),
            labels=torch.tensor([found.target_ids]),
            output_attentions=True,
        )
    for kind, name in (("encoder", "encoder"), ("decoder", "decoder"), ("cross", "cross")):
        for ours, theirs in zip(found.of_kind(kind), out[f"{name}_attentions"], strict=True):
            assert ours.shape[1:] == shapes[kind]
            torch.testing.assert_close(ours, theirs[0])
            torch.testing.assert_close(ours.sum(dim=-1), torch.ones(ours.shape[:-1]))
    searched = model.generate(**tokenizer(SOURCE, return_tensors="pt"), num_beams=3, max_length_offset=3)
    assert searched[0, 1 : 1 + t].tolist() == found.target_ids


def test_search_settings_with_a_given_target_are_refused(model, tokenizer):
    with pytest.raises(ValueError, match="num_beams would change nothing"):
        attention_weights(model, tokenizer, SOURCE, TARGET, num_beams=3)


@pytest.mark.parametrize("kinds", [(), ("encoder",), ("decoder", "cross")])
def test_bertviz_takes_our_outputs(make_model, tokenizer, kinds):
    """With stacks unlike in depth, and a layer that lost heads."""
    bertviz = pytest.importorskip("bertviz", reason="needs bertviz")
    model = make_model(vocab_size=len(tokenizer), encoder_layers=3, decoder_layers=2)
    found = attention_weights(prune_heads(model, [Head("encoder", 1, 0)]), tokenizer, SOURCE, TARGET)
    assert len(found.encoder[1]) < len(found.encoder[0])
    given = found.for_bertviz(*kinds)
    assert given["include_layers"] == list(range(3 if kinds == ("encoder",) else 2))
    for view in (bertviz.head_view, bertviz.model_view):
        page = view(**given, html_action="return").data
        pieces = {"encoder": found.source_pieces[0], "decoder": found.decoder_pieces[1]}
        for piece in (pieces[kind] for kind in kinds or pieces if kind in pieces):
            assert json.dumps(piece)[1:-1] in page


# --------------------------------------------------------------------------- the command
@pytest.fixture
def folder(model, tokenizer, tmp_path):
    model.generation_config.max_length_offset = 2
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def run(*arguments):
    return main(["attention", *map(str, arguments)])


def test_the_command_writes_pictures_and_a_page_and_prints_their_names(folder, capsys):
    names = [folder / f"out.{ending}" for ending in ("png", "svg", "pdf", "html")]
    outputs = [word for name in names for word in ("-o", name)]
    assert run(folder / "model", SOURCE, "--target", TARGET, "--layers", "0,-1", "--heads", "1", *outputs) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [str(name) for name in names]
    assert f"{SOURCE} -> {TARGET}" in said.err
    heads = [b"\x89PNG", b"<?xml", b"%PDF", b"<!DOCTYPE html>"]
    for name, head in zip(names, heads, strict=True):
        assert name.read_bytes().startswith(head)
    assert sorted(one.name for one in folder.iterdir()) == sorted(["model", *(name.name for name in names)])
    from PIL import Image

    width, height = Image.open(names[0]).size
    assert min(width, height) > 300


def test_the_command_draws_the_models_own_translation_of_a_line_of_standard_input(folder, monkeypatch, capsys):
    from io import BytesIO, TextIOWrapper

    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(SOURCE.encode() + b"\n"), encoding="utf-8"))
    monkeypatch.chdir(folder)
    assert run("model", "--picture", "lines", "--words", "--beams", 2, "--kind", "encoder") == 0
    assert capsys.readouterr().out == "attention.html\n"
    assert SOURCE in (folder / "attention.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "7"], "the decoder has 3 layers"),
        (["--heads", "9", "-o", "a.png"], "head 9 does not exist"),
        (["-o", "a.gif"], "a.gif: the ending must be one of .png, .svg, .pdf, .html"),
        (["-o", "none/a.png"], "there is no folder none"),
        (["--beams", "2"], "leave one out"),
        (["--query", "Hund"], "--query is for --picture lines"),
        (["--picture", "lines", "--query", "Katze", "-o", "a.png"], "no piece is 'Katze'"),
    ],
)
def test_the_command_says_what_is_wrong_and_leaves_no_file(folder, monkeypatch, capsys, options, message):
    monkeypatch.chdir(folder)
    assert run("model", SOURCE, "--target", TARGET, *options) == 2
    assert message in capsys.readouterr().err
    assert [one.name for one in folder.iterdir()] == ["model"]


def test_a_folder_is_not_taken_for_a_file(folder, capsys):
    (folder / "a.png").mkdir()
    assert run(folder / "model", SOURCE, "-o", folder / "a.png") == 2
    assert "a.png is a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sentence", "message"),
    [(" \t", "is blank"), ("a\nb", "several lines"), ("a" * 20_001, "20,001 letters")],
)
def test_a_sentence_that_cannot_be_drawn_is_refused_before_the_model_is_loaded(tmp_path, capsys, sentence, message):
    assert run(tmp_path / "no model", sentence) == 2
    assert message in capsys.readouterr().err


def test_a_sentence_longer_than_a_picture_is_refused_by_the_command(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert run("model", "x " * 300, "--target", TARGET, "-o", "a.png") == 2
    assert "A picture holds 200 pieces" in capsys.readouterr().err
    assert not (folder / "a.png").exists()
