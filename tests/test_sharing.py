"""A saved folder or a repository on a hub is all that others need, with or without this package."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_server import HubServer
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer
from hf_vaswani.sharing import model_card

PACKAGE_ROOT = Path(__file__).parents[1]
CODE = {
    f"{name}_vaswani.py" for name in ("configuration", "modeling", "generation", "tokenization", "pipeline", "text")
}  # fmt: skip
LINES = ["Ein Mann schläft.", "", "Zwei Hunde rennen über die Wiese!", "31 </s> ja"]


def texts():
    return ["Ein Mann schläft.", "Zwei Hunde rennen über die Wiese.", "A man is sleeping.", "Two dogs run."] * 9


def results_of(folder, **trust):
    """All that a user gets out of a folder: ids, logits, generated ids and translations."""
    tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, **trust)
    batch = tokenizer(LINES[:1] + LINES[2:], padding=True, return_tensors="pt")
    decoder_input_ids = torch.tensor([[2, 7, 300], [2, 99, 5], [2, 4, 3]])
    with torch.no_grad():
        logits = model(**batch, decoder_input_ids=decoder_input_ids).logits
    translate = pipeline("translation", model=str(folder), **trust)
    return {
        "config": AutoConfig.from_pretrained(folder, **trust).d_ff,
        "ids": batch["input_ids"],
        "logits": logits,
        "generated": model.generate(**batch),
        "translations": [one["translation_text"] for one in translate(LINES)],
        "beams": model.generation_config.num_beams,
        "penalty": model.generation_config.length_penalty_type,
        "class": type(model).__module__.split(".")[0],
    }


def assert_same_results(actual, expected, class_from):
    assert actual["class"] == class_from
    for name in ("ids", "logits", "generated"):
        assert torch.equal(actual[name], expected[name]), name
    for name in ("config", "translations", "beams", "penalty"):
        assert actual[name] == expected[name]


def assert_complete(folder):
    """Code, settings and the entries that lead to them are all there, none pointing elsewhere."""
    names = {path.name for path in Path(folder).iterdir()}
    assert names >= CODE | {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"]["AutoConfig"] == "configuration_vaswani.VaswaniConfig"
    assert config["auto_map"]["AutoModelForSeq2SeqLM"] == "modeling_vaswani.VaswaniForConditionalGeneration"
    assert config["custom_pipelines"]["translation"]["impl"] == "pipeline_vaswani.VaswaniTranslationPipeline"
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer["auto_map"]["AutoTokenizer"] == ["tokenization_vaswani.VaswaniTokenizer", None]
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["num_beams"], generation["length_penalty_type"], generation["max_length_offset"]) == (
        3,
        "gnmt",
        9,
    )


BLOCK_THE_PACKAGE = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_vaswani":
            raise ImportError("hf_vaswani is not installed here")
sys.meta_path.insert(0, Blocker())
"""
# What `results_of` needs in another process; this file itself imports the package.
SHARED_CODE = """
import json, sys, torch
from pathlib import Path
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline
"""


def run_elsewhere(script, folder, *arguments, is_installed=False, **environment):
    """Run a script in a process and folder of its own, without the package unless it is asked for."""
    shared = SHARED_CODE + f"LINES = {LINES!r}\n" + inspect.getsource(results_of)
    code = ("" if is_installed else BLOCK_THE_PACKAGE) + shared + script
    folder.mkdir(exist_ok=True)
    given = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PYTHONPATH"))}
    given |= {
        "HF_HOME": str(folder / "home"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(PACKAGE_ROOT) if is_installed else "",
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=folder, env=given, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model and its tokenizer, and what they give in this process."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    tokenizer = VaswaniTokenizer.train(texts(), vocab_size=310, allow_fewer=True, show_progress=False)
    torch.manual_seed(5)
    config = VaswaniConfig(
        vocab_size=len(tokenizer), d_model=16, encoder_layers=2, decoder_layers=1, num_attention_heads=2, d_k=5,
        d_v=7, d_ff=24,
    )  # fmt: skip
    model = VaswaniForConditionalGeneration(config).eval()
    model.generation_config.update(num_beams=3, max_length_offset=9)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, results_of(folder)


# ------------------------------------------------------------------ folders
def test_the_saved_folder_is_complete_and_needs_no_trust_here(home):
    folder, results = home
    assert_complete(folder)
    assert results["class"] == "hf_vaswani"
    assert len(results["translations"]) == len(LINES)
    assert results["translations"][1] == ""


ELSEWHERE = """
for number, folder in enumerate(sys.argv[2:]):
    found = results_of(folder, trust_remote_code=True)
    try:
        AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=False)
        found["asked"] = False
    except ValueError as error:
        found["asked"] = "trust_remote_code" in str(error)
    out = f"{sys.argv[1]}/{number}"
    AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True).save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, trust_remote_code=True).save_pretrained(out)
    pipeline("translation", model=folder, trust_remote_code=True).save_pretrained(out + "-pipeline")
    torch.save(found, out + ".pt")
assert "hf_vaswani" not in sys.modules
"""


@pytest.fixture(scope="module")
def elsewhere(home, tmp_path_factory):
    """The folder, and a copy that was loaded and saved again here, used and saved where there is no package."""
    folder, _ = home
    place = tmp_path_factory.mktemp("elsewhere")
    again = place / "again"
    VaswaniForConditionalGeneration.from_pretrained(folder).save_pretrained(again)
    AutoTokenizer.from_pretrained(folder).save_pretrained(again)
    run_elsewhere(ELSEWHERE, place / "process", place, folder, again)
    return place


def test_a_folder_works_the_same_where_the_package_is_not_installed(home, elsewhere):
    found = torch.load(elsewhere / "0.pt")
    assert_same_results(found, home[1], "transformers_modules")
    assert found["asked"]  # foreign code is never run unasked


def test_saving_again_with_the_package_keeps_everything(home, elsewhere):
    assert_complete(elsewhere / "again")
    assert_same_results(torch.load(elsewhere / "1.pt"), home[1], "transformers_modules")


@pytest.mark.parametrize("name", ["0", "1", "0-pipeline", "1-pipeline"])
def test_saving_again_without_the_package_keeps_everything(home, elsewhere, name):
    assert_complete(elsewhere / name)
    assert_same_results(results_of(elsewhere / name), home[1], "hf_vaswani")


def test_the_code_that_travels_is_the_code_of_the_package(home, elsewhere):
    for name in CODE:
        expected = (PACKAGE_ROOT / "hf_vaswani" / name).read_text()
        assert (home[0] / name).read_text() == expected
        assert (elsewhere / "0" / name).read_text() == expected


# ------------------------------------------------------------------ a hub
PUSH = """
from hf_vaswani import VaswaniForConditionalGeneration, VaswaniTokenizer
from hf_vaswani.sharing import push_folder
folder = sys.argv[1]
VaswaniForConditionalGeneration.from_pretrained(folder).push_to_hub("user/parts")
VaswaniTokenizer.from_pretrained(folder).push_to_hub("user/parts")
pipeline("translation", model=folder).push_to_hub("user/pipeline")
push_folder(folder, "user/folder")
# With the package, a repository needs no trust.
torch.save(results_of("user/folder"), sys.argv[2])
"""
PULL = """
for name in ("parts", "pipeline", "folder"):
    torch.save(results_of(f"user/{name}", trust_remote_code=True), f"{sys.argv[1]}/{name}.pt")
AutoModelForSeq2SeqLM.from_pretrained("user/folder", trust_remote_code=True).save_pretrained(sys.argv[1] + "/saved")
AutoTokenizer.from_pretrained("user/folder", trust_remote_code=True).save_pretrained(sys.argv[1] + "/saved")
assert "hf_vaswani" not in sys.modules
"""


@pytest.fixture(scope="module")
def hub(home, tmp_path_factory):
    """Pushed from one process with the package, loaded by another one without it: server and results."""
    folder, _ = home
    place = tmp_path_factory.mktemp("hub")
    (folder / "README.md").write_text(
        model_card("user/folder", languages=["de", "en"], license="mit"), encoding="utf-8"
    )
    (folder / "optimizer.pt").write_bytes(b"not for others")
    with HubServer() as server:
        settings = {"HF_ENDPOINT": server.endpoint, "HF_TOKEN": "x", "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        run_elsewhere(PUSH, place / "push", folder, place / "here.pt", is_installed=True, **settings)
        run_elsewhere(PULL, place / "pull", place, **settings)
    return server, place


def test_card_code_and_weights_arrive(home, hub):
    server, _ = hub
    for name in ("user/parts", "user/pipeline", "user/folder"):
        files = server.repositories[name]
        assert set(files) >= CODE | {"README.md", "config.json", "generation_config.json", "tokenizer.json"}
        assert files["model.safetensors"] == (home[0] / "model.safetensors").read_bytes()
        assert files["README.md"].startswith(b"---\n")
    assert b'license: "mit"' in server.repositories["user/folder"]["README.md"]
    assert "optimizer.pt" not in server.repositories["user/folder"]


@pytest.mark.parametrize("name", ["parts", "pipeline", "folder"])
def test_a_repository_works_the_same_where_the_package_is_not_installed(home, hub, name):
    assert_same_results(torch.load(hub[1] / f"{name}.pt"), home[1], "transformers_modules")


def test_a_repository_needs_no_trust_with_the_package(home, hub):
    assert_same_results(torch.load(hub[1] / "here.pt"), home[1], "hf_vaswani")


def test_what_is_saved_from_a_repository_stands_alone(home, hub):
    assert_complete(hub[1] / "saved")
    assert_same_results(results_of(hub[1] / "saved"), home[1], "hf_vaswani")
