"""The page of all layers and heads: one file, no network, driven in headless Chromium."""

import base64
import json
import re
import shutil
from html import unescape
from itertools import pairwise

import numpy as np
import pytest
import torch
from test_attention_pictures import weights

from hf_vaswani.analysis.attention_page import attention_page, notebook_frame, write_page
from hf_vaswani.analysis.words import merge_words

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SOURCE = ["Der", "␣Hu", "nd", "␣</script>", "שלום", "日本", "</s>"]
TARGET = ["The", "␣dog", "&amp;", "<b>", "</s>"]
FOUND = weights(SOURCE, TARGET, layers=3, heads=2)


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def test_the_file_holds_every_weight_and_names_no_other_host():
    page = attention_page(FOUND)
    assert "://" not in page
    assert "src=" not in page
    assert page.count("</script>") == 2  # a piece that spells it ends nothing
    views = data_of(page)["views"]
    for view, found in (("pieces", FOUND), ("words", merge_words(FOUND))):
        for kind in ("encoder", "decoder", "cross"):
            one = views[view][kind]
            assert (one["rows"], one["columns"]) == found.pieces_of_kind(kind)
            for layer, matrix in zip(one["layers"], found.of_kind(kind), strict=True):
                packed = np.frombuffer(base64.b64decode(layer["weights"]), dtype="<u2").reshape(matrix.shape)
                assert np.abs(packed / 65535 - matrix.numpy()).max() < 1 / 65535
                assert layer["heads"] == [0, 1]


def test_the_page_needs_neither_display_nor_matplotlib(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['matplotlib'] = None; sys.path.insert(0, 'tests')\n"
        "import torch\n"
        "from hf_vaswani.analysis.weights import AttentionWeights\n"
        "from hf_vaswani.analysis.attention_page import attention_page, write_page\n"
        "one = [torch.ones(1, 1, 1)]\n"
        "found = AttentionWeights(one, one, one, [1], [1], ['a'], ['b'], ['c'], 'a', 'b')\n"
        "write_page(attention_page(found), sys.argv[1])\n"
    )
    environment = {"PATH": "/usr/bin", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a.html"], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.html").stat().st_size > 10_000


def test_what_is_shown_first_is_chosen_and_checked():
    start = data_of(attention_page(FOUND, "encoder", [-2], [1], words=True, picture="heat"))["start"]
    assert start == {"kind": "encoder", "layer": 1, "heads": [1], "words": True, "picture": "heat"}
    start = data_of(attention_page(FOUND, "cross", "all", "mean"))["start"]
    assert start == {"kind": "cross", "layer": 0, "heads": [0, 1], "words": False, "picture": "heat"}
    for options, message in (
        ({"layers": [3]}, "3 layers"),
        ({"heads": [2]}, "head 2 does not exist"),
        ({"kind": "x"}, "encoder, decoder, cross"),
        ({"picture": "x"}, "heat, lines"),
        ({"layers": "x"}, '"all" or numbers'),
    ):
        with pytest.raises(ValueError, match=message):
            attention_page(FOUND, **options)


def test_pruned_heads_keep_their_numbers():
    found = weights(SOURCE, TARGET, layers=2, heads=2, pruned_heads={"cross.0": [2, 6]})
    data = data_of(attention_page(found, layers=[0]))
    assert data["start"]["heads"] == [2, 6]
    assert data["views"]["words"]["cross"]["layers"][0]["heads"] == [2, 6]
    assert len(data["colours"]) == 7


def test_a_sentence_longer_than_a_page_is_refused_with_its_size(monkeypatch):
    monkeypatch.setattr("hf_vaswani.analysis.attention_page.MAX_WEIGHTS", 1000)
    count = 2 * 3 * 2 * (7 * 7 + 5 * 5 + 5 * 7)
    with pytest.raises(
        ValueError, match=f"holds 1,000 weights, and this sentence of 7 and 5 pieces has up to {count:,}"
    ):
        attention_page(FOUND)


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.html"
    write_page("before", path)

    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError, match="No space"):
        write_page("after", path)
    monkeypatch.undo()
    assert path.read_text() == "before"
    assert [one.name for one in tmp_path.iterdir()] == ["a.html"]


def test_a_saved_notebook_still_shows_the_page():
    """Row 137: the whole page is in the cell's output; nothing is fetched when the notebook is opened again."""
    page = attention_page(FOUND)
    frame = notebook_frame(page, height=300)
    assert unescape(re.search(r'srcdoc="([^"]*)"', frame)[1]) == page
    assert 'height="300"' in frame
    assert 'sandbox="allow-scripts"' in frame


# --------------------------------------------------------------------------- in a browser
@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright to drive a browser")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(browser, tmp_path):
    """The page as a reader opens it: from a file, without a network."""
    write_page(attention_page(FOUND, "cross", [0], [0]), tmp_path / "a.html")
    context = browser.new_context(offline=True, viewport={"width": 1200, "height": 800})
    page = context.new_page()
    page.faults, page.asked = [], []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("console", lambda said: page.faults.append(said.text) if said.type == "error" else None)
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto((tmp_path / "a.html").as_uri())
    yield page
    assert page.faults == []
    assert page.asked == [(tmp_path / "a.html").as_uri()]
    context.close()


def strengths(page, head):
    """(row, column) to strength of the lines of one head that are drawn."""
    found = {}
    for line in page.locator(f'#lines line[data-head="{head}"]').all():
        row, column = (round(float(line.get_attribute(name)) / 24 - 0.5) for name in ("y1", "y2"))
        found[row, column] = float(line.get_attribute("stroke-opacity"))
    return found


def expected(matrix):
    return {
        (q, k): round(float(matrix[q, k]), 3)
        for q in range(matrix.shape[0])
        for k in range(matrix.shape[1])
        if matrix[q, k] >= 0.0201
    }


def compare(page, head, matrix):
    drawn = strengths(page, head)
    for place, strength in expected(matrix).items():
        assert drawn[place] == pytest.approx(strength, abs=2e-3)


def test_layer_and_head_are_changed_by_a_click_and_a_picture_is_kept(opened, tmp_path):
    assert opened.locator("#lines line").count() > 0
    compare(opened, 0, FOUND.cross[0][0])
    assert strengths(opened, 1) == {}
    opened.click('#pick-layer label:has(input[value="2"])')
    compare(opened, 0, FOUND.cross[2][0])
    opened.click('#pick-heads label:has(input[value="1"])')
    compare(opened, 1, FOUND.cross[2][1])
    compare(opened, 0, FOUND.cross[2][0])
    colours = {
        head: opened.locator(f'#lines line[data-head="{head}"]').first.get_attribute("stroke") for head in (0, 1)
    }
    assert colours[0] != colours[1]
    picture = tmp_path / "attention_page.png"
    opened.screenshot(path=picture, full_page=True)
    print(f"picture: {picture}")
    assert picture.stat().st_size > 10_000
    opened.click('#pick-attention label:has(input[value="encoder"])')
    compare(opened, 1, FOUND.encoder[2][1])
    opened.click('#pick-heads button[value="none"]')
    assert opened.locator("#lines line").count() == 0
    assert opened.locator("#says").inner_text() == "No head is chosen."
    opened.click('#pick-heads button[value="all"]')
    compare(opened, 0, FOUND.encoder[2][0])


def test_every_piece_is_shown_as_text_even_one_that_spells_markup(opened):
    for side, pieces in (("rows", TARGET), ("columns", SOURCE)):
        assert opened.locator(f'.piece[data-side="{side}"] bdi').all_inner_texts() == pieces
    boxes = [one.bounding_box() for one in opened.locator('.piece[data-side="columns"]').all()]
    assert all(a["y"] + a["height"] <= b["y"] + 0.5 for a, b in pairwise(boxes))


def test_a_piece_under_the_pointer_or_held_by_a_click_shows_its_own_lines(opened):
    piece = opened.locator('.piece[data-side="rows"]').nth(1)
    piece.hover()
    assert {row for row, _ in strengths(opened, 0)} == {1}
    best = int(FOUND.cross[0][0][1].argmax())
    said = opened.locator("#says").inner_text()
    assert said.startswith(f"{TARGET[1]} looks at {SOURCE[best]} {100 * float(FOUND.cross[0][0][1, best]):.1f} %")
    opened.mouse.move(1100, 700)
    assert {row for row, _ in strengths(opened, 0)} == set(range(5))
    piece.click()
    opened.mouse.move(1100, 700)
    assert {row for row, _ in strengths(opened, 0)} == {1}
    piece.click()
    opened.mouse.move(1100, 700)
    opened.locator("h1").click()
    assert {row for row, _ in strengths(opened, 0)} == set(range(5))


def test_pieces_are_reached_by_keys(opened):
    opened.locator('.piece[data-side="rows"]').first.focus()
    opened.keyboard.press("ArrowDown")
    opened.keyboard.press("ArrowDown")
    assert {row for row, _ in strengths(opened, 0)} == {2}
    opened.keyboard.press("ArrowRight")
    assert {column for _, column in strengths(opened, 0)} == {2}
    opened.keyboard.press("End")
    assert {column for _, column in strengths(opened, 0)} == {6}
    opened.locator('#pick-layer input[value="0"]').focus()
    opened.keyboard.press("ArrowRight")
    assert opened.locator('#pick-layer input[value="1"]').is_checked()
    compare(opened, 0, FOUND.cross[1][0])


def test_the_heat_map_and_whole_words_are_a_click_away(opened):
    opened.click('#pick-picture label:has(input[value="heat"])')
    cells = opened.locator("#heat rect title").all_text_contents()
    words = merge_words(FOUND)
    assert f"{TARGET[1]} looks at {SOURCE[2]}: {100 * float(FOUND.cross[0][0][1, 2]):.1f} %" in cells
    opened.click("#pick-labels label")
    cells = opened.locator("#heat rect title").all_text_contents()
    matrix = words.cross[0][0]
    assert len(cells) == int((matrix >= 0.003).sum())
    assert f"dog&amp;<b> looks at Hund: {100 * float(matrix[1, 1]):.1f} %" in cells or len(words.target_pieces) > 3


def test_a_long_sentence_scrolls_in_its_frame_and_no_label_is_cut(browser, tmp_path):
    long = weights([f"␣wort{i}" for i in range(120)], [f"␣w{i}" for i in range(90)], layers=1, heads=1)
    write_page(attention_page(long, heads="mean"), tmp_path / "a.html")
    page = browser.new_page(viewport={"width": 900, "height": 700})
    page.goto((tmp_path / "a.html").as_uri())
    frame = page.locator("#drawing")
    assert frame.evaluate("one => one.scrollWidth > one.clientWidth")
    inside = page.locator("#heat").evaluate(
        "svg => [...svg.querySelectorAll('text')].every(t => { const b = t.getBoundingClientRect(), "
        "o = svg.getBoundingClientRect(); return b.left >= o.left && b.right <= o.right + 1 && b.top >= o.top - 1; })"
    )
    assert inside
    page.close()


def test_rows_still_add_up_after_packing():
    packed = data_of(attention_page(FOUND))["views"]["words"]["decoder"]["layers"][1]["weights"]
    rows = np.frombuffer(base64.b64decode(packed), dtype="<u2").reshape(merge_words(FOUND).decoder[1].shape).sum(-1)
    assert np.abs(rows / 65535 - 1).max() < 1e-4
    assert torch.allclose(merge_words(FOUND).decoder[1].sum(-1), torch.ones(2, rows.shape[1]))
