"""The attention picture."""

import builtins
import warnings
from itertools import pairwise

import pytest
import torch

from hf_vaswani import VaswaniTokenizer
from hf_vaswani.analysis import attention_figure, draw_attention, piece_texts

pytest.importorskip("matplotlib")
SOURCE = "Ein Hund schläft."


@pytest.fixture(scope="module")
def tokenizer():
    return VaswaniTokenizer.train([SOURCE, "A dog is asleep."] * 3, vocab_size=275, allow_fewer=True)


@pytest.fixture
def model(make_model, tokenizer):
    return make_model(vocab_size=len(tokenizer))


def reference_weights(model, tokenizer, target, layer):
    encoded, labels = tokenizer(SOURCE, return_tensors="pt"), tokenizer(text_target=target, return_tensors="pt")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**encoded, labels=labels["input_ids"], output_attentions=True)
    model.set_attn_implementation("sdpa")
    return out.cross_attentions[layer][0]


def test_the_matrix_is_the_cross_attention_of_the_given_target(model, tokenizer):
    target = "A dog."
    picture = attention_figure(model, tokenizer, SOURCE, target)
    rows, columns = len(tokenizer(target)["input_ids"]), len(tokenizer(SOURCE)["input_ids"])
    assert rows != columns
    assert picture.weights.shape == (rows, columns)
    assert (len(picture.tgt_pieces), len(picture.src_pieces)) == (rows, columns)
    torch.testing.assert_close(picture.weights.sum(dim=1), torch.ones(rows))
    torch.testing.assert_close(picture.weights, reference_weights(model, tokenizer, target, -1).mean(dim=0))
    assert picture.score is None


def test_layer_and_head_are_chosen(model, tokenizer):
    target = "A dog."
    for layer, head in [(0, 1), (-2, 0)]:
        picture = attention_figure(model, tokenizer, SOURCE, target, layer=layer, heads=head)
        torch.testing.assert_close(picture.weights, reference_weights(model, tokenizer, target, layer)[head])
    with pytest.raises(ValueError, match="3 layers"):
        attention_figure(model, tokenizer, SOURCE, target, layer=3)
    with pytest.raises(ValueError, match="heads 0 to 1"):
        attention_figure(model, tokenizer, SOURCE, target, heads=2)
    with pytest.raises(ValueError, match="blank"):
        attention_figure(model, tokenizer, "  ")


def test_without_a_target_the_models_own_translation_is_explained(model, tokenizer):
    model.generation_config.max_length_offset = 2
    found = model.generate(**tokenizer(SOURCE, return_tensors="pt"), return_dict_in_generate=True, output_scores=True)
    picture = attention_figure(model, tokenizer, SOURCE)
    expected = found.sequences[0, 1:].tolist()
    assert picture.tgt_pieces == piece_texts(tokenizer, expected[: len(picture.tgt_pieces)])
    assert set(expected[len(picture.tgt_pieces) :]) <= {tokenizer.pad_token_id, tokenizer.eos_token_id}
    assert picture.score == pytest.approx(found.sequences_scores[0].item())


def test_the_model_is_left_as_it_was_even_after_a_fault(model, tokenizer):
    model.train()
    before = model.config._attn_implementation
    attention_figure(model, tokenizer, SOURCE, "A dog.")
    with pytest.raises(ValueError, match="layer"):
        attention_figure(model, tokenizer, SOURCE, "A dog.", layer=9)
    assert model.training
    assert model.config._attn_implementation == before == "sdpa"


# ------------------------------------------------------------------ labels
def test_pieces_are_shown_as_text_and_blanks_can_be_seen(tokenizer):
    shown = piece_texts(tokenizer, tokenizer("A dog  is asleep.")["input_ids"])
    assert shown[-1] == "</s>"
    assert "".join(shown[:-1]) == "A␣dog␣␣is␣asleep."
    assert max(map(len, shown[:-1])) > 1


def test_the_bytes_of_a_split_letter_are_shown_as_numbers(tokenizer):
    shown = piece_texts(tokenizer, tokenizer("中\tdog")["input_ids"])
    assert shown[:4] == ["‹E4›", "‹B8›", "‹AD›", "→"]
    joined = VaswaniTokenizer.train(["lä"] * 3 + ["lö"] * 3, vocab_size=260)
    assert piece_texts(joined, joined("lü")["input_ids"]) == ["l‹C3›", "‹BC›", "</s>"]


# ------------------------------------------------------------------ drawing
def labels_of(figure):
    axes = figure.axes[0]
    return axes.get_xticklabels(), axes.get_yticklabels()


TOKENS = {
    "plain": (["The", "␣dog", "</s>"], ["Der", "␣Hund", "␣bellt", "</s>"]),
    "long": (["Donaudampfschifffahrtskapitän", "x", "y"], ["a" * 40, "b", "Straßenbahnhaltestelle" * 2, "d"]),
    "scripts": (["שלום", "עולם", "</s>"], ["日本", "語", "مرحبا", "</s>"]),
    "markup": (["$x^2$", "a_b", "$"], ["\\frac", "%", "{", "}"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", TOKENS)
def test_every_label_is_inside_the_picture_and_none_covers_another(kind, tmp_path):
    tgt, src = TOKENS[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a letter that no font has would warn
        figure = draw_attention(torch.full((3, 4), 0.25), tgt, src, "a title")
        figure.canvas.draw()
        figure.savefig(tmp_path / "a.png")
    renderer = figure.canvas.get_renderer()
    columns, rows = labels_of(figure)
    assert (len(columns), len(rows)) == (4, 3)
    for labels, side in [(columns, "x"), (rows, "y")]:
        boxes = [label.get_window_extent(renderer) for label in labels]
        for box in boxes:
            assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
            assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
        spans = sorted((getattr(box, side + "0"), getattr(box, side + "1")) for box in boxes)
        assert all(end <= start + 1 for (_, end), (start, _) in pairwise(spans))


def test_a_letter_that_no_font_has_is_spelt_by_its_number():
    figure = draw_attention(torch.ones(1, 1), ["a"], ["\U00010fff"])
    assert labels_of(figure)[0][0].get_text() == "U+10FFF"


def test_rows_are_target_and_columns_are_source():
    weights = torch.tensor([[0.1, 0.2, 0.7], [0.0, 1.0, 0.0]])
    figure = draw_attention(weights, ["t0", "t1"], ["s0", "s1", "s2"])
    columns, rows = labels_of(figure)
    assert [label.get_text() for label in columns] == ["s0", "s1", "s2"]
    assert [label.get_text() for label in rows] == ["t0", "t1"]
    assert figure.axes[0].images[0].get_array().tolist() == weights.tolist()
    with pytest.raises(ValueError, match="2 x 3"):
        draw_attention(weights, ["t0"], ["s0", "s1", "s2"])


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_pictures_are_written_in_the_kind_of_their_name(model, tokenizer, tmp_path, ending, magic):
    path = tmp_path / f"attention.{ending}"
    attention_figure(model, tokenizer, SOURCE, "A dog.").save(path)
    assert path.read_bytes().startswith(magic)


def test_a_notebook_can_show_the_picture_and_pyplot_keeps_nothing(model, tokenizer):
    import matplotlib.pyplot as plt

    assert attention_figure(model, tokenizer, SOURCE, "A dog.")._repr_png_().startswith(b"\x89PNG")
    assert plt.get_fignums() == []


def test_a_missing_matplotlib_is_said_with_the_command_that_installs_it(model, tokenizer, monkeypatch):
    plain_import = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
        return plain_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r'pip install "hf-vaswani\[plots\]"'):
        attention_figure(model, tokenizer, SOURCE, "A dog.")
