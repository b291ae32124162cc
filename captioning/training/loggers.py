"""The start of a run's loggers: what they refuse is one line, and wandb logs offline where it reaches no server."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

from pytorch_lightning.loggers import Logger, WandbLogger

from captioning.errors import InputError, one_line

_log = logging.getLogger("captioning")


def start_loggers(loggers: Iterable[Logger], settings: Mapping[str, Any]) -> None:
    """Start the loggers of a run with its settings; an InputError if one cannot start, as wandb with a wrong key."""
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "15")  # seconds; wandb itself would wait for 90
    for logger in loggers:
        getattr(logger, "_wandb_init", {}).pop("anonymous", None)  # Lightning passes it, and wandb warns of it
        _start(logger, dict(settings))


def _start(logger: Logger, settings: dict[str, Any]) -> None:
    try:
        logger.log_hyperparams(settings)
    except Exception as error:  # the libraries behind the loggers raise types of their own
        if type(error).__name__ == "CommError" and os.environ.get("WANDB_MODE") != "offline":  # wandb's
            import wandb

            _log.warning("wandb does not answer, so this run logs offline (%s)", one_line(error, 120))
            os.environ["WANDB_MODE"] = "offline"
            wandb.teardown()  # so that it reads the mode again
            return _start(logger, settings)
        instead = "--trainer.logger false trains without it"
        if isinstance(logger, WandbLogger) and os.environ.get("WANDB_MODE") != "offline":
            instead = f"WANDB_MODE=offline logs without an account, {instead}"
        raise InputError(f"trainer.logger: {type(logger).__name__}: {one_line(error)}; {instead}") from error
