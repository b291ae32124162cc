"""The Lightning CLI: ``captioning fit|validate|test|predict``."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from captioning.component import import_modules
from captioning.configs import CONFIG_FORMAT, read_config
from captioning.encoders.base import without_weights
from captioning.errors import InputError
from captioning.files import write_text
from captioning.provenance import provenance
from captioning.run_folder import RunFolder
from captioning.training.callbacks import AtomicCheckpointIO, LogLines
from captioning.training.datamodule import CaptionDataModule
from captioning.training.foreign_settings import evaluation_settings, resume_settings
from captioning.training.module import CaptioningModule
from captioning.training.parser import CommandLineParser
from captioning.training.progress import with_own_displays
from captioning.training.start import removes_what_a_failed_start_wrote
from captioning.training.wandb_run import WandbRun
from captioning.usage import values_of


def main(args: list[str] | None = None) -> CaptioningCLI:
    """Run one command line and return the CLI with its trainer, module and data module.

    Raises:
        InputError: something in the command line, a config or the data cannot be used.
    """
    args, modules = _split_imports(sys.argv[1:] if args is None else args)
    configs = [Path(config).parent for config in values_of(args, "--config", "-c")]
    import_modules(modules, [Path(), *configs[:1]])
    wandb_offline_without_account()
    _quieten()
    try:
        return CaptioningCLI(
            CaptioningModule,
            CaptionDataModule,
            seed_everything_default=1,
            save_config_callback=SaveRunConfig,
            save_config_kwargs={"save_to_log_dir": False},
            auto_configure_optimizers=False,  # the module takes its own
            parser_class=CommandLineParser,
            parser_kwargs={"parser_mode": CONFIG_FORMAT},
            args=with_run_config(args),
        )
    except MisconfigurationException as error:  # options of the trainer that contradict each other
        raise InputError(" ".join(str(error).split())) from error


def _quieten() -> None:
    """Silence what Lightning says about choices that are made here on purpose."""
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's own calls
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended to run from within Python")
    warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")  # a frozen encoder
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
    logging.getLogger("pytorch_lightning.utilities.rank_zero").addFilter(lambda record: "Tip:" not in str(record.msg))


class SaveRunConfig(SaveConfigCallback):
    """Saves the full config in the run's folder when a run is trained; evaluations leave it as it is."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        path = RunFolder(Path(trainer.default_root_dir)).config
        write_text(path, self.parser.dump(self.config, skip_none=False))
        for logger in trainer.loggers:
            if isinstance(logger, WandbRun):
                logger.save_file(path, "run_config.yaml")  # wandb writes a config.yaml of its own


class CaptioningCLI(LightningCLI):
    """One folder per run: config, checkpoints, metrics, samples and the logger's files are all in RUNS/NAME."""

    run_dir: Path

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--name", type=str | None, default=None, help="The run's name; default: the config's.")
        parser.add_argument("--runs", type=str, default="runs", help="Folder of all runs; a run's folder is RUNS/NAME.")
        parser.add_argument(
            "--results", type=str | None, default=None, help="Where validate and test write; default: the run's folder."
        )
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.add_lightning_class_args(ModelCheckpoint, "last")
        parser.add_lightning_class_args(EarlyStopping, "early_stopping")
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
        parser.link_arguments("seed_everything", "data.seed", compute_fn=_seed)

    def _parse_ckpt_path(self) -> None:
        """Leave the config alone: what the command line and the YAML say wins over what a checkpoint was made with."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        fitting = self.subcommand == "fit"
        checkpoint = config.get("ckpt_path")
        name = config.name or _config_name(config.get("config")) or "run"
        self.run_dir = Path(config.runs) / name
        if checkpoint in ("best", "last"):
            checkpoint = config.ckpt_path = str(RunFolder(self.run_dir).checkpoint(checkpoint))
        if not fitting and not checkpoint:
            checkpoint = config.ckpt_path = str(RunFolder(self.run_dir).checkpoint("best"))
        if checkpoint:
            if not Path(checkpoint).is_file():
                raise InputError(
                    f"{checkpoint}: no such checkpoint; give one with --ckpt_path, or train with fit first"
                )
            folder = RunFolder.of(checkpoint)
            if folder is not None and (config.name is None or not fitting):
                self.run_dir = folder.path
        elif RunFolder(self.run_dir).checkpoints.exists():
            self.run_dir = _free_name(self.run_dir)
        if config.get("weights_only") is None:
            config.weights_only = True  # a checkpoint that came from elsewhere runs nothing
        config.name = self.run_dir.name
        config.runs = str(self.run_dir.parent)
        config.trainer.default_root_dir = str(self.run_dir)
        config.checkpoint.dirpath = config.last.dirpath = str(RunFolder(self.run_dir).checkpoints)
        if fitting:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            print(f"run folder: {self.run_dir}", flush=True)
            if not checkpoint:
                RunFolder(self.run_dir).wandb_run.unlink(missing_ok=True)  # of a run that ended before its first epoch
            group = _config_name(config.get("config"))
            config.trainer.logger = _loggers(config.trainer.get("logger"), self.run_dir, group)
        else:
            if config.results:
                config.trainer.default_root_dir = config.results
            config.trainer.logger = False  # scores of an evaluation are printed and written as JSON

    def instantiate_classes(self) -> None:
        resumed = self.subcommand is not None and self.config[self.subcommand].get("ckpt_path")
        with self._starting(), without_weights() if resumed else contextlib.nullcontext():  # the checkpoint brings them
            super().instantiate_classes()

    def _run_subcommand(self, subcommand: str) -> None:
        with self._starting():
            super()._run_subcommand(subcommand)

    def _starting(self) -> contextlib.AbstractContextManager[None]:
        """Let a run that fails before its first step leave no folder behind."""
        if self.subcommand != "fit" or getattr(rank_zero_only, "rank", 0):
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
        self.trainer_defaults = {"callbacks": [LogLines()]}
        trainer = super().instantiate_trainer(plugins=[AtomicCheckpointIO()], use_distributed_sampler=False, **kwargs)
        trainer.callbacks = with_own_displays(trainer.callbacks)  # type: ignore[attr-defined]
        return trainer

    def after_instantiate_classes(self) -> None:
        self.model.connect(self.datamodule)
        self._dump_config()  # config_dump: the full configuration as plain data

    def before_fit(self) -> None:
        self.model.settings = self.config_dump
        for logger in self.trainer.loggers:
            logger.log_hyperparams(self.config_dump | _labels(self.config_dump))

    def after_fit(self) -> None:
        best = next((c for c in self.trainer.checkpoint_callbacks if getattr(c, "monitor", None)), None)
        if isinstance(best, ModelCheckpoint) and best.best_model_score is not None:
            print(f"best checkpoint: {best.best_model_path} ({best.monitor} {float(best.best_model_score):.2f})")
        for logger in self.trainer.loggers:
            if isinstance(logger, WandbRun):
                logger.finish()
        wandb_folder = self.run_dir / "wandb"
        if any(wandb_folder.glob("offline-run-*")):
            print(f"wandb ran offline; to upload: wandb sync {wandb_folder}/offline-run-*")


def _seed(seed: int | bool) -> int:
    return 1 if seed is True else int(seed or 0)


def _config_name(paths: Any) -> str | None:
    """Return the name of the first config file, which names the experiment; later ones are overlays."""
    if not paths:
        return None
    first = paths[0] if isinstance(paths, list) else paths
    return Path(str(getattr(first, "relative", first))).stem


def _free_name(folder: Path) -> Path:
    number = 2
    while folder.with_name(f"{folder.name}-{number}").exists():
        number += 1
    return folder.with_name(f"{folder.name}-{number}")


def _labels(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that distinguish runs, under short names, and where the run comes from."""
    decoder = settings["model"]["decoder"]["init_args"]
    attention = decoder["attention"]
    score = attention.get("init_args", {}).get("score") or {}
    return {
        "attention": attention["class_path"].rpartition(".")[2],
        "score": score.get("class_path", "").rpartition(".")[2] or None,
        "encoder": settings["model"]["encoder"]["class_path"].rpartition(".")[2],
        "seed": settings["data"]["seed"],
        "provenance": provenance(command=shlex.join(sys.argv), seed=settings["data"]["seed"]),
    }


def _loggers(configured: Any, run_dir: Path, group: str | None) -> Any:
    """Point the configured loggers at the run's folder and add a CSV, which survives a killed process.

    A wandb logger is named after the run; what its config leaves open gets the values that keep a project in order.
    """
    from jsonargparse import Namespace

    if configured in (None, False, True):
        configured = []
    loggers = list(configured) if isinstance(configured, list) else [configured]
    for logger in loggers:
        if "save_dir" in logger.init_args:
            logger.init_args.save_dir = str(run_dir)
        if logger.class_path.endswith(("WandbLogger", "WandbRun")):
            logger.class_path = "captioning.training.WandbRun"
            logger.init_args.pop("experiment", None)  # an object, which no config can hold
            project = os.environ.get("WANDB_PROJECT", "captioning")
            defaults = {"name": run_dir.name, "project": project, "group": group, "job_type": "train"}
            for name, value in defaults.items():
                logger.init_args[name] = logger.init_args.get(name) or value
    csv = Namespace(
        class_path="pytorch_lightning.loggers.CSVLogger",
        init_args=Namespace(
            save_dir=str(run_dir), name="metrics", version=None, prefix="", flush_logs_every_n_steps=100
        ),
    )
    return [*loggers, csv]


def with_run_config(args: list[str]) -> list[str]:
    """Add the config of the run that ``--ckpt_path`` lies in where the command line names no config.

    Only data are taken of it: ``foreign_settings`` says which.

    Raises:
        InputError: it is damaged, or chooses what only a config that the user names may choose.
    """
    if values_of(args, "--config", "-c") or not args or args[0] not in ("fit", "validate", "test", "predict"):
        return args
    for checkpoint in values_of(args, "--ckpt_path"):
        folder = RunFolder.of(checkpoint)
        if folder is not None and folder.config.is_file():
            select = resume_settings if args[0] == "fit" else evaluation_settings
            settings = select(read_config(folder.config), folder.config)
            return [args[0], "--config", json.dumps(settings), *args[1:]]
    return args


def _split_imports(args: list[str]) -> tuple[list[str], list[str]]:
    """Return the other arguments, and the modules of ``--import``."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--import", dest="imports", action="append", default=[])
    known, others = parser.parse_known_args(args)
    return others, known.imports


def wandb_offline_without_account() -> None:
    """Let wandb log offline where nobody is logged in; without this it asks, or fails where it cannot ask."""
    if "WANDB_MODE" in os.environ or os.environ.get("WANDB_API_KEY"):
        return
    netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    if netrc.is_file() and "wandb" in netrc.read_text(errors="ignore"):
        return
    os.environ["WANDB_MODE"] = "offline"
