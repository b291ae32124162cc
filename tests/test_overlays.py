"""The figure shows the image and the model's view of it, and a map's maximum where the attention was."""

import math
import sys

import numpy as np
import pytest
from helpers import quick_if, random_alphas, random_view, trace_of
from matplotlib.text import Text
from PIL import Image

from captioning.cells import CellGrid
from captioning.views.maps import STYLES, smooth_alphas
from captioning.views.overlays import WHOLE, ModelAttention, attention_figure

CELLS = CellGrid.regular((3, 5), (40, 60))
GRAY = Image.new("RGB", (60, 40), "gray")


def one_hot(cell: int, cells: int = 15) -> np.ndarray:
    alpha = np.zeros(cells)
    alpha[cell] = 1
    return alpha


def figure_of(photo, words, trace, cells=CELLS, *, region=WHOLE, **options):
    """The figure of one model."""
    return attention_figure(photo, words, {"": ModelAttention(trace, cells, region)}, text=" ".join(words), **options)


def panels(figure) -> list:
    """The axes of the words' maps: the image comes before them, the value scale after."""
    return figure.axes[1:-1]


def pixels(axes) -> np.ndarray:
    return np.asarray(axes.images[0].get_array(), dtype=float)


def brightest_cells(figure) -> list[int]:
    """The cell of the 3 x 5 grid where each panel has most red."""
    cells = []
    for axes in panels(figure):
        red = pixels(axes)[:, :, 0]
        y, x = np.unravel_index(red.argmax(), red.shape)
        cells.append(int((y + 0.5) * 3 / red.shape[0]) * 5 + int((x + 0.5) * 5 / red.shape[1]))
    return cells


@pytest.mark.parametrize(("grid", "size"), [((3, 5), (96, 130)), ((14, 14), (224, 224)), ((28, 7), (224, 112))])
def test_a_single_cells_maximum_stays_inside_that_cell(grid, size):
    height, width = grid
    for cell in range(height * width):
        smooth = smooth_alphas(one_hot(cell, height * width), CellGrid.regular(grid, size))
        y, x = np.unravel_index(smooth.argmax(), smooth.shape)
        assert (int((y + 0.5) * height / size[0]), int((x + 0.5) * width / size[1])) == divmod(cell, width)


@pytest.mark.parametrize("offset", [(0.5, 15.5), (4.0, 2.5), (12.5, 10.5)])
def test_cells_that_begin_elsewhere_move_the_map(offset):
    cells = CellGrid((14, 14), offset, (16, 16), (224, 224))
    for location in (0, 13, 90, 182, 195):
        smooth = smooth_alphas(one_hot(location, 196), cells)
        y, x = np.add(np.unravel_index(smooth.argmax(), smooth.shape), 0.5)
        left, top, right, bottom = cells.box(location)
        assert top <= y <= bottom and left <= x <= right


@pytest.mark.parametrize("size", [(96, 130), (31, 47)])
def test_a_map_goes_from_the_least_to_the_greatest_alpha_and_even_attention_stays_even(size):
    for alpha in (one_hot(0), one_hot(7), random_alphas(1)[0], 0.06 + 0.1 * one_hot(3)):
        smooth = smooth_alphas(alpha, CellGrid.regular((3, 5), size))
        assert smooth.shape == size
        assert (smooth.min(), smooth.max()) == pytest.approx((alpha.min(), alpha.max()), rel=1e-5)
    for cells in (CellGrid.regular((3, 5), size), CellGrid((3, 5), (20.0, 15.0), (9.0, 8.0), size)):
        np.testing.assert_allclose(smooth_alphas(np.full(15, 1 / 15), cells), 1 / 15, rtol=1e-4)


def test_smoothing_is_the_authors_on_their_sizes():
    alpha = random_alphas(1, 196)[0]
    upsampled = np.kron(alpha.reshape(14, 14), np.ones((16, 16)))
    kernel = np.exp(-0.5 * (np.arange(-80, 81) / 20) ** 2)
    padded = np.pad(upsampled, 80, mode="symmetric")
    for axis in (0, 1):
        padded = np.apply_along_axis(np.convolve, axis, padded, kernel / kernel.sum(), mode="valid")
    stretched = (padded - padded.min()) / np.ptp(padded) * np.ptp(alpha) + alpha.min()
    smooth = smooth_alphas(alpha, CellGrid.regular((14, 14), (224, 224)))
    np.testing.assert_allclose(smooth, stretched, atol=2e-3 * alpha.max())


def test_the_figure_has_the_untouched_view_the_caption_a_panel_for_every_word_and_the_scale():
    view, words = random_view(), ["two", "cats", "sleep"]
    figure = figure_of(view, words, trace_of(random_alphas(3), [0.25, 0.5, 1]))
    np.testing.assert_array_equal(pixels(figure.axes[0]), np.asarray(view))
    assert [axes.get_title() for axes in panels(figure)] == words
    assert figure.get_suptitle() == "two cats sleep"
    assert figure.texts[-1].get_text() == f"attention per location, from 0 to {random_alphas(3).max():#.2g}"


def test_all_maps_have_one_scale_which_ends_at_the_greatest_attention_of_all_words():
    strong, look = one_hot(7), STYLES["paper"]
    alphas = [0.3 * strong + 0.7 / 15, 0.6 * strong + 0.4 / 15, 0.1 * strong + 0.9 / 15]
    end = alphas[1].max()
    figure = figure_of(GRAY, ["a", "cat", "of"], trace_of(alphas), style="paper")
    for axes, alpha in zip(panels(figure), alphas, strict=True):
        for extreme, value in ((np.min, math.sqrt(alpha.min() / end)), (np.max, math.sqrt(alpha.max() / end))):
            light, white = look["dim"] + (1 - look["dim"]) * value, look["opacity"] * value
            assert extreme(pixels(axes)) == pytest.approx(128 * light * (1 - white) + 255 * white, abs=2)
    assert figure.texts[-1].get_text() == f"attention per location, from 0 to {end:#.2g}"


def test_the_whole_photo_is_shown_with_the_models_view_marked():
    photo, region = random_view(90, 40), (0.25, 0.0, 0.75, 1.0)
    figure = figure_of(photo, ["cat"], trace_of(random_alphas(1)), region=region)
    shown, whole = pixels(figure.axes[0]), np.asarray(photo)
    np.testing.assert_array_equal(shown[:, 22:68], whole[:, 22:68])
    np.testing.assert_array_equal(shown[:, :22], whole[:, :22] // 2)
    np.testing.assert_array_equal(shown[:, 68:], whole[:, 68:] // 2)
    frame = figure.axes[0].patches[-1].get_bbox()
    assert (frame.x0, frame.x1) == pytest.approx((22.5, 67.5), abs=1)


def test_maps_are_painted_on_the_photos_own_pixels_of_the_view():
    photo, region = random_view(1200, 800), (0.2, 0.1, 0.7, 0.6)
    figure = figure_of(photo, ["cat"], trace_of([np.zeros(15)]), region=region)
    expected = photo.resize((448, 299), Image.Resampling.BICUBIC, box=(240, 80, 840, 480))
    dimmed = np.asarray(expected, dtype=np.float32) * STYLES["color"]["dim"]
    np.testing.assert_allclose(pixels(panels(figure)[0]), dimmed, atol=1)


def test_attended_pixels_keep_half_of_their_color_under_the_map():
    red, blue = ((220, 30, 30), (30, 30, 220))
    peaks = []
    for color in (red, blue):
        figure = figure_of(Image.new("RGB", (60, 40), color), ["cat"], trace_of([one_hot(7)]))
        painted = pixels(panels(figure)[0])
        peaks.append(painted[painted.shape[0] // 2, painted.shape[1] // 2])
    np.testing.assert_allclose(peaks[0] - peaks[1], (np.array(red) - np.array(blue)) / 2, atol=2)


def test_even_attention_shows_no_pattern_stays_dim_beside_other_words_and_is_named():
    even = np.full(15, 1 / 15)
    alphas = [even, 0.5 * one_hot(7) + 0.5 * even, 0.95 * even + 0.05 * one_hot(2)]
    figure = figure_of(GRAY, ["of", "cat", "a"], trace_of(alphas))
    flat, strong, _ = (pixels(axes) for axes in panels(figure))
    assert np.ptp(flat[:, :, 0]) <= 1 and flat.max() < 0.6 * strong.max()
    assert [axes.get_xlabel() for axes in panels(figure)] == ["nearly even", "", "nearly even"]
    (alone,) = panels(figure_of(GRAY, ["of"], trace_of([even])))
    assert np.ptp(pixels(alone)[:, :, 0]) <= 1 and alone.get_xlabel() == "nearly even"


def test_the_papers_style_is_white_on_the_gray_photo():
    red, cell = Image.new("RGB", (60, 40), (220, 30, 30)), 7
    (axes,) = panels(figure_of(red, ["cat"], trace_of([one_hot(cell)]), style="paper"))
    painted = pixels(axes)
    assert (painted == painted[:, :, :1]).all()
    gray = float(np.asarray(red.convert("L"))[0, 0])
    assert painted.min() == pytest.approx(STYLES["paper"]["dim"] * gray, abs=2) and painted.max() > 180


def test_each_panel_is_brightest_at_the_strongest_location_and_details_are_beneath():
    trace = trace_of([one_hot(cell) for cell in (0, 14, 7)], [0.25, 0.5, 1])
    assert brightest_cells(figure_of(GRAY, ["a", "b", "c"], trace)) == [0, 14, 7]
    figure = figure_of(GRAY, ["a", "b", "c"], trace, details=True)
    assert [axes.get_xlabel() for axes in panels(figure)] == [
        f"\u03b2 {beta} \u00b7 at most 1.0" for beta in ("0.25", "0.50", "1.00")
    ]


def test_details_show_the_evidence_beneath_the_alphas():
    alphas, evidence = [[one_hot(cell) for cell in cells] for cells in ((0, 4), (10, 14))]
    trace = trace_of(alphas, [0.25, 0.5])._replace(evidence=np.array(evidence, dtype=np.float32))
    assert brightest_cells(figure_of(GRAY, ["a", "cat"], trace)) == [0, 4]
    figure = figure_of(GRAY, ["a", "cat"], trace, details=True)
    assert brightest_cells(figure) == [0, 10, 4, 14]
    assert [axes.get_ylabel() for axes in panels(figure)] == ["attention", "evidence", "", ""]
    trace = trace_of([0.1 * one_hot(4) + 0.06, 0.02 * one_hot(0) + 0.06])._replace(evidence=np.array(evidence))
    figure = figure_of(GRAY, ["a", "cat"], trace, details=True)  # on a scale of its own
    assert brightest_cells(figure)[:2] == [4, 10]
    scale = "attention per location, from 0 to 0.16; evidence per location, from 0 to 1.0"
    assert figure.texts[-1].get_text() == scale
    figure.draw_without_rendering()
    assert figure.texts[-1].get_window_extent().x1 <= figure.bbox.x1


@pytest.mark.parametrize(("both", "details"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("steps", [quick_if(steps < 11, steps) for steps in (0, 1, 6, 7, 11, 30)])
def test_panels_lie_inside_the_figure_and_do_not_overlap(steps, both, details):
    alphas = random_alphas(steps)
    trace = trace_of(alphas, [0.5] * steps)._replace(evidence=alphas if both else None)
    figure = figure_of(random_view(), ["word"] * steps, trace, details=details)
    boxes = [axes.get_position() for axes in figure.axes]
    assert len(boxes) == 2 + steps * (1 + (both and details)) and figure.get_figwidth() < 14
    for n, box in enumerate(boxes):
        assert 0 <= box.x0 < box.x1 <= 1 and 0 <= box.y0 < box.y1 <= 1
        assert not any(box.x0 < b.x1 and b.x0 < box.x1 and box.y0 < b.y1 and b.y0 < box.y1 for b in boxes[:n])


@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize("steps", [0, 2, 15])
@pytest.mark.parametrize("size", [(40, 40), (30, 300), (30, 900), (300, 30)])
def test_all_text_lies_inside_the_figure_and_none_on_another_at_any_aspect(size, steps, details):
    words = ["standing"] * steps
    cells = CellGrid.regular((3, 5), size[::-1])
    trace = trace_of(random_alphas(steps), [0.5] * steps)
    figure = figure_of(random_view(*size), words, trace, cells, details=details)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.findobj(Text) if text.get_text()]
    assert len(boxes) == steps * (1 + details) + (2 if steps else 1)
    for n, box in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1
        assert not any(box.overlaps(other) for other in boxes[:n])


def test_words_are_never_read_as_formulas_and_the_figure_is_saved(tmp_path):
    words = ["$x_", "a_$b$", "internationalisation-of-everything"]
    figure = figure_of(random_view(), words, trace_of(random_alphas(3), locations=[1, -1, 2]))
    assert [axes.get_title() for axes in panels(figure)] == words
    for name in ("figure.png", "figure.pdf"):
        figure.savefig(tmp_path / name)
    with Image.open(tmp_path / "figure.png") as png:
        assert png.mode == "RGBA" and np.asarray(png).std() > 0
    assert (tmp_path / "figure.pdf").read_bytes()[:4] == b"%PDF"
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_the_chosen_cell_is_framed_in_its_panel_and_soft_attention_chooses_nothing():
    chosen = [0, 14, -1]
    figure = figure_of(random_view(), ["a", "b", "c"], trace_of(random_alphas(3), locations=chosen))
    for cell, axes in zip(chosen, panels(figure), strict=True):
        height, width = pixels(axes).shape[:2]
        if cell == -1:
            assert not axes.patches
            continue
        row, column = divmod(cell, 5)
        for patch in axes.patches:
            box = patch.get_bbox()
            assert (box.x0, box.x1) == pytest.approx((column * width / 5, (column + 1) * width / 5), abs=1)
            assert (box.y0, box.y1) == pytest.approx((row * height / 3, (row + 1) * height / 3), abs=1)


def test_each_model_has_a_row_and_hard_attention_shows_the_chosen_cell_alone():
    words, chosen = ["a", "b", "c"], [0, 14, 9]
    spread = np.full((3, 15), 1 / 15)  # what hard attention drew from
    traces = {"soft": trace_of([one_hot(cell) for cell in (7, 2, 12)]), "hard": trace_of(spread, locations=chosen)}
    attention = {name: ModelAttention(trace, CELLS) for name, trace in traces.items()}
    figure = attention_figure(GRAY, words, attention, text=" ".join(words))
    assert brightest_cells(figure) == [7, 0, 2, 14, 12, 9]
    assert [axes.get_ylabel() for axes in panels(figure)] == ["soft", "hard", "", "", "", ""]
    assert [bool(axes.patches) for axes in panels(figure)] == [False, True] * 3
    assert [axes.get_title() for axes in panels(figure)[::2]] == words
    assert [axes.get_xlabel() for axes in panels(figure)] == ["", "0.067 there"] * 3  # the brightness does not say it
    end = one_hot(7).max()
    assert figure.texts[-1].get_text() == (
        f"attention per location, from 0 to {end:#.2g}; outlined: the chosen location, painted alone"
    )
    alone = attention_figure(GRAY, words, {"hard": attention["hard"]}, text="")
    assert alone.texts[-1].get_text() == "outlined: the chosen location, painted alone"
