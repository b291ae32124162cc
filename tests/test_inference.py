"""A checkpoint file alone gives captions with their attention; a bad file is refused with the reason."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import random_view, save_image
from helpers_runs import COLUMNS, ROWS, SIDE, WORDS, save_checkpoint
from PIL import Image

from captioning.attention import HardAttention, SoftAttention
from captioning.errors import InputError
from captioning.inference import DecodingOptions, load
from captioning.model import SummedOutput
from captioning.trace import EXPECTATION
from captioning.vocabulary import END, SPECIALS, START, Vocabulary


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("run") / "best.ckpt")


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("images")
    return [save_image(folder / f"{n}.png", n, (30 + n, 20)) for n in range(5)]


@pytest.fixture(scope="module")
def captioner(checkpoint):
    return load(checkpoint)


def test_load_caption_and_figure_take_three_lines(checkpoint, images, tmp_path):
    captioner = load(checkpoint)
    caption = captioner.caption(images[0])
    caption.save_figure(tmp_path / "figure.png")
    assert set(caption.words) <= set(WORDS)
    assert caption.text == " ".join(caption.words)
    with Image.open(tmp_path / "figure.png") as figure:
        assert figure.width > 300
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]


def test_a_caption_has_everything_in_step_with_its_words(captioner, images):
    for caption in captioner.caption(images, max_length=6):
        T = len(caption.words)
        assert caption.alphas.shape == (T, ROWS * COLUMNS)
        assert caption.alphas.dtype == np.float32
        np.testing.assert_allclose(caption.alphas.sum(axis=1), 1, rtol=1e-5)
        assert caption.betas.shape == (T,)
        assert len(caption.log_probs) == T + caption.finished
        assert caption.log_prob == pytest.approx(sum(caption.log_probs), rel=1e-5)
        assert caption.grid_size == (ROWS, COLUMNS)
        assert T <= 6


@pytest.mark.parametrize(
    ("attention", "output"), [(SoftAttention, None), (HardAttention, None), (SoftAttention, SummedOutput())]
)
def test_forced_decoding_is_the_recurrence_fed_the_given_words(tmp_path, images, attention, output):
    captioner = load(save_checkpoint(tmp_path / "x.ckpt", attention=attention, output=output))
    given = [["a", "cat", "sits"], ["two", "mats"], [], ["red", "dogs"], ["a"]]  # "dogs" is not in the vocabulary
    inference = "argmax" if attention is HardAttention else None
    captions = captioner.force_decode(images, given, inference=inference, batch_size=3)
    assert [caption.words for caption in captions] == given
    for path, words, caption in zip(images, given, captions, strict=True):
        model = captioner.model
        memory = model.encode(captioner.encoder.preprocessing(captioner.encoder.preprocessing.load(path)).unsqueeze(0))
        state, token = model.decoder.init_state(memory), START
        with torch.inference_mode(), model.decoder.attention.inferring(inference or "expected"):
            for step, target in enumerate([*captioner.vocabulary.encode(words), END]):
                logits, state, trace = model.decoder.step(torch.tensor([token]), state, memory)
                assert caption.log_probs[step] == pytest.approx(float(logits[0].log_softmax(0)[target]), rel=1e-4)
                if step < len(words):
                    np.testing.assert_allclose(caption.alphas[step], trace.alphas[0].numpy(), rtol=1e-4, atol=1e-6)
                    assert caption.trace.locations[step] == trace.locations[0]
                token = target
        assert (caption.posteriors is None) == (output is None)
        assert caption.alphas.shape == (len(words), ROWS * COLUMNS)
        assert caption.log_prob == pytest.approx(sum(caption.log_probs), rel=1e-5)


def test_forced_decoding_of_what_a_search_found_gives_its_attention(captioner, images):
    for caption in captioner.caption(images, max_length=6):
        if not caption.finished:
            continue
        (forced,) = captioner.force_decode([caption.path], [caption.words])
        np.testing.assert_allclose(forced.alphas, caption.alphas, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(forced.log_probs, caption.log_probs, rtol=1e-4)


def test_a_caption_knows_the_whole_photo_at_its_own_size_upright(captioner, tmp_path):
    photo = random_view(300, 200)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by 90 degrees
    photo.save(tmp_path / "turned.png", exif=exif)
    for source, size in ((tmp_path / "turned.png", (200, 300)), (photo, (300, 200))):
        image, region = captioner.caption(source).photo()
        assert image.size == size
        assert region == captioner.encoder.preprocessing.region(size)
    again = pickle.loads(pickle.dumps(captioner.caption(tmp_path / "turned.png")))
    np.testing.assert_array_equal(np.asarray(again.photo()[0]), np.asarray(photo.transpose(Image.Transpose.ROTATE_270)))


def test_a_photo_that_is_gone_when_it_is_drawn_is_named(captioner, tmp_path):
    caption = captioner.caption(save_image(tmp_path / "x.png"))
    (tmp_path / "x.png").unlink()
    with pytest.raises(InputError, match=r"x\.png: no such image file"):
        caption.save_figure(tmp_path / "figure.png")
    assert list(tmp_path.iterdir()) == []


def test_the_saved_model_captions_as_the_one_in_memory(checkpoint, captioner, images):
    content = torch.load(checkpoint, weights_only=True)
    assert {f"captioner.{name}" for name in captioner.model.state_dict()} == set(content["state_dict"])
    for name, tensor in captioner.model.state_dict().items():
        assert torch.equal(tensor, content["state_dict"][f"captioner.{name}"])
    assert not captioner.model.training
    assert not any(parameter.requires_grad for parameter in captioner.model.parameters())
    assert captioner.vocabulary == Vocabulary(WORDS)
    assert len(captioner.vocabulary) == len(SPECIALS) + len(WORDS)


def test_the_view_is_the_checkpoints_preprocessing(captioner, images):
    caption = captioner.caption(images[0])
    assert captioner.encoder.preprocessing.resize == SIDE + 4
    assert caption.view.size == (SIDE, SIDE)
    with Image.open(images[0]) as image:
        expected = captioner.encoder.preprocessing.view(image)
    np.testing.assert_array_equal(np.asarray(caption.view), np.asarray(expected))


def test_batches_do_not_change_captions_nor_their_order(captioner, images):
    together = captioner.caption(images)
    in_twos = captioner.caption(images, batch_size=2)
    alone = [captioner.caption(image) for image in images]
    assert len({caption.text for caption in alone}) > 1
    for one, two, three in zip(together, in_twos, alone, strict=True):
        assert one.text == two.text == three.text
        assert one.path == two.path == three.path
        np.testing.assert_allclose(one.alphas, three.alphas, atol=1e-5)
        np.testing.assert_allclose(two.alphas, three.alphas, atol=1e-5)


def test_a_path_as_text_and_the_pixels_give_the_same_caption(captioner, images):
    with Image.open(images[1]) as image:
        pixels = captioner.caption(image)
    assert pixels.path is None
    by_text, by_path = captioner.caption(str(images[1])), captioner.caption(images[1])
    assert by_text.text == by_path.text == pixels.text
    assert by_text.path == by_path.path == str(images[1])


def test_captions_come_before_later_images_are_read(captioner, images):
    asked: list[int] = []

    def sources():
        for number, image in enumerate(images):
            asked.append(number)
            yield image

    next(captioner.stream(sources(), batch_size=2))
    assert asked == [0, 1]


def test_no_images_give_no_captions(captioner):
    assert captioner.caption([]) == []


def test_a_marked_photograph_is_turned_upright(captioner, tmp_path):
    upright = Image.open(save_image(tmp_path / "upright.png", 7, (40, 24)))
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying on its left side: to be turned by 90 degrees clockwise
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "marked.png", exif=exif)
    marked, expected = captioner.caption([tmp_path / "marked.png", upright])
    np.testing.assert_array_equal(np.asarray(marked.view), np.asarray(expected.view))


def test_search_defaults_to_what_the_run_was_evaluated_with(tmp_path, images):
    search = {"beam_size": 2, "length_normalization": 1.0, "max_length": 4, "min_length": 3}
    captioner = load(save_checkpoint(tmp_path / "x.ckpt", search=search))
    assert captioner.options == DecodingOptions(**search)
    caption = captioner.caption(images[0])
    assert 3 <= len(caption.words) <= 4
    assert len(caption.alternatives) == 1
    assert len(captioner.caption(images[0], max_length=7, min_length=7 - 1).words) >= 6


def test_a_checkpoint_without_settings_searches_with_beam_three(captioner):
    assert captioner.options.beam_size == 3
    assert captioner.settings == {}


def test_alternatives_are_the_rest_of_the_beam_best_first(captioner, images):
    caption = captioner.caption(images[0], beam_size=4, max_length=5)
    assert len(caption.alternatives) == 3
    texts = [caption.text, *(other.text for other in caption.alternatives)]
    assert len(set(texts)) == 4


def test_an_alternative_has_everything_in_step_with_its_words(captioner, images):
    caption = captioner.caption(images[0], beam_size=4, max_length=5)
    lengths = {len(other.words) for other in caption.alternatives}
    for other in caption.alternatives:
        T = len(other.words)
        assert other.text == " ".join(other.words)
        assert other.alphas.shape == (T, ROWS * COLUMNS) and other.trace.locations.shape == (T,)
        np.testing.assert_allclose(other.alphas.sum(axis=1), 1, rtol=1e-5)
        assert other.betas.shape == (T,)
        assert len(other.log_probs) == T + other.finished
        assert other.log_prob == pytest.approx(sum(other.log_probs), rel=1e-5)
    assert lengths
    # The first word is chosen before captions part, so all of them looked at the same places for it.
    for other in caption.alternatives:
        np.testing.assert_allclose(other.alphas[0], caption.alphas[0], atol=1e-6)
    assert any(not np.allclose(other.alphas[-1], caption.alphas[-1], atol=1e-3) for other in caption.alternatives)


def test_soft_attention_forms_its_contexts_with_the_alphas(captioner, images):
    caption = captioner.caption(images[0], max_length=5)
    assert (caption.trace.locations == EXPECTATION).all()
    assert caption.to_dict()["chosen"] == [None] * len(caption.words)


@pytest.mark.parametrize("options", [{}, {"rank": 2}, {"block": (2, 2), "rank": 3}])
@pytest.mark.parametrize("method", ["beam", "greedy", "sample"])
def test_a_checkpoint_with_a_summed_output_tells_the_posterior_of_every_word(tmp_path, images, method, options):
    captioner = load(save_checkpoint(tmp_path / "x.ckpt", output=SummedOutput(**options)))
    caption = captioner.caption(images[0], method=method, max_length=5)
    T = len(caption.words)
    assert T and caption.posteriors.shape == caption.alphas.shape == (T, ROWS * COLUMNS)
    np.testing.assert_allclose(caption.posteriors.sum(axis=1), 1, rtol=1e-5)
    assert np.abs(caption.posteriors - caption.alphas).max() > 0.01
    content = json.loads(json.dumps(caption.to_dict()))
    np.testing.assert_allclose(content["posteriors"], caption.posteriors, rtol=1e-5)
    for other in caption.alternatives:
        assert other.posteriors.shape == (len(other.words), ROWS * COLUMNS)


def test_an_ordinary_checkpoint_has_no_posterior(captioner, images):
    assert captioner.caption(images[0], max_length=5).to_dict()["posteriors"] is None


def test_greedy_is_the_beam_of_one(captioner, images):
    greedy, beam = captioner.caption(images[2], method="greedy"), captioner.caption(images[2], beam_size=1)
    assert greedy.text == beam.text
    assert greedy.alternatives == []


def test_sampling_with_a_seed_repeats_itself_and_leaves_the_global_stream_alone(captioner, images):
    many = [images[0]] * 8
    before = torch.get_rng_state()
    first = [
        caption.text for caption in captioner.caption(many, method="sample", temperature=9.0, seed=3, batch_size=4)
    ]
    assert torch.equal(before, torch.get_rng_state())
    assert first == [
        caption.text for caption in captioner.caption(many, method="sample", temperature=9.0, seed=3, batch_size=4)
    ]
    assert len(set(first)) > 2
    assert first[:4] != first[4:]
    top = captioner.caption(images[0], method="sample", top_k=1)
    assert top.text == captioner.caption(images[0], method="greedy").text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 5}, "top_k=5 has an effect only when sampling, not with beam"),
        ({"method": "greedy", "seed": 0}, "seed=0 has an effect only"),
        ({"method": "sample", "temperature": 0.0}, "temperature must be in 1e-06 .. 1000000.0, got 0.0"),
        ({"beam_size": 0}, "beam_size must be in 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 2.5}, "batch_size must be a whole number, got 2.5"),
        ({"beam_size": "3"}, "beam_size must be a whole number, got '3'"),
        ({"max_length": 5.5}, "max_length must be a whole number, got 5.5"),
    ],
)
def test_an_option_out_of_its_range_is_refused(captioner, images, options, message):
    with pytest.raises(InputError, match=message):
        captioner.caption(images[0], **options)


def test_captions_to_decode_are_lists_of_words_one_for_each_image(captioner, images):
    with pytest.raises(InputError, match="there are 1 for 2 images"):
        captioner.force_decode(images[:2], [["a"]])
    with pytest.raises(InputError, match="a caption is a list of words, got 'a red circle'"):
        captioner.force_decode(images[:1], ["a red circle"])
    with pytest.raises(InputError, match="batch_size must be at least 1, got 0"):
        captioner.force_decode(images[:1], [["a"]], batch_size=0)


def test_a_style_of_figures_that_there_is_not_is_named(captioner, images):
    with pytest.raises(InputError, match="style must be one of color, paper, got 'colour'"):
        captioner.caption(images[0]).figure("colour")


def test_an_image_that_cannot_be_read_is_named(captioner, images, tmp_path):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"not an image")
    with pytest.raises(InputError, match=r"broken\.jpg: cannot be read as an image"):
        captioner.caption([images[0], broken])


def test_an_image_that_cannot_be_read_does_not_stop_the_others(captioner, images, tmp_path):
    failed = []
    sources = [images[0], tmp_path / "none.jpg", images[1], tmp_path / "neither.jpg", tmp_path / "nor.jpg"]
    captions = list(captioner.stream(sources, batch_size=2, on_error=lambda *error: failed.append(error)))
    assert [caption.path for caption in captions] == [str(images[0]), str(images[1])]
    assert [source.name for source, _ in failed] == ["none.jpg", "neither.jpg", "nor.jpg"]
    assert "no such image file" in str(failed[0][1])


def test_an_open_image_that_is_cut_short_is_named(captioner, images, tmp_path):
    save_image(tmp_path / "whole.jpg", 1)
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:-40])
    failed = []
    with Image.open(tmp_path / "cut.jpg") as cut:
        sources = [images[0], cut]
        assert len(list(captioner.stream(sources, on_error=lambda *error: failed.append(error)))) == 1
    assert "image: " in str(failed[0][1])


def test_settings_of_another_type_are_one_line(tmp_path):
    with pytest.raises(InputError, match=r"x\.ckpt: "):
        load(save_checkpoint(tmp_path / "x.ckpt", search={"length_normalization": "a"}))
    assert load(save_checkpoint(tmp_path / "y.ckpt", search={"beam_size": None})).options.beam_size == 3


def test_a_decoder_without_a_gate_shows_no_betas(tmp_path, images):
    caption = load(save_checkpoint(tmp_path / "x.ckpt", gated=False)).caption(images[0], max_length=3)
    assert caption.betas is None
    assert caption.to_dict()["betas"] is None
    assert not any("\u03b2" in text.get_text() for text in caption.figure().axes[0].texts)


# Files that are no checkpoint


def test_a_run_folder_points_to_its_checkpoint(tmp_path):
    with pytest.raises(InputError, match=r"is a folder; give a \.ckpt file in it"):
        load(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    save_checkpoint(tmp_path / "checkpoints" / "best.ckpt")
    with pytest.raises(InputError, match=r"is a folder; give .*best\.ckpt"):
        load(tmp_path)


@pytest.mark.parametrize("content", [{"model": torch.zeros(3)}, [1, 2], torch.zeros(2)])
def test_a_checkpoint_of_another_project_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "other.ckpt")
    with pytest.raises(InputError, match=r"other\.ckpt: not a checkpoint of this project"):
        load(tmp_path / "other.ckpt")


class _Surprise:
    def __reduce__(self):
        return print, ("code ran",)


def test_no_code_runs_because_somebody_opened_a_file(tmp_path, capsys):
    torch.save({"captioning": {}, "state_dict": {}, "x": _Surprise()}, tmp_path / "trap.ckpt")
    with pytest.raises(InputError, match=r"trap\.ckpt: not a checkpoint of this project: it holds objects"):
        load(tmp_path / "trap.ckpt")
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary": ["a"]}, "its weights do not fit the model it describes"),
        ({"vocabulary": ["a", "a"]}, "words must be distinct"),
        ({"encoder": {"class_path": "captioning.encoder.Old", "init_args": {}}}, "encoder.Old is not a known Encoder"),
        ({"encoder": {}}, "has no 'class_path'; it is damaged or was edited"),
        ({"preprocessing": {"resize": 3}}, "preprocessing: "),
    ],
)
def test_a_checkpoint_that_cannot_be_rebuilt_says_why(tmp_path, changes, message):
    with pytest.raises(InputError, match=message) as caught:
        load(save_checkpoint(tmp_path / "x.ckpt", **changes))
    assert str(caught.value).startswith(f"{tmp_path / 'x.ckpt'}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_captioning_loads_no_library_that_it_does_not_need(checkpoint, images):
    program = f"""
import sys
from captioning.inference import load
load({str(checkpoint)!r}).caption({str(images[0])!r})
heavy = "torchvision timm nltk pytorch_lightning wandb pandas matplotlib pycocotools torch._dynamo sympy"
print([name for name in heavy.split() if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.gpu
def test_the_gpu_gives_the_same_captions(checkpoint, captioner, images):
    on_gpu = load(checkpoint, "cuda")
    assert on_gpu.device.type == "cuda"
    for one, other in zip(captioner.caption(images), on_gpu.caption(images), strict=True):
        assert one.text == other.text
        np.testing.assert_allclose(one.alphas, other.alphas, atol=1e-3)
    sampled = [[c.text for c in on_gpu.caption(images, method="sample", seed=1)] for _ in range(2)]
    assert sampled[0] == sampled[1]
