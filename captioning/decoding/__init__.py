"""Captions from a step function: greedy decoding, sampling and beam search. Nothing here knows a model."""

from captioning.decoding.beam import beam_search
from captioning.decoding.constraints import Constraints
from captioning.decoding.sampling import greedy, sample
from captioning.decoding.step import BeamOptions, Hypothesis, Step, StepFunction

__all__ = [
    "BeamOptions",
    "Constraints",
    "Hypothesis",
    "Step",
    "StepFunction",
    "beam_search",
    "greedy",
    "sample",
]
