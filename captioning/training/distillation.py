"""Distillation: a model also learns the word probabilities of trained models (Hinton et al. 2015, Kim & Rush 2016)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from captioning.attention.memory import repeat_rows
from captioning.checkpoint.load import check_vocabulary, read_model
from captioning.encoders import Encoder
from captioning.errors import InputError, check_range
from captioning.model.decoder import DecoderOutput
from captioning.model.ensemble import Ensemble
from captioning.objective.terms import ForcedBatch, Term
from captioning.vocabulary import Vocabulary


class Distillation(Term):
    """weight * KL(p || q) in nats per word: p is the mean word distribution of the teachers, q that of the model.

    Both follow the same words of a reference. Teachers have no dropout and are not trained. They are read when training
    begins, and are no part of the checkpoint.

    Args:
        teachers: Checkpoints, exported folders or names of captioners on the hub, as ``--model`` takes them.
        weight: Weight of the term beside the likelihood.

    Raises:
        InputError: There is no teacher, or the weight is negative.
    """

    def __init__(self, teachers: Sequence[str], weight: float = 1.0) -> None:
        super().__init__()
        check_range(0, distillation_weight=weight)
        if not teachers:
            raise InputError("Distillation: teachers: name at least one model")
        self.teachers = teachers
        self.weight = weight
        self._ensemble: list[Ensemble] = []  # in a list, so that it is no part of the model

    def begin(self, vocabulary: Vocabulary, encoder: Encoder) -> None:
        """Read the teachers before training.

        Raises:
            InputError: A teacher cannot be read, or has another vocabulary or another encoder than the run.
        """
        members = []
        for path in self.teachers:
            model = read_model(path)
            check_vocabulary(f"{path}: its", model.vocabulary.words, vocabulary)
            if model.captioner.encoder.identity() != encoder.identity():
                raise InputError(f"{path}: a teacher must have the encoder of the run, with the same weights")
            members.append(model.captioner)
        self._ensemble = [Ensemble(members).requires_grad_(False).eval()]

    @torch.no_grad()
    def _target(self, forced: ForcedBatch) -> DecoderOutput:
        ensemble = self._ensemble[0].to(forced.batch.captions.device)
        return ensemble.teacher_force(forced.batch, ensemble.encode_batch(forced.batch))

    def forward(self, forced: ForcedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        target, mask = self._target(forced), forced.output.mask
        words = torch.arange(len(target.logits), device=mask.device)
        words = torch.zeros(target.mask.shape, dtype=words.dtype, device=mask.device).masked_scatter(target.mask, words)
        log_p = target.logits[repeat_rows(words, forced.samples)[mask]]  # (M, V), as the logits of the model
        log_q = torch.log_softmax(forced.output.logits.float(), dim=-1)
        divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
        steps = torch.zeros(mask.shape, dtype=divergence.dtype, device=mask.device).masked_scatter(mask, divergence)
        mean = forced.reduction.over_steps(steps, mask)
        return self.weight * mean, {"distillation": mean}
