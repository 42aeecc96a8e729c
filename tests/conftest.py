"""Shared settings and the tiny model that most tests use: every size differs, so that a swapped axis fails."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest
import torch
from transformers.utils import logging

torch.set_num_threads(1)
logging.disable_progress_bar()

TINY = {
    "vocab_size": 37,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "num_attention_heads": 2,
    "d_k": 5,
    "d_v": 7,
    "d_ff": 24,
    "max_position_embeddings": 64,
}


# Files that start processes or train: they go first, so that no worker is left alone with one of them at the end.
LONG_FILES = (
    "test_examples",
    "test_resume",
    "test_benchmarks_training",
    "test_benchmarks",
    "test_cli_translate",
    "test_quickstart",
    "test_sharing",
    "test_run",
)


def pytest_configure(config):
    """Worker processes take files in the order below, not by their number of tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    """Put the long files first; the order within a file stays."""
    place = {name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(autouse=True)
def _fresh_accelerate_state():
    """Accelerate's state is one for all of a process; a test that chose a precision must not choose it for others."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def tiny_config():
    from hf_vaswani import VaswaniConfig

    return VaswaniConfig(**TINY)


@pytest.fixture
def make_model():
    """Builds a seeded tiny model in evaluation mode; keyword arguments change its configuration."""
    from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration

    def make(seed: int = 0, **changes):
        torch.manual_seed(seed)
        return VaswaniForConditionalGeneration(VaswaniConfig(**{**TINY, **changes})).eval()

    return make


@pytest.fixture
def batch():
    """Three sources of 7, 4 and 2 tokens padded on the right, and three targets of 5 columns."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, 37, (3, 7), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row, length in enumerate((7, 4, 2)):
        input_ids[row, length - 1] = 1
        input_ids[row, length:] = 0
        attention_mask[row, length:] = 0
    labels = torch.randint(3, 37, (3, 5), generator=generator)
    labels[1, 3:] = -100
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


@pytest.fixture(autouse=True)
def threads_stay():
    """A test that sets the number of threads sets it for itself: the last digits of later ones would change with it."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)
