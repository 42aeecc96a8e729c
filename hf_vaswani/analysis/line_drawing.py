"""Attention as the paper draws it: lines from each piece to what it looks at, a colour for each head.

Letters: H heads, Q pieces that look, K pieces that are looked at.
"""

from collections.abc import Sequence
from typing import Any

import torch

from .heat_map import check_pieces
from .labels import new_figure, readable, widest

MAX_HEADS = 16
_FAINTEST = 0.02  # lines of less weight cannot be seen, and there are many
_DASHES: list[Any] = ["-", (0, (6, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (3, 3)), (0, (8, 2, 1, 2, 1, 2))]
_ROW, _BETWEEN, _LETTERS, _BOX = 0.2, 2.2, 9, 0.09
_LEGEND_COLUMNS, _LEGEND_WIDTH = 4, 0.95
_AS_IS: dict[str, Any] = {"parse_math": False, "clip_on": False}


def head_colours(count: int) -> list[tuple[float, float, float]]:
    """Colours that lie apart in hue and, printed in grey, in lightness.

    Args:
        count (`int`): of heads.

    Returns:
        `count` triples of red, green and blue, 0 to 1, darkest first.
    """
    from matplotlib import colormaps

    # The light end of the map cannot be seen on white.
    mapped = [colormaps["viridis"](0.82 * i / max(count - 1, 1)) for i in range(count)]
    return [(red, green, blue) for red, green, blue, _ in mapped]


def draw_lines(
    layers: Sequence[torch.Tensor],
    row_labels: list[str],
    column_labels: list[str],
    head_names: Sequence[str],
    layer_names: Sequence[str],
    title: str = "",
    axis_names: tuple[str, str] = ("target", "source"),
    query: int | None = None,
) -> Any:
    """Draw lines between two columns of pieces; the more weight, the stronger the line.

    Args:
        layers (`Sequence[torch.Tensor]`): one drawing each, side by side: [H, Q, K].
        row_labels, column_labels (`list[str]`): Q texts on the left, which look, and K on the right.
        head_names (`Sequence[str]`): H names for the legend. layer_names (`Sequence[str]`): above each drawing.
        title (`str`): above all. axis_names (`tuple[str, str]`): what the two columns are.
        query (`int`, *optional*): only what this piece looks at, with a box for each head beside what it sees.

    Returns:
        `matplotlib.figure.Figure`, outside of pyplot.

    Raises:
        ImportError: without matplotlib. ValueError: labels that do not fit, or more than a picture can hold.

    Source: Vaswani et al. 2017, figures 3 to 5. Choice: columns instead of rows, so that long words can be read, and
        dashes beside the colours, so that heads can be told apart in grey.
    """
    head_count = len(head_names)
    for weights in layers:
        if tuple(weights.shape) != (head_count, len(row_labels), len(column_labels)):
            raise ValueError(
                f"The weights are {tuple(weights.shape)}, but there are {head_count} heads, {len(row_labels)} "
                f"{axis_names[0]} and {len(column_labels)} {axis_names[1]} labels."
            )
    check_pieces(row_labels, column_labels)
    if head_count > MAX_HEADS:
        raise ValueError(
            f"A drawing tells {MAX_HEADS} heads apart, and {head_count} were chosen: choose fewer, or their mean."
        )
    figure = new_figure(1, 1)
    fonts, (rows, columns) = readable([row_labels, column_labels])
    boxes = head_count * _BOX + 0.08 if query is not None else 0.0
    left = widest(rows, fonts, _LETTERS) * (1.15 if query is not None else 1.0) + 0.1  # the asked piece is bold
    right = widest(columns, fonts, _LETTERS) + 0.1 + boxes
    height = max(len(rows), len(columns)) * _ROW
    one_width = left + _BETWEEN + right + 0.15
    legend_lines = -(-head_count // _LEGEND_COLUMNS)
    total_width = max(
        0.15 + one_width * len(layers),
        widest([title], ["DejaVu Sans"], 10) + 0.3,
        min(head_count, _LEGEND_COLUMNS) * _LEGEND_WIDTH + 0.2,
    )
    total_height = 0.95 + height + 0.2 * legend_lines + 0.25
    figure.set_size_inches(total_width, total_height)
    figure.text(0.15 / total_width, 1 - 0.08 / total_height, title, va="top", fontsize=10, parse_math=False)
    colours = head_colours(head_count)
    label = {"va": "center", "family": fonts, "fontsize": _LETTERS, **_AS_IS}
    for place, (weights, name) in enumerate(zip(layers, layer_names, strict=True)):
        x = 0.1 + place * one_width + left
        y = total_height - 0.85 - height
        axes = figure.add_axes((x / total_width, y / total_height, _BETWEEN / total_width, height / total_height))
        axes.set(xlim=(0, 1), ylim=(max(len(rows), len(columns)) - 0.5, -0.5))
        axes.axis("off")
        _draw_one(axes, weights, colours, query)
        for i, text in enumerate(rows):
            weight = "bold" if i == query else "normal"
            axes.text(-0.03, i, text, ha="right", fontweight=weight, **label)
        for k, text in enumerate(columns):
            axes.text(1.03 + boxes / _BETWEEN, k, text, ha="left", **label)
        for at, side, text in ((0.0, "right", axis_names[0]), (1.0 + boxes / _BETWEEN, "left", axis_names[1])):
            axes.text(at, -0.95, text, ha=side, va="bottom", fontsize=8, fontstyle="italic", **_AS_IS)
        axes.text(0.5 + boxes / _BETWEEN / 2, -1.9, name, ha="center", va="bottom", fontsize=9, **_AS_IS)
    _draw_legend(figure, colours, head_names, total_width, total_height, legend_lines)
    return figure


def _draw_one(axes: Any, weights: torch.Tensor, colours: list[tuple[float, float, float]], query: int | None) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Rectangle

    for head, colour in enumerate(colours):
        shown = weights[head].clamp(0, 1)
        if query is not None:
            shown = torch.zeros_like(shown).index_copy_(0, torch.tensor([query]), shown[query : query + 1])
        visible = (shown >= _FAINTEST).nonzero().tolist()
        strengths = [float(shown[q, k]) for q, k in visible]
        if visible:
            axes.add_collection(
                LineCollection(
                    [((0.0, q), (1.0, k)) for q, k in visible],
                    colors=[(*colour, strength) for strength in strengths],
                    linewidths=[0.8 + 1.2 * strength for strength in strengths],
                    linestyles=[_DASHES[head % len(_DASHES)]],
                    clip_on=False,
                )
            )
        if query is None:
            continue
        for k, strength in enumerate(weights[head, query].tolist()):
            corner = (1.0 + (0.04 + head * _BOX) / _BETWEEN, k - 0.4)
            box = Rectangle(corner, _BOX / _BETWEEN, 0.8, facecolor=(*colour, min(strength, 1.0)), linewidth=0.2)
            box.set(edgecolor="0.7", clip_on=False)
            axes.add_patch(box)


def _draw_legend(
    figure: Any, colours: list[Any], names: Sequence[str], width: float, height: float, lines: int
) -> None:
    from matplotlib.lines import Line2D

    for head, (colour, name) in enumerate(zip(colours, names, strict=True)):
        x = 0.15 + (head % _LEGEND_COLUMNS) * _LEGEND_WIDTH
        y = 0.15 + (lines - 1 - head // _LEGEND_COLUMNS) * 0.2
        style = _DASHES[head % len(_DASHES)]
        figure.add_artist(Line2D([x / width, (x + 0.33) / width], [y / height] * 2, color=colour, lw=2, ls=style))
        figure.text((x + 0.38) / width, y / height, name, va="center", fontsize=8, parse_math=False)
