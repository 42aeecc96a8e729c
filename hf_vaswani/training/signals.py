"""Ending a run in good order when it is asked to."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SAME_S = 1.0


@contextmanager
def stop_signals(ask: Callable[[], None]) -> Iterator[None]:
    """Have SIGTERM (as from a cluster's scheduler) and Ctrl-C call `ask`; the second one ends the program at once.

    What comes within a second of the first is taken for the same: a launcher passes Ctrl-C on to processes that had it
    from the terminal already. Outside the main thread, where Python takes no signals, nothing is changed.

    Args:
        ask: called in the main thread, between any two instructions; it should do little.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[float] = []

    def handle(number: int, frame: Any) -> None:
        if not asked:
            asked.append(time.monotonic())
            ask()
        elif time.monotonic() - asked[0] > _SAME_S:
            raise KeyboardInterrupt

    old = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
