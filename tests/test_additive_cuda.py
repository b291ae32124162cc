"""The Triton kernels of the additive score against the formula: interpreted on a CPU, compiled where there is a GPU."""

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
from packaging.version import Version

from captioning.kernels import products
from captioning.kernels.deferred import defer_gradient
from captioning.kernels.products import additive_logits, plain_additive_logits

B, R, L = 3, 2, 9
GPU = torch.cuda.is_available()

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch) -> str:
    """Where the kernels run; conftest sets TRITON_INTERPRET where there is no GPU."""
    if request.param == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("the kernels are compiled for the GPU in this process, not interpreted")
        if Version(version("triton")) < Version("3.9"):
            pytest.skip("the interpreter of Triton before 3.9 makes numbers of arrays in a way that NumPy deprecates")
        monkeypatch.setattr(products, "_kernels", lambda projected: products._cuda_kernels())
    return request.param


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.03}


def inputs(A: int, dtype: torch.dtype, device: str, locations: int = L) -> tuple[torch.Tensor, ...]:
    return (
        (2 * torch.randn(B, locations, A)).to(device, dtype).requires_grad_(),
        torch.randn(B, R, A).to(device, dtype).requires_grad_(),
        torch.randn(A).to(device).requires_grad_(),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("A", "locations"), [(7, L), (150, L), (300, 40)])  # fewer and more than a tile, no multiples
def test_fused_additive_score_and_its_gradients_equal_the_formula(A, locations, dtype, device):
    fused = inputs(A, dtype, device, locations)
    plain = [x.detach().float().requires_grad_() for x in fused]
    e, e_ = additive_logits(*fused), plain_additive_logits(*plain)
    assert e.dtype == torch.float32 and e.grad_fn.name() == "_AdditiveLogitsBackward"
    torch.testing.assert_close(e, e_, atol=2e-5, rtol=1e-5)
    g = torch.randn(B, R, locations, device=device)
    e.backward(g)
    e_.backward(g)
    for one, other in zip(fused, plain, strict=True):
        assert one.grad.dtype == one.dtype
        torch.testing.assert_close(one.grad.float(), other.grad, **tolerance(one.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_of_shared_projections_is_the_sum_over_steps(dtype, device):
    P, v = inputs(70, dtype, device)[0], torch.randn(70, device=device)
    steps = [(torch.randn(B, R, 70, device=device), torch.randn(B, R, L, device=device)) for _ in range(4)]
    shared, plain = defer_gradient(P), P.detach().float().requires_grad_()
    sum((additive_logits(shared, q, v) * g).sum() for q, g in steps).backward()
    sum((plain_additive_logits(plain, q, v) * g).sum() for q, g in steps).backward()
    torch.testing.assert_close(P.grad.float(), plain.grad, **tolerance(dtype))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # infinity is what the kernel counts on
def test_tanh_of_large_numbers_stays_within_one_and_nan_stays_nan(device):
    P = torch.tensor([-1e4, -20.0, 0.0, 20.0, 1e4, float("nan")], device=device).view(1, 6, 1)
    e = additive_logits(P, torch.zeros(1, 1, 1, device=device), torch.ones(1, device=device))
    expected = torch.tensor([-1.0, -1, 0, 1, 1, float("nan")], device=device)
    torch.testing.assert_close(e.flatten(), expected, atol=1e-6, rtol=0, equal_nan=True)


@pytest.mark.gpu
def test_a_gpu_takes_the_kernels_and_repeats_their_gradients_exactly():
    P, q, v = inputs(150, torch.bfloat16, "cuda", 196)
    g = torch.randn(B, R, 196, device="cuda")
    first, second = (torch.autograd.grad(additive_logits(P, q, v), (P, q, v), g) for _ in range(2))
    assert products._kernels(P) is products._cuda_kernels()
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_memory_does_not_grow_with_steps_times_locations_times_units():
    P, q, v = inputs(512, torch.bfloat16, "cuda", 196)
    additive_logits(P, q, v).sum().backward()  # compiles
    torch.cuda.reset_peak_memory_stats()
    before, shared = torch.cuda.memory_allocated(), defer_gradient(P)
    sum(additive_logits(shared, q, v).sum() for _ in range(20)).backward()
    hidden = B * R * 196 * 512 * 4
    assert torch.cuda.max_memory_allocated() - before < 2 * hidden


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from captioning.kernels import additive_cuda

capability, dtype = int(sys.argv[1]), sys.argv[2]
types = {"P": dtype, "q": dtype, "dq": dtype, "dP": dtype, "v": "fp32", "e": "fp32", "g": "fp32", "dv": "fp32"}
constants = {"A": 150, "LOCATIONS": 16, "UNITS": 64}
for kernel in (additive_cuda._forward, additive_cuda._backward, additive_cuda._backward_projected):
    names = kernel.arg_names
    signature = {name: "*" + types[name] if name in types else "i32" for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    target = GPUTarget("cuda", capability, 32)
    assert "atom" not in triton.compile(source, target=target, options={"enable_fp_fusion": True}).asm["ptx"]
"""


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype"), [(80, "bf16"), (90, "fp32"), (100, "fp16")])
def test_kernels_compile_for_gpus_without_atomic_operations(capability, dtype, tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COMPILE, str(capability), dtype], env=environment, check=True)
