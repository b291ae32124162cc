"""The benchmark at every level of instructions: ``python -m benchmarks.instructions [LEVEL ..]``.

Each level is a process of its own and writes docs/measurements/benchmark_LEVEL.json. ``native`` is no limit. PyTorch's
operations are limited, our kernels in C are not. Nothing
else should run meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_SUBJECTS = "train decode alone encode".split()
_FOLDER = Path("docs/measurements")


def main(levels: list[str]) -> None:
    """Run the benchmark at each level; by default at avx2 and without a limit."""
    for level in levels or ["avx2", "native"]:
        limit = {} if level == "native" else {"ATEN_CPU_CAPABILITY": level, "ONEDNN_MAX_CPU_ISA": level.upper()}
        file = _FOLDER / f"benchmark_{level}.json"
        command = ["-m", "captioning", "bench", "--rounds", "5", "--only", *_SUBJECTS, "--json", str(file)]
        subprocess.run([sys.executable, *command], env=os.environ | limit, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
