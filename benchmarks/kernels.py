"""Two kernels beside their plain formulas: forward and backward, in the sizes of a training batch with two steps."""

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.agreement import KernelSizes, kernels, result_and_gradients
from benchmarks.report import Report, Row
from benchmarks.timing import Setup, interleave
from benchmarks.training import PRECISIONS

_BATCH = KernelSizes(B=64, R=1, T=2, L=196, A=512, E=512, V=2539)  # the formulas have no memory for more


def measure(setup: Setup) -> Report:
    """Time every kernel, which is Triton's on a GPU, and the formula of PyTorch's operations that it replaces."""
    sizes = KernelSizes() if setup.quick else _BATCH
    description = ", ".join(f"{letter}={size}" for letter, size in sizes._asdict().items())
    report = Report()
    for precision, dtype in PRECISIONS.items():
        cases = kernels(dtype, setup.device, sizes)
        subjects: dict[str, Callable[[], Any]] = {}
        for name, (kernel, formula, inputs) in cases.items():
            inputs = [x.to(setup.device) for x in inputs]
            subjects[name] = partial(result_and_gradients, kernel, inputs)
            subjects[f"{name} plain"] = partial(result_and_gradients, formula, inputs)
        timings = interleave(subjects, setup)
        report.rows += [
            Row(
                f"kernel_{name.replace(' ', '_').lower()}_{precision}",
                f"{name}, forward and backward, {precision}; {description}",
                timings[name],
                timings[f"{name} plain"],
                other_name="plain_formula",
            )
            for name in cases
        ]
    return report
