"""The reward of a caption: a metric against the references of its training image."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from captioning.data.records import CaptionIndex
from captioning.decoding import Hypothesis
from captioning.metrics.bleu import bleu_counts, sentence_bleu
from captioning.metrics.cider import CiderD
from captioning.vocabulary import END, SPECIALS, Vocabulary

END_WORD = SPECIALS[END]

Reward = Callable[[Sequence[int], Sequence[Hypothesis]], Tensor]
"""``reward(index_rows, captions)`` returns rewards (N,) of N captions; ``index_rows`` as in ``CaptionBatch``."""


class CaptionReward:
    """A weighted sum of CIDEr-D and sentence BLEU-4 of a caption. The references are counted once.

    The end of a caption counts as a word, in captions and references alike. Otherwise captions learn to break off ("a
    man riding a wave on a"), which costs them nothing and gains n-grams.

    Args:
        index: The training split.
        cider_d: Weight of CIDEr-D, 0 to 10.
        bleu4: Weight of smoothed sentence BLEU-4, 0 to 1.
    """

    def __init__(self, index: CaptionIndex, vocabulary: Vocabulary, *, cider_d: float, bleu4: float) -> None:
        self.vocabulary, self.cider_d_weight, self.bleu4_weight = vocabulary, cider_d, bleu4
        references = ([caption.split() for caption in index.references(row)] for row in range(len(index)))
        self.cider_d = CiderD([[[*words, END_WORD] for words in image] for image in references])

    def __call__(self, index_rows: Sequence[int], captions: Sequence[Hypothesis]) -> Tensor:
        """Return the rewards (N,), float32."""
        words = [self.vocabulary.decode(caption.ids) + ([END_WORD] if caption.finished else []) for caption in captions]
        reward = self.cider_d_weight * self.cider_d.values(words, index_rows)
        if self.bleu4_weight:
            counts = bleu_counts(words, self.cider_d.ngrams, index_rows)
            reward += self.bleu4_weight * sentence_bleu(counts)[:, 3] / 100
        return torch.from_numpy(reward).float()
