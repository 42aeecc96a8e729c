"""Memory and time of updates, measured on a copy of the model that is thrown away."""

import copy
import ctypes
import gc
import math
import platform
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from .dry_run_cost import PRECISIONS, count_flops, device_clock
from .recipe import Recipe
from .schedule import paper_optimizer, set_learning_rate

_MEASURED_SHAPES = 8  # batch shapes whose FLOPs are counted
_REPEATS = 3  # updates that are timed, of each size
_ENOUGH_S = 20.0  # no further repeat once measuring has taken this long


@dataclass(frozen=True)
class MemoryNeed:
    """Memory of one device, without sharding.

    Args:
        device (`str`): that was measured. weights_bytes, gradient_bytes, adam_bytes (`int`): counted exactly.
        activation_bytes (`int`, *optional*): measured on the largest batch; None where it could not be.
        total_bytes (`int`): their sum. available_bytes (`int`, *optional*): what the device has.
        snapshot_bytes (`int`): of main memory, for snapshots of the weights that are averaged at the end.
        largest_rows, largest_src, largest_tgt (`int`): shape of the largest batch: pairs, source and target tokens.
    """

    device: str
    weights_bytes: int
    gradient_bytes: int
    adam_bytes: int
    activation_bytes: int | None
    total_bytes: int
    available_bytes: int | None
    snapshot_bytes: int
    largest_rows: int
    largest_src: int
    largest_tgt: int


@dataclass(frozen=True)
class TimeNeed:
    """Time of an update on one device, all its batches one after the other, and of the run.

    Args:
        mean_s (`float`): of an update, from batches with the middle and the largest number of places, scaled to the
            mean. step_s (`float`): the optimizer's part of it.
        tgt_tokens_per_s (`float`): over all devices. hours (`float`): of the run.
    """

    mean_s: float
    step_s: float
    tgt_tokens_per_s: float
    hours: float


class BatchShapes:
    """Sizes of the batches of an epoch, by number: [batches] each; and its tokens."""

    def __init__(self, plan: Any, dataset: Any):
        batches = [np.asarray(plan[number]) for number in range(len(plan))]
        src, tgt = ([np.asarray(n)[b] for b in batches] for n in (dataset.src_lengths, dataset.tgt_lengths))
        self.rows = np.array([len(batch) for batch in batches])
        self.src, self.tgt = (np.array([int(n.max()) for n in side]) for side in (src, tgt))
        self.src_tokens, self.tgt_tokens = (sum(int(n.sum(dtype=np.int64)) for n in side) for side in (src, tgt))
        self.widths = self.src + self.tgt
        self.places = self.rows * self.widths
        self.middle = int(self.places.argsort(kind="stable")[len(self.places) // 2])
        self.largest = int(self.places.argmax())


class Bench:
    """A copy of the model with an optimizer of its own, on which updates can be tried.

    Args:
        model, recipe, precision: see `dry_run`. device (`torch.device`): of the copy.
        make_batch (`Callable[[int], dict]`): the batch of a number.
    """

    def __init__(
        self, model: Any, make_batch: Callable[[int], Any], recipe: Recipe, device: torch.device, precision: str | None
    ):
        self.make_batch, self.device, self.kind = make_batch, device, PRECISIONS.get(precision)
        workers = (0 if device.type == "cpu" else 2) if recipe.loader_workers is None else recipe.loader_workers
        self.makes_batches = workers == 0
        self.max_grad_norm = recipe.max_grad_norm or math.inf
        self.model = copy.deepcopy(model).to(device).train()
        if recipe.gradient_checkpointing:
            self.model.activation_checkpointing_enable()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = paper_optimizer(self.trained)
        # The rate changes neither time nor memory; at 0 the weights stay in the range that they are made for.
        set_learning_rate(self.optimizer, 0.0)
        self.backend: Any = getattr(torch, device.type, None)

    def batch(self, number: int) -> dict[str, torch.Tensor]:
        return {key: value.to(self.device) for key, value in self.make_batch(number).items()}

    def autocast(self) -> Any:
        return nullcontext() if self.kind is None else torch.autocast(self.device.type, dtype=self.kind)

    def forward_backward(self, number: int) -> float:
        """Seconds of one batch, with those of making it only where no other process makes it meanwhile."""
        ready = None if self.makes_batches else self.batch(number)
        start = device_clock(self.device)
        batch = ready or self.batch(number)
        count = (batch["labels"] != -100).sum()
        with self.autocast():
            loss = self.model(**batch, num_items_in_batch=count).loss
        loss.backward()
        del loss
        return device_clock(self.device) - start

    def step(self) -> float:
        """Seconds of clipping, Adam, and making the gradients zero again; they keep their memory."""
        start = device_clock(self.device)
        nn.utils.clip_grad_norm_(self.trained, self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return device_clock(self.device) - start

    def peak_bytes_of(self, work: Callable[[], Any]) -> tuple[int | None, Any]:
        """Memory that some work takes at its peak, beyond what is in use before, and what the work gives."""
        if self.device.type == "cpu":
            return _main_memory_peak_of(work)
        if not hasattr(self.backend, "max_memory_allocated"):
            return None, work()
        self.backend.synchronize()
        self.backend.reset_peak_memory_stats(self.device)
        before = self.backend.memory_allocated(self.device)
        given = work()
        return self.backend.max_memory_allocated(self.device) - before, given

    def flops_of_epoch(self, shapes: BatchShapes) -> float:
        """Counted on a row of a few batches, from the shortest pairs to the longest, each standing for its like."""
        by_width = shapes.widths.argsort(kind="stable")
        total = 0.0
        for neighbours in np.array_split(by_width, min(_MEASURED_SHAPES, len(by_width))):
            chosen = int(neighbours[len(neighbours) // 2])
            row = {key: value[:1] for key, value in self.batch(chosen).items()}
            with self.autocast():
                per_row = count_flops(self.model, row)
            total += per_row / int(shapes.widths[chosen]) * int(shapes.places[neighbours].sum())
        return total


def measure(
    bench: Bench, shapes: BatchShapes, recipe: Recipe, accumulation: int, tgt_tokens: float
) -> tuple[int | None, TimeNeed | None]:
    """Activation bytes of the largest batch, and time of updates.

    Args:
        bench, shapes, recipe: on which, of what and for how long. accumulation (`int`): batches of an update, one after
            the other. tgt_tokens (`float`): of an update, over all devices.

    Returns:
        `tuple`: None for what the memory does not suffice to measure.
    """
    begin = time.perf_counter()
    sizes = (shapes.middle, shapes.largest)
    found: dict[int, list[float]] = {number: [] for number in sizes}
    steps: list[float] = []
    try:
        # The first pass sets up kernels and Adam's states, so that the second measures activations alone.
        found[shapes.middle].append(bench.forward_backward(shapes.middle))
        steps.append(bench.step())
        activation_bytes, seconds = bench.peak_bytes_of(lambda: bench.forward_backward(shapes.largest))
        found[shapes.largest].append(seconds)
        steps.append(bench.step())
        for number in sizes * _REPEATS:
            if time.perf_counter() - begin < _ENOUGH_S:
                found[number].append(bench.forward_backward(number))
                steps.append(bench.step())
    except RuntimeError as error:
        # In main memory it is a plain RuntimeError.
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        return None, None
    # The first of each size is left out where there is a second.
    batch_s = [float(np.median(found[number][1:] or found[number])) for number in sizes]
    step_s = float(np.median(steps[1:] or steps))
    per_place = sum(batch_s) / int(shapes.places[list(sizes)].sum())
    mean_s = accumulation * per_place * float(shapes.places.mean()) + step_s
    hours = recipe.updates * mean_s / 3600
    return activation_bytes, TimeNeed(mean_s, step_s, tgt_tokens_per_s=tgt_tokens / mean_s, hours=hours)


def memory_need(
    model: nn.Module, device: torch.device, activation_bytes: int | None, recipe: Recipe, shapes: BatchShapes
) -> MemoryNeed:
    """What is counted, with the measured `activation_bytes` added."""
    weights = sum(p.nbytes for p in model.parameters())
    trained = [p.nbytes for p in model.parameters() if p.requires_grad]
    # Two moments like the weights, and for each matrix a float32 that counts the steps.
    adam = sum(2 * count + 4 for count in trained)
    available = None
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    elif device.type == "cpu":
        available = psutil.virtual_memory().total
    return MemoryNeed(
        device=str(device),
        weights_bytes=weights,
        gradient_bytes=sum(trained),
        adam_bytes=adam,
        activation_bytes=activation_bytes,
        total_bytes=weights + sum(trained) + adam + (activation_bytes or 0),
        available_bytes=available,
        snapshot_bytes=weights * min(recipe.average_last, -(-recipe.updates // recipe.average_every)),
        largest_rows=int(shapes.rows[shapes.largest]),
        largest_src=int(shapes.src[shapes.largest]),
        largest_tgt=int(shapes.tgt[shapes.largest]),
    )


def _main_memory_peak_of(work: Callable[[], Any]) -> tuple[int, Any]:
    """As `Bench.peak_bytes_of`, by a look at this process every millisecond.

    The operating system's own peak cannot be used: it is of the whole life of the process.
    """
    gc.collect()
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that the C library keeps would not show when used again
    process, is_over = psutil.Process(), threading.Event()
    before = most = process.memory_info().rss

    def watch() -> None:
        nonlocal most
        while not is_over.wait(0.001):
            most = max(most, process.memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        given = work()
    finally:
        is_over.set()
        thread.join()
    return max(most, process.memory_info().rss) - before, given


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Leave the random generators of Python, NumPy and torch where they were."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    others: list[Any] = []
    if device.type != "cpu":
        others = [torch.get_device_module(device).current_device() if device.index is None else device.index]
    try:
        with torch.random.fork_rng(others, device_type=device.type if others else "cuda"):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
