"""Get a data set or an encoder's weights, or count n-grams.

The command names the files that are missing, and says where to get those that it cannot download.
Files that exist are not downloaded again. To resume an interrupted download, run the same command
again. Downloads are checked against the published checksums. data/README.md says where every file
belongs.

examples:
  captioning prepare coco --karpathy        Karpathy's split of the 2014 images, as in most papers
  captioning prepare coco --check           only check that all files are there
  captioning prepare flickr8k
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import shutil
import sys
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from captioning.cli import frequencies
from captioning.cli.arguments import script_parser, whole_number
from captioning.errors import InputError, exits_on_input_error, printable
from captioning.files import replacing
from captioning.progress import size_text

if TYPE_CHECKING:
    from captioning.data.karpathy import KarpathySource
    from captioning.data.records import CaptionIndex

COCO_HOST = "http://images.cocodataset.org"  # its https certificate is of another name; the MD5 guards the content
KARPATHY_URL = "https://cs.stanford.edu/people/karpathy/deepimagesent/caption_datasets.zip"
MOBILENET, MOBILENET_FILE = "mobilenetv1_100", "mobilenetv1_100_trunk.safetensors"
SHOWN = 5  # missing files that are named


@dataclass(frozen=True)
class Archive:
    """A published zip file.

    Attributes:
        url: Its published address.
        unpacks: Whether a file, by its name in the archive, is wanted. It keeps that name below the root.
        size: Published bytes; None if unpublished.
        md5: Published checksum; None if unpublished.
        images: Number of image files in it.
    """

    url: str
    unpacks: Callable[[str], bool]
    size: int | None = None
    md5: str | None = None
    images: int = 0

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]

    def at(self, mirror: str | None) -> str:
        """Return its address on a mirror: the path of its URL there."""
        return self.url if mirror is None else mirror.rstrip("/") + urllib.parse.urlsplit(self.url).path


def _captions_or_instances(name: str) -> bool:
    return name.startswith(("annotations/captions_", "annotations/instances_"))


def _jpeg(name: str) -> bool:
    return name.endswith(".jpg")


COCO = {
    (2014, "annotations"): Archive(
        f"{COCO_HOST}/annotations/annotations_trainval2014.zip",
        _captions_or_instances,
        size=252872794,
        md5="0a379cfc70b0e71301e0f377548639bd",
    ),
    (2014, "train"): Archive(
        f"{COCO_HOST}/zips/train2014.zip",
        _jpeg,
        size=13510573713,
        md5="0da8c0bd3d6becc4dcb32757491aca88",
        images=82783,
    ),
    (2014, "val"): Archive(
        f"{COCO_HOST}/zips/val2014.zip",
        _jpeg,
        size=6645013297,
        md5="a3d79f5ed8d289b7a7554ce06a5782b3",
        images=40504,
    ),
    (2017, "annotations"): Archive(
        f"{COCO_HOST}/annotations/annotations_trainval2017.zip",
        _captions_or_instances,
        size=252907541,
        md5="f4bbac642086de4f52a3fdda2de5fa2c",
    ),
    (2017, "train"): Archive(
        f"{COCO_HOST}/zips/train2017.zip",
        _jpeg,
        size=19336861798,
        md5="cced6f7f71b7629ddf16f17bbcfab6b2",
        images=118287,
    ),
    (2017, "val"): Archive(
        f"{COCO_HOST}/zips/val2017.zip",
        _jpeg,
        size=815585330,
        md5="442b8da7639aecaf257c1dceb8ba8c80",
        images=5000,
    ),
}

BY_HAND = """\
The images of {name} may not be passed on, so this script cannot download them:
  1. Fill in the form at {form} (University of Illinois; research and education only).
     A link comes by mail. About the data set: {about}.
  2. Put {archive} into {root}, or its jpg files into {images}.
  3. Run this command again: it unpacks and checks them."""
FLICKR = {
    "flickr8k": {
        "name": "Flickr8k",
        "form": "https://forms.illinois.edu/sec/1713398",
        "about": "Hodosh, Young & Hockenmaier, JAIR 47, 2013",
        "archive": "Flickr8k_Dataset.zip (about 1 GB)",
    },
    "flickr30k": {
        "name": "Flickr30k",
        "form": "https://forms.illinois.edu/sec/229675",
        "about": "https://shannon.cs.illinois.edu/DenotationGraph/, Young et al. 2014",
        "archive": "flickr30k-images.tar.gz (about 4.4 GB)",
    },
}


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["frequencies"]:
        inspect.unwrap(frequencies.main)(argv[1:])
        return
    options = _parse(argv)
    options.run(options)


def parser() -> argparse.ArgumentParser:
    parser = script_parser(__doc__, "prepare")
    commands = parser.add_subparsers(
        prog="captioning prepare", required=True, metavar="coco|flickr8k|flickr30k|shapes|weights|frequencies"
    )

    def command(name: str, run: Callable[[argparse.Namespace], None], what: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            allow_abbrev=False,
            formatter_class=parser.formatter_class,
        )
        sub.set_defaults(run=run, dataset=name)
        sub.add_argument(
            "--root",
            type=Path,
            default=Path("data") / name,
            metavar="DIR",
            help="folder of the files (default: %(default)s)",
        )
        sub.add_argument("--check", action="store_true", help="only check that all files are there")
        return sub

    coco = command("coco", _coco, "download, unpack and check COCO 2017 or 2014 (20 GB)")
    coco.add_argument("--year", type=int, choices=(2014, 2017), help="year of the images (default: 2017)")
    coco.add_argument("--karpathy", action="store_true", help="Karpathy's split of the 2014 images")
    flickr = "download the captions; the images must be requested"
    for sub in (coco, command("flickr8k", _flickr, flickr), command("flickr30k", _flickr, flickr)):
        sub.add_argument("--mirror", metavar="URL", help="download from this server, which has the original paths")
    command("weights", _weights, "download the encoder of the MobileNet configurations")
    shapes = command("shapes", _shapes, "generate images of shapes with captions, in a minute")
    shapes.add_argument(
        "--seed", type=whole_number(0), default=0, metavar="N", help="seed of the generator (default: %(default)s)"
    )
    for split, name, count in (("train", "training", 6000), ("val", "validation", 500), ("test", "test", 500)):
        shapes.add_argument(
            f"--{split}",
            type=whole_number(1),
            default=count,
            metavar="N",
            help=f"{name} images (default: %(default)s)",
        )
    counting = frequencies.parser()
    commands.add_parser(
        "frequencies",
        help="count n-grams for a CIDEr-D reward",
        parents=[counting],
        add_help=False,
        description=counting.description,
        epilog=counting.epilog,
        formatter_class=parser.formatter_class,
    )
    return parser


def _parse(argv: list[str]) -> argparse.Namespace:
    options = parser().parse_args(argv)
    if options.dataset == "coco" and options.karpathy and options.year == 2017:
        raise InputError("--karpathy is a split of the 2014 images; leave --year 2017 out")
    if (mirror := getattr(options, "mirror", None)) is not None:
        _check_mirror(mirror)
    return options


def _check_mirror(mirror: str) -> None:
    if not re.match(r"(https?|file)://", mirror):
        raise InputError(f"--mirror {mirror}: must begin with https:// or http://")
    try:
        address = urllib.parse.urlsplit(mirror)
        named = address.scheme == "file" or address.hostname
        valid = named and address.port != 0 and re.fullmatch("[!-~]+", mirror)
    except ValueError:  # a port beyond 65535, or half a pair of brackets
        valid = False
    if not valid:
        raise InputError(f"--mirror {mirror}: is not an address; give one like https://example.org:8080/coco")


# --- the data sets -----------------------------------------------------------------------------------------------


def _coco(options: argparse.Namespace) -> None:
    from captioning.data.coco import CocoSource
    from captioning.data.karpathy import KarpathySource

    root: Path = options.root
    year: int = 2014 if options.karpathy else options.year or 2017
    if not options.check:
        kinds = [f"{kind}_{split}{year}.json" for kind in ("captions", "instances") for split in ("train", "val")]
        wanted = [] if _listing(root / "annotations").keys() >= set(kinds) else [COCO[year, "annotations"]]
        for split in ("train", "val"):
            archive = COCO[year, split]
            if sum(name.endswith(".jpg") for name in _listing(root / f"{split}{year}")) < archive.images:
                wanted.append(archive)
        _get(wanted, root, options)
        if options.karpathy:
            _get_split_file(root, options)
    if options.karpathy:
        _finish(_read(KarpathySource(str(root / "dataset_coco.json"), str(root))))
    else:
        source = CocoSource(str(root), year=year)
        _finish({split: source.index(split) for split in ("train", "val")})


def _flickr(options: argparse.Namespace) -> None:
    from captioning.data.download import unpack
    from captioning.data.karpathy import KarpathySource

    root, images = options.root, options.root / "images"
    if not options.check:
        _get_split_file(root, options)
    indices = _read(KarpathySource(str(root / f"dataset_{options.dataset}.json"), str(images)))
    missing = {path for index in indices.values() for path in _missing(index)}
    if missing and not options.check:
        for archive in sorted(path for kind in ("*.zip", "*.tar", "*.tar.gz", "*.tgz") for path in root.glob(kind)):
            unpack(archive, images, lambda name: PurePosixPath(name).name in missing, flat=True)
    if not missing <= _listing(images).keys():
        print(BY_HAND.format(root=root, images=images, **FLICKR[options.dataset]), flush=True)
    _finish(indices)


def _shapes(options: argparse.Namespace) -> None:
    from captioning.data.shapes import ShapesSource

    source = ShapesSource(str(options.root), train=options.train, val=options.val, test=options.test, seed=options.seed)
    if options.check:
        source.is_complete()  # refuses shapes made with other options
    else:
        source.prepare()
    _finish({split: source.index(split) for split in ("train", "val", "test")})


def _weights(options: argparse.Namespace) -> None:
    """Write timm's published weights to where the MobileNet configurations read them, or check the file there."""
    from captioning.encoders import TimmEncoder

    path = options.root / MOBILENET_FILE
    arguments: dict[str, Any] = {"image_size": 224, "crop": False, "mean": (0.5,) * 3, "std": (0.5,) * 3}
    if path.is_file():
        TimmEncoder(MOBILENET, "blocks.4.0", weights=str(path), model_args={"pad_type": "same"}, **arguments)
        print(f"{path}: fits {MOBILENET} of timm", flush=True)
        return
    if options.check:
        raise InputError(f"{path}: missing; run the same command without --check")
    try:
        encoder = TimmEncoder(MOBILENET, 4, **arguments)  # the whole network, for every configuration
    except InputError as error:
        raise InputError(
            f"{error}. By hand: get model.safetensors of {MOBILENET} from timm's collection on a model hub, and put it "
            f"at {path}; the whole network's file does, too"
        ) from error
    from safetensors.torch import save_file

    with replacing(path) as part:
        tensors = {name: tensor.contiguous() for name, tensor in encoder.network.state_dict().items()}
        save_file(tensors, part, metadata={"network": f"timm {MOBILENET}"})
    print(
        f"{path}: the published weights of {MOBILENET}. They expect padding on all sides. Give captioning extract "
        "and captioning fit one of these options: --model.encoder.model_args '{output_stride: 16}' if the config sets "
        "output_stride; --model.encoder.same_padding false if its encoder is MobileNetV1; otherwise "
        "--model.encoder.model_args '{}'.\n"
        "docs/results.md was measured with other weights, trained with TensorFlow's "
        "padding (pad_type: same), which are not published as a file for timm.",
        flush=True,
    )


def _read(source: KarpathySource) -> dict[str, CaptionIndex]:
    """Return the splits of a split file, which may lack a test split."""
    indices = {split: source.index(split) for split in ("train", "val")}
    try:
        indices["test"] = source.index("test")
    except InputError as error:
        if "no test split" not in str(error):
            raise
        print(printable(error), flush=True)
    return indices


def _get_split_file(root: Path, options: argparse.Namespace) -> None:
    name = f"dataset_{options.dataset}.json"
    if not (root / name).is_file():
        _get([Archive(KARPATHY_URL, lambda member: member == name)], root, options)


# --- checking ----------------------------------------------------------------------------------------------------


def _finish(indices: dict[str, CaptionIndex]) -> None:
    """Check the image files of the splits and print a line per split.

    Raises:
        InputError: Files are missing or empty; names the first few.
    """
    missing: list[Path] = []
    for split, index in indices.items():
        gone = _missing(index)
        state = f"{len(gone):,} image files missing" if gone else "all files there"
        print(f"{split:<5} {len(index):>8,} images {len(index.captions):>9,} captions  {state}", flush=True)
        missing += [index.root / path for path in gone]
    if missing:
        names = ", ".join(map(str, missing[:SHOWN]))
        more = f" and {len(missing) - SHOWN:,} more" if len(missing) > SHOWN else ""
        raise InputError(f"missing: {names}{more}; data/README.md says where they come from")


def _missing(index: CaptionIndex) -> list[str]:
    """Return the image files that are missing or empty, relative to the index's root; lists each folder once."""
    paths = list(index.paths)
    files = {folder: _listing(index.root / folder) for folder in {os.path.dirname(path) for path in paths}}
    return [path for path in paths if os.path.basename(path) not in files[os.path.dirname(path)]]


def _listing(folder: Path) -> dict[str, int]:
    """Return the names and sizes in bytes of a folder's files, without empty and unfinished ones."""
    if not folder.is_dir():
        return {}
    with os.scandir(folder) as entries:
        sizes = {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    return {name: size for name, size in sizes.items() if size and not name.endswith(".part")}


# --- downloading -------------------------------------------------------------------------------------------------


def _get(archives: list[Archive], root: Path, options: argparse.Namespace) -> None:
    """Download, verify, unpack and delete one archive after the other, so that the disk never holds two."""
    from captioning.data.download import fetch, unpack

    root.mkdir(parents=True, exist_ok=True)
    _need_space(archives, root)
    for archive in archives:
        path = root / archive.name
        fetch(archive.at(options.mirror), path, md5=archive.md5)
        unpack(path, root, archive.unpacks)
        path.unlink()


def _need_space(archives: list[Archive], root: Path) -> None:
    """Raise an InputError unless the disk can hold each archive together with all files unpacked so far."""
    needed = used = 0.0
    for archive in archives:
        size = archive.size or 0
        unpacked = 1.1 * size  # images are about as large inside an archive; annotations are small either way
        used -= sum(path.stat().st_size for path in root.glob(f"{archive.name}*"))
        used -= sum(_listing(root / Path(archive.name).stem).values())
        needed = max(needed, used + size + unpacked)
        used += unpacked
    free = shutil.disk_usage(root).free
    if needed > free:
        raise InputError(
            f"{root}: needs {size_text(int(needed))}, the disk has {size_text(free)} free; use --root on another disk"
        )
