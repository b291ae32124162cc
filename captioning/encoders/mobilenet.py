"""MobileNetV1 (Howard et al. 2017), width 1.0, with a grid of 1/16 of the image's side. Needs no other package."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from captioning.data.transforms import Preprocessing
from captioning.encoders.base import Encoder
from captioning.errors import InputError, check_range

_CHANNELS = (64, *2 * (128,), *2 * (256,), *6 * (512,), *2 * (1024,))
"""Channels of the separable convolutions; those of a stage have equally many."""


class MobileNetV1(Encoder):
    """The first separable convolutions of MobileNetV1, with the names of timm's ``mobilenetv1_100``.

    Annotations equal those of ``TimmEncoder("mobilenetv1_100", ..., model_args={"pad_type": "same", "output_stride":
    16})``. Without ``same_padding`` they equal those of the same encoder without ``pad_type``. Beyond 1/16 of the
    image's side, dilation takes the place of the last stride.

    Args:
        layers: Number of separable convolutions, 6 to 13. The annotations have 512 channels up to the eleventh, and
            1024 from the twelfth on.
        weights: A ``.safetensors`` or ``.pth`` file with the state dict of the whole network or of the used part. None
            initialises them at random.
        image_size: Side of the square input in pixels, a multiple of 16; the whole image is squashed into it.
        same_padding: Whether a convolution with a stride pads its input only below and on the right, like TensorFlow's
            "same". The weights of the captioner in the package expect that; those that timm publishes do not.
        trainable_from: First stage that is fine-tuned, such as ``blocks.3``; None freezes everything.
        learning_rate: Learning rate of the fine-tuned part; None uses the decoder's.
    """

    def __init__(
        self,
        layers: int = 12,
        *,
        weights: str | None,
        image_size: int = 224,
        same_padding: bool = True,
        trainable_from: str | None = None,
        learning_rate: float | None = None,
    ) -> None:
        check_range(6, 13, layers=layers)
        check_range(16, 4096, image_size=image_size)
        if image_size % 16:
            raise InputError(f"MobileNetV1: image_size must be a multiple of 16, got {image_size}")
        preprocessing = Preprocessing(image_size, None, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic")
        network = _Network(layers, same_padding)
        super().__init__(network, preprocessing, weights, trainable_from=trainable_from, learning_rate=learning_rate)

    def _maps(self, images: Tensor) -> Tensor:
        return self.network(images)


class _Network(nn.Module):
    """Images (B, 3, side, side) to maps (B, D, side / 16, side / 16)."""

    def __init__(self, layers: int, same_padding: bool) -> None:
        super().__init__()
        self.padding = (0, 1, 0, 1) if same_padding else (1, 1, 1, 1)  # left, right, top, bottom, before a stride of 2
        self.conv_stem = nn.Conv2d(3, 32, 3, stride=2, bias=False)
        self.bn1 = nn.BatchNorm2d(32)
        self.blocks = nn.Sequential()
        before, stage = 32, nn.Sequential()
        for channels in _CHANNELS[:layers]:
            if channels != before:
                stage = nn.Sequential()
                self.blocks.append(stage)
            stride = 2 if channels != before and channels in (128, 256, 512) else 1
            dilation = 2 if before == 1024 else 1  # after the layer without its stride
            stage.append(_Separable(before, channels, stride, dilation, self.padding))
            before = channels

    def forward(self, images: Tensor) -> Tensor:
        return self.blocks(F.relu6(self.bn1(self.conv_stem(F.pad(images, self.padding))), inplace=True))


class _Separable(nn.Module):
    """A convolution of every channel by itself, then one that mixes the channels of a place."""

    def __init__(self, before: int, after: int, stride: int, dilation: int, padding: tuple[int, int, int, int]) -> None:
        super().__init__()
        self.padding = padding
        inside = dilation if stride == 1 else 0
        self.conv_dw = nn.Conv2d(
            before, before, 3, stride, padding=inside, dilation=dilation, groups=before, bias=False
        )
        self.bn1 = nn.BatchNorm2d(before)
        self.conv_pw = nn.Conv2d(before, after, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)

    def forward(self, maps: Tensor) -> Tensor:
        maps = maps if self.conv_dw.stride == (1, 1) else F.pad(maps, self.padding)
        maps = F.relu6(self.bn1(self.conv_dw(maps)), inplace=True)
        return F.relu6(self.bn2(self.conv_pw(maps)), inplace=True)
