"""The captioner in the package: its folder, what uses it by default, and the recipe that makes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import load_script, save_image
from helpers_runs import save_checkpoint

from captioning.checkpoint import pretrained
from captioning.checkpoint.pretrained import FOLDER
from captioning.cli import caption
from captioning.errors import InputError
from captioning.inference import load

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = pytest.mark.skipif(not FOLDER.exists(), reason="the weights are not in this tree")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A small captioner in the place of the pretrained one."""
    folder = tmp_path / "package/pretrained/small"
    load(save_checkpoint(tmp_path / "best.ckpt")).export(folder, dtype="float16")
    monkeypatch.setattr(pretrained, "FOLDER", folder)
    return folder


def test_load_and_the_command_use_it_by_default(installed, tmp_path, capsys):
    image = save_image(tmp_path / "photo.png")
    expected = load(installed).caption(image).text
    assert load().caption(image).text == expected
    caption.main([str(image), "--explorer", str(tmp_path / "page.html")])
    assert capsys.readouterr().out == f"{expected}\n"
    assert "Where pretrained looks" in (tmp_path / "page.html").read_text()


def test_an_installation_without_it_is_one_line_that_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path / "small")
    with pytest.raises(InputError, match=r"no pretrained captioner .*pretrained/small is missing\); install the whole"):
        load()
    with pytest.raises(SystemExit) as caught:
        caption.main([str(save_image(tmp_path / "photo.png"))])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1 and "name a model: a .ckpt file" in error


@pytest.mark.parametrize("name", ["folder", "notes.txt", "missing.jpg"])
def test_what_is_no_photograph_is_one_line(installed, name, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("no photograph")
    with pytest.raises(SystemExit) as caught:
        caption.main([str(tmp_path / name)])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1 and f"{name}: " in error


# The shipped folder


@SHIPPED
def test_it_is_small_enough_and_complete():
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    expected = "README.md SHA256SUMS config.json model.safetensors vocabulary.json"
    assert sorted(files) == expected.split()
    assert sum(files.values()) <= 24_000_000


@SHIPPED
def test_its_card_keeps_the_two_licences_apart_and_has_scores_with_intervals():
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    for part in (
        "## Limits",
        "**The code**",
        "MIT",
        "**The weights** are for research and education only",
        "Apache-2.0",
    ):
        assert part in card
    assert "Validation split, 1000 images" in card and "| BLEU-4 |" in card and " to " in card


@SHIPPED
def test_its_configuration_names_no_folder_of_a_machine_and_no_library_that_is_optional():
    text = (FOLDER / "config.json").read_text(encoding="utf-8")
    assert '"/' not in text and "\\\\" not in text
    assert json.loads(text)["encoder"]["class_path"] == "captioning.encoders.MobileNetV1"


@SHIPPED
def test_it_captions_a_photograph_without_anything_that_is_slow_to_import(tmp_path):
    """Elsewhere than in the repository: there are neither data nor the encoder's own weights."""
    photo = save_image(tmp_path / "photo.png", size=(300, 200))
    heavy = "torchvision timm scipy pandas matplotlib pytorch_lightning wandb nltk pycocotools torch._dynamo sympy"
    program = (
        "import sys\n"
        "from captioning.cli.caption import main\n"
        f"main([{str(photo)!r}])\n"
        f"print([name for name in {heavy.split()} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    words, imported = done.stdout.splitlines()
    assert len(words.split()) > 3 and imported == "[]"


# The recipe


@pytest.fixture
def recipe(monkeypatch, tmp_path):
    """scripts/pretrained.py, with commands that only note what they were called with."""
    script = load_script("pretrained")
    ran: list[str] = []
    monkeypatch.setattr(script.Commands, "run", lambda self, name, arguments: ran.append(name))
    monkeypatch.setattr(script, "check", lambda *arguments: ran.append("check"))
    monkeypatch.setattr(script, "measurement_of", lambda *arguments, **options: {})
    monkeypatch.setattr(script, "MEASUREMENT", tmp_path / "measured.json")
    script.ran = ran
    script.runs = tmp_path / "runs"
    return script


ORDER = ["features", "first", "tuned", "tuned_features", "critical", "average", "score", "export", "check"]


def test_the_stages_run_in_their_order_and_once(recipe):
    recipe.main(["--runs", str(recipe.runs)])
    assert recipe.ran == ORDER
    recipe.main(["--runs", str(recipe.runs)])
    assert recipe.ran == ORDER
    recipe.main(["--runs", str(recipe.runs), "--only", "export", "check"])
    assert recipe.ran == [*ORDER, "export", "check"]


def test_every_stage_reads_what_an_earlier_one_wrote(recipe):
    written: set[str] = set()
    for name, words in recipe.recipe(recipe.runs).items():
        output = words[words.index("--output") + 1] if "--output" in words else ""
        read = [word for word in words if word.endswith("best.ckpt") and word != output]
        read += [words[words.index("--data.features") + 1]] if "--data.features" in words else []
        assert set(read) <= written, name
        written.add(output)
        if "fit" in words:
            written.add(f"{recipe.runs}/{words[words.index('--name') + 1]}/checkpoints/best.ckpt")


def test_an_interrupted_stage_is_resumed_and_no_later_one_runs(recipe, monkeypatch):
    def interrupted(self, name, arguments):
        recipe.ran.append(name)
        if name == "tuned":
            raise InputError("tuned: interrupted")

    monkeypatch.setattr(recipe.Commands, "run", interrupted)
    with pytest.raises(SystemExit):
        recipe.main(["--runs", str(recipe.runs)])
    assert recipe.ran == ["features", "first", "tuned"]
    assert "--ckpt_path" not in recipe.recipe(recipe.runs)["tuned"]
    last = recipe.runs / "pretrained_tuned/checkpoints/last.ckpt"
    last.parent.mkdir(parents=True)
    last.touch()
    assert recipe.recipe(recipe.runs)["tuned"][-2:] == ["--ckpt_path", str(last)]


def test_a_dry_run_prints_the_commands_and_runs_none(recipe, capsys):
    recipe.main(["--runs", str(recipe.runs), "--dry_run"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ORDER and recipe.ran == []
    assert "--dtype float16" in lines[-2] and not recipe.runs.exists()


def test_a_stage_that_does_not_exist_is_one_line(recipe, capsys):
    with pytest.raises(SystemExit):
        recipe.main(["--only", "frist"])
    assert "--only: there is no stage 'frist'; one of features, first, tuned" in capsys.readouterr().err


@pytest.mark.parametrize("equal", [199, 197])
def test_an_export_whose_captions_differ_is_refused(tmp_path, monkeypatch, capsys, equal):
    script = load_script("pretrained")

    class Words:
        def __init__(self, words):
            self.words = words

    class Model:
        def __init__(self, changed):
            self.changed, self.settings = changed, {}

        def stream(self, images):
            return (Words(["a", "cat" if number < self.changed else "dog"]) for number, _ in enumerate(images))

        def caption(self, image):
            pass

    class Source:
        def index(self, split):
            assert split == "val"
            return type("Index", (), {"__len__": lambda self: 200, "image_path": lambda self, number: number})()

    monkeypatch.setattr("captioning.inference.load", lambda path: Model(0 if path == Path("a.ckpt") else 200 - equal))
    monkeypatch.setattr("captioning.cli.build.build", lambda *arguments: (Source(),))
    measurement = tmp_path / "measured.json"
    measurement.write_text('{"values": {}}')
    if equal == 197:
        with pytest.raises(InputError, match=r"fewer than 99 % of its captions are those of a\.ckpt"):
            script.check(Path("a.ckpt"), tmp_path, measurement)
    else:
        script.check(Path("a.ckpt"), tmp_path, measurement)
    assert json.loads(measurement.read_text())["export"]["equal_captions"] == equal
