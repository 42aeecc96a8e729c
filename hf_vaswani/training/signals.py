"""Ending a run in good order when it is asked to."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_signals(ask: Callable[[], None]) -> Iterator[None]:
    """Have SIGTERM (as from a cluster's scheduler) and Ctrl-C call `ask`; the second one ends the program at once.

    Outside the main thread, where Python takes no signals, nothing is changed.

    Args:
        ask: called in the main thread, between any two instructions; it should only take a note.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        ask()

    old = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
