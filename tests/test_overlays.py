"""The figure shows the image and the model's view of it, and a map's maximum where the attention was."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
from helpers import trace_of
from PIL import Image

from captioning.cells import CellGrid
from captioning.views.maps import LOOKS, smooth_alphas
from captioning.views.overlays import attention_figure

CELLS = CellGrid.regular((3, 5), (40, 60))


def one_hot(cell: int, cells: int) -> np.ndarray:
    alpha = np.zeros(cells)
    alpha[cell] = 1
    return alpha


def random_view(width: int = 60, height: int = 40) -> Image.Image:
    pixels = np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def random_alphas(steps: int, cells: int) -> np.ndarray:
    return np.random.default_rng(4).dirichlet(np.ones(cells), size=steps)


def panels(figure) -> list:
    """The words' pictures: the image comes before them, the value scale after."""
    return figure.axes[0].images[1:-1]


def brightest_cells(figure) -> list[int]:
    """The cell of the 3 x 5 grid where each panel has most red."""
    cells = []
    for image in panels(figure):
        red = np.asarray(image.get_array(), dtype=float)[:, :, 0]
        y, x = np.unravel_index(red.argmax(), red.shape)
        cells.append(int((y + 0.5) * 3 / red.shape[0]) * 5 + int((x + 0.5) * 5 / red.shape[1]))
    return cells


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def drawn(figure, dpi: int = 50) -> np.ndarray:
    figure.set_dpi(dpi)
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())


@pytest.mark.parametrize(("grid", "size"), [((3, 5), (96, 130)), ((14, 14), (224, 224)), ((28, 7), (224, 112))])
def test_a_single_cells_maximum_stays_inside_that_cell(grid, size):
    rows, columns = grid
    for row in range(rows):
        for column in range(columns):
            smooth = smooth_alphas(one_hot(row * columns + column, rows * columns), CellGrid.regular(grid, size))
            y, x = np.unravel_index(smooth.argmax(), smooth.shape)
            assert (int((y + 0.5) * rows / size[0]), int((x + 0.5) * columns / size[1])) == (row, column)


@pytest.mark.parametrize("size", [(96, 130), (31, 47), (2, 3)])
def test_smoothing_keeps_the_mass(size):
    grid = (3, 5)
    for alpha in (one_hot(0, 15), one_hot(7, 15), random_alphas(1, 15)[0]):
        smooth = smooth_alphas(alpha, CellGrid.regular(grid, size))
        assert smooth.shape == size
        assert smooth.sum() == pytest.approx(size[0] * size[1] / 15, rel=1e-4)
        assert smooth.min() >= 0


def test_even_attention_stays_even_up_to_the_border():
    smooth = smooth_alphas(np.full(15, 1 / 15), CellGrid.regular((3, 5), (96, 130)))
    np.testing.assert_allclose(smooth, 1 / 15, rtol=1e-4)


def test_smoothing_is_the_authors_on_their_sizes():
    alpha = random_alphas(1, 196)[0]
    upsampled = np.kron(alpha.reshape(14, 14), np.ones((16, 16)))
    offsets = np.arange(-80, 81)
    kernel = np.exp(-0.5 * (offsets / 20) ** 2)
    kernel /= kernel.sum()
    padded = np.pad(upsampled, 80, mode="symmetric")
    for axis in (0, 1):
        padded = np.apply_along_axis(np.convolve, axis, padded, kernel, mode="valid")
    np.testing.assert_allclose(smooth_alphas(alpha, CellGrid.regular((14, 14), (224, 224))), padded, rtol=1e-4)


def smooth_maxima(alphas) -> list[float]:
    """Of panels of 336 x 224 pixels."""
    return [float(smooth_alphas(alpha, CELLS.scaled((224, 336))).max()) for alpha in alphas]


def test_the_figure_has_the_untouched_view_the_caption_a_panel_for_every_word_and_the_scale():
    view, words = random_view(), ["two", "cats", "sleep"]
    alphas = [np.full(15, 1 / 15), one_hot(7, 15), random_alphas(1, 15)[0]]
    figure = attention_figure(view, words, trace_of(alphas, [0.25, 0.5, 1]), CELLS)
    np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), np.asarray(view))
    assert len(panels(figure)) == 3
    assert texts(figure)[:-1] == ["two cats sleep", *words]
    assert texts(figure)[-1] == f"attention per location, from 0 to {np.median(smooth_maxima(alphas)):.2f} and above"


def test_numbers_beneath_the_panels_are_details():
    words, alphas = ["two", "cats", "sleep"], [np.full(15, 1 / 15), one_hot(7, 15), random_alphas(1, 15)[0]]
    figure = attention_figure(random_view(), words, trace_of(alphas, [0.25, 0.5, 1]), CELLS, details=True)
    assert texts(figure)[1:-1:2] == words
    for text, beta, maximum in zip(texts(figure)[2:-1:2], ("0.25", "0.50", "1.00"), smooth_maxima(alphas), strict=True):
        written, _, number = text.rpartition(" ")
        assert written == f"\u03b2 {beta} \u00b7 at most" and float(number) == pytest.approx(maximum, abs=0.005)


def test_all_maps_have_one_scale():
    grey = Image.new("RGB", (336, 224), "gray")
    strong = one_hot(7, 15)
    weak = 0.25 * strong + 0.75 / 15
    middle, dim = 0.5 * strong + 0.5 / 15, LOOKS["paper"].dim
    figure = attention_figure(grey, ["a", "cat", "of"], trace_of([middle, strong, weak]), CELLS, style="paper")
    maxima = smooth_maxima([middle, strong, weak])
    for image, maximum in zip(panels(figure), maxima, strict=True):
        light = dim + (1 - dim) * min(maximum / maxima[0], 1)  # the median map ends the scale
        assert np.asarray(image.get_array(), dtype=float).max() == pytest.approx(128 * light, abs=1)
    posterior = trace_of([weak])._replace(posterior=np.array([strong], dtype=np.float32))
    both = attention_figure(grey, ["cat"], posterior, CELLS, style="paper", details=True)
    prior, after = (float(np.asarray(image.get_array(), dtype=float).max()) for image in panels(both))
    maxima = smooth_maxima([weak, strong])
    assert prior == pytest.approx(128 * (dim + (1 - dim) * maxima[0] / np.mean(maxima)), abs=1) and after == 128


def test_the_whole_photo_is_shown_with_the_models_view_marked():
    photo = random_view(90, 40)
    region = (0.25, 0.0, 0.75, 1.0)
    figure = attention_figure(
        random_view(45, 40), ["cat"], trace_of(random_alphas(1, 15)), CELLS, photo=photo, region=region
    )
    shown, pixels = np.asarray(figure.axes[0].images[0].get_array()), np.asarray(photo)
    np.testing.assert_array_equal(shown[:, 22:68], pixels[:, 22:68])
    np.testing.assert_array_equal(shown[:, :22], pixels[:, :22] // 2)
    np.testing.assert_array_equal(shown[:, 68:], pixels[:, 68:] // 2)
    left, right, bottom, top = figure.axes[0].images[0].get_extent()
    assert (right - left) / (bottom - top) == pytest.approx(90 / 40)
    frame = figure.axes[0].patches[-1].get_bbox()
    assert (frame.x0 - left) / (right - left) == pytest.approx(0.25, abs=0.01)
    assert (frame.x1 - left) / (right - left) == pytest.approx(0.75, abs=0.01)


def test_maps_are_painted_on_the_photos_own_pixels_of_the_view():
    photo = random_view(1200, 800)
    region = (0.2, 0.1, 0.7, 0.6)
    figure = attention_figure(
        photo.resize((60, 40)), ["cat"], trace_of([np.zeros(15)]), CELLS, photo=photo, region=region
    )
    expected = photo.resize((448, 299), Image.Resampling.BICUBIC, box=(240, 80, 840, 480))
    dimmed = np.asarray(expected, dtype=np.float32) * LOOKS["color"].dim
    np.testing.assert_allclose(np.asarray(panels(figure)[0].get_array(), dtype=np.float32), dimmed, atol=1)


@pytest.mark.parametrize("style", ["color", "paper"])
def test_what_is_not_attended_to_is_dimmed_and_keeps_its_colour(style):
    green = Image.new("RGB", (60, 40), (20, 200, 60))
    figure = attention_figure(green, ["cat"], trace_of([one_hot(0, 15)]), CELLS, style=style)
    corner = np.asarray(panels(figure)[0].get_array(), dtype=int)[-1, -1]
    np.testing.assert_allclose(corner, np.array([20, 200, 60]) * LOOKS[style].dim, atol=1)


def test_what_is_attended_to_keeps_half_of_its_colour_under_the_map():
    red, blue = ((220, 30, 30), (30, 30, 220))
    peaks = []
    for color in (red, blue):
        figure = attention_figure(Image.new("RGB", (60, 40), color), ["cat"], trace_of([one_hot(7, 15)]), CELLS)
        pixels = np.asarray(panels(figure)[0].get_array(), dtype=int)
        peaks.append(pixels[pixels.shape[0] // 2, pixels.shape[1] // 2])
    np.testing.assert_allclose(peaks[0] - peaks[1], (np.array(red) - np.array(blue)) / 2, atol=2)


def test_the_papers_style_leaves_what_it_points_at_as_it_is():
    view = random_view(224, 224)
    grid = CellGrid.regular((14, 14), (224, 224))
    figure = attention_figure(view, ["cat"], trace_of([one_hot(7 * 14 + 7, 196)]), grid, style="paper")
    painted, pixels = np.asarray(panels(figure)[0].get_array(), dtype=float), np.asarray(view, dtype=float)
    smooth = smooth_alphas(one_hot(7 * 14 + 7, 196), grid)  # test_smoothing_is_the_authors_on_their_sizes
    peak = np.unravel_index(smooth.argmax(), smooth.shape)
    np.testing.assert_allclose(painted[peak], pixels[peak], atol=1)
    light = painted.sum(axis=2) / pixels.sum(axis=2).clip(min=1)
    assert light.max() <= 1 and light[smooth < 1e-6].max() <= LOOKS["paper"].dim  # dimmed, nowhere bleached


def test_even_attention_shows_no_pattern_and_stays_dim():
    view = Image.new("RGB", (60, 40), "gray")
    figure = attention_figure(view, ["of"], trace_of([np.full(15, 1 / 15)]), CELLS, style="paper")
    pixels = np.asarray(panels(figure)[0].get_array())
    dim = LOOKS["paper"].dim
    assert np.ptp(pixels) <= 1 and pixels.max() == pytest.approx(128 * (dim + (1 - dim) / 3), abs=1)


def test_a_posterior_replaces_its_prior_and_details_show_both():
    view = Image.new("RGB", (60, 40), "gray")
    prior, posterior = [[one_hot(cell, 15) for cell in cells] for cells in ((0, 4), (10, 14))]
    trace = trace_of(prior, [0.25, 0.5])._replace(posterior=np.array(posterior, dtype=np.float32))
    assert brightest_cells(attention_figure(view, ["a", "cat"], trace, CELLS)) == [10, 14]
    figure = attention_figure(view, ["a", "cat"], trace, CELLS, details=True)
    assert brightest_cells(figure) == [0, 10, 4, 14]
    places = [image.get_extent() for image in panels(figure)]  # left, right, bottom, top
    for before, after in (places[:2], places[2:]):
        assert before[:2] == after[:2] and after[3] > before[2]
    assert texts(figure).count("before the word (prior)") == texts(figure).count("after the word (posterior)") == 1
    assert [text[:6] for text in texts(figure) if "\u03b2" in text] == ["\u03b2 0.25", "\u03b2 0.50"]


def test_heads_stand_beneath_their_mean():
    view, words = Image.new("RGB", (60, 40), "gray"), ["two", "cats"]
    cells = [[0, 4, 14], [10, 12, 2]]  # of three heads at two words
    heads = np.array([[one_hot(cell, 15) for cell in word_cells] for word_cells in cells], dtype=np.float32)
    trace = trace_of(heads.mean(1), [0.25, 0.5])._replace(heads=heads)
    assert len(panels(attention_figure(view, words, trace, CELLS))) == 2
    figure = attention_figure(view, words, trace, CELLS, heads=True)
    brightest = brightest_cells(figure)
    assert brightest[1:4] == cells[0] and brightest[5:] == cells[1]
    assert brightest[0] in cells[0] and brightest[4] in cells[1]  # the mean has three of them
    names = [text for text in texts(figure) if "head" in text]
    assert names == ["mean of 3 heads", "head 1", "head 2", "head 3"]
    with pytest.raises(ValueError, match="the trace has no heads"):
        attention_figure(view, words, trace._replace(heads=None), CELLS, heads=True)


def test_each_panel_is_brightest_where_its_word_looked():
    grey = Image.new("RGB", (60, 40), "gray")
    cells = [0, 14, 7]
    figure = attention_figure(grey, ["a", "b", "c"], trace_of([one_hot(cell, 15) for cell in cells]), CELLS)
    assert brightest_cells(figure) == cells


def test_a_map_that_looks_everywhere_stays_darker_than_one_that_looks_somewhere():
    alphas = [np.full(15, 1 / 15), one_hot(7, 15)]
    figure = attention_figure(Image.new("RGB", (60, 40), "gray"), ["of", "cat"], trace_of(alphas), CELLS)
    even, focused = (np.asarray(image.get_array(), dtype=int).sum(axis=2) for image in panels(figure))
    assert even.max() < focused.max()
    assert even.max() - even.min() <= 3


@pytest.mark.parametrize(("both", "details"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("steps", [0, 1, 5, 6, 7, 11, 20, 30])
def test_panels_lie_inside_the_figure_and_do_not_overlap(steps, both, details):
    alphas = random_alphas(steps, 15)
    trace = trace_of(alphas, [0.5] * steps)._replace(posterior=alphas if both else None)
    figure = attention_figure(random_view(), ["word"] * steps, trace, CELLS, details=details)
    width, height = figure.get_size_inches()
    scale = figure.axes[0].images[-1]
    boxes = []
    for image in figure.axes[0].images:
        left, right, bottom, top = image.get_extent()
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        assert image is scale or (right - left) / (bottom - top) == pytest.approx(60 / 40)
        assert all(left >= r or right <= ll or top >= b or bottom <= t for ll, r, b, t in boxes)
        boxes.append((left, right, bottom, top))
    assert len(boxes) == 2 + steps * (1 + both)
    assert width < 14


def test_words_keep_clear_of_their_neighbours_and_are_never_read_as_formulas():
    words = ["$x_", "a_$b$", "internationalisation-of-everything"]
    figure = attention_figure(random_view(), words, trace_of(random_alphas(3, 15)), CELLS)
    drawn(figure)
    boxes = [text.get_window_extent() for text in figure.axes[0].texts[1:-1]]
    assert all(left.x1 <= right.x0 for left, right in itertools.pairwise(boxes))
    assert texts(figure)[1:-1] == words


def test_the_figure_can_be_drawn_and_saved_as_png_and_pdf(tmp_path):
    figure = attention_figure(random_view(), ["a", "cat"], trace_of(random_alphas(2, 15)), CELLS)
    assert drawn(figure).std() > 0
    framed = attention_figure(random_view(), ["a"], trace_of(random_alphas(1, 15), locations=[1]), CELLS)
    framed.savefig(tmp_path / "framed.pdf")
    for name in ("figure.png", "figure.pdf"):
        figure.savefig(tmp_path / name)
    with Image.open(tmp_path / "figure.png") as png:
        assert png.format == "PNG" and png.mode == "RGBA"  # true colour: a palette of 256 colours shows bands
    assert (tmp_path / "figure.pdf").read_bytes()[:4] == b"%PDF"


def test_figures_leave_nothing_behind_in_pyplot():
    attention_figure(random_view(), ["a"], trace_of(random_alphas(1, 15)), CELLS)
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alphas": random_alphas(3, 15)}, r"alphas must be \(2, 15\) for 2 words on a grid of 3 x 5, got \(3, 15\)"),
        ({"alphas": random_alphas(2, 14)}, r"got \(2, 14\)"),
        ({"betas": np.ones(1)}, r"betas must be \(2,\) for 2 words .*, got \(1,\)"),
        ({"posterior": random_alphas(2, 14)}, r"posterior must be \(2, 15\) for 2 words .*, got \(2, 14\)"),
        ({"heads": np.ones((2, 3, 14))}, r"heads must be \(2, 3, 15\) for 2 words .*, got \(2, 3, 14\)"),
        ({"locations": np.arange(3)}, r"locations must be \(2,\) for 2 words .*, got \(3,\)"),
    ],
)
def test_a_figure_of_contradicting_shapes_is_refused(changes, message):
    trace = trace_of(random_alphas(2, 15))._replace(**changes)
    with pytest.raises(ValueError, match=message):
        attention_figure(random_view(), ["a", "cat"], trace, CELLS)


def test_a_map_of_another_grid_is_refused():
    with pytest.raises(ValueError, match=r"alpha must be \(15,\) for a grid of 3 x 5, got \(14,\)"):
        smooth_alphas(np.ones(14), CellGrid.regular((3, 5), (30, 50)))


# Hard attention: the cell that was chosen over the distribution it was chosen from


def frames(figure) -> list[tuple[float, float]]:
    """The centres of the outlined cells, in inches."""
    boxes = [patch.get_bbox() for patch in figure.axes[0].patches]
    return sorted({(round((box.x0 + box.x1) / 2, 6), round((box.y0 + box.y1) / 2, 6)) for box in boxes})


def test_the_chosen_cell_is_framed_in_its_panel():
    cells = [0, 14, 7]
    figure = attention_figure(random_view(), ["a", "b", "c"], trace_of(random_alphas(3, 15), locations=cells), CELLS)
    expected = []
    for cell, image in zip(cells, panels(figure), strict=True):
        left, right, bottom, top = image.get_extent()
        row, column = divmod(cell, 5)
        centre = left + (column + 0.5) * (right - left) / 5, top + (row + 0.5) * (bottom - top) / 3
        expected.append((round(centre[0], 6), round(centre[1], 6)))
    assert frames(figure) == sorted(expected)


def test_a_frame_leaves_its_cell_free_and_is_seen_on_black_and_on_white():
    for level in (0, 255):
        view = Image.new("RGB", (50, 30), (level, level, level))
        framed, plain = (
            drawn(
                attention_figure(view, ["cat"], trace_of(random_alphas(1, 15), locations=cell), CELLS), dpi=100
            ).astype(int)
            for cell in ([7], None)
        )
        difference = np.abs(framed - plain)[:, :, :3].max(axis=2)
        assert difference.max() > 100
        figure = attention_figure(view, ["cat"], trace_of(random_alphas(1, 15), locations=[7]), CELLS)
        (x, y), height = frames(figure)[0], figure.get_size_inches()[1]
        column, row = round(x * 100), round(y * 100)
        assert 0 < y < height
        inside = framed[row - 8 : row + 8, column - 8 : column + 8, :3]  # a cell is 32 x 32 of these pixels
        assert np.abs(np.diff(inside, axis=0)).max() < 20


def test_soft_attention_chooses_nothing_even_where_it_is_certain():
    alphas = np.stack([one_hot(3, 15), random_alphas(1, 15)[0]])
    assert trace_of(alphas).chosen() == [None, None]
    figure = attention_figure(random_view(), ["a", "b"], trace_of(alphas), CELLS)
    assert frames(figure) == []
