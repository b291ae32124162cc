"""Metrics of single captions as rewards of training, against references that are indexed once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from captioning.data.records import CaptionIndex
from captioning.decoding import Hypothesis
from captioning.errors import InputError
from captioning.evaluation.bleu import bleu_counts_of, sentence_bleu
from captioning.evaluation.cider import CiderD, DocumentFrequencies
from captioning.objective import SelfCriticalTraining
from captioning.vocabulary import END, SPECIALS, Vocabulary

END_WORD = SPECIALS[END]


def words_with_end(index: CaptionIndex) -> list[list[list[str]]]:
    """Return the references of every image of a split as word lists that end with ``END_WORD``."""
    return [[[*caption.split(), END_WORD] for caption in index.references(row)] for row in range(len(index))]


class CaptionReward:
    """The reward of ``SelfCriticalTraining``: a weighted sum of CIDEr-D and sentence BLEU-4.

    The end of a caption counts as a word, in captions and references alike. Otherwise captions learn to break off ("a
    man riding a wave on a"), which costs them nothing and gains n-grams.

    Args:
        options: The weights, and the file of document frequencies.
        index: Records of the training split.
        vocabulary: Vocabulary of the captions' ids.

    Raises:
        InputError: The document frequencies cannot be read, or were counted without the ends of captions.
    """

    def __init__(self, options: SelfCriticalTraining, index: CaptionIndex, vocabulary: Vocabulary) -> None:
        self.options = options
        self.vocabulary = vocabulary
        frequencies = None if options.frequencies is None else DocumentFrequencies.load(Path(options.frequencies))
        if frequencies is not None and END_WORD not in frequencies.counts:
            raise InputError(
                f"objective.frequencies: {options.frequencies} does not count the ends of captions, {END_WORD}; count "
                "them with captioning prepare frequencies, or leave it out"
            )
        self.cider_d = CiderD(words_with_end(index), frequencies=frequencies)

    def __call__(self, rows: Sequence[int], captions: Sequence[Hypothesis]) -> Tensor:
        """Return the reward of every caption, (N,) float32, of these rows of the training split, (N,)."""
        hypotheses = [self.vocabulary.decode(caption.ids) + [END_WORD] * caption.finished for caption in captions]
        reward = self.options.cider_d * self.cider_d.values(hypotheses, rows)
        if self.options.bleu4:
            reward += self.options.bleu4 * sentence_bleu(bleu_counts_of(self.cider_d.index, hypotheses, rows)) / 100
        return torch.from_numpy(reward).float()
