"""The checkpoint that lies in the repository: small, whole, described by its card, and as good as the card says."""

import gzip
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from transformers import pipeline

import hf_vaswani
from hf_vaswani.evaluation import evaluate_model
from hf_vaswani.sharing import check_card

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "checkpoints" / "tatoeba-de-en"
PAIRS = ROOT.parent / "shared" / "data" / "tatoeba_en_de" / "pairs.tsv.gz"


@pytest.fixture(scope="module")
def translate():
    return pipeline("translation", model=str(FOLDER), device="cpu")


def test_it_is_small_and_loads_in_full_precision(translate):
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 12e6
    assert translate.model.dtype == torch.float32
    assert isinstance(translate.model, hf_vaswani.VaswaniForConditionalGeneration)
    assert isinstance(translate.tokenizer, hf_vaswani.VaswaniTokenizer)


def test_saved_again_it_carries_its_code(translate, tmp_path):
    # In the repository the code lies beside it; a copy of it belongs to folders that leave.
    assert not list(FOLDER.glob("*.py"))
    translate.save_pretrained(tmp_path)
    package = Path(hf_vaswani.__file__).parent
    assert {path.name for path in tmp_path.glob("*_vaswani.py")} == {
        path.name for path in package.glob("*_vaswani.py") if not path.name.startswith("foreign_")
    }


def test_it_translates_plain_sentences(translate):
    sentences = {
        "Ich habe Hunger.": r"I('m| am) hungry\.",
        "Wo ist mein Buch?": r"Where( is|'s) my book\?",
        "Tom lacht.": r"Tom('s| is)? laugh(s|ed|ing)\.",
        "Er spricht sehr gut Englisch.": r"He speaks English very well\.",
    }
    for source, found in zip(sentences, translate(list(sentences)), strict=True):
        assert re.fullmatch(sentences[source], found["translation_text"])


def test_its_card_is_the_repositorys_and_every_figure_in_it_is_in_its_header():
    text = (ROOT / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == text
    header = check_card(text)
    (entry,) = header["model-index"]
    scores = {
        (result["dataset"]["name"], metric["name"]): metric["value"]
        for result in entry["results"]
        for metric in result["metrics"]
    }
    assert len(scores) >= 4
    body = text.split("---", 2)[2]
    for (dataset, name), value in scores.items():
        assert f"{value:.2f}" in body, (dataset, name)
    assert "tatoeba.org" in body
    assert yaml.safe_load(json.dumps(header))["license"]


@pytest.mark.slow  # two thousand lines with beam 4 take a minute
def test_it_scores_what_its_card_says(translate):
    if not PAIRS.is_file():
        pytest.skip("the Tatoeba pairs are not here")
    with gzip.open(PAIRS, "rt", encoding="utf-8", newline="\n") as stream:
        rows = [line.rstrip("\n").split("\t") for line in stream]
    test = [(german, english) for part, english, german in rows if part == "test"]
    found = evaluate_model(
        translate.model, translate.tokenizer, [s for s, _ in test], [t for _, t in test], target_language="en"
    )
    header = check_card((ROOT / "MODEL_CARD.md").read_text(encoding="utf-8"))
    claimed = {
        metric["name"]: metric["value"]
        for result in header["model-index"][0]["results"]
        if result["dataset"]["name"].startswith("Tatoeba, leak-free test part")
        for metric in result["metrics"]
    }
    for name in ("sacreBLEU", "chrF"):
        assert found[name].score == pytest.approx(claimed[name], abs=0.005)
