"""Read a caption back: which objects it mentions and where it says that they stand. The inverse of ``grammar``.

The words of a model can be anything: the reader takes what it understands and skips the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from captioning.data.shape_world.grammar import ORDER, PLACE_WORDS, RELATION_WORDS, SYNONYMS
from captioning.data.shape_world.scene import COLOURS, NOUNS, SIZES, TEXTURES


@dataclass(frozen=True)
class Mention:
    """A noun phrase without its synonyms: "a little spotted box" is a small dotted square. None: not said."""

    noun: str | None = None
    colour: str | None = None
    texture: str | None = None
    size: str | None = None


class StatedRelation(NamedTuple):
    """Mention ``subject`` is said to stand in a direction from mention ``other``; None where the caption names none."""

    subject: int | None
    direction: str
    other: int | None


class StatedPlace(NamedTuple):
    """Mention ``subject`` is said to stand at a place of the picture; None where the caption names none."""

    subject: int | None
    place: str


class Reading(NamedTuple):
    """What a caption says. ``ordered``: it says that the mentions go from left to right."""

    mentions: list[Mention]
    relations: list[StatedRelation]
    places: list[StatedPlace]
    ordered: bool


@dataclass(frozen=True)
class _Relation:
    direction: str
    pronoun: bool  # "above it": the other object is the caption's first


@dataclass(frozen=True)
class _Place:
    place: str


@dataclass(frozen=True)
class _Order:
    pass


_Item = Mention | _Relation | _Place | _Order | None

_MAIN = {synonym: word for word, synonym in SYNONYMS.items()}
_KINDS = {
    word: kind
    for kind, words in {"noun": NOUNS, "colour": COLOURS, "texture": TEXTURES, "size": SIZES}.items()
    for word in words
}
_SAYINGS: dict[tuple[str, ...], _Item] = (
    {tuple(words.split()): _Place(place) for place, words in PLACE_WORDS.items()}
    | {
        tuple(words.split()): _Relation(direction, pronoun=form == 2)
        for direction, forms in RELATION_WORDS.items()
        for form, words in enumerate(forms)
    }
    | {tuple(ORDER.split()): _Order()}
)
_LONGEST = max(map(len, _SAYINGS))


def read(words: Sequence[str]) -> Reading:
    """Return what the words of a caption say, whichever style or synonyms they use."""
    items = list(_items([_MAIN.get(word, word) for word in words]))
    mentions = [item for item in items if isinstance(item, Mention)]
    numbers, count = [], 0  # of the mention at each item, None for another item
    for item in items:
        numbers.append(count if isinstance(item, Mention) else None)
        count += isinstance(item, Mention)
    numbers += [None, None]  # read at -1 and behind the last item
    relations, places = [], []
    for i, item in enumerate(items):
        before, after = numbers[i - 1], numbers[i + 1]
        if isinstance(item, _Place):
            # "a red star on the left", or "on the left is a red star".
            places.append(StatedPlace(_first(numbers[i:]) if before is None else before, item.place))
        elif isinstance(item, _Relation) and item.pronoun:
            relations.append(StatedRelation(before, item.direction, 0 if before else None))
        elif isinstance(item, _Relation):
            # "A left of B", or "left of B is A".
            subject = _first(numbers[i + 2 :]) if before is None else before
            relations.append(StatedRelation(subject, item.direction, after))
    return Reading(mentions, relations, places, ordered=_Order() in items)


def _first(numbers: Sequence[int | None]) -> int | None:
    return next((number for number in numbers if number is not None), None)


def _items(words: Sequence[str]) -> Iterator[_Item]:
    """Yield what the words say in turn; None for a word that says nothing by itself. Articles are left out."""
    phrase: dict[str, str] = {}
    position = 0
    while position < len(words):
        word = words[position]
        kind = _KINDS.get(word)
        if kind is not None:
            phrase[kind] = word
            position += 1
        if phrase and (kind is None or kind == "noun"):
            yield Mention(**phrase)
            phrase = {}
        if kind is None:
            length = _length_of_saying(words, position)
            if length:
                yield _SAYINGS[tuple(words[position : position + length])]
            elif word not in ("a", "an"):
                yield None
            position += max(1, length)
    if phrase:
        yield Mention(**phrase)


def _length_of_saying(words: Sequence[str], start: int) -> int:
    """Return the number of words of the longest saying that begins at ``start``; 0 if there is none."""
    lengths = range(min(_LONGEST, len(words) - start), 0, -1)
    return next((n for n in lengths if tuple(words[start : start + n]) in _SAYINGS), 0)
