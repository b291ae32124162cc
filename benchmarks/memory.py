"""Peak memory of the first training step, optimizer state included; each measured in a process of its own.

``python -m benchmarks.memory WHO CASE DEVICE [--quick]`` prints bytes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.models import Data
from benchmarks.report import Report
from benchmarks.training import PRECISIONS, cases, our_step, port_step

_ROOT = Path(__file__).resolve().parent.parent


def measure(device: torch.device, *, quick: bool) -> Report:
    """Measure ours and the common port at the sizes of the training steps."""
    report = Report()
    precisions = ["fp32"] if quick else list(PRECISIONS)
    for name in ("512",) if quick else ("512", "2048"):
        for who in ("common_port", *precisions):
            command = [sys.executable, "-m", "benchmarks.memory", who, name, str(device), *(["--quick"] * quick)]
            done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True)
            size = int(done.stdout.split()[-1])
            if who == "common_port":
                report.peak_memory |= {f"train_step_{name}_{precision}_common_port": size for precision in precisions}
            else:
                report.peak_memory[f"train_step_{name}_{who}"] = size
    return report


def peak_of_a_step(who: str, case: str, device: torch.device, *, quick: bool) -> int:
    """Return by how many bytes memory grows during a training step, at most.

    On a CPU that is the resident size of this process, on a GPU what tensors take.

    Args:
        who: ``common_port``, or the precision of ours.
    """
    sizes = cases(quick)[case].sizes
    data = Data.make(sizes, device)
    if who == "common_port":
        step = port_step(sizes, data, device)
    else:
        ours, batch = our_step(sizes, device, precision=PRECISIONS[who]), data.batch()
        step = lambda: ours(batch)  # noqa: E731
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


def resident(entry: str) -> int:
    """Return an entry of this process's memory in bytes: VmRSS now, VmHWM at most so far. Linux only.

    RssAnon is the part that is no file's, RssFile what of mapped files is in memory.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(entry + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {entry}")


if __name__ == "__main__":
    _, _who, _case, _device, *_rest = sys.argv
    print(peak_of_a_step(_who, _case, torch.device(_device), quick=bool(_rest)))
