"""What training minimises: a sum of terms for the likelihood (Eq. 14, and Eq. 11-12 where locations are drawn)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from captioning.attention import Attention
from captioning.component import Component
from captioning.data.batch import CaptionBatch
from captioning.decoding import BeamOptions, Hypothesis
from captioning.errors import InputError, check_range
from captioning.model import Captioner, DecoderOutput
from captioning.objective.estimators import Estimator, MovingAverage
from captioning.objective.reductions import Reduction
from captioning.objective.terms import NLL, DoublyStochasticPenalty, Entropy, ForcedBatch, Reinforce, Term

if TYPE_CHECKING:
    from typing_extensions import Self


class Loss(NamedTuple):
    """The objective of one batch. With several processes, loss and logged values must be averaged across them.

    Attributes:
        loss: The scalar to differentiate.
        logged: Detached values by name; "loss" is the value of the objective, without REINFORCE's surrogate.
        output: The decoder's output.
    """

    loss: Tensor
    logged: dict[str, Tensor]
    output: DecoderOutput


Reward = Callable[[Sequence[int], Sequence[Hypothesis]], Tensor]
"""``reward(records, captions)`` returns one number (N,) for each of N captions of images, given by training records."""


class Objective(Component):
    """What training minimises.

    Attributes:
        second_stage: Whether training needs the weights of a model that captions already.
    """

    second_stage = False

    def connect(self, attention: Attention) -> Self:
        """Prepare for a decoder's attention; called once, when the model is put together.

        An InputError says that an option has no effect on this attention, or does not work with it.
        """
        return self

    def begin(self, attention: Attention, reward_of: Callable[[Any], Reward], search: BeamOptions) -> None:
        """Prepare for training; called once, before its first batch.

        Args:
            attention: The decoder's attention.
            reward_of: Returns the reward of captions that the options of this objective describe.
            search: The search of validation, which limits the lengths of captions.

        Raises:
            InputError: The attention's inference mode does not work with this objective.
        """

    @abstractmethod
    def forward(self, captioner: Captioner, batch: CaptionBatch) -> Loss:
        """Return the objective of one training batch. ``captioner.begin_batch`` has been called for it."""


class Likelihood(Objective):
    """-log p(y | a) plus the doubly stochastic penalty (Eq. 14); with hard attention, the bound L_s of Eq. 10 instead.

    Args:
        attention_penalty: lambda of Eq. 14, ``DoublyStochasticPenalty``.
        estimator: The estimator of REINFORCE for attention that needs one; by default ``MovingAverage``.
        reward_weight: lambda_r of the learning rule below Eq. 12; 1 gives the gradient of the bound L_s.
        entropy_weight: lambda_e of that rule, the weight of the alphas' entropy, for stochastic attention.
        label_smoothing: Fraction of the target probability that is spread over the vocabulary. Rewards are plain
            log-probabilities.
        samples: How many times each caption is decoded in training, each with its own dropout, over one encoding of
            the image. With hard attention the estimator sets it.
        reduction: How terms are averaged; per word by default.
        terms: Terms of your own, added to the others.
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
        reduction: Reduction | None = None,
        terms: Sequence[Term] = (),
    ) -> None:
        super().__init__()
        check_range(1, samples=samples)
        self.reward_weight = reward_weight
        self.samples = samples
        self.reduction = reduction or Reduction()
        likelihood = [NLL(label_smoothing), DoublyStochasticPenalty(attention_penalty), Entropy(entropy_weight)]
        reinforce = [] if estimator is None else [Reinforce(estimator, reward_weight)]
        self.terms = nn.ModuleList([*likelihood, *terms, *reinforce])

    @property
    def estimator(self) -> Estimator | None:
        """The estimator of REINFORCE; None for attention that needs none."""
        return next((term.estimator for term in self.terms if isinstance(term, Reinforce)), None)

    def connect(self, attention: Attention) -> Self:
        if self.estimator is not None and not attention.needs_estimator:
            name, estimator = type(attention).__name__, type(self.estimator).__name__
            raise InputError(f"estimator: {name} is differentiable and needs no estimator; leave {estimator} out")
        if attention.needs_estimator:
            if self.samples > 1:
                raise InputError("samples: with hard attention the estimator sets them; leave it out")
            if self.estimator is None:
                self.terms.append(Reinforce(MovingAverage(), self.reward_weight))
            assert self.estimator is not None
            self.samples = self.estimator.samples
        return self

    def forward(self, captioner: Captioner, batch: CaptionBatch) -> Loss:
        memory = captioner.encode_batch(batch)
        output = captioner.teacher_force(batch, memory, self.samples)
        forced = ForcedBatch(captioner, batch, memory, output, self.samples, self.reduction)
        logged: dict[str, Tensor] = {}
        loss = reported = None
        for term in self.terms:
            value, to_log = term(forced)
            logged |= to_log
            if value is not None:
                loss = value if loss is None else loss + value
                if term.reported:
                    reported = value if reported is None else reported + value
        assert loss is not None and reported is not None
        return Loss(loss, {name: tensor.detach() for name, tensor in ({"loss": reported} | logged).items()}, output)
