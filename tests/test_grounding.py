"""Pointing accuracy and attention correctness on cases small enough to check by hand."""

import numpy as np
import pytest

from captioning.cells import CellGrid
from captioning.data.records import GroundedObject
from captioning.data.regions import named_regions, object_regions
from captioning.evaluation import grounding
from captioning.evaluation.caption_files import CaptionedImage, NounHit
from captioning.evaluation.grounding import center_attention, grounding_metrics

GRID = (2, 3)  # rows, columns, over 20 x 30 pixels: cells of 10 x 10
L = 6
CELLS = CellGrid.regular(GRID, (20, 30))


def box(top: int, bottom: int, left: int, right: int, size: tuple[int, int] = (20, 30)) -> np.ndarray:
    mask = np.zeros(size, dtype=bool)
    mask[top:bottom, left:right] = True
    return mask


def thing(noun: str, mask: np.ndarray, attributes: str = "", synonyms: str = "") -> GroundedObject:
    return GroundedObject(noun, frozenset(synonyms.split()), frozenset(attributes.split()), mask)


def noun_hits(words, alphas, objects, cells=CELLS) -> list[NounHit]:
    return grounding.noun_hits(words, alphas, named_regions(words, object_regions(objects, cells)), cells)


def looking_at(*cells: tuple[int, int]) -> np.ndarray:
    """Return alphas of a word for each cell (row, column), at which they are strongest."""
    alphas = np.full((len(cells), L), 0.1)
    for step, (row, column) in enumerate(cells):
        alphas[step, row * GRID[1] + column] = 0.5
    return alphas


ANYWHERE = (0, 0)


def test_a_hit_is_a_strongest_cell_that_touches_the_mask():
    circle = thing("circle", box(2, 5, 12, 18))  # within row 0, column 1
    for row in range(2):
        for column in range(3):
            hits = noun_hits(["a", "circle"], looking_at(ANYWHERE, (row, column)), [circle])
            assert [(hit.step, hit.noun, hit.hit) for hit in hits] == [(1, "circle", (row, column) == (0, 1))]
            assert hits[0].chance == 1 / 6


def test_the_color_in_the_phrase_chooses_among_objects_of_one_noun():
    objects = [
        thing("circle", box(0, 10, 0, 10), "red large big"),
        thing("circle", box(10, 20, 20, 30), "blue small little"),
    ]
    words = "a big red circle above a little blue circle".split()
    right = looking_at(*[ANYWHERE] * 3, (0, 0), *[ANYWHERE] * 4, (1, 2))
    swapped = looking_at(*[ANYWHERE] * 3, (1, 2), *[ANYWHERE] * 4, (0, 0))
    assert [hit.hit for hit in noun_hits(words, right, objects)] == [True, True]
    assert [hit.hit for hit in noun_hits(words, swapped, objects)] == [False, False]


def test_adjectives_of_an_earlier_phrase_do_not_choose():
    objects = [thing("circle", box(0, 10, 0, 10), "red"), thing("circle", box(10, 20, 20, 30), "blue")]
    # Without a determiner the phrase still ends at the noun before it.
    hits = noun_hits("red circle blue circle".split(), looking_at(*[ANYWHERE] * 3, (1, 2)), objects)
    assert [(hit.step, hit.hit) for hit in hits] == [(1, True), (3, True)]


def test_pointing_at_any_of_several_that_fit_equally_is_a_hit():
    objects = [thing("circle", box(0, 10, 0, 10), "red"), thing("circle", box(10, 20, 20, 30), "red")]
    for cell, expected in [((0, 0), True), ((1, 2), True), ((0, 1), False)]:
        (hit,) = noun_hits("a red circle".split(), looking_at(ANYWHERE, ANYWHERE, cell), objects)
        assert hit.hit is expected
        assert hit.chance == pytest.approx(2 / 6)


def test_a_noun_that_names_no_object_in_view_is_not_counted():
    outside = thing("circle", box(0, 0, 0, 0), "red")
    inside = thing("circle", box(10, 20, 20, 30), "blue")
    words = "a red circle".split()
    for objects in ([], [outside], [thing("square", box(0, 10, 0, 10), "red")]):
        assert noun_hits(words, looking_at(*[ANYWHERE] * 3), objects) == []
    (hit,) = noun_hits(words, looking_at(*[ANYWHERE] * 2, (1, 2)), [outside, inside])
    assert hit.hit


def test_synonyms_and_names_of_several_words_are_found_at_their_last_word():
    bear = thing("teddy bear", box(10, 20, 20, 30), synonyms="teddy")
    animal = thing("bear", box(0, 10, 0, 10))
    hits = noun_hits("a teddy bear".split(), looking_at(ANYWHERE, ANYWHERE, (1, 2)), [animal, bear])
    assert [(hit.step, hit.noun, hit.hit) for hit in hits] == [(2, "teddy bear", True)]
    (hit,) = noun_hits("one teddy".split(), looking_at(ANYWHERE, (1, 2)), [animal, bear])
    assert (hit.step, hit.hit) == (1, True)


@pytest.mark.parametrize(
    ("caption", "object_", "synonyms"),
    [
        ("a hot dog", "dog", "dogs"),
        ("two teddy bears", "bear", "bears"),
        ("a bus driver waves", "bus", ""),
        ("the dining tables", "table", "tables"),
        ("a baseball bat", "bat", "bats"),
    ],
)
def test_a_word_of_a_categorys_name_does_not_name_another_category(caption, object_, synonyms):
    words, objects = caption.split(), [thing(object_, box(0, 10, 0, 10), synonyms=synonyms)]
    assert noun_hits(words, looking_at(*[(0, 0)] * 4), objects) == []
    words = [*words, "and", "a", object_]
    assert [hit.noun for hit in noun_hits(words, looking_at(*[(0, 0)] * len(words)), objects)] == [object_]


def test_metrics_are_means_over_nouns_in_percent():
    hits = [
        NounHit(1, "circle", True, 0.25, 0.5, 0.6, 0.1, 0.2),
        NounHit(4, "star", False, 0.5, 0.0, 0.0, 0.3, 0.4),
        NounHit(2, "ring", True, 0.15, 1.0, 0.3, 0.2, 0.0),
    ]
    images = [
        CaptionedImage(image_id=i, caption="", references=[], hits=own) for i, own in enumerate((hits[:2], hits[2:]))
    ]
    names = ("pointing_accuracy", "pointing_chance", "pointing_centre")
    names += ("attention_correctness", "correctness_uniform", "correctness_centre")
    assert grounding_metrics(images) == pytest.approx(dict(zip(names, [200 / 3, 30, 50, 30, 20, 20], strict=True)))
    assert grounding_metrics([]) == {}


def test_coverage_is_the_exact_fraction_of_a_cells_area():
    # Cells of 10 x 10: 30 pixels of the first, 20 of the second.
    assert CELLS.coverage(box(0, 5, 4, 14)).tolist() == [[0.3, 0.2, 0], [0, 0, 0]]
    assert CellGrid.regular((1, 4), (2, 2)).coverage(box(0, 1, 1, 2, size=(2, 2))).tolist() == [[0, 0, 0.5, 0.5]]
    # 7 pixels in 2 cells of 3.5: half of pixel 3 lies in each.
    assert CellGrid.regular((1, 2), (1, 7)).coverage(box(0, 1, 3, 4, size=(1, 7))).tolist() == [[1 / 7, 1 / 7]]
    assert CellGrid.regular((3, 5), (17, 23)).coverage(np.ones((17, 23), dtype=bool)).tolist() == [[1.0] * 5] * 3


def test_correctness_is_the_fraction_of_attention_on_the_object():
    circle = thing("circle", box(0, 10, 5, 20))  # half of cell (0, 0), all of (0, 1)
    alphas = np.array([[1 / 6] * 6, [0.4, 0.3, 0.1, 0.1, 0.05, 0.05]])
    (hit,) = noun_hits(["a", "circle"], alphas, [circle])
    assert hit.correctness == pytest.approx(0.4 / 2 + 0.3)
    assert hit.uniform_correctness == pytest.approx(150 / 600)
    center = center_attention(CELLS)
    assert hit.center_correctness == pytest.approx(center[0, 0] / 2 + center[0, 1])
    assert hit.center_hit == 0.5  # the two cells in the middle are (0, 1) and (1, 1)


def test_objects_that_overlap_are_counted_once():
    objects = [thing("circle", box(0, 10, 0, 8)), thing("circle", box(0, 10, 2, 10))]
    (hit,) = noun_hits(["circle"], looking_at(ANYWHERE), objects)
    assert hit.correctness == pytest.approx(0.5)  # all of cell (0, 0)


@pytest.mark.parametrize(("grid_size", "middle"), [((3, 5), 1), ((4, 6), 4), ((2, 3), 2)])
def test_a_central_location_is_one_of_those_nearest_to_the_middle(grid_size, middle):
    cells = CellGrid.regular(grid_size, (24, 30))
    star = thing("star", box(11, 12, 14, 15, size=(24, 30)))  # one pixel up and left of the middle
    alphas = np.full((1, grid_size[0] * grid_size[1]), 0.1)
    (hit,) = noun_hits(["star"], alphas, [star], cells)
    assert hit.center_hit == 1 / middle


@pytest.mark.parametrize("grid_size", [(3, 5), (4, 6)])
def test_center_attention_is_a_symmetric_gaussian_of_a_quarter_of_the_view(grid_size):
    weights = center_attention(CellGrid.regular(grid_size, (20, 30)))
    assert weights.shape == grid_size
    assert weights.sum() == pytest.approx(1)
    np.testing.assert_allclose(weights, weights[::-1, ::-1], rtol=1e-12)
    rows = weights.sum(axis=1)
    places = (np.arange(grid_size[0]) + 0.5) / grid_size[0]
    np.testing.assert_allclose(rows / rows[0], np.exp(8 * ((places[0] - 0.5) ** 2 - (places - 0.5) ** 2)))
