"""A look at the gradients of a run's first update."""

from torch import nn


def check_gradients(model: nn.Module) -> None:
    """See that every trained parameter takes part: several processes would otherwise wait for the others.

    Args:
        model (`torch.nn.Module`): without wrappers, after a backward pass.

    Raises:
        ValueError: parameters without a gradient; the first of them are named.
    """
    unused = [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]
    if unused:
        raise ValueError(
            f"{len(unused)} parameter(s) have no part in the loss: {', '.join(unused[:5])}"
            f"{' ...' if len(unused) > 5 else ''}. Set requires_grad_(False) on them, or use them."
        )
