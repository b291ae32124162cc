"""Evaluates a split batch by batch: metrics of captions, the NLL of references, and the hits of attention."""

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from captioning.data.batch import CaptionBatch
from captioning.data.loading import SplitData, batch_loader, load_images, worker_count
from captioning.data.records import CaptionIndex, CaptionSource
from captioning.data.regions import RegionsInView, named_regions
from captioning.data.sampler import image_batches
from captioning.decoding import BeamOptions, Hypothesis
from captioning.errors import InputError, check_whole
from captioning.evaluation.caption_files import CaptionedImage, NounHit
from captioning.evaluation.grounding import grounding_metrics, noun_hits
from captioning.metrics.table import caption_metrics
from captioning.model.captioner import Captioner, CaptionModel
from captioning.model.ensemble import Ensemble
from captioning.objective.bounds import likelihood_bounds
from captioning.objective.reductions import step_nll
from captioning.progress import Progress
from captioning.vocabulary import Vocabulary


@dataclass(repr=False)
class Evaluator:
    """Evaluates a captioner or an ensemble, in eval mode, on batches of images with all their captions.

    The random numbers of a batch depend on the seed and the batch alone. The global random stream does not change.
    """

    model: CaptionModel
    vocabulary: Vocabulary
    index: CaptionIndex  # of the split
    regions: RegionsInView  # of the split's images
    search: BeamOptions
    bound_draws: int = 0  # draws of locations for each reference, which estimate the bounds of stochastic attention
    seed: int = 0
    figure_count: int = 0  # number of images at the beginning of the split that get a figure
    with_references: bool = True  # whether references are teacher-forced; metrics need them
    figure_hypotheses: dict[int, Hypothesis] = field(default_factory=dict, init=False)  # of these images, by row
    images: dict[int, CaptionedImage] = field(default_factory=dict, init=False)  # by row of the split
    sums: dict[int, dict[str, float]] = field(default_factory=dict, init=False)
    """By the row of a batch's first image: the number of "words" of the references, <end> included, and the sums of
    their "nll" and, with draws, their bounds, in nats. A batch that two processes evaluate has one entry."""

    def __post_init__(self) -> None:
        if self.with_references and not self.index.captions:
            raise InputError(f"{self.index.origin}: has no captions to compare with; use captioning predict")

    @property
    def captioned_images(self) -> list[CaptionedImage]:
        """The images in the order of the split."""
        return [self.images[row] for row in sorted(self.images)]

    def compute_metrics(self, *, meteor: bool = False) -> dict[str, float]:
        """Return ``caption_metrics``, the NLL and bounds of the references in nats per word, and ``grounding_metrics``.

        Returns {} without images or references. METEOR, which knows only English, is computed if ``meteor`` is true.
        """
        images = self.captioned_images
        if not (images and self.with_references):
            return {}
        metrics = caption_metrics([image.words for image in images], [i.reference_words for i in images], meteor=meteor)
        batches = list(self.sums.values())  # in any order; fsum gives any number of processes the same digits
        totals = {name: math.fsum(sums[name] for sums in batches) for name in batches[0]}
        words = totals.pop("words")
        metrics |= {name: total / words for name, total in totals.items()}
        return metrics | grounding_metrics(images)

    def update(self, batch: CaptionBatch) -> None:
        """Evaluate a batch of images, each with all its captions."""
        rows, device = batch.index_rows.tolist(), batch.captions.device
        (batch_seed,) = np.random.SeedSequence((self.seed, rows[0])).generate_state(1, np.uint64)
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.inference_mode():
            torch.manual_seed(int(batch_seed))
            memory = self.model.encode_batch(batch)
            objects = [self.regions.object_regions(row) for row in rows]
            # The search comes first, so that its draws do not depend on those of the bounds.
            hypotheses = [[best] for best, *_ in self.model.search(memory, self.search, self.vocabulary)]
            if any(objects) or any(row < self.figure_count for row in rows):
                hypotheses = self.model.with_evidence(memory, hypotheses)
            reference_hits = self._teacher_force_references(batch, memory) if self.with_references else [{}] * len(rows)
        cells = self.model.encoder.cells
        images = zip(batch.image_ids.tolist(), rows, objects, reference_hits, hypotheses, strict=True)
        for image_id, row, objects_in_view, image_reference_hits, (best,) in images:
            words = self.vocabulary.decode(best.ids)
            caption = " ".join(words)
            written = self.vocabulary.tokenizer.join(words)
            evidence = best.trace.evidence
            regions = named_regions(words, objects_in_view)
            self.images[row] = CaptionedImage(
                image_id=image_id,
                file=str(self.index.image_path(row)),
                caption=caption,
                written=None if written == caption else written,
                log_prob=best.log_prob,
                finished=best.finished,
                references=self.index.references(row),
                hits=noun_hits(words, best.trace.alphas.numpy(), regions, cells),
                evidence_hits=[] if evidence is None else noun_hits(words, evidence.numpy(), regions, cells),
                **image_reference_hits,
            )
            if row < self.figure_count:
                self.figure_hypotheses[row] = best

    def _teacher_force_references(self, batch: CaptionBatch, memory: Any) -> list[dict[str, list[NounHit]]]:
        """Teacher-force the references, store their ``sums``, and return fields of each image's ``CaptionedImage``."""
        with self.model.in_context_mode("expected"):
            output = self.model.teacher_force(batch, memory)
        nll = float(step_nll(output.logits, output.targets).sum())
        sums = self.sums[int(batch.index_rows[0])] = {"words": len(output.targets), "nll": nll}
        model = self.model
        if self.bound_draws and isinstance(model, Captioner) and model.decoder.attention.can_draw:
            sums["bound"], sums["iwae_bound"] = likelihood_bounds(model, batch, memory, self.bound_draws)
        rows, images = batch.index_rows.tolist(), batch.image_index.tolist()
        references = [reference.split() for row in rows for reference in self.index.references(row)]
        regions = [caption_regions for row in rows for caption_regions in self.regions.caption_regions(row)]
        evidence = model.evidence(batch, memory) if any(regions) else None
        tensors = {"reference_hits": output.trace.alphas, "reference_evidence_hits": evidence}
        attention = {name: tensor.float().cpu().numpy() for name, tensor in tensors.items() if tensor is not None}
        hits: list[dict[str, list[NounHit]]] = [{name: [] for name in attention} for _ in rows]
        cells = model.encoder.cells
        for n, (image, words, caption_regions) in enumerate(zip(images, references, regions, strict=True)):
            for name, weights in attention.items():
                hits[image][name] += noun_hits(words, weights[n], caption_regions, cells)
        return hits


def evaluate_model(
    model: CaptionModel,
    vocabulary: Vocabulary,
    source: CaptionSource,
    search: BeamOptions = BeamOptions(),  # noqa: B008 - frozen
    *,
    split: str = "test",
    limit_images: int | None = None,
    batch_size: int = 50,
    num_workers: int = 0,
    features: str | None = None,
    bound_draws: int = 0,
    seed: int = 0,
    figure_count: int = 0,
    with_references: bool = True,
) -> Evaluator:
    """Caption a split of a data set, and return the evaluator, whose ``compute_metrics`` returns the metrics.

    >>> import captioning
    >>> from captioning.data import ShapesSource
    >>> captioner = captioning.load()
    >>> source = ShapesSource("data/shapes", train=1, val=1, test=3)
    >>> evaluator = evaluate_model(captioner.model, captioner.vocabulary, source, captioner.options)
    >>> evaluator.compute_metrics()["bleu1"] > 0, len(evaluator.captioned_images)
    (True, 3)

    Args:
        model: A captioner, or an ensemble, which loads images itself if its members' encoders differ.
        vocabulary: Vocabulary of the model's ids; its tokenizer splits the data set's captions into words.
        limit_images: Number of images at the beginning of the split that are evaluated; None for all.
        batch_size: Number of images that go through the model together.
        num_workers: Processes that load images; 0 loads them in this process.
        features: Folder that `captioning extract` wrote; its annotations replace the encoder.
        bound_draws, seed, figure_count, with_references: Fields of the ``Evaluator``.
    """
    check_whole(1, batch_size=batch_size)
    workers = worker_count(num_workers, cached=features is not None)
    source.tokenizer = vocabulary.tokenizer
    source.prepare()
    data = SplitData(source, split, limit_images=limit_images, features=features)
    model.eval()
    if isinstance(model, Ensemble):  # its members may have other views of an image than the batch
        model.load_images = functools.partial(load_images, data.index)
    encoder, device = model.encoder, next(model.parameters()).device
    fields = model, vocabulary, data.index, data.regions(encoder), search
    evaluator = Evaluator(
        *fields, bound_draws=bound_draws, seed=seed, figure_count=figure_count, with_references=with_references
    )
    dataset = data.evaluation_dataset(vocabulary, encoder)
    with Progress(f"{split} split", len(data.index)) as bar:
        for batch in batch_loader(dataset, image_batches(len(data.index), batch_size), num_workers=workers):
            evaluator.update(batch.to(device))
            bar.update(len(batch.index_rows))
    return evaluator
