"""Train and score every variant of a study, each with several seeds, and say what is left to do.

A study is a YAML of configs/studies: variants of configurations that differ in what is compared and in nothing else.
The score of a run is written to docs/measurements/STUDY_VARIANT_SEED.json; a run that has one is done, a run that was
interrupted is resumed where it stopped.

examples:
  python scripts/study.py configs/studies/flickr8k.yaml --jobs 2
  python scripts/study.py configs/studies/flickr8k.yaml --only soft marginal_blocks --seeds 1
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from captioning.errors import InputError, exits_on_input_error
from captioning.run_folder import RunFolder
from captioning.terminal import script_parser

REPOSITORY = Path(__file__).resolve().parent.parent
_PROGRESS = re.compile("run folder|epoch|best checkpoint|BLEU")


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("study", type=Path, help="a YAML of configs/studies")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="(default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, help="(default: the study's)")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side (default: %(default)s)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="(default: %(default)s)")
    args = parser.parse_args(argv)
    study = yaml.safe_load(args.study.read_text())
    variants = study["variants"]
    unknown = set(args.only or ()) - set(variants)
    if unknown:
        raise InputError(f"--only: no variant {sorted(unknown)[0]} in {args.study}; there are {', '.join(variants)}")
    jobs = [(name, seed) for seed in args.seeds or study["seeds"] for name in args.only or variants]
    threads = max(1, (os.cpu_count() or 1) // args.jobs)
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda job: run(study, *job, args.runs, environment), jobs))


def run(study: dict[str, Any], variant: str, seed: int, runs: Path, environment: dict[str, str]) -> None:
    """Train and score one run, unless that is done."""
    name = f"{study['name']}_{variant}_{seed}"
    measurement = Path("docs/measurements") / f"{name}.json"
    if measurement.is_file():
        return
    folder = RunFolder(runs / name)
    best, last = folder.checkpoint("best"), folder.checkpoint("last")
    options = study["variants"][variant]
    command = [
        "-m",
        "captioning",
        "fit",
        "--config",
        f"configs/{options['config']}.yaml",
        "--seed_everything",
        str(seed),
    ]
    command += [*study["fit"], *options.get("fit", []), "--runs", str(runs), "--name", name, "--trainer.logger=false"]
    command += ["--ckpt_path", str(last)] if last.is_file() else []
    _call(name, command, environment)
    command = ["scripts/evaluate.py", "--checkpoint", str(best), *study["evaluate"], "--measurement", str(measurement)]
    _call(name, command, environment)


def _call(name: str, command: list[str], environment: dict[str, str]) -> None:
    started = time.perf_counter()
    print(f"{name}: $ python {shlex.join(command)}", flush=True)
    with subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        lines = []
        for line in process.stdout or ():
            lines.append(line)
            if _PROGRESS.search(line):
                print(f"{name}: {line}", end="", flush=True)
    if process.returncode:
        raise InputError(f"{name} failed: {' '.join(''.join(lines[-3:]).split())}")
    print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
