"""The Lightning CLI: ``captioning fit|validate|test|predict``."""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from pytorch_lightning.utilities.exceptions import MisconfigurationException, SIGTERMException

from captioning.checkpoint.load import SavedModel, read_model
from captioning.cli.build import build
from captioning.cli.checks import (
    REFUSALS,
    foreign_callback,
    refusal,
    refuse_empty_paths,
    refuse_impossible,
    while_restoring,
)
from captioning.cli.command_line import configs_first, split_imports, sweep_name, with_run_config
from captioning.cli.loggers import (
    run_labels,
    run_loggers,
    say_how_to_upload,
    variant_name,
    wandb_offline_without_account,
)
from captioning.cli.old_parser import AutoPrecisionTrainer, CommandLineParser, values_of
from captioning.cli.precision import settled_precision
from captioning.cli.run_place import RunPlace, removes_what_a_failed_start_wrote
from captioning.component import import_modules
from captioning.data import CaptionSource
from captioning.encoders.base import without_weights
from captioning.errors import DEBUG, InputError, check_range, is_out_of_memory, one_line
from captioning.files import write_text
from captioning.inference import load
from captioning.model.ensemble import Ensemble
from captioning.run_folder import RunFolder
from captioning.settings import read_config
from captioning.training.callbacks import BestCheckpoint, LogTest, NamedCheckpoint, StopEarly, refuse_unknown_monitors
from captioning.training.checkpoint_io import AtomicCheckpointIO
from captioning.training.datamodule import CaptionDataModule
from captioning.training.divergence import StopOnDivergence
from captioning.training.module import CaptioningModule
from captioning.training.processes import BatchNormSync, OrderedSums, process_rank
from captioning.training.progress import LogFacts, LogLines, Throughput, with_own_displays
from captioning.training.resumed_settings import ResumedSettings
from captioning.training.resumed_state import CheckedState
from captioning.training.stopping import Preemption, ends_after_the_step
from captioning.training.wandb_run import WandbRun

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(args: list[str] | None = None) -> CaptioningCLI:
    """Run one command line and return the CLI with its trainer, module and data module.

    Raises:
        InputError: Something in the command line, a config or the data cannot be used.
    """
    words = [arg for arg in (sys.argv[1:] if args is None else args) if arg != DEBUG]
    args, modules = split_imports(configs_first(words))
    configs = [Path(config) for config in values_of(args, "--config", "-c")]
    import_modules(modules, [Path(), *(config.parent for config in configs[:1])])
    for config in configs:
        if not config.exists() or config.is_file():  # a pipe can be read once
            read_config(config, "--config")
    wandb_offline_without_account()
    _quieten()
    if args[:1] != ["fit"]:
        warnings.filterwarnings("ignore", message="The dirpath has changed")  # a scored checkpoint may lie anywhere
    try:
        with ends_after_the_step():
            return CaptioningCLI(
                CaptioningModule,
                CaptionDataModule,
                seed_everything_default=1,
                save_config_callback=SaveRunConfig,
                save_config_kwargs={"save_to_log_dir": False},
                auto_configure_optimizers=False,  # the module takes its own
                parser_class=CommandLineParser,
                parser_kwargs={"exit_on_error": False},
                args=with_run_config(args),
            )
    except (MisconfigurationException, argparse.ArgumentError, yaml.YAMLError) as error:
        raise InputError(one_line(error, 400)) from error
    except Exception as error:
        if isinstance(error, InputError) or is_out_of_memory(error):
            raise
        if str(error).startswith("Early stopping conditioned on metric"):
            raise InputError(f"--early_stopping.monitor: {one_line(error)}") from error
        if "val_check_interval" in str(error):
            raise InputError(f"--trainer.val_check_interval: {one_line(error)}") from error
        if (callback := foreign_callback(error)) is not None:
            raise InputError(f"trainer.callbacks: {callback}: {one_line(error)}") from error
        if not while_restoring(error):
            raise
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(f"the checkpoint does not fit this model, optimizer and trainer ({reason})") from error


def _quieten() -> None:
    """Silence Lightning's warnings about choices that are made here on purpose."""
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's own calls
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended to run from within Python")
    warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")  # a frozen encoder
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
    warnings.filterwarnings("ignore", message=r"It is recommended to use .*sync_dist=True")  # all have them
    unsaid = ("Tip:", "SIGTERMException was raised with message")  # `to go on` says what the second is about
    logging.getLogger("pytorch_lightning.utilities.rank_zero").addFilter(
        lambda record: not any(words in str(record.msg) for words in unsaid)
    )


class SaveRunConfig(SaveConfigCallback):
    """Saves the full config in the run's folder when training starts.

    Evaluations leave the file as it is, and so does a resumed run that fails before training starts.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        pass

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self.save_config(trainer, pl_module, "fit")

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        path = RunFolder(Path(trainer.default_root_dir)).config
        config = self.config.clone()
        if config.ckpt_path is not None and path.is_file():
            config.init_from = read_config(path).get("init_from")  # a resumed second stage keeps its first stage
        config.ckpt_path = None  # a run that is started with this file is a new one
        for logger in config.trainer.logger:
            if logger.class_path.endswith("WandbRun") and logger.init_args.name == path.parent.name:
                logger.init_args.name = None
        write_text(path, self.parser.dump(config, skip_none=False), follow=False)
        for logger in trainer.loggers:
            if isinstance(logger, WandbRun):
                logger.save_file(path, "run_config.yaml")  # wandb writes a config.yaml of its own


class CaptioningCLI(LightningCLI):
    """One folder per run: config, checkpoints, metrics, samples and the logger's files are all in RUNS/NAME."""

    run_dir: Path
    wandb_run: WandbRun | None = None
    """The wandb run that a test is logged to."""
    start: SavedModel | None = None
    """The weights that training begins with."""

    def __init__(self, *args: Any, **options: Any) -> None:
        with contextlib.ExitStack() as self._held:  # the claim on the run's folder
            super().__init__(*args, **{"trainer_class": AutoPrecisionTrainer} | options)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        self._words: list[str] = list(args or ())
        seed = (self.config.get(self.config.get("subcommand", "")) or self.config).get("seed_everything")
        check_range(0, 2**32 - 1, seed_everything=None if isinstance(seed, bool) else seed)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--name", type=str | None, default=None, help="The run's name; default: the config's.")
        parser.add_argument("--runs", type=str, default="runs", help="Folder of all runs; a run's folder is RUNS/NAME.")
        parser.add_argument(
            "--results", type=str | None, default=None, help="Where validate and test write; default: the run's folder."
        )
        parser.add_argument(
            "--init_from",
            type=str | None,
            default=None,
            help="fit: begin with the weights of this model, and a new optimizer. Resuming, --ckpt_path, wins.",
        )
        parser.add_argument(
            "--ensemble",
            type=list[str] | None,
            default=None,
            help="Checkpoints of the same vocabulary; validate, test and predict average the words' probabilities.",
        )
        parser.add_lightning_class_args(BestCheckpoint, "checkpoint")
        parser.add_lightning_class_args(NamedCheckpoint, "last")
        parser.add_lightning_class_args(StopEarly, "early_stopping")
        parser.set_defaults(
            {
                "checkpoint.monitor": "val/bleu4",
                "checkpoint.mode": "max",
                "checkpoint.filename": "best",
                "checkpoint.enable_version_counter": False,
                "checkpoint.auto_insert_metric_name": False,
                # A checkpoint of its own, because save_last follows the best one and would fall behind with it.
                "last.filename": "last",
                "last.every_n_epochs": 1,
                "last.save_on_exception": True,
                "last.enable_version_counter": False,
                "early_stopping.monitor": "val/bleu4",
                "early_stopping.mode": "max",
                "early_stopping.patience": 5,
            }
        )

    def _parse_ckpt_path(self) -> None:
        """Do nothing: command line and YAML win over the settings inside a checkpoint."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        refuse_empty_paths(config)
        fitting = self.subcommand == "fit"
        if fitting and config.name is None:
            config.name = sweep_name(config)
        place = RunPlace.of(config, fitting=fitting)
        if not fitting and config.results is None and config.name is not None and values_of(self._words, "--name"):
            named = Path(config.runs) / config.name  # of another run than the checkpoint's
            config.results = str(named) if named.resolve() != place.folder.resolve() else None
        if config.ensemble and fitting:
            raise InputError("--ensemble: models are trained one by one; use it with validate, test or predict")
        if fitting:
            refuse_impossible(config)
            if config.trainer.check_val_every_n_epoch not in (None, 1) and config.last.save_on_train_epoch_end is None:
                config.last.save_on_train_epoch_end = True  # also in a last epoch without validation
            if not process_rank():
                place, claim = place.claimed()
                self._held.enter_context(claim)
        self.run_dir, config.ckpt_path = place
        config.trainer.precision, line = settled_precision(config.trainer)
        if line is not None and not process_rank():
            print(line, flush=True)
        if config.get("weights_only") is None:
            config.weights_only = True  # a checkpoint from elsewhere runs no code
        config.name = self.run_dir.name
        config.runs = str(self.run_dir.parent)
        config.trainer.default_root_dir = str(self.run_dir)
        config.checkpoint.dirpath = config.last.dirpath = str(RunFolder(self.run_dir).checkpoints)
        if fitting:
            self._prepare_training(config, resumed=place.checkpoint is not None)
        else:
            self._prepare_evaluation(config)

    def _prepare_training(self, config: Any, *, resumed: bool) -> None:
        if config.get("init_from") and not resumed:
            try:
                self.start = read_model(config.init_from)
            except InputError as error:
                raise InputError(f"--init_from {error}") from error
        if not process_rank() and not resumed:
            RunFolder(self.run_dir).wandb_run.unlink(missing_ok=True)  # left by a run that ended before its first epoch
        group = variant_name(config, self._words)
        config.trainer.logger = run_loggers(config.trainer.get("logger"), self.run_dir, group)

    def _prepare_evaluation(self, config: Any) -> None:
        if config.ensemble and not config.results:
            config.results = str(self.run_dir / "ensemble")  # the folder itself has the scores of this model alone
        if config.results:
            config.trainer.default_root_dir = config.results
        elif self.subcommand == "test" and config.trainer.logger is not False:
            folder = RunFolder.of(config.ckpt_path)
            self.wandb_run = None if folder is None else WandbRun.of_folder(folder)
        config.trainer.logger = False  # scores of an evaluation are printed and written as JSON

    def instantiate_classes(self) -> None:
        resumed = self.subcommand is not None and self.config[self.subcommand].get("ckpt_path")
        weights = without_weights() if resumed or self.start else contextlib.nullcontext()  # the checkpoint brings them
        with self._starting(), weights:
            try:
                self._prepare_data()
                super().instantiate_classes()
            except InputError:
                raise
            except REFUSALS as error:
                raise refusal(error) from error

    def _prepare_data(self) -> None:
        """Check that the training data are there before weights are downloaded and a wandb run begins."""
        if self.subcommand == "fit" and not process_rank():
            described = {"data": {"source": self.config["fit"].data.source.as_dict()}}
            (source,) = build({"data.source": CaptionSource}, [described])
            source.prepare()

    def _run_subcommand(self, subcommand: str) -> None:
        with warnings.catch_warnings(), self._starting():
            if subcommand != "fit":  # evaluation needs no training callbacks
                warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`, callbacks used")
            try:
                super()._run_subcommand(subcommand)
            except SIGTERMException:
                self._say_how_to_go_on()
                raise
            except OSError as error:
                if error.errno in _FULL and error.filename is None:  # such as the logger's, whose file has no name here
                    raise InputError(f"{self.run_dir}: cannot be written ({error.strerror})") from error
                raise

    def _say_how_to_go_on(self) -> None:
        last = RunFolder(self.run_dir).checkpoint("last")
        if last.is_file() and not process_rank():
            words = ["--ckpt_path", str(last)]
            words += [word for module in values_of(sys.argv, "--import") for word in ("--import", module)]
            print(f"to go on: captioning fit {shlex.join(words)}", file=sys.stderr, flush=True)

    def _starting(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a run that fails before its first step leaves no folder behind."""
        if self.subcommand != "fit" or process_rank():
            return contextlib.nullcontext()
        return removes_what_a_failed_start_wrote(self.run_dir, self._has_begun)

    def _has_begun(self) -> bool:
        trainer = getattr(self, "trainer", None)
        for logger in [] if trainer is None else trainer.loggers:
            if isinstance(logger, WandbRun):
                logger.finish()  # it writes into the folder for as long as it runs
        return RunFolder(self.run_dir).checkpoints.exists() or (trainer is not None and trainer.global_step > 0)

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        # The samplers split the data over the processes themselves.
        log_test = [LogTest(self.wandb_run)] if self.wandb_run else []
        callbacks = [CheckedState(), ResumedSettings(), LogLines(), LogFacts(), StopOnDivergence()]
        callbacks += [OrderedSums(), Preemption()]
        self.trainer_defaults = {"callbacks": [*callbacks, *log_test]}
        plugins = [AtomicCheckpointIO(), BatchNormSync()]
        try:
            trainer = super().instantiate_trainer(plugins=plugins, use_distributed_sampler=False, **kwargs)
        except InputError:
            raise
        except (ValueError, TypeError, ImportError, OverflowError, RuntimeError) as error:  # an unknown strategy ..
            settings = self.config[self.subcommand].trainer if self.subcommand else {}
            given = (f"{name} {settings.get(name)}" for name in ("accelerator", "strategy", "precision", "max_time"))
            raise InputError(f"trainer: {one_line(error)} ({', '.join(given)})") from error
        displayed: list[Callback] = with_own_displays(trainer.callbacks)  # type: ignore[attr-defined]
        has_speed = any(isinstance(callback, Throughput) for callback in displayed)
        trainer.callbacks = displayed if has_speed else [Throughput(), *displayed]  # type: ignore[attr-defined]
        return trainer

    def after_instantiate_classes(self) -> None:
        self.model.connect(self.datamodule)
        self.datamodule.seed = self._seed()
        self._dump_config()  # config_dump: the full configuration as plain data

    def before_validate(self) -> None:
        config = self.config[self.subcommand]
        if config.ensemble:
            ensemble = load([config.ckpt_path, *config.ensemble]).model
            assert isinstance(ensemble, Ensemble)
            self.model.join(ensemble.captioners[1:])

    def before_test(self) -> None:
        self.before_validate()

    def before_predict(self) -> None:
        self.before_validate()

    def before_fit(self) -> None:
        self.model.start = self.start
        refuse_unknown_monitors(self.trainer)
        self.model.settings = self.config_dump
        for logger in self.trainer.loggers:
            logger.log_hyperparams(self.config_dump | run_labels(self.config_dump, self._seed()))

    def after_fit(self) -> None:
        best = next((c for c in self.trainer.checkpoint_callbacks if getattr(c, "monitor", None)), None)
        if isinstance(best, ModelCheckpoint) and best.best_model_score is not None and self.trainer.is_global_zero:
            print(f"best checkpoint: {best.best_model_path} ({best.monitor} {float(best.best_model_score):.2f})")
        for logger in self.trainer.loggers:
            if isinstance(logger, WandbRun):
                logger.finish()
        say_how_to_upload(self.run_dir)

    def after_test(self) -> None:
        if self.wandb_run is not None:
            say_how_to_upload(self.run_dir)

    def _seed(self) -> int:
        seed = self.config[self.subcommand].seed_everything if self.subcommand else self.config.seed_everything
        return 1 if seed is True else int(seed or 0)
