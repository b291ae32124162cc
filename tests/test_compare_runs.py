"""Runs are read from folders, wandb's files and its server; the script prints, writes and reports what it cannot do."""

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
from captioning.comparison.wandb_runs import find_run, find_runs, report_command
from helpers import SCRIPTS
from helpers_runs import CAPTION, CSV, make_run, save_checkpoint

from captioning.attention import HardAttention
from captioning.cli import compare as compare_command
from captioning.comparison.attention_explorer import _image_files, explore, load_models
from captioning.comparison.compare import compare
from captioning.comparison.result import Comparison, Disagreement
from captioning.comparison.runs import Run, WandbPlace, common_folder, name_runs, read_run
from captioning.comparison.verdicts import ONE_SEED
from captioning.errors import InputError
from captioning.evaluation.metrics import NAMES
from captioning.inference import load
from captioning.model import SummedOutput


def number_of(image: dict) -> int:
    """The number of an image that the explorer shows."""
    return int(image["name"].rpartition(" ")[2])


def read_tested(folder: Path) -> list[dict]:
    return json.loads((folder / "test_captions.json").read_text())


def test_two_runs_become_a_table_a_page_and_numbers(tested_pair, capsys):
    soft, hard = map(str, tested_pair)
    numbers = tested_pair[0].parent / "numbers.json"
    compare_command.main([soft, hard, "--resamples", "50", "--json", str(numbers), "--metric", "bleu1"])
    out = capsys.readouterr().out
    for expected in (
        ONE_SEED,
        "Captions of 4 images",
        "Pointing accuracy",
        "Parameters, decoder",
    ):
        assert expected in " ".join(out.split())
    assert "beam_size" not in out and "wandb sync" not in out
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
    assert set(re.findall(r'data-explore="(.*?)"', page)) == names
    for item in content["disagreements"]:  # the name of the file, a thumbnail on the page alone
        assert item["file"].endswith(".png") and "thumbnail" not in item
        assert f"{item['file']}, image {item['image_id']}" in names
    assert len(re.findall(r'<img src="data:image/(?:png|jpeg);base64,', page)) == 4 and ONE_SEED in page
    assert not list(tested_pair[0].parent.glob("*.part"))


def test_without_image_files_the_page_has_the_texts_and_says_why(tested_pair, tmp_path, capsys):
    for folder in tested_pair:
        settings = yaml.safe_load((folder / "config.yaml").read_text())
        settings["data"]["source"]["init_args"]["root"] = str(tmp_path / "gone")
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    compare_command.main([*map(str, tested_pair), "--resamples", "9", "--output", str(tmp_path / "x.html")])
    page = (tmp_path / "x.html").read_text()
    assert "explorer-data" not in page and "a shape number 1" in re.sub(r"<[^>]*>", "", page)
    assert "The page shows no images: " in capsys.readouterr().out and "gone" in page


def test_without_checkpoints_the_page_has_the_texts_and_says_why(tested_pair, tmp_path, capsys):
    (tested_pair[0] / "checkpoints/best.ckpt").unlink()
    (tested_pair[1] / "checkpoints/best.ckpt").write_bytes(b"damaged")
    compare_command.main([*map(str, tested_pair), "--resamples", "9"])
    out = capsys.readouterr().out
    assert "No attention of soft: its checkpoint is missing." in out
    assert "No attention of hard: its checkpoint cannot be loaded." in out
    assert "hard/checkpoints/best.ckpt: not a checkpoint" in out
    assert "explorer-data" not in (tested_pair[0].parent / "comparison.html").read_text()


def test_the_attention_is_that_of_the_checkpoint_that_was_tested(tested_pair, tmp_path, capsys):
    checkpoints, metrics = tested_pair[0] / "checkpoints", tested_pair[0] / "test_metrics.json"
    content = json.loads(metrics.read_text())
    metrics.write_text(json.dumps(content | {"search": content["search"] | {"checkpoint": "last.ckpt"}}))
    assert read_run(tested_pair[0]).checkpoint.name == "best.ckpt"
    compare_command.main([*map(str, tested_pair), "--output", str(tmp_path / "x.html")])
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
    names = [
        image["name"]
        for image in json.loads(re.search(r'explorer-data">(.*?)</script>', page, flags=re.S)[1])["images"]
    ]
    assert len(names) == 8 and sum(name.endswith(", as hard cuts it") for name in names) == 4


def explored_by(folders, seed: int = 0) -> tuple[str, list[str]]:
    runs = [read_run(folder) for folder in folders]
    models, _ = load_models(runs)
    return explore(runs, models, compare(runs, resamples=9), seed=seed)


def test_the_attention_shown_is_that_along_the_tested_caption(tested_pair, shapes_settings):
    source, _ = shapes_settings
    index = source.index("test")
    page, _ = explored_by(tested_pair)
    images = json.loads(re.search(r'explorer-data">(.*?)</script>', page, flags=re.S)[1])["images"]
    soft = load(tested_pair[0] / "checkpoints/best.ckpt")
    rows = {image_id: row for row, image_id in enumerate(index.image_ids.tolist())}
    for image in images:
        path = index.image_path(rows[number_of(image)])
        (shown,) = image["runs"][0]["captions"]
        caption = soft.force_decode([path], [shown["words"]])[0]
        np.testing.assert_allclose(shown["attention"]["prior"]["peaks"], caption.alphas.max(axis=1), rtol=1e-3)


def test_the_attention_starts_at_the_first_word_that_differs(tested_pair):
    entries = {"soft": "a red dog sits", "hard": "a red cat sits"}
    for folder, caption in zip(tested_pair, entries.values(), strict=True):
        content = [entry | {"caption": caption} for entry in read_tested(folder)]
        (folder / "test_captions.json").write_text(json.dumps(content))
    page, _ = explored_by(tested_pair)
    images = json.loads(re.search(r'explorer-data">(.*?)</script>', page, flags=re.S)[1])["images"]
    assert [run["start"] for image in images for run in image["runs"]] == [2] * 8


def test_a_summed_outputs_posterior_is_shown_beside_the_alphas(tested_pair):
    save_checkpoint(tested_pair[1] / "checkpoints/best.ckpt", output=SummedOutput())
    page, _ = explored_by(tested_pair)
    images = json.loads(re.search(r'explorer-data">(.*?)</script>', page, flags=re.S)[1])["images"]
    for image in images:
        soft, marginal = (run["captions"][0] for run in image["runs"])
        assert "posterior" not in soft["attention"]
        assert len(marginal["attention"]["posterior"]["peaks"]) == len(marginal["words"])


def test_a_checkpoint_that_cannot_have_said_the_tested_captions_is_named(tested_pair):
    _, notices = explored_by(tested_pair)
    assert " ".join(notices) == (
        "4 of the 4 captions of soft shown have words that its checkpoint does not know: another checkpoint was "
        "tested, and the attention shown is not its attention; test the run again."
    )
    entries = read_tested(tested_pair[0])
    for entry in entries:
        entry["caption"] = "a <unk> cat"
    (tested_pair[0] / "test_captions.json").write_text(json.dumps(entries))
    assert explored_by(tested_pair)[1] == []


def test_sampled_contexts_repeat_with_the_seed_and_change_no_global_state(tested_pair):
    save_checkpoint(tested_pair[1] / "checkpoints/best.ckpt", attention=HardAttention)
    runs = [read_run(folder) for folder in tested_pair]
    runs[1].search["inference"] = "sample"
    models, _ = load_models(runs)
    comparison = compare(runs, resamples=9)
    before = torch.get_rng_state()
    (first, notices), (again, _), (other, _) = (explore(runs, models, comparison, seed=seed) for seed in (1, 1, 2))
    assert first == again and first != other
    assert notices[-1] == "The contexts of hard were sampled in the test; the attention shown comes from other draws."
    assert torch.equal(torch.get_rng_state(), before)
    assert models["hard"].model.decoder.attention.inference == "expected"


def test_a_data_source_outside_the_package_is_not_imported(tested_pair):
    runs = [read_run(folder) for folder in tested_pair]
    for run, path in zip(runs, ["evil.Source", "captioning.errors.InputError"], strict=True):
        run.settings = {"data": {"source": {"class_path": path}}}
    models, _ = load_models(runs)
    page, notices = explore(runs, models, compare(runs, resamples=9), seed=0)
    assert page == "" and "InputError is not a known CaptionSource" in notices[-1] and "evil" not in sys.modules


def test_settings_missing_beside_a_checkpoint_are_taken_from_it(tested_pair):
    (tested_pair[0] / "config.yaml").unlink()
    run = read_run(tested_pair[0])
    models, troubles = load_models([run])
    assert run.settings["model"]["search"]["beam_size"] == 2 and not troubles
    decoder = sum(p.numel() for p in models["soft"].model.decoder.parameters())
    assert run.parameters == {"decoder": decoder, "encoder": 1366}


def test_an_untested_run_is_named_with_its_command(tested_pair, capsys):
    (tested_pair[1] / "test_captions.json").unlink()
    compare_command.main([*map(str, tested_pair), "--resamples", "9", "--images", "0"])
    out = capsys.readouterr().out
    assert f"hard has no captions of its test split; to make them: captioning test --ckpt_path {tested_pair[1]}" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{soft}"], "give two or more runs"),
        (["{soft}", "nowhere"], "nowhere: no such folder; give a run's folder, or ENTITY/PROJECT/RUN_ID"),
        (["{runs}/soft"], "give two or more runs"),
    ],
)
def test_what_cannot_be_compared_is_one_line(tested_pair, capsys, argv, message):
    with pytest.raises(SystemExit) as left:
        compare_command.main([text.format(soft=tested_pair[0], runs=tested_pair[0].parent) for text in argv])
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


# wandb, offline


# wandb, online


def test_a_folder_stands_for_its_runs_in_order_and_the_first_one_given_is_not_there_twice(tested_pair, capsys):
    soft, hard = tested_pair
    assert [run.name for run in find_runs(str(soft.parent))] == ["hard", "soft"]
    assert [run.name for run in find_runs(str(hard))] == ["hard"]
    page = soft.parent.parent / "folder.html"
    numbers = page.with_suffix(".json")
    compare_command.main(
        [
            str(soft),
            str(soft.parent),
            "--resamples",
            "9",
            "--images",
            "0",
            "--output",
            str(page),
            "--json",
            str(numbers),
        ]
    )
    assert json.loads(numbers.read_text())["runs"] == ["soft", "hard"]


# Report

