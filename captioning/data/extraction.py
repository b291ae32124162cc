"""A frozen encoder's annotations of whole splits, written as the features that training reads."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from captioning.data.features import FeatureWriter, flipped_split, view_fingerprint
from captioning.data.loading import read_ahead
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
    process: tuple[int, int] = (0, 1),
) -> None:
    """Write the features of every image; resumes where an earlier call stopped, and prints its progress.

    Args:
        encoder: A frozen encoder in evaluation mode, on the device.
        indices: Records by the name of their split.
        output: Folder of the feature cache.
        device: Device of the encoder.
        batch_size: Images per batch.
        num_workers: Threads that decode images beside the network; 0 decodes them in between.
        flipped: Splits whose mirrored images are written, too.
        process: (i, n): This is process i of n that divide the shards among them.

    Raises:
        InputError: The disk is too small, an image cannot be read, or the folder holds other features.
    """
    height, width = encoder.grid_size
    fingerprint = encoder.fingerprint()
    views = {split: (split, False) for split in indices}
    views |= {flipped_split(split): (split, True) for split in flipped}
    writers = {
        name: FeatureWriter(
            output,
            name,
            paths=list(indices[split].paths),
            fingerprint=view_fingerprint(fingerprint, upright=indices[split].upright, flipped=mirrored),
            shape=(height * width, encoder.annotation_dim),
            process=process,
        )
        for name, (split, mirrored) in views.items()
    }
    _announce(list(writers.values()), output)
    for name, (split, mirrored) in views.items():
        images = _Images(indices[split], encoder.preprocessing, mirrored)
        _extract(writers[name], images, encoder, device, batch_size, num_workers)


def _announce(writers: list[FeatureWriter], output: Path) -> None:
    """Print the sizes of what is to be written.

    Raises:
        InputError: The disk is too small.
    """
    missing = 0
    for writer in writers:
        n, locations, dim = writer.shape
        here = f", {writer.total:,} of them here" if writer.total < n else ""
        done = f", {writer.done:,} done already" if writer.done else ""
        gigabytes = n * writer.manifest.image_bytes / 1e9
        print(
            f"{writer.split}: {n:,} images x {locations} locations x {dim} x 2 bytes = {gigabytes:.2f} GB{here}{done}"
        )
        missing += len(writer.rows) * writer.manifest.image_bytes
    output.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(output).free
    print(f"{missing / 1e9:.2f} GB to write into {output}, {free / 1e9:.2f} GB free", flush=True)
    if missing > free:
        raise InputError(
            f"--output {output}: {missing / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free; "
            "free some, give another folder, or choose an encoder with fewer or smaller annotations"
        )


class _Images:
    """Images of an index as the encoder sees them, before normalisation."""

    def __init__(self, index: CaptionIndex, preprocessing: Preprocessing, mirrored: bool) -> None:
        self.index = index
        self.preprocessing = preprocessing
        self.mirrored = mirrored

    def views(self, rows: list[int]) -> list[Image.Image]:
        views = [self.preprocessing.view(self.index.image(row, self.preprocessing)) for row in rows]
        return [view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for view in views] if self.mirrored else views


def _extract(
    writer: FeatureWriter,
    images: _Images,
    encoder: ImageEncoder,
    device: torch.device,
    batch_size: int,
    threads: int,
) -> None:
    rows = writer.rows.tolist()
    batches = (rows[start : start + batch_size] for start in range(0, len(rows), batch_size))
    # Pillow decodes without the GIL, so threads work beside the network; processes would have to pass pixels on.
    loader = read_ahead(images.views, batches, threads=max(1, threads), depth=threads)
    split, total = writer.split, writer.total
    progress = Progress(split, total, writer.done)
    try:
        with progress, torch.inference_mode():
            for views in loader:
                writer.write(encoder(encoder.preprocessing.normalise_all(views, device)))
                progress.update(writer.collected)
    finally:
        if writer.done < total:
            print(f"{split}: stopped at {writer.done:,} of {total:,}; the same command resumes here", flush=True)
        elif progress.done > progress.first:
            print(f"{split}: complete, {progress.rate()}", flush=True)
