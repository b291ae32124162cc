"""All steps of a recurrence behind one call: collected gradients, different lengths, autocast.

The result is that of ``for x in inputs: state, out = step(module, x, state, memory)`` at the steps that exist.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from captioning.kernels.unroll import padded, unrolled
from captioning.trace import State


class ImageMemory(Protocol):
    """Tensors of several images that all steps read."""

    def collected(self) -> Any:
        """Return it with the gradients of all steps collected, see ``unroll``."""

    def select(self, images: Tensor) -> Any:
        """Return the memory of the given images, (B',) indices."""

    def first(self, images: int) -> Any:
        """Return the memory of the first images; their gradients are collected with those of all."""


FEW_ENOUGH = 0.9
"""Images leave only if less than this fraction of a batch's steps remains; otherwise copying the memory costs more."""

Out = TypeVar("Out", bound=tuple)
Step = Callable[[Any, Tensor, State, Any], tuple[State, Out]]
"""``step(module, x, state, memory)`` returns the new state and a named tuple of tensors (N, ..) or None."""


def run_recurrence(
    step: Step[Out], module: nn.Module, inputs: Tensor, state: State, memory: ImageMemory, images: int, lengths: Tensor
) -> Out:
    """Run all steps and return their outputs stacked to (N, T, ..); None stays None.

    On a CPU, if that saves a tenth of the steps, an image leaves the batch when all of its rows have ended. Outputs of
    steps that do not exist are unspecified.

    Args:
        step: The step of the recurrence.
        module: The module whose ``StepLinear`` layers collect their gradients over the steps.
        inputs: (N, T, ..), one entry per step; N = images * R, the rows of an image adjacent.
        state: The state before the first step, tensors of N rows.
        memory: The memory of the images.
        images: Number of images.
        lengths: (N,) int64, the steps of each row, T at most.
    """
    N, R = len(inputs), len(inputs) // images
    rows, steps = None, inputs.unbind(1)
    if inputs.is_cpu and (leaving := _leaving(lengths, images, len(steps))) is not None:
        order, present = leaving
        rows, memory = torch.arange(N).view(images, R)[order].flatten(), memory.select(order)
        state = tuple(tensor[rows] for tensor in state)
        steps = tuple(x[: count * R] for x, count in zip(inputs[rows].unbind(1), present, strict=True))
    with unrolled(module):
        outputs = _run(functools.partial(step, module), steps, state, memory.collected(), R)
    stacked = [_stacked(tensors, N) for tensors in zip(*outputs, strict=True)]
    if rows is not None:
        back = rows.argsort()
        stacked = [None if x is None else x[back] for x in stacked]
    return type(outputs[0])(*stacked)


def _leaving(lengths: Tensor, images: int, T: int) -> tuple[Tensor, list[int]] | None:
    """Return the order of the images, the last to leave first, and how many are there at each of T steps.

    Returns None if too few steps are saved to make up for copying the memory in that order.

    Args:
        lengths: (N,) steps of each row, the rows of an image adjacent.
        images: Number of images.
        T: Number of steps.
    """
    ends = lengths.view(images, -1).amax(dim=1)
    present = (ends > torch.arange(T).unsqueeze(1)).sum(dim=1).clamp(min=1).tolist()
    return (ends.argsort(descending=True, stable=True), present) if sum(present) < FEW_ENOUGH * images * T else None


def to_autocast(x: Tensor) -> Tensor:
    """Return ``x`` in autocast's type, so that a tensor which every step uses is converted once."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _run(step: Callable[..., Any], inputs: Sequence[Tensor], state: Any, memory: Any, R: int) -> list[Any]:
    """Run the steps; one with fewer rows than the step before it works on the first images, of R rows each."""
    outputs, remaining = [], memory
    for x in inputs:
        if (rows := len(x)) < len(state[0]):
            state, remaining = tuple(tensor[:rows] for tensor in state), memory.first(rows // R)
        state, out = step(x, state, remaining)
        outputs.append(out)
    return outputs


def _stacked(tensors: Sequence[Tensor | None], rows: int) -> Tensor | None:
    existing = [x for x in tensors if x is not None]  # of all steps, or of none
    if not existing:
        return None
    stacked = torch.stack([padded(x, len(existing[0])) for x in existing], 1)
    return stacked if len(stacked) == rows else stacked[:rows]
