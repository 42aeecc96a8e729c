"""Labels of pictures: the library that draws, and fonts for every script that is installed."""

import warnings
from collections.abc import Sequence
from typing import Any


def require_matplotlib() -> None:
    """Say what to install where matplotlib is missing.

    Raises:
        ImportError: it is missing.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError('Drawing needs matplotlib. Run: pip install "hf-vaswani[plots]"') from error


def new_figure(width: float, height: float) -> Any:
    """A figure outside of pyplot: it needs no display and is freed like any object.

    Args:
        width, height (`float`): in inches.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ImportError: without matplotlib.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def readable(groups: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Fonts that can show the labels, and the labels with what no installed font can show as "U+4E2D".

    Args:
        groups (`Sequence[Sequence[str]]`): labels, such as those of rows and of columns.

    Returns:
        The names of the fonts, first the one to be asked first, and the labels group by group.
    """
    from matplotlib import font_manager, ft2font

    needed = {ord(letter) for labels in groups for label in labels for letter in label}
    families = ["DejaVu Sans"]  # comes with matplotlib
    missing = needed - _letters_of(ft2font, font_manager.findfont("DejaVu Sans"))
    for entry in font_manager.fontManager.ttflist if missing else []:
        if entry.name in families or entry.style != "normal" or entry.name.startswith("Last Resort"):
            continue
        found = missing & _letters_of(ft2font, entry.fname)
        if found:
            families.append(entry.name)
            missing -= found
        if not missing:
            break

    def spell(label: str) -> str:
        return "".join(f"U+{ord(letter):04X}" if ord(letter) in missing else letter for letter in label)

    return families, [[spell(label) for label in labels] for labels in groups]


def _letters_of(ft2font: Any, path: str) -> set[int]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return set(ft2font.FT2Font(path).get_charmap())
    except (OSError, RuntimeError):
        return set()  # a font file that is listed but cannot be read


def widest(labels: Sequence[str], families: list[str], size: float) -> float:
    """Length of the longest label, in inches.

    Args:
        labels (`Sequence[str]`). families (`list[str]`): as `readable` gives them. size (`float`): of the letters, in
            points.
    """
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=families, size=size)
    lengths = (text_to_path.get_text_width_height_descent(label, font, ismath=False)[0] for label in set(labels))
    return max(lengths, default=0.0) / 72
