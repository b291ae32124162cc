"""Run folders are read, also of unfinished runs."""

import json
from pathlib import Path

import pytest
from helpers_runs import CAPTION, make_run

from captioning.cli import model_name
from captioning.comparison.runs import Run, find_runs, name_runs, read_run
from captioning.errors import InputError
from captioning.evaluation.caption_files import NounHit


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("best.ckpt", "best"),
        ("cats/", "cats"),
        ("mine/v1.2", "v1.2"),
        ("hf:me/cats", "cats"),
        ("a/checkpoints/b.ckpt", "a"),
        ("a/checkpoints/pretrained", "pretrained"),
        (".", Path.cwd().name),
    ],
)
def test_a_model_is_named_by_its_run_or_else_by_its_file_or_folder(model, name):
    assert model_name(model) == name


def test_a_folder_is_read_with_everything_in_it(tmp_path):
    csv = "epoch,step,train/loss,val/bleu4\n0,4,2.5,\n0,9,,10.5\n1,9,1.5,\n1,19,,11\n"
    folder = make_run(tmp_path / "soft", captions=[CAPTION], settings={"data": {"batch_size": 8}}, csv=csv)
    (folder / "checkpoints/best.ckpt").touch()
    run = read_run(folder)
    assert run.name == "soft" and run.folder == folder and run.checkpoint == folder / "checkpoints/best.ckpt"
    assert run.settings == {"data": {"batch_size": 8}}
    assert run.curves["train/loss"] == [(4, 2.5), (9, 1.5)] and run.curves["val/bleu4"] == [(9, 10.5), (19, 11)]
    assert run.metrics == {"bleu4": 12.5} and run.conditions == {"beam_size": 3, "context_mode": "expected"}
    assert run.captions is not None
    assert run.captions[7].references == CAPTION["references"] and run.captions[7].log_prob == -2.5
    assert run.captions[7].hits == [NounHit(2, "dog", True, 0.25, 0.5, 0.4, 0.2, 0.3)]
    assert run.captions[7].reference_hits == []


def test_curves_continue_in_a_resumed_run_and_an_incomplete_last_line_is_left_out(tmp_path):
    folder = make_run(tmp_path / "a", csv="step,train/loss,val/nll\n1,5,\n2,4,nan\n3,9,\n4")
    for version, text in ((10, "step,train/loss\n4,1\n"), (2, "step,train/loss\n3,3\n4,7\n")):
        (folder / f"metrics/version_{version}").mkdir()
        (folder / f"metrics/version_{version}/metrics.csv").write_text(text)
    assert read_run(folder).curves == {"train/loss": [(1, 5), (2, 4), (3, 3), (4, 1)]}  # logged twice, the later counts


def test_the_conditions_of_a_test_have_the_names_of_today(tmp_path):
    folder = make_run(tmp_path / "a", captions=[CAPTION])
    earlier = {"test/bleu4": 12.5, "search": {"inference": "argmax", "bound_samples": 8}}
    (folder / "test_metrics.json").write_text(json.dumps(earlier))
    assert read_run(folder).conditions == {"context_mode": "argmax", "bound_draws": 8}


def test_hits_of_an_earlier_version_have_the_names_of_today(tmp_path):
    hit = CAPTION["hits"][0]
    names = {"center_hit": "centre_hit", "uniform_correctness": "uniform", "center_correctness": "centre"}
    earlier = CAPTION | {"hits": [{names.get(name, name): value for name, value in hit.items()}]}
    run = read_run(make_run(tmp_path / "a", captions=[earlier]))
    assert run.captions[7].hits == [NounHit(**hit)]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("test_captions.json", "[{", "cannot be read"),
        ("test_captions.json", "{}", "expected what `captioning test` writes"),
        ("test_captions.json", '[{"image_id": 3}]', "expected what `captioning test` writes"),
        ("test_metrics.json", "[]", "expected what `captioning test` writes"),
        ("config.yaml", "a: [", "not a YAML file"),
        ("config.yaml", "- a", "not a configuration"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, file, text, message):
    folder = make_run(tmp_path / "a", captions=[CAPTION], settings={})
    (folder / file).write_text(text)
    with pytest.raises(InputError, match=f"{file}: {message}"):
        read_run(folder)


def test_speed_is_the_median_of_what_was_logged():
    run = Run("a", curves={"train/captions_per_second": [(1, 10.0), (2, 500.0), (3, 480.0)]})
    assert run.captions_per_second == 480
    assert Run("a").captions_per_second is None


def test_a_folder_stands_for_its_runs_by_name(tmp_path):
    for name in ("soft", "hard"):
        make_run(tmp_path / name, captions=[CAPTION])
    (tmp_path / "notes").mkdir()
    assert [run.name for run in find_runs(tmp_path)] == ["hard", "soft"]
    assert [run.name for run in find_runs(tmp_path / "soft")] == ["soft"]
    with pytest.raises(InputError, match=r"notes: not a run; it has none of config.yaml"):
        find_runs(tmp_path / "notes")


def test_runs_of_one_name_have_their_folders_as_names():
    runs = [Run(Path(folder).name, Path(folder)) for folder in ("runs/a/soft", "runs/hard", "runs/b/soft")]
    name_runs(runs)
    assert [run.name for run in runs] == ["runs/a/soft", "hard", "runs/b/soft"]
