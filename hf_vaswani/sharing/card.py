"""The card of a trained model (README.md), written from given facts and checked before anything is uploaded.

Every text in the header is quoted, because YAML reads an unquoted `no` (Norwegian) as false and `16` as a number, and
the Hub refuses a card for it at the end of an upload.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, HfApi, ModelCardData

_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*|multilingual")
_HEADER = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_UPLOADED = ["*.json", "*.safetensors", "*.py", "*.md", "*.model", "LICENSE*"]


@dataclass(frozen=True)
class Measurement:
    """One measured score.

    Args:
        name (`str`): the metric with its kind, such as "sacreBLEU" or "chrF++"; a bare "BLEU" says too little.
        score (`float`): on the metric's own scale, such as 0 to 100.
        signature (`str`): all settings of the metric, as sacreBLEU prints them.
        dataset (`str`): what was translated, such as "wmt/wmt14". config, split (`str`): which part of it.
    """

    name: str
    score: float
    signature: str
    dataset: str
    config: str | None = None
    split: str = "test"

    def __post_init__(self) -> None:
        if self.name.strip().lower() == "bleu":
            raise ValueError(
                'A bare "BLEU" cannot be compared: name its kind, such as "sacreBLEU" or "tokenised BLEU".'
            )
        if isinstance(self.score, bool) or not isinstance(self.score, int | float) or not math.isfinite(self.score):
            raise ValueError(f"The score of {self.name!r} must be a finite number, got {self.score!r}.")
        if not self.signature.strip():
            raise ValueError(f"{self.name!r} needs its signature: without the settings its number means nothing.")

    def to_eval_result(self) -> EvalResult:
        """The entry of `model-index` for this score."""
        families = ("sacrebleu", "bleu", "chrf", "ter")
        family = next((one for one in families if one in self.name.lower()), self.name.lower())
        return EvalResult(
            task_type="translation",
            dataset_type=self.dataset,
            dataset_name=self.dataset,
            dataset_config=self.config,
            dataset_split=self.split,
            metric_type=family,
            metric_name=self.name,
            metric_value=float(self.score),
            metric_args={"signature": self.signature},
        )


class _Text(str):
    """A string that is always quoted in YAML."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(_Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


def _quoted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _quoted(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_quoted(one) for one in value]
    return _Text(value) if isinstance(value, str) else value


def _row(*cells: Any) -> str:
    return "| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in cells) + " |"


def model_card(
    name: str,
    *,
    languages: Sequence[str],
    license: str,
    datasets: Sequence[str] = (),
    scores: Sequence[Measurement] = (),
    training: Mapping[str, Any] | None = None,
    base_model: str | None = None,
) -> str:
    """Writes the card of a translation model; nothing is invented, so what is not given is not in it.

    Args:
        name (`str`): the model as it will be found, "user/model" on the Hub.
        languages (`Sequence[str]`): language codes, source first, such as `["de", "en"]`.
        license (`str`): the licence's identifier, such as "apache-2.0"; only its owner can choose it.
        datasets (`Sequence[str]`): what the model was trained on.
        scores (`Sequence[Measurement]`): measured scores with their settings.
        training (`Mapping[str, Any]`, *optional*): facts of the training, such as `{"Updates": 100_000}`.
        base_model (`str`, *optional*): the model that this one was fine-tuned from.

    Returns:
        `str`: the text of README.md, checked by `check_card`.

    Raises:
        ValueError: for an empty licence, no language, or anything else that `check_card` refuses.
    """
    for argument, given in (("languages", languages), ("datasets", datasets)):
        if isinstance(given, str):
            raise ValueError(f"`{argument}` must be a list of texts, got the text {given!r}.")
    if not name.strip() or re.search(r"[\"\\\s]", name):
        raise ValueError(f"`name` must be one word such as 'user/model', got {name!r}.")
    header = ModelCardData(
        language=list(languages),
        license=license,
        library_name="transformers",
        pipeline_tag="translation",
        tags=["vaswani", "translation"],
        datasets=list(datasets) or None,
        metrics=sorted({one.to_eval_result().metric_type for one in scores}) or None,
        base_model=base_model,
        model_name=name if scores else None,  # read only with results
        eval_results=[one.to_eval_result() for one in scores] or None,
    ).to_dict()
    yaml_text = yaml.dump(_quoted(header), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
    lines = [
        f"---\n{yaml_text}---\n\n# {name}\n",
        f"A Transformer of Vaswani et al. (2017) that translates: {' → '.join(languages)}.\n",
        "## Use\n\n```python\nfrom transformers import pipeline\n",
        f'translate = pipeline("translation", model="{name}", trust_remote_code=True)\ntranslate("...")\n```\n',
        "With `import hf_vaswani` first, the code of the installed package is used and no trust is needed.",
    ]
    if scores:
        lines += ["", "## Scores", "", _row("Test set", "Metric", "Score", "Signature"), _row(*["---"] * 4)]
        for one in scores:
            place = " ".join(part for part in (one.dataset, one.config, one.split) if part)
            lines.append(_row(place, one.name, f"{one.score:.2f}", one.signature))
    if datasets or training or base_model:
        lines += ["", "## Training", "", _row("Fact", "Value"), _row("---", "---")]
        facts = {"Data": ", ".join(datasets), "Fine-tuned from": base_model, **(training or {})}
        lines += [_row(fact, value) for fact, value in facts.items() if value not in (None, "")]
    text = "\n".join(lines) + "\n"
    check_card(text)
    return text


def check_card(text: str) -> dict[str, Any]:
    """Checks a card as the Hub would at the end of an upload, but without a network.

    Args:
        text (`str`): of a README.md.

    Returns:
        `dict`: the header, read back.

    Raises:
        ValueError: with every fault: a header that is missing or no YAML, a licence that is missing, a language code
            that is none, a task other than translation, or a value that YAML does not read as text.
    """
    match = _HEADER.match(text)
    if match is None:
        raise ValueError("The card has no header: it must begin with a block of YAML between two lines `---`.")
    try:
        header = yaml.safe_load(match.group(1))
    except yaml.YAMLError as error:
        raise ValueError(f"The card's header is not valid YAML: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"The card's header must be a mapping, but it is {type(header).__name__}.")
    faults = list(_faults(header))
    if faults:
        raise ValueError("The card cannot be uploaded:\n- " + "\n- ".join(faults))
    return header


def _faults(header: dict[str, Any]) -> Iterator[str]:
    if not str(header.get("license") or "").strip():
        yield 'license: none is given. Choose one, such as "apache-2.0"; it is not for a program to choose.'
    languages = header.get("language")
    for code in languages if isinstance(languages, list) else [languages]:
        if isinstance(code, str) and not _LANGUAGE.fullmatch(code):
            yield f'language: {code!r} is no language code such as "de".'
    if not languages:
        yield 'language: none is given. Name them, such as ["de", "en"].'
    if header.get("pipeline_tag") != "translation":
        yield f'pipeline_tag: must be "translation", got {header.get("pipeline_tag")!r}.'
    if header.get("library_name") != "transformers":
        yield f'library_name: must be "transformers", got {header.get("library_name")!r}.'
    yield from _not_text(header, "")


def _not_text(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _not_text(one, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _not_text(one, f"{place}[{index}]")
    elif re.search(r"\.metrics\[\d+\]\.(value|verified)$", place):
        if not isinstance(value, bool | int | float) or not math.isfinite(value):
            yield f"{place}: must be a number, got {value!r}."
    elif not isinstance(value, str):
        yield f"{place}: YAML reads it as {value!r}, not as text. Put it in quotes."
    elif not value.strip() and place != "license":
        yield f"{place}: is empty."


def push_folder(
    folder: str | os.PathLike, repo_id: str, *, private: bool | None = None, token: str | None = None
) -> str:
    """Uploads a saved model with its tokenizer, code and card; the card is checked first.

    Args:
        folder (`str`): with config.json, the weights and README.md. Training states in it are left at home.
        repo_id (`str`): "user/model"; created if it is not there.
        private (`bool`, *optional*): of a new repository. token (`str`, *optional*): the login's, if not given.

    Returns:
        `str`: the address of the commit.

    Raises:
        ValueError: for a card that is missing or faulty, before anything is sent.
        FileNotFoundError: for a folder without a model.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
        raise FileNotFoundError(f"{folder} holds no saved model: config.json and *.safetensors are needed.")
    if not (folder / "README.md").is_file():
        raise ValueError(f"{folder} has no README.md: write one with `model_card(...)`.")
    check_card((folder / "README.md").read_text(encoding="utf-8"))
    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    uploaded = api.upload_folder(
        repo_id=repo_id, folder_path=folder, allow_patterns=_UPLOADED, ignore_patterns=["checkpoint*/**", "runs/**"]
    )
    return str(uploaded)
