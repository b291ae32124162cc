"""What runs are scored on: the images that all of them captioned, resampled alike for every interval and test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from captioning.comparison.result import Comparison
from captioning.evaluation.records import CaptionedImage
from captioning.evaluation.resampling import (
    LEVEL,
    Difference,
    Floats,
    Interval,
    Score,
    differences,
    holm,
    intervals,
)

CORRECTED = " The p-values are corrected for the number of tests in this table (Holm); the intervals are not."


@dataclass(frozen=True)
class Scored:
    """What the tested runs are scored on, and how it is resampled for every interval and test.

    Attributes:
        captions: by run and image id.
        common: ids of the images that all runs captioned; if there are none, a run is scored on its own images.
        compared: the runs that are tested against the first one by one.
    """

    captions: dict[str, dict[int, CaptionedImage]]
    common: list[int]
    compared: list[str]
    resamples: int
    seed: int

    def images(self) -> Iterator[tuple[str, dict[int, CaptionedImage], list[int]]]:
        """Yield the name, the captions and the ids of the scored images of every run."""
        return ((name, captions, self.common or sorted(captions)) for name, captions in self.captions.items())

    def intervals(self, counts: Floats, score: Score) -> list[Interval]:
        """Return one interval for each score of ``score``."""
        found = intervals(counts, score, resamples=self.resamples, seed=self.seed)
        return [Interval(*(float(value) for value in column)) for column in found.reshape(3, -1).T]

    def differences(self, first: Floats, second: Floats, score: Score) -> list[Difference]:
        return differences(first, second, score, resamples=self.resamples, seed=self.seed)


def common_images(tested: dict[str, dict[int, CaptionedImage]], result: Comparison) -> list[int]:
    """Return the ids of the images that all tested runs captioned, with a notice where they are not all images."""
    if not tested:
        return []
    first, *others = tested.values()
    shared = sorted(set(first).intersection(*others))
    # An id alone does not make an image: another data set has other references under the same number.
    common = [i for i in shared if all(set(first[i].references) & set(run[i].references) for run in others)]
    if any(len(run) != len(common) for run in tested.values()):
        sizes = ", ".join(f"{name} {len(run)}" for name, run in tested.items())
        if common:
            result.notices.append(
                f"The runs were evaluated on different images ({sizes}); compared on the {len(common)} in common."
            )
        else:
            result.notices.append(
                f"The runs have no image in common ({sizes}): each is scored on its own images, and no test is made."
            )
    changed = sum(any(run[i].references != first[i].references for run in others) for i in common)
    if changed:
        result.notices.append(
            f"The references of {changed} common images differ between the runs (another tokenisation?); "
            "each run is scored with its own."
        )
    result.images = len(common)
    return common


def add_tests(result: Comparison, tests: dict[tuple[str, str], Difference], resamples: int) -> None:
    """Add the tests of one table, by run and measure, corrected for their number."""
    for (run, measure), corrected in zip(tests, holm(list(tests.values())), strict=True):
        result.tests.setdefault(run, {})[measure] = corrected
    if len(tests) / (resamples + 1) >= LEVEL:
        result.notices.append(
            f"{resamples} resamples are too few for {len(tests)} tests: no corrected p-value can be below {LEVEL}; "
            f"take at least {round(len(tests) / LEVEL)}."
        )
