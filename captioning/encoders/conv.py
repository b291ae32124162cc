"""A small convolutional network that is trained from scratch together with the decoder."""

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from captioning.data.transforms import Preprocessing
from captioning.encoders.base import Encoder
from captioning.errors import InputError, check_whole


class ConvEncoder(Encoder):
    """Two convolutions with batch norm and ReLU per stage, for synthetic images.

    Differs from the paper, where the encoder is pretrained and frozen. No weights are published for synthetic shapes,
    so this encoder trains with the decoder. It is small enough not to slow an epoch down.

    Args:
        channels: Number of channels of each stage; the last is D.
        strides: Stride of each stage's first convolution. Their product times the grid's side is the input's side.
        image_size: Side of the square input in pixels; the whole image is squashed into it.
        positions: Whether to add to every annotation a learned vector of its position, initialized with sinusoids.
            Without it, the decoder must guess "left of" from traces of the padding.
    """

    freeze_batch_norm_statistics = False  # there are no published statistics

    def __init__(
        self,
        channels: Sequence[int] = (32, 64, 128),
        strides: Sequence[int] = (4, 2, 1),
        *,
        image_size: int = 112,
        positions: bool = True,
    ) -> None:
        check_whole(1, image_size=image_size, strides=min(strides, default=0), channels=min(channels, default=0))
        if len(channels) != len(strides) or image_size % math.prod(strides):
            problem = f"channels {list(channels)} and strides {list(strides)} must be equally many"
            raise InputError(f"ConvEncoder: {problem}, and the strides' product must divide image_size {image_size}")
        stages: OrderedDict[str, nn.Module] = OrderedDict()
        for i, (inputs, outputs, stride) in enumerate(zip((3, *channels), channels, strides, strict=False)):
            # The first kernel is larger than its stride and as wide as a texture's period, a few pixels.
            first = _block(inputs, outputs, 7 if i == 0 else 3, stride)
            stages[f"stage{i + 1}"] = nn.Sequential(*first, *_block(outputs, outputs, 3, 1))
        if positions:
            stages["positions"] = _Positions(channels[-1], image_size // math.prod(strides))
        preprocessing = Preprocessing(image_size, None, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
        super().__init__(nn.Sequential(stages), preprocessing, trainable_from="stage1")


def _block(inputs: int, outputs: int, kernel_size: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel_size, stride, padding=kernel_size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


class _Positions(nn.Module):
    """Adds a learned map, initialized with sinusoids: half of the channels encode the row, half the column."""

    def __init__(self, dim: int, side: int) -> None:
        super().__init__()
        y = _octaves(side, (dim + 1) // 2)[:, :, None].expand(-1, -1, side)
        x = _octaves(side, dim // 2)[:, None, :].expand(-1, side, -1)
        self.map = nn.Parameter(torch.cat([y, x]))  # (D, height, width)

    def forward(self, maps: Tensor) -> Tensor:
        return maps + self.map


def _octaves(length: int, dim: int) -> Tensor:
    """Return sines and cosines (dim, length) in turn; over the length they have 1/2 period, then 1, 2, 4 .. periods."""
    position = (torch.arange(length) + 0.5) / length  # (length,)
    octave = torch.arange(dim) // 2 % max(1, math.ceil(math.log2(length)))
    phase = torch.arange(dim) % 2 * (math.pi / 2)
    return torch.sin(math.pi * 2.0 ** octave[:, None] * position + phase[:, None])
