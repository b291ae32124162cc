"""Captions from a step function: greedy decoding, sampling and beam search. Nothing here knows a model."""

from captioning.decoding.beam import beam_search
from captioning.decoding.constraints import Constraints
from captioning.decoding.methods import decode
from captioning.decoding.options import BeamOptions, DecodingOptions
from captioning.decoding.sampling import greedy, sample
from captioning.decoding.step import Hypothesis, Step, StepFunction

__all__ = [
    "BeamOptions",
    "Constraints",
    "DecodingOptions",
    "Hypothesis",
    "Step",
    "StepFunction",
    "beam_search",
    "decode",
    "greedy",
    "sample",
]
