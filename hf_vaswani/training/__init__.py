"""The paper's training recipe."""

from .averaging import AveragingError, SnapshotAverage, average_weights
from .checkpoint import CheckpointError, CheckpointFolder, Progress
from .config import ConfigError, TrainingConfig, load_config
from .loop import train
from .recipe import Recipe, leave_processes, make_accelerator
from .result import TrainingDiverged, TrainingResult
from .schedule import learning_rate, paper_optimizer

__all__ = [
    "AveragingError",
    "CheckpointError",
    "CheckpointFolder",
    "ConfigError",
    "Progress",
    "Recipe",
    "SnapshotAverage",
    "TrainingConfig",
    "TrainingDiverged",
    "TrainingResult",
    "average_weights",
    "learning_rate",
    "leave_processes",
    "load_config",
    "make_accelerator",
    "paper_optimizer",
    "train",
]
