"""Attention = score x normalizer x selection, each a small class."""

from captioning.attention.base import Attention, AttentionOutput
from captioning.attention.hard import GumbelAttention, HardAttention, StochasticAttention
from captioning.attention.layers import AnnotationAttention, AnnotationLayer, AnnotationLSTM
from captioning.attention.local import LocalScore
from captioning.attention.memory import Memory, expected_context
from captioning.attention.multihead import MultiHeadAttention
from captioning.attention.normalizers import Entmax15, Normalizer, Softmax, Sparsemax
from captioning.attention.ntm import NTMAttention, NTMScore
from captioning.attention.scores import (
    AdditiveScore,
    ConcatScore,
    CosineScore,
    CoverageScore,
    DotScore,
    GeneralScore,
    LocationScore,
    ScaledDotScore,
    Score,
)
from captioning.attention.soft import SoftAttention, UniformAttention
