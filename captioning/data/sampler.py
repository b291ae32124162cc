"""The order of captions in training and of images in evaluation, and their division among processes."""

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np
from torch.utils.data import Sampler

from captioning.errors import InputError

Group = Literal["length", "image"]


class PlacedBatch(list[int]):
    """The indices of a batch's captions; ``epoch_and_batch`` is its position, the same on all ranks."""

    epoch_and_batch = 0, 0


class CaptionBatches(Sampler[list[int]]):
    """Whole batches of captions of similar length (Sec. 4.3, Xu et al. 2015), shuffled again in each epoch.

    The captions of an epoch are cut into global batches of ``batch_size * world_size`` captions. With group ``length``,
    they are sorted by length before the cut, and the global batches are shuffled after it, so most global batches have
    one length. One global batch may be smaller. Each rank takes every ``world_size``-th caption of a global batch; if
    there are fewer captions than ranks, some are repeated. Every caption appears once per epoch unless
    ``captions_per_image`` is set. The order is a function of seed, epoch and ``batch_size * world_size``, so nothing is
    saved: a resumed run begins at ``start``.

    Differs from the paper, which draws a random length for each update: lengths come in proportion to their captions.

    Args:
        lengths, caption_image: (M,) words and image row of each caption, as in ``CaptionIndex``.
        batch_size: Captions per batch on each rank. With ``group="image"`` this is an average.
        group, captions_per_image: As in ``CaptionDataModule``. With ``"image"``, images are drawn regardless of caption
            length: batches sorted by length would hold similar pictures, from which the encoder learns badly.
        start: (epoch, batch) of the first pass's first batch, which workers load before ``set_epoch`` is called.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        caption_image: np.ndarray,
        batch_size: int,
        seed: int,
        *,
        group: Group = "length",
        captions_per_image: int | None = None,
        start: tuple[int, int] = (0, 0),
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if captions_per_image is not None and group != "image":
            raise InputError(f"captions_per_image: needs group image, got {group}")
        self.lengths, images = np.asarray(lengths), np.asarray(caption_image)
        self.seed, self.group, self.rank, self.world_size = seed, group, rank, world_size
        self.epoch, self.first_batch = start
        # The units that are shuffled: captions, or images.
        self.units, self.units_per_batch = len(images), batch_size * world_size
        if group == "image":
            self._by_image = np.argsort(images, kind="stable")  # captions, image by image
            _, self._first_caption, self._counts = np.unique(np.sort(images), return_index=True, return_counts=True)
            self._epoch_counts = np.minimum(self._counts, captions_per_image or len(images))  # captions in an epoch
            self.units = len(self._counts)
            images_per_caption = self.units / int(self._epoch_counts.sum())
            self.units_per_batch = max(world_size, round(batch_size * world_size * images_per_caption))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, which skips batches only in the epoch of ``start``. Lightning calls this."""
        if epoch != self.epoch:
            self.epoch, self.first_batch = epoch, 0

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on each rank, even if the next pass begins in its middle."""
        return math.ceil(self.units / self.units_per_batch)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first_batch = self.epoch, self.first_batch
        random = np.random.default_rng((self.seed, epoch))
        units = random.permutation(self.units).astype(np.int32)
        if self.group == "length":
            units = units[np.argsort(self.lengths[units], kind="stable")]
        sizes = np.full(len(self), self.units_per_batch)
        sizes[random.integers(len(self))] -= sizes.sum() - len(units)  # a random global batch is the smaller one
        global_batches = np.split(units, np.cumsum(sizes)[:-1])
        order = random.permutation(len(self)).tolist()
        for number, i in enumerate(order[first_batch:], first_batch):
            batch = PlacedBatch(self._caption_numbers(global_batches[i], epoch))
            batch.epoch_and_batch = epoch, number
            yield batch

    def _caption_numbers(self, units: np.ndarray, epoch: int) -> list[int]:
        """Return the numbers of this rank's captions of a global batch's units."""
        if len(units) < self.world_size:
            units = np.resize(units, self.world_size)
        rank_units = units[self.rank :: self.world_size]
        if self.group == "length":
            return rank_units.tolist()
        images = np.stack([self._first_caption, self._counts, self._epoch_counts], axis=1)[rank_units].tolist()
        positions = [first + (epoch * n + i) % count for first, count, n in images for i in range(n)]
        return self._by_image[positions].tolist()


def image_batches(image_count: int, batch_size: int, *, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """Return this rank's image batches, out of those that a single process would evaluate.

    Ranks wait for each other, so every rank has the same number of batches; a rank with fewer repeats the last batch of
    the split. The caller counts each image once, by its row.
    """
    batches = [list(range(first, min(first + batch_size, image_count))) for first in range(0, image_count, batch_size)]
    per_rank = -(-len(batches) // world_size)
    return [batches[min(number, len(batches) - 1)] for number in range(rank * per_rank, (rank + 1) * per_rank)]
