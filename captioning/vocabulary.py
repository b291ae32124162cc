"""Words to ids and back. <pad>, <start>, <end> and <unk> are four different ids, 0 to 3."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from captioning.component import known_class
from captioning.errors import InputError
from captioning.files import read_json, write_json
from captioning.tokenizers import PennTreebank, Tokenizer

PAD, START, END, UNK = range(4)
SPECIALS = ("<pad>", "<start>", "<end>", "<unk>")

FUNCTION_WORDS = (
    "a an the this that these those some another each both and or but as while with without of to from for by at in on "
    "into onto over under up down out off through across along around behind between near next beside against above "
    "after before during is are was were be being been has have had do does it its they them their he his him she her "
    "who which what where there very other one"
).split()
"""English words that name nothing in a photo."""


class Vocabulary:
    """The words that a model knows, in a fixed order after the four special tokens.

    Args:
        words: Distinct texts without the special tokens; word ``i`` gets id ``i + 4``.
        tokenizer: The tokenizer that the words come from.
    """

    def __init__(self, words: Sequence[str], tokenizer: Tokenizer = PennTreebank()) -> None:  # noqa: B008 - no state
        self.words = tuple(words)
        self.tokenizer = tokenizer
        self._by_id = SPECIALS + self.words
        self._ids = {word: i for i, word in enumerate(self._by_id)}
        if twice := [word for word, n in Counter(self._by_id).items() if n > 1]:
            raise InputError(f"words must be distinct and not special tokens, got {twice[:3]} twice")

    @classmethod
    def build(
        cls,
        captions: Iterable[Sequence[str]],
        *,
        min_count: int = 1,
        max_words: int | None = None,
        tokenizer: Tokenizer = PennTreebank(),  # noqa: B008 - no state
    ) -> Vocabulary:
        """Count the words of tokenized **training** captions and keep the frequent ones, most frequent first.

        A word with fewer occurrences than ``min_count`` becomes <unk>; ``max_words`` does not count special tokens.
        """
        counts = Counter(word for words in captions for word in words)
        frequent = [word for word, n in counts.items() if n >= min_count and word not in SPECIALS]
        return cls(sorted(frequent, key=lambda word: (-counts[word], word))[:max_words], tokenizer)

    def __len__(self) -> int:
        return len(self._by_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and (self.words, self.tokenizer) == (other.words, other.tokenizer)

    def __contains__(self, word: str) -> bool:
        return word in self._ids and word not in SPECIALS

    def encode(self, words: Iterable[str]) -> list[int]:
        """Return the ids of ``words``, without <start> and <end>. A word outside the vocabulary becomes <unk>."""
        return [i if (i := self._ids.get(word, UNK)) > UNK else UNK for word in words]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the words up to the first <end>; <pad> and <start> are left out, <unk> stays visible."""
        until_end = itertools.takewhile(lambda i: i != END, ids)
        return [self._by_id[i] for i in until_end if i not in (PAD, START)]

    def extended(self, words: Iterable[str]) -> Vocabulary:
        """Return this vocabulary with the ``words`` that it lacks appended. The ids of its words stay."""
        return Vocabulary([*self.words, *(word for word in words if word not in self)], self.tokenizer)

    def save(self, path: str | Path) -> None:
        """Write ``{"words": [...]}`` as JSON."""
        write_json(Path(path), {"words": self.words}, indent=0)

    @classmethod
    def load(cls, path: str | Path, tokenizer: Tokenizer = PennTreebank()) -> Vocabulary:  # noqa: B008 - no state
        """Read the file of ``save``. Raises InputError if it is missing or is not a vocabulary."""
        content = read_json(Path(path).expanduser())
        words = content.get("words") if isinstance(content, dict) else None
        if not isinstance(words, list):
            raise InputError(f'{path}: not a vocabulary file, expected {{"words": [...]}}')
        return cls(words, tokenizer)


def tokenizer_from(config: Mapping[str, Any] | str | None) -> Tokenizer:
    """Return the tokenizer that a file or an option names. Its module is the package's, or is imported already.

    ``config`` is ``{"class_path": ..}`` or a class path; None is the default, English. Raises InputError if there is no
    such tokenizer.
    """
    path = config.get("class_path") if isinstance(config, Mapping) else config
    if path is None:
        return PennTreebank()
    tokenizer: Any = known_class(path, Tokenizer)
    return tokenizer()
