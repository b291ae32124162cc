"""Five ways to describe a scene. Given the scene and the style, the words are fixed.

Colour, texture and noun are said of every object, the size in scenes of one or two. Objects are mentioned from left
to right, or from right to left, and a relation is along the longer axis, so a caption can only be right or wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from captioning.data.shape_world.scene import Shape, place, relation

STYLES = 5
SIZED = 2  # the size is said in scenes of at most so many objects

# By the number of objects, then by style. ``A`` to ``D`` are the objects from left to right; ``AB`` is where A stands
# seen from B ("left of"), ``AB+`` the same at length ("to the left of"), ``AB~`` with a pronoun ("to its left");
# ``@`` is the place in the picture.
TEMPLATES: dict[int, tuple[str, str, str, str, str]] = {
    1: (
        "A @",
        "there is A @ of the picture",
        "the picture shows A @",
        "we see only A @",
        "@ is A",
    ),
    2: (
        "A AB B",
        "there is A AB+ B",
        "the picture shows B BA A",
        "we see A and B BA~",
        "BA+ A is B",
    ),
    3: (
        "A AB B BC C",
        "there is A AB+ B BC C",
        "the picture shows C CB B BA A",
        "we see B with A AB~ and C CB~",
        "BA+ A is B BC C",
    ),
    4: (
        "A AB B and C CD D",
        "there is A AB B with C CD D",
        "the picture shows D DC C and B BA A",
        "from left to right we see A B C and D",
        "BA A is B and DC C is D",
    ),
}

# The last two styles use these words instead.
SYNONYMS = {
    "large": "big",
    "small": "little",
    "dotted": "spotted",
    "checkered": "checked",
    "circle": "disc",
    "square": "box",
    "cross": "plus",
    "ring": "hoop",
    "above": "over",
    "below": "under",
}
SYNONYM_STYLES = (3, 4)

PLACE_WORDS = {
    "left": "on the left",
    "right": "on the right",
    "top": "at the top",
    "bottom": "at the bottom",
    "middle": "in the middle",
}
RELATION_WORDS = {  # short, long, with a pronoun
    "left": ("left of", "to the left of", "to its left"),
    "right": ("right of", "to the right of", "to its right"),
    "above": ("above", "above", "above it"),
    "below": ("below", "below", "below it"),
}


def describe(shapes: Sequence[Shape], style: int) -> list[str]:
    """Return the lower-case words of ``shapes`` (one to four, from left to right) in one of the ``STYLES``."""
    words: list[str] = []
    for token in TEMPLATES[len(shapes)][style].split():
        if token == "@":
            words += PLACE_WORDS[place(shapes[0])].split()
        elif token in ("A", "B", "C", "D"):
            words += _noun_phrase(shapes["ABCD".index(token)], sized=len(shapes) <= SIZED)
        elif token.isupper():
            here, there = (shapes["ABCD".index(letter)] for letter in token[:2])
            words += RELATION_WORDS[relation(here, there)][" +~".index(token[2:] or " ")].split()
        else:
            words.append(token)
    return [SYNONYMS.get(word, word) for word in words] if style in SYNONYM_STYLES else words


def _noun_phrase(shape: Shape, *, sized: bool) -> list[str]:
    size = [shape.size] if sized else []
    texture = [shape.texture] if shape.texture != "plain" else []
    adjectives = [*size, *texture, shape.colour]
    article = "an" if adjectives[0][0] in "aeiou" else "a"
    return [article, *adjectives, shape.noun]
