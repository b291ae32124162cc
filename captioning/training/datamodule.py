"""The data of a run: records of one source as training and evaluation batches."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from captioning.checkpoint.load import check_tokenizer, read_model
from captioning.data.batch import CaptionBatch
from captioning.data.loading import CaptionDataset, SplitData, batch_loader, worker_count
from captioning.data.records import CaptionIndex, CaptionSource
from captioning.data.sampler import CaptionBatches, Group, image_batches
from captioning.data.transforms import Augmentation
from captioning.encoders import Encoder
from captioning.errors import InputError, check_whole
from captioning.tokenizers import PennTreebank, Tokenizer
from captioning.training.resume import next_batch
from captioning.vocabulary import Vocabulary


@dataclass(frozen=True)
class VocabularyOptions:
    """The words that a model knows, and the tokenizer that splits captions into them.

    Args:
        min_count: A word with fewer occurrences in the training captions becomes <unk>.
        max_words: Largest number of words; None sets no limit.
        file: Vocabulary to use instead of the words of the training captions.
        extend: Model whose vocabulary is kept and extended by new words of the training captions: a checkpoint, an
            exported folder or a name on the hub. Needed to fine-tune that model (``--init_from``).
        tokenizer: Splits captions into words and joins words to a text. English by Penn Treebank rules by default,
            ``Whitespace``, ``Characters`` for Chinese and Japanese, or a class of your own.
    """

    min_count: int = 1
    max_words: int | None = None
    file: str | None = None
    extend: str | None = None
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        check_whole(1, min_count=self.min_count, max_words=self.max_words)
        if self.file is not None and self.extend is not None:
            raise InputError("data.vocabulary: file and extend are both given; give one of them")


class CaptionDataModule(pl.LightningDataModule):
    """The batches of one data set for training and validation.

    The encoder of the trainer's module determines the preprocessing of images and the cells of objects.

    Args:
        source: Data set.
        batch_size: Captions in a training batch, per process.
        group: What a training batch keeps together: captions of one ``length`` (Sec. 4.3), or all captions of an
            ``image``, so that an encoder that is being trained runs once per image and epoch, not once per caption.
        captions_per_image: Captions of each image in an epoch; the next epoch takes the next captions. None for all.
            Needs ``group: image``.
        eval_batch_size: Images in an evaluation batch, per process.
        num_workers: Processes that load images. By default one per processor, at most 8; for cached features none
            on a CPU and two on a GPU.
        vocabulary: Options of the vocabulary.
        features: Folder written by ``captioning extract``; training reads annotations from it.
        augmentation: Random changes of training images.
        limit_images: Use only the first images of every split, to try something out.
        seed: Seed of the order of the batches and of the augmentation.
    """

    encoder: Encoder
    needs_regions = False  # whether the objective teaches attention by regions

    def __init__(
        self,
        source: CaptionSource,
        *,
        batch_size: int = 64,
        group: Group = "length",
        captions_per_image: int | None = None,
        eval_batch_size: int = 50,
        num_workers: int | None = None,
        vocabulary: VocabularyOptions = VocabularyOptions(),
        features: str | None = None,
        augmentation: Augmentation = Augmentation(),  # noqa: B008 - frozen
        limit_images: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_whole(1, batch_size=batch_size, captions_per_image=captions_per_image)
        check_whole(1, eval_batch_size=eval_batch_size, limit_images=limit_images)
        self.source, self._vocabulary_options = source, vocabulary
        source.tokenizer = vocabulary.tokenizer or PennTreebank()
        self.batch_size, self.group, self.captions_per_image = batch_size, group, captions_per_image
        self.eval_batch_size, self.workers = eval_batch_size, worker_count(num_workers, cached=features is not None)
        self.features, self.augmentation = features, augmentation
        self.limit_images, self.seed = limit_images, seed
        self._splits: dict[str, SplitData] = {}

    def prepare_data(self) -> None:
        self.source.prepare()

    def setup(self, stage: str) -> None:
        """Read the splits that ``stage`` (fit or validate) needs."""
        if self.trainer is not None:
            module: Any = self.trainer.lightning_module
            self.encoder, self.needs_regions = module.encoder, module.objective.needs_regions
        for split in ("train", "val") if stage == "fit" else ("val",):
            self.index(split)

    def split_data(self, name: str) -> SplitData:
        """Return a split, which is read once. Raises InputError if needed images are missing."""
        if name not in self._splits:
            self._splits[name] = SplitData(self.source, name, limit_images=self.limit_images, features=self.features)
        return self._splits[name]

    def index(self, split: str) -> CaptionIndex:
        return self.split_data(split).index

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The words of the training captions, of a file, or of a model with the new words of the captions appended."""
        options, tokenizer = self._vocabulary_options, self.source.tokenizer
        if options.file is not None:
            return Vocabulary.load(options.file, tokenizer)
        index, min_count = self.index("train"), options.min_count
        captions = (caption.split() for caption in index.captions)
        frequent = Vocabulary.build(captions, min_count=min_count, max_words=options.max_words, tokenizer=tokenizer)
        if not frequent.words and options.extend is None:
            problem = f"no word of the {len(index.captions)} training captions occurs that often; lower it"
            raise InputError(f"data.vocabulary.min_count {min_count}: {problem}")
        if options.extend is None:
            return frequent
        vocabulary = read_model(options.extend).vocabulary
        check_tokenizer(vocabulary.tokenizer, tokenizer)
        return vocabulary.extended(frequent.words)

    @property
    def _rank_options(self) -> dict[str, Any]:
        trainer = self.trainer
        return {} if trainer is None else {"rank": trainer.global_rank, "world_size": trainer.world_size}

    def _loader(self, dataset: CaptionDataset, batches: Iterable[list[int]]) -> DataLoader[CaptionBatch]:
        return batch_loader(
            dataset,
            batches,
            num_workers=self.workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.workers > 0,
            # Loaders must not draw from the global generator: a resumed run continues its numbers.
            generator=torch.Generator().manual_seed(self.seed),
        )

    def sampler(self, start: tuple[int, int] = (0, 0)) -> CaptionBatches:
        """Return this process's training batches, lists of caption indices, from ``start`` (epoch, batch)."""
        lengths, images = self.index("train").caption_lengths, self.index("train").caption_image
        options: dict[str, Any] = {"group": self.group, "captions_per_image": self.captions_per_image, "start": start}
        return CaptionBatches(lengths, images, self.batch_size, self.seed, **options, **self._rank_options)

    def train_dataloader(self) -> DataLoader[CaptionBatch]:
        if self.augmentation.random_crop and self.features is not None:
            raise InputError("data.augmentation.random_crop: cached features have one view; unset it or data.features")
        if self.augmentation.random_crop and self.encoder.preprocessing.crop is None:
            raise InputError("data.augmentation.random_crop: this encoder sees the whole image; leave it out")
        data = self.split_data("train")
        regions = data.regions(self.encoder) if self.needs_regions else None
        if regions is not None:
            if not regions.available:
                raise InputError("objective.guidance: the data set has no regions; see data/README.md")
            # Training moves the encoder's cells, but loading processes keep a copy of the cells at the start. The main
            # process (num_workers 0) must use the same cells.
            regions.cells = self.encoder.cells
        dataset = CaptionDataset(
            data.index,
            self.vocabulary,
            self.encoder.preprocessing,
            augmentation=self.augmentation,
            seed=self.seed,
            features=data.cached_features(self.encoder),
            mirrored_features=data.cached_features(self.encoder, mirrored=True) if self.augmentation.flip else None,
            regions=regions,
        )
        return self._loader(dataset, self.sampler((0, 0) if self.trainer is None else next_batch(self.trainer)))

    def val_dataloader(self) -> DataLoader[CaptionBatch]:
        batches = image_batches(len(self.index("val")), self.eval_batch_size, **self._rank_options)
        return self._loader(self.split_data("val").evaluation_dataset(self.vocabulary, self.encoder), batches)
