"""All steps of a recurrence behind one call, with deferred weight gradients, for captions of different lengths.

At existing steps, the result equals ``for x in inputs: state, out = step(x, state, memory)``.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from captioning.kernels.deferred import defer_gradient, pad_rows, take_first
from captioning.precision import to_autocast
from captioning.trace import State

LARGEST_REMAINDER = 0.9  # images leave if less than this of all steps remains; otherwise copies cost more than steps

Out = TypeVar("Out", bound=tuple)


def run_recurrence(
    step: Callable[[Tensor, State, Any], tuple[State, Out]],
    module: nn.Module,
    inputs: Tensor,
    state: State,
    memory: Any,
    image_count: int,
    lengths: Tensor,
) -> Out:
    """Run all steps and return their outputs stacked to (N, T, ..); None stays None.

    On a CPU, an image leaves the batch when all of its rows have ended, if that saves a tenth of the steps. Outputs of
    steps that do not exist are unspecified.

    Args:
        step: ``step(x, state, memory)`` returns the new state and a named tuple of tensors (N, ..) or None.
        module: The module whose ``Linear`` layers defer their weight gradients.
        inputs: (N, T, ..), x of every step; N = image_count * R, the rows of an image adjacent.
        state: The state before the first step, tensors of N rows.
        memory: The memory of the images, which all steps read: an ``attention.Memory``.
        image_count: Number of images.
        lengths: (N,) int64, the steps of each row, T at most.
    """
    R = len(inputs) // image_count
    row_order = None
    steps = inputs.unbind(1)  # T of (N, ..)
    if inputs.is_cpu and (leaving := _leaving_order(lengths, image_count, len(steps))) is not None:
        order, image_counts = leaving
        row_order = torch.arange(len(inputs)).view(-1, R)[order].flatten()  # (N,)
        memory = memory.select_images(order)
        state = tuple(tensor[row_order] for tensor in state)
        steps = tuple(x[: count * R] for x, count in zip(inputs[row_order].unbind(1), image_counts, strict=True))
    outputs: list[Any] = []
    with deferring_weight_gradients(module):
        step_memory = memory = memory.map(defer_gradient)
        for x in steps:
            if len(x) < len(state[0]):
                B = len(x) // R
                state = tuple(tensor[: len(x)] for tensor in state)
                step_memory = memory.map(lambda field, B=B: take_first(field, len(field) // image_count * B))
            state, out = step(x, state, step_memory)
            outputs.append(out)
    fields = [_stack(tensors) for tensors in zip(*outputs, strict=True)]  # (N, T, ..) or None each
    if row_order is not None:
        original_order = row_order.argsort()
        fields = [None if x is None else x[original_order] for x in fields]
    return type(outputs[0])(*fields)


@contextmanager
def deferring_weight_gradients(module: nn.Module) -> Iterator[None]:
    """Compute the weight gradient of every ``Linear`` in ``module`` once for all steps within a ``with`` block."""
    layers: list[Any] = [layer for layer in module.modules() if hasattr(layer, "step_weight")]
    try:
        for layer in layers:
            layer.step_weight = functools.cache(lambda layer=layer: defer_gradient(to_autocast(layer.weight)))
        yield
    finally:
        for layer in layers:
            layer.step_weight = None


def _leaving_order(lengths: Tensor, B: int, T: int) -> tuple[Tensor, list[int]] | None:
    """Return the images, the last to leave first, and the number of images at each step; None if few leave."""
    ends = lengths.view(B, -1).amax(dim=1)
    counts = (ends > torch.arange(T).unsqueeze(1)).sum(dim=1).clamp(min=1).tolist()
    return (ends.argsort(descending=True, stable=True), counts) if sum(counts) < LARGEST_REMAINDER * B * T else None


def _stack(tensors: Sequence[Tensor | None]) -> Tensor | None:
    existing = [x for x in tensors if x is not None]  # all steps have it, or none
    return torch.stack([pad_rows(x, len(existing[0])) for x in existing], 1) if existing else None
