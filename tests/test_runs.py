"""A run's folder is read as it is, also half finished; settings become comparable lines."""

from __future__ import annotations

import json

import pytest
from helpers_runs import CAPTION, make_run

from captioning.comparison.runs import Run, flat, number, read_run
from captioning.errors import InputError
from captioning.evaluation.records import NounHit, read_metrics


def test_a_folder_is_read_with_everything_in_it(tmp_path):
    csv = "epoch,step,train/loss,val/bleu4\n0,4,2.5,\n0,9,,10.5\n1,9,1.5,\n1,19,,11\n"
    folder = make_run(tmp_path / "soft", captions=[CAPTION], settings={"data": {"batch_size": 8}}, csv=csv)
    (folder / "checkpoints/best.ckpt").touch()
    run = read_run(folder)
    assert run.name == "soft" and run.folder == folder and run.checkpoint == folder / "checkpoints/best.ckpt"
    assert run.settings == {"data": {"batch_size": 8}}
    assert run.curves["train/loss"] == [(4, 2.5), (9, 1.5)] and run.curves["val/bleu4"] == [(9, 10.5), (19, 11)]
    assert run.scores == {"bleu4": 12.5} and run.search == {"beam_size": 3, "inference": "expected"}
    assert run.captions is not None
    assert run.captions[7].references == CAPTION["references"] and run.captions[7].log_prob == -2.5
    assert run.captions[7].hits == [NounHit(2, "dog", True, 0.25, 0.5, 0.4, 0.2, 0.3)]
    assert run.captions[7].reference_hits == []
    assert run.how_to_test == ""


def test_a_resumed_runs_curve_goes_on_and_what_was_logged_twice_counts_once(tmp_path):
    folder = make_run(tmp_path / "a", csv="step,train/loss\n1,5\n2,4\n3,9\n")
    for version, text in ((10, "step,train/loss\n4,1\n"), (2, "step,train/loss\n3,3\n4,7\n")):
        (folder / f"metrics/version_{version}").mkdir()
        (folder / f"metrics/version_{version}/metrics.csv").write_text(text)
    assert read_run(folder).curves["train/loss"] == [(1, 5), (2, 4), (3, 3), (4, 1)]


def test_a_killed_runs_last_line_costs_that_line(tmp_path):
    folder = make_run(tmp_path / "a", csv="step,train/loss,val/nll\n1,5,\n2,4,nan\n3")
    assert read_run(folder).curves == {"train/loss": [(1, 5), (2, 4)]}


def test_an_untested_run_names_the_command_that_tests_it(tmp_path):
    with_config = make_run(tmp_path / "a", settings={"data": {}})
    without = make_run(tmp_path / "b")
    for folder in (with_config, without):
        (folder / "checkpoints/best.ckpt").touch()
    assert read_run(with_config).how_to_test == f"captioning test --ckpt_path {with_config}/checkpoints/best.ckpt"
    # `captioning test` would need a config; the script takes the checkpoint's.
    assert read_run(without).how_to_test == f"captioning evaluate --model {without}/checkpoints/best.ckpt"


def test_a_run_whose_test_captioned_nothing_is_an_untested_one(tmp_path):
    folder = make_run(tmp_path / "a", settings={"data": {}})
    (folder / "checkpoints/best.ckpt").touch()
    (folder / "test_captions.json").write_text("[]")
    run = read_run(folder)
    assert run.captions is None and run.how_to_test.startswith("captioning test --ckpt_path")


def test_what_is_no_run_is_refused_by_name(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty: not a run; it has none of config.yaml"):
        read_run(tmp_path / "empty")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("test_captions.json", "[{", "cannot be read"),
        ("test_captions.json", "{}", "not what `captioning test` writes"),
        ("test_captions.json", '[{"image_id": 3}]', "not what `captioning test` writes"),
        ("test_captions.json", "[3]", "not what `captioning test` writes"),
        ("test_captions.json", json.dumps([CAPTION | {"hits": [{"step": 1}]}]), "not what `captioning test` writes"),
        ("test_metrics.json", "[]", "not what `captioning test` writes"),
        ("config.yaml", "a: [", "not a YAML file"),
        ("config.yaml", "- a", "not a configuration"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, file, text, message):
    folder = make_run(tmp_path / "a", captions=[CAPTION], settings={})
    (folder / file).write_text(text)
    with pytest.raises(InputError, match=f"{file}: {message}"):
        read_run(folder)


def test_numbers_that_no_test_writes_are_refused(tmp_path):
    (tmp_path / "test_metrics.json").write_text('{"test/bleu4": 1, "search": {"beam_size": 1%s}}' % ("0" * 400))
    with pytest.raises(InputError, match=r"test_metrics\.json: beam_size is no number that `captioning test` writes"):
        read_metrics(tmp_path / "test_metrics.json")


def test_settings_become_lines_with_short_names_of_classes():
    decoder = {
        "class_path": "captioning.model.AttentionDecoder",
        "init_args": {"attention": {"class_path": "captioning.attention.SoftAttention"}, "dropout": 0.5},
    }
    callbacks = [{"class_path": "x.Throughput", "init_args": {"every_n_steps": 5}}, {"class_path": "x.Unfreeze"}]
    assert flat({"model": {"decoder": decoder}, "trainer": {"callbacks": callbacks, "devices": [0, 1]}}) == {
        "model.decoder": "AttentionDecoder",
        "model.decoder.attention": "SoftAttention",
        "model.decoder.dropout": 0.5,
        "trainer.callbacks.Throughput": "Throughput",
        "trainer.callbacks.Throughput.every_n_steps": 5,
        "trainer.callbacks.Unfreeze": "Unfreeze",
        "trainer.devices": [0, 1],
    }


def test_speed_is_the_median_of_what_was_logged():
    run = Run("a", "a", curves={"train/captions_per_second": [(1, 10.0), (2, 500.0), (3, 480.0)]})
    assert run.captions_per_second == 480
    assert Run("a", "a").captions_per_second is None


def test_a_logged_number_over_equal_parts_of_the_training():
    curves = {"train/beta": [(-7, 9.0), (0, 0.2), (49, 0.4), (50, 0.5), (99, 0.7)], "val/bleu4": [(149, 1.0)]}
    run = Run("a", "a", curves=curves)
    assert run.over_training("train/beta", 3) == [pytest.approx(0.3), pytest.approx(0.6), None]
    assert run.over_training("val/bleu4", 3) == [None, None, 1.0]
    assert run.over_training("train/reward", 2) == [None, None]
    assert Run("a", "a").over_training("train/beta", 1) == [None]


def test_only_finite_numbers_are_numbers():
    assert [number(value) for value in ("2.5", 3, "", None, "nan", float("inf"), True, {}, "x")] == [2.5, 3] + [
        None
    ] * 7
