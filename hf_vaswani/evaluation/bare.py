"""The model as a saved copy of it would compute: what is measured during training is what is measured afterwards."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def bare_model(model: Any, accelerator: Any = None, dtype: torch.dtype | None = None) -> Iterator[Any]:
    """Lend the model without its wrappers, in evaluation mode and in the precision of its own weights.

    Mixed precision of a training run would give other translations than the checkpoint that it saves, and wrappers for
    several processes expect all of them to run alike; both are left out here and come back afterwards. Weights that
    are sharded over processes (FSDP2) are brought together in a copy, for which every process must call this.

    Args:
        model: a model of transformers, as it is or as `accelerator.prepare` gave it back.
        accelerator (`accelerate.Accelerator`, *optional*): the one that prepared it.
        dtype (`torch.dtype`, *optional*): compute in this precision, in a copy where the weights have another.

    Yields:
        The module itself, or a copy that computes the same.

    Raises:
        ValueError: the weights are sharded in a way that cannot be undone here (FSDP1, DeepSpeed ZeRO stage 3).
    """
    if accelerator is not None:
        model = accelerator.unwrap_model(model, keep_torch_compile=False)
    _check_is_usable(model)
    if any(hasattr(weight, "full_tensor") for weight in model.parameters()):
        model = _gathered(model)
    if dtype is not None and model.dtype != dtype:
        model = copy.deepcopy(model).to(dtype)
    # Accelerate puts mixed precision into an attribute of the instance, which hides the method of the class.
    forward = vars(model).pop("forward", None) if "_original_forward" in vars(model) else None
    was_training = model.training
    model.eval()
    try:
        yield model
    finally:
        model.train(was_training)
        if forward is not None:
            model.forward = forward


def _check_is_usable(model: Any) -> None:
    kinds = {type(module).__name__ for module in model.modules()}
    if "FullyShardedDataParallel" in kinds:
        raise ValueError("The model is sharded by FSDP1, which cannot be evaluated: set `fsdp_version: 2`.")
    if any(hasattr(weight, "ds_id") for weight in model.parameters()):
        raise ValueError("The model is sharded by DeepSpeed ZeRO stage 3, which cannot be evaluated: use stage 1 or 2.")


def _gathered(model: Any) -> Any:
    """A copy with whole weights, of the class that the model had before it was sharded."""
    state = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }
    # The class of a sharded module makes a plain module of the class that it was before.
    whole = type(model)(model.config).to(device=model.device, dtype=model.dtype)
    whole.load_state_dict(state)
    whole.generation_config = model.generation_config
    whole.train(model.training)
    return whole
