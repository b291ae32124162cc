"""Attention = score x selection: any score with any selection, each a small class."""

from captioning.attention.annotation_layer import AnnotationAttention, AnnotationLayer
from captioning.attention.annotation_lstm import AnnotationLSTM
from captioning.attention.base import Attention, AttentionOutput, Memory, Score, Selected, State, expected_context
from captioning.attention.coverage import CoverageScore
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
from captioning.attention.stochastic import GumbelAttention, HardAttention, StochasticAttention

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
