"""The card of a model: every text stays text, nothing is invented, and faults are found before an upload."""

import pytest
import yaml
from huggingface_hub import HfApi, ModelCard

from hf_vaswani.evaluation import sacrebleu_score
from hf_vaswani.sharing import Measurement, check_card, model_card, push_folder

BLEU = Measurement(
    "sacreBLEU", 27.3, "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.5.1", "wmt/wmt14", "de-en"
)


def card(**changes):
    given = {"languages": ["de", "en"], "license": "apache-2.0", "datasets": ["wmt/wmt14"], "scores": [BLEU]}
    return model_card("user/vaswani-base", **{**given, **changes})


def header_of(text):
    return yaml.safe_load(text.split("---\n")[1])


def leaves(value):
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from leaves(one)
    else:
        yield value


def test_values_that_yaml_takes_for_something_else_stay_text():
    odd = Measurement("chrF++", 51, "1.0", "16", "16", "off")
    datasets = ["16", "1e3", "2020-01-01"]
    text = model_card("user/vaswani:base", languages=["no", "en"], license="1.0", datasets=datasets, scores=[odd])
    header = header_of(text)
    assert header["language"] == ["no", "en"]
    assert header["license"] == "1.0"
    assert header["datasets"] == datasets
    assert header["model-index"][0]["name"] == "user/vaswani:base"
    (result,) = header["model-index"][0]["results"]
    assert result["dataset"] == {"name": "16", "type": "16", "config": "16", "split": "off"}
    assert [one for one in leaves(header) if not isinstance(one, str)] == [51.0]
    # Readers of other versions of YAML take other words for numbers: whatever is text is in quotes.
    lines = [line.strip() for line in text.split("---\n")[1].splitlines()]
    assert not [line for line in lines if not line.endswith(('"', ":")) and not line.startswith("value: ")]


def test_the_hub_client_reads_the_card_back():
    data = ModelCard(card(base_model="user/older")).data
    assert (data.license, data.language, data.library_name) == ("apache-2.0", ["de", "en"], "transformers")
    assert (data.pipeline_tag, data.base_model, data.model_name) == ("translation", "user/older", "user/vaswani-base")
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_name, result.metric_value) == ("sacrebleu", "sacreBLEU", 27.3)
    assert (result.dataset_type, result.dataset_config, result.dataset_split) == ("wmt/wmt14", "de-en", "test")
    assert result.metric_args == {"signature": BLEU.signature}


def test_a_measured_score_goes_into_a_card_as_it_is():
    score = sacrebleu_score(["a small house stands here"], ["a small house stands there"])
    text = card(scores=[Measurement(score.name, score.score, score.signature, "own", split="dev")])
    (result,) = ModelCard(text).data.eval_results
    assert result.metric_value == score.score
    assert f"| own dev | {score.name} | {score.score:.2f} | " in text
    assert score.signature.replace("|", "\\|") in text


def test_the_text_shows_use_and_training():
    text = card(training={"Updates": 100_000, "Batch": "25,000 | 25,000 tokens", "Not known": None})
    assert 'pipeline("translation", model="user/vaswani-base", trust_remote_code=True)' in text
    assert "| Updates | 100000 |" in text
    assert "| Batch | 25,000 \\| 25,000 tokens |" in text
    assert "Not known" not in text


def test_what_is_not_given_is_not_in_the_card():
    text = model_card("user/plain", languages=["de", "en"], license="mit")
    assert set(header_of(text)) == {"language", "library_name", "license", "pipeline_tag", "tags"}
    assert "## Scores" not in text
    assert "## Training" not in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"license": ""}, "license: none is given"),
        ({"license": "  "}, "license: none is given"),
        ({"languages": []}, "language: none is given"),
        ({"languages": ["German"]}, "'German' is no language code"),
        ({"languages": "de"}, "`languages` must be a list"),
        ({"datasets": "wmt/wmt14"}, "`datasets` must be a list"),
        ({"datasets": ["wmt/wmt14", ""]}, r"datasets\[1\]: is empty"),
    ],
)
def test_a_card_that_the_hub_would_refuse_is_not_written(changes, message):
    with pytest.raises(ValueError, match=message):
        card(**changes)


@pytest.mark.parametrize("name", ["", " ", 'user/a"b', "user/a b", "user/a\nb"])
def test_a_name_that_is_no_name_is_refused(name):
    with pytest.raises(ValueError, match="`name`"):
        model_card(name, languages=["de"], license="mit")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "BLEU"}, "bare"),
        ({"score": float("nan")}, "finite"),
        ({"score": "27.3"}, "finite"),
        ({"signature": " "}, "signature"),
    ],
)
def test_a_score_that_cannot_be_compared_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Measurement(**{"name": "sacreBLEU", "score": 1.0, "signature": "s", "dataset": "d", **changes})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[4:], "no header"),
        (lambda text: text.replace('- "de"', "- no"), r"language\[0\]: YAML reads it as False"),
        (lambda text: text.replace('"de-en"', "16"), "dataset.config: YAML reads it as 16"),
        (lambda text: text.replace("value: 27.3", 'value: "27.3"'), r"metrics\[0\].value: must be a number"),
        (lambda text: text.replace('license: "apache-2.0"\n', ""), "license: none"),
        (lambda text: text.replace('"translation"', '"summarization"'), "pipeline_tag"),
        (lambda text: text.replace('"transformers"', '"other"'), "library_name"),
        (lambda text: text.replace('license: "apache-2.0"', "license: user: x"), "not valid YAML"),
        (lambda text: "---\n- a\n---\n", "must be a mapping"),
    ],
)
def test_faults_of_a_card_written_by_hand_are_named(change, message):
    assert check_card(card())["license"] == "apache-2.0"
    with pytest.raises(ValueError, match=message):
        check_card(change(card()))


def test_all_faults_are_named_at_once():
    with pytest.raises(ValueError, match=r"license.*\n- language.*\n- pipeline_tag") as caught:
        check_card("---\ntags: [a]\n---\n")
    assert str(caught.value).count("\n- ") == 4


def test_nothing_is_sent_before_the_card_is_right(make_model, tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(HfApi, "create_repo", lambda self, *args, **kwargs: sent.append("repository"))
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **kwargs: sent.append("files"))
    with pytest.raises(FileNotFoundError, match="no saved model"):
        push_folder(tmp_path, "user/one")
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no README\.md"):
        push_folder(tmp_path, "user/one")
    (tmp_path / "README.md").write_text(card().replace("apache-2.0", ""), encoding="utf-8")
    with pytest.raises(ValueError, match="license"):
        push_folder(tmp_path, "user/one")
    assert sent == []
    (tmp_path / "README.md").write_text(card(), encoding="utf-8")
    push_folder(tmp_path, "user/one")
    assert sent == ["repository", "files"]
