"""Captions from a step function: sampling and beam search. Nothing here knows a model."""

from captioning.decoding.constraints import Constraints
from captioning.decoding.methods import beam_search, decode, sample
from captioning.decoding.step import Hypothesis, Step, StepFunction
from captioning.decoding_options import BeamOptions, DecodingOptions
