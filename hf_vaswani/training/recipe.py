"""How a model is trained, as against on what: updates, rate, precision and safety."""

import math
from dataclasses import dataclass
from typing import Any

from huggingface_hub.dataclasses import strict

_POSITIVE = ("updates", "batches_per_update", "warmup_updates", "average_every", "nonfinite_limit")


@strict
@dataclass
class Recipe:
    """What the loop does; the defaults are the paper's base run.

    Args:
        updates (`int`): planned optimizer updates.
        max_minutes (`float`, *optional*): wall-clock limit of this start of the run, looked at before each update. It
            decides only where the run ends: no update depends on it.
        batches_per_update (`int`): batches of one update, over all processes together.
        warmup_updates (`int`), rate_factor (`float`): see `learning_rate`.
        max_grad_norm (`float`, *optional*): clip the gradient to this norm. Choice: None, as in the authors' code.
        precision (`str`, *optional*): "no" (float32), "bf16" or "fp16" (mixed, with a loss scale); None: what
            `accelerate launch` says, else float32.
        gradient_checkpointing (`bool`): compute activations twice instead of keeping them.
        compile (`bool`): run the model through torch.compile, with dynamic shapes.
        average_last (`int`), average_every (`int`): at the end of `train`, the weights become the mean of the last
            `average_last` snapshots in memory, taken every so many updates and after the last one; 0 keeps the last
            weights. A run with checkpoints on disk averages those instead.
        nonfinite_limit (`int`): updates in a row without a finite gradient after which the run ends. One such update
            is skipped and counted.
        seed (`int`): of weights, dropout and the order of batches.
        loader_workers (`int`, *optional*): processes that make batches; None: 2 beside an accelerator, else none.
        log_with (`list[str]`): trackers of Accelerate, such as "tensorboard".
    """

    updates: int = 100_000
    max_minutes: float | int | None = None
    batches_per_update: int = 1
    warmup_updates: int = 4000
    rate_factor: float | int = 1.0
    max_grad_norm: float | int | None = None
    precision: str | None = None
    gradient_checkpointing: bool = False
    compile: bool = False
    average_last: int = 0
    average_every: int = 1500
    nonfinite_limit: int = 10
    seed: int = 1
    loader_workers: int | None = None
    log_with: list[str] | None = None

    def validate_numbers(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)!r}.")
        for name in ("average_last", "seed", "loader_workers"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"`{name}` must be at least 0, got {getattr(self, name)!r}.")
        if self.seed >= 2**63:
            raise ValueError(f"`seed` must be below 2**63, got {self.seed!r}.")
        for name in ("rate_factor", "max_minutes", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"`{name}` must be a number above 0, got {value!r}.")
        if self.precision not in (None, "no", "bf16", "fp16"):
            raise ValueError(f'`precision` must be "no", "bf16" or "fp16", got {self.precision!r}.')


def leave_processes() -> None:
    """Part from the other processes of a run, as a program that was started by a launcher must before it ends.

    Threads that still hold a process group while the interpreter shuts down can abort it, and the launcher then calls a
    good run failed.
    """
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def make_accelerator(recipe: Recipe, project_dir: str | None = None) -> Any:
    """Accelerate's `Accelerator` as a recipe wants it: its precision, torch.compile, and its trackers."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    return Accelerator(
        # Without an accelerator, processes find each other only where Accelerate is told that it is to use CPUs.
        cpu=not torch.accelerator.is_available(),
        mixed_precision=recipe.precision,
        log_with=recipe.log_with,
        project_dir=project_dir,
        # Batches differ in width, and a compilation for each would take longer than it saves.
        dynamo_plugin=TorchDynamoPlugin(backend="inductor", dynamic=True) if recipe.compile else None,
    )
