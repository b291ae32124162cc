"""How often the intervals of captioning/metrics/seeds.py hold the true difference between variants: a simulation.

A run's score of an image is the sum of four effects: of the image on all runs, of the variant on the image, of the seed
on all images, and of this run on this image. The grid crosses the numbers of seeds, the ratio of the variants'
deviations over seeds, the images' fraction of the variance, the number of images and the score: a mean of normal
values, a mean of values with heavy tails (Student's t with three degrees of freedom), or BLEU-4 of captions whose words
are right or wrong.

examples:
  python -m benchmarks.coverage --json docs/measurements/coverage.json
"""

import argparse
import dataclasses
import itertools
import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.random import Generator

from captioning.files import write_json
from captioning.metrics.arrays import Floats
from captioning.metrics.bleu import bleu_from_counts
from captioning.metrics.resampling import Statistic
from captioning.metrics.seeds import SeedDifferences
from captioning.provenance import provenance

SCORES = ("mean", "heavy tails", "BLEU-4")
IMAGES = (200, 1000)
IMAGE_FRACTIONS = (0.1, 0.5, 0.9)
SEEDS = ((2, 2), (3, 3), (4, 4), (5, 5), (2, 5))
PAIRS = (2, 3, 5)
RATIOS = (1.0, 3.0, 10.0)
POWER_AT = 3.0  # true difference, in standard deviations of the measured difference

_IMAGE, _VARIANT, _RUN = 2.0, 1.0, 1.0  # deviations over images, in units of _SCALE
_SCALE = {"mean": 10.0, "heavy tails": 10.0, "BLEU-4": 0.08}
_RIGHT = 0.62  # probability that a word is right, on average
_WORDS = 14  # words of the longest caption
_ELEMENTS = 5_000_000  # elements of the arrays of a batch of replications


@dataclass(frozen=True)
class Cell:
    """A cell of the grid.

    Attributes:
        score: One of ``SCORES``.
        images: The number of images.
        seeds: The number of seeds of both variants.
        paired: Whether each run of the second variant goes on from one of the first.
        ratio: The second variant's deviation over seeds divided by the first's; 1 for pairs.
        image_fraction: The images' fraction of the variance of the difference.
    """

    score: str
    images: int
    seeds: tuple[int, int]
    paired: bool
    ratio: float
    image_fraction: float


def grid() -> Iterator[Cell]:
    """Yield the cells."""
    designs = [(seeds, False, ratio) for seeds in SEEDS for ratio in RATIOS]
    designs += [((2, 5), False, 1 / ratio) for ratio in RATIOS if ratio > 1]
    designs += [((pairs, pairs), True, 1.0) for pairs in PAIRS]
    for score, images, design, fraction in itertools.product(SCORES, IMAGES, designs, IMAGE_FRACTIONS):
        yield Cell(score, images, *design, fraction)


def simulate(cell: Cell, replications: int, random: Generator) -> dict[str, float]:
    """Return fractions of the replications, each a pair of variants.

    Returns:
        "coverage": of intervals that hold the true difference; "power": of intervals that exclude zero if the variants
        differ by ``POWER_AT`` standard deviations.
    """
    width = sum(cell.seeds) * cell.images * (_WORDS if cell.score == "BLEU-4" else 1)
    size = max(1, min(replications, _ELEMENTS // width))
    deviations = _seed_deviations(cell, random, min(size, 100))
    values, half_widths = [], []
    for start in range(0, replications, size):
        batch = min(size, replications - start)
        score = _score(cell.score, batch)
        test = SeedDifferences(*_counts(cell, deviations, batch, random), score, paired=cell.paired)
        values.append(test.differences)
        half_widths.append(test.half_width(0.05))
    error = np.concatenate(values) - _true_difference(cell, deviations)
    half = np.concatenate(half_widths)
    error_at_power = error + POWER_AT * error.std()
    return {"coverage": float((np.abs(error) <= half).mean()), "power": float((np.abs(error_at_power) > half).mean())}


# The runs


def _seed_deviations(cell: Cell, random: Generator, batch: int) -> tuple[float, float]:
    """Return the deviations over seeds with which the images have their fraction, from runs without seed effects."""
    counts = _counts(cell, (0.0, 0.0), batch, random)
    test = SeedDifferences(*counts, _score(cell.score, batch), paired=cell.paired)
    image_variance = float(test.image_variances.mean())
    seed_variance = image_variance * (1 / cell.image_fraction - 1)
    if cell.paired:
        gain = math.sqrt(seed_variance * cell.seeds[1])
        return (2 * gain / _slope(cell.score), gain / _slope(cell.score))  # the pairs differ more than their gains
    first = math.sqrt(seed_variance / (1 / cell.seeds[0] + cell.ratio**2 / cell.seeds[1])) / _slope(cell.score)
    return first, cell.ratio * first


def _counts(cell: Cell, deviations: tuple[float, float], batch: int, random: Generator) -> list[Floats]:
    """Return the counts (seeds, images, C) of both variants, of ``batch`` replications side by side in C."""
    scale = _SCALE[cell.score]

    def effect(runs: int, deviation: float) -> Floats:
        size = (runs, cell.images, batch)
        if cell.score == "heavy tails":
            return random.standard_t(3, size) * (scale * deviation / math.sqrt(3))
        return random.standard_normal(size) * (scale * deviation)

    image_effect = effect(1, _IMAGE)
    seed_effects = [random.standard_normal((n, 1, batch)) * d for n, d in zip(cell.seeds, deviations, strict=True)]
    if cell.paired:
        seed_effects[1] += seed_effects[0]
    values = [
        image_effect + effect(1, _VARIANT) + effect(runs, _RUN) + seeds
        for runs, seeds in zip(cell.seeds, seed_effects, strict=True)
    ]
    if cell.score != "BLEU-4":
        return [np.concatenate([value, np.ones((*value.shape[:2], 1))], axis=-1) for value in values]
    words = random.integers(8, _WORDS, size=(cell.images, batch)).astype(np.float64)  # of the closest reference
    return [_caption_counts(_RIGHT + value, words, random) for value in values]


def _caption_counts(right_probability: Floats, reference: Floats, random: Generator) -> Floats:
    """Return BLEU's counts (seeds, images, batch x 10) of captions whose words are right with these probabilities.

    Args:
        right_probability: (seeds, images, batch).
        reference: (images, batch) words of the reference; a caption has up to one word more or less.
    """
    words = np.clip(reference + random.integers(-1, 2, size=right_probability.shape), 4, _WORDS)
    position = np.arange(_WORDS)
    is_right = random.random((*right_probability.shape, _WORDS), dtype=np.float32) < right_probability[..., None]
    is_right &= position < words[..., None]
    counts, matched = np.empty((*right_probability.shape, 10)), is_right
    for n in range(4):
        if n:
            matched = matched[..., :-1] & is_right[..., n:]  # n + 1 right words in a row
        counts[..., n], counts[..., 4 + n] = matched.sum(axis=-1), words - n
    counts[..., 8], counts[..., 9] = words, reference
    return counts.reshape(*right_probability.shape[:2], -1)


def _score(name: str, batch: int) -> Statistic:
    """Return the function from summed counts to the score of every replication."""
    if name != "BLEU-4":
        return lambda summed: summed[..., :-1] / summed[..., -1:]
    return lambda summed: bleu_from_counts(summed.reshape(*summed.shape[:-1], batch, 10))[..., 3]


# The truth


def _true_difference(cell: Cell, deviations: tuple[float, float]) -> float:
    """Return the difference over all images and seeds. BLEU is not linear, so it depends on the seeds' deviation."""
    if cell.score != "BLEU-4":
        return 0.0
    first, second = deviations
    if cell.paired:
        second = math.hypot(first, second)
    return _mean_bleu(second) - _mean_bleu(first)


def _slope(score: str) -> float:
    """Return how much the score grows with the quality of a seed."""
    return 1.0 if score != "BLEU-4" else float(_bleu(np.array(0.005)) - _bleu(np.array(-0.005))) / 0.01


def _mean_bleu(deviation: float) -> float:
    nodes, weights = np.polynomial.hermite_e.hermegauss(41)
    return float(_bleu(nodes * deviation) @ weights / weights.sum())


def _bleu(quality: Floats) -> Floats:
    """Return BLEU-4 over all images of seeds of this quality, (..): the means of the counts are known."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(81)
    spread = _SCALE["BLEU-4"] * math.hypot(_IMAGE, _VARIANT, _RUN)
    right = np.clip(_RIGHT + quality[..., None] + nodes * spread, 0, 1)
    precisions = [(right**n) @ weights / weights.sum() for n in range(1, 5)]
    return np.asarray(100 * np.exp(np.mean(np.log(precisions), axis=0)))


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replications", type=int, default=1000, help="replications of a cell (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the coverages and their provenance")
    args = parser.parse_args(argv)
    cells = []
    for number, cell in enumerate(grid()):
        outcome = simulate(cell, args.replications, np.random.default_rng([args.seed, number]))
        cells.append(dataclasses.asdict(cell) | outcome)
        print(*(f"{value:.4g}" if isinstance(value, float) else value for value in cells[-1].values()), flush=True)
    if args.json:
        unit = (
            "fractions of the replications; ratio: the second variant's deviation over seeds by the first's; "
            f"power: at a true difference of {POWER_AT:.0f} standard deviations"
        )
        content = {
            "cells": cells,
            "unit": unit,
            "replications": args.replications,
            "standard_error": round(math.sqrt(0.95 * 0.05 / args.replications), 4),
            **provenance(command=f"python -m benchmarks.coverage {shlex.join(argv)}", seed=args.seed),
        }
        write_json(args.json, content)


if __name__ == "__main__":
    main()
