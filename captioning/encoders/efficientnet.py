"""EfficientNet-Lite2 (Tan & Le 2019, without squeeze and excitation), without classifier and without timm."""

import functools
from collections import OrderedDict
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from captioning.data.transforms import Preprocessing
from captioning.encoders.base import Encoder
from captioning.errors import InputError, check_choice

# Blocks, channels, kernel size and stride of every stage.
_STAGES = ((1, 16, 3, 1), (3, 24, 3, 2), (3, 48, 5, 2), (4, 88, 3, 2), (4, 120, 5, 1), (5, 208, 5, 2), (1, 352, 3, 1))
_EXPANSION = 6  # factor of the channels within a block

_norm = functools.partial(nn.BatchNorm2d, eps=1e-3)
_relu6 = functools.partial(nn.ReLU6, inplace=True)


class EfficientNetLite2(Encoder):
    """EfficientNet-Lite2 without its classifier. The grid's side is 1/32 of the image's.

    ``TimmEncoder("tf_efficientnet_lite2", ..)`` gives equal annotations; tensors have timm's names.

    Args:
        weights: A file as in ``TorchvisionEncoder``, such as the one that ``captioning prepare weights`` downloads.
            None for random weights.
        layer: ``head`` takes the head convolution, 1280 channels; ``expansion`` takes the expanded maps within the last
            block, 1248 channels, timm's ``"feature_location": "expansion"``.
        image_size: Side of the square input in pixels, a multiple of 32; the whole image is squashed into it.
        trainable_from: First stage that is fine-tuned, such as ``blocks.5``; None freezes everything.
        learning_rate: Learning rate of the fine-tuned stages; None uses the decoder's.
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
        check_choice(("head", "expansion"), layer=layer)
        if image_size < 32 or image_size % 32:
            raise InputError(f"EfficientNetLite2: image_size must be a multiple of 32, got {image_size}")
        preprocessing = Preprocessing(image_size, None, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic")
        network = _Network(head=layer == "head")
        super().__init__(network, preprocessing, weights, trainable_from=trainable_from, learning_rate=learning_rate)


class _Network(nn.Sequential):
    """Images (B, 3, side, side) to maps (B, D, side / 32, side / 32)."""

    def __init__(self, *, head: bool) -> None:
        stages, inputs = nn.Sequential(), 32
        for blocks, channels, kernel_size, stride in _STAGES:
            block = _Block if len(stages) else _first_block
            further_blocks = (block(channels, channels, kernel_size, 1) for _ in range(blocks - 1))
            stages.append(nn.Sequential(block(inputs, channels, kernel_size, stride), *further_blocks))
            inputs = channels
        layers = {"conv_stem": _Convolution(3, 32, 3, stride=2), "bn1": _norm(32), "act1": _relu6(), "blocks": stages}
        if head:
            layers |= {"conv_head": _Convolution(inputs, 1280, 1), "bn2": _norm(1280), "act2": _relu6()}
        else:
            last_block: Any = stages.get_submodule("6.0")
            last_block.conv_pwl = last_block.bn3 = nn.Identity()
        super().__init__(OrderedDict(layers))


def _first_block(inputs: int, outputs: int, kernel_size: int, stride: int) -> nn.Module:
    """Return a depthwise convolution, followed by one of 1 x 1."""
    depthwise = _Convolution(inputs, inputs, kernel_size, stride=stride, groups=inputs)
    layers = {"conv_dw": depthwise, "bn1": _norm(inputs), "act1": _relu6()}
    return nn.Sequential(OrderedDict(layers | {"conv_pw": _Convolution(inputs, outputs, 1), "bn2": _norm(outputs)}))


class _Block(nn.Sequential):
    """An inverted residual: more channels, a depthwise convolution, fewer channels again."""

    def __init__(self, inputs: int, outputs: int, kernel_size: int, stride: int) -> None:
        inner = _EXPANSION * inputs
        depthwise = _Convolution(inner, inner, kernel_size, stride=stride, groups=inner)
        layers = {"conv_pw": _Convolution(inputs, inner, 1), "bn1": _norm(inner), "act1": _relu6()}
        layers |= {"conv_dw": depthwise, "bn2": _norm(inner), "act2": _relu6()}
        super().__init__(OrderedDict(layers | {"conv_pwl": _Convolution(inner, outputs, 1), "bn3": _norm(outputs)}))
        self.has_residual = inputs == outputs and stride == 1

    def forward(self, maps: Tensor) -> Tensor:
        output = super().forward(maps)
        return maps + output if self.has_residual else output


class _Convolution(nn.Conv2d):
    """A convolution without bias, with TensorFlow's "same" padding: a stride of 2 pads the end more than the start."""

    def __init__(self, inputs: int, outputs: int, kernel_size: int, *, stride: int = 1, groups: int = 1) -> None:
        padding = kernel_size // 2 if stride == 1 else 0
        super().__init__(inputs, outputs, kernel_size, stride, padding, groups=groups, bias=False)
        self.uneven_padding = 2 * ((kernel_size - 2) // 2, (kernel_size - 1) // 2)  # left, right, top, bottom

    def forward(self, maps: Tensor) -> Tensor:
        return super().forward(maps if self.stride == (1, 1) else F.pad(maps, self.uneven_padding))
