"""What training minimizes: a sum of terms for the likelihood (Eq. 14, and Eq. 11-12 where locations are drawn)."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn
from typing_extensions import Self

from captioning.attention.memory import repeat_rows
from captioning.component import Component
from captioning.data.batch import CaptionBatch
from captioning.data.records import CaptionIndex
from captioning.decoding import BeamOptions
from captioning.errors import InputError, check_range, check_whole
from captioning.model import Captioner, Decoder, DecoderOutput
from captioning.model.captioner import memory_of_captions
from captioning.objective.estimators import Estimator, MovingAverage
from captioning.objective.guidance import Guidance
from captioning.objective.reductions import Reduction, step_entropy, step_log_probs
from captioning.trace import NO_LOCATION
from captioning.vocabulary import Vocabulary


class Loss(NamedTuple):
    """The objective of one batch. With several processes, loss and logs must be averaged across them.

    Attributes:
        loss: The scalar to differentiate.
        logs: Detached values by name; "loss" leaves out the REINFORCE term, of which only the gradient has a meaning.
        output: The decoder's output.
    """

    loss: Tensor
    logs: dict[str, Tensor]
    output: DecoderOutput


class Objective(Component):
    """What training minimizes.

    Attributes:
        needs_pretrained: Whether training needs the weights of a model that captions already.
        needs_regions: Whether training batches need the regions of phrases.
    """

    needs_pretrained = False
    needs_regions = False

    def bind(self, decoder: Decoder) -> Self:
        """Prepare for a decoder; called once, when the model is put together.

        Raises InputError if a term or an estimator does not work with this decoder or its attention.
        """
        return self

    def prepare(self, index: CaptionIndex, vocabulary: Vocabulary, search: BeamOptions) -> None:
        """Prepare for training; called once, before its first batch.

        Args:
            index: The training split.
            vocabulary: The words of the captions.
            search: The search of validation, which limits the lengths of captions.
        """

    @abstractmethod
    def forward(self, captioner: Captioner, batch: CaptionBatch) -> Loss:
        """Return the objective of one training batch."""


class Likelihood(Objective):
    """-log p(y | a), or -L_s (Eq. 10) with hard attention, plus the doubly stochastic penalty (Eq. 14).

    Args:
        attention_penalty: lambda of Eq. 14; ``reductions.doubly_stochastic_penalty`` explains its scale.
        estimator: The estimator of REINFORCE for attention that needs one; by default ``MovingAverage``.
        reward_weight: lambda_r of the learning rule below Eq. 12; 1 gives the gradient of the bound L_s.
        entropy_weight: lambda_e of that rule, the weight of the alphas' entropy, for stochastic attention.
        label_smoothing: Fraction of the target probability that is spread over the vocabulary. Rewards are plain
            log-probabilities.
        samples: How often each caption is decoded in training, with new dropout, over one encoding of the image. With
            hard attention, the estimator sets this number.
        guidance: Terms that teach attention where to look, in training alone; none in the paper.
        reduction: How terms are averaged; per word by default.
    """

    def __init__(
        self,
        *,
        attention_penalty: float = 1.0,
        estimator: Estimator | None = None,
        reward_weight: float = 1.0,
        entropy_weight: float = 0.002,
        label_smoothing: float = 0.0,
        samples: int = 1,
        guidance: list[Guidance] | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        super().__init__()
        check_whole(1, samples=samples)
        check_range(0, attention_penalty=attention_penalty, entropy_weight=entropy_weight)
        check_range(0, 0.99, label_smoothing=label_smoothing)
        check_range(-math.inf, reward_weight=reward_weight)
        self.attention_penalty = attention_penalty
        self.estimator = estimator
        self.reward_weight = reward_weight
        self.entropy_weight = entropy_weight
        self.label_smoothing = label_smoothing
        self.samples = samples
        self.guidance: Sequence[Guidance] = nn.ModuleList(guidance or [])  # type: ignore[assignment]
        self.needs_regions = any(term.needs_regions for term in self.guidance)
        self.reduction = reduction or Reduction()

    def bind(self, decoder: Decoder) -> Self:
        attention = decoder.attention
        for term in self.guidance:
            term.check(decoder)
        if self.estimator is not None and not attention.needs_estimator:
            name, estimator = type(attention).__name__, type(self.estimator).__name__
            raise InputError(f"estimator: {name} is differentiable and needs no estimator; leave {estimator} out")
        if attention.needs_estimator:
            self.estimator = self.estimator or MovingAverage()
            if self.samples not in (1, self.estimator.samples):
                raise InputError("samples: with hard attention the estimator sets them; leave it out")
            self.samples = self.estimator.samples
        return self

    def prepare(self, index: CaptionIndex, vocabulary: Vocabulary, search: BeamOptions) -> None:
        for term in self.guidance:
            term.prepare(vocabulary)

    def forward(self, captioner: Captioner, batch: CaptionBatch) -> Loss:
        memory = captioner.encode_batch(batch)
        caption_memory = memory_of_captions(batch, memory)
        output = captioner.decoder(batch.captions, batch.lengths, caption_memory, self.samples)  # logits (M, V)
        alphas, mask = output.trace.alphas, output.mask  # (N, T, L), (N, T)
        reduction = self.reduction
        image_index = repeat_rows(batch.image_index, self.samples)  # (N,)
        exists = None if memory.mask is None else memory.mask[image_index]  # (N, L)

        nll = reduction.nll(output.logits, output.targets, mask, label_smoothing=self.label_smoothing)  # Eq. 10, 14
        penalty = reduction.penalty(alphas, exists, stochastic=output.location_log_prob is not None)
        loss = nll + self.attention_penalty * penalty  # Eq. 14
        if output.location_log_prob is not None:  # the rule below Eq. 12: keep the draws diverse
            loss = loss - self.entropy_weight * reduction.reduce_steps(step_entropy(alphas), mask)
        logs = {"nll": nll, "attention_penalty": penalty}
        for term in self.guidance:
            logs[term.name] = reduction.reduce_steps(term(captioner.decoder, batch, caption_memory, output), mask)
            loss = loss + term.weight * logs[term.name]
        logs["loss"] = loss
        if self.estimator is not None and output.location_log_prob is not None and captioner.decoder.attention.may_draw:
            word_log_probs = step_log_probs(output.logits, output.targets, mask)  # (N, T)
            signal = self.estimator(word_log_probs, mask, output.trace.locations != NO_LOCATION)
            credit = signal.advantages * output.location_log_prob  # (N, T), (log p(y | s, a) - b) log p(s | a)
            loss = loss - self.reward_weight * reduction.reduce_steps(credit, mask)  # Eq. 11-12, only for the gradient
            logs |= signal.means()
        return Loss(loss, {name: tensor.detach() for name, tensor in logs.items()}, output)
