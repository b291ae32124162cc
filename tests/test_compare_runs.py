"""`captioning compare`: what it prints and writes, and the attention of both runs on its page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from helpers_runs import save_checkpoint

from captioning.attention import HardAttention
from captioning.cli.compare import compare as compare_command
from captioning.comparison.attention_explorer import explore, load_models
from captioning.comparison.compare import compare
from captioning.comparison.runs import read_run
from captioning.comparison.verdicts import ONE_SEED
from captioning.errors import InputError
from captioning.inference import load
from captioning.model import SummedOutput


def explored_images(page: str) -> list[dict]:
    return json.loads(re.search(r'explorer-data">(.*?)</script>', page, flags=re.S)[1])["images"]


def number_of(image: dict) -> int:
    """The number of an image that the explorer shows."""
    return int(image["name"].rpartition(" ")[2])


def read_tested(folder: Path) -> list[dict]:
    return json.loads((folder / "test_captions.json").read_text())


def test_two_runs_become_a_table_a_page_and_numbers(tested_pair, capsys):
    soft, hard = map(str, tested_pair)
    numbers = tested_pair[0].parent / "numbers.json"
    compare_command(soft, hard, resamples=50, json=numbers, metric="bleu1")
    out = capsys.readouterr().out
    for expected in (
        ONE_SEED,
        "Captions of 4 images",
        "Pointing accuracy",
        "Parameters, decoder",
    ):
        assert expected in " ".join(out.split())
    content = json.loads(numbers.read_text())
    assert ONE_SEED in content["verdicts"][0]
    assert content["provenance"]["command"].startswith("captioning compare ")
    assert content["tables"]["Speed, size and decoding"]["Parameters, decoder"]["soft"] > 100
    page = (tested_pair[0].parent / "comparison.html").read_text()
    explored = json.loads(re.search(r'class="explorer-data">(.*?)</script>', page, flags=re.S)[1])
    assert explored["runs"] == ["soft", "hard"] and len(explored["images"]) == 4
    assert "longer n-grams). The captions are those that were tested; teacher forcing gives" in page
    tested = {path.name: {entry["image_id"]: entry["caption"] for entry in read_tested(path)} for path in tested_pair}
    for image in explored["images"]:
        assert [run["run"] for run in image["runs"]] == ["soft", "hard"]
        for run in image["runs"]:  # the tested caption, and no other
            assert [" ".join(shown["words"]) for shown in run["captions"]] == [tested[run["run"]][number_of(image)]]
    names = {image["name"] for image in explored["images"]}
    for item in content["disagreements"]:
        assert item["file"].endswith(".png")
        assert f"{item['file']}, image {item['image_id']}" in names
    assert ONE_SEED in page


def test_without_image_files_the_page_has_the_texts_and_says_why(tested_pair, tmp_path, capsys):
    for folder in tested_pair:
        settings = yaml.safe_load((folder / "config.yaml").read_text())
        settings["data"]["source"]["init_args"]["root"] = str(tmp_path / "gone")
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    compare_command(*map(str, tested_pair), resamples=9, output=tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text()
    assert "explorer-data" not in page and "a shape number 1" in re.sub(r"<[^>]*>", "", page)
    assert "The page shows no images: " in capsys.readouterr().out and "gone" in page


def test_without_checkpoints_the_page_has_the_texts_and_says_why(tested_pair, tmp_path, capsys):
    (tested_pair[0] / "checkpoints/best.ckpt").unlink()
    (tested_pair[1] / "checkpoints/best.ckpt").write_bytes(b"damaged")
    compare_command(*map(str, tested_pair), resamples=9)
    out = capsys.readouterr().out
    for run in ("soft", "hard"):
        assert f"No attention of {run}: its checkpoint is missing, or cannot be loaded." in out
    assert "hard/checkpoints/best.ckpt: not a checkpoint" in out
    assert "explorer-data" not in (tested_pair[0].parent / "comparison.html").read_text()


def test_the_attention_is_that_of_the_checkpoint_that_was_tested(tested_pair, tmp_path, capsys):
    checkpoints, metrics = tested_pair[0] / "checkpoints", tested_pair[0] / "test_metrics.json"
    content = json.loads(metrics.read_text())
    metrics.write_text(json.dumps(content | {"search": content["search"] | {"checkpoint": "last.ckpt"}}))
    assert read_run(tested_pair[0]).checkpoint.name == "best.ckpt"
    compare_command(*map(str, tested_pair), resamples=9, output=tmp_path / "x.html")
    out = capsys.readouterr().out
    assert "soft was tested with last.ckpt, which is gone; the attention shown is best.ckpt's." in out
    assert "Checkpoint of the test" in out
    (checkpoints / "last.ckpt").write_bytes((checkpoints / "best.ckpt").read_bytes())
    assert read_run(tested_pair[0]).checkpoint == checkpoints / "last.ckpt"


def test_runs_that_cut_their_images_differently_share_no_view(tested_pair):
    runs = [read_run(folder) for folder in tested_pair]
    models, _ = load_models(runs)
    object.__setattr__(models["hard"].encoder.preprocessing, "crop", None)
    object.__setattr__(models["hard"].encoder.preprocessing, "resize", 12)
    page, _ = explore(runs, models, compare(runs, resamples=9), seed=0)
    names = [image["name"] for image in explored_images(page)]
    assert len(names) == 8 and sum(name.endswith(", as hard cuts it") for name in names) == 4


def explored_by(folders, seed: int = 0) -> tuple[str, list[str]]:
    runs = [read_run(folder) for folder in folders]
    models, _ = load_models(runs)
    return explore(runs, models, compare(runs, resamples=9), seed=seed)


def test_the_attention_shown_is_that_along_the_tested_caption(tested_pair, shapes_settings):
    source, _ = shapes_settings
    index = source.index("test")
    images = explored_images(explored_by(tested_pair)[0])
    soft = load(tested_pair[0] / "checkpoints/best.ckpt")
    rows = {image_id: row for row, image_id in enumerate(index.image_ids.tolist())}
    for image in images:
        path = index.image_path(rows[number_of(image)])
        (shown,) = image["runs"][0]["captions"]
        caption = soft.force_decode([path], [shown["words"]])[0]
        np.testing.assert_allclose(shown["attention"]["prior"]["peaks"], caption.alphas.max(axis=1), rtol=1e-3)


def test_a_summed_outputs_posterior_is_shown_beside_the_alphas(tested_pair):
    save_checkpoint(tested_pair[1] / "checkpoints/best.ckpt", output=SummedOutput())
    images = explored_images(explored_by(tested_pair)[0])
    for image in images:
        soft, marginal = (run["captions"][0] for run in image["runs"])
        assert "posterior" not in soft["attention"]
        assert len(marginal["attention"]["posterior"]["peaks"]) == len(marginal["words"])


def test_sampled_contexts_repeat_with_the_seed_and_change_no_global_state(tested_pair):
    save_checkpoint(tested_pair[1] / "checkpoints/best.ckpt", attention=HardAttention)
    runs = [read_run(folder) for folder in tested_pair]
    runs[1].search["inference"] = "sample"
    models, _ = load_models(runs)
    comparison = compare(runs, resamples=9)
    before = torch.get_rng_state()
    (first, _), (again, _), (other, _) = (explore(runs, models, comparison, seed=seed) for seed in (1, 1, 2))
    assert first == again and first != other
    assert torch.equal(torch.get_rng_state(), before)
    assert models["hard"].model.decoder.attention.inference == "expected"


def test_a_data_source_outside_the_package_is_not_imported(tested_pair):
    runs = [read_run(folder) for folder in tested_pair]
    for run, path in zip(runs, ["evil.Source", "captioning.errors.InputError"], strict=True):
        run.settings = {"data": {"source": {"class_path": path}}}
    models, _ = load_models(runs)
    page, notices = explore(runs, models, compare(runs, resamples=9), seed=0)
    assert page == "" and "InputError is not a known CaptionSource" in notices[-1] and "evil" not in sys.modules


def test_an_untested_run_is_named_with_its_command(tested_pair, capsys):
    (tested_pair[1] / "test_captions.json").unlink()
    compare_command(*map(str, tested_pair), resamples=9, images=0)
    out = capsys.readouterr().out
    assert f"hard has no captions of its test split; to make them: captioning test --ckpt_path {tested_pair[1]}" in out


@pytest.mark.parametrize(
    ("names", "message"),
    [(["soft"], "give two or more runs"), (["soft", "sofft"], r"sofft: no such folder of a run.* did you mean .*soft")],
)
def test_what_cannot_be_compared_is_named(tested_pair, names, message):
    with pytest.raises(InputError, match=message):
        compare_command(*(str(tested_pair[0].parent / name) for name in names))


def test_the_first_run_given_is_not_there_twice_with_those_of_its_folder(tested_pair, tmp_path):
    soft, _ = tested_pair
    numbers = tmp_path / "numbers.json"
    compare_command(str(soft), str(soft.parent), resamples=9, images=0, output=tmp_path / "x.html", json=numbers)
    assert json.loads(numbers.read_text())["runs"] == ["soft", "hard"]


def test_runs_without_captions_are_tested_first_if_that_is_asked_for(tested_pair, monkeypatch, capsys):
    captions, commands = tested_pair[1] / "test_captions.json", []
    content = captions.read_text()
    captions.unlink()

    real = subprocess.run

    def run(command, **options):
        if "captioning" not in command:
            return real(command, **options)
        commands.append(command[1:])
        captions.write_text(content)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("captioning.cli.compare.subprocess.run", run)
    compare_command(*map(str, tested_pair), resamples=9, images=0, test=True)
    best = str(tested_pair[1] / "checkpoints" / "best.ckpt")
    assert commands == [["-m", "captioning", "test", "--ckpt_path", best]]
    assert "has no captions" not in capsys.readouterr().out
