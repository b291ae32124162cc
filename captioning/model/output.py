"""From a step of the recurrence to the distribution of its word: the interface, and the deep output of Eq. 7."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from captioning.attention import Attended, Attention, Memory
from captioning.attention.memory import repeat_rows
from captioning.component import Component
from captioning.kernels.dropout import Dropout
from captioning.kernels.linear import Linear, precise_linear, to_autocast


class Output(Component):
    """The layers L_h, L_z and L_o of Eq. 7, and how they are combined into the logits of words."""

    def check(self, attention: Attention) -> None:
        """Raise an InputError if this output does not work with ``attention``."""

    def build(
        self, embedding_dim: int, hidden_dim: int, annotation_dim: int, vocabulary_size: int, *, dropout: float
    ) -> None:
        """Create the layers.

        Args:
            dropout: Probability of dropping a unit of h_t and of the hidden layer.
        """
        self.L_h = Linear(hidden_dim, embedding_dim, bias=False)
        self.L_z = Linear(annotation_dim, embedding_dim, bias=False)
        self.L_o = Linear(embedding_dim, vocabulary_size)
        self.dropout = Dropout(dropout)
        nn.init.zeros_(self.L_o.bias)

    def prepare_search(self, memory: Memory) -> Memory:
        """Return ``memory`` with everything that the steps of a search share."""
        return memory

    @abstractmethod
    def forward(
        self, word: Tensor, attended: Attended, memory: Memory, image_index: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the words of all steps of teacher forcing.

        Args:
            word: (M, E), embedding of the previous word.
            attended: What the M steps saw, and their h.
            image_index: (M,) int64, ascending, the image of ``memory`` that a step looks at.
            targets: (M,) int64, the true words.

        Returns:
            The logits (M, V), log-probabilities if the output sums over locations; and the posterior (M, L), the
            probability that the word came from a location, given the word and that the step used the image at all.
            The posterior sums to 1; it is None in training, without targets, and for outputs that do not sum.
        """

    def location_logits(self, words: Tensor, memory: Memory) -> Tensor:
        """Return W_y . L_z a_i, what location i alone adds to the logit of a word, for words (N, T): (N, T, L).

        W_y is the row of L_o for word y. Eq. 7 is linear in the context, z_t = beta_t sum_i alpha_ti a_i, so that the
        logit of y_t is a sum over locations and a part without the image:

            W_y . (E y_{t-1} + L_h h_t) + b_y + sum_i beta_t alpha_ti (W_y . L_z a_i)

        Dropout is left out. N = B * R, the rows of an image adjacent. Masked locations get -inf.
        """
        A = to_autocast(self.L_z(memory.annotations))  # (B, L, E)
        W = to_autocast(self.L_o.weight[words]).unflatten(0, (len(A), -1)).flatten(1, 2)  # (B, R * T, E)
        logits = torch.bmm(W, A.mT).view(*words.shape, -1)  # (N, T, L)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if memory.mask is None:
            return logits
        return logits.masked_fill(~repeat_rows(memory.mask, len(words) // len(A)).unsqueeze(1), float("-inf"))

    def evidence(self, words: Tensor, memory: Memory) -> Tensor | None:
        """Return where the image speaks for words (N, T): softmax_i(W_y . L_z a_i), (N, T, L), which sums to 1.

        It is a class activation map inside the decoder. It does not depend on the alphas: a location may speak for a
        word and not have been looked at. None for an output whose ``forward`` returns the posterior instead.
        """
        return torch.softmax(self.location_logits(words, memory), dim=-1)

    @abstractmethod
    def step(self, word: Tensor, attended: Attended, memory: Memory) -> Tensor:
        """Return the logits (N, V) of one step of a search, N = B * R, the rows of an image adjacent.

        At least float32, because a search ranks words by these logits (``kernels.linear.precise_linear``).
        """


class DeepOutput(Output):
    """p(y_t) = softmax(L_o(E y_{t-1} + L_h h_t + L_z z_t)), Eq. 7."""

    def forward(
        self, word: Tensor, attended: Attended, memory: Memory, image_index: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return self.L_o(self._hidden(word, attended)), None

    def step(self, word: Tensor, attended: Attended, memory: Memory) -> Tensor:
        return precise_linear(self.L_o, self._hidden(word, attended))

    def _hidden(self, word: Tensor, attended: Attended) -> Tensor:
        return self.dropout(word + self.L_h(self.dropout(attended.h)) + self.L_z(attended.context))
