"""Training with Lightning."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from pytorch_lightning.cli import OptimizerCallable
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from captioning.attention import StochasticAttention, UniformAttention
from captioning.checkpoint.format import describe
from captioning.checkpoint.load import SavedModel, check_tokenizer, check_vocabulary
from captioning.data.batch import CaptionBatch
from captioning.decoding import BeamOptions
from captioning.encoders import Encoder
from captioning.errors import InputError, check_range, one_line
from captioning.evaluation.rewards import CaptionReward
from captioning.model import Captioner, Decoder
from captioning.objective import Likelihood, Objective
from captioning.objective.collapse import CollapseWatch, attention_statistics
from captioning.objective.processes import process_count, sum_over_processes
from captioning.training.evaluation_loops import EvaluatedModule
from captioning.vocabulary import Vocabulary, tokenizer_from


class CaptioningModule(EvaluatedModule):
    """An encoder and a decoder, trained by an objective.

    The vocabulary comes from the data, so the model is assembled in ``configure_model``, after the data are set up;
    ``connect`` passes them in.

    Args:
        encoder: Images to annotations.
        decoder: Annotations to words; it takes the attention among its own arguments.
        objective: The objective to minimise; by default the likelihood with the doubly stochastic penalty (Eq. 14).
        optimizer: Called with the parameter groups; a fine-tuned encoder is a group with its own learning rate.
        scheduler: Called with the optimizer and the number of optimizer steps of the whole run; none by default.
        search: Options of the search that makes captions for ``val/*`` and ``test/*``.
        bound_samples: Number of draws per caption with which ``test`` and ``validate`` estimate the bounds of
            stochastic attention; 0 leaves the bounds out.
    """

    def __init__(
        self,
        encoder: Encoder,
        decoder: Decoder,
        *,
        objective: Objective | None = None,
        optimizer: OptimizerCallable = torch.optim.Adam,
        scheduler: Callable[[torch.optim.Optimizer, int], LRScheduler] | None = None,
        search: BeamOptions = BeamOptions(),  # noqa: B008 - frozen
        bound_samples: int = 8,
    ) -> None:
        super().__init__(encoder, decoder, search=search, bound_samples=bound_samples)
        self.objective = (objective or Likelihood()).connect(decoder.attention)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._watch = CollapseWatch()
        self.settings: dict[str, Any] = {}
        self.start: SavedModel | None = None
        """The model whose weights the captioner begins with when it is assembled."""
        self.loaded_step = 0
        """Optimizer step at which the checkpoint that was loaded last was saved."""
        self._random_state: dict[str, Any] | None = None
        self._begins_with_weights = False  # whether these are another run's

    def configure_model(self) -> None:
        """Assemble the captioner for the data's vocabulary. Called by the trainer; a second call does nothing."""
        if self.captioner is None:
            self.assemble(self.data.vocabulary)

    def assemble(self, vocabulary: Vocabulary) -> Captioner:
        """Build the captioner for ``vocabulary`` and return it.

        Raises:
            InputError: The weights that it begins with are of another vocabulary or model.
        """
        self.vocabulary = vocabulary
        self.captioner = Captioner(*self._parts, vocabulary_size=len(vocabulary))
        if self.start is not None:
            self.start.load_into(self.captioner, vocabulary)
            self.start, self._begins_with_weights = None, True
        return self.captioner

    # Training

    def on_fit_start(self) -> None:
        if isinstance(self.attention, StochasticAttention) and self.attention.ramp:
            batches = self.trainer.estimated_stepping_batches * self.trainer.accumulate_grad_batches
            if self.attention.ramp[0] >= batches:
                rank_zero_info(
                    f"no context will be drawn: the ramp of {type(self.attention).__name__} begins at batch "
                    f"{self.attention.ramp[0]}, and the training has {batches:.0f}; set "
                    "--model.decoder.init_args.attention.init_args.ramp"
                )
        if self.objective.second_stage and self.trainer.ckpt_path is None and not self._begins_with_weights:
            rank_zero_warn(
                "self-critical training begins with random weights; pass first-stage weights with --init_from"
            )
        self.objective.begin(self.attention, self._reward, self.search)

    def _reward(self, options: Any) -> CaptionReward:
        assert self.vocabulary is not None
        return CaptionReward(options, self.data.index("train"), self.vocabulary)

    def training_step(self, batch: CaptionBatch, batch_idx: int) -> Tensor:
        assert self.captioner is not None
        self.captioner.begin_batch()
        loss, terms, output = self.objective(self.captioner, batch)
        statistics = attention_statistics(output.trace, output.mask, sparse=self.attention.normaliser.sparse)
        mask = batch.annotation_mask
        self._watch.update(statistics, output.trace.alphas.shape[-1] if mask is None else mask.sum(dim=1))
        for name, value in (self._over_processes(terms | statistics) | self.attention.schedule()).items():
            self.log(f"train/{name}", value, prog_bar=name == "loss")
        self.log("epoch", float(self.current_epoch + 1))  # counted from 1; Lightning's own column begins at 0
        return loss

    def _over_processes(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the means over all processes; of the terms of the loss these are the whole batch's."""
        if (processes := process_count()) == 1:
            return values
        means = sum_over_processes(torch.stack([value.float() for value in values.values()])) / processes
        return dict(zip(values, means, strict=True))

    def on_train_batch_start(self, batch: CaptionBatch, batch_idx: int) -> None:
        """Where several processes train, let each draw from a stream of its own.

        A stream is a function of the seed, the process and the batches trained on: a resumed run finds its place
        without the states of all processes, which a checkpoint that one of them saves in an emergency cannot have.
        """
        if self.trainer.world_size > 1:
            total: Any = self.trainer.fit_loop.epoch_loop.batch_progress.total
            place = np.random.SeedSequence((self.data.seed, self.trainer.global_rank, total.processed))
            torch.manual_seed(int(place.generate_state(1, np.uint64)[0]))

    def on_train_epoch_end(self) -> None:
        if not isinstance(self.attention, UniformAttention) and (cause := self._watch.cause()) is not None:
            rank_zero_warn(f"attention has collapsed: {cause}")

    # Optimization

    def configure_optimizers(self) -> Any:
        assert self.captioner is not None
        decoder = [p for p in self.captioner.decoder.parameters() if p.requires_grad]
        groups = [{"params": decoder}, *self.captioner.encoder.parameter_groups()]
        try:
            optimizer = self.optimizer(groups)
        except (ValueError, TypeError) as error:
            raise InputError(f"model.optimizer: {one_line(error)}") from error
        for number, group in enumerate(optimizer.param_groups):
            check_range(0, **{f"model.optimizer: the learning rate of group {number + 1}": float(group["lr"])})
        if self.scheduler is None:
            return optimizer
        steps = self.trainer.estimated_stepping_batches
        if math.isinf(steps):
            raise InputError(
                "model.scheduler: needs the length of training; give --trainer.max_epochs or --trainer.max_steps"
            )
        try:
            scheduler = self.scheduler(optimizer, int(steps))
        except InputError:
            raise
        except (ValueError, TypeError) as error:
            raise InputError(f"model.scheduler: {one_line(error)}") from error
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip as Lightning does, also with a fused optimizer, which it refuses because of scaled float16 gradients.

        Logs ``train/gradient_norm``, before it is clipped, and ``train/learning_rate``, of the decoder.
        """
        by_norm, fused = gradient_clip_algorithm in (None, "norm"), optimizer.defaults.get("fused")
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None and fused:
            scaler.unscale_(optimizer)  # so that its step does not unscale again
        if gradient_clip_val and by_norm:
            # The order of the parameters determines the rounding of the norm, and so whether runs repeat exactly.
            groups = optimizer.param_groups
            clipped = self.parameters() if fused else (p for group in groups for p in group["params"])
            norm = torch.nn.utils.clip_grad_norm_(clipped, gradient_clip_val)
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
            if gradient_clip_val:
                torch.nn.utils.clip_grad_value_(self.parameters(), gradient_clip_val)
        self.log("train/gradient_norm", norm)
        self.log("train/learning_rate", float(optimizer.param_groups[0]["lr"]))

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the entry that rebuilds the captioner without a config, a vocabulary file or a data set."""
        assert self.captioner is not None and self.vocabulary is not None
        checkpoint["captioning"] = describe(self.captioner, self.vocabulary, self.settings)
        state = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        # A run that stops before its first batch saves the state that it loaded.
        checkpoint["random_state"] = self._random_state or state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert self.vocabulary is not None
        content = checkpoint["captioning"]
        check_tokenizer(tokenizer_from(content.get("tokenizer")), self.vocabulary.tokenizer)
        check_vocabulary("the checkpoint's", content.get("vocabulary") or (), self.vocabulary)
        self._refuse_other_sizes(checkpoint["state_dict"])
        states = len(checkpoint.get("optimizer_states", ()))
        if self.trainer.state.fn == "fit" and not (states and "loops" in checkpoint):
            raise InputError("the checkpoint holds the model alone; training cannot go on from it")
        if states > 1:
            raise InputError(f"the checkpoint has the states of {states} optimizers; a run has one")
        self._random_state = checkpoint.get("random_state")
        self.loaded_step = checkpoint.get("global_step", 0)

    def _refuse_other_sizes(self, weights: Mapping[str, Any]) -> None:
        """Refuse the weights of another model before any of them is taken.

        Raises:
            InputError: The first weight that differs.
        """
        own_weights = self.state_dict()
        for name in [*own_weights, *weights]:
            here, there = (
                None if tensor is None else tuple(tensor.shape) for tensor in (own_weights.get(name), weights.get(name))
            )
            if here != there:
                sizes = ["missing" if size is None else size for size in (there, here)]
                raise InputError(
                    f"the checkpoint is of another model: {name} is {sizes[0]} there and {sizes[1]} here; use the "
                    "model settings that it was trained with"
                )

    def on_train_start(self) -> None:
        if self._random_state is not None:  # a resumed run continues the same stream of random numbers
            torch.set_rng_state(self._random_state["cpu"].cpu())
            if self.device.type == "cuda" and "cuda" in self._random_state:
                torch.cuda.set_rng_state(self._random_state["cuda"].cpu(), self.device)
            self._random_state = None
