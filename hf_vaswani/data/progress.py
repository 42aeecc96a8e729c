"""A bar for work that may take long, on standard error alone."""

import sys
from typing import Any

SILENT_S = 2.0  # seconds before a bar, or a word about waiting, appears


def late_bar(description: str, unit: str, total: int | None = None, initial: int = 0, is_shown: bool = True) -> Any:
    """A `tqdm` bar that appears only after `SILENT_S` seconds, and not at all where standard error is no terminal.

    Args:
        description (`str`), unit (`str`): what is done, and what is counted. total (`int`, *optional*): units in all.
        initial (`int`): units done before. is_shown (`bool`): False on all but one of several processes.

    Returns:
        `tqdm.tqdm`: for a `with` statement.
    """
    from tqdm import tqdm

    return tqdm(
        total=total,
        initial=initial,
        desc=description,
        unit=unit,
        unit_scale=True,
        file=sys.stderr,
        delay=SILENT_S,
        disable=not (is_shown and sys.stderr.isatty()),
        dynamic_ncols=True,
    )
