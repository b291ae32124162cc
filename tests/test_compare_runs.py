"""`captioning compare`: what it prints and writes, and the attention of both runs on its page."""

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers_runs import edit_checkpoint, save_checkpoint

from captioning.attention import HardAttention
from captioning.cli.compare import compare as compare_command
from captioning.comparison.attention_explorer import explore_disagreements, load_models_into
from captioning.comparison.compare import compare_runs
from captioning.comparison.result import ONE_SEED
from captioning.comparison.runs import read_run
from captioning.errors import InputError
from captioning.inference import load
from captioning.model import SummedOutput
from captioning.run_folder import checksum

NO_FILES = "The page shows no images: the tests name no files, or the files are gone."


def explorer_of(folders, edit=lambda runs, models: None, seed: int = 0) -> tuple[list[dict], list[str]]:
    """The images that the explorer shows of runs, and what it says is missing."""
    runs = [read_run(folder) for folder in folders]
    models, _ = load_models_into(runs)
    edit(runs, models)
    page, notices = explore_disagreements(runs, models, compare_runs(runs, resamples=9), seed=seed)
    return explorer_images(page), notices


def explorer_images(page: str) -> list[dict]:
    match = re.search(r'class="explorer-data">(.*?)</script>', page, flags=re.S)
    return json.loads(match[1])["images"] if match else []


def edit_images(folders, edit) -> None:
    """Change every image in the files of the runs' tests."""
    for folder in folders:
        file = folder / "test_captions.json"
        file.write_text(json.dumps([edit(image) for image in json.loads(file.read_text())]))


def number_of(image: dict) -> int:
    """The number of an image that the explorer shows."""
    return int(image["name"].rpartition(" ")[2])


def test_two_runs_become_a_table_a_page_and_numbers(tested_pair, capsys):
    numbers = tested_pair[0].parent / "numbers.json"
    # The first run is not there twice with those of its folder, nor is one by a link.
    (numbers.parent / "a_link").symlink_to(tested_pair[0])
    options = {"json": numbers, "metric": "bleu1", "figure": numbers.with_suffix(".svg")}
    compare_command(tested_pair[0], str(numbers.parent), resamples=50, **options)
    out, err = capsys.readouterr()
    assert "scoring captions: 100%" in err and f"written to {numbers.with_suffix('.svg')}\n" in err
    out = " ".join(out.split())
    for expected in (
        ONE_SEED,
        "; BLEU of fewer than 100 images says little.",
        "Captions of 4 images",
        "Pointing accuracy",
        "Parameters, decoder",
    ):
        assert expected in out
    content = json.loads(numbers.read_text())
    assert content["runs"] == ["soft", "hard"] and ONE_SEED in content["verdicts"][0]
    assert content["provenance"]["command"].startswith("captioning compare ")
    page = (numbers.parent / "comparison.html").read_text()
    assert ONE_SEED in page and "teacher-forced through one run of each variant" in page
    assert options["figure"].read_text().count("<image ") > 2
    assert "longer n-grams. The captions are those of the test; teacher forcing gives" in page
    images = explorer_images(page)
    for item in content["disagreements"]:
        assert item["file"].endswith(".png")
        (image,) = [image for image in images if image["name"] == f"{item['file']}, image {item['image_id']}"]
        assert [run["run"] for run in image["runs"]] == ["soft", "hard"]
        for run in image["runs"]:  # the tested caption and no other, from the first word that differs
            assert [" ".join(shown["words"]) for shown in run["captions"]] == [item["captions"][run["run"]]]
            soft, hard = (item["captions"][name].split() for name in ("soft", "hard"))
            assert soft[: run["start"]] == hard[: run["start"]] and soft[run["start"]] != [*hard, ""][run["start"]]
    assert len(images) == len(content["disagreements"]) == 4


def test_images_that_the_page_cannot_show_are_named(tested_pair, tmp_path, capsys):
    (tested_pair[0] / "checkpoints/best.ckpt").unlink()
    (tested_pair[1] / "checkpoints/best.ckpt").write_bytes(b"damaged")
    compare_command(*map(str, tested_pair), resamples=9)
    out = capsys.readouterr().out
    for run in ("soft", "hard"):
        assert f"No attention of {run}: its checkpoint is missing, or cannot be loaded." in out
    assert "hard/checkpoints/best.ckpt: " in out
    assert "explorer-data" not in (tested_pair[0].parent / "comparison.html").read_text()
    edit_images(tested_pair, lambda image: image | {"file": str(tmp_path / "gone" / Path(image["file"]).name)})
    compare_command(*map(str, tested_pair), resamples=9, output=tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text()
    assert "explorer-data" not in page and "a shape number 1" in re.sub(r"<[^>]*>", "", page)
    assert NO_FILES in " ".join(capsys.readouterr().out.split())
    edit_images(tested_pair, lambda image: {key: value for key, value in image.items() if key != "file"})
    assert explorer_of(tested_pair) == ([], [NO_FILES])


def test_images_whose_files_are_gone_are_left_out_of_the_page(tested_pair):
    number = json.loads((tested_pair[0] / "test_captions.json").read_text())[1]["image_id"]
    gone = {"file": str(tested_pair[0] / "gone.png")}
    edit_images(tested_pair, lambda image: image | (gone if image["image_id"] == number else {}))
    shown, _ = explorer_of(tested_pair)
    assert len(shown) == 3 and number not in map(number_of, shown)


def test_the_page_shows_attention_of_the_tested_checkpoint(tested_pair):
    checkpoints, metrics = tested_pair[0] / "checkpoints", tested_pair[0] / "test_metrics.json"
    content = json.loads(metrics.read_text())
    metrics.write_text(json.dumps(content | {"conditions": content["conditions"] | {"checkpoint": "last.ckpt"}}))
    assert read_run(tested_pair[0]).checkpoint == checkpoints / "best.ckpt"
    (checkpoints / "last.ckpt").write_bytes((checkpoints / "best.ckpt").read_bytes())
    assert read_run(tested_pair[0]).checkpoint == checkpoints / "last.ckpt"


def test_runs_with_other_crops_share_no_view(tested_pair):
    def cut(runs, models):
        object.__setattr__(models["hard"].encoder.preprocessing, "crop", None)
        object.__setattr__(models["hard"].encoder.preprocessing, "resize", 12)

    names = [image["name"] for image in explorer_of(tested_pair, cut)[0]]
    assert len(names) == 8 and sum(name.endswith(", as hard crops it") for name in names) == 4


def test_the_page_shows_attention_along_the_tested_caption(tested_pair, shapes_settings):
    save_checkpoint(tested_pair[1] / "checkpoints/best.ckpt", output=SummedOutput())
    index = shapes_settings[0].index("test")
    model = load(tested_pair[0] / "checkpoints/best.ckpt")
    rows = {image_id: row for row, image_id in enumerate(index.image_ids.tolist())}
    for image in explorer_of(tested_pair)[0]:
        path = index.image_path(rows[number_of(image)])
        soft, summed = (run["captions"][0] for run in image["runs"])
        caption = model.teacher_force_captions([path], [soft["words"]])[0]
        np.testing.assert_allclose(soft["attention"]["alphas"]["peaks"], caption.alphas.max(axis=1), rtol=1e-3)
        assert "evidence" in soft["attention"]
        assert len(summed["attention"]["evidence"]["peaks"]) == len(summed["words"])


def test_sampled_contexts_repeat_with_the_seed(tested_pair):
    save_checkpoint(tested_pair[1] / "checkpoints/best.ckpt", attention=HardAttention)

    def sample(runs, models):
        runs[1].conditions["context_mode"] = "sample"

    first, again, other = (explorer_of(tested_pair, sample, seed)[0] for seed in (1, 1, 2))
    assert first == again and first != other


def test_no_output_replaces_a_compared_run(tested_pair, tmp_path):
    inputs = "config.yaml test_metrics.json test_captions.json checkpoints/best.ckpt metrics/version_0/metrics.csv"
    (tmp_path / "link.svg").symlink_to(tested_pair[1] / "config.yaml")
    outputs = [(option, tested_pair[1] / name) for name in inputs.split() for option in ("output", "json")]
    before = [path.read_bytes() for _, path in outputs]
    for option, path in [*outputs, ("figure", tmp_path / "link.svg")]:
        with pytest.raises(
            InputError, match=f"--{option} {path}: (would replace {path.resolve()}, which is an|must end in)"
        ):
            compare_command(*map(str, tested_pair), resamples=9, **{option: path})
    assert [path.read_bytes() for _, path in outputs] == before
    assert not (tested_pair[0].parent / "comparison.html").exists()


@pytest.fixture
def commands(tested_pair, monkeypatch) -> list[list[str]]:
    """The commands of `captioning` that were started. The second run has no captions before one has tested it."""
    captions, real, started = tested_pair[1] / "test_captions.json", subprocess.run, []
    content = captions.read_text()
    captions.unlink()

    def run(command, **options):
        if "captioning" not in command:
            return real(command, **options)
        started.append(command[1:])
        captions.write_text(content)
        return real(["echo", "printed by the test"], **options)

    monkeypatch.setattr(subprocess, "run", run)
    return started


def test_an_untested_run_is_named_with_its_command_and_tested_with_test(tested_pair, commands, capsys):
    best = str(tested_pair[1] / "checkpoints" / "best.ckpt")
    missing = f"hard has no captions; to test it: captioning test --ckpt_path {best}"
    compare_command(*map(str, tested_pair), resamples=9, images=0)
    assert missing in capsys.readouterr().out and commands == []
    compare_command(*map(str, tested_pair), resamples=9, images=0, test=True)
    printed = capsys.readouterr()
    assert "testing hard" in printed.err
    assert commands == [["-m", "captioning", "test", "--ckpt_path", best]]
    assert "has no captions" not in printed.out


@pytest.mark.slow
def test_a_run_that_was_trained_further_after_its_test_is_left_out_or_tested_again(tested_pair, commands, capsys):
    best, metrics = tested_pair[0] / "checkpoints/best.ckpt", tested_pair[0] / "test_metrics.json"
    content = json.loads(metrics.read_text())
    content["conditions"] |= {"checkpoint": "best.ckpt", "weights": checksum(best)}
    metrics.write_text(json.dumps(content))
    (tested_pair[0] / "argmax").mkdir()
    (tested_pair[0] / "argmax/test_metrics.json").write_text(json.dumps(content))
    assert read_run(tested_pair[0]).captions and read_run(tested_pair[0]).metrics_by_context["argmax"] == {"bleu4": 1.0}
    edit_checkpoint(best, lambda saved: next(iter(saved["state_dict"].values())).add_(1))
    run = read_run(tested_pair[0])
    assert (run.captions, run.metrics, run.metrics_by_context, run.checkpoint) == (None, {}, {}, best)
    compare_command(*map(str, tested_pair), resamples=9, images=0)
    old = "soft was tested with other weights than its checkpoint has now; to test it: captioning test"
    assert f"{old} --ckpt_path {best}" in capsys.readouterr().out and commands == []
    compare_command(*map(str, tested_pair), resamples=9, images=0, test=True)
    assert [words[-1] for words in commands] == [str(best), str(tested_pair[1] / "checkpoints/best.ckpt")]


@pytest.mark.slow
def test_json_alone_is_printed_also_if_runs_are_tested_first(tested_pair, commands, capfd):
    compare_command(*map(str, tested_pair), resamples=9, images=0, test=True, json=Path("-"))
    printed = capfd.readouterr()
    assert json.loads(printed.out)["runs"] and "printed by the test" not in printed.err
