"""What comes of a run."""

from dataclasses import dataclass, field


class TrainingDiverged(RuntimeError):
    """Too many updates in a row had a loss or a gradient that is no number."""


@dataclass
class TrainingResult:
    """What a run did.

    Args:
        planned_updates (`int`): those asked for. updates (`int`): done, over all starts of the run.
        from_update (`int`): where this start began.
        skipped_count (`int`): updates skipped for want of a finite gradient.
        tgt_tokens (`int`): target tokens trained on. epochs (`float`): passes over the data. seconds (`float`): of
            training, over all starts.
        averaged_count (`int`): snapshots in the final weights.
        losses (`list[float]`): of each update of this start, per target token, in nats.
        validations (`list[dict]`): of this start, each with its `update`.
        best_update (`int`, *optional*): of all starts.
        ended_by (`str`): "plan", "clock", "patience" or "signal".
    """

    planned_updates: int
    updates: int = 0
    from_update: int = 0
    skipped_count: int = 0
    tgt_tokens: int = 0
    epochs: float = 0.0
    seconds: float = 0.0
    averaged_count: int = 0
    losses: list[float] = field(default_factory=list)
    validations: list[dict[str, float]] = field(default_factory=list)
    best_update: int | None = None
    ended_by: str = "plan"

    @property
    def stopped_early(self) -> bool:
        """Whether the run ended before its plan."""
        return self.updates < self.planned_updates
