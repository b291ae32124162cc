"""Callbacks of a training run: figures, terminal, checkpoints, early stopping, speed, unfreezing, stop signals."""

import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.utilities.exceptions import SIGTERMException

from captioning.checkpoint.format import write_checkpoint
from captioning.data.batch import CaptionBatch
from captioning.errors import check_whole
from captioning.training.loggers import log_figures, write_figures
from captioning.training.resume import is_inside_step


class ValidationFigures(Callback):
    """Writes captions and attention overlays of the first validation images to ``figures/`` at every validation.

    The panel ``val/figures`` of wandb shows them, too. Images without a file (cached features) are left out.

    Args:
        images: Number of images.
    """

    def __init__(self, images: int = 4) -> None:
        check_whole(0, images=images)
        self.images = images

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.figure_count = self.images

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            folder, epoch = Path(trainer.default_root_dir), f"{trainer.current_epoch + 1:03d}"
            log_figures(trainer.loggers, "val", write_figures(folder, epoch, pl_module.evaluator))


class TerminalReport(Callback):
    """Prints the size of each module, the metrics of each validation, and a line if nothing was left to train."""

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self._start_time, self._has_trained = time.perf_counter(), False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for name, module in pl_module.captioner.named_children() if trainer.is_global_zero else ():
            sizes = [(weights.numel(), weights.requires_grad) for weights in module.parameters()]
            count, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
            print(f"{name}: {type(module).__name__}, {count:,} parameters, {trained:,} of them trained", flush=True)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._has_trained = True

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._has_trained and trainer.is_global_zero:
            limits = "--trainer.max_epochs, max_steps, max_time, limit_train_batches and --early_stopping.patience"
            print(f"nothing is left to train after step {trainer.global_step}; the limits are {limits}", flush=True)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        monitors = [str(callback.monitor) for callback in trainer.checkpoint_callbacks]  # type: ignore[attr-defined]
        names = dict.fromkeys(("train/loss", "val/nll", *monitors, "val/bleu4", "val/pointing_accuracy"))
        logged = trainer.callback_metrics
        metrics = [f"{name} {logged[name]:.2f}" for name in names if name in logged and not logged[name].isnan()]
        seconds = time.perf_counter() - self._start_time
        print(f"epoch {trainer.current_epoch + 1}, step {trainer.global_step}, {seconds:.0f} s:", *metrics, flush=True)


class BestCheckpoint(callbacks.ModelCheckpoint):
    """Lightning's callback, except that the lowest ``val/nll`` decides among equally good checkpoints.

    BLEU-4 may be 0 in the first validations. Lightning would keep the first checkpoint and stop early, although the
    model learns. A lower ``val/nll`` among equals also resets early stopping.
    """

    nll = math.inf  # val/nll of the best checkpoint

    @property
    def state_key(self) -> str:
        key = super().state_key
        # With a monitor, the key is Lightning's, as in 0.2. Without one, Lightning's key would equal that of `last`.
        return key.replace("Best", "Model", 1) if self.monitor else key

    def check_monitor_top_k(self, trainer: pl.Trainer, current: torch.Tensor | None = None) -> bool:
        nll = float(trainer.callback_metrics.get("val/nll", math.inf))
        better = super().check_monitor_top_k(trainer, current)
        if not better and self.save_top_k == 1 and current == self.best_model_score and nll < self.nll:
            better = True
            for stopping in trainer.early_stopping_callbacks:
                if getattr(stopping, "monitor", None) == self.monitor:
                    stopping.wait_count = 0  # type: ignore[attr-defined]
        self.nll = nll if better else self.nll
        return better

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"nll": self.nll}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state, also of a run that was moved or copied. Lightning ignores the state of another folder."""
        old, new = str(state_dict["dirpath"]), str(self.dirpath)
        if Path(state_dict["best_model_path"].replace(old, new, 1)).is_file():
            paths = {name: value.replace(old, new, 1) for name, value in state_dict.items() if isinstance(value, str)}
            best_k_models = {path.replace(old, new, 1): metric for path, metric in state_dict["best_k_models"].items()}
            state_dict = state_dict | paths | {"best_k_models": best_k_models}
        super().load_state_dict(state_dict)
        self.nll = state_dict.get("nll", math.inf)


class CheckpointFiles(TorchCheckpointIO):
    """Writes a checkpoint beside its path, then renames it. A full disk would cut off Lightning's copy from /tmp."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_checkpoint(checkpoint, Path(path))


class ResumableEarlyStopping(callbacks.EarlyStopping):
    """Lightning's callback, for runs that end inside an epoch and are resumed.

    Two events use up no patience: the validation that ``max_time`` adds, and the end of an epoch that was cut short.
    A resumed run uses the patience in its settings. If no patience is left, it stops before the first batch.
    """

    @property
    def state_key(self) -> str:
        return super().state_key.removeprefix("Resumable")  # as in 0.2

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop |= self.wait_count >= max(1, self.patience)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_last_batch or not trainer.should_stop:
            super().on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_last_batch:
            super().on_train_epoch_end(trainer, pl_module)


class Throughput(Callback):
    """Logs ``train/captions_per_second`` of this process, over ``log_every_n_steps`` batches or an epoch.

    Lightning's ``ThroughputMonitor`` waits for the device in every step and logs other keys.
    """

    def on_train_start(self, *_: Any) -> None:
        self._start_time, self._captions = time.perf_counter(), 0

    on_train_epoch_start = on_validation_end = on_train_start  # type: ignore[assignment]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: CaptionBatch, batch_idx: int
    ) -> None:
        self._captions += len(batch.captions)
        if (batch_idx + 1) % max(1, trainer.log_every_n_steps) == 0 or trainer.is_last_batch:  # type: ignore[attr-defined]
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize(pl_module.device)  # otherwise the time would exclude steps in progress
            pl_module.log("train/captions_per_second", self._captions / (time.perf_counter() - self._start_time))
            self.on_train_start()


class Unfreeze(Callback):
    """Keeps a trainable encoder frozen for the first epochs, while the decoder is still random.

    An encoder without ``trainable_from`` is never trained.

    Args:
        epoch: Number of epochs for which the encoder is frozen.
    """

    def __init__(self, epoch: int) -> None:
        check_whole(0, epoch=epoch)
        self.epoch = epoch

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        encoder = pl_module.encoder
        encoder.set_trainable(encoder.trainable_from is not None and trainer.current_epoch >= self.epoch)

    on_train_start = on_train_epoch_start  # a run resumed inside an epoch skips the start of the epoch


class StopOnRequest(Callback):
    """Saves and ends training on SIGTERM, SIGHUP (a closed terminal) or Ctrl-C.

    Steps of several batches are finished first, because checkpoints have no gradients. So are validations, whose
    metrics a resumed run would lack. All processes end at the same batch. A second Ctrl-C ends at once, without saving.
    """

    def __init__(self) -> None:
        self.stop_signal: int | None = None  # the signal that asked for the end

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._lightning_handler = signal.getsignal(signal.SIGTERM)
        for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(signal_number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(signal_number, self._on_signal)

    def _on_signal(self, signal_number: int, frame: Any) -> None:
        if signal_number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            print("\nending after this step; Ctrl-C again ends at once, without saving", file=sys.stderr, flush=True)
        self.stop_signal = signal_number

    def _must_stop(self, trainer: pl.Trainer) -> bool:
        """Return whether a signal has asked any process to stop. All processes must call this together."""
        if must_stop := bool(trainer.strategy.reduce_boolean_decision(self.stop_signal is not None, all=False)):
            self.stop_signal = self.stop_signal or int(signal.SIGTERM)
        return must_stop

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        stops_here = self._must_stop(trainer) and not trainer.is_last_batch and not is_inside_step(trainer)
        if stops_here and callable(self._lightning_handler):
            self._lightning_handler(signal.SIGTERM, None)  # the trainer raises SIGTERMException after this batch

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._must_stop(trainer):  # the signal came after the last batch of an epoch, which is saved by now
            raise SIGTERMException
