"""Pointing accuracy on cases small enough to check by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from captioning.grounding import (
    GroundedObject,
    NounHit,
    cells_touched,
    chance_pointing_accuracy,
    noun_hits,
    pointing_accuracy,
)

GRID = (2, 3)  # rows, columns, over 20 x 30 pixels: cells of 10 x 10
L = 6


def box(top: int, bottom: int, left: int, right: int, size: tuple[int, int] = (20, 30)) -> np.ndarray:
    mask = np.zeros(size, dtype=bool)
    mask[top:bottom, left:right] = True
    return mask


def thing(noun: str, mask: np.ndarray, attributes: str = "", synonyms: str = "") -> GroundedObject:
    return GroundedObject(noun, frozenset(synonyms.split()), frozenset(attributes.split()), mask)


def looking_at(*cells: tuple[int, int]) -> np.ndarray:
    """One row of alphas per word, strongest at that (row, column)."""
    alphas = np.full((len(cells), L), 0.1)
    for step, (row, column) in enumerate(cells):
        alphas[step, row * GRID[1] + column] = 0.5
    return alphas


ANYWHERE = (0, 0)


def test_a_hit_is_a_cell_that_touches_the_mask():
    circle = thing("circle", box(2, 5, 12, 18))  # within row 0, column 1
    for row in range(2):
        for column in range(3):
            hits = noun_hits(["a", "circle"], looking_at(ANYWHERE, (row, column)), GRID, [circle])
            assert hits == [NounHit(step=1, noun="circle", hit=(row, column) == (0, 1), chance=1 / 6)]


def test_one_pixel_in_a_cell_is_enough_and_its_neighbours_do_not_count():
    # Dilated by half a cell (5 pixels), pixel (9, 20) reaches the centres of the cells that contain it, no other's.
    assert cells_touched(box(9, 10, 20, 21), GRID).tolist() == [[False, False, True], [False, False, False]]
    assert cells_touched(box(9, 11, 19, 21), GRID).tolist() == [[False, True, True], [False, True, True]]


def test_a_pixel_on_a_cell_edge_belongs_to_both_cells():
    # 7 pixels in 2 cells: the edge runs through pixel 3.
    assert cells_touched(box(0, 1, 3, 4, size=(1, 7)), (1, 2)).tolist() == [[True, True]]
    assert cells_touched(box(0, 1, 2, 3, size=(1, 7)), (1, 2)).tolist() == [[True, False]]


def test_a_grid_finer_than_the_mask_still_covers_it():
    assert cells_touched(box(0, 1, 1, 2, size=(2, 2)), (2, 4)).tolist() == [[False] * 2 + [True] * 2, [False] * 4]


def test_cells_agree_with_a_loop_over_pixels_on_uneven_sizes():
    rng = np.random.default_rng(5)
    mask = rng.random((17, 23)) < 0.03
    rows, columns = 3, 5
    expected = np.zeros((rows, columns), dtype=bool)
    for y, x in zip(*mask.nonzero(), strict=True):
        for r in range(rows):
            for c in range(columns):
                # Exact in integers: pixel [y, y+1) and cell [r*17/3, (r+1)*17/3) share area.
                inside_rows = y * rows < (r + 1) * 17 and (y + 1) * rows > r * 17
                inside_columns = x * columns < (c + 1) * 23 and (x + 1) * columns > c * 23
                expected[r, c] |= inside_rows and inside_columns
    assert (cells_touched(mask, (rows, columns)) == expected).all()


def test_the_colour_in_the_phrase_chooses_among_objects_of_one_noun():
    objects = [
        thing("circle", box(0, 10, 0, 10), "red large big"),
        thing("circle", box(10, 20, 20, 30), "blue small little"),
    ]
    words = "a big red circle above a little blue circle".split()
    right = looking_at(*[ANYWHERE] * 3, (0, 0), *[ANYWHERE] * 4, (1, 2))
    swapped = looking_at(*[ANYWHERE] * 3, (1, 2), *[ANYWHERE] * 4, (0, 0))
    assert [hit.hit for hit in noun_hits(words, right, GRID, objects)] == [True, True]
    assert [hit.hit for hit in noun_hits(words, swapped, GRID, objects)] == [False, False]


def test_adjectives_of_an_earlier_phrase_do_not_choose():
    objects = [thing("circle", box(0, 10, 0, 10), "red"), thing("circle", box(10, 20, 20, 30), "blue")]
    # Without a determiner the phrase still ends at the noun before it.
    hits = noun_hits("red circle blue circle".split(), looking_at(*[ANYWHERE] * 3, (1, 2)), GRID, objects)
    assert [(hit.step, hit.hit) for hit in hits] == [(1, True), (3, True)]


def test_pointing_at_any_of_several_that_fit_equally_is_a_hit():
    objects = [thing("circle", box(0, 10, 0, 10), "red"), thing("circle", box(10, 20, 20, 30), "red")]
    for cell, expected in [((0, 0), True), ((1, 2), True), ((0, 1), False)]:
        (hit,) = noun_hits("a red circle".split(), looking_at(ANYWHERE, ANYWHERE, cell), GRID, objects)
        assert hit.hit is expected
        assert hit.chance == pytest.approx(2 / 6)


def test_a_noun_that_names_no_object_is_not_counted():
    circle = thing("circle", box(0, 10, 0, 10), "red")
    assert noun_hits("a red square".split(), looking_at(*[ANYWHERE] * 3), GRID, [circle]) == []
    assert noun_hits("a red circle".split(), looking_at(*[ANYWHERE] * 3), GRID, []) == []


def test_an_object_outside_the_view_is_not_counted():
    outside = thing("circle", box(0, 0, 0, 0), "red")
    inside = thing("circle", box(10, 20, 20, 30), "blue")
    words = "a red circle".split()
    assert noun_hits(words, looking_at(*[ANYWHERE] * 3), GRID, [outside]) == []
    (hit,) = noun_hits(words, looking_at(*[ANYWHERE] * 2, (1, 2)), GRID, [outside, inside])
    assert hit.hit


def test_synonyms_and_names_of_several_words_count_at_their_last_word():
    bear = thing("teddy bear", box(10, 20, 20, 30), synonyms="teddy")
    animal = thing("bear", box(0, 10, 0, 10))
    hits = noun_hits("a teddy bear".split(), looking_at(ANYWHERE, ANYWHERE, (1, 2)), GRID, [animal, bear])
    assert hits == [NounHit(step=2, noun="teddy bear", hit=True, chance=1 / 6)]
    (hit,) = noun_hits("one teddy".split(), looking_at(ANYWHERE, (1, 2)), GRID, [animal, bear])
    assert (hit.step, hit.hit) == (1, True)


def test_the_row_of_the_end_token_may_be_there_and_is_ignored():
    circle = thing("circle", box(0, 10, 0, 10))
    assert [hit.hit for hit in noun_hits(["circle"], looking_at((0, 0), (1, 2)), GRID, [circle])] == [True]


@pytest.mark.parametrize(
    ("words", "alphas", "message"),
    [
        (["circle"], np.zeros((1, 5)), r"alphas must be \(T, 6\) for a grid of 2 x 3, got \(1, 5\)"),
        (["a", "circle"], np.zeros((1, 6)), "alphas has 1 rows for 2 words"),
    ],
)
def test_contradicting_shapes_are_refused(words, alphas, message):
    with pytest.raises(ValueError, match=message):
        noun_hits(words, alphas, GRID, [thing("circle", box(0, 10, 0, 10))])


def test_masks_of_different_sizes_are_refused():
    objects = [thing("circle", box(0, 10, 0, 10)), thing("star", np.zeros((20, 31), dtype=bool))]
    with pytest.raises(ValueError, match="masks must be of one size"):
        noun_hits(["circle"], looking_at(ANYWHERE), GRID, objects)


def test_accuracies_are_percentages_of_the_counted_nouns():
    hits = [NounHit(1, "circle", True, 0.25), NounHit(4, "star", False, 0.5), NounHit(2, "ring", True, 0.15)]
    assert pointing_accuracy(hits) == pytest.approx(200 / 3)
    assert chance_pointing_accuracy(hits) == pytest.approx(30)


def test_accuracy_of_no_noun_is_not_a_number():
    assert math.isnan(pointing_accuracy([]))
    assert math.isnan(chance_pointing_accuracy([]))


def test_chance_is_what_random_locations_score():
    objects = [thing("circle", box(0, 10, 5, 25)), thing("star", box(10, 20, 0, 10))]
    words = "a circle above a star".split()
    scores = []
    chances = set()
    for location in range(L):
        alphas = np.zeros((len(words), L))
        alphas[:, location] = 1
        hits = noun_hits(words, alphas, GRID, objects)
        scores.append(pointing_accuracy(hits))
        chances.add(chance_pointing_accuracy(hits))
    assert len(chances) == 1
    assert chances.pop() == pytest.approx(np.mean(scores))
