"""Scenes of one to four objects whose description leaves no room for doubt."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

NOUNS = ("circle", "square", "triangle", "star", "cross", "ring", "heart", "diamond")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "black")
TEXTURES = ("plain", "striped", "dotted", "checkered")
SIZES = ("small", "large")
PLACES = ("left", "right", "top", "bottom", "middle")

# All lengths below are in pixels of a canvas this wide; other canvases scale them.
REFERENCE_SIZE = 112
RADII = {"small": (12.0, 14.0), "large": (18.5, 21.5)}
ORDER_MARGIN = 10.0  # neighbours in left-to-right order stand at least this far apart in x
AXIS_MARGIN = 10.0  # where a relation is stated, the displacement along its axis leads by at least this much
OBJECT_COUNTS = {1: 0.15, 2: 0.3, 3: 0.3, 4: 0.25}
PLAIN = 0.4  # probability of an object without a texture
CLOSEST = 0.65  # of the sum of two radii: how near two centres may come, so that overlaps stay partial

# Which pairs (in left-to-right order) have their relation stated, by the number of objects.
RELATED = {1: (), 2: ((0, 1),), 3: ((0, 1), (1, 2)), 4: ((0, 1), (2, 3))}


@dataclass(frozen=True)
class Shape:
    """One object: its words, its centre and the geometry that it is drawn from (reference pixels, radians)."""

    noun: str
    colour: str
    texture: str
    size: str
    x: float
    y: float
    radius: float
    angle: float
    tint: tuple[float, float, float]  # offsets in [-1, 1] within the colour's range of hue, saturation and value


@dataclass(frozen=True)
class Scene:
    """Objects from left to right, and the order they are painted in: ``painting[0]`` is the hindmost."""

    shapes: tuple[Shape, ...]
    painting: tuple[int, ...]


def sample_scene(rng: np.random.Generator) -> Scene:
    """Draw one scene. No two objects share both colour and noun; stated relations hold by a clear margin."""
    count = int(rng.choice(list(OBJECT_COUNTS), p=list(OBJECT_COUNTS.values())))
    kinds = rng.choice(len(NOUNS) * len(COLOURS), size=count, replace=False)
    while True:
        sizes = [SIZES[int(large)] for large in rng.random(count) < (0.5 if count < 3 else 0.35)]
        radii = [float(rng.uniform(*RADII[size])) for size in sizes]
        centres = _place_one(rng, radii[0]) if count == 1 else _place_several(rng, radii)
        if centres is not None:
            break
    shapes = tuple(
        Shape(
            noun=NOUNS[kind % len(NOUNS)],
            colour=COLOURS[kind // len(NOUNS)],
            texture=TEXTURES[0] if rng.random() < PLAIN else TEXTURES[int(rng.integers(1, len(TEXTURES)))],
            size=size,
            x=x,
            y=y,
            radius=radius,
            angle=float(rng.uniform(-0.2, 0.2)),
            tint=(float(rng.uniform(-1, 1)), float(rng.uniform(-1, 1)), float(rng.uniform(-1, 1))),
        )
        for kind, size, radius, (x, y) in zip(kinds.tolist(), sizes, radii, centres, strict=True)
    )
    return Scene(shapes, tuple(rng.permutation(count).tolist()))


def place(shape: Shape) -> str:
    """Return where in the picture a shape stands: one of ``PLACES``."""
    dx, dy = shape.x - REFERENCE_SIZE / 2, shape.y - REFERENCE_SIZE / 2
    if math.hypot(dx, dy) < 10:
        return "middle"
    if abs(dx) > abs(dy):
        return "left" if dx < 0 else "right"
    return "top" if dy < 0 else "bottom"


def relation(a: Shape, b: Shape) -> str:
    """Return where ``a`` stands seen from ``b`` along the longer axis: left, right, above or below."""
    dx, dy = a.x - b.x, a.y - b.y
    if abs(dx) > abs(dy):
        return "left" if dx < 0 else "right"
    return "above" if dy < 0 else "below"


def _place_one(rng: np.random.Generator, radius: float) -> list[tuple[float, float]]:
    middle, reach = REFERENCE_SIZE / 2, REFERENCE_SIZE / 2 - radius - 2
    where = PLACES[int(rng.integers(len(PLACES)))]
    if where == "middle":
        return [(middle + float(rng.uniform(-5, 5)), middle + float(rng.uniform(-5, 5)))]
    along = float(rng.uniform(22, reach))
    across = float(rng.uniform(-1, 1)) * (along - 12)
    sign = -1 if where in ("left", "top") else 1
    if where in ("left", "right"):
        return [(middle + sign * along, middle + across)]
    return [(middle + across, middle + sign * along)]


def _place_several(rng: np.random.Generator, radii: list[float]) -> list[tuple[float, float]] | None:
    """Try a few times to place centres from left to right; None when the sizes don't seem to fit."""
    low = np.asarray(radii) + 2
    high = REFERENCE_SIZE - low
    distances = CLOSEST * np.add.outer(radii, radii)
    np.fill_diagonal(distances, 0)
    for _ in range(8):  # each try draws 64 layouts at once
        xs, ys = rng.uniform(low, high, (2, 64, len(radii)))
        good = (np.diff(xs, axis=1) >= ORDER_MARGIN).all(axis=1)
        for a, b in RELATED[len(radii)]:
            good &= np.abs(np.abs(xs[:, a] - xs[:, b]) - np.abs(ys[:, a] - ys[:, b])) >= AXIS_MARGIN
        apart = np.hypot(xs[:, :, None] - xs[:, None], ys[:, :, None] - ys[:, None])
        good &= (apart >= distances).all(axis=(1, 2))
        if good.any():
            first = int(good.argmax())
            return [(float(x), float(y)) for x, y in zip(xs[first], ys[first], strict=True)]
    return None
