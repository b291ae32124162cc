"""A caption can be drawn, saved, explored and written as plain data."""

import dataclasses
import json
import re

import numpy as np
import pytest
from helpers import random_view, trace_of
from PIL import Image

from captioning.cells import CellGrid
from captioning.errors import InputError
from captioning.inference.caption import Caption, Photo
from captioning.views.explorer import explorer_image, explorer_page, explorer_run

ROWS, COLUMNS = 3, 5
CELLS = ROWS * COLUMNS


def make(text: str, seed: int) -> Caption:
    words = text.split()
    alphas = np.random.default_rng(seed).dirichlet(np.ones(CELLS), size=len(words)).astype(np.float32)
    return Caption(
        *(text, words, [-0.5] * (len(words) + 1), -0.5 * (len(words) + 1), True),
        trace=trace_of(alphas, np.linspace(0.25, 1, len(words))),
        cells=CellGrid((ROWS, COLUMNS), (3.5, 4.5), (8, 7.5), (24, 40)),
        view=Image.new("RGB", (40, 24), "gray"),
        path="cats.jpg",
    )


@pytest.fixture
def caption() -> Caption:
    best, *others = (make(text, seed) for seed, text in enumerate(["two cats sleep", "a cat", "cats sleep on mats"]))
    return dataclasses.replace(best, alternatives=others)


def hard(caption: Caption, cells: list[int]) -> Caption:
    return dataclasses.replace(caption, trace=caption.trace._replace(locations=np.array(cells)))


def test_the_figure_has_a_panel_for_every_word(caption):
    figure = caption.figure()
    assert [axes.get_title() for axes in figure.axes] == ["", *caption.words, ""]
    assert figure.get_suptitle() == "two cats sleep" and not any(axes.patches for axes in figure.axes)
    photo = random_view(160, 90)
    whole = dataclasses.replace(caption, read_photo=lambda: Photo(photo, (0.1, 0, 0.9, 1))).figure("paper").axes[0]
    assert whole.images[0].get_array().shape == (90, 160, 3) and len(whole.patches) == 2


def test_details_show_betas_and_evidence_and_hard_attention_frames_the_chosen_cell(caption, tmp_path):
    both = dataclasses.replace(caption, trace=caption.trace._replace(evidence=caption.alphas[:, ::-1]))
    assert (len(both.figure().axes), len(both.figure(details=True).axes)) == (2 + 3, 2 + 2 * 3)
    betas = [axes.get_xlabel()[:6] for axes in both.figure(details=True).axes if "\u03b2" in axes.get_xlabel()]
    assert betas == ["\u03b2 0.25", "\u03b2 0.62", "\u03b2 1.00"]
    assert sum(bool(axes.patches) for axes in hard(caption, [3, 0, 14]).figure().axes) == 3


def test_the_figure_its_details_and_json_have_the_same_numbers(caption):
    figure, alphas = caption.figure(details=True), caption.to_dict()["alphas"]
    beneath = [axes.get_xlabel().split()[5] for axes in figure.axes[1:-1]]
    assert beneath == [f"{max(alpha):#.2g}" for alpha in alphas]
    assert figure.texts[-1].get_text().endswith(f"from 0 to {max(map(max, alphas)):#.2g}")
    of_choice = hard(caption, [3, 0, 14]).figure(details=True)
    beneath = [axes.get_xlabel().partition(" · ")[2] for axes in of_choice.axes[1:-1]]
    assert beneath == [f"{alpha[cell]:#.2g} there" for alpha, cell in zip(alphas, [3, 0, 14], strict=True)]


def test_a_figure_goes_to_a_file(caption, tmp_path):
    for framed, name in [(caption, "soft.pdf"), (hard(caption, [3, 0, 14]), "hard.pdf")]:
        framed.save_figure(tmp_path / "new" / name)
        assert (tmp_path / "new" / name).read_bytes()[:4] == b"%PDF"
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        caption.save_figure(tmp_path / "file" / "figure.png")
    for name in ("figure", "figure.txt"):
        with pytest.raises(InputError, match=f"^{tmp_path / name}: must end in .png, .pdf, .svg$"):
            caption.save_figure(tmp_path / name)


def test_plain_data_survives_json(caption):
    content = json.loads(json.dumps(caption.to_dict()))
    assert (content["caption"], content["words"]) == ("two cats sleep", ["two", "cats", "sleep"])
    assert (content["image"], content["log_probs"], content["view_size"]) == ("cats.jpg", caption.log_probs, [24, 40])
    assert content["grid_size"] == [ROWS, COLUMNS] and content["cells"] == {"offset": [3.5, 4.5], "stride": [8, 7.5]}
    np.testing.assert_allclose(content["alphas"], caption.alphas, rtol=1e-5)
    np.testing.assert_allclose(content["betas"], caption.betas, rtol=1e-5)
    others = [(other["caption"], other["log_prob"]) for other in content["alternatives"]]
    assert others == [("a cat", -1.5), ("cats sleep on mats", -2.5)]
    assert content["chosen"] == [None, None, None]
    assert json.loads(json.dumps(hard(caption, [3, 0, 14]).to_dict()))["chosen"] == [3, 0, 14]


def test_the_explorer_gets_the_caption_and_its_beam(caption):
    captions = explorer_run("mine", hard(caption, [3, 0, 14]), numbers={"BLEU-4": 0.5})
    page = explorer_page([explorer_image("0.png", caption.view, [captions])])
    (text,) = re.findall(r'explorer-data">(.*?)</script>', page, flags=re.DOTALL)
    (shown,) = json.loads(text)["images"][0]["runs"]
    assert (shown["run"], shown["numbers"]) == ("mine", {"BLEU-4": 0.5})
    best, *others = shown["captions"]
    assert (best["words"], best["logProb"], best["chosen"]) == (["two", "cats", "sleep"], -2, [3, 0, 14])
    assert [" ".join(other["words"]) for other in others] == ["a cat", "cats sleep on mats"]


def test_seen_is_the_undistorted_part_of_the_photo_in_view(caption):
    assert caption.seen_photo().size == (40, 24)  # there is only the view
    photo = random_view(160, 90)
    seen = dataclasses.replace(caption, read_photo=lambda: Photo(photo, (0.25, 0, 0.75, 1))).seen_photo()
    np.testing.assert_array_equal(np.asarray(seen), np.asarray(photo)[:, 40:120])
