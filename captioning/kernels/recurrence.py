"""All steps of a recurrence behind one call: collected gradients, compiled steps, autocast.

The result is that of ``for x in inputs: state, out = step(module, x, state, memory)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from captioning.kernels.compilation import Mode, ShapeBuckets, begin_training_step, compiled
from captioning.kernels.unroll import unrolled
from captioning.trace import State


class ImageMemory(Protocol):
    """Tensors of several images that all steps read."""

    def collected(self) -> Any:
        """Return it with the gradients of all steps collected, see ``unroll``."""

    def select(self, images: Tensor) -> Any:
        """Return the memory of the given images, (B',) indices."""


Out = TypeVar("Out", bound=tuple)
Step = Callable[[Any, Tensor, State, Any], tuple[State, Out]]
"""``step(module, x, state, memory)`` returns the new state and a named tuple of tensors (N, ..) or None."""


class Recurrence:
    """Runs the steps of a module.

    Attributes:
        mode: Mode of ``torch.compile`` for the step in training; None to run it uncompiled. If the step is compiled,
            small batches are padded with copies of their images, so that few shapes are compiled.
    """

    def __init__(self) -> None:
        self.mode: Mode | None = None
        self._buckets = ShapeBuckets()

    def __call__(
        self, step: Step[Out], module: nn.Module, inputs: Tensor, state: State, memory: ImageMemory, images: int
    ) -> Out:
        """Run all steps and return their outputs stacked to (N, T, ..); None stays None.

        Args:
            step: A plain function, so that one compilation serves every instance of the module's class.
            module: The module whose ``StepLinear`` layers collect their gradients over the steps.
            inputs: (N, T, ..), one entry per step; N = images * R, the rows of an image adjacent.
            state: The state before the first step, tensors of N rows.
            memory: The memory of the images.
            images: Number of images.
        """
        N = len(inputs)
        if self.mode is None or not (module.training and torch.is_grad_enabled()):
            with unrolled(module):
                outputs = _run(functools.partial(step, module), inputs.unbind(1), state, memory.collected())
        else:
            R = N // images
            if (padded := self._buckets.images(images, R)) > images:
                chosen = torch.arange(padded, device=inputs.device) % images
                rows = torch.arange(padded * R, device=inputs.device) % N
                inputs, state, memory = inputs[rows], tuple(tensor[rows] for tensor in state), memory.select(chosen)
            begin_training_step(self.mode)
            # Compiled code does not collect gradients; autograd adds them step by step. The strides of the inputs must
            # not depend on T.
            steps = inputs.transpose(0, 1).contiguous().unbind(0)
            outputs = _run(functools.partial(compiled(step, self.mode), module), steps, state, memory)
        return type(outputs[0])(*(_stacked(tensors, N) for tensors in zip(*outputs, strict=True)))


def to_autocast(x: Tensor) -> Tensor:
    """Return ``x`` in autocast's type, so that a tensor which every step uses is converted once."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _run(step: Callable[..., Any], inputs: Sequence[Tensor], state: Any, memory: Any) -> list[Any]:
    outputs = []
    for x in inputs:
        state, out = step(x, state, memory)
        outputs.append(out)
    return outputs


def _stacked(tensors: Sequence[Tensor | None], rows: int) -> Tensor | None:
    if tensors[0] is None:
        return None
    stacked = torch.stack(tensors, 1)  # type: ignore[arg-type] # a field is None at every step or at none
    return stacked if len(stacked) == rows else stacked[:rows]
