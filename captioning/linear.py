"""The linear layer of a step, with one weight gradient for a whole recurrence."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from captioning.kernels.deferred import Use, deferred_product, deferred_uses


class Linear(nn.Linear):
    """``nn.Linear`` for layers that every step runs."""

    step_weight: Callable[[], Tensor] | None = None  # within ``kernels.recurrence``, the weight that all steps share

    def forward(self, x: Tensor) -> Tensor:
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
        flat_x = x.to(weight.dtype).flatten(0, -2)  # (N, in)
        y = deferred_product(flat_x, weight, nn.functional.linear, torch.matmul, _weight_gradient)  # (N, out)
        y = y.unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias.to(y.dtype)
    return nn.functional.linear(x, weight, bias)


def _weight_gradient(weight: Tensor, uses: list[Use]) -> Tensor:
    inputs, gradients = zip(*uses, strict=True)
    return torch.cat(gradients).t() @ torch.cat(inputs)
