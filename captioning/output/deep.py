"""The paper's deep output."""

from __future__ import annotations

from torch import Tensor

from captioning.attention import Memory
from captioning.output.base import Layers, Output, Steps, Words, precise_words


class DeepOutput(Output):
    """p(y_t) = softmax(L_o(E y_{t-1} + L_h h_t + L_z z_t)), Eq. 7: a word follows from the context."""

    def forward(
        self, layers: Layers, steps: Steps, memory: Memory, image_index: Tensor, targets: Tensor | None = None
    ) -> Words:
        return Words(layers.words(self._hidden(layers, steps)))

    def step(self, layers: Layers, steps: Steps, memory: Memory) -> Tensor:
        return precise_words(layers.words, self._hidden(layers, steps))

    def _hidden(self, layers: Layers, steps: Steps) -> Tensor:
        hidden = steps.embedded + layers.hidden(layers.dropout(steps.h)) + layers.context(steps.context)
        return layers.dropout(hidden)
