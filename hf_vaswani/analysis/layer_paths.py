"""Table 1's other two columns found on the layers themselves: steps that wait for one another, and path lengths."""

import re
from typing import Any

import torch

from .complexity import RECURRENT
from .layer_costs import BenchSettings, make_layer

_PRODUCT = re.compile(r"(Mm|Addmm|Bmm|Baddbmm|Mv|Linear|Convolution)Backward")


def sequential_steps(kind: str, length: int, settings: BenchSettings) -> int:
    """The longest chain of matrix products, each waiting for the one before, in one pass of a layer.

    It is read from the graph that autograd keeps, so it is what the layer does, not what a formula says.

    Args:
        kind (`str`): of layer. length (`int`): n. settings (`BenchSettings`): kernel, window and width of a head.

    Returns:
        `int`: products. A layer with projections has a few more than Table 1's order, whatever n.
    """
    # In float64, because in float32 an LSTM may be one fused kernel, which is a single node of the graph.
    layer = make_layer(kind, settings.head_width, settings).double()
    output = _output(layer(torch.randn(1, length, settings.head_width, dtype=torch.float64)))
    return _longest_chain(output.grad_fn)


def path_length(kind: str, length: int, settings: BenchSettings) -> int:
    """How far the first and the last position are apart, found by the gradient between them.

    Args: as for `sequential_steps`.

    Returns:
        `int`: the least number of layers, one on another, through which the last output depends on the first input. For
        a recurrent layer, in which one layer does it step by step, the products on the way.
    """

    def is_joined(count: int) -> bool:
        torch.manual_seed(settings.seed)
        # In float64 a path through a hundred layers is still told from none.
        layer = make_layer(kind, settings.head_width, settings).double()
        first = torch.randn(1, length, settings.head_width, dtype=torch.float64, requires_grad=True)
        states = first
        for _ in range(count):
            states = _output(layer(states))
        (slope,) = torch.autograd.grad(states[:, -1].sum(), first)
        return bool((slope[:, 0] != 0).any())

    most = 1
    while not is_joined(most):
        if most > 2 * length:
            raise ValueError(f"The first and the last of {length} positions never meet.")
        most *= 2
    least = most // 2 + 1  # joined at `most`, not at half of it
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if is_joined(middle) else (middle + 1, most)
    if kind == RECURRENT and most == 1:
        return sequential_steps(kind, length, settings) - 1  # less the input's own map, which waits for nothing
    return most


def _output(found: Any) -> torch.Tensor:
    return found[0] if isinstance(found, tuple) else found


def _longest_chain(end: Any) -> int:
    """Products on the longest way through an autograd graph; without recursion, as the graph may be deep."""
    depth: dict[Any, int] = {}
    waiting = [end]
    while waiting:
        node = waiting[-1]
        before = [one for one, _ in node.next_functions if one is not None]
        open_ones = [one for one in before if one not in depth]
        if open_ones:
            waiting.extend(open_ones)
            continue
        waiting.pop()
        depth[node] = max((depth[one] for one in before), default=0) + bool(_PRODUCT.search(node.name()))
    return depth[end]
