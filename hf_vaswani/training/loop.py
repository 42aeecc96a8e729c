"""The training loop: one optimizer update after another, on whatever Accelerate finds.

The loss of an update is the sum over all its target tokens divided by their number, so that it does not matter into how
many batches, over how many processes, the update is cut.
"""

import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from ..data.batches import TokenBatchSampler
from ..data.progress import late_bar
from .averaging import SnapshotAverage
from .checkpoint import CheckpointError, CheckpointFolder, Progress, is_sharded, read_progress
from .config import CheckpointConfig, ValidationConfig
from .gradients import check_gradients
from .identity import identity_of, judge_of, refuse_other_run, what_changed
from .loader import rank_loader
from .metrics import MetricsFile
from .recipe import Recipe, make_accelerator
from .result import TrainingDiverged, TrainingResult
from .schedule import learning_rate, paper_optimizer, set_learning_rate
from .signals import stop_signals

Validate = Callable[[Any, Any], dict[str, float]]
_EPOCHS_LOOKED_AT = 1000


def train(
    model: Any,
    dataset: Dataset,
    sampler: TokenBatchSampler,
    collator: Callable[[list[Any]], Any],
    recipe: Recipe,
    metrics_path: str | os.PathLike[str] | None = None,
    accelerator: Any = None,
    checkpoints: CheckpointFolder | None = None,
    checkpoint_plan: CheckpointConfig | None = None,
    validate: Validate | None = None,
    validation_plan: ValidationConfig | None = None,
    resume: bool = False,
    on_start: Callable[[], None] | None = None,
) -> TrainingResult:
    """Train a model in place.

    The same seed gives the same losses, bit for bit, on the same CPU with the same number of threads, whether the run
    was interrupted or not.

    Args:
        model: a seq2seq model of transformers whose `forward` divides its loss by `num_items_in_batch`.
        dataset: gives `input_ids` and `labels` by index. sampler (`TokenBatchSampler`): makes the batches.
        collator: pads a list of examples, for example transformers' `DataCollatorForSeq2Seq`.
        recipe (`Recipe`): how long and how fast.
        metrics_path (*optional*): a file for one JSON line per update.
        accelerator (`accelerate.Accelerator`, *optional*): None makes one after the recipe.
        checkpoints (`CheckpointFolder`, *optional*): where checkpoints go; None: none are written.
        checkpoint_plan (`CheckpointConfig`, *optional*): when they are written.
        validate (*optional*): called as validate(model, accelerator) on every process; gives scores by name.
        validation_plan (`ValidationConfig`, *optional*): when, and which score says what is best.
        resume (`bool`): go on from the newest checkpoint in `checkpoints`; where there is none, begin.
        on_start (*optional*): called on every process once the checkpoint, if any, has been accepted.

    Returns:
        `TrainingResult`.

    Raises:
        TrainingDiverged: `nonfinite_limit` updates in a row had no finite gradient.
        CheckpointError: the checkpoint is damaged or of another run.
        ValueError: the sampler has no batch, or a parameter has no part in the loss.
    """
    # Under fractional weights an epoch may be empty, and the next one not.
    if len(sampler) == 0 and not any(len(sampler.plan(epoch)) for epoch in range(_EPOCHS_LOOKED_AT)):
        raise ValueError("There is nothing to train on: the corpus gives no batch.")
    run = _Run(model, dataset, sampler, collator, recipe, accelerator or make_accelerator(recipe))
    run.checkpoints, run.checkpoint_plan = checkpoints, checkpoint_plan or CheckpointConfig()
    run.validate, run.validation_plan = validate, validation_plan or ValidationConfig()
    run.progress.setting = run._setting()
    if resume and checkpoints is not None:
        run.resume()
    if on_start is not None:
        on_start()
    was_training = model.training
    run.model.train()
    try:
        # Without a checkpoint to write there is nothing to end in good order.
        with stop_signals(run.ask_to_stop) if checkpoints is not None else nullcontext():
            run.go(metrics_path)
    finally:
        model.train(was_training)
    return run.result


class _Run:
    """One start of a run: its parts, and where it stands."""

    checkpoints: CheckpointFolder | None
    checkpoint_plan: CheckpointConfig
    validate: Validate | None
    validation_plan: ValidationConfig

    def __init__(self, model: Any, dataset: Any, sampler: Any, collator: Any, recipe: Recipe, accelerator: Any):
        self.dataset, self.sampler, self.collator = dataset, sampler, collator
        self.recipe, self.accelerator = recipe, accelerator
        self.world_size: int = accelerator.num_processes
        self.per_process = -(-recipe.batches_per_update // self.world_size)
        accelerator.gradient_accumulation_steps = self.per_process
        if recipe.gradient_checkpointing:
            model.activation_checkpointing_enable()
        self.d_model: int = model.config.d_model
        # Nothing here looks at logits; a model that can do without them trains faster.
        self.extras = {"skip_logits": True} if "skip_logits" in inspect.signature(model.forward).parameters else {}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if is_sharded(accelerator):
            # FSDP2 shards by module, and refuses a matrix that two hold: the shared embedding becomes one module.
            model.set_input_embeddings(model.get_input_embeddings())
        self.model, self.optimizer = accelerator.prepare(model, paper_optimizer(trained))
        self.snapshots = SnapshotAverage(recipe.average_last) if recipe.average_last else None
        self.progress = Progress(run=identity_of(recipe, dataset, sampler))
        self.result = TrainingResult(planned_updates=recipe.updates)
        self.should_stop = False
        self._last_saved = time.perf_counter()
        self._loss_of_last = 0.0
        self._has_seen_gradients = False

    def _setting(self) -> dict[str, Any]:
        return {
            "processes": self.world_size,
            "precision": self.accelerator.mixed_precision,
            "judge": judge_of(self.validate, self.validation_plan),
        }

    # ------------------------------------------------------------------ resuming
    def resume(self) -> None:
        assert self.checkpoints is not None
        folder = self.checkpoints.resumable()
        if folder is None:
            if self.checkpoints.all():
                raise CheckpointError(
                    f"{self.checkpoints.root} has weights, but no checkpoint that a run can go on from: none has its "
                    "optimizer's state. Name another output folder."
                )
            return
        before = read_progress(folder)
        refuse_other_run(folder, before["run"] or {}, self.progress.run or {})
        self.progress = self.checkpoints.load(folder, self.model, self.optimizer, self.accelerator)
        self.result.from_update = self.progress.update
        self.say(f"Resuming after update {self.progress.update:,} ({folder}).")
        setting, now = self.progress.setting or {}, self._setting()
        for text in what_changed(setting, now):
            self.say(text)
        if now["judge"] != setting.get("judge", now["judge"]):
            self.progress.best_value, self.progress.best_update, self.progress.without_best = None, None, 0
        if self.progress.update >= self.recipe.updates:
            self.say(f"Nothing is left to train: {self.recipe.updates:,} updates are planned.")
        self.progress.setting = now

    def ask_to_stop(self) -> None:
        """End after the update in hand, with a checkpoint."""
        self.should_stop = True
        if self.accelerator.is_main_process:
            with suppress(OSError):  # within a signal's handler, where a stream may be half-way through a line
                os.write(2, b"\nStopping after this update, with a checkpoint. Once more ends the run at once.\n")

    def say(self, text: str) -> None:
        from tqdm import tqdm

        if self.accelerator.is_main_process:
            tqdm.write(text, file=sys.stderr)

    # ------------------------------------------------------------------ the loop
    def go(self, metrics_path: Any) -> None:
        accelerator, recipe, progress = self.accelerator, self.recipe, self.progress
        is_main = accelerator.is_main_process
        metrics = MetricsFile(
            metrics_path if is_main else None, after_update=progress.update, after_skipped=progress.skipped_count
        )
        metrics.write(
            start_after_update=progress.update,
            batches_per_update=recipe.batches_per_update,
            torch_threads=torch.get_num_threads(),
            processes=self.world_size,
            precision=accelerator.mixed_precision,
        )
        if recipe.batches_per_update % self.world_size:
            self.say(
                f"An update is {recipe.batches_per_update} batches, which {self.world_size} processes cannot share "
                "evenly: some wait for the others."
            )
        start, before = time.perf_counter(), progress.seconds
        bar = late_bar("training", "update", recipe.updates, initial=progress.update, is_shown=is_main)
        batches = self._batches()
        if self._is_out_of_patience():
            self.result.ended_by = "patience"
            self.say(
                f"Patience had ended this run: {progress.without_best} validations without a new best. To go on, raise "
                "`validation.patience`."
            )
        try:
            while self.result.ended_by != "patience" and progress.update < recipe.updates and self._may_go_on(start):
                micro = [next(batches) for _ in range(self.per_process)]
                first = (progress.epoch, progress.batch)
                record = self._update(first, micro)
                self._advance()
                progress.seconds = before + time.perf_counter() - start
                if record is None:
                    metrics.write(
                        skipped_update=progress.update + 1, skipped=progress.skipped_count, loss=self._loss_of_last
                    )
                    continue
                metrics.write(update=progress.update, **record, seconds=round(progress.seconds, 3))
                if accelerator.log_with:
                    accelerator.log({k: record[k] for k in ("loss", "learning_rate", "grad_norm")}, progress.update)
                self.result.losses.append(record["loss"])
                bar.update(1)
                bar.set_postfix(
                    loss=f"{record['loss']:.3f}",
                    tokens_s=f"{progress.tgt_tokens / max(progress.seconds, 1e-9):,.0f}",
                    refresh=False,
                )
                if self.snapshots is not None and progress.update % recipe.average_every == 0:
                    self.snapshots.add(accelerator.unwrap_model(self.model, keep_torch_compile=False))
                if self._validate_and_save(metrics):
                    self.result.ended_by = "patience"
                    break
            if self.checkpoints is not None and self.save(is_end=True) is None and is_main:
                raise CheckpointError(
                    f"Training ended after update {progress.update:,}, which could not be written to disk. Make room, "
                    "then resume: what came after the last checkpoint is trained again."
                )
            self._finish()
        finally:
            bar.close()
            metrics.close()

    def _batches(self) -> Iterator[Any]:
        """This process's batches, from where the run stands, epoch after epoch."""
        recipe, accelerator = self.recipe, self.accelerator
        workers = recipe.loader_workers
        if workers is None:
            workers = 0 if accelerator.device.type == "cpu" else 2
        epoch, batch = self.progress.epoch, self.progress.batch
        while True:
            plan = self.sampler.plan(epoch)
            if len(plan) == 0:
                epoch += 1
                continue
            self.progress.epoch, self.plan_length = epoch, len(plan)
            yield from rank_loader(
                self.dataset, plan, batch, self.collator, recipe.batches_per_update, accelerator.process_index,
                self.world_size, workers,
            )  # fmt: skip
            epoch, batch = epoch + 1, 0

    def _advance(self) -> None:
        """Count the batches of an update, over the end of the epoch where it comes."""
        self.progress.batch += self.recipe.batches_per_update
        if self.progress.batch >= self.plan_length:
            self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0

    def _update(self, first: tuple[int, int], micro: list[Any]) -> dict[str, float] | None:
        """Forward, backward and step; None where the gradient was no number and the weights stay as they were."""
        accelerator, recipe, progress = self.accelerator, self.recipe, self.progress
        update = progress.update + 1
        rate = learning_rate(update, self.d_model, recipe.warmup_updates, recipe.rate_factor)
        set_learning_rate(self.optimizer, rate)
        loss, token_count = self._forward_backward(first, micro)
        self._loss_of_last = loss
        if not self._has_seen_gradients and not is_sharded(accelerator):  # gradients live elsewhere there
            check_gradients(accelerator.unwrap_model(self.model, keep_torch_compile=False))
        self._has_seen_gradients = True
        grad_norm = self._gradient_norm()
        is_finite = math.isfinite(grad_norm)
        if is_finite or accelerator.scaler is not None:
            # A loss scale only falls when the step is taken, which then leaves the weights alone.
            self.optimizer.step()
        self.optimizer.zero_grad()
        if not is_finite:
            progress.skipped_count += 1
            progress.skipped_in_a_row += 1
            if progress.skipped_in_a_row >= recipe.nonfinite_limit:
                raise TrainingDiverged(
                    f"{progress.skipped_in_a_row} updates in a row, at update {update}, had a loss or gradient that is "
                    "no finite number. Lower the rate (`rate_factor`), lengthen `warmup_updates`, or set "
                    "`max_grad_norm`."
                )
            return None
        progress.skipped_in_a_row = 0
        progress.update = update
        progress.tgt_tokens += token_count
        return {"loss": loss, "learning_rate": rate, "grad_norm": grad_norm, "tgt_tokens": token_count}

    def _forward_backward(self, first: tuple[int, int], micro: list[Any]) -> tuple[float, int]:
        """Add up the gradients of one update; the loss per target token and the number of target tokens, everywhere."""
        from accelerate.utils import send_to_device

        accelerator = self.accelerator
        counts = torch.stack([(batch["labels"] != -100).sum() for batch in micro]).sum().to(accelerator.device)
        token_count = int(accelerator.reduce(counts, reduction="sum"))
        # Processes and accumulated batches are averaged by the back end, not added: each share is scaled up in turn.
        # A tensor, since a compiled model is compiled anew for every other number.
        divisor = torch.tensor(max(1, token_count) / (self.world_size * self.per_process), device=accelerator.device)
        total = torch.zeros((), device=accelerator.device)
        for turn, batch in enumerate(micro):
            epoch, number = first[0], first[1] + turn * self.world_size + accelerator.process_index
            # Dropout depends on the batch alone: not on what came before it, nor on which process has it.
            torch.manual_seed(((self.recipe.seed * 1_000_003 + epoch) * 1_000_003 + number) % 2**63)
            with accelerator.accumulate(self.model):
                inputs = send_to_device(batch, accelerator.device)
                loss = self.model(**inputs, num_items_in_batch=divisor, **self.extras).loss
                accelerator.backward(loss)
            total += loss.detach()
        return float(accelerator.reduce(total, reduction="sum")) / (self.world_size * self.per_process), token_count

    def _gradient_norm(self) -> float:
        # Gradients are shared before they are measured, so all processes see the same norm and take the same branch.
        limit = self.recipe.max_grad_norm or math.inf
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        if norm is None:  # DeepSpeed clips by its own configuration and steps within backward
            norm = self.model.get_global_grad_norm() or 0.0
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return float(norm)

    def _may_go_on(self, start: float) -> bool:
        """False once the clock or a signal ends the run; all processes must agree, or one would wait for ever."""
        minutes = self.recipe.max_minutes
        is_over = minutes is not None and time.perf_counter() - start >= minutes * 60
        flags = torch.tensor([float(is_over), float(self.should_stop)], device=self.accelerator.device)
        over, stopped = self.accelerator.reduce(flags, reduction="sum").tolist()
        if stopped:
            self.result.ended_by = "signal"
        elif over:
            self.result.ended_by = "clock"
        return not over and not stopped

    # ------------------------------------------------------------------ between updates
    def _validate_and_save(self, metrics: MetricsFile) -> bool:
        """What is due after an update; True where patience is at its end."""
        update, plan = self.progress.update, self.validation_plan
        is_last = update == self.recipe.updates
        is_save_due = update % self.checkpoint_plan.every_updates == 0
        is_best = False
        if self.validate is not None and (
            update % (plan.every_updates or self.checkpoint_plan.every_updates) == 0 or is_last
        ):
            is_best = self._measure(metrics)
        is_save_due = self._minutes_are_up() or is_save_due
        if self.checkpoints is not None and (is_save_due or is_best):
            self.save(is_due=is_save_due)
        return self._is_out_of_patience()

    def _is_out_of_patience(self) -> bool:
        patience = self.validation_plan.patience
        return self.validate is not None and patience is not None and self.progress.without_best >= patience

    def _measure(self, metrics: MetricsFile) -> bool:
        """Validate; whether this is the best so far."""
        assert self.validate is not None
        self.model.eval()
        scores = self.validate(self.model, self.accelerator)
        self.model.train()
        progress, name = self.progress, self.validation_plan.metric
        value = scores[name] if name == "bleu" else -scores[name]
        is_best = value > (
            -math.inf if progress.best_value is None else progress.best_value
        )  # never one that is no number
        if is_best:
            progress.best_value, progress.best_update, progress.without_best = value, progress.update, 0
        else:
            progress.without_best += 1
        self.result.validations.append({"update": progress.update, **scores})
        metrics.write(validated_update=progress.update, **scores, is_best=is_best)
        if self.accelerator.log_with:
            self.accelerator.log({f"valid_{k}": v for k, v in scores.items()}, progress.update)
        shown = ", ".join(f"{k} {v:.2f}" if v < 1e6 else f"{k} {v:.2e}" for k, v in scores.items())
        self.say(f"Update {progress.update:,}: validation {shown}{' (best so far)' if is_best else ''}.")
        return is_best

    def _minutes_are_up(self) -> bool:
        minutes = self.checkpoint_plan.every_minutes
        if minutes is None:
            return False
        is_due = torch.tensor(
            float(time.perf_counter() - self._last_saved >= minutes * 60), device=self.accelerator.device
        )
        return float(self.accelerator.reduce(is_due, reduction="sum")) > 0

    def save(self, is_due: bool | None = None, is_end: bool = False) -> Path | None:
        assert self.checkpoints is not None
        self._last_saved = time.perf_counter()
        if is_due is None:
            is_due = self.progress.update > 0 and self.progress.update % self.checkpoint_plan.every_updates == 0
        return self.checkpoints.save(self.progress, self.model, self.optimizer, self.accelerator, is_due, is_end)

    def _finish(self) -> None:
        result, progress = self.result, self.progress
        if self.snapshots is not None and progress.update > result.from_update:
            plain = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            if progress.update % self.recipe.average_every:
                self.snapshots.add(plain)
            self.snapshots.write_into(plain)
            result.averaged_count = len(self.snapshots)
        for name in ("skipped_count", "tgt_tokens", "seconds", "best_update"):
            setattr(result, name, getattr(progress, name))
        result.updates = progress.update
        done = progress.batch / len(self.sampler.plan(progress.epoch)) if progress.batch else 0.0
        result.epochs = progress.epoch + done
