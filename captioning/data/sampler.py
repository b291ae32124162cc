"""Which captions make a batch, in which order, on which process.

Both yield whole batches, as lists of numbers, and are given to ``DataLoader(sampler=..., batch_size=None)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.utils.data import Sampler

from captioning.errors import InputError


class Numbers(list[int]):
    """The numbers of a batch's captions.

    Attributes:
        place: the batch's epoch and its number in it, the same on all ranks.
    """

    def __init__(self, numbers: Iterable[int], place: tuple[int, int]) -> None:
        super().__init__(numbers)
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return Numbers, (list(self), self.place)


class CaptionBatchSampler(Sampler[list[int]]):
    """Batches of captions of similar length (Sec. 4.3, Xu et al. 2015), shuffled again in each epoch.

    An epoch is cut into **steps** of ``batch_size * world_size`` captions of one length (where a length runs out, its
    neighbours fill up), and a step is dealt out to the ranks caption by caption, so that all ranks work on similar
    lengths at the same time and none waits for another. Then the steps are shuffled. Every caption appears exactly
    once in an epoch, counted over all ranks. One step of the epoch, at a random length, is short: its captions are
    dealt out in the same way, so every rank has the same number of batches. Only if it has fewer captions than there
    are ranks are some of them repeated, at most ``world_size - 1`` captions (or images with theirs) per epoch.

    Differs from the paper: it draws a length at random for each update; walking through all batches in random order
    draws lengths in proportion to their captions, without repeating or missing any.

    Args:
        lengths: (M,) words per caption, ``CaptionIndex.caption_lengths``.
        caption_image: (M,) image row of each caption, ``CaptionIndex.caption_image``.
        batch_size: captions per batch on each rank. With ``group="image"`` a target, met on average.
        seed: the order is a function of ``seed``, the epoch and ``batch_size * world_size`` alone: the same captions
            meet in a step whatever the number of ranks that they are dealt to.
        rank: this process, 0 .. world_size - 1.
        group: ``"length"`` as above. ``"image"`` keeps all captions of an image in one batch: an encoder that is being
            trained then runs once per image and epoch instead of five times. Images are drawn regardless of caption
            length: batches sorted by length would hold similar pictures, from which the encoder learns badly.
        image_share: (N,) the share, 0 .. shares - 1, that each image row belongs to, where processes do not have all
            images at hand. A step takes an equal part of every share, and the ranks of a share (neighbours, equally
            many) see its images alone. Every caption still appears once in an epoch and every rank has the same number
            of batches; those of a share with fewer captions are a little smaller.
        shares: how many there are; the order of the captions depends on it.
    """

    def __init__(
        self,
        lengths: Tensor | np.ndarray,
        caption_image: Tensor | np.ndarray,
        *,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        group: Literal["length", "image"] = "length",
        image_share: Tensor | np.ndarray | None = None,
        shares: int = 1,
    ) -> None:
        _check_layout(batch_size, rank, world_size)
        if world_size % shares:
            raise InputError(f"{shares} shares of the images cannot be divided among {world_size} processes")
        if group not in ("length", "image"):
            raise InputError(f"group must be length or image, got {group!r}")
        self._lengths = np.asarray(lengths, dtype=np.int32)
        images = np.asarray(caption_image)
        if self._lengths.ndim != 1 or self._lengths.shape != images.shape:
            raise ValueError(f"lengths and caption_image must both be (M,), got {self._lengths.shape}, {images.shape}")
        if not len(images):
            raise InputError("there is no caption to sample")
        self.batch_size, self.seed, self.rank, self.world_size, self.group = batch_size, seed, rank, world_size, group
        self.shares, self._together = shares, world_size // shares  # ranks of a share
        self.share = rank // self._together
        if group == "image":
            self._group_images(images)
            self._units = len(self._unit_size)
        else:
            self._units = len(images)
        self._per_step = self._units_a_step(batch_size, world_size)
        self._share_of = None if image_share is None else self._shares_of_units(np.asarray(image_share), images)
        self._steps = self._count_steps()
        self._next = (0, 0)  # epoch and batch that the next pass begins with
        self.epoch = 0
        self.batches_done = 0

    def _group_images(self, images: np.ndarray) -> None:
        """The unit of shuffling is an image."""
        self._by_image = np.argsort(images, kind="stable")  # captions, image by image
        ordered = images[self._by_image]
        self._unit_start = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        self._unit_size = np.diff(np.r_[self._unit_start, len(images)])

    def _shares_of_units(self, image_share: np.ndarray, images: np.ndarray) -> np.ndarray:
        first = self._by_image[self._unit_start] if self.group == "image" else slice(None)
        return image_share[images[first]]

    def _count_steps(self) -> int:
        """Return the steps of an epoch, which the largest share needs.

        Raises:
            InputError: a share is too small to give something to each of them.
        """
        sizes = [self._units] if self._share_of is None else np.bincount(self._share_of, minlength=self.shares).tolist()
        steps = -(-max(sizes) // self._per_step)
        if min(sizes) < steps * (1 if self._share_of is None else self._together):
            share, unit = sizes.index(min(sizes)), "captions" if self.group == "length" else "images"
            raise InputError(
                f"share {share} of {self.shares} has {min(sizes)} {unit} for {steps} batches an epoch of each of its "
                f"{self._together} processes; divide the images into fewer shares, or take larger batches"
            )
        return steps

    def _units_a_step(self, batch_size: int, world_size: int) -> int:
        """Return how many of a share a step has, unless it is short."""
        captions = batch_size * world_size // self.shares
        if self.group == "length":
            return captions
        return max(world_size // self.shares, round(captions * self._units / len(self._lengths)))

    def __len__(self) -> int:
        """Return the batches of a whole epoch on each rank, also when the next pass resumes in its middle."""
        return self._steps

    def __iter__(self) -> Iterator[Numbers]:  # type: ignore[override]
        """Yield lists of caption numbers: every pass is an epoch, the first one starts at the position that was loaded.

        There is no ``set_epoch``: a trainer that counts epochs otherwise (Lightning does after a stop in the middle of
        one) must not move a restored position.
        """
        # A generator, because DataLoader calls iter() twice and uses one: only the first next() may move the position.
        epoch, self.batches_done = self._next
        self.epoch, self._next = epoch, (epoch + 1, 0)
        units, starts, stops = self._plan(epoch)
        for step in range(self.batches_done, len(starts)):
            self.batches_done = step + 1
            yield Numbers(self._captions(units[starts[step] : stops[step]]), place=(self.epoch, step))

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the epoch's units of this share in order of length, and where in them each step begins and ends."""
        random = np.random.default_rng((self.seed, epoch))
        units = random.permutation(self._units).astype(np.int32)
        if self._share_of is not None:
            units = units[self._share_of[units] == self.share]
        if self.group == "length":
            units = units[np.argsort(self._lengths[units], kind="stable")]
        sizes = np.full(len(self), self._per_step)
        short, missing = random.integers(len(self)), sizes.sum() - len(units)
        if self._share_of is None:
            sizes[short] -= missing
        else:  # of a small share, more may be missing than a step has
            sizes -= missing // len(self)
            sizes[: missing % len(self)] -= 1
        stops = np.cumsum(sizes)
        order = random.permutation(len(self))
        return units, (stops - sizes)[order], stops[order]

    def _captions(self, step: np.ndarray) -> list[int]:
        if len(step) < self._together:
            step = np.resize(step, self._together)
        mine = step[self.rank % self._together :: self._together]
        if self.group == "length":
            return mine.tolist()
        starts, sizes = self._unit_start[mine], self._unit_size[mine]
        return [caption for a, n in zip(starts, sizes, strict=True) for caption in self._by_image[a : a + n].tolist()]

    @property
    def resumes_at(self) -> int:
        """Batches of its epoch that the next pass leaves out; 0 unless a position was restored."""
        return self._next[1]

    def state_dict(self, batches_done: int | None = None) -> dict[str, Any]:
        """Return the position as plain data.

        Args:
            batches_done: batches of the current epoch that have been **trained on**. A data loader with workers is
                ahead of training, so an exact resume needs this count; by default the batches yielded so far.
        """
        done = self.batches_done if batches_done is None else batches_done
        epoch, done = (self.epoch + 1, 0) if done >= len(self) else (self.epoch, done)
        return {"epoch": epoch, "batches_done": done, **self._layout()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass continue where ``state_dict`` was taken.

        The number of ranks may be another one if ``batch_size * world_size`` is the same.

        Raises:
            InputError: the position is in the middle of an epoch whose steps were cut differently.
        """
        epoch, done, layout = state["epoch"], state["batches_done"], self._layout()
        state = {"shares": 1, **state}  # checkpoints of earlier versions have none
        differing = [name for name, value in layout.items() if state[name] != value]
        step = state["batch_size"] * state["world_size"]
        if self._units_a_step(state["batch_size"], state["world_size"]) == self._per_step:
            differing = [name for name in differing if name not in ("batch_size", "world_size")]
        if done and differing:
            changes = ", ".join(f"{name} {state[name]} -> {layout[name]}" for name in differing)
            fits, rest = divmod(step, self.world_size)
            remedy = "use the old values"
            if differing == ["world_size"] and not rest:
                remedy = f"with {self.world_size} processes, batch_size {fits} goes on at the same place"
            raise InputError(f"cannot resume in the middle of epoch {epoch}: {changes}; {remedy}")
        self._next = (epoch, done)
        self.epoch, self.batches_done = epoch, done

    def _layout(self) -> dict[str, Any]:
        return {
            "captions": len(self._lengths),
            "batch_size": self.batch_size,
            "world_size": self.world_size,
            "seed": self.seed,
            "group": self.group,
            "shares": self.shares,
        }


class ImageBatchSampler(Sampler[list[int]]):
    """Evaluation order: the batches of one process, dealt out whole, so that all processes find what one would find.

    A rank gets neighbouring batches, which are read from a feature cache in file order, and every rank the same number
    of them, because ranks wait for each other: where the batches run out, it gets the last one of all again. What is
    gathered must count that once, by its rows.

    Args:
        num_images: rows of the split's ``CaptionIndex``.
        batch_size: images per batch.
    """

    def __init__(self, num_images: int, batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        _check_layout(batch_size, rank, world_size)
        starts = range(0, num_images, batch_size)
        share = -(-len(starts) // world_size)
        self._batches = [
            range(starts[number], min(starts[number] + batch_size, num_images))
            for number in (min(n, len(starts) - 1) for n in range(rank * share, (rank + 1) * share))
        ]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield lists of image rows."""
        for batch in self._batches:
            yield list(batch)


def _check_layout(batch_size: int, rank: int, world_size: int) -> None:
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}")
    if not 0 <= rank < world_size:
        raise InputError(f"rank must be in 0 .. {world_size - 1}, got {rank}")
