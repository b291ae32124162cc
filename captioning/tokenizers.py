"""Texts to words, and words to texts: English by Penn Treebank rules, what stands between spaces, or characters."""

from __future__ import annotations

import functools
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np


class Tokenizer(ABC):
    """Makes words of captions, for the vocabulary and for scores, and a text of a caption's words.

    Constructors take no arguments: a checkpoint names a tokenizer by its class.

    Attributes:
        description: what is done to a text, for reports of scores.
        english: METEOR and SPICE, which know no other language, can be computed.
    """

    description: str
    english = False

    @abstractmethod
    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text, none of them empty or with white space in it."""

    def tokenize_all(self, texts: Sequence[str]) -> list[str]:
        """Return ``" ".join(tokenize(text))`` of every text."""
        return [" ".join(self.tokenize(text)) for text in texts]

    def join(self, words: Sequence[str]) -> str:
        """Return the words as people write them."""
        return " ".join(words)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class PennTreebank(Tokenizer):
    """English by Penn Treebank rules: lower case, without punctuation, contractions split."""

    description = (
        "Penn Treebank rules in Python (nltk), lower case, without punctuation; not the COCO toolkit's Java program"
    )
    english = True

    def tokenize(self, text: str) -> list[str]:
        return tokenize(text)

    def tokenize_all(self, texts: Sequence[str]) -> list[str]:
        return tokenize_all(texts)


class Whitespace(Tokenizer):
    """What stands between white space, as it is: captions that another program has made words of."""

    description = "what stands between white space, unchanged"

    def tokenize(self, text: str) -> list[str]:
        return text.split()


class Characters(Tokenizer):
    """Every character is a word, as Chinese and Japanese are written; letters of alphabets and digits stay together.

    Wide and narrow forms are one (NFKC), capitals become small, punctuation is dropped.
    """

    description = "characters, words of alphabets kept together (NFKC), lower case, without punctuation"

    def tokenize(self, text: str) -> list[str]:
        return _CHARACTERS.findall(unicodedata.normalize("NFKC", text).lower())

    def join(self, words: Sequence[str]) -> str:
        """Return the words without spaces, but between two of alphabets."""
        text = ""
        for word in words:
            text += " " * bool(text and text[-1] < _FIRST_IDEOGRAPH and word[0] < _FIRST_IDEOGRAPH) + word
        return text


_FIRST_IDEOGRAPH = "\u2e80"
_CHARACTERS = re.compile(rf"[^\W_{_FIRST_IDEOGRAPH}-\U0010ffff]+|[^\W_]")

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
