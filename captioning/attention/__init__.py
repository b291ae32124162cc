"""Attention = score x selection: any score with any selection, each a small class."""

from captioning.attention.annotation_lstm import AnnotationLSTM
from captioning.attention.base import Attention, AttentionOutput, Memory, Score, Selected, State, expected_context
from captioning.attention.local import LocalScore
from captioning.attention.multihead import MultiHeadAttention
from captioning.attention.scores import AdditiveScore, DotScore, GeneralScore, ScaledDotScore
from captioning.attention.soft import SoftAttention, UniformAttention
from captioning.attention.stochastic import GumbelAttention, HardAttention, StochasticAttention

__all__ = [
    "AdditiveScore",
    "AnnotationLSTM",
    "Attention",
    "AttentionOutput",
    "DotScore",
    "GeneralScore",
    "GumbelAttention",
    "HardAttention",
    "LocalScore",
    "Memory",
    "MultiHeadAttention",
    "ScaledDotScore",
    "Score",
    "Selected",
    "SoftAttention",
    "State",
    "StochasticAttention",
    "UniformAttention",
    "expected_context",
]
