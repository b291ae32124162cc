"""Attention = score x selection: any score with any selection, each a small class."""

from captioning.attention.base import Attention, AttentionOutput, Memory, Score, Selected, State, expected_context
from captioning.attention.coverage import CoverageScore
from captioning.attention.hard import GumbelAttention, HardAttention, StochasticAttention
from captioning.attention.layers import AnnotationAttention, AnnotationLayer, AnnotationLSTM
from captioning.attention.local import LocalScore
from captioning.attention.multihead import MultiHeadAttention
from captioning.attention.ntm import NTMScore
from captioning.attention.scores import (
    AdditiveScore,
    ConcatScore,
    DotScore,
    GeneralScore,
    LocationScore,
    ScaledDotScore,
)
from captioning.attention.soft import SoftAttention, UniformAttention

__all__ = [
    "AdditiveScore",
    "AnnotationAttention",
    "AnnotationLSTM",
    "AnnotationLayer",
    "Attention",
    "AttentionOutput",
    "ConcatScore",
    "CoverageScore",
    "DotScore",
    "GeneralScore",
    "GumbelAttention",
    "HardAttention",
    "LocalScore",
    "LocationScore",
    "Memory",
    "MultiHeadAttention",
    "NTMScore",
    "ScaledDotScore",
    "Score",
    "Selected",
    "SoftAttention",
    "State",
    "StochasticAttention",
    "UniformAttention",
    "expected_context",
]
