"""The paper's learning rate and its optimizer."""

from collections.abc import Iterable

import torch


def learning_rate(update: int, d_model: int, warmup_updates: int = 4000, factor: float = 1.0) -> float:
    """The rate of one optimizer update.

        lrate = factor * d_model^-0.5 * min(update^-0.5, update * warmup_updates^-1.5)

    It rises in a straight line to its peak at `warmup_updates` and falls with the square root from there. It depends
    on the number of the update alone: not on time, on processes, or on micro-batches.

    Args:
        update (`int`): number of the update, from 1. d_model (`int`): width of the model.
        warmup_updates (`int`): the update with the highest rate.
        factor (`float`): 1 is the paper; small models and small batches may want another.

    Returns:
        `float`: the rate.

    Raises:
        ValueError: for an update or a warm-up below 1.

    Source: Vaswani et al. 2017, section 5.3, eq. (3).
    """
    if update < 1 or warmup_updates < 1:
        raise ValueError(f"`update` ({update}) and `warmup_updates` ({warmup_updates}) must be at least 1.")
    return factor * d_model**-0.5 * min(update**-0.5, update * warmup_updates**-1.5)


def paper_optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Adam:
    """Adam with the paper's constants; whoever steps it sets the rate first (see `set_learning_rate`).

    Args:
        parameters: what is trained.

    Returns:
        `torch.optim.Adam`: beta_1 0.9, beta_2 0.98, epsilon 1e-9, no weight decay.

    Source: Vaswani et al. 2017, section 5.3.
    """
    parameters = list(parameters)
    # One pass over weights and moments instead of a dozen, where there is a kernel for it.
    is_fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
    return torch.optim.Adam(parameters, lr=1.0, betas=(0.9, 0.98), eps=1e-9, fused=is_fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group of an optimizer the same rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
