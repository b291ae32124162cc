"""The data of a run: records of one source as training and evaluation batches."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import DataLoader

from captioning.checkpoint.load import check_tokenizer, read_model
from captioning.data.batch import CaptionBatch
from captioning.data.features import Features, flipped_split, view_fingerprint
from captioning.data.loading import BatchLoader, CaptionDataset, processors
from captioning.data.old_sampler import CaptionBatchSampler, ImageBatchSampler, is_position
from captioning.data.records import SPLITS, CaptionIndex, CaptionSource
from captioning.data.transforms import Preprocessing, TrainingTransform
from captioning.encoders import Encoder
from captioning.errors import InputError, check_range
from captioning.evaluation.grounding import ObjectCells, object_cells
from captioning.tokenizers import PennTreebank, Tokenizer
from captioning.vocabulary import Vocabulary


class ResumableLoader(BatchLoader[CaptionBatch]):
    """A loader of whole batches that counts those that have been trained on, so that a run resumes at the next one.

    The trainer calls ``state_dict`` when it saves and ``load_state_dict`` when it resumes.

    Args:
        trained_on: Function that returns how many batches of the epoch are done, given how many were handed out.
    """

    sampler: CaptionBatchSampler

    def __init__(
        self, dataset: CaptionDataset, batches: CaptionBatchSampler, *, trained_on: Callable[[int], int], **options: Any
    ) -> None:
        super().__init__(dataset, batches, **options)
        self.trained_on = trained_on
        self._handed_out: int | None = None

    def __iter__(self) -> Iterator[CaptionBatch]:  # type: ignore[override]
        self._handed_out = self.sampler.resumes_at
        for batch in super().__iter__():
            self._handed_out += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        done = None if self._handed_out is None else self.trained_on(self._handed_out)
        return self.sampler.state_dict(done)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)


@dataclass(frozen=True)
class VocabularyOptions:
    """Which words the captions are made of.

    Args:
        min_count: A word with fewer occurrences in the training captions becomes <unk>.
        max_words: Largest number of words; None sets no limit.
        file: Vocabulary to use instead of the words of the training captions.
        extend: Model whose words come first, in their order, before the further words of the training captions: a
            checkpoint, an exported folder or a name on the hub. Needed to fine-tune it (``--init_from``) on new words.
        tokenizer: Splits captions into words and joins words to a text. English by Penn Treebank rules by default,
            ``Whitespace``, ``Characters`` for Chinese and Japanese, or a class of your own.

    Raises:
        InputError: A number is below 1, or both ``file`` and ``extend`` are given.
    """

    min_count: int = 1
    max_words: int | None = None
    file: str | None = None
    extend: str | None = None
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        check_range(1, min_count=self.min_count, max_words=self.max_words)
        if self.file is not None and self.extend is not None:
            raise InputError("data.vocabulary: file and extend are both given; give one of them")

    def build(self, index: CaptionIndex, tokenizer: Tokenizer) -> Vocabulary:
        """Return the vocabulary of the training captions ``index``, that of the file, or that of the model and both."""
        if self.file is not None:
            return Vocabulary(Vocabulary.load(self.file).words, tokenizer)
        captions = (caption.split() for caption in index.captions)
        counted = Vocabulary.build(captions, min_count=self.min_count, max_size=self.max_words, tokenizer=tokenizer)
        if not counted.words:
            raise InputError(
                f"data.vocabulary.min_count {self.min_count}: no word of the {len(index.captions)} training captions "
                "occurs so often; give less"
            )
        if self.extend is None:
            return counted
        known = read_model(self.extend).vocabulary
        check_tokenizer(known.tokenizer, tokenizer)
        return known.extended(counted.words)


@dataclass(frozen=True)
class Augmentation:
    """Random changes of training images.

    Args:
        random_crop: Whether to cut images from anywhere in the resized image instead of from its centre.
        flip: Probability of mirroring an image, whose caption may say "left" or "right". With ``data.features``, the
            probability of reading the features of the mirrored image, for all its captions of an epoch
            (``captioning extract --flipped``).
    """

    random_crop: bool = False
    flip: float = 0.0


class CaptionDataModule(pl.LightningDataModule):
    """Records of one source as training and evaluation batches.

    ``CaptioningModule.connect`` sets ``encoder``, which determines the preprocessing of images and the grid of objects.

    Args:
        source: Data set.
        batch_size: Captions in a training batch, per process.
        group: What a training batch keeps together: captions of one ``length`` (Sec. 4.3), or all captions of an
            ``image``, so that an encoder that is being trained runs once per image and epoch, not once per caption.
        captions_per_image: How many captions of each image an epoch takes; every epoch continues where the last one
            stopped. None for all. Needs ``group: image``.
        eval_batch_size: Images in an evaluation batch, per process.
        num_workers: Processes that load images. By default one per processor, at most 8, and none for cached
            features, which threads of this process read ahead.
        vocabulary: Which words the captions are made of.
        features: Folder written by ``captioning extract``; training reads annotations from it.
        augmentation: Random changes of training images.
        test_split: Split that ``test`` and ``predict`` use.
        limit_images: Use only the first images of every split, to try something out.

    Raises:
        InputError: An option is out of its range.
    """

    encoder: Encoder
    seed: int = 0
    """Seed of the order of the batches and of the augmentation; ``--seed_everything`` sets it."""

    def __init__(
        self,
        source: CaptionSource,
        *,
        batch_size: int = 64,
        group: Literal["length", "image"] = "length",
        captions_per_image: int | None = None,
        eval_batch_size: int = 50,
        num_workers: int | None = None,
        vocabulary: VocabularyOptions = VocabularyOptions(),
        features: str | None = None,
        augmentation: Augmentation = Augmentation(),
        test_split: str = "test",
        limit_images: int | None = None,
    ) -> None:
        super().__init__()
        check_range(1, batch_size=batch_size, captions_per_image=captions_per_image)
        check_range(1, eval_batch_size=eval_batch_size, limit_images=limit_images)
        check_range(0, 1024, num_workers=num_workers)
        if test_split not in SPLITS:
            raise InputError(f"test_split must be one of {', '.join(SPLITS)}, got {test_split!r}")
        self.source = source
        self.tokenizer = source.tokenizer = vocabulary.tokenizer or PennTreebank()
        self.batch_size = batch_size
        self.group = group
        self.captions_per_image = captions_per_image
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.features = features
        self.augmentation = augmentation
        self.test_split = test_split
        self.limit_images = limit_images
        self._words = vocabulary
        self._indices: dict[str, CaptionIndex] = {}
        self._objects: dict[tuple[str, int], list[ObjectCells]] = {}
        self._objects_on: object = None  # the cells that these objects are on
        self._vocabulary: Vocabulary | None = None
        self.evaluated_split = "val"
        self._train_loader: ResumableLoader | None = None
        self._resume_from: dict[str, Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CaptionDataModule:
        """Return the same object: copies of a module, such as an average of its weights, share the data."""
        return self

    def prepare_data(self) -> None:
        self.source.prepare()

    def setup(self, stage: str) -> None:
        """Read the splits that ``stage`` (fit, validate, test, predict) needs, and the vocabulary."""
        self.evaluated_split = self.test_split if stage in ("test", "predict") else "val"
        splits = ["train", "val"] if stage == "fit" else [self.evaluated_split]
        for split in splits:
            if len(self.index(split)) < self._processes[1]:
                raise InputError(
                    f"{self.index(split).origin}: the {split} split has {len(self.index(split))} images for "
                    f"{self._processes[1]} processes; lower --trainer.devices"
                )
        self.source.objects(self.evaluated_split)  # damaged outlines are refused before work starts

    def index(self, split: str) -> CaptionIndex:
        """Return the records of ``split``, read once."""
        if split not in self._indices:
            index = self.source.index(split)
            if self.limit_images is not None:
                index = index.take(self.limit_images)
            self._indices[split] = index
        return self._indices[split]

    @property
    def evaluated(self) -> CaptionIndex:
        """The records of the split that the current stage evaluates."""
        return self.index(self.evaluated_split)

    @property
    def vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = self._words.build(self.index("train"), self.tokenizer)
        return self._vocabulary

    def objects(self, row: int) -> list[ObjectCells]:
        """Return the objects of an image of the evaluated split, on the encoder's cells; [] without annotated ones."""
        cells, key = self.encoder.cells, (self.evaluated_split, row)
        if self._objects_on != cells:  # an encoder that is being trained changes them
            self._objects_on, self._objects = cells, {}
        if key not in self._objects:
            lookup = self.source.objects(self.evaluated_split)
            objects = [] if lookup is None else lookup(int(self.evaluated.image_ids[row]))
            view = self.encoder.preprocessing
            self._objects[key] = object_cells(
                [dataclasses.replace(item, mask=view.mask(item.mask)) for item in objects], cells
            )
        return self._objects[key]

    @property
    def _processes(self) -> tuple[int, int]:
        """(rank, world size)."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _trained_on(self, handed_out: int) -> int:
        """Return how many of the batches handed out are done; all of the epoch, once the trainer stops asking."""
        if self.trainer is None:
            return handed_out
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        # Not ready: an epoch begins, and the count is still that of the epoch before. When ready, a batch that a crash
        # or Ctrl-C left unfinished is not counted.
        done = progress.processed if progress.ready else handed_out
        return sys.maxsize if done >= self.trainer.num_training_batches else done

    def _dataset(self, split: str, *, by_image: bool) -> CaptionDataset:
        features = flipped = None
        if self.features is not None:
            if not self.encoder.frozen:
                raise InputError("data.features: cached features need a frozen encoder; unset encoder.trainable_from")
            features = self._cache(split)
            if self.augmentation.flip and not by_image:
                flipped = self._flipped_features()
        else:
            self.index(split).check_images()
        transform = None if by_image else self._training_transform()
        return CaptionDataset(
            self.index(split),
            self.vocabulary,
            self.encoder.preprocessing,
            transform=transform,
            seed=self.seed,
            features=features,
            flipped=flipped,
            flip=self.augmentation.flip,
            by_image=by_image,
        )

    @property
    def _workers(self) -> int:
        """Processes that load images."""
        if self.num_workers is not None:
            return self.num_workers
        return 0 if self.features is not None else min(8, processors())

    def _loader_options(self, dataset: CaptionDataset) -> dict[str, Any]:
        return {
            "num_workers": self._workers,
            "pin_memory": torch.cuda.is_available(),
            "persistent_workers": self._workers > 0,
            # Its own generator: the global one belongs to dropout and sampling, and must resume unchanged.
            "generator": torch.Generator().manual_seed(self.seed),
        }

    def _training_transform(self) -> TrainingTransform | None:
        random_crop, flip = self.augmentation.random_crop, self.augmentation.flip
        if self.features is not None:
            if random_crop:
                raise InputError("data.augmentation.random_crop: cached features are of one fixed view; unset one")
            return None
        if not (random_crop or flip):
            return None
        if random_crop and self.encoder.preprocessing.crop is None:
            raise InputError("data.augmentation.random_crop: this encoder sees the whole image; set its crop: true")
        return self.encoder.preprocessing.training(random_crop=random_crop, flip=flip)

    def _flipped_features(self) -> Features:
        """Return the features of the mirrored training images.

        Raises:
            InputError: They were not extracted, or ``flip`` is not a probability.
        """
        check_range(0, 1, **{"data.augmentation.flip": self.augmentation.flip})
        try:
            return self._cache("train", flipped=True)
        except InputError as error:
            raise InputError(f"data.augmentation.flip: {error}; extract with --flipped") from error

    def _cache(self, split: str, *, flipped: bool = False) -> Features:
        assert self.features is not None
        upright = self.index(split).upright
        fingerprint = view_fingerprint(self.encoder.fingerprint(), upright=upright, flipped=flipped)
        return Features(self.features, flipped_split(split) if flipped else split, fingerprint)

    def samples(self, count: int) -> CaptionBatch:
        """Return the first ``count`` images of the evaluated split as one batch."""
        dataset = self._dataset(self.evaluated_split, by_image=True)
        return dataset[list(range(min(count, len(dataset.index))))]

    def photo(self, row: int) -> Image | None:
        """Return an image of the evaluated split before preprocessing; None if its image file is missing."""
        there = self.evaluated.image_path(row).is_file()
        return self.evaluated.image(row, self.encoder.preprocessing) if there else None

    def load(self, rows: Tensor, preprocessing: Preprocessing) -> Tensor:
        """Return images (B, 3, height, width) of the evaluated split, for an encoder with this preprocessing."""
        return torch.stack([preprocessing(self.evaluated.image(row, preprocessing)) for row in rows.tolist()])

    def transfer_batch_to_device(self, batch: CaptionBatch, device: torch.device, dataloader_idx: int) -> CaptionBatch:
        """Return the batch on the device; from page-locked memory, the copy overlaps with computing."""
        return batch.to(device, non_blocking=device.type == "cuda")

    def train_dataloader(self) -> ResumableLoader:
        dataset = self._dataset("train", by_image=False)
        index = dataset.index
        rank, world_size = self._processes
        sampler = CaptionBatchSampler(
            index.caption_lengths,
            index.caption_image,
            batch_size=self.batch_size,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
            group=self.group,
            captions_per_image=self.captions_per_image,
        )
        options = self._loader_options(dataset)
        loader = ResumableLoader(dataset, sampler, trained_on=self._trained_on, **options)
        if self._resume_from is not None:
            loader.load_state_dict(self._resume_from)
        self._train_loader, self._resume_from = loader, None
        return loader

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training captions from which a resumed run continues.

        The loader keeps one too, but Lightning 2.6 does not restore it at the end of an epoch or after a schedule has
        asked for the number of steps.
        """
        if self._resume_from is not None:
            return self._resume_from
        return {} if self._train_loader is None else self._train_loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let ``train_dataloader`` continue where ``state_dict`` was taken.

        Raises:
            InputError: It is not such a position.
        """
        if state_dict != {} and not is_position(state_dict):
            raise InputError("the checkpoint's position in the training data is damaged; use another one")
        self._resume_from = state_dict or None

    def val_dataloader(self) -> DataLoader[CaptionBatch]:
        dataset = self._dataset(self.evaluated_split, by_image=True)
        rank, world_size = self._processes
        sampler = ImageBatchSampler(len(dataset.index), self.eval_batch_size, rank=rank, world_size=world_size)
        return BatchLoader(dataset, sampler, **self._loader_options(dataset))

    test_dataloader = predict_dataloader = val_dataloader
