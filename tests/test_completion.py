"""Completion of command lines, as bash computes it with the script that the command prints."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from captioning.cli.usage import COMMANDS, TOOLS

ROOT = Path(__file__).resolve().parent.parent


def printed(shell: str) -> str:
    program = (
        f"import sys; sys.argv = ['captioning', 'completion', '{shell}']\n"
        "from captioning.__main__ import main\nmain()\nassert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "captioning.bash"
    path.write_text(printed("bash"))
    return path


def completed(script: Path, line: str, folder: Path = ROOT) -> set[str]:
    """The words that bash offers for the last, begun word of a line."""
    words = shlex.split(line) if not line.endswith(" ") else [*shlex.split(line), ""]
    program = (
        f"source {script}\n"
        f"COMP_WORDS=({' '.join(word or chr(39) * 2 for word in words)}); COMP_CWORD={len(words) - 1}\n"
        "function_name=$(complete -p captioning | sed 's/.*-F \\([^ ]*\\).*/\\1/')\n"
        f"$function_name captioning {shlex.quote(words[-1])} {words[-2]}\n"
        "printf '%s\\n' \"${COMPREPLY[@]}\"\n"
    )
    done = subprocess.run(["bash", "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {word.strip() for word in done.stdout.splitlines()}


def test_all_subcommands_are_offered(script):
    assert completed(script, "captioning ") >= {*COMMANDS, *TOOLS}
    assert completed(script, "captioning ca") == {"caption"}


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("captioning caption --ov", {"--overlay", "--overlay_format"}),
        ("captioning caption --style ", {"color", "paper"}),
        ("captioning evaluate --split ", {"train", "val", "test"}),
        ("captioning fit --ckpt", {"--ckpt_path"}),
        ("captioning test --data.test", {"--data.test_split"}),
        ("captioning prepare sh", {"shapes"}),
        ("captioning prepare coco --kar", {"--karpathy"}),
        ("captioning completion z", {"zsh"}),
    ],
)
def test_options_and_their_choices_are_offered(script, line, offered):
    assert completed(script, line) == offered


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("captioning caption --model be", {"best.ckpt"}),
        ("captioning caption ph", {"photo.jpg"}),
        ("captioning fit --config con", {"config.yaml"}),
        ("captioning export --output ou", {"out/", "out"}),
    ],
)
def test_files_are_offered(script, tmp_path, line, offered):
    for name in ("best.ckpt", "photo.jpg", "config.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "out").mkdir()
    found = completed(script, line, tmp_path)
    assert found and found <= offered


def test_zsh_gets_a_script_of_its_own():
    text = printed("zsh")
    assert text.startswith("#compdef captioning") and "--overlay_format" in text and "bench" in text
