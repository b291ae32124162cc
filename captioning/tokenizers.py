"""Texts to words, and words to texts: English by Penn Treebank rules, splitting at white space, or characters."""

import functools
import html
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence


class Tokenizer(ABC):
    """Splits captions into words, for vocabulary and metrics, and joins words into a text.

    Constructors take no arguments: a checkpoint names a tokenizer by its class.

    Attributes:
        description: How a text is split, for reports of metrics.
        english: Whether METEOR, which knows only English, can be computed.
    """

    description = "split by a user's tokenizer"
    english = False

    @abstractmethod
    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text. No word is empty or contains white space."""

    def join(self, words: Sequence[str]) -> str:
        """Return the words as people write them."""
        return " ".join(words)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class PennTreebank(Tokenizer):
    """English by Penn Treebank rules: lower case, without punctuation, contractions split."""

    description = "Penn Treebank rules (nltk), lower case, without punctuation, as in the COCO toolkit"
    english = True

    def tokenize(self, text: str) -> list[str]:
        text = html.unescape(text) if "&" in text and ";" in text else text
        text = text.lower().translate(_PLAIN).replace("''", " ").replace("--", " ")
        # No rule crosses a space, so pieces between spaces are cached: nltk's rules take minutes for 592,000 captions.
        return [word for piece in _ATOMS.sub(r" \g<0> ", text).split() for word in _tokenize_piece(piece)]


class Whitespace(Tokenizer):
    """Splits at white space alone: for captions that another program has tokenized."""

    description = "split at white space, unchanged"

    def tokenize(self, text: str) -> list[str]:
        return text.split()


class Characters(Tokenizer):
    """Splits Chinese and Japanese into characters; letters of alphabets and digits stay together.

    Wide and narrow forms become one (NFKC), capitals become lower case, and punctuation is dropped. Combining
    marks, such as the vowel signs of Devanagari, are lost.
    """

    description = "characters, words of alphabets kept together (NFKC), lower case, without punctuation"

    def tokenize(self, text: str) -> list[str]:
        return _CHARACTERS.findall(unicodedata.normalize("NFKC", text).lower())

    def join(self, words: Sequence[str]) -> str:
        """Return the words without spaces, except between two words of alphabets."""
        return _BESIDE_IDEOGRAPH.sub("", " ".join(words))


_BESIDE_IDEOGRAPH = re.compile("(?<=[\u2e80-\U0010ffff]) | (?=[\u2e80-\U0010ffff])")
_CHARACTERS = re.compile("[^\\W_\u2e80-\U0010ffff]+|[^\\W_]")

# The COCO toolkit's PTBTokenizer (Stanford CoreNLP 3.4.1) replaces these marks by plain ones, or drops them.
_PLAIN = str.maketrans(
    dict.fromkeys("\u2019\u2018`", "'") | dict.fromkeys('"“”«»\u2013—…', " ") | {"\xad": "", "*": " * "}
)
# Words that stay whole: <unk> and other tags, !!, #topic, u.s., and -lrb-, this tokenizer's word for a bracket.
_ATOMS = re.compile(r"</?[a-z][\w:.-]*/?>|[?!]{2,}|[„\u201a]|#[a-z]\w*|\b(?:[a-z]\.){2,}|-[lr][rsc]b-|/(?!\w)|(?<!\w)/")
_OPENING = re.compile(r"(?<![\w.])'+(?=\w)(?!(?:[smd]|re|ve|ll|n|em|til|cause)\b|\d0s|t(?:is|was))")  # a quote, not 's
_BRACKETS = {"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"}
_PUNCTUATION = frozenset("' . ? ! , : ;".split())

# Words of letters alone that Penn Treebank rules split: can not, gim me ..
_CONTRACTIONS = frozenset("cannot gimme gonna gotta lemme wanna".split())


@functools.lru_cache(maxsize=1 << 16)
def _tokenize_piece(piece: str) -> tuple[str, ...]:
    if (piece.isascii() and piece.isalnum() and piece not in _CONTRACTIONS) or _ATOMS.fullmatch(piece):
        return (piece,)  # no rule changes it
    from nltk.tokenize import TreebankWordTokenizer  # slow to import, and rarely needed

    words = TreebankWordTokenizer().tokenize(_OPENING.sub("", piece.strip("-.")))
    return tuple(_BRACKETS.get(word, word) for word in words if word.strip("-.") and word not in _PUNCTUATION)
