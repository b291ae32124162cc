"""From a step of the recurrence to the distribution of its word: the interface, and the deep output of Eq. 7."""

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from captioning.attention import Attention, Memory
from captioning.attention.memory import repeat_rows
from captioning.component import Component
from captioning.linear import Linear
from captioning.model.decoder import ExistingSteps
from captioning.precision import at_least_float32
from captioning.trace import AttentionTrace


class LSTMSteps(NamedTuple):
    """What the LSTM computes in one step of N rows, (N, ..), or in many steps, (N, T, ..) or packed (M, ..).

    Attributes:
        h: (.., H), the new h_t.
        context: (.., D), beta_t z_t: the context after the gate.
        beta_logit: (..), f_beta(h_{t-1}) of Sec. 4.2.1; None without a gate.
        alphas, locations, location_log_prob, head_alphas: As in ``AttentionOutput``.
    """

    h: Tensor
    context: Tensor
    beta_logit: Tensor | None
    alphas: Tensor
    locations: Tensor
    location_log_prob: Tensor | None
    head_alphas: Tensor | None

    def trace(self) -> AttentionTrace:
        """Return the attention trace of these steps."""
        betas = None if self.beta_logit is None else torch.sigmoid(self.beta_logit)
        return AttentionTrace(self.alphas, betas, self.locations, head_alphas=self.head_alphas)


RunSteps: TypeAlias = Callable[[], tuple[ExistingSteps, Tensor, LSTMSteps]]
"""Runs the LSTM over captions. Returns the existing steps, the embeddings (M, E) of the words before them, and the
LSTM's steps (N, T, ..)."""


class Output(Component):
    """The layers L_h, L_z and L_o of Eq. 7, and how they are combined into the logits of words."""

    def check(self, attention: Attention) -> None:
        """Raise InputError if this output does not work with ``attention``."""

    def build(
        self, embedding_dim: int, hidden_dim: int, annotation_dim: int, vocabulary_size: int, *, dropout: float
    ) -> None:
        """Create the layers; ``dropout`` is the probability of dropping a unit of h_t and of the hidden layer."""
        self.L_h = Linear(hidden_dim, embedding_dim, bias=False)
        self.L_z = Linear(annotation_dim, embedding_dim, bias=False)
        self.L_o = Linear(embedding_dim, vocabulary_size)
        self.dropout = nn.Dropout(dropout)
        nn.init.zeros_(self.L_o.bias)

    def to_search_memory(self, memory: Memory) -> Memory:
        """Return ``memory`` with everything that the steps of a search share."""
        return memory

    @abstractmethod
    def forward(self, embedded: Tensor, steps: LSTMSteps, memory: Memory, image_index: Tensor) -> Tensor:
        """Return the logits of M steps, (M, V); they are log-probabilities if the output sums over locations.

        Args:
            embedded: (M, E), embedding of the previous word.
            steps: The M steps of the LSTM.
            image_index: (M,) int64, ascending, the image of ``memory`` that a step looks at.
        """

    def location_logits(self, words: Tensor, memory: Memory) -> Tensor:
        """Return W_y . L_z a_i, what location i alone adds to the logit of a word, for words (N, T): (N, T, L).

        W_y is the row of L_o for word y. Eq. 7 is linear in the context, z_t = beta_t sum_i alpha_ti a_i, so that the
        logit of y_t is a term without the context plus a sum over locations:

            W_y . (E y_{t-1} + L_h h_t) + b_y + sum_i beta_t alpha_ti (W_y . L_z a_i)

        Dropout is left out. N = B * R, the rows of an image adjacent. Masked locations get -inf.
        """
        a, W_y_L_z = memory.annotations, self.L_o.weight[words] @ self.L_z.weight  # (B, L, D), (N, T, D)
        W_y_L_z = W_y_L_z.unflatten(0, (len(a), -1)).flatten(1, 2)  # (B, R * T, D)
        logits = at_least_float32(torch.bmm(W_y_L_z, a.mT).view(*words.shape, -1))  # (N, T, L)
        if memory.mask is None:
            return logits
        return logits.masked_fill(~repeat_rows(memory.mask, len(words) // len(a)).unsqueeze(1), float("-inf"))

    def evidence(self, words: Tensor, memory: Memory, run_steps: RunSteps) -> Tensor:
        """Return how strongly each location speaks for words (N, T): softmax_i(W_y . L_z a_i), (N, T, L), summing to 1.

        It is a class activation map inside the decoder. It does not depend on the alphas: the decoder may not have
        looked at a location that speaks for the word. An output whose evidence depends on the LSTM's steps calls
        ``run_steps``, which takes much longer than this softmax.
        """
        return torch.softmax(self.location_logits(words, memory), dim=-1)

    @abstractmethod
    def step(self, embedded: Tensor, steps: LSTMSteps, memory: Memory) -> Tensor:
        """Return the logits (N, V) of one step of a search, N = B * R, the rows of an image adjacent.

        At least float32, because a search ranks words by these logits (``Linear.forward_float32``).
        """


class DeepOutput(Output):
    """p(y_t) = softmax(L_o(E y_{t-1} + L_h h_t + L_z z_t)), Eq. 7."""

    def forward(self, embedded: Tensor, steps: LSTMSteps, memory: Memory, image_index: Tensor) -> Tensor:
        return self.L_o(self._hidden(embedded, steps))  # (M, V)

    def step(self, embedded: Tensor, steps: LSTMSteps, memory: Memory) -> Tensor:
        return self.L_o.forward_float32(self._hidden(embedded, steps))

    def _hidden(self, embedded: Tensor, steps: LSTMSteps) -> Tensor:
        return self.dropout(embedded + self.L_h(self.dropout(steps.h)) + self.L_z(steps.context))  # (.., E)
