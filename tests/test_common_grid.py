"""Compared runs are judged on one grid as far as their cells agree, on cases small enough to check by hand."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from helpers_runs import captioned_image, run_of

from captioning.cells import CellGrid
from captioning.comparison.common_grid import on_one_grid
from captioning.comparison.compare import compare
from captioning.comparison.runs import Run, read_run
from captioning.data.objects import GroundedObject, mask_of, outline_of
from captioning.errors import InputError
from captioning.evaluation.grounding import noun_hits, object_cells
from captioning.evaluation.records import CaptionedImage, NounHit, read_cells, write_evaluation

# Four cells in a row. Those of the first run are columns -1..7, 7..15, 15..23 and 23..31; those of the second 1..9 ..;
# those of their mean 0..8, 8..16 ..
FIRST = CellGrid((1, 4), (4.0, 3.0), (8.0, 8.0), (8, 32), standard_error=(0.0, 1.0))
SECOND = dataclasses.replace(FIRST, offset=(4.0, 5.0))
MEAN = dataclasses.replace(FIRST, offset=(4.0, 4.0))
FAR = dataclasses.replace(FIRST, offset=(4.0, 6.5), standard_error=(0.0, 0.5))


def thing(noun: str, left: int, right: int) -> GroundedObject:
    mask = np.zeros((8, 32), dtype=bool)
    mask[2:5, left:right] = True
    return GroundedObject(noun, frozenset(), frozenset(), mask)


def run(name: str, cells: CellGrid, **changes: object) -> Run:
    """A run that says "dog cat" of a dog in columns 16 and 17 and a cat in column 15; it looks at the second cell."""
    objects = object_cells([thing("dog", 16, 18), thing("cat", 15, 16)], cells)
    alphas = np.tile([0.1, 0.7, 0.1, 0.1], (2, 1))
    hits, outlines = noun_hits(["dog", "cat"], alphas, objects), [item.outline for item in objects]
    image = captioned_image(7, "dog cat", ["dog cat"], hits=hits, outlines=outlines)
    return run_of(name, {7: dataclasses.replace(image, **changes)}, cells=cells)


def pointing(of: Run) -> dict[str, tuple[bool, float, float]]:
    assert of.captions is not None
    return {noun.noun: (noun.hit, noun.chance, noun.centre_hit) for noun in of.captions[7].hits}


def test_the_mean_grid_of_two_runs_makes_a_hit_of_a_miss_and_a_miss_of_a_hit():
    first, second = run("a", FIRST), run("b", SECOND)
    assert pointing(first) == {"dog": (False, 1 / 4, 1), "cat": (False, 1 / 4, 1)}  # the middle is column 16
    assert pointing(second) == {"dog": (True, 2 / 4, 1), "cat": (True, 1 / 4, 1)}
    moved, (notice,) = on_one_grid([first, second])
    for of in moved:
        assert of.cells == MEAN
        assert pointing(of) == {"dog": (False, 1 / 4, 1 / 2), "cat": (True, 1 / 4, 1 / 2)}
    assert notice == (
        "Pointing is scored on one grid for a (4, 3) and b (4, 5), the mean of theirs, weighted by their standard "
        "errors: its first cell lies at (4, 4) pixels. Attention correctness is scored on each run's own grid."
    )
    assert [noun.correctness for noun in moved[1].captions[7].hits] == [
        noun.correctness for noun in second.captions[7].hits
    ]
    assert pointing(first)["cat"][0] is False  # what was read is not changed


def test_a_comparison_shows_pointing_on_the_common_grid():
    compared = compare([run("a", FIRST), run("b", SECOND)], resamples=9)
    (row,) = (row for table in compared.tables for row in table.rows if row.name == "Pointing accuracy")
    assert [cell.value for cell in row.cells] == [50, 50]
    assert any(notice.startswith("Pointing is scored on one grid for a ") for notice in compared.notices)


def test_a_run_whose_cells_lie_further_away_keeps_its_grid():
    """The third cells lie 3.5 from the first and 1.5 from the second; two standard errors are 2.24."""
    runs = [run("a", FIRST), run("b", SECOND), run("c", FAR)]
    moved, (notice, _) = on_one_grid(runs)
    assert [of.cells for of in moved] == [MEAN, MEAN, FAR] and moved[2] is runs[2]
    assert notice == (
        "c (4, 6.5): pointing is scored on the run's own grid, because its cells have another size or its first cell "
        "(in pixels) lies more than two standard errors from that of a (4, 3) or b (4, 5)."
    )


def test_a_run_whose_test_kept_too_little_keeps_its_grid():
    without = [dataclasses.replace(noun, location=None, objects=[]) for noun in run("b", SECOND).captions[7].hits]
    runs = [run("a", FIRST), run("b", SECOND, hits=without, outlines=[])]
    moved, (notice,) = on_one_grid(runs)
    assert moved == runs
    assert notice == (
        "b: pointing is scored on the run's own grid, because the test kept no outlines of objects; run "
        "`captioning test` again."
    )
    unknown = dataclasses.replace(runs[0], name="c", cells=None)
    assert on_one_grid([unknown, runs[1]])[1][0].startswith("c and b: pointing is scored on the run's own grid")


def test_runs_on_equal_grids_and_runs_without_nouns_are_as_they_were():
    other = dataclasses.replace(FIRST, standard_error=(0.0, 0.5))
    runs = [run("a", FIRST), run("b", other), run("c", FAR, hits=[]), run_of("untested")]
    assert on_one_grid(runs) == (runs, [])


@pytest.mark.parametrize(
    ("outlines", "noun", "message"),
    [
        (["00", ""], {}, "its run lengths do not add up to its image of 8 x 32 pixels"),
        (None, {"location": 4}, "the noun at word 0 has no such location or object"),
        (None, {"location": -1}, "the noun at word 0 has no such location or object"),
        (None, {"objects": []}, "the noun at word 0 has no such location or object"),
        (None, {"objects": [2]}, "the noun at word 0 has no such location or object"),
    ],
)
def test_a_damaged_test_is_refused_in_one_line(outlines, noun, message):
    second = run("b", SECOND)
    image: CaptionedImage = second.captions[7]
    hits: list[NounHit] = [dataclasses.replace(hit, **noun) for hit in image.hits]
    second.captions[7] = dataclasses.replace(image, hits=hits, outlines=outlines or image.outlines)
    with pytest.raises(InputError, match=f"^b: test_captions.json: image 7: {message}; run `captioning test` again$"):
        on_one_grid([run("a", FIRST), second])


def test_the_text_of_an_outline_draws_its_mask():
    mask = np.random.default_rng(3).random((13, 17)) < 0.3
    assert np.array_equal(mask_of(outline_of(mask), (13, 17)), mask)
    for whole in (np.zeros((2, 3), dtype=bool), np.ones((2, 3), dtype=bool)):
        assert np.array_equal(mask_of(outline_of(whole), (2, 3)), whole)


def test_the_grid_of_a_test_reads_back(tmp_path):
    metrics = tmp_path / "test_metrics.json"
    write_evaluation(tmp_path, "test", {"bleu4": 1.0}, [], search={}, cells=FAR)
    assert read_cells(metrics) == FAR and read_cells(metrics).standard_error == (0.0, 0.5)
    (tmp_path / "config.yaml").write_text("{}")
    assert read_run(tmp_path).cells == FAR and read_run(tmp_path).scores == {"bleu4": 1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": 3}, "not what `captioning test` writes"),
        ({"size": [8, 10**9]}, "no grid of a view of at most 4096 pixels a side"),
        ({"grid_size": [0, 4]}, "no grid of a view of at most 4096 pixels a side"),
        ({"stride": [8.0, 0.0]}, "no grid of a view of at most 4096 pixels a side"),
        ({"offset": [4.0, 1e300]}, "lie more than 4096 pixels outside the view"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(tmp_path, change, message):
    metrics = tmp_path / "test_metrics.json"
    metrics.write_text(json.dumps({"cells": dataclasses.asdict(FAR) | change}))
    with pytest.raises(InputError, match=f"test_metrics.json: cells: {message}"):
        read_cells(metrics)
