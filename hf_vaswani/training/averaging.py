"""The mean of the last weights, which translates better than the last weights."""

from collections import deque

import torch
from torch import nn


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
