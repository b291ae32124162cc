"""A word's likelihood summed over locations, exactly.

The deep output is linear in the context. With s_t = L_o(E y_{t-1} + L_h h_t) + b and G_i = L_o L_z a_i, the logits of
the words are s_t + G_i after a look at location i, and s_t without a look (component 0). With the weights
w_t0 = 1 - beta_t and w_ti = beta_t alpha_ti,

    p(y_t) = sum_i w_ti softmax(s_t + G_i)[y_t]        Deng et al. 2018
    Z = exp(S) exp(G)^T                                (T, L) for an image, one product over V
    P = exp(S) * ((w / Z) exp(G))                      (T, V), one product over L

Both exponentials are divided by their sums over the words, which does not change P. Callers pass the factors of
G = A W^T: A (B, L, r), what each location adds to the output's hidden layer, and W (V, r). G and its gradient are
computed for a few images at a time, which fit in the cache; only exp(G) is kept for the backward pass.

Letters: B images; M steps, of the images ``image_index`` (M,); L locations, and L + 1 weights. Locations without a
weight, such as those outside the support of sparse alphas, are left out.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from captioning.precision import to_autocast

SMALLEST = 1e-15
"""Smaller totals are replaced by this value; the plain formula computes such steps."""

CPU_CHUNK_BYTES, GPU_CHUNK_BYTES = 8 << 20, 256 << 20  # of G; a CPU's cache keeps this much between operations


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
    precise = _precise(S)
    S, G, log_w = S.to(precise).unsqueeze(-2), G.to(precise), log_w.to(precise).unsqueeze(-1)
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
    """
    A, log_w, _ = _on_support(A, log_w, image_index)
    padded, flat = _by_image(image_index, len(A))
    S, log_w = padded(S), padded(log_w)
    A, W = _as_autocast(A, W)
    with torch.autocast(A.device.type, enabled=False):
        log_p, unreliable = _Summed.apply(S, A, W, log_w)
        return flat(_in_logarithms(log_p, unreliable, S, A, W, log_w))


@torch.no_grad()
def summed_posterior(S: Tensor, A: Tensor, W: Tensor, log_w: Tensor, image_index: Tensor, targets: Tensor) -> Tensor:
    """Return p(z_t = i | y_t) = w_ti p(y_t | i) / p(y_t), (M, L + 1), component 0 first; 0 where the weight is 0.

    The words y_t are targets (M,) int64, the other arguments as in ``summed_log_probs``. Only Z is computed, not P.
    """
    components = log_w.shape
    A, log_w, columns = _on_support(A, log_w, image_index)
    padded, flat = _by_image(image_index, len(A))
    A, W = _as_autocast(A, W)
    S, log_w, targets = padded(S), padded(log_w), padded(targets)
    with torch.autocast(A.device.type, enabled=False):
        joint, lost = [], []
        for chunk in _chunks(A, W):
            exp_G = _exponentials(A[chunk], W)
            *_, w_per_Z, lost_in_chunk = _weigh(S[chunk], exp_G, log_w[chunk])
            at_targets = exp_G.gather(2, targets[chunk].unsqueeze(1).expand(-1, exp_G.shape[1], -1)).mT  # (b, T, L)
            joint.append(w_per_Z * torch.nn.functional.pad(at_targets, (1, 0), value=1.0))  # (b, T, L + 1)
            lost.append(lost_in_chunk)
        posterior = torch.cat(joint)
        total = posterior.sum(-1)
        for b, t in ((total < SMALLEST) | torch.cat(lost)).nonzero().tolist():
            log_joint = _joint_log_probs(S[b, t], A[b] @ W.t(), log_w[b, t])  # (L + 1, V)
            posterior[b, t], total[b, t] = torch.softmax(log_joint[:, targets[b, t]], 0), 1
    posterior = flat(posterior / total.unsqueeze(-1))
    return posterior.new_zeros(components).scatter(1, columns, posterior)


def _on_support(A: Tensor, log_w: Tensor, image_index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Leave out locations whose weight is 0 at every step of their image: exact (Correia et al. 2020).

    Returns A (B, K, r), log_w (M, K + 1), and the kept columns (M, K + 1) of ``log_w``. K is the batch's largest
    support.
    """
    (B, L, _), weighted = A.shape, log_w[:, 1:] != -math.inf
    times_weighted = torch.zeros(B, L, dtype=torch.int32, device=A.device).index_add_(0, image_index, weighted.int())
    K = max(1, int((times_weighted > 0).sum(dim=1).max()))
    if K == L:
        return A, log_w, torch.arange(L + 1, device=A.device).expand_as(log_w)
    locations = times_weighted.argsort(dim=1, descending=True)[:, :K]
    rows = locations + L * torch.arange(B, device=A.device).unsqueeze(1)
    columns = torch.nn.functional.pad(locations + 1, (1, 0))[image_index]
    return A.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, (B, K)), log_w.gather(1, columns), columns


@torch.no_grad()
def location_exponentials(A: Tensor, W: Tensor) -> Tensor:
    """Return exp(G) divided by its sum over the words, (B, L, V), which all steps of a search share."""
    A, W = _as_autocast(A, W)
    with torch.autocast(A.device.type, enabled=False):
        return torch.cat([_exponentials(A[chunk], W) for chunk in _chunks(A, W)])


@torch.no_grad()
def summed_step(S: Tensor, A: Tensor, W: Tensor, log_w: Tensor, exp_G: Tensor) -> Tensor:
    """Return log p of the next word in nats, (N, V), at least float32, with two products per image.

    Args:
        S, log_w: (N, V) and (N, L + 1); N = B * R, the rows of an image adjacent.
        A, W: As in ``summed_log_probs``.
        exp_G: ``location_exponentials`` of A and W.
    """
    A, (S, log_w) = A.to(exp_G.dtype), (x.unflatten(0, (len(A), -1)) for x in (S, log_w))  # (B, R, ..)
    with torch.autocast(A.device.type, enabled=False):
        log_p, unreliable, _ = _sum_locations(S, A, W, log_w, exp_G)
        return _in_logarithms(log_p, unreliable, S, A, W, log_w).flatten(0, 1)


def _by_image(image_index: Tensor, B: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return functions that pad M steps to (B, T, ..), with T the most steps of an image, and flatten them again."""
    counts = image_index.bincount(minlength=B)
    T, before = int(counts.max()), counts.cumsum(0) - counts
    slots = image_index * T + torch.arange(len(image_index), device=image_index.device) - before[image_index]

    def padded(x: Tensor) -> Tensor:
        return x.new_zeros(B * T, *x.shape[1:]).index_copy(0, slots, x).unflatten(0, (B, T))

    return padded, lambda x: x.flatten(0, 1).index_select(0, slots)


def _as_autocast(A: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
    A = to_autocast(A)
    A = A.float() if A.dtype == torch.float16 else A  # the exponent range of float16 is too narrow
    return A, W.to(A.dtype)


def _chunks(A: Tensor, W: Tensor) -> list[slice]:
    """Return slices of a few images at a time."""
    room = CPU_CHUNK_BYTES if A.is_cpu else GPU_CHUNK_BYTES
    count = max(1, room // (A.shape[1] * len(W) * A.element_size()))
    return [slice(start, start + count) for start in range(0, len(A), count)]


def _exponentials(A: Tensor, W: Tensor) -> Tensor:
    """Return exp(G) divided by its sum over the words, (b, L, V), for A (b, L, r)."""
    return torch.softmax(A @ W.t(), -1)


def _precise(*tensors: Tensor) -> torch.dtype:
    """Return the widest of the tensors' types and float32."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


def _weigh(S: Tensor, exp_G: Tensor, log_w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return log softmax(S), exp(S), Z and w / Z of a few images, and where a summand may be lost to underflow.

    Args:
        S: (b, T, V), like log softmax(S). exp(S) has the type of exp(G); all else is at least float32.
        exp_G: (b, L, V).
        log_w: (b, T, L + 1), like Z and w / Z. Component 0 is first; its Z is 1.
    """
    log_S = torch.log_softmax(S, -1, dtype=_precise(S, exp_G, log_w))
    exp_S = log_S.exp().to(exp_G.dtype)
    Z = torch.nn.functional.pad(torch.bmm(exp_S, exp_G.mT).to(log_S.dtype), (1, 0), value=1.0)
    w_per_Z = (log_w - Z.clamp(min=SMALLEST).log()).exp()
    lost = ((Z < SMALLEST) & (w_per_Z > 0)).any(-1)  # (b, T) bool
    # The plain formula computes steps with a clamped Z; the numbers here must still be finite.
    return log_S, exp_S, Z.clamp_(min=SMALLEST), w_per_Z, lost


def _sum_locations(
    S: Tensor, A: Tensor, W: Tensor, log_w: Tensor, exp_G: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Sum over locations at steps S (B, T, V), with exp(G) (B, L, V), by default of A and W.

    Returns:
        log p (B, T, V); where a summand may be lost to underflow, (B, T) bool; and the factors of the gradient, five
        for every chunk of images: exp(S), exp(G), Z, w / Z, and the sum over locations of (w / Z)_i exp(G_i).
    """
    log_p = torch.empty(S.shape, dtype=_precise(S, A, log_w), device=S.device)
    unreliable, factors = torch.empty(S.shape[:2], dtype=torch.bool, device=S.device), list[Tensor]()
    for chunk in _chunks(A, W):
        G = _exponentials(A[chunk], W) if exp_G is None else exp_G[chunk]
        log_S, exp_S, Z, w_per_Z, lost = _weigh(S[chunk], G, log_w[chunk])
        looks = torch.bmm(w_per_Z[..., 1:].to(G.dtype), G)  # (b, T, V)
        total = looks.to(log_p.dtype) + w_per_Z[..., :1]
        unreliable[chunk] = (total.amin(-1) < SMALLEST) | lost
        torch.add(log_S, total.clamp_(min=SMALLEST).log_(), out=log_p[chunk])
        factors += (exp_S, G, Z, w_per_Z, looks)
    return log_p, unreliable, factors


def _in_logarithms(log_p: Tensor, unreliable: Tensor, S: Tensor, A: Tensor, W: Tensor, log_w: Tensor) -> Tensor:
    """Return ``log_p`` (B, T, V), its unreliable steps replaced by the plain formula, one by one."""
    positions = unreliable.nonzero()
    plain = [plain_summed_log_probs(S[b, t], A[b] @ W.t().to(A.dtype), log_w[b, t]) for b, t in positions.tolist()]
    return log_p.index_put(tuple(positions.t()), torch.stack(plain).to(log_p.dtype)) if plain else log_p


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, S: Tensor, A: Tensor, W: Tensor, log_w: Tensor) -> tuple[Tensor, Tensor]:
        log_p, unreliable, factors = _sum_locations(S, A, W, log_w)
        ctx.types = S.dtype, log_w.dtype
        ctx.save_for_backward(A, W, *factors)
        ctx.mark_non_differentiable(unreliable)
        return log_p, unreliable

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """With q the gradient of log p and U = q / total, the gradient of log w_i is r_i = (w / Z)_i U exp(G_i)^T.

        log Z_i has the gradient -r_i. With c = r / Z

            dS = q - exp(S) * (c exp(G))         dG = exp(G) * ((w / Z)^T U - c^T exp(S))
        """
        A, W, *factors = ctx.saved_tensors
        dS, dA, dlog_w, dW = [], [], [], torch.zeros_like(W, dtype=gradient.dtype)
        for chunk in _chunks(A, W):
            (exp_S, G, Z, w_per_Z, looks), factors = factors[:5], factors[5:]
            q = gradient[chunk]
            quotients = q / (looks.to(q.dtype) + w_per_Z[..., :1]).clamp_(min=SMALLEST)
            U = quotients.to(G.dtype)
            r = w_per_Z * torch.cat([quotients.sum(-1, keepdim=True), torch.bmm(U, G.mT)], -1)
            c = r / Z
            minus_c = -c[..., 1:].to(G.dtype)
            dS.append((torch.bmm(minus_c, G) - c[..., :1]).mul_(exp_S).add_(q).to(ctx.types[0]))
            left, right = torch.cat([minus_c, w_per_Z[..., 1:].to(G.dtype)], 1), torch.cat([exp_S, U], 1)
            dG = torch.bmm(left.mT, right).mul_(G).flatten(0, 1)
            dA.append((dG @ W).unflatten(0, G.shape[:2]))
            dW += dG.t() @ A[chunk].flatten(0, 1)
            dlog_w.append(r.to(ctx.types[1]))
        return torch.cat(dS), torch.cat(dA), dW.to(W.dtype), torch.cat(dlog_w)
