"""From records to batches: what belongs together stays together, and cached features stand in for images."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from helpers_training import make_shapes
from torch import Tensor

from captioning.attention import AdditiveScore, SoftAttention
from captioning.data.extraction import extract_features
from captioning.data.features import FeatureCache, FeatureWriter, view_fingerprint
from captioning.data.loading import CaptionDataset
from captioning.data.records import CaptionIndex
from captioning.data.sampler import CaptionBatchSampler
from captioning.data.shapes import ShapesSource
from captioning.encoders import TorchvisionEncoder
from captioning.errors import InputError
from captioning.model import AttentionDecoder
from captioning.model.captioner import Captioner
from captioning.objective.reductions import caption_nll
from captioning.training import CaptionDataModule
from captioning.training.datamodule import Augmentation
from captioning.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> ShapesSource:
    return make_shapes(tmp_path_factory.mktemp("data"), train=6, val=3, test=2)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> TorchvisionEncoder:
    """A frozen network; its weights are random, which a cache does not mind."""
    torch.manual_seed(5)
    return TorchvisionEncoder("squeezenet1_1", "features.4", weights=None, image_size=48)


@pytest.fixture(scope="module")
def features(shapes, encoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    rows, cols = encoder.grid_size
    for split in ("train", "val"):
        index = shapes.index(split)
        shape = (rows * cols, encoder.annotation_dim)
        images = [encoder.preprocessing(encoder.preprocessing.load(index.image_path(i))) for i in range(len(index))]
        paths, fingerprint = list(index.paths), encoder.fingerprint()
        writer = FeatureWriter(folder, split, paths=paths, fingerprint=fingerprint, shape=shape, shard_images=1)
        writer.write(encoder(torch.stack(images)))
    return folder


def make_data(source: ShapesSource, encoder, *, seed: int = 0, **options) -> CaptionDataModule:
    """A data module that knows its encoder; there is no trainer."""
    data = CaptionDataModule(source, **{"batch_size": 7, "eval_batch_size": 2, "num_workers": 0} | options)
    data.encoder, data.seed = encoder, seed
    data.setup("fit")
    return data


def words_of(data: CaptionDataModule, batch) -> list[str]:
    return [" ".join(data.vocabulary.decode(ids[1:])) for ids in batch.captions.tolist()]


@pytest.mark.parametrize("group", ["length", "image"])
def test_every_caption_comes_once_an_epoch_beside_the_image_it_describes(shapes, encoder, group):
    data = make_data(shapes, encoder, group=group)
    index = data.index("train")
    seen = []
    for batch in data.train_dataloader():
        assert batch.images.shape == (len(batch.rows), 3, 48, 48)
        assert len(set(batch.rows.tolist())) == len(batch.rows)  # an image stands once
        for text, image in zip(words_of(data, batch), batch.image_index.tolist(), strict=True):
            row = int(batch.rows[image])
            assert text in index.references(row)
            seen.append((row, text))
        torch.testing.assert_close(
            batch.images[0],
            encoder.preprocessing(encoder.preprocessing.load(index.image_path(int(batch.rows[0])))),
            rtol=0,
            atol=0,
        )
    assert sorted(seen) == sorted((row, text) for row in range(len(index)) for text in index.references(row))


def test_evaluation_batches_hold_every_image_once_with_all_its_captions(shapes, encoder):
    data = make_data(shapes, encoder)
    batches = list(data.val_dataloader())
    assert [row for batch in batches for row in batch.rows.tolist()] == [0, 1, 2]
    assert batches[0].image_index.tolist() == [0] * 5 + [1] * 5
    known = data.vocabulary
    expected = [" ".join(known.decode(known.encode(text.split()))) for text in data.index("val").references(1)]
    assert words_of(data, batches[0])[5:] == expected


def test_vocabulary_comes_from_the_training_split_alone(shapes, encoder):
    data = make_data(shapes, encoder)
    index = shapes.index("train")
    assert set(data.vocabulary.words) == {word for caption in index.captions for word in caption.split()}


def test_cached_features_give_the_same_losses_to_fp16_rounding(shapes, encoder, features):
    from_images, from_cache = make_data(shapes, encoder), make_data(shapes, encoder, features=str(features))
    decoder = AttentionDecoder(SoftAttention(AdditiveScore(10)), embedding_dim=9, hidden_dim=14, dropout=0.0)
    captioner = Captioner(encoder, decoder, vocabulary_size=len(from_images.vocabulary))
    compared = 0
    for images, cached in zip(from_images.train_dataloader(), from_cache.train_dataloader(), strict=True):
        assert cached.images is None and cached.annotations.dtype == torch.float16
        assert torch.equal(images.captions, cached.captions)
        outputs = captioner(images), captioner(cached)
        nlls = [caption_nll(output.logits, output.targets) for output in outputs]
        torch.testing.assert_close(nlls[0], nlls[1], rtol=2e-3, atol=0)
        compared += 1
    assert compared == 5


def test_features_read_ahead_give_the_batches_that_reading_one_by_one_gives(shapes, encoder, features):
    loader = make_data(shapes, encoder, features=str(features)).train_dataloader()
    expected = [loader.dataset[numbers] for numbers in CaptionBatchSampler(
        loader.dataset.index.caption_lengths, loader.dataset.index.caption_image, batch_size=7, seed=0
    )]  # fmt: skip
    for batch, alone in zip(loader, expected, strict=True):
        assert torch.equal(batch.captions, alone.captions) and torch.equal(batch.annotations, alone.annotations)


def test_a_run_resumes_after_the_batches_it_got_not_those_read_ahead(shapes, encoder, features):
    loader = make_data(shapes, encoder, features=str(features)).train_dataloader()
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    time.sleep(0.05)  # the next ones are read meanwhile
    state = loader.state_dict()
    rest = [batch.captions for batch in batches]
    resumed = make_data(shapes, encoder, features=str(features)).train_dataloader()
    resumed.load_state_dict(state)
    assert state["batches_done"] == 2
    for batch, captions in zip(resumed, rest, strict=True):
        assert torch.equal(batch.captions, captions)


def test_features_of_an_encoder_that_is_fine_tuned_are_refused(shapes, features):
    tuned = TorchvisionEncoder("squeezenet1_1", "features.4", weights=None, image_size=48, trainable_from="features.3")
    with pytest.raises(InputError, match="cached features need a frozen encoder"):
        make_data(shapes, tuned, features=str(features)).train_dataloader()


def test_features_of_other_weights_are_refused(shapes, features):
    other = TorchvisionEncoder("squeezenet1_1", "features.4", weights=None, image_size=48)
    with pytest.raises(InputError, match="features of another encoder"):
        make_data(shapes, other, features=str(features)).train_dataloader()


def test_missing_images_are_named_before_training_starts(shapes, encoder, tmp_path):
    data = make_data(shapes, encoder)
    data.index("train").root = tmp_path
    with pytest.raises(InputError, match="has no file"):
        data.train_dataloader()


def test_words_outside_the_vocabulary_become_unk(shapes, encoder):
    dataset = CaptionDataset(shapes.index("train"), Vocabulary(["a"]), encoder.preprocessing, by_image=True)
    assert set(dataset[[0, 1]].captions.flatten().tolist()) <= {0, 1, 2, 3, 4}


def test_training_images_vary_as_configured_and_evaluated_ones_do_not(shapes, encoder):
    def images(loader):
        torch.manual_seed(1)
        return {int(row): image for batch in loader for row, image in zip(batch.rows, batch.images, strict=True)}

    plain, augmented = (
        make_data(shapes, encoder),
        make_data(shapes, encoder, augmentation=Augmentation(random_crop=True, flip=1.0)),
    )
    assert encoder.preprocessing.crop < encoder.preprocessing.resize
    before, after = images(plain.train_dataloader()), images(augmented.train_dataloader())
    assert before.keys() == after.keys() == set(range(6))
    load = encoder.preprocessing.load
    for row, image in after.items():
        resized = encoder.preprocessing._resized(load(shapes.index("train").image_path(row)))
        windows = encoder.preprocessing.normalise(resized).flip(2).unfold(1, 48, 1).unfold(2, 48, 1)
        assert (windows == image[:, None, None]).all(dim=(0, 3, 4)).any()
        assert not torch.equal(image, before[row])
    before, after = images(plain.val_dataloader()), images(augmented.val_dataloader())
    assert all(torch.equal(after[row], image) for row, image in before.items())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_varies_depends_on_the_seed_and_the_place_in_training_not_on_who_loads_it(shapes, encoder):
    def images(skip: int = 0, **options) -> list[torch.Tensor]:
        loader = make_data(
            shapes, encoder, augmentation=Augmentation(random_crop=True, flip=0.5), **options
        ).train_dataloader()
        loader.load_state_dict(loader.sampler.state_dict(skip))
        return [batch.images for batch in loader]

    whole, resumed, worked = images(), images(skip=2), images(num_workers=1)
    assert all(torch.equal(*pair) for pair in zip(whole, worked, strict=True))
    assert all(torch.equal(*pair) for pair in zip(whole[2:], resumed, strict=True))


def test_cached_features_are_not_cropped_at_random(shapes, encoder, features):
    data = make_data(shapes, encoder, features=str(features), augmentation=Augmentation(random_crop=True))
    with pytest.raises(InputError, match=r"data\.augmentation\.random_crop: cached features"):
        data.train_dataloader()


@pytest.fixture(scope="module")
def both_sides(shapes, encoder, tmp_path_factory):
    """The features of all training images and of their mirror images, and of the validation images."""
    folder = tmp_path_factory.mktemp("sides")
    options = {"device": torch.device("cpu"), "batch_size": 4, "num_workers": 0}
    indices = {split: shapes.index(split) for split in ("train", "val")}
    with torch.no_grad():
        extract_features(encoder, indices, folder, **options, flipped=["train"])
    return folder


def sides_of(loader, plain: Tensor, mirrored: Tensor) -> list[dict[int, bool]]:
    """Return, batch by batch, whether an image is seen mirrored."""
    found = []
    for batch in loader:
        found.append({})
        for row, seen in zip(batch.rows.tolist(), batch.annotations, strict=True):
            found[-1][row] = torch.equal(seen, mirrored[row])
            assert found[-1][row] or torch.equal(seen, plain[row])
    return found


def test_an_image_is_seen_from_one_side_in_an_epoch_and_from_both_in_several(shapes, encoder, both_sides):
    fingerprint = encoder.fingerprint()
    plain = FeatureCache(both_sides, "train", fingerprint).gather(range(6))
    mirrored = FeatureCache(both_sides, "train_flipped", view_fingerprint(fingerprint, flipped=True)).gather(range(6))
    images = [encoder.preprocessing(encoder.preprocessing.load(shapes.index("train").image_path(i))) for i in range(6)]
    with torch.no_grad():
        expected = encoder(torch.stack(images).flip(3))
    torch.testing.assert_close(mirrored.float(), expected, rtol=2**-10, atol=1e-4)
    assert not torch.allclose(plain, mirrored)

    options = {"features": str(both_sides), "augmentation": Augmentation(flip=0.5), "seed": 4}
    loader = make_data(shapes, encoder, **options).train_dataloader()
    epochs = [sides_of(loader, plain, mirrored) for _ in range(6)]
    for batches in epochs:
        sides: dict[int, set[bool]] = {}
        for batch in batches:
            for row, side in batch.items():
                sides.setdefault(row, set()).add(side)
        assert all(len(seen) == 1 for seen in sides.values()) and sides.keys() == set(range(6))
    seen = [{row: side for batch in batches for row, side in batch.items()} for batches in epochs]
    assert all({epoch[row] for epoch in seen} == {True, False} for row in range(6))

    resumed = make_data(shapes, encoder, **options, num_workers=1).train_dataloader()  # a process of its own reads
    resumed.load_state_dict(loader.sampler.state_dict(len(loader)) | {"epoch": 2, "batches_done": 2})
    assert sides_of(resumed, plain, mirrored) == epochs[2][2:]
    other = make_data(shapes, encoder, **options | {"seed": 5}).train_dataloader()
    assert [sides_of(other, plain, mirrored) for _ in range(6)] != epochs

    always = make_data(shapes, encoder, features=str(both_sides), augmentation=Augmentation(flip=1.0))
    assert all(side for batch in sides_of(always.train_dataloader(), plain, mirrored) for side in batch.values())
    unflipped = FeatureCache(both_sides, "val", fingerprint)
    for batch in always.val_dataloader():
        assert torch.equal(batch.annotations, unflipped.gather(batch.rows))


def test_features_of_mirrored_images_are_asked_for(shapes, encoder, features, both_sides):
    with pytest.raises(
        InputError, match=r"data\.augmentation\.flip: .*train_flipped\.json: no features; .*extract with --flipped"
    ):
        make_data(shapes, encoder, features=str(features), augmentation=Augmentation(flip=0.5)).train_dataloader()
    with pytest.raises(InputError, match=r"flip must be a probability, got 1\.5"):
        make_data(shapes, encoder, features=str(both_sides), augmentation=Augmentation(flip=1.5)).train_dataloader()
    with pytest.raises(InputError, match=r"features of another encoder \(flipped True there"):
        FeatureCache(both_sides, "train_flipped", encoder.fingerprint())


def test_features_of_photographs_as_they_are_stored_are_not_those_of_upright_ones(shapes, encoder, features):
    data = make_data(shapes, encoder, features=str(features))
    data._indices["train"] = dataclasses.replace(data.index("train"), upright=True)
    with pytest.raises(InputError, match=r"features of another encoder \(upright None there, True here\)"):
        data.train_dataloader()


def test_an_index_that_shared_memory_has_no_room_for_is_one_line(shapes, encoder, features, monkeypatch):
    def full(self):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(CaptionIndex, "share_memory", full)
    make_data(
        shapes, encoder, features=str(features)
    ).train_dataloader()  # without workers there is nobody to share with
    with pytest.raises(
        InputError, match=r"no room in shared memory \(unable.*--shm-size or --ipc=host\), or set data.num"
    ):
        make_data(shapes, encoder, num_workers=2)
