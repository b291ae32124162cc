"""From a step of the recurrence to the distribution of its word: the interface, and the deep output of Eq. 7."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from captioning.attention import Attention, Memory
from captioning.component import Component
from captioning.kernels.linear import Linear, precise_linear
from captioning.trace import AttentionTrace


class Recurred(NamedTuple):
    """The result of Eq. 1-6 for N rows of one step, for steps (N, T), or for the M existing steps of all captions.

    Attributes:
        h: (.., H), h_t.
        context: (.., D), z_t multiplied by beta_t.
        beta_logit: (..), f_beta(h_{t-1}); None if the decoder has no gate.
        alphas: (.., L), at least float32.
        locations: (..) int64, the location that the context was taken from, or ``trace.EXPECTATION``.
        log_prob: (..), as in ``AttentionOutput``.
        heads: (.., h, L), the alphas of each head; None in training, and where attention has no heads.
    """

    h: Tensor
    context: Tensor
    beta_logit: Tensor | None
    alphas: Tensor
    locations: Tensor
    log_prob: Tensor | None = None
    heads: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Recurred:
        """Return it with ``function`` applied to every field that is not None."""
        return Recurred(*(None if field is None else function(field) for field in self))  # type: ignore[arg-type]

    def trace(self) -> AttentionTrace:
        """Return the attention trace of these steps."""
        betas = None if self.beta_logit is None else torch.sigmoid(self.beta_logit)
        return AttentionTrace(self.alphas, betas, self.locations, heads=self.heads)


class Words(NamedTuple):
    """The words of M steps.

    Attributes:
        logits: (M, V); with a summed output they are log-probabilities.
        posterior: (M, L), the probability that the word came from a location, given the word and that the step used
            the image at all; sums to 1. None in training, without targets, and for outputs that sum over no locations.
    """

    logits: Tensor
    posterior: Tensor | None = None


class Output(Component):
    """The layers L_h, L_z and L_o of Eq. 7, and how they are combined into the logits of words.

    Attributes:
        has_posterior: Whether ``forward`` returns a posterior for targets.
    """

    has_posterior = False

    def check(self, attention: Attention) -> None:
        """Check that this output works with ``attention``.

        Raises:
            InputError: It does not.
        """

    def build(
        self,
        embedding_dim: int,
        hidden_dim: int,
        annotation_dim: int,
        vocabulary_size: int,
        grid_size: tuple[int, int] | None,
        *,
        dropout: float,
    ) -> None:
        """Create the layers, for annotations on a grid of ``grid_size`` (height, width) or on none.

        Args:
            dropout: Probability of dropping a unit of h_t and of the hidden layer.
        """
        self.L_h = Linear(hidden_dim, embedding_dim, bias=False)
        self.L_z = Linear(annotation_dim, embedding_dim, bias=False)
        self.L_o = Linear(embedding_dim, vocabulary_size)
        self.dropout = nn.Dropout(dropout)
        nn.init.zeros_(self.L_o.bias)

    def prepare_search(self, memory: Memory) -> Memory:
        """Return ``memory`` with everything that the steps of a search share."""
        return memory

    @abstractmethod
    def forward(
        self, word: Tensor, recurred: Recurred, memory: Memory, image_index: Tensor, targets: Tensor | None = None
    ) -> Words:
        """Return the words of all steps of teacher forcing.

        Args:
            word: (M, E), embedding of the previous word.
            recurred: The recurrence at M steps.
            image_index: (M,) int64, ascending, the image of ``memory`` that a step looks at.
            targets: (M,) int64, the true words.
        """

    @abstractmethod
    def step(self, word: Tensor, recurred: Recurred, memory: Memory) -> Tensor:
        """Return the logits (N, V) of one step of a search, N = B * R, the rows of an image adjacent.

        At least float32, because a search ranks words by these logits (``kernels.linear.precise_linear``).
        """


class DeepOutput(Output):
    """p(y_t) = softmax(L_o(E y_{t-1} + L_h h_t + L_z z_t)), Eq. 7."""

    def forward(
        self, word: Tensor, recurred: Recurred, memory: Memory, image_index: Tensor, targets: Tensor | None = None
    ) -> Words:
        return Words(self.L_o(self._hidden(word, recurred)))

    def step(self, word: Tensor, recurred: Recurred, memory: Memory) -> Tensor:
        return precise_linear(self.L_o, self._hidden(word, recurred))

    def _hidden(self, word: Tensor, recurred: Recurred) -> Tensor:
        return self.dropout(word + self.L_h(self.dropout(recurred.h)) + self.L_z(recurred.context))
