"""All steps of a recurrence behind one call: weights that are shared by the steps, compiled steps, autocast.

What is computed is ``for x in inputs: state, out = step(module, x, state, memory)``, whatever makes it fast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from captioning.kernels.compilation import Mode, ShapeBuckets, begin_training_step, compiled
from captioning.kernels.unroll import unrolled

State = tuple[Tensor, ...]


class ImageMemory(Protocol):
    """What all steps look at, of several images."""

    def shared(self) -> Any:
        """Return it with the gradients of all steps collected, see ``unroll``."""

    def select(self, images: Tensor) -> Any:
        """Return the memory of the given images, (B',) indices."""


Kept = TypeVar("Kept", bound=tuple)
Step = Callable[[Any, Tensor, State, Any], tuple[State, Kept]]
"""``step(module, x, state, memory)`` returns the new state and a tuple of tensors to keep, rows first."""


class Recurrence:
    """Runs the steps of a module.

    Attributes:
        mode: compile the step for training; None runs it as it is. Small batches are then filled up with copies of
            their images, so that few shapes are compiled.
    """

    def __init__(self) -> None:
        self.mode: Mode | None = None
        self._buckets = ShapeBuckets()

    def __call__(
        self, step: Step[Kept], module: nn.Module, inputs: Tensor, state: State, memory: ImageMemory, images: int
    ) -> Kept:
        """Take all steps and return what they kept as one, (N, T, ..) each; None stays None.

        Args:
            step: a plain function, so that what is compiled serves every instance of the module's class.
            module: its ``StepLinear`` layers share their weights among the steps.
            inputs: (N, T, ..), one entry for each step; N = images * R, the rows of an image adjacent.
            state: tensors of N rows, before the first step.
            memory: of the images.
            images: how many.
        """
        N = len(inputs)
        if self.mode is None or not (module.training and torch.is_grad_enabled()):
            memory = memory.shared()
            with unrolled(module):
                kept = _take(functools.partial(step, module), inputs.unbind(1), state, memory)
        else:
            R = N // images
            if (wanted := self._buckets.images(images, R)) > images:
                chosen = torch.arange(wanted, device=inputs.device) % images
                rows = torch.arange(wanted * R, device=inputs.device) % N
                inputs, state, memory = inputs[rows], tuple(part[rows] for part in state), memory.select(chosen)
            begin_training_step(self.mode)
            # A step's gradients are added up step by step: what is compiled has no memory of them. The strides of its
            # inputs must not depend on T.
            steps = inputs.transpose(0, 1).contiguous().unbind(0)
            kept = _take(functools.partial(compiled(step, self.mode), module), steps, state, memory)
        return type(kept[0])(*(_stacked(parts, N) for parts in zip(*kept, strict=True)))


def to_autocast(x: Tensor) -> Tensor:
    """Return ``x`` in the type that autocast computes with: what every step uses is converted once."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _take(step: Callable[..., Any], inputs: Sequence[Tensor], state: Any, memory: Any) -> list[Any]:
    kept = []
    for x in inputs:
        state, out = step(x, state, memory)
        kept.append(out)
    return kept


def _stacked(parts: Sequence[Tensor | None], rows: int) -> Tensor | None:
    if parts[0] is None:
        return None
    stacked = torch.stack(parts, 1)  # type: ignore[arg-type] # what a step keeps, every step keeps
    return stacked if len(stacked) == rows else stacked[:rows]
