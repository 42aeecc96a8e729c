"""Table 1 of the paper measured: time and memory of its four layers, and how their steps and positions hang together.

Letters: B sequences, n positions, d width, H heads, K width of a head, C blocks, b positions in a block, W keys that a
block sees, r size of the neighbourhood.
"""

import ctypes
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..attention_vaswani import eager_attention_forward
from ..configuration_vaswani import VaswaniConfig
from ..data.progress import late_bar
from ..modeling_vaswani import VaswaniAttention
from ..training.dry_run_cost import device_clock
from .complexity import CONVOLUTIONAL, LAYER_TYPES, RECURRENT, RESTRICTED, SELF_ATTENTION, blocks_of, check_sizes

CORE, LAYER = "core", "layer"
# What is measured: attention's own products, which Table 1 is about, and the layers with their projections.
PARTS = (
    (SELF_ATTENTION, CORE),
    (SELF_ATTENTION, LAYER),
    (RECURRENT, LAYER),
    (CONVOLUTIONAL, LAYER),
    (RESTRICTED, CORE),
    (RESTRICTED, LAYER),
)
_SAMPLE_S = 0.004  # a sample of time is at least so long, of as many calls as that takes
_MOST_CALLS = 50


@dataclass(frozen=True)
class BenchSettings:
    """How layers are built and measured.

    Args:
        kernel (`int`): k, odd. window (`int`): r, odd. head_width (`int`): K; a layer has d / K heads, as the paper's
            base and big models, so that the core's cost is in proportion to d.
        batch (`int`): B. repeats (`int`): samples of time, of which the least counts.
        backward (`bool`): with the gradients of input and weights. device (`str`): where. seed (`int`): of weights and
            input.
    """

    kernel: int = 3
    window: int = 65
    head_width: int = 64
    batch: int = 1
    repeats: int = 5
    backward: bool = False
    device: str = "cpu"
    seed: int = 1

    def __post_init__(self) -> None:
        check_sizes(1, self.head_width, self.kernel, self.window)
        for name in ("batch", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")


@dataclass(frozen=True)
class Measurement:
    """One part of one layer at one size.

    Args:
        kind (`str`): one of `LAYER_TYPES`. part (`str`): "core" or "layer". length, width (`int`): n and d.
        seconds (`float`): of a call, the least of the samples.
        peak_bytes (`int`, *optional*): most that a call has allocated at a time, beyond input and weights; None where
            the device does not tell.
    """

    kind: str
    part: str
    length: int
    width: int
    seconds: float
    peak_bytes: int | None


def restricted_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, scaling: float
) -> torch.Tensor:
    """Self-attention in which a position sees itself and (r - 1) / 2 neighbours on either side, in O(r n d).

    The sequence is cut into blocks; each is multiplied with the keys that any of its positions sees, so no n x n matrix
    is ever made.

    Args:
        query, key (`torch.Tensor`): [B, H, n, K]. value: [B, H, n, K'].
        window (`int`): r, odd. scaling (`float`): 1 / sqrt(d_k).

    Returns:
        `torch.Tensor`: [B, n, H, K'], as `eager_attention_forward` gives it.

    Source: Vaswani et al. 2017, section 4 ("a neighborhood of size r in the input sequence centered around the
    respective output position").
    """
    length, side = query.shape[2], (window - 1) // 2
    block, count = blocks_of(length, window)
    missing = count * block - length
    pad = nn.functional.pad
    seen = block + 2 * side  # W
    queries = pad(query, (0, 0, 0, missing)).unflatten(2, (count, block))  # [B, H, C, b, K]
    keys = pad(key, (0, 0, side, side + missing)).unfold(2, seen, block)  # [B, H, C, K, W]
    values = pad(value, (0, 0, side, side + missing)).unfold(2, seen, block)  # [B, H, C, K', W]
    place = torch.arange(seen, device=query.device)  # of a key in what its block sees
    offset = place - torch.arange(block, device=query.device)[:, None]  # [b, W]
    position = place - side + block * torch.arange(count, device=query.device)[:, None]  # [C, W], in the sequence
    is_seen = ((offset >= 0) & (offset < window)) & ((position >= 0) & (position < length))[:, None]  # [C, b, W]
    scores = torch.matmul(queries, keys) * scaling  # [B, H, C, b, W]
    # Not -inf: a row of the last block that is all padding would become NaN, and its gradient with it.
    scores = scores.masked_fill(~is_seen, torch.finfo(scores.dtype).min)
    mixed = torch.matmul(torch.softmax(scores, dim=-1), values.transpose(-1, -2))  # [B, H, C, b, K']
    return mixed.flatten(2, 3)[:, :, :length].transpose(1, 2)  # [B, n, H, K']


class RestrictedAttention(VaswaniAttention):
    """The model's multi-head self-attention, each position seeing its neighbourhood alone.

    Args:
        config (`VaswaniConfig`): widths and heads. window (`int`): r.
    """

    def __init__(self, config: VaswaniConfig, window: int):
        super().__init__(config)
        self.window = window

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        query = self.split_heads(self.q_proj(hidden_states), self.d_k)  # [B, H, n, K]
        key, value = self.keys_and_values(hidden_states, False, None)
        heads = restricted_attention(query, key, value, self.window, self.scaling)
        return self.out_proj(heads.flatten(2)), None  # [B, n, d]


def make_layer(kind: str, width: int, settings: BenchSettings) -> nn.Module:
    """A layer of Table 1, from [B, n, d] to [B, n, d], without dropout.

    Args:
        kind (`str`): one of `LAYER_TYPES`. width (`int`): d, a multiple of the width of a head.

    Returns:
        `nn.Module`: its output is a tensor, or a tuple that begins with it. Attention is the model's own, in its plain
        form: softmax(Q K^T) V with all weights at hand.

    Raises:
        ValueError: an unknown kind, or a width that heads do not divide.
    """
    if width % settings.head_width:
        raise ValueError(f"Width {width} is no multiple of the head width {settings.head_width}.")
    heads = width // settings.head_width
    config = VaswaniConfig(d_model=width, num_attention_heads=heads, d_k=settings.head_width, d_v=settings.head_width)
    config._attn_implementation = "eager"
    if kind == SELF_ATTENTION:
        return VaswaniAttention(config)
    if kind == RESTRICTED:
        return RestrictedAttention(config, settings.window)
    if kind == RECURRENT:
        return nn.LSTM(width, width, batch_first=True)
    if kind == CONVOLUTIONAL:
        return _Convolution(width, settings.kernel)
    raise ValueError(f"Unknown layer type {kind!r}. Types: {', '.join(LAYER_TYPES)}.")


class _Convolution(nn.Conv1d):
    """A convolution over positions that keeps their number."""

    def __init__(self, width: int, kernel: int):
        super().__init__(width, width, kernel, padding=kernel // 2)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states.transpose(1, 2)).transpose(1, 2)  # [B, n, d]


def make_call(kind: str, part: str, layer: Any, length: int, width: int, settings: BenchSettings) -> Callable[[], None]:
    """What is timed: a forward pass of a layer or of attention's core, and its gradients where those are asked for.

    Returns:
        `Callable[[], None]`: keeps nothing.
    """
    generator = torch.Generator().manual_seed(settings.seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(settings.device).requires_grad_(settings.backward)

    if part == CORE:
        heads = (settings.batch, width // settings.head_width, length, settings.head_width)
        query, key, value = noise(*heads), noise(*heads), noise(*heads)  # [B, H, n, K]
        wanted = [query, key, value]

        def forward() -> Any:
            if kind == RESTRICTED:
                return restricted_attention(query, key, value, settings.window, layer.scaling)
            return eager_attention_forward(layer, query, key, value, None, layer.scaling)
    else:
        states = noise(settings.batch, length, width)
        wanted = [states, *layer.parameters()]

        def forward() -> Any:
            return layer(states)

    slope = torch.ones(settings.batch, length, width, device=settings.device)

    def call() -> None:
        with nullcontext() if settings.backward else torch.no_grad():
            output = forward()
            output = output[0] if isinstance(output, tuple) else output
        if settings.backward:
            torch.autograd.grad(output, wanted, slope.view_as(output))

    return call


def measure_layers(
    sizes: list[tuple[int, int]], settings: BenchSettings, parts: tuple[tuple[str, str], ...] = PARTS
) -> list[Measurement]:
    """Time and memory of the parts of layers at each size.

    On a processor with one thread the time is the thread's own, so that other programs' turns are not counted. The
    samples of all sizes take turns, so that a burst of other work falls on all of them, and the least counts.

    Args:
        sizes (`list[tuple[int, int]]`): n and d of each. settings (`BenchSettings`). parts: see `PARTS`.

    Returns:
        `list[Measurement]`: by size, then part, as given.

    Raises:
        ValueError: a width that heads do not divide, or a size for which the memory does not suffice.
    """
    device = torch.device(settings.device)
    torch.manual_seed(settings.seed)
    widths = sorted({d for _, d in sizes})
    kinds = {kind for kind, _ in parts}
    layers = {(k, d): make_layer(k, d, settings).to(device).train(settings.backward) for k in kinds for d in widths}
    best: dict[Any, float] = {}
    calls: dict[Any, int] = {}
    peaks: dict[Any, int | None] = {}
    keys = [(n, d, kind, part) for n, d in sizes for kind, part in parts]
    total = len(keys) * (settings.repeats + 1)
    with freed_memory_kept(device), late_bar("measuring", "sample", total=total) as bar:
        for turn in range(settings.repeats + 1):
            for key in keys:
                n, d, kind, part = key
                call = make_call(kind, part, layers[kind, d], n, d, settings)
                try:
                    if turn == 0:
                        call()  # sets kernels up
                        calls[key] = min(_MOST_CALLS, 1 + int(_SAMPLE_S / max(1e-9, _seconds_of(call, 1, device))))
                        peaks[key] = peak_bytes(call, device)
                    else:
                        call()  # brings its data near, after another size was at work
                        seconds = _seconds_of(call, calls[key], device)
                        best[key] = min(best.get(key, seconds), seconds)
                except RuntimeError as error:
                    # In main memory it is a plain RuntimeError.
                    if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
                        raise
                    raise ValueError(
                        f"The memory of {device} does not suffice for {kind} at n = {n}, d = {d}: leave that size out."
                    ) from error
                bar.update()
    return [Measurement(k[2], k[3], k[0], k[1], best[k], peaks[k]) for k in keys]


def is_thread_time(device: torch.device) -> bool:
    """Whether times are those of this thread alone: on a processor, where one thread computes."""
    return device.type == "cpu" and torch.get_num_threads() == 1


def _seconds_of(call: Callable[[], None], count: int, device: torch.device) -> float:
    def clock() -> float:
        return time.thread_time() if is_thread_time(device) else device_clock(device)

    start = clock()
    for _ in range(count):
        call()
    return (clock() - start) / count


def peak_bytes(call: Callable[[], None], device: torch.device) -> int | None:
    """Most memory that a call has allocated at a time, beyond what was in use before.

    On a processor it is the record of torch's own allocator, which holds every tensor, also those inside an operator;
    what a kernel library takes by itself is not in it. Elsewhere the device's own count.

    Returns:
        `int`, *optional*: bytes; None where the device does not count.
    """
    if device.type != "cpu":
        backend: Any = getattr(torch, device.type, None)
        if not hasattr(backend, "max_memory_allocated"):
            call()
            return None
        backend.synchronize()
        backend.reset_peak_memory_stats(device)
        before = backend.memory_allocated(device)
        call()
        backend.synchronize()
        return backend.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would tell of each start on standard error
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    live = most = 0
    for _, change in changes:
        live += change
        most = max(most, live)
    return most


@contextmanager
def freed_memory_kept(device: torch.device) -> Iterator[None]:
    """Inside, memory that is freed stays with this process.

    The C library gives large pieces back at once, and the system clears them anew for the next call. That begins at
    some size and takes longer than the products there, so the slope over n would tell of it.
    """
    is_glibc = device.type == "cpu" and sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
    if not is_glibc:
        yield
        return
    library = ctypes.CDLL(None)
    trim_threshold, map_most = -1, -4  # of malloc.h
    library.mallopt(map_most, 0)
    library.mallopt(trim_threshold, 2**31 - 1)
    try:
        yield
    finally:
        library.mallopt(map_most, 65536)
        library.mallopt(trim_threshold, 128 * 1024)
        library.malloc_trim(0)
