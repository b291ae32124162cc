"""The explorer in a real Chromium: hover, click and press keys as a reader does, and check what is shown."""

import base64
import io
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from helpers import caption_of, image_data, run_data
from PIL import Image

from captioning.cells import CellGrid
from captioning.views.explorer import ExplorerData, explorer_fragment, explorer_image, explorer_page, explorer_run
from captioning.views.maps import smooth_alphas

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
playwright = pytest.importorskip("playwright.sync_api")

GRID, CELLS = (3, 4), 12
SOFT = ["two", "brown", "dogs", "run"]
HARD = ["brown", "cats", "and", "dogs", "sleep"]


def peaked(cells: list[int], rest: float = 0.02) -> np.ndarray:
    """Alphas that peak at one cell per word."""
    alphas = np.full((len(cells), CELLS), rest)
    alphas[np.arange(len(cells)), cells] = 1 - rest * (CELLS - 1)
    return alphas


def gray(width: int = 64, height: int = 48) -> Image.Image:
    return Image.new("RGB", (width, height), (128, 128, 128))


SOFT_CELLS, HARD_CELLS, OTHER_CELLS = [0, 3, 8, 11], [5, 6, 1, 10, 2], [7, 4]


def run_pair() -> list[ExplorerData]:
    other = caption_of("a dog", peaked(OTHER_CELLS), log_probs=[-4.5, -5.0], log_prob=-9.5)
    soft = run_data(
        "soft",
        " ".join(SOFT),
        alphas=peaked(SOFT_CELLS),
        betas=[0.1, 0.9, 0.8, 0.5],
        log_probs=np.log([0.5, 0.25, 0.75, 0.125]).tolist(),
        log_prob=-4.25,
        alternatives=[other],
        grid_size=GRID,
        numbers={"BLEU-4": 0.25},
    )
    chosen = [9, *HARD_CELLS[1:]]  # the first was drawn where the distribution is low
    hard = run_data("hard", " ".join(HARD), alphas=peaked(HARD_CELLS), locations=chosen, grid_size=GRID)
    return [soft, hard]


def image_set() -> list[ExplorerData]:
    boats = run_data("soft", "boats at sea", alphas=peaked([1, 2, 3]), grid_size=GRID)
    return [
        image_data(*run_pair(), name="dogs.jpg", view=gray(), references=["some dogs", "reference 0"]),
        image_data(*run_pair(), name="more dogs.jpg", view=gray(), references=["some dogs", "reference 1"]),
        image_data(boats, name="boats.jpg", view=gray()),
    ]


@pytest.fixture
def visit(browser, tmp_path) -> Iterator[Callable[..., playwright.Page]]:
    """Open a document from disk. It must make no request and log nothing to the console."""
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


def brightest(page, run: str, picture: int = 0) -> int:
    """The cell of a picture with most of the map's color: red over gray."""
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


def test_the_bar_under_a_word_is_its_probability(visit):
    page = visit()
    widths = "(bars) => bars.map((bar) => bar.offsetWidth / bar.parentElement.offsetWidth)"
    bars = panel(page, "soft").locator(".probability span").evaluate_all(widths)
    assert bars == pytest.approx([0.5, 0.25, 0.75, 0.125], abs=0.05)
    assert "probability 0.25 · weight of the image (β) 0.90" in panel(page, "soft").locator(".details").inner_text()
    assert "The bar under a word is its probability" in page.locator(".note").inner_text()


def evidence_page() -> str:
    both = run_data(
        "summed", " ".join(SOFT), alphas=peaked(SOFT_CELLS), evidence=peaked(SOFT_CELLS[::-1]), grid_size=GRID
    )
    return explorer_page([image_data(both, run_pair()[0], view=gray())])


def test_a_key_switches_between_alphas_and_evidence(visit):
    page = visit(evidence_page())
    word(page, "summed", "dogs").hover()
    pressed = page.locator('.attention[aria-pressed="true"]')
    assert pressed.inner_text() == "Where it looked"
    assert "Where the word came from: the locations whose content speaks for it." in page.locator(".note").inner_text()
    assert (brightest(page, "summed"), brightest(page, "soft")) == (SOFT_CELLS[2], SOFT_CELLS[2])
    page.keyboard.press("a")
    assert pressed.inner_text() == "Where the word came from"
    assert (brightest(page, "summed"), brightest(page, "soft")) == (SOFT_CELLS[1], SOFT_CELLS[2])
    assert "strongest in row 1, column 4" in panel(page, "summed").locator(".details").inner_text()
    assert "has no evidence" in panel(page, "soft").locator(".details").inner_text()
    assert matrix_peaks(page, "summed") == SOFT_CELLS[::-1]
    point_at(page, panel(page, "summed").locator(".stage"), 3.5 / 4, 0.5 / 3)  # cell 3
    assert "evidence 0.78" in panel(page, "summed").locator(".details").inner_text()
    page.set_viewport_size({"width": 340, "height": 800})  # as in the app on a telephone
    switches = page.locator(".group:not(.runs)")
    assert switches.evaluate_all("(groups) => groups.every((group) => group.scrollWidth <= group.clientWidth)")


def test_every_head_has_a_button(visit):
    heads = np.stack([peaked(SOFT_CELLS), peaked(SOFT_CELLS[::-1])], axis=1)  # (T, heads, L)
    run = run_data("heads", " ".join(SOFT), alphas=heads.mean(axis=1), heads=heads, grid_size=GRID)
    page = visit(explorer_page([image_data(run, run_pair()[0], view=gray())]))
    word(page, "heads", "dogs").hover()
    page.locator('.attention[data-attention="head 2"]').click()
    assert page.locator('.attention[aria-pressed="true"]').inner_text() == "Head 2"
    assert (brightest(page, "heads"), brightest(page, "soft")) == (SOFT_CELLS[1], SOFT_CELLS[2])
    assert "has no head 2" in panel(page, "soft").locator(".details").inner_text()
    page.keyboard.press("a")
    assert page.locator('.attention[aria-pressed="true"]').inner_text() == "All heads"
    page.keyboard.press("a")
    assert brightest(page, "heads") == SOFT_CELLS[2]


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
    np.testing.assert_allclose(np.reshape(smooth, cells.size), smooth_alphas(alpha, cells), rtol=1e-4, atol=1e-8)


def test_cells_are_framed_and_found_where_the_encoder_has_them(visit):
    cells = CellGrid(
        (3, 4), (2, 20), (16, 16), (48, 64)
    )  # the first row begins 6 pixels above, columns 12 to the right
    words = caption_of("here", peaked([5]), locations=[0])._replace(cells=cells)
    page = visit(explorer_page([image_data(explorer_run("own", words), view=gray())]))
    stage = panel(page, "own").locator(".stage")
    outer = stage.bounding_box()
    scale = outer["width"] / 64

    def box(kind: str) -> list[float]:
        inner = panel(page, "own").locator(f".frame.{kind}").bounding_box()
        top, left = (inner["y"] - outer["y"]) / scale, (inner["x"] - outer["x"]) / scale
        return [left, top, left + inner["width"] / scale, top + inner["height"] / scale]

    np.testing.assert_allclose(box("chosen"), cells.box(0), atol=1)
    for y, x, location in [(9.5, 27, 0), (10.5, 29, 5), (30, 27, 8), (47, 2, 8), (1, 62, 3), (20, 43, 5), (20, 45, 6)]:
        stage.hover(position={"x": x * scale, "y": y * scale})
        assert panel(page, "own").locator(".frame.marked").get_attribute("data-location") == str(location)
        np.testing.assert_allclose(box("marked"), cells.box(location), atol=1)
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


def test_a_caption_of_the_beam_shows_its_own_words_and_attention(visit):
    page = visit()
    hypothesis = panel(page, "soft").locator(".hypothesis")
    assert hypothesis.locator(".log-prob").all_inner_texts() == ["\u22124.25", "\u22129.50"]
    hypothesis.nth(1).click()
    assert panel(page, "soft").locator(".word .text").all_inner_texts() == ["a", "dog"]
    assert brightest(page, "soft") == OTHER_CELLS[1]
    page.mouse.move(2, 2)
    page.keyboard.press("ArrowLeft")
    assert brightest(page, "soft") == OTHER_CELLS[0]
    page.keyboard.press("b")
    assert panel(page, "soft").locator(".word .text").all_inner_texts() == SOFT
    assert panel(page, "hard").locator(".hypothesis").first.is_hidden()


def test_the_second_word_is_shown_first_and_arrow_keys_go_on_also_after_a_search(visit):
    page = visit()
    assert shown(page, "soft") == "brown"
    page.keyboard.press("ArrowRight")
    assert shown(page, "soft") == "dogs"
    page.keyboard.press("/")
    page.keyboard.type("boats")
    page.keyboard.press("Enter")
    for text in ("at", "sea"):
        assert (page.locator(".explorer h2").inner_text(), shown(page, "soft")) == ("boats.jpg", text)
        page.keyboard.press("ArrowRight")
    page.locator(".item").last.click()  # also while the list of images has the focus
    page.keyboard.press("ArrowLeft")
    assert (page.locator(".explorer h2").inner_text(), shown(page, "soft")) == ("boats.jpg", "at")


def test_a_map_that_prefers_no_location_is_named_and_the_scale_ends_at_the_strongest(visit):
    alphas = np.stack([np.full(CELLS, 1 / CELLS), peaked([5])[0]])
    page = visit(explorer_page([image_data(run_data("soft", "a dog", alphas=alphas, grid_size=GRID), view=gray())]))
    details = panel(page, "soft").locator(".details")
    assert "strongest in row 2, column 2" in details.inner_text()
    page.keyboard.press("ArrowLeft")
    assert "nearly even" in details.inner_text() and np.ptp(pixels(page, "soft")[:, :, 0].astype(int)) <= 1
    assert panel(page, "soft").locator(".maximum").inner_text() == f"{alphas.max():.2f}"


def test_keys_buttons_and_the_list_change_the_image(visit):
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


def test_markup_in_captions_and_names_is_shown_as_text(visit):
    trap = "<img src=x onerror=window.caught=1> </script><script>window.caught=1</script>"
    alphas = np.full((len(trap.split()), CELLS), 1 / CELLS)
    trapped = run_data(trap, trap, alphas=alphas, grid_size=GRID, numbers={trap: trap})
    page = visit(explorer_page([explorer_image(trap, gray(), [trapped], references=[trap])], trap))
    assert page.evaluate("window.caught") is None
    assert page.title() == trap
    assert page.locator(".explorer h2").inner_text() == trap
    assert page.locator(".word .text").all_inner_texts() == trap.split()
    assert page.locator(".references li").all_inner_texts() == [trap]


def test_a_page_around_the_fragment_can_lead_to_an_image(visit):
    fragment = explorer_fragment(image_set())
    page = visit(
        f"<!doctype html><button data-explore='boats.jpg'>see</button><div style='height:2000px'></div>{fragment}"
    )
    page.locator("[data-explore]").click()
    assert page.locator(".explorer h2").inner_text() == "boats.jpg"
    assert page.evaluate("document.querySelector('.explorer').getBoundingClientRect().top < innerHeight")


@pytest.mark.parametrize("width", [1280, 390])
def test_no_text_is_cut_off_at_the_side(visit, width):
    wordy = run_data("a-run-with-quite-a-long-name_" * 3, "supercalifragilisticexpialidocious " * 20)
    page = visit(explorer_page([*image_set(), image_data(wordy, name="a" * 120)]), width=width)
    for key in ("0", "n", "n", "n"):
        page.keyboard.press(key)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        right = page.evaluate(
            "Math.max(...[...document.querySelectorAll('.word, .hypothesis, .stage, .matrix, h3')]"
            ".map((item) => item.getBoundingClientRect().right))"
        )
        assert right <= width
