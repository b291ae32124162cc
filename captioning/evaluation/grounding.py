"""Pointing accuracy and attention correctness: does attention look at the objects that the words name?"""

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from captioning.cells import CellGrid
from captioning.data.regions import Region
from captioning.evaluation.caption_files import CaptionedImage, NounHit
from captioning.metrics.arrays import Floats
from captioning.metrics.table import NOUN_METRICS


def noun_hits(words: Sequence[str], alphas: ArrayLike, regions: Sequence[Region], cells: CellGrid) -> list[NounHit]:
    """Judge the attention at every noun or phrase of a caption that names one of ``regions``, in their order.

    A location is a hit if its cell touches the region.

    Correctness is the attention correctness of Liu et al. ("Attention correctness in neural image captioning", AAAI
    2017): the sum of attention over the region that the word names. Differs from the paper: a location's weight is
    spread evenly over its cell, so a cell on the region's edge counts by its covered fraction. The paper interpolates
    the map to the image's size and sums over pixels. A phrase is judged at its noun; the paper takes the largest sum
    among its words. The region is cropped to the model's view.

    Args:
        alphas: (T, L) attention weights; step t belongs to ``words[t]``, and the step of <end> is ignored. The first of
            equally strong locations counts.
        regions: The regions that the caption names, from ``named_regions`` or from annotated phrases.
        cells: The grid of L locations.
    """
    alphas = np.asarray(alphas).reshape(-1, *cells.grid_size)
    hits = []
    for region in regions:
        coverage, alpha = region.coverage, alphas[region.end - 1]
        touched, location = coverage > 0, int(alpha.argmax())
        hits.append(
            NounHit(
                step=region.end - 1,
                noun=" ".join(words[region.noun_start : region.end]),
                hit=bool(touched.flat[location]),
                chance=float(touched.mean()),
                center_hit=float(touched[_central_cells(cells)].mean()),
                correctness=float((alpha * coverage).sum()),
                uniform_correctness=float(coverage.mean()),
                center_correctness=float((center_attention(cells) * coverage).sum()),
                location=location,
            )
        )
    return hits


def grounding_metrics(images: Sequence[CaptionedImage]) -> dict[str, float]:
    """Return the means over the images' nouns in percent; a metric without a noun is left out.

    The baselines of ``pointing_accuracy`` are ``pointing_chance`` (random locations) and ``pointing_centre`` (always
    the middle), those of ``attention_correctness`` are ``correctness_uniform`` and ``correctness_centre``. Baselines
    ignore the caption. They may be high: large objects are easy to hit, and photographers put them in the middle.
    """
    return {
        name: 100 * sum(values) / len(values)
        for name, metric in NOUN_METRICS.items()
        if (values := [getattr(hit, metric.hit_field) for image in images for hit in getattr(image, metric.hit_list)])
    }


@functools.cache
def center_attention(cells: CellGrid) -> Floats:
    """Return attention (height, width) on the middle of the view, a baseline that sums to 1.

    This attention is a Gaussian at the center of the view, evaluated at the cells' centers. Its standard deviations are
    a quarter of the height and of the width; about half of its mass lies in the middle quarter of the view's area.
    """
    positions = (centers / side for centers, side in zip(cells.centers(), cells.size, strict=True))
    weights = np.outer(*(np.exp(-0.5 * ((position - 0.5) / 0.25) ** 2) for position in positions))
    return weights / weights.sum()


@functools.cache
def _central_cells(cells: CellGrid) -> tuple[NDArray[np.intp], ...]:
    """Return an index of the cells nearest to the view's middle; several may be equally near."""
    distances = [np.abs(centers - side / 2) for centers, side in zip(cells.centers(), cells.size, strict=True)]
    return np.ix_(*(away <= away.min() + 1e-6 * stride for away, stride in zip(distances, cells.stride, strict=True)))
