"""What a training costs in weights and floating point operations, counted and by the paper's method."""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..configuration_vaswani import VaswaniConfig

SUSTAINED_TFLOPS = {"K80": 2.8, "K40": 3.7, "M40": 6.0, "P100": 9.5}
# The two runs of Table 2 of the paper: hours on eight P100, and updates.
PAPER_RUNS = {"base": (12.0, 100_000), "big": (84.0, 300_000)}
PRECISIONS: dict[str | None, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}  # any other is float32


@dataclass(frozen=True)
class ParameterCount:
    """Numbers in the weights, a shared matrix counted once.

    Args:
        total, embedding, other (`int`): all; those of embeddings and pre-softmax matrix; the rest.
        trained (`int`): those that are not frozen.
    """

    total: int
    embedding: int
    other: int
    trained: int


@dataclass(frozen=True)
class TrainingCost:
    """Floating point operations of the whole training, a multiply-add taken as two.

    Args:
        counted (`float`): of the matrix products of forward and backward, padding included.
        sustained_tflops (`float`): what one device sustains. sustained_of (`str`): how that is known.
        paper_method (`float`, *optional*): hours x devices x sustained rate; None where no time was measured.
        paper_size (`str`, *optional*): "base" or "big" where the model has that size.
    """

    counted: float
    sustained_tflops: float
    sustained_of: str
    paper_method: float | None
    paper_size: str | None


def paper_flops(hours: float, gpu_count: int, sustained_tflops: float) -> float:
    """The training cost of a run as the paper estimates it.

        FLOPs = time x number of GPUs x sustained single-precision rate of one

    Args:
        hours (`float`): of training. gpu_count (`int`): GPUs.
        sustained_tflops (`float`): of one, in 10^12 operations a second; `SUSTAINED_TFLOPS` has the paper's figures.

    Returns:
        `float`: operations.

    Source: Vaswani et al. 2017, section 6.1 and its footnote.
    """
    return hours * 3600 * gpu_count * sustained_tflops * 1e12


def paper_size(config: Any) -> str | None:
    """The name of the paper's model, "base" or "big", that has the same layers and widths; None for another size."""
    names = ["d_model", "d_ff", "num_attention_heads", "query_key_width", "value_width"]
    names += ["encoder_layers", "decoder_layers"]
    for size in PAPER_RUNS:
        paper = VaswaniConfig.from_preset(size)
        if all(getattr(config, name, None) == getattr(paper, name) for name in names):
            return size
    return None


def count_parameters(model: Any) -> ParameterCount:
    """Count the numbers in a model's weights.

    Args:
        model (`torch.nn.Module`): of transformers, if its pre-softmax matrix is to be told from other maps.

    Returns:
        `ParameterCount`: `total` is `model.num_parameters()`.
    """
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) or m is head}
    sizes = [(p.numel(), id(p) in tables, p.requires_grad) for p in model.parameters()]
    embedding, other = (sum(n for n, is_table, _ in sizes if is_table == wanted) for wanted in (True, False))
    trained = sum(n for n, _, is_trained in sizes if is_trained)
    return ParameterCount(total=embedding + other, embedding=embedding, other=other, trained=trained)


def count_flops(model: Any, batch: dict[str, Any]) -> int:
    """Floating point operations of the matrix products of one forward and backward pass.

    Args:
        model: gives a `loss`; its gradients are added to. batch (`dict`): its arguments.

    Returns:
        `int`: a multiply-add is two operations. Attention counts as its plain formula, whatever kernel computes it.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    # The counter does not know every fused kernel, and of some it counts what they compute a second time.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    return counter.get_total_flops()


def sustained_tflops(device: torch.device, precision: str | None) -> tuple[float, str]:
    """What a device sustains, in 10^12 operations a second, and how that is known.

    It is the paper's figure, or for other devices that of a plain matrix product in the `precision` of the run.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    for known, rate in SUSTAINED_TFLOPS.items():
        if known in name.replace("-", " ").split():
            return rate, f"the paper's figure for a {known}"
    kind = PRECISIONS.get(precision, torch.float32)
    size, seconds = 128, 0.0
    while seconds < 0.02 and size < 8192:
        size *= 2
        left = torch.full((size, size), 0.5, dtype=kind, device=device)
        seconds = math.inf
        for _ in range(4):
            start = device_clock(device)
            torch.mm(left, left)
            seconds = min(seconds, device_clock(device) - start)
    return 2 * size**3 / seconds / 1e12, f"a {str(kind).removeprefix('torch.')} matrix product, on {name}"


def device_clock(device: torch.device) -> float:
    """Seconds of a clock, read when the device has done what it was given."""
    backend: Any = getattr(torch, device.type, None)
    if device.type != "cpu" and hasattr(backend, "synchronize"):
        backend.synchronize()
    return time.perf_counter()
