"""A frozen encoder's annotations of whole splits, written as the features that training reads."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from captioning.data.features import features_key, read_features_json
from captioning.data.loading import CaptionDataset, batch_loader
from captioning.data.records import CaptionIndex
from captioning.data.transforms import Augmentation
from captioning.errors import InputError
from captioning.files import write_json
from captioning.progress import Progress
from captioning.vocabulary import Vocabulary

if TYPE_CHECKING:
    from captioning.encoders import Encoder

_BATCHES_BETWEEN_SAVES = 32


def extract_features(
    encoder: Encoder,
    index_by_split: Mapping[str, CaptionIndex],
    output: Path,
    *,
    device: torch.device,
    batch_size: int,
    num_workers: int,
    mirrored: bool = False,
) -> None:
    """Write the features of every image, from where an earlier call stopped, and print the progress.

    The encoder is frozen, in evaluation mode and on the device. With ``mirrored``, the training images are also written
    as mirror images. Raises InputError if an image cannot be read, the disk is too small, a value does not fit into
    fp16, or the folder holds other features.
    """
    for split, is_mirrored in [*((split, False) for split in index_by_split), *([("train", True)] if mirrored else [])]:
        index = index_by_split[split]
        name, identity = features_key(split, encoder.frozen_identity(), mirrored=is_mirrored)
        json_path, features, content = _open_or_create(encoder, index, output / name, identity)
        count, done = len(features), content["done"]
        print(f"{name}: {count:,} images, {features.nbytes / 1e9:.2f} GB; {done:,} images done already", flush=True)
        needed, free = features.nbytes * (count - done) / count, shutil.disk_usage(output).free
        if needed > free:  # a memory map on a full disk would end the process by SIGBUS
            raise InputError(f"--output {output}: needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free")
        batches = [list(range(first, min(first + batch_size, count))) for first in range(done, count, batch_size)]
        augmentation = Augmentation(flip=float(is_mirrored))
        dataset = CaptionDataset(index, Vocabulary([]), encoder.preprocessing, augmentation=augmentation, by_image=True)
        with Progress(name, count, done) as progress, torch.inference_mode():
            try:
                for number, batch in enumerate(batch_loader(dataset, batches, num_workers=num_workers), 1):
                    annotations = encoder(batch.images.to(device)).half().cpu()
                    if not annotations.isfinite().all():
                        where = f"in images {done} to {done + len(annotations) - 1} of {name}"
                        raise InputError(f"values beyond fp16's 65504 {where}; train from the images instead")
                    features[done : done + len(annotations)] = annotations.numpy()
                    done += len(annotations)
                    progress.update(len(annotations))
                    if number % _BATCHES_BETWEEN_SAVES == 0:
                        write_json(json_path, content | {"done": done}, indent=None)
            finally:
                features.flush()
                write_json(json_path, content | {"done": done}, indent=None)


def _open_or_create(
    encoder: Encoder, index: CaptionIndex, path: Path, identity: dict[str, Any]
) -> tuple[Path, np.memmap[Any, Any], dict[str, Any]]:
    """Open or create a split's two files. Return the JSON's path, the features (N, L, D), and the JSON's content."""
    json_path, file = path.with_name(f"{path.name}.json"), path.with_name(f"{path.name}.npy")
    if json_path.exists() and file.exists():
        content = read_features_json(json_path, identity)
        if content["paths"] != index.paths:
            raise InputError(f"{json_path}: made from other images; give another --output or delete the folder")
        return json_path, np.lib.format.open_memmap(file, "r+"), content
    content = {"fingerprint": identity, "done": 0, "paths": index.paths}
    write_json(json_path, content, indent=None)
    shape = len(index), encoder.grid_size[0] * encoder.grid_size[1], encoder.annotation_dim
    return json_path, np.lib.format.open_memmap(file, "w+", np.dtype(np.float16), shape), content
