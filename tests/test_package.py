"""What importing the package does, and does not."""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import hf_vaswani

PACKAGE = Path(hf_vaswani.__file__).parent
FLAT = sorted(path.name.removesuffix("_vaswani.py") for path in PACKAGE.glob("*_vaswani.py"))


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_import_is_light():
    code = """
import json, sys
from transformers.models.marian.modeling_marian import MarianMTModel
from transformers import AutoTokenizer, PreTrainedTokenizerFast, pipeline
before = set(sys.modules)
import pytest

import hf_vaswani
heavy = {"datasets", "accelerate", "matplotlib", "sacrebleu", "evaluate", "pandas", "pyarrow"}
heavy |= {"hf_vaswani.training", "hf_vaswani.cli", "hf_vaswani.analysis"}
print(json.dumps(sorted(heavy & (set(sys.modules) - before))))
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_an_older_transformers_gets_a_plain_error():
    code = """
import importlib.metadata as m
real = m.version
m.version = lambda name: "5.23.1" if name == "transformers" else real(name)
import pytest

import hf_vaswani
"""
    done = run(code)
    assert done.returncode == 1
    assert re.search(r"ImportError: hf_vaswani needs transformers 5\.24 .*found 5\.23\.1", done.stderr)


def test_the_auto_classes_know_the_model():
    from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model("vaswani", vocab_size=37, d_model=16, num_attention_heads=2, d_ff=24)
    assert type(config) is hf_vaswani.VaswaniConfig
    assert type(AutoModel.from_config(config)) is hf_vaswani.VaswaniModel
    assert type(AutoModelForSeq2SeqLM.from_config(config)) is hf_vaswani.VaswaniForConditionalGeneration


def test_files_that_travel_with_weights_import_only_each_other_and_the_libraries():
    allowed = {"torch", "transformers", "tokenizers", "huggingface_hub", "tqdm"} | set(sys.stdlib_module_names)
    assert {"configuration", "modeling", "generation", "tokenization", "pipeline"} <= set(FLAT)
    for name in FLAT:
        text = (PACKAGE / f"{name}_vaswani.py").read_text(encoding="utf-8")
        for module in re.findall(r"^\s*(?:from|import)\s+([\w.]+)", text, flags=re.MULTILINE):
            if module.startswith("."):
                assert module in {f".{other}_vaswani" for other in FLAT}, (name, module)
            else:
                assert module.split(".")[0] in allowed, (name, module)


@pytest.mark.parametrize("is_on", [True, False])
def test_importing_leaves_the_collector_as_it_was(is_on):
    done = run(f"import gc; gc.{'enable' if is_on else 'disable'}(); import hf_vaswani; print(gc.isenabled())")
    assert done.stdout.split() == [str(is_on)], done.stderr


def test_the_version_is_the_installed_one():
    assert hf_vaswani.__version__ == version("hf-vaswani")
    assert (PACKAGE / "py.typed").exists()
