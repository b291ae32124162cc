"""Captions from a step function: greedy, sampling, beam search. Nothing here knows a model."""

from captioning.decoding.beam import beam_search
from captioning.decoding.ensemble import MeanStep, mean_log_probs, mean_trace
from captioning.decoding.sampling import greedy, sample
from captioning.decoding.step import BeamOptions, Hypothesis, ImageStepFunction, State, Step, StepFunction

__all__ = [
    "BeamOptions",
    "Hypothesis",
    "ImageStepFunction",
    "MeanStep",
    "State",
    "Step",
    "StepFunction",
    "beam_search",
    "greedy",
    "mean_log_probs",
    "mean_trace",
    "sample",
]
