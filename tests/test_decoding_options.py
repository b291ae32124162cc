"""Options of decoding with every model: several captions, a prefix, lengths, no repetition."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
from helpers import save_image
from helpers_runs import WORDS, save_checkpoint

from captioning.attention import HardAttention
from captioning.decoding import Constraints, DecodingOptions
from captioning.errors import InputError
from captioning.inference import ImageCaptioner, load
from captioning.inference.caption import Caption
from captioning.model import SummedOutput

MODELS = ["soft", "hard", "summed", "ensemble"]


@pytest.fixture(scope="module")
def captioners(tmp_path_factory) -> dict[str, ImageCaptioner]:
    folder = tmp_path_factory.mktemp("models")
    paths = {
        "soft": save_checkpoint(folder / "soft.ckpt"),
        "hard": save_checkpoint(folder / "hard.ckpt", attention=HardAttention, gated=False),
        "summed": save_checkpoint(folder / "summed.ckpt", output=SummedOutput()),
    }
    return {name: load(path) for name, path in paths.items()} | {"ensemble": load([*paths.values()])}


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("images")
    return [save_image(folder / f"{n}.png", n, (30 + n, 20)) for n in range(5)]


def all_of(caption: Caption) -> list:
    return [caption, *caption.alternatives]


METHODS = {
    "greedy": {"method": "greedy"},
    "beam": {"method": "beam", "beam_size": 4},
    "sample": {"method": "sample", "count": 3, "seed": 0},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_every_caption_begins_with_the_prefix_is_long_enough_and_repeats_nothing(captioners, images, name, method):
    captioner = captioners[name]
    context_mode = {"context_mode": "sample"} if name == "hard" and method != "greedy" else {}
    options = METHODS[method] | context_mode | {"prefix": f"{WORDS[1]} {WORDS[0]}"}
    captions = captioner.caption(images, **options, no_repeat_ngram=2, min_length=4, max_length=8, batch_size=2)
    for caption in itertools.chain.from_iterable(map(all_of, captions)):
        assert caption.words[:2] == [WORDS[1], WORDS[0]]
        assert 4 <= len(caption.words) <= 8
        assert max(Counter(itertools.pairwise(caption.words)).values()) == 1
        assert len(caption.log_probs) == len(caption.words) + caption.finished
        assert len(caption.alphas) == len(caption.words)
        assert (caption.evidence is None) == (name == "ensemble")


def test_samples_differ_belong_to_their_image_and_are_the_same_with_a_seed(captioners, images):
    """With the most probable word alone to draw, all samples are the greedy caption of their image."""
    drawn = captioners["soft"].caption(images, method="sample", count=3, top_k=1)
    greedy = captioners["soft"].caption(images, method="greedy")
    assert [[c.text for c in all_of(caption)] for caption in drawn] == [[caption.text] * 3 for caption in greedy]
    options = {"method": "sample", "count": 6, "temperature": 9.0, "seed": 3}
    first, again = (captioners["soft"].caption(images[:2], **options) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert [c.text for c in all_of(one)] == [c.text for c in all_of(other)] and len(all_of(one)) == 6
        assert len({c.text for c in all_of(one)}) > 2


@pytest.mark.parametrize("name", MODELS)
def test_the_n_best_captions_are_the_first_of_the_beam(captioners, images, name):
    whole = captioners[name].caption(images[0], beam_size=5)
    best = captioners[name].caption(images[0], beam_size=5, count=2)
    assert [c.words for c in all_of(best)] == [c.words for c in all_of(whole)][:2]
    widened = captioners[name].caption(images[0], beam_size=2, count=5)
    assert [c.words for c in all_of(widened)] == [c.words for c in all_of(whole)]


def test_no_repeat_ngram_of_zero_allows_what_the_models_own_options_forbid(captioners, images, tmp_path):
    strict = load(save_checkpoint(tmp_path / "strict.ckpt", search={"no_repeat_ngram": 1}))
    plain = [caption.text for caption in captioners["soft"].caption(images)]
    assert [caption.text for caption in strict.caption(images)] != plain
    assert [caption.text for caption in strict.caption(images, no_repeat_ngram=0)] == plain
    assert all(
        Constraints.from_options(DecodingOptions(no_repeat_ngram=n), None).no_repeat_ngram is None for n in (None, 0)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix": f"{WORDS[0]} zebra"}, "the model does not know 'zebra'; it knows 7 words"),
        ({"prefix": " ".join(WORDS[:3]), "max_length": 3}, "prefix: 3 words leave no room below max_length 3"),
        ({"count": 0}, "count must be in 1 .. 1000, got 0"),
        ({"method": "greedy", "count": 2}, "count=2: greedy decoding has one caption; use beam or sample"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram must be at least 0, got -1"),
        ({"top_k": 5}, "top_k=5 has an effect only with method sample .--sample., not beam"),
        ({"method": "greedy", "seed": 0}, "seed=0 has an effect only"),
        ({"method": "sample", "temperature": 0.0}, "temperature must be in 1e-06 .. 1000000.0, got 0.0"),
        ({"method": "sample", "top_k": 0}, "top_k must be at least 1, got 0"),
        ({"method": "sample", "top_p": 1.5}, "top_p must be in .* 1, got 1.5"),
        ({"max_length": 5.5}, "max_length must be a whole number, got 5.5"),
        ({"min_length": 99}, "at most max_length"),
    ],
)
def test_constraints_that_no_caption_meets_are_refused(captioners, images, options, message):
    with pytest.raises(InputError, match=message):
        captioners["soft"].caption(images[0], **options)


@pytest.mark.parametrize("options", [{"prefix": "a dog"}, {"no_repeat_content": True}])
def test_options_about_words_need_the_vocabulary(options):
    with pytest.raises(InputError, match=f"^{next(iter(options))} needs the model's vocabulary"):
        Constraints.from_options(DecodingOptions(**options), None)
