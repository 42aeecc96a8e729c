"""Table 1 of the paper as formulas: what a layer costs, how much of it must wait, and how far apart positions are.

Letters, as in the table: n length of the sequence, d width, k width of the convolution's kernel, r size of the
neighbourhood of restricted self-attention.
"""

import math
from dataclasses import dataclass

import numpy as np

SELF_ATTENTION, RECURRENT = "self-attention", "recurrent"
CONVOLUTIONAL, RESTRICTED = "convolutional", "restricted self-attention"
LAYER_TYPES = (SELF_ATTENTION, RECURRENT, CONVOLUTIONAL, RESTRICTED)


@dataclass(frozen=True)
class Formula:
    """A row of Table 1.

    Args:
        operations, sequential, path (`str`): orders of the operations of a layer, of those that must follow one
            another, and of the longest path between two positions.
        exponents (`tuple[int, int]`): of n and of d in `operations`.

    Source: Vaswani et al. 2017, Table 1 and section 4.
    """

    operations: str
    sequential: str
    path: str
    exponents: tuple[int, int]


FORMULAS = {
    SELF_ATTENTION: Formula("O(n^2 d)", "O(1)", "O(1)", (2, 1)),
    RECURRENT: Formula("O(n d^2)", "O(n)", "O(n)", (1, 2)),
    CONVOLUTIONAL: Formula("O(k n d^2)", "O(1)", "O(log_k(n))", (1, 2)),
    RESTRICTED: Formula("O(r n d)", "O(1)", "O(n/r)", (1, 1)),
}


@dataclass(frozen=True)
class LayerCount:
    """What a layer comes to at given sizes, one sequence.

    Args:
        formula (`int`): the table's product of n, d, k and r, without a constant.
        core (`int`): multiply-adds of the layer as built that the formula is about. Self-attention: Q K^T and the
            weighted sum of V. Recurrent: an LSTM's maps from the state to its four gates. Convolutional: all.
        projections (`int`): multiply-adds of the layer's other maps, all of order n d^2 and each over all positions at
            once. Self-attention: Q, K, V and output. Recurrent: the input's maps to the four gates.
        sequential (`int`): steps that must follow one another, up to a constant.
        path (`int`): layers as built that lie one on another until every position can depend on every other; for a
            recurrent layer, whose one layer does it, the steps inside it.
    """

    formula: int
    core: int
    projections: int
    sequential: int
    path: int

    @property
    def whole(self) -> int:
        """Multiply-adds of the whole layer."""
        return self.core + self.projections


def count_layer(kind: str, length: int, width: int, kernel: int = 3, window: int = 65) -> LayerCount:
    """Count one row of Table 1 for given sizes.

        self-attention             n^2 d        core 2 n^2 d        projections 4 n d^2
        recurrent (LSTM)           n d^2        core 4 n d^2        projections 4 n d^2
        convolutional              k n d^2      core k n d^2
        restricted self-attention  r n d        core 2 n r' d       projections 4 n d^2

    r' is what the blocks of `restricted_attention` compute for a position, 2 (r - 1): twice the neighbourhood or a
    little less. Places of padding in convolution and blocks are counted, because they are computed.

    Args:
        kind (`str`): one of `LAYER_TYPES`. length (`int`): n, positions. width (`int`): d.
        kernel (`int`): k, odd. window (`int`): r, odd: the position itself and (r - 1) / 2 on either side.

    Returns:
        `LayerCount`.

    Raises:
        ValueError: an unknown kind, a size below 1, or an even kernel or window.

    Source: Vaswani et al. 2017, Table 1. Choice: the kernels are contiguous, so n positions need about 2 n / k layers
    on one another; the table's log_k(n) is for dilated kernels.
    """
    check_sizes(length, width, kernel, window)
    n, d, k, r = length, width, kernel, window
    if kind == SELF_ATTENTION:
        return LayerCount(n * n * d, 2 * n * n * d, 4 * n * d * d, sequential=1, path=1)
    if kind == RECURRENT:
        return LayerCount(n * d * d, 4 * n * d * d, 4 * n * d * d, sequential=n, path=max(1, n - 1))
    if kind == CONVOLUTIONAL:
        return LayerCount(k * n * d * d, k * n * d * d, 0, sequential=1, path=_layers_across(n, k))
    if kind == RESTRICTED:
        block, block_count = blocks_of(n, r)
        pairs = block_count * block * (block + r - 1)
        return LayerCount(r * n * d, 2 * pairs * d, 4 * n * d * d, sequential=1, path=_layers_across(n, r))
    raise ValueError(f"Unknown layer type {kind!r}. Types: {', '.join(LAYER_TYPES)}.")


def blocks_of(length: int, window: int) -> tuple[int, int]:
    """Positions in a block of restricted self-attention, and the number of blocks.

    Choice: as many positions as there are neighbours. A larger block computes more pairs in vain, and a smaller one
    copies each key more often.
    """
    block = max(1, window - 1)
    return block, -(-length // block)


def check_sizes(length: int, width: int, kernel: int, window: int) -> None:
    """Refuse sizes that no layer has.

    Raises:
        ValueError: one is below 1, or kernel or window is even and so has no middle.
    """
    for name, value in (("length", length), ("width", width), ("kernel", kernel), ("window", window)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    for name, value in (("kernel", kernel), ("window", window)):
        if value % 2 == 0:
            raise ValueError(f"`{name}` must be odd, so that it has a middle, got {value}.")


def _layers_across(length: int, reach: int) -> int:
    """Layers that see `reach` positions around each, until the first and the last of `length` meet."""
    if length > 1 and reach == 1:
        raise ValueError("A kernel or window of 1 never joins two positions: take at least 3.")
    return max(1, math.ceil((length - 1) / max(1, (reach - 1) // 2)))


@dataclass(frozen=True)
class PowerLaw:
    """y = factor x^exponent, fitted to measured points.

    Args:
        exponent, factor (`float`). error (`float`): standard error of the exponent; 0 for two points.
        points (`int`): how many were fitted.
    """

    exponent: float
    factor: float
    error: float
    points: int

    def at(self, x: float) -> float:
        """The fitted value."""
        return self.factor * x**self.exponent


def fit_power_law(x: list[float], y: list[float]) -> PowerLaw:
    """Fit a straight line to log y over log x, by least squares.

    Args:
        x, y (`list[float]`): at least two points, all above 0, at unlike x.

    Returns:
        `PowerLaw`.

    Raises:
        ValueError: fewer than two unlike x, or a value that has no logarithm.
    """
    if len(set(x)) < 2 or len(x) != len(y):
        raise ValueError(f"A line needs at least two points, at unlike x; got {len(set(x))}.")
    if min(*x, *y) <= 0:
        raise ValueError("A point at or below 0 has no place on logarithmic axes.")
    log_x, log_y = np.log(x), np.log(y)
    spread = float(((log_x - log_x.mean()) ** 2).sum())
    exponent = float(((log_x - log_x.mean()) * (log_y - log_y.mean())).sum()) / spread
    offset = float(log_y.mean() - exponent * log_x.mean())
    rest = float(((log_y - offset - exponent * log_x) ** 2).sum())
    error = math.sqrt(rest / (len(x) - 2) / spread) if len(x) > 2 else 0.0
    return PowerLaw(exponent, math.exp(offset), error, len(x))


def overtaking_point(x: list[float], first: list[float], second: list[float]) -> float | None:
    """Where `first` grows past `second` for good, on straight lines between the points on logarithmic axes.

    Args:
        x (`list[float]`): ascending. first, second (`list[float]`): values above 0 at each.

    Returns:
        `float`, *optional*: x; None where `first` is above all along, or not above at the last point.
    """
    gap = np.log(first) - np.log(second)
    below = np.flatnonzero(gap <= 0)
    if len(below) == 0 or below[-1] == len(gap) - 1:
        return None
    i = int(below[-1])
    share = -gap[i] / (gap[i + 1] - gap[i])
    return float(math.exp(math.log(x[i]) + share * (math.log(x[i + 1]) - math.log(x[i]))))
