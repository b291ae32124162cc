"""The captioner in the package: its folder, the commands that use it by default, and the recipe that makes it."""

import subprocess
import sys

import pytest
from helpers import load_script, save_image
from helpers_faults import command, refusal
from helpers_runs import save_checkpoint

from captioning.checkpoint.load import PRETRAINED_FOLDER
from captioning.data import KarpathySource
from captioning.evaluation.caption_files import CaptionedImage, NounHit
from captioning.files import write_json
from captioning.inference import load

SHIPPED = pytest.mark.skipif(not PRETRAINED_FOLDER.exists(), reason="the weights are not in this tree")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A small captioner in place of the pretrained one."""
    folder = tmp_path / "package/pretrained/small"
    load(save_checkpoint(tmp_path / "best.ckpt")).export(folder, dtype="float16")
    monkeypatch.setattr("captioning.checkpoint.load.PRETRAINED_FOLDER", folder)
    return folder


def test_load_and_the_command_use_the_pretrained_captioner_by_default(installed, tmp_path, capsys):
    image = save_image(tmp_path / "photo.png")
    expected = load(installed).caption(image).text
    assert load().caption(image).text == expected
    command("caption", image, "--explorer", tmp_path / "page.html")
    assert capsys.readouterr().out == f"{expected}\n"
    assert "Where the model looked: pretrained" in (tmp_path / "page.html").read_text()


def test_an_installation_without_the_captioner_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("captioning.checkpoint.load.PRETRAINED_FOLDER", tmp_path / "small")
    line = refusal(capsys, "caption", save_image(tmp_path / "photo.png"))
    assert f"{tmp_path / 'small'}: the checkpoint cannot be read (No such file or directory)" in line


# The shipped folder


@SHIPPED
def test_the_captioner_is_small_and_complete_and_its_card_has_both_licenses():
    files = {path.name: path.stat().st_size for path in PRETRAINED_FOLDER.iterdir()}
    assert sorted(files) == "README.md config.json model.safetensors vocabulary.json".split()
    assert sum(files.values()) <= 32 * 2**20
    card = (PRETRAINED_FOLDER / "README.md").read_text(encoding="utf-8")
    for part in ("## Limits", "**The code**", "**The weights** are for non-commercial research", "| BLEU-4 |"):
        assert part in card


@SHIPPED
def test_captioning_a_photo_imports_nothing_slow(tmp_path):
    """Outside of the repository, without data and without the encoder's published weights."""
    photo = save_image(tmp_path / "photo.png", size=(300, 200))
    heavy = "torchvision timm scipy pandas matplotlib pytorch_lightning wandb nltk pycocotools torch._dynamo sympy"
    program = (
        "import sys\n"
        "from captioning.__main__ import main\n"
        f"main(['caption', {str(photo)!r}])\n"
        f"print([name for name in {heavy.split()} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    words, imported = done.stdout.splitlines()
    assert len(words.split()) > 3 and imported == "[]"


def test_every_stage_of_the_recipe_reads_what_an_earlier_one_wrote(tmp_path, capsys):
    best = f"{tmp_path}/pretrained/checkpoints/best.ckpt"
    written, recipe = set[str](), load_script("pretrained").recipe(tmp_path)
    for name, words in recipe.items():
        output = words[words.index("--output") + 1] if "--output" in words else ""
        read = [word for word in words if word.endswith("best.ckpt") and word != output]
        read += [words[words.index("--data.features") + 1]] if "--data.features" in words else []
        assert set(read) <= written, name
        written.add(best if name == "score" else output)
        if "fit" in words:
            written.add(f"{tmp_path}/{words[words.index('--name') + 1]}/checkpoints/best.ckpt")
    load_script("pretrained").main(["--runs", str(tmp_path / "runs"), "--dry_run"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines][: len(recipe)] == list(recipe)
    assert "--dtype float16" in lines[-2] and not list(tmp_path.iterdir())


def test_the_data_of_the_recipe_are_the_listed_photos_of_three_data_sets(tmp_path, monkeypatch):
    """Images of two data sets may have one number; Flickr8k's test images are left out."""
    monkeypatch.chdir(tmp_path)
    pretrained = load_script("pretrained")
    recipe = tmp_path / "recipe"
    recipe.mkdir()
    (recipe / "photographs.txt").write_text("# comment\ntrain coco 7\ntrain flickr30k 9.jpg\nval coco 8\n")
    monkeypatch.setattr(pretrained, "RECIPE", recipe)
    for name, images in {
        "flickr8k": [("train", {"imgid": 7}), ("val", {"imgid": 8}), ("test", {"imgid": 9})],
        "coco": [("restval", {"cocoid": 7, "filepath": "val2014"}), ("test", {"cocoid": 8}), ("train", {"cocoid": 9})],
        "flickr30k": [("val", {"imgid": 9}), ("train", {"imgid": 7})],
    }.items():
        entries = [
            {"split": split, "filename": f"{next(iter(ids.values()))}.jpg", "sentences": [{"tokens": [name]}], **ids}
            for split, ids in images
        ]
        write_json(tmp_path / f"data/{name}/dataset_{name}.json", {"images": entries})
    pretrained.join(pretrained.JOINED, pretrained.COCO)
    train, val, coco = (
        KarpathySource(str(path), "data").index(split)
        for path, split in [(pretrained.JOINED, "train"), (pretrained.JOINED, "val"), (pretrained.COCO, "val")]
    )
    assert train.paths == ["flickr8k/images/7.jpg", "coco/val2014/7.jpg", "flickr30k/images/9.jpg"]
    assert val.paths == ["flickr8k/images/8.jpg", "coco/8.jpg"] and coco.paths == val.paths[1:]
    assert len({*train.image_ids, *val.image_ids}) == 5


@pytest.mark.parametrize(
    ("caption", "breaks_off", "repeats"),
    [
        ("a man in a baseball", True, False),  # half a compound: the training captions go on
        ("a man in a baseball cap", False, False),
        ("a dog on the", True, False),
        ("a dog that is brown", True, False),
        ("a boat on a boat", False, True),
        ("a person in a van van", False, True),
        ("a brown dog and a black dog", False, False),
        ("a dog is on a dog", False, True),
    ],
)
def test_sentences_that_break_off_or_repeat_are_counted(caption, breaks_off, repeats):
    training = [f"a man in a baseball {noun}".split() for noun in ["cap", "uniform"] * 6]
    rules = load_script("caption_faults").FaultRules(training)
    assert (rules.breaks_off(caption.split()), rules.repeats(caption.split())) == (breaks_off, repeats)


def test_looking_metrics_have_baselines_intervals_and_the_difference_from_the_center():
    def image(i: int) -> CaptionedImage:
        baselines = {"chance": 0.3, "center_hit": 0.5, "uniform_correctness": 0.2, "center_correctness": 0.3}
        hit = NounHit(0, "dog", hit=i % 4 > 0, correctness=0.4, **baselines)
        return CaptionedImage(image_id=i, caption="a dog", references=["a dog"], hits=[hit], reference_hits=[hit, hit])

    facts = load_script("looking").looking_metrics([image(i) for i in range(40)])
    assert facts["pointing_accuracy"]["value"] == 75 and facts["reference_pointing_accuracy"]["nouns"] == 80
    assert facts["pointing_accuracy"]["low"] < 75 < facts["pointing_accuracy"]["high"]
    assert facts["pointing_centre"] == {"value": 50, "low": 50, "high": 50, "nouns": 40}
    assert facts["above_the_centre"]["value"] == 25 and facts["above_the_centre"]["p"] < 0.05
