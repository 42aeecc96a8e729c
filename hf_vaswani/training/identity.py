"""What makes a run the run it is, so that no checkpoint is gone on with by another one."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .checkpoint import CheckpointError


def identity_of(recipe: Any, dataset: Any, sampler: Any) -> dict[str, Any]:
    """The text of a run and its order, as plain values. Weights are checked by their names and shapes.

    Args:
        recipe (`Recipe`): seed and batches. dataset: with `src_lengths` and `tgt_lengths`, and `weights` where it has
            them. sampler: with its budgets `src_tokens` and `tgt_tokens`.

    Returns:
        `dict`: for `Progress.run`.
    """
    found = {
        "seed": recipe.seed,
        "batches_per_update": recipe.batches_per_update,
        "pairs": len(dataset),
        "src_tokens": sampler.src_tokens,
        "tgt_tokens": sampler.tgt_tokens,
        "text": _fingerprint(torch.stack([dataset.src_lengths, dataset.tgt_lengths]).to(torch.int32)),
    }
    weights = getattr(dataset, "weights", None)
    return found if weights is None else found | {"weights": _fingerprint(weights)}


def refuse_other_run(folder: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    """See that a checkpoint is of this run.

    Args:
        folder (`Path`): the checkpoint. then, now (`dict`): as `identity_of` gave them.

    Raises:
        CheckpointError: it is of another run; what differs is named.
    """
    for name in [*now, *(set(then) - set(now))]:
        if then.get(name) != now.get(name):
            raise CheckpointError(
                f"{folder} is of another run: `{name}` was {then.get(name)!r} and is now {now.get(name)!r}. Put it "
                "back, or name another output folder."
            )


def judge_of(validate: Any, plan: Any) -> str | None:
    """What the best value of a run is a value of: metric and text. Values of two judges cannot be compared."""
    return None if validate is None else f"{plan.metric} {getattr(validate, 'text_key', '')}".strip()


def what_changed(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What differs from the setting of a checkpoint, as sentences; it may differ, and is said.

    Args:
        then, now (`dict`): as in `Progress.setting`; a name that `then` lacks is passed over.
    """
    for name, value in now.items():
        if value == then.get(name, value):
            continue
        if name == "judge":
            yield "Validation is another than before: what is best, and patience, are counted anew."
        else:
            yield f"Resuming with {name} {value}, where it was {then[name]}: later losses differ in their last digits."


def _fingerprint(numbers: torch.Tensor) -> str:
    """Numbers of each pair as one: another text has other lengths."""
    return hashlib.sha256(numbers.contiguous().numpy().tobytes()).hexdigest()[:16]
