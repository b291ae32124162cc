"""The validation, test and prediction loops that Lightning calls, and captions of some images for display."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from PIL.Image import Image

from captioning.attention import Attention
from captioning.data.batch import CaptionBatch
from captioning.decoding import BeamOptions, Hypothesis
from captioning.encoders import Encoder
from captioning.errors import check_range
from captioning.evaluation.evaluator import Evaluated, Evaluator
from captioning.evaluation.records import CaptionedImage, write_evaluation, write_predictions
from captioning.model import Decoder
from captioning.model.captioner import Captioner, CaptionModel
from captioning.model.ensemble import Ensemble
from captioning.tokenizers import PennTreebank
from captioning.training.datamodule import CaptionDataModule
from captioning.vocabulary import Vocabulary


class Sample(NamedTuple):
    """A captioned image for display: its record, the hypothesis of the search, and the image before preprocessing."""

    image: CaptionedImage
    hypothesis: Hypothesis
    photo: Image


class EvaluatedModule(pl.LightningModule):
    """An encoder and a decoder whose captions are scored, after every epoch of training or by a command of its own.

    The vocabulary comes from the data, so the captioner is assembled when the data are known.

    Args:
        encoder: Images to annotations.
        decoder: Annotations to words.
        search: Options of the search that makes captions for ``val/*`` and ``test/*``.
        bound_samples: Draws of every caption that ``test`` and ``validate`` estimate the bounds of stochastic attention
            with, beside the NLL; 0 leaves them out.
    """

    def __init__(self, encoder: Encoder, decoder: Decoder, *, search: BeamOptions, bound_samples: int) -> None:
        super().__init__()
        check_range(0, 100_000, bound_samples=bound_samples)
        self._parts = (encoder, decoder)  # a tuple, so that they are registered once, inside the captioner
        self.captioner: Captioner | None = None
        self.vocabulary: Vocabulary | None = None
        self.search = search
        self.bound_samples = bound_samples
        self.results: list[CaptionedImage] = []
        """The images of the last evaluation, in the order of the split; complete on every process."""
        self.keep_hypotheses = 0
        """Number of images of a split that ``kept_samples`` returns after its evaluation."""
        self.evaluated_weights: Callable[[], AbstractContextManager[None]] = nullcontext
        """Puts the evaluated weights in place, where they differ from those being trained."""
        self._data: CaptionDataModule | None = None
        self._others: tuple[Captioner, ...] = ()
        self._evaluator: Evaluator | None = None

    @property
    def encoder(self) -> Encoder:
        return self._parts[0]

    @property
    def attention(self) -> Attention:
        return self._parts[1].attention

    def connect(self, data: CaptionDataModule) -> None:
        """Train and evaluate on ``data``, prepared for this encoder. Must be called before the trainer starts."""
        data.encoder = self.encoder
        self._data = data

    @property
    def data(self) -> CaptionDataModule:
        if self._data is None:
            raise RuntimeError("the module has no data; call its connect(data) before the trainer starts")
        return self._data

    def join(self, others: Sequence[Captioner]) -> None:
        """Evaluate the ensemble of this model and others of the same vocabulary; see ``captioning.model.ensemble``."""
        self._others = tuple(others)  # a tuple keeps them out of this module's state

    def on_validation_epoch_start(self) -> None:
        self._evaluator = self._make_evaluator()

    def validation_step(self, batch: CaptionBatch, batch_idx: int) -> None:
        assert self._evaluator is not None
        self._evaluator.update(batch)

    def on_validation_epoch_end(self) -> None:
        self._finish_evaluation("val")

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def test_step(self, batch: CaptionBatch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        self._finish_evaluation("test")

    def on_predict_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def predict_step(self, batch: CaptionBatch, batch_idx: int) -> list[dict[str, Any]]:
        """Return ``{"image_id", "caption", "log_prob"}`` of every image."""
        assert self._evaluator is not None
        images = [image for image, _ in self._evaluator.caption(batch)]
        self._evaluator.evaluated.images |= dict(zip(batch.rows.tolist(), images, strict=True))
        return [{"image_id": image.image_id, "caption": image.text, "log_prob": image.log_prob} for image in images]

    def on_predict_epoch_end(self) -> None:
        images = dict(sorted(self._gathered().images.items()))
        if self.trainer.is_global_zero:
            paths = [self.data.evaluated.image_path(row) for row in images]
            for path in write_predictions(Path(self.trainer.default_root_dir), paths, list(images.values())):
                print(f"written to {path}", flush=True)

    @torch.inference_mode()
    def caption_samples(self, count: int) -> list[Sample]:
        """Caption the first ``count`` images of the split being evaluated; those without an image file are left out."""
        assert self.captioner is not None
        batch = self.data.samples(count).to(self.device)
        training = self.training
        self.eval()
        with self.evaluated_weights():
            evaluator = self._make_evaluator()
            memory = evaluator.captioner.encode_batch(batch)
            captioned = evaluator.caption(batch, memory)
            hypotheses = evaluator.captioner.with_posterior(memory, [[best] for _, best in captioned])
        self.train(training)
        return self._samples(
            (row, (image, best))
            for row, (image, _), (best,) in zip(batch.rows.tolist(), captioned, hypotheses, strict=True)
        )

    def kept_samples(self) -> list[Sample]:
        """Return the first images of the last evaluation, with the captions that were scored and their attention.

        Images that another process evaluated, or that have no image file, are left out.
        """
        return self._samples([] if self._evaluator is None else sorted(self._evaluator.kept.items()))

    def _samples(self, captioned: Iterable[tuple[int, tuple[CaptionedImage, Hypothesis]]]) -> list[Sample]:
        """Return the samples of rows of the evaluated split."""
        with_photos = ((image, best, self.data.photo(row)) for row, (image, best) in captioned)
        return [Sample(image, best, photo) for image, best, photo in with_photos if photo is not None]

    def _make_evaluator(self) -> Evaluator:
        assert self.captioner is not None and self.vocabulary is not None
        captioner: CaptionModel = self.captioner
        if self._others:
            others = [other.to(self.captioner.decoder.embedding.weight) for other in self._others]
            captioner = Ensemble([self.captioner, *others], load=self.data.load).eval()
        bound_samples = 0 if self.trainer.state.fn == "fit" else self.bound_samples
        return Evaluator(
            captioner,
            self.vocabulary,
            self.data.evaluated,
            self.data.objects,
            search=self.search,
            bound_samples=bound_samples,
            seed=self.data.seed,
            keep=self.keep_hypotheses,
        )

    def _gathered(self) -> Evaluated:
        """Return what all processes have evaluated."""
        assert self._evaluator is not None
        evaluated = self._evaluator.evaluated
        if self.trainer.world_size > 1:
            parts: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(parts, evaluated)
            evaluated = Evaluated.merge(parts)
        return evaluated

    def _finish_evaluation(self, stage: str) -> None:
        # METEOR alone takes seconds: not after every epoch, and not on every process.
        evaluating = self.trainer.state.fn != "fit" and self.trainer.is_global_zero
        assert self.vocabulary is not None
        tokenizer = self.vocabulary.tokenizer
        evaluated = self._gathered()
        scores, self.results = evaluated.finish(java=evaluating and tokenizer.english)
        for name, value in scores.items():
            self.log(f"{stage}/{name}", value, prog_bar=name == "bleu4", sync_dist=False)
        if self.trainer.state.fn == "fit":
            self.log("epoch", float(self.current_epoch + 1))
        if scores and evaluating:
            search = vars(self.search) | {"inference": self.attention.inference, "split": self.data.evaluated_split}
            if self.trainer.ckpt_path is not None:
                search["checkpoint"] = Path(self.trainer.ckpt_path).name
            if "bound" in scores:
                search["bound_samples"] = self.bound_samples
            if not isinstance(tokenizer, PennTreebank):
                search["tokenizer"] = type(tokenizer).__name__
            if self._others:
                search["ensemble"] = 1 + len(self._others)
            tokens = self.data.source.tokens
            write_evaluation(
                Path(self.trainer.default_root_dir),
                stage,
                scores,
                self.results,
                search=search,
                tokens=tokens,
                cells=self.encoder.cells if any(image.hits or image.reference_hits for image in self.results) else None,
            )
            print(f"tokens: {tokens}")
