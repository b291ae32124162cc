"""The C kernels of the additive score for each kind of processor: their error, their range, and their gradients."""

from __future__ import annotations

import os

import pytest
import torch

from captioning.kernels import additive_cpu, native
from captioning.kernels.additive import additive_logits, plain_additive_logits
from captioning.kernels.unroll import collected, leading

# In bfloat16 the largest error of the rational function of 5/4 degrees that these kernels replaced; in float32, where
# that of 13/6 had 2.9e-7 at most, a little more.
TANH_ERROR = {torch.float32: 4e-7, torch.bfloat16: 1.8e-4}

# The reciprocal of AVX2 is within 1.5 * 2^-12 on an Intel processor, and closer on an AMD one. The square of that error
# remains after the Newton step, and tanh has it twice: 2.7e-7, with the rounding 4.3e-7.
TANH_ERROR_OF_AVX2 = 5e-7


PROCESSORS = {"native": "", "avx512": " -march=x86-64-v4", "avx2": " -march=x86-64-v3", "sse2": " -march=x86-64"}


@pytest.fixture(scope="module", params=PROCESSORS)
def processor(request, tmp_path_factory):
    """Kernels for this processor, for x86 processors of three levels."""
    levels = {"avx512": "avx512_f", "avx2": "avx2", "sse2": "sse4_1"}
    if request.param != "native" and not torch.cpu.get_capabilities().get(levels[request.param]):
        pytest.skip("needs a processor that runs such code")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", os.environ.get("CC", "cc") + PROCESSORS[request.param])
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp(request.param)))
        native.library.cache_clear()
        if not native.usable(torch.zeros(1)):
            pytest.skip("needs a C compiler that knows the processor")
        yield request.param
    native.library.cache_clear()


def kernel_tanh(P: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The kernels' approximation of tanh(P + q), (len(q), len(P))."""
    return additive_cpu.forward(P.view(1, -1, 1), q.view(1, -1, 1), torch.ones(1))[0]


def every_bfloat16() -> torch.Tensor:
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    return numbers[numbers.isfinite()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tanh_is_about_as_exact_as_the_rational_functions_before(processor, dtype, request):
    P = every_bfloat16() if dtype == torch.bfloat16 else torch.linspace(-34, 34, 100_003)
    q = torch.cat([torch.linspace(-30, 30, 101), torch.tensor([-1e-3, 0.0, 1e-3])])
    exact = torch.tanh(P.double() + q.double().unsqueeze(1))
    allowed = TANH_ERROR[dtype]
    if request.node.callspec.params["processor"] in ("native", "avx2"):
        allowed = max(allowed, TANH_ERROR_OF_AVX2)
    assert (kernel_tanh(P, q) - exact).abs().max() < allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_numbers_of_opposite_signs_cancel_out(processor, dtype):
    P = torch.tensor([-33.0, -30, 30, 33])
    torch.testing.assert_close(
        kernel_tanh(P.to(dtype), -P + 0.25), torch.tanh(P - P.unsqueeze(1) + 0.25), atol=TANH_ERROR[dtype], rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_any_size_give_the_formulas_score(processor, dtype):
    """Also where e^2P or e^2q alone leaves a float's range: P = 44 and q = -43 make tanh(1)."""
    ends = torch.tensor([0.0, 33, 34, 35, 43, 44, 45, 60, 100, 1e4, 1e38])
    ends = torch.cat([ends, -ends]).to(dtype).float()
    P, q = (ends.view(1, -1, 1).clone().requires_grad_() for _ in range(2))
    v = torch.ones(1, requires_grad=True)
    e = additive_logits(P.to(dtype), q, v)
    e.sum().backward()
    exact = torch.tanh(ends.double() + ends.double().unsqueeze(1))
    torch.testing.assert_close(e[0].double(), exact, atol=TANH_ERROR[dtype], rtol=0)
    assert all(x.isfinite().all() for x in (P.grad, q.grad, v.grad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_large_numbers_are_the_formulas(processor, dtype):
    P = (30 * torch.randn(3, 9, 70)).to(dtype).requires_grad_()
    q, v = torch.cat([30 * torch.randn(3, 1, 70), torch.randn(3, 1, 70)], dim=1), torch.randn(70)
    q[0] /= 30  # only some images have large queries
    inputs = [P, q.requires_grad_(), v.requires_grad_()]
    plain = [x.detach().double().requires_grad_() for x in inputs]
    g = torch.randn(3, 2, 9)
    gradients = torch.autograd.grad(additive_logits(*inputs), inputs, g)
    expected = torch.autograd.grad(plain_additive_logits(*plain), plain, g.double())
    for gradient, exact in zip(gradients, expected, strict=True):
        rounding = 2**-8 if gradient.dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(gradient.double(), exact, atol=450 * TANH_ERROR[dtype], rtol=rounding)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("A", "L"), [(1, 1), (7, 9), (64, 4), (150, 6)])
def test_score_and_gradients_equal_the_formula(processor, A, L, dtype, threads, monkeypatch):
    monkeypatch.setattr(native, "threads", lambda: threads)
    P = (2 * torch.randn(3, L, A)).to(dtype).requires_grad_()
    q, v = torch.randn(3, 2, A).to(dtype).requires_grad_(), torch.randn(A, requires_grad=True)
    P_, q_, v_ = (x.detach().double().requires_grad_() for x in (P, q, v))
    e, e_ = additive_logits(P, q, v), plain_additive_logits(P_, q_, v_)
    assert e.dtype == torch.float32 and e.grad_fn.name() == "_AdditiveLogitsBackward"
    g = torch.randn(3, 2, L)
    e.backward(g)
    e_.backward(g.double())
    error = TANH_ERROR[dtype]
    torch.testing.assert_close(e.double(), e_, atol=A * error, rtol=0)
    rounding = 2**-8 if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(v.grad.double(), v_.grad, atol=50 * L * error, rtol=0)
    torch.testing.assert_close(q.grad.double(), q_.grad, atol=50 * L * error, rtol=rounding)
    torch.testing.assert_close(P.grad.double(), P_.grad, atol=50 * error, rtol=rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collected_gradient_of_projections_is_the_sum_over_steps(processor, dtype):
    P = torch.randn(3, 9, 70).to(dtype).requires_grad_()
    v, steps = torch.randn(70), [(torch.randn(3, 2, 70), torch.randn(3, 2, 9)) for _ in range(4)]
    projections = collected(P)
    sum((additive_logits(projections, q, v) * g).sum() for q, g in steps).backward()
    plain = P.detach().float().requires_grad_()
    sum((plain_additive_logits(plain, q, v) * g).sum() for q, g in steps).backward()
    tolerance = 2e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(P.grad.float(), plain.grad, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("A", [7, 16])
def test_steps_of_the_first_images_get_the_formulas_gradients(processor, A, dtype):
    P, v, counts = torch.randn(4, 3, 9, A), torch.randn(A), (3, 3, 2, 1)
    steps = [(torch.randn(n, 2, A, requires_grad=True), torch.randn(n, 2, 9)) for n in counts]
    P = P[0].to(dtype).requires_grad_()
    projections = collected(P)
    sum((additive_logits(leading(projections, len(q)), q, v) * g).sum() for q, g in steps).backward()
    plain, queries = P.detach().double().requires_grad_(), [q.detach().double().requires_grad_() for q, _ in steps]
    total = 0.0
    for q, (_, g) in zip(queries, steps, strict=True):
        total = total + (plain_additive_logits(plain[: len(q)], q, v.double()) * g.double()).sum()
    total.backward()
    tolerance = 2e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(P.grad.double(), plain.grad, atol=tolerance, rtol=tolerance)
    for (q, _), exact in zip(steps, queries, strict=True):
        torch.testing.assert_close(q.grad.double(), exact.grad, atol=tolerance, rtol=tolerance)
