"""The embedded data set: drawn and described locally from a seed, kept on disk as COCO files.

Under ``root``: ``{train,val,test}/000001.png`` and so on, ``annotations/captions_{split}.json``,
``annotations/instances_{split}.json`` and ``shapes.json`` with the parameters. Beyond what COCO has, a caption carries
``phrases`` (``start``, ``end`` exclusive and ``noun`` are word positions, ``object`` the id of the instance named) and
an instance carries ``attributes``. Instances list an image's objects from left to right; masks are run lengths of the
visible pixels.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from captioning.data.attributes import AttributeJudge, JudgedAttribute
from captioning.data.objects import GroundedObject, ObjectLookup, check_outline
from captioning.data.records import SPLITS, CaptionIndex, CaptionSource, ImageEntry, check_split, image_name
from captioning.data.shape_world.drawing import paint
from captioning.data.shape_world.grammar import STYLES, attributes, describe, names
from captioning.data.shape_world.judging import judge
from captioning.data.shape_world.scene import NOUNS, REFERENCE_SIZE, TEXTURES, Described, sample_scene
from captioning.errors import InputError, one_line
from captioning.files import read_bytes
from captioning.progress import Progress

FORMAT = 3  # changes whenever the same parameters give other files
SMALLEST_CANVAS = 48  # pixels; on smaller ones textures and small shapes cannot be told apart
_ID_STRIDE = 1_000_000  # image ids of the splits start this far apart, so that they never meet


class ShapesSource(CaptionSource):
    """Images of one to four shapes with five captions each, generated on first use.

    The same arguments give the same files, and a larger split begins with the images of a smaller one. The splits draw
    from separate random streams.

    Args:
        root: The folder of the data set.
        train, val, test: Images per split.
        seed: Seed of all randomness.
        image_size: Side of the square images in pixels.
    """

    def __init__(
        self,
        root: str = "data/shapes",
        *,
        train: int = 6000,
        val: int = 500,
        test: int = 500,
        seed: int = 0,
        image_size: int = 112,
    ) -> None:
        self.root = Path(root)
        self.images = {"train": train, "val": val, "test": test}
        for split, count in self.images.items():
            if not 1 <= count < _ID_STRIDE:
                raise InputError(f"shapes: {split} must be 1 to {_ID_STRIDE - 1} images, got {count}")
        if image_size < SMALLEST_CANVAS:
            raise InputError(f"shapes: image_size must be at least {SMALLEST_CANVAS} pixels, got {image_size}")
        if seed < 0:
            raise InputError(f"shapes: seed must not be negative, got {seed}")
        self.seed = seed
        self.image_size = image_size
        self._lookups: dict[str, _InstanceLookup] = {}

    @property
    def description(self) -> str:
        return "the generated shapes"

    def prepare(self) -> None:
        """Generate the data set unless it exists.

        It is written to a temporary folder beside ``root`` and renamed when complete, so an interrupted run leaves
        nothing half done. If two runs start together, one of them generates the data set that both use.

        Raises:
            InputError: ``root`` holds something else, or shapes made with other arguments.
        """
        if self.is_complete():
            return
        root = Path(os.path.realpath(self.root))  # it may be a link to another disk
        root.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{root.name}.", suffix=".part", dir=root.parent))
        try:
            part.chmod(0o755)  # mkdtemp keeps others out
            self._generate(part)
            _write_json(part / "shapes.json", self._header())
            with contextlib.suppress(OSError):  # a non-empty root: another run was faster, or the check below fails
                os.rename(part, root)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        if not self.is_complete():
            raise InputError(f"{self.root}: could not be put in place; delete the folder or choose another root")

    def index(self, split: str) -> CaptionIndex:
        check_split(split)
        captions, origin = self._read("captions", split), self._annotations("captions", split)
        with self._layout_errors(origin):
            by_image: dict[int, list[str]] = {image["id"]: [] for image in captions["images"]}
            for annotation in captions["annotations"]:
                by_image[annotation["image_id"]].append(annotation["caption"])
            entries = []
            for image in captions["images"]:
                name = image_name(image["file_name"], allow_outside=False, where=f"{origin}: image {image['id']}")
                entries.append(ImageEntry(image["id"], f"{split}/{name}", by_image[image["id"]]))
            return CaptionIndex.build(self.root, entries, origin=origin)

    def objects(self, split: str) -> ObjectLookup:
        return self._lookup(split)

    def attributes(self, split: str) -> AttributeJudge:
        return self._lookup(split).judge

    def _lookup(self, split: str) -> _InstanceLookup:
        check_split(split)
        if split not in self._lookups:
            instances = self._read("instances", split)
            with self._layout_errors(self._annotations("instances", split)):
                self._lookups[split] = _InstanceLookup(instances, self.image_size)
        return self._lookups[split]

    @contextlib.contextmanager
    def _layout_errors(self, path: Path) -> Iterator[None]:
        """Raise an InputError for a file that was changed after it was generated."""
        try:
            yield
        except InputError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise InputError(
                f"{path}: not as it was generated ({reason}); delete {self.root} to regenerate it"
            ) from error

    def _header(self) -> dict[str, Any]:
        return {"format": FORMAT, "seed": self.seed, "image_size": self.image_size, "images": self.images}

    def is_complete(self) -> bool:
        """Return whether ``root`` holds these shapes; raise if it holds anything else."""
        if not self.root.exists() or (self.root.is_dir() and not any(self.root.iterdir())):
            return False
        path, wanted = self.root / "shapes.json", self._header()
        try:
            header = json.loads(read_bytes(path))
            differ = [
                f"{key} {header[key]} instead of {value}" for key, value in wanted.items() if header[key] != value
            ]
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(
                f"{self.root}: exists, but without a readable shapes.json; choose another root or delete the folder"
            ) from None
        if differ:
            raise InputError(
                f"{path}: these shapes were made with {', '.join(differ)}; "
                "use those values, choose another root, or delete the folder to regenerate it"
            )
        return True

    def _annotations(self, kind: str, split: str) -> Path:
        return self.root / "annotations" / f"{kind}_{split}.json"

    def _read(self, kind: str, split: str) -> dict[str, Any]:
        path = self._annotations(kind, split)
        try:
            content: dict[str, Any] = json.loads(read_bytes(path))
        except FileNotFoundError:
            raise InputError(f"{path}: missing; run captioning prepare shapes --root {self.root}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path}: not JSON ({one_line(error)}); delete {self.root} to regenerate it") from error
        return content

    def _generate(self, folder: Path) -> None:
        (folder / "annotations").mkdir()
        # No threads: drawing holds the interpreter lock, and threads that pass it on take twice as long.
        with Progress("drawing shapes", sum(self.images.values())) as progress:
            for split, count in self.images.items():
                (folder / split).mkdir()
                records = []
                for number in range(1, count + 1):
                    records.append(self._draw(folder, split, number))
                    progress.update(progress.done + 1)
                images = [image for image, _, _ in records]
                info = {"description": f"shapes, {split}, made from seed {self.seed}"}
                categories = [{"id": i, "name": noun, "supercategory": "shape"} for i, noun in enumerate(NOUNS, 1)]
                captions = [caption for _, captions, _ in records for caption in captions]
                _write_json(
                    folder / "annotations" / f"captions_{split}.json",
                    {"info": info, "images": images, "annotations": captions},
                )
                instances = [instance for _, _, instances in records for instance in instances]
                _write_json(
                    folder / "annotations" / f"instances_{split}.json",
                    {"info": info, "images": images, "annotations": instances, "categories": categories},
                )

    def _draw(self, folder: Path, split: str, number: int) -> tuple[dict[str, Any], list[Any], list[Any]]:
        """Write image ``number`` of a split; return its COCO records (image, captions, instances)."""
        # Each image has its own random stream, so that it does not depend on the size of the split.
        key = (SPLITS.index(split), number)
        rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=key))
        painted = None
        while painted is None:
            scene = sample_scene(rng)
            painted = paint(scene, rng, self.image_size)
        image, masks = painted
        name = f"{number:06d}.png"
        image.save(folder / split / name, compress_level=0)
        image_id = SPLITS.index(split) * _ID_STRIDE + number
        instance_ids = [image_id * 10 + i for i in range(1, len(scene.shapes) + 1)]
        instances = []
        for instance_id, shape, mask in zip(instance_ids, scene.shapes, masks, strict=True):
            instances.append(
                {
                    "id": instance_id,
                    "image_id": image_id,
                    "category_id": NOUNS.index(shape.noun) + 1,
                    "attributes": [shape.size, shape.colour, *([shape.texture] if shape.texture != "plain" else [])],
                    **_mask_fields(mask),
                }
            )
        captions = []
        for i, style in enumerate(rng.permutation(STYLES).tolist(), 1):
            text = describe(scene.shapes, style)
            phrases = [
                {"start": phrase.start, "end": phrase.end, "noun": phrase.noun, "object": instance_ids[phrase.shape]}
                for phrase in text.phrases
            ]
            captions.append(
                {"id": image_id * 10 + i, "image_id": image_id, "caption": " ".join(text.words), "phrases": phrases}
            )
        size = {"height": self.image_size, "width": self.image_size}
        return {"id": image_id, "file_name": name, **size}, captions, instances


class _InstanceLookup:
    """The objects of one split, masks unpacked on demand, and the judge of its captions."""

    def __init__(self, instances: dict[str, Any], image_size: int) -> None:
        self._nouns = {category["id"]: category["name"] for category in instances["categories"]}
        self._instances: dict[int, list[dict[str, Any]]] = {}
        for instance in instances["annotations"]:
            self._instances.setdefault(instance["image_id"], []).append(instance)
        self._scenes = {
            image_id: [self._described(instance, REFERENCE_SIZE / image_size) for instance in of_image]
            for image_id, of_image in self._instances.items()
        }

    def __call__(self, image_id: int) -> list[GroundedObject]:
        objects = []
        for instance in self._instances.get(image_id, []):
            noun = self._nouns[instance["category_id"]]
            check_outline(instance["segmentation"], *instance["segmentation"]["size"])
            mask = _unpack_mask(instance["segmentation"])
            objects.append(GroundedObject(noun, names(noun) - {noun}, attributes(instance["attributes"]), mask))
        return objects

    def judge(self, image_id: int, words: Sequence[str]) -> list[JudgedAttribute]:
        scene = self._scenes.get(image_id)
        return [] if scene is None else judge(scene, words)

    def _described(self, instance: dict[str, Any], scale: float) -> Described:
        """Return an object in the words of captions; its place is the middle of what is visible of it."""
        size, colour, *texture = instance["attributes"]
        left, top, width, height = instance["bbox"]
        return Described(
            noun=self._nouns[instance["category_id"]],
            colour=colour,
            texture=texture[0] if texture else TEXTURES[0],
            size=size,
            x=(left + width / 2) * scale,
            y=(top + height / 2) * scale,
        )


def _mask_fields(mask: np.ndarray) -> dict[str, Any]:
    """Return the COCO fields for a (height, width) mask. ``counts`` are plain run lengths down the columns."""
    pixels = mask.ravel(order="F")
    changes = np.flatnonzero(np.diff(pixels, prepend=False)).tolist()  # the first run is one of unset pixels
    ys, xs = np.flatnonzero(mask.any(axis=1)).tolist(), np.flatnonzero(mask.any(axis=0)).tolist()
    return {
        "segmentation": {"size": list(mask.shape), "counts": np.diff([0, *changes, pixels.size]).tolist()},
        "area": int(mask.sum()),
        "bbox": [xs[0], ys[0], xs[-1] - xs[0] + 1, ys[-1] - ys[0] + 1],
        "iscrowd": 0,
    }


def _unpack_mask(segmentation: dict[str, Any]) -> np.ndarray:
    """Return the (height, width) bool mask of plain run lengths."""
    counts = segmentation["counts"]
    pixels = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return pixels.reshape(segmentation["size"], order="F")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
