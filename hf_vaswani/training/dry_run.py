"""What a run will take, found out before it is started: text, FLOPs, memory, time and disk.

Nothing of it trains the caller's model: all is counted, or measured on a copy that is thrown away.
"""

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import dry_run_text
from .checkpoint import RESUMABLE_KEPT
from .config import CheckpointConfig
from .dry_run_cost import ParameterCount, TrainingCost, count_parameters, paper_flops, paper_size, sustained_tflops
from .dry_run_measure import BatchShapes, Bench, MemoryNeed, TimeNeed, measure, memory_need, random_state_kept
from .recipe import Recipe


@dataclass(frozen=True)
class UpdateText:
    """The text of one update.

    Args:
        device_count (`int`): processes. accumulation (`int`): batches each takes one after the other in an update.
        batches_per_update (`int`): batches of an update, over all devices. batches_per_epoch (`int`): of the first
            epoch.
        src_budget, tgt_budget (`int`): padded tokens of a batch, at most.
        src_tokens, tgt_tokens (`float`): tokens of an update on average, padding left out.
        padding (`float`): share of padding in all places of the batches, from 0 to 1.
    """

    device_count: int
    accumulation: int
    batches_per_update: int
    batches_per_epoch: int
    src_budget: int
    tgt_budget: int
    src_tokens: float
    tgt_tokens: float
    padding: float

    @property
    def src_limit(self) -> int:
        """Padded source tokens of an update, at most: devices x budget x accumulation, less the turns without batch."""
        return self.batches_per_update * self.src_budget

    @property
    def tgt_limit(self) -> int:
        """Padded target tokens of an update, at most."""
        return self.batches_per_update * self.tgt_budget


@dataclass(frozen=True)
class CheckpointPlan:
    """What will be written, and what is kept.

    Args:
        written, kept, averaged (`list[int]`): updates after which a checkpoint is written; those that are there at the
            end, besides the best; those whose mean becomes the run's model.
        every_updates (`int`), every_minutes (`float`, *optional*): the rule.
        whole_bytes, weights_bytes (`int`): one checkpoint with the optimizer's state, and without.
        peak_bytes (`int`): most that is on the disk at a time. free_bytes (`int`): free there.
        folder (`str`): the run's.
    """

    written: list[int]
    kept: list[int]
    averaged: list[int]
    every_updates: int
    every_minutes: float | None
    whole_bytes: int
    weights_bytes: int
    peak_bytes: int
    free_bytes: int
    folder: str


@dataclass(frozen=True)
class DryRun:
    """What a run will take; `str()` gives it for reading, `to_dict()` for a file.

    Args:
        updates (`int`): planned. updates_per_epoch (`int`): of the first epoch. epochs (`float`): passes over the text.
        warmup_updates (`int`): of the rate. text, parameters, cost, memory: see each.
        time (`TimeNeed`, *optional*): None where the device has not the memory to measure it.
        checkpoints (`CheckpointPlan`, *optional*): None for a run that writes none.
        notes (`list[str]`): what the figures leave out. warnings (`list[str]`): what will go wrong.
    """

    updates: int
    updates_per_epoch: int
    epochs: float
    warmup_updates: int
    text: UpdateText
    parameters: ParameterCount
    cost: TrainingCost
    memory: MemoryNeed
    time: TimeNeed | None
    checkpoints: CheckpointPlan | None
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As plain values: bytes, seconds (`_s`), tokens, shares from 0 to 1."""
        values = asdict(self)
        values["text"] |= {"src_limit": self.text.src_limit, "tgt_limit": self.text.tgt_limit}
        return values

    def __str__(self) -> str:
        return "\n".join(dry_run_text.lines(self))


def dry_run(
    model: Any,
    sampler: Any,
    dataset: Any,
    collator: Callable[[list[Any]], Any],
    recipe: Recipe,
    checkpoints: CheckpointConfig | None = None,
    process_count: int | None = None,
    accelerator: Any = None,
    output: str | os.PathLike[str] = ".",
) -> DryRun:
    """Find out what a run will take, without starting it.

    The model, its gradients and mode, the random generators and the sampler are left as they were.

    Args:
        model: a seq2seq model of transformers, not yet prepared by Accelerate.
        sampler: makes the batches; `plan(0)` is looked at. dataset: gives `input_ids` and `labels` by index, and has
            `src_lengths` and `tgt_lengths`. collator: pads a list of examples.
        recipe (`Recipe`): how long and how fast.
        checkpoints (`CheckpointConfig`, *optional*): the rule by which they are written; None: none are.
        process_count (`int`, *optional*): devices that the run will have, which need not be here; None: those of the
            accelerator, or one.
        accelerator (`accelerate.Accelerator`, *optional*): gives device and precision; None: the model's device, and
            the recipe's precision.
        output: the run's folder, on whose disk there must be room; it need not exist.

    Returns:
        `DryRun`.

    Raises:
        ValueError: the corpus gives no batch, or `process_count` is below 1.
    """
    plan = sampler.plan(0)
    if len(plan) == 0:
        raise ValueError("There is nothing to train on: the corpus gives no batch.")
    if process_count is None:
        process_count = accelerator.num_processes if accelerator is not None else 1
    if process_count < 1:
        raise ValueError(f"`process_count` must be at least 1, got {process_count}.")
    device = torch.device(accelerator.device if accelerator is not None else next(model.parameters()).device)
    precision = accelerator.mixed_precision if accelerator is not None else recipe.precision

    shapes = BatchShapes(plan, dataset)
    updates_per_epoch = -(-len(plan) // recipe.batches_per_update)
    epochs = recipe.updates / updates_per_epoch
    text = UpdateText(
        device_count=process_count,
        accumulation=-(-recipe.batches_per_update // process_count),
        batches_per_update=recipe.batches_per_update,
        batches_per_epoch=len(plan),
        src_budget=sampler.src_tokens,
        tgt_budget=sampler.tgt_tokens,
        src_tokens=shapes.src_tokens / updates_per_epoch,
        tgt_tokens=shapes.tgt_tokens / updates_per_epoch,
        padding=1 - (shapes.src_tokens + shapes.tgt_tokens) / int(shapes.places.sum()),
    )
    with random_state_kept(device):
        bench = Bench(model, lambda number: collator([dataset[i] for i in plan[number]]), recipe, device, precision)
        flops_per_epoch = bench.flops_of_epoch(shapes)
        activation_bytes, time_need = measure(bench, shapes, recipe, text.accumulation, text.tgt_tokens)
        rate, rate_of = sustained_tflops(device, precision)
        del bench
    memory = memory_need(model, device, activation_bytes, recipe, shapes)
    cost = TrainingCost(
        counted=flops_per_epoch * epochs,
        sustained_tflops=rate,
        sustained_of=rate_of,
        paper_method=None if time_need is None else paper_flops(time_need.hours, process_count, rate),
        paper_size=paper_size(model.config),
    )
    disk = None
    if checkpoints is not None:
        disk = _checkpoint_plan(checkpoints, recipe.updates, time_need, memory, Path(output))
    result = DryRun(
        updates=recipe.updates,
        updates_per_epoch=updates_per_epoch,
        epochs=epochs,
        warmup_updates=recipe.warmup_updates,
        text=text,
        parameters=count_parameters(model),
        cost=cost,
        memory=memory,
        time=time_need,
        checkpoints=disk,
    )
    result.notes.extend(dry_run_text.notes(result, recipe, accelerator))
    result.warnings.extend(dry_run_text.warnings(result, recipe, checkpoints))
    return result


def checkpoint_updates(updates: int, every_updates: int, every_by_clock: int | None = None) -> list[int]:
    """After which updates a run writes a checkpoint.

    Args:
        updates (`int`): of the run. every_updates (`int`): one is due at each multiple of it.
        every_by_clock (`int`, *optional*): updates done in the time after which one is due again, counted from the
            last.

    Returns:
        `list[int]`: ascending; the last update is always among them.
    """
    written, last = [], 0
    while last < updates:
        due = (last // every_updates + 1) * every_updates
        if every_by_clock is not None:
            due = min(due, last + every_by_clock)
        last = min(due, updates)
        written.append(last)
    return written


def _checkpoint_plan(
    rule: CheckpointConfig, updates: int, time_need: TimeNeed | None, memory: MemoryNeed, output: Path
) -> CheckpointPlan:
    by_clock = None
    if rule.every_minutes is not None and time_need is not None:
        by_clock = max(1, math.ceil(rule.every_minutes * 60 / time_need.mean_s))
    written = checkpoint_updates(updates, rule.every_updates, by_clock)
    kept = written[-rule.keep_last :]
    whole, weights = memory.weights_bytes + memory.adam_bytes, memory.weights_bytes
    # The fullest moment: one more is written before the oldest is removed, and the best may be older than all of them.
    before = min(len(written) - 1, rule.keep_last)
    before_whole = min(before, RESUMABLE_KEPT)
    has_older_best = len(written) - 1 > rule.keep_last
    peak = whole * (before_whole + 1) + weights * (before - before_whole + has_older_best)
    existing = output.resolve()
    while not existing.exists():
        existing = existing.parent
    return CheckpointPlan(
        written=written,
        kept=kept,
        averaged=written[-rule.average_last :] if rule.average_last else [],
        every_updates=rule.every_updates,
        every_minutes=rule.every_minutes,
        whole_bytes=whole,
        weights_bytes=weights,
        peak_bytes=peak,
        free_bytes=shutil.disk_usage(existing).free,
        folder=str(output),
    )
