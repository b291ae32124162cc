"""Texts to words, and words to texts: English by Penn Treebank rules, splitting at white space, or characters."""

from __future__ import annotations

import functools
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np


class Tokenizer(ABC):
    """Splits captions into words, for the vocabulary and for scores, and joins words to a text.

    Constructors take no arguments: a checkpoint names a tokenizer by its class.

    Attributes:
        description: How a text is split, for reports of scores.
        english: Whether METEOR, which knows only English, can be computed.
    """

    description: str
    english = False

    @abstractmethod
    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text. No word is empty or has white space in it."""

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
    """Splits at white space alone: for captions that another program has tokenised."""

    description = "split at white space, unchanged"

    def tokenize(self, text: str) -> list[str]:
        return text.split()


class Characters(Tokenizer):
    """Every character is a word, for Chinese and Japanese; letters of alphabets and digits stay together.

    Wide and narrow forms become one (NFKC), capitals become lower case, and punctuation is dropped.
    """

    description = "characters, words of alphabets kept together (NFKC), lower case, without punctuation"

    def tokenize(self, text: str) -> list[str]:
        return _CHARACTERS.findall(unicodedata.normalize("NFKC", text).lower())

    def join(self, words: Sequence[str]) -> str:
        """Return the words without spaces, except between two words of alphabets."""
        return _BESIDE_IDEOGRAPH.sub("", " ".join(words))


_BESIDE_IDEOGRAPH = re.compile("(?<=[\u2e80-\U0010ffff]) | (?=[\u2e80-\U0010ffff])")
_CHARACTERS = re.compile("[^\\W_\u2e80-\U0010ffff]+|[^\\W_]")

# Tokens that the COCO caption toolkit drops after its Penn Treebank tokeniser.
PUNCTUATION = frozenset("'' ' `` ` -LRB- -RRB- -LCB- -RCB- . ? ! , : - -- ... ; ( ) [ ] { } \" # /".split())


@functools.cache
def _treebank():  # type: ignore[no-untyped-def]
    from nltk.tokenize import TreebankWordTokenizer  # slow to import, and rarely needed

    return TreebankWordTokenizer()


# Words of letters alone that Penn Treebank rules split: can not, gim me ..
CONTRACTIONS = frozenset("cannot gimme gonna gotta lemme wanna".split())


def tokenize(text: str) -> list[str]:
    """Return the words of ``text``: Penn Treebank rules, lower case, punctuation dropped."""
    # No rule crosses a space, so words can be split first and cached: nltk's rules would take minutes for the 592,000
    # captions of COCO.
    return [word for piece in text.lower().replace(".", " ").split() for word in _tokenize_piece(piece)]


def tokenize_all(texts: Sequence[str]) -> list[str]:
    """Return ``" ".join(tokenize(text))`` of every text. Fast for many texts, because rules change few of them."""
    lines: list[str] = []
    for start in range(0, len(texts), _CHUNK):
        lines += _tokenize_chunk(texts[start : start + _CHUNK])
    return lines


_CHUNK = 1 << 14  # texts
_GAP, _OTHER = 1, 2
_KINDS = bytes(_GAP if byte in b" \n" else 0 if chr(byte).isalnum() and byte < 128 else _OTHER for byte in range(256))
_LOWER = bytes(range(256)).lower()
_CONTRACTION = re.compile("|".join(CONTRACTIONS).encode())


class _Pieces(dict[str, str]):
    """Caches the words, joined by spaces, of the text between two spaces; a line's end stays itself."""

    def __missing__(self, piece: str) -> str:
        if len(self) >= 1 << 16:
            self.clear()
        words = "\n" if piece == "\n" else " ".join(word for text in piece.split() for word in _tokenize_piece(text))
        self[piece] = words
        return words


_pieces = _Pieces()


def _tokenize_chunk(texts: Sequence[str]) -> list[str]:
    """Return ``tokenize_all`` of texts, which are joined to lines and searched at once."""
    joined = "\n".join(texts)
    if joined.count("\n") != len(texts) - 1:
        texts = [text.replace("\n", " ") for text in texts]
        joined = "\n".join(texts)
    content = (joined + "\n").encode("utf-8").replace(b".\n", b"\n").translate(_LOWER)
    lines = content.decode("utf-8").split("\n")[:-1]
    # A line of letters and digits with single spaces between them needs no change.
    kinds = np.frombuffer(b"\x01" + content.translate(_KINDS), np.uint8)
    unusual = np.flatnonzero(((kinds[1:] & kinds[:-1] & _GAP) | (kinds[1:] & _OTHER)) != 0)
    contractions = [match.start() for match in _CONTRACTION.finditer(content)]
    ends = np.flatnonzero(np.frombuffer(content, np.uint8) == ord("\n"))
    # A gap is noticed at its second character, which at the end of a line still belongs to that line.
    places = np.concatenate((unusual, np.array(contractions, np.int64)))
    changed = np.unique(np.searchsorted(ends, places)).tolist()
    if changed:
        pieces = " \n ".join([texts[i] for i in changed]).lower().replace(".", " ").split(" ")
        words = " ".join(filter(None, map(_pieces.__getitem__, pieces)))
        for i, line in zip(changed, words.split("\n"), strict=True):
            lines[i] = line.strip(" ")
    return lines


@functools.lru_cache(maxsize=1 << 16)
def _tokenize_piece(piece: str) -> tuple[str, ...]:
    if piece.isascii() and piece.isalnum() and piece not in CONTRACTIONS:
        return (piece,)  # no rule changes it
    return tuple(word for word in _treebank().tokenize(piece) if word not in PUNCTUATION)
