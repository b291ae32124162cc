"""The kernels of the additive score beside those of an earlier version: each alone, and in a training step."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from benchmarks.models import Data
from benchmarks.report import Report, Row
from benchmarks.timing import interleave
from benchmarks.training import PRECISIONS, cases, our_step
from benchmarks.work import Sizes
from captioning.errors import InputError
from captioning.kernels import additive, additive_cpu

_KERNELS = Path("captioning", "kernels")


def measure(*, earlier: Path, quick: bool, rounds: int) -> Report:
    """Time both versions in turn, on a CPU.

    Args:
        earlier: a checkout of the other version.

    Raises:
        InputError: there are no kernels in ``earlier``.
    """
    before = _kernels_of(earlier)
    sizes = cases(quick)["512"].sizes
    report = Report()
    for precision, dtype in PRECISIONS.items():
        for rows in (1, 2):
            now, then = _parts(additive_cpu, sizes, dtype, rows), _parts(before, sizes, dtype, rows)
            for part in now:
                timings = _in_turn(now[part], then[part], rounds)
                name = f"additive_{part}_{'one_row' if rows == 1 else 'two_rows'}_{precision}"
                report.rows.append(Row(name, f"{precision}, rows of a caption: {rows}; {sizes}", **timings))
        cpu = torch.device("cpu")
        step = partial(our_step(sizes, cpu, precision=dtype), Data.make(sizes, cpu).batch())
        timings = _in_turn(step, partial(_with_kernels, before, step), rounds)
        report.rows.append(Row(f"train_step_512_{precision}", f"soft attention, {precision}; {sizes}", **timings))
    return report


def _in_turn(now: Callable[[], Any], then: Callable[[], Any], rounds: int) -> dict[str, Any]:
    timings = interleave({"now": now, "then": then}, rounds=rounds, device=torch.device("cpu"), warm_up=2)
    return {"ours": timings["now"], "earlier": timings["then"]}


def _kernels_of(checkout: Path) -> ModuleType:
    """Return that version's ``additive_cpu``, with the C code that belongs to it."""
    kernels = _module("earlier_additive_cpu", checkout / _KERNELS / "additive_cpu.py")
    kernels.native = _module("earlier_native", checkout / _KERNELS / "native" / "__init__.py")  # type: ignore[attr-defined]
    return kernels


def _module(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"--earlier: {path} does not exist; give a checkout of an earlier version")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _with_kernels(kernels: ModuleType, step: Callable[[], Any]) -> None:
    with mock.patch.object(additive, "additive_cpu", kernels):
        step()


def _parts(kernels: ModuleType, sizes: Sizes, dtype: torch.dtype, rows: int) -> dict[str, Callable[[], Any]]:
    """Return what a training step computes of the score: e of all steps, their gradients of q and v, and that of P."""
    torch.manual_seed(3)
    B, L, A, T = sizes.images, sizes.locations, sizes.attention_dim, max(sizes.lengths)
    P, v = torch.randn(B, L, A).to(dtype), torch.randn(A) / A**0.5
    queries = tuple(torch.randn(B, rows, A) for _ in range(T))
    gradients = tuple(torch.randn(B, rows, L) for _ in range(T))
    return {
        "forward": lambda: [kernels.forward(P, q, v) for q in queries],
        "backward": lambda: [kernels.backward(P, q, v, g) for q, g in zip(queries, gradients, strict=True)],
        "backward_projected": lambda: kernels.backward_projected(P, queries, v, gradients),
    }
