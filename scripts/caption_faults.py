"""Two faults of captions that hardly change metrics, counted by rules: sentences that break off or repeat a noun.

The rules are not exact. They also find both faults in captions that people wrote, whose percentages are the scale.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

_ARTICLES = "a an the another his her their its my your this that these those some"
_PREPOSITIONS = "of in on at with to from by into onto near beside between behind under above among against for as like"
_CONJUNCTIONS = "and or while but is are was were has have being that which who"
_ADJECTIVES = """black white red blue green yellow brown pink orange purple grey gray dark light bright large small big
little tall long short old young wooden metal colorful blond several many very two-story multi-colored"""
OPEN = frozenset(" ".join([_ARTICLES, _PREPOSITIONS, _CONJUNCTIONS, _ADJECTIVES]).split())
"""Words that a sentence does not end with."""

_FUNCTION = OPEN | frozenset(
    """he she it they him them one two three four five other up down out off over through across along around next front
    top side back while their there here each person's""".split()
)
MIN_OCCURRENCES = 10  # occurrences of a trigram from which it is judged whether it ends captions
MAX_FINAL_FRACTION = 0.01  # fraction of them that end a caption


class FaultRules:
    """Judges captions by the training captions, which are lists of words.

    Half a compound ("a man in a baseball") is recognized by the last three words: the training captions have them at
    least 10 times, and end with them in fewer than 1 % of these cases.
    """

    def __init__(self, training_captions: Iterable[Sequence[str]]) -> None:
        self._trigram_count, self._final_count = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
        for words in training_captions:
            trigrams = list(zip(words, words[1:], words[2:], strict=False))
            self._trigram_count.update(trigrams)
            self._final_count.update(trigrams[-1:])

    def breaks_off(self, words: Sequence[str]) -> bool:
        """Return whether a caption ends in an article, preposition, conjunction or adjective, or in half a compound."""
        last = tuple(words[-3:])
        count = self._trigram_count[last]
        halved = count >= MIN_OCCURRENCES and self._final_count[last] < MAX_FINAL_FRACTION * count
        return not words or words[-1] in OPEN or halved

    @staticmethod
    def repeats(words: Sequence[str]) -> bool:
        """Return whether a content word stands twice after the same article ("a boat on a boat") or twice in a row."""
        pairs = [pair for pair in pairwise(words) if pair[1] not in _FUNCTION]
        return len(set(pairs)) < len(pairs) or any(first == second for first, second in pairs)

    def faults(self, captions: Sequence[Sequence[str]]) -> dict[str, float]:
        """Return the percentages of captions that break off and that repeat."""
        counts = {
            "breaks_off": sum(map(self.breaks_off, captions)),
            "repeats": sum(map(self.repeats, captions)),
        }
        return {name: round(100 * count / len(captions), 2) for name, count in counts.items()}
