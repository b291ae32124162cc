"""EfficientNet-Lite2 (Tan & Le 2019, without squeeze and excitation) without its classifier. Needs no timm."""

from __future__ import annotations

import functools

import torch.nn.functional as F
from torch import Tensor, nn

from captioning.data.transforms import Preprocessing
from captioning.encoders.base import Encoder
from captioning.errors import InputError, check_range

# Blocks, channels, side of the kernel and stride of every stage.
_STAGES = ((1, 16, 3, 1), (3, 24, 3, 2), (3, 48, 5, 2), (4, 88, 3, 2), (4, 120, 5, 1), (5, 208, 5, 2), (1, 352, 3, 1))
_EXPANSION = 6  # factor of the channels within a block

_norm = functools.partial(nn.BatchNorm2d, eps=1e-3)


class EfficientNetLite2(Encoder):
    """EfficientNet-Lite2 up to its last layers, at 1/32 of the image's side.

    ``TimmEncoder("tf_efficientnet_lite2", ..)`` gives equal annotations; tensors have timm's names.

    Args:
        weights: A file as in ``TorchvisionEncoder``, such as the one that ``captioning prepare weights`` downloads.
            None for random weights.
        layer: ``head`` takes the head convolution, 1280 channels; ``expansion`` takes the expanded maps within the last
            block, 1248 channels, timm's ``"feature_location": "expansion"``.
        image_size: Side of the square input in pixels, a multiple of 32; the whole image is squashed into it.
        trainable_from: First stage that is fine-tuned, such as ``blocks.5``; None freezes everything.
        learning_rate: Learning rate of the fine-tuned part; None uses the decoder's.
    """

    def __init__(
        self,
        *,
        weights: str | None,
        layer: str = "head",
        image_size: int = 256,
        trainable_from: str | None = None,
        learning_rate: float | None = None,
    ) -> None:
        check_range(32, 4096, image_size=image_size)
        if image_size % 32 or layer not in ("head", "expansion"):
            wanted = "layer must be head or expansion, image_size a multiple of 32"
            raise InputError(f"EfficientNetLite2: {wanted}, got {layer!r}, {image_size}")
        preprocessing = Preprocessing(image_size, None, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic")
        network = _Network(head=layer == "head")
        super().__init__(network, preprocessing, weights, trainable_from=trainable_from, learning_rate=learning_rate)


class _Network(nn.Module):
    """Images (B, 3, side, side) to maps (B, D, side / 32, side / 32)."""

    def __init__(self, *, head: bool) -> None:
        super().__init__()
        self.conv_stem = _Convolution(3, 32, 3, stride=2)
        self.bn1 = _norm(32)
        self.blocks, before = nn.Sequential(), 32
        for blocks, channels, side, stride in _STAGES:
            block = _Block if len(self.blocks) else _FirstBlock
            further = (block(channels, channels, side, 1) for _ in range(blocks - 1))
            self.blocks.append(nn.Sequential(block(before, channels, side, stride), *further))
            before = channels
        self.head = head
        if head:
            self.conv_head, self.bn2 = _Convolution(before, 1280, 1), _norm(1280)
        else:
            last = self.blocks.get_submodule("6.0")
            last.conv_pwl = last.bn3 = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        maps = self.blocks(F.relu6(self.bn1(self.conv_stem(images)), inplace=True))
        return F.relu6(self.bn2(self.conv_head(maps)), inplace=True) if self.head else maps


class _FirstBlock(nn.Module):
    """A depthwise convolution, then one of 1 x 1."""

    def __init__(self, before: int, after: int, side: int, stride: int) -> None:
        super().__init__()
        self.conv_dw = _Convolution(before, before, side, stride=stride, groups=before)
        self.bn1 = _norm(before)
        self.conv_pw = _Convolution(before, after, 1)
        self.bn2 = _norm(after)

    def forward(self, maps: Tensor) -> Tensor:
        return self.bn2(self.conv_pw(F.relu6(self.bn1(self.conv_dw(maps)), inplace=True)))


class _Block(nn.Module):
    """An inverted residual: more channels, a depthwise convolution, fewer channels again."""

    def __init__(self, before: int, after: int, side: int, stride: int) -> None:
        super().__init__()
        inside = _EXPANSION * before
        self.conv_pw = _Convolution(before, inside, 1)
        self.bn1 = _norm(inside)
        self.conv_dw = _Convolution(inside, inside, side, stride=stride, groups=inside)
        self.bn2 = _norm(inside)
        self.conv_pwl = _Convolution(inside, after, 1)
        self.bn3 = _norm(after)
        self.residual = before == after and stride == 1

    def forward(self, maps: Tensor) -> Tensor:
        inside = F.relu6(self.bn1(self.conv_pw(maps)), inplace=True)
        inside = F.relu6(self.bn2(self.conv_dw(inside)), inplace=True)
        after = self.bn3(self.conv_pwl(inside))
        return maps + after if self.residual else after


class _Convolution(nn.Conv2d):
    """A convolution without bias, with TensorFlow's "same" padding: a stride of 2 pads the end more than the start."""

    def __init__(self, before: int, after: int, side: int, *, stride: int = 1, groups: int = 1) -> None:
        padding = side // 2 if stride == 1 else 0
        super().__init__(before, after, side, stride, padding, groups=groups, bias=False)
        self.uneven = 2 * ((side - 2) // 2, (side - 1) // 2)  # left, right, top, bottom

    def forward(self, maps: Tensor) -> Tensor:
        return super().forward(maps if self.stride == (1, 1) else F.pad(maps, self.uneven))
