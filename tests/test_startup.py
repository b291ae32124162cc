"""Slow modules are imported only where they are needed: help comes at once, and captions need no Lightning."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from captioning import data, encoders
from captioning.cli import FIT_HELP, HELP, OTHER_COMMANDS, RUN_COMMANDS

ROOT = Path(__file__).resolve().parent.parent
SLOW = {"torch", "numpy", "jsonargparse", "pytorch_lightning", "rich", "PIL"}


def program(words: list[str], heavy: set[str]) -> str:
    """A program that runs a command line and fails if a heavy module is imported then."""
    return (
        f"import sys; sys.argv = ['captioning', *{words!r}]\nfrom captioning.__main__ import main\n"
        f"try:\n    main()\nfinally:\n    loaded = {heavy!r} & set(sys.modules)\n    assert not loaded, loaded\n"
    )


def run(code: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(ROOT), "COLUMNS": "150", "PATH": ""}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["", *RUN_COMMANDS, *OTHER_COMMANDS])
def test_help_fits_a_screen_and_imports_nothing_slow(name):
    done = run(program([name, "--help"] if name else [], SLOW))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"usage: captioning {name or 'COMMAND'}")
    assert len(lines) <= 55 and max(map(len, lines)) <= 105


def test_captioning_an_image_imports_neither_compiler_nor_lightning_nor_wandb(tmp_path):
    heavy = {"pytorch_lightning", "wandb", "matplotlib", "nltk", "jsonargparse", "timm"}
    done = run(program(["caption", str(ROOT / "docs/images/photo.jpg")], heavy), tmp_path)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert done.stderr == "captioning caption: starting ...\n"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("ftt", "captioning ftt: no such command; did you mean fit?"),
        ("quit", "captioning quit: no such command; `captioning` lists the commands"),
        ("caption photo.png --overlya x.png", "unrecognized arguments: --overlya x.png; did you mean --overlay?"),
        ("caption empty", "empty: no image in this folder"),
        ("compare empty gone", "gone: no such folder of a run"),
        ("compare empty empty --figure fig.txt", "--figure fig.txt: must end in .png, .pdf, .svg"),
        ("compare empty empty --resamples 0", "resamples must be at least 1, got 0"),
        ("compare empty empty --seed -1", "seed must be at least 0, got -1"),
        ("compare empty empty --images -3", "images must be at least 0, got -3"),
        ("extract --config shapes_soft.yaml --output out --batch_size -1", "batch_size must be at least 1, got -1"),
        ("extract --config shapes_soft.yaml --output out --num_workers -1", "num_workers must be at least 0, got -1"),
        ("fit --import gone", "--import gone: ModuleNotFoundError: No module named 'gone'"),
        ("fit --import gone.py", "; give gone, without .py"),
    ],
)
def test_a_missing_file_is_named_before_torch_is_imported(tmp_path, words, error):
    for name in ("photo.png", "shapes_soft.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    done = run(program(words.split(), {"torch"}), tmp_path)
    *_, line = done.stderr.splitlines()
    assert done.returncode == 2 and error in line


@pytest.mark.parametrize("text", [HELP, FIT_HELP])
def test_every_file_in_a_help_text_exists_or_is_written_by_a_command_there(text):
    named = set(re.findall(r"[\w/]+\.(?:yaml|py)", text)) - {"CONFIG.yaml", "FILE.yaml", "OVERLAY.yaml", "DATA.yaml"}
    assert all((ROOT / name).is_file() for name in named), named
    runs = re.findall(r"runs/(\w+)/checkpoints", text)  # of an example that trains it
    assert all((ROOT / "configs" / f"{run}.yaml").is_file() for run in runs)


def test_the_command_alone_lists_every_command_in_a_line():
    lines = HELP.splitlines()
    assert all(f"  {name:12}{description}" in lines for name, description in (RUN_COMMANDS | OTHER_COMMANDS).items())


def test_the_help_of_fit_names_every_encoder_and_source():
    exported = [value for room in (data, encoders) for value in vars(room).values() if isinstance(value, type)]
    bases = (data.CaptionSource, encoders.Encoder)
    names = {cls.__name__ for cls in exported if issubclass(cls, bases) and cls not in bases}
    assert len(names) > 7 and names <= set(re.findall(r"\w+", FIT_HELP))


def test_the_help_of_fit_repeats_no_defaults_of_options():  # --help_all has them from the code
    assert not re.search(r"default: \d|val/", FIT_HELP)
