"""Training and validation of a captioner with Lightning."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from pytorch_lightning.cli import OptimizerCallable
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from captioning.attention import Attention
from captioning.checkpoint.format import checkpoint_entry
from captioning.checkpoint.load import SavedModel, check_tokenizer, check_vocabulary
from captioning.component import check_shape
from captioning.data.batch import CaptionBatch
from captioning.decoding import BeamOptions
from captioning.encoders import Encoder
from captioning.errors import InputError, one_line
from captioning.evaluation.evaluator import Evaluator
from captioning.metrics.table import log_key
from captioning.model import Captioner, Decoder
from captioning.objective import Likelihood, Objective
from captioning.objective.collapse import CollapseWatch, attention_statistics
from captioning.objective.processes import process_count, sum_over_processes
from captioning.training import resume
from captioning.training.datamodule import CaptionDataModule
from captioning.vocabulary import Vocabulary, tokenizer_from


class CaptioningModule(pl.LightningModule):
    """Trains an encoder and a decoder by an objective, and validates their captions.

    The vocabulary comes from the data, so the captioner is assembled in ``configure_model``, after the data are set up.

    Args:
        encoder: Images to annotations.
        decoder: Annotations to words; the attention is one of its arguments.
        objective: Objective of training; by default the likelihood with the doubly stochastic penalty (Eq. 14).
        optimizer: Called with the parameter groups; a fine-tuned encoder is a group with its own learning rate.
        scheduler: Called with the optimizer and the number of optimizer steps of the whole run; none by default.
        search: Options of the search in validations.
        initial_model: Model whose weights the captioner starts from.
        settings: The full configuration of the run, which checkpoints keep.
    """

    captioner: Captioner
    evaluator: Evaluator
    figure_count = 0  # number of validation images with a figure; ``ValidationFigures`` sets it

    def __init__(
        self,
        encoder: Encoder,
        decoder: Decoder,
        *,
        objective: Objective | None = None,
        optimizer: OptimizerCallable = torch.optim.Adam,
        scheduler: Callable[[torch.optim.Optimizer, int], LRScheduler] | None = None,
        search: BeamOptions = BeamOptions(),  # noqa: B008 - frozen
        initial_model: SavedModel | None = None,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self._encoder_decoder = (encoder, decoder)  # a tuple: only the captioner registers them as submodules
        self.objective = (objective or Likelihood()).bind(decoder)
        self.optimizer, self.scheduler = optimizer, scheduler
        self.search, self.initial_model, self.settings = search, initial_model, dict(settings)
        self._watch = CollapseWatch()
        self._run_batches: int | None = None  # batches of the whole run; None if no attention needs the progress
        self._random_state: dict[str, Any] | None = None
        self._random_state_at_step: dict[str, Tensor] = {}  # at the beginning of the optimizer step
        self._stops_after_step = False  # whether training ends with the optimizer step in progress

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without objects that refer to the parser: ``EMAWeightAveraging`` could not copy them."""
        return super().__getstate__() | {"optimizer": None, "scheduler": None, "initial_model": None}

    @property
    def encoder(self) -> Encoder:
        return self._encoder_decoder[0]

    @property
    def attention(self) -> Attention:
        return self._encoder_decoder[1].attention

    @property
    def data(self) -> CaptionDataModule:
        return self.trainer.datamodule  # type: ignore[attr-defined,no-any-return]

    def configure_model(self) -> None:
        if not hasattr(self, "captioner"):
            self.assemble(self.data.vocabulary)

    def assemble(self, vocabulary: Vocabulary) -> Captioner:
        """Build and return the captioner for a vocabulary, with the weights of ``initial_model``."""
        self.captioner = Captioner(*self._encoder_decoder, vocabulary_size=len(vocabulary))
        self.captioner.freeze_statistics = bool(self.initial_model or self.settings.get("init_from"))  # also if resumed
        checkpoint_entry(self.captioner, vocabulary, self.settings)  # raises if a checkpoint cannot describe it
        self.captioner.train()  # Lightning leaves the mode as it is
        if self.initial_model is not None:
            self.initial_model.load_into(self.captioner, vocabulary)
        return self.captioner

    def on_fit_start(self) -> None:
        if self.objective.needs_pretrained and self.trainer.ckpt_path is None and self.initial_model is None:
            rank_zero_warn("self-critical training begins with random weights; give trained ones by --init_from")
        needs_progress = any(attention.needs_progress for attention in self.captioner.decoder.attentions())
        self._run_batches = self._run_length()[1] if needs_progress else None
        # Otherwise an epoch of fewer batches would log nothing.
        self.trainer.log_every_n_steps = min(self.trainer.log_every_n_steps, max(1, self._batches_per_epoch()))  # type: ignore[attr-defined]
        self.objective.prepare(self.data.index("train"), self.data.vocabulary, self.search)

    def on_train_start(self) -> None:
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GradientAccumulationScheduler):  # a run resumed inside an epoch skips this call
                callback.on_train_epoch_start(self.trainer)
        resume.start_new_epoch(self.trainer)
        if self._random_state is not None:  # a resumed run continues the same stream of random numbers
            torch.set_rng_state(self._random_state["cpu"].cpu())
            if self.device.type == "cuda" and "cuda" in self._random_state:
                torch.cuda.set_rng_state(self._random_state["cuda"].cpu(), self.device)
            self._random_state = None

    def on_train_batch_start(self, batch: CaptionBatch, batch_idx: int) -> None:
        """Seed each process, if there are several, by rank and batch, so that a resumed run draws the same numbers."""
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self._random_state_at_step = self._generator_state()
        if self.trainer.world_size > 1:
            seeds = (self.data.seed, self.trainer.global_rank, self.trainer.fit_loop.total_batch_idx)
            torch.manual_seed(int(np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]))

    def training_step(self, batch: CaptionBatch, batch_idx: int) -> Tensor:
        if self._run_batches is not None:
            for attention in self.captioner.decoder.attentions():
                attention.progress = self.trainer.fit_loop.total_batch_idx / self._run_batches
        loss, terms, output = self.objective(self.captioner, batch)
        check_shape(self.objective, "the loss ()", loss)
        statistics = attention_statistics(output.trace, output.mask, sparse=self.attention.normalizer.sparse)
        mask = batch.annotation_mask
        self._watch.update(statistics, output.trace.alphas.shape[-1] if mask is None else mask.sum(dim=1))
        values = terms | statistics
        if (processes := process_count()) > 1:  # log the means; Lightning would wait for all processes at every value
            means = sum_over_processes(torch.stack([value.float() for value in values.values()])) / processes
            values = dict(zip(values, means, strict=True))
        for name, value in (values | self.attention.logged_values()).items():
            self.log(f"train/{name}", value, prog_bar=name == "loss")
        self.log("epoch", float(self.current_epoch + 1))  # counted from 1; Lightning's own column begins at 0
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Let ``max_time`` and early stopping wait for the optimizer step, because checkpoints have no gradients."""
        self._stops_after_step |= self.trainer.should_stop
        self.trainer.should_stop = self._stops_after_step and not resume.is_inside_step(self.trainer)

    on_validation_end = on_train_batch_end

    def on_train_epoch_end(self) -> None:
        learns = any(parameter.requires_grad for parameter in self.attention.parameters())
        if learns and (diagnosis := self._watch.diagnosis()) is not None:
            rank_zero_warn(f"attention has collapsed: {diagnosis}")

    def configure_optimizers(self) -> Any:
        steps = 0 if self.scheduler is None else self._run_length()[0]
        decoder = [p for p in self.captioner.decoder.parameters() if p.requires_grad]
        groups = [{"params": decoder}, *self.captioner.encoder.parameter_groups()]
        try:
            optimizer = self.optimizer(groups)
            if self.scheduler is None:
                return optimizer
            scheduler = self.scheduler(optimizer, steps)
        except (ValueError, TypeError) as error:
            raise InputError(f"model.optimizer or model.scheduler: {one_line(error)}") from error
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _run_length(self) -> tuple[int, int]:
        """Return the run's optimizer steps and batches. Lightning's own count would build the loader too early."""
        trainer: Any = self.trainer
        batches = self._batches_per_epoch()
        steps = max(1, math.ceil(batches / trainer.accumulate_grad_batches))  # of an epoch, like ``batches``
        limits = [(trainer.max_steps, trainer.max_steps * batches // steps)] if trainer.max_steps > 0 else []
        if trainer.max_epochs is not None and trainer.max_epochs >= 0:
            limits.append((trainer.max_epochs * steps, trainer.max_epochs * batches))
        if not limits:
            raise InputError("the schedule of the learning rate or attention needs --trainer.max_epochs or max_steps")
        return min(limits)

    def _batches_per_epoch(self) -> int:
        batches, limit = len(self.data.sampler()), self.trainer.limit_train_batches
        return min(batches, limit) if isinstance(limit, int) else int(batches * limit)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip gradients, also the scaled gradients of a fused optimizer, which Lightning refuses to clip.

        Raises InputError if training has diverged, before a gradient that is not finite changes a weight.
        """
        is_fused = optimizer.defaults.get("fused")
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)  # it skips steps whose gradient overflows
        if scaler is not None and is_fused:
            scaler.unscale_(optimizer)  # the optimizer's step then does not unscale again
        # The order of the parameters determines how the norm is rounded, and thus whether runs repeat exactly.
        group_parameters = (p for group in optimizer.param_groups for p in group["params"])
        parameters = list(self.parameters() if is_fused else group_parameters)
        gradients = [p.grad for p in parameters if p.grad is not None]
        try:
            norm = torch.nn.utils.get_total_norm(gradients, error_if_nonfinite=scaler is None)
        except RuntimeError as error:
            remedy = "try a lower learning rate, --trainer.gradient_clip_val 5, or --trainer.precision 32-true"
            step = self.trainer.global_step + 1
            raise InputError(f"training has diverged: the gradient is not finite at step {step}; {remedy}") from error
        if gradient_clip_val and gradient_clip_algorithm in (None, "norm"):
            torch.nn.utils.clip_grads_with_norm_(parameters, gradient_clip_val, norm)
        elif gradient_clip_val:
            torch.nn.utils.clip_grad_value_(parameters, gradient_clip_val)
        self.log("train/gradient_norm", norm)  # before clipping
        self.log("train/learning_rate", float(optimizer.param_groups[0]["lr"]))  # the decoder's

    def on_validation_epoch_start(self) -> None:
        data = self.data
        index, regions = data.index("val"), data.split_data("val").regions(self.encoder)
        self.evaluator = Evaluator(
            self.captioner, data.vocabulary, index, regions, self.search, seed=data.seed, figure_count=self.figure_count
        )

    def validation_step(self, batch: CaptionBatch, batch_idx: int) -> None:
        self.evaluator.update(batch)

    def on_validation_epoch_end(self) -> None:
        """Log the metrics over the images of all processes."""
        if self.trainer.world_size > 1:
            results: list[Any] = [None] * self.trainer.world_size  # of the processes
            torch.distributed.all_gather_object(results, (self.evaluator.images, self.evaluator.sums))
            for images, sums in results:
                self.evaluator.images |= images
                self.evaluator.sums |= sums
        metrics = self.evaluator.compute_metrics()  # without METEOR, which takes seconds
        # Monitored grounding metrics need a value (NaN) even if only references name objects.
        metrics = {name.removeprefix("reference_"): math.nan for name in metrics} | metrics
        self.log_dict({log_key("val", name): value for name, value in metrics.items()})
        self.log("epoch", float(self.current_epoch + 1))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the description of the captioner, and the random state and position for a resumed run."""
        checkpoint["captioning"] = checkpoint_entry(self.captioner, self.data.vocabulary, self.settings)
        checkpoint["unfinished"] = resume.unfinished_batches(self.trainer)
        checkpoint["processes"] = self.trainer.world_size
        # A resumed run that stops before its first batch saves the loaded state.
        state = self._random_state_at_step if checkpoint["unfinished"] else self._generator_state()
        checkpoint["random_state"] = self._random_state or state

    def _generator_state(self) -> dict[str, Tensor]:
        state = {"cpu": torch.get_rng_state()}
        return state | ({"cuda": torch.cuda.get_rng_state(self.device)} if self.device.type == "cuda" else {})

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        resume.rewind(checkpoint)
        content = checkpoint.get("captioning", {})
        check_tokenizer(tokenizer_from(content.get("tokenizer")), self.data.vocabulary.tokenizer)
        check_vocabulary("the checkpoint's", content.get("vocabulary") or (), self.data.vocabulary)
        resume.compare_settings(checkpoint, self.settings | {"processes": self.trainer.world_size})
        self._random_state = checkpoint["random_state"]
