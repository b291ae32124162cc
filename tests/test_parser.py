"""The command line: one line for any mistake, every class by its short name, help of a place."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import yaml
from helpers_runs import TINY

from captioning.cli import old_parser as parsers
from captioning.cli.fit import CaptioningCLI, main
from captioning.cli.old_parser import explain
from captioning.cli.usage import COMMANDS, command_help
from captioning.component import Component, public_path, subclasses
from captioning.data import CaptionSource, FolderSource
from captioning.errors import InputError


class Parsed(Exception):
    pass


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Parse a command line beside a small config; returns the settings of ``fit``."""
    source = {"class_path": "captioning.data.ShapesSource"}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY | {"data": {"source": source}}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["captioning"])
    parsed = []

    def stop(cli):
        parsed.append(cli.config["fit"])
        raise Parsed

    monkeypatch.setattr(CaptioningCLI, "before_instantiate_classes", stop)

    def parse(*args: str, config: str = "tiny.yaml"):
        with pytest.raises(Parsed):
            main(["fit", "--config", config, *args])
        return parsed.pop()

    return parse


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--model.bound_sample 1", "--model.bound_sample: no such option; did you mean --model.bound_samples?"),
        ("--data.batchsize=1", "--data.batchsize: no such option; did you mean --data.batch_size?"),
        ("--data.batch 3", "--data.batch: no such option; did you mean --data.batch_size?"),
        ("--ckpt x.ckpt", "--ckpt: no such option; did you mean --ckpt_path?"),
        ("stray", "stray: no such option"),
        ("--data.augmentation.flip", "--data.augmentation.flip: needs a value"),
        ("--data.source FoldrSource", "data.source: FoldrSource is no class that can stand there; did you mean Folder"),
        ("--data.source captioning.data.FoldrSource", "data.source: FoldrSource is no class that can stand there; did"),
        ("--data.source FolderSource", "data.source: FolderSource needs root; give --data.source.root"),
        ("--model.encoder.chanels 3", "model.encoder: ConvEncoder takes no chanels; did you mean channels?"),
        ("--model.decoder.hiden_dim 3", "model.decoder: AttentionDecoder takes no hiden_dim; did you mean hidden_dim?"),
        (
            "--model.decoder.attention.scor x",
            "model.decoder.attention: SoftAttention takes no scor; did you mean score",
        ),
        (
            "--model.decoder.attention.score DotScor",
            "model.decoder.attention.score: DotScor is no class that can stand",
        ),
        ("--model.decoder.output ShapesSource", "there; one of DeepOutput, SummedOutput"),
        (
            "--model.decoder.attention.score.attention_dim x",
            "attention.score.attention_dim: must be a whole number, got",
        ),
        (
            "--model.objective Likelihood --model.objective.estimator LeaveOneOut --model.objective.estimator.sampls 2",
            "LeaveOneOut takes no sampls; did you mean samples",
        ),
        ("--model.optimizer SDG", "model.optimizer: SDG is no class that can stand there; did you mean SGD?"),
        ("--model.optimizer.lrr 0.1", "model.optimizer: Adam takes no lrr; did you mean lr?"),
        ("--data.group imag", "data.group: must be one of length, image, got imag; did you mean image?"),
        ("--trainer.max_epochs many", "trainer.max_epochs: must be a whole number or null, got many"),
        (
            "--trainer.callbacks+=Througput",
            "trainer.callbacks: Througput is no class that can stand there; did you mea",
        ),
        ("--data.sorce.help", "--data.sorce.help: no class stands there"),
        ("--data.source.help FoldrSource", "--data.source.help FoldrSource: no such class; did you mean FolderSource?"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(settings, args, message):
    with pytest.raises(InputError) as error:
        settings(*args.split(), "--model.optimizer.lr", "0.1") if "optimizer" in args else settings(*args.split())
    assert message in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modl": {"x": 1}}, "modl: no such section of a configuration; did you mean model?"),
        ({"trainer": {"max_epoch": 3}}, "trainer.max_epoch: no such setting; did you mean trainer.max_epochs?"),
        ({"data": {"source": "ShapesSource", "batch_size": "big"}}, "data.batch_size: must be a whole number, got big"),
    ],
)
def test_a_mistake_in_a_config_is_one_line(settings, change, message):
    Path("bad.yaml").write_text(yaml.safe_dump(TINY | change))
    with pytest.raises(InputError, match=re.escape(message)):
        settings("--data.source", "ShapesSource", config="bad.yaml")


def test_an_empty_argument_is_named():
    assert explain("unrecognized arguments: ", []) == '"": no such option'


def test_without_a_config_the_line_says_what_to_give(monkeypatch):
    monkeypatch.setattr("sys.argv", ["captioning"])
    with pytest.raises(
        InputError, match=r"no model\.encoder, .*data\.source given; give a configuration, such as --co"
    ):
        main(["fit"])


PLACES = [f"model.{name}" for name in ("encoder", "decoder", "objective")]
PLACES += [f"model.objective.{name}" for name in ("estimator", "reduction")]
PLACES += [f"model.decoder.{name}" for name in ("attention", "output", "annotation_layer")]
PLACES += [f"model.decoder.attention.{name}" for name in ("score", "normaliser")]


def test_every_component_of_the_package_stands_at_some_place():
    placed = {cls for place in PLACES for cls in parsers.classes_at(place).values()}
    exported = [cls for cls in subclasses(Component) if re.match(r"captioning\.\w+\.\w+$", public_path(cls))]
    concrete = {cls for cls in exported if not inspect.isabstract(cls) and not cls.__subclasses__()}
    assert len(concrete) > 20
    assert not concrete - placed


@pytest.mark.parametrize("place", [*PLACES, "data.source"])
def test_short_names_work_for_every_component(settings, place):
    ours = [name for name, cls in parsers.classes_at(place).items() if cls.__module__.startswith("captioning.")]
    assert ours
    required = {
        "FolderSource": "root=x",
        "KarpathySource": "json_path=x image_dir=x",
        "CocoSource": "root=x",
        "TorchvisionEncoder": "name=vgg19",
        "TimmEncoder": "name=x",
        "LocalScore": "score=DotScore",
        "AttentionDecoder": "attention=UniformAttention",
        "TransformerDecoder": "attention=UniformAttention",
    }
    for name in ours:
        options = [f"--{place}.{option}" for option in required.get(name, "").split()]
        objective = ["--model.objective", "Likelihood"] if place.startswith("model.objective.") else []
        parsed = settings(*objective, f"--{place}", name, *options)
        for step in place.split("."):
            parsed = parsed[step] if step in parsed else parsed["init_args"][step]
        assert parsed["class_path"].endswith(f".{name}")


def test_help_of_a_place_lists_every_class_and_of_a_class_every_option(capsys):
    def printed(*args: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["fit", *args])
        assert end.value.code == 0
        return capsys.readouterr().out

    text = printed("--data.source.help")
    sources = [cls.__name__ for cls in subclasses(CaptionSource) if cls.__module__.startswith("captioning.data")]
    listed = re.findall(r"^  (\w+)  ", text, re.MULTILINE)  # other tests may have imported sources of their own
    assert [name for name in listed if name in sources] == sorted(set(sources) - {"CaptionSource"})
    text = printed("--data.source.help", "FolderSource")
    assert all(f"--data.source.{name}" in text for name in list(inspect.signature(FolderSource).parameters))
    assert "--model.decoder.hidden_dim" in printed("--model.decoder.help", "AttentionDecoder")
    assert "warmup_steps" in printed("--model.scheduler.help=WarmupCosine")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_short_help_names_options_and_classes_that_exist(settings, command):
    text = command_help(command)
    for option, choices in re.findall(r"^  --([a-z][\w.]+) .*?CLASS(?:\n {30})? +([A-Z].+)$", text, re.MULTILINE):
        if option.startswith(("model", "data")):
            assert set(re.findall(r"\b[A-Z]\w+", choices.partition(";")[0])) <= set(parsers.classes_at(option)), option
    values = {"trainer.accelerator": "cpu", "trainer.precision": "32-true", "trainer.logger": "false", "results": "x"}
    values |= {
        "data.features": "x",
        "data.test_split": "test",
        "name": "x",
        "runs": "x",
        "model.optimizer.lr": "0.1",
        "init_from": "x",
    }
    values["ensemble"] = '["x"]'
    for option in re.findall(r"^  --([a-z][\w.]+) [^C\n]", text, re.MULTILINE):
        if option not in ("config", "ckpt_path", "import", "debug", "print_config", "help_all"):
            first = ["--model.optimizer", "Adam"] if "optimizer" in option else []
            settings(*first, f"--{option}", values.get(option, "3"))
    defaults = settings()
    assert (defaults["runs"], defaults["seed_everything"], defaults["data"]["test_split"]) == ("runs", 1, "test")
    assert defaults["early_stopping"]["patience"] == 5
