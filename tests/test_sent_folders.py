"""A folder that somebody sends leads nowhere: links, pipes, templates of names, images that start programs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from helpers import load_script, random_view
from helpers_faults import Fault, ends, faults, proves
from helpers_runs import tiny_config
from helpers_training import enter_copy, trained_folder

from captioning.cli import run_place
from captioning.cli.fit import main
from captioning.data.images import load_image
from captioning.data.records import read_annotations
from captioning.errors import InputError
from captioning.evaluation.cider import DocumentFrequencies
from captioning.files import read_json, replacing, write_text
from captioning.inference.images import _from_bytes
from captioning.run_folder import RunFolder
from captioning.training.callbacks import NamedCheckpoint
from captioning.training.checkpoint_io import AtomicCheckpointIO
from captioning.vocabulary import Vocabulary

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")
RUN = Path("runs/tiny")
LAST = str(RUN / "checkpoints/last.ckpt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a run of one epoch."""
    folder = tmp_path_factory.mktemp("trained")
    return trained_folder(folder, tiny_config(Path("shapes")))


@pytest.fixture
def workdir(trained, tmp_path, monkeypatch) -> Path:
    """A copy of it, entered, beside a file that is not to be changed."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/file").write_text("mine")
    return enter_copy(trained, tmp_path / "work", monkeypatch)


def victims(workdir: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (workdir.parent / "victim").iterdir()}


def link(name: str, target: str) -> None:
    """Put a link where a run has a file or a folder."""
    path = RUN / name
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    path.symlink_to(target, target_is_directory=True)


IS_LINK = "is a link to"
FILES = (
    "test_captions.json test_metrics.json predictions.jsonl predict_results.json config.yaml .lock wandb_run.json "
    "comparison.html test_captions.json.part checkpoints/best.ckpt checkpoints/last.ckpt.part metrics samples wandb"
).split()
LINKED = {Fault(f"`{name}` of a sent run is a link", IS_LINK, kept="what it leads to"): name for name in FILES}


@faults(LINKED)
def test_nothing_is_written_through_a_link_in_the_folder_of_a_run(workdir, capsys, fault, case):
    victim = workdir.parent / "victim"
    target = victim if case in ("metrics", "samples", "wandb") else victim / "file"
    link(case, str(target))
    line = ends(capsys, fault, main, ["test", "--ckpt_path", LAST])
    assert f"{case}: is a link to {target}" in line
    ends(capsys, fault, main, ["fit", "--ckpt_path", LAST, "--trainer.max_epochs", "2"])
    assert victims(workdir) == {"file": "mine"}


@proves(Fault("a new run in a folder that holds a link", IS_LINK, kept="what it leads to"))
def test_a_new_run_writes_through_no_link(workdir, capsys, fault):
    Path("runs/new").mkdir()
    Path("runs/new/config.yaml").symlink_to("../../../victim/file")
    ends(capsys, fault, main, ["fit", "--config", "tiny.yaml", "--name", "new"])
    assert victims(workdir) == {"file": "mine"}


@proves(Fault("`checkpoints` of a sent run is a link to those of another", IS_LINK, kept="the other run"))
def test_a_checkpoint_behind_a_link_does_not_make_the_other_folder_the_runs(workdir, capsys, fault):
    shutil.copytree("runs/tiny", "runs/other")
    shutil.rmtree("runs/other/checkpoints")
    Path("runs/other/checkpoints").symlink_to("../tiny/checkpoints")
    ends(capsys, fault, main, ["test", "--ckpt_path", "runs/other/checkpoints/last.ckpt"])
    assert not (RUN / "test_metrics.json").exists()


def test_the_folder_itself_may_be_a_link_and_wandb_may_link_inside(workdir):
    shutil.move("runs/tiny", "elsewhere")
    Path("runs/tiny").symlink_to("../elsewhere")
    (RUN / "wandb/run-1").mkdir(parents=True)
    (RUN / "wandb/latest-run").symlink_to("run-1")
    (RUN / "wandb/run-1/debug-core.log").symlink_to("/var/log/core.log")  # as wandb does, into its cache
    main(["test", "--ckpt_path", LAST])
    assert Path("elsewhere/test_metrics.json").is_file()
    Path("best.ckpt").symlink_to(LAST)
    assert RunFolder.of("best.ckpt").path.resolve() == Path("elsewhere").resolve()


def test_a_pipe_in_the_folder_of_a_run_is_refused(workdir):
    os.mkfifo(RUN / "wandb_run.json")
    with pytest.raises(InputError, match=r"wandb_run\.json: is no regular file"):
        main(["test", "--ckpt_path", LAST])


def test_a_temporary_file_is_never_a_link_that_somebody_laid(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "a.txt.part").symlink_to("victim")
    write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "victim").read_text() == "mine" and not (tmp_path / "a.txt").is_symlink()
    (tmp_path / "b.txt").symlink_to("victim")
    with pytest.raises(InputError, match="is a link, through which nothing is written"):
        write_text(tmp_path / "b.txt", "new", follow=False)
    with pytest.raises(InputError, match="is a link"), replacing(tmp_path / "b.txt", follow=False):
        raise AssertionError("not reached")
    assert (tmp_path / "victim").read_text() == "mine"


# File names of checkpoints


@pytest.mark.parametrize("template", ["../x", "{epoch}/../../x", "/tmp/x", "{/x}", "{epoch:c}", "{epoch:x", "{0.x}{}"])
def test_a_name_of_a_checkpoint_leads_to_no_other_folder(tmp_path, template):
    callback = NamedCheckpoint(tmp_path / "checkpoints", template)
    with pytest.raises(InputError, match=r"filename .*(outside|is no name of a file)"):
        callback.format_checkpoint_name({})


def test_the_result_of_a_template_is_checked_whatever_made_it(tmp_path):
    callback = NamedCheckpoint(tmp_path / "checkpoints", "{a:c}{a:c}{b:c}x", auto_insert_metric_name=False)
    numbers = {"a": torch.tensor(ord(".")), "b": torch.tensor(ord("/"))}
    with pytest.raises(InputError, match=r"\.\./x\.ckpt would lie outside"):
        callback.format_checkpoint_name(numbers)
    assert callback.format_checkpoint_name({"a": torch.tensor(65), "b": torch.tensor(66)}).endswith("AABx.ckpt")
    for wide in ("{epoch:999999999}", "{epoch:099999999d}", "{epoch:.999999999f}"):
        with pytest.raises(InputError, match="numbers are at most 99 characters wide"):
            NamedCheckpoint(tmp_path, wide).format_checkpoint_name({})
    honest = NamedCheckpoint(tmp_path, "best-{epoch:03d}-{val/bleu4:.2f}", auto_insert_metric_name=False)
    scores = {"epoch": torch.tensor(2), "val/bleu4": torch.tensor(1.5)}
    assert honest.format_checkpoint_name(scores) == str(tmp_path / "best-002-1.50.ckpt")


@proves(Fault("a resumed run whose checkpoints' name is `{epoch:999999999}`", "at most 99 characters wide"))
def test_a_huge_name_is_refused_before_training(workdir, capsys, fault):
    settings = yaml.safe_load((RUN / "config.yaml").read_text())
    settings["checkpoint"]["filename"] = "{epoch:999999999}"
    (RUN / "config.yaml").write_text(yaml.safe_dump(settings))
    ends(capsys, fault, main, ["fit", "--ckpt_path", LAST, "--trainer.max_epochs", "2"])


@proves(Fault("shapes that a sent config draws through a link", "outside this folder", kept="what it leads to"))
def test_shapes_are_not_drawn_through_a_link(workdir, capsys, fault):
    Path("drawn").symlink_to("../victim")
    settings = yaml.safe_load((RUN / "config.yaml").read_text())
    settings["data"]["source"]["init_args"]["root"] = "drawn/shapes"
    (RUN / "config.yaml").write_text(yaml.safe_dump(settings))
    ends(capsys, fault, main, ["test", "--ckpt_path", LAST])
    assert victims(workdir) == {"file": "mine"}


# Images

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\n%%EOF\n"


@pytest.mark.parametrize("suffix", [".eps", ".png", ".jpg"])
def test_no_image_starts_a_program(tmp_path, monkeypatch, suffix):
    gs = tmp_path / "bin/gs"
    gs.parent.mkdir()
    gs.write_text(f"#!/bin/sh\ntouch {tmp_path}/marker\n")
    gs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{gs.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", str(gs))
    path = tmp_path / f"image{suffix}"
    path.write_bytes(EPS)
    with pytest.raises(InputError, match="cannot be read as an image"):
        load_image(path)
    with pytest.raises(InputError, match="no image file"):
        _from_bytes(EPS, "bytes")
    onnx = pytest.importorskip("onnxruntime") and load_script("caption_onnx")
    with pytest.raises(onnx.Refused, match="cannot be read as an image"):
        onnx.prepare(path, {"resize": 8, "crop": None})
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "gif", "tiff", "webp", "ppm", "jp2"])
def test_usual_images_are_read(tmp_path, suffix):
    path = tmp_path / f"image.{suffix}"
    random_view(8, 6).save(path)
    assert load_image(path).size == (8, 6)


# The terminal


def test_words_of_an_exported_folder_do_not_command_the_terminal(capsys):
    pytest.importorskip("onnxruntime")
    script = load_script("caption_onnx")
    assert script._captioned(lambda path, **options: "a \x1b]0;owned\x07\u202edog", "x\x1b[2J.png", {}, several=True)
    assert capsys.readouterr().out == "x\\x1b[2J.png\ta \\x1b]0;owned\\x07\\u202edog\n"


def test_names_in_a_damaged_archive_do_not_command_the_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_place, "damage_of", lambda path: "archive/\x1b[2J")
    monkeypatch.setattr(run_place, "sound_beside", lambda path: path)
    (tmp_path / "last.ckpt").touch()
    run_place._sound(tmp_path / "last.ckpt")
    assert "damaged (archive/\\x1b[2J); going on" in capsys.readouterr().err


# Pipes where files are read


def test_no_reader_waits_for_a_pipe(tmp_path):
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)

    def annotations(path: Path) -> dict:
        return read_annotations(path, dict, "file", "")

    for read in (read_json, Vocabulary.load, DocumentFrequencies.load, annotations):
        with pytest.raises(InputError, match="is no regular file"):
            read(pipe)
    with pytest.raises(InputError, match="is no regular file"):
        AtomicCheckpointIO().load_checkpoint(pipe)
