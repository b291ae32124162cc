"""A frozen encoder's annotations of whole splits, written as the features that training reads."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from captioning.data.features import FeatureWriter, features_size, flipped_split, view_fingerprint
from captioning.data.loading import obey_the_main_process
from captioning.data.records import CaptionIndex
from captioning.data.transforms import Preprocessing
from captioning.errors import InputError
from captioning.progress import Progress


class ImageEncoder(Protocol):
    """What extraction needs of an encoder; see ``captioning.encoders.Encoder``."""

    @property
    def preprocessing(self) -> Preprocessing: ...

    @property
    def grid_size(self) -> tuple[int, int]: ...

    @property
    def annotation_dim(self) -> int: ...

    def fingerprint(self) -> dict[str, Any]: ...

    def __call__(self, images: Tensor) -> Tensor: ...


def extract_features(
    encoder: ImageEncoder,
    indices: Mapping[str, CaptionIndex],
    output: Path,
    *,
    device: torch.device,
    batch_size: int,
    num_workers: int,
    flipped: Collection[str] = (),
    dtype: str = "float16",
    share: tuple[int, int] = (0, 1),
) -> None:
    """Write the features of every image; resumes where an earlier call stopped, and prints its progress.

    Args:
        encoder: frozen, in evaluation mode and on the device.
        indices: of the splits, by name.
        output: folder of the feature cache.
        device: of the encoder.
        batch_size: images.
        num_workers: processes that decode images; 0 decodes them here.
        flipped: splits whose mirrored images are written, too.
        dtype: how numbers are kept, ``float16`` or ``uint8``.
        share: (i, n): write the i-th of n shares of the shards; other processes write the others.

    Raises:
        InputError: the disk is too small, an image cannot be read, or the folder holds other features.
    """
    rows, cols = encoder.grid_size
    shape = (rows * cols, encoder.annotation_dim)
    fingerprint = encoder.fingerprint()
    sides = {split: (split, False) for split in indices}
    sides |= {flipped_split(split): (split, True) for split in flipped}
    writers = {
        name: FeatureWriter(
            output,
            name,
            paths=list(indices[split].paths),
            fingerprint=view_fingerprint(fingerprint, upright=indices[split].upright, flipped=mirrored),
            shape=shape,
            dtype=dtype,
            share=share,
        )
        for name, (split, mirrored) in sides.items()
    }
    _announce(writers, output)
    for name, (split, mirrored) in sides.items():
        images = _Images(indices[split], encoder.preprocessing, mirrored)
        _extract(writers[name], images, encoder, device, batch_size, num_workers)


def _announce(writers: Mapping[str, FeatureWriter], output: Path) -> None:
    """Print each split's size and the sum, and refuse to start what the disk cannot hold."""
    missing = 0
    for split, writer in writers.items():
        n, locations, dim = writer.shape
        size = features_size(writer.shape, writer.dtype)
        number = size // max(1, n * locations * dim)
        share = f", {writer.total:,} of them here" if writer.total < n else ""
        done = f", {writer.done:,} done already" if writer.done else ""
        plural = "s" if number > 1 else ""
        print(
            f"{split}: {n:,} images x {locations} locations x {dim} x {number} byte{plural} = {size / 1e9:.2f} GB"
            f"{share}{done}"
        )
        missing += features_size((len(writer.rows), locations, dim), writer.dtype)
    free = shutil.disk_usage(output).free
    print(f"{missing / 1e9:.2f} GB to write into {output}, {free / 1e9:.2f} GB free", flush=True)
    if missing > free:
        raise InputError(f"--output {output}: {missing / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free")


class _Images:
    """Images of an index in row order, ready for the encoder. A file that cannot be read is returned as its error."""

    def __init__(self, index: CaptionIndex, preprocessing: Preprocessing, mirrored: bool) -> None:
        self.index = index
        self.preprocessing = preprocessing
        self.transform = preprocessing.training(random_crop=False, flip=1.0) if mirrored else preprocessing

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, row: int) -> Tensor | InputError:
        try:
            return self.transform(self.index.image(row, self.preprocessing))
        except InputError as error:
            return error  # raised in the main process: through a worker it would arrive with a traceback


def _stack(items: list[Tensor | InputError]) -> Tensor | InputError:
    errors = [item for item in items if isinstance(item, InputError)]
    return errors[0] if errors else torch.stack([item for item in items if isinstance(item, Tensor)])


def _extract(
    writer: FeatureWriter,
    images: Any,
    encoder: ImageEncoder,
    device: torch.device,
    batch_size: int,
    num_workers: int,
) -> None:
    loader: DataLoader[Any] = DataLoader(
        images,
        batch_size=batch_size,
        sampler=writer.rows.tolist(),
        num_workers=num_workers,
        collate_fn=_stack,
        pin_memory=device.type == "cuda",
        worker_init_fn=obey_the_main_process,
    )
    split, total = writer.split, writer.total
    progress = Progress(split, total, writer.done)
    try:
        with progress, torch.inference_mode():
            for batch in loader:
                if isinstance(batch, InputError):
                    raise batch
                writer.write(encoder(batch.to(device, non_blocking=True)))
                progress.update(writer.collected)
    finally:
        if writer.done < total:
            print(f"{split}: stopped at {writer.done:,} of {total:,}; the same command resumes here", flush=True)
        elif progress.done > progress.first:
            print(f"{split}: complete, {progress.rate()}", flush=True)
