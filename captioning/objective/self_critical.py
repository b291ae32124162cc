"""Self-critical sequence training (Rennie et al. 2017): a second stage that raises a metric of the model's captions.

The objective is E_w[r(w)], the expected reward of a caption w ~ p(w | a). Captions are sampled word by word from the
model in eval mode: no dropout, fixed statistics, contexts by ``Attention.context_mode``. The search's ``min_length``
and ``max_length`` hold; its rules on repeated words do not. The gradient (REINFORCE) is the mean over captions of

    (r(w) - b) * d log p(w | a)

with any b that does not depend on w; here b is the mean reward of the image's other captions (Luo 2020).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Self

from captioning import decoding
from captioning.attention import Memory
from captioning.attention.memory import repeat_rows
from captioning.data.batch import CaptionBatch, pad_captions
from captioning.data.records import CaptionIndex
from captioning.decoding import BeamOptions, Constraints, Hypothesis
from captioning.decoding.constraints import FORBIDDEN_IDS
from captioning.errors import InputError, check_range, check_whole
from captioning.model import Captioner, Decoder, DecoderOutput
from captioning.objective.estimators import LearningSignal, leave_one_out
from captioning.objective.objective import Likelihood, Loss, Objective
from captioning.objective.processes import process_count, sum_over_processes
from captioning.objective.reductions import step_log_probs
from captioning.objective.reward import CaptionReward, Reward
from captioning.precision import at_least_float32
from captioning.vocabulary import END, Vocabulary


class SelfCriticalTraining(Objective):
    """Minus the expected reward of sampled captions. The reward is cider_d * CIDEr-D + bleu4 * BLEU-4.

    Args:
        samples: Number of captions sampled for every image, at least 2.
        cider_d: Weight of CIDEr-D on the toolkit's scale, 0 to 10; logged metrics are 100 times that scale.
        bleu4: Weight of smoothed sentence BLEU-4, 0 to 1.
        dropout: Whether to differentiate log p(w | a) with the decoder's dropout. Captions are still sampled without
            dropout, so this is only approximately the gradient of the expected reward. On a few thousand images,
            dropout keeps the model from overfitting the rewards of the training images.
        likelihood: A ``Likelihood``, whose loss on the batch's captions, with its guidance, is added. The reward alone
            moves the alphas away from what they were taught.
        likelihood_weight: Weight of that loss.
    """

    needs_pretrained = True

    def __init__(
        self,
        *,
        samples: int = 5,
        cider_d: float = 1.0,
        bleu4: float = 0.0,
        dropout: bool = False,
        likelihood: Likelihood | None = None,
        likelihood_weight: float = 1.0,
    ) -> None:
        super().__init__()
        check_range(0, cider_d=cider_d, bleu4=bleu4, likelihood_weight=likelihood_weight)
        check_whole(2, **{"objective.samples": samples})
        self.samples = samples
        self.cider_d = cider_d
        self.bleu4 = bleu4
        self.dropout = dropout
        self.likelihood, self.likelihood_weight = likelihood, likelihood_weight
        self.needs_regions = likelihood is not None and likelihood.needs_regions
        self.reward: Reward | None = None  # set when training starts
        self.search = BeamOptions()

    def bind(self, decoder: Decoder) -> Self:
        if decoder.attention.context_mode == "sample":  # the gradient would ignore the draws
            raise InputError("objective: captions are drawn with the attention's context_mode expected or argmax")
        if self.likelihood is not None:
            self.likelihood.bind(decoder)
        return self

    def prepare(self, index: CaptionIndex, vocabulary: Vocabulary, search: BeamOptions) -> None:
        self.reward = CaptionReward(index, vocabulary, cider_d=self.cider_d, bleu4=self.bleu4)
        self.search = search
        if self.likelihood is not None:
            self.likelihood.prepare(index, vocabulary, search)

    def forward(self, captioner: Captioner, batch: CaptionBatch) -> Loss:
        """Return the objective of the batch's images. Only ``likelihood`` reads the batch's captions.

        Logged values are means over the captions of all processes; "loss" is minus the reward. The value of the
        returned loss means nothing. Its gradient, averaged over processes, is the gradient for all captions.
        """
        was_training = captioner.training
        captioner.eval()
        try:
            memory = captioner.encode_batch(batch)
            captions, rewards = self.sample(captioner, memory, batch.index_rows.tolist())  # N, (N,)
            if self.dropout:
                _enable_dropout(captioner.decoder)
            log_probs, output = self.log_probs(captioner.decoder, memory, captions)  # (N,)
        finally:
            captioner.train(was_training)
        baseline = leave_one_out(rewards, self.samples)
        advantages = rewards - baseline  # (N,)
        counts = rewards.new_tensor([len(captions), sum(len(caption.ids) for caption in captions)])
        caption_count, word_count = sum_over_processes(counts)
        is_sampled = torch.ones_like(rewards, dtype=torch.bool)
        logs = LearningSignal(rewards, baseline, advantages, is_sampled).means()
        logs |= {"loss": -logs["reward"], "caption_length": word_count / caption_count}
        loss = -(advantages * log_probs).sum() / caption_count * process_count()
        if self.likelihood is not None:
            term = self.likelihood(captioner, batch)
            loss = loss + self.likelihood_weight * term.loss
            logs = term.logs | logs
        return Loss(loss, logs, output)

    @torch.no_grad()
    def sample(
        self, captioner: Captioner, memory: Memory, index_rows: Sequence[int]
    ) -> tuple[list[Hypothesis], Tensor]:
        """Return N = B * samples captions, image by image, and their rewards (N,).

        The B images of ``memory`` have the rows ``index_rows`` in the index of the training split.
        """
        assert self.reward is not None
        state = captioner.decoder.init_state(memory)
        repeated_state = tuple(repeat_rows(tensor, self.samples) for tensor in state)
        constraints = Constraints(min_length=self.search.min_length)
        step_function = captioner.step_function(memory)
        captions = decoding.sample(
            step_function, repeated_state, max_length=self.search.max_length, constraints=constraints
        )
        caption_rows = [row for row in index_rows for _ in range(self.samples)]
        return captions, self.reward(caption_rows, captions).to(state[0].device)

    def log_probs(
        self, decoder: Decoder, memory: Memory, captions: Sequence[Hypothesis]
    ) -> tuple[Tensor, DecoderOutput]:
        """Return log p(w | a) of N sampled captions (N,) in nats, and the decoder's output for them."""
        device = memory.annotations.device
        ids, lengths = pad_captions([caption.ids for caption in captions])
        lengths = lengths - torch.tensor([not caption.finished for caption in captions]).long()  # no <end>
        output = decoder(ids.to(device), lengths.to(device), memory)
        logits = _sampleable_logits(output, self.search.min_length)
        return step_log_probs(logits, output.targets, output.mask).sum(dim=1), output


def _enable_dropout(decoder: Decoder) -> None:
    """Drop units of the decoder; statistics, attention and everything computed once per image stay in eval mode."""
    decoder.train()
    for attention in decoder.attentions():
        attention.eval()
    if decoder.feature_norm is not None:
        decoder.feature_norm.eval()


def _sampleable_logits(output: DecoderOutput, min_length: int) -> Tensor:
    """Return the logits (M, V), at least float32, far below all others for words that are never sampled."""
    logits = at_least_float32(output.logits)
    never = -1e30  # far below any logit, and finite when a kernel sums a row: infinities times 0 are NaN
    logits = logits.index_fill(-1, torch.tensor(FORBIDDEN_IDS, device=logits.device), never)
    early = output.mask.nonzero()[:, 1] < min_length
    end = logits[:, END].masked_fill(early, never)
    return logits.index_copy(1, torch.tensor([END], device=logits.device), end.unsqueeze(1))
