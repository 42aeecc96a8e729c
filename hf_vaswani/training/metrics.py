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
        path (*optional*): the file, made anew; None writes nowhere.
    """

    def __init__(self, path: str | os.PathLike[str] | None):
        # Open for the whole run; `close` ends it.
        self._stream = None if path is None else Path(path).open("w", encoding="utf-8")  # noqa: SIM115

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


def progress_bar(total: int | None, description: str, unit: str) -> Any:
    """A `tqdm` bar on standard error, silent where that is no terminal."""
    from tqdm import tqdm

    return tqdm(
        total=total, desc=description, unit=unit, file=sys.stderr, disable=not sys.stderr.isatty(), dynamic_ncols=True
    )
