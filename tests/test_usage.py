"""What the command says at once: help, misspelt commands, files that are not there."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from captioning.cli.usage import COMMANDS, HELP, TOOLS, check_tool, command_help, first_line, footnotes
from captioning.errors import InputError, did_you_mean

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_is_short_and_answered_at_once(command):
    program = (
        f"import sys; sys.argv = ['captioning', '{command}', '--config', 'x.yaml', '--help']\n"
        "from captioning.__main__ import main\nmain()\n"
        "slow = {'torch', 'numpy', 'jsonargparse', 'pytorch_lightning'} & set(sys.modules)\nassert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"usage: captioning {command} ") and lines[2] == "most used:"
    assert len(lines) <= 45 and max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", TOOLS)
def test_help_of_a_tool_fits_a_screen_and_imports_nothing_slow(name):
    program = (
        f"import sys; sys.argv = ['captioning', '{name}', '--help']\n"
        "from captioning.__main__ import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "slow = {'torch', 'numpy', 'jsonargparse', 'pytorch_lightning', 'rich', 'PIL'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    environment = os.environ | {"COLUMNS": "150"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"usage: captioning {name}") and "examples:" in lines
    assert len(lines) <= 45 and max(map(len, lines)) <= 100


def without_torch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command line that must end before torch is imported."""
    program = (
        f"import sys; sys.argv = ['captioning', *{list(words)!r}]\n"
        "from captioning.__main__ import main\ntry:\n    main()\nfinally:\n    assert 'torch' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["caption", "gone.png", "--model", "best.ckpt"], "error: gone.png: no such image file"),
        (
            ["caption", "a.png", "--model", "bets.ckpt"],
            "--model bets.ckpt: the checkpoint cannot be read (no such file); ",
        ),
        (
            ["caption", "a.png", "--model", "best.ckpt", "--import", "gone"],
            "--import gone: there is no such module in ",
        ),
        (["fit", "--import", "gone.py"], "; give gone, without .py"),
        (["export", "--model", "gone.ckpt", "--output", "x"], "--model gone.ckpt: the checkpoint cannot be read"),
    ],
)
def test_what_is_not_there_is_said_before_torch_is_imported(tmp_path, words, error):
    (tmp_path / "a.png").touch()
    (tmp_path / "best.ckpt").touch()
    done = without_torch(tmp_path, *words)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert error in line


def test_a_tool_says_at_once_that_it_imports_torch(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    check_tool("caption", ["hf:owner/name", "pretrained"])
    assert capsys.readouterr().err == "captioning caption: importing PyTorch ...\n"


def test_a_tool_shows_the_traceback_of_an_error(tmp_path):
    command = [sys.executable, "-m", "captioning", "export", "--debug", "--model", "no.ckpt", "--output", "x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    first, *_, last = done.stderr.splitlines()
    assert done.returncode == 2 and first.startswith("Traceback") and last.startswith("error: --model no.ckpt")


def test_what_is_left_out_is_said_after_the_results(capsys):
    with footnotes():
        logging.getLogger("captioning.evaluation.metrics").warning("no SPICE: no Java")
        print("results", file=sys.stderr)
    assert capsys.readouterr().err == "results\nno SPICE: no Java\n"


def test_the_command_alone_lists_every_subcommand_in_a_line():
    lines = HELP.splitlines()
    for name, description in (COMMANDS | TOOLS).items():
        assert f"  {name:12}{description}" in lines
    assert len(lines) <= 45 and max(map(len, lines)) <= 100


@pytest.mark.parametrize("text", [HELP, *map(command_help, COMMANDS)])
def test_every_file_that_the_help_names_is_there_or_made_by_it(text):
    named = set(re.findall(r"[\w/]+\.(?:yaml|py)", text)) - {"CONFIG.yaml", "FILE.yaml"}
    assert all((ROOT / name).is_file() for name in named), named
    runs = re.findall(r"runs/(\w+)/checkpoints", text)  # of an example that trains it
    assert all((ROOT / "configs" / f"{run}.yaml").is_file() for run in runs)


def test_the_first_line_comes_long_before_the_libraries(tmp_path):
    (tmp_path / "x.yaml").write_text("{}")
    command = [sys.executable, "-m", "captioning", "fit", "--config", "x.yaml"]
    env = {"PYTHONPATH": str(ROOT), "PATH": ""}
    started = time.monotonic()
    with subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as process:
        line, seconds = process.stderr.readline(), time.monotonic() - started
        process.kill()
    assert line == "captioning fit x.yaml: importing PyTorch and Lightning ...\n"
    assert seconds < 5  # 0.1 s on a machine that does nothing else; the libraries take 7


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ftt"], "captioning ftt: no such command; did you mean fit?"),
        (["evaluat"], "captioning evaluat: no such command; did you mean evaluate?"),
        (["quit"], "captioning quit: no such command; `captioning` lists the commands"),
        (["fit", "--config", "configs/shape_soft.yaml"], "no such file; did you mean configs/shapes_soft.yaml?"),
        (["fit", "-c", "a.yaml"], "--config a.yaml: no such file"),
        (["test", "--ckpt_path=x.ckpt"], "--ckpt_path x.ckpt: no such file; `captioning fit` writes RUNS/NAME/checkp"),
        (["test", "--ckpt_path", "runs/soft/checkpoints/bets.ckpt"], "mean runs/soft/checkpoints/best.ckpt?"),
        (["test", "--ckpt_path", "runs/sof/checkpoints/best.ckpt"], "mean runs/soft/checkpoints/best.ckpt?"),
        (["test", "--ckpt_path", "runs/soft"], "runs/soft: is a folder; give runs/soft/checkpoints/best.ckpt"),
        (["test", "--ckpt_path", "configs"], "configs: is a folder; give a .ckpt file"),
    ],
)
def test_what_is_not_there_is_named_with_what_was_probably_meant(tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    for file in ("configs/shapes_soft.yaml", "runs/soft/checkpoints/best.ckpt"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    with pytest.raises(InputError) as error:
        first_line(args)
    assert message in str(error.value)


def test_what_is_there_is_said_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").touch()
    (tmp_path / "best.ckpt").touch()
    assert first_line(["test", "-c", "a.yaml", "--ckpt_path", "best.ckpt"]).startswith(
        "captioning test a.yaml best.ckpt:"
    )
    assert first_line(["test", "--ckpt_path", "best"]).startswith("captioning test best:")


def test_a_word_that_is_like_none_gets_no_suggestion():
    assert did_you_mean("hiden_dim", ["hidden_dim", "dropout"]) == "; did you mean hidden_dim?"
    assert did_you_mean("zzz", ["hidden_dim", "dropout"]) == ""
