"""Batch norm that processes share, in one process: the numbers of PyTorch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from captioning.encoders import TimmEncoder
from captioning.training.processes import BatchNormSync, SharedBatchNorm


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shared_batch_norm_equals_pytorchs_in_every_precision(dtype):
    x = (3 + 2 * torch.randn(6, 5, 4, 4)).to(dtype)
    kept = torch.promote_types(dtype, torch.float32)  # the layer's own numbers
    plain = nn.BatchNorm2d(5, dtype=kept)
    model = BatchNormSync().apply(nn.Sequential(nn.BatchNorm2d(5, dtype=kept))).to(kept)
    assert isinstance(model[0], SharedBatchNorm)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    weights = torch.randn_like(x)
    outputs = [layer(given) for layer, given in zip((plain, model), inputs, strict=True)]
    for output in outputs:
        (output * weights).sum().backward()
    assert outputs[1].dtype == dtype
    tolerance = {"atol": 2e-6, "rtol": 2e-5} if dtype != torch.bfloat16 else {"atol": 0.03, "rtol": 0.03}
    torch.testing.assert_close(outputs[1], outputs[0], **tolerance)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, **tolerance)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model[0].state_dict()[name], value, atol=1e-5, rtol=1e-5)


class WithActivation(nn.BatchNorm2d):
    """As timm's: the activation is in it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def test_a_batch_norm_that_does_more_stays_what_it_is():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), WithActivation(4), nn.BatchNorm2d(4)).eval()
    x = torch.randn(2, 3, 5, 5)
    expected = model(x)
    shared = BatchNormSync().apply(model)
    assert torch.equal(shared(x), expected)
    assert type(shared[1]) is WithActivation and type(shared[2]) is SharedBatchNorm


def test_a_timm_encoder_sees_the_same_with_several_processes():
    pytest.importorskip("timm")
    encoder = TimmEncoder("mobilenetv1_100", 3, weights=None, image_size=64, crop=False)
    images = torch.randn(2, 3, 64, 64)
    expected = encoder(images)
    assert torch.equal(BatchNormSync().apply(encoder)(images), expected)
