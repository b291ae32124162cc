"""The precision of a run follows what PyTorch says of the device."""

import pytest
import torch

from captioning.precision import best_precision


@pytest.mark.parametrize(
    ("capabilities", "precision"),
    [
        (["avx2"], "32-true"),
        (["avx2", "avx512"], "32-true"),
        (["avx2", "avx512_bf16"], "bf16-mixed"),
        (["amx_bf16"], "bf16-mixed"),
        (["neon", "bf16"], "bf16-mixed"),
    ],
)
def test_bfloat16_is_used_on_processors_with_bfloat16_products(monkeypatch, capabilities, precision):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(capabilities, True))
    assert best_precision("cpu") == precision


@pytest.mark.parametrize(("has_products", "precision"), [(True, "bf16-mixed"), (False, "16-mixed")])
def test_a_gpu_is_used_in_sixteen_bits(monkeypatch, has_products, precision):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_products)
    assert {best_precision(accelerator) for accelerator in ("auto", "gpu", "cuda")} == {precision}
