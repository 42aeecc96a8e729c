"""Attention as heat maps: one panel for each layer and head, their labels shared.

Letters: Q pieces that look, K pieces that are looked at.
"""

from collections.abc import Sequence
from typing import Any

import torch

from .labels import new_figure, readable, widest

DPI = 150
MAX_PIECES = 200
_MAX_INCHES = 400  # a bitmap side has at most 65,535 points
_MAX_AREA = 2500  # square inches: 56 million points
_TITLE = 0.26  # inches of a line of title
_GAP = 0.18
_UPRIGHT: dict[str, Any] = {"rotation": 90, "va": "center", "ha": "center"}


def draw_heat_maps(
    panels: Sequence[Sequence[torch.Tensor]],
    row_labels: list[str],
    column_labels: list[str],
    titles: Sequence[Sequence[str]],
    title: str = "",
    axis_names: tuple[str, str] = ("target", "source"),
) -> Any:
    """Draw matrices of attention weights as a grid, darker for more; rows look, columns are looked at.

    One scale of colours holds for all panels, from 0 to the largest weight; it grows darker all the way, so that it can
    be read in grey.

    Args:
        panels (`Sequence[Sequence[torch.Tensor]]`): rows of panels, each [Q, K]; every row has as many.
        row_labels, column_labels (`list[str]`): Q and K texts.
        titles (`Sequence[Sequence[str]]`): one for each panel. title (`str`): above all.
        axis_names (`tuple[str, str]`): what rows and columns are.

    Returns:
        `matplotlib.figure.Figure`, outside of pyplot.

    Raises:
        ImportError: without matplotlib.
        ValueError: labels that do not fit the matrices, or more than a picture can hold.
    """
    for panel in (one for row in panels for one in row):
        if tuple(panel.shape) != (len(row_labels), len(column_labels)):
            raise ValueError(
                f"The matrix is {panel.shape[0]} x {panel.shape[1]}, but there are {len(row_labels)} {axis_names[0]} "
                f"and {len(column_labels)} {axis_names[1]} labels."
            )
    check_pieces(row_labels, column_labels)
    is_single = len(panels) == len(panels[0]) == 1
    cell, letters = (0.32, 10) if is_single else (0.17, 7)
    figure = new_figure(1, 1)
    fonts, (rows, columns) = readable([row_labels, column_labels])
    panel_title = 0.0 if is_single else _TITLE
    caption = max(widest([one], ["DejaVu Sans"], 8) for row in titles for one in row)
    width, height = max(len(columns) * cell, caption + 0.1), len(rows) * cell
    left, top = widest(rows, fonts, letters) + 0.5, widest(columns, fonts, letters) + 0.5
    across, down = len(panels[0]), len(panels)
    bar = 1.0 if height > 1.0 else 1.3
    total = (
        max(left + across * (width + _GAP) + bar, widest([title], ["DejaVu Sans"], 10) + 0.3),
        max(_TITLE + top + down * (height + panel_title + _GAP) + 0.1, 1.8 + _TITLE),
    )
    _check_size(*total)
    figure.set_size_inches(*total)
    figure.text(0.15 / total[0], 1 - 0.08 / total[1], title, va="top", fontsize=10, parse_math=False)
    largest = max(float(one.max()) for row in panels for one in row) or 1.0
    for i, line in enumerate(panels):
        y = total[1] - _TITLE - top - height - i * (height + panel_title + _GAP)
        for j, weights in enumerate(line):
            x = left + j * (width + _GAP)
            axes = figure.add_axes((x / total[0], y / total[1], width / total[0], height / total[1]))
            image = axes.imshow(weights.numpy(), cmap="Blues", vmin=0.0, vmax=largest, aspect="auto")
            axes.tick_params(length=0, pad=2)
            axes.xaxis.tick_top()
            axes.set_xticks([])
            axes.set_yticks([])
            if i == 0:
                axes.set_xticks(range(len(columns)), columns)
                for label in axes.get_xticklabels():
                    label.set(rotation=90, family=fonts, fontsize=letters, parse_math=False)
            if j == 0:
                axes.set_yticks(range(len(rows)), rows)
                for label in axes.get_yticklabels():
                    label.set(family=fonts, fontsize=letters, parse_math=False)
            if not is_single:
                axes.set_xlabel(titles[i][j], fontsize=8)
                axes.xaxis.set_label_position("bottom")
    head = total[1] - _TITLE  # where the title ends
    figure.text(left / total[0], (head - 0.12) / total[1], axis_names[1], fontsize=9, va="center")
    figure.text(0.13 / total[0], (head - top - height / 2) / total[1], axis_names[0], fontsize=9, **_UPRIGHT)
    x = left + across * (width + _GAP)
    length = max(height, 1.0)
    y = max(head - top - length, 0.15)
    bar_axes = figure.add_axes((x / total[0], y / total[1], 0.14 / total[0], length / total[1]))
    figure.colorbar(image, cax=bar_axes)
    bar_axes.tick_params(labelsize=7, length=2)
    bar_axes.set_ylabel("weight", fontsize=8)
    return figure


def check_pieces(row_labels: list[str], column_labels: list[str]) -> None:
    """Refuse a sentence that is longer than a picture can hold.

    Raises:
        ValueError: more than `MAX_PIECES` on a side.
    """
    count = max(len(row_labels), len(column_labels))
    if count > MAX_PIECES:
        raise ValueError(
            f"A picture holds {MAX_PIECES} pieces on a side, and this sentence has {count}: take a shorter one, put "
            "pieces together to words, or write an .html page, which scrolls."
        )


def _check_size(width: float, height: float) -> None:
    if max(width, height) > _MAX_INCHES or width * height > _MAX_AREA:
        raise ValueError(
            f"The picture would be {width:.0f} by {height:.0f} inches, more than can be looked at: choose fewer layers "
            'or heads ("mean" is one panel a layer), or write an .html page.'
        )
