"""Dealing the batches of an epoch out to the processes of a run.

An update takes the next `per_update` batches of the plan. With two processes, process 0 has the first, third ... of
them and process 1 the second, fourth ...: the text of an update does not depend on the number of processes. Where there
is no batch left for a process it gets a filler, whose labels are all -100: it adds nothing to loss or gradient, and
keeps the process in step with the others.
"""

import signal
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler


class RankBatches(Sampler[list[int]]):
    """One process's share of an epoch, as lists of indices; an empty list is a filler.

    Args:
        plan: the epoch's batches, by number. start (`int`): the first batch that is still to come.
        per_update (`int`): batches of an update. rank, world_size (`int`): this process, and how many there are.
    """

    def __init__(self, plan: Any, start: int, per_update: int, rank: int, world_size: int):
        self.plan, self.start, self.per_update, self.rank, self.world_size = plan, start, per_update, rank, world_size
        self.per_process = -(-per_update // world_size)

    def __len__(self) -> int:
        updates = -(-(len(self.plan) - self.start) // self.per_update)
        return updates * self.per_process

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(self.start, len(self.plan), self.per_update):
            for turn in range(self.per_process):
                slot = turn * self.world_size + self.rank
                has_batch = slot < self.per_update and first + slot < len(self.plan)
                yield self.plan[first + slot] if has_batch else []


class FillingCollator:
    """Collates as `collator` does, and makes of an empty list a batch without a label.

    Args:
        collator: pads a list of examples. dataset: where the filler's text comes from.
    """

    def __init__(self, collator: Callable[[list[Any]], Any], dataset: Dataset):
        self.collator, self.dataset = collator, dataset

    def __call__(self, examples: list[Any]) -> Any:
        if examples:
            return self.collator(examples)
        batch = self.collator([self.dataset[0]])
        batch["labels"].fill_(-100)
        return batch


def rank_loader(
    dataset: Dataset,
    plan: Any,
    start: int,
    collator: Callable[[list[Any]], Any],
    per_update: int,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
) -> DataLoader:
    """A loader of one process's batches of an epoch, from batch `start` of the plan on."""
    return DataLoader(
        dataset,
        batch_sampler=RankBatches(plan, start, per_update, rank, world_size),
        collate_fn=FillingCollator(collator, dataset),
        num_workers=workers,
        worker_init_fn=_leave_signals_to_the_run,
    )


def _leave_signals_to_the_run(worker: int) -> None:
    """Launchers and terminals end whole process groups; a loading process that died of it would take the run along."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
