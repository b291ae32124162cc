"""The deep output summed over locations: the exact likelihood of a word, whatever location it came from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from captioning.attention import Attended, Attention, Memory, MultiHeadAttention, NTMAttention, SoftAttention
from captioning.errors import InputError
from captioning.kernels.linear import precise_linear
from captioning.kernels.summed import Located, locate, summed_log_probs, summed_posterior, summed_step
from captioning.model.output import Output


@dataclass(frozen=True)
class LocatedMemory(Memory):
    """A memory with each location's contribution to the logits, computed once per image of a search."""

    located: Located = field(kw_only=True)

    def select(self, images: Tensor) -> LocatedMemory:
        return replace(super().select(images), located=self.located.select(images))


class SummedOutput(Output):
    """The word's likelihood summed over locations, exactly (Deng et al. 2018); no location is drawn.

    p(y_t) = sum_i w_ti softmax(L_o(E y_{t-1} + L_h h_t + L_z a_i))[y_t] with w_ti = beta_t alpha_ti, and one more
    component without L_z a_i for a step that does not look at the image, of weight w_t0 = 1 - beta_t. The LSTM is fed
    the expected context, as with soft attention, so that the recurrence does not branch.
    ``captioning.kernels.summed`` has the computation.

    By default every location is a component, or every location of the support where alphas are sparse. No parameter
    depends on ``block``, so it may be changed at any time.

    Args:
        block: (height, width) of blocks of cells that are one component each: the mean of their annotations, with the
            sum of their weights.

    Raises:
        InputError: An option is out of its range.
    """

    has_posterior = True

    def __init__(self, *, block: tuple[int, int] | None = None) -> None:
        super().__init__()
        if block is not None and (len(block) != 2 or min(block) < 1):
            raise InputError(f"block must be height and width of at least 1, got {list(block)}")
        self.block = None if block is None else tuple(block)

    def check(self, attention: Attention) -> None:
        name = type(attention).__name__
        if isinstance(attention, (MultiHeadAttention, NTMAttention)):
            reason = "looks at several locations at once, or writes over them"
            raise InputError(f"output: {name} {reason}; a sum over all of them takes SoftAttention")
        if not isinstance(attention, SoftAttention):
            raise InputError(f"output: {name} chooses locations itself; a sum over all of them takes SoftAttention")

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
        if self.block is not None and grid_size is None:
            raise InputError(f"block: {list(self.block)} needs annotations on a grid; leave it out")
        super().build(embedding_dim, hidden_dim, annotation_dim, vocabulary_size, grid_size, dropout=dropout)
        self._grid_size = grid_size

    def prepare_search(self, memory: Memory) -> LocatedMemory:
        return LocatedMemory(**vars(memory), located=locate(*self._factors(memory)))

    def forward(
        self, word: Tensor, attended: Attended, memory: Memory, image_index: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        S = self.L_o(self._hidden(word, attended))
        A, W = self._factors(memory)
        log_w = self._log_weights(attended, memory)
        log_probs = summed_log_probs(S, A, W, log_w, image_index)
        if targets is None or self.training:
            return log_probs, None
        posterior = summed_posterior(S, A, W, log_w, image_index, targets)[:, 1:]
        if (blocks := self._blocks(memory)) is not None:
            posterior = _spread(posterior, attended.alphas, blocks)
        return log_probs, _given_a_look(posterior, attended.alphas)

    def step(self, word: Tensor, attended: Attended, memory: Memory) -> Tensor:
        located = memory.located if isinstance(memory, LocatedMemory) else locate(*self._factors(memory))
        S = precise_linear(self.L_o, self._hidden(word, attended))
        return summed_step(S, located, self._log_weights(attended, memory))

    def _hidden(self, word: Tensor, attended: Attended) -> Tensor:
        """Return the hidden layer of a step that does not look, (M, E)."""
        return self.dropout(word + self.L_h(self.dropout(attended.h)))

    def _log_weights(self, attended: Attended, memory: Memory) -> Tensor:
        """Return the log weights of C + 1 components, 1 - beta first, (M, C + 1); -inf where a weight is 0."""
        weights = _summed(attended.alphas, self._blocks(memory))
        exists = weights > torch.finfo(weights.dtype).tiny
        log_w = torch.where(exists, weights, 1.0).log().masked_fill(~exists, float("-inf"))
        if attended.beta_logit is None:
            return nn.functional.pad(log_w, (1, 0), value=float("-inf"))
        beta_logit = attended.beta_logit.to(log_w.dtype).unsqueeze(1)
        return torch.cat([nn.functional.logsigmoid(-beta_logit), nn.functional.logsigmoid(beta_logit) + log_w], 1)

    def _factors(self, memory: Memory) -> tuple[Tensor, Tensor]:
        """Return A (B, C, E) and W (V, E): the components add A W^T to the logits of a step that does not look."""
        annotations, blocks = memory.annotations, self._blocks(memory)
        if blocks is not None:
            annotations = _block_means(annotations, memory.mask, blocks)
        return self.dropout(self.L_z(annotations)), self.L_o.weight

    def _blocks(self, memory: Memory) -> Tensor | None:
        """Return the block of every location, (L,) int64, counted in row-major order; None without blocks."""
        if self.block is None:
            return None
        assert self._grid_size is not None
        (height, width), L, device = self._grid_size, memory.annotations.shape[1], memory.annotations.device
        if height * width != L:
            raise InputError(f"block: {L} annotations do not lie on a grid of {height} x {width}; leave it out")
        across = -(-width // self.block[1])
        row, column = torch.arange(height, device=device), torch.arange(width, device=device)
        return ((row // self.block[0]).unsqueeze(1) * across + column // self.block[1]).flatten()


def _summed(alphas: Tensor, blocks: Tensor | None) -> Tensor:
    """Return the weights of blocks (M, C) whose cells have alphas (M, L)."""
    if blocks is None:
        return alphas
    return alphas.new_zeros(len(alphas), int(blocks[-1]) + 1).index_add(1, blocks, alphas)


def _block_means(annotations: Tensor, mask: Tensor | None, blocks: Tensor) -> Tensor:
    """Return the mean over every block's locations that exist, (B, C, D); 0 where none does."""
    exists = torch.ones_like(annotations[..., 0]) if mask is None else mask.to(annotations.dtype)
    count = _summed(exists, blocks)  # (B, C)
    fraction = exists / count.clamp(min=1)[:, blocks]
    means = annotations.new_zeros(len(annotations), count.shape[1], annotations.shape[2])
    return means.index_add(1, blocks, annotations * fraction.unsqueeze(-1))


def _spread(posterior: Tensor, weights: Tensor, blocks: Tensor) -> Tensor:
    """Return the posterior of blocks (M, C) as that of their cells (M, L), in proportion to their prior weights (M, L).

    A word says nothing about the cells within a block.

    Args:
        blocks: (L,) int64, the block of every cell.
    """
    whole = _summed(weights.to(posterior.dtype), blocks)
    return (posterior / whole.clamp(min=torch.finfo(whole.dtype).tiny))[:, blocks] * weights


def _given_a_look(posterior: Tensor, alphas: Tensor) -> Tensor:
    """Return posterior (M, L) divided by its sum, the probability of a look; alphas where that is 0."""
    looked = posterior.sum(1, keepdim=True)
    tiny = torch.finfo(looked.dtype).tiny
    return torch.where(looked > tiny, posterior / looked.clamp(min=tiny), alphas)
