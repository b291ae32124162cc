"""The command ``fit``: Lightning's command line; a configuration becomes a plan, objects, and a training."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from jsonargparse import Namespace
from pytorch_lightning import callbacks
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.utilities.exceptions import SIGTERMException

from captioning.checkpoint.format import read_checkpoint
from captioning.checkpoint.load import SavedModel, read_model
from captioning.cli import IMPORTED_MODULES
from captioning.cli.build import parse_training, restrict_imports
from captioning.cli.parser import CommandParser
from captioning.errors import InputError, one_line
from captioning.files import write_text
from captioning.metrics.table import few_images_warning
from captioning.precision import best_precision
from captioning.provenance import provenance
from captioning.run_folder import RunFolder
from captioning.settings import attention_kind, config_text, read_config
from captioning.training import CaptionDataModule, CaptioningModule, TerminalReport, Throughput, ValidationFigures
from captioning.training.callbacks import BestCheckpoint, CheckpointFiles, ResumableEarlyStopping, StopOnRequest
from captioning.training.loggers import finish_loggers, start_loggers, upload_advice
from captioning.training.plan import monitor_mode, plan_run

_FOLDER_VARIABLE = "CAPTIONING_RUN_FOLDER"  # environment variable with the run's folder, for the other processes
_MONITOR = {"monitor": "val/bleu4", "mode": None}  # the metric has a mode
_BEST = {"filename": "best", "auto_insert_metric_name": False, "enable_version_counter": False}
_LAST = {"filename": "last", "enable_version_counter": False, "every_n_epochs": 1, "save_on_train_epoch_end": True}
_CALLBACKS: dict[str, tuple[type, dict[str, Any]]] = {
    "checkpoint": (BestCheckpoint, _MONITOR | _BEST),
    # Another callback, because save_on_exception would overwrite the best checkpoint.
    "last": (callbacks.ModelCheckpoint, _LAST | {"save_on_exception": True}),
    # A short run may have no validation. NaN means that no caption named an object.
    "early_stopping": (ResumableEarlyStopping, _MONITOR | {"patience": 5, "strict": False, "check_finite": False}),
}
"""Callbacks that have a section of settings: by section, the class and its defaults."""
_LIBRARIES = ("pytorch_lightning", "lightning_fabric", "wandb", "yaml")  # errors of their checks become one line


def fit(args: list[str]) -> Fit:
    """Run ``captioning fit``, and return the ``Fit``, which has the trainer, the module and the data module.

    Raises SystemExit if training was asked to stop; it can be resumed.
    """
    restrict_imports()
    _quieten()
    with _library_errors_as_input_errors():
        command = Fit(args)
        command.train()
    return command


@contextlib.contextmanager
def _library_errors_as_input_errors(*error_types: type[Exception]) -> Iterator[None]:
    """Turn errors of these types, and a library's refusal of its input, into an InputError of one line.

    A refusal has a library's own type or comes from a library's check. Other errors keep their traceback.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        is_theirs = type(error).__module__.startswith(_LIBRARIES)
        if str(frame.f_globals.get("__name__")).startswith(_LIBRARIES):
            error_types += (ValueError, TypeError, ImportError, RuntimeError)
        if not (is_theirs or isinstance(error, error_types) or str(error).startswith("Error(s) in loading state_dict")):
            raise
        message = one_line(error, 2000)
        message = message.partition("Problem with given class_path ")[2] or message  # such as a missing package
        raise InputError(message[:900]) from error


def _quieten() -> None:
    """Silence libraries' warnings about deliberate choices."""
    for message in (
        r"Found \d+ module\(s\) in eval mode",  # a frozen encoder
        ".*does not have many workers",
        r".*isinstance\(treespec, LeafSpec\)",
        r"It is recommended to use .*sync_dist=True",  # all processes have the same metrics
        "You're resuming from a checkpoint that ended before the epoch ended",  # the sampler begins at its batch
        r"`ModelCheckpoint\(monitor=.* could not find the monitored key",  # a run of a few steps
        "You're using the WeightAveraging callback with a model that overrides",  # strategies that shard are not used
        "Checkpoint directory .* exists and is not empty",  # a resumed run's own
        "The dirpath has changed",  # a run that was moved, or is resumed under another name
    ):
        warnings.filterwarnings("ignore", message=message)
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # type: ignore[assignment,misc]
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)  # ``TerminalReport`` prints instead
    logging.getLogger("pytorch_lightning.profilers").setLevel(logging.INFO)  # the report of a profiler


class Fit(LightningCLI):
    """A run of ``captioning fit``: parsed, planned and built. ``train`` trains it.

    LightningCLI calls the methods down to ``parse_arguments`` in their order, seeds all random numbers, and calls
    ``before_instantiate_classes`` and ``instantiate_classes``. The parser builds no object, because ``plan_run``
    completes the settings first.
    """

    def __init__(self, args: list[str]) -> None:
        args = _with_config(args)
        self.option_names = [word[2:].partition("=")[0] for word in args if word.startswith("--")]
        super().__init__(
            CaptioningModule,
            CaptionDataModule,
            auto_configure_optimizers=False,  # the module has an argument for it
            load_from_checkpoint_support=False,
            seed_everything_default=1,
            run=False,
            parser_kwargs={"prog": "captioning fit", "allow_abbrev": False, "exit_on_error": False},
            args=args,
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        self._add(pl.Trainer, "trainer", default={"num_sanity_val_steps": 0, "enable_model_summary": False})
        self._add(CaptioningModule, "model", skip={"initial_model", "settings"})
        self._add(CaptionDataModule, "data", skip={"seed"})

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--name", type=str | None, help="The run's name; default: the config's.")
        parser.add_argument("--runs", type=str, default="runs", help="Folder of all runs; a run's folder is RUNS/NAME.")
        parser.add_argument("--ckpt_path", type=str | None, help="Checkpoint to resume: a file, or best or last.")
        init_from = "Begin with the weights of this model and a new optimizer. --ckpt_path wins over it."
        parser.add_argument("--init_from", type=str | None, help=init_from)
        for section, (cls, defaults) in _CALLBACKS.items():
            self._add(cls, section, default=defaults)
        parser.link_arguments("runs", "trainer.logger.init_args.save_dir")  # some loggers require it

    def _add(self, cls: type, key: str, **options: Any) -> None:
        self.parser.add_class_arguments(cls, key, fail_untyped=False, instantiate=False, sub_configs=True, **options)

    def parse_arguments(self, parser: Any, args: Any) -> None:
        self.config = parse_training(parser, args)

    def before_instantiate_classes(self) -> None:
        """Plan the run, claim its folder, and complete the configuration."""
        self.is_rank_zero = getattr(pl.utilities.rank_zero_only, "rank", 0) == 0  # no trainer exists yet
        config = self.config.as_dict()
        # Under torchrun the variable is unset, and the trainer broadcasts the folder.
        self.plan = plan_run(config, self.option_names, None if self.is_rank_zero else os.environ.get(_FOLDER_VARIABLE))
        if self.is_rank_zero:
            while self.plan.claims_folder and not self.plan.folder.claim():  # another run was faster
                self.plan = plan_run(config, self.option_names)
            reason = f" ({self.plan.taken_folder.path} is taken)" if self.plan.taken_folder else ""
            print(f"run folder: {self.plan.folder.path}{reason}", flush=True)
        os.environ[_FOLDER_VARIABLE] = str(self.plan.folder.path)  # processes started by this one take the same folder
        for key, value in self.plan.changes.items():
            self.config[key] = value
        trainer = self.config.trainer
        trainer.use_distributed_sampler = False  # the samplers know the processes
        trainer.precision = trainer.precision or best_precision(str(trainer.accelerator))

    def instantiate_classes(self) -> None:
        self.stop_on_request = StopOnRequest()
        refusals = _library_errors_as_input_errors(ValueError, TypeError, ImportError)
        with contextlib.ExitStack() as stack, self._releasing_folder_on_failure(), refusals:
            # SIGTERM raises SystemExit, so that temporary files and the claimed folder are removed.
            handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            stack.callback(signal.signal, signal.SIGTERM, handler)
            self.datamodule = CaptionDataModule(**self._instantiate("data"), seed=self.config.seed_everything)
            initial = self.read_data_and_initial_model()
            self.settings = yaml.safe_load(self.parser.dump(self.config, skip_link_targets=False, skip_unset=False))
            self.model = CaptioningModule(**self._instantiate("model"), initial_model=initial, settings=self.settings)
            if initial is None and self.config.ckpt_path is None:
                self.model.encoder.load_published_weights()
            self.trainer: Any = self.instantiate_trainer()

    def _instantiate(self, section: str) -> dict[str, Any]:
        return vars(self.parser.instantiate(Namespace({section: self.config[section]}))[section])

    @contextlib.contextmanager
    def _releasing_folder_on_failure(self) -> Iterator[None]:
        """Release the folder of a run that fails before it has saved a checkpoint."""
        try:
            yield
        except BaseException:
            if self.is_rank_zero and self.plan.claims_folder:
                finish_loggers(1)
                self.plan.folder.release()
            raise

    def read_data_and_initial_model(self) -> SavedModel | None:
        """Read the data, and return the model of --init_from. Raises InputError if one is missing or damaged."""
        checkpoint = self.config.ckpt_path
        if checkpoint is not None:  # its setting wins over the command line's
            self.config.init_from = read_checkpoint(Path(checkpoint))["captioning"]["settings"].get("init_from")
        if self.is_rank_zero:
            self.datamodule.prepare_data()
            self.datamodule.setup("fit")
        return read_model(self.config.init_from) if self.config.init_from and checkpoint is None else None

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Return the trainer. A default callback is left out if the user gives one of its class."""
        options = self._instantiate("trainer") | kwargs
        setting = options["callbacks"] or []
        all_callbacks = [*setting] if isinstance(setting, list) else [setting]
        for default in (ValidationFigures(), Throughput(), TerminalReport(), self.stop_on_request):
            if not any(isinstance(callback, type(default)) for callback in all_callbacks):
                all_callbacks.append(default)
        with_settings: dict[str, Any] = {name: cls(**vars(self.config[name])) for name, (cls, _) in _CALLBACKS.items()}
        self.best_checkpoint = with_settings["checkpoint"]
        all_callbacks += with_settings.values()
        # on_fit_start comes after the weights are restored, so a resume that fails there leaves config.yaml as it was.
        all_callbacks.append(callbacks.LambdaCallback(on_fit_start=self._write_config))
        options["plugins"] = options["plugins"] or [CheckpointFiles()]
        return pl.Trainer(**options | {"callbacks": all_callbacks})

    def train(self) -> None:
        """Train, and print the best checkpoint or how to resume a stopped run."""
        with self._releasing_folder_on_failure():
            for callback in self.trainer.callbacks:
                if hasattr(callback, "monitor") and hasattr(callback, "mode"):
                    monitor_mode(f"trainer.callbacks: {type(callback).__name__}", callback.monitor, callback.mode)
            self._start_loggers()
            exit_code = 0
            try:
                self.trainer.fit(self.model, self.datamodule, ckpt_path=self.config.ckpt_path, weights_only=True)
            except SIGTERMException:
                if self.trainer.global_rank:  # the launcher would kill the first process while it saves
                    raise SystemExit(0) from None
                exit_code = 130 if self.stop_on_request.stop_signal == signal.SIGINT else 143
            except SystemExit as error:
                # Lightning exits with code 1 after a Ctrl-C before the first step.
                raise error.__context__ if isinstance(error.__context__, KeyboardInterrupt) else error from None
            finish_loggers(exit_code)
            if exit_code:
                options = ["--ckpt_path", str(self.plan.folder.checkpoint("last"))]
                options += [word for module in IMPORTED_MODULES for word in ("--import", module)]
                print(f"to go on: captioning fit {shlex.join(options)}", file=sys.stderr, flush=True)
                raise SystemExit(exit_code)
            if self.trainer.is_global_zero:
                self._print_end()

    def _write_config(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            for unfinished in self.plan.folder.checkpoints.glob("*.part"):  # of a run that was killed while it saved
                unfinished.unlink(missing_ok=True)
            settings = self.settings | {"ckpt_path": None}  # a run with this configuration is a new one
            write_text(self.plan.folder.config, config_text(settings))

    def _start_loggers(self) -> None:
        trainer, seed = self.trainer, self.datamodule.seed
        estimator = getattr(self.model.objective, "estimator", None)
        machine = {"device": trainer.strategy.root_device.type, "processes": trainer.world_size}
        machine |= {"precision": trainer.precision, "num_workers": self.datamodule.workers}
        labels = {  # columns of a table of runs
            "attention": attention_kind(self.settings),
            "estimator": estimator and type(estimator).__name__,
            "context_mode": self.model.attention.context_mode,
            "encoder": type(self.model.encoder).__name__,
            "seed": seed,
            "provenance": provenance(command=shlex.join(sys.argv), seed=seed) | {"used": machine},
        }
        monitor = (self.best_checkpoint.monitor, self.best_checkpoint.mode) if self.best_checkpoint.monitor else None
        start_loggers(trainer.loggers, self.settings | labels, monitor=monitor)

    def _print_end(self) -> None:
        best = self.best_checkpoint
        if best.best_model_score is not None:
            few = few_images_warning(len(self.datamodule.index("val"))) if "bleu" in str(best.monitor) else ""
            print(f"best checkpoint: {best.best_model_path} ({best.monitor} {float(best.best_model_score):.2f}{few})")
        elif not best.best_model_path and best.save_top_k:
            end = f"training ended after step {self.trainer.global_step}"
            print(f"no best checkpoint: {end}, before a checkpoint with {best.monitor} was due")
        if advice := upload_advice(self.plan.folder.path):
            print(advice)


def _with_config(args: list[str]) -> list[str]:
    """Return the command line, with the config.yaml of a resumed run if it names no --config."""
    parser = CommandParser("captioning fit", add_help=False, allow_abbrev=False)
    parser.add_argument("-c", "--config", action="append", default=[])
    for option in ("--runs", "--ckpt_path", "--name"):
        parser.add_argument(option)
    options = parser.parse_known_args(args)[0]
    if options.ckpt_path and (last := RunFolder(Path(options.ckpt_path)).checkpoint("last")).is_file():
        raise InputError(f"--ckpt_path {options.ckpt_path}: is a folder; give {last}")
    if options.ckpt_path and not options.config:
        run = RunFolder.of_checkpoint(options.ckpt_path, Path(options.runs or "runs", options.name or "run"))
        if run is not None and run.config.is_file():
            return ["--config", str(run.config), *args]
        read_checkpoint(Path(options.ckpt_path))  # raises InputError if it is none
    for file in options.config:
        read_config(Path(file), "--config")  # raises InputError if it is none
    return args
