"""The deep output as a mixture over locations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from captioning.attention import Attention, Memory, MultiHeadAttention, SoftAttention
from captioning.errors import InputError
from captioning.kernels.marginal import (
    Located,
    locate,
    mixture_log_probs,
    mixture_posterior,
    mixture_step,
    top_components,
)
from captioning.model.output import Layers, Output, Steps, Words, precise_words


class MarginalOutput(Output):
    """The word's likelihood summed over locations, exactly (Deng et al. 2018): hard attention without draws.

    p(y_t) = sum_i w_ti softmax(L_o(E y_{t-1} + L_h h_t + L_z a_i))[y_t], with w_ti = beta_t alpha_ti and, for a step
    that looks nowhere, a component without L_z a_i and with w_t0 = 1 - beta_t. The LSTM is fed the expectation, as with
    soft attention, so that no path branches. ``captioning.kernels.marginal`` has the computation.

    The options, which combine, say what the components are; by default every location is one. ``block``, ``top_k`` and
    ``rest`` belong to no parameter and may be set at any time.

    Args:
        block: (rows, columns) of cells that are one component: the mean of their annotations, the sum of their weights.
        top_k: the most probable components of each step stay, all others become one: soft attention over the rest.
        rest: with ``top_k``, look at that rest; otherwise the most probable components have all the weight.
        rank: of L_o L_z a_i. A learned map to so many dimensions comes between the output's hidden layer and L_o.

    Raises:
        InputError: an option out of its range.
    """

    has_posterior = True

    def __init__(
        self,
        *,
        block: tuple[int, int] | None = None,
        top_k: int | None = None,
        rest: bool = True,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        if block is not None and (len(block) != 2 or min(block) < 1):
            raise InputError(f"block must be rows and columns of at least 1, got {list(block)}")
        for name, value in (("top_k", top_k), ("rank", rank)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        if not rest and top_k is None:
            raise InputError("rest: is what `top_k` leaves; set top_k, or leave rest out")
        self.block = None if block is None else tuple(block)
        self.top_k = top_k
        self.rest = rest
        self.rank = rank
        self.projection: nn.Linear | None = None

    def check(self, attention: Attention) -> None:
        name = type(attention).__name__
        if isinstance(attention, MultiHeadAttention):
            raise InputError(f"output: {name} looks at several locations at once, a mixture takes one word from each")
        if not isinstance(attention, SoftAttention):
            raise InputError(f"output: {name} chooses locations itself; a sum over all of them takes SoftAttention")

    def build(self, embedding_dim: int, grid_size: tuple[int, int] | None) -> None:
        if self.block is not None and grid_size is None:
            raise InputError(f"block: {list(self.block)} needs annotations on a grid; leave it out")
        self._grid_size = grid_size
        if self.rank is not None:
            if self.rank > embedding_dim:
                raise InputError(f"rank: {self.rank} exceeds the embedding's size {embedding_dim}; leave it out")
            self.projection = nn.Linear(embedding_dim, self.rank, bias=False)
            nn.init.orthogonal_(self.projection.weight)  # G is then what it is without, seen in a subspace

    def prepare(self, layers: Layers, memory: Memory) -> Located:
        return locate(*self._factors(layers, memory))

    def forward(
        self, layers: Layers, steps: Steps, memory: Memory, image_index: Tensor, targets: Tensor | None = None
    ) -> Words:
        if self.training:
            targets = None  # no posterior
        S = layers.words(self._hidden(layers, steps))
        A, W = self._factors(layers, memory)
        blocks, log_w = self._blocks(memory), self._log_weights(steps, memory)
        if self.top_k is None:
            log_probs = mixture_log_probs(S, A, W, log_w, image_index)
            if targets is None:
                return Words(log_probs)
            posterior = mixture_posterior(S, A, W, log_w, image_index, targets)[:, 1:]
        else:
            top = top_components(A, log_w, image_index, self.top_k, rest=self.rest)
            own = torch.arange(len(S), device=S.device)
            log_probs = mixture_log_probs(S, top.A, W, top.log_w, own)
            if targets is None:
                return Words(log_probs)
            posterior = mixture_posterior(S, top.A, W, top.log_w, own, targets)[:, 1:]
            weights = _summed(steps.alphas, blocks)
            posterior = _spread(posterior, weights, top.component_of(weights.shape[1]))
        if blocks is not None:
            posterior = _spread(posterior, steps.alphas, blocks.expand_as(steps.alphas))
        return Words(log_probs, _if_looked(posterior, steps.alphas))

    def step(self, layers: Layers, steps: Steps, memory: Memory) -> Tensor:
        located = memory.located or self.prepare(layers, memory)
        S = precise_words(layers.words, self._hidden(layers, steps))
        log_w = self._log_weights(steps, memory)
        if self.top_k is not None:
            images = torch.arange(len(S), device=S.device) // (len(S) // len(located.A))
            top = top_components(located.A, log_w, images, self.top_k, rest=self.rest)
            of_rest = locate(top.A[:, -1:], located.W).exp_G  # the one component that no image has
            exp_G = torch.cat([located.exp_G[images.unsqueeze(1), top.locations], of_rest], 1)
            located, log_w = Located(top.A, located.W, exp_G), top.log_w
        return mixture_step(S, located, log_w)

    def _hidden(self, layers: Layers, steps: Steps) -> Tensor:
        """Return the hidden layer of a step that looks nowhere, (M, E)."""
        return layers.dropout(steps.embedded + layers.hidden(layers.dropout(steps.h)))

    def _log_weights(self, steps: Steps, memory: Memory) -> Tensor:
        """Return log of beta * alpha of the components after that of 1 - beta, (M, C + 1); -inf where a weight is 0."""
        weights = _summed(steps.alphas, self._blocks(memory))
        exists = weights > torch.finfo(weights.dtype).tiny
        log_w = torch.where(exists, weights, 1.0).log().masked_fill(~exists, float("-inf"))
        if steps.gate is None:
            return nn.functional.pad(log_w, (1, 0), value=float("-inf"))
        gate = steps.gate.to(log_w.dtype).unsqueeze(1)
        return torch.cat([nn.functional.logsigmoid(-gate), nn.functional.logsigmoid(gate) + log_w], 1)

    def _factors(self, layers: Layers, memory: Memory) -> tuple[Tensor, Tensor]:
        """Return A (B, C, r) and W (V, r), whose products are what the components add to those logits."""
        annotations, blocks = memory.annotations, self._blocks(memory)
        if blocks is not None:
            annotations = _block_means(annotations, memory.mask, blocks)
        A, W = layers.dropout(layers.context(annotations)), layers.words.weight
        return (A, W) if self.projection is None else (self.projection(A), self.projection(W))

    def _blocks(self, memory: Memory) -> Tensor | None:
        """Return the block of every location, (L,) int64, counted row by row; None where every location is its own."""
        if self.block is None:
            return None
        assert self._grid_size is not None
        (rows, columns), L, device = self._grid_size, memory.annotations.shape[1], memory.annotations.device
        if rows * columns != L:
            raise InputError(f"block: {L} annotations do not lie on a grid of {rows} x {columns}; leave it out")
        across = -(-columns // self.block[1])
        row, column = torch.arange(rows, device=device), torch.arange(columns, device=device)
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
    share = exists / count.clamp(min=1)[:, blocks]
    means = annotations.new_zeros(len(annotations), count.shape[1], annotations.shape[2])
    return means.index_add(1, blocks, annotations * share.unsqueeze(-1))


def _spread(posterior: Tensor, weights: Tensor, component: Tensor) -> Tensor:
    """Return the posterior of the parts (M, n) of components (M, C): a word says nothing of the parts of a component.

    Args:
        weights: (M, n), prior weights of the parts.
        component: (M, n) int64, the component of every part.
    """
    whole = torch.zeros_like(posterior).scatter_add(1, component, weights.to(posterior.dtype))
    return (posterior / whole.clamp(min=torch.finfo(whole.dtype).tiny)).gather(1, component) * weights


def _if_looked(posterior: Tensor, alphas: Tensor) -> Tensor:
    """Return posterior (M, L) as shares of its sum; alphas where that is nothing."""
    looked = posterior.sum(1, keepdim=True)
    share = posterior / looked.clamp(min=torch.finfo(looked.dtype).tiny)
    return torch.where(looked > torch.finfo(looked.dtype).tiny, share, alphas)
