"""A split of a data set, evaluated batch by batch: its captions, the NLL of its references, where attention looked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from captioning.data.batch import CaptionBatch
from captioning.data.records import CaptionIndex
from captioning.decoding import BeamOptions, Hypothesis
from captioning.evaluation.grounding import ObjectCells, grounding_scores, noun_hits, posterior_scores
from captioning.evaluation.records import CaptionedImage, NounHit
from captioning.evaluation.scores import score_captions
from captioning.model import Captioner, CaptionModel
from captioning.objective import losses
from captioning.objective.objective import sampled_bounds
from captioning.vocabulary import Vocabulary


@dataclass
class Evaluated:
    """What has been evaluated, by one process or by all of them.

    Attributes:
        images: by their row of the split.
        sums: log-probabilities of the references in nats, summed over ``words`` words.
    """

    images: dict[int, CaptionedImage] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    words: int = 0

    @classmethod
    def merge(cls, parts: Iterable[Evaluated]) -> Evaluated:
        """Return the parts of several processes as one."""
        whole = cls()
        for part in parts:
            whole.images |= part.images
            whole.words += part.words
            for name, value in part.sums.items():
                whole.add(name, value)
        return whole

    def add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def finish(self, *, java: bool = False) -> tuple[dict[str, float], list[CaptionedImage]]:
        """Return the scores and the images in the order of the split; no scores where there is no image.

        The scores are ``score_captions``, nats per word of the references, and ``grounding_scores`` of the captions
        and, as "reference_..", of the references; ``posterior_scores`` where words come from single locations.

        Args:
            java: also METEOR and SPICE, where they are available.
        """
        images = [self.images[row] for row in sorted(self.images)]
        if not images:
            return {}, []
        hypotheses, references = [image.words for image in images], [image.reference_words for image in images]
        scores = score_captions(hypotheses, references, java=java)
        scores |= {name: total / self.words for name, total in self.sums.items()}
        scores |= grounding_scores([hit for image in images for hit in image.hits])
        of_references = grounding_scores([hit for image in images for hit in image.reference_hits])
        scores |= {f"reference_{name}": value for name, value in of_references.items()}
        scores |= posterior_scores("posterior", [hit for image in images for hit in image.posterior_hits])
        known = [hit for image in images for hit in image.reference_posterior_hits]
        return scores | posterior_scores("reference_posterior", known), images


class Evaluator:
    """Evaluates a captioner or an ensemble, in eval mode, on batches of whole images; ``evaluated`` has what was found.

    Args:
        index: the records of the split.
        objects: returns the objects of a row of the split, on the encoder's grid.
        search: how captions are made.
        bound_samples: draws of every caption that the bounds of stochastic attention are estimated with; 0 leaves
            them out. An ensemble has none.
    """

    def __init__(
        self,
        captioner: CaptionModel,
        vocabulary: Vocabulary,
        index: CaptionIndex,
        objects: Callable[[int], Sequence[ObjectCells]],
        *,
        search: BeamOptions,
        bound_samples: int = 0,
    ) -> None:
        self.captioner = captioner
        self.vocabulary = vocabulary
        self.index = index
        self.objects = objects
        self.search = search
        draws = isinstance(captioner, Captioner) and "sample" in captioner.decoder.attention.inference_modes
        self.bound_samples = bound_samples if draws else 0
        self.evaluated = Evaluated()

    @torch.inference_mode()
    def update(self, batch: CaptionBatch) -> None:
        """Evaluate a batch of images, each with all its captions."""
        memory = self.captioner.encode_batch(batch)
        reference_hits: dict[int, list[NounHit]] = {}
        reference_posterior_hits: dict[int, list[NounHit]] = {}
        if len(batch.captions):
            with self.captioner.inferring("expected"):
                output = self.captioner.teacher_force(batch, memory)
            self.evaluated.words += len(output.targets)
            self.evaluated.add("nll", -float(losses.token_log_probs(output.logits, output.targets).sum()))
            if self.bound_samples and isinstance(self.captioner, Captioner):
                bounds = sampled_bounds(self.captioner, batch, memory, self.bound_samples)
                self.evaluated.add("bound", bounds.bound)
                self.evaluated.add("iwae_bound", bounds.importance_weighted)
            reference_hits = self._reference_hits(batch, output.trace.alphas)
            if output.trace.posterior is not None:
                reference_posterior_hits = self._reference_hits(batch, output.trace.posterior)
        images, found = zip(*self.caption(batch, memory), strict=True)
        rows = batch.rows.tolist()
        cells = [self.objects(row) for row in rows]
        forced = [[best] for best in found]
        if any(cells):
            forced = self.captioner.with_posterior(memory, forced)
        for row, image, (best,), objects in zip(rows, images, forced, cells, strict=True):
            words, trace = self.vocabulary.decode(best.ids), best.trace
            self.evaluated.images[row] = dataclasses.replace(
                image,
                hits=noun_hits(words, trace.alphas.numpy(), objects),
                reference_hits=reference_hits.get(row, []),
                posterior_hits=[] if trace.posterior is None else noun_hits(words, trace.posterior.numpy(), objects),
                reference_posterior_hits=reference_posterior_hits.get(row, []),
            )

    @torch.inference_mode()
    def caption(self, batch: CaptionBatch, memory: Any = None) -> list[tuple[CaptionedImage, Hypothesis]]:
        """Return the best caption of every image of a batch: its record, without hits, and as the search found it."""
        if memory is None:
            memory = self.captioner.encode_batch(batch)
        found = [hypotheses[0] for hypotheses in self.captioner.search(memory, self.search)]
        images = [
            CaptionedImage(
                image_id=image_id,
                caption=" ".join(self.vocabulary.decode(best.ids)),
                log_prob=best.score,
                finished=best.finished,
                references=self.index.references(row),
            )
            for image_id, row, best in zip(batch.image_ids.tolist(), batch.rows.tolist(), found, strict=True)
        ]
        return list(zip(images, found, strict=True))

    def _reference_hits(self, batch: CaptionBatch, alphas: Tensor) -> dict[int, list[NounHit]]:
        """Judge the references by their alphas (N, T, L) under teacher forcing; keys are rows of the split."""
        rows, looked = batch.rows.tolist(), alphas.float().cpu().numpy()
        hits: dict[int, list[NounHit]] = {row: [] for row in rows}
        left = {row: iter(self.index.references(row)) for row in rows}
        for image, alpha in zip(batch.image_index.tolist(), looked, strict=True):
            row = rows[image]
            hits[row] += noun_hits(next(left[row]).split(), alpha, self.objects(row))
        return hits
