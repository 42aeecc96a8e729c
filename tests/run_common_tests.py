"""Run transformers' own battery of model and configuration tests against this package.

A manual check: it needs the package registry, because the battery is in the source archive of transformers only. It
fetches the archive of the installed version into a temporary folder, writes a driver beside it and runs that; nothing
of it stays. The archive does not hold the battery's tests of `generate`, so those are not run.

    python tests/run_common_tests.py                          # the whole battery
    python tests/run_common_tests.py -- -k "sdpa or config"   # further arguments go to pytest
    python tests/run_common_tests.py --source transformers-5.24.0.tar.gz

Needs `pytest`, `parameterized` and `httpx` beside the package. The exit status is pytest's: 0 if nothing failed.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

# The battery imports these although only tests that are not in the archive need them.
STAND_INS = {
    "__init__.py": "",
    "exporters/__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "utils/__init__.py": "",
    "utils/test_configuration_utils.py": (
        "config_common_kwargs = {\n"
        "    'return_dict': False,\n"
        "    'output_hidden_states': True,\n"
        "    'dtype': 'float16',\n"
        "    'chunk_size_feed_forward': 3,\n"
        "    'architectures': ['SomeArchitecture'],\n"
        "    'id2label': {0: 'no', 1: 'yes'},\n"
        "    'label2id': {'no': 0, 'yes': 1},\n"
        "    'problem_type': 'regression',\n"
        "}\n"
    ),
}

DRIVER = """
import unittest

import torch
from transformers.models.auto import modeling_auto

import hf_vaswani  # noqa: F401
from hf_vaswani.configuration_vaswani import VaswaniConfig
from hf_vaswani.modeling_vaswani import VaswaniForConditionalGeneration, VaswaniModel

from .generation.test_utils import GenerationTesterMixin
from .test_configuration_common import ConfigTester
from .test_modeling_common import ModelTesterMixin

# The battery asks these tables which classes take labels.
modeling_auto.MODEL_MAPPING_NAMES["vaswani"] = "VaswaniModel"
modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES["vaswani"] = "VaswaniForConditionalGeneration"


class VaswaniModelTester:
    # The battery extends a smaller batch with rows of its own that hold the padding id.
    batch_size, seq_length, is_training = 9, 7, True
    hidden_size, num_hidden_layers, num_attention_heads, vocab_size = 16, 2, 2, 37

    def __init__(self, parent):
        self.parent = parent

    def get_config(self):
        return VaswaniConfig(
            vocab_size=self.vocab_size, d_model=self.hidden_size, d_ff=24, encoder_layers=2, decoder_layers=2,
            num_attention_heads=self.num_attention_heads, max_position_embeddings=50, **SETTINGS,
        )

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, self.vocab_size, (2, self.batch_size, self.seq_length))
        ones = torch.ones_like(ids[0])
        return self.get_config(), {
            "input_ids": ids[0], "attention_mask": ones, "decoder_input_ids": ids[1], "decoder_attention_mask": ones,
        }


class VaswaniModelTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (VaswaniModel, VaswaniForConditionalGeneration)
    is_encoder_decoder = True

    def setUp(self):
        self.model_tester = VaswaniModelTester(self)
        self.config_tester = ConfigTester(self, config_class=VaswaniConfig)

    def test_config(self):
        self.config_tester.run_common_tests()
"""

# Two models: the paper's, and one that takes every other road.
SETTINGS = {
    "paper": {},
    "other": {
        "d_k": 5,
        "d_v": 7,
        "norm_position": "pre",
        "position_encoding": "learned",
        "attention_bias": True,
        "output_bias": True,
    },
}


def fetch_archive(folder: Path) -> Path:
    """Download the source archive of the installed transformers with pip.

    Args:
        folder (`Path`): where to put it.

    Returns:
        `Path` of the archive.

    Raises:
        subprocess.CalledProcessError: if pip cannot reach its registry.
    """
    version = importlib.metadata.version("transformers")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*command, "--no-build-isolation", f"transformers=={version}", "-d", str(folder)], check=True)
    return next(folder.glob("transformers-*.tar.gz"))


def lay_out(archive: Path, folder: Path) -> Path:
    """Unpack the battery, with our driver and the stand-ins beside it.

    Args:
        archive (`Path`): a source archive of transformers. folder (`Path`): an empty folder.

    Returns:
        `Path` of the folder in which pytest is to be started.
    """
    with tarfile.open(archive) as packed:
        members = [one for one in packed.getmembers() if one.isfile() and "/tests/" in one.name]
        for member in members:
            inside = Path(*Path(member.name).parts[1:])
            (folder / inside).parent.mkdir(parents=True, exist_ok=True)
            with packed.extractfile(member) as source, open(folder / inside, "wb") as target:
                shutil.copyfileobj(source, target)
    for name, text in STAND_INS.items():
        path = folder / "tests" / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for name, settings in SETTINGS.items():
        driver = folder / "tests" / f"test_modeling_vaswani_{name}.py"
        driver.write_text(DRIVER.replace("**SETTINGS", f"**{settings!r}"), encoding="utf-8")
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = -q -p no:cacheprovider -W ignore::pytest.PytestUnknownMarkWarning\n", encoding="utf-8"
    )
    return folder


def main(arguments: list[str] | None = None) -> int:
    """Run the battery.

    Args:
        arguments (`list[str]`, *optional*): of the command line.

    Returns:
        `int`: pytest's exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a source archive of transformers that is already here")
    parser.add_argument("pytest_arguments", nargs="*", help="after --, handed to pytest")
    given = parser.parse_args(arguments)
    absent = [name for name in ("pytest", "parameterized", "httpx") if importlib.util.find_spec(name) is None]
    if absent:
        parser.error(f"the battery needs {', '.join(absent)}: pip install {' '.join(absent)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = lay_out(given.source or fetch_archive(folder), folder)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        drivers = [f"tests/test_modeling_vaswani_{one}.py" for one in SETTINGS]
        command = [sys.executable, "-m", "pytest", *drivers, *given.pytest_arguments]
        return subprocess.run(command, cwd=root, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
