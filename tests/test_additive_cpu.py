"""The C kernels of the additive score for each kind of processor: error, range, gradients, threads and compiler."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from helpers import quick_if

from captioning.kernels import additive_cpu
from captioning.kernels.additive_cpu import load_library
from captioning.kernels.deferred import defer_gradient, take_first
from captioning.kernels.products import additive_logits, plain_additive_logits

# In bfloat16 the largest error of the rational function of 5/4 degrees that these kernels replaced; in float32, where
# that of 13/6 had 2.9e-7 at most, a little more.
TANH_ERROR = {torch.float32: 4e-7, torch.bfloat16: 1.8e-4}

# The reciprocal of AVX2 is within 1.5 * 2^-12 on an Intel processor, and closer on an AMD one. The square of that error
# remains after the Newton step, and tanh has it twice: 2.7e-7, with the rounding 4.3e-7.
TANH_ERROR_OF_AVX2 = 5e-7

PROCESSORS = {"native": "", "avx512": " -march=x86-64-v4", "avx2": " -march=x86-64-v3", "sse2": " -march=x86-64"}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])

needs_compiler = pytest.mark.skipif(not additive_cpu.supports(torch.zeros(1)), reason="needs a C compiler")


@pytest.fixture(scope="module", params=[quick_if(name in ("native", "sse2"), name) for name in PROCESSORS])
def processor(request, tmp_path_factory):
    """Kernels for this processor, for x86 processors of three levels."""
    levels = {"avx512": "avx512_f", "avx2": "avx2", "sse2": "sse4_1"}
    if request.param != "native" and not torch.cpu.get_capabilities().get(levels[request.param]):
        pytest.skip("needs a processor that runs such code")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", os.environ.get("CC", "cc") + PROCESSORS[request.param])
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp(request.param)))
        load_library.cache_clear()
        if not additive_cpu.supports(torch.zeros(1)):
            pytest.skip("needs a C compiler that knows the processor")
        yield request.param
    load_library.cache_clear()


@DTYPES
def test_the_error_of_tanh_is_below_its_bound(processor, dtype):
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    P = numbers[numbers.isfinite()] if dtype == torch.bfloat16 else torch.linspace(-34, 34, 100_003)
    q = torch.cat([torch.linspace(-30, 30, 101), torch.tensor([-1e-3, 0.0, 1e-3])])
    tanh = additive_cpu.forward(P.view(1, -1, 1), q.view(1, -1, 1), torch.ones(1))[0]
    allowed = max(TANH_ERROR[dtype], TANH_ERROR_OF_AVX2 if processor in ("native", "avx2") else 0)
    assert (tanh - torch.tanh(P.double() + q.double().unsqueeze(1))).abs().max() < allowed


@DTYPES
def test_numbers_of_any_size_give_the_formulas_score(processor, dtype):
    """Also where e^2P or e^2q alone leaves a float's range: P = 44 and q = -43 make tanh(1)."""
    ends = torch.tensor([0.0, 30, 30.25, 33, 34, 35, 43, 44, 45, 60, 100, 1e4, 1e38])
    ends = torch.cat([ends, -ends]).to(dtype).float()
    P, q = (ends.view(1, -1, 1).clone().requires_grad_() for _ in range(2))
    v = torch.ones(1, requires_grad=True)
    e = additive_logits(P.to(dtype), q, v)
    e.sum().backward()
    exact = torch.tanh(ends.double() + ends.double().unsqueeze(1))
    torch.testing.assert_close(e[0].double(), exact, atol=TANH_ERROR[dtype], rtol=0)
    assert all(x.isfinite().all() for x in (P.grad, q.grad, v.grad))


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@DTYPES
@pytest.mark.parametrize(("A", "L", "size"), [(1, 1, 1), (7, 9, 1), (64, 4, 1), (150, 6, 1), (70, 9, 30)])
def test_score_and_gradients_equal_the_formula(processor, A, L, size, dtype, threads):
    P, q, v = (2 * size * torch.randn(3, L, A)).to(dtype).requires_grad_(), torch.randn(3, 2, A), torch.randn(A)
    q[1:, 0] *= size  # only some images have large queries
    q, v = q.to(dtype).requires_grad_(), v.requires_grad_()
    P_, q_, v_ = (x.detach().double().requires_grad_() for x in (P, q, v))
    e, e_ = additive_logits(P, q, v), plain_additive_logits(P_, q_, v_)
    assert e.dtype == torch.float32 and e.grad_fn.name() == "_AdditiveLogitsBackward"
    g = torch.randn(3, 2, L)
    e.backward(g)
    e_.backward(g.double())
    error, rounding = TANH_ERROR[dtype], 2**-8 if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(e.double(), e_, atol=A * error, rtol=0)
    torch.testing.assert_close(v.grad.double(), v_.grad, atol=50 * L * error, rtol=0)
    torch.testing.assert_close(q.grad.double(), q_.grad, atol=50 * L * error, rtol=rounding)
    torch.testing.assert_close(P.grad.double(), P_.grad, atol=50 * error * (1 if size == 1 else L), rtol=rounding)


@DTYPES
@pytest.mark.parametrize("A", [7, 16, 70])
def test_gradients_equal_the_formulas_where_images_have_ended(processor, A, dtype):
    steps = [(torch.randn(n, 2, A, requires_grad=True), torch.randn(n, 2, 9)) for n in (3, 3, 2, 1)]
    P, v = torch.randn(3, 9, A).to(dtype).requires_grad_(), torch.randn(A)
    projections = defer_gradient(P)
    sum((additive_logits(take_first(projections, len(q)), q, v) * g).sum() for q, g in steps).backward()
    plain, queries = P.detach().double().requires_grad_(), [q.detach().double().requires_grad_() for q, _ in steps]
    total = 0.0
    for q, (_, g) in zip(queries, steps, strict=True):
        total = total + (plain_additive_logits(plain[: len(q)], q, v.double()) * g.double()).sum()
    total.backward()
    tolerance = 2e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(P.grad.double(), plain.grad, atol=tolerance, rtol=tolerance)
    for (q, _), exact in zip(steps, queries, strict=True):
        torch.testing.assert_close(q.grad.double(), exact.grad, atol=tolerance, rtol=tolerance)


@DTYPES
@pytest.mark.parametrize("width", [3, 16, 40])  # less than a vector, one, and several with a rest
def test_nan_stays_nan(processor, width, dtype):
    """So that a run that diverges shows it, also on the fast path."""
    for position in range(2):
        P, q = torch.randn(1, 5, width).to(dtype), torch.randn(1, 1, width)
        (P[0, 3], q[0, 0])[position][width // 2] = float("nan")
        e = additive_logits(P, q, torch.randn(width))[0, 0]
        assert e[3].isnan() and e.isnan().sum() == (1, 5)[position]


# The compiler and the threads


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_library.cache_clear()
    yield tmp_path / "captioning"
    load_library.cache_clear()


@pytest.mark.parametrize("reason", ["no-such-compiler", "disk full"])
def test_without_a_compiler_the_formula_is_used_and_the_reason_logged_once(
    reason, own_cache, tmp_path, monkeypatch, caplog
):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'disk full' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken) if reason == "disk full" else reason)
    with caplog.at_level(logging.WARNING):
        P, q, v = torch.randn(3, 9, 6), torch.randn(3, 2, 6), torch.randn(6)
        for _ in range(2):
            torch.testing.assert_close(additive_logits(P, q, v), plain_additive_logits(P, q, v))
    assert len(caplog.records) == 1 and reason in caplog.text
    assert not list(own_cache.iterdir())  # nothing half-built is left


@needs_compiler
def test_the_library_is_compiled_once_and_keeps_subnormal_numbers(own_cache):
    assert additive_cpu.supports(torch.zeros(1))
    (compiled,) = own_cache.iterdir()
    written = compiled.stat().st_mtime_ns
    load_library.cache_clear()
    assert additive_cpu.supports(torch.zeros(1)) and compiled.stat().st_mtime_ns == written
    assert torch.tensor(1e-310, dtype=torch.float64) / 2 > 0  # fast-math of a linked library would round it to 0


FEWER_THREADS = """
import torch
from captioning.kernels import additive_cpu
from captioning.kernels.products import additive_logits, plain_additive_logits

torch.set_num_threads(2)
assert additive_cpu.supports(torch.zeros(1))
gradients, tensors = [], (torch.randn(8, 5, 6), torch.randn(8, 2, 6), torch.randn(6))
for score in (additive_logits, plain_additive_logits):
    inputs = [x.clone().requires_grad_() for x in tensors]
    score(*inputs).sum().backward()
    gradients.append([x.grad for x in inputs])
torch.testing.assert_close(*gradients)
"""


@needs_compiler
@pytest.mark.parametrize("limit", ["OMP_THREAD_LIMIT=1", pytest.param("OMP_DYNAMIC=true", marks=pytest.mark.slow)])
def test_the_result_is_complete_with_fewer_threads_than_requested(limit):
    name, value = limit.split("=")
    environment = {key: setting for key, setting in os.environ.items() if key != "OMP_NUM_THREADS"} | {name: value}
    subprocess.run([sys.executable, "-c", FEWER_THREADS], env=environment, check=True)
