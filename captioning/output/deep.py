"""The paper's deep output."""

from __future__ import annotations

from torch import Tensor

from captioning.attention import Memory
from captioning.output.base import Layers, Output, Steps, Words


class DeepOutput(Output):
    """p(y_t) = softmax(L_o(E y_{t-1} + L_h h_t + L_z z_t)), Eq. 7: a word follows from the context."""

    def forward(
        self, layers: Layers, steps: Steps, memory: Memory, image_index: Tensor, targets: Tensor | None = None
    ) -> Words:
        return Words(self.step(layers, steps, memory))

    def step(self, layers: Layers, steps: Steps, memory: Memory) -> Tensor:
        hidden = steps.embedded + layers.hidden(layers.dropout(steps.h)) + layers.context(steps.context)
        return layers.words(layers.dropout(hidden))
