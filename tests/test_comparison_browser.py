"""The comparison's page in a real Chromium: it fits, is readable on light and dark paper, and explores."""

from __future__ import annotations

import pytest
from helpers import explored, random_alphas, run_captions
from helpers_runs import make_captions, run_of

from captioning.comparison.compare import compare
from captioning.comparison.page import comparison_page
from captioning.views.explorer import explorer_fragment

pytestmark = pytest.mark.browser
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
    page = tmp_path_factory.mktemp("page") / "comparison.html"
    page.write_text(comparison_page(comparison, explorer=explorer_fragment(images)), encoding="utf-8")
    return page.as_uri()


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


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_the_page_fits_its_window_and_every_text_stands_out_from_its_background(browser, document, width, scheme):
    errors: list[str] = []
    opened = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    opened.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(document)
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    dark = opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 19, 18)"
    assert dark == (scheme == "dark")
    found = opened.evaluate(CONTRASTS)
    texts = " ".join(text for _, text in found)
    assert all(part in texts for part in ("difference", "BLEU-4", "soft", "val/nll", "Where the runs disagree"))
    assert [(round(ratio, 2), text) for ratio, text in found if ratio < 4.5] == []
    assert opened.locator(".charts img").count() == 2
    assert all(picture.evaluate("(item) => item.naturalWidth") for picture in opened.locator(".charts img").all())
    assert errors == []
    opened.close()
