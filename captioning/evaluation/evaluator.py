"""A split of a data set, evaluated batch by batch: its captions, the NLL of its references, where attention looked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from captioning.data.batch import CaptionBatch
from captioning.data.records import CaptionIndex
from captioning.decoding import BeamOptions, Hypothesis
from captioning.evaluation.grounding import ObjectCells, grounding_scores, noun_hits, posterior_scores
from captioning.evaluation.records import CaptionedImage, NounHit
from captioning.evaluation.scores import score_captions
from captioning.model.captioner import Captioner, CaptionModel
from captioning.objective.bounds import sampled_bounds
from captioning.objective.reductions import token_log_probs
from captioning.vocabulary import Vocabulary


@dataclass
class Evaluated:
    """What has been evaluated, by one process or by all of them.

    Attributes:
        images: by their row of the split.
        sums: of every batch, by the row of its first image: log-probabilities of its references in nats, and the number
            of their "words". Kept apart, because a sum depends on the order of its terms in the last digits.
    """

    images: dict[int, CaptionedImage] = field(default_factory=dict)
    sums: dict[int, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def merge(cls, parts: Iterable[Evaluated]) -> Evaluated:
        """Return the parts of several processes as one; a batch that several have evaluated counts once."""
        whole = cls()
        for part in parts:
            whole.images |= part.images
            whole.sums |= part.sums
        return whole

    def _per_word(self) -> dict[str, float]:
        """Return the log-probabilities in nats per word."""
        totals: dict[str, float] = {}
        for row in sorted(self.sums):
            for name, value in self.sums[row].items():
                totals[name] = totals.get(name, 0.0) + value
        words = totals.pop("words", 0.0)
        return {name: total / words for name, total in totals.items()}

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
        scores |= self._per_word()
        scores |= grounding_scores([hit for image in images for hit in image.hits])
        of_references = grounding_scores([hit for image in images for hit in image.reference_hits])
        scores |= {f"reference_{name}": value for name, value in of_references.items()}
        scores |= posterior_scores("posterior", [hit for image in images for hit in image.posterior_hits])
        known = [hit for image in images for hit in image.reference_posterior_hits]
        return scores | posterior_scores("reference_posterior", known), images


def score_names() -> set[str]:
    """Return the names of all scores that an evaluation in training can give, for any data and attention."""
    hit = NounHit(0, "a", True, 1.0, 1.0, 1.0, 1.0, 1.0)
    image = CaptionedImage(
        image_id=0,
        caption="a",
        references=["a"],
        hits=[hit],
        reference_hits=[hit],
        posterior_hits=[hit],
        reference_posterior_hits=[hit],
    )
    return set(Evaluated(images={0: image}, sums={0: {"words": 1, "nll": 0.0}}).finish()[0])


class Evaluator:
    """Evaluates a captioner or an ensemble, in eval mode, on batches of whole images; ``evaluated`` has what was found.

    Args:
        index: the records of the split.
        objects: returns the objects of a row of the split, on the encoder's grid.
        search: how captions are made.
        bound_samples: draws of every caption that the bounds of stochastic attention are estimated with; 0 leaves
            them out. An ensemble has none.
        seed: of what is drawn for a batch, which depends on it and on the batch alone: neither on the batches before
            nor on which process evaluates it. The global stream of random numbers is left as it was.
        keep: images at the beginning of the split whose hypotheses ``kept`` has, by row; those of ``update`` alone.
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
        seed: int = 0,
        keep: int = 0,
    ) -> None:
        self.captioner = captioner
        self.vocabulary = vocabulary
        self.index = index
        self.objects = objects
        self.search = search
        draws = isinstance(captioner, Captioner) and "sample" in captioner.decoder.attention.inference_modes
        self.bound_samples = bound_samples if draws else 0
        self.seed = seed
        self.keep = keep
        self.kept: dict[int, tuple[CaptionedImage, Hypothesis]] = {}
        self.evaluated = Evaluated()

    @contextmanager
    def _drawing_for(self, batch: CaptionBatch) -> Iterator[None]:
        """Draw from a stream of the batch's own."""
        device = batch.captions.device
        stream = np.random.SeedSequence((self.seed, int(batch.rows[0]))).generate_state(1, np.uint64)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int(stream[0]))
            yield

    def update(self, batch: CaptionBatch) -> None:
        """Evaluate a batch of images, each with all its captions."""
        with self._drawing_for(batch):
            self._update(batch)

    @torch.inference_mode()
    def _update(self, batch: CaptionBatch) -> None:
        memory = self.captioner.encode_batch(batch)
        rows = batch.rows.tolist()
        cells = {row: self.objects(row) for row in rows}
        reference_hits: dict[int, list[NounHit]] = {}
        reference_posterior_hits: dict[int, list[NounHit]] = {}
        if len(batch.captions):
            with self.captioner.inferring("expected"):
                output = self.captioner.teacher_force(batch, memory)
            sums = {
                "words": len(output.targets),
                "nll": -float(token_log_probs(output.logits, output.targets).sum()),
            }
            if self.bound_samples and isinstance(self.captioner, Captioner):
                bounds = sampled_bounds(self.captioner, batch, memory, self.bound_samples)
                sums |= {"bound": bounds.bound, "iwae_bound": bounds.importance_weighted}
            self.evaluated.sums[int(batch.rows[0])] = sums
            reference_hits = self._reference_hits(batch, output.trace.alphas, cells)
            if output.trace.posterior is not None:
                reference_posterior_hits = self._reference_hits(batch, output.trace.posterior, cells)
        images, found = zip(*self._caption(batch, memory), strict=True)
        forced = [[best] for best in found]
        if any(cells.values()) or any(row < self.keep for row in rows):
            forced = self.captioner.with_posterior(memory, forced)
        for row, image, (best,) in zip(rows, images, forced, strict=True):
            words, trace, objects = self.vocabulary.decode(best.ids), best.trace, cells[row]
            if row < self.keep:
                self.kept[row] = image, best
            self.evaluated.images[row] = dataclasses.replace(
                image,
                hits=noun_hits(words, trace.alphas.numpy(), objects),
                reference_hits=reference_hits.get(row, []),
                posterior_hits=[] if trace.posterior is None else noun_hits(words, trace.posterior.numpy(), objects),
                reference_posterior_hits=reference_posterior_hits.get(row, []),
            )

    def caption(self, batch: CaptionBatch, memory: Any = None) -> list[tuple[CaptionedImage, Hypothesis]]:
        """Return the best caption of every image of a batch: its record, without hits, and as the search found it.

        Args:
            memory: of the batch's images, if they are encoded already.
        """
        with self._drawing_for(batch), torch.inference_mode():
            return self._caption(batch, self.captioner.encode_batch(batch) if memory is None else memory)

    def _caption(self, batch: CaptionBatch, memory: Any) -> list[tuple[CaptionedImage, Hypothesis]]:
        found = [hypotheses[0] for hypotheses in self.captioner.search(memory, self.search)]
        images = [
            CaptionedImage(
                image_id=image_id,
                caption=" ".join(words := self.vocabulary.decode(best.ids)),
                written=self._written(words),
                log_prob=best.score,
                finished=best.finished,
                references=self.index.references(row),
            )
            for image_id, row, best in zip(batch.image_ids.tolist(), batch.rows.tolist(), found, strict=True)
        ]
        return list(zip(images, found, strict=True))

    def _written(self, words: list[str]) -> str | None:
        text = self.vocabulary.tokenizer.join(words)
        return None if text == " ".join(words) else text

    def _reference_hits(
        self, batch: CaptionBatch, alphas: Tensor, objects: Mapping[int, Sequence[ObjectCells]]
    ) -> dict[int, list[NounHit]]:
        """Judge the references by their alphas (N, T, L) under teacher forcing; keys are rows of the split."""
        rows, looked = batch.rows.tolist(), alphas.float().cpu().numpy()
        hits: dict[int, list[NounHit]] = {row: [] for row in rows}
        left = {row: iter(self.index.references(row)) for row in rows}
        for image, alpha in zip(batch.image_index.tolist(), looked, strict=True):
            row = rows[image]
            hits[row] += noun_hits(next(left[row]).split(), alpha, objects[row])
        return hits
