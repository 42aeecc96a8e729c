"""The mean of the last weights, which translates better than the last weights."""

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

_WEIGHTS = "model.safetensors"


class AveragingError(ValueError):
    """Checkpoints that cannot be averaged; the message says why."""


class SnapshotAverage:
    """Keeps the weights of the last few moments of training in main memory, and their mean.

    Args:
        count (`int`): snapshots kept; older ones are forgotten.

    Source: Vaswani et al. 2017, section 6.1: the last 5 checkpoints, written at 10-minute intervals.
    Choice: intervals are counted in updates, so that the mean does not depend on the speed of the machine.
    """

    def __init__(self, count: int):
        if count < 1:
            raise ValueError(f"`count` must be at least 1, got {count}.")
        self._snapshots: deque[dict[str, torch.Tensor]] = deque(maxlen=count)

    def __len__(self) -> int:
        return len(self._snapshots)

    def add(self, model: nn.Module) -> None:
        """Copy the weights of `model` as they are now; a shared matrix is copied once."""
        self._snapshots.append({n: p.detach().to("cpu", copy=True) for n, p in model.named_parameters()})

    @torch.no_grad()
    def write_into(self, model: nn.Module) -> None:
        """Replace the weights of `model` by the mean of the snapshots, summed in float64.

        Raises:
            RuntimeError: when there is no snapshot.
        """
        if not self._snapshots:
            raise RuntimeError("There is no snapshot to average: training was too short to take one.")
        for name, parameter in model.named_parameters():
            total = torch.zeros(parameter.shape, dtype=torch.float64)
            for snapshot in self._snapshots:
                total += snapshot[name]
            parameter.copy_(total / len(self._snapshots))


def average_weights(folders: Sequence[str | os.PathLike[str]]) -> dict[str, torch.Tensor]:
    """The mean of the weights in several model folders, summed in float64, one matrix in memory at a time.

    Args:
        folders: each with a `model.safetensors`.

    Returns:
        `dict[str, torch.Tensor]`: by name, in the precision of the first folder.

    Raises:
        AveragingError: no folder, one without weights, or folders whose weights differ in name or shape.

    Source: Vaswani et al. 2017, section 6.1.
    """
    if not folders:
        raise AveragingError("There is no checkpoint to average.")
    files = []
    for folder in folders:
        path = Path(folder) / _WEIGHTS
        if not path.is_file():
            raise AveragingError(f"{folder} has no {_WEIGHTS}, so it is no checkpoint that can be averaged.")
        try:
            files.append((path, safe_open(path, framework="pt")))
        except (SafetensorError, OSError) as error:
            raise AveragingError(f"{path} is damaged ({error}); leave it out or write it again.") from error
    first_path, first = files[0]
    names = set(first.keys())
    for path, other in files[1:]:
        if set(other.keys()) != names:
            odd = sorted(set(other.keys()) ^ names)[0]
            raise AveragingError(f"{path} and {first_path} are different models: only one of them has {odd}.")
    mean = {}
    for name in sorted(names):
        total = first.get_tensor(name)
        kind, shape = total.dtype, total.shape
        total = total.double()
        for path, other in files[1:]:
            matrix = other.get_tensor(name)
            if matrix.shape != shape:
                raise AveragingError(
                    f"{name} is {tuple(matrix.shape)} in {path} and {tuple(shape)} in {first_path}: different models."
                )
            total += matrix
        mean[name] = (total / len(files)).to(kind) if kind.is_floating_point else first.get_tensor(name)
    return mean
