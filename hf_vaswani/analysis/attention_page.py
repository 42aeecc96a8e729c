"""A page that shows all layers and heads of a sentence, with pickers; it needs no network and no other file."""

import base64
import json
import os
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from .attention import ALL, AXIS_NAMES, MEAN, PICTURES
from .weights import KINDS, AttentionWeights
from .words import merge_words

MAX_WEIGHTS = 8_000_000  # 21 MB of page
_SCALE = 65535  # weights are written as 16 bits each


def attention_page(
    found: AttentionWeights,
    kind: str = "cross",
    layers: Sequence[int] | str = (-1,),
    heads: Sequence[int] | str = ALL,
    words: bool = False,
    picture: str = "lines",
) -> str:
    """A whole HTML document with every layer and head of all three kinds of attention.

    Args:
        found (`AttentionWeights`): of pieces; words are put together here.
        kind, layers, heads, words, picture: what is shown at first, as for `draw_attentions`. Of several layers the
            first; "mean" chooses all heads and the heat map, which shows their mean.

    Returns:
        `str`: with its own script and style, and a policy that forbids anything else.

    Raises:
        ValueError: what is to be shown first does not exist, or the weights are too many for a page.
    """
    if picture not in PICTURES:
        raise ValueError(f"`picture` must be one of {', '.join(PICTURES)}, got {picture!r}.")
    count = 2 * sum(one.numel() for each in KINDS for one in found.of_kind(each))
    if count > MAX_WEIGHTS:
        raise ValueError(
            f"A page holds {MAX_WEIGHTS:,} weights, and this sentence of {len(found.source_ids)} and "
            f"{len(found.target_ids)} pieces has up to {count:,}: take a shorter one."
        )
    first = _first_layer(found, kind, layers)
    numbers = found.head_numbers(kind, first)
    chosen = numbers if heads in (ALL, MEAN) else [int(one) for one in heads]
    for one in chosen:
        found.head(kind, first, one)
    places = [(each, i) for each in KINDS for i in range(len(found.of_kind(each)))]
    highest = max(number for place in places for number in found.head_numbers(*place))
    data = {
        "source": found.source,
        "target": found.target,
        "start": {
            "kind": kind,
            "layer": first,
            "heads": chosen,
            "words": words,
            "picture": "heat" if heads == MEAN else picture,
        },
        "colours": _colours(highest + 1),
        "views": {"pieces": _view(found), "words": _view(merge_words(found))},
    }
    template = resources.files(__package__).joinpath("attention_page.html").read_text(encoding="utf-8")
    # Inside a script element "<" could end it; nothing else is special there.
    return template.replace("@DATA@", json.dumps(data, ensure_ascii=False).replace("<", "\\u003c"))


def notebook_frame(page: str, height: int = 720) -> str:
    """The page as HTML that a notebook keeps with the cell and shows in a frame of its own.

    Args:
        page (`str`): of `attention_page`. height (`int`): of the frame, in pixels.
    """
    return (
        f'<iframe srcdoc="{escape(page, quote=True)}" sandbox="allow-scripts" width="100%" height="{height}" '
        'style="border:0" title="Attention"></iframe>'
    )


def write_page(page: str, path: str | os.PathLike[str]) -> None:
    """Write a page whole or not at all.

    Raises:
        OSError: the place cannot be written.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.unfinished")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _first_layer(found: AttentionWeights, kind: str, layers: Sequence[int] | str) -> int:
    if isinstance(layers, str):
        if layers != ALL:
            raise ValueError(f'`layers` must be "all" or numbers, got {layers!r}.')
        return 0
    for one in layers:
        found.layer(kind, one)
    return layers[0] % len(found.of_kind(kind))


def _view(found: AttentionWeights) -> dict[str, Any]:
    view = {}
    for kind in KINDS:
        rows, columns = found.pieces_of_kind(kind)
        layers = [
            {"heads": found.head_numbers(kind, i), "weights": _packed(weights)}
            for i, weights in enumerate(found.of_kind(kind))
        ]
        view[kind] = {"rows": rows, "columns": columns, "names": AXIS_NAMES[kind], "layers": layers}
    return view


def _packed(weights: torch.Tensor) -> str:
    """[H, rows, columns] as base64 of 16-bit numbers, low byte first."""
    scaled = (weights.clamp(0, 1) * _SCALE).round().to(torch.int32).numpy().astype("<u2")
    return base64.b64encode(scaled.tobytes()).decode("ascii")


def _colours(count: int) -> list[str]:
    """Dark blue to light green in `count` steps: apart in hue and, in grey, in lightness. Needs no other library."""
    ends = [(68, 1, 84), (49, 104, 142), (38, 160, 130), (130, 200, 60)]
    colours = []
    for i in range(count):
        at = (len(ends) - 1) * i / max(count - 1, 1)
        low = min(int(at), len(ends) - 2)
        mixed = [round(a + (b - a) * (at - low)) for a, b in zip(ends[low], ends[low + 1], strict=True)]
        colours.append("#" + "".join(f"{value:02x}" for value in mixed))
    return colours
