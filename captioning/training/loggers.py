"""The loggers of a run, from their settings to their end; everything about wandb; the files in ``figures/``."""

import inspect
import os
import pkgutil
import secrets
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps
from pytorch_lightning.loggers import Logger, WandbLogger

from captioning.errors import InputError, one_line, warn_once
from captioning.evaluation.evaluator import Evaluator
from captioning.files import replacing
from captioning.metrics.table import log_key
from captioning.run_folder import RunFolder
from captioning.settings import attention_kind, read_config
from captioning.views.overlays import ModelAttention, attention_figure

_CSV = "pytorch_lightning.loggers.CSVLogger"


def logger_settings(settings: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return the settings of a run's loggers: CSV, and wandb unless the configuration turns it off."""
    setting = settings["trainer"]["logger"]
    if setting in (None, True):
        setting = {"class_path": "pytorch_lightning.loggers.WandbLogger"}
    given = setting if isinstance(setting, list) else [setting] if setting else []
    has_csv, loggers = any(logger["class_path"] == _CSV for logger in given), []
    for logger in given if has_csv else [*given, {"class_path": _CSV}]:
        arguments = logger.get("init_args", {})
        # A list of loggers with folders comes from another run's config.yaml; this run gets a wandb run of its own.
        is_of_another_run = isinstance(setting, list) and arguments.get("save_dir") not in (None, ".")
        takes_folder = "save_dir" in inspect.signature(pkgutil.resolve_name(logger["class_path"])).parameters
        arguments = arguments | ({"save_dir": str(folder)} if takes_folder else {})
        if logger["class_path"].endswith("WandbLogger"):
            if settings["ckpt_path"] is None and is_of_another_run:
                arguments |= {"id": None, "name": None}
            defaults = {"project": os.environ.get("WANDB_PROJECT", "captioning"), "job_type": "train"}
            defaults |= {"name": folder.name, "group": attention_kind(settings), "id": secrets.token_hex(4)}
            arguments |= {key: arguments.get(key) or default for key, default in defaults.items()}
        if logger["class_path"] == _CSV:
            arguments |= {"name": "metrics", "version": None}  # a resumed run would delete the file of a version
        loggers.append({"class_path": logger["class_path"], "init_args": arguments})
    return loggers


def start_loggers(
    loggers: Iterable[Logger], settings: Mapping[str, Any], *, monitor: tuple[str, str] | None = None
) -> None:
    """Start the loggers of a run with its settings. Without an account or a network, wandb logs offline.

    wandb's table of runs shows the best and the last value of ``monitor``, a metric and its mode: ("val/nll", "min").

    Raises:
        InputError: A logger fails, as wandb does with a wrong key.
    """
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "15")  # seconds; wandb itself would wait for 90
    netrc = Path(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))
    if not os.environ.get("WANDB_API_KEY") and not (netrc.is_file() and "wandb" in netrc.read_text(errors="ignore")):
        os.environ.setdefault("WANDB_MODE", "offline")  # wandb would ask for a key, or fail without a terminal
    for logger in loggers:
        is_online = isinstance(logger, WandbLogger) and os.environ.get("WANDB_MODE") != "offline"
        if not is_online:
            os.environ.setdefault("WANDB_SILENT", "true")  # ``upload_advice`` replaces its lines
        try:
            logger.log_hyperparams(dict(settings))
        except Exception as error:  # logging libraries raise their own types
            if not is_online or type(error).__name__ != "CommError":
                problem = f"trainer.logger: {type(logger).__name__}: {one_line(error)}"
                remedy = "set WANDB_MODE=offline, or --trainer.logger false (fit) or --no_logger (test)"
                raise InputError(f"{problem}; {remedy}") from error
            warn_once(f"wandb does not answer, so this run logs offline ({one_line(error, 120)})")
            os.environ["WANDB_MODE"] = "offline"
            sys.modules["wandb"].teardown()  # so that it reads the environment again
            start_loggers([logger], settings)
        if isinstance(logger, WandbLogger) and monitor is not None:
            axis = {"step_metric": "trainer/global_step", "step_sync": True}
            logger.experiment.define_metric(monitor[0], summary=f"{monitor[1]},last", **axis)


def finish_loggers(exit_code: int) -> None:
    """End this process's run in wandb. wandb then writes its last files and lines."""
    if "wandb" in sys.modules:
        sys.modules["wandb"].finish(exit_code)


def upload_advice(folder: Path) -> str:
    """Return a line that says how to upload the offline wandb logs of a run's folder; "" if it has none."""
    if not any(folder.glob("wandb/offline-run-*")):
        return ""
    return f"wandb ran offline; to upload: wandb sync {shlex.quote(str(folder))}/wandb/offline-run-*"


def write_figures(folder: Path, suffix: str, evaluator: Evaluator) -> dict[str, str]:
    """Write the evaluator's figures to ``figures/``, and return their captions by path."""
    encoder, index = evaluator.model.encoder, evaluator.index
    captions = {}
    for row, hypothesis in sorted(evaluator.figure_hypotheses.items()):
        if not index.image_path(row).is_file():  # cached features alone
            continue
        image, photo = evaluator.images[row], index.image(row, encoder.preprocessing)
        attention = ModelAttention(hypothesis.trace, encoder.cells, encoder.preprocessing.view_box(photo.size))
        figure = attention_figure(photo, image.words, {"": attention}, text=image.text)
        path = folder / "figures" / f"{image.image_id}_{suffix}.png"
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=80, format="png", pil_kwargs={"compress_level": 1})  # in half the time
        captions[str(path)] = image.text
    return captions


def log_figures(loggers: Iterable[Logger], stage: str, captions: Mapping[str, str]) -> None:
    """Log the figures to wandb as the panel STAGE/figures."""
    for logger in loggers:
        if isinstance(logger, WandbLogger) and captions:
            figures = [Image.open(path).convert("RGB") for path in captions]
            width, height = max(figure.width for figure in figures), max(figure.height for figure in figures)
            # wandb shows the figures of a panel in one size.
            borders = [(0, 0, width - figure.width, height - figure.height) for figure in figures]
            padded = [ImageOps.expand(*args, fill="white") for args in zip(figures, borders, strict=True)]
            # Not as a table: an offline run stores a table's images outside its folder.
            logger.log_image(f"{stage}/figures", padded, caption=[*captions.values()])


def log_test(run: RunFolder, metrics: Mapping[str, float], evaluator: Evaluator) -> None:
    """Log a test to the wandb runs in the configuration of ``run``."""
    captions = write_figures(run.path, "test", evaluator)
    for entry in read_config(run.config).get("trainer", {}).get("logger") or []:
        if entry["class_path"].endswith("WandbLogger"):
            logger = WandbLogger(**entry["init_args"] | {"save_dir": str(run.path)})  # the run may have moved
            start_loggers([logger], {})
            logger.log_metrics({log_key("test", name): value for name, value in metrics.items()})
            log_figures([logger], "test", captions)
            finish_loggers(0)
