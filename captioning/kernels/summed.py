"""A word's likelihood summed over locations, exactly.

The deep output is linear in the context. With q_t = L_o(E y_{t-1} + L_h h_t) + b and G_i = L_o L_z a_i, the logits of
the words are q_t + G_i after a look at location i, and q_t without a look (component 0). With the weights
w_t0 = 1 - beta_t and w_ti = beta_t alpha_ti,

    p(y_t) = sum_i w_ti softmax(q_t + G_i)[y_t]        Deng et al. 2018
    Z = exp(Q) exp(G)^T                                (T, L) for an image, one product over V
    P = exp(Q) * ((w / Z) exp(G))                      (T, V), one product over L

Both exponentials are divided by their sums over the words, which does not change P. Callers pass the factors of
G = C W^T: C (B, L, E), what each location adds to the output's hidden layer, and W (V, E). G and its gradient are
computed for a few images at a time, which fit in the cache; only exp(G) is kept for the backward pass.

Letters: B images; M steps, of the images ``image_index`` (M,); L locations, and L + 1 weights.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from captioning.precision import at_least_float32, to_autocast

SMALLEST = 1e-15  # lower bound of a sum, so that numbers stay finite; steps with a smaller sum take the plain formula

CPU_CHUNK_BYTES, GPU_CHUNK_BYTES = 8 << 20, 256 << 20  # of G; a CPU's cache keeps this much between operations


def plain_summed_log_probs(Q: Tensor, G: Tensor, log_w: Tensor) -> Tensor:
    """Return log p of every word in nats, (.., V), at least float32. The reference, for logits of any size.

    Args:
        Q: (.., V), the logits without the context.
        G: (.., L, V), the summand of each location.
        log_w: (.., L + 1), log of the weights, component 0 first; -inf leaves a component out.
    """
    Q = at_least_float32(Q).unsqueeze(-2)
    log_p = torch.cat([torch.log_softmax(Q, -1), torch.log_softmax(Q + G, -1)], -2)  # (.., L + 1, V), of a component
    return torch.logsumexp(log_w.unsqueeze(-1) + log_p, -2)


def summed_log_probs(Q: Tensor, C: Tensor, W: Tensor, log_w: Tensor, image_index: Tensor) -> Tensor:
    """Return log p of every word in nats, (M, V), at least float32: ``plain_summed_log_probs`` with G = C W^T.

    exp(Q), exp(G) and the products have C's and W's type, or autocast's; sums and logarithms are at least float32.

    Args:
        Q: (M, V).
        C: (B, L, E), float32 or bfloat16; the exponents of float16 are too narrow.
        W: (V, E).
        log_w: (M, L + 1), log of the weights, component 0 first; -inf leaves a component out.
        image_index: (M,) int64, ascending: an image's steps are adjacent.
    """
    pad, flatten = _make_padding(image_index, len(C))
    Q, log_w = pad(Q), pad(log_w)
    C, W = _cast_factors(C, W)
    with torch.autocast(C.device.type, enabled=False):
        log_p, unreliable = _Summed.apply(Q, C, W, log_w)
        return flatten(_replace_unreliable(log_p, unreliable, Q, C, W, log_w))


def summed_posterior(Q: Tensor, C: Tensor, W: Tensor, log_w: Tensor, image_index: Tensor, targets: Tensor) -> Tensor:
    """Return p(i | y_t) = w_ti p(y_t | i) / p(y_t), (M, L + 1), component 0 first, for targets y_t (M,) int64.

    It is the derivative of log p(y_t), which ``summed_log_probs`` returns, with respect to log w_ti.
    """
    with torch.inference_mode(False), torch.enable_grad():
        Q, C, W, log_w, targets = (x.clone() if x.is_inference() else x.detach() for x in (Q, C, W, log_w, targets))
        log_p = summed_log_probs(Q, C, W, log_w.requires_grad_(), image_index)
        (posterior,) = torch.autograd.grad(log_p.gather(1, targets.unsqueeze(1)).sum(), log_w)
    return posterior


@torch.no_grad()
def location_exponentials(C: Tensor, W: Tensor) -> Tensor:
    """Return exp(G) divided by its sum over the words, (B, L, V), which all steps of a search share."""
    C, W = _cast_factors(C, W)
    with torch.autocast(C.device.type, enabled=False):
        return torch.cat([torch.softmax(C[chunk] @ W.t(), -1) for chunk in _chunks(C, W)])


@torch.no_grad()
def summed_step(Q: Tensor, C: Tensor, W: Tensor, log_w: Tensor, exp_G: Tensor) -> Tensor:
    """Return log p of the next word in nats, (N, V), at least float32, with two products per image.

    Args:
        Q, log_w: (N, V) and (N, L + 1); N = B * R, the rows of an image adjacent.
        C, W: As in ``summed_log_probs``.
        exp_G: ``location_exponentials`` of C and W.
    """
    C, (Q, log_w) = C.to(exp_G.dtype), (x.unflatten(0, (len(C), -1)) for x in (Q, log_w))  # (B, R, ..)
    with torch.autocast(C.device.type, enabled=False):
        log_p, unreliable, _ = _sum_locations(Q, C, W, log_w, exp_G)
        return _replace_unreliable(log_p, unreliable, Q, C, W, log_w).flatten(0, 1)


def _make_padding(image_index: Tensor, B: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return functions that pad M steps to (B, T, ..), T the most steps of an image, and flatten them again."""
    counts = image_index.bincount(minlength=B)
    T = int(counts.max())
    starts = counts.cumsum(0) - counts
    positions = image_index * T + torch.arange(len(image_index), device=image_index.device) - starts[image_index]

    def pad(x: Tensor) -> Tensor:
        return x.new_zeros(B * T, *x.shape[1:]).index_copy(0, positions, x).unflatten(0, (B, T))

    return pad, lambda x: x.flatten(0, 1).index_select(0, positions)


def _cast_factors(C: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
    C = to_autocast(C)
    C = C.float() if C.dtype == torch.float16 else C  # the exponent range of float16 is too narrow
    return C, W.to(C.dtype)


def _chunks(C: Tensor, W: Tensor) -> list[slice]:
    """Return slices of a few images at a time."""
    chunk_bytes = CPU_CHUNK_BYTES if C.is_cpu else GPU_CHUNK_BYTES
    count = max(1, chunk_bytes // (C.shape[1] * len(W) * C.element_size()))
    return [slice(start, start + count) for start in range(0, len(C), count)]


def _sum_locations(
    Q: Tensor, C: Tensor, W: Tensor, log_w: Tensor, exp_G: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Sum over locations at steps Q (B, T, V), with exp(G) (B, L, V), by default of C and W.

    Returns:
        log p (B, T, V); (B, T) bool, True where underflow may lose a summand; and, for each chunk of b images,
        five factors of the gradient: exp(Q), exp(G), Z and w / Z (b, T, L + 1), sum_i (w / Z)_i exp(G_i) (b, T, V).
    """
    log_p = torch.empty(Q.shape, dtype=at_least_float32(Q).dtype, device=Q.device)
    unreliable = torch.empty(Q.shape[:2], dtype=torch.bool, device=Q.device)
    factors: list[Tensor] = []
    for chunk in _chunks(C, W):
        G = torch.softmax(C[chunk] @ W.t(), -1) if exp_G is None else exp_G[chunk]  # exp(G), (b, L, V)
        log_Q = torch.log_softmax(Q[chunk], -1, dtype=log_p.dtype)
        exp_Q = log_Q.exp().to(G.dtype)  # (b, T, V)
        Z = torch.nn.functional.pad(torch.bmm(exp_Q, G.mT).to(log_p.dtype), (1, 0), value=1.0)  # component 0 has Z = 1
        w_per_Z = (log_w[chunk] - Z.clamp(min=SMALLEST).log()).exp()
        is_lost = ((Z < SMALLEST) & (w_per_Z > 0)).any(-1)  # (b, T)
        location_sum = torch.bmm(w_per_Z[..., 1:].to(G.dtype), G)  # (b, T, V)
        total = location_sum.to(log_p.dtype) + w_per_Z[..., :1]
        unreliable[chunk] = (total.amin(-1) < SMALLEST) | is_lost
        torch.add(log_Q, total.clamp_(min=SMALLEST).log_(), out=log_p[chunk])
        factors += (exp_Q, G, Z.clamp_(min=SMALLEST), w_per_Z, location_sum)  # finite also where they are not used
    return log_p, unreliable, factors


def _replace_unreliable(log_p: Tensor, unreliable: Tensor, Q: Tensor, C: Tensor, W: Tensor, log_w: Tensor) -> Tensor:
    """Return ``log_p`` (B, T, V), its unreliable steps replaced by the plain formula, one by one."""
    positions = unreliable.nonzero()
    plain = [plain_summed_log_probs(Q[b, t], C[b] @ W.t().to(C.dtype), log_w[b, t]) for b, t in positions.tolist()]
    return log_p.index_put(tuple(positions.t()), torch.stack(plain).to(log_p.dtype)) if plain else log_p


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, Q: Tensor, C: Tensor, W: Tensor, log_w: Tensor) -> tuple[Tensor, Tensor]:
        log_p, unreliable, factors = _sum_locations(Q, C, W, log_w)
        ctx.types = Q.dtype, log_w.dtype
        ctx.save_for_backward(C, W, *factors)
        ctx.mark_non_differentiable(unreliable)
        return log_p, unreliable

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """With g the gradient of log p and U = g / total, the gradient of log w_i is r_i = (w / Z)_i U exp(G_i)^T.

        log Z_i has the gradient -r_i. With c = r / Z

            dQ = g - exp(Q) * (c exp(G))         dG = exp(G) * ((w / Z)^T U - c^T exp(Q))
        """
        C, W, *factors = ctx.saved_tensors
        dQ, dC, dlog_w = [], [], []
        dW = torch.zeros_like(W, dtype=gradient.dtype)
        for chunk in _chunks(C, W):
            (exp_Q, G, Z, w_per_Z, location_sum), factors = factors[:5], factors[5:]
            g = gradient[chunk]
            quotients = g / (location_sum.to(g.dtype) + w_per_Z[..., :1]).clamp_(min=SMALLEST)
            U = quotients.to(G.dtype)
            r = w_per_Z * torch.cat([quotients.sum(-1, keepdim=True), torch.bmm(U, G.mT)], -1)
            dlog_w.append(r.to(ctx.types[1]))
            if not any(ctx.needs_input_grad[:3]):  # for the posterior
                continue
            c = r / Z
            minus_c = -c[..., 1:].to(G.dtype)
            dQ.append((torch.bmm(minus_c, G) - c[..., :1]).mul_(exp_Q).add_(g).to(ctx.types[0]))
            left, right = torch.cat([minus_c, w_per_Z[..., 1:].to(G.dtype)], 1), torch.cat([exp_Q, U], 1)
            dG = torch.bmm(left.mT, right).mul_(G).flatten(0, 1)
            dC.append((dG @ W).unflatten(0, G.shape[:2]))
            dW += dG.t() @ C[chunk].flatten(0, 1)
        gradients = (torch.cat(dQ), torch.cat(dC), dW.to(W.dtype)) if dQ else (None, None, None)
        return *gradients, torch.cat(dlog_w)
