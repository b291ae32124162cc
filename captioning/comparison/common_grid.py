"""One grid for the pointing of several runs, whose cells were measured with an error each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from captioning.cells import CellGrid
from captioning.comparison.runs import Run
from captioning.errors import InputError
from captioning.evaluation.grounding import pointing_on
from captioning.evaluation.records import CaptionedImage, NounHit


def on_one_grid(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the runs with their pointing judged on one grid, and sentences on which runs are on which grid.

    The grid is the mean of the runs' own (``CellGrid.pooled``). A run joins it unless its cells differ from those of a
    run that joined before (``CellGrid.differs``). A run that does not join keeps its own grid, and so does one whose
    test did not keep what is needed. If all runs have the same grid, there is nothing to do or to say.

    Raises:
        InputError: What a test kept is damaged.
    """
    pointing = [run for run in runs if _nouns(run)]
    if len({run.cells for run in pointing}) < 2:
        return list(runs), []
    joined: dict[str, CellGrid] = {}
    apart: dict[str, CellGrid] = {}
    lacking: dict[str, CellGrid | None] = {}
    for run in pointing:
        if run.cells is None or any(noun.location is None for noun in _nouns(run)):
            lacking[run.name] = run.cells
        elif any(run.cells.differs(grid) for grid in joined.values()):
            apart[run.name] = run.cells
        else:
            joined[run.name] = run.cells
    notices = []
    if apart:
        notices.append(
            f"{_placed(apart)}: pointing is scored on the run's own grid, because its cells have another size or its "
            f"first cell (in pixels) lies more than two standard errors from that of {_placed(joined, 'or')}."
        )
    common = CellGrid.pooled(list(joined.values())) if joined else None
    if names := [name for name, cells in lacking.items() if cells is None or cells != common]:
        notices.append(
            f"{_listed(names)}: pointing is scored on the run's own grid, because the test kept no outlines of "
            "objects; run `captioning test` again."
        )
    if common is None or all(cells == common for cells in joined.values()):
        return list(runs), notices
    notices.append(
        f"Pointing is scored on one grid for {_placed(joined)}, the mean of theirs, weighted by their standard errors: "
        f"its first cell lies at {_place(common)} pixels. Attention correctness is scored on each run's own grid."
    )
    return [_moved(run, common) if run.name in joined else run for run in runs], notices


def _nouns(run: Run) -> list[NounHit]:
    return [noun for image in (run.captions or {}).values() for noun in [*image.hits, *image.reference_hits]]


def _moved(run: Run, cells: CellGrid) -> Run:
    def judged_again(image: CaptionedImage) -> CaptionedImage:
        try:
            return pointing_on(image, cells)
        except InputError as error:
            raise InputError(
                f"{run.source}: test_captions.json: image {image.image_id}: {error}; run `captioning test` again"
            ) from error

    captions = {number: judged_again(image) for number, image in (run.captions or {}).items()}
    return dataclasses.replace(run, captions=captions, cells=cells)


def _place(cells: CellGrid) -> str:
    return f"({cells.offset[0]:.3g}, {cells.offset[1]:.3g})"


def _placed(grids: Mapping[str, CellGrid], word: str = "and") -> str:
    return _listed([f"{name} {_place(cells)}" for name, cells in grids.items()], word)


def _listed(names: Sequence[str], word: str = "and") -> str:
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last
