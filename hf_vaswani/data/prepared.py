"""A corpus as token ids on disk: memory-mapped, with only the lengths in memory."""

import json
from bisect import bisect_right
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

_FORMAT = 1
_FILES = ("pairs.arrow", "lengths.npy")


@dataclass
class SourceReport:
    """What became of the pairs of one corpus.

    Args:
        name (`str`): of the corpus. weight (`float`): in the mixture.
        read_count, kept_count (`int`): pairs in the corpus, and pairs that are trained on.
        dropped (`dict[str, int]`): pairs left out, by reason: "blank on one side", "over length", "off in ratio".
        first_lines (`dict[str, list[int]]`): for each reason, the first lines (of a dataset: rows), from 1.
        removed (`dict[str, int]`): what was taken out of texts, by kind, such as "control characters".
    """

    name: str
    weight: float = 1.0
    read_count: int = 0
    kept_count: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    first_lines: dict[str, list[int]] = field(default_factory=dict)
    removed: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.read_count:,} pairs read, {self.kept_count:,} kept"]
        for reason, count in self.dropped.items():
            shown = self.first_lines[reason]
            more = ", ..." if count > len(shown) else ""
            word = "line" if count == 1 else "lines"
            parts.append(f"{count:,} dropped as {reason} ({word} {', '.join(map(str, shown))}{more})")
        parts += [f"{count:,} {kind} removed" for kind, count in self.removed.items()]
        return "; ".join(parts)


class PreparedCorpus(Dataset):
    """Encoded pairs of one or more corpora, in their order; made by `prepare_corpus`.

    Tokens stay on disk until a pair is asked for. In memory it takes 8 bytes a pair, 12 with weights.

    Args:
        folders (`list`): what `prepare_corpus` wrote, one folder a corpus. report (`list[SourceReport]`): one each.
    """

    def __init__(self, folders: list[Path], report: list[SourceReport]):
        self.folders, self.report = folders, report
        self._ends = np.cumsum([one.kept_count for one in report]).tolist()
        lengths = [np.load(folder / "lengths.npy") for folder in folders]
        src, tgt = np.concatenate(lengths, axis=1)
        self.src_lengths, self.tgt_lengths = torch.from_numpy(src), torch.from_numpy(tgt)
        self._parts: list[_Pairs] | None = None

    def __len__(self) -> int:
        return len(self.src_lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        if self._parts is None:
            self._parts = [_Pairs(folder / "pairs.arrow") for folder in self.folders]
        part = bisect_right(self._ends, place)
        return self._parts[part][place - (self._ends[part - 1] if part else 0)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parts": None}  # a process that loads data maps the files itself

    @property
    def weights(self) -> torch.Tensor | None:
        """[pairs], float32, how often each pair comes in an epoch; None where each comes once."""
        if all(one.weight == 1 for one in self.report):
            return None
        counts = torch.tensor([one.kept_count for one in self.report])
        return torch.tensor([one.weight for one in self.report], dtype=torch.float32).repeat_interleave(counts)


class _Pairs:
    """The pairs of one Arrow file, memory-mapped."""

    def __init__(self, path: Path):
        import pyarrow as pa

        # The stream format, which `datasets.Dataset.from_file` reads too.
        batches = list(pa.ipc.open_stream(pa.memory_map(str(path))))
        self._ends = np.cumsum([batch.num_rows for batch in batches]).tolist()
        self._columns = [[(c.offsets.to_numpy(), c.values.to_numpy()) for c in batch.columns] for batch in batches]

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        part = bisect_right(self._ends, index)
        row = index - (self._ends[part - 1] if part else 0)
        (src_starts, src), (tgt_starts, tgt) = self._columns[part]
        return {
            "input_ids": src[src_starts[row] : src_starts[row + 1]].tolist(),
            "labels": tgt[tgt_starts[row] : tgt_starts[row + 1]].tolist(),
        }


# ---------------------------------------------------------------------- the folder of one corpus
def write_summary(folder: Path, report: SourceReport) -> None:
    """Write what makes a folder whole: the report, and the sizes that the other files must have."""
    sizes = {name: (folder / name).stat().st_size for name in _FILES}
    summary = {"format": _FORMAT, "sizes": sizes, "report": asdict(report)}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")


def read_summary(folder: Path) -> SourceReport | None:
    """The report of a whole folder; None where there is none or it is damaged."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in _FILES}
        is_whole = summary["format"] == _FORMAT and summary["sizes"] == sizes
        return SourceReport(**summary["report"]) if is_whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
