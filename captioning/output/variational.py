"""The mixture over locations, trained with draws: the variational bound of its likelihood."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from captioning.attention import Memory
from captioning.attention.stochastic import draw
from captioning.errors import InputError
from captioning.kernels.cross_entropy import step_nll
from captioning.kernels.marginal import ByImage
from captioning.output.base import Drawn, Layers, Steps, Words
from captioning.output.marginal import MarginalOutput


class VariationalOutput(MarginalOutput):
    """The model of ``MarginalOutput``, trained by one draw of a location per word (Deng et al. 2018, Sec. 4).

    In training a location z_t is drawn from q(z_t | y_t, h_t, a), which knows the word, and the word follows from that
    location alone. What is maximised is the bound

        log p(y_t) >= E_q[log p(y_t | z_t)] - KL(q(z_t) || w_t)        w_t the alphas and the gate, as a distribution

    with the divergence summed over locations, the first term differentiated through the draw by REINFORCE. The alphas
    follow q, and need no estimator of their own. Outside training the likelihood is the exact sum.

    q is a dot product of what the word and the state say with every component, and with a learned vector for a look
    nowhere. Its inputs come from the layers of the deep output, and it passes no gradient on to them.

    Args:
        inference_dim: size of that dot product.
        block: as in ``MarginalOutput``.
        top_k, rest: as in ``MarginalOutput``, outside training alone.

    Raises:
        InputError: an option out of its range.
    """

    draws = True

    def __init__(
        self,
        *,
        inference_dim: int = 128,
        block: tuple[int, int] | None = None,
        top_k: int | None = None,
        rest: bool = True,
    ) -> None:
        super().__init__(block=block, top_k=top_k, rest=rest)
        if inference_dim < 1:
            raise InputError(f"inference_dim must be at least 1, got {inference_dim}")
        self.inference_dim = inference_dim

    def build(self, embedding_dim: int, grid_size: tuple[int, int] | None) -> None:
        super().build(embedding_dim, grid_size)
        self.word_query = nn.Linear(embedding_dim, self.inference_dim, bias=False)
        self.state_query = nn.Linear(embedding_dim, self.inference_dim)
        self.location_key = nn.Linear(embedding_dim, self.inference_dim, bias=False)
        self.nowhere_key = nn.Parameter(torch.zeros(self.inference_dim))

    def forward(
        self, layers: Layers, steps: Steps, memory: Memory, image_index: Tensor, targets: Tensor | None = None
    ) -> Words:
        if targets is None or not self.training:
            return super().forward(layers, steps, memory, image_index, targets)
        hidden = self._hidden(layers, steps)  # (M, E)
        A, W = self._factors(layers, memory)
        log_w = self._log_weights(steps, memory)
        by_image = ByImage.of(image_index, len(A))
        log_q = self._log_q(hidden.detach(), A.detach(), W.detach()[targets], log_w, by_image)
        q = log_q.exp()
        z = draw(q.detach())  # (M,), 0 looks nowhere
        looked = (z > 0).unsqueeze(1)
        at_z = A.flatten(0, 1).index_select(0, image_index * A.shape[1] + (z - 1).clamp(min=0)) * looked
        logits = layers.words(hidden + at_z)
        with torch.no_grad():
            expectation = by_image.flat(torch.bmm(by_image.padded(log_w[:, 1:].exp()).to(A.dtype), A))
            expected = -step_nll(layers.words(hidden + expectation), targets)
        exists = log_w > float("-inf")
        terms = torch.where(exists, q * (torch.where(exists, log_q, 0.0) - torch.where(exists, log_w, 0.0)), 0.0)
        log_prob = log_q.gather(1, z.unsqueeze(1)).squeeze(1)
        return Words(logits, drawn=Drawn(log_prob, terms.sum(1), expected))

    def _log_q(self, hidden: Tensor, A: Tensor, word: Tensor, log_w: Tensor, by_image: ByImage) -> Tensor:
        """Return log q (M, C + 1), nowhere first; -inf where the weight is 0.

        Args:
            hidden: (M, E), the output's hidden layer without the image.
            A: (B, C, E), what the components add to it.
            word: (M, E), the rows of L_o of the words.
        """
        query = self.state_query(hidden) + self.word_query(word)  # (M, a)
        keys = self.location_key(A)  # (B, C, a)
        keys = torch.cat([self.nowhere_key.to(keys.dtype).expand(len(keys), 1, -1), keys], 1)
        scores = by_image.flat(torch.bmm(by_image.padded(query), keys.mT)).to(log_w.dtype)
        scores = scores / self.inference_dim**0.5
        return torch.log_softmax(scores.masked_fill(log_w == float("-inf"), float("-inf")), 1)
