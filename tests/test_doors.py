"""A file that somebody sends runs nothing: hostile checkpoints, run folders and annotations, one test per door.

Each would leave a file named ``marker`` if what is in it ran. docs/reliability.md lists the doors.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers_runs import TINY, edit_checkpoint
from helpers_training import enter_copy, trained_folder

from captioning.cli import caption, evaluate
from captioning.cli.allowed_values import checked_component, checked_plain
from captioning.cli.build import build
from captioning.cli.fit import main
from captioning.cli.foreign_settings import resume_settings
from captioning.cli.old_parser import CommandLineParser
from captioning.component import import_modules
from captioning.data import CaptionSource, CocoSource, FolderSource, KarpathySource, ShapesSource
from captioning.encoders import Encoder, TimmEncoder
from captioning.errors import InputError, exits_on_input_error, printable
from captioning.files import replacing, write_text
from captioning.inference import load
from captioning.training.callbacks import BestCheckpoint
from captioning.training.checkpoint_io import AtomicCheckpointIO

# The run that the tests share is copied to a folder for each.
pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")

SHELL = {"class_path": "os.system", "init_args": {"command": "touch marker"}}
RUN = "runs/tiny"
CHECKPOINT = f"{RUN}/checkpoints/last.ckpt"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a run of one epoch."""
    folder = tmp_path_factory.mktemp("trained")
    source = {
        "class_path": "captioning.data.ShapesSource",
        "init_args": {"root": "shapes", "train": 4, "val": 2, "test": 2, "image_size": 48},
    }
    model = TINY["model"] | {
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}},
        "scheduler": {"class_path": "captioning.training.WarmupCosine", "init_args": {"warmup_steps": 2}},
    }
    callbacks = [{"class_path": "captioning.training.Throughput"}]
    config = TINY | {
        "trainer": TINY["trainer"] | {"callbacks": callbacks},
        "model": model,
        "data": {"source": source, "batch_size": 10, "num_workers": 0},
    }
    return trained_folder(folder, config)


@pytest.fixture
def workdir(trained, tmp_path, monkeypatch) -> Path:
    """A copy of it, entered."""
    return enter_copy(trained, tmp_path / "work", monkeypatch)


def put(settings: dict[str, Any], place: str, value: Any) -> None:
    *groups, name = place.split(".")
    for group in groups:
        settings = settings[int(group) if isinstance(settings, list) else group]
    settings[int(name) if isinstance(settings, list) else name] = value


def edit_run(place: str, value: Any) -> None:
    settings = yaml.safe_load(Path(RUN, "config.yaml").read_text())
    put(settings, place, value)
    Path(RUN, "config.yaml").write_text(yaml.safe_dump(settings))


def edit_settings_inside(place: str, value: Any) -> None:
    edit_checkpoint(CHECKPOINT, lambda content: put(content["captioning"]["settings"], place, value))


def refused(capsys, run: Any, *args: Any) -> str:
    """Return the one line that a command ends with, after exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        exits_on_input_error(run)(*args)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    assert not Path("marker").exists()
    return lines[0]


TORCHVISION = {
    "class_path": "captioning.encoders.TorchvisionEncoder",
    "init_args": {"name": "resnet18", "node": "layer3", "weights": None},
}


def in_model_args(value: Any) -> dict[str, Any]:
    return TORCHVISION | {"init_args": TORCHVISION["init_args"] | {"model_args": {"norm_layer": value}}}


# What a file may say of model and data, whatever is done with it
HOSTILE_PARTS = {
    "encoder": ("model.encoder", SHELL),
    "decoder": ("model.decoder", SHELL),
    "score": ("model.decoder.init_args.attention.init_args.score", SHELL),
    "any argument": ("model.encoder", in_model_args(SHELL)),
    "list in any argument": ("model.encoder", in_model_args([[SHELL]])),
    "text in any argument": ("model.encoder", in_model_args(json.dumps(SHELL))),
    "text in a text": ("model.encoder", in_model_args(json.dumps([json.dumps(SHELL)]))),
    "name of a module": ("model.decoder.init_args.attention.init_args.score", "evil.Score"),
    "name of a config": ("model.encoder", "evil.yaml"),
    "dotted key": ("model", {"encoder.class_path": "os.system", "encoder.init_args": {"command": "touch marker"}}),
    "search": ("model.search", SHELL),
    "search in a file": ("model.search", "evil.yaml"),
    "objective": ("model.objective", SHELL),
    "estimator": (
        "model.objective",
        {"class_path": "captioning.objective.Likelihood", "init_args": {"estimator": SHELL}},
    ),
    "source": ("data.source", SHELL),
    "tokenizer": ("data.vocabulary.tokenizer", SHELL),
    "tokenizer of another module": ("data.vocabulary.tokenizer", "evil.Words"),
    "data option": ("data.features", SHELL),
    "class of torch": ("model.encoder", {"class_path": "torch.nn.Linear"}),
    "seed": ("seed_everything", SHELL),
    "accelerator": ("trainer.accelerator", SHELL),
}
# What only training needs
HOSTILE_TRAINING = {
    "precision": ("trainer.precision", "evil.Precision"),
    "optimizer": ("model.optimizer", SHELL),
    "function of torch.optim": ("model.optimizer", {"class_path": "torch.optim.lr_scheduler.LambdaLR"}),
    "optimizer's argument": ("model.optimizer", {"class_path": "torch.optim.SGD", "init_args": {"lr": SHELL}}),
    "scheduler": ("model.scheduler", SHELL),
    "scheduler with a function": (
        "model.scheduler",
        {"class_path": "torch.optim.lr_scheduler.LambdaLR", "init_args": {"lr_lambda": "os.system"}},
    ),
    "callback": (
        "trainer.callbacks",
        [{"class_path": "pytorch_lightning.callbacks.LambdaCallback", "init_args": {"setup": SHELL}}],
    ),
    "callback's argument": (
        "trainer.callbacks",
        [{"class_path": "captioning.training.Throughput", "init_args": {"every_n_steps": SHELL}}],
    ),
    "logger": ("trainer.logger", [SHELL]),
    "server of wandb": (
        "trainer.logger",
        [{"class_path": "captioning.training.WandbRun", "init_args": {"settings": {"base_url": "http://evil"}}}],
    ),
    "plugins": ("trainer.plugins", [SHELL]),
    "profiler": ("trainer.profiler", SHELL),
    "strategy": ("trainer.strategy", "evil.Strategy"),
    "early stopping": ("early_stopping.monitor", SHELL),
    "file name of checkpoints": ("checkpoint.filename", "../../../elsewhere"),
}


def each(doors: dict[str, Any]) -> Any:
    return pytest.mark.parametrize(("place", "value"), doors.values(), ids=doors)


def leave_bait() -> None:
    """A module and a config that a settings file would have imported or read by their names."""
    Path("evil.py").write_text("open('marker', 'w')\nclass Score: pass\nclass Strategy: pass\nclass Precision: pass\n")
    Path("evil.yaml").write_text(yaml.safe_dump(SHELL))


@each(HOSTILE_PARTS)
def test_settings_inside_a_checkpoint_run_nothing(workdir, capsys, monkeypatch, place, value):
    monkeypatch.syspath_prepend(str(workdir))
    leave_bait()
    edit_settings_inside(place, value)
    assert CHECKPOINT in refused(capsys, evaluate.main, ["--model", CHECKPOINT])


@each(HOSTILE_PARTS)
def test_config_of_a_run_folder_runs_nothing_in_an_evaluation(workdir, capsys, monkeypatch, place, value):
    monkeypatch.syspath_prepend(str(workdir))
    leave_bait()
    edit_run(place, value)
    for command in ("test", "validate", "predict"):
        line = refused(capsys, main, [command, "--ckpt_path", CHECKPOINT])
        assert f"{RUN}/config.yaml" in line and "--config" in line


@each(HOSTILE_PARTS | HOSTILE_TRAINING)
def test_config_of_a_run_folder_runs_nothing_in_a_resumed_run(workdir, capsys, monkeypatch, place, value):
    monkeypatch.syspath_prepend(str(workdir))
    leave_bait()
    edit_run(place, value)
    line = refused(capsys, main, ["fit", "--ckpt_path", CHECKPOINT, "--trainer.max_epochs", "2"])
    assert f"{RUN}/config.yaml" in line and "--config" in line


def leaves_of(settings: Any, place: str = "") -> Iterator[str]:
    """Yield the places of all values, and of the mappings and lists that they are in."""
    if place:
        yield place
    settings = dict(enumerate(settings)) if isinstance(settings, list) else settings
    items = settings.items() if isinstance(settings, dict) else ()
    for name, value in items:
        yield from leaves_of(value, f"{place}.{name}".lstrip("."))


# Every way in which jsonargparse finds a class or a file in a value
BAITS: list[Any] = ["sent.payload.X", {"class_path": "sent.payload.X"}, {"a": "payload.X"}, ["payload.X"]]
BAITS += ["bait", "sent/bait.yaml"]


def test_no_value_of_a_config_imports_a_file_of_its_folder(workdir, monkeypatch):
    """``--import`` puts the working directory on the path, from where every file of the folder can be imported."""
    monkeypatch.syspath_prepend(str(workdir))
    monkeypatch.setattr(sys, "path", [str(workdir / "sent"), *sys.path])
    Path("sent").mkdir()
    Path("sent/payload.py").write_text("open('marker', 'w')\nclass X: pass\ndef f(*args): pass\n")
    for file in ("bait", "sent/bait.yaml"):
        Path(file).write_text(yaml.safe_dump({"class_path": "sent.payload.X"}))
    path = Path(RUN, "config.yaml")
    settings = yaml.safe_load(path.read_text())
    settings["trainer"]["callbacks"] += [
        {"class_path": "pytorch_lightning.callbacks.RichProgressBar", "init_args": {"theme": {"time": "dim"}}},
        {"class_path": "pytorch_lightning.callbacks.EarlyStopping", "init_args": {"monitor": "val/nll"}},
    ]
    settings["model"] |= {"scheduled_sampling": None, "self_critical": None}
    settings["model"]["optimizer"]["init_args"]["lr"] = 0.01
    places = list(leaves_of(settings))
    assert len(places) > 150
    parse = command_parser(monkeypatch)
    honest, parsed = json.dumps(resume_settings(settings, path)), 0
    for place, bait in itertools.product(places, BAITS):
        hostile = copy.deepcopy(settings)
        put(hostile, place, bait)
        with contextlib.suppress(InputError):
            chosen = json.dumps(resume_settings(hostile, path))
            if chosen != honest:
                parsed += 1
                parse(chosen)
        assert not Path("marker").exists(), f"{place}: {bait}"
    assert 50 < parsed < len(places) * len(BAITS) / 2


def command_parser(monkeypatch) -> Callable[[str], Any]:
    """Return a function that parses settings as ``captioning fit`` does, with one parser, which saves minutes."""
    parse_args, parsers = CommandLineParser.parse_args, []

    def keep(parser: CommandLineParser, args: Any = None, *others: Any, **options: Any) -> Any:
        parsers.append(parser)
        return parse_args(parser, args, *others, **options)

    with monkeypatch.context() as patch:
        patch.setattr(CommandLineParser, "parse_args", keep)
        with pytest.raises(SystemExit):
            main(["fit", "--config", "tiny.yaml", "--print_config"])
    return lambda settings: parsers[0].parse_args(["fit", "--config", settings])


def test_evaluations_take_nothing_of_training(workdir, capsys):
    for place, value in HOSTILE_TRAINING.values():
        edit_run(place, value)
        edit_settings_inside(place, value)
    edit_run("results", "elsewhere")
    cli = main(["test", "--ckpt_path", CHECKPOINT])
    assert Path(RUN, "test_metrics.json").is_file() and not Path("elsewhere").exists()
    assert cli.config["test"].trainer.callbacks is None
    evaluate.main(["--model", CHECKPOINT])
    assert "BLEU-1" in capsys.readouterr().out
    assert not Path("marker").exists()


class Pickled:
    def __reduce__(self):
        return os.system, ("touch marker",)


@pytest.mark.parametrize("command", ["test", "fit"])
def test_a_pickle_in_a_checkpoint_does_not_run_whatever_its_run_says(workdir, command):
    edit_run("weights_only", False)
    edit_checkpoint(CHECKPOINT, lambda content: content.update(extra=Pickled()))
    with pytest.raises(InputError, match="holds objects beside weights"):
        main([command, "--ckpt_path", CHECKPOINT])
    assert not Path("marker").exists()


def test_a_run_writes_into_the_folder_of_its_checkpoint_alone(workdir):
    for place, value in (("name", "other"), ("runs", "elsewhere"), ("trainer.default_root_dir", "elsewhere")):
        edit_run(place, value)
    for group in ("checkpoint", "last"):
        edit_run(f"{group}.dirpath", str(Path("elsewhere").resolve()))
    cli = main(["fit", "--ckpt_path", CHECKPOINT, "--trainer.max_epochs", "2"])
    assert cli.run_dir == Path(RUN) and cli.trainer.current_epoch == 2
    assert not Path("elsewhere").exists() and not Path("runs/other").exists()


def test_a_resumed_run_keeps_optimizer_schedule_and_callbacks_and_one_csv_logger(workdir):
    cli = main(["fit", "--ckpt_path", CHECKPOINT, "--trainer.max_epochs", "2"])
    assert isinstance(cli.trainer.optimizers[0], torch.optim.SGD)
    assert type(cli.trainer.lr_scheduler_configs[0].scheduler).__name__ == "WarmupCosine"
    assert "Throughput" in {type(callback).__name__ for callback in cli.trainer.callbacks}
    loggers = yaml.safe_load(Path(RUN, "config.yaml").read_text())["trainer"]["logger"]
    assert [logger["class_path"].rpartition(".")[2] for logger in loggers] == ["CSVLogger"]


def test_generated_data_are_not_written_outside_the_working_directory(workdir, capsys, tmp_path):
    edit_run("data.source.init_args.root", str(tmp_path / "elsewhere"))
    assert "would write" in refused(capsys, main, ["test", "--ckpt_path", CHECKPOINT])
    assert not (tmp_path / "elsewhere").exists()


def test_a_checkpoint_names_no_files_in_other_folders_to_delete(workdir):
    folder = Path(CHECKPOINT).parent.resolve()
    own, through = str(folder / "best.ckpt"), str(folder / "../../../victim.ckpt")

    def name_others(content: dict[str, Any]) -> None:
        state = next(state for state in content["callbacks"].values() if state.get("best_k_models"))
        state["best_k_models"] = {through: torch.tensor(0.0), own: torch.tensor(1.0)}
        state |= {"kth_best_model_path": through, "last_model_path": "/etc/victim.ckpt", "best_model_path": own}

    edit_checkpoint(CHECKPOINT, name_others)
    loaded = AtomicCheckpointIO().load_checkpoint(CHECKPOINT, weights_only=True)["callbacks"]
    assert "victim" not in str(loaded) and str(loaded).count(own) == 2


def test_the_best_checkpoint_of_a_folder_that_was_moved_is_still_known(workdir):
    """Else the first validation after resuming is the best, whatever its score, and replaces the file."""
    folder = Path(CHECKPOINT).parent.resolve()
    moved = folder.with_name("moved")
    shutil.copytree(folder, moved)
    name = Path(CHECKPOINT).name
    states = AtomicCheckpointIO().load_checkpoint(moved / name, weights_only=True)["callbacks"].values()
    state = next(state for state in states if state.get("best_k_models"))
    assert list(state["best_k_models"]) == [state["best_model_path"]] == [str(moved / "best.ckpt")]
    assert state["dirpath"] == str(moved)
    resumed = BestCheckpoint(moved, monitor="val/bleu4", mode="max")
    resumed.load_state_dict(state)
    assert resumed.best_model_score == state["best_model_score"] and resumed.best_k_models


def test_a_comparison_builds_no_unknown_source(workdir):
    for value in (SHELL, {"class_path": "captioning.data.FolderSource", "init_args": {"root": "x", "captions": SHELL}}):
        with pytest.raises(InputError, match=r"os\.system is not a known"):
            build({"data.source": CaptionSource}, [{"data": {"source": value}}])
    assert not Path("marker").exists()


def test_a_rebuilt_encoder_opens_no_other_file(tmp_path):
    pytest.importorskip("timm")
    arguments = {"name": "resnet10t", "out_index": 2, "weights": None, "image_size": 64}
    config = {"class_path": "captioning.encoders.TimmEncoder", "init_args": arguments}
    hostile = tmp_path / "hostile.pth"
    torch.save({"state_dict": Pickled()}, hostile)
    arguments["model_args"] = {"checkpoint_path": str(hostile)}
    encoder = Encoder.rebuild(config)
    assert isinstance(encoder, TimmEncoder)
    assert encoder.to_config()["init_args"]["model_args"] == arguments["model_args"]


def test_plain_values_hold_no_class_at_any_depth():
    assert checked_plain({"a": [1, 2.5, None, True, "soft: run 3"]}, "x") == {"a": [1, 2.5, None, True, "soft: run 3"]}
    for value in (SHELL, [SHELL], {"a": {"b": SHELL}}, json.dumps(SHELL), "[" + json.dumps(SHELL) + "]", object()):
        with pytest.raises(InputError):
            checked_plain(value, "x")


def test_checked_component_leaves_an_honest_config_as_it_was(trained):
    settings = yaml.safe_load((trained / RUN / "config.yaml").read_text())
    encoder = settings["model"]["encoder"]
    assert checked_component(encoder, Encoder, "model.encoder") == encoder


OWN = """from captioning.attention import AdditiveScore
class OwnScore(AdditiveScore):
    pass
"""


def test_a_module_that_the_user_imports_by_name_may_be_used(workdir, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("own").mkdir()
    Path("own/own_score_of_doors.py").write_text(OWN)
    config = yaml.safe_load(Path("tiny.yaml").read_text())
    put(config, "model.decoder.init_args.attention.init_args.score", {"class_path": "own_score_of_doors.OwnScore"})
    Path("own/mine.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", "own/mine.yaml", "--import", "own_score_of_doors"])
    checkpoint = "runs/mine/checkpoints/last.ckpt"
    main(["test", "--ckpt_path", checkpoint, "--import=own_score_of_doors"])
    evaluate.main(["--model", checkpoint, "--import", "own_score_of_doors"])
    assert type(load(checkpoint).model.decoder.attention.score).__name__ == "OwnScore"


def test_a_module_that_cannot_be_imported_is_one_line(workdir, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("broken_of_doors.py").write_text("1 / 0")
    line = refused(capsys, main, ["test", "--ckpt_path", CHECKPOINT, "--import", "broken_of_doors"])
    assert "--import broken_of_doors: ZeroDivisionError" in line
    with pytest.raises(InputError, match=r"--import nowhere\.py: .*give nowhere, without \.py"):
        import_modules(["nowhere.py"], [])


# Annotations

BAD_NAMES = ["/etc/passwd", "../secret.png", "a/../../secret.png", "a\0.png"]


def annotated(kind: str, name: str, root: Path, **options: Any) -> CaptionSource:
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    coco = {
        "images": [{"id": 1, "file_name": name}],
        "annotations": [{"id": 1, "image_id": 1, "caption": "a dog"}],
    }
    if kind == "coco":
        (root / "annotations/captions_val2017.json").write_text(json.dumps(coco))
        return CocoSource(str(root), **options)
    if kind == "karpathy":
        image = {"split": "val", "imgid": 1, "filename": name, "sentences": [{"tokens": ["a", "dog"]}]}
        (root / "dataset.json").write_text(json.dumps({"images": [image]}))
        return KarpathySource(str(root / "dataset.json"), str(root), **options)
    if kind == "folder":
        (root / "captions.jsonl").write_text(json.dumps({"image": name, "caption": "a dog", "split": "val"}))
        return FolderSource(str(root), **options)
    (root / "annotations/captions_val.json").write_text(json.dumps(coco))
    return ShapesSource(str(root))


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("kind", ["coco", "karpathy", "folder", "shapes"])
def test_annotations_name_no_images_outside_their_folder(tmp_path, kind, name):
    with pytest.raises(InputError, match=r"lies outside the folder|is not the name of a file"):
        annotated(kind, name, tmp_path).index("val")


@pytest.mark.parametrize("kind", ["coco", "karpathy", "folder"])
def test_the_user_may_allow_annotations_to_name_images_anywhere(tmp_path, kind):
    index = annotated(kind, "../elsewhere/a.png", tmp_path, allow_outside=True).index("val")
    assert str(index.image_path(0)).endswith("../elsewhere/a.png")
    index = annotated(kind, "/elsewhere/a.png", tmp_path, allow_outside=True).index("val")
    assert str(index.image_path(0)) == "/elsewhere/a.png"
    with pytest.raises(InputError, match="is not the name of a file"):
        annotated(kind, "a\0.png", tmp_path, allow_outside=True).index("val")


def test_a_file_cannot_allow_what_the_user_did_not(workdir, capsys):
    annotated("folder", "/etc/passwd", workdir / "theirs")
    arguments = {"root": "theirs", "allow_outside": True}
    edit_run("data.source", {"class_path": "captioning.data.FolderSource", "init_args": arguments})
    edit_run("data.vocabulary.file", None)
    assert "lies outside the folder" in refused(capsys, main, ["validate", "--ckpt_path", CHECKPOINT])


# The terminal and files


def test_control_characters_are_shown_not_obeyed(capsys):
    assert printable("a\x1b]0;owned\x07\nb\x9b\u202e") == r"a\x1b]0;owned\x07\nb\x9b\u202e"
    assert printable("Straße, 狗 🐕") == "Straße, 狗 🐕"
    assert printable("a\udc80") == r"a\udc80"  # half a pair of surrogates, which no terminal can write

    def fail() -> None:
        raise InputError("\x1b[2Jx: bad\nsecond line")

    assert refused(capsys, fail) == r"error: \x1b[2Jx: bad\nsecond line"


def test_a_link_is_written_through_and_a_device_is_never_replaced(tmp_path):
    (tmp_path / "real.txt").write_text("old")
    link = tmp_path / "link.txt"
    link.symlink_to("real.txt")
    write_text(link, "new")
    assert link.is_symlink() and (tmp_path / "real.txt").read_text() == "new"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/null")):
        with pytest.raises(InputError, match="no regular file"), replacing(path):
            raise AssertionError("not reached")
    assert pipe.is_fifo() and not Path("/dev/null").is_file()


@pytest.mark.parametrize("option", ["--overlay", "--json", "--explorer"])
@pytest.mark.parametrize("way", ["itself", "link", "folder", "stdin"])
def test_an_image_that_is_captioned_is_never_replaced(workdir, capsys, monkeypatch, option, way):
    photo, out = Path("photos/x.png"), Path("photos/x.png")
    photo.parent.mkdir()
    shutil.copy("shapes/test/000001.png", photo)
    before = photo.read_bytes()
    if option == "--explorer":  # its name must end so
        photo = out = photo.rename("photos/x.html")
    if way == "link":
        out = Path("link" + photo.suffix)
        out.symlink_to(photo)
    images = str(photo)
    if way == "folder":
        images = "photos"
        out = Path("photos") if option == "--overlay" else out
        if option == "--explorer":
            pytest.skip("a folder's images have the suffixes of images")
    if way == "stdin":
        images = "-"
        out = Path("photos") if option == "--overlay" else out
        monkeypatch.setattr(sys, "stdin", iter([f"{photo}\n"]))
    arguments = [images, "--model", CHECKPOINT, option, str(out)]
    line = refused(capsys, caption.main, arguments)
    assert "would replace" in line and photo.read_bytes() == before


def test_a_checkpoint_is_never_replaced_by_what_is_made_with_it(workdir, capsys):
    before = Path(CHECKPOINT).read_bytes()
    image = "shapes/test/000001.png"
    refused(capsys, caption.main, [image, "--model", CHECKPOINT, "--json", CHECKPOINT])
    refused(capsys, evaluate.main, ["--model", CHECKPOINT, "--json", CHECKPOINT])
    assert Path(CHECKPOINT).read_bytes() == before
