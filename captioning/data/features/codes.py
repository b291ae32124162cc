"""Annotations in 8 bits: each channel's range of a shard in 255 equal steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DTYPES: dict[str, type[np.generic]] = {"float16": np.float16, "uint8": np.uint8}
"""How numbers are kept: as fp16, or as codes, half the size."""
_SERIAL = 32_000  # numbers; PyTorch computes fewer than 32,768 in one thread


class Scale(NamedTuple):
    """What turns codes back into annotations: ``code * step + offset``, by channel.

    Attributes:
        step, offset: (D,) float32.
    """

    step: NDArray[np.float32]
    offset: NDArray[np.float32]


def encode(annotations: Tensor) -> tuple[NDArray[np.uint8], Scale]:
    """Return codes (n, L, D) of annotations (n, L, D) and their scale, each channel's from its least to its largest.

    No value is clipped, so none is off by more than half a step; a channel's least value, the 0 of a ReLU, is exact.
    """
    low, high = annotations.amin((0, 1)).float(), annotations.amax((0, 1)).float()
    step = (high - low) / 255
    divisor = torch.where(step > 0, step, 1.0)
    codes = torch.empty(annotations.shape, dtype=torch.uint8)
    for image, out in zip(annotations, codes, strict=True):  # one at a time: as a whole it would be twice as large
        out.copy_(((image.float() - low) / divisor).round_().clamp_(0, 255))
    return codes.numpy(), Scale(step.numpy(), low.numpy())


def decode(codes: NDArray[np.uint8], scale: Scale, out: Tensor) -> None:
    """Write annotations (n, L, D) half of codes (n, L, D) into ``out``.

    In this thread alone, as copying is: reading ahead must not take cores from training.
    """
    step, offset = torch.from_numpy(scale.step), torch.from_numpy(scale.offset)
    some = max(1, _SERIAL // codes.shape[-1])
    numbers = codes.reshape(-1, codes.shape[-1])
    values = torch.empty(min(some, len(numbers)), codes.shape[-1])
    for first, part in zip(range(0, len(numbers), some), out.flatten(0, 1).split(some), strict=True):
        found = values[: len(part)]
        found.numpy()[:] = numbers[first : first + some]
        part.copy_(torch.addcmul(offset, found, step, out=found))
