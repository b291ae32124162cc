"""Judge a caption by the scene: colour, shape, size, pattern, relations and place, each right or wrong.

A caption may describe the objects in any order and with any synonym. Its mentions are matched to the objects so that
most words are right, then most relations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from captioning.data.attributes import JudgedAttribute
from captioning.data.shape_world.grammar import SIZED
from captioning.data.shape_world.reading import Mention, Reading, read
from captioning.data.shape_world.scene import AXIS_MARGIN, RELATED, TEXTURES, Described, place, relation

# Name of an attribute -> field of ``Described`` and ``Mention``.
_OF_OBJECTS = {"colour": "colour", "shape": "noun", "size": "size", "pattern": "texture"}
_PLAIN = TEXTURES[0]
_MOST_MENTIONS = 6  # are matched to objects, of which there are at most four; a caption that goes round has more

Matching = dict[int, Described]
"""The object of each mention; without those that are left over when every object has one."""


def judge(scene: Sequence[Described], words: Sequence[str]) -> list[JudgedAttribute]:
    """Return what a caption says of a scene (one to four objects from left to right), and what it leaves out.

    Left out is what the references say: of every object its colour, shape and, if it has one, its pattern, and in
    scenes of at most two its size. What is said of an object that is not there is wrong.
    """
    reading = read(words)
    matching = _match(scene, reading)
    judged = [*_objects(scene, reading, matching), *_relations(reading, matching), *_places(reading, matching)]
    for attribute, expected in {"relation": len(RELATED[len(scene)]), "place": int(len(scene) == 1)}.items():
        said = sum(item.attribute == attribute for item in judged)
        judged += [JudgedAttribute(attribute, None, None, False)] * (expected - said)
    return judged


def _match(scene: Sequence[Described], reading: Reading) -> Matching:
    """Return the matching of mentions and objects with most words right, then with most relations right."""
    mentions, objects = range(min(_MOST_MENTIONS, len(reading.mentions))), range(len(scene))
    if len(mentions) < len(objects):
        pairings = [list(zip(mentions, taken, strict=True)) for taken in permutations(objects, len(mentions))]
    else:
        pairings = [list(zip(taken, objects, strict=True)) for taken in permutations(mentions, len(objects))]
    words = [[_words_right(reading.mentions[mention], item) for item in scene] for mention in mentions]
    totals = [sum(words[mention][number] for mention, number in pairs) for pairs in pairings]
    best = [pairs for pairs, total in zip(pairings, totals, strict=True) if total == max(totals)]
    matchings = [{mention: scene[number] for mention, number in pairs} for pairs in best]
    return max(matchings, key=lambda matching: sum(item.right for item in _relations(reading, matching)))


def _words_right(mention: Mention, item: Described) -> int:
    return sum(getattr(mention, field) == getattr(item, field) for field in _OF_OBJECTS.values())


def _objects(scene: Sequence[Described], reading: Reading, matching: Matching) -> Iterator[JudgedAttribute]:
    """Judge the words of every mention, and yield what no mention says of an object."""
    pairs: list[tuple[Mention, Described | None]] = [
        (mention, matching.get(number)) for number, mention in enumerate(reading.mentions)
    ]
    pairs += [(Mention(), item) for item in scene if item not in matching.values()]
    for mention, item in pairs:
        for attribute, field in _OF_OBJECTS.items():
            said, true = getattr(mention, field), getattr(item, field, None)
            in_references = true not in (None, _PLAIN) and (attribute != "size" or len(scene) <= SIZED)
            if said is not None or in_references:
                yield JudgedAttribute(attribute, said, true, said is not None and said == true)


def _relations(reading: Reading, matching: Matching) -> Iterator[JudgedAttribute]:
    """Judge every relation, and the order of the mentions where the caption says that it is from left to right."""
    for subject, direction, other in reading.relations:
        here, there = _of(subject, matching), _of(other, matching)
        if here is None or there is None or here is there:
            yield JudgedAttribute("relation", direction, None, False)
        else:
            yield JudgedAttribute("relation", direction, relation(here, there), direction in _directions(here, there))
    if reading.ordered:
        for number in range(len(reading.mentions) - 1):
            here, there = matching.get(number), matching.get(number + 1)
            if here is None or there is None:
                yield JudgedAttribute("relation", "left", None, False)
            else:
                true = "left" if here.x < there.x else "right"
                yield JudgedAttribute("relation", "left", true, true == "left")


def _directions(here: Described, there: Described) -> set[str]:
    """Return every direction that is true: both, where the displacement is about as long along one axis as the other.

    No reference states such a relation.
    """
    dx, dy = here.x - there.x, here.y - there.y
    if abs(abs(dx) - abs(dy)) >= AXIS_MARGIN / 2:  # half: of overlapping objects, the visible centres are known
        return {relation(here, there)}
    return {"left" if dx < 0 else "right", "above" if dy < 0 else "below"}


def _places(reading: Reading, matching: Matching) -> Iterator[JudgedAttribute]:
    for subject, said in reading.places:
        item = _of(subject, matching)
        true = None if item is None else place(item)
        yield JudgedAttribute("place", said, true, said == true)


def _of(mention: int | None, matching: Matching) -> Described | None:
    return None if mention is None else matching.get(mention)
