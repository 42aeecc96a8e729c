"""How commands meet the user: plain errors, notes on standard error, and a look at folders before any work."""

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn


class UserError(Exception):
    """Something only the user can put right; shown as one sentence, without a traceback."""


class Terminated(BaseException):
    """SIGTERM has come; like KeyboardInterrupt no `Exception`, so that nothing mistakes it for a fault."""


@contextmanager
def stop_at_sigterm() -> Iterator[None]:
    """Inside, SIGTERM unwinds as Ctrl-C does, so that temporary folders go and what was printed stays printed.

    Raises:
        Terminated: the signal came.
    """
    if threading.current_thread() is not threading.main_thread():  # elsewhere signals cannot be taken
        yield
        return

    def stop(*_: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stopped(command: str, error: BaseException) -> int:
    """Say that a command was stopped; what a shell reports of a program that SIGINT (130) or SIGTERM (143) ended."""
    print(f"hf-vaswani {command}: stopped.", file=sys.stderr, flush=True)
    return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)


def stop_at_once(command: str, error: BaseException) -> NoReturn:
    """End the process without waiting for a library that computes on in threads of its own."""
    status = stopped(command, error)
    try:
        sys.stdout.flush()
    finally:
        os._exit(status)


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
def plain_faults() -> Iterator[None]:
    """Where the model computes and results are written: one sentence for what can go wrong there.

    Raises:
        UserError: the model's scores are not numbers, or standard output cannot be written.
    """
    try:
        yield
        sys.stdout.flush()
    except FloatingPointError as error:
        raise UserError(str(error)) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
            raise
        # What is still waiting to be written would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise UserError(f"standard output cannot be written: {error.strerror}. The results are incomplete.") from error
