"""Folders that are whole or absent."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Give a folder beside `path` to fill; it takes that name once the block ends well, and is removed otherwise.

    Args:
        path (`Path`): the folder to come, in place of any that is there.

    Yields:
        `Path`: an empty folder.
    """
    full = path.resolve()
    full.parent.mkdir(parents=True, exist_ok=True)
    unfinished = full.with_name(f".{full.name}.unfinished-{os.getpid()}")
    replaced = full.with_name(f".{full.name}.replaced-{os.getpid()}")
    unfinished.mkdir()
    try:
        yield unfinished
        if full.exists():
            full.rename(replaced)
        unfinished.rename(full)
    except BaseException:
        if replaced.exists() and not full.exists():
            replaced.rename(full)
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
