"""From a step of the decoder to the distribution of its word; the paper's deep output, Eq. 7."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from captioning.attention import Attention, Memory
from captioning.component import Component
from captioning.kernels.marginal import Located


class Layers(NamedTuple):
    """The layers of Eq. 7. They are the decoder's, whatever the output makes of them."""

    hidden: nn.Linear
    """L_h, H -> E."""
    context: nn.Linear
    """L_z, D -> E."""
    words: nn.Linear
    """L_o with a bias, E -> V."""
    dropout: nn.Module


class Steps(NamedTuple):
    """M steps of the recurrence whose words are asked for.

    Attributes:
        embedded: (M, E), the word before.
        h: (M, H).
        context: (M, D), gated.
        alphas: (M, L), at least float32.
        gate: (M,), logits of beta; None if the decoder has no gate.
    """

    embedded: Tensor
    h: Tensor
    context: Tensor
    alphas: Tensor
    gate: Tensor | None


class Drawn(NamedTuple):
    """What an output that draws locations in training says of M draws, in nats.

    Attributes:
        log_prob: (M,), log-probability of the location that was drawn, with gradient.
        divergence: (M,), from the distribution of draws to the attention's.
        expected: (M,), log-probability of the word with the expected context, without gradient.
    """

    log_prob: Tensor
    divergence: Tensor
    expected: Tensor


class Words(NamedTuple):
    """What M steps say.

    Attributes:
        logits: (M, V), log-probabilities of the words, normalised or not.
        posterior: (M, L), the probability that step looked at a location if it looked at all, now that its word is
            known; sums to 1. None in training, where no targets are given, or where words do not come from single
            locations.
        drawn: in training, where the output draws locations: ``logits`` are then those of the drawn locations.
    """

    logits: Tensor
    posterior: Tensor | None = None
    drawn: Drawn | None = None


class Output(Component):
    """Makes words of what the recurrence leaves behind.

    Attributes:
        has_posterior: whether ``forward`` returns one for targets.
        draws: whether ``forward`` draws locations in training, so that its gradient needs an estimator.
    """

    has_posterior = False
    draws = False

    def check(self, attention: Attention) -> None:
        """Raises:
        InputError: attention that this output makes no sense with.
        """

    def build(self, embedding_dim: int, grid_size: tuple[int, int] | None) -> None:
        """Create the parameters beside ``Layers``, for annotations that lie on ``grid_size`` (rows, columns)."""

    def prepare(self, layers: Layers, memory: Memory) -> Located | None:
        """Return what the steps of a search share, computed once per image, for ``Memory.located``."""
        return None

    @abstractmethod
    def forward(
        self, layers: Layers, steps: Steps, memory: Memory, image_index: Tensor, targets: Tensor | None = None
    ) -> Words:
        """Return the words of all steps of teacher forcing.

        Args:
            image_index: (M,) int64, ascending, the image of ``memory`` that a step looks at.
            targets: (M,) int64, the words that came.
        """

    @abstractmethod
    def step(self, layers: Layers, steps: Steps, memory: Memory) -> Tensor:
        """Return the logits (N, V) of one step of a search of N = B * R rows, the rows of an image adjacent.

        They are at least float32, whatever the rest of the model computes in; see ``precise_words``.
        """


def precise_words(words: nn.Linear, hidden: Tensor) -> Tensor:
    """Return ``words`` of the hidden layer (N, E), (N, V), in at least float32, also where autocast is on.

    A search compares words. bfloat16 has 8 significant bits: among thousands of words the best two logits are often the
    same number, and which of them comes first is then the search's accident, not the model's choice.
    """
    device, precise = hidden.device.type, torch.promote_types(hidden.dtype, torch.float32)
    if words.weight.dtype == hidden.dtype == precise and not torch.is_autocast_enabled(device):
        return words(hidden)
    weight, bias = words.weight.to(precise), words.bias.to(precise)
    with torch.autocast(device, enabled=False):
        return nn.functional.linear(hidden.to(precise), weight, bias)


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
