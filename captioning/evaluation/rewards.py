"""Metrics of single captions as rewards of training, against references that are indexed once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from captioning.data.records import CaptionIndex
from captioning.decoding import Hypothesis
from captioning.evaluation.bleu import bleu_counts, sentence_bleu
from captioning.evaluation.cider import CiderD
from captioning.objective import SelfCriticalTraining
from captioning.vocabulary import END, SPECIALS, Vocabulary

END_WORD = SPECIALS[END]


class CaptionReward:
    """The reward of ``SelfCriticalTraining``, which has the weights of CIDEr-D and of sentence BLEU-4.

    The end of a caption counts as a word, in captions and references alike. Otherwise captions learn to break off ("a
    man riding a wave on a"), which costs them nothing and gains n-grams.
    """

    def __init__(self, options: SelfCriticalTraining, index: CaptionIndex, vocabulary: Vocabulary) -> None:
        self.options, self.vocabulary = options, vocabulary
        references = ([caption.split() for caption in index.references(row)] for row in range(len(index)))
        self.cider_d = CiderD([[[*words, END_WORD] for words in of_image] for of_image in references])

    def __call__(self, rows: Sequence[int], captions: Sequence[Hypothesis]) -> Tensor:
        """Return the reward of every caption, (N,) float32, of these rows of the training split, (N,)."""
        hypotheses = [self.vocabulary.decode(caption.ids) + [END_WORD] * caption.finished for caption in captions]
        reward = self.options.cider_d * self.cider_d.values(hypotheses, rows)
        if self.options.bleu4:
            reward += self.options.bleu4 * sentence_bleu(bleu_counts(hypotheses, self.cider_d.index, rows))[:, 3] / 100
        return torch.from_numpy(reward).float()
