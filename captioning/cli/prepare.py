"""The command ``prepare``: data sets and an encoder's weights."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from captioning.errors import InputError

if TYPE_CHECKING:
    from captioning.data import CaptionSource

COCO_HOST = "http://images.cocodataset.org"  # no https, because its certificate has another name; the MD5 is checked
KARPATHY_URL = "https://cs.stanford.edu/people/karpathy/deepimagesent/caption_datasets.zip"
WEIGHTS_FILE = "tf_efficientnet_lite2_features.safetensors"
WEIGHTS_URL = "https://huggingface.co/timm/tf_efficientnet_lite2.in1k/resolve/main/model.safetensors"


class Archive(NamedTuple):
    """A published zip file: its address, bytes (0 if unpublished), MD5, and the number of image files in it."""

    url: str
    size: int = 0
    md5: str | None = None
    image_count: int = 0


_ANNOTATIONS, _ZIPS = f"{COCO_HOST}/annotations/annotations_trainval", f"{COCO_HOST}/zips"
COCO = {
    (2014, "annotations"): Archive(f"{_ANNOTATIONS}2014.zip", 252872794, "0a379cfc70b0e71301e0f377548639bd"),
    (2014, "train"): Archive(f"{_ZIPS}/train2014.zip", 13510573713, "0da8c0bd3d6becc4dcb32757491aca88", 82783),
    (2014, "val"): Archive(f"{_ZIPS}/val2014.zip", 6645013297, "a3d79f5ed8d289b7a7554ce06a5782b3", 40504),
    (2017, "annotations"): Archive(f"{_ANNOTATIONS}2017.zip", 252907541, "f4bbac642086de4f52a3fdda2de5fa2c"),
    (2017, "train"): Archive(f"{_ZIPS}/train2017.zip", 19336861798, "cced6f7f71b7629ddf16f17bbcfab6b2", 118287),
    (2017, "val"): Archive(f"{_ZIPS}/val2017.zip", 815585330, "442b8da7639aecaf257c1dceb8ba8c80", 5000),
}
"""Archives of COCO by year and content."""

_COCO_FILES = r"\.jpg$|^annotations/(captions|instances)_"  # names of the files to unpack
_FLICKR_FILES = r"(?i)(^|/)[^./][^/]*\.jpg$"  # without the hidden files that macOS adds


def coco(*, root: Path = Path("data/coco"), year: Literal[2014, 2017] | None = None, karpathy: bool = False) -> None:
    """Download, unpack and check COCO 2017 or 2014 (20 GB).

    Files that exist are not downloaded again. To resume an interrupted download, run the same command
    again. COCO's archives are checked against the published checksums.

    Args:
        root: Folder of the files.
        year: Year of the images, 2017 by default.
        karpathy: Get Karpathy's split of the 2014 images, as in most papers.

    Examples:
        captioning prepare coco --karpathy
    """
    from captioning.data.coco import CocoSource
    from captioning.data.karpathy import KarpathySource

    if karpathy and year == 2017:
        raise InputError("--year 2017: Karpathy's split is of the 2014 images; leave out --year or --karpathy")
    image_year = 2014 if karpathy else year or 2017
    names = [f"{kind}_{split}{image_year}.json" for kind in ("captions", "instances") for split in ("train", "val")]
    has_annotations = all((root / "annotations" / name).is_file() for name in names)
    archives = [] if has_annotations else [COCO[image_year, "annotations"]]
    counts = {split: len([*(root / f"{split}{image_year}").glob("*.jpg")]) for split in ("train", "val")}
    archives += [COCO[image_year, split] for split in counts if counts[split] < COCO[image_year, split].image_count]
    _download_and_unpack(archives, _COCO_FILES, root)
    if karpathy:
        _download_split_file("coco", root)
        _check_images(KarpathySource(str(root / "dataset_coco.json"), str(root)), "train", "val", "test")
    else:
        _check_images(CocoSource(str(root), year=image_year), "train", "val")


def flickr8k(*, root: Path = Path("data/flickr8k")) -> None:
    """Get Flickr8k: download its captions, and unpack its images, which you request by a form.

    Args:
        root: Folder of the files.
    """
    _prepare_flickr("flickr8k", root, "https://forms.illinois.edu/sec/1713398", "Flickr8k_Dataset.zip")


def flickr30k(*, root: Path = Path("data/flickr30k")) -> None:
    """Get Flickr30k: download its captions, and unpack its images, which you request by a form.

    Args:
        root: Folder of the files.
    """
    _prepare_flickr("flickr30k", root, "https://forms.illinois.edu/sec/229675", "flickr30k-images.tar.gz")


def _prepare_flickr(name: str, root: Path, form: str, archive: str) -> None:
    """Get Karpathy's captions and unpack the folder's archives. The InputError for missing images names the form."""
    from captioning.data.download import unpack
    from captioning.data.karpathy import KarpathySource
    from captioning.data.records import SPLITS

    images = root / "images"
    _download_split_file(name, root)
    source = KarpathySource(str(root / f"dataset_{name}.json"), str(images))
    for file in sorted(root.iterdir()):
        if re.search(r"(?i)\.(zip|tar|tgz|tar\.\w+)$", file.name):
            unpack(file, images, _FLICKR_FILES, flat=True)
    if not images.exists() and (image := next(root.rglob(source.index("test").paths[0]), None)):  # unpacked by hand
        images.symlink_to(os.path.relpath(image.parent, root))
    try:
        _check_images(source, *SPLITS)
    except InputError as error:
        raise InputError(f"{error}. Fill in {form}, put {archive} into {root}, and run this again") from error


def shapes(
    *, root: Path = Path("data/shapes"), seed: int = 0, train: int = 6000, val: int = 500, test: int = 500
) -> None:
    """Generate images of shapes with captions, in a minute.

    Args:
        root: Folder of the files.
        seed: Seed of the generator.
        train: Number of training images.
        val: Number of validation images.
        test: Number of test images.
    """
    from captioning.data.shapes import ShapesSource

    source = ShapesSource(str(root), train=train, val=val, test=test, seed=seed)
    source.prepare()
    _check_images(source, "train", "val", "test")


def weights(*, root: Path = Path("data/weights")) -> None:
    """Download timm's weights of EfficientNet-Lite2, the encoder of the Lite2 configurations.

    Args:
        root: Folder of the file.
    """
    from captioning.data.download import fetch
    from captioning.encoders import EfficientNetLite2

    path = root / WEIGHTS_FILE
    fetch(WEIGHTS_URL, path)
    EfficientNetLite2(weights=str(path)).load_published_weights()
    print(f"{path}: fits EfficientNetLite2")


prepare = {"coco": coco, "flickr8k": flickr8k, "flickr30k": flickr30k, "shapes": shapes, "weights": weights}


def _download_split_file(name: str, root: Path) -> None:
    file = f"dataset_{name}.json"
    if not (root / file).is_file():
        _download_and_unpack([Archive(KARPATHY_URL)], f"^{file}$", root)


def _download_and_unpack(archives: Sequence[Archive], pattern: str, root: Path) -> None:
    """Download, verify, unpack and delete one archive after another, so that the disk never has two."""
    from captioning.data.download import fetch, unpack

    root.mkdir(parents=True, exist_ok=True)
    sizes = [archive.size for archive in archives]
    needed, free = (sum(sizes) + max(sizes, default=0)) / 1e9, shutil.disk_usage(root).free / 1e9  # one archive stays
    if needed > free:
        raise InputError(f"{root}: needs {needed:.1f} GB, the disk has {free:.1f} GB free; give --root on another disk")
    for archive in archives:
        path = root / archive.url.rpartition("/")[2]
        fetch(archive.url, path, md5=archive.md5)
        unpack(path, root, pattern)
        path.unlink()


def _check_images(source: CaptionSource, *splits: str) -> None:
    """Check the image files of the splits and print a line per split."""
    for split in splits:
        index = source.index(split)
        index.check_images()
        print(f"{split:<5} {len(index):>8,} images {len(index.captions):>9,} captions  all files there")
