"""Encoder and decoder: Eq. 1-7 of Xu et al. 2015, the outputs that make words, and the assembled captioner."""

from captioning.model.captioner import Captioner, CaptionModel
from captioning.model.decoder import Decoder, DecoderOutput
from captioning.model.ensemble import Ensemble
from captioning.model.lstm import AttentionDecoder
from captioning.model.output import DeepOutput, Output
from captioning.model.summed import SummedOutput
from captioning.model.transformer import TransformerDecoder
