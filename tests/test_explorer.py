"""The page is complete and small, and no text can break out of its HTML."""

import base64
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
from helpers import caption_of, image_data, random_alphas, random_view, run_data
from PIL import Image

from captioning.views import maps
from captioning.views.explorer import explorer_fragment, explorer_page


def content(page: str) -> dict:
    """Return the data of the page's script."""
    (text,) = re.findall(r'<script type="application/json" class="explorer-data">(.*?)</script>', page, flags=re.S)
    return json.loads(text)


def caption(*runs: dict, rank: int = 0) -> dict:
    """Return the data of a caption of the first run in the page's script."""
    return content(explorer_page([image_data(*runs)]))["images"][0]["runs"][0]["captions"][rank]


def levels(shown: dict, kind: str = "alphas") -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(shown["attention"][kind]["levels"]), dtype=np.uint8)
    return flat.reshape(len(shown["words"]), -1)


class Tags(HTMLParser):
    """The elements of a page, and the text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = self.inside = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside not in ("script", "style"):
            self.text += data


def test_stored_alphas_are_exact_to_half_a_level_of_their_rows_maximum():
    alphas = random_alphas(3)
    shown = caption(run_data(alphas=alphas))
    peaks = np.array(shown["attention"]["alphas"]["peaks"])
    np.testing.assert_allclose(peaks, alphas.max(axis=1), rtol=1e-3)
    back = levels(shown) / 255 * peaks[:, None]
    assert (np.abs(back - alphas) <= 0.502 / 255 * peaks[:, None] + 1e-3 * alphas).all()


def test_a_caption_keeps_its_words_numbers_and_chosen_cells():
    shown = caption(
        run_data(locations=[4, -1, 14], betas=[0.25, 0.5, 1], log_probs=[-1.5, -2, -0.25, -9], log_prob=-3.75)
    )
    assert shown["words"] == ["two", "cats", "sleep"] and shown["chosen"] == [4, None, 14]
    assert shown["betas"] == [0.25, 0.5, 1] and shown["logProbs"] == [-1.5, -2, -0.25] and shown["logProb"] == -3.75
    assert caption(run_data())["betas"] is None
    empty = caption(run_data(words="", alphas=[]))
    assert empty["words"] == empty["attention"]["alphas"]["peaks"] == []


def test_alternatives_evidence_and_heads_have_their_own_attention():
    other = caption_of("a cat", random_alphas(2, seed=9), log_prob=-7.0)
    shown = caption(run_data(alternatives=[other]), rank=1)
    assert shown["words"] == ["a", "cat"] and shown["logProb"] == -7
    np.testing.assert_array_equal(levels(shown).argmax(axis=1), other.trace.alphas.argmax(axis=1))

    evidence = random_alphas(3, seed=8)
    shown = caption(run_data(evidence=evidence))
    np.testing.assert_array_equal(levels(shown, "evidence").argmax(axis=1), evidence.argmax(axis=1))

    heads = np.stack([random_alphas(3, seed=seed) for seed in range(10)], axis=1)  # (T, h, L)
    shown = caption(run_data(alphas=heads.mean(axis=1), heads=heads))
    for number in range(10):
        of_head = levels(shown, f"head {number + 1}")
        np.testing.assert_array_equal(of_head.argmax(axis=1), heads[:, number].argmax(axis=1))


def test_the_alphas_are_shown_first_and_heads_stand_beside_their_mean():
    page = explorer_page([image_data(run_data(evidence=random_alphas(3, seed=8)), run_data("hard"))])
    assert content(page)["attentions"] == {"alphas": "Where it looked", "evidence": "Where the word came from"}
    heads = np.stack([random_alphas(3, seed=seed) for seed in range(10)], axis=1)
    labels = content(explorer_page([image_data(run_data(heads=heads))]))["attentions"]
    assert list(labels) == ["alphas", *(f"head {number}" for number in range(1, 11))]
    assert (labels["alphas"], labels["head 10"]) == ("All heads", "Head 10")


def test_runs_keep_their_order_and_an_image_may_lack_a_run():
    runs = [["soft"], ["hard", "soft"], ["local"]]
    page = explorer_page([image_data(*(run_data(run) for run in of_image)) for of_image in runs])
    assert content(page)["runs"] == ["soft", "hard", "local"]
    assert [[shown["run"] for shown in image["runs"]] for image in content(page)["images"]] == runs
    assert content(explorer_page([]))["images"] == []


def test_numbers_of_a_caption_may_be_words_or_missing():
    page = explorer_page([image_data(run_data(numbers={"BLEU-4": 0.123456, "kind": "best", "CIDEr": float("nan")}))])
    assert content(page)["images"][0]["runs"][0]["numbers"] == {"BLEU-4": 0.1235, "kind": "best", "CIDEr": None}


def test_a_small_view_is_stored_exactly_and_a_large_photo_at_the_size_of_a_screen():
    drawing = random_view()
    image = content(explorer_page([image_data(view=drawing)]))["images"][0]
    kind, _, text = image["view"].partition(";base64,")
    assert kind == "data:image/png" and (image["width"], image["height"]) == drawing.size
    with Image.open(io.BytesIO(base64.b64decode(text))) as back:
        np.testing.assert_array_equal(np.asarray(back.convert("RGB")), np.asarray(drawing))
    image = content(explorer_page([image_data(view=random_view(1500, 1000))]))["images"][0]
    assert image["view"].startswith("data:image/jpeg;base64,") and (image["width"], image["height"]) == (1024, 683)


TRAP = "</script><script>alert(1)</script><!--<script> & \"'\u2028"


def test_no_text_can_end_the_pages_script():
    trapped = run_data(TRAP, words=TRAP, alphas=random_alphas(len(TRAP.split())), numbers={TRAP: TRAP})
    page = explorer_page([image_data(trapped, name=TRAP, references=[TRAP])], "a <b> & $title")
    tags = Tags(page)
    assert [tag for tag, _ in tags.seen].count("script") == 2
    assert "alert(1)" not in tags.text
    image = content(page)["images"][0]
    assert image["name"] == image["references"][0] == image["runs"][0]["run"] == TRAP
    assert image["runs"][0]["numbers"] == {TRAP: TRAP}
    assert image["runs"][0]["captions"][0]["words"] == TRAP.split()
    assert "<title>a &lt;b&gt; &amp; $title</title>" in page


def test_the_page_needs_no_network():
    page = explorer_page([image_data()])
    for tag, attributes in Tags(page).seen:
        for name in ("src", "href", "srcset", "data", "action"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|url\(|@import|fetch\(|import\(", page)


def test_a_fragment_is_one_section():
    fragment = explorer_fragment([image_data()])
    assert fragment.startswith('<section class="explorer"') and fragment.rstrip().endswith("</section>")
    assert not {"html", "head", "body"} & {tag for tag, _ in Tags(fragment).seen}


def test_the_map_is_drawn_with_the_overlays_constants():
    drawn = content(explorer_page([]))["map"]
    colors = np.frombuffer(base64.b64decode(drawn.pop("colors")), dtype=np.uint8).reshape(256, 3)
    np.testing.assert_allclose(colors / 255, maps.map_colors(), atol=0.5 / 255 + 1e-6)
    constants = {"sigmaOfSide": maps.SIGMA_OF_SIDE, "sigmaOfCell": maps.SIGMA_OF_CELL, "nearlyEven": maps.NEARLY_EVEN}
    assert drawn == constants | {"style": maps.STYLES["color"]}


def test_an_image_costs_less_than_a_tenth_of_a_megabyte():
    """224 x 224 pixels of noise are a worst case for JPEG; two runs with a beam of three, 12 words on 14 x 14."""
    words = " ".join(["word"] * 12)
    other = caption_of(words, random_alphas(12, 196))
    options = {"alphas": random_alphas(12, 196), "grid_size": (14, 14), "alternatives": [other, other]}
    image = image_data(*(run_data(run, words, **options) for run in ("soft", "hard")), view=random_view(224, 224))
    one, two = (len(explorer_page([image] * n)) for n in (1, 2))
    assert two - one < 150_000 and two - one - len(image["view"]) < 30_000
