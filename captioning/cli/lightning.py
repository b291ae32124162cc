"""``captioning fit``, ``validate``, ``test`` and ``predict``: Lightning's command line around module and data."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import secrets
import shlex
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from jsonargparse import Namespace
from pytorch_lightning.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    ModelSummary,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
)
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.exceptions import MisconfigurationException, SIGTERMException

from captioning.checkpoint.io import read_checkpoint
from captioning.checkpoint.load import read_model
from captioning.cli import IMPORTED
from captioning.cli.build import build, restrict_imports
from captioning.cli.parser import OneLineErrors
from captioning.data import CaptionSource
from captioning.decoding import BeamOptions
from captioning.encoders.base import without_weights
from captioning.errors import InputError, did_you_mean, one_line
from captioning.evaluation.metrics import METRICS
from captioning.files import read_config, write_text
from captioning.kernels.machine import best_precision
from captioning.provenance import provenance
from captioning.run_folder import RunFolder
from captioning.training import CaptionDataModule, CaptioningModule, CaptionSamples, LogLines, StopOnRequest, Throughput

_FOLDER = "CAPTIONING_RUN_FOLDER"
"""Environment variable by which the first process of a run tells the others where it writes."""


def run(name: str, args: list[str]) -> LightningCLI:
    """Run one command and return the command line with its trainer, module and data module.

    Args:
        name: "fit", "validate", "test" or "predict".
        args: The words after it.

    Raises:
        InputError: Something in the command line, a configuration or the data cannot be used.
        SystemExit: Training was asked to stop; it can be resumed.
    """
    restrict_imports()
    _quieten()
    try:
        cli = Fit(args) if name == "fit" else Score(name, args)
        cli.start()
    except (MisconfigurationException, yaml.YAMLError) as error:
        raise InputError(one_line(error, 400)) from error
    except RuntimeError as error:
        if not str(error).startswith("Error(s) in loading state_dict"):
            raise
        raise InputError(one_line(error, 400)) from error
    return cli


def _quieten() -> None:
    """Silence warnings about choices that are made here on purpose, and let wandb log offline without an account."""
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's own calls
    for message in (
        "LightningCLI's args parameter is intended",
        r"Found \d+ module\(s\) in eval mode",  # a frozen encoder
        ".*does not have many workers",
        r".*isinstance\(treespec, LeafSpec\)",
        r"Precision \S+ is not supported by the model summary",  # of the size alone
        r"It is recommended to use .*sync_dist=True",  # all processes have the same numbers
        "You're resuming from a checkpoint that ended before the epoch ended",  # the sampler begins at its batch
        r"`ModelCheckpoint\(monitor=.* could not find the monitored key",  # a run of a few steps
        "You're using the WeightAveraging callback with a model that overrides",  # strategies that shard are not used
    ):
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("pytorch_lightning.utilities.rank_zero").addFilter(
        lambda record: not any(words in str(record.msg) for words in ("Tip:", "SIGTERMException was raised"))
    )
    netrc = Path(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))
    if not os.environ.get("WANDB_API_KEY") and not (netrc.is_file() and "wandb" in netrc.read_text(errors="ignore")):
        os.environ.setdefault("WANDB_MODE", "offline")  # otherwise it would ask, or fail where it cannot


def _rank() -> int:
    """Return the number of this process among those of a run, also before there is a trainer."""
    return int(getattr(rank_zero_only, "rank", 0))


class Parser(OneLineErrors, LightningArgumentParser):
    """Lightning's parser, whose errors are one line."""


class CommandLine(LightningCLI):
    """What the four commands share: the parser, the precision, and the callbacks that every run has."""

    def __init__(self, name: str, model: Any, args: Sequence[str]) -> None:
        super().__init__(
            model,
            CaptionDataModule,
            seed_everything_default=1,
            save_config_callback=None,  # saved when training starts
            auto_configure_optimizers=False,  # the module takes its own
            load_from_checkpoint_support=False,
            run=False,
            parser_class=Parser,
            parser_kwargs={"prog": f"captioning {name}", "allow_abbrev": False},
            args=list(args),
        )

    folder: Path
    """Where the command writes."""
    own_callbacks: list[Any]
    """Callbacks of every run, which the configuration may replace by others of their kind."""

    def before_instantiate_classes(self) -> None:
        """Set the folder, and the precision, which is by default the best of this machine."""
        trainer = self.config.trainer
        trainer.default_root_dir = str(self.folder)
        if trainer.precision is None:
            trainer.precision = best_precision(str(trainer.accelerator))

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except InputError:
            raise
        except (ValueError, TypeError, ImportError) as error:  # an argument that a class refuses, an unknown strategy
            raise InputError(one_line(error, 400)) from error
        self.datamodule.seed = int(self.config.seed_everything or 0)
        self._dump_config()

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Return the trainer with the callbacks of every run that the configuration neither has nor turns off."""
        trainer = self.config_init.trainer
        configured = list(trainer.callbacks or [])
        off = {ProgressBar: trainer.enable_progress_bar is False, ModelSummary: trainer.enable_model_summary is False}
        for callback in self.own_callbacks:
            kind = next((kind for kind in (*off, CaptionSamples) if isinstance(callback, kind)), type(callback))
            if not off.get(kind) and not any(isinstance(other, kind) for other in configured):
                configured.append(callback)
        trainer.callbacks = configured
        return super().instantiate_trainer(use_distributed_sampler=False, **kwargs)  # the samplers know the processes


class Fit(CommandLine):
    """``captioning fit``. One folder per run: config, checkpoints, metrics and samples are all in RUNS/NAME."""

    def __init__(self, args: list[str]) -> None:
        if "WANDB_SWEEP_ID" in os.environ:  # wandb does not promise the order in which its agent passes parameters
            args = sorted(args, key=lambda arg: not arg.startswith("--config="))
        words, _ = _words(args)
        folder = _run_of(words)
        if folder is not None and not words.config:  # a resumed run has its own config, and stays where it is
            place = ["--runs", str(folder.path.parent), "--name", folder.path.name]
            args = ["--config", str(folder.config), *place, *args]
        super().__init__("fit", CaptioningModule, args)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--name", type=str | None, default=None, help="The run's name; default: the config's.")
        parser.add_argument("--runs", type=str, default="runs", help="Folder of all runs; a run's folder is RUNS/NAME.")
        parser.add_argument(
            "--ckpt_path", type=str | None, default=None, help="Checkpoint to resume: a file, or best or last of NAME."
        )
        parser.add_argument(
            "--init_from",
            type=str | None,
            default=None,
            help="Begin with the weights of this model, and a new optimizer. Resuming, --ckpt_path, wins.",
        )
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.add_lightning_class_args(ModelCheckpoint, "last")
        parser.add_lightning_class_args(EarlyStopping, "early_stopping")
        parser.set_defaults(
            {
                "checkpoint.monitor": "val/bleu4",
                "checkpoint.mode": "max",
                "checkpoint.filename": "best",
                "checkpoint.auto_insert_metric_name": False,
                "checkpoint.enable_version_counter": False,
                # A checkpoint of its own: after an exception, that of the best would be written over.
                "last.filename": "last",
                "last.every_n_epochs": 1,
                "last.save_on_train_epoch_end": True,
                "last.save_on_exception": True,
                "last.enable_version_counter": False,
                "early_stopping.monitor": "val/bleu4",
                "early_stopping.mode": "max",
                "early_stopping.patience": 5,
                "early_stopping.strict": False,  # a run of a few steps reaches no validation
                "trainer.num_sanity_val_steps": 0,
            }
        )

    def _place(self) -> Path:
        """Return the folder of the run: that of the resumed one, or the first free one of NAME, NAME-2 .."""
        config = self.config
        stems = _stems(config.config)
        name = config.name or (stems[0] if stems else "run")
        if config.name is None and "WANDB_SWEEP_ID" in os.environ:
            name = f"{name}_{config.seed_everything}"
        if _rank() and _FOLDER in os.environ:
            folder = Path(os.environ[_FOLDER])
        else:
            names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
            folders = (Path(config.runs) / name for name in names)
            folder = next(path for path in folders if config.ckpt_path or not RunFolder(path).is_trained())
            if not _rank():
                print(f"run folder: {folder}", flush=True)
        os.environ[_FOLDER] = str(folder)  # the processes that this one starts must not choose another
        if config.ckpt_path in ("best", "last"):
            config.ckpt_path = str(RunFolder(folder).checkpoint(config.ckpt_path))
        return folder

    def before_instantiate_classes(self) -> None:
        self.folder, self.stop, config = self._place(), StopOnRequest(), self.config
        super().before_instantiate_classes()
        summary = RichModelSummary(max_depth=3)
        self.own_callbacks = [RichProgressBar(), summary, CaptionSamples(), Throughput(), LogLines(), self.stop]
        config.checkpoint.dirpath = config.last.dirpath = str(RunFolder(self.folder).checkpoints)
        config.name, config.runs = self.folder.name, str(self.folder.parent)
        config.trainer.logger = _loggers(config, self.folder)

    def instantiate_classes(self) -> None:
        config = self.config
        if config.ckpt_path is not None:
            read_checkpoint(Path(config.ckpt_path))  # says at once if it is missing, damaged or of another project
        if not _rank():  # missing data are told before weights are downloaded and wandb begins
            (source,) = build({"data.source": CaptionSource}, [{"data": {"source": config.data.source.as_dict()}}])
            source.prepare()
        start = read_model(config.init_from) if config.init_from and config.ckpt_path is None else None
        given = start is not None or config.ckpt_path is not None
        with without_weights() if given else contextlib.nullcontext():
            super().instantiate_classes()
        self.model.start = start
        self.model.settings = self.config_dump

    def start(self) -> None:
        _refuse_unknown_monitors(self.config)
        if self.trainer.is_global_zero:
            config = self.config.clone()
            config.ckpt_path = None  # a run that is started with this file is a new one
            write_text(RunFolder(self.folder).config, self.parser.dump(config, skip_none=False))
        seed, attention = self.datamodule.seed, type(self.model.attention).__name__
        labels: dict[str, Any] = {"attention": attention, "seed": seed}
        labels["provenance"] = provenance(command=shlex.join(sys.argv), seed=seed)
        for logger in self.trainer.loggers:
            logger.log_hyperparams(self.config_dump | labels)
        try:
            self.trainer.fit(self.model, self.datamodule, ckpt_path=self.config.ckpt_path, weights_only=True)
        except SIGTERMException:
            if self.trainer.global_rank:  # any other code would make the launcher kill the first while it saves
                raise SystemExit(0) from None
            words = ["--ckpt_path", str(RunFolder(self.folder).checkpoint("last"))]
            words += [word for module in IMPORTED for word in ("--import", module)]
            print(f"to go on: captioning fit {shlex.join(words)}", file=sys.stderr, flush=True)
            raise SystemExit(130 if self.stop.asked == signal.SIGINT else 143) from None
        best: Any = self.trainer.checkpoint_callbacks[0]
        if best.best_model_score is not None and self.trainer.is_global_zero:
            print(f"best checkpoint: {best.best_model_path} ({best.monitor} {float(best.best_model_score):.2f})")
            if any(self.folder.glob("wandb/offline-run-*")):
                print(f"wandb ran offline; to upload: wandb sync {self.folder}/wandb/offline-run-*")


def _words(args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return what the command line says about its place, before its options are parsed, and its other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-c", "--config", action="append", default=[])
    parser.add_argument("--runs", default="runs")
    parser.add_argument("--ckpt_path")
    parser.add_argument("--name")
    return parser.parse_known_args(list(args))


def _run_of(words: argparse.Namespace) -> RunFolder | None:
    """Return the folder of the run that the checkpoint of a command line lies in."""
    if words.ckpt_path in ("best", "last"):
        return RunFolder(Path(words.runs, words.name or "run"))
    folder = RunFolder.of(words.ckpt_path) if words.ckpt_path else None
    return folder if folder is not None and folder.config.is_file() else None


def _stems(configs: Any) -> list[str]:
    """Return the names of configuration files; the first names the experiment, later ones are overlays."""
    configs = configs if isinstance(configs, list) else [configs] if configs else []
    return [Path(str(getattr(config, "relative", config))).stem for config in configs]


def _loggers(config: Any, folder: Path) -> list[Namespace]:
    """Return the loggers of a run: CSV, whose file survives a killed process, and wandb unless it is turned off."""
    given = config.trainer.logger
    wandb = Namespace(class_path="pytorch_lightning.loggers.WandbLogger", init_args=Namespace())
    given = (
        [wandb] if given in (None, True) else [] if given is False else given if isinstance(given, list) else [given]
    )
    loggers = [logger for logger in given if not logger.class_path.endswith("CSVLogger")]
    for logger in loggers:
        arguments = logger.init_args
        arguments.save_dir = str(folder)
        if logger.class_path.endswith("WandbLogger"):
            arguments.pop("experiment", None)  # an object, which no config can hold
            defaults: dict[str, Any] = {"project": os.environ.get("WANDB_PROJECT", "captioning"), "job_type": "train"}
            defaults |= {"name": folder.name, "group": " ".join(_stems(config.config)) or None}
            for name, value in defaults.items():
                arguments[name] = arguments.get(name) or value
            if config.ckpt_path is None or not arguments.get("id"):  # a resumed run goes on in wandb, too
                arguments.id, arguments.name = secrets.token_hex(4), folder.name
            arguments.resume = "allow"  # jsonargparse passes None for options that are not set
    csv = {"save_dir": str(folder), "name": "metrics"}
    return [*loggers, Namespace(class_path="pytorch_lightning.loggers.CSVLogger", init_args=Namespace(**csv))]


def _refuse_unknown_monitors(config: Any) -> None:
    """Refuse to monitor what no validation logs, which Lightning would notice after an epoch."""
    for option in ("checkpoint", "early_stopping"):
        monitor = config[option].monitor
        if monitor and monitor.startswith("val/") and monitor[4:] not in METRICS:
            near = did_you_mean(monitor, [f"val/{name}" for name in METRICS])
            raise InputError(f"--{option}.monitor {monitor}: no validation logs that{near}")


class Score(CommandLine):
    """``captioning validate``, ``test`` and ``predict`` of any model: a checkpoint, an exported folder, or of the hub.

    The model comes from the file that ``--ckpt_path`` names, and brings its vocabulary and its search. The data come
    from ``--config``, or else from the configuration of the run that the checkpoint lies in.
    """

    def __init__(self, stage: str, args: list[str]) -> None:
        self.words, args = _words(args)
        self.stage, self.run, path = stage, _run_of(self.words), self.words.ckpt_path
        if path is None:
            raise InputError(f"captioning {stage}: name a model with --ckpt_path")
        if path in ("best", "last") and self.run is not None:
            path = str(self.run.checkpoint(path))
        self.saved = saved = read_model(path)
        configs = [Path(config) for config in self.words.config] or ([self.run.config] if self.run is not None else [])
        self.saved = saved = read_model(path)
        if not configs and not any(arg.startswith("--data.source") for arg in args):
            raise InputError(f"{path}: is in no run's folder; name a configuration with its data by --config")
        numbers = {field.name for field in dataclasses.fields(BeamOptions)}
        search = (saved.settings.get("model") or {}).get("search") or {}
        search = {name: value for name, value in search.items() if name in numbers and isinstance(value, (int, float))}
        settings = [{"model": {"search": search}}, *map(_data_of, configs)]

        def scored_model(
            search: BeamOptions = BeamOptions(),  # noqa: B008 - frozen
            bound_samples: int = 8,
            inference: str | None = None,
            ensemble: list[str] | None = None,
        ) -> CaptioningModule:
            """Return the module that scores the model.

            Args:
                search: Options of the search; by default those of the model's training.
                bound_samples: Draws per caption that estimate the bounds of stochastic attention; 0 for none.
                inference: How stochastic attention forms contexts: "expected", "argmax" or "sample".
                ensemble: Further models of the same vocabulary, whose word probabilities are averaged with this one's.
            """
            if inference is not None:
                saved.captioner.decoder.attention.inference = inference  # refuses a mode that it does not have
            parts = saved.captioner.encoder, saved.captioner.decoder
            module = CaptioningModule(*parts, search=search, bound_samples=bound_samples)
            module.captioner = saved.captioner
            others = [read_model(name) for name in ensemble or ()]
            for other in others:
                if other.vocabulary.words != saved.vocabulary.words:
                    raise InputError(f"{other.path}: its vocabulary differs from that of {saved.path}")
            module.others = tuple(other.captioner for other in others)
            module.scored = Path(path).name
            return module

        scored_model.__qualname__ += secrets.token_hex(4)  # jsonargparse keeps a function of a name for the process
        options = [f"--config={json.dumps(content)}" for content in settings]
        super().__init__(stage, scored_model, [*options, *args])

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--results", type=str | None, default=None, help="Folder to write to; default: the run's.")

    def _place(self) -> Path:
        """Return the folder for the results: the run's, with one of its own for an ensemble and for other data."""
        if self.config.results is not None:
            return Path(self.config.results)
        stem = Path(self.saved.path.rpartition("/")[2] or "model").stem
        folder = self.run.path if self.run is not None else Path(self.words.runs) / "scored" / stem
        other_data = Path(self.words.config[-1]).stem if self.words.config else ""
        return folder / ("ensemble" if self.config.model.ensemble else "") / other_data

    def before_instantiate_classes(self) -> None:
        self.folder = self._place()
        super().before_instantiate_classes()
        logger = self.config.trainer.logger
        if logger is None and self.stage == "test" and self.run is not None and not self.words.config:
            logger = [
                Namespace(class_path=entry["class_path"], init_args=Namespace(**entry["init_args"]))
                for entry in read_config(self.run.config).get("trainer", {}).get("logger") or []
                if entry["class_path"].endswith("WandbLogger")
            ]
        self.config.trainer.logger = logger or False  # the test of a run is logged to the run of wandb that it has
        self.own_callbacks = [RichProgressBar(), *([CaptionSamples()] if logger else [])]

    def start(self) -> None:
        self.datamodule.use(self.saved.vocabulary)
        self.model.provenance = provenance(command=shlex.join(sys.argv), seed=self.datamodule.seed) | {
            "scored_in": self.config_dump["trainer"]["precision"],
            "settings": self.saved.settings | {"data": self.config_dump["data"]},
        }
        if self.stage == "predict":
            self.trainer.predict(self.model, datamodule=self.datamodule, return_predictions=False)
            return
        score = self.trainer.test if self.stage == "test" else self.trainer.validate
        score(self.model, datamodule=self.datamodule, verbose=False)
        if self.trainer.is_global_zero:
            models = f"; {1 + len(self.model.others)} models" if self.model.others else ""
            context = f"beam {self.model.search.beam_size}, {self.model.attention.inference} context; in percent"
            print(f"\n{self.datamodule.evaluated_split} split, {len(self.model.results)} images{models}; {context}")
            values = {name.partition("/")[2]: float(value) for name, value in self.trainer.callback_metrics.items()}
            for name, metric in METRICS.items():
                if name in values:
                    print(f"{metric.title:45}{values[name]:8.2f}" + f" {metric.unit}" * (metric.unit != "percent"))
            print(f"tokens: {self.datamodule.source.tokens}\nwritten to {self.folder}")


def _data_of(path: Path) -> dict[str, Any]:
    """Return what a configuration says about data, seed, device and search, and nothing of how a model is trained."""
    settings = read_config(path, "--config")
    parts = {
        "model": ("search", "bound_samples"),
        "trainer": ("accelerator", "devices", "strategy", "num_nodes", "limit_val_batches", "limit_test_batches"),
    }
    chosen = {
        part: {name: value for name, value in (settings.get(part) or {}).items() if name in names}
        for part, names in parts.items()
    }
    return chosen | {name: settings[name] for name in ("data", "seed_everything") if name in settings}
