"""The tutorials and the notebook, run as they are printed, at tiny sizes."""

import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import wandb
from helpers_faults import command as captioning
from PIL import Image

# Lightning's advice on data as small as these.
pytestmark = pytest.mark.filterwarnings("ignore::lightning_fabric.utilities.warnings.PossibleUserWarning")

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = ROOT / "docs" / "tutorials"
NOTEBOOK = ROOT / "docs" / "notebooks" / "caption_and_look.ipynb"

SMALL_SHAPES = [f"--data.source.init_args.{name}={count}" for name, count in (("train", 12), ("val", 3), ("test", 3))]
# What is added to `captioning fit`: sizes, and nothing that a tutorial is about.
TINY = {
    "own_photos": ["--trainer.max_epochs=1", "--data.num_workers=0"],
    "new_attention": ["--trainer.max_epochs=1", "--data.num_workers=0", *SMALL_SHAPES],
    "soft_against_hard": ["--trainer.max_epochs=1", "--data.num_workers=0", *SMALL_SHAPES],
}


def blocks(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield (the paragraph before it, language, text) of every fenced block."""
    text = (TUTORIALS / f"{name}.md").read_text(encoding="utf-8")
    for fence in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield text[: fence.start()].strip().rpartition("\n\n")[2], fence[1], fence[2]


def follow(name: str) -> list[str]:
    """Write every file that the tutorial shows ("`NAME`:") and run every command; returns the commands."""
    commands = []
    for before, language, text in blocks(name):
        if language in ("python", "yaml"):
            file = re.search(r"`([\w./-]+)`:$", before)
            assert file, f"{name}: a block of {language} whose file is not named before it"
            Path(file[1]).write_text(text, encoding="utf-8")
        elif language == "bash":
            for command in text.replace("\\\n", " ").splitlines():
                run(shlex.split(command), TINY[name])
                commands.append(command)
    return commands


def run(command: list[str], tiny: list[str]) -> None:
    """Run a command in this process, which has imported what takes seconds to import."""
    program, *words = command
    if program == "captioning":
        captioning(*words, *(tiny if words[0] == "fit" else ()))
        wandb.finish()  # the end of a process does so
    else:
        assert program == "python"
        runpy.run_path(words[0], run_name="__main__")


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder with the repository's configs, as its user stands in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.setattr(sys, "argv", ["captioning"])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delenv("WANDB_DIR", raising=False)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if "my_attention" in name:
            del sys.modules[name]
    plt.close("all")


def photos(folder: Path, header: list[str]) -> None:
    """Write photos with two captions each, those of the tutorial, one for validation (25), two for the test."""
    names = ["beach/1.jpg", "garden/cat.jpg", *(f"beach/{number}.jpg" for number in (2, 3, 4, 5, 25))]
    lines = [",".join(header)]
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 48), (5 * number, 120, 90)).save(folder / name)
        lines += [f"{name},a photo of colour {number % 3}", f'{name},"a plain, coloured picture"']
    (folder / "captions.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.slow
def test_own_photos(workplace, capsys):
    (shown,) = [text for _, language, text in blocks("own_photos") if language == "csv"]
    photos(workplace / "photos", shown.splitlines()[0].split(","))
    commands = follow("own_photos")
    assert len(commands) == 7
    output = capsys.readouterr().out
    assert "test/bleu4" in output or "bleu4" in output
    for name in ("looked.png", "cat.png", "looked.html", "photos/features/train.npy"):
        assert (workplace / name).stat().st_size > 1000
    for name in ("my_photos", "my_photos_cached"):
        assert (workplace / "runs" / name / "checkpoints" / "best.ckpt").is_file()


@pytest.mark.slow
def test_new_attention(workplace, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert len(follow("new_attention")) == 5
    assert "the score is right" in capsys.readouterr().out
    assert (workplace / "distance.png").stat().st_size > 1000
    metrics = json.loads((workplace / "runs/distance/test_metrics.json").read_text())
    assert 0 <= metrics["test/reference_pointing_accuracy"] <= 100


@pytest.mark.slow
def test_soft_against_hard(workplace, monkeypatch, capsys):
    wandb.teardown()  # of an earlier test's: it would keep that test's environment
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)

    assert len(follow("soft_against_hard")) == 5
    output = capsys.readouterr().out
    assert "Variants over seeds" in output and "2 seeds" in output
    folder = workplace / "runs" / "soft_hard"
    assert (folder / "comparison.html").is_file()
    with pytest.raises(SystemExit):
        run(["captioning", "compare", "runs/soft_hard/soft_1"], [])
    assert "give two or more different runs" in capsys.readouterr().err


def test_the_notebook_has_its_outputs_and_its_cells_run_in_its_own_folder(monkeypatch, capsys):
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    stored = ["".join(line for output in cell["outputs"] for line in output.get("text", [])) for cell in cells]
    kinds = [kind for cell in cells for output in cell["outputs"] for kind in output.get("data", {}) if "image" in kind]
    assert kinds == ["image/jpeg", "image/jpeg", "image/png"]
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setattr(plt, "show", lambda: None)
    names: dict[str, object] = {}
    for cell, text in zip(cells, stored, strict=True):
        exec("".join(cell["source"]), names)
        assert bool(capsys.readouterr().out) == bool(text)  # another processor may caption in other words
    captions = names["captions"]
    assert [len(caption.words) > 2 for caption in captions] == [True, True]
    plt.close("all")
