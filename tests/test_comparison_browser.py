"""What a reader does on the comparison's page, done in a real Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from helpers import explored, random_alphas, random_view, run_captions
from helpers_runs import make_captions, run_of

from captioning.comparison.compare import compare
from captioning.comparison.page import comparison_page
from captioning.views.explorer import data_uri, explorer_fragment

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api")

CURVES = {
    "soft": {"val/bleu4": [(0, 1.0), (500, 3.25), (1000, 2.5)], "val/nll": [(0, 2.0), (1000, 1.5)]},
    "hard": {"val/bleu4": [(0, 2.0), (1000, 4.75)], "val/nll": [(0, 2.5)]},
}


@pytest.fixture(scope="module")
def document(tmp_path_factory) -> str:
    """The page of two runs, with an explorer, thumbnails and settings that differ."""
    runs = [
        run_of(name, make_captions(12, skill, seed=i), curves=CURVES[name], settings={"model": {"rate": i}})
        for i, (name, skill) in enumerate([("soft", 0.5), ("hard", 0.9)])
    ]
    comparison = compare(runs, resamples=30, images=3)
    images = [
        explored(
            *(
                run_captions(name, text, alphas=random_alphas(len(text.split())))
                for name, text in item.captions.items()
            ),
            name=item.name,
        )
        for item in comparison.disagreements
    ]
    for item in comparison.disagreements:
        item.thumbnail = data_uri(random_view())
    page = tmp_path_factory.mktemp("page") / "comparison.html"
    page.write_text(comparison_page(comparison, explorer=explorer_fragment(images)), encoding="utf-8")
    return page.as_uri()


@pytest.fixture(params=[1280, 390])
def page(browser, document, request) -> Iterator[playwright.Page]:
    """The page, at two widths; an error in its scripts is a failure."""
    opened = browser.new_page(viewport={"width": request.param, "height": 900})
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    opened.goto(document)
    yield opened
    opened.close()
    assert errors == []


def test_nothing_is_wider_than_the_window(page):
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]


def test_a_phones_first_screen_has_verdict_table_and_curve_and_the_rest_is_folded(page):
    phone = page.viewport_size["width"] < 600
    assert page.locator(".scroll").first.evaluate("(item) => item.scrollWidth - item.clientWidth") == 0
    curve = page.locator(".lead .chart").first.bounding_box()
    assert page.locator(".verdict").bounding_box()["y"] < page.locator(".scroll").first.bounding_box()["y"]
    assert curve["y"] + curve["height"] <= 900
    opened = page.evaluate("[...document.querySelectorAll('details.part:not(.curves)')].map((part) => part.open)")
    assert len(opened) == 4 and set(opened) == {not phone}
    height = page.evaluate("document.documentElement.scrollHeight")
    assert not phone or height < 1700
    interval = page.locator(".lead .interval").first
    assert interval.is_visible() == (not phone)
    if phone:
        page.locator(".intervals input").check()
        assert interval.is_visible()


def test_a_desktops_width_is_used(browser, document):
    opened = browser.new_page(viewport={"width": 1440, "height": 900})
    opened.goto(document)
    boxes = opened.evaluate(
        "[...document.querySelectorAll('.lead > *, .tables')].map((part) => part.getBoundingClientRect().toJSON())"
    )
    verdict, charts, tables = boxes
    assert verdict["left"] <= 20 and charts["left"] - verdict["right"] <= 20
    assert charts["right"] >= 1400 and tables["right"] - tables["left"] >= 1380
    shared = opened.evaluate("document.querySelector('.lead .scroll').getBoundingClientRect().width")
    assert shared == pytest.approx(verdict["width"])
    opened.close()


# Every text node's colour against what is behind it, as WCAG 2 defines contrast; transparent layers are mixed.
CONTRASTS = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], base) => [r, g, b].map((value, i) => value * a + base[i] * (1 - a));
  const behind = (item) => {
    if (!item) return [255, 255, 255];
    const color = rgba(getComputedStyle(item).backgroundColor);
    return color[3] === 1 ? color.slice(0, 3) : over(color, behind(item.parentElement));
  };
  const luminance = (color) => {
    const [r, g, b] = color.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim();
    const item = walker.currentNode.parentElement;
    if (!text || item.closest("script, style, noscript") || !item.checkVisibility()) continue;
    const style = getComputedStyle(item);
    const base = behind(item);
    const color = over(rgba(item.closest("svg") ? style.fill : style.color), base);
    const [light, dark] = [luminance(color), luminance(base)].sort((a, b) => b - a);
    found.push([(light + 0.05) / (dark + 0.05), text]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_its_background(browser, document, scheme):
    errors: list[str] = []
    opened = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    opened.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(document)
    opened.evaluate("document.querySelectorAll('details').forEach((fold) => (fold.open = true))")
    dark = opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 19, 18)"
    assert dark == (scheme == "dark")
    found = opened.evaluate(CONTRASTS)
    texts = " ".join(text for _, text in found)
    assert all(part in texts for part in ("difference", "BLEU-4", "soft", "val/nll", "1,000", "Map", "How to"))
    assert [(round(ratio, 2), text) for ratio, text in found if ratio < 4.5] == []
    assert errors == []
    line = opened.locator(".chart polyline").first.evaluate("(line) => getComputedStyle(line).stroke")
    assert line == ("rgb(102, 170, 209)" if dark else "rgb(0, 114, 178)")  # the second is too dark on dark paper
    opened.close()


def test_paper_shows_all_parts_and_thumbnails_in_place_of_the_explorer(page):
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("main details:not([open])").count() == 0
    assert not page.locator(".explorer").is_visible()
    pictures = page.locator(".cases img")
    assert pictures.count() == 3
    assert all(picture.is_visible() and picture.evaluate("(item) => item.naturalWidth") for picture in pictures.all())
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("main details:not([open])").count() > 0


def test_the_bars_of_a_row_share_one_axis(page):
    """The place of a dot on its bar depends on the value alone."""
    if page.viewport_size["width"] < 600:
        page.locator(".intervals input").check()
    cells = page.locator(".scroll").first.locator("tr:has(.interval)").first.locator("td")
    ends = re.findall(r"[\d.]+", page.locator(".scroll th:has(.detail)").first.locator(".detail").inner_text())
    low, high = map(float, ends)
    widths = set()
    for n in range(2):
        bar, dot = (cells.nth(n).locator(part).bounding_box() for part in (".interval", ".interval circle"))
        value = float(cells.nth(n).inner_text().split()[0])
        share = (dot["x"] + dot["width"] / 2 - bar["x"]) / bar["width"]
        assert share == pytest.approx((value - low) / (high - low), abs=0.01)
        widths.add(round(bar["width"], 3))
    assert len(widths) == 1


def test_labels_of_curves_cover_no_point_and_are_not_cut_off(page):
    boxes = page.evaluate(
        """[...document.querySelectorAll(".chart")].map((chart) => ["circle", ".label"]
          .map((part) => [...chart.querySelectorAll(part)].map((item) => item.getBoundingClientRect()))
          .concat([[chart.getBoundingClientRect()]])
          .map((found) => found.map(({ left, right, top, bottom }) => ({ left, right, top, bottom }))))"""
    )
    assert [len(points) for points, *_ in boxes] == [5, 3]
    for points, labels, (chart,) in boxes:
        assert len(labels) == 2
        for label in labels:
            assert chart["left"] <= label["left"] and label["right"] <= chart["right"]
            assert all(point["right"] <= label["left"] for point in points)


@pytest.mark.parametrize("width", [1280, 390])
def test_runs_with_names_of_any_width_are_labelled_inside_their_charts_and_fold(browser, tmp_path, width):
    names = ["W" * 30, "m" * 30, "flickr8k_mobilenet_soft-seed-1", "flickr8k_mobilenet_soft-seed-2", "a"]
    curves = {"val/bleu4": [(0, 1.0), (500, 3.25), (1000, 2.5)]}
    runs = [run_of(name, make_captions(12, seed=i), curves=curves) for i, name in enumerate(names)]
    document = tmp_path / "comparison.html"
    document.write_text(comparison_page(compare(runs, resamples=30, images=0)), encoding="utf-8")
    opened = browser.new_page(viewport={"width": width, "height": 900})
    opened.goto(document.as_uri())
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    chart = opened.locator(".chart").first
    outer, labels = chart.bounding_box(), chart.locator(".label").all()
    boxes = [label.bounding_box() for label in labels]
    assert max(box["x"] + box["width"] for box in boxes) <= outer["x"] + outer["width"]
    dots = [dot.bounding_box() for dot in chart.locator("circle").all()]
    assert max(dot["x"] + dot["width"] for dot in dots) <= min(box["x"] for box in boxes)
    texts = [label.text_content() for label in labels]
    assert len(set(texts)) == len(names) and all(text[0] == name[0] for text, name in zip(texts, names, strict=True))
    opened.close()


def test_values_are_read_off_a_curve_with_the_pointer_and_with_the_keys(page):
    chart, values = page.locator(".chart").first, page.locator(".values")
    assert values.is_hidden()
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.56, box["y"] + 50)
    assert "soft 3.25 at step 500" in values.inner_text()
    around = values.bounding_box()
    assert around["x"] >= 0 and around["x"] + around["width"] <= page.viewport_size["width"]
    page.mouse.move(0, 0)
    assert values.is_hidden()
    chart.focus()
    chart.press("ArrowRight")
    assert "soft 3.25 at step 500" in values.inner_text()  # where the pointer left it
    chart.press("ArrowRight")
    assert values.inner_text().split("\n")[0] == "hard 4.75 at step 1,000"  # the higher curve first
    chart.press("ArrowLeft")
    assert "soft 3.25 at step 500" in values.inner_text()
    chart.press("Escape")
    assert values.is_hidden()


def test_a_captions_image_opens_in_the_explorer(page):
    page.evaluate("document.querySelectorAll('details.part').forEach((part) => (part.open = true))")
    page.locator("summary", has_text="as text").click()
    last = page.locator(".cases button").last
    last.click()
    assert page.locator(".explorer h2").first.inner_text() == last.get_attribute("data-explore")
