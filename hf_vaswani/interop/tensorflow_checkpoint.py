"""Reads TensorFlow's V2 checkpoints ("tensor bundles") without TensorFlow.

NAME.index is a sorted table in LevelDB's format: blocks of keys that share prefixes, each with a checksum, and a footer
that points at the block of blocks. Its values are protocol-buffer messages that say where in the NAME.data files each
tensor lies. Every block and every tensor that is used is held against its CRC-32C.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .foreign import ConversionError

_FOOTER, _MAGIC = 48, bytes.fromhex("57fb808b247547db")
_MASK_DELTA = 0xA282EAD8
# TensorFlow's numbers of data types, with what numpy maps and torch calls them; bfloat16 is no type of numpy's.
_TYPES: dict[int, tuple[Any, torch.dtype]] = {
    1: (np.float32, torch.float32),
    2: (np.float64, torch.float64),
    3: (np.int32, torch.int32),
    4: (np.uint8, torch.uint8),
    5: (np.int16, torch.int16),
    6: (np.int8, torch.int8),
    9: (np.int64, torch.int64),
    10: (np.bool_, torch.bool),
    14: (np.int16, torch.bfloat16),
    19: (np.float16, torch.float16),
}


# --------------------------------------------------------------------------- CRC-32C (Castagnoli), in numpy
def _advance(states: np.ndarray) -> np.ndarray:
    """Running checksums after one more byte, which has been added to their lowest one already."""
    return _TABLE[states & 0xFF] ^ (states >> 8)


def _byte_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    return table


_TABLE = _byte_table()
_PAIR_TABLE = _advance(_advance(np.arange(1 << 16, dtype=np.uint32)))  # two bytes at once, the low one first


def _extend(states: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Feed one column of bytes, or of pairs of bytes, after the other into one running checksum per row."""
    table, bits = (_TABLE, 8) if columns.dtype == np.uint8 else (_PAIR_TABLE, 16)
    for column in columns:
        states = table[(states ^ column) & np.uint32((1 << bits) - 1)] ^ (states >> np.uint32(bits))
    return states


def _apply(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A 32 by 32 matrix over GF(2), as 32 columns, times many vectors of 32 bits."""
    result = np.zeros_like(values)
    for bit in range(32):
        result ^= np.where((values >> np.uint32(bit)) & 1, matrix[bit], 0).astype(np.uint32)
    return result


def crc32c(data: bytes | np.ndarray) -> int:
    """CRC-32C of some bytes.

    A checksum is linear in its bytes, so long data is cut into rows of equal length, all rows run at once, and their
    results are joined in pairs: crc(a b) = M(crc(a)) ^ crc(b), where M feeds as many zeros as b has bytes.

    Args:
        data (`bytes` or `np.ndarray` of uint8).

    Returns:
        `int`, unmasked.
    """
    raw = np.frombuffer(data, dtype=np.uint8) if isinstance(data, bytes) else data
    rows = 1 << min(15, max(0, (len(raw) // 64).bit_length() - 1))
    width = len(raw) // rows & ~1
    states = np.zeros(rows, dtype=np.uint32)
    states[0] = 0xFFFFFFFF
    if rows > 1:
        pairs = np.ascontiguousarray(raw[: rows * width]).view("<u2").reshape(rows, -1)
        states = _extend(states, np.ascontiguousarray(pairs.T))
        shift = _extend(np.uint32(1) << np.arange(32, dtype=np.uint32), np.zeros(width, dtype=np.uint8))
        while len(states) > 1:
            states = _apply(shift, states[0::2]) ^ states[1::2]
            shift = _apply(shift, shift)
        raw = raw[rows * width :]
    return int(_extend(states, raw)[0]) ^ 0xFFFFFFFF


def masked_crc32c(data: bytes | np.ndarray) -> int:
    """CRC-32C in the masked form in which these files store it."""
    value = crc32c(data)
    return (((value >> 15) | (value << 17)) + _MASK_DELTA) & 0xFFFFFFFF


# --------------------------------------------------------------------------- protocol buffers and the table
def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, at, shift = value | (byte & 0x7F) << shift, at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise IndexError("a number of more than ten bytes")


def _message(data: bytes) -> Iterator[tuple[int, Any]]:
    """Field number and value of each field; those of a length come as bytes, the others as whole numbers."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise IndexError(f"a field of unknown kind {kind}")
        if at + size > len(data):
            raise IndexError("a field past the end")
        piece = data[at : at + size]
        yield key >> 3, piece if kind == 2 else int.from_bytes(piece, "little")
        at += size


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@dataclass
class TensorEntry:
    """Where one tensor lies.

    Args:
        dtype (`int`): TensorFlow's number. shape (`tuple`). shard (`int`): which of the data files.
        offset, size (`int`): bytes. checksum (`int`): masked. is_partitioned (`bool`): stored in slices.
    """

    dtype: int = 0
    shape: tuple[int, ...] = ()
    shard: int = 0
    offset: int = 0
    size: int = 0
    checksum: int = 0
    is_partitioned: bool = False

    @classmethod
    def parse(cls, data: bytes) -> "TensorEntry":
        entry = cls()
        for number, value in _message(data):
            if number == 2:
                dims = [piece for inner, piece in _message(value) if inner == 2]
                entry.shape = tuple(_signed(dict(_message(dim)).get(1, 0)) for dim in dims)
            elif number == 7:
                entry.is_partitioned = True
            elif number in (1, 3, 4, 5, 6):
                setattr(entry, ("dtype", "", "shard", "offset", "size", "checksum")[number - 1], value)
        return entry


def _block(data: bytes, handle: tuple[int, int], path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of one block, whose compression and checksum stand in the five bytes behind it."""
    start, size = handle
    whole = data[start : start + size + 1]
    if len(data) < start + size + 5 + _FOOTER:
        raise ConversionError(f"{path} is damaged: one of its blocks lies past the end of the file.")
    if masked_crc32c(whole) != int.from_bytes(data[start + size + 1 : start + size + 5], "little"):
        raise ConversionError(f"{path} is damaged: the block at byte {start} does not match its checksum.")
    if whole[-1]:
        raise ConversionError(
            f"{path}: the block at byte {start} is compressed (type {whole[-1]}), which TensorFlow does not do to a "
            "checkpoint's index. Load the checkpoint in TensorFlow and save it again."
        )
    restarts = int.from_bytes(whole[-5:-1], "little")
    end, at, key = size - 4 * (restarts + 1), 0, b""
    while at < end:
        shared, at = _varint(whole, at)
        own, at = _varint(whole, at)
        length, at = _varint(whole, at)
        key = key[:shared] + whole[at : at + own]
        yield key, whole[at + own : at + own + length]
        at += own + length


def _handle(data: bytes, at: int = 0) -> tuple[tuple[int, int], int]:
    start, at = _varint(data, at)
    size, at = _varint(data, at)
    return (start, size), at


def _read_index(path: Path) -> tuple[dict[str, TensorEntry], int]:
    data = path.read_bytes()
    if len(data) < _FOOTER or data[-8:] != _MAGIC:
        raise ConversionError(f"{path} is no TensorFlow checkpoint index, or its end is missing.")
    entries: dict[str, TensorEntry] = {}
    shards = 0
    try:
        _, after = _handle(data, len(data) - _FOOTER)
        root, _ = _handle(data, after)
        for _, found in _block(data, root, path):
            for key, value in _block(data, _handle(found)[0], path):
                if key:
                    entries[key.decode()] = TensorEntry.parse(value)
                    continue
                header = dict(_message(value))
                shards = header.get(1, 0)
                if header.get(2, 0):
                    raise ConversionError(f"{path} was written on a big-endian machine, which cannot be read here.")
    except (IndexError, UnicodeDecodeError, AttributeError, TypeError) as error:
        raise ConversionError(f"{path} is damaged ({error}).") from error
    if not shards:
        raise ConversionError(f"{path} has no header, so it is no index of a checkpoint.")
    return entries, shards


# --------------------------------------------------------------------------- the checkpoint
@dataclass
class TensorFlowCheckpoint(Mapping[str, torch.Tensor]):
    """Tensors of a V2 checkpoint by name; each is mapped from its file and checked when it is asked for.

    Args:
        prefix (`Path`): NAME, without ".index" or ".data-00000-of-00001".

    Raises:
        ConversionError: at construction for a damaged index or a data file that is missing or too short; on access for
            a checksum that does not match, a partitioned variable, or a type that is no number.
    """

    prefix: Path
    entries: dict[str, TensorEntry] = field(init=False)
    shards: int = field(init=False)
    _files: dict[int, np.ndarray] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        index = Path(f"{self.prefix}.index")
        if not index.is_file():
            raise ConversionError(f"{index} does not exist.")
        self.entries, self.shards = _read_index(index)
        for name, entry in self.entries.items():
            size = len(self._file(entry.shard))
            if entry.offset + entry.size > size:
                raise ConversionError(
                    f"{self._data_path(entry.shard)} is cut off: tensor {name!r} ends at byte "
                    f"{entry.offset + entry.size}, the file has {size}."
                )

    def _data_path(self, shard: int) -> Path:
        return Path(f"{self.prefix}.data-{shard:05d}-of-{self.shards:05d}")

    def _file(self, shard: int) -> np.ndarray:
        if shard not in self._files:
            path = self._data_path(shard)
            if not path.is_file():
                raise ConversionError(f"{path} is missing; the index next to it needs {self.shards} data files.")
            # Copy on write, so that a tensor may be changed and the file never is.
            empty = path.stat().st_size == 0
            self._files[shard] = np.zeros(0, np.uint8) if empty else np.memmap(path, np.uint8, mode="c")
        return self._files[shard]

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        where = f"{self.prefix}: tensor {name!r}"
        if entry.is_partitioned:
            raise ConversionError(f"{where} is stored in slices (a partitioned variable), which cannot be read.")
        if entry.dtype not in _TYPES:
            raise ConversionError(f"{where} is of TensorFlow's type number {entry.dtype}, which cannot be read.")
        stored, dtype = _TYPES[entry.dtype]
        if entry.size != int(np.prod(entry.shape, dtype=np.int64)) * np.dtype(stored).itemsize:
            raise ConversionError(f"{where} has shape {entry.shape}, which does not go with {entry.size} bytes.")
        raw = self._file(entry.shard)[entry.offset : entry.offset + entry.size]
        if masked_crc32c(raw) != entry.checksum:
            raise ConversionError(
                f"{where} does not match its checksum: {self._data_path(entry.shard)} is damaged, or of another save."
            )
        if entry.offset % np.dtype(stored).itemsize:
            raw = raw.copy()
        numbers = torch.from_numpy(np.asarray(raw).view(stored).reshape(entry.shape))
        return numbers.view(dtype) if numbers.dtype != dtype else numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries  # the mapping's own would read the tensor


def find_checkpoint(path: Path) -> Path:
    """The prefix of a checkpoint, from a folder, the prefix itself, or one of its files.

    Args:
        path (`Path`): in a folder, the text file `checkpoint` names the newest; without it there must be just one.

    Returns:
        `Path`, for `TensorFlowCheckpoint`.

    Raises:
        ConversionError: there is none, or more than one, or it is of the old V1 format.
    """
    if path.is_dir():
        found = sorted(path.glob("*.index"))
        listing = path / "checkpoint"
        named = re.search(r'(?m)^model_checkpoint_path: "(.*)"', listing.read_text()) if listing.is_file() else None
        if named:  # often an absolute path of the machine that trained
            return find_checkpoint(path / Path(named.group(1)).name)
        if len(found) != 1:
            names = ", ".join(one.stem for one in found) or "none"
            raise ConversionError(
                f"{path} should hold one TensorFlow checkpoint, but holds {names}. Name one, as in "
                f"{path / 'model.ckpt-250000'}."
            )
        path = found[0]
    prefix = Path(re.sub(r"\.(index|meta|data-\d{5}-of-\d{5})$", "", str(path)))
    if Path(f"{prefix}.index").is_file():
        return prefix
    if prefix.is_file():
        raise ConversionError(
            f"{prefix} is a TensorFlow checkpoint of the V1 format, or of another program. Load it in TensorFlow 1 and "
            "save it with `tf.train.Saver(write_version=tf.train.SaverDef.V2)`."
        )
    raise ConversionError(f"There is no TensorFlow checkpoint at {path}: {prefix}.index does not exist.")
