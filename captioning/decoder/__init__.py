"""From annotations to words, one step at a time: the LSTM of the paper, or a transformer."""

from captioning.decoder.base import Decoder, DecoderOutput, State
from captioning.decoder.lstm import AttentionDecoder, rename_weights
from captioning.decoder.transformer import TransformerDecoder

__all__ = ["AttentionDecoder", "Decoder", "DecoderOutput", "State", "TransformerDecoder", "rename_weights"]
