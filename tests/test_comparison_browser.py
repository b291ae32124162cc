"""The comparison's page in a real Chromium: it fits the window, is readable in light and dark, and has the explorer."""

import pytest
from helpers import image_data, run_data
from helpers_runs import make_captions, run_of

from captioning.comparison.compare import compare_runs
from captioning.comparison.page import comparison_page
from captioning.views.explorer import explorer_fragment

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
pytest.importorskip("playwright.sync_api")

CURVES = {
    "soft": {"val/bleu4": [(0, 1.0), (500, 3.25), (1000, 2.5)], "val/nll": [(0, 2.0), (1000, 1.5)]},
    "hard": {"val/bleu4": [(0, 2.0), (1000, 4.75)], "val/nll": [(0, 2.5)]},
}


@pytest.fixture(scope="module")
def document(tmp_path_factory) -> str:
    """The page of two runs, with an explorer and settings that differ."""
    runs = [
        run_of(name, make_captions(12, skill, seed=i), curves=CURVES[name], settings={"model": {"rate": i}})
        for i, (name, skill) in enumerate([("soft", 0.5), ("hard", 0.9)])
    ]
    comparison = compare_runs(runs, resamples=30, images=3)
    images = [
        image_data(*(run_data(name, text) for name, text in item.captions.items()), name=item.name)
        for item in comparison.disagreements
    ]
    page = tmp_path_factory.mktemp("page") / "comparison.html"
    page.write_text(comparison_page(comparison, explorer=explorer_fragment(images)), encoding="utf-8")
    return page.as_uri()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_the_page_fits_its_window_on_light_and_dark_paper(browser, document, width, scheme):
    errors: list[str] = []
    opened = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    opened.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(document)
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    dark = opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 19, 18)"
    assert dark == (scheme == "dark")
    shown = opened.locator("body").inner_text()
    assert all(part in shown for part in ("one seed each", "BLEU-4", "soft", "Where the runs disagree"))
    table = opened.locator("table").first.bounding_box()
    assert table["y"] < 900 and not any(part in shown for part in ("optimizer steps", "image 1"))  # the rest is folded
    for column in opened.locator("thead").first.locator("th").all():  # of both runs, also on a phone
        box = column.bounding_box()
        assert box["x"] + box["width"] <= width
    for folded in opened.locator("main > details > summary").all():
        folded.click()
    assert "val/nll" in opened.locator("body").inner_text()
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.locator(".charts img").count() == 2
    assert all(picture.evaluate("(item) => item.naturalWidth") for picture in opened.locator(".charts img").all())
    assert errors == []
    opened.close()
