"""The linear layer of a step: fast for the few rows of a search, with one weight gradient for a whole recurrence."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from captioning.kernels.deferred import Use, deferred_product, deferred_uses


class Linear(nn.Linear):
    """``nn.Linear`` for layers that every step runs.

    Attributes:
        step_weight: Returns the weight that all steps of a recurrence share; None outside of ``kernels.recurrence``.
    """

    step_weight: Callable[[], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return (.., out) for x (.., in)."""
        return linear(x, self.weight if self.step_weight is None else self.step_weight(), self.bias)

    def forward_float32(self, x: Tensor) -> Tensor:
        """Return (.., out) in at least float32, also under autocast, for logits that a search ranks.

        bfloat16 has 8 significant bits: the best two of thousands of logits are often equal, and their order in a
        search would be arbitrary.
        """
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return linear(x.to(dtype), self.weight.to(dtype), self.bias.to(dtype))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b for x (.., in), W (out, in), b (out,), as ``torch.nn.functional.linear`` does."""
    if deferred_uses(weight) is not None:
        rows = x.to(weight.dtype).flatten(0, -2)  # (N, in)
        y = deferred_product(rows, weight, _product, torch.matmul, _weight_gradient)  # (N, out)
    elif _is_few(x, weight):
        y = _product(x.flatten(0, -2), weight)  # (N, out)
    else:
        return nn.functional.linear(x, weight, bias)
    y = y.unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias.to(y.dtype)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return (weight @ x.t()).t().contiguous() if _is_few(x, weight) else nn.functional.linear(x, weight)


def _weight_gradient(weight: Tensor, uses: list[Use]) -> Tensor:
    inputs, gradients = zip(*uses, strict=True)
    return torch.cat(gradients).t() @ torch.cat(inputs)


def _is_few(x: Tensor, weight: Tensor) -> bool:
    """Return whether x has so few rows, such as the beams of an image, that a CPU computes (W x^T)^T faster.

    Also in training: ``deferred_product`` runs without autograd, and few rows remain when most captions have ended.
    """
    return (
        not torch.is_grad_enabled()
        and x.is_cpu
        and x.dtype is weight.dtype is torch.float32
        and 2 <= x.shape[:-1].numel() <= 8
        and not torch.is_autocast_enabled("cpu")
    )
