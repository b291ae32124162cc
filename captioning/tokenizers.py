"""Texts to words, and words to texts: English by Penn Treebank rules, splitting at white space, or characters."""

from __future__ import annotations

import functools
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence


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


@functools.lru_cache(maxsize=1 << 16)
def _tokenize_piece(piece: str) -> tuple[str, ...]:
    if piece.isascii() and piece.isalnum() and piece not in CONTRACTIONS:
        return (piece,)  # no rule changes it
    return tuple(word for word in _treebank().tokenize(piece) if word not in PUNCTUATION)
