"""Words to ids and back. <pad>, <start>, <end> and <unk> are four different ids, 0 to 3."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from captioning.errors import InputError, check_range
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


def tokenize_all(texts: Sequence[str]) -> list[str]:
    """Return ``" ".join(tokenize(text))`` of every text, quickly for many: most have no word that a rule changes."""
    found: list[str] = []
    for start in range(0, len(texts), _TOGETHER):
        found += _tokenize_some(texts[start : start + _TOGETHER])
    return found


_TOGETHER = 1 << 14
_GAP, _OTHER = 1, 2
_KINDS = bytes(_GAP if byte in b" \n" else 0 if chr(byte).isalnum() and byte < 128 else _OTHER for byte in range(256))
_LOWER = bytes(range(256)).lower()


class _Pieces(dict[str, str]):
    """What stands between two spaces -> its words, joined by spaces; a line's end is itself."""

    def __missing__(self, piece: str) -> str:
        if len(self) >= 1 << 16:
            self.clear()
        words = "\n" if piece == "\n" else " ".join(word for part in piece.split() for word in _tokenize_piece(part))
        self[piece] = words
        return words


_pieces = _Pieces()


def _tokenize_some(texts: Sequence[str]) -> list[str]:
    """``tokenize_all`` of texts that are searched as one, a line each."""
    joined = "\n".join(texts)
    if joined.count("\n") != len(texts) - 1:
        texts = [text.replace("\n", " ") for text in texts]
        joined = "\n".join(texts)
    content = (joined + "\n").encode("utf-8").replace(b".\n", b"\n").translate(_LOWER)
    lines = content.decode("utf-8").split("\n")[:-1]
    # Of letters and digits with single spaces between them nothing is changed.
    kinds = np.frombuffer(b"\x01" + content.translate(_KINDS), np.uint8)
    unusual = np.flatnonzero(((kinds[1:] & kinds[:-1] & _GAP) | (kinds[1:] & _OTHER)) != 0)
    split = [match.start() for word in CONTRACTIONS if (known := word.encode()) in content
             for match in re.finditer(known, content)]  # fmt: skip
    ends = np.flatnonzero(np.frombuffer(content, np.uint8) == ord("\n"))
    # A gap is found at its second character: at the end of a line, that is the line's own.
    rows = np.unique(np.searchsorted(ends, np.concatenate((unusual, np.array(split, np.int64))))).tolist()
    if rows:
        pieces = " \n ".join([texts[row] for row in rows]).lower().replace(".", " ").split(" ")
        found = " ".join(filter(None, map(_pieces.__getitem__, pieces)))
        for row, line in zip(rows, found.split("\n"), strict=True):
            lines[row] = line.strip(" ")
    return lines


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

        Raises:
            InputError: a number below 1.
        """
        check_range(1, min_count=min_count, max_words=max_size)
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
        except (ValueError, KeyError, TypeError, RecursionError):
            words = None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise InputError(f'{path}: not a vocabulary file, expected {{"words": [...]}}')
        try:
            return cls(words)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


def _some(words: Sequence[str]) -> str:
    return ", ".join(map(repr, words[:3])) + (f" and {len(words) - 3} more" if len(words) > 3 else "")
