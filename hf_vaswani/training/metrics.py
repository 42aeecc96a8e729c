"""What a run tells while it goes: a file of JSON lines."""

import errno
import json
import math
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


class MetricsFile:
    """Writes one JSON object a line; each line is handed to the system before training goes on.

    Where that fails (full disk) training goes on as well: it is said once, and the lines are kept and written as soon
    as there is room.

    Args:
        path (*optional*): the file; None writes nowhere.
        after_update (`int`): 0 makes the file anew. A resumed run passes the update that it goes on from: lines of
            later updates, which an interrupted run may have left, are dropped, and the others stay.
        after_skipped (`int`): the same for skipped updates, of which there were so many.
    """

    def __init__(self, path: str | os.PathLike[str] | None, after_update: int = 0, after_skipped: int = 0):
        self._stream: Any = None
        self._waiting, self._size, self._is_told = b"", 0, False
        if path is None:
            return
        self._path = Path(path)
        kept = _lines_up_to(self._path, after_update, after_skipped) if after_update else []
        if kept:
            partial = Path(f"{os.fspath(path)}.unfinished")
            partial.write_text("".join(kept), encoding="utf-8", newline="\n")
            partial.replace(path)
        # Open for the whole run; `close` ends it.
        self._stream = self._path.open("ab" if kept else "wb", buffering=0)
        self._size = self._stream.tell()

    def write(self, **values: Any) -> None:
        """Write one line; floats keep all their digits, so that runs can be compared bit for bit.

        What is no number is written as the string "nan", "inf" or "-inf", because JSON has no such number.
        """
        if self._stream is not None:
            plain = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            self._waiting += (json.dumps(plain, allow_nan=False) + "\n").encode()
            self._write_waiting()

    def _write_waiting(self) -> None:
        try:
            if self._stream.write(self._waiting) < len(self._waiting):
                raise OSError(errno.ENOSPC, "only a part could be written")
            self._size, self._waiting = self._size + len(self._waiting), b""
        except OSError as error:
            with suppress(OSError):
                self._stream.truncate(self._size)  # no half line stays
                self._stream.seek(self._size)
            if not self._is_told:
                print(
                    f"{self._path} cannot be written to ({error.strerror}). Training goes on; its lines are written "
                    "once there is room.",
                    file=sys.stderr,
                    flush=True,
                )
            self._is_told = True

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            if self._waiting:
                self._write_waiting()
            self._stream.close()
            if self._waiting:
                print(f"{self._path} lacks its last {self._waiting.count(10)} lines.", file=sys.stderr, flush=True)


def _lines_up_to(path: Path, update: int, skipped: int) -> list[str]:
    """Whole lines of a metrics file that belong to no later update."""
    kept: list[str] = []
    if not path.is_file():
        return kept
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # cut short when the run was killed
        if not isinstance(record, dict):
            continue
        number = next((record[k] for k in ("update", "validated_update", "start_after_update") if k in record), None)
        if (number is not None and number > update) or record.get("skipped", 0) > skipped:
            continue
        kept.append(line + "\n")
    return kept
