"""Where a training step spends its time, with the C kernels and without them; writes a JSON file.

examples:
  python -m benchmarks.profile docs/measurements/profile_train_step.json
"""

from __future__ import annotations

import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.models import Data
from benchmarks.training import PRECISIONS, cases, our_step
from captioning.cli.arguments import script_parser
from captioning.files import write_json
from captioning.kernels import native
from captioning.provenance import provenance

_OPERATIONS = 12
_STEPS = 5


def main(argv: list[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("output", type=Path, metavar="JSON")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs")
    args = parser.parse_args(argv)
    sizes = cases(args.quick)["512"].sizes
    data = Data.make(sizes, torch.device("cpu"))
    profiles: dict[str, Any] = {}
    for precision, dtype in PRECISIONS.items():
        for name, usable in (("kernels", native.usable), ("plain", lambda tensor: False)):
            with mock.patch.object(native, "usable", usable):
                step = our_step(sizes, torch.device("cpu"), precision=dtype)
                profiles[f"{name}_{precision}"] = _profile(lambda step=step: step(data.batch()))  # type: ignore[misc]
    command = f"python -m benchmarks.profile {shlex.join(sys.argv[1:] if argv is None else argv)}"
    content = {"unit": "milliseconds", "sizes": str(sizes), "profiles": profiles}
    write_json(args.output, content | provenance(command=command, seed=2))


def _profile(step: Any) -> dict[str, Any]:
    """Return the median time of a step, and the operations that it spends most time in, in milliseconds."""
    step()
    seconds = []
    for _ in range(_STEPS):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)[:_OPERATIONS]
    return {
        "step": round(1000 * statistics.median(seconds), 1),
        "operations": {event.key: round(event.self_cpu_time_total / 1000, 1) for event in events},
    }


if __name__ == "__main__":
    main()
