"""Sinusoids that checkpoints carry along: the model computes its own, so what is stored must be the same."""

import torch

from ..modeling_vaswani import sinusoid_table
from .foreign import ConversionError, TensorReader

# Rounding of a stored table: of its numbers, and of the angles they were made from, the more the later the position.
_ROUNDING, _ROUNDING_A_ROW = 1e-6, 4e-7


def first_other_row(
    table: torch.Tensor, layout: str, exponent: str = "2i/d", offset: int = 0, rounding_a_row: float = _ROUNDING_A_ROW
) -> tuple[int, float] | None:
    """Where a stored table is not the sinusoid, beyond rounding.

    Args:
        table (`torch.Tensor`): [rows, d_model], as stored; half precision may be rounded that much more.
        layout, exponent, offset: as for `sinusoid_table`.
        rounding_a_row (`float`): what angles computed in float32 add with every position; 0 for exact ones.

    Returns:
        The first such row and its largest difference; None: it is the sinusoid.
    """
    own = sinusoid_table(len(table), table.shape[1], layout, exponent, offset)
    apart = (table.float() - own).abs().amax(dim=1)
    allowed = max(torch.finfo(table.dtype).eps, _ROUNDING) + rounding_a_row * torch.arange(len(table))
    beyond = (~(apart <= allowed)).nonzero()  # a number that is none is beyond too
    return None if len(beyond) == 0 else (int(beyond[0]), float(apart[beyond[0]]))


def check_sinusoid(
    reader: TensorReader, name: str, d_model: int, layout: str = "interleaved", exponent: str = "2i/d"
) -> None:
    """Leave a stored table out where there is one, once it is the sinusoid.

    Raises:
        ConversionError: the numbers are others, so the function would be.
    """
    if name not in reader:
        return
    if first_other_row(reader.tensors[name].reshape(-1, d_model), layout, exponent) is not None:
        raise ConversionError(f"{reader.path}: {name!r} is not the sinusoid that the hyper-parameters ask for.")
    reader.ignore(name, "computed from a formula")
