"""Words to ids and back. <pad>, <start>, <end> and <unk> are four different ids, 0 to 3."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from captioning.errors import InputError
from captioning.files import write_json

PAD, START, END, UNK = range(4)
SPECIALS = ("<pad>", "<start>", "<end>", "<unk>")

# Tokens that the COCO caption toolkit drops after its Penn Treebank tokeniser.
PUNCTUATION = frozenset("'' ' `` ` -LRB- -RRB- -LCB- -RCB- . ? ! , : - -- ... ; ( ) [ ] { } \" # /".split())


@functools.cache
def _treebank():  # type: ignore[no-untyped-def]
    from nltk.tokenize import TreebankWordTokenizer  # nltk is slow to import, and most uses have tokens already

    return TreebankWordTokenizer()


# The words that Penn Treebank rules split although they are all letters: can not, gim me ..
CONTRACTIONS = frozenset("cannot gimme gonna gotta lemme wanna".split())


def tokenize(text: str) -> list[str]:
    """Return the words of ``text``: Penn Treebank rules, lower case, punctuation dropped."""
    # Splitting at spaces first changes nothing (no rule crosses a space) but makes caching possible: running nltk's
    # rules over the 592,000 captions of COCO would take minutes.
    return [word for piece in text.lower().replace(".", " ").split() for word in _tokenize_piece(piece)]


@functools.lru_cache(maxsize=1 << 16)
def _tokenize_piece(piece: str) -> tuple[str, ...]:
    if piece.isascii() and piece.isalnum() and piece not in CONTRACTIONS:
        return (piece,)  # no rule changes it
    return tuple(word for word in _treebank().tokenize(piece) if word not in PUNCTUATION)


class Vocabulary:
    """The words a model knows, in a fixed order after the four special tokens.

    Args:
        words: distinct words without the special tokens; word ``i`` gets id ``i + 4``.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self._ids = {word: i for i, word in enumerate(SPECIALS + self.words)}
        if len(self._ids) != len(SPECIALS) + len(self.words):
            twice = [word for word, n in Counter(SPECIALS + self.words).items() if n > 1]
            raise InputError(f"words must be distinct and not special tokens, got {twice[:3]} twice")

    @classmethod
    def build(cls, captions: Iterable[Sequence[str]], *, min_count: int = 1, max_size: int | None = None) -> Vocabulary:
        """Count the words of tokenised training captions and keep the frequent ones, most frequent first.

        Args:
            captions: word lists of the **training** split.
            min_count: a word seen less often becomes ``<unk>``.
            max_size: at most this many words, not counting the special tokens.
        """
        counts = Counter(word for words in captions for word in words)
        kept = sorted((word for word, n in counts.items() if n >= min_count), key=lambda word: (-counts[word], word))
        return cls([word for word in kept if word not in SPECIALS][:max_size])

    def __len__(self) -> int:
        return len(SPECIALS) + len(self.words)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.words == other.words

    def __hash__(self) -> int:
        return hash(self.words)

    def __contains__(self, word: str) -> bool:
        return word in self._ids and word not in SPECIALS

    def encode(self, words: Iterable[str]) -> list[int]:
        """Return the ids of ``words``, without <start> and <end>. A word outside the vocabulary becomes <unk>."""
        return [i if (i := self._ids.get(word, UNK)) > UNK else UNK for word in words]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the words up to the first <end>; <pad> and <start> are left out, <unk> stays visible."""
        words = []
        for i in ids:
            if i == END:
                break
            if i not in (PAD, START):
                words.append(SPECIALS[i] if i < len(SPECIALS) else self.words[i - len(SPECIALS)])
        return words

    def difference(self, words: Sequence[str]) -> str:
        """Return in a few words where a list of words first differs from this one, "" where it does not."""
        gone, new = [word for word in words if word not in self], sorted(set(self.words) - set(words))
        if gone or new:
            parts = [_some(found) + where for found, where in ((gone, " only there"), (new, " only here")) if found]
            return " and ".join(parts)
        pairs = enumerate(zip(words, self.words, strict=False), 1)
        moved = (f"word {i} is {there!r} there and {here!r} here" for i, (there, here) in pairs if there != here)
        return next(moved, "")

    def save(self, path: str | Path) -> None:
        """Write ``{"words": [...]}`` as JSON."""
        write_json(Path(path), {"words": self.words}, indent=0)

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read what ``save`` wrote.

        Raises:
            InputError: the file is missing or is not a vocabulary.
        """
        try:
            words = json.loads(Path(path).read_text(encoding="utf-8"))["words"]
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
        except (ValueError, KeyError, TypeError):
            words = None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise InputError(f'{path}: not a vocabulary file, expected {{"words": [...]}}')
        try:
            return cls(words)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


def _some(words: Sequence[str]) -> str:
    return ", ".join(map(repr, words[:3])) + (f" and {len(words) - 3} more" if len(words) > 3 else "")
