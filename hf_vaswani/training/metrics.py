"""What a run tells while it goes: a file of JSON lines and a bar on standard error."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any


class MetricsFile:
    """Writes one JSON object a line; each line is on disk before training goes on.

    Args:
        path (*optional*): the file; None writes nowhere.
        after_update (`int`): 0 makes the file anew. A resumed run passes the update that it goes on from: lines of
            later updates, which an interrupted run may have left, are dropped, and the others stay.
    """

    def __init__(self, path: str | os.PathLike[str] | None, after_update: int = 0):
        self._stream = None
        if path is None:
            return
        kept = _lines_up_to(Path(path), after_update) if after_update else []
        if kept:
            partial = Path(f"{os.fspath(path)}.unfinished")
            partial.write_text("".join(kept), encoding="utf-8")
            partial.replace(path)
        # Open for the whole run; `close` ends it.
        self._stream = Path(path).open("a" if kept else "w", encoding="utf-8")  # noqa: SIM115

    def write(self, **values: Any) -> None:
        """Write one line; floats keep all their digits, so that runs can be compared bit for bit.

        What is no number is written as the string "nan", "inf" or "-inf", because JSON has no such number.
        """
        if self._stream is not None:
            plain = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            self._stream.write(json.dumps(plain, allow_nan=False) + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()


def _lines_up_to(path: Path, update: int) -> list[str]:
    """Whole lines of a metrics file that belong to no later update."""
    kept: list[str] = []
    if not path.is_file():
        return kept
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # cut short when the run was killed
        number = next((record[k] for k in ("update", "validated_update", "start_after_update") if k in record), None)
        number = record["skipped_update"] - 1 if number is None and "skipped_update" in record else number
        if number is not None and number > update:
            continue
        kept.append(line + "\n")
    return kept


def progress_bar(total: int | None, description: str, unit: str, initial: int = 0) -> Any:
    """A `tqdm` bar on standard error, silent where that is no terminal."""
    from tqdm import tqdm

    return tqdm(
        total=total,
        initial=initial,
        desc=description,
        unit=unit,
        file=sys.stderr,
        disable=not sys.stderr.isatty(),
        dynamic_ncols=True,
    )
