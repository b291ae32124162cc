"""A mean teacher (Tarvainen & Valpola 2017), as CaMEL trains captioners with one (Barraco et al. 2022)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from captioning.errors import InputError, check_range
from captioning.model import Captioner
from captioning.objective.terms import ForcedBatch, Term


class MeanTeacher(Term):
    """The mean squared difference between the logits of the model and of its teacher, an average of its weights.

    The teacher sees the same batch, with dropout of its own. It is not saved: a resumed run begins with a new one.

    Args:
        weight: Weight of the term, beside the likelihood.
        decay: Factor d of ``teacher = d * teacher + (1 - d) * weights`` after each batch. In batch n it is at most
            (1 + n) / (10 + n), so that the random beginning is soon forgotten.

    Raises:
        InputError: The decay is not in [0, 1), or the weight is negative.
    """

    def __init__(self, weight: float = 0.1, decay: float = 0.999) -> None:
        super().__init__()
        check_range(0, weight=weight)
        if not 0 <= decay < 1:
            raise InputError(f"MeanTeacher: decay must be at least 0 and below 1, got {decay}")
        self.weight = weight
        self.decay = decay
        self._batches = 0
        self._teacher: list[Captioner] = []  # in a list, so that it is no part of the model

    def forward(self, forced: ForcedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            teacher = self._updated(forced.captioner)
            memory = teacher.encode_batch(forced.batch)
            target = teacher.teacher_force(forced.batch, memory, forced.samples)
        difference = ((forced.output.logits - target.logits) ** 2).mean()
        return self.weight * difference, {"teacher_difference": difference}

    def _updated(self, captioner: Captioner) -> Captioner:
        """Return the teacher after the weights of ``captioner`` have entered its average."""
        if not self._teacher:
            shared = {id(captioner.encoder): captioner.encoder}
            self._teacher.append(copy.deepcopy(captioner, shared))
        teacher = self._teacher[0]
        decay = min(self.decay, (1 + self._batches) / (10 + self._batches))
        self._batches += 1
        weights = list(captioner.decoder.parameters())
        torch._foreach_lerp_(list(teacher.decoder.parameters()), weights, 1 - decay)
        return teacher
