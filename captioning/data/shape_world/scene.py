"""Scenes of one to four objects, and five unambiguous ways to describe each.

A description names color, texture and noun of every object, and the size in scenes of one or two. It mentions objects
from left to right or from right to left, and states relations along the longer axis, so it is either right or wrong.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NOUNS = ("circle", "square", "triangle", "star", "cross", "ring", "heart", "diamond")
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "black")
TEXTURES = ("plain", "striped", "dotted", "checkered")
SIZES = ("small", "large")

# All lengths below are in pixels of a canvas this wide; other canvases scale them.
REFERENCE_SIZE = 112
RADII = {"small": (12.0, 14.0), "large": (18.5, 21.5)}
ORDER_MARGIN = 10.0  # neighbors in left-to-right order stand at least this far apart in x
AXIS_MARGIN = 10.0  # two objects are at least this much farther apart along their relation's axis than across
OBJECT_COUNTS = {1: 0.15, 2: 0.3, 3: 0.3, 4: 0.25}
PLAIN_PROBABILITY = 0.4  # of an object without a texture
CLOSEST = 0.65  # least distance of two centers, as a fraction of their radii's sum, so that overlaps stay partial

# Which pairs (in left-to-right order) have their relation stated, by the number of objects.
RELATED_PAIRS = {1: (), 2: ((0, 1),), 3: ((0, 1), (1, 2)), 4: ((0, 1), (2, 3))}

# By the number of objects, then by style. ``A`` to ``D`` are the objects from left to right. ``AB`` is the direction
# from B to A ("left of"), ``AB+`` its long form ("to the left of"), ``AB~`` its form with a pronoun ("to its left").
# ``@`` is the position in the picture.
TEMPLATES = {
    1: ("A @", "there is A @ of the picture", "the picture shows A @", "we see only A @", "@ is A"),
    2: ("A AB B", "there is A AB+ B", "the picture shows B BA A", "we see A and B BA~", "BA+ A is B"),
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
STYLES = 5
SYNONYM_STYLES = (3, 4)  # styles that use the synonyms below
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
WHERE = {  # in the picture; seen from another object: short, long, with a pronoun
    "left": ("on the left", "left of", "to the left of", "to its left"),
    "right": ("on the right", "right of", "to the right of", "to its right"),
    "above": ("at the top", "above", "above", "above it"),
    "below": ("at the bottom", "below", "below", "below it"),
    "middle": ("in the middle",),
}


class Shape(NamedTuple):
    """One object: its words, its center and the geometry that it is drawn from (reference pixels, radians)."""

    noun: str
    color: str
    texture: str
    size: str
    x: float
    y: float
    radius: float
    angle: float
    tint: tuple[float, ...]  # offsets in [-1, 1] within the color's range of hue, saturation and value


def sample_scene(rng: np.random.Generator) -> tuple[list[Shape], list[int]]:
    """Return objects from left to right, and the order of painting, the hindmost first.

    No two objects share both color and noun; stated relations hold by a clear margin.
    """
    count = int(rng.choice(list(OBJECT_COUNTS), p=list(OBJECT_COUNTS.values())))
    colors_and_nouns = rng.choice(len(NOUNS) * len(COLORS), size=count, replace=False).tolist()
    centers = None
    while centers is None:
        sizes = [SIZES[int(large)] for large in rng.random(count) < (0.5 if count < 3 else 0.35)]
        radii = [float(rng.uniform(*RADII[size])) for size in sizes]
        centers = _place_one(rng, radii[0]) if count == 1 else _place_several(rng, radii)
    shapes = []
    for number, size, radius, (x, y) in zip(colors_and_nouns, sizes, radii, centers, strict=True):
        color, noun = divmod(number, len(NOUNS))
        texture = TEXTURES[0 if rng.random() < PLAIN_PROBABILITY else int(rng.integers(1, len(TEXTURES)))]
        angle, *tint = rng.uniform([-0.2, -1, -1, -1], [0.2, 1, 1, 1]).tolist()
        shapes.append(Shape(NOUNS[noun], COLORS[color], texture, size, x, y, radius, angle, tuple(tint)))
    return shapes, rng.permutation(count).tolist()


def _place_one(rng: np.random.Generator, radius: float) -> list[tuple[float, float]]:
    middle = REFERENCE_SIZE / 2
    side = int(rng.integers(5))  # left, right, top, bottom, middle
    if side == 4:
        return [(middle + float(rng.uniform(-5, 5)), middle + float(rng.uniform(-5, 5)))]
    along = float(rng.uniform(22, middle - radius - 2))
    across = middle + float(rng.uniform(-1, 1)) * (along - 12)
    along = middle + along if side % 2 else middle - along
    return [(along, across) if side < 2 else (across, along)]


def _place_several(rng: np.random.Generator, radii: list[float]) -> list[tuple[float, float]] | None:
    """Try a few times to place centers from left to right. Return None if no layout fits."""
    low = np.asarray(radii) + 2
    least_distances = CLOSEST * np.add.outer(radii, radii)
    np.fill_diagonal(least_distances, 0)
    for _ in range(8):  # each try draws 64 layouts at once
        xs, ys = rng.uniform(low, REFERENCE_SIZE - low, (2, 64, len(radii)))
        is_valid = (np.diff(xs, axis=1) >= ORDER_MARGIN).all(axis=1)
        for a, b in RELATED_PAIRS[len(radii)]:
            is_valid &= np.abs(np.abs(xs[:, a] - xs[:, b]) - np.abs(ys[:, a] - ys[:, b])) >= AXIS_MARGIN
        distances = np.hypot(xs[:, :, None] - xs[:, None], ys[:, :, None] - ys[:, None])
        is_valid &= (distances >= least_distances).all(axis=(1, 2))
        if is_valid.any():
            first = int(is_valid.argmax())
            return list(zip(xs[first].tolist(), ys[first].tolist(), strict=True))
    return None


def describe(shapes: Sequence[Shape], style: int) -> list[str]:
    """Return the lower-case words of ``shapes`` (one to four, from left to right) in one of the ``STYLES``."""
    words: list[str] = []
    for token in TEMPLATES[len(shapes)][style].split():
        if token == "@":
            dx, dy = shapes[0].x - REFERENCE_SIZE / 2, shapes[0].y - REFERENCE_SIZE / 2
            words += WHERE["middle" if math.hypot(dx, dy) < 10 else _direction(dx, dy)][0].split()
        elif token in ("A", "B", "C", "D"):
            shape = shapes["ABCD".index(token)]
            size = [shape.size] if len(shapes) <= 2 else []
            phrase = [*size, *([shape.texture] if shape.texture != "plain" else []), shape.color, shape.noun]
            words += ["an" if phrase[0][0] in "aeiou" else "a", *phrase]
        elif token.isupper():
            shape, other = (shapes["ABCD".index(letter)] for letter in token[:2])
            form = 1 + " +~".index(token[2:] or " ")
            words += WHERE[_direction(shape.x - other.x, shape.y - other.y)][form].split()
        else:
            words.append(token)
    return [SYNONYMS.get(word, word) for word in words] if style in SYNONYM_STYLES else words


def _direction(dx: float, dy: float) -> str:
    if abs(dx) > abs(dy):
        return "left" if dx < 0 else "right"
    return "above" if dy < 0 else "below"
