"""The reader of TensorFlow's checkpoints, against files of another writer, damaged ones, and a real one."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from tensor_bundles import NUMBERS, item, save_bundle, slow_crc

from hf_vaswani.interop.foreign import ConversionError
from hf_vaswani.interop.tensorflow_checkpoint import TensorFlowCheckpoint, crc32c, find_checkpoint

REAL = Path(__file__).parents[2] / "shared" / "data" / "weights" / "t2t_transformer_test_ckpt"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="Tensor2Tensor's own test checkpoint is not here")


def test_the_checksum_is_the_known_one():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # of RFC 3720
    assert crc32c(b"") == 0


@pytest.mark.parametrize("size", [1, 63, 64, 65, 127, 128, 129, 1000, 4097, 70001])
def test_the_fast_checksum_is_the_slow_one(size):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert crc32c(data.tobytes()) == slow_crc(data.tobytes())
    assert crc32c(data) == slow_crc(data.tobytes())


def test_every_type_of_number_is_read(tmp_path):
    tensors = {
        "a/float32": torch.randn(3, 4), "a/float64": torch.randn(2, dtype=torch.float64),
        "a/float16": torch.randn(3, 2).half(), "a/bfloat16": torch.randn(5).bfloat16(), "b/scalar": torch.tensor(7.5),
        "b/int64": torch.tensor([1, -(2**40)]), "b/int32": torch.arange(3, dtype=torch.int32),
        "b/int16": torch.arange(2, dtype=torch.int16), "b/int8": torch.tensor([-3], dtype=torch.int8),
        "b/uint8": torch.tensor([3, 250, 1], dtype=torch.uint8), "b/bool": torch.tensor([True, False, True]),
        "c/empty": torch.zeros(0, 4), "c/after odd bytes": torch.randn(2, 2),
    }  # fmt: skip
    save_bundle(tmp_path / "x", tensors, shards=2)
    checkpoint = TensorFlowCheckpoint(tmp_path / "x")
    assert sorted(checkpoint) == sorted(tensors)
    for name, tensor in tensors.items():
        assert checkpoint[name].dtype == tensor.dtype
        assert torch.equal(checkpoint[name], tensor)


def test_names_with_shared_beginnings_over_many_blocks(tmp_path):
    tensors = {
        f"scope/layer_{n}/{part}": torch.tensor([n]) for n in range(40) for part in ("kernel", "kern", "kernel/Adam")
    }
    save_bundle(tmp_path / "x", tensors)
    checkpoint = TensorFlowCheckpoint(tmp_path / "x")
    assert len(checkpoint) == 120
    assert all(torch.equal(checkpoint[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_may_be_changed_and_its_file_is_not(tmp_path):
    save_bundle(tmp_path / "x", {"a": torch.ones(4)})
    before = (tmp_path / "x.data-00000-of-00001").read_bytes()
    TensorFlowCheckpoint(tmp_path / "x")["a"].zero_()
    assert (tmp_path / "x.data-00000-of-00001").read_bytes() == before


@needs_real
def test_a_real_checkpoint_is_listed_and_read_whole():
    checkpoint = TensorFlowCheckpoint(find_checkpoint(REAL))
    with (REAL / "variables.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert [row["name"] for row in rows] == list(checkpoint)
    for row in rows:
        entry, tensor = checkpoint.entries[row["name"]], checkpoint[row["name"]]
        assert (entry.shard, entry.offset, entry.size) == tuple(int(row[k]) for k in ("shard", "byte_offset", "bytes"))
        assert str(tensor.dtype) == f"torch.{row['dtype']}"
        assert "x".join(map(str, tensor.shape)) == row["shape"].replace("scalar", "")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(bytes(data))


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda p: flip(p / "x.index", 3), r"x\.index is damaged: the block at byte 0 does not match its checksum"),
        (lambda p: flip(p / "x.index", -3), r"x\.index is no TensorFlow checkpoint index"),
        (lambda p: cut(p / "x.index", 200), r"x\.index is no TensorFlow checkpoint index, or its end is missing"),
        (lambda p: (p / "x.index").write_bytes((p / "x.index").read_bytes()[30:]), "not match its checksum|past the"),
        (lambda p: flip(p / "x.data-00000-of-00001", 9), r"tensor 'a/\d+' does not match its checksum: .*damaged"),
        (lambda p: cut(p / "x.data-00000-of-00001", 90), r"is cut off: tensor 'a/\d+' ends at byte \d+, .* has 90"),
        (lambda p: (p / "x.data-00000-of-00001").unlink(), r"x\.data-00000-of-00001 is missing"),
        (lambda p: (p / "x.index").unlink(), r"x\.index does not exist"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_an_error(tmp_path, damage, said):
    save_bundle(tmp_path / "x", {f"a/{n}": torch.randn(3) for n in range(20)})
    damage(tmp_path)
    with pytest.raises(ConversionError, match=said):
        dict(TensorFlowCheckpoint(tmp_path / "x"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": 1}, "is compressed .type 1."),
        ({"header": item(2, 1)}, "written on a big-endian machine"),
        ({"entry": lambda name, parts: {**parts, 1: NUMBERS["string"]}}, "type number 7"),
        ({"entry": lambda name, parts: {**parts, 7: item(1, b"")}}, "stored in slices"),
        (
            {"entry": lambda name, parts: {**parts, 2: item(2, item(1, 9))}},
            r"shape \(9,\), which does not go with 12 bytes",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, changes, said):
    save_bundle(tmp_path / "x", {"a": torch.randn(3)}, **changes)
    with pytest.raises(ConversionError, match=said):
        dict(TensorFlowCheckpoint(tmp_path / "x"))


def test_the_checkpoint_that_is_meant_is_found(tmp_path):
    for step in (5, 10):
        save_bundle(tmp_path / f"model.ckpt-{step}", {"a": torch.ones(1)})
    assert find_checkpoint(tmp_path / "model.ckpt-5") == tmp_path / "model.ckpt-5"
    assert find_checkpoint(tmp_path / "model.ckpt-5.index") == tmp_path / "model.ckpt-5"
    with pytest.raises(ConversionError, match=r"holds model\.ckpt-10, model\.ckpt-5\. Name one"):
        find_checkpoint(tmp_path)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/elsewhere/model.ckpt-5"\n')
    assert find_checkpoint(tmp_path) == tmp_path / "model.ckpt-5"
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-7"\n')
    with pytest.raises(ConversionError, match=r"model\.ckpt-7\.index does not exist"):
        find_checkpoint(tmp_path)
    (tmp_path / "model.ckpt-7").write_bytes(b"old")
    with pytest.raises(ConversionError, match=r"V1 format.*SaverDef"):
        find_checkpoint(tmp_path)
