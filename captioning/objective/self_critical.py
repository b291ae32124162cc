"""Self-critical sequence training (Rennie et al. 2017): a second stage that raises a score of the model's own captions.

Its objective is E_w[r(w)], the expected reward of a caption w ~ p(w | a) that is drawn from the model as it is
evaluated: without dropout, with fixed statistics, contexts as ``Attention.inference`` forms them, and the words that a
search may take. A reward has no gradient, but the expectation has (REINFORCE), the mean over drawn captions of

    (r(w) - b) * d log p(w | a)

with any b that does not depend on w. Words are drawn here; ``estimators`` are about drawn locations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from captioning import decoding
from captioning.attention import Attention, Memory
from captioning.data.batch import CaptionBatch, pad_captions
from captioning.decoding import BeamOptions, Hypothesis
from captioning.decoding.search import Rules
from captioning.errors import InputError
from captioning.model import Decoder, DecoderOutput
from captioning.model.captioner import Captioner
from captioning.objective import terms as losses
from captioning.objective.processes import process_count, summed
from captioning.vocabulary import END

Reward = Callable[[Sequence[int], Sequence[Hypothesis]], Tensor]
"""``reward(rows, captions)`` returns one number (N,) for each of N captions of images, given by their training rows."""


@dataclass(frozen=True)
class SelfCriticalTraining:
    """Train by reward instead of by likelihood. The reward is cider_d * CIDEr-D + bleu4 * BLEU-4.

    Attributes:
        samples: captions drawn of every image.
        baseline: b of a caption: "leave_one_out", the mean reward of the image's other captions (Luo 2020), or
            "greedy", that of the image's greedy caption (Rennie et al. 2017), which costs another search.
        cider_d: weight of CIDEr-D on the toolkit's scale, 0 to 10; scores in logs are 100 times that scale.
        bleu4: weight of smoothed sentence BLEU-4, 0 to 1.
        dropout: differentiate log p(w | a) with the decoder's dropout in place. Captions are still drawn without, so
            the gradient is no longer exactly that of the expected reward; on a few thousand images it keeps the model
            from learning the rewards of the training images by heart.
        frequencies: file of CIDEr-D's document frequencies; by default those of the training references. The end of a
            caption counts as a word in it, "<end>".

    Raises:
        InputError: an option out of its range.
    """

    samples: int = 5
    baseline: Literal["leave_one_out", "greedy"] = "leave_one_out"
    cider_d: float = 1.0
    bleu4: float = 0.0
    dropout: bool = False
    frequencies: str | None = None

    def __post_init__(self) -> None:
        if self.baseline not in ("leave_one_out", "greedy"):
            raise InputError(f"self_critical.baseline must be leave_one_out or greedy, got {self.baseline!r}")
        least = 2 if self.baseline == "leave_one_out" else 1
        if self.samples < least:
            raise InputError(f"self_critical.samples: {self.baseline} needs at least {least}, got {self.samples}")
        if not (min(self.cider_d, self.bleu4) >= 0 and 0 < self.cider_d + self.bleu4 < float("inf")):
            given = f"cider_d {self.cider_d}, bleu4 {self.bleu4}"
            raise InputError(f"self_critical: the weights of a reward are at least 0 and not all 0, got {given}")

    def check(self, attention: Attention) -> None:
        """Raises:
        InputError: attention whose locations are drawn while words are, which this gradient knows nothing of.
        """
        if attention.inference == "sample":
            raise InputError("self_critical: captions are drawn with the attention's inference expected or argmax")


class SequenceObjective:
    """What self-critical training minimises: minus the reward that captions drawn from the model are expected to have.

    Args:
        options: samples and baseline.
        search: the shortest and the longest caption.
        reward: of captions.
    """

    def __init__(self, options: SelfCriticalTraining, search: BeamOptions, reward: Reward) -> None:
        self.options = options
        self.lengths = {"max_length": search.max_length, "min_length": search.min_length}
        self.reward = reward

    def __call__(self, captioner: Captioner, batch: CaptionBatch) -> tuple[Tensor, dict[str, Tensor], DecoderOutput]:
        """Return what to differentiate, what to log by name, and the decoder's output for the captions that were drawn.

        Of a batch the images alone are used. All that is logged is a mean over the captions of all processes: reward,
        baseline, the standard deviation of their difference, words per caption, and as "loss" minus the reward. What is
        differentiated has no meaning but its gradient, whose mean over processes is that of all their captions.
        """
        training = captioner.training
        captioner.eval()
        try:
            memory = captioner.encode(batch.images, batch.annotations, batch.annotation_mask)
            drawn, rewards, baseline = self.draw(captioner, memory, batch.rows.tolist())
            with _dropping_units(captioner.decoder) if self.options.dropout else nullcontext():
                surrogate, output = self.surrogate(captioner, batch, memory, drawn, rewards - baseline)
        finally:
            captioner.train(training)
        words = torch.tensor([float(len(caption.ids)) for caption in drawn], device=rewards.device)
        advantages = rewards - baseline
        sums = torch.stack([part.sum() for part in (rewards, baseline, advantages, advantages**2, words)])
        total = summed(torch.cat([sums, sums.new_tensor([len(drawn)])]))
        reward, of_baseline, advantage, square, length = total[:-1] / total[-1]
        terms = {
            "loss": -reward,
            "reward": reward,
            "baseline": of_baseline,
            "advantage_std": (square - advantage**2).clamp(min=0).sqrt(),
            "caption_length": length,
        }
        return -surrogate.sum() * process_count() / total[-1], terms, output

    @torch.no_grad()
    def draw(
        self, captioner: Captioner, memory: Memory, rows: Sequence[int]
    ) -> tuple[list[Hypothesis], Tensor, Tensor]:
        """Draw captions of the B images of ``memory``; N = B * samples, those of an image adjacent.

        Returns:
            the captions, their rewards (N,) and baselines (N,).
        """
        samples = self.options.samples
        step, state = captioner.stepper(memory), captioner.decoder.init_state(memory)
        many = tuple(part.repeat_interleave(samples, 0) for part in state)
        drawn = decoding.sample(step, many, **self.lengths)
        several = [row for row in rows for _ in range(samples)]
        if self.options.baseline == "leave_one_out":
            rewards = self.reward(several, drawn).to(state[0].device)
            by_image = rewards.view(-1, samples)
            return drawn, rewards, ((by_image.sum(1, keepdim=True) - by_image) / (samples - 1)).flatten()
        greedy = decoding.greedy(step, state, **self.lengths)
        both = self.reward([*several, *rows], [*drawn, *greedy]).to(state[0].device)  # in one go
        rewards, of_greedy = both[: len(drawn)], both[len(drawn) :]
        return drawn, rewards, of_greedy.repeat_interleave(samples)

    def surrogate(
        self, captioner: Captioner, batch: CaptionBatch, memory: Memory, drawn: Sequence[Hypothesis], advantages: Tensor
    ) -> tuple[Tensor, DecoderOutput]:
        """Return (r(w) - b) log p(w | a) of every caption (N,), and the decoder's output for them.

        Args:
            batch: of the B images of ``memory``.
            drawn: N = B * R captions, those of an image adjacent.
            advantages: (N,), r(w) - b.
        """
        device, images = advantages.device, len(batch.rows)
        captions, lengths = pad_captions([caption.ids for caption in drawn])
        lengths = lengths - torch.tensor([not caption.finished for caption in drawn]).long()  # cut off: no <end>
        image_index = torch.arange(images, device=device).repeat_interleave(len(drawn) // images)
        own = replace(batch, captions=captions.to(device), lengths=lengths.to(device), image_index=image_index)
        output = captioner.teacher_force(own, memory)
        logits = _of_allowed_words(output, self.lengths["min_length"])
        log_probs = losses.step_log_probs(logits, output.targets, output.mask).sum(dim=1)
        return advantages * log_probs, output


@contextmanager
def _dropping_units(decoder: Decoder) -> Iterator[None]:
    """Drop units of the decoder; statistics, and how locations are chosen, stay those of an evaluation.

    So do the annotations and what was computed of them for all words: their dropout, and that of a layer that reads
    them, have no effect.
    """
    decoder.train()
    for attention in decoder.attentions():
        attention.eval()
    if decoder.standardize is not None:
        decoder.standardize.eval()
    if decoder.words is not None and decoder.words.draws:
        decoder.words.eval()
    try:
        yield
    finally:
        decoder.eval()


def _of_allowed_words(output: DecoderOutput, min_length: int) -> Tensor:
    """Return the logits (M, V), at least float32, without the words that are never drawn: p is what was drawn from."""
    rules, logits = Rules.on(output.logits.device, min_length), output.logits
    never = -1e30  # far below any logit, and finite when a kernel sums a row: infinities times 0 are NaN
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).index_fill(-1, rules.always, never)
    early = output.mask.nonzero()[:, 1] < min_length
    end = logits[:, END].masked_fill(early, never)
    return logits.index_copy(1, torch.tensor([END], device=logits.device), end.unsqueeze(1))
