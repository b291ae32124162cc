"""The data of a run: records of one source as training and evaluation batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import DataLoader

from captioning.checkpoint.load import check_tokenizer, read_model
from captioning.data.batch import CaptionBatch
from captioning.data.features import Features, seen
from captioning.data.loading import CaptionDataset, batch_loader, processors
from captioning.data.records import SPLITS, CaptionIndex, CaptionSource
from captioning.data.sampler import CaptionBatches, image_batches
from captioning.data.transforms import Preprocessing, TrainingTransform
from captioning.encoders import Encoder
from captioning.errors import InputError, check_range
from captioning.tokenizers import PennTreebank, Tokenizer
from captioning.vocabulary import Vocabulary


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

    The trainer's module brings ``encoder``, which determines the preprocessing of images and the grid of objects.

    Args:
        source: Data set.
        batch_size: Captions in a training batch, per process.
        group: What a training batch keeps together: captions of one ``length`` (Sec. 4.3), or all captions of an
            ``image``, so that an encoder that is being trained runs once per image and epoch, not once per caption.
        captions_per_image: How many captions of each image an epoch takes; every epoch continues where the last one
            stopped. None for all. Needs ``group: image``.
        eval_batch_size: Images in an evaluation batch, per process.
        num_workers: Processes that load images. By default one per processor, at most 8; for cached features none
            on a CPU and two on a GPU.
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
        self._vocabulary: Vocabulary | None = None
        self.evaluated_split = "val"

    def use(self, vocabulary: Vocabulary) -> None:
        """Use a trained model's vocabulary and its tokenizer in place of the words of the training captions."""
        self._vocabulary = vocabulary
        self.tokenizer = self.source.tokenizer = vocabulary.tokenizer

    def prepare_data(self) -> None:
        self.source.prepare()

    def setup(self, stage: str) -> None:
        """Read the splits that ``stage`` (fit, validate, test, predict) needs, and the vocabulary."""
        if self.trainer is not None:
            self.encoder = self.trainer.lightning_module.encoder  # type: ignore[assignment]
        self.evaluated_split = self.test_split if stage in ("test", "predict") else "val"
        for split in ["train", "val"] if stage == "fit" else [self.evaluated_split]:
            self.index(split)

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

    @property
    def _processes(self) -> tuple[int, int]:
        """(rank, world size)."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _dataset(self, split: str, *, by_image: bool) -> CaptionDataset:
        """Return the images of a split, or for training its captions with the random changes of their images.

        Raises:
            InputError: Images or features are missing, or cannot be changed so.
        """
        index, encoder, transform = self.index(split), self.encoder, None
        features: dict[str, Features | None] = {}
        random_crop, flip = (False, 0.0) if by_image else (self.augmentation.random_crop, self.augmentation.flip)
        check_range(0, 1, **{"data.augmentation.flip": flip})
        if self.features is None:
            index.check_images()
            if random_crop and encoder.preprocessing.crop is None:
                raise InputError("data.augmentation.random_crop: this encoder sees the whole image; set its crop: true")
            if random_crop or flip:
                transform = TrainingTransform(encoder.preprocessing, random_crop=random_crop, flip=flip)
        else:
            if not encoder.frozen:
                raise InputError("data.features: cached features need a frozen encoder; unset encoder.trainable_from")
            if random_crop:
                raise InputError("data.augmentation.random_crop: cached features are of one fixed view; unset one")
            features["features"] = self._features(split)
            try:
                features["flipped"] = self._features(split, flipped=True) if flip else None
            except InputError as error:
                raise InputError(f"data.augmentation.flip: {error}; extract with --flipped") from error
        return CaptionDataset(
            index,
            self.vocabulary,
            encoder.preprocessing,
            transform=transform,
            seed=self.seed,
            flip=flip,
            by_image=by_image,
            **features,
        )

    def _features(self, split: str, *, flipped: bool = False) -> Features:
        index = self.index(split)
        name, fingerprint = seen(split, self.encoder.fingerprint(), upright=index.upright, flipped=flipped)
        return Features(str(self.features), name, fingerprint, index.paths)

    @property
    def _workers(self) -> int:
        """Processes that load images."""
        if self.num_workers is not None:
            return self.num_workers
        if self.features is not None:
            return 2 if torch.cuda.is_available() else 0
        return min(8, processors())

    def _loader(self, dataset: CaptionDataset, batches: Iterable[list[int]]) -> DataLoader[CaptionBatch]:
        return batch_loader(
            dataset,
            batches,
            num_workers=self._workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self._workers > 0,
            # Its own generator: the global one belongs to dropout and sampling, and must resume unchanged.
            generator=torch.Generator().manual_seed(self.seed),
        )

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

    def batches_per_epoch(self) -> int:
        """Return the training batches of an epoch of this process."""
        return len(self._sampler((0, 0)))

    def _sampler(self, start: tuple[int, int]) -> CaptionBatches:
        index = self.index("train")
        rank, world_size = self._processes
        return CaptionBatches(
            index.caption_lengths,
            index.caption_image,
            self.batch_size,
            self.seed,
            group=self.group,
            captions_per_image=self.captions_per_image,
            start=start,
            rank=rank,
            world_size=world_size,
        )

    def train_dataloader(self) -> DataLoader[CaptionBatch]:
        """Return the training batches; those of a resumed run begin where the trainer's own count says that it is."""
        start = (0, 0)
        if self.trainer is not None:
            loop: Any = self.trainer.fit_loop
            progress = loop.epoch_loop.batch_progress
            in_epoch = loop.restarting and not progress.is_last_batch
            start = (self.trainer.current_epoch, progress.current.processed if in_epoch else 0)
        return self._loader(self._dataset("train", by_image=False), self._sampler(start))

    def val_dataloader(self) -> DataLoader[CaptionBatch]:
        dataset = self._dataset(self.evaluated_split, by_image=True)
        rank, world_size = self._processes
        batches = image_batches(len(dataset.index), self.eval_batch_size, rank=rank, world_size=world_size)
        return self._loader(dataset, batches)

    test_dataloader = predict_dataloader = val_dataloader
