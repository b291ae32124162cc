"""Neural Turing machines: addressing by content and by a shift of the previous alphas, and a write head."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captioning.attention.base import AttentionOutput
from captioning.attention.memory import Memory, repeat_rows
from captioning.attention.normalizers import masked_log_softmax
from captioning.attention.scores import CosineScore, Score, dot
from captioning.attention.soft import SoftAttention
from captioning.cells import GridSize
from captioning.linear import Linear
from captioning.precision import at_least_float32
from captioning.trace import State

_NEIGHBORS = 9  # offsets of the 3 x 3 shift


class NTMScore(CosineScore):
    """The logits are the logs of the weights of Graves et al. 2014, Eq. 5-9, in two dimensions.

    From h_{t-1} come a key, its strength, a gate, a shift and an exponent, in the paper k, beta, g, s and gamma:

        w^c_i ~ exp(strength cos(key, W a_i))          addressing by content, Eq. 5-6
        w^g   = gate w^c + (1 - gate) alpha_{t-1}      interpolation with the previous alphas, Eq. 7
        w^s   = conv(shift, w^g)                       shift by up to one cell in each direction, Eq. 8
        alpha ~ (w^s)^exponent                         sharpening, Eq. 9

    At the first step alpha_{t-1} is uniform. Differs from the paper: the shift has two dimensions, and weight that
    moves past the border is dropped instead of wrapping around. Alphas are divided by their sum as in the paper.

    Args:
        attention_dim: Size A of the keys.
    """

    needs_softmax = True

    def build(self, annotation_dim: int, query_dim: int, grid_size: GridSize) -> None:
        assert self.attention_dim is not None
        self.grid_size = grid_size
        self.annotation_projection = nn.Linear(annotation_dim, self.attention_dim, bias=False)
        self.key = Linear(query_dim, self.attention_dim)
        self.controls = Linear(query_dim, 3 + _NEIGHBORS)
        with torch.no_grad():  # training begins almost without a shift
            self.controls.bias[3 + _NEIGHBORS // 2] = 4.0

    def init_state(self, exists: Tensor) -> State:
        """Return uniform alphas, and the mask, which restricts the addressing to locations that exist."""
        alphas = at_least_float32(exists.to(self.key.weight.dtype))
        return alphas / alphas.sum(dim=1, keepdim=True), exists

    def update(self, alphas: Tensor, *state: Tensor) -> State:
        return alphas, state[1]

    def forward(self, query: Tensor, projected: Tensor, *state: Tensor) -> Tensor:
        previous_alphas, exists = state  # (B, R, L) each
        cosine = at_least_float32(dot(F.normalize(self.key(query), dim=-1), projected))  # (B, R, L)
        controls = self.controls(query).to(cosine.dtype)  # (B, R, 12)
        strength, gate, exponent, shift = controls.split([1, 1, 1, _NEIGHBORS], dim=-1)
        w_c = masked_log_softmax(F.softplus(strength) * cosine, exists).exp()  # (B, R, L), Eq. 5
        gate = torch.sigmoid(gate)  # (B, R, 1)
        w_s = self._convolve(gate * w_c + (1 - gate) * previous_alphas, shift.softmax(dim=-1))  # (B, R, L), Eq. 7-8
        return (1 + F.softplus(exponent)) * w_s.clamp_min(torch.finfo(w_s.dtype).tiny).log()  # Eq. 9

    def _convolve(self, weights: Tensor, shift: Tensor) -> Tensor:
        """Return weights (B, R, L) convolved with ``shift`` (B, R, 9), the probabilities of the nine offsets."""
        height, width = self.grid_size
        padded = F.pad(weights.unflatten(-1, self.grid_size), (1, 1, 1, 1))
        shifted = torch.zeros_like(weights)
        for offset, probability in enumerate(shift.unbind(-1)):
            down, right = divmod(offset, 3)
            window = padded[..., 2 - down : 2 - down + height, 2 - right : 2 - right + width]
            shifted = shifted + probability.unsqueeze(-1) * window.flatten(-2)
        return shifted


class NTMAttention(SoftAttention):
    """Soft attention over a memory into which the decoder writes at every step.

    The annotations of an image are the first memory M_0 of each of its captions. A step reads its context from M_{t-1};
    then the write head erases and adds (Graves et al. 2014, Sec. 3.2, Eq. 3-4) with its own alphas v_t and
    r_t = sigmoid(W_r h_{t-1} + b_r), u_t = W_u h_{t-1} + b_u:

        M_t(i) = M_{t-1}(i) * (1 - v_ti r_t) + v_ti u_t

    Training begins with almost no writing. Memories (N, L, D) are float32 at least: bfloat16 rounds small writes away.

    Args:
        score: The score of the read head, usually ``NTMScore``. The write head has a copy with parameters of its own.
        dropout: Probability of dropping a weight of the read head, as in ``SoftAttention``.
    """

    weighs_annotations = False

    def __init__(self, score: Score, *, dropout: float = 0.0) -> None:
        super().__init__(score, dropout=dropout)
        self.write_head = SoftAttention(copy.deepcopy(score))

    def build(self, annotation_dim: int, query_dim: int, grid_size: GridSize) -> None:
        super().build(annotation_dim, query_dim, grid_size)
        self.write_head.build(annotation_dim, query_dim, grid_size)
        self.erase, self.add = Linear(query_dim, annotation_dim), Linear(query_dim, annotation_dim)
        nn.init.constant_(self.erase.bias, -4.0)
        nn.init.zeros_(self.add.weight)
        nn.init.zeros_(self.add.bias)

    def prepare(self, annotations: Tensor, mask: Tensor | None = None) -> Memory:
        return Memory(annotations, annotations, mask)  # a step projects M_{t-1}

    def init_state(self, memory: Memory) -> State:
        """Return M_0 and the states of both heads: tensors (B, ..)."""
        exists = memory.exists
        return (
            at_least_float32(memory.annotations),
            *self.score.init_state(exists),
            *self.write_head.score.init_state(exists),
        )

    def forward(self, query: Tensor, memory: Memory, state: State | None = None) -> tuple[AttentionOutput, State]:
        R = len(query) // len(memory.annotations)
        M, *head_states = self._first_state(memory, len(query)) if state is None else state  # M (N, L, D)
        annotations = M.to(memory.annotations.dtype)
        mask = None if memory.mask is None else repeat_rows(memory.mask, R)  # (N, L): every row is an image of its own
        keys, write_keys = (score.project(annotations) for score in (self.score, self.write_head.score))
        size = len(head_states) // 2  # of one head's state
        output, read_state = super().forward(query, Memory(annotations, keys, mask), tuple(head_states[:size]))
        write, write_state = self.write_head(query, Memory(annotations, write_keys, mask), tuple(head_states[size:]))
        v = write.alphas.unsqueeze(-1)  # (N, L, 1)
        erased = M * (1 - v * torch.sigmoid(self.erase(query)).unsqueeze(1))  # (N, L, D), Eq. 3
        return output, (erased + v * self.add(query).unsqueeze(1), *read_state, *write_state)  # Eq. 4
