"""The paper's training recipe."""

from .averaging import SnapshotAverage
from .loop import Recipe, TrainingDiverged, TrainingResult, train
from .schedule import learning_rate, paper_optimizer

__all__ = [
    "Recipe",
    "SnapshotAverage",
    "TrainingDiverged",
    "TrainingResult",
    "learning_rate",
    "paper_optimizer",
    "train",
]
