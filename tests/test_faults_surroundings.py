"""What surrounds a run: a full disk, little memory, the environment, files in place of others, what a machine lacks."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import load_script, random_view
from helpers_faults import Fault, ends, faults, proves
from helpers_runs import edit_checkpoint, make_run, save_checkpoint, tiny_config

from captioning.checkpoint.io import damage_of
from captioning.cli import average, caption, compare, evaluate, export
from captioning.cli.fit import main
from captioning.encoders.weights import read_weights
from captioning.errors import InputError, check_range, exits_on_input_error, printable
from captioning.files import cache_folder
from captioning.inference import load
from captioning.run_folder import RunFolder
from captioning.training.wandb_run import WandbRun

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4cac19622fc3ada9\nsize 12345\n"


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    """A folder with a model, an image, captions and a config; entered."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["captioning"])
    save_checkpoint(tmp_path / "x.ckpt")
    random_view(30, 20).save("a.png")
    Path("captions.json").write_text(json.dumps([{"image_id": 1, "caption": "a dog"}]))
    Path("references.json").write_text(json.dumps({"annotations": [{"image_id": 1, "caption": "the dog"}]}))
    Path("tiny.yaml").write_text(yaml.safe_dump(tiny_config(tmp_path / "shapes")))
    for name in ("r", "s"):
        caption = {"image_id": 1, "caption": "a dog", "log_prob": -1.0, "finished": True, "references": ["a dog"]}
        make_run(tmp_path / name, captions=[caption], settings={"seed_everything": 1})
    return tmp_path


# Disks


MODELS = ["--model", "x.ckpt", "--model", "x.ckpt"]
WRITERS: dict[Fault, tuple[Callable[[list[str]], None], list[str]]] = {
    Fault("a full disk in `average`", "y.ckpt: cannot be written (File too large)"): (
        average.main,
        [*MODELS, "--output", "y.ckpt"],
    ),
    Fault("a full disk in `export`", "model.safetensors: cannot be written (File too large)"): (
        export.main,
        ["--model", "x.ckpt", "--output", "y"],
    ),
    Fault("a full disk in `caption --json`", "y.json: cannot be written (File too large)"): (
        caption.main,
        ["a.png", "--model", "x.ckpt", "--json", "y.json"],
    ),
    Fault("a full disk in `caption --overlay`", "y.png: cannot be written (File too large)"): (
        caption.main,
        ["a.png", "--model", "x.ckpt", "--overlay", "y.png"],
    ),
    Fault("a full disk in `evaluate`", "y.json: cannot be written (File too large)"): (
        evaluate.main,
        ["--captions", "captions.json", "--references", "references.json", "--json", "y.json"],
    ),
    Fault("a full disk in `compare`", "y.html: cannot be written (File too large)"): (
        compare.main,
        ["r", "s", "--resamples", "5", "--output", "y.html"],
    ),
}


@faults(WRITERS)
def test_a_full_disk_names_the_file(workdir, capsys, monkeypatch, fault, case):
    monkeypatch.setenv("CAPTIONING_JAVA", "off")
    command, arguments = case
    before, files = resource.getrlimit(resource.RLIMIT_FSIZE), sorted(os.listdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        ends(capsys, fault, command, arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [name for name in sorted(os.listdir()) if Path(name).is_file()] == [n for n in files if Path(n).is_file()]


@proves(Fault("a full disk while training logs", "tiny: cannot be written (File too large)"))
def test_a_full_disk_while_training_names_the_run(workdir, capsys, monkeypatch, fault):
    from pytorch_lightning.loggers import CSVLogger

    def full(*_: Any, **__: Any) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr(CSVLogger, "log_metrics", full)
    ends(capsys, fault, main, ["fit", "--config", "tiny.yaml"])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@proves(Fault("standard output to a full disk", "standard output"))
def test_an_output_that_cannot_be_written_is_one_line(fault):
    code = "from captioning.errors import exits_on_input_error as e; e(lambda: print('x'))()"
    for options, line in ([], "cannot be written (No space left on device)"), (["-u"], "No space left on device"):
        command = [sys.executable, *options, "-c", code]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment)
        assert done.returncode == fault.code and done.stderr.count("\n") == 1
        assert done.stderr.startswith(f"error: {fault.sees}") and line in done.stderr


# Memory


def no_memory(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: 9 bytes"
    )


@proves(Fault("too little memory for a checkpoint", "out of memory ("))
def test_too_little_memory_is_not_called_damage(workdir, capsys, monkeypatch, fault):
    monkeypatch.setattr(torch, "load", no_memory)
    assert "damaged" not in ends(capsys, fault, caption.main, ["a.png", "--model", "x.ckpt"])


def test_a_checkpoint_is_not_damaged_because_memory_is_short(workdir, monkeypatch):
    monkeypatch.setattr("captioning.checkpoint.io.refuse_inflated_archive", no_memory)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        damage_of(Path("x.ckpt"))


# Files in place of others


OTHER_FILES = {
    Fault("a pointer of git-LFS in place of an encoder's weights", "the pointer of git-LFS, not the weights"): LFS,
    Fault("a text in place of an encoder's weights", "w.pth: "): b"hello\n",
    Fault("a page of HTML in place of an encoder's weights", "w.pth: "): b"<!DOCTYPE html>\n<html>404</html>\n",
    Fault("an empty file in place of an encoder's weights", "w.pth: "): b"",
}


@faults(OTHER_FILES)
def test_weights_that_are_none_are_refused(workdir, capsys, fault, case):
    Path("w.pth").write_bytes(case)
    ends(capsys, fault, read_weights, "w.pth")
    Path("w.safetensors").write_bytes(case)
    with pytest.raises(InputError, match=r"w\.safetensors: "):
        read_weights("w.safetensors")


@proves(
    Fault("a pointer of git-LFS in place of a checkpoint", "is the pointer of git-LFS, not the checkpoint; run git")
)
def test_a_pointer_of_git_lfs_is_told_from_a_damaged_checkpoint(workdir, capsys, fault):
    Path("p.ckpt").write_bytes(LFS)
    ends(capsys, fault, caption.main, ["a.png", "--model", "p.ckpt"])


@proves(Fault("a pointer of git-LFS in an exported folder", "is the pointer of git-LFS, not the file; run git"))
def test_a_pointer_of_git_lfs_is_told_in_an_exported_folder(workdir, capsys, fault):
    export.main(["--model", "x.ckpt", "--output", "e"])
    Path("e/model.safetensors").write_bytes(LFS)
    ends(capsys, fault, caption.main, ["a.png", "--model", "e"])


@proves(
    Fault("a deviation of 10^400 in a checkpoint's preprocessing", "preprocessing: std must be in 1e-06 .. 1000000.0")
)
@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan"), 0.0, 1e-320])
def test_numbers_beyond_floats_are_out_of_range(workdir, capsys, fault, value):
    edit_checkpoint("x.ckpt", lambda content: content["captioning"]["preprocessing"].update(std=[1.0, value, 1.0]))
    ends(capsys, fault, load, "x.ckpt")


@pytest.mark.parametrize("note", [{"tags": 5}, {"tags": [1, 2]}, {"entity": 3, "project": 4}, {"step": "x"}, {"id": 1}])
def test_a_note_of_wandb_with_other_types_is_not_followed_into_an_error(tmp_path, note):
    content = {"id": "ab", "entity": "e", "project": "p", "tags": ["x"], "step": 3} | note
    (tmp_path / "wandb_run.json").write_text(json.dumps(content))
    WandbRun.of_folder(RunFolder(tmp_path))


@proves(Fault("a pipe in place of another data set's config", "--data p.yaml: cannot be read (is no regular file)"))
def test_a_pipe_is_not_waited_for(workdir, capsys, fault):
    os.mkfifo("p.yaml")
    settings = yaml.safe_load(Path("tiny.yaml").read_text())
    edit_checkpoint("x.ckpt", lambda content: content["captioning"].update(settings=settings))
    ends(capsys, fault, evaluate.main, ["--model", "x.ckpt", "--data", "p.yaml"])


# The script without PyTorch

PREPROCESSING = {"resize": 12, "crop": None, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bilinear"}
EXPORTED: dict[str, Any] = {
    "e/config.json": {"preprocessing": PREPROCESSING, "tokenizer": None, "settings": {}},
    "e/vocabulary.json": {"words": ["a", "dog"]},
    "e/encoder.onnx": "no graph",
}


def config(**changes: Any) -> dict[str, Any]:
    return {"e/config.json": EXPORTED["e/config.json"] | changes}


def preprocessing(**changes: Any) -> dict[str, Any]:
    return config(preprocessing=PREPROCESSING | changes)


SCRIPT: dict[Fault, dict[str, Any]] = {
    Fault("`caption_onnx.py` with a list for settings", "config.json: is not what captioning export"): {
        "e/config.json": []
    },
    Fault("`caption_onnx.py` with settings that are no JSON", "config.json: is no JSON"): {"e/config.json": "{"},
    Fault("`caption_onnx.py` with JSON nested 100,000 deep", "config.json: is no JSON"): {"e/config.json": "[" * 10**5},
    Fault("`caption_onnx.py` without preprocessing", "config.json: has no preprocessing"): config(preprocessing=None),
    Fault("`caption_onnx.py` with images of `x` pixels", "resize must be in 1 .. 10000 pixels"): preprocessing(
        resize="x"
    ),
    Fault("`caption_onnx.py` with a crop of -1", "crop must be in 1 .. 12 pixels, got -1"): preprocessing(crop=-1),
    Fault("`caption_onnx.py` with a mean of text", "mean must be three numbers"): preprocessing(mean=["x"] * 3),
    Fault("`caption_onnx.py` with a deviation of 10^400", "std must be three numbers"): preprocessing(
        std=[1, 10**400, 1]
    ),
    Fault("`caption_onnx.py` with an unknown interpolation", "interpolation x is not known"): preprocessing(
        interpolation="x"
    ),
    Fault("`caption_onnx.py` with words that are numbers", "vocabulary.json: has no list of words"): {
        "e/vocabulary.json": {"words": [1, 2]}
    },
    Fault("`caption_onnx.py` without a vocabulary", "vocabulary.json: cannot be read (No such file"): {
        "e/vocabulary.json": None
    },
    Fault("`caption_onnx.py` with a text for a graph", "encoder.onnx: is no graph, or a damaged one"): {},
    Fault("`caption_onnx.py` without a graph", "encoder.onnx: no such file; export the folder with --onnx"): {
        "e/encoder.onnx": None
    },
}


@faults(SCRIPT)
def test_the_script_without_pytorch_refuses_in_one_line(tmp_path, capsys, monkeypatch, fault, case):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    Path("e").mkdir()
    for name, content in (EXPORTED | case).items():
        if content is not None:
            Path(name).write_text(content if isinstance(content, str) else json.dumps(content))
    monkeypatch.setattr(sys, "argv", ["caption_onnx.py", "e", "a.png"])
    ends(capsys, fault, load_script("caption_onnx").main)


# The environment


@pytest.mark.parametrize("home", ["", "relative", None])
def test_the_cache_is_never_in_the_working_directory(tmp_path, monkeypatch, home):
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if home is None:  # and no entry of the user in the system's list
        monkeypatch.setattr("os.path.expanduser", lambda path: path)
    else:
        monkeypatch.setenv("HOME", home)
    folder = cache_folder("kernels")
    assert folder.is_absolute() and not folder.is_relative_to(tmp_path)


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp1252"])
def test_characters_that_a_terminal_lacks_are_escaped(monkeypatch, encoding):
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])

    @exits_on_input_error
    def command() -> None:
        print("猫")
        raise InputError("猫.png: no such image")

    with pytest.raises(SystemExit):
        command()
    for stream, text in zip(streams, ("\\u732b\n", "error: \\u732b.png: no such image\n"), strict=True):
        stream.flush()
        assert stream.buffer.getvalue().decode("ascii") == text  # type: ignore[attr-defined]


# What a machine lacks, and what a model is not made for


TRAINER = {
    Fault("`--trainer.strategy ddp_spawn`", "--trainer.strategy ddp_spawn: copies the run"): ["strategy", "ddp_spawn"],
    Fault("`--trainer.strategy ddp_fork`", "--trainer.strategy ddp_fork: copies the run"): ["strategy", "ddp_fork"],
    Fault("`--trainer.accelerator tpu` without one", "(accelerator tpu, "): ["accelerator", "tpu"],
    Fault("`--trainer.precision transformer-engine` without it", "precision transformer-engine"): [
        "precision",
        "transformer-engine",
    ],
    Fault("`--trainer.max_time` of 10^14 days", "max_time 99999999999999:00:00:00)"): [
        "max_time",
        "99999999999999:00:00:00",
    ],
    Fault("`--trainer.accumulate_grad_batches` of 10^22", "accumulate_grad_batches must be in 1 .. 2147483648"): [
        "accumulate_grad_batches",
        "1" + 22 * "0",
    ],
    Fault("`--trainer.gradient_clip_val 1e308`", "gradient_clip_val must be in 0 .. 1e+38, got 1e+308"): [
        "gradient_clip_val",
        "1e308",
    ],
    Fault("Lightning's callback for models of another kind", "trainer.callbacks: BackboneFinetuning: "): [
        "callbacks+",
        "BackboneFinetuning",
    ],
    Fault("Lightning's average of weights", "trainer.callbacks: StochasticWeightAveraging: copies the run"): [
        "callbacks+",
        "{class_path: StochasticWeightAveraging, init_args: {swa_lrs: 0.1}}",
    ],
    Fault(
        "Lightning's search for a batch size",
        "trainer.callbacks: BatchSizeFinder: would change a value that config.yaml",
    ): [
        "callbacks+",
        "BatchSizeFinder",
    ],
    Fault("Lightning's `Timer`", "trainer.callbacks: Timer: cannot be written into the config"): [
        "callbacks+",
        "Timer",
    ],
}


@faults(TRAINER)
def test_what_the_machine_has_not_is_refused(workdir, capsys, fault, case):
    name, value = case
    ends(capsys, fault, main, ["fit", "--config", "tiny.yaml", f"--trainer.{name}", value])
    assert not Path("runs").exists() or not any(Path("runs").iterdir())


@pytest.mark.parametrize("settings", [{"checkpoint": {"filename": "{epoch}-{step}", "save_top_k": 2}}, {}])
def test_the_usual_pattern_of_a_checkpoints_name_works(workdir, settings):
    Path("more.yaml").write_text(yaml.safe_dump(settings))
    options = [] if settings else ["--checkpoint.filename", "{epoch}-{step}"]
    main(["fit", "--config", "tiny.yaml", "--config", "more.yaml", *options])
    assert sorted(os.listdir("runs/tiny/checkpoints")) == ["1-2.ckpt", "last.ckpt"]


# Messages that come early


@proves(Fault("`min_count 1000`, which no word reaches", "data.vocabulary.min_count 1000: no word of the "))
def test_a_vocabulary_without_words_is_refused_before_training(workdir, capsys, fault):
    ends(capsys, fault, main, ["fit", "--config", "tiny.yaml", "--data.vocabulary.min_count", "1000"])
    assert not any(Path("runs").iterdir())


@proves(Fault("fractions of 10^308 in `average`", "", 0, "they are divided by their sum"))
def test_fractions_whose_sum_is_beyond_floats_are_used(workdir, fault):
    from captioning.checkpoint.average import average_checkpoints

    checkpoint = average_checkpoints([Path("x.ckpt"), Path("x.ckpt")], [1e308, 1e308])
    assert [part["fraction"] for part in checkpoint["captioning"]["settings"]["averaged"]] == [0.5, 0.5]


LARGE = {
    Fault("`--batch_size` of 10^20", "argument --batch_size: must be a whole number in 1 .. 2147483647"): (
        caption.main,
        ["a.png", "--batch_size", 20 * "9"],
    ),
}


@faults(LARGE)
def test_whole_numbers_have_an_end(workdir, capsys, fault, case):
    command, arguments = case
    ends(capsys, fault, command, arguments)


def test_a_message_shows_the_beginning_of_a_long_number():
    with pytest.raises(InputError) as caught:
        check_range(0, 1, x=10**400)
    assert len(printable(caught.value)) < 120
