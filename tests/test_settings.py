"""A configuration file is read by its rules, and configurations are compared by dotted keys."""

import pytest

from captioning.errors import InputError
from captioning.settings import command_line, config_text, flatten, nest, read_config


def test_a_key_that_stands_twice_is_refused_with_both_lines(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("trainer: {devices: 1}\nmodel:\n  size: 5\n  parts: [{a: 1, a: 2}]\n  size: 6\ntrainer:\n")
    places = [("line 4: model.parts.0.a", 4), ("line 5: model.size", 3), ("line 6: trainer", 1)]
    twice = "; ".join(f"{key} is there twice, first in line {first}" for key, first in places)
    with pytest.raises(InputError, match=f"^--config {path}: {twice}$"):
        read_config(path, "--config")
    path.write_text("trainer:\n  max_epochs: 2\ntrainer.max_epochs: 7\n")
    with pytest.raises(InputError, match=r"line 3: trainer\.max_epochs is there twice, first in line 2$"):
        read_config(path)
    path.write_text("trainer.max_epochs: 7\ntrainer: {max_epochs: 2}\n")
    with pytest.raises(InputError, match=r"line 2: trainer\.max_epochs is there twice, first in line 1$"):
        read_config(path)
    path.write_text("a: &a {x: 1, y: 2e-3}\nb: {<<: *a, <<: {z: 4}, x: 3}\n")  # as merging means it
    assert read_config(path)["b"] == {"x": 3, "y": 0.002, "z": 4}


def test_settings_of_version_02_that_are_options_now_are_left_out_with_a_line(tmp_path, caplog):
    path = tmp_path / "old.yaml"
    path.write_text("data: {test_split: val, batch_size: 3}\nmodel: {bound_samples: null}\n")
    assert read_config(path) == {"data": {"batch_size": 3}, "model": {}}
    assert caplog.messages == ["data.test_split is ignored; it is an option now: captioning test --split"]


def test_options_that_are_gone_are_left_out_if_an_earlier_run_has_their_defaults(tmp_path):
    path = tmp_path / "config.yaml"
    encoder = {"class_path": "captioning.encoders.ConvEncoder", "init_args": {"image_size": 56, "learning_rate": None}}
    guidance = [{"class_path": "captioning.objective.MovingAverage", "init_args": {"decay": 0.9, "initial": None}}]
    objective = {"class_path": "SelfCriticalTraining", "init_args": {"baseline": "leave_one_out", "parts": guidance}}
    path.write_text(config_text({"model": {"encoder": encoder, "objective": objective}}))
    del encoder["init_args"]["learning_rate"], guidance[0]["init_args"]["initial"], objective["init_args"]["baseline"]
    assert read_config(path) == {"model": {"encoder": encoder, "objective": objective}}
    encoder["init_args"]["learning_rate"] = 0.1  # it is refused where the encoder is made
    path.write_text(config_text({"model": {"encoder": encoder}}))
    assert read_config(path) == {"model": {"encoder": encoder}}


def test_a_path_in_the_home_folder_is_written_out_in_settings_and_on_command_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "paths.yaml"
    path.write_text("root: ~/photos\nnothing: ~\nfit: [--data.features=~/features, a ~/b, 'x=~/y']\nlr: 1e-3\n")
    features = f"--data.features={tmp_path}/features"
    settings = {"root": f"{tmp_path}/photos", "nothing": None, "fit": [features, "a ~/b", "x=~/y"], "lr": 0.001}
    assert read_config(path) == settings
    assert command_line(["fit", "~/a.yaml", "--data.features=~/features"]) == ["fit", f"{tmp_path}/a.yaml", features]


def test_settings_are_read_as_they_were_written(tmp_path):
    texts = ["05879e07", "1e5", "-2E-3", "1.5e7", "12345678", "true", "null", "a: b", "~x", "猫", "0x1f", "1_000", "e7"]
    settings = {"texts": texts, "numbers": [1e-5, 2e22, 3, 0.1, True, None], "parts": {"b": 1, "a": {}}}
    (tmp_path / "config.yaml").write_text(config_text(settings), encoding="utf-8")
    assert read_config(tmp_path / "config.yaml") == settings


def test_dotted_keys_are_nested_beside_the_other_keys_of_their_sections():
    settings = {"a.b.c": 1, "a": {"b": {"d.e": 2}, "f": None}, "a.b.d.g": [3], "h": None, "h.i": {"j.k": {}, 0: 4}}
    nested = {"a": {"b": {"c": 1, "d": {"e": 2, "g": [3]}}, "f": None}, "h": {"i": {"j": {"k": {}}, "0": 4}}}
    assert nest(settings, {}) == nested


def test_settings_become_lines_with_short_names_of_known_classes():
    decoder = {
        "class_path": "captioning.model.AttentionDecoder",
        "init_args": {"attention": {"class_path": "captioning.attention.SoftAttention"}, "dropout": 0.5},
    }
    callbacks = [{"class_path": "captioning.training.Throughput", "init_args": {"every_n_steps": 5}}]
    callbacks += [{"class_path": "x.Unfreeze"}, {"class_path": "x.Unfreeze", "init_args": {"epoch": 3}}]
    assert flatten({"model": {"decoder": decoder}, "trainer": {"callbacks": callbacks, "devices": [0, 1]}}) == {
        "model.decoder": "AttentionDecoder",
        "model.decoder.attention": "SoftAttention",
        "model.decoder.dropout": 0.5,
        "trainer.callbacks.Throughput": "Throughput",
        "trainer.callbacks.Throughput.every_n_steps": 5,
        "trainer.callbacks.Unfreeze": "x.Unfreeze",
        "trainer.callbacks.Unfreeze-2": "x.Unfreeze",
        "trainer.callbacks.Unfreeze-2.epoch": 3,
        "trainer.devices": [0, 1],
    }
