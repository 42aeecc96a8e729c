"""The rows of Table 3 as changes of any base model: at the paper's size exactly the paper's rows.

A laptop-sized base is changed in the same proportions: where the paper halves d_ff, d_ff is halved.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..configuration_vaswani import PRESETS, VaswaniConfig

_UPDATES_OF_BIG = 3  # 300,000 updates beside 100,000


@dataclass(frozen=True)
class PaperFigures:
    """What the paper printed for a row: on newstest2013, English to German, without checkpoint averaging.

    Args:
        perplexity (`float`): per word piece. bleu (`float`): tokenised. parameters (`int`, *optional*): in millions;
            None where the paper leaves the cell empty, which is the number of the base model.

    Source: Vaswani et al. 2017, Table 3.
    """

    perplexity: float
    bleu: float
    parameters: int | None = None


PAPER = {
    "base": PaperFigures(4.92, 25.8, 65),
    "A-h1": PaperFigures(5.29, 24.9),
    "A-h4": PaperFigures(5.00, 25.5),
    "A-h16": PaperFigures(4.91, 25.8),
    "A-h32": PaperFigures(5.01, 25.4),
    "B-dk16": PaperFigures(5.16, 25.1, 58),
    "B-dk32": PaperFigures(5.01, 25.4, 60),
    "C-N2": PaperFigures(6.11, 23.7, 36),
    "C-N4": PaperFigures(5.19, 25.3, 50),
    "C-N8": PaperFigures(4.88, 25.5, 80),
    "C-d256": PaperFigures(5.75, 24.5, 28),
    "C-d1024": PaperFigures(4.66, 26.0, 168),
    "C-dff1024": PaperFigures(5.12, 25.4, 53),
    "C-dff4096": PaperFigures(4.75, 26.2, 90),
    "D-dropout0.0": PaperFigures(5.77, 24.6),
    "D-dropout0.2": PaperFigures(4.95, 25.5),
    "D-smoothing0.0": PaperFigures(4.67, 25.3),
    "D-smoothing0.2": PaperFigures(5.47, 25.7),
    "E-learned": PaperFigures(4.92, 25.7),
    "big": PaperFigures(4.33, 26.4, 213),
}


def choose_rows(names: Sequence[str]) -> list[str]:
    """Rows by name, in the order of the table, "base" always among them.

    Args:
        names (`Sequence[str]`): rows ("A-h1"), groups ("A" to "E"), or "all".

    Raises:
        ValueError: for a name that is neither; the nearest is named.
    """
    chosen = {"base"}
    for name in names:
        found = [row for row in PAPER if name in (row, "all") or (name in "ABCDE" and row.startswith(f"{name}-"))]
        if not name or not found:
            near = difflib.get_close_matches(name, PAPER, n=1, cutoff=0.4)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"Table 3 has no row {name!r}.{hint} Rows: {', '.join(PAPER)}; groups: A, B, C, D, E; all."
            )
        chosen.update(found)
    return [row for row in PAPER if row in chosen]


def row_changes(row: str, base: VaswaniConfig) -> dict[str, Any]:
    """The configuration fields in which a row differs from a base model.

    Args:
        row (`str`): a row of Table 3. base (`VaswaniConfig`): of any size.

    Returns:
        `dict[str, Any]`: empty for "base". For the paper's base model they are the preset "table3-…" exactly.

    Raises:
        ValueError: the base is too small to be divided as the row asks.

    Choice: sizes keep their proportion to the base (d_ff 1024 of 2048 is half), but for group A "h 1" is one head
    whatever the base has, and all its rows keep h d_k and h d_v, as the paper does. The number of layers is rounded to
    the nearest (N 4 of 6 is 2 of 3). Dropout and smoothing are multiplied; 0 stays 0.
    """
    if row not in PAPER:
        choose_rows([row])
    preset, paper = PRESETS[f"table3-{row}"], VaswaniConfig()
    h, d_k, d_v = base.num_attention_heads, base.query_key_width, base.value_width
    if row.startswith("A-"):
        heads = 1 if row == "A-h1" else _scaled(row, "num_attention_heads", h, preset["num_attention_heads"], 8)
        for name, width in (("d_k", h * d_k), ("d_v", h * d_v)):
            if width % heads:
                raise ValueError(f"Row {row}: {heads} heads cannot share a width of {width} (h times {name}).")
        return {"num_attention_heads": heads, "d_k": h * d_k // heads, "d_v": h * d_v // heads}
    changes: dict[str, Any] = {}
    for name, value in preset.items():
        ours, theirs = getattr(base, name), getattr(paper, name)
        if name in ("encoder_layers", "decoder_layers"):
            changes[name] = max(1, round(ours * value / theirs))
        elif name in ("dropout", "label_smoothing"):
            changes[name] = ours * (value / theirs)
        elif name == "d_k":
            changes[name] = _scaled(row, name, d_k, value, paper.query_key_width)
        elif name == "d_v":
            changes[name] = _scaled(row, name, d_v, value, paper.value_width)
        elif name == "position_encoding":
            changes[name] = value
        else:
            changes[name] = _scaled(row, name, ours, value, theirs)
    if row == "big" and (base.d_k is not None or base.d_v is not None):
        changes |= {"d_k": d_k, "d_v": d_v}
    return changes


def _scaled(row: str, name: str, ours: int, value: int, theirs: int) -> int:
    if ours * value % theirs:
        raise ValueError(
            f"Row {row} takes {value}/{theirs} of `{name}`, and {ours} cannot be divided so: choose another base, or "
            "leave the row out."
        )
    return ours * value // theirs


def update_factor(row: str) -> int:
    """How many times the base's updates a row is trained: 3 for big, else 1 (Vaswani et al. 2017, section 5.2)."""
    return _UPDATES_OF_BIG if row == "big" else 1
