"""The data of a run: batches by its options, cached features, and options that exclude each other."""

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from captioning.data.extraction import extract_features
from captioning.data.sampler import CaptionBatches
from captioning.data.shapes import ShapesSource
from captioning.data.transforms import Augmentation
from captioning.encoders import ConvEncoder, TorchvisionEncoder
from captioning.errors import InputError
from captioning.settings import BATCH_SETTINGS
from captioning.training.datamodule import CaptionDataModule, VocabularyOptions


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> ShapesSource:
    source = ShapesSource(str(tmp_path_factory.mktemp("data") / "shapes"), train=6, val=3, test=2, image_size=48)
    source.prepare()
    return source


def make_encoder(**options) -> TorchvisionEncoder:
    """A frozen network with random weights, which are as good for a cache."""
    return TorchvisionEncoder("squeezenet1_1", "features.4", weights=None, image_size=48, **options)


@pytest.fixture(scope="module")
def encoder() -> TorchvisionEncoder:
    return make_encoder()


@pytest.fixture(scope="module")
def features(shapes, encoder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    indices = {split: shapes.index(split) for split in ("train", "val")}
    extract_features(encoder, indices, folder, device=torch.device("cpu"), batch_size=4, num_workers=0)
    return folder


def make_data(source: ShapesSource, encoder, *, seed: int = 0, **options) -> CaptionDataModule:
    """Return a data module with its encoder, without a trainer."""
    data = CaptionDataModule(source, seed=seed, **{"batch_size": 7, "eval_batch_size": 2, "num_workers": 0} | options)
    data.encoder = encoder
    data.setup("fit")
    return data


def test_vocabulary_comes_from_the_training_split_alone(shapes, encoder):
    words = {word for caption in shapes.index("train").captions for word in caption.split()}
    assert set(make_data(shapes, encoder).vocabulary.words) == words
    with pytest.raises(InputError, match="min_count 1000: no word of the 30 training captions occurs that often"):
        _ = make_data(shapes, encoder, vocabulary=VocabularyOptions(min_count=1000)).vocabulary
    few = make_data(shapes, encoder, vocabulary=VocabularyOptions(min_count=1000, extend="pretrained"))
    assert len(few.vocabulary) > 1000


def test_batch_settings_are_the_settings_that_change_a_batch(shapes, encoder):
    """A resumed run refuses them inside an epoch."""
    base: dict[str, Any] = {"group": "image", "captions_per_image": 2, "seed": 0}
    changes = {"batch_size": 5, "group": "length", "captions_per_image": 3, "limit_images": 4, "seed": 1}
    changes |= {"eval_batch_size": 3, "num_workers": 1, "augmentation": Augmentation(flip=0.5)}
    changes |= {"vocabulary": VocabularyOptions(min_count=2), "features": None}  # features have the same captions
    assert {"source", *changes} == {*inspect.signature(CaptionDataModule).parameters}
    # The data set has the first two, `world_size` is the setting `processes`, and no setting is the last two.
    others = {"lengths", "caption_image", "world_size", "start", "rank"}
    assert {*inspect.signature(CaptionBatches).parameters} <= {*changes} | others and "processes" in BATCH_SETTINGS
    batches = list(make_data(shapes, encoder, **base).sampler())
    for name, value in changes.items():
        options = base | {name: value} | ({"captions_per_image": None} if value == "length" else {})
        is_changed = list(make_data(shapes, encoder, **options).sampler()) != batches
        setting = "seed_everything" if name == "seed" else f"data.{name}"
        assert is_changed == (setting in BATCH_SETTINGS), name


def test_images_and_regions_can_be_loaded_by_spawned_processes(shapes):
    """As on macOS and Windows, and on Linux from Python 3.14 on."""
    data = make_data(shapes, make_encoder())
    data.needs_regions = True
    dataset = data.train_dataloader().dataset
    here, there = (each[[0, 1]] for each in (dataset, pickle.loads(pickle.dumps(dataset))))
    assert len(here.regions) and torch.equal(here.regions, there.regions) and torch.equal(here.images, there.images)


def test_a_loading_process_keeps_the_cells_of_the_encoder_for_regions(shapes):
    data = make_data(shapes, ConvEncoder((8, 8), (4, 4), image_size=48))
    data.needs_regions = True
    dataset = data.train_dataloader().dataset
    before = dataset[[0, 1]].regions
    torch.nn.init.normal_(next(data.encoder.parameters()))
    assert torch.equal(dataset[[0, 1]].regions, before) and data.encoder.cells != dataset.regions.cells


def test_training_shuffles_captions_and_evaluation_keeps_images_in_order(shapes, encoder):
    data = make_data(shapes, encoder)
    assert sum(len(batch.captions) for batch in data.train_dataloader()) == 30
    assert [batch.index_rows.tolist() for batch in data.val_dataloader()] == [[0, 1], [2]]
    assert len(make_data(shapes, encoder, limit_images=2).train_dataloader()) == 2  # 10 captions


def test_cached_features_replace_the_encoder(shapes, encoder, features):
    from_images, from_cache = make_data(shapes, encoder), make_data(shapes, encoder, features=str(features))
    for images, cached in zip(from_images.train_dataloader(), from_cache.train_dataloader(), strict=True):
        assert torch.equal(images.captions, cached.captions)
        with torch.no_grad():
            torch.testing.assert_close(cached.annotations.float(), encoder(images.images), rtol=2e-3, atol=1e-4)


def test_training_images_are_augmented_and_evaluated_images_are_not(shapes, encoder):
    plain, varied = (
        make_data(shapes, encoder, augmentation=augmentation)
        for augmentation in (Augmentation(), Augmentation(random_crop=True, flip=1.0))
    )
    for before, after in zip(plain.train_dataloader(), varied.train_dataloader(), strict=True):
        assert torch.equal(before.index_rows, after.index_rows) and not torch.equal(before.images, after.images)
    for before, after in zip(plain.val_dataloader(), varied.val_dataloader(), strict=True):
        assert torch.equal(before.images, after.images)


@pytest.mark.parametrize(
    ("augmentation", "message"),
    [
        (Augmentation(random_crop=True), r"data\.augmentation\.random_crop: cached features"),
        (
            Augmentation(flip=0.5),
            r"train_flipped\.json: no features; run captioning extract with --split train --flipped",
        ),
    ],
)
def test_options_that_cached_features_cannot_have_are_refused(shapes, encoder, features, augmentation, message):
    with pytest.raises(InputError, match=message):
        make_data(shapes, encoder, features=str(features), augmentation=augmentation).train_dataloader()


def test_a_probability_outside_its_range_is_refused():
    with pytest.raises(InputError, match=r"augmentation\.flip must be in 0 \.\. 1, got 1\.5"):
        Augmentation(flip=1.5)


def test_features_of_another_or_a_trained_encoder_or_of_other_views_are_refused(shapes, encoder, features):
    with pytest.raises(InputError, match="its features cannot be cached; set trainable_from to null"):
        make_data(shapes, make_encoder(trainable_from="features.3"), features=str(features)).train_dataloader()
    with pytest.raises(InputError, match="features of another encoder"):
        make_data(shapes, make_encoder(), features=str(features)).train_dataloader()
