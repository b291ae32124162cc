"""All steps of a recurrence behind one call. Weight gradients are deferred, and captions have different lengths.

At existing steps, the result equals ``for x in inputs: state, out = step(x, state, memory)``.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from captioning.kernels.deferred import deferred, leading, padded
from captioning.precision import to_autocast
from captioning.trace import State

FEW_ENOUGH = 0.9  # images leave only if less than this fraction of all steps remains; otherwise copies cost more

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
    R, rows, steps = len(inputs) // image_count, None, inputs.unbind(1)  # T of (N, ..)
    if inputs.is_cpu and (leaving := _leaving(lengths, image_count, len(steps))) is not None:
        order, present = leaving
        rows, memory = torch.arange(len(inputs)).view(-1, R)[order].flatten(), memory.select_images(order)  # (N,)
        state = tuple(tensor[rows] for tensor in state)
        steps = tuple(x[: count * R] for x, count in zip(inputs[rows].unbind(1), present, strict=True))
    outputs: list[Any] = []
    with deferring_weight_gradients(module):
        remaining = memory = memory.map(deferred)
        for x in steps:
            if len(x) < len(state[0]):
                state, left = tuple(tensor[: len(x)] for tensor in state), len(x) // R
                remaining = memory.map(lambda field, left=left: leading(field, len(field) // image_count * left))
            state, out = step(x, state, remaining)
            outputs.append(out)
    stacked = [_stacked(tensors) for tensors in zip(*outputs, strict=True)]  # (N, T, ..) or None each
    if rows is not None:
        in_order = rows.argsort()
        stacked = [None if x is None else x[in_order] for x in stacked]
    return type(outputs[0])(*stacked)


@contextmanager
def deferring_weight_gradients(module: nn.Module) -> Iterator[None]:
    """Compute the weight gradient of every ``Linear`` in ``module`` once for all steps within the context."""
    layers: list[Any] = [layer for layer in module.modules() if hasattr(layer, "step_weight")]
    try:
        for layer in layers:
            layer.step_weight = functools.cache(lambda layer=layer: deferred(to_autocast(layer.weight)))
        yield
    finally:
        for layer in layers:
            layer.step_weight = None


def _leaving(lengths: Tensor, B: int, T: int) -> tuple[Tensor, list[int]] | None:
    """Return the order of the images, the last to leave first, and their number at each step; None if few leave."""
    ends = lengths.view(B, -1).amax(dim=1)
    present = (ends > torch.arange(T).unsqueeze(1)).sum(dim=1).clamp(min=1).tolist()
    return (ends.argsort(descending=True, stable=True), present) if sum(present) < FEW_ENOUGH * B * T else None


def _stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    existing = [x for x in tensors if x is not None]  # all steps have it, or none
    return torch.stack([padded(x, len(existing[0])) for x in existing], 1) if existing else None
