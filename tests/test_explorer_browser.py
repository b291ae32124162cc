"""The explorer in a real Chromium: hover, click and press keys as a reader does, and check what is shown."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from helpers import attended, explored, random_alphas, random_view, run_captions, trace_of
from PIL import Image

from captioning.cells import CellGrid
from captioning.views.explorer import ExploredImage, RunCaptions, explorer_fragment, explorer_page
from captioning.views.maps import paint, smooth_alphas
from captioning.views.overlays import attention_figure

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api")

GRID, CELLS = (3, 4), 12
SOFT = ["two", "brown", "dogs", "run"]
HARD = ["brown", "cats", "and", "dogs", "sleep"]


def peaked(cells: list[int], rest: float = 0.02) -> np.ndarray:
    """Alphas that peak at one cell per word."""
    alphas = np.full((len(cells), CELLS), rest)
    alphas[np.arange(len(cells)), cells] = 1 - rest * (CELLS - 1)
    return alphas


def lossless(view: Image.Image) -> Image.Image:
    """Colours in large patches, which the page keeps as PNG."""
    return view.resize((4, 3)).resize(view.size, Image.Resampling.NEAREST)


def grey(width: int = 64, height: int = 48) -> Image.Image:
    return Image.new("RGB", (width, height), (128, 128, 128))


SOFT_CELLS, HARD_CELLS, OTHER_CELLS = [0, 3, 8, 11], [5, 6, 1, 10, 2], [7, 4]


def run_pair(number: int = 0) -> list[RunCaptions]:
    other = attended("a dog", peaked(OTHER_CELLS), [0.1, 0.2], score=-9.5)
    soft = run_captions(
        "soft",
        " ".join(SOFT),
        alphas=peaked(SOFT_CELLS),
        betas=[0.1, 0.9, 0.8, 0.5],
        log_probs=np.log([0.5, 0.25, 0.75, 0.125]).tolist(),
        score=-4.25,
        alternatives=[other],
        grid_size=GRID,
        references=["some dogs", f"reference {number}"],
        numbers={"BLEU-4": 0.25},
    )
    chosen = [9, *HARD_CELLS[1:]]  # the first was drawn where the distribution is low
    hard = run_captions("hard", " ".join(HARD), alphas=peaked(HARD_CELLS), locations=chosen, grid_size=GRID)
    return [soft, hard]


def image_set() -> list[ExploredImage]:
    boats = run_captions("soft", "boats at sea", alphas=peaked([1, 2, 3]), grid_size=GRID)
    return [
        explored(*run_pair(0), name="dogs.jpg", view=grey()),
        explored(*run_pair(1), name="more dogs.jpg", view=grey()),
        explored(boats, name="boats.jpg", view=grey()),
    ]


@pytest.fixture
def visit(browser, tmp_path) -> Iterator[Callable[..., playwright.Page]]:
    """Open a document from disk; at the end there may be no request and no message of the console."""
    problems: list[str] = []
    opened = []

    def visit(document: str | None = None, width: int = 1280, height: int = 900, **options) -> playwright.Page:
        file = tmp_path / f"explorer{len(opened)}.html"
        file.write_text(document or explorer_page(image_set(), "Dogs & boats"), encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        opened.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)  # a machine may be busy with other tests
        page.on("console", lambda message: problems.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on(
            "request",
            lambda request: None if request.url.startswith((file.as_uri(), "data:")) else problems.append(request.url),
        )
        page.goto(file.as_uri())
        drawn = "[...document.querySelectorAll('.stage canvas')].every((canvas) => canvas.width >= 336)"
        for _ in range(600):  # wait_for_function would evaluate inside the page, which the page's policy forbids
            if page.evaluate(drawn):
                break
            page.wait_for_timeout(50)
        return page

    yield visit
    for context in opened:
        context.close()
    assert problems == []


def panel(page, run: str):
    return page.locator(f'.panel[data-run="{run}"]')


def shown(page, run: str) -> str:
    return panel(page, run).locator(".word[aria-current] .text").inner_text()


def pinned(page, run: str) -> list[str]:
    return panel(page, run).locator('.word[aria-pressed="true"] .text').all_inner_texts()


def word(page, run: str, text: str):
    return panel(page, run).locator(".word").filter(has_text=text)


def pixels(page, run: str, picture: int = 0) -> np.ndarray:
    """A drawn picture, (height, width, 3)."""
    uri = panel(page, run).locator(".stage canvas").nth(picture).evaluate("(canvas) => canvas.toDataURL('image/png')")
    with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as drawn:
        return np.asarray(drawn.convert("RGB"))


def runs_shown(page) -> list[str]:
    return [item.get_attribute("data-run") for item in page.locator(".panel").all()]


def matrix_peaks(page, run: str) -> list[int]:
    """The strongest location of each word in the matrix, which has a pixel for each."""
    matrix = panel(page, run).locator(".matrix")
    values = matrix.evaluate(
        "(canvas) => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data]"
    )
    return np.reshape(values, (-1, CELLS, 4))[:, :, 0].argmax(axis=1).tolist()


def colors(page) -> np.ndarray:
    """The different colours of the soft run's picture."""
    return np.unique(pixels(page, "soft").astype(int) @ [1, 256, 65536])


def brightest(page, run: str, picture: int = 0) -> int:
    """The cell of a picture with most of the map's colour: red over grey."""
    drawn = pixels(page, run, picture).astype(int)
    excess = drawn[:, :, 0] - drawn[:, :, 2]
    rows, columns = GRID
    y, x = np.unravel_index(excess.argmax(), excess.shape)
    return int(y * rows / excess.shape[0]) * columns + int(x * columns / excess.shape[1])


def point_at(page, locator, column: float, row: float) -> None:
    """Move the pointer to a place in an element, in fractions of its width and height."""
    locator.scroll_into_view_if_needed()
    box = locator.bounding_box()
    page.mouse.move(box["x"] + column * box["width"], box["y"] + row * box["height"])


def test_hovering_and_arrow_keys_move_the_map_and_stop_at_the_ends(visit):
    page = visit()
    for text, cell in zip(SOFT, SOFT_CELLS, strict=True):
        word(page, "soft", text).hover()
        assert (shown(page, "soft"), brightest(page, "soft")) == (text, cell)
    page.mouse.move(2, 2)
    page.keyboard.press("Home")
    seen = []
    for _ in range(len(SOFT)):
        seen.append((shown(page, "soft"), brightest(page, "soft")))
        page.keyboard.press("ArrowRight")
    assert seen == list(zip(SOFT, SOFT_CELLS, strict=True))
    assert shown(page, "soft") == "run"
    for key, text in (("ArrowLeft", "dogs"), ("Home", "two"), ("End", "run")):
        page.keyboard.press(key)
        assert shown(page, "soft") == text


def test_a_pinned_word_comes_back_when_the_pointer_leaves(visit):
    page = visit()
    word(page, "soft", "brown").click()
    assert pinned(page, "soft") == ["brown"]
    word(page, "soft", "run").hover()
    assert shown(page, "soft") == "run"
    assert pinned(page, "soft") == ["brown"]
    page.mouse.move(2, 2)
    assert shown(page, "soft") == "brown"
    assert brightest(page, "soft") == 3
    word(page, "soft", "brown").click()
    assert pinned(page, "soft") == []
    word(page, "soft", "run").hover()
    page.mouse.move(2, 2)
    assert shown(page, "soft") == "run"


def test_two_pinned_words_stand_side_by_side_with_their_own_maps(visit):
    page = visit()
    first, second = (panel(page, "soft").locator(".word-view").nth(n) for n in (0, 1))
    word(page, "soft", "brown").click()
    assert panel(page, "soft").locator(".word-view").count() == 1
    before = word(page, "soft", "dogs").bounding_box()
    word(page, "soft", "dogs").click()
    assert word(page, "soft", "dogs").bounding_box() == before  # nothing moves under the pointer
    assert pinned(page, "soft") == ["brown", "dogs"]
    assert [first.inner_text().split("\n")[0], second.inner_text().split("\n")[0]] == ["“brown”", "“dogs”"]
    assert [brightest(page, "soft", n) for n in (0, 1)] == [SOFT_CELLS[1], SOFT_CELLS[2]]
    left, right = first.bounding_box(), second.bounding_box()
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
    assert panel(page, "soft").locator(".mark.row:not([hidden])").count() == 2
    word(page, "soft", "run").hover()  # in the place of the later one, for as long as the pointer stays
    assert [brightest(page, "soft", n) for n in (0, 1)] == [SOFT_CELLS[1], SOFT_CELLS[3]]
    page.mouse.move(2, 2)
    assert [brightest(page, "soft", n) for n in (0, 1)] == [SOFT_CELLS[1], SOFT_CELLS[2]]
    word(page, "soft", "run").click()  # the third pin replaces the first
    assert pinned(page, "soft") == ["dogs", "run"]
    assert [brightest(page, "soft", n) for n in (0, 1)] == [SOFT_CELLS[2], SOFT_CELLS[3]]
    word(page, "soft", "dogs").click()
    assert pinned(page, "soft") == ["run"]
    page.mouse.move(2, 2)
    assert panel(page, "soft").locator(".word-view").count() == 1
    assert brightest(page, "soft") == SOFT_CELLS[3]
    assert panel(page, "hard").locator(".word-view").count() == 1


def test_the_keyboards_focus_stays_where_it_was_when_words_are_pinned(visit):
    page = visit()
    focused = "document.activeElement.querySelector('.text')?.textContent"
    word(page, "soft", "two").focus()
    page.keyboard.press("Enter")
    assert page.evaluate(focused) == "two"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert (page.evaluate(focused), pinned(page, "soft")) == ("dogs", ["two", "dogs"])
    page.keyboard.press("ArrowRight")
    assert (page.evaluate(focused), shown(page, "soft")) == ("run", "run")
    page.keyboard.press("1")  # one run alone, at the word shown
    assert page.evaluate(focused) == "run"
    page.keyboard.press("b")  # another caption of the beam, at its first word
    assert page.evaluate(focused) == "a"
    page.keyboard.press("Escape")
    assert page.evaluate(focused) == "a"
    word(page, "soft", "dog").click()
    assert page.evaluate(focused) == "dog"


def test_the_value_scale_ends_at_the_median_map_and_marks_even_attention(visit):
    page = visit()
    word(page, "soft", "brown").hover()
    page.locator('.style[data-style="cells"]').click()
    scale = panel(page, "soft").locator(".scale")
    assert scale.inner_text().split() == ["0", "0.78"]  # 1 - 11 * 0.02
    bar, tick = scale.locator(".bar").bounding_box(), scale.locator(".even").bounding_box()
    assert (tick["x"] + tick["width"] / 2 - bar["x"]) / bar["width"] == pytest.approx(1 / 12 / 0.78, abs=0.01)
    ramp = scale.locator("canvas").evaluate("(canvas) => [...canvas.getContext('2d').getImageData(0, 0, 256, 1).data]")
    levels = np.linspace(0, 1, 256, dtype=np.float32)
    on_white = paint(np.ones((256, 3), dtype=np.float32), levels, 1.0, "color")
    np.testing.assert_allclose(np.reshape(ramp, (256, 4))[:, :3], on_white, atol=1)


@pytest.mark.parametrize("style", ["smooth", "cells"])
def test_all_words_of_a_caption_have_one_scale(visit, style):
    alphas = peaked([5, 5, 5])
    alphas[2] = 0.2 * alphas[0] + 0.8 / CELLS
    page = visit(
        explorer_page([explored(run_captions("soft", "a cat of", alphas=alphas, grid_size=GRID), view=grey())])
    )
    page.locator(f'.style[data-style="{style}"]').click()
    ends, heights = [], []
    for text in ("cat", "of"):
        word(page, "soft", text).hover()
        ends.append(panel(page, "soft").locator(".scale .end").inner_text())
        drawn = pixels(page, "soft").astype(int)
        heights.append((drawn[:, :, 0] - drawn[:, :, 2]).max())
    assert ends[0] == ends[1]
    assert heights[1] < 0.6 * heights[0]  # a weak map looks weak


def posterior_page() -> str:
    both = run_captions(
        "marginal", " ".join(SOFT), alphas=peaked(SOFT_CELLS), posterior=peaked(SOFT_CELLS[::-1]), grid_size=GRID
    )
    return explorer_page([explored(both, run_pair()[0], view=grey())])


def test_attention_before_and_after_the_word_is_switched_where_there_are_both(visit):
    page = visit(posterior_page())
    word(page, "marginal", "dogs").hover()
    assert page.locator('.attention[aria-pressed="true"]').inner_text() == "After the word"
    assert (brightest(page, "marginal"), brightest(page, "soft")) == (SOFT_CELLS[1], SOFT_CELLS[2])
    assert "strongest in row 1, column 4" in panel(page, "marginal").locator(".details").inner_text()
    assert "has no" not in panel(page, "soft").locator(".details").inner_text()
    assert matrix_peaks(page, "marginal") == SOFT_CELLS[::-1]
    point_at(page, panel(page, "marginal").locator(".stage"), 3.5 / 4, 0.5 / 3)  # cell 3
    assert "posterior 0.78" in panel(page, "marginal").locator(".details").inner_text()
    page.keyboard.press("a")
    assert page.locator('.attention[aria-pressed="true"]').inner_text() == "Before the word"
    assert (brightest(page, "marginal"), brightest(page, "soft")) == (SOFT_CELLS[2], SOFT_CELLS[2])


def test_every_head_can_be_looked_at(visit):
    heads = np.stack([peaked(SOFT_CELLS), peaked(SOFT_CELLS[::-1])], axis=1)  # (T, h, L)
    run = run_captions("heads", " ".join(SOFT), alphas=heads.mean(axis=1), heads=heads, grid_size=GRID)
    page = visit(explorer_page([explored(run, run_pair()[0], view=grey())]))
    word(page, "heads", "dogs").hover()
    page.locator('.attention[data-attention="head 2"]').click()
    assert page.locator('.attention[aria-pressed="true"]').inner_text() == "Head 2"
    assert (brightest(page, "heads"), brightest(page, "soft")) == (SOFT_CELLS[1], SOFT_CELLS[2])
    assert "has no head 2" in panel(page, "soft").locator(".details").inner_text()
    page.keyboard.press("a")
    assert page.locator('.attention[aria-pressed="true"]').inner_text() == "All heads"
    page.keyboard.press("a")
    assert brightest(page, "heads") == SOFT_CELLS[2]


def test_without_a_posterior_there_is_nothing_to_switch(visit):
    page = visit()
    assert page.locator(".attention").count() == 0
    page.keyboard.press("a")
    assert brightest(page, "soft") == SOFT_CELLS[0]


def test_words_are_reached_by_tab_pinned_by_enter_and_unpinned_by_escape(visit):
    page = visit()
    page.locator(".play").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.querySelector('.text').textContent") == "brown"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert page.locator('.word[tabindex="0"]').count() == 2  # one stop per run
    page.keyboard.press("Enter")
    assert pinned(page, "soft") == ["brown"]
    assert "pinned" in panel(page, "soft").locator(".details").inner_text()
    page.keyboard.press("Escape")
    assert pinned(page, "soft") == []


def test_opacity_goes_from_the_untouched_view_to_the_published_figure(visit):
    page = visit()
    word(page, "soft", "brown").hover()
    page.locator("input[type=range]").fill("0")
    assert (pixels(page, "soft") == 128).all()
    page.locator("input[type=range]").fill("50")
    half = pixels(page, "soft").astype(int)
    page.locator("input[type=range]").fill("100")
    full = pixels(page, "soft").astype(int)
    np.testing.assert_allclose(half, (128 + full) / 2, atol=1)
    figure = attention_figure(
        grey(full.shape[1], full.shape[0]), ["brown"], trace_of(peaked([3])), CellGrid.regular(GRID, full.shape[:2])
    )
    published = np.asarray(figure.axes[0].images[1].get_array(), dtype=int)
    np.testing.assert_allclose(full, published, atol=3)


@pytest.mark.parametrize(("run", "locations"), [("soft", None), ("hard", [9])])
def test_a_coloured_views_map_is_the_published_figures_too(visit, run, locations):
    view = random_view(448, 336)  # as large as the explorer draws it
    image = explored(
        run_captions(run, "brown", alphas=peaked([5]), locations=locations, grid_size=GRID), view=lossless(view)
    )
    page = visit(explorer_page([image]))
    page.locator("input[type=range]").fill("100")
    drawn = pixels(page, run).astype(int)
    trace = trace_of(peaked([5]), locations=locations)
    figure = attention_figure(lossless(view), ["brown"], trace, CellGrid.regular(GRID, (336, 448)))
    published = np.asarray(figure.axes[0].images[1].get_array(), dtype=int)
    np.testing.assert_allclose(drawn, published, atol=3)


@pytest.mark.parametrize(
    "cells",
    [
        CellGrid.regular((3, 5), (96, 130)),
        CellGrid.regular((14, 14), (224, 224)),
        CellGrid.regular((7, 4), (31, 47)),
        CellGrid((14, 14), (0.5, 15.5), (16, 16), (224, 224)),
        CellGrid((3, 4), (7, 2.25), (8, 10.5), (31, 47)),
    ],
)
def test_the_map_is_smoothed_as_in_overlays(visit, cells):
    page = visit()
    rows, columns = cells.grid_size
    alpha = np.random.default_rng(0).dirichlet(np.ones(rows * columns))
    fractions = {name: np.divide(getattr(cells, name), cells.size).tolist() for name in ("offset", "stride")}
    smooth = page.locator(".explorer").evaluate(
        "(root, [alpha, ...sizes]) => [...root.explorer.map.smooth(alpha, ...sizes)]",
        [alpha.tolist(), {"rows": rows, "columns": columns, **fractions}, *cells.size],
    )
    np.testing.assert_allclose(np.reshape(smooth, cells.size), smooth_alphas(alpha, cells), rtol=1e-4)


def test_cells_are_drawn_flat(visit):
    page = visit()
    assert len(colors(page)) > 50
    page.locator('.style[data-style="cells"]').click()
    assert page.locator('.style[data-style="cells"]').get_attribute("aria-pressed") == "true"
    assert len(colors(page)) == 2
    assert brightest(page, "soft") == 0
    page.keyboard.press("s")
    assert len(colors(page)) > 50


def test_cells_are_framed_and_found_where_the_encoder_has_them(visit):
    cells = CellGrid(
        (3, 4), (2, 20), (16, 16), (48, 64)
    )  # the first row begins 6 pixels above, columns 12 to the right
    words = attended("here", peaked([5]), locations=[0])
    page = visit(explorer_page([explored(RunCaptions("own", [words], cells), view=grey())]))
    stage = panel(page, "own").locator(".stage")
    outer = stage.bounding_box()
    scale = outer["width"] / 64

    def box(kind: str) -> list[float]:
        inner = panel(page, "own").locator(f".frame.{kind}").bounding_box()
        top, left = (inner["y"] - outer["y"]) / scale, (inner["x"] - outer["x"]) / scale
        return [top, top + inner["height"] / scale, left, left + inner["width"] / scale]

    np.testing.assert_allclose(box("chosen"), cells.square(0), atol=1)
    for y, x, location in [(9.5, 27, 0), (10.5, 29, 5), (30, 27, 8), (47, 2, 8), (1, 62, 3), (20, 43, 5), (20, 45, 6)]:
        stage.hover(position={"x": x * scale, "y": y * scale})
        assert panel(page, "own").locator(".frame.marked").get_attribute("data-location") == str(location)
        np.testing.assert_allclose(box("marked"), cells.square(location), atol=1)
    page.locator('.style[data-style="cells"]').click()
    drawn = pixels(page, "own").astype(int)
    factor = drawn.shape[1] / 64
    at = lambda y, x: drawn[int(y * factor), int(x * factor)].sum()  # noqa: E731
    inside = at(11, 29)  # cell 5: rows 10 .. 26, columns 28 .. 44
    assert inside == at(25, 43) and inside > 20 + max(at(9, 29), at(11, 27), at(25, 45), at(27, 43))


def test_the_chosen_cell_is_framed_where_it_was_chosen(visit):
    page = visit()
    frame = panel(page, "hard").locator(".frame.chosen")
    stage = panel(page, "hard").locator(".stage")
    for text, cell in zip(HARD, [9, *HARD_CELLS[1:]], strict=True):
        word(page, "hard", text).hover()
        inner, outer = frame.bounding_box(), stage.bounding_box()
        row = (inner["y"] + inner["height"] / 2 - outer["y"]) / outer["height"] * GRID[0]
        column = (inner["x"] + inner["width"] / 2 - outer["x"]) / outer["width"] * GRID[1]
        assert int(row) * GRID[1] + int(column) == cell
    assert brightest(page, "hard") == HARD_CELLS[-1]
    assert panel(page, "soft").locator(".frame.chosen").is_hidden()


def test_keys_and_buttons_switch_runs_and_keep_the_word(visit):
    page = visit()
    assert runs_shown(page) == ["soft", "hard"]
    word(page, "soft", "dogs").hover()
    page.keyboard.press("2")
    assert (runs_shown(page), shown(page, "hard")) == (["hard"], "dogs")
    for key, runs in (("1", ["soft"]), ("9", ["soft"]), ("0", ["soft", "hard"])):
        page.keyboard.press(key)
        assert runs_shown(page) == runs
    for button, runs in (("1", ["hard"]), ("all", ["soft", "hard"])):
        page.locator(f'.run[data-run="{button}"]').click()
        assert runs_shown(page) == runs


def test_the_other_run_follows_to_the_same_word(visit):
    page = visit()
    word(page, "soft", "dogs").hover()
    assert shown(page, "hard") == "dogs"
    assert brightest(page, "hard") == 10
    word(page, "soft", "run").hover()
    assert shown(page, "hard") == "dogs"  # it has no such word
    word(page, "hard", "brown").hover()
    assert shown(page, "soft") == "brown"


def test_a_caption_of_the_beam_shows_its_own_words_and_attention(visit):
    page = visit()
    hypothesis = panel(page, "soft").locator(".hypothesis")
    assert hypothesis.locator(".score").all_inner_texts() == ["\u22124.25", "\u22129.50"]
    hypothesis.nth(1).click()
    assert panel(page, "soft").locator(".word .text").all_inner_texts() == ["a", "dog"]
    assert brightest(page, "soft") == OTHER_CELLS[0]
    page.mouse.move(2, 2)
    page.keyboard.press("ArrowRight")
    assert brightest(page, "soft") == OTHER_CELLS[1]
    page.keyboard.press("b")
    assert panel(page, "soft").locator(".word .text").all_inner_texts() == SOFT
    assert panel(page, "hard").locator(".hypothesis").first.is_hidden()


def test_a_word_of_low_probability_looks_unsure_and_says_so(visit):
    page = visit()
    titles = [item.get_attribute("title") for item in panel(page, "soft").locator(".word").all()]
    assert titles == ["p = 0.50", "p = 0.25", "p = 0.75", "p = 0.13"]
    assert panel(page, "soft").locator(".unsure .text").all_inner_texts() == ["run"]
    assert panel(page, "soft").get_by_role("button", name="run (unsure)").count() == 1
    decoration = "(item) => getComputedStyle(item).textDecorationStyle"
    assert word(page, "soft", "run").locator(".text").evaluate(decoration) == "dotted"
    assert panel(page, "hard").locator(".word[title], .unsure").count() == 0  # nothing is known there


def test_a_single_image_needs_no_list_of_images(visit):
    page = visit(explorer_page(image_set()[:1]))
    assert page.locator(".explorer aside").is_hidden() and page.locator(".next").is_hidden()
    assert "search" not in page.locator(".keys").inner_text()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.tagName") == "BODY"


def test_a_gate_is_a_bar_as_long_as_beta(visit):
    page = visit()
    for item, beta in zip(panel(page, "soft").locator(".word").all(), [0.1, 0.9, 0.8, 0.5], strict=True):
        outer, inner = (item.locator(place).bounding_box()["width"] for place in (".gate", ".gate span"))
        assert inner / outer == pytest.approx(beta, abs=0.05)
    assert panel(page, "hard").locator(".gate").count() == 0


def test_the_details_say_probability_gate_and_place(visit):
    page = visit()
    word(page, "soft", "dogs").hover()
    text = panel(page, "soft").locator(".details").inner_text()
    assert text.startswith("\u201cdogs\u201d, word 3 of 4 \u00b7 probability 0.75 \u00b7 \u03b2 0.80")
    assert "strongest in row 3, column 1" in text
    assert text in page.locator("[aria-live=polite]").text_content()
    word(page, "hard", "cats").hover()
    assert "chose row 2, column 3" in panel(page, "hard").locator(".details").inner_text()
    word(page, "hard", "brown").hover()
    assert "chose row 3, column 2" in panel(page, "hard").locator(".details").inner_text()


def unfold_matrix(page, run: str) -> None:
    panel(page, run).locator(".matrix-box summary").click()


def test_the_matrix_is_folded_away_until_it_is_asked_for(visit):
    page = visit()
    page.keyboard.press("1")
    matrix, summary = panel(page, "soft").locator(".matrix"), panel(page, "soft").locator(".matrix-box summary")
    assert matrix.is_hidden() and "Matrix of words" in summary.inner_text()
    summary.focus()
    page.keyboard.press("Enter")
    assert matrix.is_visible() and pinned(page, "soft") == []
    page.keyboard.press("n")  # it stays open at the next image
    assert panel(page, "soft").locator(".matrix").is_visible()


def test_a_matrix_cell_shows_its_word_and_marks_its_location(visit):
    page = visit()
    unfold_matrix(page, "soft")
    matrix = panel(page, "soft").locator(".matrix")
    assert matrix.evaluate("(canvas) => [canvas.width, canvas.height]") == [CELLS, len(SOFT)]
    assert matrix_peaks(page, "soft") == SOFT_CELLS
    point_at(page, matrix, 6.5 / CELLS, 2.5 / 4)
    assert shown(page, "soft") == "dogs"
    for run in ("soft", "hard"):
        here = panel(page, run).locator(".frame.marked")
        assert here.is_visible()
        assert here.get_attribute("data-location") == "6"
    assert "in row 2, column 3" in panel(page, "soft").locator(".details").inner_text()
    page.mouse.move(2, 2)
    assert panel(page, "soft").locator(".frame.marked").is_hidden()


def test_a_location_is_marked_in_panels_of_the_same_grid_alone(visit):
    soft, hard = run_pair()
    turned = run_captions("turned", "some dogs", alphas=peaked([2, 6]), grid_size=GRID[::-1])
    page = visit(explorer_page([explored(soft, turned, hard, view=grey())]))
    unfold_matrix(page, "soft")
    point_at(page, panel(page, "soft").locator(".matrix"), 6.5 / CELLS, 2.5 / 4)
    for run, marked in (("soft", True), ("turned", False), ("hard", True)):
        assert panel(page, run).locator(".frame.marked").is_visible() == marked, run


def test_the_matrix_can_be_walked_with_arrow_keys(visit):
    page = visit()
    unfold_matrix(page, "soft")
    panel(page, "soft").locator(".matrix").focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert shown(page, "soft") == "brown"
    assert panel(page, "soft").locator(".frame.marked").get_attribute("data-location") == "2"
    page.keyboard.press("Enter")
    assert pinned(page, "soft") == ["brown"]


def test_pointing_at_the_picture_shades_the_words_that_looked_there(visit):
    page = visit()
    word(page, "soft", "brown").click()
    point_at(page, panel(page, "soft").locator(".stage"), 0.5 / 4, 2.5 / 3)  # cell 8, where "dogs" looked
    shades = [
        float(item.evaluate("(item) => item.style.getPropertyValue('--share')"))
        for item in panel(page, "soft").locator(".word").all()
    ]
    assert shades[2] == 1
    assert max(shades[:2] + shades[3:]) < 0.1
    assert shown(page, "soft") == "brown"


def test_images_go_by_keys_buttons_and_list(visit):
    page = visit()
    name, position = page.locator(".explorer h2"), page.locator(".position")
    assert (name.inner_text(), position.inner_text()) == ("dogs.jpg", "1 / 3")
    page.keyboard.press("n")
    assert (name.inner_text(), position.inner_text()) == ("more dogs.jpg", "2 / 3")
    assert page.locator(".references li").all_inner_texts() == ["some dogs", "reference 1"]
    page.locator(".next").click()
    page.locator(".next").click()
    assert name.inner_text() == "boats.jpg"
    assert page.locator(".panel").count() == 1
    assert page.locator(".references").is_hidden()
    page.keyboard.press("p")
    assert name.inner_text() == "more dogs.jpg"
    page.locator(".item").first.click()
    assert name.inner_text() == "dogs.jpg"
    assert page.locator('.item[aria-selected="true"]').get_attribute("data-index") == "0"
    page.locator(".item").first.focus()
    page.keyboard.press("ArrowDown")
    assert name.inner_text() == "more dogs.jpg"


def test_an_image_is_found_as_it_was_left(visit):
    page = visit()
    word(page, "soft", "dogs").click()
    page.mouse.move(2, 2)
    page.keyboard.press("n")
    page.keyboard.press("p")
    assert (shown(page, "soft"), pinned(page, "soft")) == ("dogs", ["dogs"])


def test_searching_keeps_the_images_that_have_all_words(visit):
    page = visit()
    page.keyboard.press("/")
    page.keyboard.type("sea boat")
    assert page.locator(".item:visible").count() == 1
    assert page.locator(".count").inner_text() == "1 of 3"
    assert page.locator(".explorer h2").inner_text() == "boats.jpg"
    page.keyboard.press("Escape")
    assert page.locator(".item:visible").count() == 3
    page.keyboard.type("reference 1")
    assert page.locator(".explorer h2").inner_text() == "more dogs.jpg"
    assert page.locator(".position").inner_text() == "1 / 1"
    page.keyboard.type(" nonsense")
    assert page.locator(".item:visible").count() == 0
    assert page.locator(".explorer h2").inner_text() == "more dogs.jpg"


def test_play_goes_through_the_words_and_ends(visit):
    page = visit()
    page.clock.install()
    page.keyboard.press(" ")
    seen = [shown(page, "soft")]
    for _ in SOFT:
        page.clock.run_for(850)
        seen.append(shown(page, "soft"))
    assert seen == [*SOFT, "run"]
    assert page.locator(".play").get_attribute("aria-pressed") == "false"


def test_keys_leave_text_fields_and_the_browsers_own_alone(visit):
    page = visit()
    page.locator("input[type=search]").focus()
    page.keyboard.type("2nsp")
    assert page.locator("input[type=search]").input_value() == "2nsp"
    assert page.locator(".panel").count() == 2
    page.locator("input[type=range]").focus()
    page.keyboard.press("ArrowRight")
    assert shown(page, "soft") == "two"


def test_markup_in_captions_and_names_is_shown_as_text(visit):
    trap = "<img src=x onerror=window.caught=1> </script><script>window.caught=1</script>"
    alphas = np.full((len(trap.split()), CELLS), 1 / CELLS)
    trapped = run_captions(trap, trap, alphas=alphas, grid_size=GRID, references=[trap], numbers={trap: trap})
    page = visit(explorer_page([ExploredImage(grey(), trap, [trapped])], trap))
    assert page.evaluate("window.caught") is None
    assert page.title() == trap
    assert page.locator(".explorer h2").inner_text() == trap
    assert page.locator(".word .text").all_inner_texts() == trap.split()
    assert page.locator(".references li").all_inner_texts() == [trap]


def test_a_caption_without_words_and_a_page_without_images_say_so(visit):
    page = visit(explorer_page([explored(run_captions("soft", "", alphas=[]), view=grey())]))
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert (pixels(page, "soft") == 128).all()
    assert page.locator(".details").inner_text() == "This caption has no words."
    page = visit(explorer_page([]))
    page.keyboard.press("n")
    page.keyboard.press("ArrowRight")
    assert page.locator(".panels").inner_text() == "There are no images to explore."


def test_a_page_around_the_fragment_can_lead_to_an_image(visit):
    fragment = explorer_fragment(image_set())
    page = visit(
        f"<!doctype html><button data-explore='boats.jpg'>see</button><div style='height:2000px'></div>{fragment}"
    )
    page.locator("[data-explore]").click()
    assert page.locator(".explorer h2").inner_text() == "boats.jpg"
    assert page.evaluate("document.querySelector('.explorer').getBoundingClientRect().top < innerHeight")


def test_two_explorers_on_a_page_do_not_disturb_each_other(visit):
    fragment = explorer_fragment(image_set()[:1])
    page = visit(f"<!doctype html>{fragment}{fragment}")
    first, second = page.locator(".explorer").nth(0), page.locator(".explorer").nth(1)
    second.locator(".word").nth(2).click()
    page.keyboard.press("ArrowRight")
    assert first.locator(".panel").first.locator(".word[aria-current] .text").inner_text() == "two"
    assert second.locator(".panel").first.locator(".word[aria-current] .text").inner_text() == "run"


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut_off_at_the_side(visit, width):
    wordy = run_captions("a-run-with-quite-a-long-name_" * 3, "supercalifragilisticexpialidocious " * 20)
    page = visit(explorer_page([*image_set(), explored(wordy, name="a" * 120)]), width=width)
    for key in ("0", "n", "n", "n"):
        page.keyboard.press(key)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        right = page.evaluate(
            "Math.max(...[...document.querySelectorAll('.word, .hypothesis, .stage, .matrix, h3')]"
            ".map((item) => item.getBoundingClientRect().right))"
        )
        assert right <= width


def test_a_phone_shows_one_run_and_a_tap_pins(visit):
    page = visit(width=390, height=844, has_touch=True, is_mobile=True)
    assert page.locator(".panel").count() == 1
    word(page, "soft", "dogs").tap()
    assert (shown(page, "soft"), pinned(page, "soft")) == ("dogs", ["dogs"])
    assert brightest(page, "soft") == 8
    page.locator('.run[data-run="1"]').tap()
    assert shown(page, "hard") == "dogs"
    page.locator('.run[data-run="all"]').tap()
    boxes = [item.bounding_box() for item in page.locator(".panel").all()]
    assert boxes[0]["x"] == boxes[1]["x"]
    assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"]
    smallest = page.evaluate(
        "Math.min(...[...document.querySelectorAll('.word, .run, .style, .play, .next, .hypothesis')]"
        ".map((item) => item.getBoundingClientRect().height || Infinity))"
    )
    assert smallest >= 36


def test_runs_stand_side_by_side_on_a_wide_screen(visit):
    long = run_captions(
        "a run of a name that needs several lines " * 3, alphas=random_alphas(3), numbers={"score": 1.0}
    )
    page = visit(explorer_page([explored(*run_pair(), long)]), width=1400)
    boxes = [stage.bounding_box() for stage in page.locator(".stage").all()]
    assert len({box["y"] for box in boxes}) == 1
    assert all(one["x"] + one["width"] <= other["x"] for one, other in itertools.pairwise(boxes))


@pytest.mark.parametrize("size", [(40, 120), (120, 40)])
def test_a_picture_of_any_shape_leaves_room_for_its_words(visit, size):
    page = visit(explorer_page([explored(*run_pair(), view=grey(*size))]))
    box = panel(page, "soft").locator(".stage").bounding_box()
    assert box["width"] / box["height"] == pytest.approx(size[0] / size[1], rel=0.02)
    assert word(page, "soft", "two").bounding_box()["y"] < 900


# WCAG's contrast ratio of each piece of text that is seen with the colour behind it, in [ratio, text] pairs.
CONTRASTS = """() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = (color) => parse(color).slice(0, 3)
    .map((level) => level / 255)
    .map((level) => (level <= 0.04045 ? level / 12.92 : ((level + 0.055) / 1.055) ** 2.4))
    .reduce((sum, level, k) => sum + level * [0.2126, 0.7152, 0.0722][k], 0);
  const opaque = (color) => (parse(color)[3] ?? 1) === 1;
  const behind = (item) => {
    while (item && !opaque(getComputedStyle(item).backgroundColor)) item = item.parentElement;
    return item ? getComputedStyle(item).backgroundColor : "rgb(255, 255, 255)";
  };
  const ratio = (one, other) => {
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const written = [...document.querySelectorAll("body *")].filter((item) => item.checkVisibility() &&
    [...item.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim()));
  const pairs = written.map((item) => [ratio(getComputedStyle(item).color, behind(item)), item.textContent.trim()]);
  const search = document.querySelector("input[type=search]");
  return [...pairs, [ratio(getComputedStyle(search, "::placeholder").color, behind(search)), "Search captions"]];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_is_readable_in_light_and_dark(visit, scheme):
    page = visit(color_scheme=scheme)
    for run in ("soft", "hard"):
        unfold_matrix(page, run)
    word(page, "soft", "two").click()
    seen = page.evaluate(CONTRASTS)
    assert {"run", "two", "References", "Matrix of words (rows) and locations (columns)"} <= {text for _, text in seen}
    assert [text for ratio, text in seen if ratio < 4.5] == []
    backgrounds = page.locator(".panel").first.evaluate("(item) => getComputedStyle(item).backgroundColor")
    assert (sum(map(int, backgrounds[4:-1].split(","))) > 600) == (scheme == "light")
