"""Texts to words, and words to texts: English by Penn Treebank rules, splitting at white space, or characters."""

from __future__ import annotations

import functools
import html
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

    description = "Penn Treebank rules as in the COCO toolkit, lower case, without punctuation"
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

# What the COCO toolkit's PTBTokenizer (Stanford CoreNLP 3.4.1) takes for a word. What fits nowhere is dropped: commas,
# quotes, dashes of up to four hyphens, emojis.
_MARKS = "".join(c for c in map(chr, range(0x300, 0xECE)) if unicodedata.category(c)[0] == "M")  # accents, vowel signs
_L, _N = rf"(?:[^\W\d_]|[{_MARKS}])", rf"(?:[^\W_¼-¾]|[{_MARKS}])"  # a letter; a letter or a digit
_A, _Q = r"['\u2019]", r"['\u2019`\u2018]"  # an apostrophe; and what stands for one inside a word
_PART = f"(?:[dol]{_Q}(?={_N}))?{_N}+"  # of a compound
_ABBREVIATIONS = """al apr attys aug ave bldg blvd bros calif capt co col conn corp ct dec dept det dr drs est etc ext
    feb fla fri ft ga gen gov hon inc intl jan jr jul jun ky lt ltd maj mar md mich minn mo mon mr mrs ms mt nev nov
    oct penn ph.d pres prof rd rep rev sen sep sept sgt sq sr st ste tel tenn thu thurs tue tues univ va vs vt wed
    wis"""
_TOKEN = re.compile(
    "|".join(
        (
            r"</?[a-z][a-z0-9_:.-]*/?>|<[!?][a-z-][^>]*>|-[lr][rcs]b-",  # <unk> and other tags, and brackets' names
            r"(?:https?|ftp)://[^\s\"<>|(){}]+[^\s\"'<>|.!?(){},;:&-]|[a-z0-9._%+-]+@[a-z0-9][a-z0-9.-]*[a-z0-9]",
            rf"[@#][^\W\d]\w*|[<>]?[:;=][-o*']?[()dpo\\{{@|](?!{_N})",  # names, topics and smileys
            f"{_N}+(?:-{_L}+){{0,2}}(?:/{_N}+(?:-{_L}+){{0,2}}){{1,2}}",  # and/or
            rf"{_N}+(?:[.,]{_N}*)*(?:-{_N}+(?:\.\d+)?)+|{_PART}(?:[-_]{_PART})+",  # 3.5-inch, jack-o'lantern
            rf"(?:[a-z](?:\.[a-z])+|{'|'.join(_ABBREVIATIONS.split())})\.(?!{_L})",  # u.s., st.
            f"(?:can(?=not)|(?:gon|wan)(?=na)|got(?=ta)|(?:lem|gim)(?=me))(?=(?:not|na|ta|me)(?!-?{_N}))",
            f"{_L}*[a-mo-z](?=n{_Q}t)|n{_Q}t(?!{_L})|'t(?=(?:is|was)(?!{_L}))|{_A}(?:[msd]|re|ve|ll)(?!{_L})",
            rf"{_A}(?:n{_A}|(?:n|em|till?|cause|[2-9]0s)(?!{_L}))|{_A}\d\d(?!\S)|y{_A}(?={_L})|(?:ol|somethin){_A}(?!{_N})",
            # o'clock, don'ts, ma'am
            f"(?:[dlo]{_Q}(?!(?:re|ve|ll)(?!{_L})){_N}|c{_A}mon|li{_A}l|n{_Q}{_L}{{2}}|{_L}+[aeiouy]{_Q}[aeiou]){_N}*",
            rf"[+-]?\d*(?:[.,]\d+)+|\d+(?:[.:,]\d+)+|[+-]\d+|{_L}{_N}*(?:[.!?]{_L}{_N}*)*|{_N}+",
            r"-{5,}|[?!]{2,}|@+|#+|_+|\*+|[][(){}<>=+%&~^|\\$/¡-ª¬®-º¼-¿\xd7÷€£„\u201a•·°™†‡]",
        )
    )
)
_CLOSING_QUOTE = re.compile(rf"\u2019(?=(?:[msd]|re|ve|ll)(?!{_L}))|(?<=n)\u2019(?=t(?!{_L}))")  # of 's and n't
_BRACKETS = {"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"}
_SPELT = str.maketrans(_BRACKETS | {"½": "1/2", "¼": "1/4", "¾": "3/4", "€": "$", "£": "#", "¢": "cents"})


def tokenize(text: str) -> list[str]:
    """Return the words of ``text``: Penn Treebank rules, lower case, punctuation dropped."""
    text = html.unescape(text) if "&" in text and ";" in text else text
    # No rule crosses a space, so words can be split first and cached, which pays for the 592,000 captions of COCO.
    return [word for piece in text.lower().replace("\xad", "").split() for word in _tokenize_piece(piece)]


@functools.lru_cache(maxsize=1 << 16)
def _tokenize_piece(piece: str) -> tuple[str, ...]:
    piece = _CLOSING_QUOTE.sub("'", piece.replace("''", '"'))
    return tuple(word.translate(_SPELT) for word in _TOKEN.findall(piece))
