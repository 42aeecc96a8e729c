"""Files of one toolkit given to the reader of another: the refusal says whose they are."""

import json
import pickle
from argparse import Namespace

import numpy as np
import pytest
import torch

from hf_vaswani.interop.foreign import ConversionError, ImportOptions
from hf_vaswani.interop.importing import import_model
from hf_vaswani.interop.recognition import recognised


def _put(folder, *names, **texts):
    for name in names:
        (folder / name).write_bytes(b"")
    for name, text in texts.items():
        (folder / name.replace("_json", ".json")).write_text(text)
    return folder


def _saved(folder, content):
    torch.save(content, folder / "some.pt")
    return folder / "some.pt"


def _archive(folder):
    np.savez(folder / "any.npz", **{"special:model.yml": np.zeros(3, dtype=np.int8)})
    return folder / "any.npz"


MADE = {
    "ctranslate2 folder": lambda f: _put(f, "model.bin", "shared_vocabulary.json"),
    "ctranslate2 file": lambda f: _put(f, "model.bin", "source_vocabulary.txt") / "model.bin",
    "marian folder": lambda f: _put(f, config_json=json.dumps({"model_type": "marian"})),
    "marian folder of the toolkit": lambda f: _put(f, "model.npz"),
    "marian file": _archive,
    "joeynmt folder": lambda f: _put(f, "config.yaml", "12000.ckpt"),
    "joeynmt file": lambda f: _saved(f, {"model_state": {"a": torch.zeros(2)}, "optimizer_state": {}}),
    "sockeye folder": lambda f: _put(f, "config", "params.best"),
    "sockeye file": lambda f: _saved(f, {"embedding_source.embedding.weight": torch.zeros(2, 2)}),
    "fairseq folder": lambda f: _put(f, "dict.de.txt", "checkpoint_best.pt"),
    "fairseq file": lambda f: _saved(f, {"args": Namespace(arch="transformer"), "model": {"a": torch.zeros(2)}}),
    "opennmt-py file": lambda f: _saved(f, {"model": {}, "generator": {}, "vocab": {}, "opt": Namespace(heads=2)}),
    "tensor2tensor folder": lambda f: _put(f, "model.ckpt-9.index"),
    "tensor2tensor file": lambda f: _put(f, "model.ckpt-9.index") / "model.ckpt-9.index",
}


@pytest.mark.parametrize("name", MADE)
def test_the_refusal_names_the_kind_that_the_files_look_like(tmp_path, name):
    path = MADE[name](tmp_path)
    kind = name.split()[0]
    assert recognised(path) == kind
    for other in ("marian", "joeynmt", "opennmt-py", "ctranslate2", "sockeye"):
        with pytest.raises(ConversionError) as caught:
            import_model(other, path, tmp_path / "out", options=ImportOptions())
        assert (f"try the kind {kind}." in str(caught.value)) == (other != kind), other
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 damaged"])
def test_of_what_is_not_known_nothing_is_said(tmp_path, content):
    (tmp_path / "some.pt").write_bytes(content)
    with pytest.raises(ConversionError) as caught:
        import_model("opennmt-py", tmp_path / "some.pt", tmp_path / "out")
    assert "looks like" not in str(caught.value)


class _Code:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (open, (str(self.marker), "w"))


@pytest.mark.parametrize("kind", ["marian", "joeynmt", "opennmt-py", "sockeye", "ctranslate2"])
@pytest.mark.parametrize("form", ["zip", "legacy", "plain pickle"])
def test_code_in_a_checkpoint_is_not_run_by_any_reader(tmp_path, kind, form):
    marker, path = tmp_path / "ran", tmp_path / "best.ckpt"
    content = {"model_state": {"a": torch.zeros(2)}, "optimizer_state": _Code(marker), "opt": _Code(marker)}
    if form == "plain pickle":
        path.write_bytes(pickle.dumps({**content, "model_state": {}}))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    (tmp_path / "config.yaml").write_text("model: {encoder: {type: transformer}}\ndata: {}\n")
    with pytest.raises(ConversionError):
        import_model(kind, path, tmp_path / "out")
    assert not marker.exists()
