"""The C kernels against the formulas they replace, and the fallback if they cannot be compiled."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers_faults import Fault, faults, proves

from captioning.files import cache_folder
from captioning.kernels import native
from captioning.kernels.additive import additive_logits, plain_additive_logits
from captioning.kernels.cross_entropy import plain_step_nll, step_nll
from captioning.kernels.lstm import lstm_cell, plain_lstm_cell

B, R, L, N, H = 3, 2, 9, 5, 19

needs_compiler = pytest.mark.skipif(not native.usable(torch.zeros(1)), reason="needs a C compiler")


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.03}


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_lstm_cell_and_its_gradients_equal_the_formula(dtype, threads, monkeypatch):
    monkeypatch.setattr(native, "threads", lambda: threads)
    every_step = torch.randn(N, 3, 4 * H).to(dtype)
    parts = [every_step[:, 1], torch.randn(N, 4 * H).to(dtype), torch.randn(N, 4 * H).to(dtype)]
    fused = [part.detach().requires_grad_() for part in parts]
    assert not fused[0].is_contiguous()  # a step's part of all embedded words
    plain = [part.float().detach().requires_grad_() for part in parts]
    c, c_ = (torch.linspace(-2, 2, N * H).view(N, H).requires_grad_() for _ in range(2))
    (h, c_new), (h_, c_new_) = lstm_cell(*fused, c), plain_lstm_cell(*plain, c_)
    assert h.dtype == dtype and c_new.dtype == torch.float32
    torch.testing.assert_close(h.float(), h_, **tolerance(dtype))
    torch.testing.assert_close(c_new, c_new_, **tolerance(torch.float32))
    for_h, for_c = torch.randn(N, H), torch.randn(N, H)
    torch.autograd.backward([h, c_new], [for_h.to(dtype), for_c])
    torch.autograd.backward([h_, c_new_], [for_h, for_c])
    for one, other in zip([*fused, c], [*plain, c_], strict=True):
        torch.testing.assert_close(one.grad.float(), other.grad, **tolerance(dtype))


@pytest.mark.parametrize("compiler", ["no-such-compiler", "an 'unclosed quote"])
def test_without_a_compiler_the_formula_is_used_and_the_reason_logged_once(tmp_path, monkeypatch, caplog, compiler):
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native._library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            P, q, v = torch.randn(B, L, 6), torch.randn(B, R, 6), torch.randn(6)
            first, second = additive_logits(P, q, v), additive_logits(P, q, v)
        torch.testing.assert_close(first, plain_additive_logits(P, q, v))
        torch.testing.assert_close(first, second)
        assert len(caplog.records) == 1 and compiler in caplog.text
    finally:
        native._library.cache_clear()


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch, caplog):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'disk full' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native._library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert not native.usable(torch.zeros(1))
        assert "disk full" in caplog.text
        assert not list((tmp_path / "captioning").iterdir())  # nothing half-built is left
    finally:
        native._library.cache_clear()


def cut_in_half(library: Path) -> None:
    os.truncate(library, library.stat().st_size // 2)


def of_another_build(library: Path) -> None:
    """What was compiled from other sources, sound in itself, and copied here under its checksum."""
    content = library.read_bytes() + b"other"
    library.unlink()
    checksum = native._name("another", content).rpartition("-")[2]
    library.with_name(f"{library.name.rpartition('-')[0]}-{checksum}").write_bytes(content)


@needs_compiler
@faults(
    {
        Fault(
            "a compiled kernel library cut in half", "is compiled again", 0, "the run: on a new library"
        ): cut_in_half,
        Fault(
            "a kernel library of another build under this one's name",
            "is compiled again",
            0,
            "the run: on a new library",
        ): of_another_build,
    }
)
def test_a_damaged_library_is_compiled_again_and_never_loaded(tmp_path, monkeypatch, caplog, fault, case):
    """Calling into a library whose end is missing kills the process by SIGBUS."""
    sound = Path(native._library()._name)
    content = sound.read_bytes()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache_folder().mkdir()
    case(Path(shutil.copy(sound, cache_folder())))
    loaded, load = [], ctypes.CDLL
    monkeypatch.setattr(native.ctypes, "CDLL", lambda path: loaded.append(Path(path).read_bytes()) or load(path))
    monkeypatch.setattr(native, "_compile", lambda *_: Path(shutil.copy(sound, cache_folder())))
    native._library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert native.usable(torch.zeros(1)) and native.usable(torch.zeros(1))
    finally:
        native._library.cache_clear()
    assert loaded == [content]
    assert [file.name for file in cache_folder().iterdir()] == [sound.name]
    assert len(caplog.records) == 1 and fault.sees in caplog.text


@needs_compiler
@proves(Fault("a compiler whose library lacks a kernel", "no C kernels", 0, "the run: on PyTorch's operations"))
def test_a_library_without_a_kernel_is_not_used(tmp_path, monkeypatch, caplog, fault):
    sound = Path(native._library()._name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_compile", lambda *_: sound)
    monkeypatch.setattr(native, "_SIGNATURES", native._SIGNATURES | {"no_such_kernel": (1, 1)})
    native._library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert not native.usable(torch.zeros(1))
    finally:
        native._library.cache_clear()
    assert len(caplog.records) == 1 and fault.sees in caplog.text and "no_such_kernel" in caplog.text


@needs_compiler
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_cross_entropy_and_its_gradient_equal_the_formula(dtype, smoothing):
    M, V = 11, 133
    logits = (8 * torch.randn(M, V)).to(dtype)
    logits[0, 0], logits[1] = 300.0, -40.0  # certain, and even
    targets = torch.randint(V, (M,))
    fused, plain = logits.clone().requires_grad_(), logits.double().requires_grad_()
    nll, nll_ = step_nll(fused, targets, smoothing), plain_step_nll(plain, targets, smoothing)
    torch.testing.assert_close(nll.double(), nll_, atol=2e-5, rtol=2e-6)
    g = torch.rand(M)
    nll.backward(g)
    nll_.backward(g.double())
    bound = 2e-7 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(fused.grad.double(), plain.grad, atol=bound, rtol=8 * bound)


@needs_compiler
def test_a_word_outside_the_vocabulary_is_refused():
    for word in (-1, 5):
        with pytest.raises(IndexError, match="targets must be in"):
            step_nll(torch.randn(1, 5), torch.tensor([word]))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 16, 40])  # less than a vector, one, and several with a rest
def test_nan_stays_nan(width, dtype):
    """So that a run that diverges shows it, also on the fast path."""
    for gate in range(4):
        parts, c = [torch.randn(2, 4 * width).to(dtype) for _ in range(3)], torch.randn(2, width)
        parts[0][0, gate * width + 1] = float("nan")
        h, c_new = lstm_cell(*parts, c)
        assert h[0, 1].isnan() and h[1].isfinite().all() and c_new[1].isfinite().all()
    for place in range(2):
        P, q = torch.randn(1, 5, width).to(dtype), torch.randn(1, 1, width)
        (P[0, 3], q[0, 0])[place][width // 2] = float("nan")
        e = additive_logits(P, q, torch.randn(width))[0, 0]
        assert e[3].isnan() and e.isnan().sum() == (1, 5)[place]
    logits = torch.randn(2, width).to(dtype)
    logits[0, 2] = float("nan")
    nll = step_nll(logits, torch.tensor([1, 1]), 0.1)
    assert nll[0].isnan() and nll[1].isfinite()


@needs_compiler
def test_a_word_that_cannot_be_costs_nothing():
    logits = torch.randn(2, 40)
    logits[:, 7] = -math.inf
    targets = torch.tensor([1, 2])
    torch.testing.assert_close(step_nll(logits, targets), plain_step_nll(logits, targets))


FEWER_THREADS = """
import torch
from captioning.kernels import native
from captioning.kernels.additive import additive_logits, plain_additive_logits
from captioning.kernels.cross_entropy import plain_step_nll, step_nll

torch.set_num_threads(2)
assert native.usable(torch.zeros(1)) and native.threads() == 2
logits, targets = torch.randn(64, 50), torch.randint(50, (64,))
torch.testing.assert_close(step_nll(logits, targets), plain_step_nll(logits, targets))
P, q, v = torch.randn(8, 5, 6), torch.randn(8, 2, 6), torch.randn(6)
gradients = []
for score in (additive_logits, plain_additive_logits):
    inputs = [x.clone().requires_grad_() for x in (P, q, v)]
    score(*inputs).sum().backward()
    gradients.append([x.grad for x in inputs])
torch.testing.assert_close(*gradients)
"""


@needs_compiler
@pytest.mark.parametrize("limit", ["OMP_THREAD_LIMIT=1", "OMP_DYNAMIC=true"])
def test_fewer_threads_than_asked_for_do_all_of_the_work(limit):
    name, value = limit.split("=")
    environment = {key: setting for key, setting in os.environ.items() if key != "OMP_NUM_THREADS"} | {name: value}
    subprocess.run([sys.executable, "-c", FEWER_THREADS], env=environment, check=True)


def test_openmp_is_found_in_a_folder_whose_name_has_blanks(monkeypatch):
    addresses = native._openmp.__wrapped__()
    if addresses is None or not Path("/proc/self/maps").is_file():
        pytest.skip("PyTorch's OpenMP runtime is not found here")
    maps = Path("/proc/self/maps").read_text()
    asked = []
    load = native.ctypes.CDLL
    blank = maps.replace("/libgomp", "/a b/libgomp").replace("/libomp", "/a b/libomp")
    monkeypatch.setattr(Path, "read_text", lambda path: blank)
    monkeypatch.setattr(native.ctypes, "CDLL", lambda path: asked.append(path) or load(path.replace("/a b/", "/")))
    assert native._openmp.__wrapped__() == addresses
    assert asked and all(path.startswith("/") and "/a b/" in path for path in asked)


def test_memory_that_kernels_write_has_a_type_of_its_own():
    """The default may be another (Lightning's bf16-true), and what is written beyond a buffer's end need not show."""
    files = Path(native.__file__).parent.parent.glob("*.py")
    calls = [call for file in files for call in re.findall(r"torch\.(?:empty|zeros|tensor)\([^\n]*", file.read_text())]
    assert len(calls) > 10 and [call for call in calls if "dtype=" not in call] == []
