"""The training loop: one optimizer update after another, on whatever Accelerate finds.

Each update takes `micro_batches` batches from every process. Its loss is the sum over all their target tokens divided
by the number of those tokens, so that it does not matter how an update is split.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ..data.batches import TokenBatchSampler
from .averaging import SnapshotAverage
from .metrics import MetricsFile, progress_bar
from .schedule import learning_rate, paper_optimizer, set_learning_rate


class TrainingDiverged(RuntimeError):
    """Too many updates in a row had a loss or a gradient that is no number."""


@dataclass
class Recipe:
    """What a run does; the defaults are the paper's base run.

    Args:
        updates (`int`): planned optimizer updates.
        max_seconds (`float`, *optional*): wall-clock limit, looked at before each update. It decides only where the run
            ends: no update depends on it.
        micro_batches (`int`): batches per update and process.
        warmup_updates (`int`), rate_factor (`float`): see `learning_rate`.
        max_grad_norm (`float`, *optional*): clip the gradient to this norm. Choice: None, as in the authors' code.
        average_last (`int`), average_every (`int`): at the end, the weights become the mean of the last `average_last`
            snapshots, taken every so many updates and after the last one; 0 keeps the last weights.
        nonfinite_limit (`int`): updates in a row without a finite gradient after which the run ends. One such update
            is skipped and counted.
        seed (`int`): of dropout and of the order of batches.
    """

    updates: int = 100_000
    max_seconds: float | None = None
    micro_batches: int = 1
    warmup_updates: int = 4000
    rate_factor: float = 1.0
    max_grad_norm: float | None = None
    average_last: int = 5
    average_every: int = 1500
    nonfinite_limit: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("updates", "micro_batches", "warmup_updates", "average_every", "nonfinite_limit"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)!r}.")
        if self.average_last < 0:
            raise ValueError(f"`average_last` must be at least 0, got {self.average_last!r}.")
        for name in ("rate_factor", "max_seconds", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"`{name}` must be a number above 0, got {value!r}.")


@dataclass
class TrainingResult:
    """What a run did.

    Args:
        updates (`int`): optimizer updates done. planned_updates (`int`): those asked for.
        skipped_count (`int`): updates skipped for want of a finite gradient.
        tgt_tokens (`int`): target tokens trained on. epochs (`float`): passes over the data.
        seconds (`float`): of wall clock. losses (`list[float]`): of each update done, per target token, in nats.
        averaged_count (`int`): snapshots in the final weights.
    """

    planned_updates: int
    updates: int = 0
    skipped_count: int = 0
    tgt_tokens: int = 0
    epochs: float = 0.0
    seconds: float = 0.0
    averaged_count: int = 0
    losses: list[float] = field(default_factory=list)

    @property
    def stopped_early(self) -> bool:
        """Whether the clock ended the run before its plan."""
        return self.updates < self.planned_updates


def train(
    model: Any,
    dataset: Dataset,
    sampler: TokenBatchSampler,
    collator: Callable[[list[Any]], Any],
    recipe: Recipe,
    metrics_path: str | os.PathLike[str] | None = None,
    accelerator: Any = None,
) -> TrainingResult:
    """Train a model in place.

    The same seed gives the same losses, bit for bit, on the same machine with the same number of threads.

    Args:
        model: a seq2seq model of transformers whose `forward` divides its loss by `num_items_in_batch`.
        dataset: gives `input_ids` and `labels` by index. sampler (`TokenBatchSampler`): makes the batches.
        collator: pads a list of examples, for example transformers' `DataCollatorForSeq2Seq`.
        recipe (`Recipe`): how long and how fast.
        metrics_path (*optional*): a file for one JSON line per update.
        accelerator (`accelerate.Accelerator`, *optional*): None makes one with its defaults.

    Returns:
        `TrainingResult`.

    Raises:
        TrainingDiverged: `nonfinite_limit` updates in a row had no finite gradient.
        ValueError: the sampler has no batch.
    """
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    if len(sampler) == 0:
        raise ValueError("There is nothing to train on: the corpus gives no batch.")
    accelerator = accelerator or Accelerator()
    set_seed(recipe.seed, device_specific=accelerator.num_processes > 1)
    optimizer = paper_optimizer(model.parameters())
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collator)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = _endless(loader, sampler)
    d_model = accelerator.unwrap_model(model).config.d_model
    snapshots = SnapshotAverage(recipe.average_last) if recipe.average_last else None
    result = TrainingResult(planned_updates=recipe.updates)
    is_main = accelerator.is_main_process
    metrics = MetricsFile(metrics_path if is_main else None)
    metrics.write(recipe=asdict(recipe), processes=accelerator.num_processes, torch_threads=torch.get_num_threads())
    was_training = model.training
    model.train()
    skipped_in_a_row = micro_batch_count = 0
    start = time.perf_counter()
    bar = progress_bar(recipe.updates if is_main else None, "training", "update")
    try:
        while result.updates < recipe.updates and not _out_of_time(start, recipe, accelerator):
            micro = [next(batches) for _ in range(recipe.micro_batches)]
            micro_batch_count += len(micro)
            loss, token_count = _forward_backward(model, micro, accelerator)
            update = result.updates + 1
            rate = learning_rate(update, d_model, recipe.warmup_updates, recipe.rate_factor)
            grad_norm = float(accelerator.clip_grad_norm_(model.parameters(), recipe.max_grad_norm or math.inf))
            # Gradients are shared before they are measured, so all processes take the same branch.
            if not math.isfinite(grad_norm):
                optimizer.zero_grad()
                result.skipped_count += 1
                skipped_in_a_row += 1
                metrics.write(skipped_update=update, loss=loss, grad_norm=grad_norm)
                if skipped_in_a_row >= recipe.nonfinite_limit:
                    raise TrainingDiverged(
                        f"{skipped_in_a_row} updates in a row, from update {update}, had a loss or gradient that is "
                        "no finite number. Lower the rate (`rate_factor`), lengthen `warmup_updates`, or set "
                        "`max_grad_norm`."
                    )
                continue
            skipped_in_a_row = 0
            set_learning_rate(optimizer, rate)
            optimizer.step()
            optimizer.zero_grad()
            result.updates = update
            result.tgt_tokens += token_count
            result.losses.append(loss)
            result.seconds = time.perf_counter() - start
            if snapshots is not None and update % recipe.average_every == 0:
                snapshots.add(accelerator.unwrap_model(model))
            metrics.write(
                update=update,
                loss=loss,
                learning_rate=rate,
                grad_norm=grad_norm,
                tgt_tokens=token_count,
                seconds=round(result.seconds, 3),
            )
            bar.update(1)
            bar.set_postfix(
                loss=f"{loss:.3f}", tokens_s=f"{result.tgt_tokens / max(result.seconds, 1e-9):,.0f}", refresh=False
            )
        plain_model = accelerator.unwrap_model(model)
        if snapshots is not None and result.updates:
            if result.updates % recipe.average_every:
                snapshots.add(plain_model)
            snapshots.write_into(plain_model)
            result.averaged_count = len(snapshots)
    finally:
        bar.close()
        metrics.close()
        model.train(was_training)
    result.seconds = time.perf_counter() - start
    result.epochs = micro_batch_count * accelerator.num_processes / len(sampler)
    return result


def _endless(loader: Any, sampler: TokenBatchSampler) -> Iterator[Any]:
    """Batches of epoch 0, 1, 2 and so on."""
    epoch = 0
    while True:
        # Accelerate does not pass the epoch on to a sampler that it has split over processes.
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def _forward_backward(model: Any, micro: list[Any], accelerator: Any) -> tuple[float, int]:
    """Add up the gradients of one update; the loss per target token and the number of target tokens, everywhere."""
    counts = torch.stack([(batch["labels"] != -100).sum() for batch in micro]).sum()
    token_count = int(accelerator.reduce(counts, reduction="sum"))
    # Gradients of several processes are averaged, not added: each process's share is scaled up in turn.
    divisor = max(1, token_count) / accelerator.num_processes
    total = torch.zeros((), device=accelerator.device)
    for position, batch in enumerate(micro):
        is_last = position == len(micro) - 1
        with _maybe_sync(accelerator, model, is_last):
            loss = model(**batch, num_items_in_batch=divisor).loss
            accelerator.backward(loss)
        total += loss.detach()
    return float(accelerator.reduce(total, reduction="mean")), token_count


def _maybe_sync(accelerator: Any, model: Any, is_last: bool) -> Any:
    """Processes exchange gradients once an update, with its last micro-batch."""
    from contextlib import nullcontext

    return nullcontext() if is_last else accelerator.no_sync(model)


def _out_of_time(start: float, recipe: Recipe, accelerator: Any) -> bool:
    """Whether any process is over the limit; all of them must agree, or one would wait for ever."""
    if recipe.max_seconds is None:
        return False
    is_over = torch.tensor(float(time.perf_counter() - start >= recipe.max_seconds), device=accelerator.device)
    return float(accelerator.reduce(is_over, reduction="sum")) > 0
