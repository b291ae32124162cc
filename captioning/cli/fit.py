"""The command ``fit``: Lightning's command line around module and data module."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import secrets
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from jsonargparse import Namespace
from pytorch_lightning import callbacks
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.utilities.exceptions import SIGTERMException

from captioning.checkpoint.io import read_checkpoint
from captioning.checkpoint.load import read_model
from captioning.cli import IMPORTED
from captioning.cli.build import build, restrict_imports
from captioning.cli.parser import OneLineErrors
from captioning.comparison.conditions import attention_kind
from captioning.data import CaptionSource
from captioning.errors import InputError, check_range, did_you_mean, one_line
from captioning.files import read_config, write_text
from captioning.metrics.table import METRICS, better, few_images_warning, log_key
from captioning.precision import best_precision
from captioning.provenance import provenance
from captioning.run_folder import RunFolder, flat
from captioning.training import (
    BestCheckpoint,
    CaptionDataModule,
    CaptioningModule,
    CaptionSamples,
    LogLines,
    ResumableStopping,
    StopOnRequest,
    Throughput,
    TrainingBar,
    start_loggers,
)

_FOLDER = "CAPTIONING_RUN_FOLDER"  # environment variable with the run's folder, for the other processes
_BY_NAME = ("best", "last")  # values of --ckpt_path that stand for a checkpoint of the run --name


def fit(args: list[str]) -> Fit:
    """Run ``captioning fit``, and return the command line with its trainer, module and data module.

    Raise SystemExit if training was asked to stop; it can be resumed.
    """
    restrict_imports()
    _quieten()
    try:
        command = Fit(args)
        command.start()
    except Exception as error:
        if not _refused_by_library(error):
            raise
        raise InputError(one_line(error, 400)) from error
    return command


def _refused_by_library(error: Exception) -> bool:
    """Return whether a library refused its input, by an error of its own or a check. Other errors are faults."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    modules = type(error).__module__, frame.f_globals.get("__name__", "")
    own_type, own_code = (re.match("(pytorch_lightning|lightning_fabric|wandb|yaml)\\b", name) for name in modules)
    checked = own_code and isinstance(error, (ValueError, TypeError, ImportError, RuntimeError))
    return bool(own_type or checked) or str(error).startswith("Error(s) in loading state_dict")


def _quieten() -> None:
    """Silence libraries' warnings about deliberate choices, and let wandb log offline without an account."""
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's own calls
    for message in (
        "LightningCLI's args parameter is intended",
        r"Found \d+ module\(s\) in eval mode",  # a frozen encoder
        ".*does not have many workers",
        r".*isinstance\(treespec, LeafSpec\)",
        r"It is recommended to use .*sync_dist=True",  # all processes have the same numbers
        "You're resuming from a checkpoint that ended before the epoch ended",  # the sampler begins at its batch
        r"`ModelCheckpoint\(monitor=.* could not find the monitored key",  # a run of a few steps
        "You're using the WeightAveraging callback with a model that overrides",  # strategies that shard are not used
    ):
        warnings.filterwarnings("ignore", message=message)
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # type: ignore[assignment,misc]
    logging.getLogger("pytorch_lightning").handlers = [_LightningLines()]
    netrc = Path(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))
    if not os.environ.get("WANDB_API_KEY") and not (netrc.is_file() and "wandb" in netrc.read_text(errors="ignore")):
        os.environ.setdefault("WANDB_MODE", "offline")  # otherwise it asks for a key, or fails without a terminal
    if os.environ.get("WANDB_MODE") == "offline":
        os.environ.setdefault("WANDB_SILENT", "true")  # fit prints how to upload


class _LightningLines(logging.Handler):
    """Prints Lightning's log above the progress bar, without lines that are useless or repeat ours."""

    _USELESS = "Tip:|SIGTERMException was|already configured|TPU av|LOCAL_RANK|`train_dataloader` to|Restor(ing|ed all)"

    def emit(self, record: logging.LogRecord) -> None:
        if not re.search(self._USELESS, line := record.getMessage()):
            print(line, file=sys.stderr, flush=True)


class Parser(OneLineErrors, LightningArgumentParser):
    """Lightning's parser, whose errors are one line."""


class Fit(LightningCLI):
    """``captioning fit``. One folder per run: config, checkpoints, metrics and samples are all in RUNS/NAME."""

    def __init__(self, args: list[str]) -> None:
        if "WANDB_SWEEP_ID" in os.environ:  # wandb does not promise the order in which its agent passes parameters
            args = sorted(args, key=lambda arg: not arg.startswith("--config="))
        words = _parse_run_options(args)
        run = _run_of(words)
        if run is not None and not (words.config and words.ckpt_path in _BY_NAME):
            # A resumed run stays in its checkpoint's folder, whatever the config is called.
            args = [*args, *["--runs", str(run.path.parent)] * (words.runs is None)]
            args += ["--name", run.path.name] * (words.name is None)
            if not words.config:
                read_config(run.config)  # an error names the file
                args = ["--config", str(run.config), *args]
        self.options = {arg.partition("=")[0] for arg in args}
        self.claimed: RunFolder | None = None
        with self._claiming():
            super().__init__(
                CaptioningModule,
                CaptionDataModule,
                seed_everything_default=1,
                save_config_callback=None,  # saved when training starts
                auto_configure_optimizers=False,  # the module takes its own
                load_from_checkpoint_support=False,
                run=False,
                parser_class=Parser,
                parser_kwargs={"prog": "captioning fit", "allow_abbrev": False},
                args=args,
            )

    @contextlib.contextmanager
    def _claiming(self) -> Iterator[None]:
        """Release the folder of a run that fails before it has saved a checkpoint."""
        try:
            yield
        except BaseException:
            if self.claimed is not None:
                if "wandb" in sys.modules:  # its process writes into the folder
                    sys.modules["wandb"].finish(1)
                self.claimed.release()
            raise

    def parse_arguments(self, parser: Any, args: Any) -> None:
        parser.settings = [read_config(Path(file)) for file in _parse_run_options(list(args)).config]
        super().parse_arguments(parser, args)
        check_range(0, 2**32 - 1, seed_everything=int(self.config.seed_everything or 0))
        if self.config.seed_everything is False:
            raise InputError("--seed_everything false: every run has a seed, so that it can be repeated; give a number")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--name", type=str | None, help="The run's name; default: the config's.")
        parser.add_argument("--runs", type=str, default="runs", help="Folder of all runs; a run's folder is RUNS/NAME.")
        parser.add_argument("--ckpt_path", type=str | None, help="Checkpoint to resume: a file, best or last of NAME.")
        parser.add_argument(
            "--init_from",
            type=str | None,
            help="Begin with the weights of this model, and a new optimizer. --ckpt_path wins.",
        )
        # Two callbacks, because save_on_exception would overwrite the best checkpoint.
        parser.add_lightning_class_args(BestCheckpoint, "checkpoint")
        parser.add_lightning_class_args(callbacks.ModelCheckpoint, "last")
        parser.add_lightning_class_args(ResumableStopping, "early_stopping")
        parser.link_arguments("runs", "trainer.logger.init_args.save_dir")  # which some loggers require
        parser.set_defaults(
            {
                "checkpoint.monitor": "val/bleu4",
                "checkpoint.mode": None,  # the monitored metric's
                "checkpoint.filename": "best",
                "checkpoint.auto_insert_metric_name": False,
                "checkpoint.enable_version_counter": False,
                "last.filename": "last",
                "last.every_n_epochs": 1,
                "last.save_on_train_epoch_end": True,
                "last.save_on_exception": True,
                "last.enable_version_counter": False,
                "early_stopping.monitor": "val/bleu4",
                "early_stopping.mode": None,
                "early_stopping.patience": 5,
                "early_stopping.check_finite": False,  # NaN: no caption of this epoch names an object
                "early_stopping.strict": False,  # a run of a few steps reaches no validation
                "trainer.num_sanity_val_steps": 0,
                "trainer.enable_model_summary": False,  # LogLines has a shorter one
            }
        )

    def before_instantiate_classes(self) -> None:
        """Choose the run's folder: the resumed run's, or the first free one of NAME, NAME-2 .."""
        self.is_first = getattr(pl.utilities.rank_zero_only, "rank", 0) == 0  # no trainer exists yet
        self.stop, config = StopOnRequest(), self.config
        files = [read_config(Path(str(getattr(path, "absolute", path)))) for path in config.config or ()]
        _refuse_what_training_cannot_do(config, self.options, files)
        for name in ("checkpoint", "early_stopping"):
            given = {key: "" for key in ("monitor", "mode") if f"--{name}.{key}" in self.options}
            mode = None
            for part in [*(file.get(name) or {} for file in files), given]:  # a new monitor drops the mode of the old
                mode = config[name].mode if part.get("mode") is not None else mode if "monitor" not in part else None
            config[name].mode = _mode(f"--{name}", config[name].monitor, mode)
        name = config.name or _stem(config.config)
        of = RunFolder.of(config.ckpt_path) if config.ckpt_path else None
        own = of is not None and of.path.resolve() == Path(config.runs, name).resolve()
        in_place = own or config.ckpt_path in _BY_NAME
        if config.name is None and "WANDB_SWEEP_ID" in os.environ:
            name = f"{name}_{config.seed_everything}"
        first, *_ = folders = [RunFolder(Path(config.runs, name))]
        if self.is_first and not in_place:
            while not folders[-1].claim():
                folders.append(RunFolder(Path(config.runs, f"{name}-{len(folders) + 1}")))
            self.claimed = folders[-1]
        self.folder = folders[-1].path
        if self.is_first:
            ended = "" if first.is_trained() else ", by a run without a checkpoint; delete it if that has ended"
            taken = f" ({first.path} is taken{ended})" if len(folders) > 1 else ""
            print(f"run folder: {self.folder}{taken}", flush=True)
        elif _FOLDER in os.environ:  # under torchrun it is unset, and the trainer broadcasts the folder
            self.folder = Path(os.environ[_FOLDER])
        os.environ[_FOLDER] = str(self.folder)  # processes started by this one take the same folder
        config.trainer.default_root_dir = str(self.folder)
        config.trainer.use_distributed_sampler = False  # the samplers know the processes
        if config.trainer.precision is None:
            config.trainer.precision = best_precision(str(config.trainer.accelerator))
        self.own_callbacks = [TrainingBar(), CaptionSamples(), Throughput(), LogLines(), self.stop]
        if config.ckpt_path in _BY_NAME:
            config.ckpt_path = str(RunFolder(self.folder).checkpoint(config.ckpt_path))
        config.checkpoint.dirpath = config.last.dirpath = str(RunFolder(self.folder).checkpoints)
        config.name, config.runs = self.folder.name, str(self.folder.parent)
        config.trainer.logger = _loggers(config, self.folder)

    def instantiate_classes(self) -> None:
        config = self.config
        if config.ckpt_path is not None:
            saved = read_checkpoint(Path(config.ckpt_path))  # an early error if it is missing, damaged or foreign
            config.init_from = saved["captioning"]["settings"].get("init_from")  # wins over the command line
        if self.is_first:  # report missing data before weights are downloaded and wandb starts
            (source,) = build({"data.source": CaptionSource}, [{"data": {"source": config.data.source.as_dict()}}])
            source.prepare()
        start = read_model(config.init_from) if config.init_from and config.ckpt_path is None else None
        try:
            super().instantiate_classes()
        except InputError:
            raise
        except (ValueError, TypeError, ImportError) as error:  # an argument that a class refuses, a strategy
            text = str(error).partition("\n  - Expected a")[0]  # jsonargparse lists all kinds of values
            text = text[max(text.rfind("Problem with given class_path"), 0) :]
            raise InputError(" ".join(text.split())[:400]) from error
        if not (start or config.ckpt_path):
            self.model.encoder.load_published_weights()
        self.datamodule.seed = int(config.seed_everything or 0)
        self._dump_config()
        self.model.start, self.model.settings = start, self.config_dump

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Return the trainer, with the default callbacks that the configuration neither replaces nor turns off."""
        trainer = self.config_init.trainer
        given, bar = trainer.callbacks or [], callbacks.ProgressBar
        chosen = [*given] if isinstance(given, list) else [given]
        for callback in self.own_callbacks:
            kind = bar if isinstance(callback, bar) else type(callback)
            if not any(isinstance(other, kind) for other in chosen):
                chosen.append(callback)
        off = (bar,) if trainer.enable_progress_bar is False else ()
        trainer.callbacks = [callback for callback in chosen if not isinstance(callback, off)]
        return super().instantiate_trainer(**kwargs)

    def start(self) -> None:
        with self._claiming():
            self._train()

    def _train(self) -> None:
        """Train; print where the best checkpoint is, or how to resume a stopped run."""
        run, trainer = RunFolder(self.folder), self.trainer
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "monitor") and hasattr(callback, "mode"):
                _mode(f"trainer.callbacks: {type(callback).__name__}", callback.monitor, callback.mode)
        if trainer.is_global_zero:
            self.datamodule.changes(self.model.encoder)  # raise before the run has files
            for split in ("train", "val"):
                self.datamodule.index(split)
            config = self.config.clone()
            config.ckpt_path = None  # a run with this configuration is a new one
            text = self.parser.dump(config, skip_none=False)
            if self.config.ckpt_path and run.config.is_file():  # restoring the state may fail
                save = callbacks.LambdaCallback(on_train_start=lambda *_: write_text(run.config, text))
                trainer.callbacks.append(save)  # type: ignore[attr-defined]
            else:
                write_text(run.config, text)
        estimator = getattr(self.model.objective, "estimator", None)
        used = {"device": trainer.strategy.root_device.type, "processes": trainer.world_size}
        used |= {"precision": trainer.precision, "num_workers": self.datamodule.workers}
        labels = {  # columns of wandb's table of runs
            "attention": attention_kind(self.config_dump),
            "estimator": estimator and type(estimator).__name__,
            "inference": self.model.attention.inference,
            "encoder": type(self.model.encoder).__name__,
            "seed": self.datamodule.seed,
            "provenance": provenance(command=shlex.join(sys.argv), seed=self.datamodule.seed) | {"used": used},
        }
        start_loggers(trainer.loggers, self.config_dump | labels)
        best: Any = trainer.checkpoint_callbacks[0]
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and best.monitor:  # the table of runs shows the best value, too
                step, both = "trainer/global_step", f"{best.mode},last"
                logger.experiment.define_metric(best.monitor, step_metric=step, step_sync=True, summary=both)
        code = 0
        try:
            trainer.fit(self.model, self.datamodule, ckpt_path=self.config.ckpt_path, weights_only=True)
        except SIGTERMException:
            if trainer.global_rank:  # after another code, the launcher would kill the first process while it saves
                raise SystemExit(0) from None
            code = 130 if self.stop.asked == signal.SIGINT else 143
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.experiment.finish(code)  # so that wandb's last lines come before ours
        if code:
            words = ["--ckpt_path", str(run.checkpoint("last"))]
            words += [word for module in IMPORTED for word in ("--import", module)]
            print(f"to go on: captioning fit {shlex.join(words)}", file=sys.stderr, flush=True)
            raise SystemExit(code)
        if not trainer.is_global_zero:
            return
        if best.best_model_score is not None:
            score = f"{best.monitor} {float(best.best_model_score):.2f}{few_images_warning(len(self.model.results))}"
            print(f"best checkpoint: {best.best_model_path} ({score})")
        elif not best.best_model_path and best.save_top_k:
            steps = f"in {trainer.global_step} steps of training"
            print(f"no best checkpoint: none was due while there was a value of {best.monitor}, {steps}")
        if any(self.folder.glob("wandb/offline-run-*")):
            print(f"wandb ran offline; to upload: wandb sync {shlex.quote(str(self.folder))}/wandb/offline-run-*")


def _refuse_what_training_cannot_do(config: Any, options: Iterable[str], files: list[dict[str, Any]]) -> None:
    """Raise InputError for options of Lightning that do not work in this training."""
    best, trainer = config.checkpoint, config.trainer
    user_files = [flat(file).items() for file in files if not {"name", "runs"} <= file.keys()]  # not fit's own file
    for option in (*(option[2:] for option in options), *(key for file in user_files for key, value in file if value)):
        if re.fullmatch(r"(checkpoint|last)\.dirpath|trainer\.(default_root_dir|logger\b.*\.(save_)?dir)", option):
            raise InputError(f"--{option}: checkpoints and logs of a run are in RUNS/NAME; give --runs and --name")
        if option == "trainer.use_distributed_sampler":
            raise InputError(f"--{option}: the samplers know the processes; leave it out")
    smallest = {"accumulate_grad_batches": 1, "check_val_every_n_epoch": 1, "val_check_interval": 1e-9}
    for name, low in (smallest | {"gradient_clip_val": 0, "log_every_n_steps": 0}).items():
        if isinstance(trainer[name], (int, float)):  # an interval may be a duration
            check_range(low, **{f"--trainer.{name}": trainer[name]})
    if trainer.enable_checkpointing is False:
        instead = "to try something out, give --data.limit_images and --runs"
        raise InputError(f"--trainer.enable_checkpointing false: a run keeps its best and its last weights; {instead}")
    if trainer.overfit_batches:
        instead = "give --config configs/overlays/overfit.yaml, or --data.limit_images"
        raise InputError(f"--trainer.overfit_batches: the sampler makes the batches; {instead}")
    if trainer.precision in ("bf16-true", "16-true"):
        mixed = trainer.precision.replace("true", "mixed")
        raise InputError(f"--trainer.precision {trainer.precision}: weights are trained in float32; take {mixed}")
    if best.save_top_k not in (0, 1) and not best.enable_version_counter and "{" not in (best.filename or "{"):
        apart = f"name them apart, as by --checkpoint.filename '{best.filename}_{{step}}'"
        raise InputError(f"--checkpoint.save_top_k {best.save_top_k}: all would be {best.filename}.ckpt; {apart}")


def _mode(option: str, monitor: str | None, mode: str | None) -> str:
    """Return min or max for a monitored metric; raise InputError if no such metric is logged or ``mode`` is wrong."""
    if monitor is None:  # the newest checkpoint is kept
        return mode or "min"
    keys = [log_key("val", name) for name in METRICS if name not in ("meteor", "bound", "iwae_bound")]  # too slow
    if monitor.startswith("val") and monitor not in keys:
        raise InputError(f"{option}.monitor {monitor}: no validation logs that{did_you_mean(monitor, keys)}")
    metric_mode = better(monitor)
    if mode is None and metric_mode is None:
        raise InputError(f"{option}.mode: give min or max for {monitor}")
    if metric_mode not in (None, mode or metric_mode):
        raise InputError(f"{option}.mode {mode}: {monitor} is best at its {metric_mode}imum; set it to {metric_mode}")
    return mode or str(metric_mode)


def _parse_run_options(args: list[str]) -> argparse.Namespace:
    """Return the options that determine the run's folder."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-c", "--config", action="append", default=[])
    for option in ("--runs", "--ckpt_path", "--name"):
        parser.add_argument(option)
    return parser.parse_known_args(args)[0]


def _run_of(words: argparse.Namespace) -> RunFolder | None:
    """Return the run of the command line's checkpoint; None if the file lies in no run's folder."""
    if words.ckpt_path in _BY_NAME:
        return RunFolder(Path(words.runs or "runs", words.name or "run"))
    run = RunFolder.of(words.ckpt_path) if words.ckpt_path else None
    return run if run is not None and run.config.is_file() else None


def _stem(configs: Any) -> str:
    """Return the name of the first configuration file; later files are overlays."""
    return Path(str(getattr(configs[0], "relative", configs[0]))).stem if configs else "run"


def _loggers(config: Any, folder: Path) -> list[Namespace]:
    """Return the loggers of a run: CSV, and wandb unless it is turned off."""
    loggers = config.trainer.logger
    if loggers in (None, True):
        loggers = Namespace(class_path="pytorch_lightning.loggers.WandbLogger", init_args=Namespace())
    loggers = [] if loggers is False else loggers if isinstance(loggers, list) else [loggers]
    loggers = [logger for logger in loggers if not logger.class_path.endswith("CSVLogger")]
    for logger in loggers:
        arguments = logger.init_args
        arguments.save_dir = str(folder)
        if logger.class_path.endswith("WandbLogger"):
            arguments.pop("experiment", None)  # an object, which no config can hold
            if config.ckpt_path is None and isinstance(config.trainer.logger, list):  # another run's
                arguments.id = arguments.name = None
            defaults: dict[str, Any] = {"project": os.environ.get("WANDB_PROJECT", "captioning"), "job_type": "train"}
            defaults |= {"name": folder.name, "group": attention_kind(config.as_dict()), "id": secrets.token_hex(4)}
            for name, value in defaults.items():
                arguments[name] = arguments.get(name) or value  # a resumed run goes on in wandb, too
            arguments.resume = "allow"  # jsonargparse passes None for options that are not set
    csv = Namespace(save_dir=str(folder), name="metrics")
    return [*loggers, Namespace(class_path="pytorch_lightning.loggers.CSVLogger", init_args=csv)]
