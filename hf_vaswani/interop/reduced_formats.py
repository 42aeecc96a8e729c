"""The check of a model in a reduced format (int8, bfloat16 and others) on real lines: it must say the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .foreign import ConversionError

# Choice: a format stops an export when more than this share of greedy outputs differs from the full model's, or when
# outputs are longer on average than this ratio. Ordinary models change 1 to 5 % of their lines in int8.
MOST_CHANGED = 0.2
MOST_LENGTH = 1.1


@dataclass(frozen=True)
class ReducedFormat:
    """How a model in a reduced format compares with itself in float32.

    Args:
        name (`str`): of the format. lines (`int`): compared.
        equal (`int`): lines with the same output.
        length_ratio (`float`): new tokens of all lines over those of the full model.
        endless (`int`): lines that reached their limit without an end token where the full model ended.
        largest_weight (`float`): of the model, without sign. largest_name (`str`): its tensor.
        faults (`tuple[str, ...]`): what is out of bounds, as sentences; empty: the format may be used.
    """

    name: str
    lines: int
    equal: int
    length_ratio: float
    endless: int
    largest_weight: float
    largest_name: str
    faults: tuple[str, ...] = ()

    def line(self) -> str:
        """For people, and for a table."""
        return (
            f"{self.name}: {self.equal} of {self.lines} lines equal, mean length ratio {self.length_ratio:.3f}, "
            f"{self.endless} without end, largest weight {self.largest_weight:.3g} ({self.largest_name})"
        )

    def require(self) -> None:
        """Stop where the format spoils the model.

        Raises:
            ConversionError: with every fault and the figures.
        """
        if self.faults:
            raise ConversionError(
                f"{self.name} is not usable for this model: {'; '.join(self.faults)}. ({self.line()}) Export it as "
                "float32 or bfloat16."
            )


def check_reduced(
    name: str,
    full: Sequence[Sequence[int]],
    reduced: Sequence[Sequence[int]],
    limits: Sequence[int],
    weights: Mapping[str, torch.Tensor],
    most_changed: float = MOST_CHANGED,
    most_length: float = MOST_LENGTH,
) -> ReducedFormat:
    """Compare the outputs of a reduced format with the full model's.

    Args:
        name (`str`): of the format, for messages.
        full, reduced (`Sequence`): new token ids of the same sources, end tokens included.
        limits (`Sequence[int]`): the most new tokens of each; both searches had them.
        weights (`Mapping`): of the full model, for the largest one.
        most_changed (`float`): share of lines that may differ. most_length (`float`): ratio of lengths that may be.

    Returns:
        `ReducedFormat`, whatever it says; `require` stops.

    Raises:
        ValueError: nothing to compare, or of different numbers.
    """
    if not full or not len(full) == len(reduced) == len(limits):
        raise ValueError(f"{len(full)}, {len(reduced)} and {len(limits)} outputs and limits cannot be compared.")
    equal = sum(list(a) == list(b) for a, b in zip(full, reduced, strict=True))
    ratio = sum(map(len, reduced)) / max(1, sum(map(len, full)))
    endless = sum(len(b) >= limit > len(a) for a, b, limit in zip(full, reduced, limits, strict=True))
    largest_name = max(weights, key=lambda one: float(weights[one].abs().max()))
    faults = []
    if (changed := len(full) - equal) > most_changed * len(full):
        faults.append(f"{changed} of {len(full)} lines change, {most_changed:.0%} may")
    if ratio > most_length:
        faults.append(f"outputs are {ratio:.2f} times as long, {most_length:g} is allowed")
    if endless:
        faults.append(f"{endless} lines run to their limit where the full model ends them")
    largest = float(weights[largest_name].abs().max())
    return ReducedFormat(name, len(full), equal, ratio, endless, largest, largest_name, tuple(faults))
