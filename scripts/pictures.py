#!/usr/bin/env python
"""Make the pictures and captions of the examples again, after the package has got another captioner.

The examples lie in captioning/pretrained/examples. A caption that changed loses its list of wrong words: look at the
photo, write the words into examples.json ([] if all are right), and run this again. The notebook and the
explorer's picture need the extras notebook and dev, and Chromium.

examples:
  python scripts/pictures.py
  python scripts/pictures.py --only gallery figures
"""

import argparse
import copy
import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from captioning.attention import HardAttention, Memory
from captioning.errors import InputError, exits_on_input_error
from captioning.files import read_json, write_json, write_text
from captioning.inference import ImageCaptioner, load
from captioning.inference.caption import Caption
from captioning.model import AttentionDecoder, SummedOutput
from captioning.settings import command_line
from captioning.trace import AttentionTrace
from captioning.views.explorer import explorer_image, explorer_page, explorer_run
from captioning.views.maps import paint, smooth_alphas
from captioning.vocabulary import FUNCTION_WORDS, SPECIALS, START, Vocabulary

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLES = REPOSITORY / "captioning/pretrained/examples"
IMAGES = REPOSITORY / "docs/images"
GALLERY = REPOSITORY / "docs/gallery.md"
NOTEBOOK = REPOSITORY / "docs/notebooks/caption_and_look.ipynb"
SHOWN_CELLS = 6
"""Number of cells, those of the greatest alphas, whose words are shown for summed attention."""
EXAMPLE = "cows.jpg"
"""The example of README, of the explorer's picture and of how_it_works.md."""


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = {"gallery": gallery, "figures": figures, "explorer": explorer, "notebook": notebook}
    parser.add_argument("--only", nargs="+", choices=steps, default=list(steps), help="make these alone")
    args = parser.parse_args(command_line(argv))
    captioner = load()
    for name in args.only:
        steps[name](captioner)
        print(f"{name}: done", flush=True)
    if unjudged := [entry["file"] for entry in read_json(EXAMPLES / "examples.json") if entry["wrong"] is None]:
        raise InputError(f"{EXAMPLES}/examples.json: name the wrong words in the new captions of {', '.join(unjudged)}")


def gallery(captioner: ImageCaptioner[Any]) -> None:
    """Caption the examples, and write their table into the page of the gallery."""
    examples = read_json(EXAMPLES / "examples.json")
    for example in examples:
        caption = captioner.caption(str(EXAMPLES / example["file"])).text
        if caption != example.get("caption"):
            example |= {"caption": caption, "wrong": None}
            print(f"{example['file']}: {caption}")
    write_json(EXAMPLES / "examples.json", examples)
    write_text(GALLERY, with_examples(GALLERY.read_text(encoding="utf-8"), examples))


def with_examples(page: str, examples: list[dict[str, Any]]) -> str:
    """Return the gallery's page with the table of the examples."""
    lines = ["| photo | caption | what the photo shows |", "|---|---|---|"]
    for example in examples:
        wrong = set(example["wrong"] or ())
        caption = " ".join(f"<del>{word}</del>" if word in wrong else word for word in example["caption"].split())
        picture = f"![{Path(example['file']).stem}](../captioning/pretrained/examples/{example['file']})"
        lines.append(f"| {picture} | {caption} | {example['about']}. [{example['credit']}]({example['source']}) |")
    words = sum(len(example["caption"].split()) for example in examples)
    right = sum(example["wrong"] == [] for example in examples)
    wrong_words = sum(example["caption"].split().count(word) for example in examples for word in example["wrong"] or ())
    count = f"Of these {len(examples)} captions, {right} are right. Of their {words} words, {wrong_words} are wrong."
    table = "\n".join(lines)
    return re.sub(r"(?<=<!-- table -->\n).*(?=<!-- end -->)", f"\n{count}\n\n{table}\n\n", page, flags=re.DOTALL)


def figures(captioner: ImageCaptioner[Any]) -> None:
    """Draw README's figure and those of how_it_works.md."""
    caption = captioner.caption(str(EXAMPLES / EXAMPLE))
    save(caption.figure(), "photo")
    named = [step for step, word in enumerate(caption.words) if word not in FUNCTION_WORDS]
    step = max(named, key=lambda step: float(caption.alphas[step].max()))
    decoder, ids = captioner.model.decoder, [START, *captioner.vocabulary.encode(caption.words[:step])]
    with torch.inference_mode():
        memory = captioner.model.encode_views([captioner.encoder.preprocessing.to_input_batch([caption.view])])
        soft, soft_trace = next_word(decoder, memory, ids)
        hard, hard_trace = next_word(with_hard_attention(decoder), memory, ids)
        summed, _ = next_word(with_summed_output(decoder), memory, ids)
        # Eq. 7 is linear in the context: the logits with the context of one cell in place of the expectation.
        output, a, alphas = decoder.output, memory.annotations[0], soft_trace.alphas[0]
        contexts = torch.cat([a, soft_trace.betas[0] * (alphas @ a)[None]])  # (L + 1, D)
        cell_logits = output.L_z(contexts) @ output.L_o.weight.T  # (L + 1, V)
        cell_word_ids = (soft.log() + cell_logits[:-1] - cell_logits[-1:]).argmax(-1)
    vocabulary, drawn = captioner.vocabulary, int(hard_trace.locations[0])
    bars = [most_probable_words(probabilities, vocabulary) for probabilities in (soft, hard, summed)]
    save(one_word(caption, alphas.numpy(), bars[0]), "one_word")
    cell_words = [name(word, vocabulary) for word in cell_word_ids.tolist()]
    save(selections(caption, alphas.numpy(), drawn, cell_words, bars), "selections")


def next_word(decoder: AttentionDecoder, memory: Memory, ids: list[int]) -> tuple[Tensor, AttentionTrace]:
    """Return the probabilities (V,) of the word after the words ``ids``, and the trace of its step."""
    memory = decoder.to_search_memory(memory)
    state = decoder.init_state(memory)
    for token in ids:
        logits, state, trace = decoder.step(torch.tensor([token]), state, memory)
    return logits[0].softmax(-1), trace


def most_probable_words(probabilities: Tensor, vocabulary: Vocabulary) -> dict[str, float]:
    best = probabilities.topk(4)
    return {name(int(word), vocabulary): float(p) for p, word in zip(best.values, best.indices, strict=True)}


def name(word: int, vocabulary: Vocabulary) -> str:
    return vocabulary.words[word - len(SPECIALS)] if word >= len(SPECIALS) else SPECIALS[word]


def with_hard_attention(decoder: AttentionDecoder) -> AttentionDecoder:
    """Return the decoder with the same weights, whose context is the annotation of the most probable location."""
    decoder, soft = copy.deepcopy(decoder), decoder.attention
    decoder.attention = HardAttention(soft.score, normalizer=soft.normalizer, context_mode="argmax").eval()
    return decoder


def with_summed_output(decoder: AttentionDecoder) -> AttentionDecoder:
    """Return the decoder with the same weights, which sums the word's probability over the locations."""
    decoder, deep = copy.deepcopy(decoder), decoder.output
    decoder.output = SummedOutput().eval()
    for name, layer in deep.named_children():
        setattr(decoder.output, name, layer)
    return decoder


def one_word(caption: Caption, alphas: NDArray[np.float32], probabilities: dict[str, float]) -> Figure:
    """Draw the steps to one word: image, cells, score, alphas, context, word."""
    titles = "1  image", "2  cells", "3  score of each cell", "4  alphas, percent", "5  context", "6  next word"
    figure = Figure((10.5, 7.4), facecolor="white", layout="constrained")
    image, cells, score, alpha, context, word = figure.subplots(2, 3).flat
    for axes, title in zip(figure.axes, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=15)
    logits = np.log(alphas) - np.log(alphas).mean()  # the scores, but for a constant that the softmax takes out
    for axes, values, numbers in ((score, logits, logits), (alpha, alphas, 100 * alphas)):
        axes.imshow(values.reshape(caption.grid_size), cmap="inferno")
        for location, number in enumerate(numbers):
            row, column = divmod(location, caption.grid_size[1])
            color = "black" if values[location] > (values.min() + values.max()) / 2 else "white"
            axes.text(column, row, f"{round(float(number))}", color=color, ha="center", va="center", size=11)
    for axes in (image, cells):
        axes.imshow(caption.view)
    for location in range(alphas.size):
        outline(cells, caption, location, "white", 0.8)
    draw_map(context, caption, alphas)
    draw_bars(word, probabilities)
    return figure


def selections(
    caption: Caption, alphas: NDArray[np.float32], drawn: int, cell_words: list[str], bars: list[dict[str, float]]
) -> Figure:
    """Draw what soft attention, hard attention and the sum make of the same alphas, and the next word of each."""
    figure = Figure((10.5, 5.6), facecolor="white", layout="constrained")
    map_axes, bar_axes = figure.subplots(2, 3, height_ratios=(3, 1.5))
    titles = "soft: a mean of cells", "hard: one cell", "summed: words of cells"
    for axes, title in zip(map_axes, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=15)
    draw_map(map_axes[0], caption, alphas)
    draw_map(map_axes[1], caption, np.arange(alphas.size) == drawn)
    outline(map_axes[1], caption, drawn, "white", 2)
    map_axes[2].imshow(np.asarray(caption.view) // 3)
    for location in alphas.argsort()[-SHOWN_CELLS:]:
        left, top, right, bottom = caption.cells.box(int(location))
        outline(map_axes[2], caption, int(location), "white", 0.8)
        text = f"{cell_words[location]}\n{100 * alphas[location]:.0f} %"
        map_axes[2].text((left + right) / 2, (top + bottom) / 2, text, color="white", ha="center", va="center", size=7)
    for axes, probabilities in zip(bar_axes, bars, strict=True):
        draw_bars(axes, probabilities)
    return figure


def draw_map(axes: Axes, caption: Caption, alphas: NDArray[Any]) -> None:
    pixels = np.asarray(caption.view.resize((448, 448)), dtype=np.float32) / np.float32(255)
    smooth = smooth_alphas(alphas, caption.cells.scaled((448, 448)))
    axes.imshow(paint(pixels, smooth, float(alphas.max()), "color"), extent=(0, *caption.view.size, 0))


def draw_bars(axes: Axes, words: dict[str, float]) -> None:
    axes.barh(list(words), list(words.values()), color="#4c5fb8")
    axes.set(xlim=(0, 1), xticks=[0, 0.5, 1])
    axes.invert_yaxis()
    axes.tick_params(labelsize=13)
    axes.spines[["top", "right"]].set_visible(False)


def outline(axes: Axes, caption: Caption, location: int, color: str, width: float) -> None:
    left, top_, right, bottom = caption.cells.box(location)
    axes.add_patch(Rectangle((left, top_), right - left, bottom - top_, fill=False, edgecolor=color, linewidth=width))


def save(figure: Figure, name: str) -> None:
    """Write a figure as a JPEG of docs/images."""
    for axes in figure.axes:
        if axes.images:
            axes.set(xticks=[], yticks=[])
    file = io.BytesIO()
    figure.savefig(file, dpi=100)
    Image.open(file).convert("RGB").save(IMAGES / f"{name}.jpg", quality=82, optimize=True)


def explorer(captioner: ImageCaptioner[Any]) -> None:
    """Take the picture of the explorer in Chromium."""
    from playwright.sync_api import sync_playwright

    caption = captioner.caption(str(EXAMPLES / EXAMPLE), beam_size=5)
    page = explorer_page(
        [explorer_image(EXAMPLE, caption.seen_photo(), [explorer_run("pretrained", caption)])], caption.text
    )
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "explorer.html"
        file.write_text(page, encoding="utf-8")
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        tab.goto(file.as_uri())
        tab.locator(".word[aria-current]").wait_for()
        tab.screenshot(path=IMAGES / "explorer.jpg", quality=80)
        browser.close()


def notebook(captioner: ImageCaptioner[Any]) -> None:
    """Run the notebook and keep its outputs."""
    command = ["jupyter", "nbconvert", "--to", "notebook", "--execute", "--inplace", str(NOTEBOOK)]
    if subprocess.run([sys.executable, "-m", *command], check=False).returncode:
        raise InputError(f"{NOTEBOOK}: a cell fails; its message stands above")


if __name__ == "__main__":
    main()
