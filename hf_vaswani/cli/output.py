"""How commands meet the user: plain errors, notes on standard error, folders that are whole or absent."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """Something only the user can put right; shown as one sentence, without a traceback."""


def note(text: str) -> None:
    """Tell how far a command is, on standard error."""
    print(text, file=sys.stderr, flush=True)


def check_new_folder(path: Path, overwrite: bool, marker: str) -> None:
    """Refuse, before any work is done, a folder that could not be written at the end.

    Args:
        path (`Path`): the folder to come. overwrite (`bool`): whether an older one may be replaced.
        marker (`str`): a file that every folder of this kind has. Only such a folder is ever replaced, so that no
            mistyped path can cost anyone their files.

    Raises:
        UserError: the folder exists and is not empty, is a file, or its parent cannot be written to.
    """
    full = path.resolve()
    if full == Path.cwd() or full in Path.cwd().parents:
        raise UserError(f"{path} is the current folder or above it: name a new one with --output.")
    if full.exists() and not full.is_dir():
        raise UserError(f"{path} is a file: name another folder with --output.")
    if full.is_dir() and any(full.iterdir()):
        if not overwrite:
            raise UserError(f"{path} is not empty: name another folder with --output, or pass --overwrite.")
        if not (full / marker).is_file():
            raise UserError(f"{path} was not made by this command (it has no {marker}), so it is not overwritten.")
    parent = full.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{path} cannot be made: {parent} is not a folder that you may write to.")


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
