"""The loggers of a run: starting them, and logging samples of captions and tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger, WandbLogger

from captioning.errors import InputError, one_line, warn_once
from captioning.evaluation.evaluator import Evaluator
from captioning.files import replacing
from captioning.metrics.table import log_key
from captioning.run_folder import RunFolder
from captioning.settings import read_config


def start_loggers(
    loggers: Iterable[Logger], settings: Mapping[str, Any], instead: str = "--trainer.logger false trains without it"
) -> None:
    """Start the loggers of a run with its settings. Without an account, wandb logs offline and in silence.

    Raises:
        InputError: A logger fails, as wandb does with a wrong key; the message ends with what to do ``instead``.
    """
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "15")  # seconds; wandb itself would wait for 90
    netrc = Path(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))
    if not os.environ.get("WANDB_API_KEY") and not (netrc.is_file() and "wandb" in netrc.read_text(errors="ignore")):
        os.environ.setdefault("WANDB_MODE", "offline")  # otherwise it asks for a key, or fails without a terminal
    if os.environ.get("WANDB_MODE") == "offline":
        os.environ.setdefault("WANDB_SILENT", "true")  # fit prints how to upload
    logging.getLogger().addFilter(_is_no_complaint_of_sizes)
    for logger in loggers:
        getattr(logger, "_wandb_init", {}).pop("anonymous", None)  # Lightning passes it, and wandb warns of it
        try:
            logger.log_hyperparams(dict(settings))
        except Exception as error:  # logging libraries raise their own types
            is_offline = os.environ.get("WANDB_MODE") == "offline"
            if type(error).__name__ == "CommError" and not is_offline:  # wandb's
                import wandb

                warn_once(f"wandb does not answer, so this run logs offline ({one_line(error, 120)})")
                os.environ["WANDB_MODE"] = "offline"
                wandb.teardown()  # so that it reads the mode again
                start_loggers([logger], settings, instead)
                continue
            if isinstance(logger, WandbLogger) and not is_offline:
                instead = f"WANDB_MODE=offline logs without an account, {instead}"
            raise InputError(f"trainer.logger: {type(logger).__name__}: {one_line(error)}; {instead}") from error


def _is_no_complaint_of_sizes(record: logging.LogRecord) -> bool:
    return "Images sizes do not match" not in record.getMessage()  # of wandb, about samples of several shapes


def draw_samples(folder: Path, suffix: str, evaluator: Evaluator) -> dict[str, str]:
    """Write figures of the evaluator's kept images to ``samples/``; return the captions by file."""
    from captioning.views.overlays import Look, attention_figure, save_figure  # matplotlib is slow to import

    encoder, index, captions = evaluator.captioner.encoder, evaluator.regions.index, dict[str, str]()
    for row, (image, hypothesis) in sorted(evaluator.kept.items()):
        if not index.image_path(row).is_file():  # cached features alone
            continue
        photo = index.image(row, encoder.preprocessing)
        look = Look(hypothesis.trace, encoder.cells, encoder.preprocessing.region(photo.size))
        figure = attention_figure(photo, image.words, {"": look}, text=image.text)
        path = folder / "samples" / f"{image.image_id}_{suffix}.png"
        with replacing(path) as part:
            save_figure(figure, part, dpi=80, format="png", pil_kwargs={"compress_level": 1})  # in half the time
        captions[str(path)] = image.text
    return captions


def log_samples(loggers: Iterable[Logger], stage: str, captions: Mapping[str, str]) -> None:
    """Log the figures to wandb as the panel STAGE/samples."""
    for logger in loggers:
        if isinstance(logger, WandbLogger) and captions:
            # Not as a table: an offline run stores a table's images outside its folder.
            logger.log_image(f"{stage}/samples", [*captions], caption=[*captions.values()])


def log_test(run: RunFolder, metrics: Mapping[str, float], evaluator: Evaluator) -> None:
    """Log a test to the wandb runs in the configuration of ``run``."""
    captions = draw_samples(run.path, "test", evaluator)
    for entry in read_config(run.config).get("trainer", {}).get("logger") or []:
        if entry["class_path"].endswith("WandbLogger"):
            logger = WandbLogger(**entry["init_args"])
            start_loggers([logger], {}, "--no_logger tests without it")
            logger.log_metrics({log_key("test", name): value for name, value in metrics.items()})
            log_samples([logger], "test", captions)
            logger.experiment.finish()
