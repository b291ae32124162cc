"""Provenance of a measurement: command, commit, seed, machine and versions."""

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def provenance(*, command: str, seed: int | None) -> dict[str, Any]:
    """Return plain data: the command, to be typed in the repository's root, commit, seed, machine, software and date.

    The seed is None if nothing is random.
    """
    import torch

    machine: dict[str, Any] = {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "system": platform.system(),
    }
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    # The package may be installed in the environment of another project, whose commit says nothing.
    is_ours = bool(_git("ls-files", "--error-unmatch", Path(__file__).name))
    changes = is_ours and _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/docs")
    return {
        "command": command,
        "commit": _git("rev-parse", "--short", "HEAD") if is_ours else "",
        "uncommitted_changes": bool(changes),
        "seed": seed,
        "machine": machine,
        "software": {"python": platform.python_version(), "torch": str(torch.__version__)},
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def _git(*args: str) -> str:
    """Return git's output in this package's checkout; "" if this is no checkout."""
    folder = Path(__file__).resolve().parent
    try:
        return subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
