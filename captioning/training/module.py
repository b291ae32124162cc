"""Training and evaluation with Lightning."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from PIL.Image import Image
from pytorch_lightning.cli import OptimizerCallable
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from captioning.attention.base import Attention, Memory
from captioning.data.batch import CaptionBatch
from captioning.decoder import AttentionDecoder
from captioning.decoding import BeamOptions, Hypothesis
from captioning.encoders import Encoder
from captioning.errors import InputError
from captioning.evaluation.bleu import corpus_bleu
from captioning.evaluation.grounding import NounHit, grounding_scores, noun_hits
from captioning.files import write_json
from captioning.model import CHECKPOINT_FORMAT, Captioner
from captioning.objective import losses
from captioning.objective.collapse import CollapseWatch, attention_statistics
from captioning.objective.estimators import Estimator
from captioning.objective.objective import Objective, sampled_bounds
from captioning.trace import AttentionTrace
from captioning.vocabulary import Vocabulary


@dataclass
class Sample:
    """A captioned image with what the model looked at at each word; the view is what it saw."""

    image_id: int
    words: list[str]
    references: list[list[str]]
    score: float
    trace: AttentionTrace
    view: Image


@dataclass
class CaptionedImage:
    """One evaluated image: what was said, what people said, and which nouns of either looked at their object."""

    row: int
    image_id: int
    words: list[str]
    score: float
    finished: bool
    references: list[list[str]]
    hits: list[NounHit]
    reference_hits: list[NounHit]


class CaptioningModule(pl.LightningModule):
    """An encoder and a decoder, trained by maximum likelihood with the doubly stochastic penalty (Eq. 14).

    The data module brings the vocabulary, so the model is assembled in ``configure_model``, after the data are set up.

    Args:
        encoder: images -> annotations.
        decoder: annotations -> words; its attention is chosen in its own arguments.
        optimizer: called with the parameter groups; a fine-tuned encoder is a group with its own rate.
        scheduler: called with the optimizer and the number of optimizer steps of the whole run; none by default.
        attention_penalty: lambda of Eq. 14; ``losses.doubly_stochastic_penalty`` says how it is averaged.
        estimator: of hard attention's gradient; the paper's moving average by default. Only hard attention takes one.
        reward_weight: lambda_r of Eq. 11; 1 gives the gradient of the bound L_s.
        entropy_weight: lambda_e of Eq. 11, the weight of the alphas' entropy; used where attention is stochastic.
        reduction: how all terms are averaged; per word by default.
        label_smoothing: share of the target probability spread over the vocabulary, in training alone. Rewards are
            plain log-probabilities.
        search: how captions are made for ``val/*`` and ``test/*``.
        bound_samples: draws of every caption that ``test`` and ``validate`` estimate the bounds of stochastic attention
            with, beside the NLL; 0 leaves them out.
        compile: mode of ``torch.compile`` for a step of the decoder in training; not compiled by default, because on a
            CPU the kernels in C are faster. "reduce-overhead" replays CUDA graphs: for small batches on a GPU.
    """

    def __init__(
        self,
        encoder: Encoder,
        decoder: AttentionDecoder,
        *,
        optimizer: OptimizerCallable = torch.optim.Adam,
        scheduler: Callable[[torch.optim.Optimizer, int], LRScheduler] | None = None,
        attention_penalty: float = 1.0,
        estimator: Estimator | None = None,
        reward_weight: float = 1.0,
        entropy_weight: float = 0.002,
        reduction: losses.Reduction | None = None,
        label_smoothing: float = 0.0,
        search: BeamOptions = BeamOptions(),  # noqa: B008 - frozen
        bound_samples: int = 8,
        compile: Literal["default", "reduce-overhead"] | None = None,
    ) -> None:
        super().__init__()
        # Recorded before build(), which is called when the vocabulary is known.
        self._recipe = {"encoder": encoder.to_config(), "decoder": decoder.to_config()}
        self._parts = (encoder, decoder)  # a tuple, so that they are registered once, inside the captioner
        self.captioner: Captioner | None = None
        self.vocabulary: Vocabulary | None = None
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.objective = Objective(
            decoder.attention,
            estimator=estimator,
            reward_weight=reward_weight,
            entropy_weight=entropy_weight,
            attention_penalty=attention_penalty,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        self.search = search
        self.bound_samples = bound_samples
        self._compile_mode = compile
        self._watch = CollapseWatch(
            draws="sample" in self.attention.inference_modes, estimated=self.attention.needs_estimator
        )
        self.settings: dict[str, Any] = {}
        self.results: list[CaptionedImage] = []
        """The images of the last evaluation, in the order of the split; complete on every process."""
        self._seen: list[CaptionedImage] = []
        self._sums: defaultdict[str, float] = defaultdict(float)
        """Log-probabilities in nats, summed over the ``_words`` words evaluated so far."""
        self._words = 0
        self._random_state: dict[str, Any] | None = None

    @property
    def encoder(self) -> Encoder:
        return self._parts[0]

    @property
    def attention(self) -> Attention:
        return self._parts[1].attention

    def configure_model(self) -> None:
        """Assemble the captioner for the data module's vocabulary. Called by the trainer; does nothing twice."""
        if self.captioner is None:
            datamodule = self.trainer.datamodule  # type: ignore[attr-defined]
            self.assemble(datamodule.vocabulary)

    def assemble(self, vocabulary: Vocabulary) -> Captioner:
        """Build the captioner for ``vocabulary`` and return it."""
        self.vocabulary = vocabulary
        self.captioner = Captioner(*self._parts, vocabulary_size=len(vocabulary))
        if self._compile_mode is not None:
            self.captioner.decoder.compile_training(self._compile_mode)
        return self.captioner

    # Training

    def training_step(self, batch: CaptionBatch, batch_idx: int) -> Tensor:
        assert self.captioner is not None
        schedule = self.attention.schedule()
        loss, terms, output = self.objective(self.captioner, batch)
        statistics = attention_statistics(output.trace, output.mask)
        mask = batch.annotation_mask
        self._watch.update(statistics, output.trace.alphas.shape[-1] if mask is None else mask.sum(dim=1))
        for name, value in (terms | statistics | schedule).items():
            self.log(f"train/{name}", value, prog_bar=name == "loss")
        return loss

    def on_train_epoch_end(self) -> None:
        if self.attention.score is not None and (cause := self._watch.cause()) is not None:
            rank_zero_warn(f"attention has collapsed: {cause}")

    def configure_optimizers(self) -> Any:
        assert self.captioner is not None
        decoder = [p for p in self.captioner.decoder.parameters() if p.requires_grad]
        groups = [{"params": decoder}, *self.captioner.encoder.parameter_groups()]
        optimizer = self.optimizer(groups)
        if self.scheduler is None:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.scheduler(optimizer, steps), "interval": "step"},
        }

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip as Lightning does, also with a fused optimizer, which it refuses because of scaled float16 gradients."""
        by_norm = gradient_clip_algorithm in (None, "norm")
        if gradient_clip_val and by_norm and optimizer.defaults.get("fused"):
            if (scaler := getattr(self.trainer.precision_plugin, "scaler", None)) is not None:
                scaler.unscale_(optimizer)  # its step then knows that nothing is left to unscale
            torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    # Evaluation

    def on_validation_epoch_start(self) -> None:
        self._seen, self._sums, self._words = [], defaultdict(float), 0

    def validation_step(self, batch: CaptionBatch, batch_idx: int) -> None:
        self._evaluate(batch)

    def on_validation_epoch_end(self) -> None:
        self._finish_evaluation("val")

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def test_step(self, batch: CaptionBatch, batch_idx: int) -> None:
        self._evaluate(batch)

    def on_test_epoch_end(self) -> None:
        self._finish_evaluation("test")

    def predict_step(self, batch: CaptionBatch, batch_idx: int) -> list[dict[str, Any]]:
        """Return ``{"image_id", "caption", "score"}`` of every image."""
        assert self.vocabulary is not None
        found = self._search(batch)
        return [
            {"image_id": image_id, "caption": " ".join(self.vocabulary.decode(h.ids)), "score": h.score}
            for image_id, h in zip(batch.image_ids.tolist(), found, strict=True)
        ]

    def _search(self, batch: CaptionBatch, memory: Memory | None = None) -> list[Hypothesis]:
        assert self.captioner is not None
        if memory is None:
            memory = self.captioner.encode(batch.images, batch.annotations, batch.annotation_mask)
        return [hypotheses[0] for hypotheses in self.captioner.search(memory, self.search)]

    @torch.inference_mode()
    def caption_samples(self, count: int) -> list[Sample]:
        """Caption the first ``count`` images of the split being evaluated; those without an image file are left out."""
        assert self.vocabulary is not None
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]
        batch = datamodule.samples(count).to(self.device)
        training = self.training
        self.eval()
        samples = []
        for row, image_id, best in zip(batch.rows.tolist(), batch.image_ids.tolist(), self._search(batch), strict=True):
            view = datamodule.view(row)
            if view is not None:
                references = [reference.split() for reference in datamodule.evaluated.references(row)]
                words = self.vocabulary.decode(best.ids)
                samples.append(Sample(image_id, words, references, best.score, best.trace, view))
        self.train(training)
        return samples

    def _evaluate(self, batch: CaptionBatch) -> None:
        assert self.captioner is not None and self.vocabulary is not None
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]
        index = datamodule.evaluated
        memory = self.captioner.encode(batch.images, batch.annotations, batch.annotation_mask)
        reference_hits: dict[int, list[NounHit]] = {row: [] for row in batch.rows.tolist()}
        if len(batch.captions):
            with self.attention.inferring("expected"):
                output = self.captioner.teacher_force(batch, memory)
            self._words += len(output.targets)
            self._sums["nll"] -= float(losses.token_log_probs(output.logits, output.targets).sum())
            if self.trainer.state.fn != "fit" and self.bound_samples and "sample" in self.attention.inference_modes:
                bounds = sampled_bounds(self.captioner, batch, memory, self.bound_samples)
                self._sums["bound"] += bounds.bound
                self._sums["iwae_bound"] += bounds.importance_weighted
            reference_hits = self._reference_hits(batch, output.trace.alphas)
        found = self._search(batch, memory)
        for row, image_id, best in zip(batch.rows.tolist(), batch.image_ids.tolist(), found, strict=True):
            words = self.vocabulary.decode(best.ids)
            hits = noun_hits(words, best.trace.alphas.numpy(), datamodule.objects(row))
            references = [reference.split() for reference in index.references(row)]
            self._seen.append(
                CaptionedImage(row, image_id, words, best.score, best.finished, references, hits, reference_hits[row])
            )

    def _reference_hits(self, batch: CaptionBatch, alphas: Tensor) -> dict[int, list[NounHit]]:
        """Judge the references by their alphas (N, T, L) under teacher forcing; keys are rows of the split."""
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]
        rows, looked = batch.rows.tolist(), alphas.float().cpu().numpy()
        hits: dict[int, list[NounHit]] = {row: [] for row in rows}
        left = {row: iter(datamodule.evaluated.references(row)) for row in rows}
        for image, alpha in zip(batch.image_index.tolist(), looked, strict=True):
            row = rows[image]
            hits[row] += noun_hits(next(left[row]).split(), alpha, datamodule.objects(row))
        return hits

    def _finish_evaluation(self, stage: str) -> None:
        seen, sums, words = self._seen, self._sums, self._words
        if self.trainer.world_size > 1:
            parts: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(parts, (seen, sums, words))
            seen = [image for part in parts for image in part[0]]
            names = sorted({name for part in parts for name in part[1]})
            sums = defaultdict(float, {name: sum(part[1][name] for part in parts) for name in names})
            words = sum(part[2] for part in parts)
        self.results = sorted(seen, key=lambda image: image.row)
        if not self.results:
            return
        bleu = corpus_bleu([image.words for image in self.results], [image.references for image in self.results])
        scores = {f"{stage}/{name}": value for name, value in bleu.items()}
        scores |= {f"{stage}/{name}": total / words for name, total in sums.items()}
        hits = [hit for image in self.results for hit in image.hits]
        scores |= {f"{stage}/{name}": value for name, value in grounding_scores(hits).items()}
        hits = [hit for image in self.results for hit in image.reference_hits]
        scores |= {f"{stage}/reference_{name}": value for name, value in grounding_scores(hits).items()}
        on_bar = {f"{stage}/bleu4"}
        for name, value in scores.items():
            self.log(name, value, prog_bar=name in on_bar, sync_dist=False)
        if self.trainer.state.fn != "fit" and self.trainer.is_global_zero:
            self._write_results(stage, scores)

    def _write_results(self, stage: str, scores: dict[str, float]) -> None:
        """Leave the scores and every caption beside the run, for comparisons that need them image by image."""
        folder = Path(self.trainer.default_root_dir)
        search = {"search": vars(self.search) | {"inference": self.attention.inference}}
        if f"{stage}/bound" in scores:
            search["search"]["bound_samples"] = self.bound_samples
        captions = [
            {
                "image_id": image.image_id,
                "caption": " ".join(image.words),
                "log_prob": image.score,
                "finished": image.finished,
                "references": [" ".join(words) for words in image.references],
                "hits": [vars(hit) for hit in image.hits],
                "reference_hits": [vars(hit) for hit in image.reference_hits],
            }
            for image in self.results
        ]
        write_json(folder / f"{stage}_metrics.json", scores | search)
        write_json(folder / f"{stage}_captions.json", captions)

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add all that rebuilds the captioner without a config, a vocabulary file or a data set beside it."""
        assert self.vocabulary is not None
        checkpoint["captioning"] = {
            "format": CHECKPOINT_FORMAT,
            **self._recipe,
            "preprocessing": self.encoder.preprocessing.to_dict(),
            "vocabulary": list(self.vocabulary.words),
            "settings": self.settings,
        }
        state = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        checkpoint["random_state"] = self._random_state or state  # a resumed run that stops before its first batch

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert self.vocabulary is not None
        words = checkpoint.get("captioning", {}).get("vocabulary")
        if words is None:
            raise InputError("the checkpoint was not written by this project: it has no vocabulary")
        if tuple(words) != self.vocabulary.words:
            raise InputError(
                f"the checkpoint's vocabulary ({len(words)} words) is not the data's ({len(self.vocabulary.words)}); "
                "use the data settings the checkpoint was trained with"
            )
        self._random_state = checkpoint.get("random_state")

    def on_train_start(self) -> None:
        if self._random_state is not None:  # a resumed run goes on with the same stream of random numbers
            torch.set_rng_state(self._random_state["cpu"].cpu())
            if self.device.type == "cuda" and "cuda" in self._random_state:
                torch.cuda.set_rng_state(self._random_state["cuda"].cpu(), self.device)
            self._random_state = None
