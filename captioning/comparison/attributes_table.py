"""The table of the attributes that captions get right, where a data set knows what is true of its images."""

from __future__ import annotations

import numpy as np

from captioning.comparison.measures import Measure, Scored
from captioning.evaluation.attributes import count_attributes
from captioning.evaluation.resampling import Floats, percentage

TITLE = "What captions get right"
NOTE = (
    "Of the colours, shapes and so on that a caption mentions, the percentage that is true of the image. How often an "
    "attribute is said stands beside its interval; what a caption leaves out does not count."
)


def attribute_measures(scored: Scored) -> list[Measure]:
    """Return a measure of every attribute that captions mention, in alphabetical order."""
    counts: dict[str, dict[str, Floats]] = {}  # by attribute and run
    for run, captions, ids in scored.images():
        judged = [count_attributes(captions[i].attributes) for i in ids]
        for attribute in set().union(*judged):
            of_images = np.array([image[attribute][:2] if attribute in image else (0, 0) for image in judged], float)
            if of_images[:, 1].any():
                counts.setdefault(attribute, {})[run] = of_images  # (images, 2): how often right, and how often said
    return [
        Measure((f"attribute_{name}",), (f"{name.capitalize()} accuracy",), by_run, percentage, unit="said")
        for name, by_run in sorted(counts.items())
    ]
