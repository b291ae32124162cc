"""The C kernels where they cannot be compiled, with several threads, and on numbers that are none."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch

from captioning.kernels import native
from captioning.kernels.additive import additive_logits, plain_additive_logits

B, R, L = 3, 2, 9

needs_compiler = pytest.mark.skipif(not native.usable(torch.zeros(1)), reason="needs a C compiler")


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    yield tmp_path / "captioning"
    native.library.cache_clear()


def test_without_a_compiler_the_formula_is_used_and_the_reason_logged_once(own_cache, monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        P, q, v = torch.randn(B, L, 6), torch.randn(B, R, 6), torch.randn(6)
        first, second = additive_logits(P, q, v), additive_logits(P, q, v)
    torch.testing.assert_close(first, plain_additive_logits(P, q, v))
    torch.testing.assert_close(first, second)
    assert len(caplog.records) == 1 and "no-such-compiler" in caplog.text


def test_a_compiler_that_fails_is_quoted(own_cache, tmp_path, monkeypatch, caplog):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'disk full' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with caplog.at_level(logging.WARNING):
        assert not native.usable(torch.zeros(1))
    assert "disk full" in caplog.text
    assert not list(own_cache.iterdir())  # nothing half-built is left


@needs_compiler
def test_the_library_is_compiled_once_for_all_processes(own_cache, monkeypatch):
    assert native.usable(torch.zeros(1))
    (library,) = own_cache.iterdir()
    written = library.stat().st_mtime_ns
    native.library.cache_clear()
    assert native.usable(torch.zeros(1)) and library.stat().st_mtime_ns == written


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 16, 40])  # less than a vector, one, and several with a rest
def test_nan_stays_nan(width, dtype):
    """So that a run that diverges shows it, also on the fast path."""
    for place in range(2):
        P, q = torch.randn(1, 5, width).to(dtype), torch.randn(1, 1, width)
        (P[0, 3], q[0, 0])[place][width // 2] = float("nan")
        e = additive_logits(P, q, torch.randn(width))[0, 0]
        assert e[3].isnan() and e.isnan().sum() == (1, 5)[place]


FEWER_THREADS = """
import torch
from captioning.kernels import native
from captioning.kernels.additive import additive_logits, plain_additive_logits

torch.set_num_threads(2)
assert native.usable(torch.zeros(1)) and native.threads() == 2
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
