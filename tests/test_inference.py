"""A checkpoint file is enough for captions with attention; a bad file is refused with the reason."""

import functools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import random_view, save_image
from helpers_runs import COLUMNS, ROWS, SIDE, WORDS, edit_checkpoint, save_checkpoint
from PIL import Image, ImageSequence

from captioning.attention import GumbelAttention, HardAttention, SoftAttention
from captioning.data.images import load_image
from captioning.errors import InputError, warn_once
from captioning.inference import DecodingOptions, load
from captioning.model import Captioner, SummedOutput
from captioning.vocabulary import END, START


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


def test_three_lines_load_caption_and_draw(checkpoint, images, tmp_path):
    captioner = load(checkpoint)
    caption = captioner.caption(images[0])
    assert caption.view.size == (SIDE, SIDE)
    caption.save_figure(tmp_path / "figure.png")
    assert set(caption.words) <= set(WORDS) and caption.text == " ".join(caption.words)
    with Image.open(tmp_path / "figure.png") as figure:
        assert figure.width > 300
    assert not captioner.model.training
    assert not any(parameter.requires_grad for parameter in captioner.model.parameters())


@pytest.mark.parametrize(
    ("attention", "output"), [(SoftAttention, None), (HardAttention, None), (SoftAttention, SummedOutput())]
)
def test_forced_decoding_is_the_recurrence_fed_the_given_words(tmp_path, images, attention, output):
    captioner = load(save_checkpoint(tmp_path / "x.ckpt", attention=attention, output=output))
    word_lists = [["a", "cat", "sits"], ["two", "mats"], [], ["red", "dogs"], ["a"]]  # "dogs" is not in the vocabulary
    context_mode = "argmax" if attention is HardAttention else None
    captions = captioner.teacher_force_captions(iter(images), word_lists, context_mode=context_mode)
    assert [caption.words for caption in captions] == word_lists
    for path, words, caption in zip(images, word_lists, captions, strict=True):
        model, preprocessing = captioner.model, captioner.encoder.preprocessing
        memory = model.encode(preprocessing(load_image(path, minimum_side=preprocessing.resize)).unsqueeze(0))
        state, token = model.decoder.init_state(memory), START
        with torch.inference_mode(), model.decoder.attention.in_context_mode(context_mode or "expected"):
            for step, target in enumerate([*captioner.vocabulary.encode(words), END]):
                logits, state, trace = model.decoder.step(torch.tensor([token]), state, memory)
                assert caption.log_probs[step] == pytest.approx(float(logits[0].log_softmax(0)[target]), rel=1e-4)
                if step < len(words):
                    np.testing.assert_allclose(caption.alphas[step], trace.alphas[0].numpy(), rtol=1e-4, atol=1e-6)
                    assert caption.trace.locations[step] == trace.locations[0]
                token = target
        assert caption.evidence.shape == caption.alphas.shape
        assert caption.alphas.shape == (len(words), ROWS * COLUMNS)
        assert caption.log_prob == pytest.approx(sum(caption.log_probs), rel=1e-5)


def test_a_caption_knows_the_whole_photo_at_its_own_size_upright(captioner, tmp_path):
    photo = random_view(300, 200)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by 90 degrees
    photo.save(tmp_path / "turned.png", exif=exif)
    for source, size in ((tmp_path / "turned.png", (200, 300)), (photo, (300, 200))):
        image, region = captioner.caption(source).read_photo()
        assert image.size == size
        assert region == captioner.encoder.preprocessing.view_box(size)
    again = pickle.loads(pickle.dumps(captioner.caption(tmp_path / "turned.png")))
    upright = photo.transpose(Image.Transpose.ROTATE_270)
    np.testing.assert_array_equal(np.asarray(again.read_photo()[0]), np.asarray(upright))


def shown(caption) -> tuple[int, ...]:
    """The color in the middle of the photo in a caption's figure."""
    pixels = np.asarray(caption.figure().axes[0].images[0].get_array())
    return tuple(pixels[len(pixels) // 2, pixels.shape[1] // 2, :3].tolist())


@pytest.mark.slow
def test_a_figure_shows_the_photo_that_was_captioned_after_a_change_of_the_working_directory(
    captioner, tmp_path, monkeypatch
):
    (tmp_path / "elsewhere").mkdir()
    for folder, color in ((tmp_path, "red"), (tmp_path / "elsewhere", "blue")):
        Image.new("RGB", (30, 20), color).save(folder / "photo.png")
    monkeypatch.chdir(tmp_path)
    caption = captioner.caption("photo.png")
    monkeypatch.chdir("elsewhere")
    assert (caption.path, shown(caption)) == ("photo.png", (255, 0, 0))


@pytest.mark.parametrize("change", ["replaced", "gone"])
def test_a_figure_of_a_replaced_file_shows_the_view_of_the_model(captioner, tmp_path, change, caplog):
    warn_once.cache_clear()
    Image.new("RGB", (30, 20), "red").save(tmp_path / "photo.png")
    caption = captioner.caption(tmp_path / "photo.png")
    (tmp_path / "photo.png").unlink()
    if change == "replaced":
        Image.new("RGB", (40, 20), "blue").save(tmp_path / "photo.png")
    assert caption.read_photo() is None and shown(caption) == (255, 0, 0)
    assert "photo.png: is no longer the image that was captioned" in caplog.text


@pytest.mark.slow
def test_a_figure_shows_the_captioned_pixels_after_the_caller_changed_them(captioner):
    photo, array = Image.new("RGB", (30, 20), "red"), np.full((20, 30, 3), (255, 0, 0), dtype=np.uint8)
    captions = [captioner.caption(photo), captioner.caption(array)]
    photo.paste("blue", (0, 0, 30, 20))
    array[:] = 0
    assert [shown(caption) for caption in captions] == [(255, 0, 0)] * 2


@pytest.mark.slow
def test_frames_of_one_buffer_or_file_are_captioned_with_their_own_pixels(captioner, tmp_path):
    colors = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    buffer = np.empty((20, 30, 3), dtype=np.uint8)

    def camera():
        for color in colors:
            buffer[:] = color
            yield buffer

    first, *others = (Image.new("RGB", (30, 20), color) for color in colors)
    first.save(tmp_path / "film.gif", save_all=True, append_images=others)
    with Image.open(tmp_path / "film.gif") as film:
        for frames in (camera(), ImageSequence.Iterator(film)):
            for caption, color in zip(captioner.caption(frames), colors, strict=True):
                assert shown(caption) == pytest.approx(color, abs=2)
                assert caption.view.getpixel((3, 3)) == pytest.approx(color, abs=2)


def test_images_that_a_generator_changes_later_are_captioned_with_their_pixels(captioner, images):
    def opened(open_image):
        for path in images:
            with open_image(path) as image:
                yield image

    def canvas():
        one = Image.new("RGB", (30, 20))
        for path in images:
            one.paste(Image.open(path).resize(one.size))
            yield one

    expected = [caption.text for caption in captioner.caption(images)]
    for sources in (opened(Image.open), opened(lambda path: path.open("rb"))):
        assert [caption.text for caption in captioner.caption(sources)] == expected
    drawn = [np.asarray(caption.view) for caption in captioner.caption(canvas())]
    assert len({view.tobytes() for view in drawn}) == len(images)


def test_batches_change_neither_captions_nor_their_order(captioner, images):
    alone = [captioner.caption(image) for image in images]
    assert len({caption.text for caption in alone}) > 1
    for batch_size in (2, 16):
        for one, other in zip(captioner.caption(images, batch_size=batch_size), alone, strict=True):
            assert (one.text, one.path) == (other.text, other.path)
            np.testing.assert_allclose(one.alphas, other.alphas, atol=1e-5)


def test_captions_come_before_later_images_are_read(captioner, images):
    asked: list[int] = []

    def sources():
        for number, image in enumerate(images):
            asked.append(number)
            yield image

    next(captioner.stream(sources(), batch_size=2))
    assert asked == [0, 1]


def test_the_default_search_is_the_runs_search_of_validation(tmp_path, images):
    search = {"beam_size": 2, "length_normalization": 1.0, "max_length": 4, "min_length": 3}
    captioner = load(save_checkpoint(tmp_path / "x.ckpt", search=search))
    assert captioner.options == DecodingOptions(**search)
    caption = captioner.caption(images[0])
    assert 3 <= len(caption.words) <= 4 and len(caption.alternatives) == 1
    assert len(captioner.caption(images[0], max_length=7, min_length=6).words) >= 6


def test_alternatives_are_the_rest_of_the_beam_with_attention_of_their_own(captioner, images):
    caption = captioner.caption(images[0], beam_size=4, max_length=5)
    assert len({caption.text, *(other.text for other in caption.alternatives)}) == 4
    for other in (caption, *caption.alternatives):
        T = len(other.words)
        assert other.alphas.shape == (T, ROWS * COLUMNS) and other.trace.locations.shape == other.betas.shape == (T,)
        np.testing.assert_allclose(other.alphas.sum(axis=1), 1, rtol=1e-5)
        assert other.text == " ".join(other.words) and len(other.log_probs) == T + other.finished
        assert other.log_prob == pytest.approx(sum(other.log_probs), rel=1e-5)
    # The first word is chosen before captions part, so all of them looked at the same places for it.
    for other in caption.alternatives:
        np.testing.assert_allclose(other.alphas[0], caption.alphas[0], atol=1e-6)
    assert any(not np.allclose(other.alphas[-1], caption.alphas[-1], atol=1e-3) for other in caption.alternatives)


@pytest.mark.parametrize("method", ["beam", "greedy", "sample"])
def test_a_caption_of_a_summed_output_has_the_evidence_of_every_word(tmp_path, images, method):
    captioner = load(save_checkpoint(tmp_path / "x.ckpt", output=SummedOutput()))
    caption = captioner.caption(images[0], method=method, max_length=5)
    T = len(caption.words)
    assert T and caption.evidence.shape == caption.alphas.shape == (T, ROWS * COLUMNS)
    np.testing.assert_allclose(caption.evidence.sum(axis=1), 1, rtol=1e-5)
    assert np.abs(caption.evidence - caption.alphas).max() > 0.01
    content = json.loads(json.dumps(caption.to_dict()))
    np.testing.assert_allclose(content["evidence"], caption.evidence, rtol=1e-5)
    for other in caption.alternatives:
        assert other.evidence.shape == (len(other.words), ROWS * COLUMNS)


def test_sampling_with_a_seed_is_repeatable_and_leaves_the_global_generator_unchanged(captioner, images):
    before = torch.get_rng_state()
    options = {"method": "sample", "temperature": 9.0, "seed": 3, "batch_size": 4}
    first, second = ([caption.text for caption in captioner.caption([images[0]] * 8, **options)] for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert first == second and len(set(first)) > 2 and first[:4] != first[4:]
    top = captioner.caption(images[0], method="sample", top_k=1)
    greedy = captioner.caption(images[0], method="greedy", length_normalization=1.0)
    assert top.text == greedy.text
    assert greedy.log_prob == captioner.caption(images[0], beam_size=1, length_normalization=1.0).log_prob


def test_a_search_of_the_model_uses_the_seed_and_the_context_mode_of_its_options(tmp_path, images):
    captioner = load(
        save_checkpoint(tmp_path / "x.ckpt", attention=functools.partial(HardAttention, context_mode="argmax"))
    )
    model = captioner.model
    memory = model.encode_views([torch.randn(2, 3, SIDE, SIDE)])

    def search(**options: Any) -> list[Any]:
        return [best.log_probs for best, *_ in model.search(memory, DecodingOptions(max_length=6, **options))]

    with model.in_context_mode("expected"):
        expected = search()
    assert search(context_mode="expected") == expected != search()
    before = torch.get_rng_state()
    assert search(method="sample", temperature=9.0, seed=3) == search(method="sample", temperature=9.0, seed=3)
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_that_draws_its_locations_takes_a_seed(tmp_path, images):
    drawing = functools.partial(HardAttention, context_mode="sample")
    captioner = load(save_checkpoint(tmp_path / "x.ckpt", attention=drawing))
    first, second = (captioner(images[0], seed=1, max_length=6).trace.locations for _ in range(2))
    assert first.tolist() == second.tolist()
    (first,), (second,) = (captioner.teacher_force_captions([images[0]], [["a", "red"] * 4], seed=1) for _ in range(2))
    assert first.trace.locations.tolist() == second.trace.locations.tolist()
    with pytest.raises(InputError, match="context_mode must be one of expected, argmax, sample, got 'foo'"):
        DecodingOptions(context_mode="foo")


def test_an_ensemble_takes_a_seed_if_a_member_draws_and_the_others_keep_their_context_modes(tmp_path, images):
    """An ensemble's trace is that of its first member."""
    sample, argmax = (
        save_checkpoint(tmp_path / f"{mode}.ckpt", attention=functools.partial(HardAttention, context_mode=mode))
        for mode in ("sample", "argmax")
    )
    soft = save_checkpoint(tmp_path / "soft.ckpt")

    def locations_of(*models: Path, seed: int | None = None) -> tuple[int, ...]:
        (caption,) = load(models).teacher_force_captions([images[0]], [["a", "red"] * 4], seed=seed)
        return tuple(caption.trace.locations.tolist())

    drawn = [locations_of(sample, soft, argmax, seed=seed) for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1] and len(set(drawn)) > 1
    assert {locations_of(argmax, sample, seed=seed) for seed in (1, 2, 3)} == {locations_of(argmax)}
    one, other = (load([sample, soft])(images[0], seed=1, max_length=6).log_prob for _ in range(2))
    assert one == other
    for models, options in (([soft, argmax], {}), ([soft], {}), ([sample, soft], {"context_mode": "argmax"})):
        with pytest.raises(InputError, match="seed=1 has an effect only with method sample"):
            load(models)(images[0], seed=1, **options)


@pytest.mark.parametrize("captions", [[["a"]], ["a red circle", "a"]])
def test_captions_to_decode_are_lists_of_words_one_for_each_image(captioner, images, captions):
    with pytest.raises(InputError, match=r"captions: give a list of words for each of 2 images, got \[.*a"):
        captioner.teacher_force_captions(images[:2], captions)


def test_a_tilde_is_the_home_folder_for_figures_and_exports(captioner, images, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save_image(tmp_path / "photo.png")
    assert captioner.caption("~/photo.png").read_photo() is not None
    captioner.export("~/exported")
    assert (tmp_path / "exported/config.json").is_file()
    captioner.vocabulary.save("~/words.json")
    assert type(captioner.vocabulary).load("~/words.json").words == captioner.vocabulary.words


def test_a_captioner_works_in_the_precision_that_it_is_given(checkpoint, images):
    halved = load(checkpoint)
    halved.model.bfloat16()
    caption = halved.caption(images[0])
    assert caption.words and caption.alphas.dtype == np.float32


def test_captions_are_hashable(captioner, images):
    caption, again = (captioner.caption(images[0]) for _ in range(2))
    assert len({caption, again}) == 2 and caption in [again, caption]


def test_a_captioner_can_be_sent_to_another_process(captioner, images, tmp_path):
    hard = load(save_checkpoint(tmp_path / "hard.ckpt", attention=HardAttention))
    for sent in (captioner, hard):
        assert pickle.loads(pickle.dumps(sent)).caption(images[0]).words == sent.caption(images[0]).words


def test_an_ensembles_caption_of_pixels_has_a_row_for_each_member(checkpoint, images):
    with pytest.raises(InputError, match="an ensemble needs at least one checkpoint"):
        load([])
    ensemble = load([checkpoint, checkpoint])
    with Image.open(images[0]) as image:
        rows = ensemble.with_members(ensemble.caption(image), ["a", "b"])
        assert [*rows.other_models] == ["b"] and rows.view.tobytes() == ensemble.caption(image).view.tobytes()


def test_one_image_may_be_streamed_and_scored(captioner, images):
    expected = captioner(images[0])
    assert [caption.text for caption in captioner.stream(images[0])] == [expected.text]
    (scored,) = captioner.teacher_force_captions(images[0], [["a", "cat"]])
    assert scored.words == ["a", "cat"]


def test_an_image_that_cannot_be_read_does_not_stop_the_others(captioner, images, tmp_path):
    failed = []
    sources = [images[0], tmp_path / "none.jpg", images[1], tmp_path / "neither.jpg", tmp_path / "nor.jpg"]
    captions = list(captioner.stream(sources, batch_size=2, on_error=lambda *error: failed.append(error)))
    assert [caption.path for caption in captions] == [str(images[0]), str(images[1])]
    assert [source.name for source, _ in failed] == ["none.jpg", "neither.jpg", "nor.jpg"]
    assert "no such image file" in str(failed[0][1])


def test_a_run_folder_points_to_its_checkpoint(tmp_path):
    with pytest.raises(
        InputError,
        match=r"is a folder; give a \.ckpt file \(caption, test and fit --init_from take exported folders, too\)$",
    ):
        load(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    save_checkpoint(tmp_path / "checkpoints" / "best.ckpt")
    with pytest.raises(InputError, match=r"is a folder; give .*best\.ckpt"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda whole: whole[:-1], "damaged"),
        (lambda whole: whole[: len(whole) // 2], "damaged"),
        (lambda whole: b"hello", "not a checkpoint"),
        (lambda whole: b"", "not a checkpoint"),
        ({"model": torch.zeros(3)}, "not a checkpoint of this project"),
        ([1, 2], "not a checkpoint of this project"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_one_line(checkpoint, tmp_path, damage, message):
    path = tmp_path / "x.ckpt"
    path.write_bytes(damage(checkpoint.read_bytes())) if callable(damage) else torch.save(damage, path)
    with pytest.raises(InputError, match=rf"x\.ckpt: .*{message}"):
        load(path)


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [(HardAttention, {"ramp": [752, 846]}), (GumbelAttention, {"anneal": 9, "final_temperature": 1})],
)
def test_a_checkpoint_of_0_2_whose_schedule_counts_batches_still_captions(tmp_path, images, kind, schedule):
    path, new = (save_checkpoint(tmp_path / f"{name}.ckpt", attention=kind) for name in ("old", "new"))

    def count_batches(content: dict) -> None:
        content["captioning"]["decoder"]["init_args"]["attention"]["init_args"] |= schedule

    edit_checkpoint(path, count_batches)
    assert [c.text for c in load(path).caption(images)] == [c.text for c in load(new).caption(images)]


def not_finite(content: dict) -> None:
    content["state_dict"]["captioner.decoder.output.L_o.weight"][0, 0] = float("nan")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 99}, "has checkpoint format 99, this version reads up to 1; update captioning"),
        ({"vocabulary": ["a"]}, "damaged, or does not describe the model of its weights"),
        ({"vocabulary": ["a", "a"]}, "words must be distinct"),
        ({"encoder": {"class_path": "captioning.encoder.Old", "init_args": {}}}, "encoder.Old is not a known Encoder"),
        ({"encoder": {}}, "does not describe the model"),
        ({"preprocessing": {"resize": 3}}, "does not describe the model of its weights .*Preprocessing"),
        (not_finite, "weights are not finite"),
    ],
)
def test_a_checkpoint_that_cannot_be_rebuilt_says_why(tmp_path, changes, message):
    path = save_checkpoint(tmp_path / "x.ckpt", **({} if callable(changes) else changes))
    if callable(changes):
        edit_checkpoint(path, changes)
    with pytest.raises(InputError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_a_model_that_exceeds_the_devices_memory_is_not_called_damaged(checkpoint, monkeypatch):
    def move(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Captioner, "to", move)
    with pytest.raises(torch.OutOfMemoryError):
        load(checkpoint)


@pytest.mark.gpu
def test_the_gpu_gives_the_same_captions(checkpoint, captioner, images):
    on_gpu = load(checkpoint, "cuda")
    assert next(on_gpu.model.parameters()).is_cuda
    for one, other in zip(captioner.caption(images), on_gpu.caption(images), strict=True):
        assert one.text == other.text
        np.testing.assert_allclose(one.alphas, other.alphas, atol=1e-3)
    sampled = [[c.text for c in on_gpu.caption(images, method="sample", seed=1)] for _ in range(2)]
    assert sampled[0] == sampled[1]


@pytest.mark.parametrize(
    ("choose", "line"),
    [
        (lambda caption, _: caption.figure("colour"), "style must be one of color, paper, got 'colour'; did you mean"),
        (lambda _, captioner: captioner.caption("x.png", method="beem"), "method must be one of beam, greedy, sample"),
        (
            lambda _, captioner: captioner.export("folder", dtype="fp16"),
            "dtype must be one of float32, float16, bfloat",
        ),
    ],
)
def test_an_unknown_choice_is_one_line_with_the_known_ones(checkpoint, images, tmp_path, choose, line):
    captioner = load(checkpoint)
    with pytest.raises(InputError, match=f"^{line}"):
        choose(captioner.caption(images[0]), captioner)
