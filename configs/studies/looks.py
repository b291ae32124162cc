"""Three decoders that should depend less on the state and more on the context than the LSTM (taught.yaml)."""

from __future__ import annotations

import torch
from torch import Tensor

from captioning.attention import Memory
from captioning.model import AttentionDecoder
from captioning.model.lstm import ScalarGate
from captioning.model.output import DeepOutput, LSTMSteps
from captioning.trace import State


class BlindStart(AttentionDecoder):
    """h_0 and c_0 are 0: before its first context, the decoder knows nothing of the image."""

    def init_state(self, memory: Memory) -> State:
        h, c, *carried = super().init_state(memory)
        return (torch.zeros_like(h), torch.zeros_like(c), *carried)


class OpenGate(AttentionDecoder):
    """beta_t is 1: the context is not scaled at any word. The gate's weights stay in the checkpoint."""

    def build(self, vocabulary_size: int, annotation_dim: int, grid_size: tuple[int, int]) -> None:
        super().build(vocabulary_size, annotation_dim, grid_size)
        self.gate = _AlwaysOpen(self.hidden_dim)


class _AlwaysOpen(ScalarGate):
    def forward(self, h: Tensor, context: Tensor) -> tuple[Tensor, Tensor | None]:
        return context, None


class ContextAlone(DeepOutput):
    """In training, half of the words are predicted without L_h h_t, from the previous word and the context alone."""

    def _hidden(self, word: Tensor, steps: LSTMSteps) -> Tensor:
        if self.training:
            is_kept = torch.rand_like(steps.h[..., :1]) < 0.5
            steps = steps._replace(h=steps.h * is_kept)
        return super()._hidden(word, steps)
