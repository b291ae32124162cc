"""A word's likelihood summed over locations, exactly.

The deep output is linear in the context. With s_t = L_o(E y_{t-1} + L_h h_t) + b and G_i = L_o L_z a_i, a word has
logits s_t + G_i after a look at location i, and s_t after no look (component 0). With the weights w_t0 = 1 - beta_t and
w_ti = beta_t alpha_ti,

    p(y_t) = sum_i w_ti softmax(s_t + G_i)[y_t]        Deng et al. 2018
    Z = exp(S) exp(G)^T                                (T, L) for an image, one product over V
    P = exp(S) * ((w / Z) exp(G))                      (T, V), one product over L

with maxima subtracted, which cancel. Callers pass the factors of G = A W^T: A (B, L, r), the locations' summand of the
output's hidden layer or a projection of lower rank, and W (V, r). G and its gradient exist for a few images at a time,
which fit in the cache; exp(G) alone is kept for the backward pass.

Letters: B images; M steps, of the images ``image_index`` (M,); L locations, and L + 1 weights. With fewer components,
A is averaged over blocks of cells and their weights are summed; with a lower rank, A and W have r columns. Locations
without a weight, such as those outside the support of sparse alphas, are left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SMALLEST = 1e-15
"""Smaller totals are replaced by this value; such steps are computed by the plain formula."""

CHUNK_BYTES = {"cpu": 8 << 20}  # of G: fits in a CPU's cache between operations
OTHER_CHUNK_BYTES = 256 << 20
SUM_ROWS = 2048  # locations per product for W's gradient: adding up more products costs passes through memory


def plain_summed_log_probs(S: Tensor, G: Tensor, log_w: Tensor) -> Tensor:
    """Return log p of every word in nats, (.., V), at least float32. The reference, for logits of any size.

    Args:
        S: (.., V), the logits without the image.
        G: (.., L, V), the summand of each location.
        log_w: (.., L + 1), log of the weights, component 0 first; -inf leaves a component out.
    """
    return torch.logsumexp(_joint_log_probs(S, G, log_w), -2)


def _joint_log_probs(S: Tensor, G: Tensor, log_w: Tensor) -> Tensor:
    """Return the joint log p of the component and the word, (.., L + 1, V)."""
    wide = _precise(S)
    S, G, log_w = S.to(wide).unsqueeze(-2), G.to(wide), log_w.to(wide).unsqueeze(-1)
    return log_w + torch.cat([torch.log_softmax(S, -1), torch.log_softmax(S + G, -1)], -2)


def summed_log_probs(S: Tensor, A: Tensor, W: Tensor, log_w: Tensor, image_index: Tensor) -> Tensor:
    """Return log p of every word in nats, (M, V), at least float32: ``plain_summed_log_probs`` with G = A W^T.

    exp(S), exp(G) and the products have A's and W's type, or autocast's; sums and logarithms are at least float32.

    Args:
        S: (M, V).
        A: (B, L, r), float32 or bfloat16; the exponents of float16 are too narrow.
        W: (V, r).
        log_w: (M, L + 1), log of the weights, component 0 first; -inf leaves a component out.
        image_index: (M,) int64, ascending: an image's steps are adjacent.

    Raises:
        ValueError: The steps of an image are not adjacent.
    """
    A, log_w, _ = _on_support(A, log_w, image_index)
    steps = ByImage.of(image_index, len(A))
    S, log_w = steps.padded(S), steps.padded(log_w)
    A, W = _as_autocast(A, W)
    with torch.autocast(A.device.type, enabled=False):
        log_p, unreliable = _Summed.apply(S, A, W, log_w)
        return steps.flat(_in_logarithms(log_p, unreliable, S, A, W, log_w))


@torch.no_grad()
def summed_posterior(S: Tensor, A: Tensor, W: Tensor, log_w: Tensor, image_index: Tensor, targets: Tensor) -> Tensor:
    """Return p(z_t = i | y_t) = w_ti p(y_t | i) / p(y_t), (M, L + 1), component 0 first; 0 where the weight is 0.

    Only Z is computed, not P.

    Args:
        S, A, W, log_w, image_index: As in ``summed_log_probs``.
        targets: (M,) int64, the words y_t.
    """
    all_components = log_w.shape
    A, log_w, columns = _on_support(A, log_w, image_index)
    steps = ByImage.of(image_index, len(A))
    A, W = _as_autocast(A, W)
    S, log_w, targets = steps.padded(S), steps.padded(log_w), steps.padded(targets)
    with torch.autocast(A.device.type, enabled=False):
        result = _sum_locations(S, A, W, log_w, targets)
    assert result.at_targets is not None
    total = (result.look + result.per_sum[..., 0]).clamp(min=SMALLEST)
    posterior = result.per_sum * result.at_targets / total.unsqueeze(-1)
    for b, t in result.unreliable.nonzero().tolist():
        joint = _joint_log_probs(S[b, t], A[b] @ W.t(), log_w[b, t])
        posterior[b, t] = torch.softmax(joint[:, targets[b, t]], 0)
    posterior = steps.flat(posterior)
    return posterior if columns is None else posterior.new_zeros(all_components).scatter(1, columns, posterior)


def _on_support(A: Tensor, log_w: Tensor, image_index: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Leave out locations whose weight is 0 at every step of their image: exact (Correia et al. 2020).

    Args:
        A, log_w, image_index: As in ``summed_log_probs``.

    Returns:
        A (B, K, r) and log_w (M, K + 1) of K locations of each image, K being the largest support in the batch; and the
        columns (M, K + 1) of ``log_w`` that were kept, component 0 first, or None if all L are.
    """
    weighted = log_w[:, 1:] != -math.inf
    if weighted.all():
        return A, log_w, None
    B, L, _ = A.shape
    steps = torch.zeros(B, L, dtype=torch.int32, device=A.device).index_add_(0, image_index, weighted.int())
    K = max(1, int((steps > 0).sum(dim=1).max()))
    if K == L:
        return A, log_w, None
    locations = steps.argsort(dim=1, descending=True)[:, :K]
    rows = locations + L * torch.arange(B, device=A.device).unsqueeze(1)
    columns = torch.nn.functional.pad(locations + 1, (1, 0))[image_index]
    return A.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, (B, K)), log_w.gather(1, columns), columns


class Located(NamedTuple):
    """The factors of B images in a search, computed once by ``locate``.

    Attributes:
        A: (B, L, r).
        W: (V, r).
        exp_G: (B, L, V), divided by each location's largest value.
    """

    A: Tensor
    W: Tensor
    exp_G: Tensor

    def select(self, images: Tensor) -> Located:
        """Return the factors of the given images, (B',) indices."""
        return Located(self.A[images], self.W, self.exp_G[images])


@torch.no_grad()
def locate(A: Tensor, W: Tensor) -> Located:
    """Return the factors of images with A (B, L, r), for W (V, r)."""
    A, W = _as_autocast(A, W)
    with torch.autocast(A.device.type, enabled=False):
        if torch.compiler.is_compiling():  # the number of images is unknown then
            return Located(A, W, _exponentials(A, W))
        return Located(A, W, torch.cat([_exponentials(A[chunk], W) for chunk in _chunks(A, W)]))


@torch.no_grad()
def summed_step(S: Tensor, located: Located, log_w: Tensor) -> Tensor:
    """Return log p of the next word in nats, (N, V), at least float32: two products per image.

    Args:
        S: (N, V), N = B * R, the rows of an image adjacent.
        located: The factors of B images.
        log_w: (N, L + 1).
    """
    A, W, exp_G = located
    if torch.compiler.is_compiling():  # plain operations; where exp(G) underflowed, its smallest normal number
        G = exp_G.clamp(min=torch.finfo(exp_G.dtype).tiny).log().repeat_interleave(S.shape[0] // A.shape[0], 0)
        return plain_summed_log_probs(S, G, log_w)
    S, log_w = S.unflatten(0, (len(A), -1)), log_w.unflatten(0, (len(A), -1))
    with torch.autocast(A.device.type, enabled=False):
        result = _sum_locations(S, A, W, log_w, None, exp_G)
    assert result.log_p is not None
    return _in_logarithms(result.log_p, result.unreliable, S, A, W, log_w).flatten(0, 1)


class ByImage:
    """Pads M steps of B images to (B, T, ..), T being the most steps of an image, and flattens them again."""

    def __init__(self, images: int, steps: int, slots: Tensor | None) -> None:
        self._shape = images, steps
        self._slots = slots

    @classmethod
    def of(cls, image_index: Tensor, images: int) -> ByImage:
        """Raises:
        ValueError: The steps of an image are not adjacent.
        """
        if (image_index.diff() < 0).any():
            raise ValueError("image_index must ascend: an image's steps must be adjacent")
        counts = image_index.bincount(minlength=images)
        T = int(counts.max())
        if T * images == len(image_index):
            return cls(images, T, None)
        before = counts.cumsum(0) - counts
        position = torch.arange(len(image_index), device=image_index.device) - before[image_index]
        return cls(images, T, image_index * T + position)

    def padded(self, x: Tensor) -> Tensor:
        if self._slots is not None:
            B, T = self._shape
            x = x.new_zeros(B * T, *x.shape[1:]).index_copy(0, self._slots, x)
        return x.unflatten(0, self._shape)

    def flat(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        return x if self._slots is None else x.index_select(0, self._slots)


def _as_autocast(A: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
    device = A.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else A.dtype
    if dtype == torch.float16:  # its exponent range is too narrow
        dtype = torch.float32
    return A.to(dtype), W.to(dtype)


def _chunks(A: Tensor, W: Tensor, images: slice | None = None) -> Iterator[slice]:
    """Yield slices of a few images at a time, over all images or over ``images``."""
    room = CHUNK_BYTES.get(A.device.type, OTHER_CHUNK_BYTES)
    count = max(1, room // (A.shape[1] * len(W) * A.element_size()))
    whole = images or slice(0, len(A))
    for start in range(whole.start, whole.stop, count):
        yield slice(start, min(start + count, whole.stop))


def _exponentials(A: Tensor, W: Tensor) -> Tensor:
    """Return exp(G) divided by each location's largest value, (b, L, V), for A (b, L, r)."""
    G = A.flatten(0, 1) @ W.t()
    _fill_exponentials(G, out=G)
    return G.unflatten(0, A.shape[:2])


def _fill_exponentials(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Fill ``out`` (.., V), which may be ``x``, with exp(x) divided by each row's largest value.

    Returns:
        The logarithm of each row's divisor, and each row's sum, (..,), at least float32.
    """
    values = x.to(_precise(x, out))
    shift = values.amax(-1)
    values = (values - shift.unsqueeze(-1)).exp_()
    out.copy_(values)
    return shift, values.sum(-1)


def _precise(*tensors: Tensor) -> torch.dtype:
    """Return the widest of the tensors' types and float32."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


def _at(rows: Tensor, words: Tensor) -> Tensor:
    """Return rows (b, L, V) at words (b, T) as (b, T, L)."""
    return rows.gather(2, words.unsqueeze(1).expand(-1, rows.shape[1], -1)).mT


class _Sum(NamedTuple):
    """The sum over locations at steps (B, T), and the factors of its gradient.

    Attributes:
        log_p: (B, T, V); None if only targets were given.
        exp_S: (B, T, V), divided by each step's largest value.
        exp_G: (b, L, V) for every chunk of images, divided by each location's largest value.
        sums: (B, T, L + 1), Z.
        per_sum: (B, T, L + 1), w / Z.
        look: The sum over the locations of (w / Z)_i exp(G_i), (B, T, V), or (B, T) if only targets were given.
        at_targets: (B, T, L + 1), exp(G) of the targets, 1 for component 0; None for all words.
        unreliable: (B, T) bool, True where a summand may have been lost to underflow.
    """

    log_p: Tensor | None
    exp_S: Tensor
    exp_G: list[Tensor]
    sums: Tensor
    per_sum: Tensor
    look: Tensor
    at_targets: Tensor | None
    unreliable: Tensor


def _sum_locations(
    S: Tensor, A: Tensor, W: Tensor, log_w: Tensor, targets: Tensor | None, exp_G: Tensor | None = None
) -> _Sum:
    """Sum over locations at steps S (B, T, V), with the given exp(G) (B, L, V) or that of A and W."""
    (B, T, _), L, dtype = S.shape, A.shape[1], A.dtype
    S, wide = S.contiguous(), _precise(S, A)
    log_w = log_w.to(wide)
    exp_S = S.new_empty(S.shape, dtype=dtype)
    sums, per_sum, at_targets = log_w.new_ones(3, B, T, L + 1)
    log_p = log_w.new_empty(S.shape) if targets is None else None
    look = exp_S.new_empty(S.shape) if targets is None else log_w.new_empty(targets.shape)
    least = log_w.new_empty(B, T)
    chunks_of_exp_G = []
    for chunk in _chunks(A, W):
        G = _exponentials(A[chunk], W) if exp_G is None else exp_G[chunk]
        chunks_of_exp_G.append(G)
        e = exp_S[chunk]
        shift, sums[chunk, :, 0] = _fill_exponentials(S[chunk], out=e)
        sums[chunk, :, 1:] = torch.bmm(e, G.mT)
        per_sum[chunk] = (log_w[chunk] - sums[chunk].clamp(min=SMALLEST).log()).exp()
        no_look, by_location = per_sum[chunk, :, 0], per_sum[chunk, :, 1:]
        if targets is not None:
            at_targets[chunk, :, 1:] = _at(G, targets[chunk])
            look[chunk] = (by_location * at_targets[chunk, :, 1:]).sum(-1)
            least[chunk] = look[chunk] + no_look
        elif log_p is not None:
            torch.bmm(by_location.to(dtype), G, out=look[chunk])
            total = look[chunk].to(wide) + no_look.unsqueeze(-1)
            least[chunk] = total.amin(-1)
            torch.add(S[chunk].to(wide) - shift.unsqueeze(-1), total.clamp_(min=SMALLEST).log_(), out=log_p[chunk])
    unreliable = (least < SMALLEST) | ((sums < SMALLEST) & (per_sum > 0)).any(-1)
    # Steps with clamped sums are computed by the plain formula; the numbers here must still be finite.
    sums.clamp_(min=SMALLEST)
    return _Sum(log_p, exp_S, chunks_of_exp_G, sums, per_sum, look, None if targets is None else at_targets, unreliable)


def _in_logarithms(log_p: Tensor, unreliable: Tensor, S: Tensor, A: Tensor, W: Tensor, log_w: Tensor) -> Tensor:
    """Return ``log_p`` (B, T, V), its unreliable steps replaced by the plain formula, one by one."""
    places = unreliable.nonzero()
    steps = [plain_summed_log_probs(S[b, t], A[b] @ W.t(), log_w[b, t]) for b, t in places.tolist()]
    return log_p.index_put(tuple(places.t()), torch.stack(steps).to(log_p.dtype)) if steps else log_p


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, S: Tensor, A: Tensor, W: Tensor, log_w: Tensor) -> tuple[Tensor, Tensor]:
        result = _sum_locations(S, A, W, log_w, None)
        assert result.log_p is not None
        ctx.types = S.dtype, log_w.dtype
        ctx.save_for_backward(A, W, result.exp_S, result.sums, result.per_sum, result.look, *result.exp_G)
        ctx.mark_non_differentiable(result.unreliable)
        return result.log_p, result.unreliable

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """With q the gradient of log p and U = q / total, the gradient of log w_i is r_i = (w / Z)_i U exp(G_i)^T.

        That of log Z_i is -r_i. Hence with c = r / Z

            dS = q - exp(S) * (c exp(G))         dG = exp(G) * ((w / Z)^T U - c^T exp(S))
        """
        A, W, exp_S, sums, per_sum, look, *exp_G = ctx.saved_tensors
        (B, L), dtype = A.shape[:2], A.dtype
        gradient = gradient.contiguous()
        for_S = torch.empty_like(exp_S, dtype=ctx.types[0])
        for_A, for_W = torch.empty_like(A), torch.zeros_like(W, dtype=gradient.dtype)
        for_log_w = torch.empty_like(per_sum)
        chunks = list(_chunks(A, W))
        at_once = max(1, SUM_ROWS // (len(exp_G[0]) * L))  # chunks
        for_G = A.new_empty(min(B, at_once * len(exp_G[0])), L, len(W))
        for first in range(0, len(chunks), at_once):
            group = chunks[first : first + at_once]
            begin, end = group[0].start, group[-1].stop
            for chunk, G in zip(group, exp_G[first:], strict=False):
                a, e, q = per_sum[chunk], exp_S[chunk], gradient[chunk]
                quotients = q / (look[chunk].to(q.dtype) + a[..., :1]).clamp_(min=SMALLEST)
                U = quotients.to(dtype)
                r = a * torch.cat([quotients.sum(-1, keepdim=True), torch.bmm(U, G.mT)], -1)
                for_log_w[chunk] = r
                c = r / sums[chunk]
                by_Z = -c[..., 1:].to(dtype)
                for_S[chunk] = (torch.bmm(by_Z, G) - c[..., :1]).mul_(e).add_(q)
                left, right = torch.cat([by_Z, a[..., 1:].to(dtype)], 1), torch.cat([e, U], 1)
                torch.mul(torch.bmm(left.mT, right), G, out=for_G[chunk.start - begin : chunk.stop - begin])
            rows = for_G[: end - begin].flatten(0, 1)
            torch.mm(rows, W, out=for_A[begin:end].flatten(0, 1))
            for_W += rows.t() @ A[begin:end].flatten(0, 1)
        return for_S, for_A, for_W.to(W.dtype), for_log_w.to(ctx.types[1])
