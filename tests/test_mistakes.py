"""Mistakes of ordinary users: one line that says what is wrong and what was probably meant, and exit code 2."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from helpers import save_image
from helpers_faults import command, refusal
from helpers_runs import make_run, save_checkpoint, tiny_config

from captioning.cli import IMPORTED_MODULES
from captioning.data.shapes import ShapesSource


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Iterator[Path]:
    """A working directory with a configuration, data, a run, and files of other kinds."""
    folder = tmp_path_factory.mktemp("mistakes")
    ShapesSource(str(folder / "shapes"), train=4, val=2, test=2, image_size=48).prepare()
    ShapesSource(str(folder / "holes"), train=4, val=2, test=2, image_size=48).prepare()
    (folder / "holes/val/000002.png").unlink()
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny_config(folder / "shapes")))
    (folder / "bad.yaml").write_text("model: 1\n  data: [\n")
    (folder / "list.yaml").write_text("- a\n")
    (folder / "twice.yaml").write_text("trainer: {max_epochs: 1}\ntrainer: {}\n")
    (folder / "encoder.yaml").write_text("class_path: ConvEncoder\nclass_path: ConvEncoder\n")
    (folder / "seed.yaml").write_text("seed_everything: -1\n")
    (folder / "names.yaml").write_text("data: gone.yaml\n")
    (folder / "section.yaml").write_text("modle: {search: {beam_size: 3}}\n")
    (folder / "limit.yaml").write_text("data: {limit_imagess: 5}\n")
    (folder / "stoping.yaml").write_text("early_stoping: {monitor: val/bleu4}\n")
    (folder / "argument.yaml").write_text("model: {encoder: {class_path: ConvEncoder, init_args: {chanels: [4]}}}\n")
    earlier = "{class_path: SoftAttention, init_args: {normaliser: {class_path: Sparsemax}}}"
    (folder / "earlier.yaml").write_text(f"model: {{decoder: {{init_args: {{attention: {earlier}}}}}}}\n")
    (folder / "notes.txt").write_text("not a model\n")
    (folder / "latin.md").write_bytes(b"# Caf\xe9\n")
    (folder / "exported").mkdir()
    (folder / "exported/config.json").write_text("{}")
    (folder / "ended/checkpoints").mkdir(parents=True)
    (folder / "ended/checkpoints/last.ckpt").touch()
    save_image(folder / "photo.png")
    save_checkpoint(make_run(folder / "runs/soft", captions=[], settings={"model": {}}) / "checkpoints/best.ckpt")
    torch.save({"state_dict": {}}, folder / "foreign.ckpt")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("WANDB_MODE", "disabled")
        yield folder


FIT = "fit --config tiny.yaml "
IN_RUNS = ": checkpoints and logs of a run are in RUNS/NAME; give --runs and --name"
MISTAKES = {
    # commands and files; test_startup has those that are found before torch is imported
    "fit --config gone.yaml": "--config gone.yaml: cannot be read (No such file or directory)",
    "test --ckpt_path=gone.ckpt": "gone.ckpt: the checkpoint cannot be read (No such file or directory)",
    "fit --config tiny.yaml --init_from gone.ckpt": "gone.ckpt: the checkpoint cannot be read (No such file",
    "caption gone.png": "error: gone.png: no such image file",
    "caption https://a.b/c.png": "https://a.b/c.png: is an address; download the image",
    "caption photo.png --model gone.ckpt": "gone.ckpt: the checkpoint cannot be read (No such file or directory)",
    "evaluate --captions gone.json --references x.json": "gone.json: cannot be read (No such file or directory)",
    "fit": "model.encoder, model.decoder, data.source, as in captioning fit --config configs/shapes_soft.yaml",
    "fit --config": "error: argument -c/--config: expected one argument (see captioning fit --help)",
    "fit --ckpt_path exported": "exported: is a folder; give a .ckpt file",
    FIT + "--ckpt_path ended": "--ckpt_path ended: is a folder; give ended/checkpoints/last.ckpt",
    "fit --name new": "are required: model.encoder, model.decoder, data.source, as in captioning fit --config",
    "fit --config bad.yaml": "--config bad.yaml: not a YAML file (mapping values are not allowed",
    "fit --config list.yaml": "--config list.yaml: not a configuration",
    FIT + "--config twice.yaml": "--config twice.yaml: line 2: trainer is there twice, first in line 1",
    FIT + "--model.encoder encoder.yaml": "line 2: class_path is there twice, first in line 1",
    FIT + "--config section.yaml": "is not accepted; did you mean --model.search.beam_size?",
    FIT + "--config stoping.yaml": "is not accepted; did you mean --early_stopping.monitor?",
    FIT + "--config argument.yaml": "Option 'chanels' is not accepted",
    FIT + "--config names.yaml": "Unable to load config 'gone.yaml'",
    # options, classes and their arguments
    FIT + "--data.batch_sise 3": "unrecognized arguments: --data.batch_sise 3; did you mean --data.batch_size?",
    FIT + "stray": "unrecognized arguments: stray",
    FIT + "--lr 0.1": "unrecognized arguments: --lr 0.1; did you mean --model.optimizer.lr?",
    FIT + "--learning_rate=0.1": "did you mean --model.optimizer.lr?",
    FIT + "--epochs 3": "did you mean --trainer.max_epochs?",
    FIT + "--optimizer.lr 0.1": "did you mean --model.optimizer.lr?",
    FIT + "--beam 3": "did you mean --model.search.beam_size?",
    FIT + "--seed 3": "did you mean --seed_everything?",
    FIT + "--monitor val/nll": "did you mean --checkpoint.monitor?",  # of three options of this name the first
    FIT + "--gpu 2": "did you mean --trainer.devices?",
    FIT + "--gpus 2": "did you mean --trainer.devices?",
    FIT + "--resume last.ckpt": "did you mean --ckpt_path?",
    FIT + "--trainer.callbacks captioning.training.CaptionSamples": "has no attribute 'CaptionSamples'",
    FIT + "--trainer.max_epochs abc": "Errors: - Expected a <class 'int'>",
    FIT + "--trainer.precision 17": "bf16-mixed",
    FIT + "--data.group imag": "Expected a typing.Literal['length', 'image']. Got value: imag",
    FIT + "--model.decoder.attention SoftAtention": "Expected a dot import path string: SoftAtention",
    FIT + "--model.encoder captioning.encoders.ConvEncodr": "'captioning.encoders' has no attribute 'ConvEncodr'",
    FIT + "--model.decoder.attention.dropuot 0.1": "Option 'dropuot' is not accepted",
    FIT + "--config earlier.yaml": "is not accepted; did you mean normalizer?",
    FIT + "--model.decoder.attention.normaliser Sparsemax": "is not accepted; did you mean normalizer?",
    FIT + "--model.decoder.attention HardAttention --model.decoder.attention.inference argmax": "mean context_mode?",
    FIT + "--model.encoder nowhere.Mine": "Importing 'nowhere.Mine' is not allowed",
    "fit --config tiny.yaml --data.source CocoSource": "shapes/annotations/captions_train2017.json: ",
    FIT + "--data.batch_size 0": "batch_size must be at least 1, got 0",
    FIT + "--model.decoder.attention HardAttention --model.decoder.attention.ramp=[752,846]": (
        "fractions of training (0 to 1, no numbers of batches) in ascending order, got [752.0, 846.0]"
    ),
    FIT + "--model.search.beam_size 0": "beam_size must be in 1 .. 1000, got 0",
    FIT + "--model.decoder.dropout 1.5": "dropout must be in 0 .. 0.99, got 1.5",
    FIT + "--seed_everything -1": "-1 is not in bounds, numpy accepts from 0 to 4294967295",
    FIT + "--config seed.yaml": "-1 is not in bounds, numpy accepts from 0 to 4294967295",
    FIT + "--trainer.accelerator toaster": "invalid accelerator name",
    FIT + "--early_stopping.monitor val/bleu5": "val/bleu5: no validation logs that; did you mean val/bleu4?",
    FIT + "--checkpoint.mode min": "--checkpoint.mode min: val/bleu4 is best at its maximum; set it to max",
    FIT + "--checkpoint.monitor bleu4": "bleu4: no validation logs that; did you mean val/bleu4?",
    FIT + "--early_stopping.monitor train/loss": "--early_stopping.mode: give min or max for train/loss",
    FIT + "--trainer.callbacks ModelCheckpoint --trainer.callbacks.monitor val/bleu4": (
        "trainer.callbacks: ModelCheckpoint.mode min: val/bleu4 is best at its maximum"
    ),
    FIT
    + "--checkpoint.save_top_k 2": "all would be best.ckpt; name them apart, as by --checkpoint.filename 'best_{step}'",
    FIT + "--trainer.overfit_batches 1": "has no effect; give --config configs/overlays/overfit.yaml",
    FIT + "--trainer.precision bf16-true": "weights are trained in float32; give bf16-mixed",
    FIT + "--trainer.precision 16-true": "weights are trained in float32; give 16-mixed",
    FIT + "--trainer.enable_checkpointing false": "`enable_checkpointing=False` but found `ModelCheckpoint`",
    FIT + "--checkpoint.dirpath big_disk": "--checkpoint.dirpath" + IN_RUNS,
    FIT + "--last.dirpath=big_disk": "--last.dirpath" + IN_RUNS,
    FIT + "--trainer.default_root_dir big_disk": "--trainer.default_root_dir" + IN_RUNS,
    FIT + "--trainer.logger CSVLogger --trainer.logger.save_dir logs": "--trainer.logger.save_dir" + IN_RUNS,
    FIT + "--trainer.accumulate_grad_batches 0": "--trainer.accumulate_grad_batches must be at least 1, got 0",
    FIT + "--trainer.check_val_every_n_epoch 0": "--trainer.check_val_every_n_epoch must be at least 1, got 0",
    FIT + "--trainer.gradient_clip_val -1": "--trainer.gradient_clip_val must be at least 0, got -1",
    FIT + "--trainer.max_time 1": "`Timer(duration='1')` is not a valid duration",
    FIT + "--trainer.limit_val_batches 3.5": "invalid value 3.5 for limit_val_batches",
    FIT + "--data.augmentation.random_crop true": "data.augmentation.random_crop: this encoder sees the whole image",
    FIT + "--data.source.root nowhere --data.source KarpathySource --data.source.json_path no.json "
    "--data.source.image_dir .": "no.json: missing; see data/README.md",
    FIT + "--data.source.root holes --model.encoder.image_size 0": (  # data are read before the model is built
        '1 of the 2 image files of the split are missing or empty, such as "holes/val/000002.png"'
    ),
    FIT + "--model.encoder.image_size 0": "image_size must be at least 1",
    FIT + "--model.optimizer.lr -1": "model.optimizer or model.scheduler: Invalid learning rate: -1.0",
    # models
    "test": "required: --ckpt_path, as in captioning test --ckpt_path",
    "validate --ckpt_path runs/soft/checkpoints/best.ckpt --split test": "validation split; use captioning test",
    "test --ckpt_path runs/soft": "runs/soft: is a folder; give runs/soft/checkpoints/best.ckpt",
    "fit --ckpt_path best --runs elsewhere": "--ckpt_path best: elsewhere/run has no checkpoints/best.ckpt; name the",
    FIT + "--ckpt_path last": "--ckpt_path last: runs/tiny has no checkpoints/last.ckpt; name the run by --name",
    "test --ckpt_path pretrained --config tiny.yaml --trainer.devices 1": "--trainer.devices 1; captioning fit has it",
    "test --ckpt_path pretrained --config tiny.yaml --trainer.precision 32": "arguments: --trainer.precision 32 (see",
    "test --ckpt_path pretrained --config tiny.yaml --bound_samples 2": "did you mean captioning test --bound_draws?",
    "test --ckpt_path pretrained --config limit.yaml": "got 'limit_imagess'; did you mean limit_images?",
    "test --ckpt_path pretrained --config names.yaml": "names.yaml: data is a file; give its settings, as in a run",
    "test --ckpt_path notes.txt --config tiny.yaml": "notes.txt: ",
    "test --ckpt_path foreign.ckpt --config tiny.yaml": "foreign.ckpt: not a checkpoint of this project",
    "caption photo.png --model runs/soft/checkpoints/best.ckpt --json notes.txt/x": "notes.txt/x",
    "caption photo.png --model runs/soft": "is a folder; give runs/soft/checkpoints/best.ckpt",
    "export --model foreign.ckpt --output out": "foreign.ckpt: not a checkpoint of this project",
    FIT + "--ckpt_path exported": "exported: is a folder; give a .ckpt file (caption, test and fit --init_from",
    FIT + "--ckpt_path pretrained": "pretrained: is a folder; give a .ckpt file (caption, test and",
    "average --model pretrained --output mean.ckpt": "pretrained: is a folder; give a .ckpt file (caption, test and",
    "export --model pretrained --output out --notes latin.md": "latin.md: is not in UTF-8 (",
    # the other commands
    "prepare coco --karpathy --year 2017 --root coco": "--year 2017: Karpathy's split is of the 2014 images; leave out",
    "caption": "are required: IMAGES, as in captioning caption photo.jpg --overlay photo.png (see",
    "export": "are required: --model, --output, as in captioning export --model runs/",
    "average": "are required: --model, --output, as in captioning average --model runs/",
    "evaluate": "are required: --captions, --references, as in captioning evaluate --captions",
    "caption photo.png --style papre": "argument --style: invalid choice: 'papre'",
    "caption photo.png --details": "--style and --details: have no effect without --overlay",
    "caption photo.png --style paper": "--style and --details: have no effect without --overlay",
    "caption photo.png --sample --beam_size 7": "--beam_size and --length_normalization: have no effect",
    "caption photo.png --temperature 0.5": "temperature=0.5 has an effect only with method sample (--sample), not beam",
    "caption photo.png --explorer out.png": "--explorer out.png: must end in .html, .htm",
    "caption photo.png --json out.html": "--json out.html: must end in .json, .jsonl",
    "caption photo.png --overlay out.html": "--overlay out.html: must end in .png, .pdf, .svg",
    "caption photo.png --samples 5": "did you mean caption --count?",
    "caption photo.png --gpu": "unrecognized arguments: --gpu; did you mean --device?",
    "compare runs/soft runs/soft --output page.png": "--output page.png: must end in .html, .htm",
    "compare runs/soft runs/soft --json page.html": "--json page.html: must end in .json, .jsonl",
    "caption photo.png --beam_size abc": "argument --beam_size: invalid int value: 'abc'",
    "compare runs/soft": "give two or more different runs to compare, got runs/soft",
    "compare runs/soft runs/sofd": "runs/sofd: no such folder of a run",
    "evaluate --captions notes.txt --references notes.txt": "notes.txt: cannot be read as JSON",
    "extract --output out": "arguments are required: --config, as in captioning extract --config configs/flickr8k",
    "extract --config tiny.yaml --output out --lr 0.1": "--lr 0.1; did you mean --model.optimizer.lr?",
    "extract --config tiny.yaml --output out --data.source.root holes": "val.json: 1 of the 2 image files",
    "extract --config tiny.yaml --output out --data.source.rot x": "Option 'rot' is not accepted",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(workdir, capsys, words):
    before = {path for path in workdir.rglob("*") if path.is_file()}
    line = refusal(capsys, *words.split())
    assert MISTAKES[words] in line and len(line) < 900
    assert {path for path in workdir.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "gpu", "mps", "cpu:1", "meta"])
@pytest.mark.parametrize(("gpus", "usable"), [(0, "cpu"), (1, "cpu or cuda:0")])
def test_advice_on_a_device_names_those_that_are_there(workdir, capsys, monkeypatch, device, gpus, usable):
    if (device, gpus) != ("cuda", 1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        line = refusal(capsys, "caption", "photo.png", "--device", device)
        assert line == f"error: device {device}: torch finds no such device here; use {usable}"


def test_a_class_of_the_user_is_found_by_import(workdir, capsys):
    Path("mine.py").write_text("from captioning.encoders import ConvEncoder\n\n\nclass Mine(ConvEncoder):\n    pass\n")
    Path("mine.yaml").write_text("model: {encoder: {class_path: mine.Mine, init_args: {}}}\n")
    options = ["--config", "mine.yaml", "--trainer.accelerator", "toaster"]
    assert "name its module by --import" in refusal(capsys, *FIT.split(), *options)
    assert "toaster" in refusal(capsys, *FIT.split(), *options, "--import", "mine")
    IMPORTED_MODULES.clear()  # another command line of a user is another process


@pytest.mark.parametrize("words", [["caption", "photo.png"], ["fit", "--config", "beside/any.yaml"]], ids=" ".join)
def test_a_module_that_fails_is_named_with_its_error(workdir, capsys, monkeypatch, words):
    """It lies in the working directory, or beside a configuration."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    module = f"wrong_{words[0]}"
    file = Path(words[-1]).parent / f"{module}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text("from captioning.attention import AdditiveScore\n\nAdditiveScore(0)\n")
    line = refusal(capsys, *words, "--import", module)
    IMPORTED_MODULES.clear()
    assert f"--import {module}: InputError: attention_dim must be" in line


def test_the_version_is_printed(capsys):
    command("--version")
    assert capsys.readouterr().out.startswith("captioning ")


def test_an_account_without_a_home_folder_gets_a_temporary_one(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "gone"))  # such as docker run --user
    command("--version")
    assert Path.home() != tmp_path / "gone" and os.access(Path.home(), os.W_OK)
