"""The linear layer of a step is PyTorch's, whatever the rows, types and strides."""

import pytest
import torch

from captioning.linear import Linear

IN, OUT = 20, 37


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (8,), (9,), (3, 2)])
def test_any_number_of_rows_gives_the_linear_layer(shape, dtype):
    for bias in (True, False):
        ours, x = Linear(IN, OUT, bias=bias).to(dtype), torch.randn(IN, *shape, dtype=dtype).movedim(0, -1)
        y = ours(x)
        assert y.is_contiguous() and y.dtype == dtype
        torch.testing.assert_close(y, torch.nn.functional.linear(x, ours.weight, ours.bias))


def test_gradients_and_autocast_are_pytorchs():
    layer, x = Linear(IN, OUT), torch.randn(3, IN)
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(OUT, IN))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert layer.forward_float32(x.bfloat16()).dtype == torch.float32
