"""Which pieces each piece looks at, drawn: one head or many, as heat maps or as the paper's lines.

Letters: H heads, S source length, T target length.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from .heat_map import DPI, draw_heat_maps
from .labels import require_matplotlib
from .line_drawing import draw_lines
from .weights import AttentionWeights, attention_weights
from .words import BLANK, merge_words

MEAN, ALL = "mean", "all"
PICTURES = ("heat", "lines")
AXIS_NAMES = {"encoder": ("source", "source"), "decoder": ("target", "read so far"), "cross": ("target", "source")}
KIND_NAMES = {"encoder": "encoder self-attention", "decoder": "decoder self-attention", "cross": "cross-attention"}
_NOTEBOOK_DPI = 110


@dataclass
class AttentionPicture:
    """A matrix of attention weights, the text of its rows and columns, and its drawing.

    Args:
        weights (`torch.Tensor`): [T, S] for cross-attention; each row adds up to 1.
        tgt_pieces, src_pieces (`list[str]`): the text of the rows and of the columns, blanks shown as "␣".
        figure (`matplotlib.figure.Figure`): the drawing; a notebook shows it when it is the last value of a cell.
        score (`float`, *optional*): of the translation that was searched for; None where the target was given.
    """

    weights: torch.Tensor
    tgt_pieces: list[str]
    src_pieces: list[str]
    figure: Any
    score: float | None = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the drawing; the ending of `path` chooses the kind (.png, .svg, .pdf)."""
        save_figure(self.figure, path)

    def _repr_png_(self) -> bytes:
        stream = BytesIO()
        self.figure.savefig(stream, format="png", dpi=_NOTEBOOK_DPI, bbox_inches="tight")
        return stream.getvalue()


def attention_figure(
    model: Any,
    tokenizer: Any,
    source: str,
    target: str | None = None,
    layer: int = -1,
    heads: int | str = MEAN,
    kind: str = "cross",
) -> AttentionPicture:
    """Draw the attention of one layer for a sentence and its translation.

    The weights come from one pass over the finished translation, so row t holds what the decoder looked at while it
    chose target piece t.

    Args:
        model: a seq2seq model of transformers. tokenizer: its tokenizer.
        source (`str`): the sentence. target (`str`, *optional*): a translation to explain; None: the model's own.
        layer (`int`): negative counts from the last.
        heads (`int` or `str`): one head, from 0, or "mean" over all heads of the layer.
        kind (`str`): "cross", "encoder" or "decoder".

    Returns:
        `AttentionPicture` with `weights` of shape [T, S], [S, S] or [T, T].

    Raises:
        ImportError: without matplotlib; the message says what to install.
        ValueError: for a blank source, one too long for a picture, or a layer or head that the model does not have.

    Source: Vaswani et al. 2017, section 3.2.3 and the figures of the appendix.
    """
    require_matplotlib()
    if heads != MEAN and (isinstance(heads, bool) or not isinstance(heads, int)):
        raise ValueError(f'`heads` must be "mean" or the number of a head, got {heads!r}.')
    found = attention_weights(model, tokenizer, source, target)
    layer = _checked_layers(found, kind, [layer])[0]
    chosen = MEAN if heads == MEAN else [int(heads)]
    figure = draw_attentions(found, kind, [layer], chosen)
    rows, columns = found.pieces_of_kind(kind)
    return AttentionPicture(_panels(found, kind, layer, chosen)[0], rows, columns, figure, found.score)


def draw_attentions(
    found: AttentionWeights,
    kind: str = "cross",
    layers: Sequence[int] | str = (-1,),
    heads: Sequence[int] | str = ALL,
    picture: str = "heat",
    words: bool = False,
    query: int | str | None = None,
) -> Any:
    """Draw any layers and heads of one kind of attention.

    Args:
        found (`AttentionWeights`): of pieces. kind (`str`): "cross", "encoder" or "decoder".
        layers (`Sequence[int]` or `str`): from 0, negative counts from the last; "all".
        heads (`Sequence[int]` or `str`): from 0; "all", or "mean" of all heads of a layer.
        picture (`str`): "heat", a panel for each layer and head, or "lines", a drawing for each layer with its heads in
            colours.
        words (`bool`): put the pieces of a word together. query (`int` or `str`, *optional*): for lines, what one piece
            alone looks at: its place from 0, or its text where no other piece has the same.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ImportError: without matplotlib.
        ValueError: what is asked for does not exist, or is more than a picture can hold.
    """
    if picture not in PICTURES:
        raise ValueError(f"`picture` must be one of {', '.join(PICTURES)}, got {picture!r}.")
    if query is not None and picture != "lines":
        raise ValueError("`query` is for lines: a heat map shows the rows of all pieces.")
    shown = merge_words(found) if words else found
    chosen = _checked_layers(shown, kind, layers)
    rows, columns = shown.pieces_of_kind(kind)
    names = [_head_names(shown, kind, layer, heads) for layer in chosen]
    panels = [_panels(shown, kind, layer, heads) for layer in chosen]
    title = KIND_NAMES[kind]
    if len(chosen) == 1:
        title += f", layer {chosen[0]}" + (f", {names[0][0]}" if len(names[0]) == 1 else "")
    if picture == "heat":
        return _grid(panels, names, chosen, rows, columns, title, AXIS_NAMES[kind])
    if any(one != names[0] for one in names):
        raise ValueError("These layers have different heads (some were pruned): draw one layer at a time.")
    return draw_lines(
        [torch.stack(one) for one in panels],
        rows,
        columns,
        names[0],
        [f"layer {one}" if len(chosen) > 1 else "" for one in chosen],
        title,
        AXIS_NAMES[kind],
        None if query is None else find_piece(rows, query),
    )


def _grid(
    panels: list[list[torch.Tensor]],
    names: list[list[str]],
    layers: list[int],
    rows: list[str],
    columns: list[str],
    title: str,
    axis_names: tuple[str, str],
) -> Any:
    widest = max(map(len, panels))
    empty = torch.zeros(len(rows), len(columns))  # where a layer has fewer heads than another
    titles = [
        [f"layer {layer}, {name}" if len(layers) > 1 else name for name in line] + [""] * (widest - len(line))
        for layer, line in zip(layers, names, strict=True)
    ]
    filled = [line + [empty] * (widest - len(line)) for line in panels]
    return draw_heat_maps(filled, rows, columns, titles, title, axis_names)


def _checked_layers(found: AttentionWeights, kind: str, layers: Sequence[int] | str) -> list[int]:
    """Layers counted from 0, each once, in order."""
    count = len(found.of_kind(kind))
    if isinstance(layers, str):
        if layers != ALL:
            raise ValueError(f'`layers` must be "all" or numbers, got {layers!r}.')
        return list(range(count))
    for one in layers:
        found.layer(kind, one)
    if not layers:
        raise ValueError("`layers` is empty: choose at least one.")
    return sorted({one % count for one in layers})


def _panels(found: AttentionWeights, kind: str, layer: int, heads: Sequence[int] | str) -> list[torch.Tensor]:
    """The matrices of one layer: all heads, some, or their mean."""
    if heads == MEAN:
        return [found.layer(kind, layer).mean(dim=0)]
    numbers = found.head_numbers(kind, layer) if isinstance(heads, str) else heads
    return [found.head(kind, layer, one) for one in numbers]


def _head_names(found: AttentionWeights, kind: str, layer: int, heads: Sequence[int] | str) -> list[str]:
    if heads == MEAN:
        return ["mean of heads"]
    if isinstance(heads, str) and heads != ALL:
        raise ValueError(f'`heads` must be "all", "mean" or numbers, got {heads!r}.')
    if not heads:
        raise ValueError("`heads` is empty: choose at least one.")
    return [f"head {one}" for one in (found.head_numbers(kind, layer) if heads == ALL else heads)]


def find_piece(pieces: Sequence[str], query: int | str) -> int:
    """The place of a piece.

    Args:
        pieces (`Sequence[str]`): as the picture labels them. query (`int` or `str`): a place, or a text, with or
            without the mark for a blank.

    Raises:
        ValueError: there is no such piece, or several; the pieces are listed.
    """
    listed = " ".join(f"{place}:{piece}" for place, piece in enumerate(pieces))
    if isinstance(query, int):
        if not 0 <= query < len(pieces):
            raise ValueError(f"There is no piece {query}: {listed}")
        return query
    places = [place for place, piece in enumerate(pieces) if query in (piece, piece.strip(BLANK))]
    if len(places) != 1:
        how_many = "several pieces are" if places else "no piece is"
        raise ValueError(f"{how_many} {query!r}; name one by its place: {listed}")
    return places[0]


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a drawing whole or not at all; the ending of `path` chooses the kind (.png, .svg, .pdf).

    Args:
        figure (`matplotlib.figure.Figure`). path (`str` or `os.PathLike`): the file, replaced where it exists.

    Raises:
        ValueError: matplotlib does not write files with this ending. OSError: the place cannot be written.
    """
    path = Path(path)
    partial = path.with_name(f".{path.stem}.unfinished{path.suffix}")
    try:
        figure.savefig(partial, dpi=DPI, bbox_inches="tight")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def draw_attention(weights: torch.Tensor, tgt_pieces: list[str], src_pieces: list[str], title: str = "") -> Any:
    """Draw a matrix of attention weights, source pieces along the top and target pieces down the side.

    Args:
        weights (`torch.Tensor`): [T, S]. tgt_pieces, src_pieces (`list[str]`): T and S labels. title (`str`): above.

    Returns:
        `matplotlib.figure.Figure`, outside of pyplot: it needs no display and is freed like any object.

    Raises:
        ImportError: without matplotlib. ValueError: labels that do not fit the matrix, or too many.
    """
    return draw_heat_maps([[weights]], tgt_pieces, src_pieces, [[""]], title)
