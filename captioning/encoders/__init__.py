"""Image -> annotations a (B, L, D). An encoder owns its freezing, its input size and its normalization.

``TorchvisionEncoder`` and ``TimmEncoder`` take published networks. ``EfficientNetLite2``, the pretrained captioner's
encoder, needs neither library. ``ConvEncoder`` is small and trained from scratch.
"""

from captioning.encoders.base import Encoder
from captioning.encoders.conv import ConvEncoder
from captioning.encoders.efficientnet import EfficientNetLite2
from captioning.encoders.published import TimmEncoder, TorchvisionEncoder
