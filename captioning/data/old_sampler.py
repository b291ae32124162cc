"""The order in which captions are trained on and images are evaluated, and which process gets which.

Both samplers yield whole batches as lists of numbers: ``DataLoader(sampler=..., batch_size=None)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.utils.data import Sampler

from captioning.data.sampler import Numbers
from captioning.errors import InputError, check_range


def is_position(state: Any) -> bool:
    """Return whether plain data are a position in the training captions, as ``CaptionBatchSampler`` saves it."""
    counts = ("epoch", "batches_done", "captions", "batch_size", "world_size", "seed")
    return (
        isinstance(state, dict)
        and all(type(state.get(name)) is int and 0 <= state[name] < 2**53 for name in counts)
        and isinstance(state.get("group"), str)
    )


class CaptionBatchSampler(Sampler[list[int]]):
    """Batches of captions of similar length (Sec. 4.3, Xu et al. 2015), shuffled again in each epoch.

    An epoch is cut into **steps** of ``batch_size * world_size`` captions of one length; where a length runs out, its
    neighbours fill the step. A step is dealt out to the ranks caption by caption, so that all ranks work on similar
    lengths at the same time and none waits for another. Then the steps are shuffled. Every caption appears exactly once
    in an epoch, counted over all ranks, unless ``captions_per_image`` is set. One step of the epoch, at a random
    length, is short, and is dealt out in the same way, so every rank has the same number of batches. If the short step
    has fewer captions than there are ranks, some are repeated: at most ``world_size - 1`` captions (or images with
    theirs) per epoch.

    Differs from the paper: it draws a random length for each update; walking through all batches in random order
    draws lengths in proportion to their captions, without repeating or missing any.

    Args:
        lengths: (M,) words per caption, ``CaptionIndex.caption_lengths``.
        caption_image: (M,) image row of each caption, ``CaptionIndex.caption_image``.
        batch_size: Captions per batch on each rank. With ``group="image"`` this is an average.
        seed: The order is a function of ``seed``, the epoch and ``batch_size * world_size`` alone: a step has the same
            captions whatever the number of ranks.
        rank: This process, 0 .. world_size - 1.
        group: ``"length"`` as above. ``"image"`` keeps all captions of an image in one batch, so that an encoder that
            is being trained runs once per image and epoch instead of five times. Images are drawn regardless of
            caption length: batches sorted by length would hold similar pictures, from which the encoder learns badly.
        captions_per_image: How many captions of each image an epoch takes; every epoch continues where the last one
            stopped. None for all. Needs ``group="image"``.

    Raises:
        InputError: An option is out of its range, or there is no caption.
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
        captions_per_image: int | None = None,
    ) -> None:
        _check_layout(batch_size, rank, world_size)
        if group not in ("length", "image"):
            raise InputError(f"group must be length or image, got {group!r}")
        check_range(1, captions_per_image=captions_per_image)
        if captions_per_image is not None and group != "image":
            raise InputError(f"captions_per_image: needs group image, got {group}")
        self._lengths = np.asarray(lengths, dtype=np.int32)
        images = np.asarray(caption_image)
        if self._lengths.ndim != 1 or self._lengths.shape != images.shape:
            raise ValueError(f"lengths and caption_image must both be (M,), got {self._lengths.shape}, {images.shape}")
        if not len(images):
            raise InputError("there is no caption to sample")
        self.batch_size, self.seed, self.rank, self.world_size, self.group = batch_size, seed, rank, world_size, group
        self.captions_per_image = captions_per_image
        # The units that are shuffled: captions, or images.
        self._units = len(images)
        if group == "image":
            self._by_image = np.argsort(images, kind="stable")  # captions, image by image
            ordered = images[self._by_image]
            self._unit_start = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
            self._unit_size = np.diff(np.r_[self._unit_start, len(images)])
            self._taken = np.minimum(self._unit_size, captions_per_image or len(images))  # of each in an epoch
            self._units = len(self._unit_size)
        self._per_step = self._units_per_step(batch_size, world_size)
        self._steps = -(-self._units // self._per_step)
        self._next = (0, 0)  # epoch and batch that the next pass begins with
        self.epoch = 0
        self.batches_done = 0

    def _units_per_step(self, batch_size: int, world_size: int) -> int:
        """Return the units of every step but the short one."""
        captions = batch_size * world_size
        if self.group == "length":
            return captions
        return max(world_size, round(captions * self._units / int(self._taken.sum())))

    def __len__(self) -> int:
        """Return the batches of a whole epoch on each rank, also when the next pass resumes in its middle."""
        return self._steps

    def __iter__(self) -> Iterator[Numbers]:  # type: ignore[override]
        """Yield lists of caption numbers. Every pass is an epoch; the first one starts at the restored position.

        There is no ``set_epoch``: a trainer that counts epochs differently (Lightning does after a stop in the middle
        of one) must not move a restored position.
        """
        # A generator, because DataLoader calls iter() twice and uses one: only the first next() may move the position.
        epoch, self.batches_done = self._next
        self.epoch, self._next = epoch, (epoch + 1, 0)
        units, starts, stops = self._plan(epoch)
        for step in range(self.batches_done, len(starts)):
            self.batches_done = step + 1
            yield Numbers(self._captions(units[starts[step] : stops[step]]), place=(self.epoch, step))

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the epoch's units in order of length, and where in them each step begins and ends."""
        random = np.random.default_rng((self.seed, epoch))
        units = random.permutation(self._units).astype(np.int32)
        if self.group == "length":
            units = units[np.argsort(self._lengths[units], kind="stable")]
        sizes = np.full(len(self), self._per_step)
        sizes[random.integers(len(self))] -= sizes.sum() - len(units)
        stops = np.cumsum(sizes)
        order = random.permutation(len(self))
        return units, (stops - sizes)[order], stops[order]

    def _captions(self, step: np.ndarray) -> list[int]:
        """Return this rank's captions of a step's units."""
        if len(step) < self.world_size:
            step = np.resize(step, self.world_size)
        mine = step[self.rank :: self.world_size]
        if self.group == "length":
            return mine.tolist()
        columns = (self._unit_start, self._unit_size, self._taken)
        images = zip(*(column[mine].tolist() for column in columns), strict=True)
        chosen = [a + (self.epoch * k + i) % n for a, n, k in images for i in range(k)]
        return self._by_image[chosen].tolist()

    @property
    def resumes_at(self) -> int:
        """Batches of its epoch that the next pass leaves out; 0 unless a position was restored."""
        return self._next[1]

    def state_dict(self, batches_done: int | None = None) -> dict[str, Any]:
        """Return the position as plain data.

        Args:
            batches_done: Batches of the current epoch that have been **trained on**. A data loader with workers is
                ahead of training, so an exact resume needs this count; by default the batches yielded so far.
        """
        done = self.batches_done if batches_done is None else batches_done
        epoch, done = (self.epoch + 1, 0) if done >= len(self) else (self.epoch, done)
        return {"epoch": epoch, "batches_done": done, **self._layout()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass continue where ``state_dict`` was taken.

        The number of ranks may differ if ``batch_size * world_size`` is the same.

        Raises:
            InputError: The position is in the middle of an epoch whose steps were cut differently.
        """
        epoch, done, layout = state["epoch"], state["batches_done"], self._layout()
        differing = [name for name, value in layout.items() if state.get(name) != value]
        if self._units_per_step(state["batch_size"], state["world_size"]) == self._per_step:
            differing = [name for name in differing if name not in ("batch_size", "world_size")]
        if done and differing:
            changes = ", ".join(f"{name} {state.get(name)} -> {layout[name]}" for name in differing)
            batch_size, rest = divmod(state["batch_size"] * state["world_size"], self.world_size)
            remedy = "use the old values"
            if differing == ["world_size"] and not rest:
                remedy = f"with {self.world_size} processes, batch_size {batch_size} goes on at the same place"
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
            "captions_per_image": self.captions_per_image,
        }


class ImageBatchSampler(Sampler[list[int]]):
    """Evaluation order: the batches of one process, dealt out whole, so that every number is that of one process.

    A rank gets neighbouring batches, which a feature cache reads in file order. Ranks wait for each other, so every
    rank has the same number of batches: when they run out, a rank repeats the last batch of all. Whoever gathers the
    results counts each image once, by its row.

    Args:
        num_images: Rows of the split's ``CaptionIndex``.
        batch_size: Images per batch.
    """

    def __init__(self, num_images: int, batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        _check_layout(batch_size, rank, world_size)
        starts = range(0, num_images, batch_size)
        per_rank = -(-len(starts) // world_size)
        self._batches = [
            range(starts[number], min(starts[number] + batch_size, num_images))
            for number in (min(n, len(starts) - 1) for n in range(rank * per_rank, (rank + 1) * per_rank))
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
