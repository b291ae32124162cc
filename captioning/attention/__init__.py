"""Attention = score x selection: any score with any selection, each a small class."""

from captioning.attention.base import Attention, AttentionOutput, Memory, Score
from captioning.attention.hard import GumbelAttention, HardAttention, StochasticAttention
from captioning.attention.scores import AdditiveScore
from captioning.attention.soft import SoftAttention, UniformAttention

__all__ = [
    "AdditiveScore",
    "Attention",
    "AttentionOutput",
    "GumbelAttention",
    "HardAttention",
    "Memory",
    "Score",
    "SoftAttention",
    "StochasticAttention",
    "UniformAttention",
]
